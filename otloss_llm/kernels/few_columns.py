"""The two sweeps where the cost of a token is one number but in a few columns of the vocabulary (`FewColumns`).

The logits of the few columns are taken out and set to -inf; the sweeps over the others are those without a cost. With
s the label's slopes, r the cost elsewhere and e = exp(z - top):

    others_cost = r sum_{i not in S} e_i + sum_{j in S} c_j e_j        z_i <- e_i (a + b (r - D)) for i not in S

so that text and numbers are summed apart: as a difference, the mass on either would lose its digits where it is small.
"""

from __future__ import annotations

from types import ModuleType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss_llm.few_columns import FewRows
from otloss_llm.kernels.rows import RowSums, Slopes


class FewColumnSweeps:
    """Both sweeps over one chunk of logits: the interface of `rows`, with `FewRows` in the place of cost rows.

    Args:
        sweeps: `rows` or a twin of it, for all other columns.
    """

    def __init__(self, sweeps: ModuleType) -> None:
        self.sweeps = sweeps

    def softmax_rows(self, z: Float[Tensor, "rows columns"], label: Int[Tensor, " rows"], cost: FewRows) -> RowSums:
        """The sums of each row; takes the few columns out of `z`."""
        wide = torch.promote_types(z.dtype, torch.float32)
        z_y = z.gather(-1, label[:, None]).squeeze(-1).to(wide)
        few = _columns_of(z, cost.columns).to(wide)
        _fill_columns(z, cost.columns, -torch.inf)
        rest = self.sweeps.softmax_rows(z, label, None)
        own = cost.columns == label[:, None]  # (rows, few)
        few.masked_fill_(own, -torch.inf)
        top = torch.maximum(rest.top.to(wide), z_y)
        top = torch.maximum(top, few.amax(-1)) if few.shape[1] else top  # NaN stays
        top = torch.where(top == torch.inf, torch.nan, top)
        shift = torch.where(top == -torch.inf, 0.0, top)
        e = few.sub_(shift[:, None]).exp_()
        text = rest.others.to(wide) * (rest.top - shift).exp()
        e_y = (z_y - shift).exp()
        costs = cost.costs(torch.where(own, e_y[:, None], e))
        r = cost.rest.to(wide)
        self._rest_top, self._e, self._costs, self._own, self._r = rest.top, e, costs, own, r
        others_cost = r * text + torch.linalg.vecdot(e, costs)
        c_y = torch.where(own.any(-1), (costs * own).sum(-1), r)
        return RowSums(top, text + e.sum(-1), others_cost, z_y, c_y)

    def gradient_rows(
        self,
        z: Float[Tensor, "rows columns"],
        top: Float[Tensor, " rows"],
        label: Int[Tensor, " rows"],
        cost: FewRows,
        slopes: Slopes,
    ) -> None:
        """As `rows.gradient_rows`, of what `softmax_rows` has left."""
        a, slope = slopes.a, slopes.a[:, None]
        if slopes.b is not None and slopes.transport is not None:
            a = a + slopes.b * (self._r - slopes.transport)
            slope = slope + slopes.b[:, None] * (self._costs - slopes.transport[:, None])
        # The sweeps may have left exp(z - their own top) in z: what is missing goes into the slope.
        shift = torch.where(self._rest_top == -torch.inf, 0.0, self._rest_top)
        share = (self._rest_top - top).exp()
        self.sweeps.gradient_rows(z, shift, label, None, Slopes(a * share, None, None, slopes.at_label))
        few = torch.where(self._own, slopes.at_label[:, None], self._e.mul_(slope))
        _put_columns(z, cost.columns, few.to(z.dtype))


# On a CPU the columns of logits are rows of memory; `index_select` and its like go through them as they lie.


def _columns_of(z: Tensor, columns: Tensor) -> Tensor:
    return z.T.index_select(0, columns).T if z.T.is_contiguous() else z.index_select(1, columns)


def _fill_columns(z: Tensor, columns: Tensor, value: float) -> None:
    if z.T.is_contiguous():
        z.T.index_fill_(0, columns, value)
    else:
        z.index_fill_(1, columns, value)


def _put_columns(z: Tensor, columns: Tensor, values: Tensor) -> None:
    if z.T.is_contiguous():
        z.T.index_copy_(0, columns, values.T)
    else:
        z.index_copy_(1, columns, values)
