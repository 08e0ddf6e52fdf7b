"""Newton's method on the dual of entropic problems on a CPU, on the few cells of the plan that hold mass.

Let b = g / epsilon, and let f be the exact update from g. The plan is P_ij = r_i S_ij with the row sums r; the shares S
of each row sum to 1. The columns hold c = P^T 1 and should hold t. In balanced problems t = q and r = p. With a
marginal penalty rho, s = epsilon / rho and k = 1 / (1 + s), it is t = q exp(-s b); balanced problems have s = 0 and k =
1. As a function of b the dual has the gradient t - c, and its negative Hessian is

    H = diag(c + s t) - k S^T diag(r) S

    round       Exact updates of f over all pairs give the error, and the cells that hold more than a small share of
                their row or column. Steps on these cells follow.
    step        Conjugate gradients solve H x = t - c, with an approximate factor of H. A search along x then ends where
                at most half of the first derivative of the dual is left.
    factor      H is the Laplacian of a graph, plus a diagonal: row i joins any two of its columns by an edge of weight
                k r_i S_ij S_il. An exact elimination of a column would join any two of its neighbours likewise. Here a
                random tree takes the place of these edges, with the same mean: each neighbour, from the lightest on, is
                joined to one of the heavier ones, with a probability in proportion to their weights.
    stage       Potentials of the exact problem are a corner of the set of its optimal potentials; those of an entropic
                problem lie near the centre of this set. From an exact start the rounds therefore begin at a larger
                epsilon. The cells of the exact plan always take part, so that the problem on the cells has a solution.

Costs are a matrix or belong to points. Of points only the pairs that count are visited (`softmin.select`).

Sources: X. Tang et al., Accelerating Sinkhorn Algorithm with Sparse Newton Iterations, arXiv 2401.12253; R. Kyng,
S. Sachdeva, Approximate Gaussian Elimination for Laplacians, 2016.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from otloss._numba.compile import bits_of_float64, compiled, exp64, inner, largest, spliced
from otloss._numba.tasks import is_stopped, next_task
from otloss.costs.order import BLOCK, ROWS
from otloss.costs.softmin_numba import CHUNK, distances_of, select
from otloss.solvers.entropic.interface import ERROR, ITERATIONS

COARSER_STAGES, COARSER = 1, 4.0  # stages before the last; each has COARSER times the epsilon
TOLERANCE_FROM_EXACT, TOLERANCE_FROM_ZERO = 1e-2, 1e-4  # of these stages
FIRST_EPSILON = 0.05  # of the marginal penalty, at most, from a start of zeros
STEPS = 6  # of a round, at most
UPDATES = 2  # exact updates of both sides on the cells before each step
GAIN, AIM = 1e-2, 0.3  # a round ends when the error has fallen by GAIN, or to AIM times the tolerance
CUT = 1e-2  # error of the cells left out in a round, as a share of the error that the round aims at
RIDGE, LEAST_RIDGE = 0.02, 1e-13  # RIDGE error + LEAST_RIDGE, times q, is added to H; this shortens steps of weak cells
PRODUCTS, FORCING = 150, 0.3  # conjugate gradients: the most products with H, and the residual that ends them
DENSE = 0.15  # share of the pairs that are cells of a coarser stage, above which it does not pay
GOLDEN = 0.6180339887498949  # the fractional parts of its multiples stand for random numbers
OCTAVES, OF_OCTAVE = 64, 4  # of shares from 1 down, and how many shares of an octave are kept
INSERTED = 16  # up to so many shares are sorted by insertion, and all kept
LARGEST_UPDATE = 50.0  # of g / epsilon
LEFT, DOUBLINGS, SEARCHES = 0.5, 4, 40  # of a search: share of the first derivative that may be left, and most trials
RELATIVE_ROUNDING = 1e-14  # of potentials
NO_MASS_LEFT = 1e-17  # share of its weight below which a column counts as empty
NEGLIGIBLE = 1e-17  # share of a row that may be left out of its sum


class Pairs(NamedTuple):
    """The costs: of a matrix (n, m), or of points. The other of the two is empty.

    x is (n, d), in an order in which neighbours follow each other. y is `as_columns(points, scratch=1)`: d coordinates,
    the number of the column, and the least mass of its cells, which `cells_of` writes.
    """

    matrix: Any
    x: Any
    y: Any
    metric: int


class Cells(NamedTuple):
    """Cells of the plan. Those of row i are starts[i] to starts[i + 1]; `evaluate` writes their shares of the row."""

    starts: Any
    columns: Any
    costs: Any
    shares: Any


class Side(NamedTuple):
    """Vectors over the rows or the columns: weights, their logarithms, potentials, and the masses of the plan."""

    weights: Any
    logs: Any
    potential: Any
    mass: Any


class Edges(NamedTuple):
    """Edges from columns to columns that are eliminated later. Those of column j are a list that begins at heads[j].

    The last list is of places that are free.
    """

    heads: Any
    nexts: Any
    columns: Any
    weights: Any


class Thinning(NamedTuple):
    """Scratch: places of shares, the shares, sums of those after each, and the places where octaves begin."""

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


def answers(n: int, g: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the answers for `newton_problems`, from the start g (B, m) and its error (B,)."""
    return np.zeros((len(g), n)), g.copy(), np.stack([error, np.zeros(len(g))], 1)


