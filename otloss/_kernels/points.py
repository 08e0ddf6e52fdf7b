"""Soft minima and slopes over clouds of points on a CPU, O(n m d) time and O(n + m) memory.

For |x - y|^2, |x - y| and sum_k |x_k - y_k| between the points x (n, d) and y (m, d). Distances are sums over the
differences, which lose nothing far from the origin. The compiled loops are in `softmin`.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import broadcast_shape
from otloss._kernels._threads import ENTRIES, run_on_threads
from otloss._kernels.softmin import (
    ABSOLUTE,
    EUCLIDEAN,
    SQUARED,
    centred,
    finished,
    points_slopes,
    shared,
    tasks,
)
from otloss._kernels.softmin import points_softmin as _points_softmin

METRICS = {"sqeuclidean": SQUARED, "euclidean": EUCLIDEAN, "l1": ABSOLUTE}


def points_softmin(
    x: Float[Tensor, "*batch n d"],
    y: Float[Tensor, "*batch m d"],
    potential: Float[Tensor, "*batch m"],
    *,
    epsilon: float | Tensor,
    metric: str,
) -> Float[Tensor, "*batch n"]:
    """Return -epsilon logsumexp_j((potential_j - C_ij) / epsilon), in the dtype of the potential."""
    shape = epsilon.shape if isinstance(epsilon, Tensor) else ()
    batch = broadcast_shape(x.shape[:-2], y.shape[:-2], potential.shape[:-1], shape)
    (points, which_x), (others, which_y) = shared(x, 2, batch), shared(y.mT, 2, batch)
    h, shift, inverse, width = centred(potential, epsilon, batch, x.dtype)
    out, total = (np.empty((h.shape[0], x.shape[-2]), h.dtype) for _ in range(2))
    given = (points, others, which_x, which_y, h, inverse, METRICS[metric], out, total)
    run_on_threads(_points_softmin, tasks(x.shape[-2], len(h)), given, one_thread=out.size * y.shape[-2] < ENTRIES)
    return finished(out, total, shift, width).reshape(*batch, x.shape[-2]).to(potential.dtype)


def slopes_in_x(
    x: Float[Tensor, "*batch n d"],
    y: Float[Tensor, "*batch m d"],
    a: Float[Tensor, "*batch n"],
    b: Float[Tensor, "*batch m"],
    *,
    epsilon: float | Tensor,
    metric: str,
) -> Float[Tensor, "*batch n d"]:
    """Return sum_j P_ij dC_ij / dx_i at fixed P, P_ij = exp((a_i + b_j - C_ij) / epsilon)."""
    shape = epsilon.shape if isinstance(epsilon, Tensor) else ()
    batch = broadcast_shape(x.shape[:-2], y.shape[:-2], a.shape[:-1], b.shape[:-1], shape)
    (points, which_x), (others, which_y) = shared(x, 2, batch), shared(y.mT, 2, batch)
    h, shift, inverse, _ = centred(b, epsilon, batch, x.dtype)
    n, d = x.shape[-2:]
    weights = (a.detach().to(torch.float64).expand(*batch, n).reshape(-1, n) + shift).contiguous().numpy()
    out = np.empty((h.shape[0], n, d), h.dtype)
    given = (points, others, which_x, which_y, weights, h, inverse, METRICS[metric], out)
    run_on_threads(points_slopes, tasks(n, len(h)), given, one_thread=len(h) * n * y.shape[-2] < ENTRIES)
    return torch.from_numpy(out).reshape(*batch, n, d)
