"""Balanced Sinkhorn for a batch of dense problems on a CPU: scaling form, one problem per thread at a time.

Let M be the mass, and p and q shares of it. With the potentials f and g the plan is M P,

    P_ij = p_i q_j exp((f_i + g_j - C_ij) / epsilon) = U_i G_ij V_j,    G_ij = exp((alpha_i + beta_j - C_ij) / epsilon)

alpha and beta are the potentials absorbed into G so far; right after an absorption U = p and V = q. At a solution no
entry of G is above 1 / max(p_i, q_j), so G does not overflow. The entries of light bins are as large as the entries of
heavy bins, so their potentials are as accurate.

    absorb      alpha = softmin(beta), and G from it. This is an exact update of f, with exponents in float64.
    iterate     U = p / (G V),  V = q / (G^T U), over-relaxed: see `steps_numba`

Epsilon falls in stages; each begins with the potentials of the one before. Every problem of the batch stops by itself.
The transport of p to itself (symmetric) takes the mean of f and softmin(f), which at least halves the error in each
iteration where the kernel is positive definite.

The error is the sum of |P 1 - p| and |P^T 1 - q|. Light bins hardly count in it. So the iterations end with an exact
update of g and then of f, and the reported error is the error of the columns after them. Bins without mass, or with
next to none, take no part; soft minima give their potentials at the end, and where both sides have such bins, updates
among them until they settle.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from otloss._numba.compile import call_at, compiled, inner, spliced
from otloss._numba.tasks import is_stopped, next_task
from otloss.solvers.entropic.interface import ERROR, ITERATIONS
from otloss.solvers.entropic.sinkhorn_kernels.numbers import (
    POTENTIAL_ERROR,
    POTENTIAL_RANGE,
    SCHEDULE,
    SMALLEST_EIGENVALUE,
)
from otloss.solvers.entropic.sinkhorn_kernels.shared_numba import (
    FACTS,
    SHARED,
    OneProblem,
    Outputs,
    build_scratch,
)
from otloss.solvers.entropic.sinkhorn_kernels.steps_numba import (
    UPDATE_BOUNDS,
    add_logs,
    column_error,
    column_sums,
    exact_update,
    needs_absorption,
    next_relaxation,
    row_sums,
    softmin_of_scores,
    symmetric_update,
    update,
)


class IterationBounds(NamedTuple):
    """What the kernels for matrices read as constants.

    Attributes:
        stage_iterations, stage_error: where each stage ends but the last.
        check_every: iterations between two measurements of the contraction.
        smallest_column_sum: a column is lost if its sum of G is below this or above its inverse: its potential is too
            far off.
        attempts: exact updates of both sides before the iterations, at most.
        largest_asymmetry: |softmin(f) - f| / epsilon, above which a symmetric problem updates the potentials and not
            the factors.
    """

    stage_iterations: int = 12
    stage_error: float = 0.05
    check_every: int = 10
    smallest_column_sum: float = 1e-12
    attempts: int = 100
    largest_asymmetry: float = 20.0


ITERATION_BOUNDS = IterationBounds()


class SinkhornLimits(NamedTuple):
    """When the iterations of a problem end, and what is known before.

    Attributes:
        tolerance, largest_change, max_iterations, patience: as in `interface.Budget`.
        is_warm: whether g holds a start.
        estimates_error: whether the error of g is estimated.
    """

    tolerance: float
    largest_change: float
    max_iterations: int
    patience: float
    is_warm: bool
    estimates_error: bool


def empty_results(count: int, n: int, m: int, g: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return f, g and the outcome for the kernels, from a start g (B, m) if there is one."""
    start = np.zeros((count, m)) if g is None else np.array(g, np.float64, order="C")
    return np.zeros((count, n)), start, np.full((count, 5), np.nan)


@inner()
def build_limits(values: Any) -> SinkhornLimits:
    tolerance, largest_change, max_iterations, patience, is_warm, estimates_error = values
    return SinkhornLimits(tolerance, largest_change, max_iterations, patience, is_warm, estimates_error)


