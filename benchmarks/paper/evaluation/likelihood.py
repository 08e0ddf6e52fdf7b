"""The likelihood of given tokens under a causal language model: of another model's samples, or of labels.

Nats per token can be compared only between models with one tokenizer; `score_texts` also gives nats per character and
bits per byte, which can be compared between any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import log
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import check_count
from otloss_llm.evaluation.perplexity import check_fit
from otloss_llm.losses.positions import IGNORE_INDEX
from otloss_llm.losses.token_loss import token_loss
from otloss_llm.models.heads import evaluation_mode
from otloss_llm.objectives import MLE

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class SequenceScores:
    """Scores per sequence: `nll` (sequences,) float64, summed over its scored tokens; `tokens` (sequences,) int64."""

    nll: Float[Tensor, " sequences"]
    tokens: Int[Tensor, " sequences"]

    @property
    def mean_nll(self) -> float:
        """Nats per token over all tokens of all sequences."""
        return float(self.nll.sum() / self.tokens.sum())

    @property
    def perplexity(self) -> float:
        """exp(mean_nll)."""
        return _exp(self.mean_nll)


@dataclass(frozen=True)
class TextScores:
    """Scores of texts under a judge; `nll` is the sum in nats, the counts are of the scored text alone."""

    nll: float
    tokens: int
    characters: int
    bytes: int

    @property
    def nats_per_token(self) -> float:
        """Mean over the judge's own tokens."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(nats_per_token)."""
        return _exp(self.nats_per_token)

    @property
    def bits_per_byte(self) -> float:
        """Comparable between judges with different tokenizers; bytes of UTF-8."""
        return self.nll / log(2) / self.bytes


def sequence_nll(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    *,
    prefix_lengths: Sequence[int] | None = None,
    batch_size: int = 8,
    progress: bool = True,
) -> SequenceScores:
    """Return scores of token sequences of unequal length under a model with the same tokenizer.

    The first `prefix_lengths[i]` tokens of sequence i are context only: at least 1, the default, because the first
    token has no context; the whole length leaves nothing to score, which counts as 0 nats over 0 tokens.

    Raises ValueError if no token is left to score, a sequence is longer than the model's context, a prefix does
    not fit, or an id lies outside the vocabulary.
    """
    check_count("batch_size", batch_size)
    prefixes = [1] * len(sequences) if prefix_lengths is None else list(prefix_lengths)
    _check_sequences(model, sequences, prefixes)
    tokens = torch.tensor([len(ids) for ids in sequences]) - torch.tensor(prefixes)
    nll = torch.zeros(len(sequences), dtype=torch.float64)
    # Sorted by length, so that little of a batch is padding.
    order = sorted((i for i in range(len(sequences)) if tokens[i] > 0), key=lambda i: len(sequences[i]))
    starts = range(0, len(order), batch_size)
    with evaluation_mode(model):
        for start in _with_bar(starts, "scoring", progress):
            rows = order[start : start + batch_size]
            ids, mask = padded([sequences[i] for i in rows])
            labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
            for row, i in enumerate(rows):
                labels[row, : prefixes[i]] = IGNORE_INDEX
            nll[rows] = _nll(model, ids, labels, mask).sum(dim=1, dtype=torch.float64).cpu()
    return SequenceScores(nll, tokens)


