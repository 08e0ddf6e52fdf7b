"""The training, validation and test rows that a command line names: of text, or of questions with answers."""

from __future__ import annotations

from typing import Any

from otloss_llm.data.blocks import PackedBlocks
from otloss_llm.data.questions import AnsweredQuestions, Question, read_questions
from otloss_llm.training.loading import Documents, load_questions, pack_documents, read_documents
from otloss_llm.training.token_store import TokenStore

# With the defaults, which are not told from what was not given.
_OF_TEXT = {"validation_text": None, "test_text": None, "text_column": "text"}
_OF_QUESTIONS = {"validation_questions": None, "test_questions": None, "train_on_question": False}


def read_sources(asked: Any) -> Documents | None:
    """The documents of the text that is named. Of questions None: they are only checked here.

    Cheap, and called before a model is loaded, so that a wrong path is found at once.

    Args:
        asked: `TextArguments`, or `CompareTextArguments`, without which there is no test.

    Raises:
        ValueError: text and questions both or neither, an option of the one beside the other, or an invalid file.
        FileNotFoundError: a file that is not there.
    """
    if bool(asked.train_text) == bool(asked.train_questions):
        given = "both" if asked.train_text else "neither"
        raise ValueError(f"got {given} of --train_text and --train_questions, expected one: what to train on.")
    kind, strays = ("questions", _OF_TEXT) if asked.train_questions else ("text", _OF_QUESTIONS)
    wrong = [f"--{name}" for name, default in strays.items() if getattr(asked, name, default) != default]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} given beside --train_{kind}, expected none of it; leave it out.")
    if kind == "text":
        test = getattr(asked, "test_text", None)
        return read_documents(asked.train_text, asked.validation_text, test, text_column=asked.text_column)
    for source in (asked.train_questions, asked.validation_questions, getattr(asked, "test_questions", None)):
        if source is not None:
            read_questions(source)
    return None


def load_rows(
    tokenizer: Any, asked: Any, documents: Documents | None, store: TokenStore
) -> (
    tuple[PackedBlocks, PackedBlocks | None, PackedBlocks | None]
    | tuple[AnsweredQuestions, AnsweredQuestions | None, list[Question]]
):
    """Rows to train and validate on, and the test: blocks or None of text, a list (perhaps empty) of questions.

    Args:
        asked: as in `read_sources`.
        documents: what that gave.
        store: tokenises text, or reads what it kept of the same text.

    Raises:
        ValueError: text or questions that leave nothing to train on.
    """
    shares = {
        "validation_fraction": asked.validation_fraction, "test_fraction": getattr(asked, "test_fraction", 0.0)
    }  # fmt: skip
    if documents is None:
        return load_questions(
            tokenizer, train=asked.train_questions, validation=asked.validation_questions,
            test=getattr(asked, "test_questions", None), max_length=asked.block_size,
            train_on_question=asked.train_on_question, **shares,
        )  # fmt: skip
    return pack_documents(store.pack, documents, **shares)
