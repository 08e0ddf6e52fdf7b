"""Whether a model sees the tokens that it has to predict.

An encoder such as BERT or a permutation model such as XLNet can be loaded as a causal language model; it reads the
tokens that it has to predict, and reaches perplexity 1. No field of a config identifies them reliably, so the model is
run with another last token in each row, and with others from where the first labelled position looks: a prefix model
sees them only if they are in the prefix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otloss_llm.losses.positions import IGNORE_INDEX
from otloss_llm.models.heads import passes_differ
from otloss_llm.training.sample import LENGTH, Sample, token_mask


def check_causal(sample: Sample) -> None:
    """Raise ValueError if the model sees tokens to the right of the position that predicts them.

    Encoder-decoders have causal decoders.
    """
    if sample.is_encoder_decoder:
        return
    name = next((name for name in ("input_ids", "inputs_embeds") if sample.inputs.get(name) is not None), None)
    if name is None:
        raise ValueError(
            f"the batch has {sorted(sample.inputs)} and neither input_ids nor inputs_embeds, so it cannot be tested "
            f"whether {sample.name} sees the tokens that it has to predict; put one of them into the batch."
        )
    changes = _changes(sample)
    logits = sample.logits(sample.inputs)
    originals = [logits[compared.to(logits.device)] for _, compared in changes]
    del logits  # large where a batch cannot be cut
    for (places, compared), original in zip(changes, originals, strict=True):
        new_tokens = _with_others(sample.inputs[name], sample.labels, places)
        logits = sample.logits(sample.inputs | {name: new_tokens})
        other = logits[compared.to(logits.device)]
        del logits
        if passes_differ(original, other):
            raise ValueError(
                f"the model ({sample.name}) sees the tokens to its right, so it is not a causal language model; use a "
                "decoder, or one trained with is_decoder=true."
            )


def _changes(sample: Sample) -> list[tuple[Tensor, Tensor]]:
    """Return twice a place in each row where tokens change, and which of the 32 positions before it are tokens."""
    labels, is_token = sample.labels, token_mask(sample.inputs, sample.labels)
    places = torch.arange(labels.shape[1], device=labels.device)
    labelled = labels != IGNORE_INDEX
    last = torch.where(is_token, places, 0).amax(1)
    first = torch.where(labelled.any(1), labelled.int().argmax(1) + 1, last).clamp(max=labels.shape[1] - 1)
    distances = [place.unsqueeze(1) - places for place in (first, last)]
    masks = [is_token & (distance > 0) & (distance <= LENGTH) for distance in distances]
    return list(zip((first, last), masks, strict=True))


def _with_others(tokens: Tensor, labels: Tensor, places: Tensor) -> Tensor:
    """Return the tokens with others from a place of each row on: labels, as other tokens may stand for an image.

    Where attention is nearly uniform, as before training, one token of many moves the others by less than the rounding
    of 16 bits.
    """
    new_tokens, positions = tokens.clone(), torch.arange(labels.shape[1], device=labels.device)
    is_text = torch.cat([torch.zeros_like(labels[:, :1], dtype=torch.bool), labels[:, :-1] != IGNORE_INDEX], 1)
    for row, place in enumerate(places.tolist()):
        is_new = ((positions > place) & is_text[row] | (positions == place)).to(tokens.device)
        if tokens.is_floating_point():
            new_tokens[row, is_new] = -tokens[row, is_new]
            continue
        candidates = torch.cat([labels[row], labels.flatten()]).to(tokens.device)
        candidates = candidates[candidates != IGNORE_INDEX]
        for at in is_new.nonzero().flatten().tolist():
            token = tokens[row, at]
            others = candidates[candidates != token]
            new_tokens[row, at] = others[0] if len(others) else (token + 1) % 3
    return new_tokens
