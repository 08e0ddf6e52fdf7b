"""Newton's method on the dual of entropic problems on a CPU, on the few cells of the plan that hold mass.

Let b = g / epsilon, and let f be the exact update from g. The plan is P_ij = r_i S_ij with the row sums r. The shares S
of each row sum to 1. The columns hold c = P^T 1 and should hold t. In balanced problems t = q and r = p. With
marginal penalties rho_p and rho_q, s_q = epsilon / rho_q and k_p = 1 / (1 + epsilon / rho_p), the targets are
t = q exp(-s_q b). A side that is kept has an infinite rho, so s = 0 and k = 1; in balanced problems both are. As a
function of b the dual has the gradient t - c, and its negative Hessian is

    H = diag(c + s_q t) - k_p S^T diag(r) S

    stage       Potentials of the exact problem are a corner of the set of its optimal potentials. Potentials of an
                entropic problem lie near the centre of this set. From an exact start the rounds therefore begin at a
                larger epsilon. The cells of the exact plan always take part, so that the problem on the cells has a
                solution.
    round       `begin_round` updates f exactly over all pairs. This gives the error, and the cells that hold more than
                a small share of their row or column. `steps_on_cells` runs on these cells.
    step        `find_step` solves H x = t - c. `search_along` moves b by x, or by a part of x where the dual would fall
                beyond it.

    cells_numba         the plan over all pairs and on the cells; which arrays belong together after which function
    equations_numba     the equations of a step
    newton_numba        this file: searches along steps, rounds, stages, and the problems of a call

`begin_round` and `find_step` are kernels that `newton_problems` calls by their addresses.
`tests/otloss/newton_reference.py` computes the same from the formulas above, with dense matrices.

Source: X. Tang et al., Accelerating Sinkhorn Algorithm with Sparse Newton Iterations, arXiv 2401.12253.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from otloss._numba.compile import addresses_of, call_at, compiled, inner, result_at, spliced
from otloss._numba.tasks import is_stopped, next_task
from otloss.solvers.entropic.interface import ERROR, ITERATIONS
from otloss.solvers.entropic.newton_kernels.cells_numba import (
    Cells,
    Pairs,
    Side,
    begin_round,
    build_side,
    build_support,
    column_error,
    evaluate,
    largest_change,
    target,
    update_columns,
)
from otloss.solvers.entropic.newton_kernels.equations_numba import elimination_order, find_step
from otloss.solvers.entropic.newton_kernels.numbers import NEWTON


class NewtonKernels(NamedTuple):
    """The addresses of the kernels that `newton_problems` calls: `begin_round` and `find_step`."""

    round: Any
    step: Any


class NewtonProblems(NamedTuple):
    """The problems k = 0, ..., B - 1 of one call, in float64.

    Attributes:
        p, q: (B, n) and (B, m), weights, or shares of the mass in balanced problems.
        pairs: the costs. The matrix has a first axis of matrices.
        owner: (B,), the number of the matrix of each problem.
        epsilon: (B,)
        penalties: (B, 2), rho_p and rho_q, infinite for a side that is kept.
        has_start: (B,), false where g is zeros.
        plans: (B, 2, cells), rows and columns of the cells of exact plans whose potentials are in g, or (B, 2, 0).
    """

    p: Any
    q: Any
    pairs: Any
    owner: Any
    epsilon: Any
    penalties: Any
    has_start: Any
    plans: Any


class NewtonLimits(NamedTuple):
    """The search of a problem or of a stage ends within the first two limits, or after the last one.

    Attributes:
        tolerance: the largest error.
        largest_change: the largest change of b by an exact update, or infinity.
        max_steps: the largest number of steps of all rounds together.
        largest_potential: over epsilon. A search beyond the tolerance ends where potentials are larger after some
            steps, since their rounding decides the plan. It is infinite where this is not looked at.
    """

    tolerance: float
    largest_change: float
    max_steps: int
    largest_potential: float = np.inf


class NewtonResults(NamedTuple):
    """What `newton_problems` writes: f (B, n), g (B, m), and outcome (B, 2), the error of g and the number of steps."""

    f: Any
    g: Any
    outcome: Any


class Progress(NamedTuple):
    """The error of g and the number of steps until then."""

    error: float
    steps: int


def build_results(n: int, g: np.ndarray) -> NewtonResults:
    """Return the results that `newton_problems` writes, with the start g (B, m)."""
    return NewtonResults(np.zeros((len(g), n)), g.copy(), np.zeros((len(g), 2)))


@inner()
def derivative_along(columns: Any, x: Any) -> float:
    """Return the derivative of the dual along a step x of b."""
    total = 0.0
    for j in range(x.shape[0]):
        total += (target(columns, j) - columns.mass[j]) * x[j]
    return total


@spliced
def search_along(cells: Any, rows: Any, columns: Any, epsilon: float, x: Any, derivative: float) -> None:
    """Move b along x, or along a part of it.

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
    counter: Any, kernels: Any, cells: Any, rows: Any, columns: Any, epsilon: float, tolerance: float, max_steps: int
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
        call_at(kernels.step, (counter, cells, rows, columns, order, epsilon, error, x))
        derivative = derivative_along(columns, x)
        if not derivative > 0:
            break
        search_along(cells, rows, columns, epsilon, x, derivative)
        error = column_error(columns)
        steps += 1
    update_columns(columns, epsilon)
    return steps


