"""Load models, tokenizers, costs and text from what a command line names, with errors that say what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from otloss_llm.costs import EmbeddingCost
from otloss_llm.data import PackedBlocks, read_texts, split_blocks
from otloss_llm.heads import find_head

COST_SOURCES = ("model", "random", "shuffled")


def load_model(path: str, **kwargs: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained(path)`, refusing what is not there or cannot be used by name.

    Raises:
        FileNotFoundError: neither a folder with a model nor a reachable model of the hub.
        ValueError: a model that is no causal language model.
    """
    from transformers import AutoModelForCausalLM

    return _from_pretrained(AutoModelForCausalLM, path, "model", **kwargs)


def load_tokenizer(path: str) -> Any:
    """`AutoTokenizer.from_pretrained(path)`, with the errors of `load_model`."""
    from transformers import AutoTokenizer

    return _from_pretrained(AutoTokenizer, path, "tokenizer")


def load_model_and_tokenizer(path: str, tokenizer_path: str | None = None) -> tuple[Any, Any]:
    """A causal LM with its tokenizer; raises ValueError where the tokenizer has more tokens than the model."""
    model, tokenizer = load_model(path), load_tokenizer(tokenizer_path or path)
    vocab = find_head(model).weight.shape[0]
    if len(tokenizer) > vocab:
        raise ValueError(
            f"the tokenizer of {tokenizer_path or path!r} has {len(tokenizer)} tokens, the model {path!r} only "
            f"{vocab}; give the model's own tokenizer, or resize the model's embeddings and save it."
        )
    return model, tokenizer


def _from_pretrained(kind: Any, path: str, what: str, **kwargs: Any) -> Any:
    local = Path(path).expanduser()
    if local.is_dir() and not any(local.glob("*.json")):
        raise FileNotFoundError(f"{path!r} is a folder without a {what}: expected config.json and its files in it.")
    try:
        return kind.from_pretrained(str(local) if local.is_dir() else path, **kwargs)
    except OSError as error:
        if local.is_dir():
            raise ValueError(f"the {what} in {path!r} cannot be loaded: {error}") from error
        raise FileNotFoundError(
            f"no {what} {path!r}: there is no such folder here, and the Hugging Face hub gave none "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Check the path, or the name and the connection."
        ) from error
    except (ValueError, KeyError) as error:
        raise ValueError(f"the {what} {path!r} cannot be used as a causal language model: {error}") from error


def load_cost(source: str, model: Any, *, seed: int = 0) -> EmbeddingCost:
    """A vocabulary cost for `model`.

    Args:
        source: "model" (its own head as it is now), "random" or "shuffled" (the controls, drawn with `seed`), a `.npy`
            file of shape (V, d), or a model (folder or name) whose head is taken.
        model: the model that will be trained; the cost must be over its vocabulary.
        seed: of the random and shuffled controls.

    Raises:
        ValueError: an embedding of another vocabulary, or one that is not a (V, d) array of finite numbers.
        FileNotFoundError: a path that is not there.
    """
    generator = torch.Generator().manual_seed(seed)
    if source in COST_SOURCES:
        own = EmbeddingCost.from_model(model)
        return {"model": lambda: own, "random": lambda: own.random_like(generator),
                "shuffled": lambda: own.shuffled(generator)}[source]()  # fmt: skip
    if source.endswith(".npy"):
        if not Path(source).is_file():
            raise FileNotFoundError(
                f"no embedding file {source!r}; expected a .npy array of shape (vocabulary, width)."
            )
        embedding = torch.as_tensor(np.load(source, allow_pickle=False))
        cost = EmbeddingCost(embedding.float() if not embedding.is_floating_point() else embedding)
    else:
        cost = EmbeddingCost.from_model(load_model(source))
    vocab = find_head(model).weight.shape[0]
    if cost.shape[0] != vocab:
        raise ValueError(
            f"the cost embedding {source!r} is over a vocabulary of {cost.shape[0]} tokens, the model has {vocab}; "
            "take it from a model with the same tokenizer."
        )
    return cost


def load_blocks(
    tokenizer: Any,
    *,
    train: str,
    validation: str | None,
    test: str | None,
    block_size: int,
    validation_fraction: float,
    test_fraction: float,
    text_column: str = "text",
) -> tuple[PackedBlocks, PackedBlocks | None, PackedBlocks | None]:
    """Packed training, validation and test blocks; a part without a source of its own is cut off the end of `train`."""
    blocks = PackedBlocks.from_texts(read_texts(train, text_column=text_column), tokenizer, block_size)
    first, second, third = split_blocks(
        blocks,
        validation_fraction=0.0 if validation else validation_fraction,
        test_fraction=0.0 if test else test_fraction,
    )
    parts: list[PackedBlocks | None] = []
    for source, split, cut in ((validation, "validation", second), (test, "test", third)):
        if source is None:
            parts.append(cut if len(cut) else None)
        else:
            texts = read_texts(source, split=split, text_column=text_column)
            parts.append(PackedBlocks.from_texts(texts, tokenizer, block_size))
    return first, parts[0], parts[1]
