"""Balanced Sinkhorn for a batch of dense problems on a CPU: scaling form, one problem per thread at a time.

With p, q over their mass and potentials f, g the plan is `P_ij = p_i q_j exp((f_i + g_j - C_ij) / epsilon)`. It is held
as `P_ij = U_i G_ij V_j`, where `G_ij = exp((alpha_i + beta_j - C_ij) / epsilon)` has the potentials that were absorbed
before, and U = p, V = q then. At a solution no entry of G is above `1 / max(p_i, q_j)`, so that it fits the numbers,
and light bins have entries as large as those of others: their potentials are found as well as theirs.

    absorb      alpha = softmin(beta), G from it: an exact update of f, with its exponents in float64
    iterate     U = p / (G V),  V = q / (G^T U)

Three things shorten the way. Epsilon falls by steps, each from the potentials of the last. Updates are over-relaxed,
f + w (softmin(g) - f), with w from the observed contraction as in successive over-relaxation (L. Hageman, D. Young,
Applied Iterative Methods, 1981, ch. 9; for transport A. Thibault et al., 2017); instead of the power `x^w` stands a
Moebius map with the same value and slope at 1, a division. And each problem stops by itself. A problem with itself
(symmetric) takes the mean of f and softmin(f), which contracts by two at least where the kernel is positive definite.

The error is the sum of `|P 1 - p|` and `|P^T 1 - q|`. It hardly sees light bins, so the iterations end with an exact
update of g and then of f, and the error that is reported is that of the columns after them. Bins of (nearly) no mass
stay out, and get their potentials by the soft minimum at the end.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from otloss._kernels._compile import compiled, inner, largest, spliced
from otloss._kernels._threads import next_task
from otloss._kernels.histograms import balance, mass_of
from otloss._kernels.sinkhorn_call import ERROR, ITERATIONS, LEAST_EIGENVALUE, POTENTIAL_ERROR, SPREAD, VALUE
from otloss._kernels.sinkhorn_steps import (
    FAST,
    LARGEST_STEP,
    absorb,
    add_logs,
    column_error,
    column_sums,
    fit,
    halve,
    least_eigenvalue,
    outgrown,
    product,
    relaxation,
    round_trip,
    row_sums,
    softmin_at,
    update,
)

STAGE_FACTOR = 0.25  # of epsilon, from one step to the next
FIRST_EPSILON = 0.25  # of the largest cost, at most
STAGE_ITERATIONS, STAGE_ERROR = 12, 0.05  # of each step but the last
LOOK_EVERY = 10  # iterations between two looks at the contraction
STEEPEST = 0.8  # |x - 1| / (x + 1) times w, beyond which an update is not over-relaxed
WORSE = 3.0  # an error this many times the least is a sign that w is too large
LEAST_CHANGE = 0.02  # of w
LOST = 1e-12  # a column sum of the kernel below this, or above its inverse: the potential there is too far off
ATTEMPTS = 100  # exact updates of both sides before the iterations, at most
SETTLING = 200  # iterations at most, within the tolerance, until light bins are settled too
# Steps of Lanczos; after the first look an eigenvalue above CLEAR is taken: a much smaller one would have shown.
LANCZOS_STEPS, FIRST_LOOK, CLEAR = 24, 8, 0.1
FAR = 20.0  # |softmin(f) - f| / epsilon from which a symmetric problem takes its steps on the potentials
# Shares of the mass from which bins take part: 1 / share has to fit the kernel.
NEGLIGIBLE_32, NEGLIGIBLE_64 = 1e-20, 1e-150


# Rows of the scratch arrays of a thread, one in float64 and one in the dtype of the costs.
ALPHA, BETA, TOTALS, SHIFTED, SCORES = range(5)
SHARE_P, SHARE_Q, U, V, SUMS, HELD, NEXT, BEFORE = range(8)
KERNEL, COSTS = range(2)


def scratch(n: int, m: int, dtype: Any) -> tuple[np.ndarray, ...]:
    """Return what a thread works in: (wide, narrow, matrices, places). Pages that are not used are never touched."""
    longest = max(n, m)
    return (
        np.empty((5, longest)),
        np.empty((8, longest), dtype),
        np.empty((2, n, m), dtype),
        np.empty((2, longest + 1), np.int64),
    )


@inner()
def _highest(cost: Any) -> float:
    """The largest cost; NaN where one is negative, NaN or infinite."""
    top, wrong = cost[0, 0], 0
    for i in range(cost.shape[0]):
        row = cost[i]
        for j in range(row.shape[0]):
            wrong |= not row[j] >= 0
        highest = largest(row, row.shape[0])
        top = highest if highest > top else top
    return np.float64(top) if wrong == 0 and top < np.inf else np.nan


@inner()
def _take(weights: Any, mass: float, negligible: float, shares: Any, places: Any) -> int:
    """Write the shares of the mass that are not negligible, and the places of their bins; return how many they are."""
    count, inverse = 0, 1 / mass
    for k in range(weights.shape[0]):
        share = weights[k] * inverse
        shares[count], places[count] = share, k
        count += share > negligible
    return count


@spliced
def _absorb_factors(cost: Any, kernel: Any, wide: Any, narrow: Any, n: int, m: int, epsilon: float) -> float:
    """Absorb, with exact updates of g in between while a column is lost; return the columns' error."""
    p, q, u, v, sums = narrow[SHARE_P], narrow[SHARE_Q], narrow[U], narrow[V], narrow[SUMS]
    alpha, beta, totals, scores = wide[ALPHA], wide[BETA], wide[TOTALS], wide[SCORES]
    for i in range(n):
        u[i] = p[i]
    for j in range(m):
        v[j] = q[j]
    for attempt in range(ATTEMPTS):
        absorb(cost, beta, scores, p, q, epsilon, alpha, totals, kernel, sums, n, m)
        lost = False
        for j in range(m):
            lost |= not (sums[j] > LOST and sums[j] < 1 / LOST)
        if not lost or attempt == ATTEMPTS - 1:
            break
        for j in range(m):
            for i in range(n):
                scores[i] = (alpha[i] - cost[i, j]) / epsilon + math.log(p[i])
            beta[j] = softmin_at(scores, epsilon, n)
    return column_error(q, sums, v, m)


