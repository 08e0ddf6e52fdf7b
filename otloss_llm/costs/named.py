"""The cost of an objective by name, as the command line takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otloss_llm.costs.choice import NumberSettings, choose_cost
from otloss_llm.costs.embedding import EmbeddingCost
from otloss_llm.costs.tokenizer_numbers import tokenizer_of
from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.models.heads import find_head

COST_SOURCES = ("all-but-the-top", "raw", "as-is", "random", "shuffled")


def load_cost(
    source: str,
    model: Any,
    *,
    seed: int = 0,
    kind: str = "embedding",
    tokenizer: Any = None,
    numbers: NumberSettings | None = None,
) -> TokenCost:
    """A vocabulary cost for `model`.

    Args:
        source: of the embedding: "all-but-the-top" (the model's own head as it is now, without its leading directions),
            "raw" (all of it, the cost of the paper), "as-is" (the same, with near-duplicate rows kept), "random" or
            "shuffled" (controls, drawn with `seed`), a `.npy` file of shape (V, d), which is taken as it is, or a model
            (folder or name) whose head is taken without its leading directions.
        model: the model that will be trained; the cost is over its vocabulary.
        seed: of the random and shuffled controls, of embeddings and of values.
        kind, tokenizer, numbers: as in `otloss_llm.costs.choice.choose_cost`. The tokenizer, or the one of a processor,
            is compared with the tokenizer of a model whose head is taken.

    Raises:
        ValueError: the embedding has another vocabulary (or other tokens) or is not a (V, d) array of finite numbers,
            or the tokenizer has no number tokens.
        FileNotFoundError: there is no such file.
    """
    tokenizer = tokenizer_of(tokenizer)
    return choose_cost(
        kind, embedding=lambda: _load_embedding(source, model, seed, tokenizer), tokenizer=tokenizer,
        vocab_size=find_head(model).weight.shape[0], numbers=numbers, seed=seed,
    )  # fmt: skip


def _load_embedding(source: str, model: Any, seed: int, tokenizer: Any) -> EmbeddingCost:
    generator = torch.Generator("cpu").manual_seed(seed)
    if source in ("as-is", "random"):
        own = EmbeddingCost.from_model(model, near_duplicates="keep")
        return own if source == "as-is" else own.random_like(generator)
    if source in COST_SOURCES:
        own = EmbeddingCost.from_model(model, directions=None if source == "all-but-the-top" else 0)
        return own.shuffled(generator) if source == "shuffled" else own
    cost = EmbeddingCost(_read_array(source)) if source.endswith(".npy") else _cost_of_model(source, tokenizer)
    vocab = find_head(model).weight.shape[0]
    if cost.shape[0] != vocab:
        raise ValueError(
            f"the cost embedding {source!r} is over a vocabulary of {cost.shape[0]} tokens, the model has {vocab}; "
            "take it from a model with the same tokenizer."
        )
    return cost


def _cost_of_model(source: str, tokenizer: Any) -> EmbeddingCost:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(source)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # the last two for files that are cut off
        names = ", ".join(COST_SOURCES)
        raise ValueError(f"cost_embedding is {source!r}, expected {names}, a .npy file, or a model: {error}") from error
    try:
        other = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError):  # a model that was saved without its tokenizer
        other = None
    if None not in (other, tokenizer) and other.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"the cost embedding {source!r} is of a model with another tokenizer: its rows belong to other tokens; "
            "take it from a model with the same tokenizer."
        )
    return EmbeddingCost.from_model(model, directions=None)


def _read_array(source: str) -> Tensor:
    path = Path(source).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no embedding file {source!r}; expected a .npy array of shape (vocabulary, width).")
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{source!r} is no .npy array ({error}); write it with numpy.save.") from error
    if array.ndim != 2 or not np.isrealobj(array) or not np.issubdtype(array.dtype, np.number) or 0 in array.shape:
        raise ValueError(
            f"{source!r} has shape {array.shape} and dtype {array.dtype}, expected real numbers (vocabulary, width)."
        )
    wrong = np.flatnonzero(~np.isfinite(array).all(axis=1))
    if len(wrong):
        raise ValueError(
            f"{source!r} has NaN or infinity in {len(wrong)} of {len(array)} rows, the first is row {wrong[0]}; "
            "expected finite numbers (a row of zeros stands for a token without a meaning)."
        )
    array = array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
    return torch.as_tensor(array, device="cpu")
