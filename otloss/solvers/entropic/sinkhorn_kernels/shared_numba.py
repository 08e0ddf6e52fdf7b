"""What the kernels of Sinkhorn's iteration compute once a problem or once an absorption, as kernels of their own.

The balanced, the symmetric and the unbalanced kernel call them by their addresses (`Shared`), so they are compiled once
for all. `balanced_numba` has the notation.

    gather_problem              before the iterations: the bins that take part, their shares of the mass and their costs
    absorb                      whenever factors have become large: potentials and the matrix G
    write_potentials            after them: potentials of all bins, for balanced and symmetric problems
    write_other_potentials      the same, for the bins of one side that took no part
    estimate_eigenvalue         how much the error of the potentials is above the error of the marginals
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from otloss._numba.compile import call_at, compiled, exp, inner, largest, log64
from otloss._numba.sums import mass_of
from otloss.solvers.entropic.sinkhorn_kernels.numbers import SMALLEST_EIGENVALUE
from otloss.solvers.entropic.sinkhorn_kernels.steps_numba import (
    FAST,
    product,
    round_trip,
    smallest_eigenvalue,
    softmin_of_scores,
)


class ShareBounds(NamedTuple):
    """Shares of the mass from which bins take part, in float32 and in float64: 1 / share has to fit the kernel."""

    negligible_32: float = 1e-20
    negligible_64: float = 1e-150


class Facts(NamedTuple):
    """The places of the numbers that `gather_problem` writes.

    Attributes:
        n, m: the numbers of bins that take part.
        mass_p, mass_q: the masses; NaN if a weight is not valid.
        highest: the largest cost of the bins that take part; NaN if any cost is negative, NaN or infinite.
    """

    n: int = 0
    m: int = 1
    mass_p: int = 2
    mass_q: int = 3
    highest: int = 4


class Shared(NamedTuple):
    """The places of the addresses of the kernels of this file, in the tuple that other kernels get.

    `write` is the kernel that writes the potentials; unbalanced problems have their own.
    """

    gather: int = 0
    absorb: int = 1
    others: int = 2
    estimate: int = 3
    write: int = 4


SHARE_BOUNDS, FACTS, SHARED = ShareBounds(), Facts(), Shared()


class OneProblem(NamedTuple):
    """One problem of a batch, on all bins: p (n,), q (m,), cost (n, m) and epsilon."""

    p: Any
    q: Any
    cost: Any
    epsilon: float


class Outputs(NamedTuple):
    """What is written for a problem: f (n,), g (m,) and outcome (5,), as `sinkhorn_cpu.KernelResults` explains them."""

    f: Any
    g: Any
    outcome: Any


class Scratch(NamedTuple):
    """The arrays that a thread works in. Vectors have the length of the longer side.

    Attributes:
        alpha, beta: the potentials absorbed so far, in float64 as all down to `absorbed`.
        totals, shifted, scores: exponents.
        phi, gamma, absorbed: potentials over epsilon of `unbalanced_numba`.
        p, q: shares of the mass, in the dtype of the costs as all down to `costs`.
        u, v: factors.
        row_sums, column_sums: sums of the plan or of G.
        x, previous: two vectors of Lanczos' method.
        kernel: the matrix G.
        costs: the costs of the bins that take part.
        rows, columns: the places of the bins that take part.
        facts: what `gather_problem` writes; `Facts` names the places.
        counter: the counter of the tasks.
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
    facts: Any
    counter: Any


def empty_arrays(n: int, m: int, dtype: Any) -> tuple[tuple[np.ndarray, ...]]:
    """Return the arrays that `build_scratch` divides among the fields of `Scratch`, for problems with n by m costs."""
    longest = max(n, m)
    wide, narrow = np.empty((9, max(longest, len(Facts())))), np.empty((8, longest), dtype)
    return ((wide, narrow, np.empty((2, n, m), dtype), np.empty((2, longest + 1), np.int64)),)


@inner()
def build_scratch(counter: Any, arrays: Any) -> Scratch:
    wide, narrow, matrices, places = arrays
    # The kernel makes the named tuple: numba takes ten times as long to pass one from Python.
    return Scratch(
        wide[0], wide[1], wide[2], wide[3], wide[4], wide[5], wide[6], wide[7], narrow[0], narrow[1], narrow[2],
        narrow[3], narrow[4], narrow[5], narrow[6], narrow[7], matrices[0], matrices[1], places[0], places[1],
        wide[8], counter,
    )  # fmt: skip


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


