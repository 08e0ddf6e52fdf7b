"""Whether a model keeps sequences apart that are packed in a row.

A batch asks for that by position_ids that begin again. Attention follows them where no cache and no mask is given;
recurrent layers, as of Mamba, and attention of other code may not, and no config says so. The model is run on two
sequences in a row, with two contents of the first one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from otloss_llm.models.heads import passes_differ
from otloss_llm.training.sample import LENGTH, PACKING, Sample, token_mask

# Of float32, relative to the largest logit. Sequences that are kept apart give equal logits but for the order of sums;
# a fresh recurrent layer may add as little as 5e-5.
_TOLERANCE = 2e-5


def is_packed(inputs: dict[str, Any], labels: Tensor) -> bool:
    """Return whether positions begin again within a row of tokens."""
    positions = inputs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape != labels.shape:  # those of images have three rows
        return False
    is_token = token_mask(inputs, labels).to(positions.device)
    return bool(((positions[:, 1:] <= positions[:, :-1]) & is_token[:, 1:] & is_token[:, :-1]).any())


def check_apart(sample: Sample, packing: dict[str, Any]) -> None:
    """Raise ValueError if the second of two sequences in a row is predicted from the first one.

    Args:
        sample: a part of a batch of text.
        packing: the entries of the batch about the borders of sequences, which are made anew for the two.
    """
    tokens = sample.inputs.get("input_ids")
    tensors = [name for name, value in sample.inputs.items() if isinstance(value, Tensor)]
    if tokens is None or any(sample.inputs[name].shape != tokens.shape for name in tensors):
        return
    half = min(LENGTH, tokens.shape[1]) // 2
    row = tokens[:1, : 2 * half]
    inputs = sample.inputs | {name: sample.inputs[name][:1, : 2 * half] for name in tensors}
    inputs["position_ids"] = torch.arange(half, device=row.device).repeat(2).unsqueeze(0)
    if "attention_mask" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    inputs |= {name: value for name, value in _borders(half, row).items() if name in packing}
    first, second = row[:, :half], row[:, half:]
    # Equal tokens would tell nothing; 0 to 2 are tokens of all models.
    other = torch.where(first == second, (first + 1) % 3, second)
    passes = [sample.logits(inputs | {"input_ids": ids})[:, half:] for ids in (row, torch.cat([other, second], 1))]
    if passes_differ(*passes, tolerance=_TOLERANCE):
        raise ValueError(
            "position_ids begin again within a row, which asks the model to read its sequences apart, but "
            f"{sample.name} (model) reads them as one. Train without packing and padding_free; with the borders of "
            'sequences that its layers take (seq_idx); or with packing_strategy="wrapped" if they may see each other.'
        )


def _borders(half: int, row: Tensor) -> dict[str, Any]:
    """Return what batches may say of two sequences of one length in a row."""
    ends = torch.tensor([0, half, 2 * half], dtype=torch.int32, device=row.device)
    numbers = torch.tensor([[0] * half + [1] * half], dtype=torch.int32, device=row.device)
    values = (ends, ends, half, half, numbers)
    return dict(zip(PACKING, values, strict=True))
