"""NumberSpanCost: every position against a reader of strings and regular expressions, and what rows must be like."""

from __future__ import annotations

import math
import random
import re
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from otloss_llm.few_columns import FewColumns
from otloss_llm.number_spans import NumberSpanCost
from otloss_llm.number_tokens import NumberTokens

DIGITS = list("0123456789")
SINGLE = [*DIGITS, "-", ".", " ", "x", "(", ")", "=", None]
PARTS = ["00", "05", "7", "12", "345", "100", "999", "0000", "12345678"]
TEXTS = [" -", "−", " ", "x", " kg", "(", ")", " =", "=", ",", "a7", ".5", "-7", "", None, "]", "\n", "�", "٣", "7 "]
MULTI = [*DIGITS, *PARTS, *(" " + d for d in [*DIGITS, *PARTS]), "-", ".", *TEXTS]
TEN = [*DIGITS, "-", ".", " kg"]


def number_tokens(texts: list[str | None]) -> NumberTokens:
    """Values as by decoding: of digits, and of '-7' and '.5' too."""
    values = [float(t) if t and re.fullmatch(r"\s*-?[0-9.]*[0-9]\s*", t) else math.nan for t in texts]
    return NumberTokens(values=torch.tensor(values, dtype=torch.float64), texts=tuple(texts), name="made up")


def span_cost(texts: list[str | None], **given: Any) -> NumberSpanCost:
    return NumberSpanCost(number_tokens(texts), **({"dtype": torch.float64} | given))


def distance(a: Fraction, b: Fraction, *, scale: str, unit: float) -> float:
    """Exact up to the last logarithm."""
    if scale == "relative":
        return float(abs(a - b) / max(abs(a), abs(b), Fraction(unit)))
    if a * b < 0:
        return distance(a, Fraction(0), scale=scale, unit=unit) + distance(b, Fraction(0), scale=scale, unit=unit)
    return math.log1p(float(abs(a - b) / (Fraction(unit) + min(abs(a), abs(b)))))


# ---- the slow twin ---------------------------------------------------------------------------------------------------

PIECE = re.compile(r" ?([0-9]+|[-−])|\.")
NUMBER = re.compile(r"(?:(?<![^\s(\[{<=>+−*/×÷^,:;|&~$€£-])[-−](?=\d)|(?<= )[-−](?=\d))?\d+(?:\.\d+)?", re.ASCII)
WHOLE = re.compile(r" ?(?P<sign>[-−]?)(?P<digits>[0-9]+(?:\.[0-9]+)?)")


def plain(text: str | None) -> str:
    """The text with its digits, points and minuses hidden, unless it is a token a number can be made of."""
    if not text:
        return "\n"
    if PIECE.fullmatch(text):
        return text
    hidden = re.sub(r"[0-9]", "x", text)
    return hidden.replace(".", "!").replace("-", "+").replace("−", "+")


def value_of(text: str) -> Fraction | None:
    found = WHOLE.fullmatch(text)
    return None if found is None else Fraction(found["digits"]) * (-1 if found["sign"] else 1)


def spans_of(pieces: list[str]) -> list[tuple[int, int]]:
    """First and last-but-one token of each number."""
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    found = [match.span() for match in NUMBER.finditer("".join(pieces))]
    token = [i for i, piece in enumerate(pieces) for _ in piece]
    return [(token[a], token[b - 1] + 1) for a, b in found]


def row_in(number: list[str], at: int, texts: list[str | None], *, glued: bool, scale: str, unit: float) -> list[float]:
    """The costs at position `at` of the tokens of a number."""
    y = value_of("".join(number))
    assert y is not None
    signed = number[0].strip() in ("-", "−")
    costs: list[float | None] = []
    for text in texts:
        if signed and at == 0:
            costs.append(0.0 if text and text.strip(" ") in ("-", "−") else None)
            continue
        became = None
        if text and PIECE.fullmatch(text) and not (glued and re.fullmatch("[0-9]+", text)):
            if text.strip(" ") in ("-", "−"):
                became = -y if at == 0 else None
            elif number[at] == "." or text != ".":
                became = value_of("".join([*number[:at], text, *number[at + 1 :]]))
        costs.append(None if became is None else distance(y, became, scale=scale, unit=unit))
    if signed and at == 0:
        rest = distance(y, -y, scale=scale, unit=unit)
    else:
        rest = 1.01 * max(c for c in costs if c is not None)
    return [rest if c is None else c for c in costs]


