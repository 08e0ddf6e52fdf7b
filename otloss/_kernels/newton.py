"""Newton's method on the dual of entropic problems on a CPU, on the few cells of the plan that hold mass.

With the shares S of the rows of the plan, `P_ij = r_i S_ij`, f an exact update from g, and b = g / epsilon, the dual as
a function of b has the gradient `t - c` and the curvature

    H = diag(c + s t) - k S^T diag(r) S        c = P^T 1,  s = epsilon / rho,  k = 1 / (1 + s)

where the columns should hold t: q in balanced problems (s = 0, r = p), `q exp(-s b)` in unbalanced ones. A step is
solved by conjugate gradients, whose product with H is one pass over the cells, and shortened or lengthened until at
most half of the first derivative of the dual along it is left.

    round       exact updates of f over all pairs, which give the error, and the cells that hold more than a small share
                of their row or column; then STEPS steps on these cells
    stage       exact potentials are a corner of the set of optimal ones, those of an entropic problem its centre: from
                an exact start the rounds begin at a larger epsilon. The cells of the exact plan always take part, so
                that the problem on the cells has a solution.

Source: X. Tang et al., Accelerating Sinkhorn Algorithm with Sparse Newton Iterations, arXiv 2401.12253.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from otloss._kernels._compile import compiled, exp64, inner, largest
from otloss._kernels._threads import next_task
from otloss._kernels.sinkhorn_columns import ERROR, ITERATIONS

STAGES, STAGE_FACTOR, STAGE_TOLERANCE = 1, 4.0, 1e-2
STEPS, UPDATES = 6, 1  # of a round, and exact updates of g on the cells before each step
GAIN = 1e-2  # factor of the error that ends a round
RIDGE, LEAST_RIDGE = 0.02, 1e-13  # added to the curvature, the former times the error: shortens steps of weak cells
PRODUCTS, FORCING = 150, 0.3  # with the curvature in a step, and the residual that ends it
LARGEST_UPDATE = 50.0  # of g / epsilon
LEFT, DOUBLINGS, SEARCHES = 0.5, 4, 40  # of a search along a step: share of the first derivative, and most trials
ROUNDING = 1e-14


class Cells(NamedTuple):
    """The cells of row i are those from starts[i] to starts[i + 1]. `shares`, of the row, are written by `evaluate`."""

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


@inner()
def side_of(weights: Any, potential: Any) -> Side:
    logs = np.empty(weights.shape[0])
    for j in range(weights.shape[0]):
        logs[j] = math.log(weights[j]) if weights[j] > 0 else -np.inf
    return Side(weights, logs, potential, np.zeros(weights.shape[0]))


@inner()
def target(side: Any, j: int, epsilon: float, ratio: float) -> float:
    """What a row or column should hold."""
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
def update_columns(columns: Any, epsilon: float, ratio: float) -> float:
    """Exact updates of g from the masses of the columns; returns the largest change of g / epsilon."""
    farthest = 0.0
    for j in range(columns.weights.shape[0]):
        wanted, mass = target(columns, j, epsilon, ratio), columns.mass[j]
        if wanted > 0:
            change = math.log(wanted / mass) / (1 + ratio) if mass > 0 else LARGEST_UPDATE
            change = min(max(change, -LARGEST_UPDATE), LARGEST_UPDATE)
            columns.potential[j] += epsilon * change
            farthest = max(farthest, abs(change))
    return farthest


@inner()
def rows_of_block(
    cost: Any, first: int, rows: Any, columns: Any, epsilon: float, ratio: float, cut: float, before: Any
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Exact updates of f in the rows of a block, over all pairs; adds to the masses of the columns.

    Returns the numbers of cells of the rows, their columns and costs: those that hold more than a share `cut` of their
    row or column, and those of `before`.
    """
    count, m = cost.shape
    inverse = 1 / epsilon
    shifted, least, scores, is_kept = np.empty(m), np.empty(m), np.empty(m), np.zeros(m, np.bool_)
    for j in range(m):
        shifted[j] = columns.potential[j] * inverse + columns.logs[j]
        least[j] = cut * target(columns, j, epsilon, ratio)
    space = min(count * m, 16 * (count + m) + m)
    places, prices, sizes, at = np.empty(space, np.int32), np.empty(space), np.empty(count, np.int64), 0
    for i in range(count):
        row = cost[i]
        for j in range(m):
            scores[j] = shifted[j] - row[j] * inverse
        turn_into_shares(scores, m, rows, first + i, epsilon, ratio)
        mass = rows.mass[first + i]
        for j in range(m):
            columns.mass[j] += mass * scores[j]
        if at + m > space:
            space = max(2 * space, at + m)
            more_places, more_prices = np.empty(space, np.int32), np.empty(space)
            more_places[:at], more_prices[:at] = places[:at], prices[:at]
            places, prices = more_places, more_prices
        old = slice(before.starts[first + i], before.starts[first + i + 1])
        for j in before.columns[old]:
            is_kept[j] = True
        begin = at
        for j in range(m):
            if mass > 0 and (scores[j] > cut or mass * scores[j] > least[j] or is_kept[j]):
                places[at], prices[at] = j, row[j]
                at += 1
        sizes[i] = at - begin
        for j in before.columns[old]:
            is_kept[j] = False
    return sizes, places[:at].copy(), prices[:at].copy()


