"""The joint-distribution loss of domain adaptation: source features and labels transported to a target batch.

    min over plans P of <C, P>,    C_ij = a |s_i - t_j|^2 - b log q_j(y_i)

with s_i, y_i features and labels of the source, t_j features and q_j predicted probabilities of the target. The
predictions there get the labels that transport brings to them. Source: B. Damodaran et al., DeepJDOT, arXiv 1803.10081.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import check_cloud, check_finite, check_floating, check_integers, check_not_negative
from otloss._public import public
from otloss.costs import PointCost
from otloss.solvers.closed_forms.line import finite_in
from otloss.solvers.options import Penalty
from otloss.solvers.solve import emd, sinkhorn


@public
def jdot_loss(
    source: Float[Tensor, "n d"],
    target: Float[Tensor, "m d"],
    labels: Int[Tensor, " n"],
    logits: Float[Tensor, "m classes"],
    *,
    feature_weight: float = 1.0,
    label_weight: float = 1.0,
    epsilon: float | None = None,
    marginal_penalty: Penalty = None,
) -> Float[Tensor, ""]:
    """Return the least cost of transporting source features and labels to target features and predictions.

    Add it to the cross-entropy of the source. Batches should hold the classes in the shares of the target; where these
    are not known, `marginal_penalty` lets samples without a counterpart stay.

    Args:
        source, target: features of both batches, with their graphs; squared distances between them are the cost.
        labels: class positions of the source batch.
        logits: of the target batch.
        feature_weight, label_weight: a and b above, >= 0.
        epsilon: None for exact transport; else as for `sinkhorn`, in the unit of the cost.
        marginal_penalty: as for `sinkhorn`, needs an epsilon.

    Returns:
        A number, differentiable in source, target and logits; every sample has the weight 1 / n or 1 / m.

    Raises:
        TypeError: if features or logits are not floating tensors, or labels no integers.
        ValueError: if shapes do not fit, a label is not a position, or a number is not finite or in range.

    Source:
        B. Damodaran et al., DeepJDOT: Deep Joint Distribution Optimal Transport for Unsupervised Domain Adaptation,
        arXiv 1803.10081.

    Example:
        >>> source, target = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.2], [0.1]])
        >>> jdot_loss(source, target, torch.tensor([0, 1]), torch.tensor([[0.0, 3.0], [3.0, 0.0]]))
        tensor(0.0736)
    """
    for name, points in (("source", source), ("target", target)):
        if check_cloud(name, points).dim() != 2:
            raise ValueError(f"{name} has shape {tuple(points.shape)}, expected (n, d), one batch of features.")
    positions = _checked_labels(source, target, labels, logits)
    for name, weight in (("feature_weight", feature_weight), ("label_weight", label_weight)):
        check_not_negative(name, weight)
    distances = PointCost(source, target).dense()
    cost = feature_weight * finite_in(distances.dtype, distances, 2)
    cost = cost - label_weight * torch.log_softmax(logits.to(cost.dtype), -1).T[positions]
    if epsilon is not None:
        return sinkhorn(None, None, cost, epsilon=epsilon, marginal_penalty=marginal_penalty)
    if marginal_penalty is not None:
        raise ValueError("marginal_penalty is given without epsilon, expected both: exact transport holds the weights.")
    return emd(None, None, cost)


def _checked_labels(source: Tensor, target: Tensor, labels: Any, logits: Any) -> Tensor:
    check_finite("logits", check_floating("logits", logits))
    positions = check_integers("labels", labels).long()
    if positions.shape != source.shape[:1] or logits.dim() != 2 or logits.shape[0] != target.shape[0]:
        raise ValueError(
            f"labels have shape {tuple(positions.shape)} and logits {tuple(logits.shape)} for {len(source)} source and "
            f"{len(target)} target samples, expected ({len(source)},) and ({len(target)}, classes)."
        )
    low, high = int(positions.min()), int(positions.max())
    if not (low >= 0 and high < logits.shape[1]):
        raise ValueError(f"labels hold {low} to {high}, expected 0 to {logits.shape[1] - 1}, as the logits.")
    return positions
