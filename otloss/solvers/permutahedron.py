"""Sorting and ranking with a quadratic regularisation: projections onto a permutahedron, in O(n log n).

The permutahedron of w (w_1 >= ... >= w_n) holds the convex combinations of its permutations. The point of it nearest to
z is, with s the entries of z in falling order,

    P(z, w) = z - v at the places of z,     v = argmin over v_1 >= ... >= v_n of |v - (s - w)|^2

an isotonic regression, whose derivative is the mean over each block of equal entries of v. With the row x in units of
its range, u = (x - min x) / (max x - min x), and m = n - 1,

    soft_rank(x) = P(m u / epsilon, (n, ..., 1))
    soft_sort(x) = min x + (max x - min x) P((n, ..., 1) / (m epsilon), sorted u)

Entries whose distance is less than epsilon times the mean distance of neighbours are pooled: they get ranks that differ
by less than one. At small epsilon ranks are the usual ones and their gradients 0, for the projection is a vertex then.

Source: M. Blondel, O. Teboul, Q. Berthet, J. Djolonga, Fast Differentiable Sorting and Ranking, ICML 2020.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


def project(z: Float[Tensor, "*batch n"], w: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """Return the point of the permutahedron of w nearest to z, in float64.

    Args:
        z: (..., n) finite.
        w: (..., n) in falling order, or (n,).

    Returns:
        (..., n), with the sum of w; differentiable in both, twice too (where blocks change, one-sided).
    """
    falling, order = torch.sort(z.double(), dim=-1, descending=True, stable=True)
    moved = falling - falling_regression(falling - w.double())
    return torch.empty_like(moved).scatter(-1, order, moved)


def falling_regression(values: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """Return the non-increasing rows nearest to these in least squares; float64, differentiable."""
    found: Tensor = _FallingRegression.apply(values)
    return found


class _FallingRegression(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        from otloss._kernels._threads import run_on_threads
        from otloss._kernels.isotonic import ROWS, falling_fit

        rows = values.detach().to("cpu", torch.float64).reshape(-1, values.shape[-1]).contiguous()
        fit, blocks = torch.empty_like(rows), torch.empty(rows.shape, dtype=torch.int64)
        arrays = rows.numpy(), fit.numpy(), blocks.numpy()
        run_on_threads(falling_fit, -(-len(rows) // ROWS), arrays, one_thread=rows.numel() < _ENTRIES)
        ctx.blocks = blocks
        return fit.reshape(values.shape).to(values.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        means: Tensor = _BlockMeans.apply(gradients[0], ctx.blocks)
        return means


class _BlockMeans(torch.autograd.Function):
    """A projection, and so its own derivative."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, blocks: Int[Tensor, "rows n"]) -> Tensor:
        from otloss._kernels._threads import run_on_threads
        from otloss._kernels.isotonic import ROWS, block_means

        ctx.blocks = blocks
        rows = values.detach().to("cpu", torch.float64).reshape(blocks.shape).contiguous()
        means = torch.empty_like(rows)
        arrays = rows.numpy(), blocks.numpy(), means.numpy()
        run_on_threads(block_means, -(-len(rows) // ROWS), arrays, one_thread=rows.numel() < _ENTRIES)
        return means.reshape(values.shape).to(values.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _BlockMeans.apply(gradients[0], ctx.blocks), None


_ENTRIES = 20_000  # below which waking up a thread takes longer than it saves