@spliced
def _iterate(
    cost: Any, kernel: Any, wide: Any, narrow: Any, n: int, m: int, epsilon: float, tolerance: float,
    settled: float, most: int, last: bool,
) -> tuple[float, int]:  # fmt: skip
    """Iterate until the error is within the tolerance; leaves beta, and after the last epsilon alpha, as found."""
    p, q, u, v, sums, held = (
        narrow[SHARE_P], narrow[SHARE_Q], narrow[U], narrow[V], narrow[SUMS], narrow[HELD],
    )  # fmt: skip
    alpha, beta = wide[ALPHA], wide[BETA]
    done, since, within, settling, stale = 0, 0, 0, True, True
    w = 1.0
    before = least = error = np.inf
    number = u.dtype.type
    steepest, largest_step = number(STEEPEST), number(LARGEST_STEP)
    while True:
        steep = False
        if stale:
            stale, since = False, 0
            off = _absorb_factors(cost, kernel, wide, narrow, n, m, epsilon)
        else:
            row_sums(kernel, v, held, n, m)
            off, steep = update(p, held, u, number(w), steepest, largest_step, n)
            column_sums(kernel, u, sums, n, m)
            off_columns, steep_columns = update(q, sums, v, number(w), steepest, largest_step, m)
            off, steep = off + off_columns, steep or steep_columns
            done += 1
            since += 1
        if off <= tolerance or done >= most:
            if not last:
                break
            column_sums(kernel, u, sums, n, m)
            change = fit(q, sums, v, m)
            row_sums(kernel, v, held, n, m)
            change = max(change, fit(p, held, u, n))
            column_sums(kernel, u, sums, n, m)
            error = column_error(q, sums, v, m)
            within += error <= tolerance
            if (error <= tolerance and (change <= settled or within > SETTLING)) or done >= most:
                break
        if since == LOOK_EVERY:
            contraction = (off / before) ** (1.0 / since)
            if off > WORSE * least:
                w, least, settling = 1.0 + (w - 1.0) / 2, off, True
            elif settling:
                settling = False
            else:
                better = relaxation(contraction, w)
                settling = better > w + LEAST_CHANGE
                w = better if settling else w
            least = off if off < least else least
            before, since = off, 0
        if (steep or since == 0) and (outgrown(u, p, n) or outgrown(v, q, m)):
            add_logs(beta, v, q, epsilon, m)
            stale = True
    add_logs(beta, v, q, epsilon, m)
    add_logs(alpha, u, p, epsilon, n)
    return error, done


