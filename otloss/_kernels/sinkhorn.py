"""Balanced Sinkhorn for a batch of dense problems on a CPU: scaling form, one problem per thread at a time.

With p, q over their mass and potentials f, g the plan is `P_ij = p_i q_j exp((f_i + g_j - C_ij) / epsilon)`. It is held
as `P_ij = u_i K_ij v_j`, where K is the plan at potentials (alpha, beta) that were absorbed before, so that no entry
can overflow and none that matters underflows:

    absorb      alpha = softmin(beta), K from it: an exact update of f, its exponents in float64 where epsilon is small
    iterate     u = p / (K v),  v = q / (K^T u)

Three things shorten the way. Epsilon falls by steps, each from the potentials of the last. Updates are over-relaxed,
f + w (softmin(g) - f), with w from the observed contraction as in successive over-relaxation (L. Hageman, D. Young,
Applied Iterative Methods, 1981, ch. 9; for transport A. Thibault et al., 2017); instead of the power `x^w` stands a
Moebius map with the same value and slope at 1, a division. And each problem stops by itself. A problem with itself
(symmetric) takes the mean of f and softmin(f), which contracts by two at least where the kernel is positive definite.

The error is the sum of `|P 1 - p|` and `|P^T 1 - q|`. The one reported is measured after a last exact update of f, on
a plan whose rows are exact. Bins of (nearly) no mass stay out, and get their potentials by the soft minimum at the end.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange

from otloss._kernels._compile import compiled, largest, log64
from otloss._kernels.sinkhorn_steps import (
    FAST,
    absorb,
    add_logs,
    column_error,
    column_sums,
    halve,
    outgrown,
    relaxation,
    softmin_at,
    update_columns,
    update_rows,
)

STAGE_FACTOR = 0.25  # of epsilon, from one step to the next
FIRST_EPSILON = 0.25  # of the largest cost, at most
STAGE_ITERATIONS, STAGE_ERROR = 12, 0.05  # of each step but the last
BLOCK = 10  # iterations between two looks at the contraction
STEEPEST = 0.8  # |x - 1| / (x + 1) times w, beyond which an update is not over-relaxed
WORSE = 3.0  # an error this many times the least is a sign that w is too large
LEAST_CHANGE = 0.02  # of w
# Exponents are made in the width of the costs where their rounding, that of the largest cost over epsilon, is below
# this share of the tolerance, or epsilon over that cost this large. Steps before the last need no more either.
ROUNDING_32, NARROW_SHARE, NARROW_FROM = 2.0**-24, 0.3, 0.02
LOST = 1e-12  # of a column's mass: its potential is too far off for K to hold it
# Entries this small beside the largest of their row are left out, and so are bins beside the whole mass: their
# products would leave the normal numbers, which are ten times slower.
NEGLIGIBLE_32, NEGLIGIBLE_64 = 1e-28, 1e-250


@njit
def _shift(beta: Any, log_q: Any, epsilon: float, shifted: Any) -> None:
    for j in range(beta.shape[0]):
        shifted[j] = beta[j] / epsilon + log_q[j]


@njit
def _renew(
    cost: Any, p: Any, q: Any, log_q: Any, alpha: Any, beta: Any, kernel: Any, u: Any, v: Any, sums: Any,
    rooms: Any, epsilon: float, negligible: float, narrow: bool,
) -> float:  # fmt: skip
    """Absorb, with one exact update of g in between where K could not hold a column; return the columns' error."""
    shifted, scores, narrow_shifted, narrow_scores, totals = rooms
    u[:], v[:] = 1, 1
    for attempt in range(2):
        if narrow:
            _shift(beta, log_q, epsilon, narrow_shifted)
            absorb(cost, narrow_shifted, p, epsilon, alpha, kernel, sums, (narrow_scores, totals), negligible)
        else:
            _shift(beta, log_q, epsilon, shifted)
            absorb(cost, shifted, p, epsilon, alpha, kernel, sums, (scores, totals), negligible)
        lost = False
        for j in range(q.shape[0]):
            lost |= not sums[j] > LOST * q[j]
        if attempt == 1 or not lost:
            break
        column = np.empty(cost.shape[0])
        for j in range(cost.shape[1]):
            for i in range(cost.shape[0]):
                column[i] = (alpha[i] - cost[i, j]) / epsilon + math.log(p[i])
            beta[j] = softmin_at(column, epsilon)
    return column_error(q, sums, v)


