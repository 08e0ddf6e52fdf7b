"""Losses of segmentations: transport between masks, and the Dice overlap with a cost between classes.

    mask_loss          S(p, q), the Sinkhorn divergence of two images with the squared distance of pixels as the cost
    wasserstein_dice   1 - 2 TP / (2 TP + sum_i D_i),   D_i = sum_c q_ic cost(y_i, c),
                       TP = sum_i a_{y_i} (a_{y_i} - D_i),   a_c = cost(c, background)

Overlap says nothing about how far a wrong pixel is from the target; transport does, and costs more. With two classes
and costs of 0 and 1 `wasserstein_dice` is the soft Dice loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss.costs import Cost, GridCost, as_cost
from otloss.extending import (
    check_below_infinity,
    check_finite,
    check_floating,
    check_integers,
    check_reduction,
    check_tensor,
    reduced,
    sinkhorn_divergence,
)

EMPTY = ("area", "zero", "error")
_SMOOTH = 1e-5  # in pixels: the loss of an image without foreground that is predicted so is 0


def mask_loss(
    logits: Float[Tensor, "*batch height width"],
    target: Float[Tensor, "*batch height width"],
    *,
    epsilon: float,
    spacing: float | Sequence[float] = 1.0,
    marginal_penalty: float | None = None,
    empty: str = "area",
    tolerance: float | None = 1e-3,
    reduction: str = "mean",
) -> Tensor:
    """Return the Sinkhorn divergence between predicted and true masks of one class, with squared distances as costs.

    Without `marginal_penalty` both masks are scaled to mass one: the loss then compares shapes and places and not
    areas; add cross-entropy or Dice for these. With it the masses are areas over that of the target.

    Args:
        logits: (..., height, width), of the class at each pixel; probabilities are their sigmoids. With three numbers
            in `spacing`: (..., depth, height, width).
        target: of that shape, >= 0: True or 1 where the class is.
        epsilon: above 0, a squared length. Details smaller than its root are smoothed away; small ones take longer.
        spacing: of neighbouring pixels, a number or one per axis, in the unit of length.
        marginal_penalty: the price of a share of the area that appears or vanishes, a squared length; None for none.
        empty: for images whose target is empty, "area" takes the predicted area (times the volume of a pixel, so a
            squared length in two axes), "zero" 0 and "error" raises.
        tolerance: as for `sinkhorn`.
        reduction: "mean" or "sum" over the images, or "none".

    Returns:
        A number, or (...) with "none", a squared length; differentiable in the logits.

    Raises:
        TypeError: if logits or the target are not tensors of the right kind.
        ValueError: if shapes differ, or a number is not finite or in range.

    Source:
        J. Feydy et al., Interpolating between Optimal Transport and MMD using Sinkhorn Divergences, 2019.

    Example:
        >>> target = torch.zeros(8, 8)
        >>> target[2:4, 2:4] = 1
        >>> near, far = (20 * target.roll(k, -1) - 10 for k in (1, 4))
        >>> mask_loss(near, target, epsilon=0.1).round(decimals=1), mask_loss(far, target, epsilon=0.1).round()
        (tensor(1.), tensor(16.))
    """
    check_reduction(reduction)
    if empty not in EMPTY:
        raise ValueError(f"empty is {empty!r}, expected one of {EMPTY}.")
    axes = len(spacing) if isinstance(spacing, Sequence) else 2
    q = _checked_target(logits, target, axes)
    cost = GridCost(logits.shape[-axes:], spacing=spacing).to(logits.device, torch.float32)
    log_p, q = torch.nn.functional.logsigmoid(logits.to(q.dtype)).flatten(-axes), q.flatten(-axes)
    area, wanted = log_p.exp().sum(-1), q.sum(-1)
    is_empty = wanted == 0
    if empty == "error" and bool(is_empty.any()):
        raise ValueError('a target is empty, expected some of the class in each; leave it out, or use empty="area".')
    # A pixel of each empty target, so that its problem has a solution, which is not used.
    q = torch.where(is_empty.unsqueeze(-1), 1.0, q)
    q = q / q.sum(-1, keepdim=True)
    p = torch.softmax(log_p, -1)
    if marginal_penalty is not None:
        # A predicted area that underflows has no derivative.
        share = area.clamp(min=1e-20) / wanted.clamp(min=torch.finfo(q.dtype).tiny)
        p = p * torch.where(is_empty, 1.0, share).unsqueeze(-1)
    value = sinkhorn_divergence(p, q, cost, epsilon=epsilon, marginal_penalty=marginal_penalty, tolerance=tolerance)
    pixel = math.prod(cost.spacing)
    value = torch.where(is_empty, pixel * area if empty == "area" else 0 * area, value)
    return reduced(value.reshape(-1), None, None, value.shape, reduction).to(logits.dtype)


def _checked_target(logits: Any, target: Any, axes: int) -> Tensor:
    check_finite("logits", check_floating("logits", logits))
    q = check_tensor("target", target)
    if logits.shape != q.shape or logits.dim() < axes or 0 in logits.shape:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)} and the target {tuple(q.shape)}, expected one shape of at least "
            f"{axes} axes without a 0; a channel of one class is removed by logits.squeeze(1)."
        )
    q = q.to(torch.promote_types(logits.dtype, torch.float32))
    check_finite("target", q)
    lowest = float(q.detach().amin())
    if lowest < 0:
        raise ValueError(f"the target holds {lowest:g}, expected numbers >= 0, such as 1 where the class is.")
    return q


def wasserstein_dice(
    logits: Float[Tensor, "batch classes ..."],
    target: Int[Tensor, "batch ..."],
    cost: Cost | Float[Tensor, "classes classes"],
    *,
    background: int = 0,
    reduction: str = "mean",
) -> Tensor:
    """Return the generalised Wasserstein Dice loss, in which confusing near classes costs less.

    Args:
        logits: (batch, K, ...), probabilities are their softmax over the second axis.
        target: (batch, ...), class positions.
        cost: (K, K) costs >= 0, [true, predicted], or a cost object, zero on the diagonal; scaled to a largest of 1.
        background: the position of the class whose agreement does not count as overlap.
        reduction: "mean" or "sum" over the images, or "none". Each image has its own overlap.

    Returns:
        A number, or (batch,) with "none", from 0 to 1 (above 1 only where two classes cost more than the background); 0
            too for an image without foreground that is predicted so.

    Raises:
        TypeError: if logits are not floating or targets not integers.
        ValueError: if shapes do not fit, a target is not a position, or the cost of a class to the background is 0.

    Source:
        L. Fidon et al., Generalised Wasserstein Dice Score for Imbalanced Multi-class Segmentation, 2017,
        arXiv 1707.00478.

    Example:
        >>> logits = torch.tensor([[[4.0, 0.0], [0.0, 4.0], [0.0, 0.0]]])  # one image of two pixels, three classes
        >>> cost = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.2], [1.0, 0.2, 0.0]])
        >>> [round(float(wasserstein_dice(logits, torch.tensor([y]), cost)), 3) for y in ([0, 1], [0, 2], [1, 0])]
        [0.028, 0.135, 0.968]
    """
    check_reduction(reduction)
    check_below_infinity("logits", check_floating("logits", logits))
    matrix = as_cost(cost).dense().to(logits.device, torch.promote_types(logits.dtype, torch.float32))
    positions = check_integers("target", target).long()
    classes = logits.shape[1] if logits.dim() > 1 else 0
    pixels = (logits.shape[0], *logits.shape[2:]) if logits.dim() > 2 else None
    if matrix.shape != (classes, classes) or positions.shape != pixels:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}, the target {tuple(positions.shape)} and the cost "
            f"{tuple(matrix.shape)}, expected (batch, K, ...), (batch, ...) and (K, K)."
        )
    if positions.numel() and not (int(positions.amin()) >= 0 and int(positions.amax()) < classes):
        raise ValueError(f"the target holds {positions.amin()} to {positions.amax()}, expected 0 to {classes - 1}.")
    if isinstance(background, bool) or not isinstance(background, int) or not 0 <= background < classes:
        raise ValueError(f"background is {background!r}, expected the position of a class, 0 to {classes - 1}.")
    matrix = matrix / matrix.amax().clamp(min=torch.finfo(matrix.dtype).tiny)
    overlap = matrix[:, background]
    others = torch.arange(classes, device=logits.device) != background
    if not (bool((matrix.diagonal() == 0).all()) and bool((overlap[others] > 0).all())):
        raise ValueError(
            f"the costs to the background {background} are {overlap.tolist()}, and on the diagonal "
            f"{matrix.diagonal().tolist()}; expected 0 on the diagonal, and costs above 0 to the background."
        )
    q = torch.softmax(logits.to(matrix.dtype), 1).flatten(2)  # (batch, K, pixels)
    y = positions.flatten(1)
    distance = (q * matrix[y].mT).sum(1)  # (batch, pixels)
    weight = overlap[y]
    agreed = 2 * (weight * (weight - distance)).sum(1)
    value = 1 - (agreed + _SMOOTH) / (agreed + distance.sum(1) + _SMOOTH)
    return reduced(value, None, None, value.shape, reduction).to(logits.dtype)
