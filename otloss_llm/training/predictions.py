"""What TRL's trainers log about predictions: their entropy, and whether the label is the most probable token.

The kernels of the losses do not compute them. Here the logits of some positions are formed once more, in chunks.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from otloss_llm.losses.positions import IGNORE_INDEX, check_head
from otloss_llm.training.fused import ScoredHead

# Of one batch in training: a sample for a log that costs little beside the loss, which scores all of them.
TRAINING_TOKENS = 512
CHUNK_ENTRIES = 2**25  # of logits in float32 at a time: 128 MiB
LOGIT_FLOOR = -200.0  # exp of it is 0 in float32, and its product with 0 is not NaN


@torch.no_grad()
def prediction_sums(
    hidden: Float[Tensor, "batch length width"],
    labels: Int[Tensor, "batch length"],
    head: ScoredHead,
    limit: int | None = None,
) -> Float[Tensor, "batch 3"]:
    """Sums over the labelled positions of each example of (entropy, label is a most probable token, 1).

    Args:
        limit: take so many positions of the batch, evenly spaced, each for as many as it stands for; None takes all.
    """
    valid = labels != IGNORE_INDEX
    h, y, example = hidden[valid], labels[valid], valid.nonzero()[:, 0]
    share = 1.0
    if limit is not None and len(y) > limit:
        share = len(y) / limit
        spread = torch.arange(limit, device=y.device) * len(y) // limit
        h, y, example = h[spread], y[spread], example[spread]
    h, weight, bias = check_head(h, head.weight, head.bias, y)
    rows = max(1, CHUNK_ENTRIES // len(weight))
    chunks = []
    with torch.autocast(h.device.type, enabled=False):
        for some, label in zip(h.split(rows), y.split(rows), strict=True):
            z = nn.functional.linear(some, weight, bias).float().mul_(head.logit_scale)
            if head.logit_softcap is not None:
                z = z.div_(head.logit_softcap).tanh_().mul_(head.logit_softcap)
            chunks.append(_token_statistics(z, label))
    return _by_example(share * torch.cat(chunks), example, len(labels))


@torch.no_grad()
def logit_sums(
    logits: Float[Tensor, "batch length vocab"], labels: Int[Tensor, "batch length"]
) -> Float[Tensor, "batch 3"]:
    """As `prediction_sums`, from logits."""
    valid = labels != IGNORE_INDEX
    return _by_example(_token_statistics(logits[valid].float(), labels[valid]), valid.nonzero()[:, 0], len(labels))


def _token_statistics(z: Float[Tensor, "tokens vocab"], y: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens 3"]:
    """What is summed, of each token; the logits are overwritten."""
    z = z.sub_(z.amax(-1, keepdim=True)).clamp_(min=LOGIT_FLOOR)
    e = z.exp()
    total = e.sum(-1)
    entropy = total.log() - torch.linalg.vecdot(e, z) / total
    hits = z.gather(-1, y.unsqueeze(-1)).squeeze(-1) == 0
    return torch.stack([entropy, hits.float(), torch.ones_like(entropy)], -1)


def _by_example(
    values: Float[Tensor, "tokens 3"], example: Int[Tensor, " tokens"], examples: int
) -> Float[Tensor, "examples 3"]:
    return values.new_zeros(examples, 3).index_add_(0, example, values)
