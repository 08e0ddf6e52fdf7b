"""Costs that know the numbers among the tokens of a vocabulary: `NumberCost`, and `MixedCost` of it and another cost.

NumberCost    c(y, j) = |x_j - x_y| between number tokens, `text` from a number to any other token, 0 for labels that
              are no numbers: they say nothing about how far off a number is
MixedCost     |x_j - x_y| times a scale between number tokens, another cost everywhere else

x is the value of a token on a scaled line (`otloss.losses.number_line`).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any, Self, TextIO

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss.costs import Cost
from otloss.costs.cost import takes_out
from otloss.extending import TEXT_OVER_WORST, check_index, check_positive, checked_values, number_line
from otloss_llm.costs.few_columns import FewColumns
from otloss_llm.costs.number_tokens import Coverage, NumberTokens

# Of the table of distances between all numbers; beyond, the rows of the labels at hand are made.
_MOST_IN_TABLE = 2**22


class NumberCost(Cost):
    """The distance between the values of number tokens; what is no number is `text` away from every number.

    With it `nll + w D` is the number token loss (Zausinger et al. 2024, arXiv 2411.02083), the probability that lands
    on no number included. In `linear_token_loss` no row over the whole vocabulary is made: it costs next to nothing.
    For EMO, which weighs nll by D, take a `MixedCost`: D is 0 here where the label is text.

    Args:
        values: `(V,)` value of each token, NaN where it is no number; at least one number.
        text: cost from a number to a token that is none; None takes 1.01 times the largest distance between numbers.
        scaling, squash: of the distances, as in `otloss.number_token_loss`: with multi-digit tokens take "symlog", as
            `from_tokenizer` does; squashed absolute distances are bounded too, but between small numbers all the same.

    Attributes:
        values: `(V,)`, as given, in float32 or wider.
        is_number: `(V,)` which tokens are numbers.

    Raises:
        TypeError: `values` is no floating tensor.
        ValueError: not one axis, no number among them, an infinite value, a setting that is unknown or not positive.

    Example:
        >>> NumberCost(torch.tensor([1.0, 5.0, float("nan")]), text=6.0).rows(torch.tensor([0, 2]))
        tensor([[0., 4., 6.],
                [0., 0., 0.]])
    """

    is_zero_on_text = True

    def __init__(
        self,
        values: Float[Tensor, " vocab"],
        *,
        text: float | None = None,
        scaling: str = "absolute",
        squash: float | None = None,
    ) -> None:
        self.values = checked_values(values)
        self.line = number_line(self.values, scaling=scaling, squash=squash, text=text)
        self.settings = {"scaling": scaling, "squash": squash}
        self.tokens: NumberTokens | None = None
        self._table: FewColumns | None = None

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Any,
        *,
        vocab_size: int | None = None,
        values: Mapping[int, float | None] | None = None,
        scaling: str | None = None,
        squash: float | None = None,
        text: float | None = None,
    ) -> Self:
        """Read the values off a tokenizer of transformers, by decoding each token; the tokenizer stays as it is.

        "7", " 7" and "##7" are all 7; digits of other scripts, full-width ones too, are text. `coverage()` says what
        was taken for a number. Costs are in float32, or in float64 where that is torch's default.

        A weight has one meaning with every tokenizer, for no cost depends on which tokens there are besides: 5 and 9
        are 4 apart, no two numbers more than 9, and text costs 9.09. Where tokens are single digits these are the
        published costs. A longer token is one choice in the place of several digits: a factor of ten costs 9, as much
        as 0 and 9 in one place, so that 100 and 900 lie about as far apart as 1 and 9. A scale made of the vocabulary
        (its range, or the mean distance of its numbers) would let one added token change what all others cost.

        Args:
            vocab_size: rows of the model's head, where it is padded beyond the tokenizer.
            values: `{id: value}` overrides what was read; None for a token that shall be no number.
            scaling: of the constructor; None is "symlog", or with `squash`, which bounds distances itself, "absolute".
            squash, text: of the constructor.

        Raises:
            TypeError, ValueError: no tokenizer, one without a number token, a head smaller than the vocabulary, an
                override of a token that is not there.
        """
        tokens = NumberTokens.of(tokenizer, vocab_size=vocab_size, values=values)
        return cls.from_tokens(tokens, scaling=scaling, squash=squash, text=text)

    @classmethod
    def from_tokens(
        cls,
        tokens: NumberTokens,
        *,
        scaling: str | None = None,
        squash: float | None = None,
        text: float | None = None,
    ) -> Self:
        """Return the cost over number tokens that were read before; settings as in `from_tokenizer`."""
        if scaling is None:
            scaling = "symlog" if squash is None else "absolute"
        # Scaled in float64: a default dtype of 16 bits would round 257 to 256.
        cost = cls(tokens.values, scaling=scaling, squash=squash, text=text)
        cost = cost.to(torch.promote_types(torch.get_default_dtype(), torch.float32))
        cost.tokens = tokens
        return cost

    def coverage(self, *, file: TextIO | None = None) -> Coverage:
        """Print (to `file`, by default stdout) what was taken for a number and what was not; and return it.

        Raises:
            ValueError: a cost of values, not from a tokenizer.
        """
        if self.tokens is None:
            raise ValueError(
                "this NumberCost was made of values, expected one of NumberCost.from_tokenizer(tokenizer)."
            )
        coverage = self.tokens.coverage()
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items() if value is not None)
        lines = f"{coverage}\ndistances: {settings}; a token that is no number costs {self.text:.3g}"
        print(lines, file=sys.stdout if file is None else file)
        return coverage

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), len(self.values)

    @property
    def is_number(self) -> Bool[Tensor, " vocab"]:
        return self.line.place >= 0

    @property
    def text(self) -> float:
        """What a token that is no number costs."""
        return self.line.text

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
        place = self.line.place[index]
        rows = self.values.new_full((len(index), self.shape[0]), self.text)
        rows[:, self.line.columns] = self.line.distances(index.where(place >= 0, self.line.columns[0]))
        return rows.masked_fill_((place < 0).unsqueeze(1), 0.0)

    def number_positions(self, labels: Int[Tensor, "*batch"], valid: Bool[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
        """Return which of the valid positions have a number for a label."""
        return valid & self.line.is_number(labels.where(valid, 0))

    def few_columns(self, labels: Int[Tensor, "*batch"], valid: Bool[Tensor, "*batch"]) -> FewColumns:
        """The costs of the labels at the valid positions, in the columns of the numbers and outside."""
        line, y = self.line, labels[valid].long()
        place = line.place[y]
        if len(line.x) ** 2 > _MOST_IN_TABLE:
            kinds, which = place.unique(return_inverse=True)
            return self._rows_of(kinds, which)
        if self._table is None or self._table.rows.device != y.device:
            every = torch.arange(-1, len(line.x), device=line.x.device)
            self._table = self._rows_of(every, every)
        table = self._table
        return FewColumns(table.columns, table.rows, table.rest, place + 1)

    def _rows_of(self, kinds: Int[Tensor, " kinds"], which: Int[Tensor, " tokens"]) -> FewColumns:
        """Rows from these places on the line; -1 is a label that is no number."""
        line, number = self.line, kinds >= 0
        rows = line.distances(line.columns[kinds.clamp(min=0)]).masked_fill_(~number.unsqueeze(1), 0.0)
        rest = number.to(rows.dtype) * line.text
        return FewColumns(line.columns, rows, rest, which)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the same cost elsewhere, as `Cost.to`."""
        moved = super().to(*args, **kwargs)
        moved.line, moved._table = self.line.to(moved.device, moved.dtype), None
        return moved

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_table": None}

    def __repr__(self) -> str:
        settings = "".join(
            f", {name}={value!r}" for name, value in self.settings.items() if value not in ("absolute", None)
        )
        return super().__repr__()[:-1] + f", numbers={len(self.line.x)}, text={self.text:g}{settings})"


