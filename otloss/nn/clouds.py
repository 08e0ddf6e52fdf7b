"""The module of transport between clouds of points."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss._foreign import explains_foreign_keywords
from otloss.applications.clouds import Clouds, Weights, check_options, cloud_loss
from otloss.costs.points import Metric
from otloss.nn.base import Loss


class CloudLoss(Loss):
    """`otloss.cloud_loss` between clouds of points.

    Args:
        kind, metric, epsilon, blur, marginal_penalty, tolerance, projections, empty: as for `otloss.cloud_loss`.
        reduction: "mean", "sum" or "none".

    Example:
        >>> loss = CloudLoss(blur=0.1)
        >>> loss(torch.zeros(2, 3), torch.ones(4, 3))
        tensor(1.5000)
    """

    @explains_foreign_keywords
    def __init__(
        self,
        *,
        kind: str = "divergence",
        metric: Metric = "sqeuclidean",
        epsilon: float | Float[Tensor, "*batch"] | None = None,
        blur: float | None = None,
        marginal_penalty: float | None = None,
        tolerance: float | None = None,
        projections: int | Float[Tensor, "k d"] | None = None,
        empty: str = "error",
        reduction: str = "mean",
    ) -> None:
        check_options(
            kind, empty, metric, divergence={"epsilon": epsilon, "blur": blur, "marginal_penalty": marginal_penalty,
            "tolerance": tolerance}, sliced={"projections": projections},
        )  # fmt: skip
        super().__init__(
            reduction, kind=kind, metric=metric, epsilon=epsilon, blur=blur, marginal_penalty=marginal_penalty,
            tolerance=tolerance, projections=projections, empty=empty,
        )  # fmt: skip

    def forward(
        self,
        x: Clouds,
        y: Clouds,
        a: Weights = None,
        b: Weights = None,
        *,
        mask_x: Bool[Tensor, "*batch n"] | None = None,
        mask_y: Bool[Tensor, "*batch m"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return self.reduced(cloud_loss(x, y, a, b, mask_x=mask_x, mask_y=mask_y, generator=generator, **self.settings))
