"""Token losses against a full target distribution: label smoothing, a teacher's probabilities.

For a target distribution `p` and the model's `q` the exact transport cost needs a solver; there are two bounds from
above that need only products with the cost matrix C:

    "difference"   |q - p|^T C p            arXiv 2310.04691, Eq. 15
    "residual"     keep min(p, q) in place, move the rest by its product coupling

Both equal `D = sum_i q_i c(i, y)`, the exact cost, when p is one-hot.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from otloss import upper_bound
from otloss._checks import check_finite, check_floating
from otloss._histograms import MASS_TOLERANCE
from otloss.costs import Cost
from otloss_llm._positions import check_objective, check_token_reduction, reduction_factor, scatter
from otloss_llm.objectives import Objective
from otloss_llm.token_loss import TokenLoss

BOUNDS = ("residual", "difference")


def dense_token_loss(
    logits: Float[Tensor, "*batch vocab"],
    target: Float[Tensor, "*batch vocab"],
    *,
    objective: Objective,
    cost: Cost,
    bound: str = "residual",
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> TokenLoss:
    """An objective of (cross-entropy, transport bound) per token against a full target distribution.

    Args:
        logits: `(..., V)`.
        target: `(..., V)` probabilities (label smoothing, a teacher's distribution); each row sums to 1. No gradient.
        objective: `(nll, D) -> value`; nll is the cross-entropy `-sum_i p_i log q_i`, D the bound.
        cost: vocabulary cost; only `cost.apply` is used, so no V x V matrix is formed for a cosine cost.
        bound: "residual" (0 iff q = p) or "difference", `|q - p|^T C p` (Eq. 15 of arXiv 2310.04691).
            The independent coupling `q^T C p` is not offered: a point mass minimises it, not p.
        mask: `(...)` bool, False leaves a position out.
        reduction: "mean" over the positions kept, "sum", or "none".

    Returns:
        `TokenLoss(loss, nll, cost)`; nll and cost are per position.

    Raises:
        ValueError: shapes that differ, targets that are negative or do not sum to 1, a cost of another vocabulary.

    Example:
        >>> from otloss_llm import EMO, EmbeddingCost
        >>> target = torch.tensor([[0.7, 0.2, 0.1]])
        >>> out = dense_token_loss(target.log(), target, objective=EMO(1.0), cost=EmbeddingCost(torch.eye(3)))
        >>> round(out.cost.item(), 6)  # the residual bound is 0 where q = p
        0.0
    """
    check_floating("logits", logits)
    check_floating("target", target)
    check_token_reduction(reduction, None)
    if bound not in BOUNDS:
        raise ValueError(f"bound is {bound!r}, expected one of {BOUNDS}.")
    if target.shape != logits.shape:
        raise ValueError(f"target has shape {tuple(target.shape)}, expected that of logits, {tuple(logits.shape)}.")
    check_objective(objective, cost, logits.shape[-1])
    valid = torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device) if mask is None else mask
    if valid.shape != logits.shape[:-1] or valid.dtype != torch.bool:
        raise ValueError(
            f"mask is {valid.dtype} of shape {tuple(valid.shape)}, expected bool of shape {tuple(logits.shape[:-1])}."
        )
    z, p = logits[valid], target[valid].detach()
    dtype = torch.promote_types(torch.promote_types(z.dtype, p.dtype), torch.float32)
    z, p = z.to(dtype), p.to(dtype)
    check_finite("logits", z)
    # Normalised once for both terms: what rounding leaves over would have nowhere to go in the transport problem.
    p = p / _checked_masses(p, MASS_TOLERANCE[target.dtype]).to(dtype)[..., None]
    log_q = torch.log_softmax(z, dim=-1)
    nll = -(p * log_q).sum(-1)
    if bound == "residual":
        transport = upper_bound(p, log_q.exp(), cost, coupling="residual")
    else:
        transport = ((log_q.exp() - p).abs() * cost.apply(p).to(dtype)).sum(-1)
    value = objective(nll, transport)
    loss = scatter(value, valid) if reduction == "none" else value.sum() * reduction_factor(reduction, None, value)
    return TokenLoss(loss, scatter(nll.detach(), valid), scatter(transport.detach(), valid))


def _checked_masses(p: Tensor, tolerance: float) -> Tensor:
    check_finite("target", p)
    if p.numel() and not bool((p >= 0).all()):
        raise ValueError(f"target holds {float(p.min())}, expected probabilities >= 0.")
    masses = p.sum(-1, dtype=torch.float64)
    off = (masses - 1).abs() > tolerance
    if off.any():
        row = int(off.nonzero()[0])
        raise ValueError(
            f"target row {row} (of those kept) sums to {float(masses[row]):.6g}, expected 1; divide it by its sum."
        )
    return masses
