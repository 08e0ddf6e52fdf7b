"""README.md and the pages of docs/: Python blocks run as printed, and links point to files that exist."""

import re
import warnings
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = BLOCK.findall(README)
LINKS = re.findall(r"\]\(([^)\s]+)\)", README)
# Pages whose blocks are parts of programs that this machine cannot run, and why.
FRAGMENTS = {"guide/devices.md": "Megatron and torchtitan"}
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if BLOCK.search(path.read_text(encoding="utf-8"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT / "docs").as_posix()


@pytest.fixture
def empty_folder(tmp_path: Path) -> Iterator[Path]:
    with chdir(tmp_path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        yield tmp_path


def need_packages_of(code: str) -> None:
    """Skip where a package of an extra is missing; the libraries are the real ones."""
    for package in ("transformers", "trl", "datasets", "matplotlib", "xgboost", "lightgbm"):
        if re.search(rf"(?:from|import) {package}\b", code) or (package == "transformers" and "otloss_llm" in code):
            pytest.importorskip(package)
    if "plotting" in code:
        pytest.importorskip("matplotlib")


def run(code: str, name: str, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, name, "exec"), names)
    printed = capsys.readouterr().out
    assert "nan" not in printed, name
    assert printed or not re.search(r"^print\(", code, re.MULTILINE), name


@pytest.mark.parametrize("number", range(1, len(BLOCKS) + 1))
def test_a_block_of_the_readme_runs_by_itself(
    number: int, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_packages_of(BLOCKS[number - 1])
    run(BLOCKS[number - 1], f"README.md, block {number}", {"__name__": "readme"}, capsys)


@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in FRAGMENTS], ids=name_of)
def test_the_blocks_of_a_page_run_in_order(page: Path, empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert FRAGMENTS.keys() <= set(map(name_of, PAGES))
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    need_packages_of("\n".join(blocks))
    names: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks, start=1):
        run(block, f"{name_of(page)}, block {number}", names, capsys)


def test_links_point_to_files() -> None:
    """Relative ones; hatch_build.py turns these into addresses for a package index."""
    missing = [link for link in LINKS if not (link.startswith("https://") or (ROOT / link).is_file())]
    assert missing == []
