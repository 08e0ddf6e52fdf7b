"""Costs that know the numbers among the tokens of a vocabulary: `NumberCost`, and `MixedCost` of it and another cost.

NumberCost    c(y, j) = |v_j - v_y| between number tokens, `text` from a number to any other token, 0 for labels that
              are no numbers: they say nothing about how far off a number is
MixedCost     |v_j - v_y| times a scale between number tokens, another cost everywhere else
"""

from __future__ import annotations

from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import check_floating, check_index, check_positive
from otloss.costs import Cost
from otloss.costs._cost import takes_out


class NumberCost(Cost):
    """The distance between the values of number tokens; what is no number is `text` away from every number.

    With it `nll + w D` is the Wasserstein form of the number token loss (Zausinger et al. 2024, arXiv 2411.02083), the
    probability that lands on no number at all included.

    Args:
        values: `(V,)` value of each token, NaN where it is no number; at least one number.
        text: cost from a number to a token that is none; None takes 1.01 times the largest distance between numbers.

    Raises:
        TypeError: `values` is no floating tensor.
        ValueError: not one axis, no number among them, an infinite value, a `text` that is not positive.

    Example:
        >>> NumberCost(torch.tensor([1.0, 5.0, float("nan")]), text=6.0).rows(torch.tensor([0, 2]))
        tensor([[0., 4., 6.],
                [0., 0., 0.]])
    """

    def __init__(self, values: Float[Tensor, " vocab"], *, text: float | None = None) -> None:
        check_floating("values", values)
        if values.dim() != 1 or values.isnan().all():
            raise ValueError(
                f"values have shape {tuple(values.shape)} and {int((~values.isnan()).sum())} numbers, "
                "expected (V,) with at least one that is not NaN."
            )
        if values.isinf().any():
            first = int(values.isinf().nonzero()[0])
            raise ValueError(
                f"values hold {float(values[first])} at token {first}, expected finite values, or NaN for text."
            )
        values = values.detach().to(torch.promote_types(values.dtype, torch.float32))
        self.is_number = ~values.isnan()
        self.values = values.nan_to_num(nan=0.0)
        self.text = check_positive("text", 1.01 * self.widest if text is None else text)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), len(self.values)

    @property
    def widest(self) -> float:
        """The largest distance between two numbers; 1 where all are equal, for it is a unit to measure in."""
        numbers = self.values[self.is_number]
        return float(numbers.max() - numbers.min()) or 1.0

    @property
    def _data(self) -> Tensor:
        return self.values

    @property
    def T(self) -> Cost:  # noqa: N802
        raise ValueError(
            "NumberCost measures from a label and has no transpose; for a small one, DenseCost(cost.dense().T)."
        )

    def rows(self, index: Int[Tensor, " picked"]) -> Float[Tensor, "picked vocab"]:
        index = check_index("index", index, self.shape[0])
        distance = (self.values[index].unsqueeze(1) - self.values).abs_()  # (picked, V)
        distance.masked_fill_(~self.is_number, self.text)
        return distance.masked_fill_(~self.is_number[index].unsqueeze(1), 0.0)

    def __repr__(self) -> str:
        return super().__repr__()[:-1] + f", numbers={int(self.is_number.sum())}, text={self.text:g})"


class MixedCost(Cost):
    """Numeric distance between number tokens, another cost (an `EmbeddingCost`) between all others.

    Args:
        numbers: which tokens are numbers, and their values.
        other: cost of the same vocabulary.
        scale: of the distance between numbers; None maps the widest one to 1, about what a cosine cost has between
            unrelated tokens.

    Raises:
        TypeError: no costs, or in the other order.
        ValueError: vocabularies that differ, a `scale` that is not positive.

    Example:
        >>> numbers = NumberCost(torch.tensor([1.0, 5.0, float("nan")]))
        >>> from otloss.costs import CosineCost
        >>> MixedCost(numbers, CosineCost(torch.eye(3))).rows(torch.tensor([0, 2]))
        tensor([[0., 1., 1.],
                [1., 1., 0.]])
    """

    def __init__(self, numbers: NumberCost, other: Cost, *, scale: float | None = None) -> None:
        if not isinstance(numbers, NumberCost) or not isinstance(other, Cost):
            raise TypeError(
                f"MixedCost got {type(numbers).__name__} and {type(other).__name__}, expected a NumberCost and another "
                "cost, in this order."
            )
        if numbers.shape != other.shape:
            raise ValueError(f"numbers are over {numbers.shape[0]} tokens, the other cost over {other.shape[0]}.")
        self.numbers, self.other = numbers, other.to(numbers.device)
        self.scale = check_positive("scale", 1.0 / numbers.widest if scale is None else scale)

    @property
    def shape(self) -> tuple[int, int]:
        return self.other.shape

    @property
    def _data(self) -> Tensor:
        return self.other._data

    @property
    def T(self) -> Self:  # noqa: N802
        return type(self)(self.numbers, self.other.T, scale=self.scale)

    def rows(
        self, index: Int[Tensor, " picked"], *, out: Float[Tensor, " entries"] | None = None
    ) -> Float[Tensor, "picked vocab"]:
        """Return the costs C[index, :]; `out` as in `Cost.rows`, for the other cost."""
        # Written into below: rows made here may be, those of a stranger are copied first.
        rows = self.other.rows(index, out=out) if takes_out(self.other) else self.other.rows(index).clone()  # type: ignore[call-arg]
        columns = self.numbers.is_number.nonzero().squeeze(-1)
        among = self.numbers.is_number[index].nonzero().squeeze(-1)
        values = self.numbers.values.to(rows.dtype)
        distance = (values[index[among]].unsqueeze(1) - values[columns]).abs_() * self.scale
        rows[among.unsqueeze(1), columns] = distance
        return rows

    def to(self, *args: object, **kwargs: object) -> Self:
        """Return the same cost elsewhere, as `Cost.to`."""
        return type(self)(self.numbers.to(*args, **kwargs), self.other.to(*args, **kwargs), scale=self.scale)

    def __repr__(self) -> str:
        return f"MixedCost({self.numbers!r}, {self.other!r}, scale={self.scale:g})"
