"""Newton's method on the dual of entropic problems on a CPU, on the few cells of the plan that hold mass.

Let b = g / epsilon, and let f be the exact update from g. The plan is P_ij = r_i S_ij with the row sums r; the shares S
of each row sum to 1. The columns hold c = P^T 1 and should hold t. In balanced problems t = q and r = p. With a
marginal penalty rho, s = epsilon / rho and k = 1 / (1 + s), it is t = q exp(-s b); balanced problems have s = 0 and k =
1. As a function of b the dual has the gradient t - c, and its negative Hessian is

    H = diag(c + s t) - k S^T diag(r) S

    round       Exact updates of f over all pairs give the error, and the cells that hold more than a small share of
                their row or column. Steps on these cells follow.
    step        Conjugate gradients solve H x = t - c. A search along x then ends where at most half of the first
                derivative of the dual is left. Components that converge slowly are nearly constant on groups of columns
                that share rows. So the preconditioner has two parts: the diagonal of H, and H between groups with a
                dense factor.
    stage       Potentials of the exact problem are a corner of the set of its optimal potentials; those of an entropic
                problem lie near the centre of this set. From an exact start the rounds therefore begin at a larger
                epsilon. The cells of the exact plan always take part, so that the problem on the cells has a solution.

Costs are a matrix or belong to points. Of points only the pairs that count are visited (`softmin.select`).

Source: X. Tang et al., Accelerating Sinkhorn Algorithm with Sparse Newton Iterations, arXiv 2401.12253.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from otloss._kernels._compile import compiled, exp64, inner, largest
from otloss._kernels._threads import is_stopped, next_task
from otloss._kernels.sinkhorn_numbers import ERROR, ITERATIONS
from otloss._kernels.softmin import BLOCK, CHUNK, ROWS, distances_of, select

COARSER_STAGES, COARSER = 1, 4.0  # stages before the last; each has COARSER times the epsilon
TOLERANCE_FROM_EXACT, TOLERANCE_FROM_ZERO = 1e-2, 1e-4  # of these stages
FIRST_EPSILON = 0.05  # of the marginal penalty, at most, from a start of zeros
STEPS = 6  # of a round, at most
UPDATES = 2  # exact updates of both sides on the cells before each step
GAIN = 1e-2  # a round ends when the error has fallen by this factor
CUT = 1e-2  # error of the cells left out in a round, as a share of the error that the round aims at
RIDGE, LEAST_RIDGE = 0.02, 1e-13  # RIDGE error + LEAST_RIDGE, times q, is added to H; this shortens steps of weak cells
PRODUCTS, FORCING = 150, 0.3  # conjugate gradients: the most products with H, and the residual that ends them
DENSE = 0.05  # share of the pairs that hold cells, above which there are no coarser stages
GROUPS, COLUMNS_OF_GROUP = 256, 4  # the most groups, and the least mean number of columns of a group
FEWER = 0.8  # merging is given up if it leaves more than this share of the groups
LARGEST_UPDATE = 50.0  # of g / epsilon
LEFT, DOUBLINGS, SEARCHES = 0.5, 4, 40  # of a search: share of the first derivative that may be left, and most trials
RELATIVE_ROUNDING = 1e-14  # of potentials, and of pivots and diagonals of the equations
NO_MASS_LEFT = 1e-17  # share of its weight below which a column counts as empty
NEGLIGIBLE = 1e-17  # share of a row that may be left out of its sum


class Pairs(NamedTuple):
    """The costs: of a matrix (n, m), or of points. The other of the two is empty.

    x is (n, d), in an order in which neighbours follow each other. y is (d + 2, m): d coordinates, the number of the
    column, and the least mass of its cells, which `cells_of` writes.
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


class Groups(NamedTuple):
    """The group of each column, and H between groups as a lower triangle L with H = L L^T."""

    of: Any
    factor: Any


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


@inner()
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
                places[at], prices[at] = j, cost_of(pairs, i, j)
                at += 1
        starts[i + 1] = at
    return Cells(starts, places[: starts[n]].copy(), prices[: starts[n]].copy(), np.empty(starts[n]))


