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
from otloss.solvers.entropic.sinkhorn_kernels.numbers import POTENTIAL_ERROR, SMALLEST_EIGENVALUE
from otloss.solvers.entropic.sinkhorn_kernels.steps_numba import (
    FAST,
    product,
    round_trip,
    smallest_eigenvalue,
    softmin_of_scores,
)


class ShareBounds(NamedTuple):
    """Shares of the mass from which bins take part, and the updates of light bins, which have less.

    Attributes:
        negligible_32, negligible_64: the shares in float32 and in float64: 1 / share has to fit the kernel.
        near: bins whose share is below so many times these are updated with light bins, with which they may exchange
            a part of their mass that counts.
        light_updates: of potentials of light bins among each other, at most.
    """

    negligible_32: float = 1e-20
    negligible_64: float = 1e-150
    near: float = 1e6
    light_updates: int = 300


class Facts(NamedTuple):
    """The places of the numbers that `gather_problem` writes.

    Attributes:
        n, m: the numbers of bins that take part.
        mass_p, mass_q: the masses; NaN if a weight is not valid.
        highest: the largest cost of the bins that take part; NaN if any cost is negative, NaN or infinite.
        change: the largest change of a potential over epsilon by the last call of `write_other_potentials`, over bins
            with mass.
    """

    n: int = 0
    m: int = 1
    mass_p: int = 2
    mass_q: int = 3
    highest: int = 4
    change: int = 5


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
def negligible_share(cost: Any) -> float:
    return SHARE_BOUNDS.negligible_32 if cost.itemsize == 4 else SHARE_BOUNDS.negligible_64


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
    negligible = negligible_share(cost)
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
    problem: Any, work: Any, is_transposed: bool, largest_share: float, smallest_share: float, is_ordered: bool,
    potential: Any, out: Any,
) -> None:  # fmt: skip
    """Write the f, or with `is_transposed` the g, of the bins with at most `largest_share` of the mass.

    They are soft minima over the other side's bins above a share `smallest_share` of its mass, and with `is_ordered`
    above the bin's own share; the potentials of the other side are `potential`. `out` may be longer than the side.
    """
    cost, epsilon = problem.cost, problem.epsilon
    own, weights = (problem.q, problem.p) if is_transposed else (problem.p, problem.q)
    inverse_own = 1 / work.facts[FACTS.mass_q if is_transposed else FACTS.mass_p]
    inverse = 1 / work.facts[FACTS.mass_p if is_transposed else FACTS.mass_q]
    shares, shifted, scores = work.totals, work.shifted, work.scores
    for j in range(weights.shape[0]):
        shares[j] = weights[j] * inverse
        shifted[j] = potential[j] / epsilon + math.log(shares[j]) if shares[j] > smallest_share else -np.inf
    change = 0.0
    for i in range(own.shape[0]):
        share = own[i] * inverse_own
        if share > largest_share:
            continue
        number, lower = 0, share if is_ordered else 0.0
        for j in range(weights.shape[0]):
            if shifted[j] > -np.inf and shares[j] > lower:
                scores[number] = shifted[j] - (cost[j, i] if is_transposed else cost[i, j]) / epsilon
                number += 1
        updated = softmin_of_scores(scores, epsilon, number)
        change = max(change, abs(updated - out[i])) if share > 0 else change
        out[i] = updated
    work.facts[FACTS.change] = change / epsilon


@inner()
def count_positive(weights: Any) -> int:
    count = 0
    for k in range(weights.shape[0]):
        count += weights[k] > 0
    return count


@inner()
def _lightest_share(weights: Any, mass: float) -> float:
    lightest = weights[0]
    for k in range(weights.shape[0]):
        lightest = min(lightest, weights[k])
    return lightest * (1 / mass)


@inner()
def _update_light(
    shared: Any, problem: Any, work: Any, is_symmetric: bool, largest_share: float, is_ordered: bool, outputs: Any
) -> float:
    """Update g and then f of the bins with at most `largest_share`; return the largest change over epsilon.

    In symmetric problems f = g at the solution, and the mean of f and its update is taken: two updates in turn would
    leave the difference between f and g of a bin that exchanges its mass with itself.
    """
    f, g, change = outputs.f, outputs.g, 0.0
    if is_symmetric:
        for i in range(f.shape[0]):
            if problem.p[i] * (1 / work.facts[FACTS.mass_p]) <= largest_share:
                g[i] = f[i] if is_ordered else (f[i] + g[i]) / 2
                f[i] = g[i]
    else:
        call_at(shared[SHARED.others], (problem, work, True, largest_share, 0.0, is_ordered, f, g))
        change = work.facts[FACTS.change]
    call_at(shared[SHARED.others], (problem, work, False, largest_share, 0.0, is_ordered, g, f))
    return max(change, work.facts[FACTS.change])


