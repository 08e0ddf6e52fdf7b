"""The updates of Sinkhorn in scaling form, on one problem; `balanced_numba` has the notation and their order.

    exact           U <- U r,    r = p / (U G V)            (and the same for V, by columns)
    over-relaxed    U <- U r^w,  that is f <- f + w (softmin(g) - f)

In place of the power r^w stands (1 + w d) / (1 - w d) with d = (r - 1) / (r + 1): a division, which has the same value
and derivative at r = 1. With a marginal penalty rho and k = rho / (rho + epsilon), the potential phi itself is
iterated:

    damped          phi <- phi + w k log(t / (U G V)),    U = p exp(phi - alpha / epsilon)

The targets t are explained in `unbalanced_numba`. Balanced problems would have k = 1 and t = p, but the
logarithm and the exponentials of this form take as long as a product with some hundred columns of G.

w follows from the contraction c of the error per iteration, as in successive over-relaxation:

    (c + w - 1)^2 = w^2 c lambda        gives lambda, the contraction of plain Sinkhorn,
    w = 2 / (1 + sqrt(1 - lambda))      is the best w for it.

Sources: L. Hageman, D. Young, Applied Iterative Methods, 1981, chapter 9; for transport A. Thibault, L. Chizat,
C. Dossal, N. Papadakis, Overrelaxed Sinkhorn-Knopp Algorithm for Regularized Optimal Transport, 2017.

The reference implementation is `entropic.sinkhorn`. Arrays may be longer than the n rows and m columns
that take part, so functions get these numbers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from otloss._numba.compile import exp64, inner, log64
from otloss.solvers.entropic.sinkhorn_kernels.numbers import SCHEDULE


class UpdateBounds(NamedTuple):
    """Bounds of one update, which the kernels read as constants.

    Attributes:
        scaling: factors are absorbed once a factor over its weight, or the inverse, is larger.
        largest_factor: one update multiplies no factor by more, since the sum of a lost column is zero.
        largest_step: one damped update changes no potential over epsilon by more.
        largest_drift: potentials over epsilon are absorbed again where they have moved by more.
        largest_relaxed_push: where w |r - 1| / (r + 1) is larger, an update is not over-relaxed.
    """

    scaling: float = 1e4
    largest_factor: float = 1e3
    largest_step: float = 7.0
    largest_drift: float = 9.0
    largest_relaxed_push: float = 0.8


UPDATE_BOUNDS = UpdateBounds()
FAST = {"reassoc", "contract", "nsz"}


@inner(fastmath=FAST)
def add_logs(potential: Any, factors: Any, weights: Any, epsilon: float, count: int) -> None:
    """potential += epsilon log(factors / weights)."""
    for i in range(count):
        potential[i] += epsilon * log64(np.float64(factors[i]) / np.float64(weights[i]))


@inner(fastmath=FAST)
def row_sums(kernel: Any, v: Any, sums: Any, n: int, m: int) -> None:
    """Write G v, four rows at a time: v is read less often, and the four sums need not wait for each other."""
    nothing = v[0] - v[0]
    whole = n - n % 4
    for i in range(0, whole, 4):
        a, b, c, d = nothing, nothing, nothing, nothing
        row_a, row_b, row_c, row_d = kernel[i], kernel[i + 1], kernel[i + 2], kernel[i + 3]
        for j in range(m):
            a += row_a[j] * v[j]
            b += row_b[j] * v[j]
            c += row_c[j] * v[j]
            d += row_d[j] * v[j]
        sums[i], sums[i + 1], sums[i + 2], sums[i + 3] = a, b, c, d
    for i in range(whole, n):
        row, a = kernel[i], nothing
        for j in range(m):
            a += row[j] * v[j]
        sums[i] = a


@inner(fastmath=FAST)
def column_sums(kernel: Any, u: Any, sums: Any, n: int, m: int) -> None:
    """Write G^T u, four rows at a time: the sums are read and written less often."""
    nothing = u[0] - u[0]
    for j in range(m):
        sums[j] = nothing
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


@inner(fastmath=FAST)
def update(
    weights: Any, sums: Any, factors: Any, w: Any, largest_push: Any, largest_factor: Any, count: int
) -> tuple[float, bool]:  # fmt: skip
    """Over-relax one side; return the error before, and whether some bin was too far from its weight for that.

    Where the sum of a lost row or column is zero, the next absorption gives its potential.
    """
    zero = w - w  # in the dtype of the kernel
    error, unrelaxed = zero, zero
    for i in range(count):
        mass = sums[i] * factors[i]
        lack, total = weights[i] - mass, weights[i] + mass
        push = w * lack
        is_relaxed = abs(push) < largest_push * total
        # Not (total + lack) / (total - lack): that denominator may round to zero.
        step = (total + push if is_relaxed else weights[i]) / (total - push if is_relaxed else mass)
        error += abs(lack)
        unrelaxed += zero if is_relaxed else w
        factors[i] *= step if step < largest_factor else largest_factor
    return np.float64(error), unrelaxed > zero


@inner(fastmath=FAST)
def damped_update(
    weights: Any, sums: Any, absorbed: Any, first: Any, potential: Any, factors: Any, steps: Any, offset: float,
    pull: float, damping: float, w: float, count: int,
) -> tuple[float, float, float, float]:  # fmt: skip
    """Update one side by a damped step.

    Returns the error before, the sum of the targets before, the sum after to second order, and the number of potentials
    that are far from `first`, the potentials of the last absorption.
    """
    error, total, total_after, far = 0.0, 0.0, 0.0, 0.0
    for i in range(count):
        mass = np.float64(factors[i]) * np.float64(sums[i])
        target = np.float64(weights[i]) * exp64(offset - pull * potential[i])
        error += abs(mass - target)
        total += target
        step = damping * log64(target / mass)
        step = w * step if abs(w * step) < SCHEDULE.largest_relaxed_step else step
        step = UPDATE_BOUNDS.largest_step if step > UPDATE_BOUNDS.largest_step else step
        step = -UPDATE_BOUNDS.largest_step if step < -UPDATE_BOUNDS.largest_step else step
        potential[i] += step
        steps[i] = step
        lowered = pull * step
        total_after += target * (1.0 - lowered + 0.5 * lowered * lowered)  # exp(-lowered) to second order
        far += 1.0 if abs(potential[i] - first[i]) > UPDATE_BOUNDS.largest_drift else 0.0
        factors[i] = np.float64(weights[i]) * exp64(potential[i] - absorbed[i])
    return error, total, total_after, far


@inner()
def largest_size(values: Any, count: int) -> float:
    size = 0.0
    for i in range(count):
        size = max(size, abs(values[i]))
    return size


@inner(fastmath=FAST)
def exact_update(weights: Any, sums: Any, factors: Any, count: int) -> float:
    """Set factors = weights / sums; return the largest relative change. A factor whose sum is zero stays as it is."""
    largest = weights[0] - weights[0]
    for i in range(count):
        factor = weights[i] / sums[i] if sums[i] > 0 else factors[i]
        change = abs(factor - factors[i])
        largest = change / factor if change > largest * factor else largest
        factors[i] = factor
    return np.float64(largest)


@inner(fastmath=FAST)
def product(weights: Any, x: Any, y: Any, count: int) -> float:
    """sum of weights x y."""
    total = weights[0] - weights[0]
    for i in range(count):
        total += weights[i] * x[i] * y[i]
    return np.float64(total)


@inner(fastmath=FAST)
def round_trip(kernel: Any, p: Any, q: Any, u: Any, v: Any, x: Any, sums_p: Any, sums: Any, n: int, m: int) -> None:
    """Write P^T diag(1 / p) P x / q to `sums`, for the plan P = U G V.

    This is what updates of f and g make of a small change x of g.
    """
    for j in range(m):
        x[j] *= v[j]
    row_sums(kernel, x, sums_p, n, m)
    for i in range(n):
        sums_p[i] *= u[i] * u[i] / p[i]
    column_sums(kernel, sums_p, sums, n, m)
    for j in range(m):
        x[j] /= v[j]
        sums[j] *= v[j] / q[j]


@inner()
def smallest_eigenvalue(diagonal: Any, beside: Any, count: int) -> float:
    """Return 1 minus the largest eigenvalue of a symmetric tridiagonal matrix with eigenvalues in [0, 1].

    It is accurate to 10 %, and at least 1e-8.
    """
    low, high = math.log(1e-8), 0.0
    for _ in range(8):
        middle = (low + high) / 2
        x, above, pivot = 1 - math.exp(middle), False, 1.0
        for k in range(count):
            square = beside[k - 1] * beside[k - 1] if k > 0 else 0.0
            pivot = diagonal[k] - x - square / (pivot if pivot != 0 else 1e-300)
            above |= pivot > 0
        high = middle if above else high
        low = low if above else middle
    return math.exp(low)


@inner(fastmath=FAST)
def column_error(q: Any, sums: Any, v: Any, m: int) -> float:
    """Return sum_j |q_j - (P^T 1)_j| for the column sums of the plan without its factors v."""
    error = q[0] - q[0]
    for j in range(m):
        error += abs(sums[j] * v[j] - q[j])
    return np.float64(error)


@inner()
def needs_absorption(factors: Any, weights: Any, count: int) -> bool:
    """Return whether a factor is so large or so small, relative to its weight, that it has to be absorbed."""
    low, high = np.inf, 0.0
    for i in range(count):
        ratio = factors[i] / weights[i]
        low = ratio if ratio < low else low
        high = ratio if ratio > high else high
    return not (low > 1 / UPDATE_BOUNDS.scaling and high < UPDATE_BOUNDS.scaling)


@inner()
def best_relaxation(contraction: float, w: float) -> float:
    """Return the best w by the formulas of this file, from the contraction c at the present w.

    They hold for c > w - 1; otherwise w alone decides the contraction, and w is returned. One call halves 2 - w at
    most, because the first errors seem to contract more slowly than later ones do.
    """
    if not w - 1.0 < contraction < 1.0:
        return w
    excess = contraction + w - 1.0
    eigenvalue = excess * excess / (w * w * contraction)
    best = 2.0 / (1.0 + math.sqrt(1.0 - eigenvalue)) if eigenvalue < 1.0 else 2.0
    return best if best < 1.0 + w / 2 else 1.0 + w / 2


@inner()
def next_relaxation(
    w: float, error: float, smallest_error: float, contraction: float, is_settling: bool
) -> tuple[float, float, bool]:
    """Return w, the smallest error so far, and whether w has changed, from the present error and its contraction."""
    if error > SCHEDULE.overshoot * smallest_error:
        return 1.0 + (w - 1.0) / 2, error, True
    if is_settling:
        is_settling = False
    else:
        best_w = best_relaxation(contraction, w)
        is_settling = best_w > w + SCHEDULE.smallest_change
        w = best_w if is_settling else w
    return w, (error if error < smallest_error else smallest_error), is_settling


@inner()
def softmin_of_scores(scores: Any, epsilon: float, count: int) -> float:
    """Return the soft minimum of costs, from their scores: -cost / epsilon plus the logarithm of a weight."""
    top = -np.inf
    for i in range(count):
        top = scores[i] if scores[i] > top else top
    total = 0.0
    for i in range(count):
        total += math.exp(scores[i] - top)
    return -epsilon * (top + math.log(total))


@inner(fastmath=FAST)
def symmetric_update(
    kernel: Any, p: Any, weight: Any, u: Any, sums: Any, largest_factor: Any, n: int
) -> tuple[float, float]:
    """Move log u half of the way to where the rows of diag(weight u) G diag(u) sum to p.

    Returns the error of the rows before, and the largest relative change of u.
    """
    nothing = p[0] - p[0]
    error, change = nothing, nothing
    for i in range(n):
        row, total = kernel[i], nothing
        for j in range(n):
            total += row[j] * u[j]
        sums[i] = total * u[i] * weight[i]
    for i in range(n):
        error += abs(sums[i] - p[i])
        step = np.sqrt(p[i] / sums[i])
        step = step if step < largest_factor else largest_factor
        u[i] *= step
        size = abs(step - p[i] / p[i])
        change = size if size > change else change
    return np.float64(2 * error), np.float64(change)
