"""Modules of the losses: ordered classes, histograms, numbers, clouds, sets, texts, ensembles and two domains."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from otloss.costs import Cost
from otloss.costs.points import Metric
from otloss.losses import (
    crps,
    document_distance,
    histogram_loss,
    histogram_mean,
    jdot_loss,
    ngram_distance,
    number_token_loss,
    ordinal_loss,
    set_loss,
    threshold_loss,
)
from otloss.losses.clouds import Clouds, Weights, check_options, cloud_loss
from otloss.nn.base import Loss, Module
from otloss.solvers.options import Penalty


class OrdinalLoss(Module):
    """`otloss.ordinal_loss` with class values or costs, and class weights.

    Begin with `OrdinalLoss(cross_entropy=0.2)` for few or imbalanced rows: the loss alone has small gradients where a
    prediction is far off, and learns slowly from them. Decode predictions by `otloss.losses.decode_classes(logits,
    "median")`, which has fewer errors of several classes than the argmax (docs/guide/ordinal.md).

    Example:
        >>> import torch
        >>> loss = OrdinalLoss(x=torch.tensor([0.0, 1.0, 4.0]), cross_entropy=0.1)
        >>> loss(torch.zeros(1, 3), torch.tensor([2]))
        tensor(1.5543)
    """

    def __init__(
        self,
        *,
        x: Tensor | None = None,
        power: float = 2,
        cost: Cost | Tensor | None = None,
        circular: bool = False,
        period: float | None = None,
        cross_entropy: float = 0.0,
        class_weight: Tensor | None = None,
        ignore_index: int | None = None,
        reduction: str = "mean",
        dim: int | None = None,
    ) -> None:
        super().__init__(locals())

    def forward(self, logits: Tensor, target: Tensor, *, sample_weight: Tensor | None = None) -> Tensor:
        return ordinal_loss(logits, target, sample_weight=sample_weight, **self.settings)


class ThresholdLoss(Module):
    """`otloss.losses.threshold_loss` of all thresholds (CORAL behind a `CumulativeLinkHead`) or the immediate ones.

    Example:
        >>> import torch
        >>> loss = ThresholdLoss(kind="immediate")
        >>> loss(torch.zeros(1, 3), torch.tensor([2]))
        tensor(1.0986)
    """

    def __init__(
        self,
        *,
        kind: str = "all",
        class_weight: Tensor | None = None,
        ignore_index: int | None = None,
        reduction: str = "mean",
        dim: int | None = None,
    ) -> None:
        super().__init__(locals())

    def forward(self, logits: Tensor, target: Tensor, *, sample_weight: Tensor | None = None) -> Tensor:
        return threshold_loss(logits, target, sample_weight=sample_weight, **self.settings)


class HistogramLoss(Module):
    """`otloss.histogram_loss` with bins.

    Example:
        >>> import torch
        >>> loss = HistogramLoss(bins=torch.tensor([0.0, 10.0, 20.0]), encoding="one_hot")
        >>> loss(torch.zeros(1, 2), torch.tensor([19.0]))
        tensor(2.5000)
        >>> loss.mean(torch.zeros(1, 2))
        tensor([10.])
    """

    def __init__(
        self,
        bins: Tensor,
        *,
        encoding: str = "two_hot",
        sigma: float | None = None,
        outside: str = "error",
        power: float = 2,
        cross_entropy: float = 0.0,
        reduction: str = "mean",
    ) -> None:
        super().__init__(locals())

    def forward(self, logits: Tensor, target: Tensor, *, sample_weight: Tensor | None = None) -> Tensor:
        return histogram_loss(logits, target, sample_weight=sample_weight, **self.settings)

    def mean(self, logits: Float[Tensor, "*batch bins"]) -> Float[Tensor, "*batch"]:
        """Return `otloss.losses.histogram_mean` of predicted histograms."""
        return histogram_mean(logits, self.settings["bins"])


class NumberTokenLoss(Module):
    """`otloss.number_token_loss` with the values of the tokens.

    Example:
        >>> import torch
        >>> loss = NumberTokenLoss(torch.tensor([5.0, 6.0, 9.0, float("nan")]))
        >>> loss(torch.tensor([[0.0, 2.0, 0.0, 0.0]]), torch.tensor([0]))
        tensor(1.9712)
    """

    def __init__(
        self,
        values: Tensor,
        *,
        form: str = "wasserstein",
        over: str = "vocabulary",
        scaling: str | None = None,
        squash: float | None = None,
        text: float | None = None,
        ignore_index: int | None = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(locals())

    def forward(self, logits: Tensor, labels: Tensor, *, sample_weight: Tensor | None = None) -> Tensor:
        return number_token_loss(logits, labels, sample_weight=sample_weight, **self.settings)


class CloudLoss(Loss):
    """`otloss.cloud_loss` between clouds of points.

    Example:
        >>> import torch
        >>> loss = CloudLoss(blur=0.1)
        >>> loss(torch.zeros(2, 3), torch.ones(4, 3))
        tensor(1.5000)
    """

    def __init__(
        self,
        *,
        kind: str = "divergence",
        metric: Metric = "sqeuclidean",
        epsilon: float | Tensor | None = None,
        blur: float | None = None,
        marginal_penalty: Penalty = None,
        tolerance: float | None = None,
        impl: str = "auto",
        projections: int | Tensor | None = None,
        empty: str = "error",
        reduction: str = "mean",
    ) -> None:
        super().__init__(locals())

    def forward(
        self,
        x: Clouds,
        y: Clouds,
        a: Weights = None,
        b: Weights = None,
        *,
        generator: torch.Generator | None = None,
        mask_x: Tensor | None = None,
        mask_y: Tensor | None = None,
    ) -> Tensor:
        return self._reduced(cloud_loss(x, y, a, b, generator=generator, mask_x=mask_x, mask_y=mask_y, **self.settings))

    def _prepared(self, settings: dict[str, Any]) -> dict[str, Any]:
        divergence = {name: settings[name] for name in ("epsilon", "blur", "marginal_penalty", "tolerance", "impl")}
        sliced = {"projections": settings["projections"]}
        check_options(settings["kind"], settings["empty"], settings["metric"], divergence=divergence, sliced=sliced)
        return settings


class SetLoss(Module):
    """`otloss.losses.set_loss`.

    Example:
        >>> import torch
        >>> SetLoss()(torch.tensor([[4.0, 1.0], [2.0, 0.0], [9.0, 9.0]]))
        tensor(3.)
    """

    def __init__(self, *, epsilon: float | None = None, reduction: str = "mean") -> None:
        super().__init__(locals())

    def forward(self, cost: Tensor, unmatched: Tensor | None = None, *, sizes: Tensor | None = None) -> Tensor:
        return set_loss(cost, unmatched, sizes=sizes, **self.settings)


class Crps(Loss):
    """`otloss.losses.crps`.

    Example:
        >>> import torch
        >>> Crps()(torch.tensor([[1.0, 2.0, 6.0], [3.0, 3.0, 3.0]]), torch.tensor([2.0, 5.0]))
        tensor(1.2778)
    """

    def __init__(self, *, fair: bool = False, reduction: str = "mean") -> None:
        super().__init__(locals())

    def forward(self, ensemble: Tensor, observation: Tensor, weights: Tensor | None = None) -> Tensor:
        return self._reduced(crps(ensemble, observation, weights, **self.settings))


class JdotLoss(Module):
    """`otloss.losses.jdot_loss`; a pair of batches has one value.

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
        marginal_penalty: Penalty = None,
    ) -> None:
        super().__init__(locals())

    def forward(self, source: Tensor, target: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
        return jdot_loss(source, target, labels, logits, **self.settings)


class DocumentDistance(Loss):
    """`otloss.losses.document_distance` with vectors (V, d) of the words; a `torch.nn.Parameter` is trained.

    Example:
        >>> import torch
        >>> distance = DocumentDistance(torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]]))
        >>> distance(ids_p=torch.tensor([0, 0, -1]), ids_q=torch.tensor([1, 2]))
        tensor(3.)
    """

    def __init__(self, embedding: Tensor, *, reduction: str = "mean") -> None:
        super().__init__(locals())

    def forward(
        self,
        p: Tensor | None = None,
        q: Tensor | None = None,
        *,
        ids_p: Tensor | None = None,
        ids_q: Tensor | None = None,
    ) -> Tensor:
        return self._reduced(document_distance(p, q, ids_p=ids_p, ids_q=ids_q, **self.settings))


class NgramDistance(Loss):
    """`otloss.losses.ngram_distance`.

    Example:
        >>> import torch
        >>> words = torch.eye(4)
        >>> NgramDistance(n=2)(words, words[[1, 0, 3, 2]])
        tensor(0.6667)
    """

    def __init__(self, *, n: int, order_weight: float = 0.0, metric: str = "cosine", reduction: str = "mean") -> None:
        super().__init__(locals())

    def forward(self, x: Tensor, y: Tensor, *, mask_x: Tensor | None = None, mask_y: Tensor | None = None) -> Tensor:
        return self._reduced(ngram_distance(x, y, mask_x=mask_x, mask_y=mask_y, **self.settings))
