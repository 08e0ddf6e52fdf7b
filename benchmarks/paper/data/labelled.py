"""Texts with labels, for classification: read from the files that such sets are published in.

.jsonl          "text" and "label"; or "question", "choices" and "answer" (a position), as MMLU on the hub
.txt            a label and a text on each line (TREC, SST-2); *_text.txt: texts, with labels on the lines of the
                *_labels.txt beside it, and their names in mapping.txt if there is one (TweetEval)
.csv, folder    of .csv files: question, choices, answer (a position or a letter), with or without a header (MMLU)
.zip            a file for each label, a text on each line (Movie Review and Subjectivity); a label is what the
                name of its file does not share with the others
"""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paper.data.text import read_records

LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True)
class LabelledText:
    """A text and its label, as it is written in a prompt."""

    text: str
    label: str


def read_labelled_texts(path: str | Path, *, labels: Mapping[str, str] | None = None) -> list[LabelledText]:
    """Return the texts and labels in a file or folder, in one of the formats of this module.

    Bytes that are not UTF-8 are read as Latin-1. Blank lines are left out.

    Args:
        labels: the labels that may occur, each with its name in prompts; by default any, as they are.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line of another form, or with a label that may not occur: the message has its number; or no line.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {str(path)!r} with labelled texts; check the path.")
    texts = []
    for place, text, label in _entries(path):
        if labels is not None and label not in labels:
            raise ValueError(f"{place}: the label {label!r} is not among the candidates {list(labels)}; add it there.")
        texts.append(LabelledText(text, label if labels is None else labels[label]))
    if not texts:
        raise ValueError(f"{str(path)!r} holds no text; expected a label and a text on each line.")
    return texts


def _entries(path: Path) -> Iterator[tuple[str, str, str]]:
    """Return place (for messages), text and label of each line."""
    if path.is_dir() or path.suffix == ".csv":
        files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
        return (entry for file in files for entry in _of_csv(file))
    if path.suffix == ".jsonl":
        return _of_jsonl(path)
    if path.suffix == ".zip":
        return _of_zip(path)
    if path.suffix != ".txt":
        raise ValueError(f"{str(path)!r} ends in {path.suffix!r}, expected .jsonl, .txt, .csv, .zip or a folder.")
    return _of_pair(path) if path.name.endswith("_text.txt") else _of_lines(path)


def _of_jsonl(path: Path) -> Iterator[tuple[str, str, str]]:
    for place, record in read_records(path):
        if "choices" in record:
            yield place, *_choice(place, record.get("question"), record["choices"], record.get("answer"))
        elif "text" in record and "label" in record:
            yield place, str(record["text"]), str(record["label"])
        else:
            raise ValueError(f"{place} has {sorted(record)}, expected text and label, or question, choices and answer.")


def _of_lines(path: Path) -> Iterator[tuple[str, str, str]]:
    for place, line in _lines(path.read_bytes(), path):
        label, _, text = line.partition(" ")
        if not text.strip():
            raise ValueError(f"{place} is {line[:40]!r}, expected a label, a space and a text.")
        yield place, text.strip(), label


def _of_pair(path: Path) -> Iterator[tuple[str, str, str]]:
    other = path.with_name(path.name.replace("_text.txt", "_labels.txt"))
    names, mapping = {}, path.with_name("mapping.txt")
    if mapping.is_file():
        names = dict(line.split("\t", 1) for _, line in _lines(mapping.read_bytes(), mapping))
    texts, labels = (_decoded(file.read_bytes()).split("\n") for file in (path, other))
    if len(texts) != len(labels):
        raise ValueError(f"{path} has {len(texts)} lines and {other.name} {len(labels)}, expected one label a text.")
    for number, (text, label) in enumerate(zip(texts, labels, strict=True), 1):
        if text.strip():
            yield f"{other}, line {number}", text.strip(), names.get(label.strip(), label.strip())


def _of_csv(path: Path) -> Iterator[tuple[str, str, str]]:
    rows = csv.reader(_decoded(path.read_bytes()).splitlines(keepends=True))
    for number, row in enumerate(rows, 1):
        if number == 1 and row and row[-1] == "answer":
            continue
        if row:
            place = f"{str(path)!r}, record {number}"
            yield place, *_choice(place, row[0], row[1:-1], row[-1])


def _of_zip(path: Path) -> Iterator[tuple[str, str, str]]:
    with zipfile.ZipFile(path) as archive:
        files = [name for name in archive.namelist() if not name.endswith(("/", "README.txt", "README"))]
        words = [name.rpartition("/")[2].split(".") for name in files]
        for name, parts in zip(files, words, strict=True):
            label = ".".join(part for part in parts if not all(part in other for other in words)) or name
            for place, line in _lines(archive.read(name), path / name):
                yield place, line.strip(), label


def _choice(place: str, question: object, choices: object, answer: object) -> tuple[str, str]:
    """Return question with lettered choices, and the letter of the right one."""
    text = str(answer)
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not 2 <= len(choices) <= len(LETTERS):
        raise ValueError(f"{place} has the choices {choices!r}, expected 2 to {len(LETTERS)} of them.")
    right = LETTERS.find(text) if text in list(LETTERS) else int(text) if text.isdigit() else -1
    if not 0 <= right < len(choices) or not isinstance(question, str):
        raise ValueError(
            f"{place}: the question is {question!r} and the answer {answer!r}, expected a string and the position (0 "
            f"to {len(choices) - 1}) or the letter of the right choice."
        )
    options = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return "\n".join([question, *options]), LETTERS[right]


def _lines(content: bytes, path: Path) -> Iterator[tuple[str, str]]:
    """Return place and content of each line that is not blank."""
    for number, line in enumerate(_decoded(content).split("\n"), 1):
        if line.strip():
            yield f"{str(path)!r}, line {number}", line


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return content.decode("latin-1").replace("\r\n", "\n")
