"""Losses of the K - 1 decisions "above class k or not" of a distribution over ordered classes.

With F the cumulative distribution of softmax(logits), and for a label y

    all         sum_{k >= y} -log F_k + sum_{k < y} -log(1 - F_k)      as the ranked probability score, with logarithms
    immediate   -log F_y - log(1 - F_{y-1})                            the two thresholds beside y alone

Both are computed of the log-odds a_k = log F_k - log(1 - F_k), -log F_k = log(1 + exp(-a_k)), which keeps relative
accuracy where F_k is nearly one. Behind a cumulative link a_k is the threshold minus the score, so these are the losses
of threshold models.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid, pad  # softplus is rounded from 20 on

from otloss._checks import numbers
from otloss._ordered_classes import check_choice
from otloss._public import public
from otloss.losses.rows import Rows, posed_rows

KINDS = ("all", "immediate")
# Log-probability of a class with logit -inf: a finite number, as logcumsumexp has no gradient at -inf.
_EXCLUDED = -1e30


@public
def threshold_loss(
    logits: Float[Tensor, "*batch classes"],
    target: Int[Tensor, "*batch"] | Float[Tensor, "*batch classes"],
    *,
    kind: str = "all",
    class_weight: Float[Tensor, " classes"] | None = None,
    sample_weight: Float[Tensor, "*batch"] | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
    dim: int | None = None,
) -> Float[Tensor, "*batch"]:
    """Return the logistic loss of the thresholds between ordered classes, on the right side of which the label lies.

    "all" is the loss of CORAL and of mord's `LogisticAT`, "immediate" the loss of mord's `LogisticIT`. Both are exactly
    theirs for the log-probabilities of `otloss.nn.CumulativeLinkHead`, whose thresholds are always ordered. "all" is a
    proper score. "immediate" is not: for given probabilities it is least where neighbouring thresholds lie apart.

    Args:
        logits: (..., K) of any model, log-probabilities for example.
        target: class positions, or soft labels, whose expected loss is taken.
        kind: "all" thresholds or the "immediate" ones.
        class_weight, sample_weight, ignore_index, reduction, dim: as for `otloss.ordinal_loss`.

    Returns:
        A scalar, or (...); differentiable in logits, soft labels and weights.

    Raises:
        TypeError, ValueError: as `otloss.ordinal_loss`, and if the classes on the label's side of a threshold have all
            logit -inf.

    Source:
        W. Cao, V. Mirjalili, S. Raschka, Rank consistent ordinal regression for neural networks, arXiv 1901.07884;
        J. Rennie, N. Srebro, Loss functions for preference levels, IJCAI 2005 workshop (both kinds).

    Example:
        >>> logits = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 2.0]])
        >>> threshold_loss(logits, torch.tensor([0, 0]), reduction="none")
        tensor([2.3522, 3.7859])
        >>> threshold_loss(logits, torch.tensor([0, 0]), kind="immediate", reduction="none")
        tensor([2.2395, 2.2395])
    """
    check_choice("kind", kind, KINDS)
    rows = posed_rows(
        logits, target, class_weight=class_weight, sample_weight=sample_weight, ignore_index=ignore_index,
        reduction=reduction, dim=dim,
    ).checked()  # fmt: skip
    return rows.positions.reduced(_values(rows, kind))


def _values(rows: Rows, kind: str) -> Float[Tensor, " rows"]:
    by_label = _by_label(rows.logits, kind)
    if rows.is_soft:
        values = (rows.target * by_label).sum(-1)
    else:
        values = by_label.gather(-1, rows.target.unsqueeze(-1)).squeeze(-1)
    of_rows = numbers(values).flatten()
    if of_rows.numel() and of_rows.amax() > -_EXCLUDED / 2:
        row = int(of_rows.argmax())
        raise ValueError(
            f"the loss of row {row} (of the positions that take part) is infinite: all classes on the side of a "
            "threshold where its label lies have logit -inf. Unmask a class, or leave the position out."
        )
    return values


def _by_label(logits: Float[Tensor, "rows classes"], kind: str) -> Float[Tensor, "rows classes"]:
    """Return the loss of each row for each label that it might have."""
    z = logits.masked_fill(logits == -torch.inf, _EXCLUDED)
    z = z - z.detach().amax(-1, keepdim=True)  # sums of far logits would lose the digits of their differences
    log_odds = z.logcumsumexp(-1)[:, :-1] - z.flip(-1).logcumsumexp(-1).flip(-1)[:, 1:]  # (rows, K - 1)
    below, above = pad(-logsigmoid(-log_odds), (1, 0)), pad(-logsigmoid(log_odds), (0, 1))
    if kind == "all":
        below, above = below.cumsum(-1), above.flip(-1).cumsum(-1).flip(-1)
    return below + above
