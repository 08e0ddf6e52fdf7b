"""Sorting, ranking and picking with a quadratic regularisation: projections onto a permutahedron, in O(n log n).

The permutahedron of w (w_1 >= ... >= w_n) holds the convex combinations of its permutations. For entries z in falling
order its nearest point is

    P(z, w) = z - v,     v = argmin over v_1 >= ... >= v_n of |v - (z - w)|^2

an isotonic regression: v, and its derivative too, is the mean of z - w over each block of pooled entries. With s
the row in falling order, r its width, u = (s - min s) / r and m = n - 1, in the order of s,

    rank     P(m u / epsilon, (n, ..., 1))          pools entries nearer than epsilon r / m
    sort     r P((n, ..., 1) / (m epsilon), s / r)    pools entries farther apart than r / (m epsilon)
    top k    P(u / epsilon, (1, ..., 1, 0, ..., 0))   = min(max(u / epsilon - theta, 0), 1)

The width is the range; for ranks and top k it is at most three times the range of the row's middle (`trim`).
Neighbours are r / m apart on average where it is the range.

Source: M. Blondel, O. Teboul, Q. Berthet, J. Djolonga, Fast Differentiable Sorting and Ranking, ICML 2020.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss._autograd import check_no_tangent, check_no_transform, once_only, release
from otloss._numba.threads import run_on_threads


def quadratic_rank(x: Float[Tensor, "*batch n"], epsilon: float) -> Float[Tensor, "*batch n"]:
    """Return `soft_rank`, differentiable once."""
    n = x.shape[-1]
    return _projected(x, np.arange(n, 0.0, -1.0), n - 1.0, epsilon, False)


def quadratic_top_k(x: Float[Tensor, "*batch n"], k: int, epsilon: float) -> Float[Tensor, "*batch n"]:
    """Return `soft_top_k`, differentiable once."""
    return _projected(x, (np.arange(x.shape[-1]) < k).astype(float), 1.0, epsilon, False)


def quadratic_sort(x: Float[Tensor, "*batch n"], epsilon: float) -> Float[Tensor, "*batch n"]:
    """Return `soft_sort`, largest first, differentiable once."""
    n = x.shape[-1]
    return _projected(x, np.arange(n, 0.0, -1.0) / max(n - 1, 1), 1.0, epsilon, True)


def trim(n: int) -> tuple[int, float]:
    """Return how many entries at each end the middle of n leaves out, and how many times its range bounds the width.

    A tenth, and three times the range of a uniform row with that middle: rows without outliers have less.
    """
    cut = n // 10
    return cut, 3 * (n - 1) / max(n - 1 - 2 * cut, 1)


def check_range(row_range: Float[Tensor, "*batch"]) -> None:
    """Raise ValueError where the range of a row is infinite."""
    if torch.isinf(row_range.detach()).any():
        raise ValueError("the range of a row of x is beyond float64, expected less than 1.7e308; rescale x.")


def _projected(x: Tensor, w: np.ndarray, scale: float, epsilon: float, sorts: bool) -> Tensor:
    check_no_transform()
    check_no_tangent('use regularization="entropy", or reverse mode.', x)
    projection: Tensor = _Project.apply(x, w, scale, epsilon, sorts)
    return projection


class _Project(torch.autograd.Function):
    """The projection P(scale u / epsilon, w) in the order of x, or of sorts r P(w / epsilon, s / r) in falling order.

    It runs on the CPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: np.ndarray, scale: float, epsilon: float, sorts: bool) -> Tensor:
        from otloss.solvers.ranking.isotonic_numba import allocate_results, project_rows

        if x.dtype == torch.float64:
            check_range(x.amax(-1) - x.amin(-1))
        rows = _rows(x)
        order, (projection, blocks) = np.argsort(rows, -1), allocate_results(rows)
        settings = order, w, scale, float(epsilon), sorts, *((0, 1.0) if sorts else trim(len(w)))
        _run(project_rows, rows, *settings, projection, blocks)
        ctx.save_for_backward(x)
        ctx.settings, ctx.blocks = settings, blocks
        return torch.from_numpy(projection).reshape(x.shape).to(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from otloss.solvers.ranking.isotonic_numba import allocate_results, project_backward

        (x,) = ctx.saved_tensors
        rows = _rows(x)
        gradient, _ = allocate_results(rows)
        _run(project_backward, rows, *ctx.settings, _rows(gradients[0]), ctx.blocks, gradient)
        release(ctx, "settings", "blocks")
        message = 'a second derivative of regularization="quadratic" was asked for; use "entropy", which gives them.'
        return once_only(torch.from_numpy(gradient).reshape(x.shape).to(x), message, x, gradients[0]), *[None] * 4


def _rows(x: Tensor) -> np.ndarray:
    # In one layout, since a kernel is compiled for each: the gradient of a sum has strides of zero.
    rows: np.ndarray = x.detach().to("cpu", torch.float64).reshape(-1, x.shape[-1]).contiguous().numpy()
    return rows


def _run(kernel: Any, rows: np.ndarray, *arguments: Any) -> None:
    from otloss.solvers.ranking.isotonic_numba import ROWS, scratch

    tasks, n = -(-len(rows) // ROWS), rows.shape[-1]
    is_small = rows.size < 20_000  # a second thread takes longer to start than it saves
    run_on_threads(kernel, tasks, (rows, *arguments), lambda: scratch(n), one_thread=is_small)
