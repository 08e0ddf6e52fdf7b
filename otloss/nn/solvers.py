"""Modules of exact and entropic transport."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from otloss._foreign import explains_foreign_keywords
from otloss.costs import Cost, as_cost
from otloss.nn.base import Loss
from otloss.solvers.entropic.problem import Settings
from otloss.solvers.exact import emd
from otloss.solvers.plain import is_plain
from otloss.solvers.sinkhorn import sinkhorn, sinkhorn_divergence


def _held(cost: Cost | Tensor) -> Cost | Tensor:
    """A cost object, checked; a matrix with negative or infinite entries as it is, which the call checks."""
    return as_cost(cost) if is_plain(cost) else cost


class Emd(Loss):
    """`otloss.emd` with a held cost.

    Args:
        cost: (n, m), a matrix per problem (..., n, m), or a cost object.
        mass: the amount that is moved, a number or one per problem; None for all.
        reduction: "mean", "sum" or "none".

    Example:
        >>> import torch
        >>> from otloss.costs import LineCost
        >>> Emd(cost=LineCost(torch.tensor([0.0, 1.0, 4.0])))(torch.eye(3)[1], torch.eye(3)[2])
        tensor(3.)
    """

    @explains_foreign_keywords
    def __init__(
        self,
        *,
        cost: Cost | Float[Tensor, "*batch n m"],
        mass: float | Float[Tensor, "*batch"] | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__(reduction, cost=_held(cost), mass=mass)

    def forward(self, p: Float[Tensor, "*batch n"] | None, q: Float[Tensor, "*batch m"] | None) -> Tensor:
        return self.reduced(emd(p, q, **self.settings))


class Sinkhorn(Loss):
    """`otloss.sinkhorn` with a held cost.

    Args:
        cost: (n, m), a matrix per problem (..., n, m), or a cost object.
        epsilon: above 0, in the unit of the cost; a number, or one per problem.
        mass: the amount that is moved, a number or one per problem; None for all.
        reduction: "mean", "sum" or "none".
        epsilon_relative_to, marginal_penalty, grad, tolerance, max_iterations, start, strict, impl, reach: as for
            `otloss.sinkhorn`.

    Example:
        >>> import torch
        >>> cost = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> loss = Sinkhorn(cost=cost, epsilon=0.1, grad="implicit")
        >>> loss(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]]))
        tensor(0.2716)
    """

    @explains_foreign_keywords
    def __init__(
        self,
        *,
        cost: Cost | Float[Tensor, "*batch n m"],
        epsilon: float | Float[Tensor, "*batch"],
        mass: float | Float[Tensor, "*batch"] | None = None,
        reduction: str = "mean",
        epsilon_relative_to: str | None = None,
        marginal_penalty: float | None = None,
        grad: str = "envelope",
        tolerance: float | None = None,
        max_iterations: int = 10_000,
        start: tuple[Tensor, Tensor] | None = None,
        strict: bool = False,
        impl: str = "auto",
        reach: float | None = None,
    ) -> None:
        options = Settings(
            epsilon_relative_to, marginal_penalty, grad, tolerance, max_iterations, start, strict, impl, reach
        )
        super().__init__(reduction, cost=_held(cost), epsilon=epsilon, mass=mass, **vars(options))

    def forward(self, p: Float[Tensor, "*batch n"] | None, q: Float[Tensor, "*batch m"] | None) -> Tensor:
        return self.reduced(sinkhorn(p, q, **self.settings))


class SinkhornDivergence(Loss):
    """`otloss.sinkhorn_divergence` with held costs.

    Args:
        cost, epsilon, reduction: as for `Sinkhorn`, and so are the other options.
        cost_p, cost_q: the costs among the bins of p, and among those of q, if `cost` does not define them.

    Example:
        >>> import torch
        >>> from otloss.costs import PointCost
        >>> cost = PointCost(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [3.0]]))
        >>> SinkhornDivergence(cost=cost, epsilon=0.1)(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5]))
        tensor(2.0000)
    """

    @explains_foreign_keywords
    def __init__(
        self,
        *,
        cost: Cost | Float[Tensor, "*batch n m"],
        epsilon: float | Float[Tensor, "*batch"],
        cost_p: Cost | Float[Tensor, "*batch n n"] | None = None,
        cost_q: Cost | Float[Tensor, "*batch m m"] | None = None,
        reduction: str = "mean",
        epsilon_relative_to: str | None = None,
        marginal_penalty: float | None = None,
        grad: str = "envelope",
        tolerance: float | None = None,
        max_iterations: int = 10_000,
        start: tuple[Tensor, Tensor] | None = None,
        strict: bool = False,
        impl: str = "auto",
        reach: float | None = None,
    ) -> None:
        held_p, held_q = (None if c is None else as_cost(c) for c in (cost_p, cost_q))
        options = Settings(
            epsilon_relative_to, marginal_penalty, grad, tolerance, max_iterations, start, strict, impl, reach
        )
        super().__init__(reduction, cost=as_cost(cost), epsilon=epsilon, cost_p=held_p, cost_q=held_q, **vars(options))

    def forward(self, p: Float[Tensor, "*batch n"] | None, q: Float[Tensor, "*batch m"] | None) -> Tensor:
        return self.reduced(sinkhorn_divergence(p, q, **self.settings))
