"""Documents: text from files, folders and dataset names, split without overlap; and real English offline.

A *document* is a string. `docstring_corpus` gives documents without a network: the docstrings of an installed package.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path

import numpy as np

TEXT_SUFFIXES = (".txt", ".md", ".jsonl")
DATASET_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:.+)?", re.ASCII)
TEST_FOLDERS = frozenset({"test", "tests"})


def read_texts(source: str | Path, *, split: str = "train", text_column: str = "text") -> list[str]:
    """Read `source` into a list of documents.

    `source` is a file (`.txt` or `.md`: the whole file is one document; `.jsonl`: one document per line, from
    `text_column`), a folder (every such file below it, sorted by path), or else the name of a Hugging Face dataset
    (`name` or `name:config`), of which `split` is read. Blank documents are left out. Line ends are read as LF.

    Raises FileNotFoundError where there is neither such a path nor such a reachable dataset, and ValueError where
    what is found is blank, not UTF-8, not JSON, or lacks the column.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.txt").write_text("one document")
    >>> _ = (folder / "b.jsonl").write_text('{"text": "a second"}\\n{"text": "a third"}\\n')
    >>> read_texts(folder)
    ['one document', 'a second', 'a third']
    """
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
        if not files:
            raise ValueError(f"folder {str(path)!r} holds no {', '.join(TEXT_SUFFIXES)} file; put text files there.")
        documents = [text for file in files for text in _read_file(file, text_column)]
    elif path.is_file():
        documents = _read_file(path, text_column)
    elif path.suffix in TEXT_SUFFIXES or not DATASET_NAME.fullmatch(str(source)):
        raise FileNotFoundError(f"there is no file or folder {str(source)!r}; check the path (now in {Path.cwd()}).")
    else:
        documents = _read_dataset(str(source), split=split, text_column=text_column)
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise ValueError(f"{str(source)!r} holds no text but whitespace; give a source with at least one document.")
    return documents


def _read_file(path: Path, text_column: str) -> list[str]:
    if path.suffix not in TEXT_SUFFIXES:
        raise ValueError(f"{str(path)!r} ends in {path.suffix!r}, expected one of {TEXT_SUFFIXES}; rename or convert.")
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(path)!r} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}; "
            f"convert it, for example with: iconv -f latin1 -t utf-8."
        ) from error
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if path.suffix != ".jsonl":
        return [text]
    # str.splitlines would also cut at U+2028, which may stand inside a JSON string.
    lines = enumerate(text.split("\n"), start=1)
    return [_json_text(line, f"{str(path)!r}, line {number}", text_column) for number, line in lines if line.strip()]


def _json_text(line: str, place: str, text_column: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON ({error}); expected one object per line.") from error
    if not isinstance(record, dict) or text_column not in record:
        found = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{place} has no column {text_column!r}, found {found}; name the right one in text_column.")
    if not isinstance(record[text_column], str):
        raise ValueError(f"{place}: column {text_column!r} is {record[text_column]!r}, expected a string.")
    return record[text_column]


def _read_dataset(source: str, *, split: str, text_column: str) -> list[str]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{source!r} is no local path, and to read it as a Hugging Face dataset the datasets package is missing: "
            f'pip install "otloss[data]"'
        ) from error
    name, _, config = source.partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split=split)
    except (FileNotFoundError, ConnectionError) as error:  # not on the hub, or no hub
        raise FileNotFoundError(
            f"{source!r} is neither a local file or folder (looked in {Path.cwd()}) nor a dataset that can be "
            f"reached: load_dataset({name!r}, {config or None!r}, split={split!r}) said: {str(error).rstrip('.')}. "
            f"Check the spelling, or download the text and give its path."
        ) from error
    if text_column not in rows.column_names:
        raise ValueError(
            f"dataset {source!r} has no column {text_column!r}, found {rows.column_names}; "
            f"name the right one in text_column."
        )
    texts = list(rows[text_column])
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(
                f"dataset {source!r}, row {number}: column {text_column!r} is {text!r}, expected a string."
            )
    return texts


def split_documents(documents: Iterable[str], fractions: Mapping[str, float], *, seed: int = 0) -> dict[str, list[str]]:
    """Split documents into named parts by the hash of their text, so that no text is in two parts.

    Documents that differ in whitespace only count as one and the first is kept. The part of a document depends on
    its text and `seed` alone, so it stays where it is when the corpus grows. `fractions` maps names to shares that
    sum to 1; the parts' numbers of documents follow them up to chance. Order is kept within a part.

    Raises ValueError where the shares do not sum to 1, or a part with a positive share stays empty.

    >>> parts = split_documents([f"document {i}" for i in range(100)], {"train": 0.8, "test": 0.2})
    >>> {name: len(part) for name, part in parts.items()}
    {'train': 80, 'test': 20}
    """
    names, shares = list(fractions), list(fractions.values())
    if not names or min(shares) < 0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
        raise ValueError(f"fractions is {dict(fractions)}, expected shares >= 0 that sum to 1; rescale them.")
    upper = np.array(list(accumulate(shares)))
    upper[upper >= upper[-1]] = math.inf  # rounding in the sum must not leave a document without a part
    parts: dict[str, list[str]] = {name: [] for name in names}
    for document in _without_duplicates(as_documents(documents)):
        digest = hashlib.sha256(f"{seed}\0{_normalised(document)}".encode()).digest()
        position = int.from_bytes(digest[:6], "big") / 2**48
        parts[names[int(np.searchsorted(upper, position, side="right"))]].append(document)
    for name, share in zip(names, shares, strict=True):
        if share > 0 and not parts[name]:
            raise ValueError(
                f"part {name!r} with share {share} got none of {sum(map(len, parts.values()))} distinct documents; "
                f"give more documents, a larger share, or another seed."
            )
    return parts


def as_documents(texts: Iterable[str]) -> Iterable[str]:
    if isinstance(texts, str):
        raise TypeError("texts is one string, expected a list of documents; pass [text].")
    return texts


def _normalised(text: str) -> str:
    return " ".join(text.split())


def _without_duplicates(documents: Iterable[str]) -> list[str]:
    first: dict[str, str] = {}
    for document in documents:
        first.setdefault(_normalised(document), document)
    return list(first.values())


def docstring_corpus(package: str, *, min_chars: int = 80) -> list[str]:
    """Collect the docstrings of an installed package as documents, without importing its modules.

    Module, class and function docstrings are read from the `.py` files, in the order of path and line, without
    duplicates and without `test` and `tests` folders. Prose and parameter tables stay; doctests, heading underlines
    and headings left without text go. Docstrings shorter than `min_chars` characters after that are left out, as
    are those a package writes at run time. `package` may be a part of one ("scipy.stats").

    Raises ImportError where the package is not installed, ValueError where it has no such docstring.

    >>> corpus = docstring_corpus("json")
    >>> corpus[0][:53]
    'JSON (JavaScript Object Notation) <https://json.org> '
    """
    prose = (_prose(docstring) for path in _source_files(package) for docstring in _docstrings(path))
    documents = _without_duplicates(document for document in prose if len(document) >= max(1, min_chars))
    if not documents:
        raise ValueError(f"package {package!r} has no docstring of {min_chars} or more characters in .py files.")
    return documents


def _source_files(package: str) -> list[Path]:
    top, *inner = package.split(".")
    spec = importlib.util.find_spec(top) if top else None
    if spec is None:
        raise ImportError(f"package {top!r} is not installed; install it, or name another package for the corpus.")
    files: list[Path] = []
    for root in spec.submodule_search_locations or []:
        base = Path(root, *inner)
        found = base.rglob("*.py") if base.is_dir() else [base.with_suffix(".py")]
        files += [file for file in found if file.is_file() and TEST_FOLDERS.isdisjoint(file.relative_to(root).parts)]
    if not spec.submodule_search_locations and not inner and spec.origin and spec.origin.endswith(".py"):
        files.append(Path(spec.origin))
    if inner and not files:
        raise ImportError(f"package {top!r} is installed but has no part {package!r}; check the name.")
    return sorted(files)


def _docstrings(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the parser's remarks on other people's string escapes
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates and files for other Python versions
            return
    stack: list[ast.AST] = [tree]
    while stack:  # in the order of the source; only statements are visited, for expressions hold no docstring
        node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node, clean=False) or ""
        children = ast.iter_child_nodes(node)
        stack += reversed(
            [child for child in children if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case)]
        )


UNDERLINE = r"[ \t]*(?:-{3,}|={3,}|~{3,}|\^{3,}|\*{3,}|\+{3,}|#{3,})[ \t]*\n"
DELETIONS = (
    re.compile(r"^[ \t]*>>>.*\n(?:[ \t]*\S.*\n)*", re.MULTILINE),  # a doctest and its output, up to a blank line
    re.compile(rf"^.+\n{UNDERLINE}(?=\s*(?:\Z|.+\n{UNDERLINE}))", re.MULTILINE),  # a heading without text
    re.compile(rf"^{UNDERLINE}", re.MULTILINE),
)
BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")


def _prose(docstring: str) -> str:
    text = inspect.cleandoc(docstring) + "\n"
    for pattern in DELETIONS:
        text = pattern.sub("", text)
    return BLANK_LINES.sub("\n\n", text).strip()