@inner(fastmath=FAST)
def _error_of_potential(kernel: Any, wide: Any, narrow: Any, n: int, m: int) -> tuple[float, float]:
    """Estimate the largest error of g / epsilon at factors that have been fitted; and 1 - T's second eigenvalue.

    To first order the error e and the residual r, both as functions on the columns, obey `(1 - T) e = r`, T the round
    trip: |e| is at most |r| over 1 less the second eigenvalue of T, which a few steps of Lanczos find. That bounds root
    mean squares by q; the largest residual takes their place, since light bins hardly count in them.
    """
    p, q, u, v, sums, held, x, before = (
        narrow[SHARE_P], narrow[SHARE_Q], narrow[U], narrow[V], narrow[SUMS], narrow[HELD], narrow[NEXT],
        narrow[BEFORE],
    )  # fmt: skip
    diagonal, beside, number = wide[TOTALS], wide[SCORES], u.dtype.type
    residual = 0.0
    for j in range(m):
        off = np.float64(sums[j] * v[j] / q[j]) - 1
        residual = max(residual, abs(off))
        before[j], x[j] = number(0), number((0.6180339887498949 * (j + 1)) % 1.0)
    count = 0
    for k in range(min(LANCZOS_STEPS, m - 1)):
        # Constants are the first eigenvector; rounding brings them back.
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
        round_trip(kernel, p, q, u, v, x, held, sums, n, m)
        diagonal[k] = product(q, x, sums, m)
        count += 1
        if count == FIRST_LOOK and least_eigenvalue(diagonal, beside, count) > CLEAR:
            break
        a, b = number(diagonal[k]), number(beside[k - 1] if k > 0 else 0)
        for j in range(m):
            after = sums[j] - a * x[j] - b * before[j]
            before[j], x[j] = x[j], after
    rounding = 1e-6 if kernel.itemsize == 4 else 1e-15
    least = least_eigenvalue(diagonal, beside, count)
    return (residual + rounding) / least, least


@inner()
def _extend(
    cost: Any, is_transposed: bool, places: Any, count: int, potential: Any, other_places: Any, other_count: int,
    shifted: Any, scores: Any, epsilon: float, out: Any,
) -> None:  # fmt: skip
    """Write potentials of all bins: those of the solver, and soft minima at the bins that stayed out."""
    at = 0
    for i in range(out.shape[0]):
        if at < count and places[at] == i:
            out[i] = potential[at]
            at += 1
            continue
        for j in range(other_count):
            place = other_places[j]
            scores[j] = shifted[j] - (cost[place, i] if is_transposed else cost[i, place]) / epsilon
        out[i] = softmin_at(scores, epsilon, other_count)


@inner()
def _extend_to_light(
    cost: Any, is_transposed: bool, places: Any, count: int, weights: Any, inverse: float, potential: Any, scores: Any,
    epsilon: float, out: Any,
) -> None:  # fmt: skip
    """Write potentials of the bins that stayed out, as soft minima over all bins of the other side that hold mass."""
    at = 0
    for i in range(out.shape[0]):
        if at < count and places[at] == i:
            at += 1
            continue
        held = 0
        for j in range(weights.shape[0]):
            if weights[j] > 0:
                c = np.float64(cost[j, i] if is_transposed else cost[i, j])
                scores[held] = (potential[j] - c) / epsilon + math.log(np.float64(weights[j]) * inverse)
                held += 1
        out[i] = softmin_at(scores, epsilon, held)


@inner()
def _count_held(weights: Any) -> int:
    held = 0
    for k in range(weights.shape[0]):
        held += weights[k] > 0
    return held


@inner()
def _write_potentials(
    p: Any, q: Any, cost: Any, places: Any, wide: Any, narrow: Any, n: int, m: int, epsilon: float, mass: float,
    scales: Any, f: Any, g: Any,
) -> None:  # fmt: skip
    alpha, beta, shifted, scores = wide[ALPHA], wide[BETA], wide[SHIFTED], wide[SCORES]
    rows, columns, share_p, share_q = places[0], places[1], narrow[SHARE_P], narrow[SHARE_Q]
    for j in range(m):
        shifted[j] = beta[j] / epsilon + math.log(np.float64(share_q[j]))
    # `n < 0` and `n >= 0` for False and True: numba would compile `_extend` once for each literal.
    _extend(cost, n < 0, rows, n, alpha, columns, m, shifted, scores, epsilon, f)
    if m < cost.shape[1]:
        for i in range(n):
            shifted[i] = alpha[i] / epsilon + math.log(np.float64(share_p[i]))
    _extend(cost, n >= 0, columns, m, beta, rows, n, shifted, scores, epsilon, g)
    if n < _count_held(p) and m < _count_held(q):
        # Light bins of both sides: what heavy bins say of each would let them exchange more than they hold.
        _extend_to_light(cost, n >= 0, columns, m, p, scales[0] / mass, f, scores, epsilon, g)
        _extend_to_light(cost, n < 0, rows, n, q, scales[1] / mass, g, scores, epsilon, f)
    # The plan of the shares is one of mass one; f + g of the plan of mass M is less by epsilon log M.
    shift = epsilon * math.log(mass)
    for i in range(f.shape[0]):
        f[i] -= shift


