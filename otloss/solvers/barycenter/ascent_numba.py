"""Newton's method on the dual of entropic barycenters on a CPU, on the few cells of the plans that hold mass.

Between the bins of the barycenter and histogram k let b_k = log u_k. The rows of plan k, the bins of the histogram,
hold p_k; its columns hold c_k(b_k), which should be one vector for all k. The dual is concave in all b_k where
sum_k w_k b_k = 0, and has the gradients -w_k c_k. The histograms are problems of `newton` side by side: their rows and
columns follow each other, rows hold the masses w_k p_k, and columns should hold w_k c with the mean c = sum_k w_k c_k.

    round       Plans over all pairs give the error, and the cells that hold more than a small share of their row or
                column. Steps on these cells follow.
    step        Conjugate gradients solve H_k x_k = c - c_k where sum_k w_k x_k = 0: the c that belongs to x is a
                multiplier. An approximate factor of all H_k is the preconditioner, the diagonal between dense plans. A
                search along x follows.
    update      log c = sum_k w_k log c_k, and b_k grows by log c - log c_k: the plain iteration.
    stage       Epsilon falls by steps. Potentials are nearly a linear function of epsilon where it is small, so each
                stage starts on the line through the last two.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from otloss._numba.compile import addresses_of, call_at, compiled, inner, spliced
from otloss._numba.tasks import is_stopped, next_task
from otloss.solvers.entropic.interface import ERROR, ITERATIONS
from otloss.solvers.entropic.newton_kernels.cells_numba import Cells, Side, column_error, evaluate
from otloss.solvers.entropic.newton_kernels.equations_numba import (
    Factor,
    build_conjugate_gradients,
    elimination_order,
    factorise,
    precondition,
)
from otloss.solvers.entropic.newton_kernels.newton_numba import derivative_along, search_along
from otloss.solvers.entropic.newton_kernels.numbers import NEWTON


class AscentNumbers(NamedTuple):
    """The numbers of the method that `NewtonNumbers` lacks.

    Attributes:
        stage_factor: epsilon of a stage over epsilon of the stage after it.
        first_epsilon: epsilon of the first stage over the largest cost, at most.
        tolerance_of_stage: the tolerance of the stages before the last.
        max_cells_of_row: with more cells in a row, the diagonal of H takes the place of its factor.
        energy: conjugate gradients end at this share of the first energy of the residual.
        largest_change: the largest change of a potential over epsilon that is a step as it is.
        largest_move: the cells tell the masses as long as no potential over epsilon has moved by more.
        tiny: added to what may be zero.
    """

    stage_factor: float = 4.0
    first_epsilon: float = 0.05
    tolerance_of_stage: float = 1e-3
    max_cells_of_row: int = 40
    energy: float = 0.01
    largest_change: float = 10.0
    largest_move: float = 4.0
    tiny: float = 1e-300


ASCENT = AscentNumbers()


class JointFactor(NamedTuple):
    """The preconditioner of all H_k, the weights of the histograms, and a vector of scratch."""

    factor: Any
    weights: Any
    scratch: Any


class AscentProblems(NamedTuple):
    """The problems of one call, in float64.

    Attributes:
        p: (B, K, m), of mass 1.
        weights: (B, K), above 0.
        costs: (m, n), whose columns are the bins of the barycenter.
        epsilon: of all problems.
    """

    p: Any
    weights: Any
    costs: Any
    epsilon: float


class AscentLimits(NamedTuple):
    """Where the steps end."""

    tolerance: float
    max_steps: int


class AscentResults(NamedTuple):
    """What the kernel writes.

    Attributes:
        log_u: (B, K, n)
        log_a: (B, n)
        outcome: (B, 2), the error and the number of steps.
    """

    log_u: Any
    log_a: Any
    outcome: Any


def allocate_results(problems: int, histograms: int, n: int) -> AscentResults:
    return AscentResults(np.zeros((problems, histograms, n)), np.zeros((problems, n)), np.zeros((problems, 2)))


@inner()
def update(columns: Any, weights: Any, epsilon: float, log_a: Any) -> None:
    """Update the potentials by the plain iteration, and write log c."""
    n = log_a.shape[0]
    for j in range(n):
        log_a[j] = 0.0
        for k in range(weights.shape[0]):
            log_a[j] += weights[k] * math.log(max(columns.mass[k * n + j] / weights[k], ASCENT.tiny))
        for k in range(weights.shape[0]):
            change = log_a[j] - math.log(max(columns.mass[k * n + j] / weights[k], ASCENT.tiny))
            columns.potential[k * n + j] += epsilon * min(max(change, -NEWTON.largest_update), NEWTON.largest_update)
    remove_mean(weights, columns.potential)  # of changes that were cut off, and rounding


@inner(allocates=True)
def all_cells(matrix: Any, count: int) -> Cells:
    m, n = matrix.shape
    rows = count * m
    starts, places, costs = np.empty(rows + 1, np.int64), np.empty(rows * n, np.int32), np.empty(rows * n)
    starts[rows] = rows * n
    for row in range(rows):
        starts[row] = row * n
        for j in range(n):
            places[row * n + j], costs[row * n + j] = row // m * n + j, matrix[row % m, j]
    return Cells(starts, places, costs, np.empty(rows * n))


@inner(allocates=True)
def cells_that_count(all_pairs: Any, rows: Any, columns: Any, cut: float) -> Cells:
    """Return the cells that hold more than the share `cut` of their row or column."""
    count, starts = 0, np.zeros_like(all_pairs.starts)
    chosen = np.empty(all_pairs.shares.shape[0], np.int32)
    for i in range(rows.mass.shape[0]):
        mass = rows.mass[i]
        for e in range(all_pairs.starts[i], all_pairs.starts[i + 1]):
            chosen[count] = e
            share = all_pairs.shares[e]
            count += mass > 0 and (share > cut or mass * share > cut * columns.weights[all_pairs.columns[e]])
        starts[i + 1] = count
    chosen = chosen[:count]
    return Cells(starts, all_pairs.columns[chosen], all_pairs.costs[chosen], np.empty(count))


@inner(allocates=True)
def joint_factor(cells: Any, rows: Any, diagonal: Any, excess: Any) -> Any:
    """Return an approximate factor of all H_k, or their diagonals, where there are too many cells."""
    if cells.columns.shape[0] <= ASCENT.max_cells_of_row * rows.mass.shape[0]:
        order = elimination_order(cells, diagonal.shape[0])
        return factorise(cells, rows, 1.0, excess, order, NEWTON.shares_of_octave)
    count = diagonal.shape[0]
    order, places = np.empty(count, np.int64), np.zeros(count + 1, np.int64)
    for j in range(count):
        order[j], excess[j] = j, diagonal[j]
    for i in range(rows.mass.shape[0]):
        for e in range(cells.starts[i], cells.starts[i + 1]):
            excess[cells.columns[e]] -= rows.mass[i] * cells.shares[e] * cells.shares[e]
    for j in range(count):
        excess[j] = max(excess[j], NEWTON.smallest_ridge * diagonal[j])
    return Factor(order, excess, places, cells.columns[:0], cells.shares[:0])


@inner()
def precondition_jointly(joint: Any, residual: Any, out: Any) -> None:
    """Write an approximate solution with sum_k w_k x_k = 0; with the diagonals it is exact."""
    factor, weights, scratch = joint
    count, n = weights.shape[0], residual.shape[0] // weights.shape[0]
    is_diagonal = factor.columns.shape[0] == 0
    for j in range(n):
        multiplier, total = 0.0, ASCENT.tiny
        for k in range(count):
            share = weights[k] / factor.pivots[k * n + j] if is_diagonal else 1.0
            multiplier += share * residual[k * n + j]
            total += share * weights[k]
        for k in range(count):
            scratch[k * n + j] = residual[k * n + j] - weights[k] * multiplier / total
    precondition(factor, scratch, out)
    if not is_diagonal:
        remove_mean(weights, out)


@inner()
def copy_to(x: Any, out: Any) -> None:
    """Copy x. With an assignment to a slice numba compiles the texts of its errors, for seconds."""
    for j in range(x.shape[0]):
        out[j] = x[j]


@inner()
def remove_mean(weights: Any, x: Any) -> None:
    """Subtract sum_k w_k x_k from all x_k."""
    n = x.shape[0] // weights.shape[0]
    for j in range(n):
        mean = 0.0
        for k in range(weights.shape[0]):
            mean += weights[k] * x[k * n + j]
        for k in range(weights.shape[0]):
            x[k * n + j] -= mean


solve_joint_equations = build_conjugate_gradients(precondition_jointly)


@compiled(allocates=True)
def find_joint_step(
    counter: Any, cells: Any, rows: Any, columns: Any, weights: Any, error: float, x: Any
) -> None:  # fmt: skip
    """Write the step of all potentials over epsilon, with sum_k w_k x_k = 0.

    `barycenter_problems` calls it by its address, so that no kernel is large: the time of a compilation grows with it.
    """
    size = x.shape[0]
    diagonal, residual, excess = np.empty(size), np.empty(size), np.empty(size)
    for j in range(size):
        wanted = columns.weights[j]
        residual[j] = wanted - columns.mass[j]
        excess[j] = (NEWTON.ridge * error + NEWTON.smallest_ridge) * wanted + ASCENT.tiny
        diagonal[j] = columns.mass[j] + excess[j]
    joint = JointFactor(joint_factor(cells, rows, diagonal, excess), weights, np.empty(size))
    solve_joint_equations(counter, cells, rows, diagonal, 1.0, joint, residual, ASCENT.energy, error, x)
    for j in range(size):  # a linear model of exponentials says nothing of larger changes
        if abs(x[j]) > ASCENT.largest_change:
            x[j] = math.copysign(ASCENT.largest_change + math.log1p(abs(x[j]) - ASCENT.largest_change), x[j])
    remove_mean(weights, x)


@inner()
def find_targets(cells: Any, rows: Any, columns: Any, weights: Any, epsilon: float) -> float:
    """Evaluate plans on the cells; write what the columns should hold, the mean; return the error."""
    evaluate(cells, rows, columns, epsilon)
    n = columns.mass.shape[0] // weights.shape[0]
    for j in range(n):
        mean = 0.0
        for k in range(weights.shape[0]):
            mean += columns.mass[k * n + j]
        for k in range(weights.shape[0]):
            columns.weights[k * n + j] = mean * weights[k]
    return column_error(columns)


@inner(allocates=True)
def steps_on_cells(
    counter: Any, joint_step: Any, searched: Any, cells: Any, rows: Any, columns: Any, weights: Any, epsilon: float,
    tolerance: float, max_steps: int, updates: int, log_a: Any,
) -> int:  # fmt: skip
    """Run Newton's method on the cells, with searches over the cells `searched`; return the number of steps."""
    x, moved, steps = np.empty(columns.mass.shape[0]), 0.0, 0
    while True:
        for _ in range(updates):
            find_targets(cells, rows, columns, weights, epsilon)
            update(columns, weights, epsilon, log_a)
        error = find_targets(cells, rows, columns, weights, epsilon)
        if error <= tolerance or is_stopped(counter, error, np.nan):
            return steps
        call_at(joint_step, (counter, cells, rows, columns, weights, error, x))
        derivative = derivative_along(columns, x)
        if not derivative > 0:
            return steps
        moved += np.abs(x).max()
        search_along(searched, rows, columns, epsilon, x, derivative)
        steps += 1
        if moved > ASCENT.largest_move or steps == max_steps:
            return steps


