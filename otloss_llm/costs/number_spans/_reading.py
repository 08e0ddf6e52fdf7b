"""Where the numbers of a batch of labels are: what each token can be in a number, and what each position is.

A number is `[-]12[.5]`: digits, a sign directly before them, one point between digits, read from the left.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss_llm.costs.number_tokens import NumberTokens, read_number

# What a token can be in a number; IGNORED is what labels are that do not count.
IGNORED, TEXT, BARE, BLANK, MINUS, POINT = range(-1, 5)

# 200 digits, and a token of 64 among them, stay far from the end of float64 at 10^308.
MOST_DIGITS = 200
_DIGITS = re.compile(" ?[0-9]{1,64}")
_LARGEST_POWER = 300

# A minus behind these, a blank or nothing is a sign; behind a digit, a letter, a closing bracket it takes a difference.
_BEFORE_A_SIGN = frozenset("([{<=>+-−*/×÷^,:;|&~$€£")


@dataclass(frozen=True)
class Alphabet:
    """What the tokens of a vocabulary are to a number.

    Strings are the distinct strings of digits: '7' and ' 7' are one, and so cost the same to the last bit.

    Attributes:
        part: TEXT, BARE digits, digits behind a BLANK, MINUS or POINT.
        opens: whether a minus behind the token is a sign.
        spaced: whether the token begins with a blank.
        string: which string the token is; 0 where it is none.
        sizes: how many digits a string has.
        values: what a string is worth.
        powers: of ten, each rounded once.
    """

    part: Int[Tensor, " vocab"]
    opens: Bool[Tensor, " vocab"]
    spaced: Bool[Tensor, " vocab"]
    string: Int[Tensor, " vocab"]
    sizes: Int[Tensor, " strings"]
    values: Float[Tensor, " strings"]
    powers: Float[Tensor, " powers"]

    @classmethod
    def of(cls, tokens: NumberTokens, *, decimals: bool) -> Self:
        """Raises ValueError if no token is digits that can join, or one has a value that its text has not."""
        _check_values(tokens)
        parts = [_part(*pair) for pair in zip(tokens.texts, tokens.values.tolist(), strict=True)]
        if not decimals:
            parts = [TEXT if part == POINT else part for part in parts]
        digits = [
            (text or "").strip() if part in (BARE, BLANK) else ""
            for text, part in zip(tokens.texts, parts, strict=True)
        ]
        strings = sorted(set(digits) - {""})
        if not strings:
            raise ValueError(
                f"{tokens.name} has no token of ASCII digits alone among {len(parts)}, so no number is made of them; "
                "use NumberCost, which takes the value of each token."
            )
        if BARE not in parts:
            raise ValueError(
                f"{tokens.name} has {parts.count(BLANK)} tokens of digits, each with a blank before them, as ' "
                f"{strings[0]}', so no two join to one number; use NumberCost, which takes the value of each token."
            )
        place = {string: i for i, string in enumerate(strings)} | {"": 0}
        return cls(
            part=torch.tensor(parts),
            opens=torch.tensor([not text or _opens(text[-1]) for text in tokens.texts]),
            spaced=torch.tensor([(text or "").startswith(" ") for text in tokens.texts]),
            string=torch.tensor([place[text] for text in digits]),
            sizes=torch.tensor([len(text) for text in strings]),
            values=torch.tensor([float(text) for text in strings], dtype=torch.float64),
            powers=torch.tensor(
                [float(f"1e{k}") for k in range(-_LARGEST_POWER, _LARGEST_POWER + 1)], dtype=torch.float64
            ),
        )

    def power(self, exponent: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """10^exponent in float64."""
        return self.powers[exponent + _LARGEST_POWER]

    def to(self, device: torch.device) -> Self:
        """The same on another device; values stay in float64."""
        return type(self)(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


@dataclass(frozen=True)
class Reading:
    """What the positions of a batch are.

    Attributes:
        inside: digits or point of a number.
        start: its first digits.
        point: its decimal point.
        sign: its sign, one before the start.
        behind: no part of a number, but right behind the last digits of one.
        glued: first digits behind a blank; without it, they would join another number.
    """

    inside: Bool[Tensor, "batch length"]
    start: Bool[Tensor, "batch length"]
    point: Bool[Tensor, "batch length"]
    sign: Bool[Tensor, "batch length"]
    behind: Bool[Tensor, "batch length"]
    glued: Bool[Tensor, "batch length"]


def read(alphabet: Alphabet, labels: Int[Tensor, "batch length"], valid: Bool[Tensor, "batch length"]) -> Reading:
    """Find the numbers of each sequence but one that its first label may be in the middle of (`_may_be_cut`).

    Labels are ids of the vocabulary, also where they are not valid.
    """
    part = alphabet.part[labels].masked_fill(~valid, IGNORED)
    bare, dot = part == BARE, part == POINT
    digits = bare | (part == BLANK)
    # In 1.2.3.4 every other point is a decimal one: 1.2 and 3.4.
    between = dot & one_before(digits) & _one_behind(bare)
    count = between.cumsum(-1)
    chain = digits & ~(bare & one_before(digits | between))
    nth = count - count.where(chain, 0).cummax(-1).values if count.numel() else count
    point = between & (nth % 2 == 1)
    start = digits & ~(bare & one_before(digits | point))
    size = alphabet.sizes[alphabet.string[labels]] * digits
    minus, spaced = part == MINUS, alphabet.spaced[labels]
    short = (digits | point) & ~_too_long(start, size)
    short &= ~_may_be_cut(start, bare, dot | (minus & ~spaced))
    start = start & short
    sign = minus & _one_behind(start & bare)
    sign &= spaced | ~one_before(valid & ~alphabet.opens[labels])
    return Reading(
        inside=short,
        start=start,
        point=point & short,
        sign=sign,
        behind=valid & ~(digits | point | sign) & one_before(short),
        glued=start & ~bare & one_before(digits | (dot & one_before(digits))),
    )


def _too_long(start: Bool[Tensor, "batch length"], size: Int[Tensor, "batch length"]) -> Bool[Tensor, "batch length"]:
    """Whether the number that a position is in has more digits than are counted."""
    number = start.reshape(-1).cumsum(0)  # 0 is what comes before the first
    total = number.new_zeros(len(number) + 1).index_add_(0, number, size.reshape(-1))
    return (total[number] > MOST_DIGITS).reshape(start.shape)


def _may_be_cut(
    start: Bool[Tensor, "batch length"], bare: Bool[Tensor, "batch length"], mark: Bool[Tensor, "batch length"]
) -> Bool[Tensor, "batch length"]:
    """Up to the second number of a row, True if its first label is a digit, or a mark before one, without a blank.

    What stands before a row is not known: labels lose their first to the shift, and packed blocks begin anywhere.
    """
    joins = start & bare
    cut = (joins | (mark & _one_behind(joins)))[:, :1]
    return cut & (start.cumsum(-1) == 1)


def one_before(mask: Bool[Tensor, "batch length"]) -> Bool[Tensor, "batch length"]:
    """Whether it holds one position before; False at the beginning."""
    moved = torch.zeros_like(mask)
    moved[:, 1:] = mask[:, :-1]
    return moved


def _one_behind(mask: Bool[Tensor, "batch length"]) -> Bool[Tensor, "batch length"]:
    """Whether it holds one position behind; False at the end."""
    moved = torch.zeros_like(mask)
    moved[:, :-1] = mask[:, 1:]
    return moved


def writes_decimals(tokenizer: Any, tokens: NumberTokens) -> bool:
    """Whether '1.5' has no blank behind its point; True for a tokenizer that only decodes."""
    texts = [tokens.texts[i] or "" for i in _encoded("1.5", tokenizer)]
    return not any(a == "." and b.startswith(" ") for a, b in itertools.pairwise(texts))


def _encoded(text: str, tokenizer: Any) -> list[int]:
    """Ids of a text, none from a tokenizer that only decodes; it stays as it is.

    A fast tokenizer of transformers would drop the truncation and padding that its backend is set to.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        made = backend.encode(text, add_special_tokens=False)
        return [i for i, is_text in zip(made.ids, made.attention_mask, strict=True) if is_text]
    return tokenizer.encode(text, add_special_tokens=False) if hasattr(tokenizer, "encode") else []