@inner()
def limits_of_stage(limits: Any, iterations: int, is_last: bool) -> SinkhornLimits:
    """Return when a stage ends, after the iterations of the stages before it. The last one has what is left of all."""
    remaining = limits.max_iterations - iterations
    is_cut = is_last or remaining < ITERATION_BOUNDS.stage_iterations
    return SinkhornLimits(
        limits.tolerance if is_last else ITERATION_BOUNDS.stage_error, limits.largest_change,
        remaining if is_cut else ITERATION_BOUNDS.stage_iterations, limits.patience if is_last else np.inf,
        limits.is_warm, limits.estimates_error,
    )  # fmt: skip


@spliced
def _absorb_factors(shared: Any, cost: Any, work: Any, n: int, m: int, epsilon: float) -> float:
    """Absorb the factors into the potentials; while a column is lost, update g exactly and absorb again.

    Returns the error of the columns.
    """
    p, q, sums, alpha, beta, scores = work.p, work.q, work.column_sums, work.alpha, work.beta, work.scores
    for i in range(n):
        work.u[i] = p[i]
    for j in range(m):
        work.v[j] = q[j]
    for attempt in range(ITERATION_BOUNDS.attempts):
        call_at(shared[SHARED.absorb], (cost, work, n, m, epsilon))
        is_lost = False
        for j in range(m):
            is_lost |= not (
                sums[j] > ITERATION_BOUNDS.smallest_column_sum and sums[j] < 1 / ITERATION_BOUNDS.smallest_column_sum
            )
        if not is_lost or attempt == ITERATION_BOUNDS.attempts - 1:
            break
        for j in range(m):
            for i in range(n):
                scores[i] = (alpha[i] - cost[i, j]) / epsilon + math.log(p[i])
            beta[j] = softmin_of_scores(scores, epsilon, n)
    return column_error(q, sums, work.v, m)


@inner()
def is_too_slow(iterations: int, error: float, previous_error: float, tolerance: float, patience: float) -> bool:
    """Return whether the tolerance takes more than `patience` iterations, at the contraction since the last check."""
    if iterations < SCHEDULE.early_check:
        return False
    speed = -math.log(error / previous_error) / ITERATION_BOUNDS.check_every
    needed = math.log(error / tolerance) / speed if speed > 0 else np.inf
    return needed > patience * (1.0 if iterations >= SCHEDULE.full_check else SCHEDULE.early_factor)


@spliced
def _relaxed_updates(work: Any, n: int, m: int, w: float) -> tuple[float, bool]:
    """Over-relax U and then V; return the error before, and whether some bin was too far from its weight for that."""
    number = work.u.dtype.type
    largest_push, largest_factor = number(UPDATE_BOUNDS.largest_relaxed_push), number(UPDATE_BOUNDS.largest_factor)
    row_sums(work.kernel, work.v, work.row_sums, n, m)
    error_p, is_steep_p = update(work.p, work.row_sums, work.u, number(w), largest_push, largest_factor, n)
    column_sums(work.kernel, work.u, work.column_sums, n, m)
    error_q, is_steep_q = update(work.q, work.column_sums, work.v, number(w), largest_push, largest_factor, m)
    return error_p + error_q, is_steep_p or is_steep_q


@spliced
def _update_exactly(work: Any, n: int, m: int) -> tuple[float, float]:
    """Update V and then U exactly; return the largest change of a factor, and the error of the columns."""
    change = exact_update(work.q, work.column_sums, work.v, m)
    row_sums(work.kernel, work.v, work.row_sums, n, m)
    change = max(change, exact_update(work.p, work.row_sums, work.u, n))
    column_sums(work.kernel, work.u, work.column_sums, n, m)
    return change, column_error(work.q, work.column_sums, work.v, m)


