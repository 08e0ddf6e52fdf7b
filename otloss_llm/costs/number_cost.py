"""Costs that know the numbers among the tokens of a vocabulary: `NumberCost`, and `MixedCost` of it and another cost.

x is the position of a number token on a scaled line (`otloss.losses.number_line`), y the label.

    NumberCost    c(y, j) = |x_j - x_y| between number tokens, `text` from a number to any other token, 0 where y is no
                  number: D = sum_j q_j c(y, j) is NTL-WAS (arXiv 2411.02083), mass on text charged
    MixedCost     c(y, j) = scale |x_j - x_y| between number tokens, another cost everywhere else
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any, Self, TextIO

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss._checks import check_index, check_positive, device_of
from otloss.costs import Cost
from otloss.losses.number_line import TEXT_OVER_WORST, checked_values, number_line
from otloss_llm.costs.tokenizer_numbers import Coverage, NumberTokens
from otloss_llm.costs.vocabulary import (
    FewColumns,
    LabelRows,
    ValuesCost,
    VocabularyCost,
    as_vocabulary_cost,
    check_cost_dtype,
)
from otloss_llm.models.sharded_heads import VocabShard


class NumberCost(ValuesCost):
    """The distance between the values of number tokens; tokens that are no numbers cost `text` from every number.

    With it `nll + w D` is the number token loss (Zausinger et al. 2024, arXiv 2411.02083), the mass on tokens that are
    no numbers included. `linear_token_loss` makes no row over the whole vocabulary for it, and takes a few percent
    longer than cross-entropy. For EMO, which weighs nll by D, take a `MixedCost`: D is 0 here where the label is text.

    Formulas: docs/guide/definitions.md#def-numbers

    Args:
        values: `(V,)` value of each token, NaN where it is no number; at least one number.
        text: cost from a number to a token that is no number; None takes 1.01 times the largest distance of numbers.
        scaling, squash: of the distances, as in `otloss.number_token_loss`: "symlog" without either. Squashed absolute
            distances are bounded too, but nearly equal for all small numbers.

    Attributes:
        values: `(V,)`, as given, in float32 or wider.
        is_number: `(V,)` which tokens are numbers.
        text: as given, or the value taken for None.
        tokens: the `NumberTokens` that the cost was made from; None if it was made from values.

    Raises:
        TypeError: `values` is not a floating tensor.
        ValueError: not one axis, no number among them, an infinite value, a setting that is unknown or not positive.

    Example:
        >>> NumberCost(torch.tensor([1.0, 5.0, float("nan")]), text=6.0).rows(torch.tensor([0, 2]))
        tensor([[0., 4., 6.],
                [0., 0., 0.]])
    """

    covers_text = False

    def __init__(
        self,
        values: Float[Tensor, " vocab"],
        *,
        text: float | None = None,
        scaling: str | None = None,
        squash: float | None = None,
    ) -> None:
        self.values = checked_values(values)
        self.line = number_line(self.values, scaling=scaling, squash=squash, text=text)
        self.settings: dict[str, Any] = {"scaling": self.line.scaling, "squash": squash}
        self.tokens: NumberTokens | None = None

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
        """Read the values from a tokenizer of transformers, by decoding each token; the tokenizer is not changed.

        "7", " 7" and "##7" are all 7; digits of other scripts, full-width ones too, are text. `coverage()` lists which
        tokens were taken for numbers. Costs are in float32, or in float64 where that is torch's default.

        A weight has one meaning with every tokenizer, for no cost depends on which tokens there are besides: 5 and 9
        are 4 apart, no two numbers more than 9, and text costs 9.09. Where tokens are single digits these are the
        published costs. A longer token is one choice in the place of several digits: a factor of ten costs 9, as much
        as 0 and 9 in one place, so that 100 and 900 lie about as far apart as 1 and 9. A scale made of the vocabulary
        (its range, or the mean distance of its numbers) would let one added token change what all others cost.

        Args:
            vocab_size: rows of the model's head, where it is padded beyond the tokenizer.
            values: `{id: value}` overrides what was read; None for a token that is not to be a number.
            scaling, squash, text: of the constructor.

        Raises:
            TypeError, ValueError: not a tokenizer, one without a number token, a head smaller than the vocabulary, an
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
        # Values are scaled in float64: 16 bits would round 257 to 256.
        cost = cls(tokens.values, scaling=scaling, squash=squash, text=text)
        cost = cost.to(torch.promote_types(torch.get_default_dtype(), torch.float32))
        cost.tokens = tokens
        return cost

    def shuffled(self, generator: torch.Generator | None = None) -> Self:
        """Return the control with the same distances, but values given to the numbers at random.

        Tokens of one value, such as "7" and " 7", keep one value.
        """
        distinct, which = self.values[self.is_number].unique(return_inverse=True)
        order = torch.randperm(len(distinct), generator=generator, device=device_of(generator)).to(distinct.device)
        return self._with_values(self.values.masked_scatter(self.is_number, distinct[order][which]))

    def equal(self) -> Self:
        """Return the control in which all numbers are alike: D is what text costs times the mass of text."""
        return self._with_values(self.values.masked_fill(self.is_number, 0.0))

    def _with_values(self, values: Float[Tensor, " vocab"]) -> Self:
        """Return the cost of other values, with the same price of text."""
        result = type(self)(values, text=self.text, **self.settings)
        result.tokens = self.tokens
        return result

    def coverage(self, *, file: TextIO | None = None) -> Coverage:
        """Print (to `file`, by default stdout) which tokens were taken for numbers and which not; and return it.

        Raises:
            ValueError: the cost was made from values, not from a tokenizer.
        """
        if self.tokens is None:
            raise ValueError(
                "this NumberCost was made from values, expected one of NumberCost.from_tokenizer(tokenizer)."
            )
        coverage = self.tokens.coverage()
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items() if value is not None)
        lines = f"{coverage}\ndistances: {settings}; a token that is no number costs {self.text:.3g}"
        print(lines, file=sys.stdout if file is None else file)
        return coverage

    @property
    def is_number(self) -> Bool[Tensor, " vocab"]:
        return self.line.place >= 0

    @property
    def text(self) -> float:
        return self.line.text

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the same cost elsewhere, as `VocabularyCost.to`."""
        moved = copy.copy(self)
        moved.values = check_cost_dtype(self.values.to(*args, **kwargs))
        moved.line = self.line.to(moved.device, moved.dtype)
        return moved

    def positions(self, labels: Int[Tensor, "*batch"], valid: Bool[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
        """Return which of the valid positions have a number for a label."""
        return valid & self.line.is_number(labels.where(valid, 0))

    def for_labels(self, labels: Int[Tensor, " tokens"], shard: VocabShard | None = None) -> FewColumns | LabelRows:
        """Return the columns of the number tokens, or dense rows with a shard."""
        if shard is not None:
            own = slice(shard.start, shard.stop)
            return LabelRows(lambda index, out: self.rows(index)[:, own], own.stop - own.start, self.device, self.dtype)
        kinds, which = self.line.place[labels].unique(return_inverse=True)
        is_number = kinds >= 0  # the other kind is a label that is no number
        costs = self.line.distances(self.line.columns[kinds.clamp(min=0)]).masked_fill_(~is_number.unsqueeze(1), 0.0)
        return FewColumns(self.line.columns, costs, is_number.to(costs.dtype) * self.text, which)

    def rows(self, index: Int[Tensor, " picked"]) -> Float[Tensor, "picked vocab"]:
        """Return the costs C[index, :]."""
        table = self.for_labels(check_index("index", index, self.shape[0]))
        assert isinstance(table, FewColumns)
        rows = table.costs_elsewhere[table.which].unsqueeze(1).repeat(1, self.shape[1])
        return rows.index_copy_(1, table.columns, table.costs[table.which])

    def __repr__(self) -> str:
        non_defaults = {name: value for name, value in self.settings.items() if value not in ("absolute", None)}
        settings = "".join(f", {name}={value!r}" for name, value in non_defaults.items())
        return (
            f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, device='{self.device}', "
            f"numbers={len(self.line.x)}, text={self.text:g}{settings})"
        )


class MixedCost(Cost, VocabularyCost):
    """Numeric distance between number tokens, another cost (an `EmbeddingCost`) between all others.

    Args:
        numbers: which tokens are numbers, and their distances.
        other: cost of the same vocabulary.
        scale: of the distance between numbers; None maps what text costs in `numbers` to 1.01, so that far numbers cost
            about 1, as unrelated tokens do in a cosine cost.

    Raises:
        TypeError: not a `NumberCost` and another cost, in this order.
        ValueError: vocabularies that differ, a `scale` that is not positive.

    Example:
        >>> numbers = NumberCost(torch.tensor([0.0, 9.0, float("nan")]))
        >>> from otloss.costs import CosineCost
        >>> MixedCost(numbers, CosineCost(torch.eye(3))).rows(torch.tensor([0, 2]))
        tensor([[0., 1., 1.],
                [1., 1., 0.]])
    """

    def __init__(self, numbers: NumberCost, other: Cost, *, scale: float | None = None) -> None:
        if not isinstance(numbers, NumberCost) or not isinstance(other, Cost):
            raise TypeError(
                f"MixedCost got {type(numbers).__name__} and {type(other).__name__}, expected a NumberCost and another "
                "cost between all tokens, in this order."
            )
        if numbers.shape != other.shape:
            raise ValueError(f"numbers are over {numbers.shape[0]} tokens, the other cost over {other.shape[0]}.")
        self.numbers, self.other = numbers, other.to(numbers.device)
        self.scale = check_positive("scale", TEXT_OVER_WORST / numbers.text if scale is None else scale)

    @property
    def shape(self) -> tuple[int, int]:
        return self.other.shape

    @property
    def requires_grad(self) -> bool:
        return bool(self.other.parameters())

    @property
    def T(self) -> Self:  # noqa: N802
        return type(self)(self.numbers, self.other.T, scale=self.scale)

    def diagonal(self) -> Float[Tensor, " vocab"]:
        return self.other.diagonal().index_fill(0, self.numbers.line.columns, 0.0)

    def rows(self, index: Int[Tensor, " picked"]) -> Float[Tensor, "picked vocab"]:
        """Return the costs C[index, :]."""
        return self.for_labels(index).rows(index, None)

    def for_labels(self, labels: Int[Tensor, " tokens"], shard: VocabShard | None = None) -> LabelRows:
        """Return the rows of the other cost, with the costs between numbers in their places."""
        other = as_vocabulary_cost(self.other).for_labels(labels, shard)
        assert isinstance(other, LabelRows)
        line, start = self.numbers.line, 0 if shard is None else shard.start
        here = (line.columns >= start) & (line.columns < start + other.columns)
        columns = line.columns[here] - start

        def rows(index: Tensor, out: Tensor | None) -> Tensor:
            result = other.rows(index, out)
            # The rows of a third-party cost may be its own memory.
            result = result if other.buffer_dtypes else result.clone()
            among = line.is_number(index).nonzero().squeeze(-1)
            distances = line.distances(index[among])[:, here] * self.scale
            result[among.unsqueeze(1), columns] = distances.to(result.dtype)
            return result

        return LabelRows(rows, other.columns, other.device, other.dtype, other.buffer_dtypes)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the same cost elsewhere, as `Cost.to`."""
        moved = copy.copy(self)
        moved.numbers, moved.other = self.numbers.to(*args, **kwargs), self.other.to(*args, **kwargs)
        return moved

    def __repr__(self) -> str:
        return f"MixedCost({self.numbers!r}, {self.other!r}, scale={self.scale:g})"
