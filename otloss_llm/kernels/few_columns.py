"""The two sweeps where a token's cost is one number except in a few columns of the vocabulary (`FewColumns`).

The logits of the few columns S are taken out and set to -inf; the sweeps over the others are those without a cost. With
r the cost elsewhere, c_j the costs in S, e = exp(z - top), D the transport cost and a, b as in `rows`:

    others_cost = r text + few_cost        text = sum_{i not in S} e_i    few = sum_S e_j    few_cost = sum_S e_j c_j
    z_i <- e_i (a + b (r - D)) for i not in S,        z_j <- e_j (a + b (c_j - D)) for j in S

Text and numbers are summed apart: taken as a difference, a small mass on either would lose its digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss_llm.costs.vocabulary import FewColumns
from otloss_llm.kernels.rows import GradientCoefficients, RowSums, logits_from


@dataclass(frozen=True)
class ColumnSums:
    """Sums of e = exp(z - top) over all columns but the label's.

    Attributes:
        top: the largest logit of each row.
        text: sum over the columns that are not among the few.
        few, few_cost: sum over the few, and the same weighted by their costs.
        cost_elsewhere: cost of text, from each row's label.
        logit: sum over all columns weighted by `z - top`; None unless the entropy is asked for.
    """

    top: Float[Tensor, " rows"]
    text: Float[Tensor, " rows"]
    few: Float[Tensor, " rows"]
    few_cost: Float[Tensor, " rows"]
    cost_elsewhere: Float[Tensor, " rows"]
    logit: Float[Tensor, " rows"] | None = None

    def row_sums(self, z_y: Tensor, c_y: Tensor) -> RowSums:
        """The sums over all columns, given logit and cost of the label."""
        others_cost = self.cost_elsewhere * self.text + self.few_cost
        return RowSums(self.top, self.text + self.few, others_cost, z_y, c_y, self.logit)

    def multipliers(self, coefficients: GradientCoefficients) -> tuple[Tensor, Tensor, Tensor]:
        """What multiplies e: (in text, constant among the few, factor of c_j among the few)."""
        a, b, transport, _, _ = coefficients
        if b is None or transport is None:
            return a, a, torch.zeros_like(a)
        return a + b * (self.cost_elsewhere - transport), a - b * transport, b


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
        sweeps: `rows` or another module with its interface, for all other columns.
    """

    def __init__(self, sweeps: ModuleType) -> None:
        self.sweeps = sweeps

    def softmax_rows(
        self, z: Float[Tensor, "rows columns"], label: Int[Tensor, " rows"], cost: FewColumns, entropy: bool = False
    ) -> RowSums:
        """The sums of each row; takes the few columns out of `z`."""
        wide = torch.promote_types(z.dtype, torch.float32)
        z_y = z.gather(-1, label[:, None]).squeeze(-1).to(wide)
        z_few = z.index_select(1, cost.columns).to(wide)
        z.index_fill_(1, cost.columns, -torch.inf)
        text_sums = self.sweeps.softmax_rows(z, label, None, entropy)
        own = cost.columns == label[:, None]  # (rows, few)
        z_few.masked_fill_(own, -torch.inf)
        self._text_top = text_sums.top.to(wide)
        top, shift = largest(self._text_top, z_y, *([z_few.amax(-1)] if z_few.shape[1] else []))
        self._e, self._c, self._own = z_few.sub_(shift[:, None]).exp_(), cost.costs[cost.which].to(wide), own
        text = text_sums.others.to(wide) * (self._text_top - shift).exp()
        few_cost = torch.linalg.vecdot(self._e, self._c)
        logit = logits_from(shift, text_sums.others_logit, text_sums.others.to(wide), self._text_top)
        if logit is not None:
            logit = torch.where(self._text_top == -torch.inf, 0.0, logit)
            logit = logit + torch.special.xlogy(self._e, self._e).sum(-1)
        self._sums = ColumnSums(top, text, self._e.sum(-1), few_cost, cost.costs_elsewhere[cost.which].to(wide), logit)
        c_y = torch.where(own.any(-1), (self._c * own).sum(-1), self._sums.cost_elsewhere)
        return self._sums.row_sums(z_y, c_y)

    def gradient_rows(
        self, z: Tensor, top: Tensor, label: Tensor, cost: FewColumns, coefficients: GradientCoefficients
    ) -> None:
        """Write the gradient as `rows.gradient_rows` does, from what `softmax_rows` has left in z."""
        a, few_a, few_b = self._sums.multipliers(coefficients)
        # The sweeps may have left exp(z - their own top) in z: what is missing goes into the multiplier.
        _, shift = largest(self._text_top)
        text = GradientCoefficients(a, None, None, coefficients.at_label, coefficients.h)
        self.sweeps.gradient_rows(z, shift, label, None, text.relative_to(self._text_top, top))
        logit = None if coefficients.h is None else torch.special.xlogy(self._e, self._e) * coefficients.h[:, None]
        gradient = self._e.mul_(self._c.mul_(few_b[:, None]).add_(few_a[:, None]))
        if logit is not None:
            gradient.sub_(logit)
        z.index_copy_(1, cost.columns, torch.where(self._own, coefficients.at_label[:, None], gradient).to(z.dtype))
