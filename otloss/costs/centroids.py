"""Lower bounds of exact transport by the means of both sides: M h(sum_i p_i x_i / M - sum_j q_j y_j / M).

They hold, by Jensen's inequality, for costs h(x_i - y_j) with h convex. The drift is M times the difference of means.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from otloss.costs.distances import by_problems
from otloss.costs.products import product


def drift(
    p: Float[Tensor, "*batch n"],
    q: Float[Tensor, "*batch m"],
    x: Float[Tensor, "*own n d"],
    y: Float[Tensor, "*own m d"],
) -> Float[Tensor, "*batch d"]:
    """Return sum_i p_i x_i - sum_j q_j y_j in the dtype of the weights, since it cancels where they nearly agree."""
    is_one_cloud = x is y
    x, y = x.to(p.dtype), y.to(p.dtype)

    def centred(x: Tensor, y: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor]:  # p and q (..., 1, n)
        centre = y.detach().mean(-2, keepdim=True)  # far from the origin the sums would cancel
        return (product(p, x - centre) - product(q, y - centre),)

    if is_one_cloud:
        return _moment(p - q, x - x.detach().mean(-2, keepdim=True))
    return by_problems(centred, x, y, p.unsqueeze(-2), q.unsqueeze(-2))[0].squeeze(-2)


def power_of_drift(drift: Tensor, mass: Tensor, power: float) -> Tensor:
    """Return M |drift / M|^power, with quotients before products: these could overflow or underflow."""
    share = drift / or_one(mass)
    return drift * share if power == 2 else mass * share.abs() ** power


def between_directions(
    p: Float[Tensor, "*batch n"],
    q: Float[Tensor, "*batch m"],
    mass: Float[Tensor, "*batch"],
    u: Float[Tensor, "*own n d"],
    v: Float[Tensor, "*own m d"],
) -> Float[Tensor, "*batch"]:
    """Return |sum_i p_i u_i - sum_j q_j v_j|^2 / 2 M, for 1 - cos = |u - v|^2 / 2 between points of length one."""
    mass = mass.unsqueeze(-1)
    # The difference of wider weights keeps the digits, and a large embedding its dtype.
    moved = _moment((p - q).to(u.dtype), u) if u is v else _moment(p.to(u.dtype), u) - _moment(q.to(v.dtype), v)
    return power_of_drift(moved, mass, 2).sum(-1) / 2


def or_one(mass: Tensor) -> Tensor:
    """Return the mass, or 1 where it is 0: nothing to move costs nothing, and value and gradient stay finite."""
    return torch.where(mass > 0, mass, 1.0)


def _moment(weights: Tensor, points: Tensor) -> Tensor:
    return product(weights.unsqueeze(-2), points).squeeze(-2)