@inner()
def _gather_costs(cost: Any, work: Any, n: int, m: int) -> float:
    """Write the costs of the bins that take part; return the largest."""
    highest = 0.0
    for i in range(n):
        source, target = cost[work.rows[i]], work.costs[i]
        for j in range(m):
            c = np.float64(source[work.columns[j]])
            target[j] = c
            highest = c if c > highest else highest
    return highest


@compiled(by_address=True)
def gather_problem(problem: Any, work: Any) -> None:
    """Write shares and places of the bins that take part, and the facts; and the costs, if other bins take none."""
    p, q, cost = problem.p, problem.q, problem.cost
    negligible = SHARE_BOUNDS.negligible_32 if cost.itemsize == 4 else SHARE_BOUNDS.negligible_64
    facts = work.facts
    highest, mass_p, mass_q = highest_cost(cost), mass_of(p), mass_of(q)
    n = gather_shares(p, mass_p, negligible, work.p, work.rows)
    m = gather_shares(q, mass_q, negligible, work.q, work.columns)
    if n < cost.shape[0] or m < cost.shape[1]:
        highest_of_block = _gather_costs(cost, work, n, m)
        highest = highest_of_block if highest < np.inf else highest
    facts[FACTS.n], facts[FACTS.m], facts[FACTS.highest] = n, m, highest
    facts[FACTS.mass_p], facts[FACTS.mass_q] = mass_p, mass_q


@compiled(fastmath=FAST, by_address=True)
def absorb(cost: Any, work: Any, n: int, m: int, epsilon: float) -> None:
    """Write alpha = softmin(beta), the kernel G row by row, and its column sums G^T p."""
    p, q, sums, alpha, beta, scores = work.p, work.q, work.column_sums, work.alpha, work.beta, work.scores
    kernel, totals = work.kernel, work.totals
    number = kernel.dtype.type
    inverse = 1.0 / epsilon
    for j in range(m):
        sums[j] = number(0)
    for i in range(n):
        row, ratio = cost[i], kernel[i]
        for j in range(m):
            scores[j] = (beta[j] - row[j]) * inverse
        top = largest(scores, m)
        for j in range(m):
            ratio[j] = number(scores[j] - top)
        total = number(0)
        for j in range(m):
            e = exp(ratio[j])
            ratio[j] = e
            total += e * q[j]
        scale, weight = number(1) / total, p[i]
        for j in range(m):
            e = ratio[j] * scale
            ratio[j] = e
            sums[j] += e * weight
        alpha[i], totals[i] = top, total
    for i in range(n):
        alpha[i] = -epsilon * (alpha[i] + log64(totals[i]))


class LanczosBounds(NamedTuple):
    """What `estimate_eigenvalue` reads as constants.

    Attributes:
        steps, first_steps, large_eigenvalue: the method ends after `first_steps` if the smallest eigenvalue is above
            `large_eigenvalue`: the eigenvalue of a few bins among thousands has shown by then, and after three steps
            it has not.
        smallest_length: the length below which a vector is rounding.
        smallest_share: the start counts bins with a smaller share of the mass as this one, so that its numbers fit
            float32.
    """

    steps: int = 24
    first_steps: int = 8
    large_eigenvalue: float = 0.1
    smallest_length: float = 1e-6
    smallest_share: float = 1e-20


LANCZOS = LanczosBounds()


