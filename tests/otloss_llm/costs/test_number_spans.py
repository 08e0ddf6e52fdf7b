"""NumberSpanCost: every position against a reader of strings and regular expressions, and what rows must be like."""

from __future__ import annotations

import functools
import io
import math
import pickle
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from otloss.losses import number_line as _number_line
from otloss_llm import linear_token_loss, token_loss
from otloss_llm.costs.few_columns import FewColumns
from otloss_llm.costs.number_spans import NumberSpanCost, _cost
from otloss_llm.costs.number_tokens import NumberTokens
from tests.otloss_llm.oracles import OBJECTIVES

DATA = Path(__file__).parents[4] / "shared/data"
DIGITS = list("0123456789")
SINGLE = [*DIGITS, "-", ".", " ", "x", "(", ")", "=", None]
PARTS = ["00", "05", "7", "12", "345", "100", "999", "0000", "12345678"]
TEXTS = [" -", "−", " ", "x", " kg", "(", ")", " =", "=", ",", "a7", ".5", "-7", "", None, "]", "\n", "�", "٣", "7 "]
MULTI = [*DIGITS, *PARTS, *(" " + d for d in [*DIGITS, *PARTS]), "-", ".", *TEXTS]
TEN = [*DIGITS, "-", ".", " kg"]
WORD_PIECES = [*DIGITS, *(" " + d for d in DIGITS), " -", " .", " kg"]


def number_tokens(texts: Sequence[str | None]) -> NumberTokens:
    """Values as by decoding: of digits, and of '-7' and '.5' too."""
    values = [float(t) if t and re.fullmatch(r"\s*-?[0-9.]*[0-9]\s*", t) else math.nan for t in texts]
    return NumberTokens(values=torch.tensor(values, dtype=torch.float64), texts=tuple(texts), name="made up")


def span_cost(texts: Sequence[str | None], **given: Any) -> NumberSpanCost:
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
    rest = distance(y, -y, scale=scale, unit=unit) if signed and at == 0 else most_of(costs, texts)
    return [rest if c is None else min(c, rest) for c in costs]


def most_of(costs: Sequence[float | None], texts: list[str | None]) -> float:
    """1.01 times the largest cost, the longest fiftieth of the tokens of digits left out."""
    usual = usual_length(tuple(texts))
    return 1.01 * max(c for c, t in zip(costs, texts, strict=True) if c is not None and len((t or "").strip()) <= usual)


