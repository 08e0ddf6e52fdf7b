"""The site: links between the pages, and (slow) the pictures and the build, with every public name in the reference."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if page.parent.name != "tutorials_built")


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
            names = re.findall(r"^(?:[^<\n]+<)?([\w/]+)>?$", contents, re.MULTILINE)
            listed += [(page.parent / name).relative_to(DOCS).as_posix() for name in names]
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES}
    assert sorted(listed) == sorted(pages - {"index"} | {"tutorials_built/index"})


def public_names() -> dict[str, set[str]]:
    """The `__all__` of each module of both packages that has one, read without an import of it."""
    names = {}
    for path in sorted([*ROOT.glob("otloss/**/*.py"), *ROOT.glob("otloss_llm/**/*.py")]):
        if found := re.search(r"^__all__ = \[(.*?)\]", path.read_text("utf-8"), re.DOTALL | re.MULTILINE):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            names[module] = set(re.findall(r'"(\w+)"', found[1]))
    return names


def test_the_reference_lists_every_public_module() -> None:
    """The build makes a page for each name in the `__all__` of these modules."""
    listed = re.findall(r"^   (otloss[\w.]*)$", (DOCS / "reference/index.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(public_names())


def test_what_pages_tutorials_and_examples_import_is_in_the_reference() -> None:
    names, places = public_names(), [ROOT / "README.md", *DOCS.glob("**/*.md"), *DOCS.glob("tutorials/*.py")]
    private = []
    for path in [*places, *ROOT.glob("examples/*.py")]:
        text = path.read_text("utf-8")
        for module, single, several in re.findall(r"from (otloss[\w.]*) import (?:([\w, ]+)|\(([^)]+)\))", text):
            imported = {name.split()[0] for name in re.split(r",\s*", (single or several).strip()) if name.strip()}
            missing = imported - names.get(module, set())
            private += [f"{path.name}: {module}.{name}" for name in missing if f"{module}.{name}" not in names]
    assert private == []


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


@pytest.mark.slow
def test_the_pictures_of_the_pages_are_drawn(tmp_path: Path) -> None:
    runpy.run_path(str(DOCS / "draw_pictures.py"))["main"](tmp_path / "pictures")
    drawn = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert drawn == {path.name for path in (DOCS / "pictures").iterdir()}
    assert min(path.stat().st_size for path in (tmp_path / "pictures").iterdir()) > 10_000
