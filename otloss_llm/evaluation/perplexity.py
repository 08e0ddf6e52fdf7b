"""Perplexity and mean transport cost of a causal language model on token ids.

    q_t = softmax(logits_t / T)
    nll_t = -log q_t(y_t)      D_t = sum_{i != y_t} q_t(i) c(i, y_t)      perplexity = exp(mean of nll_t)

Means are over tokens, not over sequences or batches, and sums are kept in float64. Nats per token can be compared
only between models with one tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import check_count, check_number
from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.losses.positions import cost_positions
from otloss_llm.losses.token_loss import token_loss
from otloss_llm.models.heads import (
    check_decoder_only,
    check_no_virtual_tokens,
    count_embeddings,
    evaluation_mode,
    passes_differ,
    text_config,
)
from otloss_llm.objectives import MLE

_LENGTH_OF_CHECK = 32
_LOGITS_AT_ONCE = 2**21  # 8 MiB in float32

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Perplexity:
    """Scores of a model on rows: means over tokens, in nats and in units of the cost.

    The transport cost of a cost of numbers is the mean over number positions, None where there are none.
    """

    nll: float
    transport_cost: float | None
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return _exp(self.nll)


def perplexity(
    model: PreTrainedModel,
    ids: Int[Tensor, "rows length"],
    *,
    batch_size: int = 8,
    cost: TokenCost | None = None,
    temperature: float = 1.0,
) -> Perplexity:
    """Return scores of a model on rows of token ids: every token but the first of each row, which has no context.

    Rows have one length, such as blocks of a text: padding would be scored. Texts of several lengths are one call each.
    With a vocabulary `cost` the mean transport cost is reported too. `temperature` divides the logits,
    above 0. The model runs in eval mode, and its mode is restored.

    Raises ValueError if the temperature is not positive, there is no row, a row is longer than the model's context,
    an id lies outside its vocabulary, some rows are padded, or the model sees the tokens that it has to predict, as an
    encoder does.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_positions=8, n_embd=4, n_layer=1, n_head=1))
    >>> scores = perplexity(model, torch.arange(16).view(2, 8) % 10)
    >>> scores.tokens, 9 < scores.perplexity < 11
    (14, True)
    """
    if not isinstance(ids, Tensor):
        raise TypeError(
            f"ids is a {type(ids).__name__}, expected a tensor (rows, length) of token ids; call torch.as_tensor on an "
            'array, and tokenizer(text, return_tensors="pt").input_ids on one text.'
        )
    if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise ValueError(
            f"ids has shape {tuple(ids.shape)} and dtype {ids.dtype}, expected integer ids (rows, length), one row of "
            "two tokens at least."
        )
    check_count("batch_size", batch_size)
    check_temperature(temperature)
    check_fit(model, ids.shape[1], int(ids.min()), int(ids.max()))
    _check_not_padded(model, ids)
    nll = transport = 0.0
    scored = 0  # positions that the cost is about
    with evaluation_mode(model):
        _check_causal(model, ids[:2, :_LENGTH_OF_CHECK].long())
        for batch in ids.split(batch_size):
            batch = batch.long()
            token_nll, token_cost = _score(model, batch, cost=cost, temperature=temperature)
            nll += float(token_nll.sum(dtype=torch.float64))
            if cost is not None and token_cost is not None:
                labels = batch[:, 1:].to(cost.device)
                transport += float(token_cost.sum(dtype=torch.float64))
                scored += int(cost_positions(cost, labels, torch.ones_like(labels, dtype=torch.bool)).sum())
    tokens = ids.shape[0] * (ids.shape[1] - 1)
    return Perplexity(nll / tokens, transport / scored if scored else None, tokens)


def context_length(model: torch.nn.Module) -> int | None:
    """Return the number of positions the model was built for; None if its configuration does not say.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> context_length(GPT2LMHeadModel(GPT2Config(vocab_size=10, n_positions=8, n_embd=4, n_layer=1, n_head=1)))
    8
    """
    config: Any = getattr(model, "config", None)
    own = getattr(config, "max_position_embeddings", None)  # may be those of images or sounds
    positions = getattr(text_config(config), "max_position_embeddings", own)
    return positions if positions is not None and positions > 0 else None  # XLNet says -1


def _check_not_padded(model: Any, ids: Tensor) -> None:
    """Raise ValueError if some of several rows begin or end in padding: the model's token for it, or ends repeated.

    A run of the token as long as this one within a row says that texts are joined by it, some of which are empty.
    """
    config: Any = getattr(model, "config", None)
    pad, end, begin = (getattr(config, f"{name}_token_id", None) for name in ("pad", "eos", "bos"))
    borders = [*(end if isinstance(end, list) else [end]), begin]  # one of them is at the end of many a block
    for token, count in [(token, 2) for token in borders] + ([] if pad in borders else [(pad, 1)]):
        if not isinstance(token, int) or len(ids) == 1 or ids.shape[1] <= count:
            continue
        at_border, longest_within = _runs(ids == token)
        row = int(at_border.argmax())
        if int(at_border[row]) >= max(count, longest_within + 1):
            raise ValueError(
                f"row {row} of ids begins or ends in token {token} as in padding, which would be scored; expected rows "
                "of one length without padding: cut texts into blocks, or call perplexity for each text by itself."
            )


def _runs(is_token: Tensor) -> tuple[Tensor, int]:
    """Return (rows,) the longest run at either end of each row, and the longest of all rows that touches no end."""
    begins, ends = is_token.long().cumprod(1).bool(), is_token.flip(1).long().cumprod(1).bool().flip(1)
    within, longest = is_token & ~(begins | ends), 0
    while bool(within.any()):
        within, longest = within[:, 1:] & within[:, :-1], longest + 1
    return torch.maximum(begins.sum(1), ends.sum(1)), longest


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless a distribution can be scored at this temperature."""
    if not 0.0 < check_number("temperature", temperature) < float("inf"):
        raise ValueError(
            f"temperature is {temperature}, expected a positive number: at 0 all but one token are impossible."
        )


