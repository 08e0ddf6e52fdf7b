"""Wasserstein-1 distance between histograms on a circle, in closed form.

Cut the circle at 0 and go once around: with positions sorted, D_k = F_k - G_k the difference of the cumulative sums
and gap_k the arc from bin k to the next one, the last arc leading back to bin 0,

    W_1 = min over t of sum_k gap_k |D_k - t|         t a median of D, weighted by the gaps

t is the mass that passes the cut (J. Rabin, J. Delon, Y. Gousseau, Transportation Distances on the Circle, 2011).

Weight gradients are dual potentials. Around the circle, the potential u falls by gap_k sign(D_k - t) from bin k to the
next; where D_k = t it may fall by anything within +-gap_k, such that the sum around the circle is zero. A bin without
mass gets the one-sided derivative, the price of an infinitesimal mass there with its cheapest partner:

    f_j = min over l with q_l > 0 of u_l + d(j, l)          g_j = min over l with p_l > 0 of d(j, l) - u_l

in the circle's metric d, which two running minima find, one along each direction.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import check_broadcast, check_finite, check_last_axis, check_positive, check_tensor
from otloss._public import public
from otloss.solvers.histograms import histogram_pair


@public
def wasserstein_circular(
    p: Float[Tensor, "*batch bins"],
    q: Float[Tensor, "*batch bins"],
    x: Float[Tensor, "*batch bins"] | None = None,
    *,
    period: float | None = None,
) -> Float[Tensor, "*batch"]:
    """Return W_1 between histograms on a circle, the least cost of moving p to q along the shorter arcs.

    Formulas: docs/guide/definitions.md#def-line

    Args:
        p: (..., n) weights >= 0. The leading axes of p, q and x broadcast.
        q: (..., n) weights >= 0 with the mass of p, up to rounding.
        x: (n,) or (..., n) positions along the circle in the unit of `period`, in any order and taken modulo `period`;
            0 to n - 1 by default.
        period: the circumference, above 0; n by default when x is not given (hours of a day: 24 bins, period 24).

    Returns:
        (...), in the promoted dtype; its unit is that of x times that of the mass.
        Differentiable in p, q (centred over the bins; one-sided derivatives at bins without mass) and x. Where more
        than one level t is optimal the value has a kink, and the gradient is a subgradient.

    Raises:
        TypeError: if p or q is not a floating tensor.
        ValueError: if the bins or masses of p and q differ, a weight is negative, a number is not finite, x comes
            without a period, or the period is not above 0.

    Source:
        J. Rabin, J. Delon, Y. Gousseau, Transportation Distances on the Circle, JMIV 41, 2011.

    Example:
        >>> late, early = torch.eye(24)[23], torch.eye(24)[1]
        >>> wasserstein_circular(late, early)
        tensor(2.)
        >>> wasserstein_circular(torch.eye(2)[0], torch.eye(2)[1], torch.tensor([10.0, 350.0]), period=360)
        tensor(20.)
    """
    pair = histogram_pair(p, q, *([] if x is None else [check_tensor("x", x).dtype]))
    n = p.shape[-1]
    if q.shape[-1] != n:
        raise ValueError(
            f"p has {n} bins and q {q.shape[-1]}, expected the same bins; give both every bin, empty or not."
        )
    if x is None:
        x = torch.arange(n, device=p.device)
        period = float(n) if period is None else period
    elif period is None:
        raise ValueError("x is given without a period, expected period=, the circumference (such as 24, 360 or 2 pi).")
    check_positive("period", period)
    check_finite("x", x)
    check_last_axis("x", x, n)
    check_broadcast(x=x.shape[:-1], weights=torch.broadcast_shapes(pair.p.shape[:-1], pair.q.shape[:-1]))
    # Taken in float64: angles far from 0 keep all the digits they came with.
    place = x.to(torch.float64).remainder(float(period)).to(pair.p.dtype)
    batch = torch.broadcast_shapes(pair.p.shape, pair.q.shape, place.shape)
    place, order = place.expand(batch).sort(dim=-1, stable=True)
    weights_p, weights_q = (weights.expand(batch).gather(-1, order) for weights in (pair.p, pair.q))
    return _around(weights_p, weights_q, place, float(period)).to(pair.dtype)


def _around(p: Tensor, q: Tensor, x: Tensor, period: float) -> Tensor:
    gaps = torch.cat([x.diff(dim=-1), period - x[..., -1:] + x[..., :1]], dim=-1)
    fixed_p, fixed_q = p.detach(), q.detach()
    occupied = ((fixed_p > 0) | (fixed_q > 0)).long().cumsum(-1)
    # Behind all mass D is 0, as it is before; rounding of the last sums must not tell the two apart.
    apart = (fixed_p - fixed_q).cumsum(-1).masked_fill(occupied == occupied[..., -1:], 0.0)
    apart = apart - _median(apart, gaps.detach())
    potential = _potential(apart, gaps)
    f, g = potential, -potential
    if (fixed_p == 0).any():
        f = torch.where(fixed_p > 0, f, _cheapest(f, fixed_q > 0, x, period))
    if (fixed_q == 0).any():
        g = torch.where(fixed_q > 0, g, _cheapest(g, fixed_p > 0, x, period))
    # The differences from the detached weights are zero and carry f and g, which keep their graph in the positions.
    return (gaps * apart.abs() + (p - fixed_p) * f + (q - fixed_q) * g).sum(-1)


def _median(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted lower median (..., 1) of the last axis."""
    ascending, order = values.sort(dim=-1)
    below = weights.gather(-1, order).cumsum(-1)
    index = (below < below[..., -1:] / 2).sum(-1, keepdim=True)
    return ascending.gather(-1, index)


def _potential(apart: Tensor, gaps: Tensor) -> Tensor:
    """Return u (..., n), with u_j - u_{j+1} the derivative of the value in D_j."""
    falls = gaps * apart.sign()
    free = gaps.masked_fill(apart != 0, 0.0)
    share = -falls.sum(-1, keepdim=True) / free.sum(-1, keepdim=True)  # the arc of the median itself is never 0
    falls = falls + free * share.clamp(-1, 1)
    return falls.flip(-1).cumsum(-1).flip(-1)


def _cheapest(price: Tensor, partner: Tensor, x: Tensor, period: float) -> Tensor:
    """Return, for every bin j, the least of price_l + d(j, l) over bins l that are partners; price_j without any."""
    n = x.shape[-1]
    offered = price.masked_fill(~partner, torch.inf)
    offered, unrolled = torch.cat([offered, offered], dim=-1), torch.cat([x, x + period], dim=-1)
    behind = ((offered - unrolled).cummin(-1).values + unrolled)[..., n:]
    ahead = ((offered + unrolled).flip(-1).cummin(-1).values.flip(-1) - unrolled)[..., :n]
    cheapest = torch.minimum(behind, ahead)
    return torch.where(partner.any(-1, keepdim=True), cheapest, price)
