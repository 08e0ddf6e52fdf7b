"""Newton's method on the dual of entropic problems on a CPU, on the few cells of the plan that hold mass.

Let b = g / epsilon, and let f be the exact update from g. The plan is P_ij = r_i S_ij with the row sums r. The shares S
of each row sum to 1. The columns hold c = P^T 1 and should hold t. In balanced problems t = q and r = p. With
marginal penalties rho_p and rho_q, s_q = epsilon / rho_q and k_p = 1 / (1 + epsilon / rho_p), the targets are
t = q exp(-s_q b). A side that is kept has an infinite rho, so s = 0 and k = 1; in balanced problems both are. As a
function of b the dual has the gradient t - c, and its negative Hessian is

    H = diag(c + s_q t) - k_p S^T diag(r) S

    round       `select_cells` updates f exactly over all pairs. This gives the error, and the cells that hold more than
                a small share of their row or column. `steps_on_cells` runs on these cells.
    step        Conjugate gradients solve H x = t - c, with an approximate factor of H as the preconditioner.
                `search_along` moves b by x, or by a part of x where the dual falls along the rest.
    factor      H is the Laplacian of a graph, plus a diagonal: row i joins any two of its columns by an edge of weight
                k_p r_i S_ij S_il. The exact elimination of a column joins any two of its neighbours in the same way.
                `add_tree` puts a random tree in the place of these edges, with the same mean: each neighbour, from the
                lightest to the heaviest, is joined to one of the heavier ones, with a probability in proportion to
                their weights. Multiples of the golden ratio serve as random numbers.
    stage       Potentials of the exact problem are a corner of the set of its optimal potentials. Potentials of an
                entropic problem lie near the centre of this set. From an exact start the rounds therefore begin at a
                larger epsilon. The cells of the exact plan always take part, so that the problem on the cells has a
                solution.

Invariants, which kernels assert where indices are checked (`make test-bounds`):

    1   After `select_cells` and `evaluate`, f and r, and after `evaluate` S too, belong to the current g and to the
        same pairs: all pairs, or the cells. So each row of S sums to 1, and r and c have the same sum.
    2   `update_columns` and `update_far_columns` change g. Then f, r, c and S are outdated until the next `evaluate` or
        `select_cells`. `column_error`, `largest_change`, `find_step` and `derivative_along` read c.
    3   `search_along` ends with an `evaluate` at the g that it leaves, so (1) holds after it.
    4   `steps_on_cells` ends with an update of g, and `solve_stage` with `select_cells`: f is the exact update from g.

`tests/otloss/newton_reference.py` computes the same from the formulas above, with dense matrices. Costs are a matrix
or belong to points. Of points only the pairs that count are visited (`softmin_numba.select`).

Sources: X. Tang et al., Accelerating Sinkhorn Algorithm with Sparse Newton Iterations, arXiv 2401.12253; R. Kyng,
S. Sachdeva, Approximate Gaussian Elimination for Laplacians, 2016.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np

from otloss._numba.compile import bits_of_float64, compiled, exp64, inner, largest, spliced
from otloss._numba.tasks import is_stopped, next_task
from otloss.costs.order import BLOCK, ROWS
from otloss.costs.pair_cost_numba import pair_cost
from otloss.costs.softmin_numba import CHUNK, distances_of, select
from otloss.solvers.entropic.interface import ERROR, ITERATIONS

CHECKED = bool(numba.config.BOUNDSCHECK)  # a constant of compiled code: without it the assertions cost nothing


class NewtonNumbers(NamedTuple):
    """The numbers of the method, which kernels read as constants.

    Where a row of `benchmarks.hard_clouds` is named ("divergence 500 0.05": work, size, blur), the kernel takes so much
    more time in it with the other value. The rest are guards: no row changes with them.

    Attributes:
        stage_factor: epsilon of a stage over epsilon of the stage after it. 16: 1.5 times in divergence 16x256 0.05.
        stages_from_exact: stages before the last, from an exact start. None: 1.4 times in divergence 500 0.01; two:
            1.5 times in divergence 2000.
        tolerance_of_stage: the tolerance of the stages before the last. 0.1 and 0.001: 1.5 times in divergence 500 0.01
            and 2000.
        first_epsilon_over_penalty: from a start of zeros, epsilon of the first stage over the marginal penalty, at
            most. 0.5: 2.0 times in unbalanced 16x256 0.05.
        max_steps_of_round: the largest number of steps on the same cells. 2: 1.4 times in divergence 500 0.01.
        updates: exact updates of both sides before each step. None: 1.2 to 1.4 times in divergence 2000 0.05.
        error_reduction, error_share: a round ends when its error on the cells is this share of the error at its start,
            or this share of the tolerance. 0.1 and 0.9: 1.5 and 1.2 times in divergence 16x256 0.05.
        omitted_share: what the cells that are left out hold, as a share of the error that the round aims at.
        ridge, smallest_ridge: (ridge error + smallest_ridge) t is added to the diagonal of H, which shortens steps of
            columns that hardly exchange mass with others. Without `ridge` divergence 500 0.01 does not converge.
        max_products, residual: conjugate gradients end after so many products with H, or at the share
            residual^2 min(1, error) of the energy.
        largest_update: the largest change of b by an update. Masses of columns that are farther away underflow.
        remaining_derivative: a search allows a derivative down to minus this share of the first one. 0.1: 1.2 times in
            divergence 16x256 0.05.
        max_trials: the largest number of lengths that a search tries.
        octaves, shares_of_octave: in rows of many cells, so many shares of each of these octaves enter the factor. All
            shares: 1.4 times in unbalanced 16x256 0.05.
        max_sorted: rows of at most so many cells enter the factor as they are.
        golden_ratio: the fractional parts of its multiples stand for random numbers.
        relative_rounding: the rounding of potentials, relative to the largest.
        negligible: the share of a row that may be left out of its sum, and the share of its weight below which a
            column counts as empty.
    """

    stage_factor: float = 4.0
    stages_from_exact: int = 1
    tolerance_of_stage: float = 1e-2
    first_epsilon_over_penalty: float = 0.05
    max_steps_of_round: int = 6
    updates: int = 2
    error_reduction: float = 1e-2
    error_share: float = 0.3
    omitted_share: float = 1e-2
    ridge: float = 0.02
    smallest_ridge: float = 1e-13
    max_products: int = 150
    residual: float = 0.3
    largest_update: float = 50.0
    remaining_derivative: float = 0.5
    max_trials: int = 40
    octaves: int = 64
    shares_of_octave: int = 4
    max_sorted: int = 16
    golden_ratio: float = 0.6180339887498949
    relative_rounding: float = 1e-14
    negligible: float = 1e-17


NEWTON = NewtonNumbers()


class Pairs(NamedTuple):
    """The costs: of a matrix (n, m), or of points. The other of the two is empty.

    x is (n, d), in an order in which neighbours follow each other. y is `as_columns(points, scratch=1)`: d coordinates,
    the number of the column, and the smallest mass of its cells. `select_cells` writes the last.
    """

    matrix: Any
    x: Any
    y: Any
    metric: int


class Near(NamedTuple):
    """The columns that count for a block of rows and for a few of its rows, as `softmin_numba.select` copies them.

    The potentials h are g + epsilon log q. `sizes` tells how many columns there are in both.
    """

    columns: Any
    h: Any
    costs: Any
    sizes: Any


class Cells(NamedTuple):
    """Cells of the plan; row i has those from starts[i] to starts[i + 1]. `evaluate` writes their shares of the row."""

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


class Edges(NamedTuple):
    """Edges between columns, as lists: the list of column j begins at heads[j] and holds what is eliminated after j.

    The last list holds the free places.
    """

    heads: Any
    nexts: Any
    columns: Any
    weights: Any


class Thinning(NamedTuple):
    """Scratch of `add_tree`: places of shares, the shares, sums of the shares after each, and where octaves begin."""

    places: Any
    kept: Any
    heavier: Any
    bounds: Any


class Factor(NamedTuple):
    """L D L^T near H. Column order[k] is eliminated as the k-th, with the k-th pivot.

    Its neighbours then are columns[starts[k] : starts[k + 1]]; shares are the weights of these edges over the pivot.
    """

    order: Any
    pivots: Any
    starts: Any
    columns: Any
    shares: Any


class NewtonResults(NamedTuple):
    """What `newton_problems` writes: f (B, n), g (B, m), and outcome (B, 2), the error of g and the number of steps."""

    f: np.ndarray
    g: np.ndarray
    outcome: np.ndarray


def build_results(n: int, g: np.ndarray) -> NewtonResults:
    """Return the results that `newton_problems` writes, with the start g (B, m)."""
    return NewtonResults(np.zeros((len(g), n)), g.copy(), np.zeros((len(g), 2)))


# ---- arrays: loops, because numba compiles np.full, argsort and assignments of slices for seconds -------------------


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


# ---- the dual --------------------------------------------------------------------------------------------------------


@inner()
def check_masses(rows: Any, columns: Any) -> None:
    """Assert that the masses of rows and columns belong to one plan (invariants 1 and 2)."""
    total = rows.mass.sum()
    assert abs(columns.mass.sum() - total) <= 1e-9 * total


@inner()
def check_shares(cells: Any) -> None:
    """Assert that the shares of each row sum to 1 (invariant 1)."""
    for i in range(cells.starts.shape[0] - 1):
        shares = cells.shares[cells.starts[i] : cells.starts[i + 1]]
        assert shares.shape[0] == 0 or abs(shares.sum() - 1) <= 1e-9


@inner(allocates=True)
def build_side(weights: Any, potential: Any, rho: float) -> Side:
    logs = np.empty(weights.shape[0])
    for j in range(weights.shape[0]):
        logs[j] = math.log(weights[j]) if weights[j] > 0 else -np.inf
    return Side(weights, logs, potential, filled(weights.shape[0], 0.0), rho)


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


# ---- cells -----------------------------------------------------------------------------------------------------------


@inner()
def find_heavy(shares: Any, mass: float, smallest: Any, smallest_share: float, count: int, places: Any) -> int:
    """Write the places of shares above `smallest_share` and of masses above `smallest`; return their number."""
    found = 0
    for start in range(0, count, CHUNK):
        stop, hits = min(start + CHUNK, count), np.int32(0)
        for e in range(start, stop):
            hits += np.int32(shares[e] > smallest_share) | np.int32(mass * shares[e] > smallest[e])
        if hits > 0:
            for e in range(start, stop):
                places[found] = e
                found += shares[e] > smallest_share or mass * shares[e] > smallest[e]
    return found


@inner(allocates=True)
def find_near(pairs: Any, i: int, h: Any, cutoff: float, near: Any) -> int:
    """Write the columns that count for point i, and their costs; return their number."""
    n, sizes, costs = pairs.x.shape[0], near.sizes, near.costs
    if i % (ROWS * BLOCK) == 0:
        block = pairs.x[i : min(i + ROWS * BLOCK, n)]
        sizes[0] = select(
            block, pairs.y, h, h.shape[0], cutoff, pairs.metric, costs, near.columns[0], near.h[0]
        )  # fmt: skip
    if i % ROWS == 0:
        block = pairs.x[i : min(i + ROWS, n)]
        sizes[1] = select(
            block, near.columns[0], near.h[0], sizes[0], cutoff, pairs.metric, costs, near.columns[1], near.h[1]
        )
    distances_of(pairs.x[i], near.columns[1], 0, pairs.metric, costs, sizes[1])
    return sizes[1]


@inner(allocates=True)
def build_near(pairs: Any, columns: Any, smallest: Any, epsilon: float) -> tuple[Near, float]:
    """Return scratch for `find_near` and its cutoff. Between points, write the smallest masses of cells to the points.

    Matrices need neither.
    """
    m, d, between_points = smallest.shape[0], pairs.x.shape[1], pairs.x.shape[0] > 0
    near = Near(
        np.empty((2, pairs.y.shape[0], m if between_points else 0)), np.empty((2, m)), np.empty(m + CHUNK),
        filled_integers(2, 0),
    )  # fmt: skip
    if not between_points:
        return near, 0.0
    largest = 0.0
    for j in range(m):
        pairs.y[d + 1, j] = smallest[j]
        largest = max(largest, abs(columns.potential[j]))
    return near, epsilon * math.log(m / NEWTON.negligible) + NEWTON.relative_rounding * largest


@inner(allocates=True)
def resize(columns: Any, costs: Any, size: int) -> tuple[Any, Any]:
    """Return longer or shorter copies of both."""
    new_columns, new_costs = np.empty(size, np.int32), np.empty(size)
    for e in range(min(size, columns.shape[0])):
        new_columns[e], new_costs[e] = columns[e], costs[e]
    return new_columns, new_costs


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
    near, cutoff = build_near(pairs, columns, smallest, epsilon)
    hits, starts, space = np.empty(m + 1, np.int64), filled_integers(n + 1, 0), min(n * m, 16 * (n + m) + m)
    places, costs = np.empty(space, np.int32), np.empty(space)
    for i in range(n):
        if between_points:
            count = find_near(pairs, i, h, cutoff, near)
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
        found = find_heavy(scores, mass, bounds, smallest_share, count, hits) if mass > 0 else 0
        if end + found + old.shape[0] > places.shape[0]:
            places, costs = resize(places, costs, max(2 * places.shape[0], end + found + old.shape[0]))
        for k in range(found):
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


@spliced
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


# ---- the approximate factor ------------------------------------------------------------------------------------------


@inner(allocates=True)
def elimination_order(cells: Any, m: int) -> Any:
    """Return the columns, those of few cells first."""
    counts, places, order = filled_integers(m, 0), filled_integers(cells.starts.shape[0] + 1, 0), np.empty(m, np.int64)
    for e in range(cells.columns.shape[0]):
        counts[cells.columns[e]] += 1
    for j in range(m):  # a column has at most one cell in each row
        places[counts[j] + 1] += 1
    for k in range(places.shape[0] - 1):
        places[k + 1] += places[k]
    for j in range(m):
        order[places[counts[j]]] = j
        places[counts[j]] += 1
    return order


@inner()
def octave(share: float) -> int:
    """Return the number of the octave of a share from 0 to 1: the last one holds the shares from 1/2 on."""
    return max(0, NEWTON.octaves - 1 - max(0, 1022 - (bits_of_float64(share) >> np.int64(52))))


@inner()
def next_phase(phase: float) -> float:
    """Return the next number in place of a random one, from 0 to 1."""
    phase += NEWTON.golden_ratio
    return phase if phase < 1 else phase - 1


@inner()
def sort_shares(shares: Any, work: Any) -> None:
    """Write the shares in ascending order, and their places, by insertion."""
    places, kept = work.places, work.kept
    for a in range(shares.shape[0]):
        b = a
        while b > 0 and kept[b - 1] > shares[a]:
            places[b], kept[b] = places[b - 1], kept[b - 1]
            b -= 1
        places[b], kept[b] = a, shares[a]


@inner(allocates=True)
def build_thinning(columns: int) -> Thinning:
    """Return scratch for rows of at most so many shares."""
    return Thinning(
        np.empty(columns, np.int64), np.empty(columns), np.empty(columns), np.empty(NEWTON.octaves + 2, np.int64)
    )  # fmt: skip


@inner()
def thin_out(shares: Any, work: Any, phase: float) -> int:
    """Write shares and their places, from light to heavy octaves; return how many there are.

    Where an octave has more than `shares_of_octave`, so many of them stand for all, with equal parts of their sum.
    """
    places, kept, bounds = work.places, work.kept, work.bounds
    for k in range(bounds.shape[0]):
        bounds[k] = 0
    for a in range(shares.shape[0]):
        bounds[octave(shares[a]) + 2] += 1
    for b in range(NEWTON.octaves):
        bounds[b + 2] += bounds[b + 1]
    for a in range(shares.shape[0]):
        b = octave(shares[a]) + 1
        places[bounds[b]] = a
        bounds[b] += 1
    count = 0
    for b in range(NEWTON.octaves):
        start, stop, total = bounds[b], bounds[b + 1], 0.0
        chosen, spacing = min(stop - start, NEWTON.shares_of_octave), (stop - start) / NEWTON.shares_of_octave
        for a in range(start, stop):
            total += shares[places[a]]
        for k in range(chosen):
            place = places[start + k if spacing <= 1 else min(start + int((k + phase) * spacing), stop - 1)]
            places[count], kept[count] = place, shares[place] if spacing <= 1 else total / chosen
            count += 1
    return count


@inner()
def first_at_most(values: Any, start: int, stop: int, bound: float) -> int:
    """Return the first place from `start` on whose value is at most the bound; the values fall, the last one does."""
    low, high = start, stop - 1
    while low < high:
        middle = (low + high) // 2
        if values[middle] <= bound:
            high = middle
        else:
            low = middle + 1
    return low


@inner()
def add_tree(edges: Any, ranks: Any, columns: Any, shares: Any, scale: float, work: Any, phase: float) -> float:
    """Add a tree of edges between columns in place of edges of weights `scale shares[a] shares[b]` between all.

    Returns the next phase, a number in place of a random one.
    """
    count = shares.shape[0]
    if count <= NEWTON.max_sorted:
        sort_shares(shares, work)
    else:
        count = thin_out(shares, work, phase)
    places, kept, heavier, total = work.places, work.kept, work.heavier, 0.0
    for a in range(count - 1, -1, -1):
        heavier[a] = total
        total += kept[a]
    for a in range(count - 1):
        weight = scale * kept[a] * heavier[a]
        if not weight > 0:
            continue
        phase = next_phase(phase)
        b = first_at_most(heavier, a + 1, count, phase * heavier[a])
        first, second = columns[places[a]], columns[places[b]]
        if ranks[first] > ranks[second]:
            first, second = second, first
        place = edges.heads[-1]
        edges.heads[-1] = edges.nexts[place]
        edges.columns[place], edges.weights[place] = second, weight
        edges.nexts[place], edges.heads[first] = edges.heads[first], place
    return phase


@inner()
def remove_neighbours(edges: Any, j: int, places: Any, near: Any, weights: Any) -> int:
    """Write the neighbours of column j and the sums of their edges, and free these edges; return their number.

    `places` is -1 for all columns, and so again at the end.
    """
    count = 0
    while edges.heads[j] >= 0:
        e = edges.heads[j]
        edges.heads[j], edges.nexts[e], edges.heads[-1] = edges.nexts[e], edges.heads[-1], e
        neighbour = edges.columns[e]
        if places[neighbour] < 0:
            places[neighbour], near[count], weights[count] = count, neighbour, 0.0
            count += 1
        weights[places[neighbour]] += edges.weights[e]
    for a in range(count):
        places[near[a]] = -1
    return count


@inner(allocates=True)
def factorise(cells: Any, rows: Any, damping: float, excess: Any, order: Any) -> Factor:
    """Return an approximate factor of H. `excess`, the diagonal beside the Laplacian, is overwritten.

    With the diagonal of H as the preconditioner instead, divergence 500 0.05 on clouds with axes of two scales takes 30
    times as long, and on clusters 12 times.
    """
    m, size, phase = order.shape[0], cells.columns.shape[0], 0.5
    ranks = np.empty(m, np.int64)
    for k in range(m):
        ranks[order[k]] = k
    edges = Edges(filled_integers(m + 1, -1), np.empty(size, np.int64), np.empty(size, np.int32), np.empty(size))
    for e in range(size):
        edges.nexts[e] = e - 1
    edges.heads[m] = size - 1
    work = build_thinning(m)
    for i in range(rows.mass.shape[0]):
        first, stop, scale = cells.starts[i], cells.starts[i + 1], damping * rows.mass[i]
        phase = add_tree(edges, ranks, cells.columns[first:stop], cells.shares[first:stop], scale, work, phase)
    pivots, starts, columns, shares = np.empty(m), filled_integers(m + 1, 0), np.empty(size, np.int32), np.empty(size)
    places, near, weights = filled_integers(m, -1), np.empty(m, np.int32), np.empty(m)
    for k in range(m):
        j, start = order[k], starts[k]
        count = remove_neighbours(edges, j, places, near, weights)
        pivots[k], starts[k + 1] = excess[j], start + count
        for a in range(count):
            pivots[k] += weights[a]
        if start + count > columns.shape[0]:
            columns, shares = resize(columns, shares, 2 * (start + count))
        for a in range(count):
            columns[start + a], shares[start + a] = near[a], weights[a] / pivots[k]
            excess[near[a]] += shares[start + a] * excess[j]
        if count > 1:
            part = shares[start : start + count]
            phase = add_tree(edges, ranks, near[:count], part, pivots[k], work, phase)
    return Factor(order, pivots, starts, columns, shares)


@inner()
def precondition(factor: Any, residual: Any, out: Any) -> None:
    """Write the solution of the approximate equations."""
    for j in range(out.shape[0]):
        out[j] = residual[j]
    for k in range(out.shape[0]):
        value = out[factor.order[k]]
        for e in range(factor.starts[k], factor.starts[k + 1]):
            out[factor.columns[e]] += factor.shares[e] * value
    for k in range(out.shape[0] - 1, -1, -1):
        total = out[factor.order[k]] / factor.pivots[k] if factor.pivots[k] > 0 else 0.0
        for e in range(factor.starts[k], factor.starts[k + 1]):
            total += factor.shares[e] * out[factor.columns[e]]
        out[factor.order[k]] = total


# ---- steps -----------------------------------------------------------------------------------------------------------


@inner(fastmath={"contract", "nsz", "reassoc"})
def apply_curvature(cells: Any, rows: Any, diagonal: Any, damping: float, x: Any, out: Any) -> None:
    """Write H x; `damping` is k_p, and the diagonal is that of diag(c + s_q t) with its ridge."""
    for j in range(x.shape[0]):
        out[j] = diagonal[j] * x[j]
    for i in range(rows.mass.shape[0]):
        total = 0.0
        for e in range(cells.starts[i], cells.starts[i + 1]):
            total += cells.shares[e] * x[cells.columns[e]]
        total *= damping * rows.mass[i]
        for e in range(cells.starts[i], cells.starts[i + 1]):
            out[cells.columns[e]] -= cells.shares[e] * total


@inner()
def derivative_along(columns: Any, x: Any) -> float:
    """Return the derivative of the dual along a step x of b."""
    total = 0.0
    for j in range(x.shape[0]):
        total += (target(columns, j) - columns.mass[j]) * x[j]
    return total


def build_conjugate_gradients(precondition: Any) -> Any:
    """Return conjugate gradients with the preconditioner M: `precondition(factor, residual, out)` writes M residual.

    It is not an argument of the kernel, since numba does not keep kernels on disk that receive functions.
    """

    @inner(allocates=True)
    def conjugate_gradients(
        counter: Any, cells: Any, rows: Any, diagonal: Any, damping: float, factor: Any, residual: Any, share: float,
        error: float, x: Any,
    ) -> None:  # fmt: skip
        """Write the solution x of H x = residual; the residual is overwritten by what remains of it.

        The iteration ends when at most `share` of the energy residual^T M residual remains. `error` is for messages
        about the progress.
        """
        m = x.shape[0]
        product, preconditioned, direction, energy = np.empty(m), np.empty(m), np.empty(m), 0.0
        precondition(factor, residual, preconditioned)
        for j in range(m):
            x[j], direction[j] = 0.0, preconditioned[j]
            energy += residual[j] * direction[j]
        enough = share * energy
        for _ in range(NEWTON.max_products):
            if not energy > enough or is_stopped(counter, error, np.nan):
                return
            apply_curvature(cells, rows, diagonal, damping, direction, product)
            curvature, next_energy = 0.0, 0.0
            for j in range(m):
                curvature += direction[j] * product[j]
            if not curvature > 0:
                return
            for j in range(m):
                x[j] += energy / curvature * direction[j]
                residual[j] -= energy / curvature * product[j]
            precondition(factor, residual, preconditioned)
            for j in range(m):
                next_energy += preconditioned[j] * residual[j]
            for j in range(m):
                direction[j] = preconditioned[j] + next_energy / energy * direction[j]
            energy = next_energy

    return conjugate_gradients


solve_equations = build_conjugate_gradients(precondition)


@spliced
def find_step(
    counter: Any, cells: Any, rows: Any, columns: Any, order: Any, epsilon: float, error: float, x: Any
) -> None:  # fmt: skip
    """Write the step x of b: the approximate solution of H x = t - c."""
    m, pull, ratio = x.shape[0], epsilon / rows.rho, epsilon / columns.rho
    damping = 1 / (1 + pull)
    diagonal, residual, excess = np.empty(m), np.empty(m), np.empty(m)
    if CHECKED:
        check_masses(rows, columns)
        check_shares(cells)
    for j in range(m):
        wanted = target(columns, j)
        residual[j] = wanted - columns.mass[j]
        excess[j] = pull * damping * columns.mass[j] + (ratio + NEWTON.ridge * error + NEWTON.smallest_ridge) * wanted
        diagonal[j] = excess[j] + damping * columns.mass[j]
    factor = factorise(cells, rows, damping, excess, order)
    share = NEWTON.residual**2 * min(1.0, error)
    solve_equations(counter, cells, rows, diagonal, damping, factor, residual, share, error, x)


@spliced
def search_along(cells: Any, rows: Any, columns: Any, epsilon: float, x: Any, derivative: float) -> None:
    """Move b along x, or along a part of it; masses, f and shares belong to the new b.

    The step becomes shorter until the derivative along it is at least minus the share `remaining_derivative` of the
    first derivative. The dual is concave, and grows.
    """
    start, length = np.empty(x.shape[0]), 1.0
    for j in range(x.shape[0]):
        start[j] = columns.potential[j]
    for _ in range(NEWTON.max_trials):
        for j in range(x.shape[0]):
            columns.potential[j] = start[j] + epsilon * length * x[j]
        evaluate(cells, rows, columns, epsilon)
        current = derivative_along(columns, x)
        if current >= -NEWTON.remaining_derivative * derivative:
            break
        zero_of_secant = derivative / (derivative - current) if current < 0 else 0.0  # 0 for NaN
        length *= min(max(zero_of_secant, 0.1), 0.5)


@spliced
def steps_on_cells(
    counter: Any, cells: Any, rows: Any, columns: Any, epsilon: float, tolerance: float, max_steps: int
) -> int:
    """Run Newton's method on the cells, from g; return the number of steps. An exact update of g ends it."""
    m, steps = columns.weights.shape[0], 0
    x, order = np.empty(m), elimination_order(cells, m)
    error = evaluate(cells, rows, columns, epsilon)
    goal = max(tolerance, NEWTON.error_reduction * error)
    while True:
        for _ in range(NEWTON.updates):
            if error > goal:
                update_columns(columns, epsilon)
                error = evaluate(cells, rows, columns, epsilon)
        if error <= goal or steps == max_steps or is_stopped(counter, error, np.nan):
            break
        find_step(counter, cells, rows, columns, order, epsilon, error, x)
        derivative = derivative_along(columns, x)
        if not derivative > 0:
            break
        search_along(cells, rows, columns, epsilon, x, derivative)
        error = column_error(columns)
        steps += 1
    update_columns(columns, epsilon)
    return steps


