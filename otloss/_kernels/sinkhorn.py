"""Balanced Sinkhorn for a batch of dense problems on a CPU: scaling form, one problem per thread at a time.

With p, q of mass one and potentials f, g the plan is `P_ij = p_i q_j exp((f_i + g_j - C_ij) / epsilon)`. It is held as
`P_ij = u_i K_ij v_j`, where K is the plan at potentials (alpha, beta) that were absorbed before, so that no entry can
overflow and none that matters underflows:

    absorb      alpha = softmin(beta), K from it: an exact update of f, its exponents in float64 for any dtype of K
    iterate     u = p / (K v),  v = q / (K^T u): one pass over K for both, since row i of K is read once, for its sum
                and then for its share of K^T u

Three things shorten the way. Epsilon falls by steps, each from the potentials of the last. Updates are over-relaxed,
f + w (softmin(g) - f), with w from the observed contraction as in successive over-relaxation (L. Hageman, D. Young,
Applied Iterative Methods, 1981, ch. 9; for transport A. Thibault et al., 2017); instead of the power `x^w` stands a
Moebius map with the same value and slope at 1, a division. And each problem stops by itself. A problem with itself
(symmetric) takes the mean of f and softmin(f), which contracts by two at least where the kernel is positive definite.

The error is the sum of `|P 1 - p|` and `|P^T 1 - q|`. The one reported is measured after a last absorption, on a plan
whose rows are exact. Bins of (nearly) no mass stay out, and get their potentials by the soft minimum at the end.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange

from otloss._kernels._compile import compiled, exp, largest

STAGE_FACTOR = 0.25  # of epsilon, from one step to the next
FIRST_EPSILON = 0.25  # of the largest cost, at most
STAGE_ITERATIONS, STAGE_ERROR = 12, 0.05  # of each step but the last
BLOCK = 10  # iterations between two looks at the contraction
SCALING_LIMIT = 1e4  # of u and v, then they are absorbed
STEEPEST = 0.8  # |x - 1| / (x + 1) times w, beyond which an update is not over-relaxed
WORSE = 3.0  # an error this many times the least is a sign that w is too large
LEAST_CHANGE = 0.02  # of w
LOST = 1e-12  # of a column's mass: its potential is too far off for K to hold it
# Entries this small beside the largest of their row are left out, and so are bins beside the whole mass: their
# products would leave the normal numbers, which are ten times slower.
NEGLIGIBLE_32, NEGLIGIBLE_64 = 1e-28, 1e-250

_fast = {"fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy"}


@njit(**_fast)
def _absorb(
    cost: Any, log_q: Any, p: Any, beta: Any, epsilon: float, alpha: Any, kernel: Any, scores: Any, negligible: float
) -> None:
    """alpha = softmin(beta) and the plan K, row by row; `scores` is room for one row in float64."""
    n, m = cost.shape
    number = kernel.dtype.type
    inverse, least = 1.0 / epsilon, number(negligible)
    for i in range(n):
        row, plan = cost[i], kernel[i]
        for j in range(m):
            scores[j] = (beta[j] - row[j]) * inverse + log_q[j]
        top = largest(scores, m)
        total = number(0)
        for j in range(m):
            e = exp(number(scores[j] - top))
            e = e if e > least else number(0)
            plan[j] = e
            total += e
        share = p[i] / total
        for j in range(m):
            plan[j] *= share
        alpha[i] = -epsilon * (top + math.log(np.float64(total)))


@njit(**_fast)
def _iterate(kernel: Any, p: Any, q: Any, u: Any, v: Any, sums: Any, w: Any, steepest: Any) -> float:
    """One update of u and of v; returns the errors of the rows before it and of the columns halfway."""
    n, m = kernel.shape
    nothing = w - w  # in the dtype of the kernel
    sums[:] = nothing
    off_rows, off_columns = nothing, nothing
    for i in range(n):
        row = kernel[i]
        held = nothing
        for j in range(m):
            held += row[j] * v[j]
        held *= u[i]
        lack, total = p[i] - held, p[i] + held
        off_rows += abs(lack)
        push = w * lack
        push = push if abs(push) < steepest * total else lack
        x = u[i] * ((total + push) / (total - push))
        u[i] = x
        for j in range(m):
            sums[j] += row[j] * x
    for j in range(m):
        held = sums[j] * v[j]
        lack, total = q[j] - held, q[j] + held
        off_columns += abs(lack)
        push = w * lack
        push = push if abs(push) < steepest * total else lack
        v[j] = v[j] * ((total + push) / (total - push))
    return off_rows + off_columns


@njit
def _outgrown(u: Any) -> bool:
    low, high = np.inf, 0.0
    for i in range(u.shape[0]):
        low = u[i] if u[i] < low else low
        high = u[i] if u[i] > high else high
    return not (low > 1 / SCALING_LIMIT and high < SCALING_LIMIT)


@njit
def _relaxation(contraction: float, w: float) -> float:
    """The w for the eigenvalue of plain Sinkhorn that this contraction under the present w tells of.

    `(c + w - 1)^2 = w^2 c eigenvalue` links them while c > w - 1; below, w alone sets the pace and c tells nothing.
    A single look at most halves 2 - w: an error that has not settled yet looks slower than it is.
    """
    if not w - 1.0 < contraction < 1.0:
        return w
    eigenvalue = min((contraction + w - 1.0) ** 2 / (w * w * contraction), 1.0)
    return min(2.0 / (1.0 + math.sqrt(1.0 - eigenvalue)), 1.0 + w / 2)


@njit(**_fast)
def _column_error(kernel: Any, q: Any, sums: Any) -> tuple[float, bool]:
    """The error of K's columns, and whether one of them holds next to nothing."""
    n, m = kernel.shape
    nothing = q[0] - q[0]
    sums[:] = nothing
    for i in range(n):
        for j in range(m):
            sums[j] += kernel[i, j]
    off, lost = nothing, False
    for j in range(m):
        off += abs(sums[j] - q[j])
        lost |= sums[j] < LOST * q[j]
    return np.float64(off), lost


