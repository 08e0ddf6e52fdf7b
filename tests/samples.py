"""Parameters of a sweep: `make test` runs the first ones, `make test-all` all."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(count: int, values: Iterable[Any]) -> list[Any]:
    """All but the first `count` values are slow."""
    several = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*each, marks=[pytest.mark.slow] * (k >= count)) for k, each in enumerate(several)]
