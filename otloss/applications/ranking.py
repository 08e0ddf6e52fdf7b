"""Losses of rankings, by smooth ranks and smooth choices of the k largest.

    spearman    1 - correlation(soft ranks of the scores, ranks of the target)
    top k       -mean over the right classes i of log share_i,   share = soft_top_k(logits, k)

Of hard ranks the first is one minus Spearman's coefficient, equal entries sharing the mean of their ranks.

Sources: M. Blondel, O. Teboul, Q. Berthet, J. Djolonga, Fast Differentiable Sorting and Ranking, ICML 2020; Y. Xie et
al., Differentiable Top-k with Optimal Transport, arXiv 2002.06504.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from otloss.applications.sorting import log_top_k, soft_rank
from otloss.extending import (
    check_finite,
    check_floating,
    check_integers,
    check_positions,
    check_reduction,
    check_tensor,
    reduced,
)


def spearman_loss(
    scores: Float[Tensor, "*batch n"],
    target: Real[Tensor, "*batch n"],
    *,
    epsilon: float | None = None,
    regularization: str = "quadratic",
    reduction: str = "mean",
) -> Tensor:
    """Return one minus the correlation of the soft ranks of the scores with the ranks of the target, 0 to 2.

    Args:
        scores: (..., n), n at least 2.
        target: (..., n) numbers in whose order the scores are to be, ties with the mean of their ranks; not
            differentiated.
        epsilon, regularization: as for `soft_rank`. As epsilon falls to 0 the loss is one minus Spearman's coefficient,
            without a gradient; from 1 on ("quadratic") it is nearly one minus Pearson's of scores and ranks.
        reduction: "mean", "sum" or "none" over the rows.

    Returns:
        A scalar, or (...) with "none", in the dtype of the scores. Unchanged by `a scores + b` with a > 0, so that the
        scores are of no scale: give them one by a second loss, or read their order only. 1 with a gradient of 0 for a
        row of equal scores.

    Raises:
        TypeError: if scores are not a floating tensor, or the target is no tensor.
        ValueError: if the shapes differ, rows have fewer than two entries, a number is not finite, all targets of a row
            are equal, or an option is not valid.

    Example:
        >>> target = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> spearman_loss(torch.tensor([0.1, 0.3, 0.2, 0.9]), target, epsilon=1e-3)
        tensor(0.2000)
    """
    check_reduction(reduction)
    check_floating("scores", scores)
    check_finite("target", check_tensor("target", target))
    n = scores.shape[-1] if scores.dim() else 0
    if scores.shape != target.shape or n < 2:
        raise ValueError(
            f"scores have shape {tuple(scores.shape)} and target {tuple(target.shape)}, expected one shape (..., n) "
            "with n >= 2."
        )
    wanted = _ranks(target) - (n + 1) / 2
    spread = wanted.square().sum(-1)
    if not (spread > 0).all():
        raise ValueError(
            "all targets of a row are equal, so that they have no order; leave such rows out of spearman_loss."
        )
    ranks = soft_rank(scores, epsilon=epsilon, regularization=regularization).double() - (n + 1) / 2
    size = ranks.square().sum(-1)
    flat = size == 0
    correlation = (ranks * wanted).sum(-1) / (size.masked_fill(flat, 1.0) * spread).sqrt()
    return reduced(1 - correlation.reshape(-1), None, None, correlation.shape, reduction).to(scores.dtype)


def _ranks(x: Real[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """Return ranks from 1, equal entries with the mean of theirs."""
    x = (x.detach() if x.is_floating_point() else x.long()).contiguous()
    ascending = x.sort(-1).values
    below, up_to = (torch.searchsorted(ascending, x, right=right) for right in (False, True))
    return (below + 1 + up_to).double() / 2


def top_k_loss(
    logits: Float[Tensor, "*batch n"],
    target: Int[Tensor, "*batch"] | Bool[Tensor, "*batch n"],
    k: int,
    *,
    epsilon: float = 0.1,
    reduction: str = "mean",
) -> Tensor:
    """Return minus the logarithm of the share that the right entries have among the k largest, made smooth.

    Args:
        logits: (..., n), or any scores.
        target: (...) the right class of each row; or a mask (..., n) of several right entries, over whose logarithms
            the mean is taken.
        k: from 1 to n.
        epsilon: as for `soft_top_k`: shares go from 0.1 to 0.9 over 2.2 epsilon of the range of a row.
        reduction: "mean", "sum" or "none" over the rows.

    Returns:
        A scalar, or (...) with "none", in the dtype of the logits. At least 0, unchanged by `a logits + b` with a > 0.

    Raises:
        TypeError: if logits are not a floating tensor, k or the target not whole numbers (or a mask).
        ValueError: if shapes do not fit, k or a target is out of range, a mask has a row without a right entry, a
            number is not finite, or an option is not valid.

    Example:
        >>> logits = torch.tensor([[0.1, 2.0, 1.5, -1.0]])
        >>> [round(float(top_k_loss(logits, torch.tensor([2]), k)), 3) for k in (1, 2)]
        [1.84, 0.009]
    """
    check_reduction(reduction)
    check_floating("logits", logits)
    is_mask = check_tensor("target", target).dtype == torch.bool
    if not is_mask:
        check_integers("target", target)
    if logits.dim() == 0 or target.shape != (logits.shape if is_mask else logits.shape[:-1]):
        raise ValueError(
            f"target has shape {tuple(target.shape)}, expected {tuple(logits.shape[:-1])} classes, or a boolean mask "
            f"of the shape of logits, {tuple(logits.shape)}."
        )
    if isinstance(k, int) and k < 1:
        raise ValueError(f"k is {k}, expected at least 1.")
    log_weights = log_top_k(logits, k, epsilon=epsilon)
    if is_mask:
        count = target.sum(-1)
        if not count.all():
            raise ValueError("target has a row without a right entry, expected at least one True in each.")
        values = -(log_weights * target).sum(-1) / count
    else:
        check_positions("target", target, logits.shape[-1], None)
        values = -log_weights.gather(-1, target.long().unsqueeze(-1)).squeeze(-1)
    return reduced(values.reshape(-1), None, None, values.shape, reduction).to(logits.dtype)