class MixedCost(Cost):
    """Numeric distance between number tokens, another cost (an `EmbeddingCost`) between all others.

    Args:
        numbers: which tokens are numbers, and their distances.
        other: cost of the same vocabulary.
        scale: of the distance between numbers; None maps what text costs in `numbers` to 1.01, so that far numbers cost
            about 1, as unrelated tokens do in a cosine cost.

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
        self.scale = check_positive("scale", TEXT_OVER_WORST / numbers.text if scale is None else scale)

    @property
    def shape(self) -> tuple[int, int]:
        return self.other.shape

    @property
    def has_rows_in_16_bits(self) -> bool:
        """Whether the other cost makes its rows in 16 bits, for speed on a GPU."""
        return bool(getattr(self.other, "has_rows_in_16_bits", False))

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
        line = self.numbers.line
        among = line.is_number(index).nonzero().squeeze(-1)
        rows[among.unsqueeze(1), line.columns] = (line.distances(index[among]) * self.scale).to(rows.dtype)
        return rows

    def to(self, *args: object, **kwargs: object) -> Self:
        """Return the same cost elsewhere, as `Cost.to`."""
        moved = copy.copy(self)
        moved.numbers, moved.other = self.numbers.to(*args, **kwargs), self.other.to(*args, **kwargs)
        return moved

    def __repr__(self) -> str:
        return f"MixedCost({self.numbers!r}, {self.other!r}, scale={self.scale:g})"
