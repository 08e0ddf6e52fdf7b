"""Value and first derivatives of small dense problems in one call of the numba kernel.

The general path (checks, search, value: a hundred operations on small tensors) takes longer than Sinkhorn itself on a
batch of small problems. Here the kernel checks its arguments too, and writes the plan while its factors are in cache.
Options, cost objects and invalid arguments take the general path, which is the reference implementation; problems that
need more than plain iterations continue there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from otloss._autograd import once_only
from otloss._kernels import may_run_on
from otloss._kernels.sinkhorn_call import ERROR, LEAST_EIGENVALUE, POTENTIAL_ERROR, RESOLVED, SPREAD, VALUE, run_kernel
from otloss.solvers.entropic.gradients import SECOND_DERIVATIVE, weight_gradient
from otloss.solvers.entropic.potentials import (
    LARGEST_FOR_KERNEL,
    LITTLE,
    MOST_FOR_KERNEL,
    PATIENCE,
    Found,
    found_by_kernel,
)
from otloss.solvers.entropic.problem import DEFAULT_TOLERANCE, LEAST_RATIO, WIDE_FROM, Settings, settled_from
from otloss.solvers.histograms import MASS_TOLERANCE

_DTYPES = (torch.float32, torch.float64)
# Entries of all plans together that may be held for the backward pass; larger ones are made there.
_MOST_FOR_PLANS = 2**22


def dense_value(p: Any, q: Any, cost: Any, *, epsilon: Any, settings: Settings) -> Tensor | Found | None:
    """Return the values of plain problems, with first derivatives; or None if the general path is needed.

    Where the problems need more than plain iterations, return where these have ended.
    """
    if not (_is_plain(settings) and type(epsilon) in (int, float) and 0 < epsilon < float("inf")):
        return None
    if not _are_plain(p, q, cost) or epsilon < torch.finfo(p.dtype).tiny:
        return None
    graph = torch.is_grad_enabled()
    weights_graph, cost_graph = graph and (p.requires_grad or q.requires_grad), graph and cost.requires_grad
    if cost_graph and cost.numel() > _MOST_FOR_PLANS:
        return None
    batch, (n, m), rho = p.shape[:-1], cost.shape[-2:], settings.marginal_penalty
    count = batch.numel()
    tolerance = settings.tolerance or DEFAULT_TOLERANCE[p.dtype]
    settled = settled_from(tolerance, p.dtype) if weights_graph else float("inf")
    judged = weights_graph and rho is None
    plans = torch.empty((count, n, m), dtype=cost.dtype, device="cpu") if cost_graph else None
    f, g, ends = run_kernel(
        p.detach().reshape(count, n), q.detach().reshape(count, m), cost.detach().reshape(count, n, m),
        owner=np.arange(count), epsilon=np.full(count, float(epsilon)), plans=plans,
        tolerance=float(tolerance), most=min(PATIENCE, settings.max_iterations), settled=settled,
        mass_tolerance=MASS_TOLERANCE[p.dtype], least_ratio=LEAST_RATIO, largest_ratio=WIDE_FROM,
        rho=rho,
    )  # fmt: skip
    if not _is_solved(ends.numpy(), float(tolerance), settled if judged else float("inf"), float(epsilon)):
        if not ends[:, ERROR].isfinite().all():  # an invalid argument, among others
            return None
        return found_by_kernel(f, g, ends, batch, judged=judged)
    value = ends[:, VALUE].to(p.dtype).reshape(batch)
    if not (weights_graph or cost_graph):
        return value
    if weights_graph:
        f, g = _derivatives(f, q, float(epsilon), rho), _derivatives(g, p, float(epsilon), rho)
    held: Tensor = _DenseValue.apply(value, f, g, plans, p, q, cost)
    return held


def _is_solved(ends: np.ndarray, tolerance: float, settled: float, epsilon: float) -> bool:
    """Whether all have converged and, if gradients of weights are wanted, g is as certain as the search leaves it."""
    if not (ends[:, ERROR] <= tolerance).all():
        return False
    if settled == float("inf"):
        return True
    certain = ends[:, POTENTIAL_ERROR] <= settled * ends[:, SPREAD] + LITTLE * epsilon
    return bool((certain & (ends[:, LEAST_EIGENVALUE] >= RESOLVED)).all())


def _derivatives(potential: Tensor, other: Tensor, epsilon: float, rho: float | None) -> Tensor:
    """Return the derivatives of values in the weights of a side, in float64; balanced, centred over the bins."""
    if rho is None:
        return potential - potential.mean(-1, keepdim=True)
    mass = other.detach().sum(-1, dtype=torch.float64).reshape(-1)
    return weight_gradient(potential, mass, potential.new_tensor(epsilon), rho)


def _is_plain(settings: Settings) -> bool:
    return (
        settings.grad == "envelope"
        and settings.impl in ("auto", "compiled")
        and settings.start is None
        and settings.epsilon_relative_to is None
    )


def _are_plain(p: Any, q: Any, cost: Any) -> bool:
    given = (p, q, cost)
    if not all(type(t) in (Tensor, Parameter) and t.dtype == p.dtype and not t.is_neg() for t in given):
        return False
    if not may_run_on(*given):
        return False
    if p.dtype not in _DTYPES or min(p.dim(), q.dim()) == 0 or p.shape[:-1] != q.shape[:-1]:
        return False
    if cost.shape != (*p.shape, q.shape[-1]) or not 0 < cost.numel() <= MOST_FOR_KERNEL:
        return False
    return p.shape[-1] * q.shape[-1] <= LARGEST_FOR_KERNEL


class _DenseValue(torch.autograd.Function):
    """The value V with its derivatives in the weights, and its plan: by the envelope theorem dV/dC = P."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, by_p: Tensor, by_q: Tensor, plans: Tensor | None, p: Tensor, q: Tensor, cost: Tensor
    ) -> Tensor:
        ctx.save_for_backward(by_p, by_q, plans, p, q, cost)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_p, by_q, plans, *inputs = ctx.saved_tensors
        upstream = gradients[0].detach()
        found: list[Tensor | None] = [None] * 3
        for k, derivative in enumerate((by_p, by_q)):
            if ctx.needs_input_grad[4 + k]:
                found[k] = upstream.unsqueeze(-1) * derivative.to(upstream.dtype).reshape(inputs[k].shape)
        if ctx.needs_input_grad[6]:
            found[2] = upstream[..., None, None] * plans.reshape(inputs[2].shape)
        return None, None, None, None, *(
            None if t is None else once_only(t, SECOND_DERIVATIVE, gradients[0], *inputs) for t in found
        )  # fmt: skip