@inner(allocates=True)
def solve_stage(
    counter: Any, joint_step: Any, all_pairs: Any, rows: Any, columns: Any, weights: Any, epsilon: float,
    tolerance: float, max_steps: int, log_a: Any,
) -> tuple[float, int]:  # fmt: skip
    """Run rounds at one epsilon, then an update; return the error before it and the number of steps.

    Where the cells of a round do not tell what a step does, the dual over all pairs falls. The step is then repeated
    with a search over all pairs.
    """
    size, steps = (rows.mass.shape[0] + columns.mass.shape[0]) // weights.shape[0], 0
    previous_potential, previous_dual, is_careful = columns.potential.copy(), -np.inf, False
    while True:
        error = find_targets(all_pairs, rows, columns, weights, epsilon)
        dual = (rows.mass * rows.potential).sum()
        if dual < previous_dual - NEWTON.relative_rounding * abs(previous_dual) and not is_careful:
            copy_to(previous_potential, columns.potential)
            is_careful = True
            continue
        if error <= tolerance or steps >= max_steps or is_stopped(counter, error, np.nan):
            update(columns, weights, epsilon, log_a)
            return error, steps
        copy_to(columns.potential, previous_potential)
        previous_dual = dual
        cut = max(tolerance, NEWTON.omitted_share * NEWTON.error_reduction * error) / size
        cells = cells_that_count(all_pairs, rows, columns, cut)
        goal = max(NEWTON.error_share * tolerance, NEWTON.error_reduction * error)
        searched, limit, updates = cells, min(NEWTON.max_steps_of_round, max_steps - steps), NEWTON.updates
        if is_careful:
            searched, limit, updates = all_pairs, 1, 0
        done = steps_on_cells(
            counter, joint_step, searched, cells, rows, columns, weights, epsilon, goal, limit, updates, log_a
        )  # fmt: skip
        steps += max(1, done)
        is_careful = False