@spliced
def _iterate(
    shared: Any, cost: Any, work: Any, n: int, m: int, epsilon: float, limits: Any, is_last: bool
) -> tuple[float, int]:
    """Iterate until the error is within the tolerance; return it, and the number of iterations.

    beta then holds g, and after the last epsilon alpha holds f. Wherever the loop may end, `column_sums` holds G^T U.
    The contraction is measured in two ways. For w, over iterations between absorptions, which change the error
    (`since_absorption`, `previous_error`). For the end, over all iterations since the last check (`checked`,
    `checked_error`), unless w has changed meanwhile (`relaxed`).
    """
    p, q, u, v, beta = work.p, work.q, work.u, work.v, work.beta
    iterations, since_absorption, checked, relaxed, count_within = 0, 0, 0, 0, 0
    must_absorb, is_settling, is_given_up, w = True, True, False, 1.0
    previous_error = checked_error = smallest_error = final_error = np.inf
    while True:
        is_steep = False
        if must_absorb:
            must_absorb, since_absorption = False, 0
            error = _absorb_factors(shared, cost, work, n, m, epsilon)
        else:
            error, is_steep = _relaxed_updates(work, n, m, w)
            iterations += 1
            since_absorption += 1
        is_at_end = iterations >= limits.max_iterations or is_given_up
        if error <= limits.tolerance or is_at_end:
            if not is_last:
                break
            change, final_error = _update_exactly(work, n, m)
            is_within = final_error <= limits.tolerance
            count_within += is_within
            is_accurate = change <= limits.largest_change or count_within > SCHEDULE.extra_iterations
            if (is_within and is_accurate) or is_at_end:
                break
        if iterations - checked == ITERATION_BOUNDS.check_every:
            is_given_up = is_stopped(work.counter, error, np.nan) or (
                iterations - relaxed > ITERATION_BOUNDS.check_every
                and is_too_slow(iterations, error, checked_error, limits.tolerance, limits.patience)
            )
            checked, checked_error = iterations, error
        if since_absorption == ITERATION_BOUNDS.check_every:
            contraction = (error / previous_error) ** (1.0 / since_absorption)
            w, smallest_error, is_settling = next_relaxation(w, error, smallest_error, contraction, is_settling)
            previous_error, since_absorption = error, 0
            relaxed = iterations if is_settling else relaxed
        if (is_steep or since_absorption == 0) and (needs_absorption(u, p, n) or needs_absorption(v, q, m)):
            add_logs(beta, v, q, epsilon, m)
            must_absorb = True
    add_logs(beta, v, q, epsilon, m)
    add_logs(work.alpha, u, p, epsilon, n)
    return final_error, iterations


@inner()
def error_of_potential(residual: float, smallest_eigenvalue: float, itemsize: int) -> float:
    """Return an estimate of the largest error of g / epsilon after exact updates.

    Let e be the error and r the residual P^T 1 / q - 1. To first order (1 - T) e = r. So |e| <= |r| / (1 - lambda) in
    the root of the mean square by q. Light bins hardly count in this mean, so the largest |r_j| replaces |r|. Where the
    estimate is above SCHEDULE.largest_estimate, the first order does not hold.
    """
    rounding = 1e-6 if itemsize == 4 else 1e-15
    error = (residual + rounding) / smallest_eigenvalue
    return error if error <= SCHEDULE.largest_estimate else np.inf


@inner()
def _write_zeros(f: Any, g: Any, outcome: Any) -> None:
    """Write the answer of a problem without mass."""
    for i in range(f.shape[0]):
        f[i] = 0
    for j in range(g.shape[0]):
        g[j] = 0
    outcome[ERROR], outcome[POTENTIAL_ERROR], outcome[POTENTIAL_RANGE], outcome[SMALLEST_EIGENVALUE] = 0, 0, 0, 1


