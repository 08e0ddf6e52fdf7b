"""The pages of the gallery: what ran, what failed, what is done, and what had other data or a path of the machine."""

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
from matplotlib import pyplot as plt
parser = argparse.ArgumentParser()
parser.add_argument("--output")
parser.add_argument("--quick", action="store_true")
options = parser.parse_args()
print({1!r})
print("quick is", options.quick, "and 3/4 m/s, https://a.org/b/c.")
plt.plot([1, 2])
plt.savefig(options.output + "/{0}.png")
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


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_page(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root, "graphs", f"kept in {root}/examples/x.txt and ~/.cache/otloss")
    wrong = root / "examples/wrong.py"
    wrong.write_text('# "--output" "--quick"\nraise ValueError(\'a bad line\')', encoding="utf-8")
    assert gallery.main([], root / "examples") == 1
    assert capsys.readouterr().out.endswith("Failed: wrong\n")
    assert files(root / "docs/reports") == {}, "make gallery leaves the tracked page as it is"
    page = (root / "gallery-output/gallery.md").read_text(encoding="utf-8")
    assert "| 3 \\| 4 times faster. | POT |" in page
    kept = "kept in (a path) and (a path)\nquick is False and 3/4 m/s, https://a.org/b/c."
    assert page.endswith(f"```text\n{kept}\n```\n"), "no path of the machine"
    wrong.unlink()
    assert gallery.main([], root / "examples") == 0
    assert "graphs  " not in capsys.readouterr().out, "it is done"


def test_the_tracked_page_keeps_what_ran_on_other_data(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ensembles", "graphs", "sequences"):
        write(root, name)
    assert gallery.main(["--docs"], root / "examples") == 0
    assert "other data" not in capsys.readouterr().out.lower()
    before = files(root / "docs/reports")
    write(root, "ensembles", OTHER)
    write(root, "sequences", "a new result")
    (root / "gallery-output/graphs/seconds.txt").unlink()  # it has not run in this clone
    (root / "examples/graphs.py").write_text('# "--output" "--quick"\nraise ValueError', encoding="utf-8")
    assert gallery.main(["--docs"], root / "examples") == 1
    assert "ensembles; docs keeps what it has of them\nFailed: graphs\n" in capsys.readouterr().out
    old, new = before["gallery.md"].decode(), (root / "docs/reports/gallery.md").read_text(encoding="utf-8")
    sections = [dict(part.split('"', 1) for part in text.split('<a id="')[1:]) for text in (old, new)]
    assert sections[0]["graphs"] == sections[1]["graphs"]
    assert sections[0]["ensembles"] == sections[1]["ensembles"]
    assert "a new result" in sections[1]["sequences"]


def test_every_example_of_the_gallery_says_when_to_use_it() -> None:
    assert set(gallery.scripts_in(gallery.HERE)) == set(gallery_page.USES)
