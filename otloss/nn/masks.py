"""Modules of the losses of segmentations."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor

from otloss.costs import Cost, as_cost
from otloss.losses import mask_loss, wasserstein_dice
from otloss.nn.base import Module


class MaskLoss(Module):
    """`otloss.losses.mask_loss` with held settings.

    Args:
        epsilon, spacing, marginal_penalty, empty, tolerance, reduction: as for the function.

    Example:
        >>> import torch
        >>> target = torch.eye(4)
        >>> bool(MaskLoss(epsilon=0.5)(20 * target - 10, target) < 1e-3)
        True
    """

    def __init__(
        self,
        *,
        epsilon: float,
        spacing: float | Sequence[float] = 1.0,
        marginal_penalty: float | None = None,
        empty: str = "area",
        tolerance: float | None = 1e-3,
        reduction: str = "mean",
    ) -> None:
        super().__init__(
            epsilon=epsilon, spacing=spacing, marginal_penalty=marginal_penalty, empty=empty, tolerance=tolerance,
            reduction=reduction,
        )  # fmt: skip

    def forward(
        self, logits: Float[Tensor, "*batch height width"], target: Float[Tensor, "*batch height width"]
    ) -> Tensor:
        return mask_loss(logits, target, **self.settings)


class WassersteinDice(Module):
    """`otloss.losses.wasserstein_dice` with held costs.

    Args:
        cost, background, reduction: as for the function.

    Example:
        >>> import torch
        >>> loss = WassersteinDice(cost=1 - torch.eye(2))
        >>> loss(torch.tensor([[[2.0, 0.0], [0.0, 2.0]]]), torch.tensor([[0, 1]]))
        tensor(0.1192)
    """

    def __init__(
        self, *, cost: Cost | Float[Tensor, "classes classes"], background: int = 0, reduction: str = "mean"
    ) -> None:
        super().__init__(cost=as_cost(cost), background=background, reduction=reduction)

    def forward(self, logits: Float[Tensor, "batch classes ..."], target: Int[Tensor, "batch ..."]) -> Tensor:
        return wasserstein_dice(logits, target, **self.settings)
