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
    CLEARLY,
    ERROR,
    FEWEST,
    FIRST_EPSILON,
    ITERATIONS,
    LARGEST_ESTIMATE,
    LEAST_EIGENVALUE,
    LEAST_ITERATIONS,
    POTENTIAL_ERROR,
    SETTLING,
    SPREAD,
    STAGE_FACTOR,
)
from otloss.solvers.entropic.sinkhorn_steps_numba import (
    FAST,
    LARGEST_FACTOR,
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

STAGE_ITERATIONS, STAGE_ERROR = 12, 0.05  # limits of each stage but the last
CHECK_EVERY = 10  # iterations between two measurements of the contraction
LARGEST_RELAXED_PUSH = (
    0.8  # where w |r - 1| / (r + 1) is larger, an update is not over-relaxed (`sinkhorn_steps_numba`)
)
LOST = 1e-12  # a column is lost if its sum of G is below this or above its inverse: its potential is too far off
ATTEMPTS = 100  # exact updates of both sides before the iterations, at most
# Steps of Lanczos' method. It ends after FIRST_STEPS if the least eigenvalue is above CLEAR: one of a few bins among
# thousands has shown by then, and after three steps it has not.
LANCZOS_STEPS, FIRST_STEPS, CLEAR = 24, 8, 0.1
# |softmin(f) - f| / epsilon from which a symmetric problem updates the potentials and not the factors.
LARGEST_ASYMMETRY = 20.0
# Shares of the mass from which bins take part: 1 / share has to fit the kernel.
NEGLIGIBLE_32, NEGLIGIBLE_64 = 1e-20, 1e-150


class Scratch(NamedTuple):
    """The arrays that a thread works in. Vectors have the length of the longer side.

    Attributes:
        alpha, beta: the potentials absorbed so far, in float64 as all down to `absorbed`.
        totals, shifted, scores: exponents.
        phi, gamma, absorbed: of `sinkhorn_unbalanced`.
        p, q: shares of the mass, in the dtype of the costs as all down to `costs`.
        u, v: factors.
        row_sums, column_sums: of the plan or of G.
        x, before: two vectors of Lanczos' method.
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
    before: Any
    kernel: Any
    costs: Any
    rows: Any
    columns: Any
    counter: Any


class Limits(NamedTuple):
    """When the iterations of a problem end; `run_kernel` explains them. `warm`: whether g holds a start."""

    tolerance: float
    settled: float
    most: int
    patience: float
    warm: bool
    rho: float


def scratch(n: int, m: int, dtype: Any) -> tuple[tuple[np.ndarray, ...]]:
    """Return the arrays that `named` divides among the fields of `Scratch`, for problems with n by m costs."""
    longest = max(n, m)
    wide, narrow = np.empty((8, longest)), np.empty((8, longest), dtype)
    return ((wide, narrow, np.empty((2, n, m), dtype), np.empty((2, longest + 1), np.int64)),)


def answers(problems: int, n: int, m: int, g: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return f, g and the outcome for the kernels, from a start g (B, m) if there is one."""
    start = np.zeros((problems, m)) if g is None else np.array(g, np.float64, order="C")
    return np.zeros((problems, n)), start, np.full((problems, 5), np.nan)


@inner()
def named(counter: Any, space: Any) -> Scratch:
    wide, narrow, matrices, places = space
    # The kernel makes the named tuple: numba takes ten times as long to pass one from Python.
    return Scratch(
        wide[0], wide[1], wide[2], wide[3], wide[4], wide[5], wide[6], wide[7], narrow[0], narrow[1], narrow[2],
        narrow[3], narrow[4], narrow[5], narrow[6], narrow[7], matrices[0], matrices[1], places[0], places[1],
        counter,
    )  # fmt: skip


@inner()
def limits_of(values: Any) -> Limits:
    tolerance, settled, most, patience, warm, rho = values
    return Limits(tolerance, settled, most, patience, warm, rho)


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
def take(weights: Any, mass: float, negligible: float, shares: Any, places: Any) -> int:
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
    for attempt in range(ATTEMPTS):
        absorb(cost, beta, scores, p, q, epsilon, alpha, work.totals, work.kernel, sums, n, m)
        lost = False
        for j in range(m):
            lost |= not (sums[j] > LOST and sums[j] < 1 / LOST)
        if not lost or attempt == ATTEMPTS - 1:
            break
        for j in range(m):
            for i in range(n):
                scores[i] = (alpha[i] - cost[i, j]) / epsilon + math.log(p[i])
            beta[j] = softmin_of_scores(scores, epsilon, n)
    return column_error(q, sums, work.v, m)


@inner()
def is_hopeless(done: int, off: float, before: float, tolerance: float, patience: float) -> bool:
    """Return whether the tolerance takes more than `patience` iterations, at the last contraction."""
    if done < FEWEST:
        return False
    speed = -math.log(off / before) / CHECK_EVERY
    left = math.log(off / tolerance) / speed if speed > 0 else np.inf
    return left > patience * (1.0 if done >= LEAST_ITERATIONS else CLEARLY)


@spliced
def _iterate(
    cost: Any, work: Any, n: int, m: int, epsilon: float, tolerance: float, settled: float, most: int, patience: float,
    last: bool,
) -> tuple[float, int]:  # fmt: skip
    """Iterate until the error is within the tolerance; return it, and the number of iterations.

    beta then holds g, and after the last epsilon alpha holds f. Wherever the loop may end, `column_sums` holds G^T U.
    """
    p, q, u, v, sums_p, sums = work.p, work.q, work.u, work.v, work.row_sums, work.column_sums
    alpha, beta, kernel = work.alpha, work.beta, work.kernel
    done, since, judged, changed, within, settling, stale = 0, 0, 0, 0, 0, True, True
    w, hopeless = 1.0, False
    before = last_judged = least = error = np.inf
    number = u.dtype.type
    steepest, largest_step = number(LARGEST_RELAXED_PUSH), number(LARGEST_FACTOR)
    while True:
        steep = False
        if stale:
            stale, since = False, 0
            off = _absorb_factors(cost, work, n, m, epsilon)
        else:
            row_sums(kernel, v, sums_p, n, m)
            off, steep = update(p, sums_p, u, number(w), steepest, largest_step, n)
            column_sums(kernel, u, sums, n, m)
            off_columns, steep_columns = update(q, sums, v, number(w), steepest, largest_step, m)
            off, steep = off + off_columns, steep or steep_columns
            done += 1
            since += 1
        if off <= tolerance or done >= most or hopeless:
            if not last:
                break
            change = exact_update(q, sums, v, m)
            row_sums(kernel, v, sums_p, n, m)
            change = max(change, exact_update(p, sums_p, u, n))
            column_sums(kernel, u, sums, n, m)
            error = column_error(q, sums, v, m)
            within += error <= tolerance
            if (error <= tolerance and (change <= settled or within > SETTLING)) or done >= most or hopeless:
                break
        if done - judged == CHECK_EVERY:  # absorptions may be more frequent than this
            is_slow = done - changed > CHECK_EVERY and is_hopeless(done, off, last_judged, tolerance, patience)
            hopeless = is_slow or is_stopped(work.counter, off, np.nan)
            judged, last_judged = done, off
        if since == CHECK_EVERY:
            w, least, settling = next_relaxation(w, off, least, (off / before) ** (1.0 / since), settling)
            before, since = off, 0
            changed = done if settling else changed
        if (steep or since == 0) and (needs_absorption(u, p, n) or needs_absorption(v, q, m)):
            add_logs(beta, v, q, epsilon, m)
            stale = True
    add_logs(beta, v, q, epsilon, m)
    add_logs(alpha, u, p, epsilon, n)
    return error, done


@inner(fastmath=FAST)
def eigenvalue_of_plan(work: Any, n: int, m: int) -> float:
    """Return 1 - lambda, where lambda is the second eigenvalue of the operator T of `round_trip`.

    `work.p` and `work.q` are the marginals of the plan U G V, of mass one. A few steps of Lanczos' method; all vectors
    but the marginals and the factors are overwritten.
    """
    p, q, u, v, sums, x, before = work.p, work.q, work.u, work.v, work.column_sums, work.x, work.before
    diagonal, beside, number = work.totals, work.scores, u.dtype.type
    state = np.uint32(1)
    for j in range(m):
        # The start has pseudo-random numbers of sizes from 0.5 to 1. One with a pattern is orthogonal to eigenvectors
        # of uniform weights, and one with small numbers nearly so to that of a bin which exchanges mass with one bin.
        state = np.uint32(state * np.uint32(1664525) + np.uint32(1013904223))
        size = 0.5 + (state >> np.uint32(2)) * 2.0**-31
        before[j], x[j] = number(0), number(size if state & np.uint32(1 << 31) else -size)
    count = 0
    for k in range(min(LANCZOS_STEPS, m - 1)):
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
        if count == FIRST_STEPS:
            least = least_eigenvalue(diagonal, beside, count)
            if least > CLEAR:
                return least
        a, b = number(diagonal[k]), number(beside[k - 1] if k > 0 else 0)
        for j in range(m):
            after = sums[j] - a * x[j] - b * before[j]
            before[j], x[j] = x[j], after
    return least_eigenvalue(diagonal, beside, count)


@inner()
def error_of_potential(residual: float, least: float, itemsize: int) -> float:
    """Return an estimate of the largest error of g / epsilon after exact updates.

    Let e be the error and r the residual P^T 1 / q - 1. To first order (1 - T) e = r. So |e| <= |r| / (1 - lambda) in
    the root of the mean square by q. Light bins hardly count in this mean, so the largest |r_j| replaces |r|. Where the
    estimate is above LARGEST_ESTIMATE, the first order does not hold.
    """
    rounding = 1e-6 if itemsize == 4 else 1e-15
    error = (residual + rounding) / least
    return error if error <= LARGEST_ESTIMATE else np.inf


@inner()
def extend(
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
        taken = 0
        for j in range(weights.shape[0]):
            if shifted[j] > -np.inf:
                scores[taken] = shifted[j] - (cost[j, i] if is_transposed else cost[i, j]) / epsilon
                taken += 1
        out[i] = softmin_of_scores(scores, epsilon, taken)


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
    # `n < 0` and `n >= 0` for False and True: numba would compile `extend` once for each literal.
    extend(cost, n < 0, rows, n, q, inverse_q, negligible, g, epsilon, f, work)
    extend(cost, n >= 0, columns, m, p, inverse_p, negligible, f, epsilon, g, work)
    if n < count_positive(p) and m < count_positive(q):
        # Both sides have light bins. With potentials from heavy bins alone, they would exchange more mass than they
        # hold.
        extend(cost, n >= 0, columns, m, p, inverse_p, mass - mass, f, epsilon, g, work)
        extend(cost, n < 0, rows, n, q, inverse_q, mass - mass, g, epsilon, f, work)


@inner()
def write_plan(work: Any, n: int, m: int, mass: float, plan: Any) -> None:
    """Write the plan, mass U G V; bins that took no part hold nothing."""
    number = plan.dtype.type
    if n < plan.shape[0] or m < plan.shape[1]:
        for i in range(plan.shape[0]):
            for j in range(plan.shape[1]):
                plan[i, j] = number(0)
    for i in range(n):
        ratio, row, factor = work.kernel[i], plan[work.rows[i]], work.u[i] * number(mass)
        if m == plan.shape[1]:
            for j in range(m):
                row[j] = factor * ratio[j] * work.v[j]
        else:
            for j in range(m):
                row[work.columns[j]] = factor * ratio[j] * work.v[j]


@inner()
def gather(cost: Any, work: Any, n: int, m: int) -> float:
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
    outcome[ERROR], outcome[POTENTIAL_ERROR], outcome[SPREAD], outcome[LEAST_EIGENVALUE] = 0, 0, 0, 1


@spliced
def _solve_by_steps(
    cost: Any, work: Any, n: int, m: int, epsilon: float, highest: float, limits: Any
) -> tuple[float, int]:
    """Iterate at falling values of epsilon, from the potentials in beta; return the error and the iterations."""
    beta = work.beta
    done, step, error = 0, epsilon, np.inf
    while not limits.warm and step / STAGE_FACTOR <= FIRST_EPSILON * highest:
        step /= STAGE_FACTOR
    while True:
        last = step <= epsilon
        left = limits.most - done
        error, more = _iterate(
            cost, work, n, m, step, limits.tolerance if last else STAGE_ERROR, limits.settled,
            left if last or left < STAGE_ITERATIONS else STAGE_ITERATIONS, limits.patience if last else np.inf, last,
        )  # fmt: skip
        done += more
        if last:
            break
        # Without its mean, g does not keep the size, and so the rounding, that it had at a large epsilon.
        mean = 0.0
        for j in range(m):
            mean += np.float64(work.q[j]) * beta[j]
        for j in range(m):
            beta[j] -= mean
        step = step * STAGE_FACTOR if step * STAGE_FACTOR > epsilon else epsilon
    return error, done


@spliced
def _solve(
    p: Any, q: Any, cost: Any, epsilon: float, f: Any, g: Any, plan: Any, outcome: Any, limits: Any, work: Any
) -> None:
    """Solve one problem from the start in g; write f and g on all bins, and the plan unless `plan` is empty."""
    negligible = NEGLIGIBLE_32 if cost.itemsize == 4 else NEGLIGIBLE_64
    outcome[ERROR], outcome[ITERATIONS] = np.inf, 0
    highest = highest_cost(cost)
    scale_p, scale_q, mass = balance(p, q, 1.0)  # checked before
    # Written so that NaN fails too.
    if not (highest < np.inf and mass < np.inf):
        return
    n = take(p, mass / scale_p, negligible, work.p, work.rows)
    m = take(q, mass / scale_q, negligible, work.q, work.columns)
    if n == 0 or m == 0:
        _write_zeros(f, g, outcome)
        write_plan(work, 0 * n, 0 * m, mass, plan)
        return
    alpha, beta = work.alpha, work.beta
    for i in range(n):
        alpha[i] = 0
    for j in range(m):
        beta[j] = g[work.columns[j]]
    block = cost
    if n < cost.shape[0] or m < cost.shape[1]:
        highest, block = gather(cost, work, n, m), work.costs
    error, done = _solve_by_steps(block, work, n, m, epsilon, highest, limits)
    _write_potentials(p, q, cost, work, n, m, epsilon, mass, (scale_p, scale_q), negligible, f, g)
    if plan.shape[0] > 0:
        write_plan(work, n, m, mass, plan)
    if limits.settled < np.inf:
        lowest_g, highest_g = beta[0], beta[0]
        for j in range(m):
            lowest_g, highest_g = min(lowest_g, beta[j]), max(highest_g, beta[j])
        residual = 0.0
        for j in range(m):
            residual = max(residual, abs(np.float64(work.column_sums[j] * work.v[j] / work.q[j]) - 1))
        least = eigenvalue_of_plan(work, n, m)
        outcome[POTENTIAL_ERROR] = epsilon * error_of_potential(residual, least, cost.itemsize)
        outcome[SPREAD], outcome[LEAST_EIGENVALUE] = highest_g - lowest_g, least
    outcome[ERROR], outcome[ITERATIONS] = error, done


@compiled(seconds=4)
def sinkhorn_problems(counter: Any, posed: Any, limits: Any, answers: Any, space: Any) -> None:
    """Solve problem k = (p[k], q[k], costs[owner[k]], epsilon[k]) from g[k], which holds zeros unless limits say warm.

    posed       p (B, n), q (B, m) and costs (matrices, n, m) in float32 or float64, in which the iterations run;
                owner (B,) and epsilon (B,)
    limits      the fields of `Limits`
    answers     f (B, n) and g (B, m) in float64; plans (B, n, m) in the dtype of the costs, or (1, 0, 0) for none;
                outcome (B, 5), which gets what `run_kernel` returns: infinity and NaN where the problem is not
                valid. Potentials of a problem without mass are 0
    space       the arrays of `scratch`
    """
    p, q, costs, owner, epsilon = posed
    f, g, plans, outcome = answers
    work, bounds = named(counter, space), limits_of(limits)
    while True:
        k = next_task(counter)
        if k >= p.shape[0]:
            return
        _solve(p[k], q[k], costs[owner[k]], epsilon[k], f[k], g[k], plans[k % plans.shape[0]], outcome[k], bounds, work)


@inner()
def _iterate_symmetric(
    cost: Any, work: Any, n: int, epsilon: float, tolerance: float, settled: float, most: int
) -> tuple[float, int]:  # fmt: skip
    p, u, v, sums, weight = work.p, work.u, work.v, work.column_sums, work.row_sums
    alpha, beta, kernel = work.alpha, work.beta, work.kernel
    largest_step = u.dtype.type(LARGEST_FACTOR)
    done, closed, change = 0, False, 0.0
    while True:
        absorb(cost, beta, work.scores, p, p, epsilon, alpha, work.totals, kernel, sums, n, n)
        for i in range(n):
            v[i] = p[i]
        error, farthest = column_error(p, sums, v, n), 0.0
        for i in range(n):
            farthest = max(farthest, abs(beta[i] - alpha[i]))
        near = farthest <= LARGEST_ASYMMETRY * epsilon
        finished = (error <= tolerance and near) or done >= most
        if finished and closed and (change <= settled or done >= most):
            return error, done
        if finished and not closed:
            # An exact update of g. The absorption that follows is the exact update of f.
            change, closed = exact_update(p, sums, v, n), True
            add_logs(beta, v, p, epsilon, n)
            continue
        closed = False
        for i in range(n):
            # The rows of G have alpha absorbed. The symmetric plan has beta in rows and columns.
            weight[i], u[i] = math.exp((beta[i] - alpha[i]) / epsilon) if near else 1, p[i]
        if not near:
            for i in range(n):
                beta[i] = (alpha[i] + beta[i]) / 2
            done += 1
            continue
        off = np.inf
        while (off > tolerance or change > settled) and done < most:
            off, change = symmetric_update(kernel, p, weight, u, sums, largest_step, n)
            done += 1
            most = done if is_stopped(work.counter, off, np.nan) else most
            if done % CHECK_EVERY == 0 and needs_absorption(u, p, n):
                break
        add_logs(beta, u, p, epsilon, n)


@compiled()
def symmetric_problems(counter: Any, posed: Any, limits: Any, answers: Any, space: Any) -> None:
    """As `sinkhorn_problems`, of p with itself at symmetric costs, without stages of epsilon and without plans."""
    p, _, costs, owner, epsilon = posed
    f, g, _, outcome = answers
    negligible = NEGLIGIBLE_32 if costs.itemsize == 4 else NEGLIGIBLE_64
    work, bounds = named(counter, space), limits_of(limits)
    while True:
        k = next_task(counter)
        if k >= p.shape[0]:
            return
        cost, mass, start = costs[owner[k]], mass_of(p[k]), g[k]
        outcome[k, ERROR], outcome[k, ITERATIONS] = 0, 0
        if mass == 0:
            _write_zeros(f[k], start, outcome[k])
            continue
        n = take(p[k], mass, negligible, work.p, work.rows)
        for i in range(n):
            work.columns[i], work.alpha[i], work.beta[i], work.q[i] = work.rows[i], 0, start[work.rows[i]], work.p[i]
        block = cost
        if n < cost.shape[0]:
            gather(cost, work, n, n)
            block = work.costs
        outcome[k, ERROR], outcome[k, ITERATIONS] = _iterate_symmetric(
            block, work, n, epsilon[k], bounds.tolerance, bounds.settled, bounds.most
        )
        _write_potentials(p[k], p[k], cost, work, n, n, epsilon[k], mass, (1.0, 1.0), negligible, f[k], start)
