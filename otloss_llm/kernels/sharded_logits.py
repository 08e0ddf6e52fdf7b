"""The token loss from logits whose columns are spread over processes, as torch's `loss_parallel` has them.

Notation: process r holds some columns of the logits z; x_i = z_i - max z over all processes, e_i = exp(x_i); label y.

    nll = log(1 + sum_{i != y} e_i / e_y)    D = sum_i e_i c_i / sum_i e_i
    H = log sum_i e_i - sum_i e_i x_i / sum_i e_i

Each process sums over its own columns, and two collectives merge the maxima and the sums, a few numbers per token. The
rest is plain autograd: every process has the same value, so the gradient of a sum over processes is its total's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from otloss_llm.costs.vocabulary import FewColumns, LabelRows
from otloss_llm.models.sharded_heads import VocabShard
from otloss_llm.objectives import Statistics, Sum


def token_values(
    logits: Float[Tensor, "tokens columns"],
    labels: Int[Tensor, " tokens"],
    *,
    objective: Sum,
    cost: LabelRows | FewColumns | None,
    shard: VocabShard,
) -> tuple[Tensor, Statistics]:
    """Return `reference.token_values`, equal in all processes, from the columns of this one."""
    read, T = objective.reads, objective.temperature or 1.0
    top = _largest(logits.detach(), shard.group)
    x = logits - top[:, None]
    e = x.exp()
    is_label = torch.arange(shard.start, shard.stop, device=labels.device) == labels[:, None]
    parts = {"others": e.masked_fill(is_label, 0.0), "x_y": torch.where(is_label, x, 0.0)}
    if cost is not None:
        assert isinstance(cost, LabelRows)
        parts["cost"] = e * cost.rows(labels, None).to(e.dtype)
    if "entropy" in read:
        parts["x"] = e * x.masked_fill(x == -torch.inf, 0.0)
    if "mean_logit" in read:
        parts["logits"] = logits
    if "tempered_logsumexp" in read:
        parts["tempered"] = (x / T).exp()
    own = torch.stack([part.sum(-1) for part in parts.values()])
    sums = dict(zip(parts, _SumOver.apply(own, shard.group), strict=True))
    # The others may underflow, and the gradient of a logarithm of 0 would be NaN.
    margin = sums["others"].clamp(min=torch.finfo(e.dtype).tiny).log() - sums["x_y"]
    nll = torch.logaddexp(torch.zeros_like(margin), margin)
    total, log_total = sums["others"] + sums["x_y"].exp(), nll + sums["x_y"]
    values: dict[str, Any] = {
        "nll": nll,
        "cost": sums["cost"] / total if cost is not None else None,
        "entropy": log_total - sums["x"] / total if "entropy" in read else None,
        "logsumexp": top + log_total if "logsumexp" in read else None,
        "mean_logit": sums["logits"] / shard.vocab if "mean_logit" in read else None,
        "tempered_logsumexp": top + T * sums["tempered"].log() if "tempered_logsumexp" in read else None,
    }
    statistics = Statistics(**values)
    return objective.value(statistics), statistics


def _largest(logits: Tensor, group: dist.ProcessGroup) -> Float[Tensor, " tokens"]:
    top = logits.amax(-1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
    if top.numel():
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    return top


class _SumOver(torch.autograd.Function):
    """The sum over processes, each of which goes on to compute the same with it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        if total.numel():
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream, None
