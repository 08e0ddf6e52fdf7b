"""Modules of the losses over ordered classes and over histograms."""

from __future__ import annotations

from jaxtyping import Float, Int, Real
from torch import Tensor

from otloss._checks import check_tensor
from otloss.costs import Cost, as_cost
from otloss.losses import histogram_loss, histogram_mean, ordinal_loss
from otloss.losses.bins import check_form
from otloss.losses.geometry import check_settings
from otloss.losses.labels import check_cross_entropy, check_dim, check_ignore_index
from otloss.losses.real import check_not_complex
from otloss.nn.base import HeldCost, Loss, described


class OrdinalLoss(Loss):
    """`otloss.ordinal_loss` with held class values or costs, and class weights.

    Args:
        x, power, cost, circular, period, cross_entropy, class_weight, ignore_index, reduction, dim: as for
            `otloss.ordinal_loss`.

    Example:
        >>> import torch
        >>> loss = OrdinalLoss(x=torch.tensor([0.0, 1.0, 4.0]), cross_entropy=0.1)
        >>> loss(torch.zeros(1, 3), torch.tensor([2]))
        tensor(1.5543)
        >>> loss
        OrdinalLoss(x=(3,) float32, power=2, cross_entropy=0.1, reduction='mean')
    """

    x: Tensor | None
    class_weight: Tensor | None

    def __init__(
        self,
        *,
        x: Float[Tensor, " classes"] | None = None,
        power: float = 2,
        cost: Cost | Float[Tensor, "classes classes"] | None = None,
        circular: bool = False,
        period: float | None = None,
        cross_entropy: float = 0.0,
        class_weight: Float[Tensor, " classes"] | None = None,
        ignore_index: int | None = None,
        reduction: str = "mean",
        dim: int | None = None,
    ) -> None:
        super().__init__(reduction)
        check_settings(x=x, power=power, cost=cost, circular=circular, period=period)
        if class_weight is not None:
            check_not_complex("class_weight", class_weight)
        check_cross_entropy(cross_entropy)
        check_ignore_index(ignore_index)
        check_dim(dim)
        self.hold("x", x)
        self.hold("class_weight", class_weight)
        self.cost = None if cost is None else HeldCost(as_cost(cost))
        self.power, self.circular, self.period = power, circular, period
        self.cross_entropy, self.ignore_index, self.dim = cross_entropy, ignore_index, dim

    def forward(
        self,
        logits: Float[Tensor, "*batch classes"],
        target: Int[Tensor, "*batch"] | Float[Tensor, "*batch classes"],
        *,
        sample_weight: Float[Tensor, "*batch"] | None = None,
    ) -> Tensor:
        return ordinal_loss(
            logits, target, x=self.x, power=self.power, cost=None if self.cost is None else self.cost(),
            circular=self.circular, period=self.period, cross_entropy=self.cross_entropy,
            class_weight=self.class_weight, sample_weight=sample_weight, ignore_index=self.ignore_index,
            reduction=self.reduction, dim=self.dim,
        )  # fmt: skip

    def extra_repr(self) -> str:
        line = ("x", "power") if self.cost is None else ()
        circle = ("circular", "period") if self.circular else ()
        mix = ("cross_entropy",) if self.cross_entropy else ()
        return described(self, (*line, *circle, *mix, "class_weight", "ignore_index", "reduction", "dim"))


class HistogramLoss(Loss):
    """`otloss.histogram_loss` with held bins.

    Args:
        bins, labels, sigma, outside, power, cross_entropy, reduction: as for `otloss.histogram_loss`.

    Example:
        >>> import torch
        >>> loss = HistogramLoss(bins=torch.tensor([0.0, 10.0, 20.0]), labels="one_hot")
        >>> loss(torch.zeros(1, 2), torch.tensor([19.0]))
        tensor(2.5000)
        >>> loss.mean(torch.zeros(1, 2))
        tensor([10.])
    """

    shown = ("bins", "labels", "sigma", "outside", "power", "cross_entropy")
    bins: Tensor

    def __init__(
        self,
        *,
        bins: Real[Tensor, " bins_or_edges"],
        labels: str = "two_hot",
        sigma: float | None = None,
        outside: str = "error",
        power: float = 2,
        cross_entropy: float = 0.0,
        reduction: str = "mean",
    ) -> None:
        super().__init__(reduction)
        check_settings(power=power)
        check_form(labels, sigma, outside)
        check_cross_entropy(cross_entropy)
        self.hold("bins", check_tensor("bins", bins))
        self.labels, self.sigma, self.outside = labels, sigma, outside
        self.power, self.cross_entropy = power, cross_entropy

    def forward(
        self,
        logits: Float[Tensor, "*batch bins"],
        target: Real[Tensor, "*batch"] | Float[Tensor, "*batch bins"],
        *,
        sample_weight: Float[Tensor, "*batch"] | None = None,
    ) -> Tensor:
        return histogram_loss(
            logits, target, self.bins, labels=self.labels, sigma=self.sigma, outside=self.outside, power=self.power,
            cross_entropy=self.cross_entropy, sample_weight=sample_weight, reduction=self.reduction,
        )  # fmt: skip

    def mean(self, logits: Float[Tensor, "*batch bins"]) -> Float[Tensor, "*batch"]:
        """Return `otloss.losses.histogram_mean` of predicted histograms."""
        return histogram_mean(logits, self.bins)
