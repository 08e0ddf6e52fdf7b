"""The kernels of `line` as differentiable functions of torch tensors.

Kernels compute the gradient as well. With create_graph=True the reference implementation computes the gradient, and so
gives second derivatives too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otloss._autograd import release
from otloss._checks import broadcast_shape
from otloss._numba.threads import run_on_threads
from otloss.solvers.closed_forms import line_numba as line
from otloss.solvers.closed_forms import sorting_numba as sorting


def line_value(
    reference: Callable[..., Tensor], tensors: tuple[Tensor, ...], *, exponent: float, tolerance: float
) -> Tensor | None:
    """Return the value per problem, or None if the inputs are not valid: a weight, a position or the masses.

    Args:
        reference: the same function of rows of problems in torch operations.
        tensors: p, q and positions, (..., bins), in float32 or float64 on the CPU, with batch axes that broadcast:
            (p, q, x) for the distance between cumulative distributions, (p, q, x, y) for the matching of quantiles.
        exponent: the power, or the order.
        tolerance: relative difference of the masses of p and q that is rounding.
    """
    batch = broadcast_shape(*(t.shape[:-1] for t in tensors))
    rows_of = {t: _rows(t, batch) for t in tensors}  # positions shared by both sides are sorted once
    rows = [rows_of[t] for t in tensors]
    orders = _orders(rows[2:])
    if orders is None:
        return None
    results = line.allocate_values(batch.numel(), _numpy(rows[0]).dtype)
    settings = (float(exponent), tolerance)
    if torch.is_grad_enabled() and any(t.requires_grad for t in rows):
        value: Tensor = _ClosedForm.apply(reference, settings, results, orders, *rows)
    else:
        value = _values(settings, results, orders, rows)
    return None if np.isnan(results[1]).any() else value.reshape(batch)


class _ClosedForm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        reference: Callable[..., Tensor],
        settings: tuple[float, float],
        results: tuple[np.ndarray, np.ndarray],
        orders: list[np.ndarray],
        *rows: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*rows)
        ctx.reference, ctx.exponent, ctx.scales, ctx.orders = reference, settings[0], results[1], orders
        return _values(settings, results, orders, rows)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        rows, needed = ctx.saved_tensors, ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():
            return None, None, None, None, *_reference_gradients(ctx.reference, rows, upstream[0], needed)
        kernel = line.cdf_gradients if len(rows) == 3 else line.quantile_gradients
        problems = ctx.scales.shape[1]
        threads, inputs = torch.get_num_threads(), tuple(map(_numpy, rows))
        filled, problem = line.allocate_gradients(problems, inputs, needed), (*inputs, *ctx.orders)
        arguments = (problem, ctx.exponent, upstream[0].contiguous().numpy(), ctx.scales, filled)
        release(ctx, "reference", "scales", "orders")
        gradients = map(torch.from_numpy, filled)
        run_on_threads(kernel, threads, (*arguments, threads))
        gradients_of_inputs = (
            (g.sum(0, keepdim=True) if t.shape[0] == 1 and problems > 1 else g) if is_needed else None
            for is_needed, g, t in zip(needed, gradients, rows, strict=True)
        )
        return None, None, None, None, *gradients_of_inputs


def _values(
    settings: tuple[float, float], results: tuple[np.ndarray, np.ndarray], orders: list[np.ndarray],
    rows: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    kernel = line.cdf_values if len(rows) == 3 else line.quantile_values
    problem = (*map(_numpy, rows), *orders)
    threads = torch.get_num_threads()
    run_on_threads(kernel, threads, (problem, settings, *results, threads))
    return torch.from_numpy(results[0])


def _reference_gradients(
    reference: Callable[..., Tensor], rows: tuple[Tensor, ...], upstream: Tensor, needed: tuple[bool, ...]
) -> list[Tensor | None]:
    # One tensor may stand for both positions; each argument needs a place of its own in the graph.
    rows = tuple(row.view_as(row) for row in rows)
    inputs = [row for row, is_needed in zip(rows, needed, strict=True) if is_needed]
    reference_gradients = iter(torch.autograd.grad(reference(*rows), inputs, upstream, create_graph=True))
    return [next(reference_gradients) if is_needed else None for is_needed in needed]


def _rows(tensor: Tensor, batch: torch.Size) -> Tensor:
    """Return the tensor as rows, one per problem, or one that serves all of them."""
    size = tensor.shape[-1]
    if tensor.shape[:-1].numel() == 1:
        return tensor.reshape(1, size).contiguous()
    return tensor.expand(*batch, size).reshape(-1, size).contiguous()


def _orders(positions: list[Tensor]) -> list[np.ndarray] | None:
    """Return what sorts the rows of each of one or two tensors, or None if a position is not finite."""
    several = [t for t in dict.fromkeys(positions) if t.shape[0] > 1]
    order_of = dict(zip(several, _orders_of_rows(several), strict=True)) if several else {}
    for t in positions:
        if t not in order_of:
            order_of[t] = _order_of_row(_numpy(t))
    orders = [order for t in positions if (order := order_of[t]) is not None]
    return orders if len(orders) == len(positions) else None


def _order_of_row(row: np.ndarray) -> np.ndarray | None:
    """Return what sorts a single row, or None if a position is not finite. No kernel has to be compiled for it."""
    order = np.argsort(row[0], kind="stable")
    is_finite = math.isfinite(row[0, order[0]]) and math.isfinite(row[0, order[-1]])  # NaN comes last
    return order.astype(np.int32)[None] if is_finite else None


def _orders_of_rows(tensors: list[Tensor]) -> list[np.ndarray | None]:
    bits = [_numpy(t).view(np.int32 if t.dtype == torch.float32 else np.int64) for t in tensors]
    bits.append(bits[0][:0])  # the kernel takes two
    orders, finite = zip(*map(sorting.allocate_results, bits), strict=True)
    threads = torch.get_num_threads()
    run_on_threads(sorting.sort_rows, threads, (tuple(bits[:2]), orders[:2], finite[:2], threads))
    return [order if is_finite.all() else None for order, is_finite in zip(orders, finite, strict=True)][: len(tensors)]


def _numpy(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().numpy()
    return array
