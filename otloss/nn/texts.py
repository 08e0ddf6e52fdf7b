"""Modules of the distances between texts."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss.losses import document_distance, ngram_distance
from otloss.nn.base import Loss


class DocumentDistance(Loss):
    """`otloss.losses.document_distance` with held vectors of the words.

    Args:
        embedding: (V, d), the vector of each word; a `torch.nn.Parameter` is trained.
        reduction: "mean", "sum" or "none".

    Example:
        >>> import torch
        >>> distance = DocumentDistance(torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]]))
        >>> distance(ids_p=torch.tensor([0, 0, -1]), ids_q=torch.tensor([1, 2]))
        tensor(3.)
    """

    def __init__(self, embedding: Float[Tensor, "vocabulary d"], *, reduction: str = "mean") -> None:
        super().__init__(reduction, embedding=embedding)

    def forward(
        self,
        p: Float[Tensor, "*batch n"] | None = None,
        q: Float[Tensor, "*batch m"] | None = None,
        *,
        ids_p: Int[Tensor, "*batch n"] | None = None,
        ids_q: Int[Tensor, "*batch m"] | None = None,
    ) -> Tensor:
        return self.reduced(document_distance(p, q, ids_p=ids_p, ids_q=ids_q, **self.settings))


class NgramDistance(Loss):
    """`otloss.losses.ngram_distance`.

    Args:
        n, order_weight, metric: as for the function.
        reduction: "mean", "sum" or "none".

    Example:
        >>> import torch
        >>> words = torch.eye(4)
        >>> NgramDistance(n=2)(words, words[[1, 0, 3, 2]])
        tensor(0.6667)
    """

    def __init__(self, *, n: int, order_weight: float = 0.0, metric: str = "cosine", reduction: str = "mean") -> None:
        super().__init__(reduction, n=n, order_weight=order_weight, metric=metric)

    def forward(
        self,
        x: Float[Tensor, "*batch length d"],
        y: Float[Tensor, "*batch other d"],
        *,
        mask_x: Bool[Tensor, "*batch length"] | None = None,
        mask_y: Bool[Tensor, "*batch other"] | None = None,
    ) -> Tensor:
        return self.reduced(ngram_distance(x, y, mask_x=mask_x, mask_y=mask_y, **self.settings))
