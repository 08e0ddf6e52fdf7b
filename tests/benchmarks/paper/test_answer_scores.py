"""Numbers in answers, scores of answers, and number tokens under teacher forcing."""

import math
from typing import Any

import pytest
import torch

from benchmarks.paper.data.blocks import PackedBlocks
from benchmarks.paper.data.questions import AnsweredQuestions, Question
from benchmarks.paper.evaluation.answer_scores import extract_answer, final_number, same_answer, score_answers, style_of
from benchmarks.paper.evaluation.answering import NumberTokenScores, number_token_scores, score_number_labels
from otloss_llm.costs.tokenizer_numbers import NumberTokens
from otloss_llm.data import train_bpe_tokenizer
from tests.errors import raising
from tests.otloss_llm.tiny_models import VOCAB, tiny_model

# ---- what a text answers ---------------------------------------------------------------------------------------------

FINAL = {
    "42": 42.0, "The answer is 42.": 42.0, "first 3, then 4": 4.0, "007": 7.0, "0.05 or so": 0.05, "about .5": 0.5,
    "it is...5": 5.0, "-7": -7.0, "x = -7": -7.0, "(−7)": -7.0, "+7": 7.0, "3-4": 4.0, "(3)-4": 4.0, "5 - 3": 3.0,
    "a-3": 3.0, "$1,250.50 left": 1250.5, "-$5": -5.0, "$-5": -5.0, "1,000,000": 1e6, "1,2,3": 3.0, "2, 100": 100.0,
    "12,34": 34.0, "1,0801": 801.0, "5kg": 5.0, "50%": 50.0, "72.0": 72.0, "**8**": 8.0, "\\boxed{9}": 9.0,
    "3/4": 0.75, "so -3/4.": -0.75, "1,000/2.5": 400.0, "3 / 4": 4.0, "3/4 of 8": 8.0, "1/2/2020": 2020.0,
    "1/2, 1/4": 0.25, "1/2e5": 1.0, "x1/2": 2.0, "1/0": None, "": None, "none": None,
    "x2": None, "v1.5": None, "1e5": None, "12e5": None, "1e-5": None, "-1.5E-3": None, "2.e+7": 2.0,
    "0x1F": None, "0X0": None, "2x4": 2.0, "10x4": 10.0, "3 is 1e-5": 3.0, "the-5": 5.0,
    "٣": None, "²": None, "9" * 301: None,
}  # fmt: skip


def test_final_number() -> None:
    assert {text: final_number(text) for text in FINAL} == FINAL


MARKED = {
    "so 6 * 12 = 72\n#### 72": "72", "#### 72.0": "72.0", "#### 72 clips": "72", "#### $72.": "72", "#### 50%": "50",
    "#### 1,080": "1080", "#### -$1,080.50": "-1080.50", "#### −3": "-3", "#### +7": "7", "####7": "7",
    "#### 72\n\nQuestion: 5": "72", "#### Step 1 of it\nthen\n#### 3": "3", "#### 1\n#### 2": "1", "#### 5/8": "5/8",
    "in a line #### 4": "4", "#### twelve": "twelve",
    "#### (72)": "72", "#### **-$72**": "-72", "#### \\$-7.50": "-7.50", "#### 72 (see 1)": "72",
    "#### 18 dollars for 3 apples": "18", "#### 2 + 3 = 5": "2",
    "#### 10:30": "10:30", "#### 1 000": "1 000", "#### 2 1/2": "2 1/2", "#### 1,0801": "1,0801", "#### 1.2.3": "1.2.3",
    "#### 1/2/2020": "1/2/2020", "#### 5 / 8": "5 / 8", "#### 1e5": "1e5", "#### 1,2\n#### 3": "3",
    "72": None, "####": None, "#### \n": None, "#### $": None,
}  # fmt: skip


def test_marked_answers() -> None:
    assert {text: extract_answer(text, "gsm8k") for text in MARKED} == MARKED


def test_other_styles() -> None:
    assert extract_answer(" 2*sqrt(3)\n", "mathematics") == "2*sqrt(3)"
    assert extract_answer(" \n", "mathematics") is None
    assert extract_answer("$1,250.50, not -$3,000", "last") == "-3000"
    assert extract_answer("none", "last") is None
    assert style_of(["x\n#### 1", "#### two"]) == "gsm8k"
    assert style_of(["x\n#### 1 or so", "#### \u2212.5"]) == "gsm8k"
    assert style_of(["1", "2 ####"]) == "mathematics"
    said = r"answer 1 \('2'\) has nothing after a ####, while 2 of 4 have; .*\(--answer_style\) of gsm8k, "
    with pytest.raises(ValueError, match=said):
        style_of(["x\n#### 1", "2", "####", "#### 4"])
    with pytest.raises(ValueError, match=r"answer style is 'first', expected one of gsm8k, mathematics, last"):
        extract_answer("1", "first")


