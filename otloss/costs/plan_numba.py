"""Plans of dense entropic problems on a CPU: P_ij = exp(a_i + b_j - C_ij / epsilon), times a factor per problem.

Exponents are computed in float64 and rounded to the dtype of the costs before the exponential. The reference
implementation is `otloss.costs.cost.plan_rows`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss._numba.compile import compiled, exp, inner
from otloss._numba.tasks import next_task
from otloss._numba.threads import MIN_ENTRIES, run_on_threads

ROWS = 16  # rows of a task


@inner()
def _row(costs: Any, a: float, b: Any, inverse: float, factor: Any, scores: Any, out: Any) -> None:
    for j in range(out.shape[0]):
        scores[j] = a + b[j] - costs[j] * inverse
    for j in range(out.shape[0]):
        out[j] = factor * exp(out.dtype.type(scores[j]))


@compiled(allocates=True)
def _fill(counter: Any, matrices: Any, a: Any, b: Any, inverse: Any, factor: Any, out: Any) -> None:
    problems, n, m = matrices.shape
    blocks = (n + ROWS - 1) // ROWS
    scores = np.empty(m)
    while True:
        task = next_task(counter)
        k, first = task // blocks, task % blocks * ROWS
        if k >= problems:
            return
        for i in range(first, first + ROWS if first + ROWS < n else n):
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
    tasks = (n + ROWS - 1) // ROWS * len(flat)
    run_on_threads(_fill, tasks, (flat.numpy(), a, b, wide, scale, out.numpy()), one_thread=flat.numel() < MIN_ENTRIES)
    return out.reshape(matrices.shape)