# ---- stages ----------------------------------------------------------------------------------------------------------


@spliced
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


@spliced
def solve_stage(
    counter: Any, pairs: Any, rows: Any, columns: Any, epsilon: float, tolerance: float,
    allowed_change: float, max_steps: int, support: Any,
) -> tuple[float, int]:  # fmt: skip
    """Run rounds at one epsilon; return the error and the number of steps. f is then the exact update from g."""
    steps, cells, error = 0, support, 1.0
    n, m = rows.weights.shape[0], columns.weights.shape[0]
    while True:
        smallest_share = max(tolerance, NEWTON.omitted_share * NEWTON.error_reduction * error) / (n + m)
        cells = select_cells(pairs, rows, columns, epsilon, smallest_share, cells)
        if steps < max_steps and update_far_columns(pairs, rows, columns, epsilon) > 0:
            cells = select_cells(pairs, rows, columns, epsilon, smallest_share, cells)
        error = column_error(columns)
        is_accurate = allowed_change == np.inf or largest_change(columns, epsilon) <= allowed_change
        if (error <= tolerance and is_accurate) or steps >= max_steps or is_stopped(counter, error, np.nan):
            return error, steps
        limit = min(NEWTON.max_steps_of_round, max_steps - steps)
        done = steps_on_cells(
            counter, cells, rows, columns, epsilon, NEWTON.error_share * tolerance, limit
        )  # fmt: skip
        steps += max(1, done)