@inner()
def _gather(cost: Any, places: Any, n: int, m: int, block: Any) -> float:
    """Write the costs of the bins that take part; return the largest."""
    highest, rows, columns = 0.0, places[0], places[1]
    for i in range(n):
        source, target = cost[rows[i]], block[i]
        for j in range(m):
            c = np.float64(source[columns[j]])
            target[j] = c
            highest = c if c > highest else highest
    return highest


@spliced
def _solve(
    p: Any, q: Any, cost: Any, epsilon: float, f: Any, g: Any, ends: Any, limits: Any, warm: bool, negligible: float,
    wide: Any, narrow: Any, matrices: Any, places: Any,
) -> None:  # fmt: skip
    """One problem; g comes in as the start, and f and g leave as the answer, on all bins."""
    mass_tolerance, least_ratio, largest_ratio, tolerance, settled, most = limits
    ends[ERROR], ends[ITERATIONS], ends[VALUE] = np.inf, 0, np.nan
    highest = _highest(cost)
    scale_p, scale_q, mass = balance(p, q, mass_tolerance)
    # Written so that NaN fails too.
    if not (highest < np.inf and mass < np.inf) or 0 < largest_ratio * highest < epsilon:
        return
    n = _take(p, mass / scale_p, negligible, narrow[SHARE_P], places[0])
    m = _take(q, mass / scale_q, negligible, narrow[SHARE_Q], places[1])
    if n == 0 or m == 0:
        for i in range(f.shape[0]):
            f[i] = 0
        for j in range(g.shape[0]):
            g[j] = 0
        ends[ERROR], ends[VALUE] = 0, 0
        ends[POTENTIAL_ERROR], ends[SPREAD], ends[LEAST_EIGENVALUE] = 0, 0, 1
        return
    alpha, beta, columns = wide[ALPHA], wide[BETA], places[1]
    for i in range(n):
        alpha[i] = 0
    for j in range(m):
        beta[j] = g[columns[j]]
    block = cost
    if n < cost.shape[0] or m < cost.shape[1]:
        block = matrices[COSTS]
        highest = _gather(cost, places, n, m, block)
    done, step, error = 0, epsilon, np.inf
    while not warm and step / STAGE_FACTOR <= FIRST_EPSILON * highest:
        step /= STAGE_FACTOR
    while True:
        last = step <= epsilon
        left = most - done
        error, more = _iterate(
            block, matrices[KERNEL], wide, narrow, n, m, step, tolerance if last else STAGE_ERROR, settled,
            left if last or left < STAGE_ITERATIONS else STAGE_ITERATIONS, last,
        )  # fmt: skip
        done += more
        if last:
            break
        # The constant that moves from g to f would keep the size, and the rounding, of potentials at a large epsilon.
        mean = 0.0
        for j in range(m):
            mean += np.float64(narrow[SHARE_Q, j]) * beta[j]
        for j in range(m):
            beta[j] -= mean
        step = step * STAGE_FACTOR if step * STAGE_FACTOR > epsilon else epsilon
    _write_potentials(p, q, cost, places, wide, narrow, n, m, epsilon, mass, (scale_p, scale_q), f, g)
    if settled < np.inf:
        lowest_g, highest_g = beta[0], beta[0]
        for j in range(m):
            lowest_g, highest_g = min(lowest_g, beta[j]), max(highest_g, beta[j])
        uncertain, ends[LEAST_EIGENVALUE] = _error_of_potential(matrices[KERNEL], wide, narrow, n, m)
        ends[POTENTIAL_ERROR] = epsilon * uncertain
        ends[SPREAD] = highest_g - lowest_g
    value_p, value_q = 0.0, 0.0
    for i in range(f.shape[0]):
        value_p += f[i] * np.float64(p[i])
    for j in range(g.shape[0]):
        value_q += g[j] * np.float64(q[j])
    reach = 0.0
    for i in range(n):
        reach = max(reach, abs(alpha[i]))
    for j in range(m):
        reach = max(reach, abs(beta[j]))
    ends[ERROR], ends[ITERATIONS] = error if epsilon >= least_ratio * reach else np.inf, done
    ends[VALUE] = value_p * scale_p + value_q * scale_q