def check_vocabulary(model: Any, low: int, high: int) -> None:
    """Raise ValueError unless ids from `low` to `high` lie in the model's vocabulary."""
    vocabulary = count_embeddings(model)
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"token ids run from {low} to {high}, outside the model's vocabulary of {vocabulary}; "
            f"was the text tokenised by another model's tokenizer?"
        )


def _score(
    model: Any, ids: Tensor, *, cost: TokenCost | None, temperature: float
) -> tuple[Float[Tensor, "rows predicted"], Float[Tensor, "rows predicted"] | None]:
    """Return nll and transport cost of each token but the first."""
    logits = model(input_ids=ids.to(model.device), use_cache=False).logits
    labels = ids[:, 1:].to(logits.device)
    # A few rows at a time, so that temporaries of the size of the logits stay in cache.
    count = max(1, _LOGITS_AT_ONCE // logits[0].numel())
    parts = [
        token_loss(z[:, :-1] if temperature == 1.0 else z[:, :-1].float() / temperature, y, objective=MLE(), cost=cost)
        for z, y in zip(logits.split(count), labels.split(count), strict=True)
    ]
    nll = torch.cat([part.nll for part in parts])
    return nll, None if cost is None else torch.cat([part.cost for part in parts if part.cost is not None])


def _check_causal(model: Any, ids: Int[Tensor, "rows length"]) -> None:
    """Raise ValueError if other tokens after the first change what the model predicts for the second."""
    check_decoder_only(model, "perplexity")
    check_no_virtual_tokens(model)
    others = torch.cat([ids[:, :1], ids.min() + ids.max() - ids[:, 1:]], 1)
    first, other = (model(input_ids=rows.to(model.device), use_cache=False).logits[:, 0] for rows in (ids, others))
    if passes_differ(first, other):
        raise ValueError(
            f"the model ({type(model).__name__}) sees the tokens to its right, so it has no perplexity; use a decoder, "
            "or one trained with is_decoder=true."
        )


def check_fit(model: Any, length: int, low: int, high: int) -> None:
    """Raise ValueError unless the model takes sequences of this length with ids from `low` to `high`."""
    context = context_length(model)
    if context is not None and length > context:
        raise ValueError(f"a sequence has {length} tokens, more than the model's context of {context}; shorten it.")
    check_vocabulary(model, low, high)


def _exp(nats: float) -> float:
    return float(torch.tensor(nats, dtype=torch.float64, device="cpu").exp())  # inf rather than OverflowError
