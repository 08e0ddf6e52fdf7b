"""The adapter for the library datasets: datasets of the hub and of files, and what their columns mean.

messages                a conversation, a list of messages with role and content
prompt, completion      text, or lists of messages; the completion is trained on
question, answer        written with a line break between them; the answer is trained on
text                    a document
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otloss._checks import missing_package
from otloss._distribution import install_hint
from otloss_llm.data.chats import Chat, ChatRows, checked_chat
from otloss_llm.data.questions import SEPARATOR, AnsweredQuestions, Question
from otloss_llm.data.text import column_text

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
PARTS = ("train", "validation", "test")
_EXPECTED = "expected text, prompt and completion, question and answer, or messages"


@dataclass(frozen=True)
class Examples:
    """Examples of one kind: "text" (strings), "questions" (`Question`), or "chat" (lists of messages)."""

    kind: str
    rows: list[Any]
    separator: str = SEPARATOR  # between a question and its answer


def load_splits(name: str, config: str | None = None) -> dict[str, Dataset]:
    """Return the splits "train", "validation" and "test" of a dataset, as far as it has them.

    `name` is a name of the hub, a folder (of `save_to_disk`, or of files), or a file (.json, .jsonl, .csv, .parquet).
    The only split of a dataset is its training split, whatever it is called.

    Raises:
        ValueError: the library datasets cannot load it, there is no training split, or the file is of another kind.
        ImportError: datasets is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        package = missing_package(error, "datasets")
        raise ImportError(f"a dataset by name needs {package}: {install_hint('llm')}") from error
    path = Path(name).expanduser()
    local = path.exists()
    if local and config is not None and path.is_file():
        raise ValueError(f"dataset_config_name is {config!r}, but {name!r} is a file, which has no configurations.")
    if path.is_file() and path.suffix not in FORMATS:
        raise ValueError(f"{name!r} ends in {path.suffix!r}, expected {', '.join(FORMATS)}; give text as --train_text.")
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            loaded: Any = datasets.load_from_disk(str(path))
        elif path.is_file():
            loaded = datasets.load_dataset(FORMATS[path.suffix], data_files=str(path))
        else:
            loaded = datasets.load_dataset(str(path) if local else name, config)
    except StopIteration as error:  # what datasets raises for an empty file
        raise ValueError(f"the dataset {name!r} cannot be loaded: it has no rows; give at least one.") from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error  # of DatasetGenerationError, which itself says nothing
        text = " ".join(str(cause).split())
        raise ValueError(f"the dataset {name!r} cannot be loaded: {type(cause).__name__}: {text}") from error
    splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    if len(splits) == 1:
        splits = {"train": next(iter(splits.values()))}
    if "train" not in splits:
        raise ValueError(f"the dataset {name!r} has the splits {sorted(splits)}, expected train; rename one.")
    return {part: splits[part] for part in PARTS if part in splits}


def read_examples(dataset: Dataset, name: str, *, text_column: str = "text") -> Examples:
    """Return the examples of a dataset; `name` is for error messages. Blank documents are left out.

    Raises ValueError for columns that are not listed above, for a value of another type, or if there is no example.
    """
    columns = dataset.column_names
    rows = [(f"{name!r}, row {i}", row) for i, row in enumerate(dataset)]
    if text_column == "text" and "messages" in columns:
        examples = Examples("chat", [checked_chat(row["messages"], place) for place, row in rows])
    elif text_column == "text" and {"prompt", "completion"} <= set(columns):
        examples = _completions(rows)
    elif text_column == "text" and {"question", "answer"} <= set(columns):
        examples = Examples("questions", [_question(row, "question", "answer", place) for place, row in rows])
    elif text_column in columns:
        texts = [column_text(row, text_column, place) for place, row in rows]
        examples = Examples("text", [text for text in texts if text.strip()])
    else:
        raise ValueError(f"{name!r} has the columns {columns}, {_EXPECTED}; rename them (dataset.rename_column).")
    if not examples.rows:
        raise ValueError(f"{name!r} has no example that is not blank; give a dataset with at least one.")
    return examples


def _question(row: dict[str, Any], asked: str, answer: str, place: str) -> Question:
    question = Question(column_text(row, asked, place), column_text(row, answer, place))
    if not (question.question.strip() and question.answer.strip()):
        raise ValueError(f"{place}: {asked} or {answer} is blank, expected text; leave the row out.")
    return question


def _completions(rows: Sequence[tuple[str, dict[str, Any]]]) -> Examples:
    """Return prompts with completions: text that follows without a line break, or messages."""
    if rows and isinstance(rows[0][1]["prompt"], str):
        return Examples("questions", [_question(row, "prompt", "completion", place) for place, row in rows], "")
    chats: list[Chat] = []
    for place, row in rows:
        chat = checked_chat([*row["prompt"], *row["completion"]], place)
        if any(message["role"] == "assistant" for message in row["prompt"]):
            raise ValueError(
                f"{place} has an answer in its prompt, which would be trained on too; give messages instead of prompt "
                "and completion to train on all answers, or use TRL's SFTTrainer with ObjectiveMixin."
            )
        chats.append(chat)
    return Examples("chat", chats)


def is_untokenised(dataset: Any) -> bool:
    """Return whether this is a dataset of the library (not a stream) without token ids."""
    library = sys.modules.get("datasets")  # If it is not imported, no object is one of its datasets.
    return library is not None and isinstance(dataset, library.Dataset) and "input_ids" not in dataset.column_names


def tokenised(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> AnsweredQuestions:
    """Return rows to train on: a document with EOS, cut at `max_length` tokens, or a prompt, question or conversation.

    Labels of the latter are on completions and answers alone, and what is longer than `max_length` is dropped with a
    warning.
    """
    examples = read_examples(dataset, "the dataset")
    if examples.kind == "chat":
        return ChatRows.from_chats(examples.rows, tokenizer, max_length=max_length)
    if examples.kind == "questions":
        return AnsweredQuestions.from_questions(
            examples.rows, tokenizer, max_length=max_length, separator=examples.separator
        )
    return ChatRows.from_texts(examples.rows, tokenizer, max_length=max_length)
