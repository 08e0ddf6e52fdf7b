"""The kernels of `line` as differentiable functions of torch tensors.

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

from otloss._kernels import line
from otloss._kernels._compile import as_many_threads_as_torch

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True)
class Closed:
    """A closed form on the line.

    Attributes:
        values, slopes: its kernels.
        exponent: the order, or power.
        twin: the same function of the same tensors in torch operations, for rows of problems.
    """

    values: Any
    slopes: Any
    exponent: float
    twin: Callable[..., Tensor]


def cdf(power: float, twin: Callable[..., Tensor]) -> Closed:
    """The distance between cumulative distributions, of (p, q, x)."""
    return Closed(line.cdf_values, line.cdf_slopes, float(power), twin)


def merged(order: float, twin: Callable[..., Tensor]) -> Closed:
    """The cost of matching quantiles, of (p, q, x, y)."""
    return Closed(line.merged_values, line.merged_slopes, float(order), twin)


def value_of(closed: Closed, tensors: tuple[Tensor, ...], tolerance: float) -> Tensor | None:
    """Return the value per problem, or None where the numbers are not those of a transport problem.

    Args:
        closed: the closed form.
        tensors: p, q and positions, (..., bins), in float32 or float64 on the CPU, with batch axes that broadcast.
        tolerance: relative difference of the masses of p and q that is rounding.
    """
    batch = torch.broadcast_shapes(*(t.shape[:-1] for t in tensors))
    rows = tuple(_rows(t, batch) for t in tensors)
    scales = _scales(rows[0], rows[1], batch.numel(), tolerance)
    orders = [_order(t) for t in rows[2:]] if scales is not None else [None]
    if scales is None or any(order is None for order in orders):
        return None
    value: Tensor = _ClosedForm.apply(closed, scales, tuple(orders), *rows)
    return value.reshape(batch)


class _ClosedForm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, closed: Closed, scales: np.ndarray, orders: tuple[np.ndarray, ...], *rows: Tensor) -> Tensor:
        ctx.save_for_backward(*rows)
        ctx.closed, ctx.scales, ctx.orders = closed, scales, orders
        values = np.empty(scales.shape[1], _numpy(rows[0]).dtype)
        with as_many_threads_as_torch():
            closed.values((*map(_numpy, rows), *orders, scales), closed.exponent, values, torch.get_num_threads())
        return torch.from_numpy(values)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        rows, closed, wanted = ctx.saved_tensors, ctx.closed, ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            return None, None, None, *_gradients_of_twin(closed, rows, upstream[0], wanted)
        problems = ctx.scales.shape[1]
        slopes = tuple(
            torch.empty(problems if want else 0, t.shape[-1], dtype=t.dtype)
            for want, t in zip(wanted, rows, strict=True)
        )
        with as_many_threads_as_torch():
            closed.slopes(
                (*map(_numpy, rows), *ctx.orders, ctx.scales),
                closed.exponent,
                upstream[0].contiguous().numpy(),
                tuple(map(_numpy, slopes)),
                torch.get_num_threads(),
            )
        found = (
            (s.sum(0, keepdim=True) if t.shape[0] == 1 and problems > 1 else s) if want else None
            for want, s, t in zip(wanted, slopes, rows, strict=True)
        )
        return None, None, None, *found


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


def _scales(p: Tensor, q: Tensor, problems: int, tolerance: float) -> np.ndarray | None:
    """Return the factors (2, problems) that bring both masses to their mean; None if they are too far apart."""
    masses = [np.empty(t.shape[0]) for t in (p, q)]
    with as_many_threads_as_torch():
        for tensor, mass in zip((p, q), masses, strict=True):
            line.row_masses(_numpy(tensor), mass, torch.get_num_threads())
    of_p, of_q = masses
    # Written so that NaN, which marks a weight that is negative or not a number, is refused too.
    if not (np.abs(of_p - of_q) <= tolerance * np.maximum(of_p, of_q)).all() or not np.isfinite(of_p).all():
        return None
    mean = (of_p + of_q) / 2
    scales = np.ones((2, problems))
    for scale, mass in zip(scales, masses, strict=True):
        np.divide(mean, mass, out=scale, where=np.broadcast_to(mass > 0, scale.shape))
    return scales


def _order(positions: Tensor) -> np.ndarray | None:
    """Return what sorts each row, or None if a position is not finite."""
    order = np.empty(positions.shape, np.int32)
    finite = np.empty(positions.shape[0], np.bool_)
    with as_many_threads_as_torch():
        bits = positions.detach().view(_BITS[positions.dtype]).numpy()
        line.sort_rows(bits, order, finite, torch.get_num_threads())
    return order if finite.all() else None


def _numpy(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().numpy()
    return array
