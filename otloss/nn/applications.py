"""Modules of the applications: clouds, sorting, sets, texts, ensembles and two domains."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from otloss.applications.clouds import check_options, cloud_loss
from otloss.applications.sorting import soft_rank, soft_sort, soft_top_k
from otloss.losses import (
    crps,
    document_distance,
    jdot_loss,
    ngram_distance,
    set_loss,
)
from otloss.nn.base import Loss, Module


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


class SoftSort(Module, function=soft_sort, inputs=("x",)):
    """`otloss.soft_sort` over the last axis.

    Example:
        >>> import torch
        >>> SoftSort(epsilon=1e-3)(torch.tensor([3.0, 1.0, 2.0]))
        tensor([1., 2., 3.])
    """


class SoftRank(Module, function=soft_rank, inputs=("x",)):
    """`otloss.soft_rank` over the last axis.

    Example:
        >>> import torch
        >>> SoftRank(epsilon=1e-3)(torch.tensor([3.0, 1.0, 2.0]))
        tensor([3., 1., 2.])
    """


class SoftTopK(Module, function=soft_top_k, inputs=("x",)):
    """`otloss.soft_top_k` over the last axis.

    Example:
        >>> import torch
        >>> SoftTopK(k=1, epsilon=1e-3)(torch.tensor([3.0, 1.0, 2.0]))
        tensor([1., 0., 0.])
    """


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
