"""The kernel of `otloss._kernels.ordinal_rows` as a differentiable function of the logits.

The gradient is made together with the values. Where a graph of it is asked for (create_graph=True), it is that of the
slow twin, which the caller hands over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._kernels import ordinal_rows
from otloss._kernels._compile import as_many_threads_as_torch


@dataclass(frozen=True)
class RankedScore:
    """What the kernel needs beside logits and labels.

    Attributes:
        gaps: (K - 1,) between neighbouring class values, in the dtype of the logits, without a graph.
        mix: weight of the cross-entropy.
        twin: the same function of (logits, labels) in torch operations.
    """

    gaps: Float[Tensor, " gaps"]
    mix: float
    twin: Callable[[Tensor, Tensor], Tensor]


def values_of(
    score: RankedScore, logits: Float[Tensor, "rows classes"], labels: Int[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """Return the value of each row, NaN or infinite where its logits make no distribution or no cross-entropy."""
    wanted = torch.is_grad_enabled() and logits.requires_grad
    found: Tensor = _RankedScore.apply(score, wanted, logits.contiguous(), labels.contiguous())
    return found


class _RankedScore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, score: RankedScore, wanted: bool, logits: Tensor, labels: Tensor) -> Tensor:
        values = torch.empty_like(logits[:, 0])
        slopes = torch.empty_like(logits if wanted else logits[:0])
        ctx.save_for_backward(logits, labels, slopes)
        ctx.score = score
        rows = (t.detach().numpy() for t in (logits, labels, score.gaps.contiguous()))
        with as_many_threads_as_torch():
            ordinal_rows.scores(*rows, score.mix, values.numpy(), slopes.numpy(), torch.get_num_threads())
        return values

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        logits, labels, slopes = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, None, slopes * upstream[0].unsqueeze(-1), None
        value = ctx.score.twin(logits, labels)
        return None, None, torch.autograd.grad(value, logits, upstream[0], create_graph=True)[0], None
