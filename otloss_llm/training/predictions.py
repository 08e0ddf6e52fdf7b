"""What TRL's trainers log about predictions: their entropy, and whether the label is the most probable token.

The kernels of the losses do not compute them. Here the logits of some positions are formed once more, in chunks.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from otloss_llm.losses.positions import IGNORE_INDEX, check_head
from otloss_llm.training.fused import ScoredHead

TRAINING_TOKENS = 512  # sampled from each batch in training, for a log that costs little beside the loss
CHUNK_ENTRIES = 2**25  # logits in float32: 128 MiB
LOGIT_FLOOR = -200.0  # exp of it is 0 in float32, and its product with 0 is not NaN


@torch.no_grad()
def prediction_sums(
    hidden: Float[Tensor, "batch length width"],
    labels: Int[Tensor, "batch length"],
    head: ScoredHead,
    limit: int | None = None,
) -> Float[Tensor, "3"]:
    """Return sums over the labelled positions of (entropy, label is a most probable token, 1).

    Args:
        limit: take so many positions of the batch, evenly spaced, each for as many as it stands for; None takes all.
    """
    valid = labels != IGNORE_INDEX
    h, y = hidden[valid], labels[valid]
    share = 1.0
    if limit is not None and len(y) > limit:
        share = len(y) / limit
        positions = torch.arange(limit, device=y.device) * len(y) // limit
        h, y = h[positions], y[positions]
    h, weight, bias = check_head(h, head.weight, head.bias, y)
    rows = max(1, CHUNK_ENTRIES // len(weight))
    sums = torch.zeros(3, dtype=torch.float32, device=h.device)
    with torch.autocast(h.device.type, enabled=False):
        for chunk, label in zip(h.split(rows), y.split(rows), strict=True):
            z = nn.functional.linear(chunk, weight, bias).float().mul_(head.logit_scale)
            if head.logit_softcap is not None:
                z = z.div_(head.logit_softcap).tanh_().mul_(head.logit_softcap)
            sums += _summed(z, label)
    return share * sums


@torch.no_grad()
def logit_sums(logits: Float[Tensor, "batch length vocab"], labels: Int[Tensor, "batch length"]) -> Float[Tensor, "3"]:
    """Return the same sums, from logits."""
    valid = labels != IGNORE_INDEX
    return _summed(logits[valid].float(), labels[valid])


def _summed(z: Float[Tensor, "tokens vocab"], y: Int[Tensor, " tokens"]) -> Float[Tensor, "3"]:
    """Return the sums over some tokens, whose logits are overwritten."""
    z = z.sub_(z.amax(-1, keepdim=True)).clamp_(min=LOGIT_FLOOR)
    e = z.exp()
    total = e.sum(-1)
    with torch.autocast(z.device.type, enabled=False):
        entropy = total.log() - torch.linalg.vecdot(e, z) / total
    hits = z.gather(-1, y.unsqueeze(-1)).squeeze(-1) == 0
    return torch.stack([entropy.sum(), hits.float().sum(), entropy.new_tensor(float(len(y)))])
