"""Plans of dense entropic problems on a CPU: P_ij = exp(a_i + b_j - C_ij / epsilon), times a factor per problem.

Exponents are made in float64 and rounded to the dtype of the costs once, before the exponential. The slow twin is
`otloss.costs._cost.plan_rows`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numba import njit, prange
from torch import Tensor

from otloss._kernels._compile import as_many_threads_as_torch, compiled, exp

ROWS = 16  # rows of a task


@njit(fastmath={"contract", "nsz"})
def _row(costs: Any, a: float, b: Any, inverse: float, factor: Any, scores: Any, out: Any) -> None:
    for j in range(out.shape[0]):
        scores[j] = a + b[j] - costs[j] * inverse
    for j in range(out.shape[0]):
        out[j] = factor * exp(out.dtype.type(scores[j]))


@compiled(parallel=True)
def _fill(matrices: Any, a: Any, b: Any, inverse: Any, factor: Any, out: Any) -> None:
    problems, n, m = matrices.shape
    blocks = (n + ROWS - 1) // ROWS
    for task in prange(blocks * problems):
        k, first = task // blocks, task % blocks * ROWS
        scores = np.empty(m)
        for i in range(first, min(first + ROWS, n)):
            _row(matrices[k, i], a[k, i], b[k], inverse[k], factor[k], scores, out[k, i])


def scaled_plans(
    matrices: Float[Tensor, "*batch n m"],
    log_weights: tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch m"]],
    inverse: Float[Tensor, "*batch"],
    factor: Float[Tensor, "*batch"],
) -> Float[Tensor, "*batch n m"]:
    """Return `factor exp(a_i + b_j - C_ij inverse)` for (a, b) = log_weights, in the dtype of the matrices."""
    batch, (n, m) = matrices.shape[:-2], matrices.shape[-2:]
    a, b = (
        w.to(torch.float64).expand(*batch, size).reshape(-1, size).contiguous().numpy()
        for w, size in zip(log_weights, (n, m), strict=True)
    )
    flat = matrices.detach().reshape(-1, n, m).contiguous()
    wide = inverse.to(torch.float64).expand(batch).reshape(-1).contiguous().numpy()
    scale = factor.to(flat.dtype).expand(batch).reshape(-1).contiguous().numpy()
    out = torch.empty_like(flat)
    with as_many_threads_as_torch():
        _fill(flat.numpy(), a, b, wide, scale, out.numpy())
    return out.reshape(matrices.shape)