@inner()
def side_of(weights: Any, potential: Any) -> Side:
    logs = np.empty(weights.shape[0])
    for j in range(weights.shape[0]):
        logs[j] = math.log(weights[j]) if weights[j] > 0 else -np.inf
    return Side(weights, logs, potential, np.zeros(weights.shape[0]))


@inner()
def target(side: Any, j: int, epsilon: float, ratio: float) -> float:
    """Return the mass t that a row or column should hold."""
    if ratio == 0:
        return side.weights[j]
    return side.weights[j] * math.exp(-ratio * side.potential[j] / epsilon)


@inner(fastmath={"contract", "nsz", "reassoc"})
def turn_into_shares(scores: Any, count: int, rows: Any, i: int, epsilon: float, ratio: float) -> None:
    """Turn the exponents of a row into shares, and write its soft minimum and mass."""
    top = largest(scores, count)
    total = 0.0
    for j in range(count):
        scores[j] = exp64(scores[j] - top)
        total += scores[j]
    inverse = 1 / total
    for j in range(count):
        scores[j] *= inverse
    rows.potential[i] = -epsilon * (top + math.log(total)) / (1 + ratio)
    rows.mass[i] = target(rows, i, epsilon, ratio)


@inner()
def column_error(columns: Any, epsilon: float, ratio: float) -> float:
    off, total = 0.0, 0.0
    for j in range(columns.weights.shape[0]):
        wanted = target(columns, j, epsilon, ratio)
        off += abs(wanted - columns.mass[j])
        total += wanted
    return off / total


@inner()
def change_of_column(columns: Any, j: int, epsilon: float, ratio: float) -> float:
    """Return what an exact update adds to g / epsilon."""
    wanted, mass = target(columns, j, epsilon, ratio), columns.mass[j]
    if wanted == 0:
        return 0.0
    change = math.log(wanted / mass) / (1 + ratio) if mass > 0 else LARGEST_UPDATE
    return min(max(change, -LARGEST_UPDATE), LARGEST_UPDATE)


@inner()
def largest_change(columns: Any, epsilon: float, ratio: float) -> float:
    """That of the exact updates, over columns that keep mass."""
    farthest = 0.0
    for j in range(columns.weights.shape[0]):
        if target(columns, j, epsilon, ratio) > NO_MASS_LEFT * columns.weights[j]:
            farthest = max(farthest, abs(change_of_column(columns, j, epsilon, ratio)))
    return farthest


@inner()
def update_columns(columns: Any, epsilon: float, ratio: float) -> None:
    for j in range(columns.weights.shape[0]):
        columns.potential[j] += epsilon * change_of_column(columns, j, epsilon, ratio)


@inner()
def cost_of(pairs: Any, i: int, j: int) -> float:
    if pairs.x.shape[0] == 0:
        return pairs.matrix[i, j]
    total = 0.0
    for k in range(pairs.x.shape[1]):
        apart = pairs.x[i, k] - pairs.y[k, j]
        total += abs(apart) if pairs.metric == 2 else apart * apart
    return math.sqrt(total) if pairs.metric == 1 else total


