"""What has to be known of a model, measured on a part of its first batch: `examine`.

- whether it sees the tokens that it has to predict
- what its own loss is: at which position it scores a label, and what it adds to the cross-entropy
- how it makes the inputs of a decoder from labels
- the transform of its logits (`otloss_llm.training.fused`)

Nothing of this is in a config by a name that all models share. The batch is a real one, so models of images and sound
are examined like those of text. All processes run the same number of forward passes, as sharded models need.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from otloss_llm.losses.positions import IGNORE_INDEX
from otloss_llm.models.heads import evaluation_mode, is_encoder_decoder
from otloss_llm.models.logit_transform import LogitTransform
from otloss_llm.training.batches import Targets
from otloss_llm.training.fused import auxiliary_loss, measure_transform, unwrap
from otloss_llm.training.trainer_settings import auxiliary_weight_of

ROWS, LENGTH = 2, 32  # of the part of a batch: its logits are formed
_SAME = 1e-3  # between logits of two passes over the same tokens, of the largest
# Of sequences that are packed without padding; a part of them is one sequence.
_OF_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def examine(model: nn.Module, inputs: dict[str, Any], targets: Targets, *, shifted_by_user: bool) -> LogitTransform:
    """Return the transform of the model's logits; raise an error if its loss cannot be replaced by an objective.

    Args:
        inputs: of a batch, without labels.
        shifted_by_user: whether the batch names its labels shift_labels.

    Raises:
        TypeError: the head is not supported.
        ValueError: the model sees the tokens to the right, its loss has an unknown term, it is unclear which position
            predicts a label, or its logits are transformed by more than a scale and a soft cap.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile would make a graph for these passes
    if isinstance(model, DistributedDataParallel):
        model = model.module
    part, labels = part_of(inputs, targets.labels, is_encoder_decoder(unwrap(model)))
    with _capacities_kept(model), evaluation_mode(model):
        check_causal(model, part)
        check_own_loss(model, part, labels, shifted_by_user=shifted_by_user)
        return measure_transform(model, with_decoder_inputs(model, part, labels))


@contextmanager
def _capacities_kept(model: nn.Module) -> Iterator[None]:
    """After this context experts have their capacity again, which NLLB-MoE in eval mode sets to that of a batch."""
    routers: list[Any] = [module for module in model.modules() if hasattr(module, "expert_capacity")]
    capacities = [router.expert_capacity for router in routers]
    try:
        yield
    finally:
        for router, capacity in zip(routers, capacities, strict=True):
            router.expert_capacity = capacity


def part_of(inputs: dict[str, Any], labels: Tensor, encoder_decoder: bool) -> tuple[dict[str, Any], Tensor]:
    """Return two rows of 32 tokens, as far as a batch can be cut: images of all rows may be in one tensor."""
    inputs = {name: value for name, value in inputs.items() if name not in _OF_PACKED}
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    if not all(value.ndim and len(value) == len(labels) for value in tensors.values()):
        return inputs, labels
    cut = {name: value[:ROWS] for name, value in tensors.items()}
    labels, length = labels[:ROWS], labels.shape[1]
    along = [name for name in cut if name.startswith("decoder_")] if encoder_decoder else list(cut)
    if all(cut[name].shape[1:] == (length,) for name in along):
        window = slice(0, LENGTH)
        mask = cut.get("decoder_attention_mask" if encoder_decoder else "attention_mask")
        if mask is not None and mask[:, -LENGTH:].sum() > mask[:, :LENGTH].sum():  # padded on the left
            window = slice(max(0, length - LENGTH), length)
        cut |= {name: cut[name][:, window] for name in along}
        labels = labels[:, window]
    return inputs | cut, labels


# ---- the inputs of a decoder ----------------------------------------------------------------------------------------


