"""An objective as the `output_processor` of Megatron's `GPTModel.forward` (Megatron Core 0.18 and later).

    model(tokens, positions, mask, labels=labels, output_processor=output_processor(EMO(), cost))

Megatron calls it with what its own loss would be made of: hidden states (sequence, batch, width), of which each process
has a part of the sequence under sequence parallelism, the output layer, whose rows are spread over the processes of
tensor parallelism, and labels (batch, sequence). What it returns is what the model returns, a loss for each token.
It is tested against a stub of this interface: Megatron is no dependency.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.losses.positions import IGNORE_INDEX
from otloss_llm.losses.token_loss import linear_token_loss
from otloss_llm.models.sharded_heads import gathered
from otloss_llm.objectives import Objective


def output_processor(
    objective: Objective,
    cost: TokenCost | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    **settings: Any,
) -> Callable[..., Tensor]:
    """The callback that makes (batch, sequence) losses; tokens that `loss_mask` leaves out are not computed, and 0.

    Args:
        objective, cost: as in `linear_token_loss`; the cost of a head in several processes is one of its whole
            vocabulary (which Megatron pads), such as `ShardedEmbeddingCost(model.output_layer.weight, group)`.
        process_group: of tensor parallelism; None takes that of the output layer.
        settings: others of `linear_token_loss`, such as `check="first"`.
    """

    def process(
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        config: Any = None,
        **others: Any,
    ) -> Tensor:
        if labels is None or getattr(config, "use_mup", False):
            raise ValueError(
                "the output processor makes losses of labels, without the scale of muP: pass labels= to the model, and "
                "logit_scale= to output_processor in the place of use_mup."
            )
        group = getattr(output_layer, "tp_group", None) if process_group is None else process_group
        group = None if group is None or dist.get_world_size(group) == 1 else group
        if group is not None and getattr(config, "sequence_parallel", False):
            hidden_states = _WholeSequence.apply(hidden_states, group)
        if loss_mask is not None:
            labels = labels.masked_fill(loss_mask.reshape(labels.shape) == 0, IGNORE_INDEX)
        weight = output_layer.weight if output_weight is None else output_weight  # of a tied embedding
        return linear_token_loss(
            hidden_states.transpose(0, 1), weight, labels, bias=getattr(output_layer, "bias", None),
            objective=objective, cost=cost, reduction="none", process_group=group, **settings,
        ).loss  # fmt: skip

    return process


class _WholeSequence(torch.autograd.Function):
    """The parts of all processes one after another; the gradient of the whole is equal in all of them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.length = dist.get_rank(group), len(part)
        return gathered(part.contiguous(), group).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream.narrow(0, ctx.rank * ctx.length, ctx.length), None
