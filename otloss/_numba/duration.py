"""How long kernels will take to compile on this machine, for the log line before.

The time follows the code that a kernel contains, its functions once each: 1.4 to 5 seconds for each 10,000 bytes of
Python's code on one machine, 2.5 in the median of 60 kernels. The machine is measured by the time in which Python
compiles a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from time import perf_counter
from types import FunctionType
from typing import Any

_TEXT = "mean = [weight * value for weight, value in zip(weights, values)]\n" * 50
# How many times the text could be compiled in the time that these take:
BYTE = 0.33  # a byte of a kernel's code
COMPILER = 700  # what numba reads before the first kernel of a process, 0.5 s
PROCESS = 2500  # the start of another process, which imports torch and this library, 2 s


def expected_seconds(kernels: Sequence[Any], *, elsewhere: bool = False) -> float:
    """Return the seconds of the processor in which kernels compile, right within a factor of 2 or so."""
    return _unit() * (COMPILER + PROCESS * elsewhere + BYTE * sum(map(_bytes_of, kernels)))


def rounded(seconds: float) -> str:
    """
    Example:
        >>> rounded(0.3), rounded(7.2), rounded(23.0)
        ('about 1 s', 'about 7 s', 'about 25 s')
    """
    step = 1 if seconds < 10 else 5
    return f"about {max(1, step * round(seconds / step))} s"


@cache
def _unit() -> float:
    return min(_time_of_text() for _ in range(5))


def _time_of_text() -> float:
    begin = perf_counter()  # where a clock of the processor counts in steps of 15 ms, the text takes none
    compile(_TEXT, "<text>", "exec")
    return perf_counter() - begin


def _bytes_of(kernel: Any) -> int:
    """Return the bytes of a kernel's code and of all functions of this library that it calls."""
    functions, new = set[FunctionType](), {kernel.py_func}
    while new:
        functions |= new
        new = {function for caller in new for function in _called(caller)} - functions
    return sum(len(function.__code__.co_code) for function in functions)


def _called(caller: FunctionType) -> list[FunctionType]:
    named = [caller.__globals__.get(name) for name in caller.__code__.co_names]
    functions = [getattr(each, "py_func", each) for each in named]
    return [
        each for each in functions if isinstance(each, FunctionType) and (each.__module__ or "").startswith("otloss")
    ]
