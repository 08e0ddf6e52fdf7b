"""What the kernels of Sinkhorn's iteration compute once for a problem, as kernels of their own.

Balanced, symmetric and unbalanced kernels call them by their addresses (`Ends`), so they are compiled once for all.
`sinkhorn_numba` has the notation.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from otloss._numba.compile import compiled
from otloss.solvers.entropic.interface import LEAST_EIGENVALUE
from otloss.solvers.entropic.sinkhorn_steps_numba import FAST, least_eigenvalue, product, round_trip, softmin_of_scores


class LanczosBounds(NamedTuple):
    """What `estimate_eigenvalue` reads as constants.

    Attributes:
        steps, first_steps, large_eigenvalue: the method ends after `first_steps` if the least eigenvalue is above
            `large_eigenvalue`: the eigenvalue of a few bins among thousands has shown by then, and after three steps
            it has not.
        smallest_length: of a vector, below which it is rounding.
        smallest_share: of the mass; the start counts lighter bins as this one, so that its numbers fit float32.
    """

    steps: int = 24
    first_steps: int = 8
    large_eigenvalue: float = 0.1
    smallest_length: float = 1e-6
    smallest_share: float = 1e-20


LANCZOS = LanczosBounds()


@compiled(fastmath=FAST)
def estimate_eigenvalue(
    kernel: Any, p: Any, q: Any, u: Any, v: Any, row_sums: Any, sums: Any, x: Any, previous: Any, diagonal: Any,
    beside: Any, n: int, m: int, outcome: Any,
) -> None:  # fmt: skip
    """Write 1 - lambda to the outcome, where lambda is the second eigenvalue of the operator T of `round_trip`.

    p and q are the marginals of the plan U G V, of mass one. A few steps of Lanczos' method. `row_sums` and all
    arrays after it are overwritten.
    """
    number, state = u.dtype.type, np.uint32(1)
    for j in range(m):
        # The start has pseudo-random numbers of sizes from 0.5 to 1. One with a pattern is orthogonal to eigenvectors
        # of uniform weights, and one with small numbers nearly so to that of a bin which exchanges mass with one bin.
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
        if count == LANCZOS.first_steps and least_eigenvalue(diagonal, beside, count) > LANCZOS.large_eigenvalue:
            break
        a, b = number(diagonal[k]), number(beside[k - 1] if k > 0 else 0)
        for j in range(m):
            following = sums[j] - a * x[j] - b * previous[j]
            previous[j], x[j] = x[j], following
    outcome[LEAST_EIGENVALUE] = least_eigenvalue(diagonal, beside, count)


@compiled()
def write_other_potentials(
    cost: Any, is_transposed: bool, places: Any, count: int, weights: Any, inverse: float, least: float,
    potential: Any, epsilon: float, out: Any, shifted: Any, scores: Any,
) -> None:  # fmt: skip
    """Write the potentials of the bins that are not among the first `count` places.

    They are soft minima over the other side's bins above a share `least`. `shifted` and `scores` are scratch.
    """
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


class Ends(NamedTuple):
    """The places of the addresses of the kernels of this file, in the tuple that other kernels get."""

    estimate: int = 0
    others: int = 1


ENDS = Ends()


def build_calls(weights: Any, costs: Any) -> tuple[tuple[Any, tuple[Any, ...]], ...]:
    """Return the kernels in the order of `Ends`, each with arguments, for weights and costs of these dtypes."""
    matrix, vector, wide = np.ones((1, 1), costs), np.ones(1, costs), np.ones(5)
    masses, places = np.ones(1, weights), np.zeros(1, np.int64)
    return (
        (estimate_eigenvalue, (matrix, *(vector,) * 8, wide, wide, 1, 1, wide)),
        (write_other_potentials, (matrix, False, places, 1, masses, 1.0, 0.0, wide, 1.0, wide, wide, wide)),
    )