@inner()
def heavy_of(shares: Any, mass: float, least: Any, cut: float, count: int, places: Any) -> int:
    """Write the places of shares above `cut` and of masses above `least`; return their number."""
    found = 0
    for start in range(0, count, CHUNK):
        stop, hits = min(start + CHUNK, count), np.int32(0)
        for e in range(start, stop):
            hits += np.int32(shares[e] > cut) | np.int32(mass * shares[e] > least[e])
        if hits > 0:
            for e in range(start, stop):
                places[found] = e
                found += shares[e] > cut or mass * shares[e] > least[e]
    return found


@inner()
def cells_of(pairs: Any, rows: Any, columns: Any, epsilon: float, ratio: float, cut: float, before: Any) -> Cells:
    """Update f exactly over all pairs, and write the masses of the columns.

    Returns the cells that hold more than the share `cut` of their row or column, and the cells of `before`.
    """
    n, m, d = rows.weights.shape[0], columns.weights.shape[0], pairs.x.shape[1]
    inverse, with_points = 1 / epsilon, pairs.x.shape[0] > 0
    h, least, scores, stamp = np.empty(m), np.empty(m), np.empty(m), np.full(m, -1)
    costs, hits, starts = np.empty(m + CHUNK), np.empty(m + 1, np.int64), np.zeros(n + 1, np.int64)
    size = 0.0
    for j in range(m):
        h[j] = columns.potential[j] + epsilon * columns.logs[j]
        size = max(size, abs(columns.potential[j]))
        least[j] = cut * target(columns, j, epsilon, ratio)
        columns.mass[j] = 0.0
    near, near_h = np.empty((2, pairs.y.shape[0], m if with_points else 0)), np.empty((2, m))
    cutoff, taken, held = 0.0, m, m
    if with_points:
        pairs.y[d + 1] = least
        cutoff = epsilon * math.log(m / NEGLIGIBLE) + RELATIVE_ROUNDING * size
    space = min(n * m, 16 * (n + m) + m)
    places, prices = np.empty(space, np.int32), np.empty(space)
    for i in range(n):
        if with_points:
            if i % (ROWS * BLOCK) == 0:
                block = pairs.x[i : min(i + ROWS * BLOCK, n)]
                taken = select(block, pairs.y, h, m, cutoff, pairs.metric, costs, near[0], near_h[0])
            if i % ROWS == 0:
                block = pairs.x[i : min(i + ROWS, n)]
                held = select(block, near[0], near_h[0], taken, cutoff, pairs.metric, costs, near[1], near_h[1])
            distances_of(pairs.x[i], near[1], 0, pairs.metric, costs, held)
            row, potential, lightest = costs[:held], near_h[1], near[1, d + 1]
        else:
            row, potential, lightest = pairs.matrix[i], h, least
        for e in range(held):
            scores[e] = (potential[e] - row[e]) * inverse
        turn_into_shares(scores, held, rows, i, epsilon, ratio)
        mass = rows.mass[i]
        if with_points:
            for e in range(held):
                columns.mass[np.int64(near[1, d, e])] += mass * scores[e]
        else:
            for e in range(held):
                columns.mass[e] += mass * scores[e]
        at, old = starts[i], before.columns[before.starts[i] : before.starts[i + 1]]
        found = heavy_of(scores, mass, lightest, cut, held, hits) if mass > 0 else 0
        if at + found + old.shape[0] > space:
            space = max(2 * space, at + found + old.shape[0])
            more_places, more_prices = np.empty(space, np.int32), np.empty(space)
            more_places[:at], more_prices[:at] = places[:at], prices[:at]
            places, prices = more_places, more_prices
        for e in hits[:found]:
            places[at], prices[at] = np.int64(near[1, d, e]) if with_points else e, row[e]
            stamp[places[at]] = i
            at += 1
        for j in old:
            if stamp[j] != i and mass > 0:
                places[at], prices[at], stamp[j] = j, cost_of(pairs, i, j), i
                at += 1
        starts[i + 1] = at
    return Cells(starts, places[: starts[n]].copy(), prices[: starts[n]].copy(), np.empty(starts[n]))


