"""The loss of a predicted set: every target is matched with one prediction, and the others are to predict nothing.

    hard    min over one-to-one s of  sum_j C[s(j), j] + sum over the other predictions i of u_i
    soft    the entropic transport of n predictions, one unit each, to m targets that take one unit each and to
            "nothing", which takes n - m units at the price u_i, with the entropy against the product of both over n

C holds the loss of each prediction as each target. Both are minima, so their gradients are the gradients of C and u at
the matching, or weighted by the plan.

Source: N. Carion et al., End-to-End Object Detection with Transformers, arXiv 2005.12872 (hard).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import check_finite, check_floating, check_reduction
from otloss._public import public
from otloss.losses.rows import Positions
from otloss.solvers.assignment.match import checked_sizes, match
from otloss.solvers.solve import sinkhorn


@public
def set_loss(
    cost: Float[Tensor, "*batch n m"],
    unmatched: Float[Tensor, "*batch n"] | None = None,
    *,
    sizes: Int[Tensor, "*batch 2"] | None = None,
    epsilon: float | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the least loss of a set of predictions over all ways to match them with the targets.

    Args:
        cost: (..., n, m), the loss of prediction i as target j, of any sign: a weighted sum of losses, one for each
            thing to predict. Targets are at most as many as predictions.
        unmatched: (..., n), the loss of a prediction that no target gets; 0 by default.
        sizes: (..., 2) predictions and targets of each problem that count, for a padded batch; what is beyond is not
            read.
        epsilon: None for a matching, by `match`; above 0 for entropic transport, by `sinkhorn`, in the unit of the
            cost: predictions share targets, and the gradient does not jump.
        reduction: "mean", "sum" or "none" over the problems.

    Returns:
        A scalar, or (...) with "none": sums over predictions, the optimum with epsilon, entropy included.
        Differentiable in cost and unmatched.

    Raises:
        TypeError: if cost or unmatched is not a floating tensor.
        ValueError: if shapes or sizes do not fit, there are more targets than predictions, a number is not finite, or
            an option is not valid.

    Example:
        >>> cost = torch.tensor([[4.0, 1.0], [2.0, 0.0], [9.0, 9.0]])
        >>> set_loss(cost), set_loss(cost, torch.tensor([0.0, 0.0, 5.0])), set_loss(cost, epsilon=0.01)
        (tensor(3.), tensor(8.), tensor(3.0330))
    """
    check_reduction(reduction)
    check_floating("cost", cost)
    if cost.dim() < 2:
        raise ValueError(f"cost has shape {tuple(cost.shape)}, expected (..., n, m), predictions by targets.")
    batch, (n, m) = cost.shape[:-2], cost.shape[-2:]
    unmatched = cost.new_zeros(*batch, n) if unmatched is None else check_floating("unmatched", unmatched)
    if unmatched.shape != (*batch, n):
        raise ValueError(f"unmatched has shape {tuple(unmatched.shape)}, expected {(*batch, n)}, one per prediction.")
    shapes = torch.tensor([n, m], device="cpu").expand(*batch, 2)
    if sizes is not None:
        shapes = torch.from_numpy(checked_sizes(sizes, batch, n, m)).reshape(*batch, 2)
    if (shapes[..., 0] < shapes[..., 1]).any():
        raise ValueError(
            f"a problem has fewer predictions than targets, with (n, m) among {shapes.reshape(-1, 2).tolist()[:3]}...; "
            "expected n >= m."
        )
    shapes = shapes.to(cost.device)
    is_row = torch.arange(n, device=cost.device) < shapes[..., :1]
    is_column = torch.arange(m, device=cost.device) < shapes[..., 1:]
    dtype = torch.promote_types(cost.dtype, unmatched.dtype)
    arithmetic = torch.promote_types(dtype, torch.float32)  # float16 overflows at 65504.
    unmatched = unmatched.to(arithmetic).masked_fill(~is_row, 0.0)
    cost = cost.to(arithmetic).masked_fill(~(is_row.unsqueeze(-1) & is_column.unsqueeze(-2)), 0.0)
    check_finite("cost", cost)
    check_finite("unmatched", unmatched)
    if epsilon is None or n == 0:
        value = _matched(cost, unmatched, sizes)
    else:
        nothing = shapes[..., :1] - shapes[..., 1:]
        full = torch.cat([cost, unmatched.unsqueeze(-1)], -1)
        # Every column takes a fixed mass, so that what is taken off all of it does not change the plan.
        is_beyond = ~is_row.unsqueeze(-1)
        low = full.detach().masked_fill(is_beyond, torch.inf).amin(-2).nan_to_num(posinf=0.0)
        full = (full - low.unsqueeze(-2)).masked_fill(is_beyond, 0.0)
        q = torch.cat([is_column, nothing], -1).to(arithmetic)
        value = sinkhorn(is_row.to(arithmetic), q, full, epsilon=epsilon) + (q * low).sum(-1)
    return Positions(batch, None, None, reduction, dtype).reduced(value.reshape(-1))


def _matched(
    cost: Float[Tensor, "*batch n m"], unmatched: Float[Tensor, "*batch n"], sizes: Tensor | None
) -> Float[Tensor, "*batch"]:
    # The differences find the matching; summed up, they would lose the digits of costs below a large `unmatched`.
    gained = cost.detach().to("cpu", torch.float64) - unmatched.detach().to("cpu", torch.float64).unsqueeze(-1)
    assignment = match(gained, sizes=sizes)
    assert isinstance(assignment, tuple)
    rows, columns = (t.to(cost.device) for t in assignment)
    places = (rows * cost.shape[-1] + columns).clamp(min=0)
    matched = cost.flatten(-2).gather(-1, places).masked_fill(rows < 0, 0.0).sum(-1)
    n = unmatched.shape[-1]
    is_matched = torch.zeros(*unmatched.shape[:-1], n + 1, dtype=torch.bool, device=cost.device)
    is_matched = is_matched.scatter(-1, rows.masked_fill(rows < 0, n), True)[..., :n]
    return matched + unmatched.masked_fill(is_matched, 0.0).sum(-1)
