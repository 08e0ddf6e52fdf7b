"""Modules of the losses over ordered classes, histograms, numbers, rankings, sets, ensembles and two domains."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from otloss.costs import Cost, as_cost
from otloss.losses import (
    crps,
    histogram_loss,
    histogram_mean,
    jdot_loss,
    number_token_loss,
    ordinal_loss,
    set_loss,
    spearman_loss,
    top_k_loss,
)
from otloss.nn.base import Loss, Module


class OrdinalLoss(Module):
    """`otloss.ordinal_loss` with held class values or costs, and class weights.

    Begin with `OrdinalLoss(cross_entropy=0.2)` for few or imbalanced rows: the loss alone has small gradients where a
    prediction is far off, and learns slowly from them. Decode predictions by `otloss.losses.decode_classes(logits,
    "median")`, which has fewer errors of several classes than the argmax (docs/ordinal.md).

    Args:
        x, power, cost, circular, period, cross_entropy, class_weight, ignore_index, reduction, dim: as for
            `otloss.ordinal_loss`.

    Example:
        >>> import torch
        >>> loss = OrdinalLoss(x=torch.tensor([0.0, 1.0, 4.0]), cross_entropy=0.1)
        >>> loss(torch.zeros(1, 3), torch.tensor([2]))
        tensor(1.5543)
    """

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
        super().__init__(
            x=x, power=power, cost=None if cost is None else as_cost(cost), circular=circular, period=period,
            cross_entropy=cross_entropy, class_weight=class_weight, ignore_index=ignore_index, reduction=reduction,
            dim=dim,
        )  # fmt: skip

    def forward(
        self,
        logits: Float[Tensor, "*batch classes"],
        target: Int[Tensor, "*batch"] | Float[Tensor, "*batch classes"],
        *,
        sample_weight: Float[Tensor, "*batch"] | None = None,
    ) -> Tensor:
        return ordinal_loss(logits, target, sample_weight=sample_weight, **self.settings)


class HistogramLoss(Module):
    """`otloss.histogram_loss` with held bins.

    Args:
        bins, labels, sigma, power, cross_entropy, reduction: as for `otloss.histogram_loss`.

    Example:
        >>> import torch
        >>> loss = HistogramLoss(bins=torch.tensor([0.0, 10.0, 20.0]), labels="one_hot")
        >>> loss(torch.zeros(1, 2), torch.tensor([19.0]))
        tensor(2.5000)
        >>> loss.mean(torch.zeros(1, 2))
        tensor([10.])
    """

    def __init__(
        self,
        *,
        bins: Real[Tensor, " bins_or_edges"],
        labels: str = "two_hot",
        sigma: float | None = None,
        power: float = 2,
        cross_entropy: float = 0.0,
        reduction: str = "mean",
    ) -> None:
        super().__init__(
            bins=bins, labels=labels, sigma=sigma, power=power, cross_entropy=cross_entropy, reduction=reduction
        )

    def forward(
        self,
        logits: Float[Tensor, "*batch bins"],
        target: Real[Tensor, "*batch"] | Float[Tensor, "*batch bins"],
        *,
        sample_weight: Float[Tensor, "*batch"] | None = None,
    ) -> Tensor:
        return histogram_loss(logits, target, sample_weight=sample_weight, **self.settings)

    def mean(self, logits: Float[Tensor, "*batch bins"]) -> Float[Tensor, "*batch"]:
        """Return `otloss.losses.histogram_mean` of predicted histograms."""
        return histogram_mean(logits, self.settings["bins"])


class NumberTokenLoss(Module):
    """`otloss.number_token_loss` with held values of the tokens.

    Args:
        values, form, over, scaling, squash, text, ignore_index, reduction: as for `otloss.number_token_loss`.

    Example:
        >>> import torch
        >>> loss = NumberTokenLoss(torch.tensor([5.0, 6.0, 9.0, float("nan")]))
        >>> loss(torch.tensor([[0.0, 2.0, 0.0, 0.0]]), torch.tensor([0]))
        tensor(1.9712)
    """

    def __init__(
        self,
        values: Float[Tensor, " vocab"],
        *,
        form: str = "wasserstein",
        over: str = "vocabulary",
        scaling: str | None = None,
        squash: float | None = None,
        text: float | None = None,
        ignore_index: int | None = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(
            values=values, form=form, over=over, scaling=scaling, squash=squash, text=text, ignore_index=ignore_index,
            reduction=reduction,
        )  # fmt: skip

    def forward(
        self,
        logits: Float[Tensor, "*batch vocab"],
        labels: Int[Tensor, "*batch"],
        *,
        sample_weight: Float[Tensor, "*batch"] | None = None,
    ) -> Tensor:
        return number_token_loss(logits, labels, sample_weight=sample_weight, **self.settings)


class SpearmanLoss(Module):
    """`otloss.losses.spearman_loss`.

    Args:
        epsilon, regularization, reduction: as for the function.

    Example:
        >>> import torch
        >>> SpearmanLoss(epsilon=1e-3)(torch.tensor([0.1, 0.3, 0.2]), torch.tensor([1.0, 2.0, 3.0]))
        tensor(0.5000)
    """

    def __init__(
        self, *, epsilon: float | None = None, regularization: str = "quadratic", reduction: str = "mean"
    ) -> None:
        super().__init__(epsilon=epsilon, regularization=regularization, reduction=reduction)

    def forward(self, scores: Float[Tensor, "*batch n"], target: Real[Tensor, "*batch n"]) -> Tensor:
        return spearman_loss(scores, target, **self.settings)


class TopKLoss(Module):
    """`otloss.losses.top_k_loss`.

    Args:
        k, epsilon, reduction: as for the function.

    Example:
        >>> import torch
        >>> TopKLoss(k=1)(torch.tensor([[0.1, 2.0, 1.5, -1.0]]), torch.tensor([2]))
        tensor(1.8397)
    """

    def __init__(self, *, k: int, epsilon: float = 0.1, reduction: str = "mean") -> None:
        super().__init__(k=k, epsilon=epsilon, reduction=reduction)

    def forward(
        self, logits: Float[Tensor, "*batch n"], target: Int[Tensor, "*batch"] | Bool[Tensor, "*batch n"]
    ) -> Tensor:
        return top_k_loss(logits, target, **self.settings)


class SetLoss(Module):
    """`otloss.losses.set_loss`.

    Args:
        epsilon, reduction: as for the function.

    Example:
        >>> import torch
        >>> SetLoss()(torch.tensor([[4.0, 1.0], [2.0, 0.0], [9.0, 9.0]]))
        tensor(3.)
    """

    def __init__(self, *, epsilon: float | None = None, reduction: str = "mean") -> None:
        super().__init__(epsilon=epsilon, reduction=reduction)

    def forward(
        self,
        cost: Float[Tensor, "*batch n m"],
        unmatched: Float[Tensor, "*batch n"] | None = None,
        *,
        sizes: Int[Tensor, "*batch 2"] | None = None,
    ) -> Tensor:
        return set_loss(cost, unmatched, sizes=sizes, **self.settings)


class Crps(Loss):
    """`otloss.losses.crps`.

    Args:
        fair: as for the function.
        reduction: "mean", "sum" or "none".

    Example:
        >>> import torch
        >>> Crps()(torch.tensor([[1.0, 2.0, 6.0], [3.0, 3.0, 3.0]]), torch.tensor([2.0, 5.0]))
        tensor(1.2778)
    """

    def __init__(self, *, fair: bool = False, reduction: str = "mean") -> None:
        super().__init__(reduction, fair=fair)

    def forward(
        self,
        ensemble: Float[Tensor, "*batch members"],
        observation: Float[Tensor, "*batch"],
        weights: Float[Tensor, "*batch members"] | None = None,
    ) -> Tensor:
        return self.reduced(crps(ensemble, observation, weights, **self.settings))


class JdotLoss(Module):
    """`otloss.losses.jdot_loss`; a pair of batches has one value.

    Args:
        feature_weight, label_weight, epsilon, marginal_penalty: as for the function.

    Example:
        >>> import torch
        >>> source, target = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.2], [0.1]])
        >>> JdotLoss()(source, target, torch.tensor([0, 1]), torch.tensor([[0.0, 3.0], [3.0, 0.0]]))
        tensor(0.0736)
    """

    def __init__(
        self,
        *,
        feature_weight: float = 1.0,
        label_weight: float = 1.0,
        epsilon: float | None = None,
        marginal_penalty: float | None = None,
    ) -> None:
        super().__init__(
            feature_weight=feature_weight, label_weight=label_weight, epsilon=epsilon,
            marginal_penalty=marginal_penalty,
        )  # fmt: skip

    def forward(
        self,
        source: Float[Tensor, "n d"],
        target: Float[Tensor, "m d"],
        labels: Int[Tensor, " n"],
        logits: Float[Tensor, "m classes"],
    ) -> Tensor:
        return jdot_loss(source, target, labels, logits, **self.settings)
