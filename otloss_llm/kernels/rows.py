"""The two sweeps over rows of logits in plain torch, for any device and dtype: the reference implementation.

Notation: z logits of one token, y its label, c its row of the cost. A process may hold only some columns of the
vocabulary, so that a row's label lies elsewhere: it is then -1 here.

    softmax_rows     top = max z    e_i = exp(z_i - top)    others = sum_i e_i    (i != y)
                     others_cost = sum_i e_i c_i    others_logit = sum_i e_i (z_i - top), 0 where e_i is 0
    gradient_rows    z_i <- e_i (a + b (c_i - D) - h (z_i - top)) for i != y,    z_y <- g

The costs and others_logit, with which the entropy is made, are summed where they are asked for only.

Between them `z` belongs to the sweeps: they may leave exp(z - top) in it, or the logits. The label's own entry stays
apart from the others, so that 1 - q_y is a sum of small numbers, never a difference of numbers near 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class RowSums(NamedTuple):
    """What the first sweep knows of each row: its columns' share of the softmax and of the transport cost.

    Attributes:
        top: the largest logit; NaN where a logit is NaN or +inf.
        others: `sum exp(z_i - top)` over the columns that are not the label.
        others_cost: the same sum weighted by the cost; None without costs.
        z_y, c_y: logit and cost of the label; -inf and 0 where it is not among the columns.
        others_logit: the sum of `others` weighted by `z_i - top`; None unless asked for.
    """

    top: Float[Tensor, " rows"]
    others: Float[Tensor, " rows"]
    others_cost: Float[Tensor, " rows"] | None
    z_y: Float[Tensor, " rows"]
    c_y: Float[Tensor, " rows"] | None
    others_logit: Float[Tensor, " rows"] | None = None


@dataclass(frozen=True)
class CostRows:
    """Rows of the cost, one per distinct label, and which of them each row of logits uses."""

    rows: Float[Tensor, "distinct columns"]
    which: Int[Tensor, " rows"]


class GradientCoefficients(NamedTuple):
    """What the second sweep needs for each row; `at_label` is g.

    `b` and `transport` (D) are None where the value does not depend on D, `h` where it does not depend on the entropy.
    """

    a: Float[Tensor, " rows"]
    b: Float[Tensor, " rows"] | None
    transport: Float[Tensor, " rows"] | None
    at_label: Float[Tensor, " rows"]
    h: Float[Tensor, " rows"] | None = None

    def relative_to(self, own_top: Float[Tensor, " rows"], top: Float[Tensor, " rows"]) -> GradientCoefficients:
        """Return the numbers for a sweep over some of the columns, whose e are relative to their own largest logit."""
        share = (own_top - top).exp()
        a, b, transport, at_label, h = self
        if h is not None:
            a, h = (a - h * _finite(own_top - top)) * share, h * share
        else:
            a = a * share
        return GradientCoefficients(a, None if b is None else b * share, transport, at_label, h)


def logits_from(
    top: Float[Tensor, "*parts rows"],
    others_logit: Float[Tensor, "*parts rows"] | None,
    others: Float[Tensor, "*parts rows"],
    own_top: Float[Tensor, "*parts rows"],
) -> Tensor | None:
    """`others_logit` relative to `top`, of columns whose sums are relative to their own top."""
    if others_logit is None:
        return None
    return (own_top - top).exp() * (others_logit + others * _finite(own_top - top))


def _finite(difference: Tensor) -> Tensor:
    """0 where a difference of tops is -inf: all those columns are masked."""
    return torch.where(difference == -torch.inf, 0.0, difference)


def softmax_rows(
    z: Float[Tensor, "rows columns"], label: Int[Tensor, " rows"], cost: CostRows | None, entropy: bool = False
) -> RowSums:
    """The sums of each row, `others_logit` for the entropy only; leaves `exp(z - top)` in `z`, 0 at the label."""
    here = label >= 0
    column = label.clamp(min=0)[:, None]
    z_y = torch.where(here, z.gather(-1, column).squeeze(-1), -torch.inf)
    top = z.amax(-1)
    top = torch.where(top == torch.inf, torch.nan, top)
    shift = torch.where(top == -torch.inf, 0.0, top)  # a row of masked columns: exp(-inf - 0) is 0
    e = z.sub_(shift[:, None]).exp_()
    e.scatter_(-1, column, torch.where(here[:, None], 0.0, e.gather(-1, column)))
    logit = torch.special.xlogy(e, e).sum(-1) if entropy else None
    if cost is None:
        return RowSums(top, e.sum(-1), None, z_y, None, logit)
    rows = cost.rows.index_select(0, cost.which).to(e.dtype)
    c_y = torch.where(here, rows.gather(-1, column).squeeze(-1), 0.0)
    return RowSums(top, e.sum(-1), torch.linalg.vecdot(e, rows), z_y, c_y, logit)


def gradient_rows(
    z: Float[Tensor, "rows columns"],
    top: Float[Tensor, " rows"],
    label: Int[Tensor, " rows"],
    cost: CostRows | None,
    coefficients: GradientCoefficients,
) -> None:
    """Overwrite `z`, as `softmax_rows` left it, with the gradient in the logits."""
    e = z
    logit = None if coefficients.h is None else torch.special.xlogy(e, e).mul_(coefficients.h[:, None])
    if cost is None or coefficients.b is None or coefficients.transport is None:
        e.mul_(coefficients.a[:, None])
    else:
        rows = cost.rows.index_select(0, cost.which).to(e.dtype)
        e.mul_(rows.sub_(coefficients.transport[:, None]).mul_(coefficients.b[:, None]).add_(coefficients.a[:, None]))
    if logit is not None:
        e.sub_(logit)
    column = label.clamp(min=0)[:, None]
    e.scatter_(-1, column, torch.where(label >= 0, coefficients.at_label, e.gather(-1, column).squeeze(-1))[:, None])
