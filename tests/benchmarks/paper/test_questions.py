"""Questions with answers: reading them, rows for training, batches."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.paper.data.questions import AnsweredQuestions, Question, pad_questions, prompt_text, read_questions
from benchmarks.paper.evaluation.sampling import sample_texts
from otloss_llm.data import train_bpe_tokenizer
from tests.otloss_llm.tiny_models import tiny_model

SUMS = [Question(f"What is {a} + {b}?", str(a + b), "sums") for a in range(4) for b in (7, 345)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_bpe_tokenizer([prompt_text(q) + q.answer for q in SUMS] * 3, 290)


# ---- reading ---------------------------------------------------------------------------------------------------------


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), "utf-8")
    return path


def test_read_what_was_written(tmp_path: Path) -> None:
    first = {"question": "a\u2028b?", "answer": " 1\n#### 1", "module": "m"}
    path = write(
        tmp_path / "q.jsonl", "\ufeff" + json.dumps(first, ensure_ascii=False), "", {"question": "c", "answer": "2"}
    )
    assert read_questions(path) == [Question("a\u2028b?", " 1\n#### 1", "m"), Question("c", "2")]
    pair = write(tmp_path / "pair.jsonl", '{"question": "\\ud83d\\ude00", "answer": "2"}')
    assert read_questions(pair) == [Question("\U0001f600", "2")]
    named = write(tmp_path / "named.jsonl", {"Q": "c", "A": "2", "topic": None}, {"Q": "d", "A": "3", "topic": "t"})
    columns = {"question_column": "Q", "answer_column": "A", "kind_column": "topic"}
    assert read_questions(str(named), **columns) == [Question("c", "2"), Question("d", "3", "t")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not", r"line 2 is not JSON .*one object per line"),
        ({"question": "q", "reply": "1"}, r"line 2 has no column 'answer', found \['question', 'reply'\]"),
        ({"question": "q", "answer": " \n"}, r"line 2: column 'answer' is ' \\n', expected a string"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_questions(write(tmp_path / "bad.jsonl", {"question": "q", "answer": "1"}, line))


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_rows_are_prompt_answer_and_end(tokenizer: Any) -> None:
    rows = AnsweredQuestions.from_questions(SUMS, tokenizer, max_length=64)
    assert len(rows) == len(SUMS)
    for question, row, start, length in zip(SUMS, rows, rows.prompt_lengths, rows.lengths, strict=True):
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        assert {key: tensor.dtype for key, tensor in row.items()} == dict.fromkeys(row, torch.int64)
        assert row["attention_mask"].tolist() == [1] * length
        assert tokenizer.decode(ids[:start]) == question.question + "\n"
        assert tokenizer.decode(ids[start:]) == question.answer + "<|endoftext|>"
        assert labels == [-100] * start + ids[start:]


@pytest.mark.parametrize("separator", ["", "\n"])
def test_prompts_of_rows_are_those_of_generation(tokenizer: Any, separator: str) -> None:
    model = tiny_model("gpt2", vocab_size=len(tokenizer), n_positions=128)
    rows = AnsweredQuestions.from_questions(SUMS, tokenizer, max_length=64, separator=separator)
    prompts = [prompt_text(question, separator) for question in SUMS]
    samples = sample_texts(model, tokenizer, prompts=prompts, max_new_tokens=1, temperature=0.0)
    for row, start, sample in zip(rows, rows.prompt_lengths, samples, strict=True):
        assert tuple(row["input_ids"][:start].tolist()) == sample.prompt_ids


def test_long_rows_are_dropped_with_a_warning(tokenizer: Any) -> None:
    long = Question("What is 1 + 1, if you please?", "2")
    lengths = AnsweredQuestions.from_questions([*SUMS, long], tokenizer, max_length=64).lengths
    limit = max(lengths[:-1])
    assert limit < lengths[-1]
    said = rf"1 of 9 questions are longer than max_length={limit} .*longest has {lengths[-1]}\) and were dropped"
    with pytest.warns(UserWarning, match=said):
        rows = AnsweredQuestions.from_questions([long, *SUMS], tokenizer, max_length=limit)
    assert (rows.lengths, rows.dropped) == (lengths[:-1], 1)
    assert "1 dropped" in repr(rows)
    with pytest.raises(ValueError, match=rf"max_length=5 .*the shortest has {min(lengths)}; raise max_length"):
        AnsweredQuestions.from_questions(SUMS, tokenizer, max_length=5)


def test_fingerprints_tell_data_apart(tokenizer: Any) -> None:
    def made(questions: list[Question] = SUMS, **settings: Any) -> str:
        return AnsweredQuestions.from_questions(questions, tokenizer, max_length=64, **settings).fingerprint

    one, other = Question("ab", "c"), Question("a", "bc")
    prints = [made(), made(SUMS[:-1]), made(SUMS[::-1]), made(separator=" "), made(train_on_question=True)]
    assert made() == prints[0]
    assert len({*prints, made([one], separator=""), made([other], separator="")}) == len(prints) + 2


def test_batches_are_padded_to_their_longest(tokenizer: Any) -> None:
    rows = AnsweredQuestions.from_questions(SUMS, tokenizer, max_length=64)
    items = [rows[i] for i in (0, 1, 5)]
    batch = pad_questions(items)
    longest = max(len(item["input_ids"]) for item in items)
    for key, fill in (("input_ids", 0), ("labels", -100), ("attention_mask", 0)):
        padded = [item[key].tolist() + [fill] * (longest - len(item[key])) for item in items]
        assert batch[key].tolist() == padded


def test_invalid_rows_raise(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="row 1 has an empty prompt or answer"):
        AnsweredQuestions([[1], []], [[2], [3]])
    without_end = train_bpe_tokenizer(["a b"], 257)
    without_end.eos_token = None
    with pytest.raises(ValueError, match="no EOS token to end an answer"):
        AnsweredQuestions.from_questions(SUMS, without_end, max_length=64)