@njit
def _at_epsilon(
    cost: Any, p: Any, q: Any, log_q: Any, alpha: Any, beta: Any, kernel: Any, u: Any, v: Any, held: Any,
    sums: Any, rooms: Any, epsilon: float, negligible: float, narrow: bool, tolerance: float, most: int, last: bool,
) -> tuple[float, int]:  # fmt: skip
    """Iterate until the error is within the tolerance; leaves beta, and after the last epsilon alpha, as found."""
    done, since, settling = 0, 0, True
    w = 1.0
    before = least = np.inf
    number = u.dtype.type
    one, steepest = number(1), number(STEEPEST)
    error = _renew(
        cost, p, q, log_q, alpha, beta, kernel, u, v, sums, rooms, epsilon, negligible, narrow
    )  # fmt: skip
    while error > tolerance and done < most:
        off = update_rows(kernel, p, u, v, number(w), steepest, held)
        column_sums(kernel, u, sums)
        off += update_columns(q, sums, v, number(w), steepest)
        done += 1
        since += 1
        finished = off <= tolerance or done >= most
        if finished and last:
            # An exact update of f, and what it leaves of the columns' error: that is the one to report.
            update_rows(kernel, p, u, v, one, one, held)
            column_sums(kernel, u, sums)
            error = column_error(q, sums, v)
            finished = error <= tolerance or done >= most
        if finished:
            break
        if since == BLOCK:
            contraction = (off / before) ** (1.0 / since)
            if off > WORSE * least:
                w, least, settling = 1.0 + (w - 1.0) / 2, off, True
            elif settling:
                settling = False
            else:
                better = relaxation(contraction, w)
                settling = better > w + LEAST_CHANGE
                w = better if settling else w
            before, least, since = off, min(least, off), 0
            if outgrown(u) or outgrown(v):
                add_logs(beta, v, epsilon)
                error = _renew(
                    cost, p, q, log_q, alpha, beta, kernel, u, v, sums, rooms, epsilon, negligible, narrow
                )  # fmt: skip
    add_logs(beta, v, epsilon)
    add_logs(alpha, u, epsilon)
    return error, done


@njit
def _with_itself(
    cost: Any, p: Any, log_p: Any, alpha: Any, beta: Any, kernel: Any, u: Any, sums: Any, rooms: Any, epsilon: float,
    negligible: float, tolerance: float, most: int,
) -> tuple[float, int]:  # fmt: skip
    shifted, scores, _, _, totals = rooms
    done = 0
    weight, ones = np.empty_like(u), np.ones_like(u)
    while True:
        _shift(beta, log_p, epsilon, shifted)
        absorb(cost, shifted, p, epsilon, alpha, kernel, sums, (scores, totals), negligible)
        error = column_error(p, sums, ones)
        if error <= tolerance or done >= most:
            return error, done
        for i in range(p.shape[0]):
            # K has alpha in its rows; the symmetric plan has beta there too.
            weight[i] = math.exp((beta[i] - alpha[i]) / epsilon)
        u[:] = 1
        off = np.inf
        while off > tolerance and done < most:
            off = np.float64(halve(kernel, p, weight, u, sums))
            done += 1
            if done % BLOCK == 0 and outgrown(u):
                break
        add_logs(beta, u, epsilon)


@njit(**FAST)
def _shares(weights: Any, shares: Any) -> float:
    """Write the weights over their mass, and return that."""
    mass = 0.0
    for k in range(weights.shape[0]):
        mass += np.float64(weights[k])
    inverse = 1 / mass if mass > 0 else 0.0
    for k in range(weights.shape[0]):
        shares[k] = weights[k] * inverse
    return mass


@njit
def _taken(shares: Any, negligible: float, places: Any) -> Any:
    """Where shares are not negligible; the shares there move to the front."""
    count = 0
    for k in range(shares.shape[0]):
        places[count] = k
        count += shares[k] > negligible
    for k in range(count):
        shares[k] = shares[places[k]]
    return places[:count]


