"""Parts of text and of questions that options name, and the number of labels that are numbers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.paper.arguments import CompareArguments
from benchmarks.paper.data.blocks import PackedBlocks
from benchmarks.paper.data.questions import AnsweredQuestions, Question, count_labels
from benchmarks.paper.data.sources import Sources, load_rows, read_sources, split_questions
from otloss_llm.data import train_bpe_tokenizer


def test_parts_are_cut_from_the_training_text_or_read(tmp_path: Path) -> None:
    text = "one two three four five " * 200
    tokenizer = train_bpe_tokenizer([text], 270)
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_text(text, encoding="utf-8")

    def load(**changes: Any) -> Any:
        base: dict[str, Any] = {"train_text": str(tmp_path / "train.txt"), "block_size": 24}
        asked = CompareArguments(**base | {"validation_fraction": 0.1, "test_fraction": 0.1} | changes)
        return load_rows(tokenizer, asked, read_sources(asked))

    train, validation, test = load()
    whole, none, same = load(test_text=str(tmp_path / "test.txt"), validation_fraction=0.0)
    assert none is None
    assert torch.equal(whole.ids, torch.cat([train.ids, validation.ids, test.ids]))
    assert same.fingerprint == whole.fingerprint


def cut(asked: list[str], validation: float = 0.2, test: float = 0.2) -> list[list[str]]:
    """The texts of the training, validation and test questions."""
    questions = Sources("questions", [Question(text, "x") for text in asked])
    shares = {"validation": validation, "test": test}
    return [[q.question for q in part] for part in split_questions(questions, shares)]


def test_shares_are_of_all_questions() -> None:
    assert cut(list("abcdefghij")) == [list("cdehij"), ["a", "f"], ["b", "g"]]
    assert [len(part) for part in cut(list("abcdefghij"), 0.7, 0.2)] == [1, 7, 2]
    assert cut(list("abc"), 0.01, 0) == [["b", "c"], ["a"], []]


def test_equal_questions_go_into_one_part() -> None:
    asked = list("abcab" * 3 + "defg")
    parts = cut(asked, 0.3, 0.3)
    assert sorted(text for part in parts for text in part) == sorted(asked)
    assert [len(set(part)) for part in parts] == [3, 2, 2]
    assert len(set().union(*parts)) == 7


def test_too_few_questions_for_the_shares() -> None:
    with pytest.raises(ValueError, match=r"the 2 different questions .* none to train on.*--test_fraction 0.2"):
        cut(["a", "b"])
    assert cut(["a", "b"], 0, 0)[0] == ["a", "b"]


def test_labels_that_are_numbers_are_counted() -> None:
    values = torch.full((9,), math.nan).index_fill(0, torch.tensor([2, 5]), 7.0)
    for train_on_question, expected in ((False, (2, 3)), (True, (3, 4))):  # nothing predicts the first of a row
        rows = AnsweredQuestions([[2, 2], [3]], [[5, 3], [2]], train_on_question=train_on_question)
        assert count_labels(rows, ~values.isnan()) == expected
    ids = torch.arange(30_000).reshape(10_000, 3) % 9
    actual = sum(token in (2, 5) for token in ids[:, 1:].flatten().tolist())
    assert count_labels(PackedBlocks(ids), ~values.isnan()) == (actual, 20_000)
