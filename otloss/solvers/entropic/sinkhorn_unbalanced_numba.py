"""Unbalanced Sinkhorn for a batch of dense problems on a CPU; the layout and the scaling form are those of `sinkhorn`.

Let M_p and M_q be the masses, p and q shares of them, r = epsilon / rho and k = 1 / (1 + r). The plan is P = U G V as
in `sinkhorn`. In place of the potentials f and g the kernel iterates

    phi = f / epsilon + log M_q,    gamma = g / epsilon + log M_p

The rows of P should sum to t = p exp(log M_p + r log M_q - r phi), and the columns likewise.

    update          phi <- phi + w k log(t / (U G V)): `sinkhorn_steps_numba.damped_update`
    shift           phi + s, gamma - s with s = log(sum of row targets / sum of column targets) / 2 r

No constant s increases the dual more than this shift does. Where factors underflow, the error is infinite and
`entropic.sinkhorn`, the reference implementation, takes over.

Source: T. Séjourné, F.-X. Vialard, G. Peyré, Faster Unbalanced Optimal Transport: Translation Invariant Sinkhorn, 2022.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from otloss._numba.compile import compiled, inner, spliced
from otloss._numba.sums import mass_of
from otloss._numba.tasks import is_stopped, next_task
from otloss.solvers.entropic.interface import (
    ERROR,
    FIRST_EPSILON,
    ITERATIONS,
    LEAST_EIGENVALUE,
    POTENTIAL_ERROR,
    SETTLING,
    SPREAD,
    STAGE_FACTOR,
)
from otloss.solvers.entropic.sinkhorn_numba import (
    CHECK_EVERY,
    LOST,
    NEGLIGIBLE_32,
    NEGLIGIBLE_64,
    STAGE_ERROR,
    STAGE_ITERATIONS,
    count_positive,
    eigenvalue_of_plan,
    error_of_potential,
    extend,
    gather,
    highest_cost,
    is_hopeless,
    limits_of,
    named,
    take,
    write_plan,
)
from otloss.solvers.entropic.sinkhorn_steps_numba import (
    absorb,
    column_sums,
    damped_update,
    largest_size,
    next_relaxation,
    row_sums,
    softmin_of_scores,
)

LEAST_FACTOR_32, LEAST_FACTOR_64 = 1e-35, 1e-300
ATTEMPTS = 4  # exact updates of both sides before the iterations, at most: Newton's method needs none


class Sides(NamedTuple):
    """r, k, and the constants in the exponents of the targets of rows and of columns."""

    pull: float
    damping: float
    rows: float
    columns: float


@spliced
def _absorb_factors(cost: Any, work: Any, n: int, m: int, epsilon: float, sides: Any) -> bool:
    """Absorb gamma and update phi exactly; while a column is lost, update gamma exactly and absorb it again.

    Returns whether the factors are normal numbers. `totals` then holds alpha / epsilon, and `shifted` and `absorbed`
    hold phi and gamma.
    """
    p, q, u, v, sums, alpha, beta, scores = (
        work.p, work.q, work.u, work.v, work.column_sums, work.alpha, work.beta, work.scores,
    )  # fmt: skip
    phi, gamma = work.phi, work.gamma
    least = LEAST_FACTOR_32 if work.kernel.itemsize == 4 else LEAST_FACTOR_64
    for _ in range(ATTEMPTS):
        for j in range(m):
            v[j], beta[j] = q[j], epsilon * gamma[j]
            work.absorbed[j] = gamma[j]
        absorb(cost, beta, scores, p, q, epsilon, alpha, work.totals, work.kernel, sums, n, m)
        is_normal = True
        for i in range(n):
            work.totals[i] = alpha[i] / epsilon
            phi[i] = sides.damping * (work.totals[i] + sides.rows)
            work.shifted[i] = phi[i]
            u[i] = p[i] * math.exp(phi[i] - work.totals[i])
            is_normal &= u[i] > least and u[i] < 1 / least
        if not is_normal:
            return False
        column_sums(work.kernel, u, sums, n, m)
        lost = False
        for j in range(m):
            ratio = np.float64(sums[j]) / math.exp(sides.columns - sides.pull * gamma[j])
            lost |= not (ratio > LOST and ratio < 1 / LOST)
        if not lost:
            return True
        for i in range(n):
            work.shifted[i] = phi[i] + math.log(p[i])
        for j in range(m):
            for i in range(n):
                scores[i] = work.shifted[i] - cost[i, j] / epsilon
            gamma[j] = sides.damping * (softmin_of_scores(scores, 1.0, n) + sides.columns)
    return False


@spliced
def _iterate(
    cost: Any, work: Any, n: int, m: int, epsilon: float, sides: Any, tolerance: float, settled: float, most: int,
    patience: float, last: bool,
) -> tuple[float, int, float]:  # fmt: skip
    """Iterate on phi and gamma until the error, relative to the mass of the plan, is within the tolerance.

    Returns the error, the number of iterations, and at the last epsilon the largest relative error of a column.
    """
    p, q, u, v, sums_p, sums = work.p, work.q, work.u, work.v, work.row_sums, work.column_sums
    phi, gamma, kernel, steps = work.phi, work.gamma, work.kernel, work.scores
    pull, damping = sides.pull, sides.damping
    done, since, within, settling, stale = 0, 0, 0, True, True
    w, shift, hopeless = 1.0, 0.0, False
    before = least = error = residual = np.inf
    while True:
        if stale:
            for j in range(m):
                gamma[j] -= shift
            stale, since, shift = False, 0, 0.0
            if not _absorb_factors(cost, work, n, m, epsilon, sides):
                error = np.inf
                break
        row_sums(kernel, v, sums_p, n, m)
        off_rows, rows, rows_after, far_rows = damped_update(
            p, sums_p, work.totals, work.shifted, phi, u, steps, sides.rows - pull * shift, pull, damping, w, n
        )
        column_sums(kernel, u, sums, n, m)
        off_columns, columns, columns_after, far_columns = damped_update(
            q, sums, work.absorbed, work.absorbed, gamma, v, steps, sides.columns + pull * shift, pull, damping, w, m
        )
        shift += math.log(rows_after / columns_after) / (2 * pull)
        off = off_rows / rows + off_columns / columns
        done += 1
        since += 1
        if off <= tolerance or done >= most or hopeless or not off < np.inf:
            if not last or not off < np.inf:
                error = off
                break
            damped_update(q, sums, work.absorbed, work.absorbed, gamma, v, steps, sides.columns + pull * shift, pull,
                   damping, 1.0, m)  # fmt: skip
            change = largest_size(steps, m)
            row_sums(kernel, v, sums_p, n, m)
            damped_update(
                p, sums_p, work.totals, work.shifted, phi, u, steps, sides.rows - pull * shift, pull, damping, 1.0, n
            )
            change = max(change, largest_size(steps, n))
            column_sums(kernel, u, sums, n, m)
            off, total, residual = 0.0, 0.0, 0.0
            for j in range(m):
                target = q[j] * math.exp(sides.columns + pull * shift - pull * gamma[j])
                away = abs(sums[j] * v[j] - target)
                off += away
                total += target
                residual = max(residual, away / target)
            error = off / total
            within += error <= tolerance
            if (error <= tolerance and (change <= settled or within > SETTLING)) or done >= most or hopeless:
                break
        if since == CHECK_EVERY:
            hopeless = not settling and is_hopeless(done, off, before, tolerance, patience)
            w, least, settling = next_relaxation(w, off, least, (off / before) ** (1.0 / since), settling)
            before, since = off, 0
        # Absorptions may be more frequent than CHECK_EVERY.
        hopeless = hopeless or (done % CHECK_EVERY == 0 and is_stopped(work.counter, off, np.nan))
        stale = far_rows + far_columns > 0
    for i in range(n):
        phi[i] += shift
    for j in range(m):
        gamma[j] -= shift
    return error, done, residual


@inner()
def _write_potentials(
    p: Any, q: Any, cost: Any, work: Any, n: int, m: int, epsilon: float, sides: Any, masses: Any, negligible: float,
    f: Any, g: Any,
) -> None:  # fmt: skip
    """Write f and g on all bins; bins that took no part get the exact update from the others."""
    for i in range(n):
        f[work.rows[i]] = epsilon * work.phi[i]
    for j in range(m):
        g[work.columns[j]] = epsilon * work.gamma[j]
    least = negligible
    while True:
        # `n < 0` and `n >= 0` for False and True: numba would compile `extend` once for each literal.
        extend(cost, n < 0, work.rows, n, q, 1 / masses[1], least, g, epsilon, f, work)
        _damp_others(work.rows, n, sides.damping, epsilon * sides.rows, f)
        extend(cost, n >= 0, work.columns, m, p, 1 / masses[0], least, f, epsilon, g, work)
        _damp_others(work.columns, m, sides.damping, epsilon * sides.columns, g)
        if least == 0 or n == count_positive(p) or m == count_positive(q):
            break
        # Both sides have light bins. With potentials from heavy bins alone, they would exchange more mass than they
        # hold.
        least = 0.0
    shift_f, shift_g = epsilon * math.log(masses[1]), epsilon * math.log(masses[0])
    for i in range(f.shape[0]):
        f[i] -= shift_f
    for j in range(g.shape[0]):
        g[j] -= shift_g


@inner()
def _damp_others(places: Any, count: int, damping: float, offset: float, potential: Any) -> None:
    at = 0
    for i in range(potential.shape[0]):
        if at < count and places[at] == i:
            at += 1
        else:
            potential[i] = damping * (potential[i] + offset)


@spliced
def _solve_by_steps(
    cost: Any, work: Any, n: int, m: int, epsilon: float, highest: float, masses: Any, limits: Any
) -> tuple[float, int, float, Any]:
    """Iterate at falling values of epsilon, from the potentials in gamma.

    Returns the error, the number of iterations, the largest relative error of a column, and the last `Sides`.
    """
    gamma, log_p, log_q = work.gamma, math.log(masses[0]), math.log(masses[1])
    done, step, error, residual = 0, epsilon, np.inf, np.inf
    while not limits.warm and step / STAGE_FACTOR <= FIRST_EPSILON * highest:
        step /= STAGE_FACTOR
    while True:
        last = step <= epsilon
        left = limits.most - done
        pull = step / limits.rho
        sides = Sides(pull, 1 / (1 + pull), log_p + pull * log_q, log_q + pull * log_p)
        for j in range(m):
            gamma[j] = gamma[j] / step + log_p
        error, more, residual = _iterate(
            cost, work, n, m, step, sides, limits.tolerance if last else STAGE_ERROR, limits.settled,
            left if last or left < STAGE_ITERATIONS else STAGE_ITERATIONS, limits.patience if last else np.inf, last,
        )  # fmt: skip
        done += more
        if last:
            break
        for j in range(m):
            gamma[j] = step * (gamma[j] - log_p)
        step = step * STAGE_FACTOR if step * STAGE_FACTOR > epsilon else epsilon
    return error, done, residual, sides


@spliced
def _solve(
    p: Any, q: Any, cost: Any, epsilon: float, f: Any, g: Any, plan: Any, outcome: Any, limits: Any, work: Any
) -> None:
    negligible = NEGLIGIBLE_32 if cost.itemsize == 4 else NEGLIGIBLE_64
    outcome[ERROR], outcome[ITERATIONS] = np.inf, 0
    highest = highest_cost(cost)
    masses = (mass_of(p), mass_of(q))
    # Written so that NaN fails too. Sides without mass are left to the caller.
    if not (highest < np.inf and 0 < masses[0] < np.inf and 0 < masses[1] < np.inf):
        return
    n = take(p, masses[0], negligible, work.p, work.rows)
    m = take(q, masses[1], negligible, work.q, work.columns)
    gamma = work.gamma
    for j in range(m):
        gamma[j] = g[work.columns[j]]  # times epsilon for now
    block = cost
    if n < cost.shape[0] or m < cost.shape[1]:
        highest, block = gather(cost, work, n, m), work.costs
    error, done, residual, sides = _solve_by_steps(block, work, n, m, epsilon, highest, masses, limits)
    outcome[ITERATIONS] = done
    if not error < np.inf:
        return
    _write_potentials(p, q, cost, work, n, m, epsilon, sides, masses, negligible, f, g)
    if plan.shape[0] > 0:
        write_plan(work, n, m, 1.0, plan)
    outcome[ERROR] = error
    if limits.settled < np.inf:
        _write_uncertainty(work, n, m, epsilon, residual, sides.damping, outcome)


@inner()
def _write_uncertainty(
    work: Any, n: int, m: int, epsilon: float, residual: float, damping: float, outcome: Any
) -> None:  # fmt: skip
    """Write the error and the spread of g, and the least eigenvalue of the equations for g without their constant.

    The constant has a closed form; the caller shifts g by it.
    """
    p, q, u, v, sums, number = work.p, work.q, work.u, work.v, work.column_sums, work.u.dtype.type
    lowest, highest, mass = np.inf, -np.inf, number(0)
    for j in range(m):
        lowest, highest = min(lowest, work.gamma[j]), max(highest, work.gamma[j])
        q[j] = sums[j] * v[j]
        mass += q[j]
    # The marginals of the plan as shares of its mass take the places of p and q.
    row_sums(work.kernel, v, work.row_sums, n, m)
    for i in range(n):
        u[i] /= mass
        p[i] = work.row_sums[i] * u[i]
    for j in range(m):
        q[j] /= mass
    least = 1 - damping * damping * (1 - eigenvalue_of_plan(work, n, m))
    outcome[POTENTIAL_ERROR] = epsilon * error_of_potential(residual, least, work.kernel.itemsize)
    outcome[SPREAD], outcome[LEAST_EIGENVALUE] = epsilon * (highest - lowest), least


@compiled(seconds=4)
def unbalanced_problems(counter: Any, posed: Any, limits: Any, answers: Any, space: Any) -> None:
    """As `sinkhorn_problems`, with the marginal penalty rho.

    The error is infinite too where a side has no mass or factors underflow. Then `f` and `g` are not written, or not
    completely.
    """
    p, q, costs, owner, epsilon = posed
    f, g, plans, outcome = answers
    work, bounds = named(counter, space), limits_of(limits)
    while True:
        k = next_task(counter)
        if k >= p.shape[0]:
            return
        _solve(p[k], q[k], costs[owner[k]], epsilon[k], f[k], g[k], plans[k % plans.shape[0]], outcome[k], bounds, work)