@inner()
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
def sums_by_group(cells: Any, i: int, of: Any, sums: Any, touched: Any) -> int:
    """Add the shares of row i by groups to `sums`, which holds zeros; write these groups and return their number."""
    count = 0
    for e in range(cells.starts[i], cells.starts[i + 1]):
        group = of[cells.columns[e]]
        if sums[group] == 0:
            touched[count] = group
            count += 1
        sums[group] += cells.shares[e] + 1e-300  # above zero, so that the group is not written twice
    return count


@inner()
def merged(cells: Any, rows: Any, of: Any, count: int) -> tuple[Any, int]:
    """Merge groups of columns; return the new group of each of `count` groups, and the number of new groups.

    First, a row merges all its groups that are not merged yet, if they are several and hold more than half of its mass.
    Then a group that is left joins the new group with the largest share of its heaviest row; without one it stays.
    """
    into, best, sums = np.full(count, -1), np.zeros(count), np.zeros(count)
    touched, made = np.empty(count, np.int64), 0
    for is_second in (False, True):
        for i in range(rows.mass.shape[0]):
            size = sums_by_group(cells, i, of, sums, touched)
            left, several, heaviest, home = 0.0, 0, 0.0, -1
            for a in touched[:size]:
                if into[a] < 0:
                    left += sums[a]
                    several += 1
                elif sums[a] > heaviest and best[a] == 0:
                    heaviest, home = sums[a], into[a]
            makes_one = not is_second and left > 0.5 and several > 1
            for a in touched[:size]:
                if makes_one and into[a] < 0:
                    into[a] = made
                elif is_second and home >= 0 and (into[a] < 0 or best[a] > 0) and rows.mass[i] * sums[a] > best[a]:
                    best[a], into[a] = rows.mass[i] * sums[a], home
                sums[a] = 0.0
            made += makes_one
    for a in range(count):
        if into[a] < 0:
            into[a] = made
            made += 1
    return into, made


