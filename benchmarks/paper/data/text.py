"""Documents (strings): read from files and folders, and split without overlap."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

TEXT_SUFFIXES = (".txt", ".md", ".jsonl")


def read_texts(source: str | Path, *, text_column: str = "text") -> list[str]:
    """Read `source` into a list of documents.

    `source` is a file (`.txt` or `.md`: the whole file is one document; `.jsonl`: one document per line, from
    `text_column`), or a folder (every such file below it, sorted by path). Blank documents are left out. Line ends are
    read as LF. A Hugging Face dataset is written to such a file by its `to_json`.

    Raises FileNotFoundError if there is no such path, and ValueError if the source is blank, not UTF-8, not JSON, or
    lacks the column.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
        if not files:
            raise ValueError(f"folder {str(path)!r} holds no {', '.join(TEXT_SUFFIXES)} file; put text files there.")
        documents = [text for file in files for text in _read_file(file, text_column)]
    elif path.is_file():
        documents = _read_file(path, text_column)
    else:
        raise FileNotFoundError(f"there is no file or folder {str(source)!r} in {Path.cwd()}; check the path.")
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise ValueError(f"{str(source)!r} holds no text but whitespace; give a source with at least one document.")
    return documents


def _read_file(path: Path, text_column: str) -> list[str]:
    if path.suffix not in TEXT_SUFFIXES:
        raise ValueError(f"{str(path)!r} ends in {path.suffix!r}, expected one of {TEXT_SUFFIXES}; rename or convert.")
    if path.suffix == ".jsonl":
        return [column_text(record, text_column, place) for place, record in read_records(path)]
    return [path.read_text(encoding="utf-8-sig")]


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """`(place, object)` of each line of a `.jsonl` file; blank lines are left out. `place` is for error messages.

    Raises ValueError if the file is not UTF-8 or a line is not a JSON object.
    """
    # str.splitlines would also cut at U+2028, which is allowed inside a JSON string.
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{str(path)!r}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place} is not JSON ({error}); expected one object per line.") from error
        if not isinstance(record, dict):
            raise ValueError(f"{place} is {type(record).__name__} {line.strip()[:40]!r}, expected a JSON object.")
        yield place, record


def column_text(record: dict[str, Any], column: str, place: str) -> str:
    """Return the string in a column of a record; raises ValueError if there is none."""
    if column not in record:
        raise ValueError(f"{place} has no column {column!r}, found {sorted(record)}; name the right one.")
    value = record[column]
    if not isinstance(value, str):
        raise ValueError(f"{place}: column {column!r} is {value!r}, expected a string.")
    return value


def split_documents(documents: Iterable[str], fractions: Mapping[str, float], *, seed: int = 0) -> dict[str, list[str]]:
    """Split documents into named parts by the hash of their text, so that no text is in two parts.

    Documents that differ in whitespace only count as one and the first is kept. The part of a document depends on
    its text and `seed` alone, so it stays where it is when the corpus grows. `fractions` maps names to shares that
    sum to 1; the parts' numbers of documents follow them up to chance. Order is kept within a part.

    Raises ValueError if the shares do not sum to 1, or a part with a positive share stays empty.
    """
    names, shares = list(fractions), list(fractions.values())
    if not names or min(shares) < 0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
        raise ValueError(f"fractions is {dict(fractions)}, expected shares >= 0 that sum to 1; rescale them.")
    upper = np.array(list(accumulate(shares)))
    upper[upper >= upper[-1]] = math.inf  # rounding in the sum must not leave a document without a part
    first: dict[str, str] = {}
    for document in as_documents(documents):
        first.setdefault(" ".join(document.split()), document)
    parts: dict[str, list[str]] = {name: [] for name in names}
    for normalised, document in first.items():
        digest = hashlib.sha256(f"{seed}\0{normalised}".encode()).digest()
        position = int.from_bytes(digest[:6], "big") / 2**48
        parts[names[int(np.searchsorted(upper, position, side="right"))]].append(document)
    for name, share in zip(names, shares, strict=True):
        if share > 0 and not parts[name]:
            raise ValueError(
                f"part {name!r} with share {share} got none of {len(first)} distinct documents; "
                f"give more documents, a larger share, or another seed."
            )
    return parts


def as_documents(texts: Iterable[str]) -> Iterable[str]:
    """Return the texts; raises TypeError if they are one string."""
    if isinstance(texts, str):
        raise TypeError("texts is one string, expected a list of documents; pass [text].")
    return texts
