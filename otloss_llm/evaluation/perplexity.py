"""The likelihood of given tokens under a causal language model: of held-out text, or of another model's samples.

    q_t = softmax(logits_t / T)
    nll_t = -log q_t(y_t)      D_t = sum_{i != y_t} q_t(i) c(i, y_t)      perplexity = exp(mean of nll_t)

Means are over tokens, not over sequences or batches, and sums are kept in float64. Nats per token can be compared
only between models with one tokenizer; `score_texts` also gives nats per character and bits per byte, which can be
compared between any.
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

from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.data.blocks import PackedBlocks
from otloss_llm.losses.positions import IGNORE_INDEX, cost_positions
from otloss_llm.losses.token_loss import token_loss
from otloss_llm.models.heads import check_decoder_only, evaluation_mode
from otloss_llm.objectives import MLE

_LOGITS_AT_ONCE = 2**21  # 8 MiB in float32

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Perplexity:
    """Scores of a model on blocks: means over tokens, in nats and in units of the cost.

    The transport cost of a cost of numbers is the mean over number positions, None where there are none.
    """

    nll: float
    transport_cost: float | None
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return _exp(self.nll)


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
    """Scores of texts under a judge; `nll` is the sum in nats, the counts are those of the scored text alone."""

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
    def nats_per_character(self) -> float:
        """Comparable between judges with different tokenizers."""
        return self.nll / self.characters

    @property
    def bits_per_byte(self) -> float:
        """Comparable between judges with different tokenizers; bytes of UTF-8."""
        return self.nll / log(2) / self.bytes


def perplexity(
    model: PreTrainedModel,
    blocks: PackedBlocks | Int[Tensor, "blocks block_size"],
    *,
    batch_size: int = 8,
    cost: TokenCost | None = None,
    temperature: float = 1.0,
    progress: bool = True,
) -> Perplexity:
    """Return scores of a model on blocks of token ids: every token but the first of each block, which has no context.

    `blocks` is a `PackedBlocks` or integer ids `(blocks, block_size)`. With a vocabulary `cost` the mean transport
    cost is reported too. `temperature` is that of the scored distribution, above 0. The model runs in eval mode, and
    its mode is restored.

    Raises ValueError if the temperature is not positive, there is no block, a block is longer than the model's context,
    or an id lies outside its vocabulary.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_positions=8, n_embd=4, n_layer=1, n_head=1))
    >>> scores = perplexity(model, torch.arange(16).view(2, 8) % 10)
    >>> scores.tokens, 9 < scores.perplexity < 11
    (14, True)
    """
    ids = blocks.ids if isinstance(blocks, PackedBlocks) else blocks
    if ids.ndim != 2 or ids.is_floating_point() or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise ValueError(
            f"blocks has shape {tuple(ids.shape)} and dtype {ids.dtype}, expected integer ids (blocks, block_size), "
            f"one block of two tokens at least; PackedBlocks.from_texts makes them."
        )
    check_batch_size(batch_size)
    check_temperature(temperature)
    check_fit(model, ids.shape[1], int(ids.min()), int(ids.max()))
    nll = transport = 0.0
    scored = 0  # positions that the cost is about
    with evaluation_mode(model):
        for batch in _with_bar(ids.split(batch_size), "perplexity", progress):
            batch = batch.long()
            token_nll, token_cost = _score(model, batch, labels=batch, cost=cost, temperature=temperature)
            nll += float(token_nll.sum(dtype=torch.float64))
            if cost is not None and token_cost is not None:
                labels = batch[:, 1:].to(cost.device)
                transport += float(token_cost.sum(dtype=torch.float64))
                scored += int(cost_positions(cost, labels, torch.ones_like(labels, dtype=torch.bool)).sum())
    tokens = ids.shape[0] * (ids.shape[1] - 1)
    return Perplexity(nll / tokens, transport / scored if scored else None, tokens)


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

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_positions=8, n_embd=4, n_layer=1, n_head=1))
    >>> sequence_nll(model, [[0, 1, 2], [0, 3], [0, 1, 2, 3]], prefix_lengths=[1, 1, 3]).tokens
    tensor([2, 1, 1])
    """
    check_batch_size(batch_size)
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
            nll[rows] = _score(model, ids, labels=labels, mask=mask)[0].sum(dim=1, dtype=torch.float64).cpu()
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

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from otloss_llm.data.blocks import train_bpe_tokenizer
    >>> tokenizer = train_bpe_tokenizer(["one two three"], 257)
    >>> judge = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=16, n_embd=4, n_layer=1, n_head=1))
    >>> scores = score_texts(judge, tokenizer, [" two", " drei"], prompts=["one", "zwei"])
    >>> scores.tokens, scores.bytes, 7.9 < scores.bits_per_byte < 8.1
    (9, 9, True)
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


def context_length(model: torch.nn.Module) -> int | None:
    """Return the number of positions the model was built for; None if its configuration does not say."""
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return positions if positions is not None and positions > 0 else None  # XLNet says -1


def tempered(logits: Float[Tensor, "*batch vocab"], temperature: float) -> Float[Tensor, "*batch vocab"]:
    """Return the logits of the distribution at a temperature; 1 leaves them, dtype included, as they are."""
    return logits if temperature == 1.0 else logits.float() / temperature


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless a distribution can be scored at this temperature."""
    if not 0.0 < temperature < float("inf"):
        raise ValueError(
            f"temperature is {temperature}, expected a positive number: at 0 all but one token are impossible."
        )


def check_vocabulary(model: Any, low: int, high: int) -> None:
    """Raise ValueError unless ids from `low` to `high` lie in the model's vocabulary."""
    vocabulary = model.get_input_embeddings().num_embeddings
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"token ids run from {low} to {high}, outside the model's vocabulary of {vocabulary}; "
            f"was the text tokenised by another model's tokenizer?"
        )


def _score(
    model: Any,
    ids: Tensor,
    *,
    labels: Tensor,
    mask: Tensor | None = None,
    cost: TokenCost | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Return nll and transport cost of each token but the first; 0 for ignored labels."""
    check_decoder_only(model, "scores of text")
    mask = None if mask is None else mask.to(model.device)
    logits = model(input_ids=ids.to(model.device), attention_mask=mask, use_cache=False).logits
    labels = labels[:, 1:].to(logits.device)
    # A few sequences at a time, so that temporaries of the size of the logits stay in cache.
    count = max(1, _LOGITS_AT_ONCE // logits[0].numel())
    parts = [
        token_loss(tempered(z[:, :-1], temperature), y, objective=MLE(), cost=cost, ignore_index=IGNORE_INDEX)
        for z, y in zip(logits.split(count), labels.split(count), strict=True)
    ]
    nll = torch.cat([part.nll for part in parts])
    return nll, None if cost is None else torch.cat([part.cost for part in parts if part.cost is not None])


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


def check_batch_size(batch_size: int) -> None:
    """Raise ValueError unless the batch size is positive."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, expected 1 or more.")


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


def check_fit(model: Any, length: int, low: int, high: int) -> None:
    """Raise ValueError unless the model takes sequences of this length with ids from `low` to `high`."""
    context = context_length(model)
    if context is not None and length > context:
        raise ValueError(f"a sequence has {length} tokens, more than the model's context of {context}; shorten it.")
    check_vocabulary(model, low, high)


def _with_bar(items: Sequence[Any], name: str, progress: bool) -> Any:
    from tqdm import tqdm

    return tqdm(items, desc=name, disable=not progress, delay=2.0, leave=False)


def _exp(nats: float) -> float:
    return float(torch.tensor(nats, dtype=torch.float64).exp())  # inf rather than OverflowError
