"""The gallery: what ran, what failed, what is done, what had other data, and the pages of docs."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import gallery
import gallery_page

SCRIPT = '''"""Title of {0}.

Text with a | in it. Result (two seeds): 3 | 4 times faster.

    python examples/{0}.py

    y = f(x)
"""
import argparse
from PIL import Image
parser = argparse.ArgumentParser()
parser.add_argument("--output")
parser.add_argument("--quick", action="store_true")
options = parser.parse_args()
print({1!r})
print("quick is", options.quick, "and 3/4 m/s, https://a.org/b/c.")
Image.new("RGB", (8, 8), "red").save(options.output + "/{0}.png")
'''
OTHER = "Other data than in the docstring: made up."


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with examples, and an empty docs."""
    for folder in ("docs/reports", "examples"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def write(root: Path, name: str, printed: str = "real data") -> Path:
    path = root / f"examples/{name}.py"
    path.write_text(SCRIPT.format(name, printed), encoding="utf-8")
    return path


def test_examples_run_once(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root, "graphs")
    wrong = root / "examples/wrong.py"
    wrong.write_text('# "--output" "--quick"\nraise ValueError(\'a bad line\')', encoding="utf-8")
    assert gallery.main([], root / "examples") == 1
    assert capsys.readouterr().out.endswith("Failed: wrong\n")
    assert (root / "gallery-output/graphs/graphs.png").exists()
    assert list((root / "docs/reports").iterdir()) == [], "make gallery leaves the pages as they are"
    wrong.unlink()
    assert gallery.main([], root / "examples") == 0
    assert "graphs  " not in capsys.readouterr().out, "it is done"


def test_pages_keep_the_figure_of_what_ran_on_other_data(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root, "ensembles")
    write(root, "graphs")
    assert gallery.main(["--docs"], root / "examples") == 0
    assert "other data" not in capsys.readouterr().out.lower()
    page = (root / "docs/reports/gallery/graphs.md").read_text(encoding="utf-8")
    assert "# Title of graphs\n" in page
    assert "**3 | 4 times faster.**" in page
    assert "The peer is POT." in page
    cards = (root / "docs/reports/gallery.md").read_text(encoding="utf-8")
    assert cards.count(":img-top:") == 3, "two examples and the demo"
    figure = root / "docs/reports/gallery/ensembles.png"
    before = figure.read_bytes()
    script = write(root, "ensembles", OTHER)
    script.write_text(script.read_text(encoding="utf-8").replace('"red"', '"blue"'), encoding="utf-8")
    assert gallery.main(["--docs"], root / "examples") == 0
    assert "ensembles; docs keeps their figures\n" in capsys.readouterr().out
    assert figure.read_bytes() == before


def test_the_pages_of_docs_are_those_of_the_scripts() -> None:
    reports = gallery.HERE.parent / "docs/reports"
    pages = gallery_page.pages(gallery.scripts_in(gallery.HERE).values(), reports)
    assert {page: page.read_text(encoding="utf-8") for page in pages} == pages, "python examples/gallery.py --docs"
    assert set(pages) == {reports / "gallery.md", *(reports / "gallery").glob("*.md")}


def test_every_example_of_the_gallery_says_when_to_use_it() -> None:
    assert set(gallery.scripts_in(gallery.HERE)) == set(gallery_page.USES)