@spliced
def find_lost(pairs: Any, rows: Any, columns: Any, epsilon: float, ratio: float) -> int:
    """Update g exactly where columns are so far off that their masses do not tell how far; return their number."""
    count = 0
    for j in range(columns.weights.shape[0]):
        if abs(change_of_column(columns, j, epsilon, ratio)) < LARGEST_UPDATE:
            continue
        count += 1
        top, total = -np.inf, 0.0
        for i in range(rows.weights.shape[0]):
            score = (rows.potential[i] - cost_of(pairs, i, j)) / epsilon + rows.logs[i]
            if score > top:
                total, top = total * math.exp(top - score), score
            total += math.exp(score - top) if score > -np.inf else 0.0
        columns.potential[j] = -epsilon * (top + math.log(total)) / (1 + ratio)
    return count


@inner()
def evaluate(cells: Any, rows: Any, columns: Any, epsilon: float, ratio: float) -> float:
    """Update f exactly on the cells; write the shares and the masses of rows and columns; return the error."""
    inverse = 1 / epsilon
    columns.mass[:] = 0.0
    for i in range(rows.weights.shape[0]):
        first, count = cells.starts[i], cells.starts[i + 1] - cells.starts[i]
        if count == 0:
            continue
        scores, places = cells.shares[first : first + count], cells.columns[first : first + count]
        prices = cells.costs[first : first + count]
        for e in range(count):
            scores[e] = (columns.potential[places[e]] - prices[e]) * inverse + columns.logs[places[e]]
        turn_into_shares(scores, count, rows, i, epsilon, ratio)
        mass = rows.mass[i]
        for e in range(count):
            columns.mass[places[e]] += mass * scores[e]
    return column_error(columns, epsilon, ratio)


@inner()
def order_of_elimination(cells: Any, m: int) -> Any:
    """Return the columns, those of few cells first."""
    counts = np.zeros(m, np.int64)
    for j in cells.columns:
        counts[j] += 1
    return np.argsort(counts, kind="mergesort")


@inner()
def octave_of(share: float) -> int:
    """Return the binary exponent of a share from 0 to 1, counted from the least one that counts."""
    return max(0, OCTAVES - 1 - max(0, 1022 - (bits_of_float64(share) >> np.int64(52))))


@inner()
def next_phase(phase: float) -> float:
    return phase + GOLDEN if phase + GOLDEN < 1 else phase + GOLDEN - 1


@inner()
def sort_shares(shares: Any, work: Any) -> None:
    """Write the shares, the lightest first, and their places, by insertion."""
    places, kept = work.places, work.kept
    for a in range(shares.shape[0]):
        b = a
        while b > 0 and kept[b - 1] > shares[a]:
            places[b], kept[b] = places[b - 1], kept[b - 1]
            b -= 1
        places[b], kept[b] = a, shares[a]


@inner()
def thinning_of(columns: int) -> Thinning:
    """Return scratch for rows of at most so many shares."""
    return Thinning(
        np.empty(columns, np.int64), np.empty(columns), np.empty(columns), np.empty(OCTAVES + 2, np.int64)
    )  # fmt: skip


@inner()
def thin_out(shares: Any, work: Any, phase: float) -> int:
    """Write shares and their places, from light to heavy octaves; OF_OCTAVE of them stand for more in one octave.

    Returns the number of shares that are left.
    """
    places, kept, bounds = work.places, work.kept, work.bounds
    bounds[:] = 0
    for a in range(shares.shape[0]):
        bounds[octave_of(shares[a]) + 2] += 1
    for b in range(OCTAVES):
        bounds[b + 2] += bounds[b + 1]
    for a in range(shares.shape[0]):
        b = octave_of(shares[a]) + 1
        places[bounds[b]] = a
        bounds[b] += 1
    count = 0
    for b in range(OCTAVES):
        start, stop, total = bounds[b], bounds[b + 1], 0.0
        chosen, every = min(stop - start, OF_OCTAVE), (stop - start) / OF_OCTAVE
        for a in range(start, stop):
            total += shares[places[a]]
        for k in range(chosen):
            place = places[start + k if every <= 1 else min(start + int((k + phase) * every), stop - 1)]
            places[count], kept[count] = place, shares[place] if every <= 1 else total / chosen
            count += 1
    return count


