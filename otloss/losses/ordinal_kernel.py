"""The kernel of `otloss._kernels.ordinal_rows` as a differentiable function of the logits.

The gradient is computed together with the values, and a mean or a sum over the rows is taken here too: each further
operation of torch with its derivative takes longer than the kernel does for a small batch. With create_graph=True the
gradient comes from the reference implementation, which the caller passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss._kernels import ordinal_rows
from otloss._kernels._threads import ENTRIES, run_on_threads


class RankedScore(NamedTuple):
    """What the kernel needs beside logits and labels.

    Attributes:
        gaps: (K - 1,) between neighbouring class values, in the dtype of the logits.
        mix: weight of the cross-entropy.
        tolerance: how far the mass of soft labels may be from one.
        divisor: the result is the sum of the rows divided by it; None for the value of each row.
        reference: the value of each row from (logits, labels) in torch operations.
    """

    gaps: Float[np.ndarray, " gaps"]
    mix: float
    tolerance: float
    divisor: int | None
    reference: Callable[[Tensor, Tensor], Tensor]


def scored(score: RankedScore, logits: Float[Tensor, "rows classes"], labels: Tensor) -> Tensor:
    """Return the values (rows,) or their sum over `score.divisor`, a scalar.

    The labels are (rows,) in int64, or soft ones (rows, K) in the dtype of the logits. The result is NaN or infinite
    where a label is not a class, logits or soft labels are not a distribution, or the cross-entropy is infinite.
    """
    wanted = torch.is_grad_enabled() and logits.requires_grad
    logits, labels = (t.contiguous().resolve_neg() for t in (logits, labels))
    found: Tensor = _RankedScore.apply(score, wanted, logits, labels)
    return found


class _RankedScore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, score: RankedScore, wanted: bool, logits: Tensor, labels: Tensor) -> Tensor:
        rows, classes = logits.shape
        values = logits.new_empty(rows)
        gradients = logits.new_empty(logits.shape if wanted else (0, classes))
        ctx.save_for_backward(logits, labels, gradients)
        ctx.score = score
        share = 1.0 if score.divisor is None else 1.0 / score.divisor
        inputs = (logits.detach().numpy(), labels.detach().numpy(), score.gaps, score.mix, share, score.tolerance)
        # A small batch, as most are, is done before another thread has woken up.
        threads = max(1, min(torch.get_num_threads(), logits.numel() // ENTRIES))
        run_on_threads(ordinal_rows.scores, threads, (*inputs, values.numpy(), gradients.numpy(), threads))
        return values if score.divisor is None else values.sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        logits, labels, gradients = ctx.saved_tensors
        divisor = ctx.score.divisor
        if not torch.is_grad_enabled():
            return None, None, gradients * (upstream[0].unsqueeze(-1) if divisor is None else upstream[0]), None
        value = ctx.score.reference(logits, labels)
        value = value if divisor is None else value.sum() / divisor
        return None, None, torch.autograd.grad(value, logits, upstream[0], create_graph=True)[0], None
