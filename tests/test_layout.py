"""The layout: public names, layers of modules, names of files."""

from __future__ import annotations

import ast
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("otloss", "otloss_llm")
FILES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_resolves(package: str) -> None:
    if package == "otloss_llm":
        pytest.importorskip("transformers")
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None, name
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018


def test_losses_need_no_transformers() -> None:
    """`import otloss_llm` is torch alone; the trainer asks for its extra."""
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import otloss_llm as o; o.emo_loss, o.linear_token_loss, o.EMO\n"
        "try: o.ObjectiveTrainer\n"
        "except ImportError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert 'pip install "otloss[llm]"' in done.stdout


def test_importing_the_losses_imports_no_compiler() -> None:
    """`torch._dynamo` takes a second, and numba half a one."""
    code = "import sys, otloss_llm; print([m for m in ('torch._dynamo', 'numba', 'triton') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_files_are_named_by_what_they_do() -> None:
    for path in FILES:
        assert path.stem.strip("_") not in {"utils", "util", "common", "helpers", "helper", "misc"}, path
        assert ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))), f"{path} has no docstring"


# ---- floors ------------------------------------------------------------------------------------------------------

PLANTED = {
    "a package above": ("otloss/costs/cost.py", "import otloss_llm"),
    "POT": ("otloss/solvers/bounds.py", "import ot"),
    "Triton outside of its adapter": ("otloss_llm/kernels/logits.py", "import triton"),
    "a floor above": ("otloss_llm/objectives.py", "import otloss_llm.training.trainer"),
    "language models in the generic layer": ("otloss/costs/cost.py", "import transformers"),
    "a module without a floor": ("otloss_llm/stray.py", "import torch"),
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the packages, to plant in."""
    pytest.importorskip("importlinter")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tree, timeout=60)


def test_floors_hold(tree: Path) -> None:
    done = lint(tree)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_import_is_found(tree: Path, case: str) -> None:
    name, line = PLANTED[case]
    path = tree / name
    path.write_text((path.read_text(encoding="utf-8") if path.exists() else "") + f"\n{line}\n", encoding="utf-8")
    done = lint(tree)
    assert done.returncode == 1, done.stdout
    assert name.removesuffix(".py").replace("/", ".") in done.stdout, done.stdout