@njit
def _softmin_at(scores: Any, epsilon: float) -> float:
    top = -np.inf
    for i in range(scores.shape[0]):
        top = scores[i] if scores[i] > top else top
    total = 0.0
    for i in range(scores.shape[0]):
        total += math.exp(scores[i] - top)
    return -epsilon * (top + math.log(total))


@njit
def _renew(
    cost: Any, p: Any, q: Any, log_p: Any, log_q: Any, alpha: Any, beta: Any, kernel: Any, u: Any, v: Any, sums: Any,
    scores: Any, epsilon: float, negligible: float,
) -> float:  # fmt: skip
    """Absorb, with one exact update of g in between where K could not hold a column."""
    _absorb(cost, log_q, p, beta, epsilon, alpha, kernel, scores, negligible)
    error, lost = _column_error(kernel, q, sums)
    if lost:
        column = np.empty(cost.shape[0])
        for j in range(cost.shape[1]):
            for i in range(cost.shape[0]):
                column[i] = (alpha[i] - cost[i, j]) / epsilon + log_p[i]
            beta[j] = _softmin_at(column, epsilon)
        _absorb(cost, log_q, p, beta, epsilon, alpha, kernel, scores, negligible)
        error, lost = _column_error(kernel, q, sums)
    u[:], v[:] = 1, 1
    return error


@njit
def _at_epsilon(
    cost: Any, p: Any, q: Any, log_p: Any, log_q: Any, alpha: Any, beta: Any, kernel: Any, u: Any, v: Any, sums: Any,
    scores: Any, epsilon: float, negligible: float, tolerance: float, most: int,
) -> tuple[float, int]:  # fmt: skip
    """Iterate until the error is within the tolerance; leaves K and (alpha, beta) at the last potentials."""
    done, since, settling = 0, 0, True
    w = 1.0
    before = least = np.inf
    number = u.dtype.type
    error = _renew(cost, p, q, log_p, log_q, alpha, beta, kernel, u, v, sums, scores, epsilon, negligible)
    while error > tolerance and done < most:
        off = np.float64(_iterate(kernel, p, q, u, v, sums, number(w), number(STEEPEST)))
        done += 1
        since += 1
        finished = off <= tolerance or done >= most
        if since == BLOCK or finished:
            contraction = (off / before) ** (1.0 / since)
            if off > WORSE * least:
                w, least, settling = 1.0 + (w - 1.0) / 2, off, True
            elif settling:
                settling = False
            else:
                better = _relaxation(contraction, w)
                settling = better > w + LEAST_CHANGE
                w = better if settling else w
            before, least, since = off, min(least, off), 0
        if finished or (since == 0 and (_outgrown(u) or _outgrown(v))):
            for j in range(v.shape[0]):
                beta[j] += epsilon * math.log(v[j])
            error = _renew(cost, p, q, log_p, log_q, alpha, beta, kernel, u, v, sums, scores, epsilon, negligible)
    return error, done


@njit(**_fast)
def _halve(kernel: Any, p: Any, weight: Any, u: Any, sums: Any) -> float:
    """u half the way, in logarithms, to rows of `diag(weight) diag(u) K diag(u)` that sum to p; their error before."""
    n = kernel.shape[0]
    nothing = p[0] - p[0]
    off = nothing
    for i in range(n):
        row, total = kernel[i], nothing
        for j in range(n):
            total += row[j] * u[j]
        sums[i] = total * u[i] * weight[i]
    for i in range(n):
        off += abs(sums[i] - p[i])
        u[i] *= np.sqrt(p[i] / sums[i])
    return 2 * off