@spliced
def _run_stages(shared: Any, cost: Any, work: Any, n: int, m: int, epsilon: float, limits: Any) -> tuple[float, int]:
    """Iterate at falling values of epsilon, from the potentials in beta; return the error and the iterations."""
    beta, highest = work.beta, work.facts[FACTS.highest]
    iterations, width, error = 0, epsilon, np.inf
    while not limits.is_warm and width / SCHEDULE.stage_factor <= SCHEDULE.first_epsilon_over_cost * highest:
        width /= SCHEDULE.stage_factor
    while True:
        is_last = width <= epsilon
        stage_limits = limits_of_stage(limits, iterations, is_last)
        error, count = _iterate(shared, cost, work, n, m, width, stage_limits, is_last)
        iterations += count
        if is_last:
            break
        # Without its mean, g does not keep the size, and so the rounding, that it had at a large epsilon.
        mean = 0.0
        for j in range(m):
            mean += np.float64(work.q[j]) * beta[j]
        for j in range(m):
            beta[j] -= mean
        width = width * SCHEDULE.stage_factor if width * SCHEDULE.stage_factor > epsilon else epsilon
    return error, iterations


@spliced
def _solve(shared: Any, problem: Any, limits: Any, work: Any, outputs: Any) -> None:
    """Solve one problem from the start in g; write f and g on all bins."""
    cost, epsilon, g, outcome = problem.cost, problem.epsilon, outputs.g, outputs.outcome
    outcome[ERROR], outcome[ITERATIONS] = np.inf, 0
    call_at(shared[SHARED.gather], (problem, work))
    facts, alpha, beta = work.facts, work.alpha, work.beta
    # Written so that NaN fails too. The masses were compared before.
    if not (facts[FACTS.highest] < np.inf and facts[FACTS.mass_p] < np.inf and facts[FACTS.mass_q] < np.inf):
        return
    n, m = int(facts[FACTS.n]), int(facts[FACTS.m])
    if n == 0 or m == 0:
        _write_zeros(outputs.f, g, outcome)
        return
    for i in range(n):
        alpha[i] = 0
    for j in range(m):
        beta[j] = g[work.columns[j]]
    block = work.costs if n < cost.shape[0] or m < cost.shape[1] else cost
    error, iterations = _run_stages(shared, block, work, n, m, epsilon, limits)
    if limits.estimates_error:
        lowest_g, highest_g = beta[0], beta[0]
        for j in range(m):
            lowest_g, highest_g = min(lowest_g, beta[j]), max(highest_g, beta[j])
        residual = 0.0
        for j in range(m):
            residual = max(residual, abs(np.float64(work.column_sums[j] * work.v[j] / work.q[j]) - 1))
        call_at(shared[SHARED.estimate], (work, n, m, outcome))
        outcome[POTENTIAL_ERROR] = epsilon * error_of_potential(residual, outcome[SMALLEST_EIGENVALUE], cost.itemsize)
        outcome[POTENTIAL_RANGE] = highest_g - lowest_g
    call_at(shared[SHARED.write], (shared, problem, work, False, limits.largest_change, outputs))
    outcome[ERROR], outcome[ITERATIONS] = error, iterations


@compiled()
def sinkhorn_problems(counter: Any, shared: Any, problems: Any, limits: Any, results: Any, arrays: Any) -> None:
    """Solve problem k = (p[k], q[k], costs[owner[k]], epsilon[k]) from g[k], which holds zeros unless limits say warm.

    shared      the addresses of the kernels that `Shared` names
    problems    p (B, n), q (B, m) and costs (matrices, n, m) in float32 or float64, in which the iterations run;
                owner (B,) and epsilon (B,)
    limits      the fields of `SinkhornLimits`
    results     f (B, n) and g (B, m) in float64; outcome (B, 5), as `KernelResults` explains it: infinity and NaN
                where the problem is not valid. Potentials of a problem without mass are 0
    arrays      what `empty_arrays` returns
    """
    p, q, costs, owner, epsilon = problems
    f, g, outcome = results
    work, bounds = build_scratch(counter, arrays), build_limits(limits)
    while True:
        k = next_task(counter)
        if k >= p.shape[0]:
            return
        problem = OneProblem(p[k], q[k], costs[owner[k]], epsilon[k])
        _solve(shared, problem, bounds, work, Outputs(f[k], g[k], outcome[k]))


