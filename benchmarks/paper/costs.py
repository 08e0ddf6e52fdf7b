"""The transport cost that an arm names."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from otloss_llm.costs.choice import NumberSettings, choose_cost
from otloss_llm.costs.embedding import EmbeddingCost
from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.models.heads import find_head

COST_SOURCES = ("all-but-the-top", "raw", "as-is", "random", "shuffled")


def named_source(source: str | None) -> str:
    """The source of the embedding cost by name, as in `load_cost`: None is the first of `COST_SOURCES`."""
    return COST_SOURCES[0] if source is None else source


def load_cost(
    source: str | None,
    model: Any,
    *,
    seed: int = 0,
    kind: str = "embedding",
    tokenizer: Any = None,
    numbers: NumberSettings | None = None,
) -> TokenCost:
    """A vocabulary cost for `model`.

    Args:
        source: of the embedding: "all-but-the-top" or None (the model's own head as it is now, without its leading
            directions), "raw" (all of it, the cost of the paper), "as-is" (the same, with near-duplicate rows kept),
            "random" or "shuffled" (controls, drawn with `seed`), or a `.npy` file of shape (V, d), which is taken as it
            is.
        seed: of the random and shuffled controls, of embeddings and of values.
        kind, tokenizer, numbers: as in `otloss_llm.costs.choice.choose_cost`; the kind "number" reads no embedding.
    """
    return choose_cost(
        kind, embedding=lambda: _embedding(named_source(source), model, seed), tokenizer=tokenizer,
        vocab_size=find_head(model).weight.shape[0], numbers=numbers, seed=seed,
    )  # fmt: skip


def _embedding(source: str, model: Any, seed: int) -> EmbeddingCost:
    generator = torch.Generator().manual_seed(seed)
    if source in ("as-is", "random"):
        own = EmbeddingCost.from_model(model, near_duplicates="keep")
        return own if source == "as-is" else own.random_like(generator)
    if source in COST_SOURCES:
        own = EmbeddingCost.from_model(model, directions=None if source == "all-but-the-top" else 0)
        return own.shuffled(generator) if source == "shuffled" else own
    return EmbeddingCost(torch.from_numpy(np.load(source, allow_pickle=False)))
