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


def scratch(rows: int, columns: int, dtype: Any) -> tuple[np.ndarray, ...]:
    """Return what a thread works in: (costs, numbers, whole numbers)."""
    small, large = min(rows, columns), max(rows, columns)
    return np.empty(small * large, dtype), np.empty((3, large)), np.empty((4, large), np.int64)


@inner()
def _shortest_path(cost: Any, row: int, u: Any, v: Any, near: Any, by: Any, row_of: Any, left: Any, m: int) -> Any:
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
def _match(cost: Any, n: int, m: int, real: Any, whole: Any) -> bool:
    """Fill row_of and column_of for n rows and at least as many columns; return whether there is a matching."""
    u, v, near = real[0], real[1], real[2]
    by, row_of, column_of, left = whole[0], whole[1], whole[2], whole[3]
    for i in range(n):
        u[i], column_of[i] = 0.0, FREE
    for j in range(m):
        v[j], row_of[j] = 0.0, FREE
    for row in range(n):
        j, way, open_count = _shortest_path(cost, row, u, v, near, by, row_of, left, m)
        if j < 0:
            return False
        u[row] += way
        for k in range(open_count, m):
            closed = left[k]
            if closed != j:
                u[row_of[closed]] += way - near[closed]
                v[closed] -= way - near[closed]
        while True:
            i = by[j]
            row_of[j] = i
            before = column_of[i]
            column_of[i] = j
            if i == row:
                break
            j = before
    return True


@compiled(seconds=2)
def match_problems(
    counter: Any, costs: Any, sizes: Any, rows: Any, columns: Any, block: Any, real: Any, whole: Any
) -> None:
    """Write the pairs of each problem to rows[k] and columns[k], in the order of rows; what is beyond stays.

    costs: (B, n, m) in float32 or float64, +inf forbids a pair; of costs[k] the first sizes[k, 0] rows and sizes[k, 1]
    columns count. rows, columns: (B, at least the pairs and 1) in int64; INVALID or INFEASIBLE in the first place.
    """
    while True:
        k = next_task(counter)
        if k >= costs.shape[0]:
            return
        cost, n, m = costs[k], sizes[k, 0], sizes[k, 1]
        is_turned = n > m
        small, large = (m, n) if is_turned else (n, m)
        own = block[: small * large].reshape(small, large)
        valid = True
        for i in range(n):
            for j in range(m):
                c = cost[i, j]
                valid &= c > -np.inf  # NaN is not
                if is_turned:
                    own[j, i] = c
                else:
                    own[i, j] = c
        if not valid:
            rows[k, 0] = INVALID
            continue
        if not _match(own, small, large, real, whole):
            rows[k, 0] = INFEASIBLE
            continue
        partner, at = whole[1] if is_turned else whole[2], 0  # of each row of `costs`
        for i in range(n):
            if partner[i] >= 0:
                rows[k, at], columns[k, at] = i, partner[i]
                at += 1