@inner()
def add_tree(edges: Any, ranks: Any, columns: Any, shares: Any, scale: float, work: Any, phase: float) -> float:
    """Add a tree of edges between columns in place of edges of weights `scale shares[a] shares[b]` between all.

    Returns the next phase, a number in place of a random one.
    """
    count = shares.shape[0]
    if count <= INSERTED:
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
        low, high = a + 1, count - 1
        while low < high:  # the first b after a with heavier[b] <= phase heavier[a]
            middle = (low + high) // 2
            if heavier[middle] <= phase * heavier[a]:
                high = middle
            else:
                low = middle + 1
        first, second = columns[places[a]], columns[places[low]]
        if ranks[first] > ranks[second]:
            first, second = second, first
        place = edges.heads[-1]
        edges.heads[-1] = edges.nexts[place]
        edges.columns[place], edges.weights[place] = second, weight
        edges.nexts[place], edges.heads[first] = edges.heads[first], place
    return phase


@spliced
def factorise(cells: Any, rows: Any, damping: float, excess: Any, order: Any) -> Factor:
    """Return an approximate factor of H. `excess`, the diagonal beside the Laplacian, is overwritten."""
    m, size, phase = order.shape[0], cells.columns.shape[0], 0.5
    ranks = np.empty(m, np.int64)
    ranks[order] = np.arange(m)
    edges = Edges(np.full(m + 1, -1), np.arange(-1, size - 1), np.empty(size, np.int32), np.empty(size))
    edges.heads[m] = size - 1
    work = thinning_of(m)
    for i in range(rows.mass.shape[0]):
        first, stop, scale = cells.starts[i], cells.starts[i + 1], damping * rows.mass[i]
        phase = add_tree(edges, ranks, cells.columns[first:stop], cells.shares[first:stop], scale, work, phase)
    pivots, starts, columns, shares = np.empty(m), np.zeros(m + 1, np.int64), np.empty(size, np.int32), np.empty(size)
    place, near, weights = np.full(m, -1), np.empty(m, np.int64), np.empty(m)
    for k in range(m):
        j, at, count, total = order[k], starts[k], 0, 0.0
        while edges.heads[j] >= 0:
            e = edges.heads[j]
            edges.heads[j], edges.nexts[e], edges.heads[m] = edges.nexts[e], edges.heads[m], e
            neighbour = edges.columns[e]
            if place[neighbour] < 0:
                place[neighbour], near[count], weights[count] = count, neighbour, 0.0
                count += 1
            weights[place[neighbour]] += edges.weights[e]
            total += edges.weights[e]
        pivots[k], starts[k + 1] = total + excess[j], at + count
        if at + count > columns.shape[0]:
            more_columns, more_shares = np.empty(2 * (at + count), np.int32), np.empty(2 * (at + count))
            more_columns[:at], more_shares[:at] = columns[:at], shares[:at]
            columns, shares = more_columns, more_shares
        for a in range(count):
            columns[at + a], shares[at + a], place[near[a]] = near[a], weights[a] / pivots[k], -1
            excess[near[a]] += shares[at + a] * excess[j]
        if count > 1:
            phase = add_tree(edges, ranks, near[:count], shares[at : at + count], pivots[k], work, phase)
    return Factor(order, pivots, starts, columns, shares)


@inner()
def precondition(factor: Any, residual: Any, out: Any) -> None:
    """Write the solution of the approximate equations."""
    out[:] = residual
    for k in range(out.shape[0]):
        value = out[factor.order[k]]
        for e in range(factor.starts[k], factor.starts[k + 1]):
            out[factor.columns[e]] += factor.shares[e] * value
    for k in range(out.shape[0] - 1, -1, -1):
        total = out[factor.order[k]] / factor.pivots[k] if factor.pivots[k] > 0 else 0.0
        for e in range(factor.starts[k], factor.starts[k + 1]):
            total += factor.shares[e] * out[factor.columns[e]]
        out[factor.order[k]] = total


@inner(fastmath={"contract", "nsz", "reassoc"})
def apply_curvature(cells: Any, rows: Any, diagonal: Any, damping: float, x: Any, out: Any) -> None:
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
def derivative_along(columns: Any, epsilon: float, ratio: float, x: Any) -> float:
    """Return the derivative of the dual along a step x of g / epsilon."""
    total = 0.0
    for j in range(x.shape[0]):
        total += (target(columns, j, epsilon, ratio) - columns.mass[j]) * x[j]
    return total


