"""The rows that a comparison trains on, validates and tests on, from the files that its options name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from benchmarks.paper.data.blocks import PackedBlocks, check_fraction, split_blocks
from benchmarks.paper.data.questions import AnsweredQuestions, Question, count_labels, read_questions, spread
from benchmarks.paper.data.text import read_texts
from otloss_llm.objectives import Sum, parse_objective


@dataclass(frozen=True)
class Sources:
    """Examples of one kind ("text" or "questions"); None for a part without a source of its own."""

    kind: str
    train: list[Any]
    validation: list[Any] | None = None
    test: list[Any] | None = None


def read_sources(asked: Any) -> Sources:
    """The examples that options of `CompareArguments` name.

    Called before a model is loaded, so that a wrong path is found at once. Raises ValueError unless one of text and
    questions was named, and FileNotFoundError for a file that does not exist.
    """
    kinds = [kind for kind in ("text", "questions") if getattr(asked, f"train_{kind}")]
    if len(kinds) != 1:
        which = "both" if kinds else "neither"
        raise ValueError(f"got {which} of --train_text and --train_questions; give one, to name the training data.")
    (kind,) = kinds
    read: dict[str, Callable[[str], list[Any]]] = {
        "text": lambda source: read_texts(source, text_column=asked.text_column),
        "questions": read_questions,
    }
    named = (getattr(asked, f"{part}_{kind}") for part in ("train", "validation", "test"))
    train, validation, test = (None if source is None else read[kind](source) for source in named)
    assert train is not None
    return Sources(kind, train, validation, test)


def load_rows(
    tokenizer: Any, asked: Any, sources: Sources, *, encoder_decoder: bool = False
) -> (
    tuple[PackedBlocks, PackedBlocks | None, PackedBlocks | None]
    | tuple[AnsweredQuestions, AnsweredQuestions | None, list[Question]]
):
    """Rows to train and validate on, and the test: blocks or None for text, a list (perhaps empty) for questions.

    A part without a source of its own is a share of the training data: blocks from its end, or evenly spaced questions.

    Raises:
        ValueError: nothing is left to train on, or text for an encoder-decoder.
    """
    if encoder_decoder and sources.kind != "questions":
        raise ValueError("the model is an encoder-decoder, which reads questions; give --train_questions.")
    shares = {"validation": asked.validation_fraction, "test": asked.test_fraction}
    if sources.kind == "questions":
        train, validation, test = split_questions(sources, shares)
        rows = [
            AnsweredQuestions.from_questions(
                part, tokenizer, max_length=asked.block_size, train_on_question=asked.train_on_question,
                encoder_decoder=encoder_decoder,
            )
            for part in (train, validation)
            if part
        ]  # fmt: skip
        return rows[0], rows[1] if validation else None, test
    own = {part: texts for part in shares if (texts := getattr(sources, part)) is not None}
    first, *cut = split_blocks(
        PackedBlocks.from_texts(sources.train, tokenizer, asked.block_size),
        **{f"{part}_fraction": 0.0 if part in own else share for part, share in shares.items()},
    )
    parts = {part: blocks if len(blocks) else None for part, blocks in zip(shares, cut, strict=True)}
    parts |= {part: PackedBlocks.from_texts(texts, tokenizer, asked.block_size) for part, texts in own.items()}
    return first, parts["validation"], parts["test"]


def split_questions(
    sources: Sources, shares: dict[str, float]
) -> tuple[list[Question], list[Question], list[Question]]:
    """Training, validation and test questions; a part that `sources` does not have is taken from the training part.

    Such a part is a share of all its questions, evenly spaced because files are often sorted by kind. Questions
    of equal text stay together: no part has a question of another.
    """
    rest = sources.train
    left = texts = list(dict.fromkeys(question.question for question in rest))
    parts = []
    for part, share in shares.items():
        check_fraction(f"--{part}_fraction", share)
        if (questions := getattr(sources, part)) is not None:
            parts.append(questions)
            continue
        taken = set(spread(left, max(1, round(share * len(texts))))) if share and left else set()
        parts.append([question for question in rest if question.question in taken])
        rest = [question for question in rest if question.question not in taken]
        left = [text for text in left if text not in taken]
    if not rest:
        there = "1 different question" if len(texts) == 1 else f"{len(texts)} different questions"
        fractions = " and ".join(f"--{part}_fraction {share}" for part, share in shares.items())
        raise ValueError(f"the {there} leave none to train on, with {fractions}; give more questions, or a share of 0.")
    return rest, parts[0], parts[1]


def number_share(rows: PackedBlocks | AnsweredQuestions, values: Float[Tensor, " vocab"], objective: str) -> str:
    """One line that says how many of the trained tokens are numbers (tokens whose value is not NaN).

    Raises ValueError if none is: the objective would be another one.
    """
    numbers, labels = count_labels(rows, ~values.isnan())
    if numbers == 0:
        same = "emo" if Sum.of(parse_objective(objective)).cost_kind == "mixed" else "mle"
        raise ValueError(f"none of the {labels} tokens that are trained on is a number: {objective} would be {same}.")
    return f"{numbers} of the {labels} tokens that are trained on are numbers ({numbers / labels:.1%})"
