"""The numbers of a batch as sums over their tokens, and what they become with other digits at one position.

Notation: at position t of a number, j a string of digits worth v_j of n_j digits, the label of n_t; `pre` and `suf`
what the tokens before and behind it are worth, 10^e the place of its last digit, f the digits behind the point.

    before the point   y_t(j) = pre 10^(n_j - n_t) + v_j 10^e + suf
    behind the point   y_t(j) = pre + (v_j 10^e + suf) 10^(n_t - n_j)
    at the point       y_t(j) = (pre 10^n_j + v_j + suf) 10^f
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss_llm.costs.number_spans._reading import Alphabet, Reading, one_before


@dataclass(frozen=True)
class Sums:
    """What the costs of a position are made of; names as in the formulas."""

    string: Int[Tensor, " rows"]
    known: Float[Tensor, " rows"]  # y
    pre: Float[Tensor, " rows"]
    suf: Float[Tensor, " rows"]
    place: Int[Tensor, " rows"]
    size: Int[Tensor, " rows"]
    whole: Bool[Tensor, " rows"]  # before the point
    decimals: Int[Tensor, " rows"]  # at the point
    among: Bool[Tensor, "rows 4"]  # whether bare and blank digits, minus and point are no others
    sign: Bool[Tensor, " rows"]
    behind: Bool[Tensor, " rows"]
    digits: Bool[Tensor, " rows"]

    def of(self, block: slice) -> Sums:
        return Sums(**{field.name: getattr(self, field.name)[block] for field in fields(self)})


def sums_of(
    alphabet: Alphabet, labels: Int[Tensor, "batch length"], reading: Reading
) -> tuple[Int[Tensor, " rows"], Sums]:
    """The positions that have a row, and what their costs are made of."""
    string = alphabet.string[labels.reshape(-1)]
    inside, start, point, sign, behind, glued, negative = (
        mask.reshape(-1)
        for mask in (
            reading.inside, reading.start, reading.point, reading.sign, reading.behind, reading.glued,
            one_before(reading.sign),
        )
    )  # fmt: skip
    table = _Table.of(alphabet, string, inside, start=start, point=point)
    row = (inside | sign | behind).nonzero().squeeze(-1)
    sign, behind, point, first, glued, negative = (
        mask[row] for mask in (sign, behind, point, start & ~negative, glued, negative)
    )
    near = table.cell[row + sign.long() - behind.long()]  # the cell of the position, or of the number beside it
    pre, worth, suf, place, size, whole, decimals = (
        entries.reshape(-1)[near]
        for entries in (table.pre, table.worth, table.suf, table.place, table.size, table.whole, table.decimals)
    )
    among = torch.stack([~(sign | glued), first, first | sign, point], dim=1)
    return row, Sums(
        string=string[row],
        known=pre + worth + suf,
        pre=pre + worth * behind,
        suf=suf,
        place=place,
        size=size * ~behind,
        whole=whole,
        decimals=decimals * point,
        among=among,
        sign=sign,
        behind=behind,
        digits=~(sign | behind | point),
    )


@dataclass(frozen=True)
class _Table:
    """Numbers x their tokens, for sums along one number: sums along the whole batch would cancel."""

    cell: Int[Tensor, " positions"]  # of each position in a number
    worth: Float[Tensor, "numbers tokens"]  # v 10^e
    pre: Float[Tensor, "numbers tokens"]
    suf: Float[Tensor, "numbers tokens"]
    place: Int[Tensor, "numbers tokens"]
    size: Int[Tensor, "numbers tokens"]
    whole: Bool[Tensor, "numbers tokens"]
    decimals: Int[Tensor, "numbers tokens"]

    @classmethod
    def of(cls, alphabet: Alphabet, string: Tensor, inside: Tensor, *, start: Tensor, point: Tensor) -> _Table:
        at, begins = inside.nonzero().squeeze(-1), start.nonzero().squeeze(-1)
        number = start.cumsum(0)[at] - 1
        slot = at - begins[number]
        shape = (len(begins), int(slot.max()) + 1 if len(at) else 0)
        cell = torch.zeros_like(string)
        cell[at] = number * shape[1] + slot

        def spread(entries: Tensor) -> Tensor:
            return entries.new_zeros(shape).put_(cell[at], entries)

        size = spread(alphabet.sizes[string[at]] * ~point[at])
        points = spread(point[at].long())
        whole = points.cumsum(1) == points  # at the point too
        decimals = (size * ~whole).sum(1, keepdim=True)
        place = size.sum(1, keepdim=True) - decimals - size.cumsum(1)
        worth = spread(alphabet.values[string[at]] * ~point[at]) * alphabet.power(place)
        return cls(
            cell=cell,
            worth=worth,
            pre=_sum_before(worth),
            suf=_sum_before(worth.flip(1)).flip(1),
            place=place,
            size=size,
            whole=whole,
            decimals=decimals.expand(shape),
        )


def _sum_before(entries: Float[Tensor, "numbers tokens"]) -> Float[Tensor, "numbers tokens"]:
    """The sum of all entries of the row before each."""
    sums = torch.zeros_like(entries)
    sums[:, 1:] = entries[:, :-1].cumsum(1)
    return sums


def became_with(alphabet: Alphabet, sums: Sums) -> Float[Tensor, "rows strings"]:
    """The absolute value of the number with each string of digits at the position."""
    power = alphabet.power
    grown, shrunk, size = power(alphabet.sizes), power(-alphabet.sizes), power(sums.size)
    whole = sums.whole.unsqueeze(1)
    value = alphabet.values * power(sums.place).unsqueeze(1) + sums.suf.unsqueeze(1)
    value *= torch.where(whole, 1.0, shrunk) * torch.where(sums.whole, 1.0, size).unsqueeze(1)
    value += torch.where(whole, grown, 1.0) * torch.where(sums.whole, sums.pre / size, sums.pre).unsqueeze(1)
    return value * power(sums.decimals).unsqueeze(1)
