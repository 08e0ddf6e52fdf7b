"""Tests of error messages as tables."""

from collections.abc import Callable
from typing import Any

import pytest


def raising(*cases: tuple[Any, ...], call: Callable[..., Any] = lambda function: function()) -> Callable[..., None]:
    """A test of calls that raise. A case: (*arguments of `call`, message) of a ValueError, or (..., error, message)."""

    @pytest.mark.parametrize("case", cases, ids=lambda case: case[-1][:40])
    def test(case: tuple[Any, ...]) -> None:
        *arguments, message = case
        is_error = isinstance(arguments[-1], type) and issubclass(arguments[-1], Exception)
        with pytest.raises(arguments.pop() if is_error else ValueError, match=message):
            call(*arguments)

    return test
