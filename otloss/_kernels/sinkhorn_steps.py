"""The steps of Sinkhorn in scaling form, on one problem; `sinkhorn` has the notation and the order they come in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from otloss._kernels._compile import exp, largest, log64

SCALING_LIMIT = 1e4  # of u and v, then they are absorbed

FAST = {"fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy"}


@njit(**FAST)
def absorb(
    cost: Any, shifted: Any, p: Any, epsilon: float, alpha: Any, kernel: Any, sums: Any, rooms: Any, negligible: float
) -> None:
    """alpha = softmin(beta) and the plan K, row by row, and the sums of its columns.

    `shifted` is beta / epsilon + log q, in the dtype that exponents are made in; `rooms` are one for a row of it, and
    one for n numbers in float64.
    """
    n, m = cost.shape
    scores, totals = rooms
    number = kernel.dtype.type
    inverse, least = shifted.dtype.type(1.0 / epsilon), number(negligible)
    sums[:] = number(0)
    for i in range(n):
        row, plan = cost[i], kernel[i]
        for j in range(m):
            scores[j] = shifted[j] - row[j] * inverse
        top = largest(scores, m)
        for j in range(m):
            plan[j] = number(scores[j] - top)
        total = number(0)
        for j in range(m):
            e = exp(plan[j])
            e = e if e > least else number(0)
            plan[j] = e
            total += e
        share = p[i] / total
        for j in range(m):
            e = plan[j] * share
            plan[j] = e
            sums[j] += e
        alpha[i], totals[i] = top, total
    for i in range(n):
        alpha[i] = -epsilon * (alpha[i] + log64(totals[i]))


@njit(**FAST)
def add_logs(potential: Any, factors: Any, epsilon: float) -> None:
    for i in range(factors.shape[0]):
        potential[i] += epsilon * log64(np.float64(factors[i]))


@njit(**FAST)
def _row_sums(kernel: Any, v: Any, held: Any) -> None:
    """K v; four rows at a time, so that v is read less often and sums need not wait for each other."""
    n, m = kernel.shape
    nothing = v[0] - v[0]
    whole = n - n % 4
    for i in range(0, whole, 4):
        a, b, c, d = nothing, nothing, nothing, nothing
        for j in range(m):
            a += kernel[i, j] * v[j]
            b += kernel[i + 1, j] * v[j]
            c += kernel[i + 2, j] * v[j]
            d += kernel[i + 3, j] * v[j]
        held[i], held[i + 1], held[i + 2], held[i + 3] = a, b, c, d
    for i in range(whole, n):
        a = nothing
        for j in range(m):
            a += kernel[i, j] * v[j]
        held[i] = a


@njit(**FAST)
def _update(weights: Any, held: Any, factors: Any, w: Any, steepest: Any) -> float:
    """Bring factors * held nearer to the weights, over-relaxed by w; return the error before."""
    off = w - w  # in the dtype of the kernel
    for i in range(factors.shape[0]):
        now = held[i] * factors[i]
        lack, total = weights[i] - now, weights[i] + now
        off += abs(lack)
        push = w * lack
        push = push if abs(push) < steepest * total else lack
        factors[i] *= (total + push) / (total - push)
    return np.float64(off)


@njit
def update_rows(kernel: Any, p: Any, u: Any, v: Any, w: Any, steepest: Any, held: Any) -> float:
    """One update of u; returns the error of the rows before it."""
    _row_sums(kernel, v, held)
    return _update(p, held, u, w, steepest)


@njit(**FAST)
def column_sums(kernel: Any, u: Any, sums: Any) -> None:
    """K^T u; four rows at a time, so that the sums are read and written less often."""
    n, m = kernel.shape
    sums[:] = u[0] - u[0]
    whole = n - n % 4
    for i in range(0, whole, 4):
        a, b, c, d = u[i], u[i + 1], u[i + 2], u[i + 3]
        row_a, row_b, row_c, row_d = kernel[i], kernel[i + 1], kernel[i + 2], kernel[i + 3]
        for j in range(m):
            sums[j] += (row_a[j] * a + row_b[j] * b) + (row_c[j] * c + row_d[j] * d)
    for i in range(whole, n):
        row, x = kernel[i], u[i]
        for j in range(m):
            sums[j] += row[j] * x


@njit
def update_columns(q: Any, sums: Any, v: Any, w: Any, steepest: Any) -> float:
    """One update of v from K^T u; returns the error of the columns before it."""
    return _update(q, sums, v, w, steepest)


@njit(**FAST)
def column_error(q: Any, sums: Any, v: Any) -> float:
    off = q[0] - q[0]
    for j in range(v.shape[0]):
        off += abs(sums[j] * v[j] - q[j])
    return np.float64(off)


@njit
def outgrown(u: Any) -> bool:
    low, high = np.inf, 0.0
    for i in range(u.shape[0]):
        low = u[i] if u[i] < low else low
        high = u[i] if u[i] > high else high
    return not (low > 1 / SCALING_LIMIT and high < SCALING_LIMIT)


@njit
def relaxation(contraction: float, w: float) -> float:
    """The w for the eigenvalue of plain Sinkhorn that this contraction under the present w tells of.

    `(c + w - 1)^2 = w^2 c eigenvalue` links them while c > w - 1; below, w alone sets the pace and c tells nothing.
    A single look at most halves 2 - w: an error that has not settled yet looks slower than it is.
    """
    if not w - 1.0 < contraction < 1.0:
        return w
    eigenvalue = min((contraction + w - 1.0) ** 2 / (w * w * contraction), 1.0)
    return min(2.0 / (1.0 + math.sqrt(1.0 - eigenvalue)), 1.0 + w / 2)


@njit
def softmin_at(scores: Any, epsilon: float) -> float:
    top = -np.inf
    for i in range(scores.shape[0]):
        top = scores[i] if scores[i] > top else top
    total = 0.0
    for i in range(scores.shape[0]):
        total += math.exp(scores[i] - top)
    return -epsilon * (top + math.log(total))


@njit(**FAST)
def halve(kernel: Any, p: Any, weight: Any, u: Any, sums: Any) -> float:
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