@inner()
def group_columns(cells: Any, rows: Any, m: int) -> tuple[Any, int]:
    """Return the group of each column, and their number."""
    most = max(1, min(GROUPS, m // COLUMNS_OF_GROUP))
    of, count = np.arange(m), m
    while count > most:
        into, fewer = merged(cells, rows, of, count)
        if fewer > FEWER * count:
            for a in range(count):
                into[a] = a * most // count
            fewer = most
        for j in range(m):
            of[j] = into[of[j]]
        count = fewer
    return of, count


@inner(fastmath={"contract", "nsz", "reassoc"})
def factorise(a: Any) -> None:
    """Write Cholesky's factor to the lower triangle. A row that is singular up to rounding gets 0 in solutions."""
    for i in range(a.shape[0]):
        for j in range(i):
            total = a[i, j]
            for k in range(j):
                total -= a[i, k] * a[j, k]
            a[i, j] = total / a[j, j]
        total = a[i, i]
        for k in range(i):
            total -= a[i, k] * a[i, k]
        a[i, i] = math.sqrt(total) if total > RELATIVE_ROUNDING * a[i, i] else np.inf


@inner(fastmath={"contract", "nsz", "reassoc"})
def solve_factorised(a: Any, x: Any) -> None:
    for i in range(a.shape[0]):
        total = x[i]
        for k in range(i):
            total -= a[i, k] * x[k]
        x[i] = total / a[i, i]
    for i in range(a.shape[0] - 1, -1, -1):
        x[i] /= a[i, i]
        for k in range(i):
            x[k] -= a[i, k] * x[i]


@inner(fastmath={"contract", "nsz", "reassoc"})
def subtract_square(factor: Any, touched: Any, size: int, sums: Any, mass: float) -> None:
    """Subtract mass sums sums^T from the lower triangle; sums are 0 but in the `size` groups that are touched."""
    is_dense = 4 * size > sums.shape[0]
    for a in touched[:size]:
        weight, row = mass * sums[a], factor[a]
        if is_dense:
            for b in range(a + 1):
                row[b] -= weight * sums[b]
        else:
            for b in touched[:size]:
                row[b] -= weight * sums[b]


@inner()
def between_groups(cells: Any, rows: Any, diagonal: Any, damping: float, of: Any, count: int) -> Groups:
    factor, sums, touched = np.zeros((count, count)), np.zeros(count), np.empty(count, np.int64)
    for j in range(of.shape[0]):
        factor[of[j], of[j]] += diagonal[j]
    for i in range(rows.mass.shape[0]):
        size = sums_by_group(cells, i, of, sums, touched)
        subtract_square(factor, touched, size, sums, damping * rows.mass[i])
        for a in touched[:size]:
            sums[a] = 0.0
    factorise(factor)
    return Groups(of, factor)


@inner()
def precondition(groups: Any, inverse: Any, residual: Any, sums: Any, out: Any) -> None:
    sums[:] = 0.0
    for j in range(residual.shape[0]):
        sums[groups.of[j]] += residual[j]
    solve_factorised(groups.factor, sums)
    for j in range(residual.shape[0]):
        out[j] = inverse[j] * residual[j] + sums[groups.of[j]]


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


@inner()
def find_step(
    cells: Any, rows: Any, columns: Any, of: Any, count: int, epsilon: float, ratio: float, error: float, x: Any
) -> int:  # fmt: skip
    """Write the step of g / epsilon to x, by conjugate gradients; return the number of products with H."""
    m, damping = x.shape[0], 1 / (1 + ratio)
    diagonal, inverse, residual = np.empty(m), np.empty(m), np.empty(m)
    direction, product, better, sums = np.empty(m), np.empty(m), np.empty(m), np.empty(count)
    size = 0.0
    for j in range(m):
        wanted = target(columns, j, epsilon, ratio)
        x[j], residual[j] = 0.0, wanted - columns.mass[j]
        size += abs(residual[j])
        diagonal[j] = columns.mass[j] + ratio * wanted + (RIDGE * error + LEAST_RIDGE) * wanted
        inverse[j] = diagonal[j]
    groups = between_groups(cells, rows, diagonal, damping, of, count)
    for i in range(rows.mass.shape[0]):
        for e in range(cells.starts[i], cells.starts[i + 1]):
            inverse[cells.columns[e]] -= damping * rows.mass[i] * cells.shares[e] ** 2
    for j in range(m):
        inverse[j] = 1 / max(inverse[j], RELATIVE_ROUNDING * diagonal[j]) if diagonal[j] > 0 else 0.0
    precondition(groups, inverse, residual, sums, direction)
    before = 0.0
    for j in range(m):
        before += residual[j] * direction[j]
    enough = FORCING * min(1.0, math.sqrt(error)) * size
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
        precondition(groups, inverse, residual, sums, better)
        for j in range(m):
            after += better[j] * residual[j]
        for j in range(m):
            direction[j] = better[j] + after / before * direction[j]
        before = after
    return PRODUCTS


@inner()
def search_along(
    cells: Any, rows: Any, columns: Any, epsilon: float, ratio: float, x: Any, derivative: float
) -> float:  # fmt: skip
    """Move g along x until at most the share LEFT of the derivative is left; return the error there."""
    start = columns.potential.copy()
    low, high, length, error = 0.0, np.inf, 1.0, np.inf
    for _ in range(SEARCHES):
        for j in range(x.shape[0]):
            columns.potential[j] = start[j] + epsilon * length * x[j]
        error = evaluate(cells, rows, columns, epsilon, ratio)
        after = derivative_along(columns, epsilon, ratio, x)
        if not after >= -LEFT * derivative:
            high = length
            zero_of_secant = derivative / (derivative - after) if after < 0 else 0.0
            length = low + (high - low) * min(max(zero_of_secant, 0.1), 0.5)
        elif after > LEFT * derivative and high == np.inf and length < 2.0**DOUBLINGS:
            low, length = length, 2 * length
        else:
            break
    return error


@inner()
def steps_on_cells(
    counter: Any, cells: Any, rows: Any, columns: Any, epsilon: float, ratio: float, tolerance: float, most: int
) -> int:
    """Run Newton's method on the cells, from g; return the number of steps. The last update of g is exact."""
    m = columns.weights.shape[0]
    x, error, enough, steps = np.empty(m), np.inf, tolerance, 0
    of, count = np.zeros(0, np.int64), 0
    while True:
        for update in range(UPDATES + 1):
            error = evaluate(cells, rows, columns, epsilon, ratio)
            if count == 0:
                enough = max(tolerance, GAIN * error)
                of, count = group_columns(cells, rows, m)
            if update < UPDATES or error <= enough or steps == STEPS:
                update_columns(columns, epsilon, ratio)
            if error <= enough:
                return steps
        if steps == most or is_stopped(counter, error, np.nan):
            return steps
        find_step(cells, rows, columns, of, count, epsilon, ratio, error, x)
        derivative = derivative_along(columns, epsilon, ratio, x)
        if not derivative > 0:
            return steps
        search_along(cells, rows, columns, epsilon, ratio, x, derivative)
        steps += 1


@inner()
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


@inner()
def solve_stage(
    counter: Any, pairs: Any, rows: Any, columns: Any, epsilon: float, ratio: float, tolerance: float, settled: float,
    most: int, support: Any,
) -> tuple[float, int]:  # fmt: skip
    """Run rounds at one epsilon; return the error and the number of steps. f is then the exact update from g."""
    steps, cells, error = 0, support, 1.0
    size = rows.weights.shape[0] + columns.weights.shape[0]
    while True:
        cut = max(tolerance, CUT * GAIN * error) / size
        cells = cells_of(pairs, rows, columns, epsilon, ratio, cut, cells)
        if steps < most and find_lost(pairs, rows, columns, epsilon, ratio) > 0:
            cells = cells_of(pairs, rows, columns, epsilon, ratio, cut, cells)
        error = column_error(columns, epsilon, ratio)
        is_settled = settled == np.inf or largest_change(columns, epsilon, ratio) <= settled
        if steps >= most or is_stopped(counter, error, np.nan) or (error <= tolerance and is_settled):
            return error, steps
        more = steps_on_cells(counter, cells, rows, columns, epsilon, ratio, 0.1 * tolerance, min(STEPS, most - steps))
        steps += max(1, more)


@inner()
def is_dense(
    pairs: Any, rows: Any, columns: Any, epsilon: float, ratio: float, tolerance: float, support: Any
) -> bool:  # fmt: skip
    """Return whether the plan between points has so many cells that a stage at a larger epsilon does not pay."""
    n, m = rows.weights.shape[0], columns.weights.shape[0]
    if pairs.x.shape[0] == 0 or support.columns.shape[0] == 0:
        return False
    cut = max(tolerance, CUT * GAIN) / (n + m)
    return cells_of(pairs, rows, columns, epsilon, ratio, cut, support).columns.shape[0] > DENSE * n * m


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
        first, coarse = (COARSER_STAGES, TOLERANCE_FROM_EXACT) if plans.shape[2] else (0, TOLERANCE_FROM_ZERO)
        if not outcome[k, ERROR] < np.inf:  # a start of zeros: potentials are at most of the size of rho
            while epsilon[k] * COARSER ** (first + 1) <= FIRST_EPSILON * rho < np.inf:
                first += 1
        if first > 0 and is_dense(pairs, rows, columns, epsilon[k], epsilon[k] / rho, tolerance, support):
            first = 0
        for stage in range(first, -1, -1):
            width, is_last = epsilon[k] * COARSER**stage, stage == 0
            outcome[k, ERROR], more = solve_stage(
                counter, pairs, rows, columns, width, width / rho, tolerance if is_last else coarse,
                settled if is_last else np.inf, most - steps, support,
            )  # fmt: skip
            steps += more
        outcome[k, ITERATIONS] = steps
