"""Modules of transport between histograms: closed forms, exact and entropic solvers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from otloss.costs import Cost
from otloss.costs.dense import posed_cost
from otloss.nn.base import Loss, checked_cost
from otloss.solvers.closed_forms.circle import wasserstein_circular
from otloss.solvers.closed_forms.line import cdf_distance, wasserstein_1d
from otloss.solvers.closed_forms.sliced import sliced_wasserstein
from otloss.solvers.closed_forms.tree import wasserstein_tree
from otloss.solvers.divergence import sinkhorn_divergence
from otloss.solvers.options import Penalty
from otloss.solvers.solve import emd, sinkhorn


class Wasserstein1d(Loss):
    """`otloss.wasserstein_1d` with positions x and y.

    Example:
        >>> import torch
        >>> loss = Wasserstein1d(x=torch.tensor([0.0, 1.0, 4.0]), order=2)
        >>> loss(torch.eye(3)[:2], torch.eye(3)[2])
        tensor(12.5000)
    """

    def __init__(
        self, x: Tensor | None = None, y: Tensor | None = None, *, order: float = 1, reduction: str = "mean"
    ) -> None:
        super().__init__(locals())

    def forward(self, p: Tensor | None, q: Tensor | None) -> Tensor:
        return self._reduced(wasserstein_1d(p, q, **self.settings))


class CdfDistance(Loss):
    """`otloss.cdf_distance` with positions x.

    Example:
        >>> import torch
        >>> CdfDistance()(torch.eye(4)[0], torch.eye(4)[2])
        tensor(2.)
    """

    def __init__(self, x: Tensor | None = None, *, power: float = 2, reduction: str = "mean") -> None:
        super().__init__(locals())

    def forward(self, p: Tensor | None, q: Tensor | None) -> Tensor:
        return self._reduced(cdf_distance(p, q, **self.settings))


class WassersteinCircular(Loss):
    """`otloss.wasserstein_circular` with positions x and y and the period.

    Example:
        >>> import torch
        >>> WassersteinCircular()(torch.eye(24)[23], torch.eye(24)[1])
        tensor(2.)
    """

    def __init__(
        self,
        x: Tensor | None = None,
        y: Tensor | None = None,
        *,
        order: float = 1,
        period: float | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__(locals())

    def forward(self, p: Tensor | None, q: Tensor | None) -> Tensor:
        return self._reduced(wasserstein_circular(p, q, **self.settings))


class WassersteinTree(Loss):
    """`otloss.wasserstein_tree` with a tree: the parent of each node, and the length of the edge to it.

    Example:
        >>> import torch
        >>> loss = WassersteinTree(parent=torch.tensor([-1, 0, 0]), length=torch.tensor([0.0, 1.0, 2.0]))
        >>> loss(torch.eye(3)[1], torch.eye(3)[2])
        tensor(3.)
    """

    def __init__(self, parent: Tensor, length: Tensor, *, reduction: str = "mean") -> None:
        super().__init__(locals())

    def forward(self, p: Tensor, q: Tensor) -> Tensor:
        return self._reduced(wasserstein_tree(p, q, **self.settings))


class SlicedWasserstein(Loss):
    """`otloss.sliced_wasserstein` between clouds of points; directions (k, d) as `projections` stay the same.

    Example:
        >>> import torch
        >>> loss = SlicedWasserstein(projections=torch.eye(2))
        >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
        >>> loss(x, x + torch.tensor([3.0, 4.0]))
        tensor(12.5000)
    """

    def __init__(self, *, order: float = 2, projections: int | Tensor = 128, reduction: str = "mean") -> None:
        super().__init__(locals())

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        a: Tensor | None = None,
        b: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return self._reduced(sliced_wasserstein(x, y, a, b, generator=generator, **self.settings))

    def _prepared(self, settings: dict[str, Any]) -> dict[str, Any]:
        directions = settings["projections"]
        return settings | {"projections": directions.detach() if isinstance(directions, Tensor) else directions}


class _TransportLoss(Loss):
    """A solver that takes matrices with negative and infinite costs too."""

    def _prepared(self, settings: dict[str, Any]) -> dict[str, Any]:
        return settings | {"cost": checked_cost(settings["cost"], posed_cost)}


class Emd(_TransportLoss):
    """`otloss.emd` with a cost: a matrix, one matrix per problem, or a cost object.

    Example:
        >>> import torch
        >>> from otloss.costs import LineCost
        >>> Emd(cost=LineCost(torch.tensor([0.0, 1.0, 4.0])))(torch.eye(3)[1], torch.eye(3)[2])
        tensor(3.)
    """

    def __init__(self, cost: Cost | Tensor, *, mass: float | Tensor | None = None, reduction: str = "mean") -> None:
        super().__init__(locals())

    def forward(self, p: Tensor | None, q: Tensor | None) -> Tensor:
        return self._reduced(emd(p, q, **self.settings))


class Sinkhorn(_TransportLoss):
    """`otloss.sinkhorn` with a cost: a matrix, one matrix per problem, or a cost object.

    Example:
        >>> import torch
        >>> cost = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> loss = Sinkhorn(cost=cost, epsilon=0.1, grad="implicit")
        >>> loss(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]]))
        tensor(0.2716)
    """

    def __init__(
        self,
        cost: Cost | Tensor,
        *,
        epsilon: float | Tensor,
        mass: float | Tensor | None = None,
        epsilon_relative_to: str | None = None,
        marginal_penalty: Penalty = None,
        grad: str = "envelope",
        tolerance: float | None = None,
        max_iterations: int = 10000,
        start: tuple[Tensor, Tensor] | None = None,
        impl: str = "auto",
        reduction: str = "mean",
    ) -> None:
        super().__init__(locals())

    def forward(self, p: Tensor | None, q: Tensor | None) -> Tensor:
        return self._reduced(sinkhorn(p, q, **self.settings))


class SinkhornDivergence(Loss):
    """`otloss.sinkhorn_divergence` with costs.

    A matrix that is trained has to stay symmetric with zeros on its diagonal, by
    `torch.nn.utils.parametrize.register_parametrization(loss.cost, "matrix", ...)`; or train points.

    Example:
        >>> import torch
        >>> from otloss.costs import PointCost
        >>> cost = PointCost(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [3.0]]))
        >>> SinkhornDivergence(cost=cost, epsilon=0.1)(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5]))
        tensor(2.0000)
    """

    def __init__(
        self,
        cost: Cost | Tensor,
        *,
        epsilon: float | Tensor,
        cost_p: Cost | Tensor | None = None,
        cost_q: Cost | Tensor | None = None,
        epsilon_relative_to: str | None = None,
        marginal_penalty: Penalty = None,
        grad: str = "envelope",
        tolerance: float | None = None,
        max_iterations: int = 10000,
        start: tuple[Tensor, Tensor] | None = None,
        impl: str = "auto",
        reduction: str = "mean",
    ) -> None:
        super().__init__(locals())

    def forward(self, p: Tensor | None, q: Tensor | None) -> Tensor:
        return self._reduced(sinkhorn_divergence(p, q, **self.settings))
