"""How far the expected rating lies from the label: `RatingCost`.

v are the values of the rating tokens, y the label, q the distribution over all tokens; a token that is no rating counts
0.

    c(y, i) = v_i - v_y for ratings i, -v_y for other tokens:    D = sum_i q_i v_i - v_y
    c(y, i) = 0 where the label y is no rating
"""

from __future__ import annotations

from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss._checks import check_index
from otloss.losses.number_line import checked_values
from otloss_llm.costs.vocabulary import FewColumns, LabelRows, ValuesCost, check_cost_dtype
from otloss_llm.models.sharded_heads import VocabShard


class RatingCost(ValuesCost):
    """The signed difference between the expected rating and the label, for `ExpectedValue`.

    Args:
        values: `(V,)` value of each rating token, NaN for all other tokens; at least one rating.

    Raises:
        TypeError: `values` is not a floating tensor.
        ValueError: not one axis, no rating among them, an infinite value.

    Example:
        >>> RatingCost(torch.tensor([1.0, 5.0, float("nan")])).rows(torch.tensor([1, 2]))
        tensor([[-4.,  0., -5.],
                [ 0.,  0.,  0.]])
    """

    covers_text = False
    signed = True

    def __init__(self, values: Float[Tensor, " vocab"]) -> None:
        self.values = checked_values(values)
        self.columns = (~self.values.isnan()).nonzero().squeeze(-1)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the same cost elsewhere, as `VocabularyCost.to`."""
        return type(self)(check_cost_dtype(self.values.to(*args, **kwargs)))

    def positions(self, labels: Int[Tensor, "*batch"], valid: Bool[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
        """Return which of the valid positions have a rating for a label."""
        return valid & ~self.values[labels.where(valid, 0)].isnan()

    def for_labels(self, labels: Int[Tensor, " tokens"], shard: VocabShard | None = None) -> FewColumns | LabelRows:
        """Return the columns of the ratings, or dense rows with a shard."""
        if shard is not None:
            own = slice(shard.start, shard.stop)
            return LabelRows(lambda index, out: self.rows(index)[:, own], own.stop - own.start, self.device, self.dtype)
        kinds, which = self.values[labels].nan_to_num(nan=torch.inf).unique(return_inverse=True)
        is_rating = kinds.isfinite()
        y = torch.where(is_rating, kinds, 0.0)
        costs = torch.where(is_rating[:, None], self.values[self.columns] - y[:, None], 0.0)
        return FewColumns(self.columns, costs, -y, which)

    def rows(self, index: Int[Tensor, " picked"]) -> Float[Tensor, "picked vocab"]:
        """Return the costs C[index, :]."""
        table = self.for_labels(check_index("index", index, self.shape[0]))
        assert isinstance(table, FewColumns)
        rows = table.costs_elsewhere[table.which].unsqueeze(1).repeat(1, self.shape[1])
        return rows.index_copy_(1, table.columns, table.costs[table.which]) + 0.0  # no -0

    def __repr__(self) -> str:
        return (
            f"RatingCost(shape={self.shape}, dtype={self.dtype}, device='{self.device}', ratings={len(self.columns)})"
        )
