"""Modules of transport between histograms: closed forms, exact and entropic solvers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from otloss.costs import as_cost
from otloss.costs.dense import has_plain_entries
from otloss.nn.base import Loss
from otloss.solvers.closed_forms.circle import wasserstein_circular
from otloss.solvers.closed_forms.line import cdf_distance, wasserstein_1d
from otloss.solvers.closed_forms.sliced import sliced_wasserstein
from otloss.solvers.closed_forms.tree import wasserstein_tree
from otloss.solvers.solve import emd, sinkhorn, sinkhorn_divergence


class Wasserstein1d(Loss, function=wasserstein_1d, inputs=("p", "q")):
    """`otloss.wasserstein_1d` with positions x and y.

    Example:
        >>> import torch
        >>> loss = Wasserstein1d(x=torch.tensor([0.0, 1.0, 4.0]), order=2)
        >>> loss(torch.eye(3)[:2], torch.eye(3)[2])
        tensor(12.5000)
    """


class CdfDistance(Loss, function=cdf_distance, inputs=("p", "q")):
    """`otloss.cdf_distance` with positions x.

    Example:
        >>> import torch
        >>> CdfDistance()(torch.eye(4)[0], torch.eye(4)[2])
        tensor(2.)
    """


class WassersteinCircular(Loss, function=wasserstein_circular, inputs=("p", "q")):
    """`otloss.wasserstein_circular` with positions x and the period.

    Example:
        >>> import torch
        >>> WassersteinCircular()(torch.eye(24)[23], torch.eye(24)[1])
        tensor(2.)
    """


class WassersteinTree(Loss, function=wasserstein_tree, inputs=("p", "q")):
    """`otloss.wasserstein_tree` with a tree: the parent of each node, and the length of the edge to it.

    Example:
        >>> import torch
        >>> loss = WassersteinTree(parent=torch.tensor([-1, 0, 0]), length=torch.tensor([0.0, 1.0, 2.0]))
        >>> loss(torch.eye(3)[1], torch.eye(3)[2])
        tensor(3.)
    """


class SlicedWasserstein(Loss, function=sliced_wasserstein, inputs=("x", "y", "a", "b", "generator")):
    """`otloss.sliced_wasserstein` between clouds of points; directions (k, d) as `projections` stay the same.

    Example:
        >>> import torch
        >>> loss = SlicedWasserstein(projections=torch.eye(2))
        >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
        >>> loss(x, x + torch.tensor([3.0, 4.0]))
        tensor(12.5000)
    """

    def _prepared(self, settings: dict[str, Any]) -> dict[str, Any]:
        directions = settings["projections"]
        return settings | {"projections": directions.detach() if isinstance(directions, Tensor) else directions}


class _TransportLoss(Loss):
    """A solver that takes matrices with negative and infinite costs too, which the call checks."""

    def _prepared(self, settings: dict[str, Any]) -> dict[str, Any]:
        cost = settings["cost"]
        return settings | {"cost": as_cost(cost) if has_plain_entries(cost) else cost}


class Emd(_TransportLoss, function=emd, inputs=("p", "q")):
    """`otloss.emd` with a cost: a matrix, one matrix per problem, or a cost object.

    Example:
        >>> import torch
        >>> from otloss.costs import LineCost
        >>> Emd(cost=LineCost(torch.tensor([0.0, 1.0, 4.0])))(torch.eye(3)[1], torch.eye(3)[2])
        tensor(3.)
    """


class Sinkhorn(_TransportLoss, function=sinkhorn, inputs=("p", "q")):
    """`otloss.sinkhorn` with a cost: a matrix, one matrix per problem, or a cost object.

    Example:
        >>> import torch
        >>> cost = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> loss = Sinkhorn(cost=cost, epsilon=0.1, grad="implicit")
        >>> loss(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]]))
        tensor(0.2716)
    """


class SinkhornDivergence(Loss, function=sinkhorn_divergence, inputs=("p", "q")):
    """`otloss.sinkhorn_divergence` with costs.

    Example:
        >>> import torch
        >>> from otloss.costs import PointCost
        >>> cost = PointCost(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [3.0]]))
        >>> SinkhornDivergence(cost=cost, epsilon=0.1)(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5]))
        tensor(2.0000)
    """
