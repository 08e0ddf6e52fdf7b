"""Soft minima and gradients over clouds of points on a CPU, in O(n m d) time at most and O(n + m) memory.

The costs are |x - y|^2, |x - y| or sum_k |x_k - y_k| between the points x (n, d) and y (m, d). They are computed from
the differences x - y, which are accurate far from the origin too. The kernels are in `softmin_numba`.

Two large clouds in up to three dimensions are put in an order in which neighbours follow each other. The kernels then
leave out pairs that are so far apart, relative to epsilon, that the sum of a row changes by less than its rounding.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import broadcast_shape
from otloss._numba.threads import Work, run_on_threads
from otloss.costs.order import BLOCK, METRIC_NUMBERS, ROWS, Orders, tasks
from otloss.costs.softmin_numba import answers, centred, finished, points_rows, shared


def points_softmin(
    x: Float[Tensor, "*batch n d"],
    y: Float[Tensor, "*batch m d"],
    potential: Float[Tensor, "*batch m"],
    *,
    epsilon: float | Tensor,
    metric: str,
    orders: Orders | None = None,
    left_out: float = 0.0,
) -> Float[Tensor, "*batch n"]:
    """Return -epsilon logsumexp_j((potential_j - C_ij) / epsilon), in the dtype of the potential.

    With the `orders` of x and of y, far pairs are left out. Together they make at most the share `left_out` of the sum
    of a row, or its rounding if that is more.
    """
    return _by_rows(x, y, potential, None, epsilon, metric, orders, left_out)


def gradients_in_x(
    x: Float[Tensor, "*batch n d"],
    y: Float[Tensor, "*batch m d"],
    a: Float[Tensor, "*batch n"],
    b: Float[Tensor, "*batch m"],
    *,
    epsilon: float | Tensor,
    metric: str,
    orders: Orders | None = None,
) -> Float[Tensor, "*batch n d"]:
    """Return sum_j P_ij dC_ij / dx_i for the fixed plan P_ij = exp((a_i + b_j - C_ij) / epsilon).

    `orders` are as in `points_softmin`.
    """
    return _by_rows(x, y, b, a, epsilon, metric, orders)


def _by_rows(
    x: Tensor, y: Tensor, h: Tensor, a: Tensor | None, epsilon: float | Tensor, metric: str, orders: Orders | None,
    left_out: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return soft minima over h - C, or with `a` the gradients."""
    if orders is not None:
        x, y, h = x.detach()[orders[0]], y.detach()[orders[1]], h.detach()[..., orders[1]]
        a = None if a is None else a[..., orders[0]]
    shapes = [t.shape[:-1] for t in (h, a) if t is not None]
    batch = broadcast_shape(
        x.shape[:-2], y.shape[:-2], *shapes, torch.Size(epsilon.shape if isinstance(epsilon, Tensor) else ())
    )
    (points, which_x), (others, which_y) = shared(x, 2, batch), shared(y.mT, 2, batch)
    scores, shift, inverse, width = centred(h, epsilon, batch, x.dtype)
    (n, d), problems = x.shape[-2:], len(scores)
    out, total, gradients = answers(problems, n, scores.dtype, None if a is None else d)
    other = shift.expand(-1, n) if a is None else a.detach().double().expand(*batch, n).reshape(-1, n) + shift
    cutoff, span = _cutoff(x, y, width, None if orders is None else left_out)
    run_on_threads(
        points_rows, tasks(n, problems, span),
        ((points, others, which_x, which_y, scores, inverse, cutoff), other.double().contiguous().numpy(), span,
         METRIC_NUMBERS[metric], (out, total, gradients)),
        work=Work("", out.size * y.shape[-2], passes=1),
    )  # fmt: skip
    if a is None:
        result, axis = finished(out, total, shift, width).reshape(*batch, n).to(h.dtype), -1
    else:
        result, axis = torch.from_numpy(gradients).reshape(*batch, n, d), -2
    return result if orders is None else torch.empty_like(result).index_copy_(axis, orders[0], result)


def _cutoff(x: Tensor, y: Tensor, width: Tensor, left_out: float | None) -> tuple[np.ndarray, int]:
    """Return how far below the best score of a row a score must be to be left out, (B,), and the rows of a task.

    All scores that are left out make at most the share `left_out` of the sum of the row, or its rounding. The rounding
    of the scores themselves is added to the cutoff. With None nothing is left out.
    """
    if left_out is None:
        return x.new_full((len(width),), torch.inf).numpy(), ROWS
    rounding = torch.finfo(x.dtype).eps
    spread = float((torch.maximum(x.amax(0), y.amax(0)) - torch.minimum(x.amin(0), y.amin(0))).double().square().sum())
    scale = max(spread, math.sqrt(3 * spread))  # the largest cost of any metric
    cutoff = width.squeeze(-1) * math.log(2 * len(y) / max(rounding, min(left_out, 1.0))) + 8 * rounding * scale
    return cutoff.to(x.dtype).contiguous().numpy(), ROWS * BLOCK