@spliced
def solve_problem(
    counter: Any, joint_step: Any, all_pairs: Any, problems: Any, limits: Any, results: Any, b: int, stages: int
) -> None:
    """Solve problem b from potentials of zeros, in so many stages before the last, and write its results."""
    p, weights, epsilon = problems.p[b], problems.weights[b], problems.epsilon
    count, m, n = p.shape[0], p.shape[1], problems.costs.shape[1]
    masses = np.empty(count * m)
    for k in range(count):
        for i in range(m):
            masses[k * m + i] = p[k, i] * weights[k]
    rows = Side(masses, np.zeros(count * m), np.zeros(count * m), np.zeros(count * m), np.inf)
    columns = Side(np.full(count * n, 1.0 / n), np.zeros(count * n), np.zeros(count * n), np.zeros(count * n), np.inf)
    previous, latest, steps = columns.potential.copy(), np.zeros(count * n), 0
    for stage in range(stages, -1, -1):
        if stage < stages - 1:  # two stages have ended: the line through them
            for j in range(count * n):
                columns.potential[j] += (latest[j] - previous[j]) / ASCENT.stage_factor
        error, done = solve_stage(
            counter, joint_step, all_pairs, rows, columns, weights, epsilon * ASCENT.stage_factor**stage,
            ASCENT.tolerance_of_stage if stage > 0 else limits.tolerance, limits.max_steps - steps, results.log_a[b],
        )  # fmt: skip
        steps += done
        copy_to(latest, previous)
        copy_to(columns.potential, latest)
    for k in range(count):
        for j in range(n):
            results.log_u[b, k, j] = columns.potential[k * n + j] / epsilon
    results.outcome[b, ERROR], results.outcome[b, ITERATIONS] = error, steps