@njit
def _with_itself(
    cost: Any, p: Any, log_p: Any, alpha: Any, beta: Any, kernel: Any, u: Any, sums: Any, scores: Any, epsilon: float,
    negligible: float, tolerance: float, most: int,
) -> tuple[float, int]:  # fmt: skip
    done = 0
    weight = np.empty_like(u)
    while True:
        _absorb(cost, log_p, p, beta, epsilon, alpha, kernel, scores, negligible)
        error, _ = _column_error(kernel, p, sums)
        if error <= tolerance or done >= most:
            return error, done
        for i in range(p.shape[0]):
            # K has alpha in its rows; the symmetric plan has beta there too.
            weight[i] = math.exp((beta[i] - alpha[i]) / epsilon)
        u[:] = 1
        off = np.inf
        while off > tolerance and done < most:
            off = np.float64(_halve(kernel, p, weight, u, sums))
            done += 1
            if done % BLOCK == 0 and _outgrown(u):
                break
        for i in range(p.shape[0]):
            beta[i] += epsilon * math.log(u[i])


@njit
def _one(
    p: Any, q: Any, cost: Any, f: Any, g: Any, epsilon: float, negligible: float, tolerance: float, most: int,
    warm: bool, symmetric: bool,
) -> tuple[float, int]:  # fmt: skip
    """One problem of mass one; f and g come in as the start and leave as the answer, on all bins."""
    rows, columns = np.flatnonzero(p > negligible), np.flatnonzero(q > negligible)
    n, m = rows.shape[0], columns.shape[0]
    kernel = np.empty((n, m), cost.dtype)
    if n == cost.shape[0] and m == cost.shape[1]:
        block = cost
    else:
        block = np.empty((n, m), cost.dtype)
        for i in range(n):
            for j in range(m):
                block[i, j] = cost[rows[i], columns[j]]
    highest = 0.0
    for i in range(n):
        highest = max(highest, np.float64(largest(block[i], m)))
    log_p, log_q, alpha, beta = np.log(p[rows]), np.log(q[columns]), np.zeros(n), g[columns]
    a, b = p[rows].astype(cost.dtype), q[columns].astype(cost.dtype)
    u, v, sums, scores = np.empty(n, cost.dtype), np.empty(m, cost.dtype), np.empty(m, cost.dtype), np.empty(m)
    if symmetric:
        error, done = _with_itself(
            block, a, log_p, alpha, beta, kernel, u, sums, scores, epsilon, negligible, tolerance, most
        )
    else:
        done, step = 0, epsilon
        while not warm and step / STAGE_FACTOR <= FIRST_EPSILON * highest:
            step /= STAGE_FACTOR
        while True:
            last = step <= epsilon
            error, more = _at_epsilon(
                block, a, b, log_p, log_q, alpha, beta, kernel, u, v, sums, scores, step, negligible,
                tolerance if last else STAGE_ERROR, most - done if last else min(STAGE_ITERATIONS, most - done),
            )  # fmt: skip
            done += more
            if last:
                break
            step = max(epsilon, step * STAGE_FACTOR)
    _extend(cost, rows, columns, log_p, log_q, alpha, beta, epsilon, f, g)
    return error, done


@njit
def _extend(
    cost: Any, rows: Any, columns: Any, log_p: Any, log_q: Any, alpha: Any, beta: Any, epsilon: float, f: Any, g: Any
) -> None:
    """Potentials of all bins: those of the solver, and soft minima at the bins that stayed out."""
    n, m = cost.shape
    f[:], g[:] = np.inf, np.inf
    f[rows], g[columns] = alpha, beta
    along, across = np.empty(columns.shape[0]), np.empty(rows.shape[0])
    for i in range(n):
        if f[i] == np.inf:
            for j in range(columns.shape[0]):
                along[j] = (beta[j] - cost[i, columns[j]]) / epsilon + log_q[j]
            f[i] = _softmin_at(along, epsilon)
    for j in range(m):
        if g[j] == np.inf:
            for i in range(rows.shape[0]):
                across[i] = (alpha[i] - cost[rows[i], j]) / epsilon + log_p[i]
            g[j] = _softmin_at(across, epsilon)


@compiled(parallel=True)
def sinkhorn_problems(
    p: Any, q: Any, costs: Any, owner: Any, epsilon: Any, f: Any, g: Any, error: Any, iterations: Any,
    tolerance: float, most: int, warm: bool, symmetric: bool,
) -> None:  # fmt: skip
    """Solve problem k = (p[k], q[k], costs[owner[k]], epsilon[k]); f[k], g[k] come in as the start.

    p, q: (B, n), (B, m) in float64, of mass one. costs: (matrices, n, m) in float32 or float64, the width that the
    iterations run in. epsilon, error: (B,) in float64. f, g: (B, n), (B, m) in float64.
    """
    negligible = NEGLIGIBLE_32 if costs.itemsize == 4 else NEGLIGIBLE_64
    for k in prange(p.shape[0]):
        error[k], iterations[k] = _one(
            p[k], q[k], costs[owner[k]], f[k], g[k], epsilon[k], negligible, tolerance, most, warm, symmetric
        )