SAME = [
    ("#### 72", "#### 72.0", "gsm8k", True), ("#### $1,072 left.", "#### 1072", "gsm8k", True),
    ("72", "#### 72", "gsm8k", False), ("#### 73", "#### 72", "gsm8k", False), ("#### -72", "#### 72", "gsm8k", False),
    ("#### 12345678901234567", "#### 12345678901234568", "gsm8k", False), ("#### 1/2", "#### 0.5", "gsm8k", True),
    ("#### noon", "#### noon", "gsm8k", True), ("#### noon", "#### 12", "gsm8k", False),
    ("####", "#### 1", "gsm8k", False),
    (" 72\n", "72", "mathematics", True), ("72.0", "72", "mathematics", False), ("5, 6", "5, 6", "mathematics", True),
    ("5,6", "5, 6", "mathematics", False), ("True", "true", "mathematics", False), ("", "72", "mathematics", False),
    ("3/2", "1/2", "last", False), ("2/4", "1/2", "last", True), ("it is 0.5", "1/2", "last", True),
    ("2", "1/2", "last", False), ("1/0", "2/0", "last", False), ("I say 72.0", "72", "last", True),
    ("72 or 73", "72", "last", False), ("none", "72", "last", False),
]  # fmt: skip


def test_same_answer() -> None:
    assert [(*case[:3], same_answer(*case[:3])) for case in SAME] == SAME


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_scores_by_hand() -> None:
    predicted = ["10", "-4", "0", "300", "no", "7 or 8", "True", "1/4"]
    expected = ["10", "4", "0", "100", "20", "8", "False", "0.5"]
    kinds = ["a", "a", "b", "b", None, "c", "c", "c"]
    scores = score_answers(predicted, expected, style="mathematics", kinds=kinds)
    # Numeric are all but 'False'; answered of them all but 'no' and '7 or 8'. Errors: 0, 8, 0, 200, 0.25.
    assert (scores.questions, scores.exact_match, scores.numeric) == (8, 2 / 8, 7 / 8)
    assert scores.answered == pytest.approx(5 / 7)
    assert scores.number_accuracy == pytest.approx(2 / 7)
    assert scores.mean_absolute_error == pytest.approx(208.25 / 5)
    assert scores.median_absolute_error == 0.25
    assert scores.mean_relative_error == pytest.approx((0 + 2 + 0 + 2 + 0.25) / 5)
    assert scores.capped_relative_error == pytest.approx((0 + 1 + 0 + 1 + 0.25 + 1 + 1) / 7)
    log_errors = [2 * math.log(5), math.log(301 / 101), math.log(1.5 / 1.25)]
    assert scores.mean_log_error == pytest.approx(sum(log_errors) / 5)
    # 10 and 0 are equal, 300 : 100 and 1/4 : 1/2 within half an order; -4 has the wrong sign.
    assert scores.order_of_magnitude_accuracy == pytest.approx(4 / 7)
    assert scores.by_kind == {"a": 0.5, "b": 0.5, "c": 0.0}
    extreme = score_answers(["9" * 290, "?"], ["1", "2"], style="last")
    assert extreme.mean_relative_error > 1e280
    assert (extreme.capped_relative_error, extreme.answered) == (1.0, 0.5)
    words = score_answers(["True", "False"], ["True", "True"], style="mathematics")
    assert (words.exact_match, words.numeric, words.by_kind) == (0.5, 0.0, {})
    assert words.answered is words.number_accuracy is words.capped_relative_error is None
    near = score_answers(
        ["0", "0.001", "3.16", "3.17", "-32", "-31"], ["0", "0", "1", "1", "-100", "-100"], style="last"
    )
    assert near.order_of_magnitude_accuracy == 3 / 6


test_invalid_answers_raise = raising(
    (["1"], ["1", "2"], "last", r"1 predicted and 2 expected answers"),
    (["1", "2"], ["#### 1", "2"], "gsm8k", r"expected answer 1 \('2'\) has no answer of the style 'gsm8k'"),
    call=lambda predicted, expected, style: score_answers(predicted, expected, style=style),
)
QUESTIONS = [Question(f"What is {a} + 1{'?' * (a % 5 + 1)}", str(a + 1)) for a in range(11)]


# ---- number tokens ---------------------------------------------------------------------------------------------------

