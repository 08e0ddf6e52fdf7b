"""Wasserstein distances between histograms or samples on a circle.

Cut the circle at 0 and go once around.

Order 1. With positions sorted, D_k = F_k - G_k the difference of the cumulative sums and gap_k the arc from position k
to the next one, the last arc leading back to position 0,

    W_1 = min over t of sum_k gap_k |D_k - t|         t a median of D, weighted by the gaps

t is the mass that passes the cut (J. Rabin, J. Delon, Y. Gousseau, Transportation Distances on the Circle, 2011).

Weight gradients are dual potentials. Around the circle, the potential u falls by gap_k sign(D_k - t) from bin k to the
next; where D_k = t it may fall by anything within +-gap_k, such that the sum around the circle is zero. A bin without
mass gets the one-sided derivative, the price of an infinitesimal mass there with its cheapest partner:

    f_j = min over l with q_l > 0 of u_l + d(j, l)          g_j = min over l with p_l > 0 of d(j, l) - u_l

in the circle's metric d, which two running minima find, one along each direction.

Order above 1. On the line that covers the circle, where F(s + M) = F(s) + period for the mass M, quantiles are matched
after a shift t of the levels (J. Delon, J. Salomon, A. Sobolevski, Fast Transport Optimization for Monge Costs on the
Circle, 2010):

    W = min over t of C(t) = integral over 0 to M of |F^-1(s) - G^-1(s + t)|^order ds

C is convex and piecewise linear. Its derivative is the sum over the levels G_j of what the mass there pays more at the
next bin of q, which is also g_{j+1} - g_j: bisection finds where the sum around the circle is zero. `_Shifted` has
these formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import broadcast_shape, check_broadcast, check_positive, check_tensor, float64_or
from otloss._per_example import per_example
from otloss._public import public
from otloss.solvers.closed_forms.line import both_or_uniform, check_exponent, checked_positions, finite_in, power_of
from otloss.solvers.histograms import histogram_pair

BISECTIONS = 60  # they find the shift in float64 to its last digit
ROUNDINGS = 8.0  # two levels that differ by no more of them may be the same


@public
@per_example(p=1, q=1, x=1, y=1)
def wasserstein_circular(
    p: Float[Tensor, "*batch n"] | None,
    q: Float[Tensor, "*batch m"] | None,
    x: Float[Tensor, "*batch n"] | None = None,
    y: Float[Tensor, "*batch m"] | None = None,
    *,
    order: float = 1,
    period: float | None = None,
) -> Float[Tensor, "*batch"]:
    """Return W_order^order on a circle, the minimal cost of moving p to q along the shorter arcs at arc^order per unit.

    Formulas: docs/guide/definitions.md#def-line

    Args:
        p: (..., n) weights >= 0, or None for 1 / n each: of samples u and v the distance is
            `wasserstein_circular(None, None, u, v, period=...)`. The leading axes of p, q, x and y broadcast.
        q: (..., m) weights >= 0 with the mass of p, up to rounding, or None for 1 / m each.
        x: (n,) or (..., n) positions of p's bins along the circle in the unit of `period`, in any order and taken
            modulo `period`; 0 to n - 1 by default.
        y: (m,) or (..., m) positions of q's bins, the positions of p by default.
        order: at least 1.
        period: the circumference, above 0; n by default when x is not given (hours of a day: 24 bins, period 24).

    Returns:
        (...), in the promoted dtype; its unit is the unit of x to the power `order`, times the unit of the mass.
        Differentiable in p, q (centred over all bins; one-sided derivatives at bins without mass), x and y. Where more
        than one shift is optimal the value has a kink, and the gradient is a subgradient.

    Raises:
        TypeError: if p or q is not a floating tensor.
        ValueError: if the masses differ, a weight is negative, a number is not finite, positions do not fit or come
            without a period, or the period is not above 0.

    Source:
        J. Rabin, J. Delon, Y. Gousseau, Transportation Distances on the Circle, JMIV 41, 2011.

    Example:
        >>> late, early = torch.eye(24)[23], torch.eye(24)[1]
        >>> wasserstein_circular(late, early)
        tensor(2.)
        >>> angles = torch.tensor([10.0, 350.0]), torch.tensor([0.0, 20.0, 340.0])
        >>> wasserstein_circular(None, None, *angles, order=2, period=360)
        tensor(100.)
    """
    check_exponent("order", order)
    p, q, dtype = both_or_uniform(p, q, x, y)
    dtypes = [check_tensor(name, t).dtype for name, t in (("x", x), ("y", y)) if t is not None]
    pair = histogram_pair(p, q, *dtypes)
    n = p.shape[-1]
    if y is None and q.shape[-1] != n:
        raise ValueError(
            f"p has {n} bins and q {q.shape[-1]}, expected the same bins when y is not given; pass y, the positions of "
            "q's bins."
        )
    if x is None:
        x = torch.arange(n, device=p.device)
        period = float(n) if period is None else period
    if period is None:
        raise ValueError("x is given without a period, expected period=, the circumference (such as 24, 360 or 2 pi).")
    check_positive("period", period)
    p, q = pair.in_float64
    x = _on_circle("x", x, p, float(period))
    y = x if y is None else _on_circle("y", y, q, float(period))
    check_broadcast(x=x.shape[:-1], y=y.shape[:-1])
    if order == 1:
        value = _of_order_1(p, q, x, y, float(period), is_shared=y is x)
    else:
        value = _above_order_1(p, q, x, y, float(period), order)
    return finite_in(dtype, value, order)


def _on_circle(name: str, positions: Tensor, weights: Tensor, period: float) -> Tensor:
    """Return checked positions in [0, period): taken in float64, angles far from 0 keep all the digits they have."""
    checked_positions(name, positions, weights)
    wide = positions.to(float64_or(weights.dtype, positions.device))
    return wide.remainder(period).to(weights.dtype)


def _sorted(weights: Tensor, positions: Tensor, batch: torch.Size) -> tuple[Tensor, Tensor]:
    positions, order = positions.expand(*batch, -1).sort(dim=-1, stable=True)
    return weights.expand(*batch, -1).gather(-1, order), positions


# ---- order 1 ---------------------------------------------------------------------------------------------------------


def _of_order_1(p: Tensor, q: Tensor, x: Tensor, y: Tensor, period: float, *, is_shared: bool) -> Tensor:
    """Return W_1: bins at different positions are bins of both, without mass on the other side."""
    batch = broadcast_shape(p.shape[:-1], q.shape[:-1], x.shape[:-1], y.shape[:-1])
    if not is_shared:
        p, q, x, y = (t.expand(*batch, -1) for t in (p, q, x, y))
        p, q, x = (
            torch.cat([p, torch.zeros_like(q)], -1),
            torch.cat([torch.zeros_like(p), q], -1),
            torch.cat([x, y], -1),
        )
    place, order = x.expand(*batch, -1).sort(dim=-1, stable=True)
    weights_p, weights_q = (weights.expand(*batch, -1).gather(-1, order) for weights in (p, q))
    return _around(weights_p, weights_q, place, period)


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
    """Return, for every bin j, the smallest price_l + d(j, l) over bins l that are partners; price_j without any."""
    n = x.shape[-1]
    offered = price.masked_fill(~partner, torch.inf)
    offered, unrolled = torch.cat([offered, offered], dim=-1), torch.cat([x, x + period], dim=-1)
    behind = ((offered - unrolled).cummin(-1).values + unrolled)[..., n:]
    ahead = ((offered + unrolled).flip(-1).cummin(-1).values.flip(-1) - unrolled)[..., :n]
    cheapest = torch.minimum(behind, ahead)
    return torch.where(partner.any(-1, keepdim=True), cheapest, price)


# ---- order above 1 ---------------------------------------------------------------------------------------------------


def _above_order_1(p: Tensor, q: Tensor, x: Tensor, y: Tensor, period: float, order: float) -> Tensor:
    batch = broadcast_shape(p.shape[:-1], q.shape[:-1], x.shape[:-1], y.shape[:-1])
    (p, x), (q, y) = (_sorted(w, t.to(w.dtype), batch) for w, t in ((p, x), (q, y)))
    fixed_p, fixed_q = p.detach(), q.detach()
    low, high, share = _best_shift(_shifted(fixed_p, fixed_q, x.detach(), y.detach(), period, order))
    path = _shifted(fixed_p, fixed_q, x, y, period, order)
    g = (1 - share) * path.rises(low) + share * path.rises(high)
    # The last rise leads back to the first bin.
    g = torch.cat([torch.zeros_like(g[..., :1]), g[..., :-1].cumsum(-1)], -1)
    f = path.cheapest_for_p(high, g)
    g = torch.where(fixed_q > 0, g, path.cheapest_for_q(high, f))
    # The differences from the detached weights are zero and carry f and g, which keep their graph in the positions.
    return path.value(high) + ((p - fixed_p) * f).sum(-1) + ((q - fixed_q) * g).sum(-1)


@dataclass(frozen=True)
class _Shifted:
    """Both sides on the line that covers the circle, with levels F and G of equal mass (..., 1)."""

    F: Float[Tensor, "*batch n"]
    G: Float[Tensor, "*batch m"]
    x: Float[Tensor, "*batch n"]
    y: Float[Tensor, "*batch m"]
    mass: Float[Tensor, "*batch 1"]
    period: float
    order: float

    def of_level(self, levels: Tensor, positions: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bins at the levels s, the first whose level is not below s, and their positions on the line."""
        turns = torch.ceil(s / self.mass) - 1
        remainder = (s - turns * self.mass).clamp(max=self.mass)
        bins = torch.searchsorted(levels, remainder.contiguous()).clamp_(max=levels.shape[-1] - 1)
        return bins, positions.gather(-1, bins) + turns * self.period

    def price(self, x: Tensor, y: Tensor) -> Tensor:
        return power_of(x - y, self.order)

    def rises(self, t: Tensor) -> Tensor:
        """Return what the mass at each level G_j pays more at the next bin of q, the last one back to the first."""
        _, x = self.of_level(self.F, self.x, self.G - t)
        following = torch.cat([self.y[..., 1:], self.y[..., :1] + self.period], -1)
        return self.price(x, following) - self.price(x, self.y)

    def value(self, t: Tensor) -> Tensor:
        """Return C(t)."""
        s = (self.G - t).remainder(self.mass)
        levels = torch.cat([self.F, s], -1).sort(-1).values
        widths = levels.diff(dim=-1, prepend=torch.zeros_like(levels[..., :1]))
        middle = levels - widths / 2
        (_, x), (_, y) = self.of_level(self.F, self.x, middle), self.of_level(self.G, self.y, middle + t)
        return (widths * self.price(x, y)).sum(-1)

    def cheapest_for_p(self, t: Tensor, g: Tensor) -> Tensor:
        """Return for each bin of p the smallest price minus g, over partners at its levels and next to them."""
        bins, y = self.of_level(self.G, self.y, self._around(self.F) + t)
        prices = self.price(self.x.repeat(*[1] * (self.x.dim() - 1), 6), y) - g.gather(-1, bins)
        return prices.unflatten(-1, (6, -1)).amin(-2)

    def cheapest_for_q(self, t: Tensor, f: Tensor) -> Tensor:
        bins, x = self.of_level(self.F, self.x, self._around(self.G) - t)
        prices = self.price(x, self.y.repeat(*[1] * (self.y.dim() - 1), 6)) - f.gather(-1, bins)
        return prices.unflatten(-1, (6, -1)).amin(-2)

    def _around(self, levels: Tensor) -> Tensor:
        """Return the levels at both ends of each bin, and a few roundings below and above."""
        rounding = ROUNDINGS * torch.finfo(levels.dtype).eps * self.mass
        lower = torch.cat([torch.zeros_like(self.mass), levels[..., :-1]], -1)
        return torch.cat([level + k * rounding for level in (lower, levels) for k in (-1, 0, 1)], -1)


def _shifted(p: Tensor, q: Tensor, x: Tensor, y: Tensor, period: float, order: float) -> _Shifted:
    F, G = p.cumsum(-1), q.cumsum(-1)
    mass = F[..., -1:]
    G = torch.where(G[..., -1:] == G, mass, torch.minimum(G, mass))  # behind all mass both have the same level
    return _Shifted(F, G, x, y, mass.clamp(min=torch.finfo(F.dtype).tiny), period, order)


def _best_shift(path: _Shifted) -> tuple[Tensor, Tensor, Tensor]:
    """Return two shifts (..., 1) next to each other, and the share of the second with which C has the derivative 0."""
    low, high = -2 * path.mass, 2 * path.mass
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        rises = path.rises(middle).sum(-1, keepdim=True) > 0
        low, high = torch.where(rises, low, middle), torch.where(rises, middle, high)
    falling, rising = (path.rises(t).sum(-1, keepdim=True) for t in (low, high))
    share = -falling / (rising - falling).clamp(min=torch.finfo(rising.dtype).tiny)
    return low, high, share.nan_to_num(nan=0.0).clamp(0, 1)