@functools.lru_cache
def usual_length(texts: tuple[str | None, ...]) -> int:
    lengths = sorted(len(t.strip()) for t in texts if t and re.fullmatch(" ?[0-9]{1,64}", t))
    return lengths[len(lengths) - len(lengths) // 50 - 1]


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
        at_start = bool(stretch) and stretch[0] == 0
        for a, b in spans:
            number = pieces[a:b]
            begins = a == 0 or (a == 1 and pieces[0] == ".")
            if at_start and begins and number[0][0] != " ":
                continue  # may be the rest of a longer one
            before = "".join(pieces[:a])
            glued = number[0][0] == " " and re.search(r"[0-9]\.?$", before) is not None
            for at in range(b - a):
                rows[stretch[a + at]] = row_in(number, at, texts, glued=glued and at == 0, scale=scale, unit=unit)
            if b < len(pieces) and b not in [at for span in spans for at in range(*span)]:
                y = value_of("".join(number))
                assert y is not None
                costs = [
                    distance(y, value_of("".join(number) + t) or Fraction(0), scale=scale, unit=unit)
                    if t and re.fullmatch("[0-9]+", t)
                    else 0.0
                    for t in texts
                ]
                most = most_of(costs, texts)
                rows[stretch[b]] = [min(cost, most) for cost in costs]
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
    begun = torch.nn.functional.pad(labels, (1, 0), value=-100)
    compare(begun.clamp(min=0), begun != -100, MULTI, scale=scale, unit=1.0)


# ---- what rows must be like ------------------------------------------------------------------------------------------


def dense_of(text: str, texts: Sequence[str | None], **given: Any) -> Tensor:
    """(characters, V), of a whole text whose characters are tokens."""
    labels = torch.tensor([-100, *(texts.index(character) for character in text)])
    found = span_cost(texts, **given).few_columns(labels, labels != -100)
    return dense(found, len(texts))


def test_rows_by_hand() -> None:
    rows = dense_of("45", TEN, scale="relative")
    assert rows[0].tolist() == pytest.approx(
        [40 / 45, 30 / 45, 20 / 45, 10 / 45, 0, 10 / 55, 20 / 65, 30 / 75, 40 / 85, 50 / 95, 2, 2.02, 2.02]
    )
    worst = 1.01 * 5 / 45
    assert rows[1].tolist() == pytest.approx(
        [5 / 45, 4 / 45, 3 / 45, 2 / 45, 1 / 45, 0, 1 / 46, 2 / 47, 3 / 48, 4 / 49, worst, worst, worst]
    )
    sign, digit, behind = dense_of("-3x", SINGLE)
    assert sign.tolist() == pytest.approx([2 * math.log(4) if text != "-" else 0.0 for text in SINGLE])
    assert digit[:10].tolist() == pytest.approx([abs(math.log((1 + j) / 4)) for j in range(10)])
    assert behind.tolist() == pytest.approx([math.log((31 + j) / 4) for j in range(10)] + [0.0] * 8)


def test_text_costs_what_it_does_beside_single_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One constant for both."""
    assert _cost.TEXT_OVER_WORST is _number_line.TEXT_OVER_WORST
    rows = dense_of("x45", [*TEN, "x"])
    monkeypatch.setattr(_cost, "TEXT_OVER_WORST", 2 * _number_line.TEXT_OVER_WORST)
    torch.testing.assert_close(dense_of("x45", [*TEN, "x"])[:, 12], 2 * rows[:, 12])


HUNDRED = [f"{i:02}" for i in range(100)]


@pytest.mark.parametrize("scale", ["log", "relative"])
def test_rare_long_tokens_do_not_decide_what_text_costs(scale: str) -> None:
    """Two of 112 tokens, 16 zeros and 12345678, do not count; a third is no longer rare."""
    plain = [*TEN[:-1], "x", *HUNDRED]
    long: list[str | None] = ["0" * 16, "12345678"]
    without, rows = (dense_of("x5x12.5x", texts, scale=scale) for texts in (plain, plain + long))
    assert torch.equal(rows[:, : len(plain)], without)
    most = without[:, 12].clone()  # text
    most[[2, 7]] = 1.01 * without[[2, 7]].amax(1)  # the label is text, right behind a number
    assert (rows[:, -2:] <= most[:, None]).all()
    assert (rows[1:, -1] > 0).all()
    two, three = (dense_of("x12", [*plain, *more], scale=scale)[2, 12] for more in (long, [*long, "0" * 9]))
    assert three > 1.01 * two
    labels = random_labels([*plain, *long], (20, 12), seed=5)
    assert compare(labels, labels > -1, [*plain, *long], scale=scale, unit=1.0) > 100


def test_a_rare_token_keeps_a_distance_below_the_price_of_text() -> None:
    texts = [*TEN, *HUNDRED, "12345678"]
    labels = torch.tensor([12, 0, 11, texts.index("12")])  # kg0.12
    row = dense(span_cost(texts).few_columns(labels, labels > -1), len(texts))[3]
    assert row[-1].item() == pytest.approx(math.log(1.12345678 / 1.12))
    assert row[12].item() == pytest.approx(1.01 * math.log(1.99 / 1.12))


def test_coverage_says_which_lengths_are_rare() -> None:
    printed = io.StringIO()
    span_cost([*TEN, *HUNDRED, "0000", "12345"]).coverage(file=printed)
    assert printed.getvalue().endswith("do too; 2 of more than 2 digits do not decide what text costs\n")


@pytest.mark.parametrize("scale", ["log", "relative"])
def test_leading_digits_weigh_more_and_farther_digits_cost_more(scale: str) -> None:
    rows = dense_of("555.55", TEN, scale=scale)[[0, 1, 2, 4, 5], :10]
    assert (rows[:-1] >= 2 * rows[1:]).masked_fill(rows[:-1] == 0, True).all()
    away = rows[:, 5:].diff(dim=1), rows[:, :6].flip(1).diff(dim=1)
    assert all((steps > 0).all() for steps in away)
    assert (rows[:, 5] == 0).all()


@pytest.mark.parametrize("scale", ["log", "relative"])
@pytest.mark.parametrize("text", ["0", "0.0", "00", "-0"])
def test_zero_is_a_number_like_any_other(text: str, scale: str) -> None:
    rows = dense_of(text, TEN, scale=scale)
    assert torch.isfinite(rows).all()
    for character, row in zip(text, rows, strict=True):
        if character.isdecimal():
            assert row[0] == 0
            assert (row[1:10] > 0).all()
            assert row[12] == row.amax() > row[:10].amax()


def test_a_token_and_its_variants_cost_exactly_nothing() -> None:
    labels = random_labels(MULTI, (40, 50), seed=1)
    found = span_cost(MULTI).few_columns(labels, torch.ones_like(labels, dtype=torch.bool))
    rows, flat = dense(found, len(MULTI)), labels.reshape(-1)
    assert (rows.gather(1, flat[:, None]) == 0).all()
    alone = torch.tensor([[MULTI.index("x"), MULTI.index(" 345"), MULTI.index("12"), MULTI.index(",")]])
    row = dense(span_cost(MULTI).few_columns(alone, alone > -1), len(MULTI))[1]
    assert row[MULTI.index("345")] == row[MULTI.index(" 345")] == 0


@pytest.mark.parametrize("scale", ["log", "relative"])
@pytest.mark.parametrize(("before", "behind"), [(200, 0), (1, 199), (199, 1), (25, 25)])
def test_long_numbers_stay_finite(before: int, behind: int, scale: str) -> None:
    texts: list[str | None] = [*TEN, "9" * 64, "0" * 64]
    text = "9" * before + "." * (behind > 0) + "1" * behind + "-"
    rows = dense_of(text, texts, scale=scale, unit=1e-30, dtype=torch.float32)
    assert torch.isfinite(rows).all()
    assert (rows >= 0).all()
    assert rows[0, 0] > 0
    assert (rows[-1, 5] > 0) == (behind == 0)  # a digit behind many is lost in float64


def test_a_number_of_more_than_200_digits_is_text() -> None:
    rows = dense_of("-" + "9" * 201 + ".x-7", [*TEN, "x"])
    assert (rows[:-2] == 0).all()
    assert (rows[-1] != 0).sum() == 13  # all but '7': the number behind is read


def test_tokens_that_were_declared_no_numbers_are_text() -> None:
    tokens = number_tokens(TEN)
    values = tokens.values.clone()
    values[7] = math.nan
    cost = NumberSpanCost(NumberTokens(values=values, texts=tokens.texts, name="no sevens"))
    labels = torch.tensor([-100, 1, 7, 3])
    found = cost.few_columns(labels, labels > -1)
    assert 7 not in found.columns
    rows = dense(found, len(TEN))
    torch.testing.assert_close(rows[0, [3, 7]], torch.tensor([math.log(2), 1.01 * math.log(5)]))  # 3, and the worst: 9


@pytest.mark.parametrize(
    ("token", "value", "expected"),
    [(5, 500.0, "its own, 5, (or NaN)"), (12, 3.0, "none (or NaN)"), (13, 7.0, "none (or NaN)")],
)
def test_values_that_texts_do_not_have_are_refused(token: int, value: float, expected: str) -> None:
    tokens = number_tokens([*TEN, None])
    values = tokens.values.clone()
    values[token] = value
    shown = f"token {token} of odd, {tokens.texts[token]!r}, is given the value {value:g}, expected {expected}"
    with pytest.raises(ValueError, match=re.escape(shown) + ".*Leave it out of values=, or use NumberCost"):
        NumberSpanCost(NumberTokens(values=values, texts=tokens.texts, name="odd"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rounded_values_are_those_of_their_texts(dtype: torch.dtype) -> None:
    texts = (*TEN, "16777217")
    exact = number_tokens(texts)
    cost = NumberSpanCost(NumberTokens(values=exact.values.to(dtype), texts=texts, name="rounded"))
    labels = torch.tensor([-100, 13, 2])
    few = (NumberSpanCost(exact).few_columns(labels, labels > -1), cost.few_columns(labels, labels > -1))
    assert torch.equal(few[0].rows, few[1].rows)


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        (TEN, "10 tokens of digits join others, 0 behind a blank begin one; '-' and '.' do too"),
        (DIGITS, "0 behind a blank begin one; no '-' or '.' joins digits here: signs and decimals are not read"),
        (WORD_PIECES, "10 behind a blank begin one; no '-' or '.' joins digits here: signs and decimals are not read"),
        ([*DIGITS, "−"], "no '.' joins digits here: decimals are not read"),
        ([*DIGITS, "."], "no '-' joins digits here: signs are not read"),
    ],
)
def test_coverage_says_what_joins(texts: list[str | None], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    cost = span_cost(texts)
    coverage = cost.coverage()
    assert coverage == number_tokens(texts).coverage()
    printed = capsys.readouterr().out
    *first, last = printed.splitlines()
    assert "\n".join(first) == str(coverage)
    assert last.startswith("whole numbers: 10 tokens")
    assert last.endswith(line)
    file = io.StringIO()
    cost.coverage(file=file)
    assert file.getvalue() == printed
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", ["WordPiece", "characters"])
def test_decimals_are_read_where_the_tokenizer_writes_them(kind: str) -> None:
    """WordPiece puts a blank behind the point: '12', '.', ' 5'."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from otloss_llm.costs.choice import NumberSettings, number_cost
    from tests.otloss_llm.costs.test_number_tokens import BUILT, wrap

    tokenizer = BUILT["characters"]()
    if kind == "WordPiece":
        words = ["[UNK]", "a", "kg", ".", *DIGITS, *("##" + digit for digit in DIGITS)]
        backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        tokenizer = wrap(backend, unk_token="[UNK]")
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=6)
    before = tokenizer.backend_tokenizer.to_str()
    cost = NumberSpanCost.from_tokenizer(tokenizer)
    assert tokenizer.backend_tokenizer.to_str() == before
    in_training = number_cost(tokenizer, cost.shape[0], NumberSettings(span="log"))
    assert torch.equal(in_training.columns, cost.columns)
    printed = io.StringIO()
    cost.coverage(file=printed)
    text = kind == "WordPiece"
    assert (f"point={not text}" in repr(cost), "decimals are not read" in printed.getvalue()) == (True, text)
    labels = torch.tensor([-100, *tokenizer.encode("12.5", add_special_tokens=False)])
    found = dense(cost.few_columns(labels, labels != -100), cost.shape[0])
    seven = cost.tokens.texts.index("7")
    worth = (17, 12) if text else (17.5, 12.5)
    assert found[1, seven].item() == pytest.approx(math.log((1 + worth[0]) / (1 + worth[1])))
    point = cost.tokens.texts.index(".")
    assert (point in cost.columns) == (not text)


