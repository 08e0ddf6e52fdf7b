"""The site: links between the pages, and (slow) the build itself, with every public name in the reference."""

import importlib
import pkgutil
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import otloss

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *(page for page in DOCS.glob("*/*.md") if page.parent.name != "tutorials_built")])


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8")))
    files = [link.partition("#")[0] for link in links if not link.startswith(("https://", "#"))]
    assert [file for file in files if not (page.parent / file).exists()] == []


def test_every_page_is_in_the_contents() -> None:
    listed = []
    for page in PAGES:
        for contents in re.findall(r"```{toctree}(.*?)```", page.read_text("utf-8"), re.DOTALL):
            names = re.findall(r"^(?:[\w ]+<)?([\w/]+)>?$", contents, re.MULTILINE)
            listed += [(page.parent / name).relative_to(DOCS).as_posix() for name in names]
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES}
    assert sorted(listed) == sorted(pages - {"index"} | {"tutorials_built/index"})


def test_the_reference_lists_every_public_module() -> None:
    """The build makes a page for each name in the `__all__` of these modules."""
    listed = re.findall(r"^   (otloss[\w.]*)$", (DOCS / "reference/index.md").read_text("utf-8"), re.MULTILINE)
    folders = {f"otloss.{actual.name}" for actual in pkgutil.iter_modules(otloss.__path__) if actual.name[0] != "_"}
    # The names of the first are those of otloss and of its other folders; the second is a command.
    inside = {"otloss.solvers", "otloss.warm_up"}
    assert set(listed) == {"otloss", "otloss_llm", *folders} - inside
    assert all(importlib.import_module(name).__all__ for name in listed if name != "otloss_llm")


@pytest.mark.slow
def test_the_site_is_built_without_warnings_and_without_broken_links(tmp_path: Path) -> None:
    """`make docs` in a folder of its own."""
    for package in ("sphinx", "myst_parser", "pydata_sphinx_theme", "sphinx_design", "sphinx_copybutton"):
        pytest.importorskip(package)
    site = tmp_path / "site"
    for command in (
        ["-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going", "-d", str(tmp_path / "trees"), "docs", str(site)],
        [".ci/check_site.py", str(site)],
    ):
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_pictures_of_the_pages_are_drawn(tmp_path: Path) -> None:
    runpy.run_path(str(DOCS / "draw_pictures.py"))["main"](tmp_path / "pictures")
    drawn = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert drawn == {path.name for path in (DOCS / "pictures").iterdir()}
    assert min(path.stat().st_size for path in (tmp_path / "pictures").iterdir()) > 10_000
