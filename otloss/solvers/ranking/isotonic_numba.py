"""Projections of many rows onto permutahedra: isotonic regression, which pools adjacent violators in one pass.

The formulas are in `otloss.solvers.ranking.permutahedron`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from otloss._numba.compile import compiled, inner
from otloss._numba.tasks import next_task

ROWS = 16  # the rows of a task
LARGEST = 1e308  # of derivatives of rows whose range is nearly 0


def scratch(n: int) -> tuple[tuple[np.ndarray, ...]]:
    """Return the memory of a thread: four rows, which the kernels name."""
    return (tuple(np.empty((4, n))),)


def allocate_results(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `projection`, or the gradient, and `blocks` for rows (rows, n)."""
    return np.empty_like(rows), np.empty(rows.shape, np.int64)


@inner()
def _find_blocks(y: Any, mean: Any, begin: Any) -> None:
    """Write to `begin` where the block of each entry begins. On the way `begin` holds the sizes of the blocks."""
    count = 0
    for i in range(y.shape[0]):
        mean[count], begin[count] = y[i], 1
        while count > 0 and mean[count - 1] < mean[count]:
            total = begin[count - 1] + begin[count]
            mean[count - 1] += (mean[count] - mean[count - 1]) * (begin[count] / total)
            begin[count - 1] = total
            count -= 1
        count += 1
    end = y.shape[0]
    for k in range(count - 1, -1, -1):
        first = end - begin[k]
        for i in range(first, end):
            begin[i] = first
        end = first


@inner()
def _average(y: Any, begin: Any, mean: Any) -> None:
    """Write the mean of each block of entries to all of them."""
    i, n = 0, y.shape[0]
    while i < n:
        end, total = i, 0.0
        while end < n and begin[end] == i:
            total += y[end] - y[i]  # so the mean of equal entries is exact
            end += 1
        value = y[i] + total / (end - i)
        for k in range(i, end):
            mean[k] = value
        i = end


@inner()
def _gather(x: Any, order: Any, falling: Any, trim: int, share: float) -> tuple[float, int, float]:
    """Write the entries in falling order; return the width, and of which entries it is how many times the distance."""
    n = order.shape[0]
    for i in range(n):
        falling[i] = x[order[n - 1 - i]]
    width, middle = falling[0] - falling[n - 1], falling[trim] - falling[n - 1 - trim]
    if middle > 0 and middle * share < width:
        return middle * share, trim, share
    return width, 0, 1.0


@compiled()
def project_rows(
    counter: Any, x: Any, order: Any, w: Any, scale: float, epsilon: float, sorts: bool, trim: int,
    share: float, projection: Any, blocks: Any, memory: Any,
) -> None:  # fmt: skip
    """Write P(scale u / epsilon, w) in the order of x, or with `sorts` r P(w / epsilon, s / r) in falling order.

    x and projection are (rows, n) in float64, order and blocks (rows, n) in int64, w is (n,). `order` has the places of
    the entries from the least to the largest. `blocks` gets, for the entries in falling order, where their block
    begins. The width r of a row is its range, or where that is less, `share` times the range without `trim` entries
    at each end.
    """
    rows, n = x.shape
    falling, y, mean, z = memory
    while True:
        task = next_task(counter)
        if task * ROWS >= rows:
            return
        for row in range(task * ROWS, min(rows, (task + 1) * ROWS)):
            width, _, _ = _gather(x[row], order[row], falling, trim, share)
            low = falling[n - 1]
            base = falling if sorts else w
            for i in range(n):  # 1 / width could overflow
                z[i] = w[i] * width if sorts else scale * ((falling[i] - low) / width) if width > 0 else 0.0
                y[i] = z[i] - epsilon * base[i]
            _find_blocks(y, mean, blocks[row])
            # Two averages, so that equal entries, and entries that are not pooled, are not rounded.
            _average(base, blocks[row], y)
            _average(z, blocks[row], mean)
            for i in range(n):
                projection[row, i if sorts else order[row, n - 1 - i]] = y[i] + (z[i] - mean[i]) / epsilon


@compiled()
def project_backward(
    counter: Any, x: Any, order: Any, w: Any, scale: float, epsilon: float, sorts: bool, trim: int,
    share: float, upstream: Any, blocks: Any, gradient: Any, memory: Any,
) -> None:  # fmt: skip
    """Write the gradient in x to `gradient`, from `upstream`, that in the result of `project_rows`."""
    rows, n = x.shape
    falling, fitted, mean, _ = memory
    while True:
        task = next_task(counter)
        if task * ROWS >= rows:
            return
        for row in range(task * ROWS, min(rows, (task + 1) * ROWS)):
            width, end, times = _gather(x[row], order[row], falling, trim, share)
            low = falling[n - 1]
            per_unit = min(scale / epsilon / width, LARGEST) if width > 0 else 0.0
            for i in range(n):
                fitted[i] = upstream[row, i] if sorts else upstream[row, order[row, n - 1 - i]]
            _average(fitted, blocks[row], mean)
            by_range = 0.0
            for i in range(n):
                by_z, at = fitted[i] - mean[i], order[row, n - 1 - i]
                if sorts:
                    by_range += by_z * w[i] / epsilon
                    gradient[row, at] = mean[i]
                else:
                    # These gradients sum to 0 over a row, so the least entry acts through the width alone.
                    gradient[row, at] = by_z * per_unit
                    by_range -= by_z * ((falling[i] - low) / width if width > 0 else 0.0)
            if not sorts:
                by_range *= per_unit
            gradient[row, order[row, n - 1 - end]] += times * by_range
            gradient[row, order[row, end]] -= times * by_range