def test_flattened_sequences_join_and_an_ignored_label_parts_them() -> None:
    """The rows 'kg 1' and '234', as one sequence '1234'."""
    apart, flat = torch.tensor([[12, 12, 1, 12], [-100, 2, 3, 4]]), torch.tensor([12, 12, 1, 2, 3, 4])
    parted = torch.tensor([12, 12, 1, -100, 2, 3, 4])
    cost = span_cost(TEN)
    rows = [dense(cost.few_columns(labels, labels != -100), len(TEN)) for labels in (apart, flat, parted)]
    assert torch.equal(rows[0][[0, 1, 2, 4, 5, 6]], rows[2])
    torch.testing.assert_close(rows[0][2, 2], torch.tensor(math.log(3 / 2)).double())  # 2 for 1
    torch.testing.assert_close(rows[1][2, 2], torch.tensor(math.log(2235 / 1235)).double())  # 2234 for 1234


@pytest.mark.parametrize(
    ("row", "unjudged"),
    [
        (["7", "+", "2", "5"], 2),  # of '17+25', whose first label the shift drops; '+' is right behind the rest
        (["7", ".", "2", "5", "+", "1"], 5),
        ([".", "5", "+", "1"], 3),
        (["-", "5", "+", "1"], 3),
        (["-"], 1),
        (["."], 1),
        (["+", "5"], 0),
        ([" 7", "5", "+"], 0),  # a blank begins a number
        (["-", " 7", "5"], 0),
        ([" -", "5", "+"], 0),
    ],
)
def test_what_may_be_the_rest_of_a_number_is_not_judged(row: list[str], unjudged: int) -> None:
    texts = [*TEN, " -", " 7", "+"]
    cost = span_cost(texts)
    labels = torch.tensor([texts.index(text) for text in row])
    whole = torch.cat([torch.tensor([-100]), labels])
    expected = dense(cost.few_columns(whole, whole != -100), len(texts))
    assert bool(expected[:unjudged].any()) == (unjudged > 1)
    expected[:unjudged] = 0.0
    got = dense(cost.few_columns(labels, labels > -1), len(texts))
    assert torch.equal(got, expected)
    assert bool(got.any()) == (unjudged < len(row))


