"""Batches of rectangular assignment problems of their own sizes: each row gets a column, along shortest paths.

    min sum_i C[i, s(i)]  over one-to-one s  =  max sum_i f_i + sum_j g_j  over  f_i + g_j <= C_ij, g <= 0

Each row takes its cheapest column if that is free. The other rows are assigned along the shortest paths of
`exact.assignment_numba`, from g = 0. Only a column that a row holds has its g lowered, and it keeps a
row: so g = 0 for free columns, as optimality asks.

Source: D. F. Crouse, On implementing 2D rectangular assignment algorithms, IEEE TAES 52, 2016.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from otloss._numba.compile import compiled, inner, spliced
from otloss._numba.tasks import is_stopped, next_task
from otloss.solvers.exact.assignment_numba import PATH_INTEGERS, augment
from otloss.solvers.exact.simplex_numba import NONE
from otloss.solvers.exact.tree_numba import VECTOR, min_difference

# What stands in the first place of a problem's rows: a cost is NaN or -inf; there is no complete matching; the
# matching pays costs beside which the others are rounding.
INVALID, INFEASIBLE, PRICED = -2, -3, -4

FAR_BELOW = 1e-3  # a cost of this share of another is not of its kind


@inner()
def _copy(flat: Any, begin: int, stride: int, n: int, m: int, is_turned: bool, matrix: Any) -> bool:
    """Write the costs to `matrix`, transposed if `is_turned`; return whether all are above -inf."""
    valid = True
    for i in range(n):
        row = flat[begin + i * stride : begin + i * stride + m]
        for j in range(m):
            c = row[j]
            valid &= c > -np.inf  # NaN is not
            if is_turned:
                matrix[j, i] = c
            else:
                matrix[i, j] = c
    return valid


@inner(fastmath=VECTOR)
def _find_column(row: Any, value: float, row_of: Any, count: int) -> int:
    """Return the column of `value` in `row`, which holds it; an unassigned column if there are several."""
    place: Any = np.int64(-1)
    for j in range(count):
        at: Any = j if row_of[j] >= 0 else j + count
        at = at if row[j] == value else np.int64(-1)
        place = at if at > place else place
    return place if place < count else place - count


@spliced
def _match(counter: Any, cost: Any, n: int, m: int, g: Any, whole: Any, real: Any) -> bool:
    """Match n rows with some of m >= n columns, in `row_of` and `column_of`; return whether that is possible."""
    row_of, column_of, waiting = (
        whole[PATH_INTEGERS.row_of],
        whole[PATH_INTEGERS.column_of],
        whole[PATH_INTEGERS.waiting],
    )
    for j in range(m):
        g[j], row_of[j], column_of[j] = 0.0, NONE, NONE
    is_complete, count = True, 0
    for i in range(n):
        best = min_difference(cost[i], g, m)
        if not best < np.inf:
            return False
        j = _find_column(cost[i], best, row_of, m)
        if row_of[j] < 0:
            row_of[j], column_of[i] = i, j
        else:
            waiting[count] = i
            count += 1
    for t in range(count):
        is_complete = is_complete and not is_stopped(counter, np.nan, t / count)
        is_complete = is_complete and augment(cost, g, real, whole, waiting[t], n, m) >= 0
    return is_complete


@inner()
def _largest_ratio(cost: Any, column_of: Any, n: int, m: int) -> float:
    """Return the largest cost that is paid over the largest that is far below it, in size; 1 if none is.

    Where those are all 0, the smallest other cost is in their place.
    """
    top, second, has_zero = 0.0, 0.0, False
    for i in range(n):
        top = max(top, abs(cost[i, column_of[i]]))
    for i in range(n):
        paid = abs(cost[i, column_of[i]])
        has_zero |= paid == 0
        if paid < FAR_BELOW * top:
            second = max(second, paid)
    if second == 0 and has_zero:
        second = top
        for i in range(n):
            for j in range(m):
                if cost[i, j] != 0:
                    second = min(second, abs(cost[i, j]))
    return float(top / second) if second > 0 else 1.0


def allocate_results(pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays for the rows and columns of all pairs; what is not written is NONE."""
    return np.full(pairs, NONE), np.full(pairs, NONE)


@compiled(allocates=True)
def match_problems(counter: Any, costs: Any, places: Any, largest_ratio: float, rows: Any, columns: Any) -> int:
    """Write the pairs of each problem to `rows` and `columns`, in the order of rows.

    Returns the number of a problem without a result, or -1.

    costs: the costs of all problems in one array, float32 or float64; +inf forbids a pair. places: (B, 5), for each
    problem where its costs begin, the stride of its rows, the numbers of rows and of columns, and where its pairs go.
    largest_ratio: of two costs that are paid, above which a problem is PRICED. rows, columns: the arrays of
    `allocate_results`; a problem without a result has INVALID, INFEASIBLE or PRICED in its first place of `rows`.
    """
    entries, bins = 0, 0
    for k in range(places.shape[0]):
        n, m = places[k, 2], places[k, 3]
        entries, bins = max(entries, n * m), max(bins, n, m)
    block, g = np.empty(entries, costs.dtype), np.empty(bins)
    whole, real = np.empty((5, bins), np.int64), np.empty((2, bins))  # as in `assignment_numba.scratch`
    failed = NONE
    while True:
        k = next_task(counter)
        if k >= places.shape[0]:
            return failed
        begin, stride, n, m, at = places[k, 0], places[k, 1], places[k, 2], places[k, 3], places[k, 4]
        if n == 0 or m == 0:
            continue
        is_turned = n > m
        small, large = (m, n) if is_turned else (n, m)
        matrix = block[: small * large].reshape(small, large)
        if not _copy(costs, begin, stride, n, m, is_turned, matrix):
            rows[at], failed = INVALID, k
            continue
        if not _match(counter, matrix, small, large, g, whole, real):
            rows[at], failed = INFEASIBLE, k
            continue
        if _largest_ratio(matrix, whole[PATH_INTEGERS.column_of], small, large) > largest_ratio:
            rows[at], failed = PRICED, k
            continue
        partner = whole[PATH_INTEGERS.row_of] if is_turned else whole[PATH_INTEGERS.column_of]
        for i in range(n):
            if partner[i] >= 0:
                rows[at], columns[at] = i, partner[i]
                at += 1
