"""The two sweeps where the cost of a token is one number but in a few columns of the vocabulary (`FewColumns`).

The logits of the few columns S are taken out and set to -inf; the sweeps over the others are those without a cost. With
r the cost elsewhere, c = A + B x in S, and e = exp(z - top):

    others_cost = r text + A few + B few_x        text = sum_{i not in S} e_i, few = sum_S e_j, few_x = sum_S e_j x_j
    z_i <- e_i (a + b (r - D)) for i not in S,    z_j <- e_j (a + b (c_j - D)) for j in S

so that text and numbers are summed apart: as a difference, the mass on either would lose its digits where it is small.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss_llm.costs.few_columns import FewColumns
from otloss_llm.kernels.rows import RowSums, Slopes


@dataclass(frozen=True)
class FewSums:
    """Sums relative to `top` over all columns but the label: of text, of the few, and of x there."""

    top: Float[Tensor, " rows"]
    text: Float[Tensor, " rows"]
    few: Float[Tensor, " rows"]
    few_x: Float[Tensor, " rows"]


class Meaning:
    """What the sums of a chunk mean: its `RowSums`, and the slopes of both kinds of columns."""

    def __init__(self, sums: FewSums, z_y: Tensor, own_x: Tensor, own: Tensor, cost: FewColumns) -> None:
        """`own`: whether the label is among the few; `own_x`: its x there."""
        wide = sums.text.dtype
        self.r = cost.rest[cost.which].to(wide)
        e_y = torch.where(own, (z_y - sums.top).exp(), 0.0)
        mass = sums.few + e_y
        self.A, self.B = cost.costs_from((sums.few_x + e_y * own_x) / mass.masked_fill(mass == 0, 1.0))
        c_y = torch.where(own, self.A + self.B * own_x, self.r)
        others_cost = self.r * sums.text + self.A * sums.few + self.B * sums.few_x
        self.sums = RowSums(sums.top, sums.text + sums.few, others_cost, z_y, c_y)

    def slopes(self, slopes: Slopes) -> tuple[Tensor, Tensor, Tensor]:
        """What multiplies e in text, and intercept and slope in x of what does among the few."""
        if slopes.b is None or slopes.transport is None:
            return slopes.a, slopes.a, torch.zeros_like(slopes.a)
        text = slopes.a + slopes.b * (self.r - slopes.transport)
        return text, slopes.a + slopes.b * (self.A - slopes.transport), slopes.b * self.B


def largest(*tops: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, NaN where one is NaN or +inf; and what to subtract where all are -inf."""
    top = tops[0]
    for other in tops[1:]:
        top = torch.maximum(top, other)  # NaN stays
    top = torch.where(top == torch.inf, torch.nan, top)
    return top, torch.where(top == -torch.inf, 0.0, top)


class FewColumnSweeps:
    """Both sweeps over one chunk of logits: the interface of `rows`, with `FewColumns` in the place of cost rows.

    Args:
        sweeps: `rows` or a twin of it, for all other columns.
    """

    def __init__(self, sweeps: ModuleType) -> None:
        self.sweeps = sweeps

    def softmax_rows(self, z: Float[Tensor, "rows columns"], label: Int[Tensor, " rows"], cost: FewColumns) -> RowSums:
        """The sums of each row; takes the few columns out of `z`."""
        wide = torch.promote_types(z.dtype, torch.float32)
        z_y = z.gather(-1, label[:, None]).squeeze(-1).to(wide)
        few = z.index_select(1, cost.columns).to(wide)
        z.index_fill_(1, cost.columns, -torch.inf)
        rest = self.sweeps.softmax_rows(z, label, None)
        own = cost.columns == label[:, None]  # (rows, few)
        few.masked_fill_(own, -torch.inf)
        rest_top = rest.top.to(wide)
        top, shift = largest(rest_top, z_y, *([few.amax(-1)] if few.shape[1] else []))
        e, x = few.sub_(shift[:, None]).exp_(), cost.rows[cost.which].to(wide)
        text = rest.others.to(wide) * (rest_top - shift).exp()
        sums = FewSums(top, text, e.sum(-1), torch.linalg.vecdot(e, x))
        self._meaning = Meaning(sums, z_y, (x * own).sum(-1), own.any(-1), cost)
        self._rest_top, self._e, self._x, self._own = rest_top, e, x, own
        return self._meaning.sums

    def gradient_rows(self, z: Tensor, top: Tensor, label: Tensor, cost: FewColumns, slopes: Slopes) -> None:
        """As `rows.gradient_rows`, of what `softmax_rows` has left."""
        a, few_a, few_b = self._meaning.slopes(slopes)
        # The sweeps may have left exp(z - their own top) in z: what is missing goes into the slope.
        _, shift = largest(self._rest_top)
        share = (self._rest_top - top).exp()
        self.sweeps.gradient_rows(z, shift, label, None, Slopes(a * share, None, None, slopes.at_label))
        few = self._e.mul_(self._x.mul_(few_b[:, None]).add_(few_a[:, None]))
        z.index_copy_(1, cost.columns, torch.where(self._own, slopes.at_label[:, None], few).to(z.dtype))


def few_column_sweeps(sweeps: ModuleType) -> Any:
    """The sweeps with few columns that go with these."""
    if sweeps.__name__.endswith(".rows_compiled"):
        from otloss_llm.kernels.few_columns_numba import CompiledFewColumnSweeps

        return CompiledFewColumnSweeps()
    return FewColumnSweeps(sweeps)
