"""The costs among the bins of one side, which debiasing needs beside those between both sides."""

from __future__ import annotations

import torch

from otloss.costs.cost import Cost
from otloss.costs.dense import DenseCost
from otloss.costs.points import PointCost


def costs_within(cost: Cost) -> tuple[Cost, Cost]:
    """Return the costs among the bins of p and among those of q.

    A `PointCost` has the points of both, and a symmetric cost with zeros on the diagonal is taken to be between equal
    bins.

    Raises:
        ValueError: if the cost is neither.
    """
    if isinstance(cost, PointCost):
        return cost.between(cost.x, cost.x, cost.metric), cost.between(cost.y, cost.y, cost.metric)
    if cost.T is cost or (isinstance(cost, DenseCost) and _is_within(cost)):
        return cost, cost
    raise ValueError(
        f"the costs among the bins of p and among those of q are not known from {cost!r}, which is not square and "
        "symmetric with a diagonal of zeros; give them with cost_p= and cost_q=, or use a PointCost."
    )


def _is_within(cost: DenseCost) -> bool:
    matrix = cost.matrix.detach()
    if matrix.shape[-2] != matrix.shape[-1] or not matrix.numel():
        return matrix.shape[-2] == matrix.shape[-1]
    allowed = 8 * torch.finfo(cost.dtype).eps * matrix.amax()
    # Without the zeros a matrix between other bins, of a single one for example, would pass.
    return bool((matrix - matrix.mT).abs().amax() <= allowed and cost.diagonal().detach().abs().amax() <= allowed)


def is_symmetric(cost: Cost) -> bool:
    """Whether C[i, j] = C[j, i] up to rounding, as for the costs among the bins of one side."""
    if cost.T is cost or (isinstance(cost, PointCost) and cost.x is cost.y):
        return True
    if isinstance(cost, PointCost):  # two clouds
        return False
    matrix = cost.dense().detach()
    return bool(((matrix - matrix.mT).abs() <= 1e-5 * matrix.abs().amax()).all()) if matrix.numel() else True
