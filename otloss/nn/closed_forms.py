"""Modules of the distances that have a closed form."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss.nn.base import Loss
from otloss.solvers.circle import wasserstein_circular
from otloss.solvers.line import cdf_distance, wasserstein_1d
from otloss.solvers.sliced import sliced_wasserstein
from otloss.solvers.tree import wasserstein_tree


class Wasserstein1d(Loss):
    """`otloss.wasserstein_1d` with held positions x and y.

    Args:
        x: (n,) positions of the bins of p, 0 to n - 1 by default.
        y: (m,) those of q, x by default.
        order: at least 1.
        reduction: "mean", "sum" or "none".

    Example:
        >>> loss = Wasserstein1d(x=torch.tensor([0.0, 1.0, 4.0]), order=2)
        >>> loss(torch.eye(3)[:2], torch.eye(3)[2])
        tensor(12.5000)
    """

    def __init__(
        self,
        *,
        x: Float[Tensor, " n"] | None = None,
        y: Float[Tensor, " m"] | None = None,
        order: float = 1,
        reduction: str = "mean",
    ) -> None:
        super().__init__(reduction, x=x, y=y, order=order)

    def forward(self, p: Float[Tensor, "*batch n"] | None, q: Float[Tensor, "*batch m"] | None) -> Tensor:
        return self.reduced(wasserstein_1d(p, q, **self.settings))


class CdfDistance(Loss):
    """`otloss.cdf_distance` with held positions x.

    Args:
        x: (n,) positions of the bins, 0 to n - 1 by default.
        power: at least 1.
        reduction: "mean", "sum" or "none".

    Example:
        >>> CdfDistance()(torch.eye(4)[0], torch.eye(4)[2])
        tensor(2.)
    """

    def __init__(self, *, x: Float[Tensor, " n"] | None = None, power: float = 2, reduction: str = "mean") -> None:
        super().__init__(reduction, x=x, power=power)

    def forward(self, p: Float[Tensor, "*batch n"], q: Float[Tensor, "*batch n"]) -> Tensor:
        return self.reduced(cdf_distance(p, q, **self.settings))


class WassersteinCircular(Loss):
    """`otloss.wasserstein_circular` with held positions x and period.

    Args:
        x: (n,) positions along the circle, 0 to n - 1 by default.
        period: the circumference, n by default when x is not given.
        reduction: "mean", "sum" or "none".

    Example:
        >>> WassersteinCircular()(torch.eye(24)[23], torch.eye(24)[1])
        tensor(2.)
    """

    def __init__(
        self, *, x: Float[Tensor, " n"] | None = None, period: float | None = None, reduction: str = "mean"
    ) -> None:
        super().__init__(reduction, x=x, period=period)

    def forward(self, p: Float[Tensor, "*batch n"], q: Float[Tensor, "*batch n"]) -> Tensor:
        return self.reduced(wasserstein_circular(p, q, **self.settings))


class WassersteinTree(Loss):
    """`otloss.wasserstein_tree` with a held tree.

    Args:
        parent: (n,) the parent of each node; the root is its own, or has -1.
        length: (n,) lengths of the edges from each node to its parent.
        reduction: "mean", "sum" or "none".

    Example:
        >>> loss = WassersteinTree(parent=torch.tensor([-1, 0, 0]), length=torch.tensor([0.0, 1.0, 2.0]))
        >>> loss(torch.eye(3)[1], torch.eye(3)[2])
        tensor(3.)
    """

    def __init__(self, *, parent: Int[Tensor, " n"], length: Float[Tensor, " n"], reduction: str = "mean") -> None:
        super().__init__(reduction, parent=parent, length=length)

    def forward(self, p: Float[Tensor, "*batch n"], q: Float[Tensor, "*batch n"]) -> Tensor:
        return self.reduced(wasserstein_tree(p, q, **self.settings))


class SlicedWasserstein(Loss):
    """`otloss.sliced_wasserstein` between clouds of points.

    Args:
        order: at least 1.
        projections: how many directions to draw at each call, or held directions (k, d).
        reduction: "mean", "sum" or "none".

    Example:
        >>> loss = SlicedWasserstein(projections=torch.eye(2))
        >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
        >>> loss(x, x + torch.tensor([3.0, 4.0]))
        tensor(12.5000)
    """

    def __init__(
        self, *, order: float = 2, projections: int | Float[Tensor, "k d"] = 128, reduction: str = "mean"
    ) -> None:
        held = projections.detach() if isinstance(projections, Tensor) else projections
        super().__init__(reduction, order=order, projections=held)

    def forward(
        self,
        x: Float[Tensor, "*batch n d"],
        y: Float[Tensor, "*batch m d"],
        a: Float[Tensor, "*batch n"] | None = None,
        b: Float[Tensor, "*batch m"] | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return self.reduced(sliced_wasserstein(x, y, a, b, generator=generator, **self.settings))
