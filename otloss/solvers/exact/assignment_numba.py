"""Batches of assignment problems: as many bins on either side, all of one mass. One problem per thread.

    min sum_i C[i, s(i)]  over permutations s  =  max sum_i f_i + sum_j g_j  over  f_i + g_j <= C_ij

Potentials g are lowered until each row i attains the minimum f_i = min_j C_ij - g_j at its own column s(i).

1. Each row in turn takes the column of its least reduced cost C_ij - g_j. The g of that column falls until the second
   least reduced cost of the row is the same. The row that held the column looks again.
2. The rows that are left are assigned one after the other, along shortest paths in reduced costs.

Source: R. Jonker, A. Volgenant, A shortest augmenting path algorithm for dense and sparse linear assignment problems,
1987. With equal weights potentials are not unique: any feasible pair whose sum is the value is a subgradient.

Paths grow long where the first step leaves many rows, as for clouds that lie apart, or costs that order all rows alike.
The simplex is faster on large problems of this kind. They are left to it, most of them before the first path.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from otloss._numba.compile import bits_of_float64, compiled, float64_of_bits, inner, spliced
from otloss._numba.tasks import is_stopped, next_task
from otloss.solvers.exact.simplex_numba import GAP, NONE, PIVOTS, SCALE, VALUE
from otloss.solvers.exact.tree_numba import ROUNDING, VECTOR, largest_size, least, lower

# Rows of the scratch arrays of a thread.
ROW_OF, COLUMN_OF, BY, WAITING, CLOSED = range(5)
NEAR, PRICE = range(2)
# Turns per row in the first step. More help little, and by rounding two rows could displace each other endlessly.
TURNS = 4
# A problem is given up where more than MOST_LEFT rows are left for paths, or paths visit more than VISITS columns per
# row.
MOST_LEFT, VISITS = 250, 64
LARGEST_BITS = np.int64(0x7FF0000000000000)  # of infinity


def scratch(n: int) -> tuple[np.ndarray, ...]:
    """Return the memory of a thread: (whole numbers, numbers)."""
    return np.empty((5, n), np.int64), np.empty((2, n))


@inner(fastmath=VECTOR)
def place_of(values: Any, bits: Any, row_of: Any, count: int) -> Any:
    """Return the column whose number has these bits, an unassigned one if there are several; -1 if there is none."""
    place: Any = np.int64(-1)
    for j in range(count):
        at: Any = j if row_of[j] >= 0 else j + count
        at = at if bits_of_float64(values[j]) == bits else np.int64(-1)
        place = at if at > place else place
    return place if place < count else place - count


@inner(fastmath=VECTOR)
def reduced(row: Any, price: Any, by: float, low: float, near: Any, count: int) -> Any:
    """Write near = max(row - price - by, low); return the bits of the least."""
    key = LARGEST_BITS
    for j in range(count):
        away = row[j] - price[j] - by
        away = away if away > low else low
        near[j] = away
        bits = bits_of_float64(away)
        key = bits if bits < key else key
    return key


@inner(fastmath=VECTOR)
def _relax(row: Any, price: Any, by: float, low: float, near: Any, hint: Any, node: int, count: int) -> Any:
    """Lower `near` to the results of `reduced`, and write `node` to `hint` wherever that lowers it.

    Closed columns have the price -inf.
    """
    key = LARGEST_BITS
    for j in range(count):
        away = row[j] - price[j] - by
        away = away if away > low else low
        hint[j] = node if away < near[j] else hint[j]
        away = away if away < near[j] else near[j]
        near[j] = away
        bits = bits_of_float64(away)
        key = bits if bits < key else key
    return key


@inner(fastmath=VECTOR)
def _least_bits(values: Any, count: int) -> Any:
    key = LARGEST_BITS
    for j in range(count):
        bits = bits_of_float64(values[j])
        key = bits if bits < key else key
    return key


@spliced
def _take_columns(
    counter: Any, cost: Any, g: Any, near: Any, row_of: Any, column_of: Any, waiting: Any, n: int
) -> tuple[int, int]:
    """Let rows take columns; return how many rows are left, in `waiting`, and the turns taken."""
    turns, left, i, next_row = 0, 0, np.int64(0), np.int64(1)
    while True:
        best = least(cost[i], g, n)
        j = place_of(near, reduced(cost[i], g, best, 0.0, near, n), row_of, n)
        if j < 0:
            return NONE, turns  # costs beyond float64
        near[j] = np.inf
        second = float64_of_bits(_least_bits(near, n))
        turns += 1
        if is_stopped(counter, np.nan, np.nan):
            return left, turns
        before = row_of[j]
        if second <= ROUNDING * (abs(best) + 2 * abs(g[j])) and before >= 0:
            # Two columns are equally near and at least one of them is taken: the paths decide.
            waiting[left] = i
            left, before = left + 1, np.int64(NONE)
        else:
            if second < np.inf:
                g[j] -= second
            row_of[j], column_of[i] = i, j
        if before >= 0 and turns < TURNS * n:
            i = before
            continue
        if before >= 0:
            waiting[left] = before
            left += 1
        if next_row == n:
            return left, turns
        i = next_row
        next_row += 1


@spliced
def augment(cost: Any, g: Any, real: Any, whole: Any, start: int, n: int, m: int) -> int:
    """Assign row `start` of n along a shortest path to one of m columns, and lower g of the columns on the path.

    Returns the columns visited, or -1 if there is no path.
    """
    near, price = real[NEAR], real[PRICE]
    row_of, column_of, by, closed = whole[ROW_OF], whole[COLUMN_OF], whole[BY], whole[CLOSED]
    for j in range(m):
        price[j], by[j] = g[j], start
    key = reduced(cost[start], price, least(cost[start], g, m), 0.0, near, m)
    count = 0
    while True:
        j = place_of(near, key, row_of, m)
        if j < 0 or count == n or key == LARGEST_BITS:
            return NONE
        way = near[j]
        i = row_of[j]
        if i < 0:
            break
        # The reduced cost of a pair is that of its row's least, so paths go on through it at no price. What is kept
        # of the way is g as it will be, less the length of the whole path.
        shift = cost[i, j] - g[j] - way
        g[j] += way
        near[j], price[j] = np.inf, -np.inf
        closed[count] = j
        count += 1
        key = _relax(cost[i], price, shift, way, near, by, i, m)
    for t in range(count):
        g[closed[t]] -= way
    while True:
        i = by[j]
        row_of[j] = i
        before = column_of[i]
        column_of[i] = j
        if i == start:
            return count + 1
        j = before


@compiled(seconds=3)
def assign_problems(counter: Any, start: Any, problems: Any, answers: Any, memory: Any) -> None:
    """Fill the answers of the problems (see `exact`), of one mass per bin, from potentials start[k] (n) or (0).

    PIVOTS counts the columns that rows took beyond their first and that paths
    visited, and is -1 where the problem was given up.
    """
    p, _, matrices, owners = problems
    f, g, cells, flows, outcome = answers
    whole, real = memory
    n = p.shape[1]
    row_of, column_of, waiting = whole[ROW_OF], whole[COLUMN_OF], whole[WAITING]
    while True:
        k = next_task(counter)
        if k >= p.shape[0]:
            return
        cost, f_k, g_k, mass = matrices[owners[k]], f[k], g[k], p[k, 0]
        for j in range(n):
            g_k[j] = start[k, j] if start.shape[1] > 0 else np.inf
            row_of[j] = NONE
        if start.shape[1] == 0:
            for i in range(n):
                lower(g_k, cost[i], 0.0, n)
        left, steps = _take_columns(counter, cost, g_k, real[NEAR], row_of, column_of, waiting, n)
        most = VISITS * n if n > MOST_LEFT else np.int64(2**62)
        has_failed = left < 0 or left > MOST_LEFT
        for t in range(left):
            has_failed = has_failed or is_stopped(counter, np.nan, t / left)
            visited = NONE if has_failed or steps > most else augment(cost, g_k, real, whole, waiting[t], n, n)
            if visited < 0:
                has_failed = True
                break
            steps += visited
        if has_failed:
            outcome[k, PIVOTS] = NONE
            continue
        value, dual = 0.0, 0.0
        for i in range(n):
            f_k[i] = least(cost[i], g_k, n)
            j = column_of[i]
            cells[k, 0, i], cells[k, 1, i], flows[k, i] = i, j, mass
            value += cost[i, j]
            dual += f_k[i] + g_k[i]
        for t in range(n, flows.shape[1]):
            cells[k, 0, t], cells[k, 1, t], flows[k, t] = 0, 0, 0.0
        outcome[k, VALUE], outcome[k, GAP] = value * mass, (value - dual) * mass
        outcome[k, SCALE], outcome[k, PIVOTS] = largest_size(cost, n, n) * mass * n, steps - n
