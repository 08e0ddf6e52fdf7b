"""Token losses against a full target distribution: label smoothing, a teacher's probabilities.

For a target distribution `p` and the model's `q` the exact transport cost needs a solver; there are two bounds from
above that need only products with the cost matrix C:

    "difference"   p^T C |q - p|            arXiv 2310.04691, Eq. 15
    "residual"     keep min(p, q) in place, move the rest by its product coupling

Both equal `D = sum_i q_i c(i, y)`, the exact cost, when p is one-hot; costs are resolved to 16 eps of the cost's dtype.
For the residual bound C may be any cost with rows for the target; for the difference bound its diagonal should be 0.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import check_finite, check_floating
from otloss._public import public
from otloss.costs import Cost
from otloss.solvers.histograms import MASS_TOLERANCE
from otloss_llm.kernels.reference import logit_statistics
from otloss_llm.losses.positions import check_objective, check_token_reduction, reduction_factor
from otloss_llm.losses.token_loss import TokenLoss
from otloss_llm.objectives import Objective, Statistics

BOUNDS = ("residual", "difference")


@public
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
        objective: `(nll, D) -> value`, or one of the statistics of `token_loss`; nll is the cross-entropy
            `-sum_i p_i log q_i`, D the bound.
        cost: vocabulary cost; only `cost.apply` is used, so no V x V matrix is formed for a cosine cost.
        bound: "residual" (0 iff q = p) or "difference", `p^T C |q - p|` (Eq. 15 of arXiv 2310.04691).
            The independent coupling `p^T C q` is not offered: a point mass minimises it, not p.
            Near q = p both bounds vanish while nll does not, so the ratio of EMO without a clip grows without limit
            there: give soft targets `EMO()`, which clips it, or a fixed weight, `EMO(1.0)`.
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
        raise ValueError(
            f"target has shape {tuple(target.shape)}, expected the shape of logits, {tuple(logits.shape)}."
        )
    total, _ = check_objective(objective, cost, logits.shape[-1])
    if not isinstance(cost, Cost):
        raise TypeError(
            f"cost is a {type(cost).__name__}, expected one that multiplies a distribution: EmbeddingCost, MixedCost "
            "or another otloss.costs.Cost. Distances of numbers as a matrix are DenseCost(matrix)."
        )
    valid = torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device) if mask is None else mask
    if valid.shape != logits.shape[:-1] or valid.dtype != torch.bool:
        raise ValueError(
            f"mask is {valid.dtype} of shape {tuple(valid.shape)}, expected bool of shape {tuple(logits.shape[:-1])}."
        )
    z, p = logits[valid], target[valid].detach()
    dtype = torch.promote_types(torch.promote_types(z.dtype, p.dtype), torch.float32)
    check_finite("logits", z)
    # float64 for the vectors: near the target nll and D are differences of numbers close to 1.
    p = p / _checked_masses(p.double(), MASS_TOLERANCE[target.dtype])[..., None]
    log_q = torch.log_softmax(z.double(), dim=-1)
    nll = -(p * log_q).sum(-1)
    gap = log_q.exp() - p
    # What rounding the target to its dtype can move; entries of exactly 0 and 1 are not rounded.
    noise = 4 * torch.finfo(target.dtype).eps * (p * (1 - p)).sum(-1)
    gap = torch.where((gap.detach().relu().sum(-1) <= noise)[..., None], 0.0, gap)
    transport = _residual(p, gap, cost) if bound == "residual" else (gap.abs() * _applied(cost.T, p)).sum(-1)
    statistics = Statistics(nll, transport, **logit_statistics(z.double(), total))
    value = total.value(statistics).to(dtype)
    loss = value if reduction == "none" else value.sum() * reduction_factor(reduction, None, value)
    return TokenLoss.at_positions(loss, statistics.map(lambda vector: vector.to(dtype)), valid)


def _residual(p: Tensor, gap: Tensor, cost: Cost) -> Tensor:
    """`r^T diag(C) + a^T C b / mass(a)`: r = min(p, q) stays, a = p - r is moved to b = q - r; 0 where the gap is 0."""
    a, b = (-gap).relu(), gap.relu()
    moved = b.sum(-1)
    mass = torch.where(moved > 0, moved, 1.0)[..., None]
    # Both shares are of order 1, so that the cost may be applied in its own, narrower dtype.
    price = (a / mass * _applied(cost, b / mass)).sum(-1)
    return moved * price + ((p - a) * cost.diagonal()).sum(-1)


def _applied(cost: Cost, v: Tensor) -> Tensor:
    """C v in float64, computed in the cost's dtype; what its rounding leaves of a 0 is 0."""
    product = cost.apply(v.to(cost.dtype))
    return torch.where(product > 16 * torch.finfo(cost.dtype).eps, product, 0.0).double()


def _checked_masses(p: Tensor, tolerance: float) -> Tensor:
    check_finite("target", p)
    if p.numel() and not bool((p >= 0).all()):
        raise ValueError(f"target holds {float(p.min())}, expected probabilities >= 0.")
    masses = p.sum(-1, dtype=torch.float64)
    invalid = (masses - 1).abs() > tolerance
    if invalid.any():
        row = int(invalid.nonzero()[0])
        raise ValueError(
            f"target row {row} (of those kept) sums to {float(masses[row]):.6g}, expected 1; divide it by its sum."
        )
    return masses
