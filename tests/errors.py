"""Tests of error messages as tables."""

from collections.abc import Callable
from typing import Any

import pytest


def raising(*cases: tuple[Any, ...]) -> Callable[..., None]:
    """A test of calls that raise. A case is (call, message), of a ValueError, or (call, error, message)."""

    @pytest.mark.parametrize("case", cases, ids=lambda case: case[-1][:40])
    def test(case: tuple[Any, ...]) -> None:
        with pytest.raises(case[1] if len(case) == 3 else ValueError, match=case[-1]):
            case[0]()

    return test
