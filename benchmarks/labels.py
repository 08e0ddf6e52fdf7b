"""Labels of benchmarks: tokens of real text, or distributions over the vocabulary.

The time of EMO's cost rows depends on the share u of distinct labels among the tokens, so labels have to repeat as in
real text: blocks of 256 consecutive tokens from random places of a text, by the tokenizer of GPT-2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measure import Settings

BLOCK = 256


@dataclass(frozen=True)
class Labels:
    """A source of labels, `draw(tokens, seed)`, and its name in tables."""

    draw: Callable[[int, int], Tensor]
    name: str


def share_distinct(labels: Tensor) -> float:
    """u, the number of distinct labels over the number of labels."""
    return len(labels.unique()) / len(labels)


def zipf(vocab: int) -> Labels:
    """Token ids with probability proportional to 1 / rank."""
    weights = 1.0 / torch.arange(1, vocab + 1, dtype=torch.float64)

    def draw(tokens: int, seed: int) -> Tensor:
        return torch.multinomial(weights, tokens, replacement=True, generator=torch.Generator().manual_seed(seed))

    return Labels(draw, "Zipf labels")


def uniform(kinds: int) -> Labels:
    """Token ids uniform over the first `kinds`."""

    def draw(tokens: int, seed: int) -> Tensor:
        return torch.randint(kinds, (tokens,), generator=torch.Generator().manual_seed(seed))

    return Labels(draw, f"labels uniform over {kinds} ids")


@lru_cache(maxsize=2)
def _token_ids(data: Path, text: str) -> Tensor:
    from tokenizers import ByteLevelBPETokenizer

    folder = data / "tokenizers/gpt2"
    tokenizer = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    return torch.tensor(tokenizer.encode((data / "text" / f"{text}.txt").read_text(encoding="utf-8")).ids)


def from_text(data: Path, text: str, vocab: int) -> Labels:
    """Blocks of consecutive tokens, without ids above the vocabulary."""
    ids = _token_ids(data, text)
    known = ids[ids < vocab]

    def draw(tokens: int, seed: int) -> Tensor:
        block = min(BLOCK, tokens)
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(known) - block + 1, (-(-tokens // block), 1), generator=generator)
        return known[starts + torch.arange(block)].flatten()[:tokens].clone()

    dropped = f", {1 - len(known) / len(ids):.0%} of ids >= V dropped" if len(known) < len(ids) else ""
    return Labels(draw, f"GPT-2 tokens of {text}{dropped}")


def labels_for(settings: Settings, vocab: int) -> Labels:
    """Labels from the text if `settings.data` is given, else Zipf labels."""
    return zipf(vocab) if settings.data is None else from_text(settings.data, settings.text, vocab)
