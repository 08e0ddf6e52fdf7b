"""Batches of rectangular assignment problems of their own sizes: each row gets a column, along shortest paths.

    min sum_i C[i, s(i)]  over one-to-one s  =  max sum_i u_i + sum_j v_j  over  u_i + v_j <= C_ij, v <= 0

Source: D. F. Crouse, On implementing 2D rectangular assignment algorithms, IEEE TAES 52, 2016.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from otloss._kernels._compile import compiled, inner
from otloss._kernels._threads import next_task

FREE = -1
INVALID, INFEASIBLE = -2, -3  # in the first place of an answer: a cost of NaN or -inf; no complete matching


def scratch(rows: int, columns: int) -> tuple[np.ndarray, ...]:
    """Return what a thread works in: (numbers, whole numbers)."""
    return np.empty((3, max(rows, columns))), np.empty((5, max(rows, columns)), np.int64)


@inner()
def _shortest_path(
    cost: Any, row: int, n: int, u: Any, v: Any, near: Any, by: Any, row_of: Any, left: Any, m: int
) -> Any:
    """Find a free column along the shortest path from `row`; return (column, its length, columns that were closed)."""
    for j in range(m):
        left[j], near[j] = j, np.inf
    open_count, way, i = m, 0.0, row
    while True:
        c = cost[i]
        shift = way - u[i]
        best, at = np.inf, -1
        for k in range(open_count):
            j = left[k]
            away = c[j] + shift - v[j]
            if away < near[j]:
                near[j], by[j] = away, i
            if near[j] < best or (near[j] == best and row_of[j] < 0):
                best, at = near[j], k
        if not best < np.inf:
            return -1, 0.0, 0
        way, j = best, left[at]
        open_count -= 1
        left[at], left[open_count] = left[open_count], j
        if row_of[j] < 0:
            return j, way, open_count
        i = row_of[j]


@inner()
def _match(cost: Any, n: int, m: int, real: Any, whole: Any, out: Any) -> None:
    u, v, near = real[0], real[1], real[2]
    by, row_of, column_of, left = whole[0], whole[1], whole[2], whole[3]
    for i in range(n):
        for j in range(m):
            if not cost[i, j] > -np.inf:  # NaN too
                out[0] = INVALID
                return
        u[i], column_of[i] = 0.0, FREE
    for j in range(m):
        v[j], row_of[j] = 0.0, FREE
    for row in range(n):
        j, way, open_count = _shortest_path(cost, row, n, u, v, near, by, row_of, left, m)
        if j < 0:
            out[0] = INFEASIBLE
            return
        u[row] += way
        for k in range(open_count, m):
            closed = left[k]
            if closed != j:
                i = row_of[closed]
                u[i] += way - near[closed]
                v[closed] -= way - near[closed]
        while True:
            i = by[j]
            row_of[j] = i
            before = column_of[i]
            column_of[i] = j
            if i == row:
                break
            j = before
    for i in range(n):
        out[i] = column_of[i]


@compiled(seconds=2)
def match_problems(counter: Any, costs: Any, sizes: Any, matched: Any, real: Any, whole: Any) -> None:
    """Write into matched[k] the column of each of the sizes[k, 0] rows of costs[k], of which sizes[k, 1] columns count.

    costs: (B, n, m) in float32 or float64, rows at most as many as columns in each; +inf forbids a pair.
    matched: (B, n) in int64, left as it is beyond the rows; INVALID or INFEASIBLE in the first place.
    """
    while True:
        k = next_task(counter)
        if k >= costs.shape[0]:
            return
        _match(costs[k], sizes[k, 0], sizes[k, 1], real, whole, matched[k])