VALUES = torch.full((VOCAB,), math.nan)
VALUES[3:13] = torch.arange(10.0)
VALUES[20:25] = torch.tensor([7.0, -2.5, 100.0, 1e6, 7.0])  # a prefix variant of 7, and values far away


def by_hand(model: Any, rows: list[tuple[list[int], list[int]]], temperature: float = 1.0) -> dict[str, float]:
    """One row and one label at a time, from the model's probabilities over the whole vocabulary."""
    sums, tokens = [0.0] * 4, 0
    model.eval()
    for ids, labels in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0].double() / temperature
        for t in range(1, len(ids)):
            if labels[t] == -100 or math.isnan(VALUES[labels[t]]):
                continue
            y, q = float(VALUES[labels[t]]), logits[t - 1].softmax(-1).tolist()
            numbers = [(q[j], float(VALUES[j])) for j in range(VOCAB) if not math.isnan(VALUES[j])]
            mass = sum(share for share, _ in numbers)
            best = q.index(max(q))
            sums[0] += float(VALUES[best]) == y
            sums[1] += sum(share * abs(v - y) for share, v in numbers) / mass
            sums[2] += sum(share * abs(log(v) - log(y)) for share, v in numbers) / mass
            sums[3] += mass
            tokens += 1
    return vars(NumberTokenScores(tokens, *(total / tokens for total in sums)))


def log(value: float) -> float:
    return math.copysign(math.log(1 + abs(value)), value)


@pytest.mark.parametrize(("name", "batch_size"), [("gpt2", 4), ("llama", 1)])
def test_number_tokens_by_hand(name: str, batch_size: int, small_blocks: None) -> None:
    model = tiny_model(name).train()
    ids = torch.randint(3, VOCAB, (7, 9), generator=torch.Generator().manual_seed(0))
    blocks = PackedBlocks(ids)
    scores = number_token_scores(model, blocks, VALUES, batch_size=batch_size, progress=False)
    assert model.training
    expected = by_hand(model, [(row, row) for row in ids.tolist()])
    assert vars(scores) == pytest.approx(expected, rel=1e-5)
    assert 0 < scores.number_mass < 1
    cooler = number_token_scores(model, blocks, VALUES, batch_size=batch_size, temperature=0.5)
    expected = by_hand(model, [(row, row) for row in ids.tolist()], temperature=0.5)
    assert vars(cooler) == pytest.approx(expected, rel=1e-5)
    rows = AnsweredQuestions([row[: i + 1] for i, row in enumerate(ids.tolist())], [row[7:] for row in ids.tolist()])
    items = [(row["input_ids"].tolist(), row["labels"].tolist()) for row in rows]
    scores = number_token_scores(model, rows, VALUES, batch_size=batch_size)
    assert vars(scores) == pytest.approx(by_hand(model, items), rel=1e-5)


@pytest.mark.parametrize("beyond", [-8, 5])
def test_number_labels_by_their_texts(beyond: int) -> None:
    """The head may be padded, or end before the tokenizer; what it cannot give is no label."""
    tokenizer = train_bpe_tokenizer([question.question + question.answer for question in QUESTIONS] * 3, 270)
    rows = len(tokenizer) + beyond
    model = tiny_model("gpt2", vocab_size=rows, n_positions=64)
    data = PackedBlocks(torch.randint(1, len(tokenizer) - 8, (30, 20), generator=torch.Generator().manual_seed(0)))
    values = torch.full((rows,), math.nan, dtype=torch.float64)
    actual = NumberTokens.of(tokenizer).values[:rows]
    values[: len(actual)] = actual
    scores = score_number_labels(model, tokenizer, data)
    assert scores == number_token_scores(model, data, values)
    words = AnsweredQuestions.from_questions([Question("1 + 1", "two")], tokenizer, max_length=64)
    assert score_number_labels(model, tokenizer, words) is None, "the numbers of a question are no labels"


SEVENS = torch.full((2, 5), 10)
test_invalid_number_tokens_raise = raising(
    (SEVENS, VALUES[:-1], rf"values are {VOCAB - 1}, the model's head has {VOCAB} rows"),
    (SEVENS, torch.full((VOCAB,), math.nan), f"all {VOCAB} values are NaN"),
    (SEVENS, VALUES.index_fill(0, torch.tensor([4]), math.inf), "hold inf at token 4"),
    (torch.full((2, 5), 15), VALUES, "none of the labels of the 2 rows is a number"),
    call=lambda ids, values: number_token_scores(tiny_model("llama"), PackedBlocks(ids), values),
)
