"""The layout: public names, layers of modules, names of files, and what belongs to one machine."""

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
# no test lets another process compile; shapes broadcast as in torch, for all pairs of small ones.
PRIVATE = {
    "conftest.py", "test_warm_up.py", "test_cli.py", "test_checks.py",
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


# What belongs to one machine: folders of a user, and hosts of package registries. The parts are joined so that this
# file does not match.
FOREIGN = re.compile(r"(?<![\w.])/(?:home|root|Users|work|mnt|srv)/\w|" + "pypi" + r"\.org|python" + "hosted")
PLACES = (
    "otloss/**/*.py", "otloss_llm/**/*.py", "examples/*.*", "benchmarks/**/*.csv", "benchmarks/**/*.py",
    "tests/**/*.py",
    ".ci/*", "docs/*.py", "docs/**/*.md", "*.md", "*.t*", "Makefile",
)  # fmt: skip


def test_no_file_names_a_path_of_a_machine_or_a_host_of_a_registry() -> None:
    paths = [path for place in PLACES for path in ROOT.glob(place) if path.is_file()]
    lines = ((path, line) for path in paths for line in path.read_text(encoding="utf-8").splitlines())
    assert [f"{path.relative_to(ROOT)}: {line.strip()}" for path, line in lines if FOREIGN.search(line)] == []


MAKERS = {
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def test_no_tensor_is_made_on_the_default_device() -> None:
    """A tensor lies where the inputs do, or on the CPU: a program may have set another default device."""
    unnamed = []
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        calls = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
        for node in (node for node in nodes if isinstance(node, ast.Attribute)):
            name, call = ast.unparse(node).removeprefix("torch."), calls.get(id(node))
            # A function without a call is passed to another one, such as map; a generator is a type too.
            if (name in MAKERS or (name == "Generator" and call)) and not (call and names_a_device(call)):
                unnamed.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(call or node)}")
    assert not unnamed


def names_a_device(call: ast.Call) -> bool:
    if ast.unparse(call.func) == "torch.Generator":
        return bool(call.args)
    return bool({word.arg for word in call.keywords} & {"device", "out"})


def test_the_modules_and_tests_of_mutation_testing_are_there() -> None:
    modules = runpy.run_path(str(ROOT / ".ci/mutants.py"))["MODULES"]
    assert [path for entry in modules.items() for path in (entry[0], *entry[1]) if not (ROOT / path).exists()] == []