@inner()
def as_cells(sizes: Any, places: Any, prices: Any) -> Cells:
    starts = np.zeros(sizes.shape[0] + 1, np.int64)
    for i in range(sizes.shape[0]):
        starts[i + 1] = starts[i] + sizes[i]
    return Cells(starts, places, prices, np.empty(places.shape[0]))


@inner()
def evaluate(cells: Any, rows: Any, columns: Any, epsilon: float, ratio: float) -> float:
    """Exact updates of f on the cells, the shares, and the masses of rows and columns; returns the error."""
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
    """The derivative of the dual along a step x of g / epsilon."""
    total = 0.0
    for j in range(x.shape[0]):
        total += (target(columns, j, epsilon, ratio) - columns.mass[j]) * x[j]
    return total


@inner()
def find_step(cells: Any, rows: Any, columns: Any, epsilon: float, ratio: float, error: float, x: Any) -> None:
    """Write the step of g / epsilon to x, by conjugate gradients with the diagonal of the curvature."""
    m, damping = x.shape[0], 1 / (1 + ratio)
    diagonal, inverse, residual = np.empty(m), np.empty(m), np.empty(m)
    direction, product = np.empty(m), np.empty(m)
    size = 0.0
    for j in range(m):
        wanted = target(columns, j, epsilon, ratio)
        x[j], residual[j] = 0.0, wanted - columns.mass[j]
        size += abs(residual[j])
        diagonal[j] = columns.mass[j] + ratio * wanted + (RIDGE * error + LEAST_RIDGE) * columns.weights[j]
        inverse[j] = diagonal[j]
    for i in range(rows.mass.shape[0]):
        for e in range(cells.starts[i], cells.starts[i + 1]):
            inverse[cells.columns[e]] -= damping * rows.mass[i] * cells.shares[e] ** 2
    before = 0.0
    for j in range(m):
        inverse[j] = 1 / max(inverse[j], ROUNDING * diagonal[j]) if diagonal[j] > 0 else 0.0
        direction[j] = inverse[j] * residual[j]
        before += residual[j] * direction[j]
    enough = FORCING * min(1.0, math.sqrt(error)) * size
    for _ in range(PRODUCTS):
        apply_curvature(cells, rows, diagonal, damping, direction, product)
        along, after, size = 0.0, 0.0, 0.0
        for j in range(m):
            along += direction[j] * product[j]
        if not (along > 0 and before > 0):
            return
        for j in range(m):
            x[j] += before / along * direction[j]
            residual[j] -= before / along * product[j]
            size += abs(residual[j])
            after += inverse[j] * residual[j] ** 2
        if size <= enough:
            return
        for j in range(m):
            direction[j] = inverse[j] * residual[j] + after / before * direction[j]
        before = after


