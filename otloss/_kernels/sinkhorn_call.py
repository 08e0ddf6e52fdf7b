"""The call of the Sinkhorn kernels on tensors."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Columns of what the kernels write per problem.
ERROR, ITERATIONS, VALUE = range(3)


def run_kernel(
    p: Float[Tensor, "problems n"],
    q: Float[Tensor, "problems m"],
    costs: Float[Tensor, "matrices n m"],
    *,
    owner: Int[Tensor, " problems"],
    epsilon: Float[Tensor, " problems"],
    g: Float[Tensor, "problems m"] | None = None,
    tolerance: float,
    most: int,
    symmetric: bool = False,
    mass_tolerance: float = 1.0,
    widest: float = math.inf,
) -> tuple[Float[Tensor, "problems n"], Float[Tensor, "problems m"], Float[Tensor, "problems 3"]]:
    """Return f, g and (error, iterations, dual value) of each problem, without a graph.

    Problem k has the cost matrix `costs[owner[k]]`. Without a start `g` epsilon falls by steps. Where masses differ by
    more than `mass_tolerance` of the larger one, epsilon is above `widest` times the largest cost, or a number is not
    valid, the error is infinite. `symmetric` is for p = q at symmetric costs, and gives no value.
    """
    from otloss._kernels._threads import ENTRIES, run_on_threads
    from otloss._kernels.sinkhorn import scratch, sinkhorn_problems, symmetric_problems

    (count, n), m = p.shape, q.shape[1]
    f = torch.empty(count, n, dtype=torch.float64, device="cpu")
    warm = g is not None
    g = (
        torch.zeros(count, m, dtype=torch.float64, device="cpu")
        if g is None
        else g.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    )
    ends = torch.empty(count, 3, dtype=torch.float64, device="cpu")
    arrays = [t.contiguous().numpy() for t in (p, q, costs, owner, epsilon, f, g, ends)]
    one, dtype = count * n * m < ENTRIES, arrays[2].dtype
    if symmetric:
        kernel, given = symmetric_problems, (arrays[0], *arrays[2:], tolerance, most)
    else:
        kernel, given = sinkhorn_problems, (*arrays, (mass_tolerance, widest, tolerance, most), warm)
    run_on_threads(kernel, count, given, lambda: scratch(n, m, dtype), one_thread=one)
    return f, g, ends
