"""Modules of exact and entropic transport."""

from __future__ import annotations

from typing import Unpack

from jaxtyping import Float
from torch import Tensor

from otloss.costs import Cost, as_cost
from otloss.nn.base import HeldCost, Loss, described
from otloss.solvers.entropic.problem import Options, Settings
from otloss.solvers.exact import emd
from otloss.solvers.sinkhorn import sinkhorn, sinkhorn_divergence


class Emd(Loss):
    """`otloss.emd` with a held cost.

    Args:
        cost: (n, m), a matrix per problem (..., n, m), or a cost object.
        reduction: "mean", "sum" or "none".

    Example:
        >>> import torch
        >>> from otloss.costs import LineCost
        >>> Emd(cost=LineCost(torch.tensor([0.0, 1.0, 4.0])))(torch.eye(3)[1], torch.eye(3)[2])
        tensor(3.)
    """

    def __init__(self, *, cost: Cost | Float[Tensor, "*batch n m"], reduction: str = "mean") -> None:
        super().__init__(reduction)
        self.cost = HeldCost(as_cost(cost))

    def forward(self, p: Float[Tensor, "*batch n"], q: Float[Tensor, "*batch m"]) -> Tensor:
        return self.reduced(emd(p, q, self.cost()))


class Sinkhorn(Loss):
    """`otloss.sinkhorn` with a held cost.

    Args:
        cost: (n, m), a matrix per problem (..., n, m), or a cost object.
        epsilon: above 0, in the unit of the cost; a number, or one per problem.
        reduction: "mean", "sum" or "none".
        options: as for `otloss.sinkhorn`, but for `start`, which belongs to a batch and not to a module.

    Example:
        >>> import torch
        >>> cost = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> loss = Sinkhorn(cost=cost, epsilon=0.1, grad="implicit")
        >>> loss(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]]))
        tensor(0.2716)
    """

    epsilon: float | Tensor

    def __init__(
        self,
        *,
        cost: Cost | Float[Tensor, "*batch n m"],
        epsilon: float | Float[Tensor, "*batch"],
        reduction: str = "mean",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(reduction)
        self.cost = HeldCost(as_cost(cost))
        if isinstance(epsilon, Tensor):
            self.hold("epsilon", epsilon)
        else:
            self.epsilon = epsilon
        Settings.of(options)  # raises where an option is not known or out of range
        if options.get("start") is not None:
            raise ValueError("start belongs to one batch of problems and is not held; call otloss.sinkhorn with it.")
        self.options = options

    def forward(self, p: Float[Tensor, "*batch n"], q: Float[Tensor, "*batch m"]) -> Tensor:
        return self.reduced(sinkhorn(p, q, self.cost(), epsilon=self.epsilon, **self.options))

    def extra_repr(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"{described(self, ('epsilon',))}{given}, reduction={self.reduction!r}"


class SinkhornDivergence(Sinkhorn):
    """`otloss.sinkhorn_divergence` with held costs.

    Args:
        cost, epsilon, reduction, options: as for `Sinkhorn`.
        cost_p, cost_q: the costs among the bins of p, and among those of q, where `cost` does not tell them.

    Example:
        >>> import torch
        >>> from otloss.costs import PointCost
        >>> cost = PointCost(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [3.0]]))
        >>> SinkhornDivergence(cost=cost, epsilon=0.1)(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5]))
        tensor(2.0000)
    """

    def __init__(
        self,
        *,
        cost: Cost | Float[Tensor, "*batch n m"],
        epsilon: float | Float[Tensor, "*batch"],
        cost_p: Cost | Float[Tensor, "*batch n n"] | None = None,
        cost_q: Cost | Float[Tensor, "*batch m m"] | None = None,
        reduction: str = "mean",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(cost=cost, epsilon=epsilon, reduction=reduction, **options)
        self.cost_p = None if cost_p is None else HeldCost(as_cost(cost_p))
        self.cost_q = None if cost_q is None else HeldCost(as_cost(cost_q))

    def forward(self, p: Float[Tensor, "*batch n"], q: Float[Tensor, "*batch m"]) -> Tensor:
        among_p, among_q = (None if held is None else held() for held in (self.cost_p, self.cost_q))
        values = sinkhorn_divergence(
            p, q, self.cost(), epsilon=self.epsilon, cost_p=among_p, cost_q=among_q, **self.options
        )
        return self.reduced(values)
