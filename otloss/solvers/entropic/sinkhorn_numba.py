"""Balanced Sinkhorn for a batch of dense problems on a CPU: scaling form, one problem per thread at a time.

Let M be the mass, and p and q shares of it. With the potentials f and g the plan is M P,

    P_ij = p_i q_j exp((f_i + g_j - C_ij) / epsilon) = U_i G_ij V_j,    G_ij = exp((alpha_i + beta_j - C_ij) / epsilon)

alpha and beta are the potentials absorbed into G so far; right after an absorption U = p and V = q. At a solution no
entry of G is above 1 / max(p_i, q_j), so G does not overflow. Light bins have entries as large as those of others, so
their potentials are as accurate.

    absorb      alpha = softmin(beta), and G from it. This is an exact update of f, with exponents in float64.
    iterate     U = p / (G V),  V = q / (G^T U), over-relaxed: see `sinkhorn_steps_numba`

Epsilon falls in stages; each begins with the potentials of the last. Every problem of the batch stops by itself. The
transport of p to itself (symmetric) takes the mean of f and softmin(f), which at least halves the error in each
iteration where the kernel is positive definite.

The error is the sum of |P 1 - p| and |P^T 1 - q|. Light bins hardly count in it. So the iterations end with an exact
update of g and then of f, and the reported error is that of the columns after them. Bins without mass, or with next to
none, take no part; soft minima give their potentials at the end.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from otloss._numba.compile import compiled, inner, largest, spliced
from otloss._numba.sums import balance, mass_of
from otloss._numba.tasks import is_stopped, next_task
from otloss.solvers.entropic.interface import (
    ERROR,
    ITERATIONS,
    LEAST_EIGENVALUE,
    POTENTIAL_ERROR,
    POTENTIAL_RANGE,
    SCHEDULE,
)
from otloss.solvers.entropic.sinkhorn_steps_numba import (
    FAST,
    UPDATE_BOUNDS,
    absorb,
    add_logs,
    column_error,
    column_sums,
    exact_update,
    least_eigenvalue,
    needs_absorption,
    next_relaxation,
    product,
    round_trip,
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
        lanczos_steps, first_steps, large_eigenvalue: Lanczos' method ends after `first_steps` if the least eigenvalue
            is above `large_eigenvalue`: the eigenvalue of a few bins among thousands has shown by then, and after three
            steps it has not.
        largest_asymmetry: |softmin(f) - f| / epsilon, above which a symmetric problem updates the potentials and not
            the factors.
        negligible_32, negligible_64: shares of the mass from which bins take part: 1 / share has to fit the kernel.
    """

    stage_iterations: int = 12
    stage_error: float = 0.05
    check_every: int = 10
    smallest_column_sum: float = 1e-12
    attempts: int = 100
    lanczos_steps: int = 24
    first_steps: int = 8
    large_eigenvalue: float = 0.1
    largest_asymmetry: float = 20.0
    negligible_32: float = 1e-20
    negligible_64: float = 1e-150


ITERATION_BOUNDS = IterationBounds()


class Scratch(NamedTuple):
    """The arrays that a thread works in. Vectors have the length of the longer side.

    Attributes:
        alpha, beta: the potentials absorbed so far, in float64 as all down to `absorbed`.
        totals, shifted, scores: exponents.
        phi, gamma, absorbed: potentials over epsilon of `sinkhorn_unbalanced_numba`.
        p, q: shares of the mass, in the dtype of the costs as all down to `costs`.
        u, v: factors.
        row_sums, column_sums: of the plan or of G.
        x, previous: two vectors of Lanczos' method.
        kernel: the matrix G.
        costs: of the bins that take part.
        rows, columns: the places of the bins that take part.
        counter: of the tasks.
    """

    alpha: Any
    beta: Any
    totals: Any
    shifted: Any
    scores: Any
    phi: Any
    gamma: Any
    absorbed: Any
    p: Any
    q: Any
    u: Any
    v: Any
    row_sums: Any
    column_sums: Any
    x: Any
    previous: Any
    kernel: Any
    costs: Any
    rows: Any
    columns: Any
    counter: Any


class KernelBudget(NamedTuple):
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