def score_texts(
    judge: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    prompts: Sequence[str] | None = None,
    batch_size: int = 8,
    progress: bool = True,
) -> TextScores:
    """Return scores of texts, whatever model wrote them, under a judge with a tokenizer of its own.

    Each text is tokenised anew, with BOS (else EOS) before it as the first token's context. With `prompts`, text i is
    the continuation of `prompts[i]`, which is context only; a token that straddles the border is scored. The end of
    the text is not scored, since each judge marks it by another token.

    Raises ValueError if no text is left to score, a text is longer than the judge's context, or the tokenizer has
    neither BOS nor EOS.
    """
    if prompts is not None and len(prompts) != len(texts):
        raise ValueError(f"there are {len(prompts)} prompts for {len(texts)} texts; give one per text, '' for none.")
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if first is None:
        raise ValueError("the judge's tokenizer has neither BOS nor EOS for the first token's context; set one first.")
    sequences, prefixes = [], []
    for prompt, text in zip(prompts or [""] * len(texts), texts, strict=True):
        ids, prompt_tokens = _text_ids(tokenizer, prompt, text)
        sequences.append([first, *ids])
        prefixes.append(1 + prompt_tokens)
    scores = sequence_nll(judge, sequences, prefix_lengths=prefixes, batch_size=batch_size, progress=progress)
    size = sum(len(text.encode()) for text in texts)
    return TextScores(float(scores.nll.sum()), int(scores.tokens.sum()), sum(map(len, texts)), size)


def tempered(logits: Float[Tensor, "*batch vocab"], temperature: float) -> Float[Tensor, "*batch vocab"]:
    """Return the logits of the distribution at a temperature; 1 leaves them, dtype included, as they are."""
    return logits if temperature == 1.0 else logits.float() / temperature


def _nll(model: Any, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Return the nll of each token but the first; 0 for ignored labels."""
    logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), use_cache=False).logits
    return token_loss(logits[:, :-1], labels[:, 1:].to(logits.device), objective=MLE(), ignore_index=IGNORE_INDEX).nll


def _text_ids(tokenizer: Any, prompt: str, text: str) -> tuple[list[int], int]:
    """Return ids of `prompt + text`, and how many of the first of them lie wholly within the prompt."""
    settings = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
    if not prompt:
        return tokenizer(text, **settings)["input_ids"], 0
    if not tokenizer.is_fast:
        raise ValueError("prompts need a fast tokenizer, which says where its tokens lie; load one, or omit prompts.")
    encoded = tokenizer(prompt + text, return_offsets_mapping=True, **settings)
    within = takewhile(lambda span: span[1] <= len(prompt), encoded["offset_mapping"])
    return encoded["input_ids"], sum(1 for _ in within)


def _check_sequences(model: Any, sequences: Sequence[Sequence[int]], prefixes: Sequence[int]) -> None:
    if len(prefixes) != len(sequences):
        raise ValueError(f"there are {len(prefixes)} prefix lengths for {len(sequences)} sequences; give one for each.")
    for i, (ids, prefix) in enumerate(zip(sequences, prefixes, strict=True)):
        if not 1 <= prefix <= len(ids):
            raise ValueError(
                f"sequence {i} has {len(ids)} tokens and prefix length {prefix}, expected 1 <= prefix <= tokens; "
                f"begin it with BOS or EOS, or leave it out."
            )
    if all(len(ids) == prefix for ids, prefix in zip(sequences, prefixes, strict=True)):
        raise ValueError(f"none of the {len(sequences)} sequences has a token to score; give at least one.")
    low, high = min(map(min, sequences)), max(map(max, sequences))
    check_fit(model, max(map(len, sequences)), low, high)


def padded(sequences: Sequence[Sequence[int]]) -> tuple[Int[Tensor, "rows longest"], Int[Tensor, "rows longest"]]:
    """Return ids and mask, padded on the right: no scored token attends to padding, and positions count from 0."""
    longest = max(len(ids) for ids in sequences)
    ids, mask = (torch.zeros(len(sequences), longest, dtype=torch.long) for _ in range(2))
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.as_tensor(sequence)
        mask[row, : len(sequence)] = 1
    return ids, mask


def _with_bar(items: Sequence[Any], name: str, progress: bool) -> Any:
    from tqdm import tqdm

    return tqdm(items, desc=name, disable=not progress, delay=2.0, leave=False)


def _exp(nats: float) -> float:
    return float(torch.tensor(nats, dtype=torch.float64).exp())  # inf rather than OverflowError
