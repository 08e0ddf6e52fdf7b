"""Costs that know the value of a whole number of several tokens.

Under teacher forcing, a token of a number is judged by what the number would become with another token in its place,
all other tokens staying. For a number of value y at position t, and a token j there,

    c_t(j) = dist(y, y_t(j)),    y_t(j) the value with the digits of j in place of the label's (`_sums`)

so that place value, sign and decimal point come by themselves and leading digits weigh more.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NoReturn, Self, TextIO

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss._checks import check_positive
from otloss.costs import Cost
from otloss.losses.number_line import TEXT_OVER_WORST
from otloss_llm.costs.few_columns import FewColumns
from otloss_llm.costs.number_spans._reading import BARE, BLANK, MINUS, POINT, Alphabet, read, writes_decimals
from otloss_llm.costs.number_spans._sums import Sums, became_with, sums_of
from otloss_llm.costs.number_tokens import Coverage, NumberTokens

SCALES = ("log", "relative")

# Quotients of the longest numbers by the unit stay below the end of float64.
_WIDEST_UNIT = 1e30

# Rows are made through blocks of about this many entries, 2 MiB in float64: they stay in the cache.
_BLOCK_ENTRIES = 2**18

_COLUMNS = (BARE, BLANK, MINUS, POINT)

# One in so many tokens of digits, the longest, does not decide what far is: GPT-2 has one of 16 zeros.
_RARE = 50


class NumberSpanCost(Cost):
    """The distance between a whole number and what it becomes with another token at one of its positions.

    A number is digits, a sign directly before them, one point between digits: `[-]12[.5]`, of tokens that are ASCII
    digits (one leading blank begins a new number), a minus (a leading blank allowed) and '.'. A minus is a sign at the
    beginning and behind a blank, an opening bracket or an operator; in '3-4' it is none. Ignored labels and all other
    tokens end a number: '1,000' is two numbers, and tokens such as '-7', '.5' or '(-' are text. So is a number of more
    than 200 digits. Digits beyond the 16 that float64 holds cost nothing.

        the label is                these tokens                                       all others
        digits                      digits: dist; at the beginning also behind a       1.01 times the largest of
                                    blank, and a minus: dist to -y                     the row for usual lengths
        the sign                    a minus: 0                                         dist to -y (none of 0)
        the point                   '.': 0, digits that close the gap: dist            as for digits
        text right behind a number  digits that lengthen it: dist                      0
        anything else                                                                  0

    Usual lengths are those up to the count of digits that 98 % of the tokens of digits do not exceed (4 in GPT-2; all
    lengths where there are fewer than 50). Longer tokens cost dist too, but at most 1.01 times the largest for usual
    lengths: rare ones, such as the 16 zeros of GPT-2, shall not decide what text costs at every number.

    Digits without a blank that would join another number before them are among the others: in place of ' 5' in '12 5'.

    What stands before a row is not known: labels lose their first to the shift, and a packed block begins anywhere. So
    the number that a row begins with costs nothing (nll stays), unless there is a blank before it; put an ignored label
    first where it is whole. The number that a row ends in counts as far as the row goes.

    Sequences run along the last axis of the labels. In a flattened batch, a row that ends in '1' and one that begins
    with '234' are one number, 1234: keep (batch, length), or put an ignored label between sequences.

    Args:
        tokens: what each token of the vocabulary adds to a text; values only tell which are no numbers, by NaN.
        scale: "log" is |s(a) - s(b)|, s(v) = sign(v) log(1 + |v| / unit): about |a - b| / unit below the unit, and
            2.3 a decimal place above, without bound. "relative" is |a - b| / max(|a|, |b|, unit), at most 1 between
            numbers of one sign and 2 between others.
        unit: below it, differences count as they are; 1e-30 to 1e30.
        dtype: of the rows, float32 or float64; they are computed in float64.
        decimals: whether digits can stand right behind a point. WordPiece writes 1.5 as '1', '.', ' 5', so that they
            cannot: then '.' is text. `from_tokenizer` looks.

    Raises:
        TypeError: `tokens` is no NumberTokens.
        ValueError: no token of digits, or each behind a blank, so that none join (`NumberCost` is for those); a value
            that is not that of the text; another `scale` or `dtype`, a `unit` out of range.

    Example:
        >>> values = torch.tensor([*range(10), *[float("nan")] * 3], dtype=torch.float64)
        >>> tokens = NumberTokens(values=values, texts=(*"0123456789", "-", ".", " kg"), name="digits")
        >>> cost = NumberSpanCost(tokens, scale="relative")
        >>> labels = torch.tensor([-100, 4, 0, 12])  # 40 kg
        >>> found = cost.few_columns(labels, labels != -100)
        >>> found.rows[found.which][:2, :5].round(decimals=2)  # to 00 10 20 30 40, and to 40 41 42 43 44
        tensor([[1.0000, 0.7500, 0.5000, 0.2500, 0.0000],
                [0.0000, 0.0200, 0.0500, 0.0700, 0.0900]])
    """

    is_zero_on_text = True

    def __init__(
        self,
        tokens: NumberTokens,
        *,
        scale: str = "log",
        unit: float = 1.0,
        dtype: torch.dtype = torch.float32,
        decimals: bool = True,
    ) -> None:
        if not isinstance(tokens, NumberTokens):
            raise TypeError(
                f"tokens is a {type(tokens).__name__}, expected NumberTokens; use NumberSpanCost.from_tokenizer."
            )
        if scale not in SCALES:
            raise ValueError(f"scale is {scale!r}, expected one of {SCALES}.")
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype is {dtype}, expected torch.float32 or torch.float64.")
        if not 1 / _WIDEST_UNIT <= check_positive("unit", unit) <= _WIDEST_UNIT:
            raise ValueError(f"unit is {unit}, expected 1e-30 to 1e30: beyond, quotients of long numbers overflow.")
        self.scale, self.unit = scale, float(unit)
        self.tokens, self.alphabet = tokens, Alphabet.of(tokens, decimals=decimals)
        part = self.alphabet.part
        self.columns = torch.cat([(part == kind).nonzero().squeeze(-1) for kind in _COLUMNS])
        self.counts = tuple(int((part == kind).sum()) for kind in _COLUMNS)
        size = self.alphabet.sizes[self.alphabet.string[self.columns[: sum(self.counts[:2])]]]
        self.usual = int(size.sort().values[-1 - len(size) // _RARE])
        self.longer = (size > self.usual).nonzero().squeeze(-1)  # which of the few columns
        self.made_in = torch.zeros(0, dtype=dtype)

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Any,
        *,
        vocab_size: int | None = None,
        values: Mapping[int, float | None] | None = None,
        scale: str = "log",
        unit: float = 1.0,
    ) -> Self:
        """Return the cost over the tokens of a tokenizer.

        `vocab_size` and `values` as in `NumberTokens.of`; but `values` can only take numbers out, `{id: None}`.
        """
        tokens = NumberTokens.of(tokenizer, vocab_size=vocab_size, values=values)
        return cls(tokens, scale=scale, unit=unit, decimals=writes_decimals(tokenizer, tokens))

    def coverage(self, *, file: TextIO | None = None) -> Coverage:
        """Print (to `file`, by default stdout) which tokens are numbers and what joins them; and return the former."""
        coverage = self.tokens.coverage()
        print(coverage, self._joins(), sep="\n", file=sys.stdout if file is None else file)
        return coverage

    def _joins(self) -> str:
        """What makes a number of several tokens, on one line."""
        missing = {"'-'": "signs"} if not self._signs else {}
        missing |= {"'.'": "decimals"} if not self._points else {}
        marks = "'-' and '.' do too"
        if missing:
            marks = f"no {' or '.join(missing)} joins digits here: {' and '.join(missing.values())} are not read"
        bare, blank, *_ = self.counts
        line = f"whole numbers: {bare} tokens of digits join others, {blank} behind a blank begin one; {marks}"
        if not len(self.longer):
            return line
        return f"{line}; {len(self.longer)} of more than {self.usual} digits do not decide what text costs"

    @property
    def _signs(self) -> bool:
        """Whether a minus without a blank is there: with blanks alone, every digit behind one has its own."""
        return bool(((self.alphabet.part == MINUS) & ~self.alphabet.spaced).any())

    @property
    def _points(self) -> bool:
        return self.counts[_COLUMNS.index(POINT)] > 0

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.alphabet.part), len(self.alphabet.part)

    @property
    def _data(self) -> Tensor:
        return self.made_in

    @property
    def T(self) -> Cost:  # noqa: N802
        raise ValueError("NumberSpanCost measures from the numbers of a text and has no transpose.")

    def rows(self, index: Int[Tensor, " picked"]) -> NoReturn:
        """Raise ValueError: there is no row of a label alone."""
        raise ValueError(
            "NumberSpanCost has no row for a label alone: its costs depend on the number that the label is part of. "
            "Give it to token_loss or linear_token_loss (without process_group), or ask for few_columns(labels, valid)."
        )

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the same cost elsewhere, as `Cost.to`; a dtype is that of the rows."""
        moved = super().to(*args, **kwargs)
        moved.alphabet = self.alphabet.to(moved.device)
        return moved

    def number_positions(
        self, labels: Int[Tensor, "*batch length"], valid: Bool[Tensor, "*batch length"]
    ) -> Bool[Tensor, "*batch length"]:
        """Return which of the valid positions have costs: the tokens of a number, and the text right behind one."""
        labels, flat = self._in_rows(labels, valid)
        found = read(self.alphabet, labels, flat)
        return (found.inside | found.sign | found.behind).reshape(valid.shape)

    def few_columns(self, labels: Int[Tensor, "*batch length"], valid: Bool[Tensor, "*batch length"]) -> FewColumns:
        """Return the costs of the valid positions in row-major order; sequences run along the last axis.

        Labels that are not valid may be anything, the others are ids of the vocabulary. Row 0 is that of positions
        without a number about them, 0 throughout; every other position has a row of its own.

        Raises:
            ValueError: labels without an axis, or `valid` of another shape.
        """
        labels, valid = self._in_rows(labels, valid)
        at, sums = sums_of(self.alphabet, labels, read(self.alphabet, labels, valid))
        few = len(self.columns)
        rows = torch.zeros(1 + len(at), few, dtype=self.dtype, device=labels.device)
        rest = torch.zeros(1 + len(at), dtype=self.dtype, device=labels.device)
        step = max(1, _BLOCK_ENTRIES // few)
        for first in range(0, len(at), step):
            block = slice(first, first + step)
            rows[1:][block], rest[1:][block] = self._costs(sums.of(block))
        which = torch.zeros(labels.numel(), dtype=torch.long, device=labels.device)
        which[at] = torch.arange(1, len(at) + 1, device=labels.device)
        return FewColumns(columns=self.columns, rows=rows, rest=rest, which=which[valid.reshape(-1)])

    def _in_rows(self, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Labels, 0 where they are not valid, and the latter, both (batch, length)."""
        if labels.dim() == 0 or labels.shape != valid.shape:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)} and valid {tuple(valid.shape)}, expected (..., length) twice."
            )
        shape = (labels.shape[:-1].numel(), labels.shape[-1])
        return labels.where(valid, 0).reshape(shape), valid.reshape(shape)

    def _costs(self, sums: Sums) -> tuple[Float[Tensor, "rows few"], Float[Tensor, " rows"]]:
        """The costs in the few columns, and in the rest."""
        became = became_with(self.alphabet, sums)
        own = became.gather(1, sums.string.unsqueeze(1)).squeeze(1)
        true = torch.where(sums.digits, own, sums.known)  # where the label is one of them, equal to the last bit
        opposite = self._distance_to_opposite(true)
        part = self.alphabet.part[self.columns]
        few = self._distance(became, true.unsqueeze(1)).index_select(1, self.alphabet.string[self.columns])
        few[:, part == MINUS] = opposite.masked_fill(sums.sign, 0.0).unsqueeze(1)
        few[:, part == POINT] = 0.0
        among = torch.cat([sums.among[:, [i]].expand(-1, n) for i, n in enumerate(self.counts)], dim=1)
        few.masked_fill_(~among, 0.0)
        worst = TEXT_OVER_WORST * few.index_fill(1, self.longer, 0.0).amax(1)
        few = torch.minimum(few, worst.unsqueeze(1), out=few)
        rest = torch.where(sums.sign, opposite, worst.masked_fill(sums.behind, 0.0))
        return torch.where(among, few, rest.unsqueeze(1)), rest

    def _distance(self, a: Float[Tensor, "*shape"], b: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """dist(a, b) for a, b >= 0; no logarithm is taken from another, which would cancel."""
        gap = (a - b).abs_()
        if self.scale == "log":
            return gap.div_(torch.minimum(a, b).add_(self.unit)).log1p_()
        return gap.div_(torch.maximum(a, b).clamp_(min=self.unit))

    def _distance_to_opposite(self, value: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """dist(y, -y) for y >= 0."""
        if self.scale == "log":
            return 2.0 * (value / self.unit).log1p()
        return 2.0 * value / value.clamp(min=self.unit)

    def __repr__(self) -> str:
        read = f"digits={sum(self.counts[:2])}, sign={self._signs}, point={self._points}"
        return super().__repr__()[:-1] + f", {read}, scale={self.scale!r}, unit={self.unit:g})"
