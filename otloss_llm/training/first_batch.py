"""What has to be known of a model, measured on a part of its first batch: `examine`.

- whether it sees the tokens that it has to predict (`training.causality`)
- whether it keeps packed sequences apart (`training.packing`)
- whether its own loss is the cross-entropy, and what it adds to it (`training.own_loss`)
- the transform of its logits (`training.fused`)

Nothing of this is in a config by a name that all models share. The batch is a real one, so models of images and sound
are examined like models of text. Sharded models need the same number of forward passes in all processes, so all of them
examine the model as soon as one has a batch in which a token is predicted (`predicts_tokens`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from otloss_llm.losses.positions import IGNORE_INDEX
from otloss_llm.models.heads import evaluation_mode, is_encoder_decoder
from otloss_llm.models.logit_transform import LogitTransform
from otloss_llm.training.causality import check_causal
from otloss_llm.training.fused import measure_transform, unwrap
from otloss_llm.training.own_loss import check_own_loss
from otloss_llm.training.packing import check_apart
from otloss_llm.training.sample import Sample, token_mask

_SIZES = ("expert_capacity", "max_seq_len_cached")  # attributes of modules


def predicts_tokens(model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> bool:
    """Return whether a model can be examined on a batch: it has a label, and a decoder has a token behind another."""
    tokens = token_mask(inputs, labels)
    has_pair = is_encoder_decoder(unwrap(model)) or bool((tokens[:, :-1] & tokens[:, 1:]).any())
    return has_pair and bool((labels != IGNORE_INDEX).any())


def examine(model: nn.Module, inputs: dict[str, Any], labels: Tensor, *, shifted_by_user: bool) -> LogitTransform:
    """Return the transform of the model's logits; raise an error if its loss cannot be replaced by an objective.

    Args:
        inputs: of a batch, without labels.
        labels: entry t is the token that position t predicts.
        shifted_by_user: whether the batch names its labels shift_labels.

    Raises:
        TypeError: the head is not supported.
        ValueError: the model sees the tokens to the right, its loss has an unknown term, it is unclear which position
            predicts a label, its logits depend on whether it gets labels or are transformed by more than a scale and a
            soft cap, or the batch has no tokens to examine it with.
    """
    model = _plain(model)
    sample = Sample(model, inputs, labels).cut()
    with _without_a_trace(model):
        check_causal(sample)
        check_own_loss(sample, shifted_by_user=shifted_by_user)
        transform = measure_transform(model, sample.whole_inputs)
        model.train()  # some terms of a loss are added in training only
        check_own_loss(sample, shifted_by_user=shifted_by_user)
    return transform


def check_packing(model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> None:
    """Raise ValueError if the model reads sequences that are packed in a row as one; arguments as for `examine`."""
    model = _plain(model)
    sample = Sample(model, inputs, labels).cut()
    if sample.is_encoder_decoder:
        return
    with _without_a_trace(model):
        check_apart(sample, inputs)


def _plain(model: nn.Module) -> nn.Module:
    """Return the model without what torch.compile, which would make a graph for these passes, and DDP put around it."""
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextmanager
def _without_a_trace(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode for this context; afterwards it and random draws are as if it had not been run."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    masks = np.random.get_state()  # numpy draws masks of SpecAugment, and Python the layers of LayerDrop
    layers = random.getstate()
    try:
        with torch.random.fork_rng(devices), evaluation_mode(model), _state_kept(model), _no_checkpoints(model):
            yield
    finally:
        np.random.set_state(masks)
        random.setstate(layers)


@contextmanager
def _no_checkpoints(model: nn.Module) -> Iterator[None]:
    """Switch gradient checkpointing off for this context; hooks of PEFT allow it one pass before a backward pass."""
    modules: list[Any] = [
        module for module in model.modules() if getattr(module, "gradient_checkpointing", None) is True
    ]
    for module in modules:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in modules:
            module.gradient_checkpointing = True


@contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """After this context modules have the buffers and the sizes that they had at its beginning.

    A pass in training mode updates the statistics of batch normalisation and the load counters of routers. NLLB-MoE in
    eval mode sets the capacity of experts to what a batch needs; rotary embeddings grow with the longest sequence.
    """
    modules = list(model.modules())
    own = [dict(module._buffers) for module in modules]
    sizes = [{key: value for key, value in vars(module).items() if key.endswith(_SIZES)} for module in modules]
    # Packed weights of quantised models are buffers too: large ones of integers, which no pass changes.
    state = [buffer for buffer in model.buffers() if buffer.is_floating_point() or buffer.ndim < 2]
    copies = [buffer.clone() for buffer in state]
    try:
        yield
    finally:
        for module, buffers, attributes in zip(modules, own, sizes, strict=True):
            module._buffers.clear()
            module._buffers.update(buffers)
            vars(module).update(attributes)
        for buffer, copy in zip(state, copies, strict=True):
            if not torch.equal(buffer, copy):  # a graph may need those that have not changed
                buffer.copy_(copy)
