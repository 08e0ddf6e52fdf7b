"""The page of the gallery: a row and a section for each example, made of a run or taken from the page as it is."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from data import OTHER
from PIL import Image

# When the loss of an example is the right one, and the peer, which had the same work.
USES = {
    "adaptation": ("labels are of one source, and the samples to classify look different", "source only"),
    "attention": ("each slot should take an input of its own", "softmax attention"),
    "boosting": (
        "grades are predicted, and an error of several grades is worse than one of one",
        "most probable grade",
    ),
    "cost_sensitive": ("errors have prices", "most likely class"),
    "documents": ("short texts are searched by meaning, among few nearest neighbours", "gensim, POT, tf-idf"),
    "ensembles": ("the members of an ensemble forecast are too close to each other", "the ensemble as it is"),
    "flow_matching": ("a sample may cost one or two steps of the network", "independent pairs"),
    "generators": ("a generator has to be trained in seconds, and sharp details are not needed", "a critic"),
    "graphs": ("many nodes of a graph are compared by their neighbourhoods", "POT"),
    "histogram_regression": (
        "a number is predicted with its uncertainty, and judged by its absolute error",
        "HL-Gauss",
    ),
    "many_problems": ("there are more problems than one process solves in time", "POT in the same engine, a loop"),
    "number_tokens": ("a language model answers with numbers, and has few rows to learn from", "likelihood"),
    "registration": ("two scans of a shape overlap in part, or have outliers", "ICP, balanced, GeomLoss"),
    "sequences": ("sentences are compared that say the same in other words", "overlap of n-grams"),
    "set_prediction": ("a network predicts objects without an order, and training is short", "hard matching"),
}
HEAD = "| example | use it when | result | peer | processor seconds |\n|---|---|---|---|---|"
TOP = """# Gallery

Each example is one script beside what one would use otherwise, most on [real data]({root}/docs/reports/data.md). The
text at its top has the formula, the data and the settings; below are the figure that it draws and what it prints.

    make gallery                             # all, {minutes:.0f} minutes of one core; the page is in gallery-output/
    python examples/gallery.py documents     # one of them

`make gallery-page` updates this page. The example for language models is [the demo]({root}/docs/reports/demo.md)."""
# Of this machine; addresses and units have something else before the slash.
PATHS = re.compile(r"(?<![\w.:/)~-])(?:~|[A-Z]:)?(?:[/\\][\w.@+-]+){2,}")


@dataclass(frozen=True)
class Ran:
    """An example, and the folder with what its run printed, its time and its figure, if it drew one."""

    script: Path
    folder: Path

    @property
    def name(self) -> str:
        return self.script.stem

    @property
    def figure(self) -> Path:
        return self.folder / f"{self.name}.png"

    @property
    def on_other_data(self) -> bool:
        return any(line.startswith(OTHER) for line in self.read("printed.txt").splitlines())

    @property
    def paragraphs(self) -> list[str]:
        """Of the docstring, without what is indented."""
        text = ast.get_docstring(ast.parse(self.script.read_text(encoding="utf-8"))) or self.name
        return [" ".join(part.split()) for part in text.split("\n\n") if not part.startswith(" ")]

    @property
    def result(self) -> str:
        match = re.search(r"Results?\b[^:]*: (.*)", "\n".join(self.paragraphs))
        return match[1].replace("|", "\\|") if match else ""

    def read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Entry:
    """A row of the table, and a section."""

    row: str
    section: str

    @property
    def seconds(self) -> int:
        return int(self.row.rstrip(" |").rpartition("|")[2])


def entry_of(run: Ran, figures: Path, root: str) -> Entry:
    """The entry of a run, with its figure copied to the page's folder; `root` leads from there to the repository."""
    use, peer = USES.get(run.name, ("", ""))
    result = "not of this run, which had other data" if run.on_other_data else run.result
    row = f"| [{run.name}](#{run.name}) | {use} | {result} | {peer} | {run.read('seconds.txt')} |"
    lines = [
        f'<a id="{run.name}"></a>\n## {run.paragraphs[0].rstrip(".")}',
        f"[examples/{run.script.name}]({root}/examples/{run.script.name})",
    ]
    if run.figure.exists():
        figures.mkdir(parents=True, exist_ok=True)
        with Image.open(run.figure) as image:  # a palette takes a third of the space
            image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(figures / run.figure.name, optimize=True)
        lines.append(f"![{run.name}]({figures.name}/{run.figure.name})")
    printed = PATHS.sub("(a path)", run.read("printed.txt")).rstrip()
    return Entry(row, "\n\n".join([*lines, *[f"```text\n{printed}\n```"] * bool(printed)]))


def entries_of(page: Path) -> dict[str, Entry]:
    """The entries of a page that is there."""
    top, *sections = re.split(r'\n\n(?=<a id=")', page.read_text(encoding="utf-8").rstrip() if page.exists() else "")
    rows = dict(re.findall(r"^(?=\| \[(\w+)\]\(#)(.*)$", top, re.MULTILINE))
    named = {section.split('"')[1]: section for section in sections}
    return {name: Entry(row, named[name]) for name, row in rows.items() if name in named}


def write(page: Path, runs: Iterable[Ran], keep: dict[str, Entry], repository: Path) -> None:
    """Write a page of the runs, and of the entries to `keep` of which there is no run."""
    root = Path(os.path.relpath(repository, page.parent)).as_posix()
    entries = keep | {run.name: entry_of(run, page.parent / "gallery", root) for run in runs}
    ordered = [entries[name] for name in sorted(entries)]
    top = TOP.format(root=root, minutes=sum(entry.seconds for entry in ordered) / 60)
    rows, sections = "\n".join([HEAD, *(entry.row for entry in ordered)]), [entry.section for entry in ordered]
    page.write_text("\n\n".join([top, rows, *sections]) + "\n", encoding="utf-8")
