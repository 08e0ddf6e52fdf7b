"""Entropic values of plain tensors in one compiled call, where nothing else is asked for.

The checks, the search and the sum of a value are a handful of operations on small tensors each, which together take
longer than Sinkhorn does on a batch of small problems. Anything out of the ordinary (a gradient, a cost object, an
option, a wrong argument, a problem that does not converge at once) goes the usual way, which is the specification.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.nn import Parameter

from otloss._kernels import may_run_on
from otloss._kernels.sinkhorn_call import ERROR, VALUE, run_kernel
from otloss.solvers.entropic.problem import DEFAULT_TOLERANCE, LEAST_RATIO, WIDE_FROM, Settings
from otloss.solvers.entropic.search import LARGEST_COMPILED, MOST_COMPILED, PATIENCE
from otloss.solvers.histograms import MASS_TOLERANCE

_DTYPES = (torch.float32, torch.float64)


def direct_value(p: Any, q: Any, cost: Any, *, epsilon: Any, settings: Settings) -> Tensor | None:
    """Return the values without a graph, or None where the usual way is to be gone."""
    if not (_is_plain(settings) and type(epsilon) in (int, float) and 0 < epsilon < float("inf")):
        return None
    if not _are_plain(p, q, cost) or epsilon < torch.finfo(p.dtype).tiny:
        return None
    batch, (n, m) = p.shape[:-1], cost.shape[-2:]
    tolerance = settings.tolerance or DEFAULT_TOLERANCE[p.dtype]
    count = batch.numel()
    _, _, ends = run_kernel(
        p.detach().reshape(count, n), q.detach().reshape(count, m), cost.detach().reshape(count, n, m),
        owner=np.arange(count), epsilon=np.full(count, float(epsilon)),
        tolerance=float(tolerance), most=min(PATIENCE, settings.max_iterations),
        mass_tolerance=MASS_TOLERANCE[p.dtype], least_ratio=LEAST_RATIO, largest_ratio=WIDE_FROM,
    )  # fmt: skip
    converged = bool((ends[:, ERROR] <= tolerance).all())
    return ends[:, VALUE].reshape(batch).to(p.dtype) if converged else None


def _is_plain(settings: Settings) -> bool:
    return (
        settings.grad == "envelope"
        and settings.impl in ("auto", "compiled")
        and settings.reach is None
        and settings.start is None
        and settings.epsilon_relative_to is None
    )


def _are_plain(p: Any, q: Any, cost: Any) -> bool:
    given = (p, q, cost)
    if not all(type(t) in (Tensor, Parameter) and t.dtype == p.dtype and not t.is_neg() for t in given):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return False
    if any(unpack_dual(t).tangent is not None for t in given):
        return False
    if not may_run_on(*given):
        return False
    if p.dtype not in _DTYPES or min(p.dim(), q.dim()) == 0 or p.shape[:-1] != q.shape[:-1]:
        return False
    if cost.shape != (*p.shape, q.shape[-1]) or not 0 < cost.numel() <= MOST_COMPILED:
        return False
    return p.shape[-1] * q.shape[-1] <= LARGEST_COMPILED
