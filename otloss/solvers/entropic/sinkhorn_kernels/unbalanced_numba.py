"""Unbalanced Sinkhorn for a batch of dense problems on a CPU; layout and scaling form as in `balanced_numba`.

Let M_p and M_q be the masses, p and q shares of them, r_p = epsilon / rho_p and k_p = 1 / (1 + r_p). The numbers r_q
and k_q are defined in the same way; r = 0 and k = 1 on a side whose marginal is kept. The plan is P = U G V as in
`balanced_numba`. In place of the potentials f and g the kernel iterates

    phi = f / epsilon + log M_q,    gamma = g / epsilon + log M_p

The rows of P should sum to t = p exp(log M_p + r_p log M_q - r_p phi). The columns have the same formula, with p and q
exchanged and gamma in place of phi.

    update          phi <- phi + w k_p log(t / (U G V)): `steps_numba.damped_update`
    shift           phi + s, gamma - s with s = log(sum of row targets / sum of column targets) / (r_p + r_q)

No constant s increases the dual more than this shift does. Where factors underflow, the error is infinite, and
the next methods of the ladder take over.

Bins too light for the factors join at the end, by exact updates of all bins. The error includes them. It is infinite
too if these updates do not make it small.

Source: T. Séjourné, F.-X. Vialard, G. Peyré, Faster Unbalanced Optimal Transport: Translation Invariant Sinkhorn, 2022.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from otloss._numba.compile import call_at, compiled, inner, spliced
from otloss._numba.tasks import is_stopped, next_task
from otloss.solvers.entropic.interface import ERROR, ITERATIONS
from otloss.solvers.entropic.sinkhorn_kernels.balanced_numba import (
    ITERATION_BOUNDS,
    SinkhornLimits,
    build_limits,
    error_of_potential,
    is_too_slow,
    limits_of_stage,
)
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
    build_calls,
    build_scratch,
    count_positive,
    negligible_share,
)
from otloss.solvers.entropic.sinkhorn_kernels.steps_numba import (
    column_sums,
    damped_update,
    largest_size,
    next_relaxation,
    row_sums,
    softmin_of_scores,
)

SMALLEST_FACTORS = (1e-35, 1e-300)  # in float32 and in float64
# At most so many exact updates of both sides come before the iterations, and at most so many of light bins and all
# others after them. Newton's method takes over the problems that need more.
ATTEMPTS = 4
JOINT_UPDATES = 20
# The error counts the mass of a column over its target as at most exp(LARGEST_EXPONENT).
LARGEST_EXPONENT = 80.0


class Side(NamedTuple):
    """r, k, and the constant in the exponents of the targets of the rows or of the columns."""

    pull: float
    damping: float
    constant: float


class Sides(NamedTuple):
    """Both sides at an epsilon."""

    rows: Side
    columns: Side
    epsilon: float


@spliced
def _absorb_factors(shared: Any, cost: Any, work: Any, n: int, m: int, sides: Any) -> bool:
    """Absorb gamma and update phi exactly; while a column is lost, update gamma exactly and absorb it again.

    Returns whether the factors are normal numbers. `totals` then holds alpha / epsilon, and `shifted` and `absorbed`
    hold phi and gamma.
    """
    p, q, u, v, sums, alpha, beta, scores = (
        work.p, work.q, work.u, work.v, work.column_sums, work.alpha, work.beta, work.scores,
    )  # fmt: skip
    phi, gamma, epsilon = work.phi, work.gamma, sides.epsilon
    smallest_factor = SMALLEST_FACTORS[0] if work.kernel.itemsize == 4 else SMALLEST_FACTORS[1]
    for _ in range(ATTEMPTS):
        for j in range(m):
            v[j], beta[j] = q[j], epsilon * gamma[j]
            work.absorbed[j] = gamma[j]
        call_at(shared[SHARED.absorb], (cost, work, n, m, epsilon))
        is_normal = True
        for i in range(n):
            work.totals[i] = alpha[i] / epsilon
            phi[i] = sides.rows.damping * (work.totals[i] + sides.rows.constant)
            work.shifted[i] = phi[i]
            u[i] = p[i] * math.exp(phi[i] - work.totals[i])
            is_normal &= u[i] > smallest_factor and u[i] < 1 / smallest_factor
        if not is_normal:
            return False
        column_sums(work.kernel, u, sums, n, m)
        is_lost = False
        for j in range(m):
            ratio = np.float64(sums[j]) / math.exp(sides.columns.constant - sides.columns.pull * gamma[j])
            is_lost |= not (
                ratio > ITERATION_BOUNDS.smallest_column_sum and ratio < 1 / ITERATION_BOUNDS.smallest_column_sum
            )
        if not is_lost:
            return True
        for i in range(n):
            work.shifted[i] = phi[i] + math.log(p[i])
        for j in range(m):
            for i in range(n):
                scores[i] = work.shifted[i] - cost[i, j] / epsilon
            gamma[j] = sides.columns.damping * (softmin_of_scores(scores, 1.0, n) + sides.columns.constant)
    return False


@spliced
def _damped_updates(work: Any, n: int, m: int, sides: Any, shift: float, w: float) -> tuple[float, float, float]:
    """Update phi and then gamma by damped steps with over-relaxation w.

    Returns the error before, the next change of the shift s, and the number of potentials that have to be absorbed.
    """
    rows, columns = sides.rows, sides.columns
    row_sums(work.kernel, work.v, work.row_sums, n, m)
    error_p, mass_p, mass_p_after, far_p = damped_update(
        work.p, work.row_sums, work.totals, work.shifted, work.phi, work.u, work.scores,
        rows.constant - rows.pull * shift, rows.pull, rows.damping, w, n,
    )  # fmt: skip
    column_sums(work.kernel, work.u, work.column_sums, n, m)
    error_q, mass_q, mass_q_after, far_q = damped_update(
        work.q, work.column_sums, work.absorbed, work.absorbed, work.gamma, work.v, work.scores,
        columns.constant + columns.pull * shift, columns.pull, columns.damping, w, m,
    )  # fmt: skip
    step_of_shift = math.log(mass_p_after / mass_q_after) / (rows.pull + columns.pull)
    return error_p / mass_p + error_q / mass_q, step_of_shift, far_p + far_q


@spliced
def _update_exactly(work: Any, n: int, m: int, sides: Any, shift: float) -> tuple[float, float, float]:
    """Update gamma and then phi exactly; return their largest change, the error, and the largest error of a column."""
    q, sums, rows, columns = work.q, work.column_sums, sides.rows, sides.columns
    constant = columns.constant + columns.pull * shift
    damped_update(
        q, sums, work.absorbed, work.absorbed, work.gamma, work.v, work.scores, constant, columns.pull,
        columns.damping, 1.0, m,
    )  # fmt: skip
    change = largest_size(work.scores, m)
    row_sums(work.kernel, work.v, work.row_sums, n, m)
    damped_update(
        work.p, work.row_sums, work.totals, work.shifted, work.phi, work.u, work.scores,
        rows.constant - rows.pull * shift, rows.pull, rows.damping, 1.0, n,
    )  # fmt: skip
    change = max(change, largest_size(work.scores, n))
    column_sums(work.kernel, work.u, sums, n, m)
    difference, total, residual = 0.0, 0.0, 0.0
    for j in range(m):
        target = q[j] * math.exp(constant - columns.pull * work.gamma[j])
        size = abs(sums[j] * work.v[j] - target)
        difference += size
        total += target
        residual = max(residual, size / target)
    return change, difference / total, residual


@spliced
def _iterate(
    shared: Any, cost: Any, work: Any, n: int, m: int, sides: Any, limits: Any, is_last: bool
) -> tuple[float, int, float]:
    """Iterate on phi and gamma until the error, relative to the mass of the plan, is within the tolerance.

    Returns the error, the number of iterations, and at the last epsilon the largest relative error of a column. The
    shift s is kept apart (`shift`) until the next absorption.
    """
    phi, gamma = work.phi, work.gamma
    iterations, since_absorption, count_within = 0, 0, 0
    must_absorb, is_settling, is_given_up, w, shift = True, True, False, 1.0, 0.0
    previous_error = smallest_error = final_error = residual = np.inf
    while True:
        if must_absorb:
            for j in range(m):
                gamma[j] -= shift
            must_absorb, since_absorption, shift = False, 0, 0.0
            if not _absorb_factors(shared, cost, work, n, m, sides):
                final_error = np.inf
                break
        error, step_of_shift, count_far = _damped_updates(work, n, m, sides, shift, w)
        shift += step_of_shift
        iterations += 1
        since_absorption += 1
        is_at_end = iterations >= limits.max_iterations or is_given_up
        if error <= limits.tolerance or is_at_end or not error < np.inf:
            if not is_last or not error < np.inf:
                final_error = error
                break
            change, final_error, residual = _update_exactly(work, n, m, sides, shift)
            is_within = final_error <= limits.tolerance
            count_within += is_within
            is_accurate = change <= limits.largest_change or count_within > SCHEDULE.extra_iterations
            if (is_within and is_accurate) or is_at_end:
                break
        if since_absorption == ITERATION_BOUNDS.check_every:
            is_given_up = not is_settling and is_too_slow(
                iterations, error, previous_error, limits.tolerance, limits.patience
            )
            contraction = (error / previous_error) ** (1.0 / since_absorption)
            w, smallest_error, is_settling = next_relaxation(w, error, smallest_error, contraction, is_settling)
            previous_error, since_absorption = error, 0
        if iterations % ITERATION_BOUNDS.check_every == 0:  # absorptions may be more frequent than the checks
            is_given_up |= is_stopped(work.counter, error, np.nan)
        must_absorb = count_far > 0
    for i in range(n):
        phi[i] += shift
    for j in range(m):
        gamma[j] -= shift
    return final_error, iterations, residual


@spliced
def _run_stages(
    shared: Any, cost: Any, work: Any, n: int, m: int, epsilon: float, penalties: Any, limits: Any
) -> tuple[float, int, float, Any]:
    """Iterate at falling values of epsilon, from the potentials in gamma.

    Returns the error, the number of iterations, the largest relative error of a column, and the last `Sides`.
    """
    gamma, facts = work.gamma, work.facts
    log_p, log_q, highest = math.log(facts[FACTS.mass_p]), math.log(facts[FACTS.mass_q]), facts[FACTS.highest]
    iterations, width, error, residual = 0, epsilon, np.inf, np.inf
    while not limits.is_warm and width / SCHEDULE.stage_factor <= SCHEDULE.first_epsilon_over_cost * highest:
        width /= SCHEDULE.stage_factor
    while True:
        is_last = width <= epsilon
        pull_p, pull_q = width / penalties[0], width / penalties[1]
        sides = Sides(
            Side(pull_p, 1 / (1 + pull_p), log_p + pull_p * log_q),
            Side(pull_q, 1 / (1 + pull_q), log_q + pull_q * log_p),
            width,
        )
        for j in range(m):
            gamma[j] = gamma[j] / width + log_p
        stage_limits = limits_of_stage(limits, iterations, is_last)
        error, count, residual = _iterate(shared, cost, work, n, m, sides, stage_limits, is_last)
        iterations += count
        if is_last:
            break
        for j in range(m):
            gamma[j] = width * (gamma[j] - log_p)
        width = width * SCHEDULE.stage_factor if width * SCHEDULE.stage_factor > epsilon else epsilon
    return error, iterations, residual, sides


@spliced
def _solve(shared: Any, problem: Any, penalties: Any, limits: Any, work: Any, outputs: Any) -> None:
    cost, g, outcome = problem.cost, outputs.g, outputs.outcome
    outcome[ERROR], outcome[ITERATIONS] = np.inf, 0
    call_at(shared[SHARED.gather], (problem, work))
    facts, gamma = work.facts, work.gamma
    mass_p, mass_q = facts[FACTS.mass_p], facts[FACTS.mass_q]
    # Written so that NaN fails too. Sides without mass are left to the caller.
    if not (facts[FACTS.highest] < np.inf and 0 < mass_p < np.inf and 0 < mass_q < np.inf):
        return
    n, m = int(facts[FACTS.n]), int(facts[FACTS.m])
    for j in range(m):
        gamma[j] = g[work.columns[j]]  # times epsilon for now
    block = work.costs if n < cost.shape[0] or m < cost.shape[1] else cost
    error, iterations, residual, sides = _run_stages(shared, block, work, n, m, problem.epsilon, penalties, limits)
    outcome[ITERATIONS] = iterations
    if error < np.inf:
        call_at(shared[SHARED.write], (shared, problem, work, sides, limits, error, residual, outputs))


@compiled()
def unbalanced_problems(counter: Any, shared: Any, problems: Any, limits: Any, results: Any, arrays: Any) -> None:
    """As `sinkhorn_problems`, with the marginal penalties (B, 2), rho_p and rho_q, of which one may be infinite.

    The error is infinite too where a side has no mass, factors underflow, or light bins count. Then `f` and `g` are not
    written, or not completely.
    """
    p, q, costs, owner, epsilon, penalties = problems
    f, g, outcome = results
    work, bounds = build_scratch(counter, arrays), build_limits(limits)
    while True:
        k = next_task(counter)
        if k >= p.shape[0]:
            return
        problem = OneProblem(p[k], q[k], costs[owner[k]], epsilon[k])
        _solve(shared, problem, penalties[k], bounds, work, Outputs(f[k], g[k], outcome[k]))


@inner()
def _update_others(
    shared: Any, problem: Any, work: Any, sides: Any, is_transposed: bool, largest_share: float, potential: Any,
    out: Any,
) -> None:  # fmt: skip
    """Update f, or with `is_transposed` g, exactly for the bins with at most `largest_share` of the mass.

    They follow from the `potential` of the other side. `out` may be longer than the side.
    """
    arguments = problem, work, is_transposed, largest_share, 0.0, np.bool_(False), potential, out
    call_at(shared[SHARED.others], arguments)
    own, mass, side = problem.p, work.facts[FACTS.mass_p], sides.rows
    if is_transposed:
        own, mass, side = problem.q, work.facts[FACTS.mass_q], sides.columns
    for i in range(own.shape[0]):
        if own[i] * (1 / mass) <= largest_share:
            out[i] = side.damping * (out[i] + problem.epsilon * side.constant)


@inner()
def _join_light(
    shared: Any, problem: Any, work: Any, sides: Any, tolerance: float, largest_change: float, f: Any, g: Any
) -> tuple[float, float]:
    """Update all bins exactly, light ones too; return the error of all columns and a bound of g's error over epsilon.

    A light bin may count: with wrong potentials it would hold more mass than all others, and heavy bins that are far
    from each other keep less mass than it does. The bound is of the columns that light bins change (`is_changed`).
    """
    updated, is_changed, columns, q, epsilon = work.beta, work.alpha, sides.columns, problem.q, problem.epsilon
    m, mass_q = int(work.facts[FACTS.m]), work.facts[FACTS.mass_q]
    has_light_rows, has_light_columns = int(work.facts[FACTS.n]) < count_positive(problem.p), m < count_positive(q)
    for j in range(g.shape[0]):
        is_changed[j] = 1.0 if has_light_rows and has_light_columns else 0.0
    for j in range(m):
        is_changed[work.columns[j]] = 0.0
    error, change = np.inf, np.inf
    for k in range(JOINT_UPDATES):
        _update_others(shared, problem, work, sides, np.bool_(False), np.inf, g, f)
        for j in range(g.shape[0]):
            updated[j] = g[j]
        _update_others(shared, problem, work, sides, np.bool_(True), np.inf, f, updated)
        difference, total, change = 0.0, 0.0, 0.0
        is_start = k == 0 and has_light_columns  # their potentials are arbitrary
        for j in range(g.shape[0]):
            share = q[j] / mass_q
            if share > 0:
                step = (updated[j] - g[j]) / epsilon
                target = math.exp(math.log(share) + columns.constant - columns.pull * g[j] / epsilon)
                difference += target * abs(math.expm1(min(-step / columns.damping, LARGEST_EXPONENT)))
                total += target
                is_changed[j] = 1.0 if abs(step) > largest_change and not is_start else is_changed[j]
                change = max(change, abs(step)) if is_changed[j] > 0 else change
            else:
                g[j] = updated[j]
        error = difference / total
        if error <= tolerance and change <= largest_change and not is_start:
            break
        for j in range(g.shape[0]):
            g[j] = updated[j]
    # Written so that NaN fails too. Two updates contract the error of g by k_p k_q.
    return error if error <= tolerance else np.inf, change / (1 - sides.rows.damping * columns.damping)


@inner()
def _subtract(shift: float, potential: Any) -> None:
    for i in range(potential.shape[0]):
        potential[i] -= shift


@inner()
def _range(weights: Any, potential: Any) -> float:
    """Return the largest potential minus the least, over bins with mass."""
    lowest, highest = np.inf, -np.inf
    for j in range(potential.shape[0]):
        if weights[j] > 0:
            lowest, highest = min(lowest, potential[j]), max(highest, potential[j])
    return highest - lowest


@inner()
def _write_uncertainty(shared: Any, work: Any, sides: Any, residual: float, outcome: Any) -> None:
    """Write the error of g, and the smallest eigenvalue of its equations without their constant.

    The constant has a closed form; the caller shifts g by it.
    """
    p, q, u, v, sums, number = work.p, work.q, work.u, work.v, work.column_sums, work.u.dtype.type
    n, m, mass = int(work.facts[FACTS.n]), int(work.facts[FACTS.m]), number(0)
    for j in range(m):
        q[j] = sums[j] * v[j]
        mass += q[j]
    # The marginals of the plan as shares of its mass take the places of p and q.
    row_sums(work.kernel, v, work.row_sums, n, m)
    for i in range(n):
        u[i] /= mass
        p[i] = work.row_sums[i] * u[i]
    for j in range(m):
        q[j] /= mass
    call_at(shared[SHARED.estimate], (work, n, m, outcome))
    eigenvalue = 1 - sides.rows.damping * sides.columns.damping * (1 - outcome[SMALLEST_EIGENVALUE])
    outcome[POTENTIAL_ERROR] = sides.epsilon * error_of_potential(residual, eigenvalue, work.kernel.itemsize)
    outcome[SMALLEST_EIGENVALUE] = eigenvalue


@compiled(by_address=True)
def write_unbalanced_potentials(
    shared: Any, problem: Any, work: Any, sides: Any, limits: Any, error: float, residual: float, outputs: Any
) -> None:
    """Write f and g on all bins, from phi and gamma of the bins that take part, and the outcome but for the iterations.

    Bins without mass, and light rows, get the exact update from the others.
    """
    f, g, outcome, epsilon = outputs.f, outputs.g, outputs.outcome, problem.epsilon
    n, m = int(work.facts[FACTS.n]), int(work.facts[FACTS.m])
    negligible = negligible_share(problem.cost)
    for j in range(g.shape[0]):
        g[j] = 0.0  # light columns: near the size of a right potential, from which `_join_light` begins
    for i in range(n):
        f[work.rows[i]] = epsilon * work.phi[i]
    for j in range(m):
        g[work.columns[j]] = epsilon * work.gamma[j]
    # np.bool_ is no literal: numba would compile `_update_others` once for each literal.
    if n < f.shape[0]:
        _update_others(shared, problem, work, sides, np.bool_(False), negligible, g, f)
    if m < g.shape[0]:
        _update_others(shared, problem, work, sides, np.bool_(True), negligible, f, g)
    uncertain = 0.0
    if n < count_positive(problem.p) or m < count_positive(problem.q):
        error, uncertain = _join_light(
            shared, problem, work, sides, max(limits.tolerance, error), limits.largest_change, f, g
        )
        if not error < np.inf:
            return
    _subtract(epsilon * math.log(work.facts[FACTS.mass_q]), f)
    _subtract(epsilon * math.log(work.facts[FACTS.mass_p]), g)
    outcome[ERROR] = error
    if limits.estimates_error:
        _write_uncertainty(shared, work, sides, residual, outcome)
        outcome[POTENTIAL_RANGE] = _range(problem.q, g)
        outcome[POTENTIAL_ERROR] = max(outcome[POTENTIAL_ERROR], epsilon * uncertain)


def build_unbalanced_calls(weights: Any, costs: Any) -> tuple[tuple[Any, tuple[Any, ...]], ...]:
    """Return what `build_calls` does, with the kernel that writes potentials of unbalanced problems."""
    *calls, (_, (shared, problem, work, *_, outputs)) = build_calls(weights, costs)
    side, limits = Side(1.0, 1.0, 1.0), SinkhornLimits(1.0, 1.0, 1, 1.0, True, True)
    arguments = shared, problem, work, Sides(side, side, 1.0), limits, 1.0, 1.0, outputs
    return (*calls, (write_unbalanced_potentials, arguments))
