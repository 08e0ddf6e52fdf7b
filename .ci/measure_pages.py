"""Print the words of the pages, and whether each page keeps its limits.

python .ci/measure_pages.py [--strict]

Prose is what remains of a page without code, tables, pictures and comments. A figure is a number outside of code. A
formula counts as one word. With --strict the exit code is 1 where a limit is exceeded.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# By folder: words of prose, figures per 100 words of prose, words of the longest paragraph or item of a list.
LIMITS = {"guide": (900, 3.0, 90), "reports": (400, None, 90)}
WORDS_OF_FILES = {"README.md": 600, "CHANGELOG.md": 1050}  # with the replacement of each thing that went
WORDS_OF_DOCS = 27_000
NOT_COUNTED = ("reference/", "tutorials", "changelog.md", "contributors/contributing.md")


class Measure(NamedTuple):
    words: int
    prose: int
    figures: float
    longest: int


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs and items of lists, without code, tables, pictures, headings and comments."""
    text = re.sub(r"^(```|:::+).*?^\1\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(\||    |#|!\[|<).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\s*([-*]|\d+\.) ", "\n", text, flags=re.MULTILINE)
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


FORMULA = re.compile(r"\$\$.*?\$\$|(?<!\$)\$[^$\n]+\$", re.DOTALL)


def measure(text: str) -> Measure:
    text = FORMULA.sub("FORMULA", text)
    parts = paragraphs(text)
    prose = [word for part in parts for word in part.split()]
    plain = re.sub(r"`[^`]*`", "", " ".join(parts))
    figures = re.findall(r"(?<![\w.^])[-+]?\d[\d,.]*(?:e-?\d+)?", plain)
    longest = max((len(part.split()) for part in parts), default=0)
    return Measure(len(text.split()), len(prose), 100 * len(figures) / max(len(prose), 1), longest)


def beyond(measured: Measure, limits: tuple[float | None, ...]) -> list[str]:
    names = ("words of prose", "figures per 100 words", "words in a paragraph")
    rows = zip(names, measured[1:], limits, strict=True)
    return [f"{name} over {limit:g}" for name, value, limit in rows if limit is not None and round(value, 1) > limit]


def main() -> int:
    print(f"{'page':36}{'words':>7}{'prose':>7}{'figures':>9}{'longest':>9}")
    total, faults = 0, []
    for page in sorted(DOCS.rglob("*.md")):
        name = page.relative_to(DOCS).as_posix()
        if name.startswith(NOT_COUNTED):
            continue
        measured = measure(page.read_text(encoding="utf-8"))
        over = beyond(measured, LIMITS.get(name.partition("/")[0], (None, None, None)))
        total += measured.words
        faults += [f"{name}: {fault}" for fault in over]
        print(f"{name:36}{measured.words:7}{measured.prose:7}{measured.figures:9.1f}{measured.longest:9}")
    rows = [("docs, of these pages", total, WORDS_OF_DOCS)]
    rows += [(name, len((ROOT / name).read_text("utf-8").split()), limit) for name, limit in WORDS_OF_FILES.items()]
    for name, words, limit in rows:
        faults += [f"{name}: words over {limit}"] if words > limit else []
        print(f"{name:36}{words:7}")
    print(*faults, sep="\n", file=sys.stderr)
    return int("--strict" in sys.argv[1:] and bool(faults))


if __name__ == "__main__":
    sys.exit(main())
