"""The kernels of `line` and `quantiles` as differentiable functions of torch tensors.

The gradient is computed by kernels as well. Where a graph of it is asked for (create_graph=True), it is that of the
slow twin, which the caller hands over: so second derivatives are those of the twin too, and never silently zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otloss._checks import broadcast_shape
from otloss._kernels import line, quantiles, sorting
from otloss._kernels._threads import run_on_threads


@dataclass(frozen=True)
class Closed:
    """A closed form on the line.

    Attributes:
        values, gradients: its kernels.
        exponent: the order, or power.
        twin: the same function of the same tensors in torch operations, for rows of problems.
    """

    values: Any
    gradients: Any
    exponent: float
    twin: Callable[..., Tensor]


def cdf(power: float, twin: Callable[..., Tensor]) -> Closed:
    """The distance between cumulative distributions, of (p, q, x)."""
    return Closed(line.cdf_values, line.cdf_gradients, float(power), twin)


def merged(order: float, twin: Callable[..., Tensor]) -> Closed:
    """The cost of matching quantiles, of (p, q, x, y)."""
    return Closed(quantiles.merged_values, quantiles.merged_gradients, float(order), twin)


def value_of(closed: Closed, tensors: tuple[Tensor, ...], tolerance: float) -> Tensor | None:
    """Return the value per problem, or None where the numbers are not those of a transport problem.

    Args:
        closed: the closed form.
        tensors: p, q and positions, (..., bins), in float32 or float64 on the CPU, with batch axes that broadcast.
        tolerance: relative difference of the masses of p and q that is rounding.
    """
    batch = broadcast_shape(*(t.shape[:-1] for t in tensors))
    made = {t: _rows(t, batch) for t in tensors}  # positions shared by both sides are sorted once
    rows = [made[t] for t in tensors]
    orders = _orders(rows[2:])
    if orders is None:
        return None
    scales = np.empty((2, batch.numel()))
    value: Tensor = _ClosedForm.apply(closed, tolerance, scales, orders, *rows)
    return None if np.isnan(scales).any() else value.reshape(batch)


class _ClosedForm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, closed: Closed, tolerance: float, scales: np.ndarray, orders: list[np.ndarray], *rows: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*rows)
        ctx.closed, ctx.scales, ctx.orders = closed, scales, orders
        values = np.empty(scales.shape[1], _numpy(rows[0]).dtype)
        problem = (*map(_numpy, rows), *orders)
        threads = torch.get_num_threads()
        run_on_threads(closed.values, threads, (problem, (closed.exponent, tolerance), values, scales, threads))
        return torch.from_numpy(values)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        rows, closed, wanted = ctx.saved_tensors, ctx.closed, ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():
            return None, None, None, None, *_gradients_of_twin(closed, rows, upstream[0], wanted)
        problems = ctx.scales.shape[1]
        gradients = tuple(
            torch.empty(problems if want else 0, t.shape[-1], dtype=t.dtype, device=t.device)
            for want, t in zip(wanted, rows, strict=True)
        )
        threads, problem = torch.get_num_threads(), (*map(_numpy, rows), *ctx.orders)
        given = (problem, closed.exponent, upstream[0].contiguous().numpy(), ctx.scales, tuple(map(_numpy, gradients)))
        run_on_threads(closed.gradients, threads, (*given, threads))
        found = (
            (s.sum(0, keepdim=True) if t.shape[0] == 1 and problems > 1 else s) if want else None
            for want, s, t in zip(wanted, gradients, rows, strict=True)
        )
        return None, None, None, None, *found


def _gradients_of_twin(
    closed: Closed, rows: tuple[Tensor, ...], upstream: Tensor, wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    # One tensor may stand for both positions; each argument needs a place of its own in the graph.
    rows = tuple(row.view_as(row) for row in rows)
    asked = [row for row, want in zip(rows, wanted, strict=True) if want]
    found = iter(torch.autograd.grad(closed.twin(*rows), asked, upstream, create_graph=True))
    return [next(found) if want else None for want in wanted]


def _rows(tensor: Tensor, batch: torch.Size) -> Tensor:
    """Return the tensor as rows, one per problem, or one that serves all of them."""
    size = tensor.shape[-1]
    if tensor.shape[:-1].numel() == 1:
        return tensor.reshape(1, size).contiguous()
    return tensor.expand(*batch, size).reshape(-1, size).contiguous()


def _orders(positions: list[Tensor]) -> list[np.ndarray] | None:
    """Return what sorts the rows of each of one or two tensors, or None if a position is not finite."""
    several = [t for t in dict.fromkeys(positions) if t.shape[0] > 1]
    found = dict(zip(several, _orders_of_rows(several), strict=True)) if several else {}
    for t in positions:
        if t not in found:  # no kernel for a single row
            found[t] = t.detach().argsort(dim=-1, stable=True).to(torch.int32).numpy() if t.isfinite().all() else None
    orders = [order for t in positions if (order := found[t]) is not None]
    return orders if len(orders) == len(positions) else None


def _orders_of_rows(tensors: list[Tensor]) -> list[np.ndarray | None]:
    bits = [_numpy(t).view(np.int32 if t.dtype == torch.float32 else np.int64) for t in tensors]
    bits.append(bits[0][:0])  # the kernel takes two
    orders = [np.empty(b.shape, np.int32) for b in bits]
    finite = [np.empty(b.shape[0], np.bool_) for b in bits]
    threads = torch.get_num_threads()
    run_on_threads(sorting.sort_rows, threads, (tuple(bits[:2]), tuple(orders[:2]), tuple(finite[:2]), threads))
    return [order if is_finite.all() else None for order, is_finite in zip(orders, finite, strict=True)][: len(tensors)]


def _numpy(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().numpy()
    return array
