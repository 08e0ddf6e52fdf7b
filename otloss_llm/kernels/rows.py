"""The two sweeps over rows of logits in plain torch, for any device and dtype: the reference implementation.

Notation: z logits of one token, y its label, c its row of the cost. A process may hold only some columns of the
vocabulary, so that a row's label lies elsewhere: it is then -1 here.

    softmax_rows     top = max z    others = sum_i exp(z_i - top)    others_cost = sum_i exp(z_i - top) c_i    (i != y)
    gradient_rows    z_i <- exp(z_i - top) (a + b (c_i - D)) for i != y,    z_y <- g

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
    """

    top: Float[Tensor, " rows"]
    others: Float[Tensor, " rows"]
    others_cost: Float[Tensor, " rows"] | None
    z_y: Float[Tensor, " rows"]
    c_y: Float[Tensor, " rows"] | None


@dataclass(frozen=True)
class CostRows:
    """Rows of the cost, one per distinct label, and which of them each row of logits uses."""

    rows: Float[Tensor, "distinct columns"]
    which: Int[Tensor, " rows"]


class GradientCoefficients(NamedTuple):
    """What the second sweep needs for each row; `at_label` is g. `b` and `transport` (D) are None without costs."""

    a: Float[Tensor, " rows"]
    b: Float[Tensor, " rows"] | None
    transport: Float[Tensor, " rows"] | None
    at_label: Float[Tensor, " rows"]


def softmax_rows(z: Float[Tensor, "rows columns"], label: Int[Tensor, " rows"], cost: CostRows | None) -> RowSums:
    """The sums of each row; leaves `exp(z - top)` in `z`, 0 at the label."""
    here = label >= 0
    column = label.clamp(min=0)[:, None]
    z_y = torch.where(here, z.gather(-1, column).squeeze(-1), -torch.inf)
    top = z.amax(-1)
    top = torch.where(top == torch.inf, torch.nan, top)
    shift = torch.where(top == -torch.inf, 0.0, top)  # a row of masked columns: exp(-inf - 0) is 0
    e = z.sub_(shift[:, None]).exp_()
    e.scatter_(-1, column, torch.where(here[:, None], 0.0, e.gather(-1, column)))
    if cost is None:
        return RowSums(top, e.sum(-1), None, z_y, None)
    rows = cost.rows.index_select(0, cost.which).to(e.dtype)
    c_y = torch.where(here, rows.gather(-1, column).squeeze(-1), 0.0)
    return RowSums(top, e.sum(-1), torch.linalg.vecdot(e, rows), z_y, c_y)


def gradient_rows(
    z: Float[Tensor, "rows columns"],
    top: Float[Tensor, " rows"],
    label: Int[Tensor, " rows"],
    cost: CostRows | None,
    coefficients: GradientCoefficients,
) -> None:
    """Overwrite `z`, as `softmax_rows` left it, with the gradient in the logits."""
    e = z
    if cost is None or coefficients.b is None or coefficients.transport is None:
        e.mul_(coefficients.a[:, None])
    else:
        rows = cost.rows.index_select(0, cost.which).to(e.dtype)
        e.mul_(rows.sub_(coefficients.transport[:, None]).mul_(coefficients.b[:, None]).add_(coefficients.a[:, None]))
    column = label.clamp(min=0)[:, None]
    e.scatter_(-1, column, torch.where(label >= 0, coefficients.at_label, e.gather(-1, column).squeeze(-1))[:, None])
