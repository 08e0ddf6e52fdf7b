"""The warning of problems that were not solved to the tolerance, and the line of the user's code that it names."""

from __future__ import annotations

import sys


class ConvergenceWarning(UserWarning):
    """A transport problem was not solved to the tolerance."""


def level_of_the_caller() -> int:
    """The stack level, for a warning of the function that asks, of the first frame outside this library and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("otloss", "torch"):
        level, frame = level + 1, frame.f_back
    return level
