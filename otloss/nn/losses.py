"""Modules of the losses: ordered classes, histograms, numbers, clouds, sets, texts, ensembles and two domains."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

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
from otloss.losses.clouds import check_options, cloud_loss
from otloss.nn.base import Loss, Module


class OrdinalLoss(Module, function=ordinal_loss, inputs=("logits", "target", "sample_weight")):
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


class ThresholdLoss(Module, function=threshold_loss, inputs=("logits", "target", "sample_weight")):
    """`otloss.losses.threshold_loss` of all thresholds (CORAL behind a `CumulativeLinkHead`) or the immediate ones.

    Example:
        >>> import torch
        >>> loss = ThresholdLoss(kind="immediate")
        >>> loss(torch.zeros(1, 3), torch.tensor([2]))
        tensor(1.0986)
    """


class HistogramLoss(Module, function=histogram_loss, inputs=("logits", "target", "sample_weight")):
    """`otloss.histogram_loss` with bins.

    Example:
        >>> import torch
        >>> loss = HistogramLoss(bins=torch.tensor([0.0, 10.0, 20.0]), encoding="one_hot")
        >>> loss(torch.zeros(1, 2), torch.tensor([19.0]))
        tensor(2.5000)
        >>> loss.mean(torch.zeros(1, 2))
        tensor([10.])
    """

    def mean(self, logits: Float[Tensor, "*batch bins"]) -> Float[Tensor, "*batch"]:
        """Return `otloss.losses.histogram_mean` of predicted histograms."""
        return histogram_mean(logits, self.settings["bins"])


class NumberTokenLoss(Module, function=number_token_loss, inputs=("logits", "labels", "sample_weight")):
    """`otloss.number_token_loss` with the values of the tokens.

    Example:
        >>> import torch
        >>> loss = NumberTokenLoss(torch.tensor([5.0, 6.0, 9.0, float("nan")]))
        >>> loss(torch.tensor([[0.0, 2.0, 0.0, 0.0]]), torch.tensor([0]))
        tensor(1.9712)
    """


class CloudLoss(Loss, function=cloud_loss, inputs=("x", "y", "a", "b", "mask_x", "mask_y", "generator")):
    """`otloss.cloud_loss` between clouds of points.

    Example:
        >>> import torch
        >>> loss = CloudLoss(blur=0.1)
        >>> loss(torch.zeros(2, 3), torch.ones(4, 3))
        tensor(1.5000)
    """

    def _prepared(self, settings: dict[str, Any]) -> dict[str, Any]:
        divergence = {name: settings[name] for name in ("epsilon", "blur", "marginal_penalty", "tolerance")}
        sliced = {"projections": settings["projections"]}
        check_options(settings["kind"], settings["empty"], settings["metric"], divergence=divergence, sliced=sliced)
        return settings


class SetLoss(Module, function=set_loss, inputs=("cost", "unmatched", "sizes")):
    """`otloss.losses.set_loss`.

    Example:
        >>> import torch
        >>> SetLoss()(torch.tensor([[4.0, 1.0], [2.0, 0.0], [9.0, 9.0]]))
        tensor(3.)
    """


class Crps(Loss, function=crps, inputs=("ensemble", "observation", "weights")):
    """`otloss.losses.crps`.

    Example:
        >>> import torch
        >>> Crps()(torch.tensor([[1.0, 2.0, 6.0], [3.0, 3.0, 3.0]]), torch.tensor([2.0, 5.0]))
        tensor(1.2778)
    """


class JdotLoss(Module, function=jdot_loss, inputs=("source", "target", "labels", "logits")):
    """`otloss.losses.jdot_loss`; a pair of batches has one value.

    Example:
        >>> import torch
        >>> source, target = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.2], [0.1]])
        >>> JdotLoss()(source, target, torch.tensor([0, 1]), torch.tensor([[0.0, 3.0], [3.0, 0.0]]))
        tensor(0.0736)
    """


class DocumentDistance(Loss, function=document_distance, inputs=("p", "q", "ids_p", "ids_q")):
    """`otloss.losses.document_distance` with vectors (V, d) of the words; a `torch.nn.Parameter` is trained.

    Example:
        >>> import torch
        >>> distance = DocumentDistance(torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]]))
        >>> distance(ids_p=torch.tensor([0, 0, -1]), ids_q=torch.tensor([1, 2]))
        tensor(3.)
    """

    def forward(self, p: Tensor | None = None, q: Tensor | None = None, **ids: Tensor | None) -> Tensor:
        return super().forward(p, q, **ids)


class NgramDistance(Loss, function=ngram_distance, inputs=("x", "y", "mask_x", "mask_y")):
    """`otloss.losses.ngram_distance`.

    Example:
        >>> import torch
        >>> words = torch.eye(4)
        >>> NgramDistance(n=2)(words, words[[1, 0, 3, 2]])
        tensor(0.6667)
    """
