"""What has to be known of a model, measured on a part of its first batch: `examine`.

- whether it sees the tokens that it has to predict
- what its own loss is: at which position it scores a label, and what it adds to the cross-entropy
- how it makes the inputs of a decoder from labels
- the transform of its logits (`otloss_llm.training.fused`)

Nothing of this is in a config by a name that all models share. The batch is a real one, so models of images and sound
are examined like those of text. All processes run the same number of forward passes, as sharded models need. A batch
in which nothing is predicted shows nothing: the next one is examined too.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import set_seed

from otloss_llm.losses.positions import IGNORE_INDEX
from otloss_llm.models.heads import evaluation_mode, is_encoder_decoder
from otloss_llm.models.logit_transform import LogitTransform
from otloss_llm.training.batches import Targets
from otloss_llm.training.fused import auxiliary_loss, measure_transform, unwrap
from otloss_llm.training.trainer_settings import auxiliary_weight

ROWS, LENGTH = 2, 32  # of the part of a batch: its logits are formed
# Of sequences that are packed without padding; a part of them is one sequence.
_OF_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_SIZES = ("expert_capacity", "max_seq_len_cached")  # attributes of modules
# Tokens that stand for parts of an image, a video or a sound, as configs name them.
_MEDIA_TOKENS = tuple(f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index"))


class Examination(NamedTuple):
    """The transform of a model's logits, and whether the batch had what the checks need."""

    transform: LogitTransform
    is_complete: bool


def examine(model: nn.Module, inputs: dict[str, Any], targets: Targets, *, shifted_by_user: bool) -> Examination:
    """Measure the transform of the model's logits; raise an error if its loss cannot be replaced by an objective.

    Args:
        inputs: of a batch, without labels.
        shifted_by_user: whether the batch names its labels shift_labels.

    Raises:
        TypeError: the head is not supported.
        ValueError: the model sees the tokens to the right, its loss has an unknown term, it is unclear which position
            predicts a label, its logits depend on whether it gets labels or are transformed by more than a scale and a
            soft cap, or the batch has no tokens to examine it with.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile would make a graph for these passes
    if isinstance(model, DistributedDataParallel):
        model = model.module
    root = unwrap(model)
    part, labels = cut_batch(inputs, targets.labels, is_encoder_decoder(root), _media_tokens(root))
    with _same_draws_after(), evaluation_mode(model), _state_kept(model):
        causal = check_causal(model, part, labels)
        checked = check_own_loss(model, part, labels, shifted_by_user=shifted_by_user)
        transform = measure_transform(model, with_decoder_inputs(model, part, labels))
        model.train()  # some terms of a loss are added in training only
        check_own_loss(model, part, labels, shifted_by_user=shifted_by_user)
    return Examination(transform, causal and checked)


@contextmanager
def _same_draws_after() -> Iterator[None]:
    """After this context random numbers are those that would have been drawn without it."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    masks = np.random.get_state()  # numpy draws those of SpecAugment, and Python the layers of LayerDrop
    layers = random.getstate()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        np.random.set_state(masks)
        random.setstate(layers)


def _media_tokens(root: Any) -> set[int]:
    return {token for name in _MEDIA_TOKENS if isinstance(token := getattr(root.config, name, None), int)}


@contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """After this context modules have the buffers and the sizes of before.

    A pass in training mode updates the statistics of batch normalisation and the load counters of routers. NLLB-MoE in
    eval mode sets the capacity of experts to that of a batch; rotary embeddings grow with the longest sequence.
    """
    modules = list(model.modules())
    own = [dict(module._buffers) for module in modules]
    sizes = [{key: value for key, value in vars(module).items() if key.endswith(_SIZES)} for module in modules]
    # Packed weights of quantised models are buffers too: large ones of integers.
    copies = [(buffer, buffer.clone()) for buffer in model.buffers() if _is_state(buffer)]
    try:
        yield
    finally:
        for module, buffers, attributes in zip(modules, own, sizes, strict=True):
            module._buffers.clear()
            module._buffers.update(buffers)
            vars(module).update(attributes)
        for buffer, copy in copies:
            if not torch.equal(buffer, copy):  # a graph may need those that have not changed
                buffer.copy_(copy)


