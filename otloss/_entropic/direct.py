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
from torch.nn import Parameter

from otloss._entropic.problem import DEFAULT_TOLERANCE, WIDE_FROM, Settings
from otloss._entropic.search import LARGEST_COMPILED, MOST_COMPILED, PATIENCE
from otloss._histograms import MASS_TOLERANCE
from otloss._kernels import may_run_on

_DTYPES = (torch.float32, torch.float64)


def direct_value(p: Any, q: Any, cost: Any, *, epsilon: Any, settings: Settings) -> Tensor | None:
    """Return the values without a graph, or None where the usual way is to be gone."""
    if not (_is_plain(settings) and type(epsilon) in (int, float) and 0 < epsilon < float("inf")):
        return None
    if not _are_plain(p, q, cost) or epsilon < torch.finfo(p.dtype).tiny:
        return None
    import numba  # takes half a second

    from otloss._kernels._compile import as_many_threads_as_torch
    from otloss._kernels.sinkhorn_values import sinkhorn_values

    batch, (n, m) = p.shape[:-1], cost.shape[-2:]
    tolerance = settings.tolerance or DEFAULT_TOLERANCE[p.dtype]
    limits = (MASS_TOLERANCE[p.dtype], WIDE_FROM, float(tolerance), min(PATIENCE, settings.max_iterations))
    values = np.empty(batch)
    arrays = (t.detach().numpy().reshape(-1, *shape) for t, shape in ((p, (n,)), (q, (m,)), (cost, (n, m))))
    with as_many_threads_as_torch(), numba.parallel_chunksize(1 if values.size < 32 else 4):
        sinkhorn_values(*map(np.ascontiguousarray, arrays), float(epsilon), limits, values.reshape(-1))
    return None if np.isnan(values.sum()) else torch.from_numpy(values).to(p.dtype)


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
    if p.dtype not in _DTYPES or min(p.dim(), q.dim()) == 0 or p.shape[:-1] != q.shape[:-1]:
        return False
    if cost.shape != (*p.shape, q.shape[-1]) or not 0 < cost.numel() <= MOST_COMPILED:
        return False
    return p.shape[-1] * q.shape[-1] <= LARGEST_COMPILED and may_run_on(*given)