@njit
def solve_one(
    p: Any, q: Any, cost: Any, f: Any, g: Any, highest: float, epsilon: float, negligible: float, tolerance: float,
    most: int, warm: bool, symmetric: bool,
) -> tuple[float, int]:  # fmt: skip
    """One problem; g comes in as the start, and f and g leave as the answer, on all bins.

    `highest` is the largest cost.
    """
    # Few pieces of memory, cut up: on small problems each would cost as much as an iteration.
    longest = max(p.shape[0], q.shape[0])
    wide, narrow = np.empty((8, longest)), np.empty((8, longest), cost.dtype)
    places = np.empty((2, longest + 1), np.int64)
    mass, other = _shares(p, wide[0, : p.shape[0]]), _shares(q, wide[1, : q.shape[0]])
    if mass == 0 or other == 0:
        f[:], g[:] = 0, 0
        return 0.0, 0
    rows = _taken(wide[0, : p.shape[0]], negligible, places[0])
    columns = _taken(wide[1, : q.shape[0]], negligible, places[1])
    n, m = rows.shape[0], columns.shape[0]
    share_p, alpha, totals = wide[0, :n], wide[2, :n], wide[3, :n]
    share_q, log_q, beta, shifted, scores = wide[1, :m], wide[4, :m], wide[5, :m], wide[6, :m], wide[7, :m]
    a, u, held = narrow[0, :n], narrow[1, :n], narrow[2, :n]
    b, v, sums, narrow_shifted, narrow_scores = (
        narrow[3, :m],
        narrow[4, :m],
        narrow[5, :m],
        narrow[6, :m],
        narrow[7, :m],
    )
    rooms = (shifted, scores, narrow_shifted, narrow_scores, totals)
    a[:], b[:], alpha[:] = share_p, share_q, 0
    for j in range(m):
        log_q[j], beta[j] = log64(share_q[j]), g[columns[j]]
    kernel = np.empty((n, m), cost.dtype)
    if n == cost.shape[0] and m == cost.shape[1]:
        block = cost
    else:
        block, highest = np.empty((n, m), cost.dtype), 0.0  # of the bins that take part alone
        for i in range(n):
            for j in range(m):
                block[i, j] = cost[rows[i], columns[j]]
                highest = max(highest, np.float64(block[i, j]))
    if symmetric:
        error, done = _with_itself(
            block, a, log_q, alpha, beta, kernel, u, sums, rooms, epsilon, negligible, tolerance, most
        )
    else:
        done, step = 0, epsilon
        while not warm and step / STAGE_FACTOR <= FIRST_EPSILON * highest:
            step /= STAGE_FACTOR
        while True:
            last = step <= epsilon
            rounding = ROUNDING_32 * highest / step
            # A start may be far larger than the costs, and its rounding with it.
            coarse = rounding < NARROW_SHARE * tolerance or step > NARROW_FROM * highest
            narrow_exponents = not last or (coarse and not warm)
            error, more = _at_epsilon(
                block, a, b, log_q, alpha, beta, kernel, u, v, held, sums, rooms, step, negligible,
                narrow_exponents, tolerance if last else STAGE_ERROR,
                most - done if last else min(STAGE_ITERATIONS, most - done), last,
            )  # fmt: skip
            done += more
            if last:
                break
            step = max(epsilon, step * STAGE_FACTOR)
    _extend(cost, (rows, columns), (share_p, share_q), (alpha, beta), epsilon, f, g)
    # The plan of the shares is one of mass one; f + g of the plan of mass M is less by epsilon log M.
    shift = epsilon * math.log(mass)
    for i in range(f.shape[0]):
        f[i] -= shift
    return error, done


@njit
def _extend(cost: Any, places: Any, shares: Any, potentials: Any, epsilon: float, f: Any, g: Any) -> None:
    """Potentials of all bins: those of the solver, and soft minima at the bins that stayed out."""
    _put(potentials[0], places[0], f)
    _put(potentials[1], places[1], g)
    if places[0].shape[0] < cost.shape[0]:
        _fill(cost, places[1], shares[1], potentials[1], epsilon, f)
    if places[1].shape[0] < cost.shape[1]:
        _fill(cost.T, places[0], shares[0], potentials[0], epsilon, g)


@njit
def _put(potential: Any, places: Any, out: Any) -> None:
    out[:] = np.inf
    for i in range(places.shape[0]):
        out[places[i]] = potential[i]


@njit
def _fill(cost: Any, places: Any, shares: Any, potential: Any, epsilon: float, out: Any) -> None:
    scores = np.empty(places.shape[0])
    for i in range(out.shape[0]):
        if out[i] == np.inf:
            for j in range(places.shape[0]):
                scores[j] = (potential[j] - cost[i, places[j]]) / epsilon + math.log(shares[j])
            out[i] = softmin_at(scores, epsilon)


@njit
def _highest(cost: Any) -> float:
    top = 0.0
    for i in range(cost.shape[0]):
        top = max(top, np.float64(largest(cost[i], cost.shape[1])))
    return top


@compiled(parallel=True)
def sinkhorn_problems(
    p: Any, q: Any, costs: Any, owner: Any, epsilon: Any, f: Any, g: Any, error: Any, iterations: Any,
    tolerance: float, most: int, warm: bool, symmetric: bool,
) -> None:  # fmt: skip
    """Solve problem k = (p[k], q[k], costs[owner[k]], epsilon[k]); g[k] comes in as the start.

    p, q: (B, n), (B, m), of one mass; without any, potentials are 0. costs: (matrices, n, m). These are in float32 or
    float64, the width that the iterations run in. epsilon, error: (B,), f, g: (B, n), (B, m), in float64.
    """
    negligible = NEGLIGIBLE_32 if costs.itemsize == 4 else NEGLIGIBLE_64
    for k in prange(p.shape[0]):
        cost = costs[owner[k]]
        error[k], iterations[k] = solve_one(
            p[k], q[k], cost, f[k], g[k], _highest(cost), epsilon[k], negligible, tolerance, most, warm, symmetric
        )
