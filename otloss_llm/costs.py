"""Costs between the tokens of a vocabulary, for objectives that measure how far a prediction misses.

`EmbeddingCost` is `c(i, j) = 1 - cos(e_i, e_j)`, e the rows of a frozen language-model head (arXiv 2310.04691).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import check_floating
from otloss.costs import CosineCost
from otloss_llm.heads import find_head

if TYPE_CHECKING:
    from torch import nn


class EmbeddingCost(CosineCost):
    """Cosine cost of a vocabulary embedding that is always detached: training never moves the geometry it is judged by.

    It is no module and belongs to none, so it enters no checkpoint and no optimizer.

    Args:
        embedding: `(V, d)`, copied without its graph. Zero rows (padding) cost 1 to every other token; rows of one
            direction (duplicate tokens) cost 0 to each other. A sharded one (DTensor) is gathered: every process
            has to make the call.

    Example:
        >>> EmbeddingCost(torch.eye(3)).rows(torch.tensor([1]))
        tensor([[1., 0., 1.]])
    """

    def __init__(self, embedding: Float[Tensor, "vocab width"]) -> None:
        embedding = check_floating("embedding", embedding).detach()
        if hasattr(embedding, "full_tensor"):
            embedding = embedding.full_tensor()
        super().__init__(embedding)  # normalising copies
        self._rounding = 16 * torch.finfo(self.dtype).eps  # of these rows, whatever dtype they are moved to later

    def rows(
        self, index: Int[Tensor, " picked"], *, out: Float[Tensor, " entries"] | None = None
    ) -> Float[Tensor, "picked vocab"]:
        """Return the costs C[index, :]; what rounding leaves between rows of one direction is 0.

        Vocabularies hold duplicates (reserved tokens). A noisy 6e-8 in place of 0 would make the ratio nll / D of a
        prediction split between duplicates 1e7, and its gradient noise of full size.
        """
        rows = torch.threshold_(self._one_minus_cosine(index, out), self._rounding, 0.0)
        return rows.scatter_(1, index.unsqueeze(1), 0.0)

    @classmethod
    def from_model(cls, model: nn.Module) -> EmbeddingCost:
        """Copy and freeze the output embedding (head) of a causal LM of transformers: tied, resized or PEFT-wrapped.

        Args:
            model: has `get_output_embeddings()`.

        Raises:
            TypeError, ValueError: the model has no head, or one that cannot be read, named in the message.
        """
        return cls(find_head(model).weight)

    def random_like(self, generator: torch.Generator | None = None) -> EmbeddingCost:
        """The control without semantics: Gaussian rows of the same shape, so that c is near 1 between all tokens."""
        unit = self.unit
        return EmbeddingCost(torch.randn(unit.shape, generator=generator, dtype=unit.dtype).to(unit.device))

    def shuffled(self, generator: torch.Generator | None = None) -> EmbeddingCost:
        """The control with the same geometry but tokens assigned to it at random."""
        order = torch.randperm(self.unit.shape[0], generator=generator).to(self.unit.device)
        return EmbeddingCost(self.unit[order])