def _check_values(tokens: NumberTokens) -> None:
    """Raise ValueError where a value is not that of the text: numbers are put together of digits, not of values."""
    numbers = (~tokens.values.isnan()).nonzero().squeeze(-1).tolist()
    read = [read_number(tokens.texts[i] or "") for i in numbers]
    own = torch.tensor([math.nan if value is None else value for value in read], dtype=torch.float64)
    held = tokens.values[numbers]
    wrong = (held.cpu() != own.to(held.dtype)).nonzero()  # NaN is none
    if len(wrong):
        first = int(wrong[0])
        i, value = numbers[first], read[first]
        raise ValueError(
            f"token {i} of {tokens.name}, {tokens.texts[i]!r}, is given the value {float(held[first]):.12g}, expected "
            f"{'none' if value is None else f'its own, {value:.12g},'} (or NaN): NumberSpanCost reads numbers off the "
            "digits. Leave it out of values=, or use NumberCost, which takes the value of each token."
        )


def _part(text: str | None, value: float) -> int:
    """What a token can be in a number; one that was declared no number is text."""
    if text is None:
        return TEXT
    if _DIGITS.fullmatch(text) and value == value:
        return BLANK if text[0] == " " else BARE
    if text.removeprefix(" ") in ("-", "−"):
        return MINUS
    return POINT if text == "." else TEXT


def _opens(character: str) -> bool:
    return character.isspace() or character in _BEFORE_A_SIGN