def with_decoder_inputs(model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> dict[str, Any]:
    """Add to the inputs of an encoder-decoder those that the model would make from labels, if they are not there."""
    root = unwrap(model)
    if not is_encoder_decoder(root) or {"decoder_input_ids", "decoder_inputs_embeds"} & set(inputs):
        return inputs
    return inputs | {"decoder_input_ids": decoder_inputs(root, labels)}


def decoder_inputs(root: Any, labels: Tensor) -> Tensor:
    """Return the labels shifted to the right behind the token that starts a text; `check_own_loss` verifies it."""
    if hasattr(root, "prepare_decoder_input_ids_from_labels"):
        made: Tensor = root.prepare_decoder_input_ids_from_labels(labels.clone())  # FSMT writes into its argument
        return made
    start, pad = _setting(root, "decoder_start_token_id"), _setting(root, "pad_token_id")
    if start is None or pad is None:
        raise ValueError(
            f"the config of {type(root).__name__} has decoder_start_token_id={start} and pad_token_id={pad}, both of "
            "which are needed to make decoder_input_ids from labels; set them, or put decoder_input_ids into the batch."
        )
    shifted = nn.functional.pad(labels[:, :-1], (1, 0), value=start)
    return shifted.masked_fill(shifted == IGNORE_INDEX, pad)


def _setting(root: Any, name: str) -> int | None:
    """The setting of the model's config, or of that of its text if the former has none."""
    own: int | None = getattr(root.config, name, None)
    return own if own is not None else getattr(root.config.get_text_config(), name, None)


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_causal(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Raise ValueError if the model sees tokens to the right of the position that predicts them.

    An encoder such as BERT or a permutation model such as XLNet can be loaded as a causal LM; it reads the tokens that
    it has to predict, and reaches perplexity 1. No field of a config identifies them reliably, so the model is run
    with another last token. Encoder-decoders have causal decoders.
    """
    ids = inputs.get("input_ids")
    if ids is None or is_encoder_decoder(unwrap(model)):
        return
    mask = inputs.get("attention_mask")
    is_token = mask[0] != 0 if mask is not None and mask.ndim == 2 else torch.ones_like(ids[0], dtype=torch.bool)
    last = int(is_token.nonzero().max()) if is_token.any() else 0
    others = ids[0, :last][ids[0, :last] != ids[0, last]]  # a token of this row: others may stand for an image
    changed = ids.clone()
    changed[0, last] = others[-1] if len(others) else (ids[0, last] + 1) % 3
    first, second = (_logits(model(**inputs | {"input_ids": some}))[0, :last].float() for some in (ids, changed))
    first, second = first[is_token[:last]], second[is_token[:last]]
    if first.numel() and (first - second).abs().max() > _SAME * first.abs().max():
        raise ValueError(
            f"the model ({type(unwrap(model)).__name__}) sees the tokens to its right, so it is not a causal language "
            "model; use a decoder, or one trained with is_decoder=true."
        )


def check_own_loss(model: nn.Module, inputs: dict[str, Any], labels: Tensor, *, shifted_by_user: bool) -> None:
    """Raise ValueError unless the model's own loss is the cross-entropy and the terms that an objective keeps.

    Labels of a decoder without encoder are its tokens: those of a batch may all be ignored in this part. The decoders
    of BART, Pegasus, TrOCR and others score label t at position t, which nothing in their configs says; the loss shows
    it.
    """
    root: Any = unwrap(model)
    base = root.get_base_model() if hasattr(root, "get_base_model") else root
    both = is_encoder_decoder(root)
    if "labels" not in inspect.signature(base.forward).parameters or not (both or "input_ids" in inputs):
        return  # no loss of its own
    labels = _known_labels(root, labels) if both else _known_labels(root, _tokens_of(inputs))
    own = model(**inputs, labels=labels.clone())
    own = own if isinstance(own, dict) else {"loss": own[0], "logits": own[1]}  # return_dict=False
    logits = _logits(own if own.get("logits") is not None else model(**inputs)).float()
    if both:
        _check_decoder_inputs(model, inputs, labels, logits)
    at = float(cross_entropy(logits.flatten(0, 1), labels.flatten()))
    before = float(cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
    nll = at if both else before
    if own.get("loss") is None or math.isnan(nll):  # NaN: a single token
        return
    experts = auxiliary_loss(own)
    known = 0.0 if experts is None else float(auxiliary_weight_of(root) * experts)
    # The experts' loss may be in 16 bits, and the other not.
    tolerance = (1e-5 if own["loss"].dtype == torch.float32 else 2.0**-6) * nll + 2.0**-8 * known
    if abs(float(own["loss"]) - known - nll) <= tolerance:
        return
    if abs(float(own["loss"]) - known - at) > tolerance:
        _raise_unknown_term(base, own, nll + known)
    if not shifted_by_user:
        raise ValueError(
            f"the loss of {type(base).__name__} scores label t at position t, those of other causal language models at "
            "t - 1, so it is unclear what the labels are. Name them shift_labels, with the token that position t "
            "predicts at t (and set remove_unused_columns=False)."
        )


def _known_labels(root: Any, labels: Tensor) -> Tensor:
    """The labels without those that are no rows of the head, such as tokens of an image; ones if none is left."""
    vocab = _setting(root, "vocab_size")
    labels = labels if vocab is None else labels.masked_fill(labels >= vocab, IGNORE_INDEX)
    return labels if (labels != IGNORE_INDEX).any() else torch.ones_like(labels)


def _raise_unknown_term(base: Any, own: Any, expected: float) -> None:
    names = [name for name in own if name.endswith(("aux_loss", "z_loss"))]
    advice = "switch it off in the model's config"
    if names:
        advice = f"({', '.join(names)}) set model.config.output_router_logits = False"
    elif getattr(base, "z_loss_coefficient", 0):
        advice = "set model.z_loss_coefficient = 0 and give the trainer z_loss=, whose mean is over labelled tokens"
    raise ValueError(
        f"the loss of {type(base).__name__} is {float(own['loss']):.6g} where its cross-entropy and the loss of its "
        f"experts are {expected:.6g}: it has a term that an objective would leave out. To train without it, {advice}."
    )


def _check_decoder_inputs(model: nn.Module, inputs: dict[str, Any], labels: Tensor, logits: Tensor) -> None:
    """Raise ValueError if the decoder's inputs, as we make them from labels, are not those of the model."""
    labelled = labels != IGNORE_INDEX
    ours, logits = _logits(model(**with_decoder_inputs(model, inputs, labels))).float()[labelled], logits[labelled]
    if not (ours - logits).abs().max() <= _SAME * logits.abs().max():
        raise ValueError(
            f"{type(unwrap(model)).__name__} makes the inputs of its decoder from labels in a way that is not known; "
            "put decoder_input_ids into the batch, with the token before label t at position t."
        )


def _tokens_of(inputs: dict[str, Any]) -> Tensor:
    """The tokens as labels; those that are padding are ignored."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    return ids if mask is None or mask.shape != ids.shape else ids.masked_fill(mask == 0, IGNORE_INDEX)


def _logits(output: Any) -> Tensor:
    logits: Tensor = output["logits"] if isinstance(output, dict) else output[0]
    return logits.full_tensor() if hasattr(logits, "full_tensor") else logits