@inner()
def largest_size(side: Any) -> float:
    """Return the largest size of a potential of bins with mass."""
    largest = 0.0
    for i in range(side.weights.shape[0]):
        if side.weights[i] > 0:
            largest = max(largest, abs(side.potential[i]))
    return largest


@spliced
def solve_stage(
    counter: Any, kernels: Any, pairs: Any, rows: Any, columns: Any, epsilon: float, limits: Any, support: Any
) -> Progress:
    """Run rounds at one epsilon, the first one with the cells of `support`. f is then the exact update from g."""
    tolerance, allowed_change, max_steps = limits.tolerance, limits.largest_change, limits.max_steps
    steps, cells, error = 0, support, 1.0
    n, m, looks_at_size = rows.weights.shape[0], columns.weights.shape[0], limits.largest_potential < np.inf
    while True:
        smallest_share = max(tolerance, NEWTON.omitted_share * NEWTON.error_reduction * error) / (n + m)
        arguments = pairs, rows, columns, epsilon, smallest_share, cells, steps < max_steps
        cells = result_at(kernels.round, arguments, cells)
        error = column_error(columns)
        is_accurate = allowed_change == np.inf or largest_change(columns, epsilon) <= allowed_change
        if (error <= tolerance and is_accurate) or steps >= max_steps or is_stopped(counter, error, np.nan):
            return Progress(error, steps)
        if looks_at_size and steps >= NEWTON.steps_before_size and error > tolerance:
            size = max(largest_size(rows), largest_size(columns))
            if size > limits.largest_potential * epsilon:
                return Progress(error, steps)
        goal, limit = NEWTON.error_share * tolerance, min(NEWTON.max_steps_of_round, max_steps - steps)
        steps += max(1, steps_on_cells(counter, kernels, cells, rows, columns, epsilon, goal, limit))


@spliced
def solve_problem(
    counter: Any, kernels: Any, pairs: Any, rows: Any, columns: Any, epsilon: float, has_start: bool, support: Any,
    limits: Any,
) -> Progress:  # fmt: skip
    """Run the stages of one problem."""
    first = NEWTON.stages_from_exact if support.columns.shape[0] > 0 else 0
    if not has_start:
        rho = min(rows.rho, columns.rho) if max(rows.rho, columns.rho) == np.inf else max(rows.rho, columns.rho)
        while epsilon * NEWTON.stage_factor ** (first + 1) <= NEWTON.first_epsilon_over_penalty * rho < np.inf:
            first += 1
    error, steps = np.inf, 0
    for stage in range(first, -1, -1):
        remaining = limits.max_steps - steps
        stage_limits = NewtonLimits(NEWTON.tolerance_of_stage, np.inf, remaining, np.inf)
        if stage == 0:
            stage_limits = NewtonLimits(limits.tolerance, limits.largest_change, remaining, limits.largest_potential)
        width = epsilon * NEWTON.stage_factor**stage
        progress = solve_stage(counter, kernels, pairs, rows, columns, width, stage_limits, support)
        error, steps = progress.error, steps + progress.steps
    return Progress(error, steps)


@compiled(allocates=True)
def newton_problems(counter: Any, kernels: Any, problems: Any, limits: Any, results: Any) -> None:
    """Solve the `NewtonProblems` within the `NewtonLimits` from `results.g`; write the `NewtonResults`."""
    costs = problems.pairs
    while True:
        k = next_task(counter)
        if k >= problems.p.shape[0]:
            return
        pairs = Pairs(costs.matrix[problems.owner[k]], costs.x, costs.y, costs.metric)
        rows = build_side(problems.p[k], results.f[k], problems.penalties[k, 0])
        columns = build_side(problems.q[k], results.g[k], problems.penalties[k, 1])
        support = build_support(problems.plans[k], problems.p.shape[1])
        progress = solve_problem(
            counter, kernels, pairs, rows, columns, problems.epsilon[k], problems.has_start[k], support, limits
        )
        results.outcome[k, ERROR], results.outcome[k, ITERATIONS] = progress.error, progress.steps


def build_calls() -> tuple[tuple[Any, tuple[Any, ...]], ...]:
    """Return the kernels in the order of `NewtonKernels`, each with arguments of the types that it is called with."""
    numbers, places = np.ones(1), np.zeros(1, np.int64)
    matrix, side = np.ones((1, 1)), Side(numbers, numbers, numbers, numbers, 1.0)
    cells = Cells(places, np.zeros(1, np.int32), numbers, numbers)
    return (
        (begin_round, (Pairs(matrix, matrix, matrix, 0), side, side, 1.0, 0.1, cells, True)),
        (find_step, (places, cells, side, side, places, 1.0, 0.1, numbers)),
    )


def find_kernels() -> NewtonKernels:
    """Return the addresses of the kernels that `newton_problems` calls; all three are compiled together."""

    def caller(addresses: Any) -> tuple[Any, tuple[Any, ...]]:
        numbers, places, matrix = np.ones(1), np.zeros(1, np.int64), np.ones((1, 1))
        problems = NewtonProblems(
            matrix, matrix, Pairs(matrix[None], matrix, matrix, 0), places, numbers, matrix, np.ones(1, bool),
            plans=np.zeros((1, 2, 1), np.int64),
        )  # fmt: skip
        arguments = problems, NewtonLimits(1.0, 1.0, 1), build_results(1, matrix)
        return newton_problems, (np.zeros(3, np.int64), NewtonKernels(*addresses), *arguments)

    return NewtonKernels(*addresses_of(newton_problems, caller, build_calls))