@spliced
def find_step(
    cells: Any, rows: Any, columns: Any, order: Any, epsilon: float, ratio: float, error: float, x: Any
) -> int:  # fmt: skip
    """Write the step of g / epsilon to x, by conjugate gradients; return the number of products with H."""
    m, damping = x.shape[0], 1 / (1 + ratio)
    diagonal, residual, excess = np.empty(m), np.empty(m), np.empty(m)
    for j in range(m):
        wanted = target(columns, j, epsilon, ratio)
        residual[j] = wanted - columns.mass[j]
        excess[j] = ratio * damping * columns.mass[j] + (ratio + RIDGE * error + LEAST_RIDGE) * wanted
        diagonal[j] = excess[j] + damping * columns.mass[j]
    factor = factorise(cells, rows, damping, excess, order)
    return conjugate_gradients(
        cells, rows, diagonal, damping, factor, residual, FORCING * min(1.0, math.sqrt(error)), x
    )


@inner()
def conjugate_gradients(
    cells: Any, rows: Any, diagonal: Any, damping: float, factor: Any, residual: Any, share: float, x: Any
) -> int:  # fmt: skip
    """Write the solution for the right side `residual`, which is overwritten by what is left, at most this share."""
    m = x.shape[0]
    product, better, before, size = np.empty(m), np.empty(m), 0.0, 0.0
    precondition(factor, residual, better)
    direction = better.copy()
    for j in range(m):
        x[j] = 0.0
        before += residual[j] * direction[j]
        size += abs(residual[j])
    enough = share * size
    for products in range(PRODUCTS):
        apply_curvature(cells, rows, diagonal, damping, direction, product)
        along, after, size = 0.0, 0.0, 0.0
        for j in range(m):
            along += direction[j] * product[j]
        if not (along > 0 and before > 0):
            return products
        for j in range(m):
            x[j] += before / along * direction[j]
            residual[j] -= before / along * product[j]
            size += abs(residual[j])
        if size <= enough:
            return products
        precondition(factor, residual, better)
        for j in range(m):
            after += better[j] * residual[j]
        for j in range(m):
            direction[j] = better[j] + after / before * direction[j]
        before = after
    return PRODUCTS


@spliced
def search_along(cells: Any, rows: Any, columns: Any, epsilon: float, ratio: float, x: Any, derivative: float) -> None:
    """Move g along x until at most the share LEFT of the derivative is left."""
    start = columns.potential.copy()
    low, high, length = 0.0, np.inf, 1.0
    for _ in range(SEARCHES):
        for j in range(x.shape[0]):
            columns.potential[j] = start[j] + epsilon * length * x[j]
        evaluate(cells, rows, columns, epsilon, ratio)
        after = derivative_along(columns, epsilon, ratio, x)
        if not after >= -LEFT * derivative:
            high = length
            zero_of_secant = derivative / (derivative - after) if after < 0 else 0.0
            length = low + (high - low) * min(max(zero_of_secant, 0.1), 0.5)
        elif after > LEFT * derivative and high == np.inf and length < 2.0**DOUBLINGS:
            low, length = length, 2 * length
        else:
            break


@spliced
def steps_on_cells(
    counter: Any, cells: Any, rows: Any, columns: Any, epsilon: float, ratio: float, tolerance: float, most: int
) -> int:
    """Run Newton's method on the cells, from g; return the number of steps. The last update of g is exact."""
    m = columns.weights.shape[0]
    x, error, enough, steps = np.empty(m), np.inf, tolerance, 0
    order, is_first = order_of_elimination(cells, m), True
    while True:
        for update in range(UPDATES + 1):
            error = evaluate(cells, rows, columns, epsilon, ratio)
            if is_first:
                enough, is_first = max(tolerance, GAIN * error), False
            if update < UPDATES or error <= enough or steps == STEPS:
                update_columns(columns, epsilon, ratio)
            if error <= enough:
                return steps
        if steps == most or is_stopped(counter, error, np.nan):
            return steps
        find_step(cells, rows, columns, order, epsilon, ratio, error, x)
        derivative = derivative_along(columns, epsilon, ratio, x)
        if not derivative > 0:
            return steps
        search_along(cells, rows, columns, epsilon, ratio, x, derivative)
        steps += 1


