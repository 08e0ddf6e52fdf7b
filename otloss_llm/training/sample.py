"""A part of a batch on which a model is examined; it is small where the batch can be cut, as its logits are formed."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from otloss_llm.losses.positions import IGNORE_INDEX
from otloss_llm.models.decoder_inputs import config_value, with_decoder_inputs
from otloss_llm.models.heads import is_encoder_decoder
from otloss_llm.training.fused import unwrap

ROWS, LENGTH = 2, 32
# Borders of sequences that are packed without padding; a part of them is one sequence.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# Tokens that stand for parts of an image, a video or a sound, as configs name them.
_MEDIA_TOKENS = tuple(f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index"))


@dataclass(frozen=True)
class Sample:
    """Inputs of a model without labels, and the labels: entry t is the token that position t predicts."""

    model: nn.Module
    inputs: dict[str, Any]
    labels: Tensor

    @property
    def root(self) -> Any:
        """The model without wrappers."""
        return unwrap(self.model)

    @property
    def name(self) -> str:
        """The name of the model's class, for messages."""
        return type(self.root).__name__

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether labels are a decoder's, which are not shifted."""
        return is_encoder_decoder(self.root)

    @property
    def whole_inputs(self) -> dict[str, Any]:
        """The inputs that the model needs when it gets no labels."""
        return with_decoder_inputs(self.root, self.inputs, self.labels)

    def logits(self, inputs: dict[str, Any]) -> Tensor:
        """Return the logits of one forward pass."""
        return output_logits(self.model(**inputs))

    def cut(self) -> Sample:
        """Return the two rows with most labels and the 32 positions with most of them, as far as both can be cut.

        Labels that are no tokens are ignored; the objective raises an error for them.
        """
        tokens = (getattr(self.root.config, name, None) for name in _MEDIA_TOKENS)
        media = {token for token in tokens if isinstance(token, int)}
        part = cut_batch(self.inputs, self.known_labels(self.labels), self.is_encoder_decoder, media)
        return Sample(self.model, *part)

    def known_labels(self, labels: Tensor) -> Tensor:
        """Return the labels without those that are no tokens of the model."""
        vocab = config_value(self.root, "vocab_size") or math.inf
        return labels.masked_fill((labels < 0) | (labels >= vocab), IGNORE_INDEX)


def output_logits(output: Any) -> Tensor:
    """Return the logits of a model's output, whole where they are sharded."""
    logits: Tensor = output["logits"] if isinstance(output, dict) else output[0]
    return logits.full_tensor() if hasattr(logits, "full_tensor") else logits


def token_mask(inputs: dict[str, Any], labels: Tensor) -> Tensor:
    """Return which positions of a decoder are no padding; under a mask of pairs, which positions are labelled."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return torch.ones_like(labels, dtype=torch.bool)
    # Padding may see all positions under a mask of pairs.
    is_by_token = isinstance(mask, Tensor) and mask.shape == labels.shape
    return mask.to(labels.device) != 0 if is_by_token else labels != IGNORE_INDEX


def cut_batch(
    inputs: dict[str, Any], labels: Tensor, encoder_decoder: bool, media: Collection[int] = ()
) -> tuple[dict[str, Any], Tensor]:
    """Return a part of inputs and labels, as `Sample.cut`.

    Images of all rows may be in one tensor: rows are cut only where each has the same number of the tokens `media` that
    stand for them. All rows stay beside a list or a tuple, and where types of tokens (a prefix) may differ.
    """
    inputs = {name: value for name, value in inputs.items() if name not in PACKING}
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    others = [value for name, value in inputs.items() if name not in tensors]  # lists may have an entry for each row
    settings = all(value is None or isinstance(value, bool | int | float | str) for value in others)
    if not (settings and _has_items_by_row(tensors, labels, encoder_decoder, media)):
        return inputs, labels
    length = labels.shape[1]
    worth = (labels != IGNORE_INDEX).int() * (length + 1) + token_mask(tensors, labels).int()
    rows = torch.arange(len(labels), device=labels.device)
    if "token_type_ids" not in tensors:
        rows = worth.sum(1).topk(min(ROWS, len(labels))).indices.sort().values
    cut = {name: value[rows.to(value.device)] for name, value in tensors.items()}
    labels = labels[rows]
    along = [name for name in cut if name.startswith("decoder_")] if encoder_decoder else list(cut)
    if length > LENGTH and all(cut[name].shape[1:2] == (length,) for name in along):
        # The last position of the part does not count: the token that it predicts lies outside.
        start = int(worth[rows, :-1].sum(0).unfold(0, LENGTH - 1, 1).sum(1).argmax())
        cut |= {name: cut[name][:, start : start + LENGTH] for name in along}
        labels = labels[:, start : start + LENGTH]
    return inputs | cut, labels


def _has_items_by_row(
    tensors: dict[str, Tensor], labels: Tensor, encoder_decoder: bool, media: Collection[int]
) -> bool:
    """Return whether entry i of each tensor belongs to row i of the labels, which equal lengths alone do not say."""
    if not all(value.ndim and len(value) == len(labels) for value in tensors.values()):
        return False
    ids = tensors.get("input_ids")
    if ids is None:  # an encoder reads one image or sound for each row
        return encoder_decoder or all(value.shape[:2] == labels.shape for value in tensors.values())
    if all(value.shape[:2] in (ids.shape, labels.shape) for value in tensors.values()):
        return True
    counts = [(ids == token).sum(1) for token in media]
    return any(count.any() for count in counts) and all((count == count[0]).all() for count in counts)
