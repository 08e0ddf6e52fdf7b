"""The specification of the token loss: from full logits, in plain autograd, written for reading.

    q = softmax(logits)        nll = -log q_y        D = sum_i q_i c(i, y)        value = objective(nll, D, ...)
    H = -sum_i q_i log q_i        Z = log sum_i exp(logit_i)        M = mean_i logit_i
    Z_T = T log sum_i exp(logit_i / T)

D is EMO's Eq. 14 (arXiv 2310.04691) for one-hot targets, and with the costs of numbers NTL-WAS (arXiv 2411.02083).
Every other kernel is tested against this one in float64. It allows second derivatives.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss_llm.costs.vocabulary import FewColumns, LabelRows
from otloss_llm.objectives import Statistics, Sum


def token_values(
    logits: Float[Tensor, "tokens vocab"],
    labels: Int[Tensor, " tokens"],
    *,
    objective: Sum,
    cost: LabelRows | FewColumns | None,
) -> tuple[Tensor, Statistics]:
    """The value and the statistics of each token, differentiable in the logits; every label is a valid token.

    nll is always made, D where there is a cost, and the others where the objective reads them.
    """
    nll = _negative_log_likelihood(logits, labels[:, None])
    transport = None if cost is None else _transport_cost(logits, labels, cost)
    statistics = Statistics(nll, transport, **logit_statistics(logits, objective))
    return objective.value(statistics), statistics


def logit_statistics(logits: Float[Tensor, "tokens vocab"], objective: Sum) -> dict[str, Tensor]:
    """Return those statistics among entropy, logsumexp, mean_logit and tempered_logsumexp that the objective reads."""
    read, T = objective.reads, objective.temperature or 1.0
    makers = {
        "entropy": _entropy, "logsumexp": lambda z: z.logsumexp(-1), "mean_logit": lambda z: z.mean(-1),
        "tempered_logsumexp": lambda z: T * (z / T).logsumexp(-1),
    }  # fmt: skip
    return {name: make(logits) for name, make in makers.items() if name in read}


def _entropy(logits: Tensor) -> Float[Tensor, " tokens"]:
    log_q = torch.log_softmax(logits, dim=-1)
    return -(log_q.exp() * log_q.masked_fill(log_q == -torch.inf, 0.0)).sum(-1)  # a masked token has 0 log 0 = 0


def _transport_cost(logits: Tensor, labels: Tensor, cost: LabelRows | FewColumns) -> Float[Tensor, " tokens"]:
    """D, summed directly: 1 - <q-mean embedding, e_y> would cancel to noise where D is small."""
    q = torch.log_softmax(logits, dim=-1).exp()
    if isinstance(cost, LabelRows):
        return (q * cost.rows(labels, None).to(q.dtype)).sum(-1)
    c, cost_elsewhere = cost.costs[cost.which].to(q.dtype), cost.costs_elsewhere[cost.which].to(q.dtype)
    q_few, q_text = q.index_select(-1, cost.columns), q.index_fill(-1, cost.columns, 0.0).sum(-1)
    return (q_few * c).sum(-1) + cost_elsewhere * q_text


def _negative_log_likelihood(logits: Tensor, label: Tensor) -> Tensor:
    """`log(1 + sum_{i != y} exp(z_i - z_y))`: equal to `-log_softmax(z)_y`, and accurate also where q_y is near 1.

    `log_softmax` rounds to 0 every nll below the dtype's epsilon; the ratio nll / D of EMO would be lost with it.
    """
    logits = logits - logits.detach().amax(-1, keepdim=True)  # first: logsumexp adds its maximum back, and rounds
    # The lowest finite number and not -inf: with everything else masked, -inf minus -inf would make NaN gradients.
    others = logits.scatter(-1, label, torch.finfo(logits.dtype).min).logsumexp(-1)
    margin = others - logits.gather(-1, label).squeeze(-1)
    return torch.logaddexp(torch.zeros_like(margin), margin)


def head_logits(
    hidden: Float[Tensor, "tokens width"],
    weight: Float[Tensor, "vocab width"],
    bias: Float[Tensor, " vocab"] | None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Float[Tensor, "tokens vocab"]:
    """`softcap * tanh(scale * (hidden weight^T + bias) / softcap) / temperature`, at least float32."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    return (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
