"""Modules of kernels as plain Python, so that tests of single functions compile nothing, and can call inner ones."""

import importlib
import sys
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest import mock

import numba
import numpy as np

from otloss._numba import compile as compilers
from otloss._numba import tasks
from otloss.costs import softmin_numba as softmin


def _decorate(**options: Any) -> Any:
    return lambda function: function


def _next_task(counter: np.ndarray) -> int:
    counter[0] += 1
    return int(counter[0]) - 1


def _select(
    block: np.ndarray, y: np.ndarray, h: np.ndarray, count: int, cutoff: float, metric: int, costs: np.ndarray,
    near: np.ndarray, near_h: np.ndarray,
) -> int:  # fmt: skip
    """Copy the columns with a score that is at most `cutoff` below the best of a point, in an order of its own."""
    scores = np.empty((len(block), count))
    for row, x in zip(scores, block, strict=True):
        _distances(x, y, 0, metric, row, count)
    scores = h[:count] - scores
    kept = np.flatnonzero((scores >= scores.max(1, keepdims=True) - cutoff).any(0))[::-1]
    near[:, : len(kept)], near_h[: len(kept)] = y[:, kept], h[kept]
    return len(kept)


def _distances(x: np.ndarray, y: np.ndarray, start: int, metric: int, out: np.ndarray, count: int) -> None:
    difference = x[:, None] - y[: len(x), start : start + count]
    out[:count] = np.abs(difference).sum(0) if metric == 2 else np.square(difference).sum(0)
    if metric == 1:
        out[:count] = np.sqrt(out[:count])


REPLACED = {
    compilers: {
        "compiled": _decorate, "inner": _decorate, "spliced": lambda function: function, "exp64": np.exp,
        "call_at": lambda kernel, arguments: kernel(*arguments),
        "result_at": lambda kernel, arguments, example: kernel(*arguments),
        "largest": lambda scores, count: scores[:count].max(),
        "bits_of_float64": lambda value: np.float64(value).view(np.int64),
    },
    tasks: {"next_task": _next_task, "is_stopped": lambda counter, error, share: False},
    softmin: {"select": _select, "distances_of": _distances},
    numba.config: {"BOUNDSCHECK": 1},
}  # fmt: skip


def import_uncompiled(*names: str) -> list[ModuleType]:
    """Return new modules whose kernels are Python functions, with assertions. Later ones import earlier ones."""
    packages = [importlib.import_module(name.rpartition(".")[0]) for name in names]
    originals = [importlib.import_module(name) for name in names]
    with ExitStack() as stack:
        for module, values in REPLACED.items():
            stack.enter_context(mock.patch.multiple(module, **values))
        for name in names:
            del sys.modules[name]
        try:
            return [importlib.import_module(name) for name in names]
        finally:
            for name, package, original in zip(names, packages, originals, strict=True):
                sys.modules[name] = original
                setattr(package, name.rpartition(".")[2], original)