def test_each_row_of_a_batch_begins_by_itself() -> None:
    labels = torch.tensor([[1, 2, 12], [12, 1, 2], [-100, 1, 2]])
    rows = dense(span_cost(TEN).few_columns(labels, labels > -1), len(TEN))
    assert [bool(row.any()) for row in rows] == [False, False, False, False, True, True, True, True]


# ---- shapes, devices, errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 3, 5)])
def test_batches_without_numbers(shape: tuple[int, ...]) -> None:
    labels = torch.full(shape, 12)
    found = span_cost(TEN).few_columns(labels, torch.ones(shape, dtype=torch.bool))
    assert (found.rows.shape, found.rest.shape, found.which.shape) == ((1, 12), (1,), (labels.numel(),))
    assert not found.rows.any()
    assert not found.rest.any()
    ignored = span_cost(TEN).few_columns(labels - 112, torch.zeros(shape, dtype=torch.bool))
    assert (ignored.rows.shape, ignored.which.shape) == ((1, 12), (0,))


def test_leading_axes_are_rows_and_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = random_labels(MULTI, (12, 20), seed=2)
    valid = torch.rand(12, 20, generator=torch.Generator().manual_seed(1)) > 0.2
    cost = span_cost(MULTI)
    expected = dense(cost.few_columns(labels, valid), len(MULTI))
    monkeypatch.setattr("otloss_llm.costs.number_spans._cost._BLOCK_ENTRIES", 100)
    again = cost.few_columns(labels.reshape(3, 4, 20), valid.reshape(3, 4, 20))
    assert torch.equal(dense(again, len(MULTI)), expected)
    lines = [dense(cost.few_columns(a, b), len(MULTI)) for a, b in zip(labels, valid, strict=True)]
    assert torch.equal(torch.cat(lines), expected)