@compiled(allocates=True)
def barycenter_problems(counter: Any, joint_step: Any, problems: Any, limits: Any, results: Any) -> None:
    """Solve each of the `AscentProblems` within the `AscentLimits` from potentials of zeros, to the `AscentResults`.

    `joint_step` is the address of `find_joint_step`.
    """
    all_pairs = all_cells(problems.costs, problems.p.shape[1])
    stages, largest = 0, problems.costs.max()
    while problems.epsilon * ASCENT.stage_factor ** (stages + 1) <= ASCENT.first_epsilon * largest:
        stages += 1
    while True:
        b = next_task(counter)
        if b >= problems.p.shape[0]:
            return
        solve_problem(counter, joint_step, all_pairs, problems, limits, results, b, stages)


def address_of_step(problems: AscentProblems, limits: AscentLimits, results: AscentResults) -> tuple[int, int]:
    """Return the address of `find_joint_step`, which is compiled together with `barycenter_problems`."""
    counter, vector = np.zeros(3, np.int64), np.zeros(1)
    cells = Cells(np.zeros(2, np.int64), np.zeros(1, np.int32), vector, vector)
    side = Side(vector, vector, vector, vector, np.inf)
    (address,) = addresses_of(
        barycenter_problems,
        lambda addresses: (barycenter_problems, (counter, *addresses, problems, limits, results)),
        lambda: ((find_joint_step, (counter, cells, side, side, vector, 1.0, vector)),),
    )
    return address
