"""The layout: public names, layers of modules, names of files, and plain words."""

import ast
import importlib
import inspect
import re
import runpy
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
        assert name == "__version__" or inspect.getdoc(getattr(module, name)), name
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018


IMPORTS = """
import sys
def loaded(*names): print([name for name in (*names, "numba", "torch._dynamo") if name in sys.modules])
import otloss
loaded("matplotlib", "geomloss", "ot", "sklearn", "transformers")
import otloss_llm as o; o.emo_loss, o.linear_token_loss, o.EMO
loaded("transformers", "accelerate", "datasets", "peft", "triton", "sklearn")
import otloss.boosting, otloss.estimators
loaded("xgboost", "lightgbm")
"""


def test_imports_load_nothing_that_takes_long() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines() == ["[]"] * 3


def test_files_are_named_by_what_they_do() -> None:
    for path in FILES:
        assert path.stem.strip("_") not in {"utils", "util", "common", "helpers", "helper", "misc"}, path
        assert ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))), f"{path} has no docstring"


# Beside the kernels' own tests: the notices of the compiler, and what a command line checks before torch is imported;
# the table of names of other packages; the name of the distribution and how hints name it; kernels that run in Python;
# no test lets another process compile.
PRIVATE = {
    "conftest.py", "test_warm_up.py", "test_cli.py",
    "test_foreign_keywords.py", "test_public_api.py", "test_llm_api.py", "uncompiled.py",
}  # fmt: skip


def test_tests_mirror_the_sources_and_import_private_names_for_kernels_alone() -> None:
    for package in PACKAGES:
        sources, tests = (
            {path.parent.relative_to(top).parts[0].strip("_") for path in top.glob("*/*.py")}
            for top in (ROOT / package, ROOT / "tests" / package)
        )
        assert tests == sources
    imported = r"^ *(?:from otloss\S*|import) .*\b_[a-z]|^ *(?:from|import) otloss\S*\._[a-z]"
    private = re.compile(imported, re.IGNORECASE | re.MULTILINE)
    paths = [path for path in (ROOT / "tests").rglob("*.py") if "kernel" not in path.as_posix()]
    assert {path.name for path in paths if private.search(path.read_text(encoding="utf-8"))} <= PRIVATE


# ---- language --------------------------------------------------------------------------------------------------------

# Patterns of words with a better one in the table of CONTRIBUTING.md; case matters for "is None".
WORDS = (
    "[Ss]lopes?", "[Tt]wins?", "[Dd]oors?", "[Rr]efus(?:e|es|ed|al|ing)", "[Mm]end(?:s|ed|ing)?", "[Pp]aid",
    "(?<!there )(?:is|are) none", "(?:a|the) floor", "[Ff]loors", "(?:go|goes|gone|went) on with", "[Ff]or ever",
    "[Ss]trangers?", "[Uu]phill", "eyes", "rooms", "gone through", "stands? on", "may enter", "be had", "be it",
)  # fmt: skip
# A name such as weight_slopes or SlopeError contains a word too.
CALIBRATION = {"recalibration.py", "test_recalibration.py"}  # the slope of a calibration line is the term of the field
PATTERN = re.compile(rf"(?<![a-zA-Z])(?:{'|'.join(WORDS)})(?![a-z])")
TEXTS = [
    path
    for pattern in (
        "otloss/**/*.py",
        "otloss_llm/**/*.py",
        "examples/*.py",
        "benchmarks/**/*.py",
        "tests/**/*.py",
        "*.md",
    )
    for path in sorted(ROOT.glob(pattern))
    if path.name not in {Path(__file__).name, "CONTRIBUTING.md"}
] + sorted((ROOT / "docs").rglob("*.md"))


def test_plain_words() -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {actual[0]!r} in {line.strip()}"
        for path in TEXTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if (actual := PATTERN.search(line)) and not (path.name in CALIBRATION and "slope" in actual[0].lower())
    ]
    assert not hits, "\n".join([f"{len(hits)} lines; see the table of CONTRIBUTING.md for better words", *hits])


def test_the_modules_and_tests_of_mutation_testing_are_there() -> None:
    modules = runpy.run_path(str(ROOT / ".ci/mutants.py"))["MODULES"]
    assert [path for entry in modules.items() for path in (entry[0], *entry[1]) if not (ROOT / path).exists()] == []