def test_dtypes_and_copies() -> None:
    texts: list[str | None] = [*TEN, "16777217"]  # not a float32
    labels = torch.tensor([-100, 13, 2, 12])
    cost = span_cost(texts)
    exact = cost.few_columns(labels, labels > -1).rows
    for copy in (cost.to(torch.float32).to(torch.float64), pickle.loads(pickle.dumps(cost))):
        assert torch.equal(copy.few_columns(labels, labels > -1).rows, exact)
    single = cost.to(torch.float32)
    assert single.few_columns(labels, labels > -1).rows.dtype == single.dtype == torch.float32
    assert torch.equal(single.few_columns(labels, labels > -1).rows, exact.float())
    assert cost.shape == (14, 14)
    assert repr(single) == (
        "NumberSpanCost(shape=(14, 14), dtype=torch.float32, device='cpu', digits=11, sign=True, point=True, "
        "scale='log', unit=1)"
    )
    assert "digits=20, sign=False, point=False" in repr(span_cost(WORD_PIECES))
    assert NumberSpanCost(number_tokens(TEN)).dtype == torch.float32


@pytest.mark.gpu
def test_cuda_gives_the_same() -> None:
    labels = random_labels(MULTI, (30, 40), seed=3)
    valid = torch.rand(labels.shape, generator=torch.Generator().manual_seed(2)) > 0.1
    cost = span_cost(MULTI)
    moved = cost.to("cuda").few_columns(labels.cuda(), valid.cuda())
    torch.testing.assert_close(
        dense(moved, len(MULTI)).cpu(), dense(cost.few_columns(labels, valid), len(MULTI)), rtol=1e-12, atol=1e-12
    )


