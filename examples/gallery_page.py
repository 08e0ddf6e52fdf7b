"""The pages of the gallery: a card with its figure for each example, and a page with figure, result and code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

# When the loss of an example is the right one, and the peer, which had the same work.
USES = {
    "adaptation": ("labels are of one source, and the samples to classify look different", "training on the source"),
    "attention": ("each slot should take an input of its own", "softmax attention"),
    "boosting": (
        "grades are predicted, and an error of several grades is worse than one of one",
        "the most probable grade",
    ),
    "cost_sensitive": ("errors have prices", "the most likely class"),
    "documents": ("short texts are searched by meaning, among few nearest neighbours", "gensim, POT and tf-idf"),
    "ensembles": ("the members of an ensemble forecast are too close to each other", "the ensemble as it is"),
    "flow_matching": ("a sample may cost one or two steps of the network", "independent pairs"),
    "generators": ("a generator has to be trained in seconds, and sharp details are not needed", "a critic"),
    "graphs": ("many nodes of a graph are compared by their neighbourhoods", "POT"),
    "histogram_regression": (
        "a number is predicted with its uncertainty, and judged by its absolute error",
        "HL-Gauss",
    ),
    "number_tokens": ("a language model answers with numbers, and has few rows to learn from", "likelihood"),
    "registration": ("two scans of a shape overlap in part, or have outliers", "ICP, balanced transport and GeomLoss"),
    "sequences": ("sentences are compared that say the same in other words", "the overlap of n-grams"),
    "set_prediction": ("a network predicts objects without an order, and training is short", "hard matching"),
}
TOP = """# Gallery

Each example is one script beside what one would use otherwise, most of them on [real data](data.md). A card opens the
page of the example, with its figure, its result and its code. Where transport gains nothing, the page says so.

    make gallery                             # all of them; figures and what they print are in gallery-output/
    python examples/gallery.py documents     # one of them

"""
CARD = """:::{{grid-item-card}} {head}
:img-top: {figure}
:link: {page}
:link-type: doc
{sentence}

*Beside {peer}.*
:::
"""
DEMO = CARD.format(
    head="EMO against likelihood",
    figure="demo_gains.png",
    page="demo",
    sentence="A language model learns the text of a source that is known exactly.",
    peer="likelihood, and random rows",
)
PAGE = """# {title}

![Figure: {head}]({name}.png)

**{result}**

{sentence} The peer is {peer}. The code begins with the formula, the data and the settings.

```{{literalinclude}} ../../../examples/{name}.py
:language: python
```
"""


@dataclass(frozen=True)
class Example:
    """A script whose docstring has a title in its first line, and a paragraph that begins with "Result"."""

    script: Path

    @property
    def name(self) -> str:
        return self.script.stem

    @property
    def paragraphs(self) -> list[str]:
        text = ast.get_docstring(ast.parse(self.script.read_text(encoding="utf-8"))) or self.name
        return [" ".join(part.split()) for part in text.split("\n\n")]

    @property
    def title(self) -> str:
        return self.paragraphs[0].rstrip(".")

    @property
    def result(self) -> str:
        """The sentence after "Result (its circumstances):", with a capital letter."""
        match = re.search(r"Results?\b[^:]*: (.*)", "\n".join(self.paragraphs))
        return match[1][:1].upper() + match[1][1:] if match else ""

    @property
    def words(self) -> dict[str, str]:
        """What the templates name."""
        use, peer = USES.get(self.name, ("it fits", "nothing"))
        return {
            "name": self.name, "title": self.title, "result": self.result, "peer": peer,
            "head": re.split("[:,]", self.title)[0],
            "sentence": f"Use it when {use}.", "figure": f"gallery/{self.name}.png", "page": f"gallery/{self.name}",
        }  # fmt: skip


def keep_figure(figure: Path, reports: Path) -> None:
    """Copy a figure to the reports, with a palette, which takes a third of the space."""
    folder = reports / "gallery"
    folder.mkdir(parents=True, exist_ok=True)
    with Image.open(figure) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(folder / figure.name, optimize=True)


def pages(scripts: Iterable[Path], reports: Path) -> dict[Path, str]:
    """Return the text of the gallery, and of the page of each script that has a figure in reports/gallery."""
    words = [Example(script).words for script in sorted(scripts)]
    words = [one for one in words if (reports / one["figure"]).exists()]
    cards = "\n".join([*(CARD.format(**one) for one in words), DEMO])
    contents = "\n".join(f"{one['head']} <{one['page']}>" for one in words)
    text = f"{TOP}::::{{grid}} 1 2 2 3\n:gutter: 3\n\n{cards}\n::::\n\n```{{toctree}}\n:hidden:\n\n{contents}\n```\n"
    return {reports / "gallery.md": text} | {reports / f"{one['page']}.md": PAGE.format(**one) for one in words}
