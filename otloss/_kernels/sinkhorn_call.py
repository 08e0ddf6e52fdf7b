"""The call of the Sinkhorn kernels on tensors."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

# A few steps of Lanczos' method tell this eigenvalue apart from smaller ones.
RESOLVED_EIGENVALUE = 0.005


def run_kernel(
    p: Float[Tensor, "problems n"],
    q: Float[Tensor, "problems m"],
    costs: Float[Tensor, "matrices n m"],
    *,
    owner: np.ndarray,
    epsilon: np.ndarray,
    g: Float[Tensor, "problems m"] | None = None,
    tolerance: float,
    most: int,
    settled: float = math.inf,
    patience: float = math.inf,
    symmetric: bool = False,
    plans: Float[Tensor, "problems n m"] | None = None,
    rho: float | None = None,
) -> tuple[Float[Tensor, "problems n"], Float[Tensor, "problems m"], Float[Tensor, "problems 5"]]:
    """Return f, g and (error, iterations, error and spread of g, least eigenvalue), without a graph.

    Problem k has the cost matrix `costs[owner[k]]` and `epsilon[k]`; owner and epsilon are (problems,). Without a start
    `g`, epsilon falls in stages. The error is infinite where a number is not valid. `symmetric` is for p = q at
    symmetric costs. `plans` is filled with the plans, which are those of the potentials up to rounding. With the
    marginal penalty `rho` problems are unbalanced: `symmetric` changes nothing then, and the error is infinite too
    where a side has no mass.

    A problem also ends where its contraction says that more than `patience` iterations are left to the tolerance.

    With `settled`, iterations go on until the last exact update changes no factor of the plan by a larger share. Then
    the largest error of g is estimated; it is a bound in unbalanced problems. The spread is the largest g minus the
    least. The least eigenvalue is that of the equations for g, estimated from above; below `RESOLVED_EIGENVALUE` it is
    uncertain. The last two are NaN in unbalanced problems.
    """
    from otloss._kernels._threads import PASSES, Work, run_on_threads
    from otloss._kernels.sinkhorn import answers, scratch, sinkhorn_problems, symmetric_problems
    from otloss._kernels.sinkhorn_unbalanced import unbalanced_problems

    (count, n), m = p.shape, q.shape[1]
    potential_p, potential_q, outcome = answers(count, n, m, None if g is None else g.detach().numpy())
    matrices = costs.contiguous().numpy()
    kernel = sinkhorn_problems if rho is None else unbalanced_problems
    if symmetric and rho is None:
        kernel = symmetric_problems
    posed = (p.contiguous().numpy(), q.contiguous().numpy(), matrices, owner, epsilon)
    limits = (tolerance, settled, most, float(patience), g is not None, 0.0 if rho is None else float(rho))
    wanted = np.empty((1, 0, 0), matrices.dtype) if plans is None else plans.numpy()
    passes = min(most, max(PASSES, most // 50))  # a limit of iterations is rarely reached
    run_on_threads(
        kernel, count, (posed, limits, (potential_p, potential_q, wanted, outcome)),
        lambda: scratch(n, m, matrices.dtype),
        work=Work("Sinkhorn iterations", count * n * m, tolerance, passes=passes),
    )  # fmt: skip
    return torch.from_numpy(potential_p), torch.from_numpy(potential_q), torch.from_numpy(outcome)