def test_bad_input_is_named() -> None:
    tokens = number_tokens(TEN)
    with pytest.raises(TypeError, match="tokens is a list, expected NumberTokens"):
        NumberSpanCost(TEN)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scale is 'rank', expected one of \('log', 'relative'\)"):
        NumberSpanCost(tokens, scale="rank")
    with pytest.raises(ValueError, match=r"dtype is torch.float16, expected torch.float32"):
        NumberSpanCost(tokens, dtype=torch.float16)
    for unit in (0.0, -1.0, math.nan, math.inf, 1e31, 1e-31):
        with pytest.raises(ValueError, match=re.escape(f"unit is {unit}, expected")):
            NumberSpanCost(tokens, unit=unit)
    with pytest.raises(ValueError, match=r"made up has no token of ASCII digits alone among 4, .* use NumberCost"):
        span_cost(["٣", "-7", "x", None])
    with pytest.raises(ValueError, match=r"made up has 2 tokens of digits, each with a blank .* ' 12', so no two join"):
        span_cost([" 7", " 12", "-", "."])
    cost = NumberSpanCost(tokens)
    with pytest.raises(ValueError, match=r"no row for a label alone: .* linear_token_loss"):
        cost.rows(torch.tensor([3]))
    with pytest.raises(ValueError, match="no row for a label alone"):
        cost.dense()
    with pytest.raises(ValueError, match="has no transpose"):
        _ = cost.T
    for shape in ((2, 3), ()):
        with pytest.raises(ValueError, match=r"labels have shape .* and valid .*, expected \(\.\.\., length\) twice"):
            cost.few_columns(torch.zeros(shape, dtype=torch.long), torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"labels have shape \(\)"):
        cost.few_columns(torch.tensor(1), torch.tensor(True))


# ---- in losses, and of real tokenizers -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["number-token", "mle", "user"])
def test_through_the_token_losses(name: str) -> None:
    objective, formula = OBJECTIVES[name]
    labels = random_labels(MULTI, (5, 12), seed=4)
    labels[torch.rand(5, 12, generator=torch.Generator().manual_seed(3)) < 0.2] = -100
    valid = labels != -100
    cost = span_cost(MULTI)
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(5, 12, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(len(MULTI), 6, dtype=torch.float64, generator=generator, requires_grad=True)
    q = (hidden @ weight.T).softmax(-1)[valid]
    own = q.gather(1, labels[valid][:, None]).squeeze(1)
    d = (q * dense(cost.few_columns(labels, valid), len(MULTI))).sum(1)
    expected = formula(own, -own.log(), d).mean()
    slopes = torch.autograd.grad(expected, [hidden, weight])
    for impl in ("reference", "chunked"):
        got = linear_token_loss(hidden, weight, labels, objective=objective, cost=cost, impl=impl, chunk_size=7)
        torch.testing.assert_close(got.loss, expected, rtol=1e-12, atol=1e-12)
        assert got.cost is not None
        torch.testing.assert_close(got.cost[valid], d, rtol=1e-12, atol=1e-12)
        for a, b in zip(torch.autograd.grad(got.loss, [hidden, weight]), slopes, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    got = token_loss(hidden @ weight.T, labels, objective=objective, cost=cost)
    torch.testing.assert_close(got.loss, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("folder", ["tokenizers/gpt2", "models/stories260K"])
def test_texts_of_real_tokenizers(folder: str) -> None:
    transformers = pytest.importorskip("transformers")
    if not (DATA / folder).is_dir():
        pytest.skip(f"{folder} is not among the shared data")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DATA / folder)
    tokens = NumberTokens.of(tokenizer)
    texts = list(tokens.texts)
    ids = tokenizer("It is -12.5 kg, (-3) or 20348-7")["input_ids"]
    labels = torch.tensor([ids])
    assert compare(labels, labels > -1, texts, scale="log", unit=1.0) >= 11
    again = NumberSpanCost.from_tokenizer(tokenizer, vocab_size=len(texts) + 7, scale="relative", unit=0.1)
    assert again.shape == (len(texts) + 7, len(texts) + 7)
    assert (again.scale, again.unit) == ("relative", 0.1)
    seven = texts.index("7")
    without = NumberSpanCost.from_tokenizer(tokenizer, values={seven: None})
    assert sorted([*without.columns.tolist(), seven]) == sorted(NumberSpanCost(tokens).columns.tolist())
    assert without.coverage(file=io.StringIO()).numbers == tokens.coverage().numbers - 1
    with pytest.raises(ValueError, match=rf"token {seven} of .*, '7', is given the value 70, expected its own, 7,"):
        NumberSpanCost.from_tokenizer(tokenizer, values={seven: 70})