def empty_arrays(n: int, m: int, dtype: Any) -> tuple[tuple[np.ndarray, ...]]:
    """Return the arrays that `build_scratch` divides among the fields of `Scratch`, for problems with n by m costs."""
    longest = max(n, m)
    wide, narrow = np.empty((8, longest)), np.empty((8, longest), dtype)
    return ((wide, narrow, np.empty((2, n, m), dtype), np.empty((2, longest + 1), np.int64)),)


def empty_results(count: int, n: int, m: int, g: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return f, g and the outcome for the kernels, from a start g (B, m) if there is one."""
    start = np.zeros((count, m)) if g is None else np.array(g, np.float64, order="C")
    return np.zeros((count, n)), start, np.full((count, 5), np.nan)


@inner()
def build_scratch(counter: Any, arrays: Any) -> Scratch:
    wide, narrow, matrices, places = arrays
    # The kernel makes the named tuple: numba takes ten times as long to pass one from Python.
    return Scratch(
        wide[0], wide[1], wide[2], wide[3], wide[4], wide[5], wide[6], wide[7], narrow[0], narrow[1], narrow[2],
        narrow[3], narrow[4], narrow[5], narrow[6], narrow[7], matrices[0], matrices[1], places[0], places[1],
        counter,
    )  # fmt: skip


@inner()
def build_budget(values: Any) -> KernelBudget:
    tolerance, largest_change, max_iterations, patience, is_warm, estimates_error = values
    return KernelBudget(tolerance, largest_change, max_iterations, patience, is_warm, estimates_error)


@inner()
def highest_cost(cost: Any) -> float:
    """Return the largest cost; NaN if any is negative, NaN or infinite."""
    top, wrong = cost[0, 0], 0
    for i in range(cost.shape[0]):
        row = cost[i]
        for j in range(row.shape[0]):
            wrong |= not row[j] >= 0
        highest = largest(row, row.shape[0])
        top = highest if highest > top else top
    return np.float64(top) if wrong == 0 and top < np.inf else np.nan


@inner()
def gather_shares(weights: Any, mass: float, negligible: float, shares: Any, places: Any) -> int:
    """Write the shares of the mass that are not negligible, and the places of their bins; return their number."""
    count, inverse = 0, 1 / mass
    for k in range(weights.shape[0]):
        share = weights[k] * inverse
        shares[count], places[count] = share, k
        count += share > negligible
    return count


@spliced
def _absorb_factors(cost: Any, work: Any, n: int, m: int, epsilon: float) -> float:
    """Absorb the factors into the potentials; while a column is lost, update g exactly and absorb again.

    Returns the error of the columns.
    """
    p, q, sums, alpha, beta, scores = work.p, work.q, work.column_sums, work.alpha, work.beta, work.scores
    for i in range(n):
        work.u[i] = p[i]
    for j in range(m):
        work.v[j] = q[j]
    for attempt in range(ITERATION_BOUNDS.attempts):
        absorb(cost, beta, scores, p, q, epsilon, alpha, work.totals, work.kernel, sums, n, m)
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
    return needed > patience * (1.0 if iterations >= SCHEDULE.first_check else SCHEDULE.early_factor)


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
    cost: Any, work: Any, n: int, m: int, epsilon: float, tolerance: float, largest_change: float, max_iterations: int,
    patience: float, is_last: bool,
) -> tuple[float, int]:  # fmt: skip
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
            error = _absorb_factors(cost, work, n, m, epsilon)
        else:
            error, is_steep = _relaxed_updates(work, n, m, w)
            iterations += 1
            since_absorption += 1
        is_at_end = iterations >= max_iterations or is_given_up
        if error <= tolerance or is_at_end:
            if not is_last:
                break
            change, final_error = _update_exactly(work, n, m)
            is_within = final_error <= tolerance
            count_within += is_within
            is_accurate = change <= largest_change or count_within > SCHEDULE.extra_iterations
            if (is_within and is_accurate) or is_at_end:
                break
        if iterations - checked == ITERATION_BOUNDS.check_every:
            is_given_up = is_stopped(work.counter, error, np.nan) or (
                iterations - relaxed > ITERATION_BOUNDS.check_every
                and is_too_slow(iterations, error, checked_error, tolerance, patience)
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


@inner(fastmath=FAST)
def eigenvalue_of_plan(work: Any, n: int, m: int) -> float:
    """Return 1 - lambda, where lambda is the second eigenvalue of the operator T of `round_trip`.

    `work.p` and `work.q` are the marginals of the plan U G V, of mass one. A few steps of Lanczos' method; all vectors
    but the marginals and the factors are overwritten.
    """
    p, q, u, v, sums, x, previous = work.p, work.q, work.u, work.v, work.column_sums, work.x, work.previous
    diagonal, beside, number = work.totals, work.scores, u.dtype.type
    state = np.uint32(1)
    for j in range(m):
        # The start has pseudo-random numbers of sizes from 0.5 to 1. One with a pattern is orthogonal to eigenvectors
        # of uniform weights, and one with small numbers nearly so to that of a bin which exchanges mass with one bin.
        # The root of the weight gives each bin an equal part, however light it is.
        state = np.uint32(state * np.uint32(1664525) + np.uint32(1013904223))
        size = (0.5 + (state >> np.uint32(2)) * 2.0**-31) / math.sqrt(max(q[j], ITERATION_BOUNDS.negligible_32))
        previous[j], x[j] = number(0), number(size if state & np.uint32(1 << 31) else -size)
    count = 0
    for k in range(min(ITERATION_BOUNDS.lanczos_steps, m - 1)):
        # The first eigenvector is constant. Rounding brings it back, so it is removed each time.
        mean = number(0)
        for j in range(m):
            mean += q[j] * x[j]
        for j in range(m):
            x[j] -= mean
        length = math.sqrt(product(q, x, x, m))
        if k > 0:
            beside[k - 1] = length
        if not length > 1e-6:
            break
        for j in range(m):
            x[j] /= number(length)
        round_trip(work.kernel, p, q, u, v, x, work.row_sums, sums, n, m)
        diagonal[k] = product(q, x, sums, m)
        count += 1
        if count == ITERATION_BOUNDS.first_steps:
            least = least_eigenvalue(diagonal, beside, count)
            if least > ITERATION_BOUNDS.large_eigenvalue:
                return least
        a, b = number(diagonal[k]), number(beside[k - 1] if k > 0 else 0)
        for j in range(m):
            following = sums[j] - a * x[j] - b * previous[j]
            previous[j], x[j] = x[j], following
    return least_eigenvalue(diagonal, beside, count)


@inner()
def error_of_potential(residual: float, least: float, itemsize: int) -> float:
    """Return an estimate of the largest error of g / epsilon after exact updates.

    Let e be the error and r the residual P^T 1 / q - 1. To first order (1 - T) e = r. So |e| <= |r| / (1 - lambda) in
    the root of the mean square by q. Light bins hardly count in this mean, so the largest |r_j| replaces |r|. Where the
    estimate is above SCHEDULE.largest_estimate, the first order does not hold.
    """
    rounding = 1e-6 if itemsize == 4 else 1e-15
    error = (residual + rounding) / least
    return error if error <= SCHEDULE.largest_estimate else np.inf


@inner()
def write_other_potentials(
    cost: Any, is_transposed: bool, places: Any, count: int, weights: Any, inverse: float, least: float,
    potential: Any, epsilon: float, out: Any, work: Any,
) -> None:  # fmt: skip
    """Write the potentials of bins that took no part: soft minima over the other side's bins above a share `least`."""
    if count == out.shape[0]:
        return
    shifted, scores = work.shifted, work.scores
    for j in range(weights.shape[0]):
        share = weights[j] * inverse
        shifted[j] = potential[j] / epsilon + math.log(share) if share > least else -np.inf
    at = 0
    for i in range(out.shape[0]):
        if at < count and places[at] == i:
            at += 1
            continue
        number = 0
        for j in range(weights.shape[0]):
            if shifted[j] > -np.inf:
                scores[number] = shifted[j] - (cost[j, i] if is_transposed else cost[i, j]) / epsilon
                number += 1
        out[i] = softmin_of_scores(scores, epsilon, number)


@inner()
def count_positive(weights: Any) -> int:
    count = 0
    for k in range(weights.shape[0]):
        count += weights[k] > 0
    return count


@inner()
def _write_potentials(
    p: Any, q: Any, cost: Any, work: Any, n: int, m: int, epsilon: float, mass: float, scales: Any, negligible: float,
    f: Any, g: Any,
) -> None:  # fmt: skip
    rows, columns, inverse_p, inverse_q = work.rows, work.columns, scales[0] / mass, scales[1] / mass
    for i in range(n):
        f[rows[i]] = work.alpha[i]
    for j in range(m):
        g[columns[j]] = work.beta[j]
    # `n < 0` and `n >= 0` for False and True: numba would compile `write_other_potentials` once for each literal.
    write_other_potentials(cost, n < 0, rows, n, q, inverse_q, negligible, g, epsilon, f, work)
    write_other_potentials(cost, n >= 0, columns, m, p, inverse_p, negligible, f, epsilon, g, work)
    if n < count_positive(p) and m < count_positive(q):
        # Both sides have light bins. With potentials from heavy bins alone, they would exchange more mass than they
        # hold.
        write_other_potentials(cost, n >= 0, columns, m, p, inverse_p, mass - mass, f, epsilon, g, work)
        write_other_potentials(cost, n < 0, rows, n, q, inverse_q, mass - mass, g, epsilon, f, work)


@inner()
def gather_costs(cost: Any, work: Any, n: int, m: int) -> float:
    """Write the costs of the bins that take part; return the largest."""
    highest = 0.0
    for i in range(n):
        source, target = cost[work.rows[i]], work.costs[i]
        for j in range(m):
            c = np.float64(source[work.columns[j]])
            target[j] = c
            highest = c if c > highest else highest
    return highest


@inner()
def _write_zeros(f: Any, g: Any, outcome: Any) -> None:
    """Write the answer of a problem without mass."""
    for i in range(f.shape[0]):
        f[i] = 0
    for j in range(g.shape[0]):
        g[j] = 0
    outcome[ERROR], outcome[POTENTIAL_ERROR], outcome[POTENTIAL_RANGE], outcome[LEAST_EIGENVALUE] = 0, 0, 0, 1


@spliced
def _run_stages(cost: Any, work: Any, n: int, m: int, epsilon: float, highest: float, limits: Any) -> tuple[float, int]:
    """Iterate at falling values of epsilon, from the potentials in beta; return the error and the iterations."""
    beta = work.beta
    iterations, width, error = 0, epsilon, np.inf
    while not limits.is_warm and width / SCHEDULE.stage_factor <= SCHEDULE.first_epsilon_over_cost * highest:
        width /= SCHEDULE.stage_factor
    while True:
        is_last = width <= epsilon
        remaining = limits.max_iterations - iterations
        is_cut = is_last or remaining < ITERATION_BOUNDS.stage_iterations
        error, count = _iterate(
            cost, work, n, m, width, limits.tolerance if is_last else ITERATION_BOUNDS.stage_error,
            limits.largest_change, remaining if is_cut else ITERATION_BOUNDS.stage_iterations,
            limits.patience if is_last else np.inf, is_last,
        )  # fmt: skip
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
def _solve(p: Any, q: Any, cost: Any, epsilon: float, f: Any, g: Any, outcome: Any, limits: Any, work: Any) -> None:
    """Solve one problem from the start in g; write f and g on all bins."""
    negligible = ITERATION_BOUNDS.negligible_32 if cost.itemsize == 4 else ITERATION_BOUNDS.negligible_64
    outcome[ERROR], outcome[ITERATIONS] = np.inf, 0
    highest = highest_cost(cost)
    scale_p, scale_q, mass = balance(p, q, 1.0)  # checked before
    # Written so that NaN fails too.
    if not (highest < np.inf and mass < np.inf):
        return
    n = gather_shares(p, mass / scale_p, negligible, work.p, work.rows)
    m = gather_shares(q, mass / scale_q, negligible, work.q, work.columns)
    if n == 0 or m == 0:
        _write_zeros(f, g, outcome)
        return
    alpha, beta = work.alpha, work.beta
    for i in range(n):
        alpha[i] = 0
    for j in range(m):
        beta[j] = g[work.columns[j]]
    block = cost
    if n < cost.shape[0] or m < cost.shape[1]:
        highest, block = gather_costs(cost, work, n, m), work.costs
    error, iterations = _run_stages(block, work, n, m, epsilon, highest, limits)
    _write_potentials(p, q, cost, work, n, m, epsilon, mass, (scale_p, scale_q), negligible, f, g)
    if limits.estimates_error:
        lowest_g, highest_g = beta[0], beta[0]
        for j in range(m):
            lowest_g, highest_g = min(lowest_g, beta[j]), max(highest_g, beta[j])
        residual = 0.0
        for j in range(m):
            residual = max(residual, abs(np.float64(work.column_sums[j] * work.v[j] / work.q[j]) - 1))
        least = eigenvalue_of_plan(work, n, m)
        outcome[POTENTIAL_ERROR] = epsilon * error_of_potential(residual, least, cost.itemsize)
        outcome[POTENTIAL_RANGE], outcome[LEAST_EIGENVALUE] = highest_g - lowest_g, least
    outcome[ERROR], outcome[ITERATIONS] = error, iterations


@compiled()
def sinkhorn_problems(counter: Any, problems: Any, limits: Any, results: Any, arrays: Any) -> None:
    """Solve problem k = (p[k], q[k], costs[owner[k]], epsilon[k]) from g[k], which holds zeros unless limits say warm.

    problems    p (B, n), q (B, m) and costs (matrices, n, m) in float32 or float64, in which the iterations run;
                owner (B,) and epsilon (B,)
    limits      the fields of `KernelBudget`
    results     f (B, n) and g (B, m) in float64; outcome (B, 5), which gets what `run_kernel` returns: infinity and NaN
                where the problem is not valid. Potentials of a problem without mass are 0
    arrays      what `empty_arrays` returns
    """
    p, q, costs, owner, epsilon = problems
    f, g, outcome = results
    work, bounds = build_scratch(counter, arrays), build_budget(limits)
    while True:
        k = next_task(counter)
        if k >= p.shape[0]:
            return
        _solve(p[k], q[k], costs[owner[k]], epsilon[k], f[k], g[k], outcome[k], bounds, work)


@inner()
def _iterate_symmetric(
    cost: Any, work: Any, n: int, epsilon: float, tolerance: float, largest_change: float, max_iterations: int
) -> tuple[float, int]:  # fmt: skip
    """Iterate f <- (f + softmin(f)) / 2 until the error is within the tolerance; return it and the iterations.

    Far from the solution the potentials are updated, and near it the factors.
    """
    p, u, v, sums, weight = work.p, work.u, work.v, work.column_sums, work.row_sums
    alpha, beta, kernel = work.alpha, work.beta, work.kernel
    largest_factor = u.dtype.type(UPDATE_BOUNDS.largest_factor)
    iterations, is_exact, change = 0, False, 0.0
    while True:
        absorb(cost, beta, work.scores, p, p, epsilon, alpha, work.totals, kernel, sums, n, n)
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
def symmetric_problems(counter: Any, problems: Any, limits: Any, results: Any, arrays: Any) -> None:
    """As `sinkhorn_problems`, of p with itself at symmetric costs and without stages of epsilon."""
    p, _, costs, owner, epsilon = problems
    f, g, outcome = results
    negligible = ITERATION_BOUNDS.negligible_32 if costs.itemsize == 4 else ITERATION_BOUNDS.negligible_64
    work, bounds = build_scratch(counter, arrays), build_budget(limits)
    while True:
        k = next_task(counter)
        if k >= p.shape[0]:
            return
        cost, mass, start = costs[owner[k]], mass_of(p[k]), g[k]
        outcome[k, ERROR], outcome[k, ITERATIONS] = 0, 0
        if mass == 0:
            _write_zeros(f[k], start, outcome[k])
            continue
        n = gather_shares(p[k], mass, negligible, work.p, work.rows)
        for i in range(n):
            work.columns[i], work.alpha[i], work.beta[i], work.q[i] = work.rows[i], 0, start[work.rows[i]], work.p[i]
        block = cost
        if n < cost.shape[0]:
            gather_costs(cost, work, n, n)
            block = work.costs
        outcome[k, ERROR], outcome[k, ITERATIONS] = _iterate_symmetric(
            block, work, n, epsilon[k], bounds.tolerance, bounds.largest_change, bounds.max_iterations
        )
        _write_potentials(p[k], p[k], cost, work, n, n, epsilon[k], mass, (1.0, 1.0), negligible, f[k], start)