def slow_rows(
    labels: list[int], valid: list[bool], texts: list[str | None], *, scale: str, unit: float
) -> list[list[float]]:
    """The rows of the valid positions of one sequence."""
    rows: dict[int, list[float]] = {i: [0.0] * len(texts) for i, v in enumerate(valid) if v}
    stretch: list[int] = []
    for i in range(len(labels) + 1):
        if i < len(labels) and valid[i]:
            stretch.append(i)
            continue
        pieces = [plain(texts[labels[k]]) for k in stretch]
        spans = spans_of(pieces)
        for a, b in spans:
            number = pieces[a:b]
            before = "".join(pieces[:a])
            glued = number[0][0] == " " and re.search(r"[0-9]\.?$", before) is not None
            for at in range(b - a):
                rows[stretch[a + at]] = row_in(number, at, texts, glued=glued and at == 0, scale=scale, unit=unit)
            if b < len(pieces) and b not in [at for span in spans for at in range(*span)]:
                y = value_of("".join(number))
                assert y is not None
                rows[stretch[b]] = [
                    distance(y, value_of("".join(number) + t) or Fraction(0), scale=scale, unit=unit)
                    if t and re.fullmatch("[0-9]+", t)
                    else 0.0
                    for t in texts
                ]
        stretch = []
    return [rows[i] for i in sorted(rows)]


def dense(found: FewColumns, vocab: int) -> Tensor:
    """(tokens, V)."""
    rows = found.rest.unsqueeze(1).repeat(1, vocab)
    rows[:, found.columns] = found.rows
    return rows[found.which]


def compare(labels: Tensor, valid: Tensor, texts: list[str | None], **given: Any) -> int:
    """How many positions had a row."""
    found = span_cost(texts, **given).few_columns(labels.masked_fill(~valid, -100), valid)
    slow = [
        row
        for line, kept in zip(labels.tolist(), valid.tolist(), strict=True)
        for row in slow_rows(line, kept, texts, **given)
    ]
    expected = torch.tensor(slow, dtype=torch.float64).reshape(-1, len(texts))
    torch.testing.assert_close(dense(found, len(texts)), expected, rtol=1e-9, atol=1e-9)
    assert ((dense(found, len(texts)) == 0) | (expected != 0)).all()  # exactly 0 where it is
    return len(found.rows) - 1


def random_labels(texts: list[str | None], shape: tuple[int, int], *, seed: int) -> Tensor:
    """Mostly digits, points and minuses."""
    chance = random.Random(seed)
    often = [i for i, t in enumerate(texts) if t and re.fullmatch("[0-9]+", t)]
    seldom = [i for i, t in enumerate(texts) if t in ("-", ".", " -", " ")]
    kinds = [often] * 6 + [seldom] * 2 + [list(range(len(texts)))] * 2
    return torch.tensor([[chance.choice(chance.choice(kinds)) for _ in range(shape[1])] for _ in range(shape[0])])


@pytest.mark.parametrize("scale", ["log", "relative"])
@pytest.mark.parametrize(("texts", "unit"), [(SINGLE, 1.0), (MULTI, 1.0), (SINGLE, 0.01), (MULTI, 50.0)])
def test_random_sequences_against_strings(texts: list[str | None], unit: float, scale: str) -> None:
    labels = random_labels(texts, (60, 24), seed=len(texts))
    valid = torch.rand(labels.shape, generator=torch.Generator().manual_seed(0)) > 0.08
    assert compare(labels, valid, texts, scale=scale, unit=unit) > 700


@pytest.mark.parametrize("scale", ["log", "relative"])
@pytest.mark.parametrize(
    "text",
    ["3-4=-1", "-0.05", "007", "1,000", "-12.50)", "(-3)", "x-3", "1.2.3.4", "5 -3", "5. 3", ".5", "0", "-0", "0.0",
     "9", "12 34", "--5", "1--2", "5.x", "-x", "100x", "2=-", "3.", "- 7", ")-7", "1.-5", "12.5 0", "-0.0"],
)  # fmt: skip
def test_hand_made_texts_against_strings(text: str, scale: str) -> None:
    labels = torch.tensor([[MULTI.index(character) for character in text.replace(",", "=")]])
    compare(labels, torch.ones_like(labels, dtype=torch.bool), MULTI, scale=scale, unit=1.0)
