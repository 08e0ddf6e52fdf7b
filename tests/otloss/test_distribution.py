"""The name of the distribution, and the other package of the name otloss."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from otloss.extending import DISTRIBUTION, install_hint

ROOT = Path(__file__).parents[2]
THEIRS = "Metadata-Version: 2.4\nName: otloss\nVersion: 0.1.0\nAuthor: Somebody Else\n"
THEIR_INIT = "from .losses import WassersteinLoss\nfrom .distributions import empirical_distribution\n"


def installed(folder: Path, init: str | None = None) -> Path:
    """A folder with links to our packages, metadata of a package otloss, and perhaps its `__init__.py`."""
    copies = {"otloss/_distribution.py": (ROOT / "otloss/_distribution.py").read_text(encoding="utf-8")}
    copies |= {"otloss-0.1.0.dist-info/METADATA": THEIRS} | ({"otloss/__init__.py": init} if init else {})
    for source in (path for package in ("otloss", "otloss_llm") for path in (ROOT / package).iterdir()):
        if (name := str(source.relative_to(ROOT))) not in copies:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).symlink_to(source)
    (folder / "otloss-0.1.0.dist-info").mkdir()
    for name, text in copies.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code with the folder before all others."""
    given = {"env": os.environ | {"PYTHONPATH": str(folder)}, "cwd": folder, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, "-c", code], check=False, **given)  # type: ignore[call-overload]


def test_another_package_in_our_folder_warns_while_our_files_are_used(tmp_path: Path) -> None:
    done = run(installed(tmp_path), "import otloss; print(otloss.emd.__name__)")
    assert done.stdout == "emd\n"
    assert "UserWarning: another package, whose name is otloss" in done.stderr
    assert "pip uninstall otloss" in done.stderr
    assert f"pip install --force-reinstall --no-deps {DISTRIBUTION}" in done.stderr


@pytest.mark.parametrize("package", ["otloss", "otloss_llm"])
def test_another_package_that_has_overwritten_our_files_raises(tmp_path: Path, package: str) -> None:
    done = run(installed(tmp_path, THEIR_INIT), f"import {package}")
    assert re.search(r"ImportError: another package, .*pip uninstall otloss", done.stderr), done.stderr


def test_another_package_that_comes_before_ours_raises(tmp_path: Path) -> None:
    (tmp_path / "first" / "otloss").mkdir(parents=True)
    (tmp_path / "first" / "otloss" / "__init__.py").write_text("", encoding="utf-8")
    code = f"import sys; sys.path.insert(1, {str(ROOT)!r}); import otloss_llm"
    done = run(tmp_path / "first", code)
    assert re.search(r"ImportError: import otloss finds .*first.*pip uninstall otloss", done.stderr), done.stderr


def test_the_hint_is_the_name_and_an_extra_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == DISTRIBUTION
    assert install_hint("llm") == f'pip install "{DISTRIBUTION}[llm]"'
    sources = [path for package in ("otloss", "otloss_llm", "benchmarks") for path in (ROOT / package).rglob("*.py")]
    extras = {actual for path in sources for actual in re.findall(r"install_hint\(.(\w+).\)", path.read_text("utf-8"))}
    assert {"llm", "plot", "boost", "bench"} <= extras <= project["optional-dependencies"].keys()
