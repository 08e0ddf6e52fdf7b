"""The plan of an entropic problem at the potentials, over all pairs or on the few cells that hold mass.

`newton_numba` has the notation. Kernels work on these arrays, and each function writes a part of them:

    g   columns.potential   f   rows.potential   r   rows.mass   c   columns.mass   S   cells.shares

    function                        g           f, r and c                      S
    `begin_round`, `select_cells`   kept (1)    of the plan over all pairs      not written
    `evaluate`                      kept        of the plan on the cells        of the plan on the cells
    `update_columns`                changed     outdated                        outdated
    `update_far_columns`            changed     outdated, if it changes any g   outdated
    `search_along`                  changed     of the plan on the cells        of the plan on the cells
    `steps_on_cells`                changed     outdated                        outdated
    `solve_stage`                   changed     of the plan over all pairs      not returned

    (1) Where `begin_round` finds masses that have underflowed, it changes g in these columns and selects again.

What is not outdated belongs to one plan, with the current g. So f is the exact update from g, each row of S sums to 1,
and r and c have the same sum. `column_error`, `largest_change`, `derivative_along` and `find_step` read c, and
`find_step` reads S: they may not follow a function after which these are outdated. Where indices are checked
(`make test-bounds`), outdated masses are NaN, and kernels assert the sums.

Costs are a matrix or belong to points. Of points only the pairs that count are visited (`softmin_numba.select`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np

from otloss._numba.compile import compiled, exp64, inner, largest
from otloss.costs.order import BLOCK, ROWS
from otloss.costs.pair_cost_numba import pair_cost
from otloss.costs.softmin_numba import CHUNK, distances_of, select
from otloss.solvers.entropic.newton_kernels.numbers import NEWTON

CHECKED = bool(numba.config.BOUNDSCHECK)  # a constant of compiled code: without it the assertions cost nothing


class Pairs(NamedTuple):
    """The costs: of a matrix (n, m), or of points. The other of the two is empty.

    The points x are (n, d), in an order in which neighbours follow each other. y is `as_columns(points, scratch=1)`:
    d coordinates, the number of the column, and the smallest mass of its cells, which `select_cells` writes.
    """

    matrix: Any
    x: Any
    y: Any
    metric: int


class Cells(NamedTuple):
    """Cells of the plan, with their shares of the row. Row i has the cells from starts[i] to starts[i + 1]."""

    starts: Any
    columns: Any
    costs: Any
    shares: Any


class Side(NamedTuple):
    """Vectors over the rows or the columns: weights, their logarithms, potentials, masses of the plan; and rho."""

    weights: Any
    logs: Any
    potential: Any
    mass: Any
    rho: float


class Near(NamedTuple):
    """The columns that count for a block of rows and for a few of its rows, as `softmin_numba.select` copies them.

    The potentials h are g + epsilon log q. `sizes` has the numbers of columns in both. Columns whose scores are more
    than `cutoff` below the best one do not count.
    """

    columns: Any
    h: Any
    costs: Any
    sizes: Any
    cutoff: float


# Loops fill arrays and compute their places, because numba compiles np.full, argsort and assignments of slices for
# seconds.


@inner(allocates=True)
def filled(size: int, value: float) -> Any:
    out = np.empty(size)
    for k in range(size):
        out[k] = value
    return out


@inner(allocates=True)
def filled_integers(size: int, value: int) -> Any:
    out = np.empty(size, np.int64)
    for k in range(size):
        out[k] = value
    return out


@inner(allocates=True)
def resize(columns: Any, costs: Any, size: int) -> tuple[Any, Any]:
    """Return longer or shorter copies of both."""
    new_columns, new_costs = np.empty(size, np.int32), np.empty(size)
    for e in range(min(size, columns.shape[0])):
        new_columns[e], new_costs[e] = columns[e], costs[e]
    return new_columns, new_costs


# ---- the plan at the potentials --------------------------------------------------------------------------------------


@inner(allocates=True)
def build_side(weights: Any, potential: Any, rho: float) -> Side:
    logs = np.empty(weights.shape[0])
    for j in range(weights.shape[0]):
        logs[j] = math.log(weights[j]) if weights[j] > 0 else -np.inf
    return Side(weights, logs, potential, filled(weights.shape[0], 0.0), rho)


@inner()
def check_masses(rows: Any, columns: Any) -> None:
    """Assert that the masses of rows and columns belong to one plan."""
    total = rows.mass.sum()
    assert abs(columns.mass.sum() - total) <= 1e-9 * total


@inner()
def check_shares(cells: Any) -> None:
    """Assert that the shares of each row sum to 1."""
    for i in range(cells.starts.shape[0] - 1):
        shares = cells.shares[cells.starts[i] : cells.starts[i + 1]]
        assert shares.shape[0] == 0 or abs(shares.sum() - 1) <= 1e-9


@inner()
def target(side: Any, j: int) -> float:
    """Return the mass t that a row or column should hold."""
    if side.rho == np.inf:
        return side.weights[j]
    return side.weights[j] * math.exp(-side.potential[j] / side.rho)


@inner(fastmath={"contract", "nsz", "reassoc"})
def turn_into_shares(scores: Any, count: int, rows: Any, i: int, epsilon: float) -> None:
    """Turn the exponents of a row into shares, and write its potential f_i and mass r_i."""
    top = largest(scores, count)
    total = 0.0
    for j in range(count):
        scores[j] = exp64(scores[j] - top)
        total += scores[j]
    inverse = 1 / total
    for j in range(count):
        scores[j] *= inverse
    rows.potential[i] = -epsilon * (top + math.log(total)) / (1 + epsilon / rows.rho)
    rows.mass[i] = target(rows, i)


@inner()
def column_error(columns: Any) -> float:
    """Return sum_j |t_j - c_j| / sum_j t_j."""
    difference, total = 0.0, 0.0
    for j in range(columns.weights.shape[0]):
        wanted = target(columns, j)
        difference += abs(wanted - columns.mass[j])
        total += wanted
    return difference / total


@inner()
def change_of_column(columns: Any, j: int, epsilon: float) -> float:
    """Return what an exact update adds to b_j = g_j / epsilon."""
    wanted, mass = target(columns, j), columns.mass[j]
    if wanted == 0:
        return 0.0
    change = math.log(wanted / mass) / (1 + epsilon / columns.rho) if mass > 0 else NEWTON.largest_update
    return min(max(change, -NEWTON.largest_update), NEWTON.largest_update)


@inner()
def largest_change(columns: Any, epsilon: float) -> float:
    """Return the largest change of b by exact updates, over the columns that keep mass."""
    change = 0.0
    for j in range(columns.weights.shape[0]):
        if target(columns, j) > NEWTON.negligible * columns.weights[j]:
            change = max(change, abs(change_of_column(columns, j, epsilon)))
    return change


@inner()
def update_columns(columns: Any, epsilon: float) -> None:
    """Update g exactly, as far as the masses tell."""
    for j in range(columns.weights.shape[0]):
        columns.potential[j] += epsilon * change_of_column(columns, j, epsilon)
    if CHECKED:
        for j in range(columns.mass.shape[0]):
            columns.mass[j] = np.nan


@inner()
def cost_of(pairs: Any, i: int, j: int) -> float:
    if pairs.x.shape[0] == 0:
        return pairs.matrix[i, j]
    return pair_cost(pairs.x[i], pairs.y[:, j], pairs.metric)


@inner()
def evaluate(cells: Any, rows: Any, columns: Any, epsilon: float) -> float:
    """Update f exactly on the cells; write the shares and the masses of rows and columns; return the error."""
    inverse = 1 / epsilon
    for j in range(columns.mass.shape[0]):
        columns.mass[j] = 0.0
    for i in range(rows.weights.shape[0]):
        first, count = cells.starts[i], cells.starts[i + 1] - cells.starts[i]
        if count == 0:
            continue
        scores, places = cells.shares[first : first + count], cells.columns[first : first + count]
        costs = cells.costs[first : first + count]
        for e in range(count):
            scores[e] = (columns.potential[places[e]] - costs[e]) * inverse + columns.logs[places[e]]
        turn_into_shares(scores, count, rows, i, epsilon)
        mass = rows.mass[i]
        for e in range(count):
            columns.mass[places[e]] += mass * scores[e]
    if CHECKED:
        check_masses(rows, columns)
    return column_error(columns)


# ---- cells -----------------------------------------------------------------------------------------------------------


@inner(allocates=True)
def build_support(places: Any, n: int) -> Cells:
    """Return the cells (2, count) of an exact plan, sorted by rows, without costs."""
    starts, end, columns = filled_integers(n + 1, 0), np.empty(n, np.int64), np.empty(places.shape[1], np.int32)
    for e in range(places.shape[1]):
        starts[places[0, e] + 1] += 1
    for i in range(n):
        end[i] = starts[i]
        starts[i + 1] += starts[i]
    for e in range(places.shape[1]):
        columns[end[places[0, e]]] = places[1, e]
        end[places[0, e]] += 1
    return Cells(starts, columns, np.empty(0), np.empty(0))


@inner()
def find_heavy(shares: Any, mass: float, smallest: Any, smallest_share: float, count: int, places: Any) -> int:
    """Write the places of shares above `smallest_share` and of masses above `smallest`; return their number."""
    heavy_count = 0
    for start in range(0, count, CHUNK):
        stop, hits = min(start + CHUNK, count), np.int32(0)
        for e in range(start, stop):
            hits += np.int32(shares[e] > smallest_share) | np.int32(mass * shares[e] > smallest[e])
        if hits > 0:
            for e in range(start, stop):
                places[heavy_count] = e
                heavy_count += shares[e] > smallest_share or mass * shares[e] > smallest[e]
    return heavy_count


@inner(allocates=True)
def build_near(pairs: Any, columns: Any, smallest: Any, epsilon: float) -> Near:
    """Return scratch for `find_near`, and write the smallest masses of cells to the points. Matrices need neither."""
    m, d, between_points, largest_potential = smallest.shape[0], pairs.x.shape[1], pairs.x.shape[0] > 0, 0.0
    if between_points:
        for j in range(m):
            pairs.y[d + 1, j] = smallest[j]
            largest_potential = max(largest_potential, abs(columns.potential[j]))
    cutoff = epsilon * math.log(m / NEWTON.negligible) + NEWTON.relative_rounding * largest_potential
    return Near(
        np.empty((2, pairs.y.shape[0], m if between_points else 0)), np.empty((2, m)), np.empty(m + CHUNK),
        filled_integers(2, 0), cutoff,
    )  # fmt: skip


@inner(allocates=True)
def find_near(pairs: Any, i: int, h: Any, near: Any) -> int:
    """Write the columns that count for point i, and their costs; return their number."""
    n, sizes, costs = pairs.x.shape[0], near.sizes, near.costs
    if i % (ROWS * BLOCK) == 0:
        block = pairs.x[i : min(i + ROWS * BLOCK, n)]
        sizes[0] = select(
            block, pairs.y, h, h.shape[0], near.cutoff, pairs.metric, costs, near.columns[0], near.h[0]
        )  # fmt: skip
    if i % ROWS == 0:
        block = pairs.x[i : min(i + ROWS, n)]
        sizes[1] = select(
            block, near.columns[0], near.h[0], sizes[0], near.cutoff, pairs.metric, costs, near.columns[1], near.h[1]
        )
    distances_of(pairs.x[i], near.columns[1], 0, pairs.metric, costs, sizes[1])
    return sizes[1]


@inner(allocates=True)
def select_cells(pairs: Any, rows: Any, columns: Any, epsilon: float, smallest_share: float, previous: Any) -> Cells:
    """Update f exactly over all pairs, and write the masses of the rows and columns.

    Returns the cells that hold more than the share `smallest_share` of their row or column, and the cells of
    `previous`. Their shares are not written.
    """
    n, m, d = rows.weights.shape[0], columns.weights.shape[0], pairs.x.shape[1]
    inverse, between_points = 1 / epsilon, pairs.x.shape[0] > 0
    h, smallest, scores, last_row = np.empty(m), np.empty(m), np.empty(m), filled_integers(m, -1)
    for j in range(m):
        h[j] = columns.potential[j] + epsilon * columns.logs[j]
        smallest[j] = smallest_share * target(columns, j)
        columns.mass[j] = 0.0
    near = build_near(pairs, columns, smallest, epsilon)
    hits, starts, space = np.empty(m + 1, np.int64), filled_integers(n + 1, 0), min(n * m, 16 * (n + m) + m)
    places, costs = np.empty(space, np.int32), np.empty(space)
    for i in range(n):
        if between_points:
            count = find_near(pairs, i, h, near)
            row, potential, bounds = near.costs[:count], near.h[1], near.columns[1, d + 1]
        else:
            count, row, potential, bounds = m, pairs.matrix[i], h, smallest
        for e in range(count):
            scores[e] = (potential[e] - row[e]) * inverse
        turn_into_shares(scores, count, rows, i, epsilon)
        mass = rows.mass[i]
        for e in range(count):
            columns.mass[np.int64(near.columns[1, d, e]) if between_points else e] += mass * scores[e]
        end, old = starts[i], previous.columns[previous.starts[i] : previous.starts[i + 1]]
        heavy_count = find_heavy(scores, mass, bounds, smallest_share, count, hits) if mass > 0 else 0
        if end + heavy_count + old.shape[0] > places.shape[0]:
            places, costs = resize(places, costs, max(2 * places.shape[0], end + heavy_count + old.shape[0]))
        for k in range(heavy_count):
            e = hits[k]
            places[end], costs[end] = np.int64(near.columns[1, d, e]) if between_points else e, row[e]
            last_row[places[end]] = i
            end += 1
        for j in old:
            if last_row[j] != i and mass > 0:
                places[end], costs[end], last_row[j] = j, cost_of(pairs, i, j), i
                end += 1
        starts[i + 1] = end
    if CHECKED:
        check_masses(rows, columns)
    places, costs = resize(places, costs, starts[n])
    return Cells(starts, places, costs, filled(starts[n], np.nan))


@inner()
def update_far_columns(pairs: Any, rows: Any, columns: Any, epsilon: float) -> int:
    """Update g exactly from f in the columns whose change exceeds `largest_update`; return their number.

    In these columns the masses have underflowed, so that they do not give the change.
    """
    count = 0
    for j in range(columns.weights.shape[0]):
        if abs(change_of_column(columns, j, epsilon)) < NEWTON.largest_update:
            continue
        count += 1
        top, total = -np.inf, 0.0
        for i in range(rows.weights.shape[0]):
            score = (rows.potential[i] - cost_of(pairs, i, j)) / epsilon + rows.logs[i]
            if score > top:
                total, top = total * math.exp(top - score), score
            total += math.exp(score - top) if score > -np.inf else 0.0
        columns.potential[j] = -epsilon * (top + math.log(total)) / (1 + epsilon / columns.rho)
    if CHECKED and count > 0:
        for j in range(columns.mass.shape[0]):
            columns.mass[j] = np.nan
    return count


@compiled(allocates=True, by_address=True)
def begin_round(
    pairs: Any, rows: Any, columns: Any, epsilon: float, smallest_share: float, previous: Any, may_update: bool
) -> Cells:  # fmt: skip
    """Update f exactly over all pairs, write all masses, and return the cells; see `select_cells`.

    With `may_update` it updates g in columns whose masses have underflowed, and selects again.
    """
    cells = select_cells(pairs, rows, columns, epsilon, smallest_share, previous)
    if may_update and update_far_columns(pairs, rows, columns, epsilon) > 0:
        cells = select_cells(pairs, rows, columns, epsilon, smallest_share, cells)
    return cells