@inner()
def _iterate_symmetric(
    shared: Any, cost: Any, work: Any, n: int, epsilon: float, tolerance: float, largest_change: float,
    max_iterations: int,
) -> tuple[float, int]:  # fmt: skip
    """Iterate f <- (f + softmin(f)) / 2 until the error is within the tolerance; return it and the iterations.

    Far from the solution the potentials are updated, and near it the factors.
    """
    p, u, v, sums, weight = work.p, work.u, work.v, work.column_sums, work.row_sums
    alpha, beta, kernel = work.alpha, work.beta, work.kernel
    largest_factor = u.dtype.type(UPDATE_BOUNDS.largest_factor)
    iterations, is_exact, change = 0, False, 0.0
    while True:
        call_at(shared[SHARED.absorb], (cost, work, n, n, epsilon))
        for i in range(n):
            v[i] = p[i]
        error, asymmetry = column_error(p, sums, v, n), 0.0
        for i in range(n):
            asymmetry = max(asymmetry, abs(beta[i] - alpha[i]))
        is_near = asymmetry <= ITERATION_BOUNDS.largest_asymmetry * epsilon
        is_finished = (error <= tolerance and is_near) or iterations >= max_iterations
        if is_finished and is_exact and (change <= largest_change or iterations >= max_iterations):
            return error, iterations
        if is_finished and not is_exact:
            # An exact update of g. The absorption that follows is the exact update of f.
            change, is_exact = exact_update(p, sums, v, n), True
            add_logs(beta, v, p, epsilon, n)
            continue
        is_exact = False
        for i in range(n):
            # The rows of G have alpha absorbed. The symmetric plan has beta in rows and columns.
            weight[i], u[i] = math.exp((beta[i] - alpha[i]) / epsilon) if is_near else 1, p[i]
        if not is_near:
            for i in range(n):
                beta[i] = (alpha[i] + beta[i]) / 2
            iterations += 1
            continue
        error = np.inf
        while (error > tolerance or change > largest_change) and iterations < max_iterations:
            error, change = symmetric_update(kernel, p, weight, u, sums, largest_factor, n)
            iterations += 1
            max_iterations = iterations if is_stopped(work.counter, error, np.nan) else max_iterations
            if iterations % ITERATION_BOUNDS.check_every == 0 and needs_absorption(u, p, n):
                break
        add_logs(beta, u, p, epsilon, n)


@compiled()
def symmetric_problems(counter: Any, shared: Any, problems: Any, limits: Any, results: Any, arrays: Any) -> None:
    """As `sinkhorn_problems`, of p with itself at symmetric costs and without stages of epsilon."""
    p, _, costs, owner, epsilon = problems
    f, g, outcome = results
    work, bounds = build_scratch(counter, arrays), build_limits(limits)
    while True:
        k = next_task(counter)
        if k >= p.shape[0]:
            return
        cost, start = costs[owner[k]], g[k]
        problem, outputs = OneProblem(p[k], p[k], cost, epsilon[k]), Outputs(f[k], start, outcome[k])
        call_at(shared[SHARED.gather], (problem, work))
        n, mass = int(work.facts[FACTS.n]), work.facts[FACTS.mass_p]
        outcome[k, ERROR], outcome[k, ITERATIONS] = 0, 0
        if mass == 0:
            _write_zeros(f[k], start, outcome[k])
            continue
        for i in range(n):
            work.alpha[i], work.beta[i] = 0, start[work.rows[i]]
        block = work.costs if n < cost.shape[0] else cost
        outcome[k, ERROR], outcome[k, ITERATIONS] = _iterate_symmetric(
            shared, block, work, n, epsilon[k], bounds.tolerance, bounds.largest_change, bounds.max_iterations
        )
        call_at(shared[SHARED.write], (shared, problem, work, True, bounds.largest_change, outputs))