@inner()
def _join_light_bins(
    shared: Any, problem: Any, work: Any, is_symmetric: bool, negligible: float, largest_change: float, outputs: Any
) -> bool:
    """Update f and g of light and empty bins of both sides until they settle; return whether they have.

    With potentials from heavy bins alone they would exchange more mass than they hold. An entry of the plan is at most
    the weight of its row and of its column, so that heavier bins of the other side decide a light bin. The bins follow
    in this order first: where a lighter one had an excess of mass to give, updates would take it away only slowly.
    """
    for _ in range(SHARE_BOUNDS.light_updates):
        if _update_light(shared, problem, work, is_symmetric, negligible, np.bool_(True), outputs) == 0:
            break
    previous, near = -1.0, negligible * SHARE_BOUNDS.near
    for _ in range(SHARE_BOUNDS.light_updates):
        change = _update_light(shared, problem, work, is_symmetric, near, np.bool_(False), outputs)
        # The second product is of what is left to change, if it contracts as between the last two updates.
        if change == 0 or (change <= largest_change and change * change <= largest_change * (previous - change)):
            return True
        previous = change
    return False


@compiled(by_address=True)
def write_potentials(
    shared: Any, problem: Any, work: Any, is_symmetric: bool, largest_change: float, outputs: Any
) -> None:
    """Write f and g on all bins, from the potentials alpha and beta of the bins that take part.

    The error of potentials is infinite where potentials of light bins still change by more than `largest_change`.
    """
    f, g, n, m = outputs.f, outputs.g, int(work.facts[FACTS.n]), int(work.facts[FACTS.m])
    negligible = negligible_share(problem.cost)
    for i in range(n):
        f[work.rows[i]] = work.alpha[i]
    for j in range(m):
        g[work.columns[j]] = work.beta[j]
    if n == f.shape[0] and m == g.shape[0]:
        return
    if is_symmetric:
        # f = g at the solution. Their errors are opposite, and light bins would read one of them.
        for i in range(n):
            g[work.rows[i]] = f[work.rows[i]] = (work.alpha[i] + work.beta[i]) / 2
    call_at(shared[SHARED.others], (problem, work, False, negligible, negligible, False, g, f))
    call_at(shared[SHARED.others], (problem, work, True, negligible, negligible, False, f, g))
    has_light = n + m < count_positive(problem.p) + count_positive(problem.q)
    lightest_p = _lightest_share(problem.p, work.facts[FACTS.mass_p])
    lightest_q = _lightest_share(problem.q, work.facts[FACTS.mass_q])
    is_joined = has_light and max(lightest_p, lightest_q) <= negligible * SHARE_BOUNDS.near
    if is_joined and not _join_light_bins(shared, problem, work, is_symmetric, negligible, largest_change, outputs):
        outputs.outcome[POTENTIAL_ERROR] = np.inf


def build_calls(weights: Any, costs: Any) -> tuple[tuple[Any, tuple[Any, ...]], ...]:
    """Return the kernels in the order of `Shared`, each with arguments, for weights and costs of these dtypes."""
    matrix, masses, wide = np.ones((1, 1), costs), np.ones(1, weights), np.ones(5)
    work = build_scratch.py_func(np.zeros(3, np.int64), *empty_arrays(1, 1, costs))
    problem = OneProblem(masses, masses, matrix, 1.0)
    return (
        (gather_problem, (problem, work)),
        (absorb, (matrix, work, 1, 1, 1.0)),
        (write_other_potentials, (problem, work, False, 1.0, 0.0, False, wide, wide)),
        (estimate_eigenvalue, (work, 1, 1, wide)),
        (write_potentials, (((0, 0),) * len(SHARED), problem, work, False, 1.0, Outputs(wide, wide, wide))),
    )