@compiled(fastmath=FAST, by_address=True)
def estimate_eigenvalue(work: Any, n: int, m: int, outcome: Any) -> None:
    """Write 1 - lambda to the outcome, where lambda is the second eigenvalue of the operator T of `round_trip`.

    `work.p` and `work.q` are the marginals of the plan U G V, of mass one. All vectors below them but u and v are
    overwritten, and `totals` and `scores`. A few steps of Lanczos' method.
    """
    kernel, p, q, u, v, row_sums, sums = work.kernel, work.p, work.q, work.u, work.v, work.row_sums, work.column_sums
    x, previous, diagonal, beside = work.x, work.previous, work.totals, work.scores
    number, state = u.dtype.type, np.uint32(1)
    for j in range(m):
        # The start has pseudo-random numbers of sizes from 0.5 to 1. A start with a pattern is orthogonal to
        # eigenvectors of uniform weights. A start with small numbers is nearly orthogonal to the eigenvector of a bin
        # that exchanges mass with one bin only.
        # The root of the weight gives each bin an equal part, however light it is.
        state = np.uint32(state * np.uint32(1664525) + np.uint32(1013904223))
        size = (0.5 + (state >> np.uint32(2)) * 2.0**-31) / math.sqrt(max(q[j], LANCZOS.smallest_share))
        previous[j], x[j] = number(0), number(size if state & np.uint32(1 << 31) else -size)
    count = 0
    for k in range(min(LANCZOS.steps, m - 1)):
        # The first eigenvector is constant. Rounding brings it back, so it is removed each time.
        mean = number(0)
        for j in range(m):
            mean += q[j] * x[j]
        for j in range(m):
            x[j] -= mean
        length = math.sqrt(product(q, x, x, m))
        if k > 0:
            beside[k - 1] = length
        if not length > LANCZOS.smallest_length:
            break
        for j in range(m):
            x[j] /= number(length)
        round_trip(kernel, p, q, u, v, x, row_sums, sums, n, m)
        diagonal[k] = product(q, x, sums, m)
        count += 1
        if count == LANCZOS.first_steps and smallest_eigenvalue(diagonal, beside, count) > LANCZOS.large_eigenvalue:
            break
        a, b = number(diagonal[k]), number(beside[k - 1] if k > 0 else 0)
        for j in range(m):
            following = sums[j] - a * x[j] - b * previous[j]
            previous[j], x[j] = x[j], following
    outcome[SMALLEST_EIGENVALUE] = smallest_eigenvalue(diagonal, beside, count)


@compiled(by_address=True)
def write_other_potentials(
    problem: Any, work: Any, is_transposed: bool, count: int, smallest_share: float, potential: Any, out: Any
) -> None:
    """Write the f, or with `is_transposed` the g, of the bins that are not among the first `count` that take part.

    They are soft minima over the other side's bins above a share `smallest_share` of its mass, whose potentials are
    `potential`. `out` may be longer than the side.
    """
    cost, epsilon, bins = problem.cost, problem.epsilon, problem.cost.shape[1 if is_transposed else 0]
    if count == bins:
        return
    places = work.columns if is_transposed else work.rows
    weights = problem.p if is_transposed else problem.q
    mass = work.facts[FACTS.mass_p if is_transposed else FACTS.mass_q]
    shifted, scores, inverse = work.shifted, work.scores, 1 / mass
    for j in range(weights.shape[0]):
        share = weights[j] * inverse
        shifted[j] = potential[j] / epsilon + math.log(share) if share > smallest_share else -np.inf
    at = 0
    for i in range(bins):
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


@compiled(by_address=True)
def write_potentials(shared: Any, problem: Any, work: Any, outputs: Any) -> None:
    """Write f and g on all bins, from the potentials alpha and beta of the bins that take part."""
    f, g, n, m = outputs.f, outputs.g, int(work.facts[FACTS.n]), int(work.facts[FACTS.m])
    negligible = SHARE_BOUNDS.negligible_32 if problem.cost.itemsize == 4 else SHARE_BOUNDS.negligible_64
    for i in range(n):
        f[work.rows[i]] = work.alpha[i]
    for j in range(m):
        g[work.columns[j]] = work.beta[j]
    call_at(shared[SHARED.others], (problem, work, False, n, negligible, g, f))
    call_at(shared[SHARED.others], (problem, work, True, m, negligible, f, g))
    if n < count_positive(problem.p) and m < count_positive(problem.q):
        # Both sides have light bins. With potentials from heavy bins alone, they would exchange more mass than they
        # hold.
        call_at(shared[SHARED.others], (problem, work, True, m, 0.0, f, g))
        call_at(shared[SHARED.others], (problem, work, False, n, 0.0, g, f))


def build_calls(weights: Any, costs: Any) -> tuple[tuple[Any, tuple[Any, ...]], ...]:
    """Return the kernels in the order of `Shared`, each with arguments, for weights and costs of these dtypes."""
    matrix, masses, wide = np.ones((1, 1), costs), np.ones(1, weights), np.ones(5)
    work = build_scratch.py_func(np.zeros(3, np.int64), *empty_arrays(1, 1, costs))
    problem = OneProblem(masses, masses, matrix, 1.0)
    return (
        (gather_problem, (problem, work)),
        (absorb, (matrix, work, 1, 1, 1.0)),
        (write_other_potentials, (problem, work, False, 1, 0.0, wide, wide)),
        (estimate_eigenvalue, (work, 1, 1, wide)),
        (write_potentials, (((0, 0),) * len(SHARED), problem, work, Outputs(wide, wide, wide))),
    )