@spliced
def support_of(places: Any, n: int) -> Cells:
    """Return the cells (2, count) of an exact plan, sorted by rows, without costs."""
    starts, columns = np.zeros(n + 1, np.int64), np.empty(places.shape[1], np.int32)
    for e in range(places.shape[1]):
        starts[places[0, e] + 1] += 1
    for i in range(n):
        starts[i + 1] += starts[i]
    at = starts[:n].copy()
    for e in range(places.shape[1]):
        columns[at[places[0, e]]] = places[1, e]
        at[places[0, e]] += 1
    return Cells(starts, columns, np.empty(0), np.empty(0))


@spliced
def solve_stage(
    counter: Any, pairs: Any, rows: Any, columns: Any, epsilon: float, ratio: float, tolerance: float, settled: float,
    most: int, support: Any, densest: float,
) -> tuple[float, int]:  # fmt: skip
    """Run rounds at one epsilon; return the error and the number of steps. f is then the exact update from g.

    A stage ends at once if more than the share `densest` of the pairs are cells.
    """
    steps, cells, error = 0, support, 1.0
    n, m = rows.weights.shape[0], columns.weights.shape[0]
    while True:
        cut = max(tolerance, CUT * GAIN * error) / (n + m)
        cells = cells_of(pairs, rows, columns, epsilon, ratio, cut, cells)
        if steps < most and find_lost(pairs, rows, columns, epsilon, ratio) > 0:
            cells = cells_of(pairs, rows, columns, epsilon, ratio, cut, cells)
        error = column_error(columns, epsilon, ratio)
        if cells.columns.shape[0] > densest * n * m:
            return error, steps
        is_settled = settled == np.inf or largest_change(columns, epsilon, ratio) <= settled
        if steps >= most or is_stopped(counter, error, np.nan) or (error <= tolerance and is_settled):
            return error, steps
        more = steps_on_cells(counter, cells, rows, columns, epsilon, ratio, AIM * tolerance, min(STEPS, most - steps))
        steps += max(1, more)


@compiled(seconds=8)
def newton_problems(counter: Any, posed: Any, limits: Any, answers: Any) -> None:
    """Solve problem k = (p[k], q[k], costs of owner[k], epsilon[k]) from g[k]; write the potentials to f[k] and g[k].

        posed       p (B, n) and q (B, m), weights, or shares of the mass in balanced problems, where rho is infinite;
                    the fields of `Pairs`, the matrix with a first axis of matrices; owner (B,); epsilon (B,); rho; and
                    rows and columns of the cells of exact plans whose potentials are in g, (B, 2, cells), or (B, 2, 0)
        limits      tolerance, settled and the most steps
        answers     f (B, n); g (B, m); outcome (B, 2), the error of g, infinite without a start, which becomes the
                    error and the number of steps

    All in float64.
    """
    p, q, costs, owner, epsilon, rho, plans = posed
    tolerance, settled, most = limits
    f, g, outcome = answers
    while True:
        k = next_task(counter)
        if k >= p.shape[0]:
            return
        pairs, steps = Pairs(costs[0][owner[k]], costs[1], costs[2], costs[3]), 0
        rows, columns, support = side_of(p[k], f[k]), side_of(q[k], g[k]), support_of(plans[k], p.shape[1])
        first, coarse, densest = 0, TOLERANCE_FROM_ZERO, 1.0
        if plans.shape[2] > 0:
            first, coarse, densest = COARSER_STAGES, TOLERANCE_FROM_EXACT, DENSE
        if not outcome[k, ERROR] < np.inf:  # a start of zeros: potentials are at most of the size of rho
            while epsilon[k] * COARSER ** (first + 1) <= FIRST_EPSILON * rho < np.inf:
                first += 1
        for stage in range(first, -1, -1):
            width, is_last = epsilon[k] * COARSER**stage, stage == 0
            outcome[k, ERROR], more = solve_stage(
                counter, pairs, rows, columns, width, width / rho, tolerance if is_last else coarse,
                settled if is_last else np.inf, most - steps, support, 1.0 if is_last else densest,
            )  # fmt: skip
            steps += more
        outcome[k, ITERATIONS] = steps
