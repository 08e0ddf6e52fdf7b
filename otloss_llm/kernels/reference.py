"""The specification of the token loss: from full logits, in plain autograd, written for reading.

    q = softmax(logits)        nll = -log q_y        D = sum_i q_i c(i, y)        value = objective(nll, D)

Every other kernel is tested against this one in float64. It allows second derivatives.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss.costs import Cost
from otloss_llm.objectives import Objective


def token_values(
    logits: Float[Tensor, "tokens vocab"],
    labels: Int[Tensor, "tokens"],
    *,
    objective: Objective,
    cost: Cost | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Per-token `(value, nll, D)`, differentiable in the logits; every label is a valid token."""
    log_q = torch.log_softmax(logits, dim=-1)
    nll = -log_q.gather(-1, labels[:, None]).squeeze(-1)
    transport = None
    if cost is not None:
        # Summed directly: 1 - <q-mean embedding, e_y> would cancel to noise where D is small.
        rows = cost.rows(labels).to(logits.dtype)
        transport = (log_q.exp() * rows).sum(-1)
    return objective(nll, transport), nll, transport


def head_logits(
    hidden: Float[Tensor, "tokens width"],
    weight: Float[Tensor, "vocab width"],
    bias: Float[Tensor, "vocab"] | None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Float[Tensor, "tokens vocab"]:
    """`softcap * tanh(scale * (hidden weight^T + bias) / softcap)`, at least float32."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
