"""README.md and the pages of docs/: Python blocks run as printed, and links point to files that exist."""

import ast
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^    python -m (otloss_llm|lm_eval) (.*)$", re.MULTILINE)
TASK = re.compile(r"`(\w+\.yaml)`:\n\n```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)  # a file that a page names
LINKS = re.findall(r"\]\(([^)\s]+)\)", README)
# Pages whose blocks are parts of programs that this machine cannot run, and why.
FRAGMENTS = {"guide/devices.md": "Megatron and torchtitan"}
ON_A_CLUSTER = "guide/beyond_one_machine.md"  # whose blocks tests/test_beyond_one_machine.py runs
OTHERS = re.compile("Megatron|transformers|dask")
PAGES = [  # tests/test_coming_from.py runs those with the calls of other packages
    path
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if path.parent.name != "coming_from" and BLOCK.search(path.read_text(encoding="utf-8"))
]
# Pages of the guide that need neither a language model nor other processes.
TOGETHER = [page for page in PAGES if page.parent.name == "guide" and not OTHERS.search(page.read_text("utf-8"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT / "docs").as_posix()


@pytest.fixture
def empty_folder(tmp_path: Path) -> Iterator[Path]:
    with chdir(tmp_path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries warn
        yield tmp_path


def need_packages_of(code: str) -> None:
    """Skip where a package of an extra is missing; the libraries are the real ones."""
    for package in ("transformers", "trl", "datasets", "matplotlib", "xgboost", "lightgbm", "dask"):
        if re.search(rf"(?:from|import) {package}\b", code) or (package == "transformers" and "otloss_llm" in code):
            pytest.importorskip(package)
    if "plotting" in code:
        pytest.importorskip("matplotlib")


def run(code: str, name: str, names: dict[str, Any]) -> None:
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, name, "exec"), names)
    assert "nan" not in printed.getvalue(), name
    assert printed.getvalue() or not re.search(r"^print\(", code, re.MULTILINE), name


def run_page(page: Path) -> None:
    """Blocks of a page in order, as parts of one program; the blocks of the readme one by one."""
    alone, names = page == ROOT / "README.md", dict[str, Any]()
    for number, block in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")), start=1):
        names = {"__name__": "page"} if alone or number == 1 else names
        run(block, f"{page.name}, block {number}", names)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page not in TOGETHER and name_of(page) not in {*FRAGMENTS, ON_A_CLUSTER}],
    ids=name_of,
)
def test_the_blocks_of_a_page_run_in_order(page: Path, empty_folder: Path) -> None:
    assert FRAGMENTS.keys() <= set(map(name_of, PAGES))
    text = page.read_text(encoding="utf-8")
    need_packages_of("\n".join(BLOCK.findall(text)))
    run_page(page)
    for name, content in TASK.findall(text):
        (empty_folder / name).write_text(content, encoding="utf-8")
    for module, given in COMMAND.findall(text):
        run_command(module, given)


def run_command(module: str, given: str) -> None:
    """A command of a page as it is printed, after the blocks of the page; of lm_eval where it is installed."""
    if module == "otloss_llm":
        from otloss_llm.cli import main

        assert main(shlex.split(given)) == 0
    elif find_spec(module) is not None:
        subprocess.run([sys.executable, "-m", module, *shlex.split(given)], check=True, timeout=300)


KERNELS = """
import sys, warnings, torch, otloss, otloss_llm
from pathlib import Path
from numba.core.dispatcher import Dispatcher
from tests.test_readme import run_page
warnings.simplefilter("ignore")
def compiled():
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("otloss")]
    kernels = {one for module in modules for one in vars(module).values() if isinstance(one, Dispatcher)}
    ours = [k for k in kernels if type(k._cache).__name__ == "KernelCache"]
    return {(k.py_func.__name__, str(s)) for k in ours for s in k.overloads}
torch.set_num_threads(1)
otloss.warm_up()
otloss_llm.warm_up()
before = compiled()
for page in sys.argv[1:]:
    run_page(Path(page))
print(len(before) > 30, sorted(compiled() - before))
"""


def test_blocks_of_the_readme_and_the_guide_run_on_the_kernels_of_warm_up(empty_folder: Path) -> None:
    """In a process of their own, that has no other kernels."""
    pages = [ROOT / "README.md", *TOGETHER]
    need_packages_of("".join(page.read_text(encoding="utf-8") for page in pages))
    given: dict[str, Any] = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True}
    command = [sys.executable, "-c", KERNELS, *map(str, pages)]
    done = subprocess.run(command, check=False, timeout=600, **given)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True []"


OF_PARTS = [ROOT / "docs" / name for name in FRAGMENTS]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
DISTRIBUTIONS = {"sklearn": "scikit-learn", "emo": "EMOLoss", "ot": "POT", "otloss_llm": "otloss"}  # by module


def installed_by(*requirements: str) -> set[str]:
    """The distributions that requirements name, with the distributions of the extras."""
    names = set()
    for requirement in requirements:
        name, extras = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", requirement).groups()  # type: ignore[union-attr]
        own = name == PROJECT["name"]
        inside = [one for extra in (extras or "").split(",") if own and extra for one in EXTRAS[extra]]
        names |= {"otloss" if own else name} | installed_by(*inside, *(PROJECT["dependencies"] if own else ()))
    return names


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_an_install_line_installs_what_the_blocks_import(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lines = re.findall(r'pip install "\.(\[[\w,]+\])"', text) or ["[all]"]
    trees = [ast.parse(block) for block in BLOCK.findall(text)] if page not in OF_PARTS else []
    nodes = [node for tree in trees for node in ast.walk(tree)]
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    packages = (
        {str(module).partition(".")[0] for module in modules} - set(sys.stdlib_module_names) - {"pandas"}
    )  # pandas is the reader's own
    expected = {DISTRIBUTIONS.get(package, package) for package in packages}
    assert expected <= installed_by(PROJECT["name"] + lines[0])


def test_messages_and_pages_name_extras_that_hold_the_package() -> None:
    pages = [README, *(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))]
    named = {name for text in pages for many in re.findall(r"otloss\[([\w,]+)\]", text) for name in many.split(",")}
    listed = re.search(r"extras: ([^\n]*)", README)
    assert listed is not None
    assert named | set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", listed[1]))) <= EXTRAS.keys()
    packages: dict[str, set[str]] = {"plot": {"matplotlib"}, "boost": {"xgboost", "lightgbm"}, "bench": {"ntloss"}}
    for path in (path for folder in ("otloss", "otloss_llm", "benchmarks") for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        hints = re.findall(r"install_hint\([\"'](\w+)[\"']\)", text)
        assert set(hints) <= EXTRAS.keys(), path
        for names in re.findall(r"missing_package\(error, (\"[^)]*)\)|_OF_THE_EXTRA = \(([^)]*)\)", text):
            packages.setdefault(hints[0] if hints else "llm", set()).update(re.findall(r"\w+", "".join(names)))
    assert {"transformers", "tokenizers"} <= packages["llm"]
    for extra, names in packages.items():
        assert names <= installed_by(*EXTRAS[extra]), extra


def test_links_point_to_files() -> None:
    """Relative ones; hatch_build.py turns these into addresses for a package index."""
    missing = [link for link in LINKS if not (link.startswith("https://") or (ROOT / link).is_file())]
    assert missing == []
