"""English text without a network: the docstrings of an installed package, as documents for `emo_demo.py`."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

TEST_FOLDERS = frozenset({"test", "tests"})
UNDERLINE = r"[ \t]*(?:-{3,}|={3,}|~{3,}|\^{3,}|\*{3,}|\+{3,}|#{3,})[ \t]*\n"
DELETIONS = (
    re.compile(r"^[ \t]*>>>.*\n(?:[ \t]*\S.*\n)*", re.MULTILINE),  # a doctest and its output, up to a blank line
    re.compile(rf"^.+\n{UNDERLINE}(?=\s*(?:\Z|.+\n{UNDERLINE}))", re.MULTILINE),  # a heading without text
    re.compile(rf"^{UNDERLINE}", re.MULTILINE),
)
BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")


def docstring_corpus(package: str, *, min_chars: int = 80) -> list[str]:
    """Return the docstrings of an installed package, read from its `.py` files without importing them.

    They are in the order of path and line, without duplicates (up to whitespace) and without `test` and `tests`
    folders. Doctests, heading underlines and headings without text are removed, then docstrings shorter than
    `min_chars`. `package` may be a part of one ("scipy.stats"). Raises ImportError if it is not installed.
    """
    documents: dict[str, str] = {}
    for path in source_files(package):
        for docstring in docstrings(path):
            text = prose(docstring)
            if len(text) >= min_chars:
                documents.setdefault(" ".join(text.split()), text)
    return list(documents.values())


def source_files(package: str) -> list[Path]:
    top, *inner = package.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"there is no installed package {top!r}; install it.")
    root = Path(spec.submodule_search_locations[0])
    base = root.joinpath(*inner)
    files = base.rglob("*.py") if base.is_dir() else [base.with_suffix(".py")]
    return sorted(path for path in files if TEST_FOLDERS.isdisjoint(path.relative_to(root).parts))


def docstrings(path: Path) -> Iterator[str]:
    """Return the docstrings of the module, its classes and functions, in the order of the source."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about string escapes in other people's code
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates, and files for other versions of Python
            return
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node, clean=False) or ""
        children = ast.iter_child_nodes(node)  # only statements; expressions hold no docstring
        stack += reversed(
            [child for child in children if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case)]
        )


def prose(docstring: str) -> str:
    text = inspect.cleandoc(docstring) + "\n"
    for pattern in DELETIONS:
        text = pattern.sub("", text)
    return BLANK_LINES.sub("\n\n", text).strip()