def _is_state(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.ndim < 2


def cut_batch(
    inputs: dict[str, Any], labels: Tensor, encoder_decoder: bool, media: set[int] | None = None
) -> tuple[dict[str, Any], Tensor]:
    """Return the two rows with most labels and the 32 tokens with most of them, as far as a batch can be cut.

    Images of all rows may be in one tensor: rows are cut only where each has the same number of the tokens `media` that
    stand for them. All rows stay beside a list or a tuple, and where types of tokens (a prefix) may differ.
    """
    inputs = {name: value for name, value in inputs.items() if name not in _OF_PACKED}
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    others = [value for name, value in inputs.items() if name not in tensors]  # lists may have an entry for each row
    settings = all(value is None or isinstance(value, bool | int | float | str) for value in others)
    if not (settings and _has_items_by_row(tensors, labels, encoder_decoder, media or set())):
        return inputs, labels
    length = labels.shape[1]
    worth = (labels != IGNORE_INDEX).int() * (length + 1) + _tokens(tensors, labels).int()
    rows = torch.arange(len(labels), device=labels.device)
    if "token_type_ids" not in tensors:
        rows = worth.sum(1).topk(min(ROWS, len(labels))).indices.sort().values
    cut = {name: value[rows.to(value.device)] for name, value in tensors.items()}
    labels = labels[rows]
    along = [name for name in cut if name.startswith("decoder_")] if encoder_decoder else list(cut)
    if length > LENGTH and all(cut[name].shape[1:2] == (length,) for name in along):
        start = int(worth[rows].sum(0).unfold(0, LENGTH, 1).sum(1).argmax())
        cut |= {name: cut[name][:, start : start + LENGTH] for name in along}
        labels = labels[:, start : start + LENGTH]
    return inputs | cut, labels


def _has_items_by_row(tensors: dict[str, Tensor], labels: Tensor, encoder_decoder: bool, media: set[int]) -> bool:
    """Whether entry i of each tensor belongs to row i of the labels, which equal lengths alone do not say."""
    if not all(value.ndim and len(value) == len(labels) for value in tensors.values()):
        return False
    ids = tensors.get("input_ids")
    if ids is None:  # an encoder reads one image or sound for each row
        return encoder_decoder or all(value.shape[:2] == labels.shape for value in tensors.values())
    if all(value.shape[:2] in (ids.shape, labels.shape) for value in tensors.values()):
        return True
    counts = [(ids == token).sum(1) for token in media]
    return any(count.any() for count in counts) and all((count == count[0]).all() for count in counts)


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
        ids: Tensor = root.prepare_decoder_input_ids_from_labels(labels.clone())  # FSMT writes into its argument
        return ids
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


def check_causal(model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> bool:
    """Raise ValueError if the model sees tokens to the right of the position that predicts them.

    An encoder such as BERT or a permutation model such as XLNet can be loaded as a causal LM; it reads the tokens that
    it has to predict, and reaches perplexity 1. No field of a config identifies them reliably, so the model is run
    with another last token in each row, and with another first token of those that are predicted: a prefix model sees
    it only if it is in the prefix. Encoder-decoders have causal decoders.

    Args:
        labels: entry t is the token that position t predicts.

    Returns:
        Whether there was a token behind another one.
    """
    if is_encoder_decoder(unwrap(model)):
        return True
    name = next((name for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None), None)
    if name is None:
        raise ValueError(
            f"the batch has {sorted(inputs)} and neither input_ids nor inputs_embeds, so it cannot be tested whether "
            f"{type(unwrap(model)).__name__} sees the tokens that it has to predict; put one of them into the batch."
        )
    changes = _changes(inputs, labels)
    logits = _logits(model(**inputs))
    tolerance = _rounding(logits)
    originals = [logits[compared.to(logits.device)] for _, compared in changes]
    del logits  # those of a batch that cannot be cut are large
    for (changed, compared), original in zip(changes, originals, strict=True):
        logits = _logits(model(**inputs | {name: _with_another(inputs[name], labels, changed)}))
        difference = logits[compared.to(logits.device)].float() - original.float()
        del logits
        if len(original) and difference.abs().max() > tolerance * original.abs().max():
            raise ValueError(
                f"the model ({type(unwrap(model)).__name__}) sees the tokens to its right, so it is not a causal "
                "language model; use a decoder, or one trained with is_decoder=true."
            )
    return any(len(original) for original in originals)


def _changes(inputs: dict[str, Any], labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """A place in each row at which to change the token, and which of the 32 positions before it are tokens; twice."""
    is_token, places = _tokens(inputs, labels), torch.arange(labels.shape[1], device=labels.device)
    labelled = labels != IGNORE_INDEX
    last = torch.where(is_token, places, 0).amax(1)
    first = torch.where(labelled.any(1), labelled.int().argmax(1) + 1, last).clamp(max=labels.shape[1] - 1)
    distances = [place.unsqueeze(1) - places for place in (first, last)]
    masks = [is_token & (distance > 0) & (distance <= LENGTH) for distance in distances]
    return list(zip((first, last), masks, strict=True))


def _tokens(inputs: dict[str, Any], labels: Tensor) -> Tensor:
    """Which positions of a decoder are no padding; under a mask of pairs, whose padding may see all, the labelled."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return torch.ones_like(labels, dtype=torch.bool)
    is_token = isinstance(mask, Tensor) and mask.shape == labels.shape
    return mask.to(labels.device) != 0 if is_token else labels != IGNORE_INDEX


def _with_another(tokens: Tensor, labels: Tensor, places: Tensor) -> Tensor:
    """The tokens with another one at a place of each row: one that is a label (others may stand for an image)."""
    changed = tokens.clone()
    for row, place in enumerate(places.tolist()):
        token = tokens[row, place]
        if tokens.is_floating_point():
            changed[row, place] = -token
            continue
        candidates = torch.cat([labels[row], labels.flatten()]).to(tokens.device)
        candidates = candidates[(candidates != IGNORE_INDEX) & (candidates != token)]
        changed[row, place] = candidates[0] if len(candidates) else (token + 1) % 3
    return changed


def check_own_loss(model: nn.Module, inputs: dict[str, Any], labels: Tensor, *, shifted_by_user: bool) -> bool:
    """Raise ValueError unless the model's own loss is the cross-entropy and the terms that an objective keeps.

    The decoders of BART, Pegasus, TrOCR and others score label t at position t, which nothing in their configs says;
    the loss shows it. Loss and logits are those of one pass, so dropout is no matter.

    Args:
        labels: entry t is the token that position t predicts.

    Returns:
        Whether a label was scored, or the model has no loss of its own.
    """
    root: Any = unwrap(model)
    base = root.get_base_model() if hasattr(root, "get_base_model") else root
    if not _takes_labels(base):
        return True
    labels = _known_labels(root, labels if is_encoder_decoder(root) else _own_labels(inputs, labels))
    own, logits = _own_output(model, inputs, labels)
    if own.get("loss") is None:
        return True
    _check_logits(model, inputs, labels, logits)
    unshifted = _mean_nll(logits, labels)
    nll = unshifted if is_encoder_decoder(root) else _mean_nll(logits[:, :-1], labels[:, 1:])
    if math.isnan(nll):  # no token is behind another one
        return False
    term, rounding = _experts_term(root, own)
    tolerance = (1e-5 if own["loss"].dtype == torch.float32 else 2.0**-6) * nll + rounding
    if abs(float(own["loss"]) - term - nll) <= tolerance:
        return True
    if not abs(float(own["loss"]) - term - unshifted) <= tolerance:
        _raise_unknown_term(root, own, nll + term)
    if not shifted_by_user:
        raise ValueError(
            f"the loss of {type(base).__name__} scores label t at position t, those of other causal language models at "
            "t - 1, so it is unclear what the labels are. Name them shift_labels, with the token that position t "
            "predicts at t (and set remove_unused_columns=False)."
        )
    return True


def _mean_nll(logits: Tensor, labels: Tensor) -> float:
    """The cross-entropy, in float32 of the labelled positions alone; NaN if there are none."""
    labelled = labels != IGNORE_INDEX
    return float(cross_entropy(logits[labelled.to(logits.device)].float(), labels[labelled].to(logits.device)))


def _experts_term(root: nn.Module, own: Any) -> tuple[float, float]:
    """What a model adds to its loss to balance its experts, and the rounding error of this.

    The weight is the model's own: a trainer may have another one, which the model does not know.
    """
    experts = auxiliary_loss(own)
    term = 0.0 if experts is None else float(auxiliary_weight(None, root) * experts)
    return term, abs(term) * (1e-5 if experts is None or experts.dtype == torch.float32 else 2.0**-8)


def _takes_labels(base: Any) -> bool:
    parameters = inspect.signature(base.forward).parameters
    return "labels" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _own_labels(inputs: dict[str, Any], labels: Tensor) -> Tensor:
    """Labels at the positions of their tokens, as models take them; all tokens where none is labelled."""
    own = nn.functional.pad(labels[:, :-1], (1, 0), value=IGNORE_INDEX)
    ids = inputs.get("input_ids")
    if ids is None or (own != IGNORE_INDEX).any():
        return own
    return ids.masked_fill(~_tokens(inputs, labels).to(ids.device), IGNORE_INDEX)


def _own_output(model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> tuple[Any, Tensor]:
    """The model's output for labels, as a dict, and its logits: of a second pass if the first makes none."""
    set_seed(0)
    own = model(**inputs, labels=labels.clone())
    if not isinstance(own, dict):  # return_dict=False
        own = {"loss": own[0], "logits": own[1]} if own[0].ndim == 0 else {"logits": own[0]}
    return own, _own_logits(model, inputs, labels) if own.get("logits") is None else _logits(own)


def _own_logits(model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> Tensor:
    """The logits without labels, with the dropout of other passes."""
    set_seed(0)
    return _logits(model(**with_decoder_inputs(model, inputs, labels)))


def _known_labels(root: Any, labels: Tensor) -> Tensor:
    """The labels without those that are no rows of the head, such as tokens of an image; ones if none is left."""
    vocab = _setting(root, "vocab_size")
    labels = labels if vocab is None else labels.masked_fill(labels >= vocab, IGNORE_INDEX)
    return labels if (labels != IGNORE_INDEX).any() else torch.ones_like(labels)


def _raise_unknown_term(root: Any, own: Any, expected: float) -> None:
    base = root.get_base_model() if hasattr(root, "get_base_model") else root
    names = [name for name in own if name.endswith(("aux_loss", "z_loss")) and name != "aux_loss"]
    advice = "switch it off in the model's config, or add it in a compute_loss of your trainer, which calls super()"
    if names:
        advice = f"({', '.join(names)}) set model.config.output_router_logits = False"
    elif getattr(base, "z_loss_coefficient", 0):
        advice = "set model.z_loss_coefficient = 0 and give the trainer z_loss=, whose mean is over labelled tokens"
    elif getattr(getattr(root, "active_peft_config", None), "orth_reg_weight", 0):
        advice = (
            "use another adapter than AdaLoRA, whose orthogonality term (orth_reg_weight) cannot be 0, such as LoRA"
        )
    raise ValueError(
        f"the loss of {type(base).__name__} is {float(own['loss']):.6g} where its cross-entropy and the loss of its "
        f"experts are {expected:.6g}: it has a term that an objective would leave out. To train without it, {advice}."
    )


def _check_logits(model: nn.Module, inputs: dict[str, Any], labels: Tensor, logits: Tensor) -> None:
    """Raise ValueError if logits depend on labels: by a decoder's inputs that are not ours, or in another way."""
    labelled = (labels != IGNORE_INDEX).to(logits.device)
    logits = logits[labelled]
    ours = _own_logits(model, inputs, labels)[labelled]
    if _agree(ours, logits):
        return
    if model.training and not _agree(ours, _own_logits(model, inputs, labels)[labelled]):
        return  # draws of its own, which no seed repeats
    name = type(unwrap(model)).__name__
    if is_encoder_decoder(unwrap(model)):
        raise ValueError(
            f"{name} makes the inputs of its decoder from labels in a way that is not known; "
            "put decoder_input_ids into the batch, with the token before label t at position t."
        )
    raise ValueError(
        f"the logits of {name} are others when it gets labels, and an objective gives it none; make its forward "
        "independent of labels, except for its loss."
    )


def _agree(a: Tensor, b: Tensor) -> bool:
    """Whether logits of the same tokens and the same draws are equal, up to the order of sums on a GPU; or NaN."""
    if not len(b) or b.isnan().any():
        return True
    tolerance = 1e-5 if torch.finfo(b.dtype).bits >= 32 else 2.0**-6
    return bool((a.float() - b.float()).abs().max() <= tolerance * b.abs().max())


def _rounding(logits: Tensor) -> float:
    """The most by which logits of two passes over the same tokens differ, of the largest of them."""
    return 1e-3 if torch.finfo(logits.dtype).bits >= 32 else 2.0**-6


def _logits(output: Any) -> Tensor:
    logits: Tensor = output["logits"] if isinstance(output, dict) else output[0]
    return logits.full_tensor() if hasattr(logits, "full_tensor") else logits