@inner()
def search_along(
    cells: Any, rows: Any, columns: Any, epsilon: float, ratio: float, x: Any, derivative: float
) -> float:  # fmt: skip
    """Move g along x until little of the derivative is left; return the error there."""
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
    cells: Any, rows: Any, columns: Any, epsilon: float, ratio: float, tolerance: float
) -> int:  # fmt: skip
    """Newton's method on the cells, from g; returns the number of steps."""
    x = np.empty(columns.weights.shape[0])
    error = evaluate(cells, rows, columns, epsilon, ratio)
    enough = max(tolerance, GAIN * error)
    for step in range(STEPS):
        for _ in range(UPDATES):
            update_columns(columns, epsilon, ratio)
            error = evaluate(cells, rows, columns, epsilon, ratio)
        find_step(cells, rows, columns, epsilon, ratio, error, x)
        derivative = derivative_along(columns, epsilon, ratio, x)
        if not derivative > 0:
            return step
        error = search_along(cells, rows, columns, epsilon, ratio, x, derivative)
        if error <= enough:
            return step + 1
    return STEPS


@inner()
def support_of(places: Any, n: int) -> Cells:
    """The cells (2, count) of an exact plan by rows, without costs."""
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
    cost: Any, rows: Any, columns: Any, epsilon: float, ratio: float, tolerance: float, settled: float, most: int,
    support: Any,
) -> tuple[float, int]:  # fmt: skip
    """Rounds at one epsilon; return the error, of f an exact update from g, and the number of steps."""
    steps, cells, is_closed, change = 0, support, False, np.inf
    cut = tolerance / (cost.shape[0] + cost.shape[1])
    while True:
        columns.mass[:] = 0.0
        cells = as_cells(*rows_of_block(cost, 0, rows, columns, epsilon, ratio, cut, cells))
        error = column_error(columns, epsilon, ratio)
        if steps >= most or (is_closed and error <= tolerance and change <= settled):
            return error, steps
        if error <= tolerance and not is_closed:
            change, is_closed = update_columns(columns, epsilon, ratio), True
            continue
        is_closed = False
        steps += max(1, steps_on_cells(cells, rows, columns, epsilon, ratio, 0.1 * tolerance))


@compiled(seconds=6)
def newton_problems(
    counter: Any, p: Any, q: Any, costs: Any, owner: Any, epsilon: Any, rho: float, f: Any, g: Any, plans: Any,
    tolerance: float, settled: float, most: int, outcome: Any,
) -> None:  # fmt: skip
    """Solve problem k = (p[k], q[k], costs[owner[k]], epsilon[k]) from g[k]; f[k] and g[k] get the potentials.

    p, q: (B, n), (B, m), shares of the mass in balanced problems, for which rho is infinite. costs: (matrices, n, m).
    plans: (B, 2, cells), rows and columns of the cells of exact plans whose potentials are in g, or (B, 2, 0).
    """
    while True:
        k = next_task(counter)
        if k >= p.shape[0]:
            return
        cost, ratio, steps = costs[owner[k]], epsilon[k] / rho, 0
        rows, columns, support = side_of(p[k], f[k]), side_of(q[k], g[k]), support_of(plans[k], p.shape[1])
        for stage in range(STAGES if plans.shape[2] else 0, 0, -1):
            larger = epsilon[k] * STAGE_FACTOR**stage
            _, more = solve_stage(
                cost, rows, columns, larger, larger / rho, STAGE_TOLERANCE, np.inf, most - steps, support
            )
            steps += more
        outcome[k, ERROR], more = solve_stage(
            cost, rows, columns, epsilon[k], ratio, tolerance, settled, most - steps, support
        )
        outcome[k, ITERATIONS] = steps + more
