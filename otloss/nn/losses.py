"""Modules of the losses over ordered classes, histograms and numbers."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from otloss.losses import histogram_loss, histogram_mean, number_token_loss, ordinal_loss, threshold_loss
from otloss.nn.base import Module


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