@compiled(seconds=4)
def sinkhorn_problems(
    counter: Any, p: Any, q: Any, costs: Any, owner: Any, epsilon: Any, f: Any, g: Any, ends: Any, limits: Any,
    warm: bool, wide: Any, narrow: Any, matrices: Any, places: Any,
) -> None:  # fmt: skip
    """Solve problem k = (p[k], q[k], costs[owner[k]], epsilon[k]); g[k] comes in as the start.

    p, q: (B, n), (B, m); without mass, potentials are 0. costs: (matrices, n, m). These are in float32 or float64, the
    width that the iterations run in. epsilon: (B,), f, g: (B, n), (B, m), in float64. limits: the relative difference
    of masses, the least epsilon over potentials and the largest over the largest cost, tolerance, `settled` and
    iterations that are allowed. ends (B, 6) gets what `run_kernel` says; infinity and NaN where the problem is not a
    valid one.
    """
    negligible = NEGLIGIBLE_32 if costs.itemsize == 4 else NEGLIGIBLE_64
    while True:
        k = next_task(counter)
        if k >= p.shape[0]:
            return
        _solve(
            p[k], q[k], costs[owner[k]], epsilon[k], f[k], g[k], ends[k], limits, warm, negligible,
            wide, narrow, matrices, places,
        )  # fmt: skip


@inner()
def _iterate_symmetric(
    cost: Any, kernel: Any, wide: Any, narrow: Any, n: int, epsilon: float, tolerance: float, settled: float,
    most: int,
) -> tuple[float, int]:  # fmt: skip
    p, u, v, sums, weight = narrow[SHARE_P], narrow[U], narrow[V], narrow[SUMS], narrow[HELD]
    alpha, beta = wide[ALPHA], wide[BETA]
    largest_step = u.dtype.type(LARGEST_STEP)
    done, closed, change = 0, False, 0.0
    while True:
        absorb(cost, beta, wide[SCORES], p, p, epsilon, alpha, wide[TOTALS], kernel, sums, n, n)
        for i in range(n):
            v[i] = p[i]
        error, farthest = column_error(p, sums, v, n), 0.0
        for i in range(n):
            farthest = max(farthest, abs(beta[i] - alpha[i]))
        near = farthest <= FAR * epsilon
        finished = (error <= tolerance and near) or done >= most
        if finished and closed and (change <= settled or done >= most):
            return error, done
        if finished and not closed:
            # The exact update of g; that of f is the absorption that follows.
            change, closed = fit(p, sums, v, n), True
            add_logs(beta, v, p, epsilon, n)
            continue
        closed = False
        for i in range(n):
            # G has alpha in its rows; the symmetric plan has beta there too.
            weight[i], u[i] = math.exp((beta[i] - alpha[i]) / epsilon) if near else 1, p[i]
        if not near:
            for i in range(n):
                beta[i] = (alpha[i] + beta[i]) / 2
            done += 1
            continue
        off = np.inf
        while (off > tolerance or change > settled) and done < most:
            off, change = halve(kernel, p, weight, u, sums, largest_step, n)
            done += 1
            if done % LOOK_EVERY == 0 and outgrown(u, p, n):
                break
        add_logs(beta, u, p, epsilon, n)


@compiled()
def symmetric_problems(
    counter: Any, p: Any, costs: Any, owner: Any, epsilon: Any, f: Any, g: Any, ends: Any, tolerance: float,
    settled: float, most: int, wide: Any, narrow: Any, matrices: Any, places: Any,
) -> None:  # fmt: skip
    """As `sinkhorn_problems`, of p with itself at symmetric costs; no value, and no epsilon steps."""
    negligible = NEGLIGIBLE_32 if costs.itemsize == 4 else NEGLIGIBLE_64
    alpha, beta, rows = wide[ALPHA], wide[BETA], places[0]
    while True:
        k = next_task(counter)
        if k >= p.shape[0]:
            return
        cost, mass, start = costs[owner[k]], mass_of(p[k]), g[k]
        ends[k, ERROR], ends[k, ITERATIONS] = 0, 0
        if mass == 0:
            for i in range(start.shape[0]):
                f[k, i], start[i] = 0, 0
            continue
        n = _take(p[k], mass, negligible, narrow[SHARE_P], rows)
        for i in range(n):
            places[1, i], alpha[i], beta[i] = rows[i], 0, start[rows[i]]
            narrow[SHARE_Q, i] = narrow[SHARE_P, i]
        block = cost
        if n < cost.shape[0]:
            block = matrices[COSTS]
            _gather(cost, places, n, n, block)
        ends[k, ERROR], ends[k, ITERATIONS] = _iterate_symmetric(
            block, matrices[KERNEL], wide, narrow, n, epsilon[k], tolerance, settled, most
        )
        _write_potentials(p[k], p[k], cost, places, wide, narrow, n, n, epsilon[k], mass, (1.0, 1.0), f[k], start)
