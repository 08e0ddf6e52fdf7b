"""How far the rounding of the weights may move the value: the bounds of `Transport` count it, since no solver sees it.

Each weight has a rounding of its own, of the number that was given or of one that was scaled to equal masses. Let p'
and q' of equal mass differ from p and q by the share u in each bin at most, and M be the mass. The value has the
derivatives f and g, which differ by at most the largest cost c from bin to bin, so it moves by at most

    u M c

A few light bins may have far larger costs. For an optimal plan P, (1 - u) P is nowhere too large for p' and q'. What is
left, up to 2 u p and 2 u q of the mass u M, moves by its product coupling, whose entropy relative to p q^T / M is at
most u M log 4. So the value moves by at most

    4 u (p^T C q / M + epsilon M)

That holds for costs of at least 0. A constant l < 0 that is added to all costs moves the value by l M, and M has the
rounding u of the weights, so the bound grows by u |l| M.

Bins of equal weights are all scaled alike, so that only their mass has a rounding: the value, homogeneous in the mass,
moves by u of itself, for costs of at least 0. The constant l < 0 is taken of the mass of one side and given back to the
mass of the other, which counts u |l| M twice; exact transport has equal masses in float64. Without a balance no weight
is scaled.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import float64_or
from otloss.costs import Cost, DenseCost, PointCost
from otloss.solvers.problem import Problem


def rounding_of_value(problem: Problem, value: Tensor | None = None) -> Float[Tensor, "*batch"]:
    """Return by how much the rounding of its weights may move the value of a posed problem, in float64.

    Without the value, the rounding of the mass of equal weights is left out.
    """
    device = problem.p.device
    wide = float64_or(problem.p.dtype, device)
    p, q = (w.detach().to(wide) for w in (problem.p, problem.q))
    if problem.marginal_penalty is not None or not problem.batch.numel():
        return p.new_zeros(problem.batch)
    mass, (cost, low) = p.sum(-1), _plain(problem.cost)
    largest = cost.largest().to(wide)
    if problem.mass is not None:  # what stays may be of any bins
        return 2 * problem.weight_rounding * problem.mass.detach() * largest
    product = _cost_of_product(cost, p, q) / mass.clamp(min=torch.finfo(wide).tiny) + problem.epsilon.detach() * mass
    bound: Tensor = problem.weight_rounding / 2 * (torch.minimum(largest * mass, 4 * product) + low.abs() * mass)
    bound_of_mass = torch.zeros_like(bound)
    if value is not None:
        of_constant = 0.0 if problem.is_exact else 2 * low.abs() * mass
        bound_of_mass = problem.weight_rounding / 2 * (value.detach().abs().to(wide) + of_constant)
    return torch.where(_is_uniform(p) & _is_uniform(q), bound_of_mass, bound)


def _plain(cost: Cost) -> tuple[Cost, Float[Tensor, "*batch"]]:
    """Return the cost without a graph, minus its smallest entry l where that is below 0, and min(0, l).

    In place of +inf it has as much as a chain of other pairs that leads around such a pair may cost.
    """
    points = cost.as_points()
    if points is not None:
        return points.without_graph(), torch.zeros((), device=cost.device)
    if cost.has_plain_entries:
        return cost, torch.zeros((), device=cost.device)
    matrix = cost.dense().detach()
    forbidden = matrix == torch.inf
    low = matrix.amin((-2, -1)).clamp(max=0.0)
    matrix = matrix - low[..., None, None]
    largest = matrix.masked_fill(forbidden, 0.0).amax((-2, -1), keepdim=True)
    return DenseCost.unchecked(torch.where(forbidden, min(cost.shape) * largest, matrix)), low


def _cost_of_product(cost: Cost, p: Tensor, q: Tensor) -> Tensor:
    """Return p^T C q, or for distances a bound from their squares, which needs no pairs."""
    points = cost.as_points()
    with torch.no_grad():
        if points is not None and points.metric in ("euclidean", "l1"):
            axes = points.x.shape[-1] if points.metric == "l1" else 1
            squares = PointCost(points.x, points.y).apply(q.to(points.dtype)).to(p)
            return (axes * p.sum(-1) * q.sum(-1) * (p * squares).sum(-1).clamp(min=0.0)).sqrt()
        return (p * cost.apply(q.to(cost.dtype)).to(p)).sum(-1).clamp(min=0.0)


def _is_uniform(weights: Tensor) -> Tensor:
    """Return whether all bins with mass have the same."""
    return weights.masked_fill(weights == 0, torch.inf).amin(-1) == weights.amax(-1)
