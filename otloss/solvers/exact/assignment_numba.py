"""Batches of assignment problems: as many bins on either side, all of one mass. One problem per thread.

    min sum_i C[i, s(i)]  over permutations s  =  max sum_i f_i + sum_j g_j  over  f_i + g_j <= C_ij

Potentials g are lowered until each row i attains the minimum f_i = min_j C_ij - g_j at its own column s(i).

1. Each row in turn takes the column of its least reduced cost C_ij - g_j. The g of that column falls until the second
   least reduced cost of the row is the same. The row that held the column looks again.
2. The rows without a column are assigned one after the other, along shortest paths in reduced costs.

Source: R. Jonker, A. Volgenant, A shortest augmenting path algorithm for dense and sparse linear assignment problems,
1987. With equal weights potentials are not unique: any feasible pair whose sum is the value is a subgradient.

Paths grow long where the first step leaves many rows, as for clouds that lie apart, or costs that order all rows alike.
The simplex is faster on large problems of this kind, so it takes them over, mostly before the first path.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from otloss._numba.compile import bits_of_float64, compiled, float64_of_bits, inner, spliced
from otloss._numba.tasks import is_stopped, next_task
from otloss.solvers.exact.results import OUTCOME
from otloss.solvers.exact.simplex_numba import NONE
from otloss.solvers.exact.tree_numba import PIVOT_LIMITS, VECTOR, largest_size, lower, min_difference


class PathIntegers(NamedTuple):
    """The rows of the whole numbers of a thread.

    Attributes:
        row_of, column_of: the partner of each column and of each row, NONE without one.
        reached_from: the row from which a path reaches each column.
        waiting: the rows that the first step leaves without a column.
        visited: the columns that a path has visited.
    """

    row_of: int = 0
    column_of: int = 1
    reached_from: int = 2
    waiting: int = 3
    visited: int = 4


class PathFloats(NamedTuple):
    """The rows of the floats of a thread.

    Attributes:
        distance: the length of the path to each column.
        price: the price of each column, -inf once a path has visited it.
    """

    distance: int = 0
    price: int = 1


class AssignmentLimits(NamedTuple):
    """When the search for paths ends, and the simplex takes the problem over.

    Attributes:
        turns: steps for each row in the first step. More steps help little, and by rounding two rows could displace
            each other endlessly.
        waiting_rows: rows that are left for paths. Between clouds that lie apart, where most rows are left, the simplex
            is faster from about 250 rows on.
        visits: columns for each row that paths visit, in problems with more than `waiting_rows` rows.
    """

    turns: int = 4
    waiting_rows: int = 250
    visits: int = 64


PATH_INTEGERS, PATH_FLOATS, ASSIGNMENT_LIMITS = PathIntegers(), PathFloats(), AssignmentLimits()


def scratch(n: int) -> tuple[np.ndarray, ...]:
    """Return the memory of a thread: (whole numbers, numbers)."""
    return np.empty((5, n), np.int64), np.empty((2, n))


@inner(fastmath=VECTOR)
def find_column(values: Any, bits: Any, row_of: Any, count: int) -> int:
    """Return the column whose number has these bits, an unassigned one if there are several; -1 without one."""
    place: Any = np.int64(-1)
    for j in range(count):
        at: Any = j if row_of[j] >= 0 else j + count
        at = at if bits_of_float64(values[j]) == bits else np.int64(-1)
        place = at if at > place else place
    return place if place < count else place - count


@inner(fastmath=VECTOR)
def write_reduced_costs(row: Any, price: Any, by: float, low: float, distance: Any, count: int) -> int:
    """Write distance = max(row - price - by, low); return the bits of the smallest distance."""
    key = bits_of_float64(np.inf)
    for j in range(count):
        reduced = row[j] - price[j] - by
        reduced = reduced if reduced > low else low
        distance[j] = reduced
        bits = bits_of_float64(reduced)
        key = bits if bits < key else key
    return key


@inner(fastmath=VECTOR)
def _relax(row: Any, price: Any, by: float, low: float, distance: Any, hint: Any, node: int, count: int) -> int:
    """Lower `distance` to the results of `write_reduced_costs`, and write `node` to `hint` wherever that lowers it.

    Visited columns have the price -inf.
    """
    key = bits_of_float64(np.inf)
    for j in range(count):
        reduced = row[j] - price[j] - by
        reduced = reduced if reduced > low else low
        hint[j] = node if reduced < distance[j] else hint[j]
        reduced = reduced if reduced < distance[j] else distance[j]
        distance[j] = reduced
        bits = bits_of_float64(reduced)
        key = bits if bits < key else key
    return key


@inner(fastmath=VECTOR)
def _smallest_bits(values: Any, count: int) -> int:
    key = bits_of_float64(np.inf)
    for j in range(count):
        bits = bits_of_float64(values[j])
        key = bits if bits < key else key
    return key


@spliced
def _assign_greedily(
    counter: Any, cost: Any, g: Any, distance: Any, row_of: Any, column_of: Any, waiting: Any, n: int
) -> tuple[int, int]:
    """Let rows take columns; return the number of rows without one, which are in `waiting`, and the turns taken."""
    turns, count, i, next_row = 0, 0, np.int64(0), np.int64(1)
    while True:
        best = min_difference(cost[i], g, n)
        j = find_column(distance, write_reduced_costs(cost[i], g, best, 0.0, distance, n), row_of, n)
        if j < 0:
            return NONE, turns  # costs beyond float64
        distance[j] = np.inf
        second = float64_of_bits(_smallest_bits(distance, n))
        turns += 1
        if is_stopped(counter, np.nan, np.nan):
            return count, turns
        displaced = row_of[j]
        if second <= PIVOT_LIMITS.rounding * (abs(best) + 2 * abs(g[j])) and displaced >= 0:
            # Two columns are equally near and at least one of them is taken: the paths decide.
            waiting[count] = i
            count, displaced = count + 1, np.int64(NONE)
        else:
            if second < np.inf:
                g[j] -= second
            row_of[j], column_of[i] = i, j
        if displaced >= 0 and turns < ASSIGNMENT_LIMITS.turns * n:
            i = displaced
            continue
        if displaced >= 0:
            waiting[count] = displaced
            count += 1
        if next_row == n:
            return count, turns
        i = next_row
        next_row += 1


@spliced
def augment(cost: Any, g: Any, real: Any, whole: Any, start: int, n: int, m: int) -> int:
    """Assign row `start` of n along a shortest path to one of m columns, and lower g of the columns on the path.

    Returns the columns visited, or -1 if there is no path.
    """
    distance, price = real[PATH_FLOATS.distance], real[PATH_FLOATS.price]
    row_of, column_of = whole[PATH_INTEGERS.row_of], whole[PATH_INTEGERS.column_of]
    reached_from, visited = whole[PATH_INTEGERS.reached_from], whole[PATH_INTEGERS.visited]
    for j in range(m):
        price[j], reached_from[j] = g[j], start
    key = write_reduced_costs(cost[start], price, min_difference(cost[start], g, m), 0.0, distance, m)
    count = 0
    while True:
        j = find_column(distance, key, row_of, m)
        if j < 0 or count == n or key == bits_of_float64(np.inf):
            return NONE
        length = distance[j]
        i = row_of[j]
        if i < 0:
            break
        # A row attains its smallest reduced cost at its own column, so a path goes on through the pair at no price.
        # g becomes its final value less the length of the whole path.
        shift = cost[i, j] - g[j] - length
        g[j] += length
        distance[j], price[j] = np.inf, -np.inf
        visited[count] = j
        count += 1
        key = _relax(cost[i], price, shift, length, distance, reached_from, i, m)
    for t in range(count):
        g[visited[t]] -= length
    while True:
        i = reached_from[j]
        row_of[j] = i
        previous = column_of[i]
        column_of[i] = j
        if i == start:
            return count + 1
        j = previous


@spliced
def _assign(counter: Any, cost: Any, g: Any, whole: Any, real: Any, n: int) -> int:
    """Assign all rows; return the columns visited, or -1 where the problem is given up."""
    row_of, waiting = whole[PATH_INTEGERS.row_of], whole[PATH_INTEGERS.waiting]
    for j in range(n):
        row_of[j] = NONE
    count, steps = _assign_greedily(
        counter, cost, g, real[PATH_FLOATS.distance], row_of, whole[PATH_INTEGERS.column_of], waiting, n
    )
    max_steps = ASSIGNMENT_LIMITS.visits * n if n > ASSIGNMENT_LIMITS.waiting_rows else np.int64(2**62)
    has_failed = count < 0 or count > ASSIGNMENT_LIMITS.waiting_rows
    for t in range(count):
        has_failed = has_failed or steps > max_steps or is_stopped(counter, np.nan, t / count)
        visits = NONE if has_failed else augment(cost, g, real, whole, waiting[t], n, n)
        has_failed = visits < 0
        if has_failed:
            break
        steps += visits
    return NONE if has_failed else steps


@compiled()
def assign_problems(counter: Any, start: Any, problems: Any, results: Any, memory: Any) -> None:
    """Fill the results (see `simplex_numba`) of problems of one mass per bin, from potentials start[k] (n) or (0).

    The pivots of the outcome are the columns that rows took beyond their first and that paths visited, and -1 where the
    problem was given up.
    """
    p, _, matrices, owners = problems
    f, g, cells, flows, outcome = results
    whole, real = memory
    n = p.shape[1]
    column_of = whole[PATH_INTEGERS.column_of]
    while True:
        k = next_task(counter)
        if k >= p.shape[0]:
            return
        cost, f_k, g_k, mass = matrices[owners[k]], f[k], g[k], p[k, 0]
        for j in range(n):
            g_k[j] = start[k, j] if start.shape[1] > 0 else np.inf
        if start.shape[1] == 0:
            for i in range(n):
                lower(g_k, cost[i], 0.0, n)
        steps = _assign(counter, cost, g_k, whole, real, n)
        outcome[k, OUTCOME.pivots] = steps - n if steps >= 0 else NONE
        if steps < 0:
            continue
        value, dual = 0.0, 0.0
        for i in range(n):
            f_k[i] = min_difference(cost[i], g_k, n)
            j = column_of[i]
            cells[k, 0, i], cells[k, 1, i], flows[k, i] = i, j, mass
            value += cost[i, j]
            dual += f_k[i] + g_k[i]
        for t in range(n, flows.shape[1]):
            cells[k, 0, t], cells[k, 1, t], flows[k, t] = 0, 0, 0.0
        outcome[k, OUTCOME.value], outcome[k, OUTCOME.gap] = value * mass, (value - dual) * mass
        outcome[k, OUTCOME.scale] = largest_size(cost, n, n) * mass * n