@spliced
def solve_problem(
    counter: Any, pairs: Any, rows: Any, columns: Any, epsilon: float, has_start: bool, support: Any,
    limits: Any,
) -> tuple[float, int]:  # fmt: skip
    """Run the stages of one problem; return the error and the number of steps."""
    tolerance, allowed_change, max_steps = limits
    first = NEWTON.stages_from_exact if support.columns.shape[0] > 0 else 0
    if not has_start:
        rho = min(rows.rho, columns.rho) if max(rows.rho, columns.rho) == np.inf else max(rows.rho, columns.rho)
        while epsilon * NEWTON.stage_factor ** (first + 1) <= NEWTON.first_epsilon_over_penalty * rho < np.inf:
            first += 1
    error, steps = np.inf, 0
    for stage in range(first, -1, -1):
        width, is_last = epsilon * NEWTON.stage_factor**stage, stage == 0
        error, done = solve_stage(
            counter, pairs, rows, columns, width, tolerance if is_last else NEWTON.tolerance_of_stage,
            allowed_change if is_last else np.inf, max_steps - steps, support,
        )  # fmt: skip
        steps += done
    return error, steps


@compiled(allocates=True)
def newton_problems(counter: Any, problems: Any, limits: Any, results: Any) -> None:
    """Solve problem k = (p[k], q[k], costs of owner[k], epsilon[k]) from g[k]; write the potentials to f[k] and g[k].

        problems    p (B, n) and q (B, m), weights, or shares of the mass in balanced problems; the fields of `Pairs`,
                    the matrix with a first axis of matrices; owner (B,); epsilon (B,); rho_p and rho_q (B, 2), infinite
                    for a side that is kept; has_start (B,), false where g is zeros; and rows and columns of the cells
                    of exact plans whose potentials are in g, (B, 2, cells), or (B, 2, 0)
        limits      the tolerance; the largest change of b by an exact update that ends a search, or infinity; the
                    largest number of steps
        results     f (B, n); g (B, m); outcome (B, 2), the error of g and the number of steps

    All in float64.
    """
    p, q, costs, owner, epsilon, penalties, has_start, plans = problems
    f, g, outcome = results
    while True:
        k = next_task(counter)
        if k >= p.shape[0]:
            return
        pairs = Pairs(costs[0][owner[k]], costs[1], costs[2], costs[3])
        rows, columns = build_side(p[k], f[k], penalties[k, 0]), build_side(q[k], g[k], penalties[k, 1])
        support = build_support(plans[k], p.shape[1])
        outcome[k, ERROR], outcome[k, ITERATIONS] = solve_problem(
            counter, pairs, rows, columns, epsilon[k], has_start[k], support, limits
        )
