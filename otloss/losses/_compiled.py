"""The kernels of `otloss._kernels.ordinal_rows` as a differentiable function of the logits.

The gradient is made together with the values. Where a graph of it is asked for (create_graph=True), it is that of the
slow twin, which the caller hands over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._kernels import ordinal_rows
from otloss._kernels._threads import run_on_threads


@dataclass(frozen=True)
class RankedScore:
    """What the kernels need beside logits and labels.

    Attributes:
        gaps: (K - 1,) between neighbouring class values, in the dtype of the logits, without a graph.
        mix: weight of the cross-entropy.
        tolerance: how far the mass of soft labels may be from one.
        twin: the same function of (logits, labels) in torch operations.
    """

    gaps: Float[Tensor, " gaps"]
    mix: float
    tolerance: float
    twin: Callable[[Tensor, Tensor], Tensor]


def scored(score: RankedScore, logits: Float[Tensor, "rows classes"], labels: Tensor) -> Float[Tensor, " rows"]:
    """Return the value of each row for labels (rows,) in int64, or soft ones (rows, K) in the dtype of the logits.

    It is NaN or infinite where logits or soft labels make no distribution, or the cross-entropy is infinite.
    """
    wanted = torch.is_grad_enabled() and logits.requires_grad
    logits, labels = (t.contiguous().resolve_neg() for t in (logits, labels))
    found: Tensor = _RankedScore.apply(score, wanted, logits, labels)
    return found


class _RankedScore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, score: RankedScore, wanted: bool, logits: Tensor, labels: Tensor) -> Tensor:
        values = torch.empty_like(logits[:, 0])
        slopes = torch.empty_like(logits if wanted else logits[:0])
        ctx.save_for_backward(logits, labels, slopes)
        ctx.score = score
        rows = (t.detach().numpy() for t in (logits, labels, score.gaps.contiguous()))
        threads = torch.get_num_threads()
        found = values.numpy(), slopes.numpy(), threads
        if labels.is_floating_point():
            given = (*rows, score.mix, score.tolerance, *found)
            run_on_threads(ordinal_rows.scores_of_histograms, threads, given)
        else:
            run_on_threads(ordinal_rows.scores, threads, (*rows, score.mix, *found))
        return values

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        logits, labels, slopes = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, None, slopes * upstream[0].unsqueeze(-1), None
        value = ctx.score.twin(logits, labels)
        return None, None, torch.autograd.grad(value, logits, upstream[0], create_graph=True)[0], None
