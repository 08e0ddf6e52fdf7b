"""Mutation testing: change one operator, number, condition or statement at a time, and see whether a test fails.

    python .ci/mutants.py [NAME ...] [--sample 60] [--seed 0]

NAME is a part of a path in MODULES (all by default). From each entry a fixed sample of mutants is drawn; each one is
tested in a fork of this process, which has imported the heavy libraries, by the tests that MODULES names. A mutant
that no test kills is printed: either a test is missing, or the change is equivalent.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What is changed (a file or a folder), and the tests that have to find it: few, the quick ones first.
MODULES = {
    "otloss_llm/objectives": ["otloss_llm/objectives", "tests/otloss_llm/objectives"],
    "otloss_llm/kernels/reference.py": [
        f"tests/otloss_llm/losses/test_{name}.py" for name in ("statistics", "dense", "token_loss")
    ],
    "otloss/losses/rows.py": [
        f"tests/otloss/losses/test_{name}.py"
        for name in ("ordinal_loss", "ordered_labels", "histogram_loss", "number_loss")
    ],
    "otloss/losses/geometry.py": [
        "tests/otloss/losses/test_ordinal_loss.py",
        "tests/otloss/losses/test_histogram_loss.py",
        "tests/otloss/losses/test_ordinal_kernel.py",
    ],
    "otloss/solvers/problem.py": [
        "tests/otloss/test_foreign_keywords.py",
        *(f"tests/otloss/solvers/test_{name}.py" for name in ("exact", "sinkhorn", "solve", "every_distance")),
    ],
    "otloss/solvers/derivatives.py": [
        f"tests/otloss/solvers/test_{name}.py" for name in ("gradient_matrix", "solve", "unbalanced")
    ],
    "otloss_llm/costs/embedding.py": [
        f"tests/otloss_llm/costs/test_{name}.py" for name in ("few_columns", "near_duplicates", "hubs", "vocab_costs")
    ],
    "otloss/metrics/forecasts.py": ["tests/otloss/metrics"],
    # These tests run the kernel as plain Python: a mutant compiles nothing.
    **{
        f"otloss/solvers/entropic/newton_kernels/{part}_numba.py": ["tests/otloss/solvers/test_newton_kernel.py"]
        for part in ("newton", "cells", "equations")
    },
}
KILLED, SURVIVED, BROKEN = 1, 0, 2
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "any": "all", "all": "any", "ones": "zeros",
         "zeros": "ones", "argmin": "argmax", "maximum": "minimum", "minimum": "maximum"}  # fmt: skip


# ---- mutants -----------------------------------------------------------------------------------------------------


def changes(node: ast.AST) -> Iterator[ast.AST | None]:
    """Yield what may stand in place of the node."""
    match node:
        case ast.Compare(left, [op, *ops], comparators) if type(op) in COMPARISONS:
            yield ast.Compare(left, [COMPARISONS[type(op)](), *ops], comparators)
        case ast.BinOp(left, op, right) | ast.AugAssign(left, op, right) if type(op) in OPERATORS:
            yield type(node)(left, OPERATORS[type(op)](), right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
            yield ast.BoolOp(op, values[:-1]) if len(values) > 2 else values[0]
        case ast.UnaryOp(ast.USub() | ast.Not() | ast.Invert(), operand):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(float() as value):
            yield ast.Constant(2 * value if value else 1.0)
        case ast.IfExp(test, body, orelse):
            yield body
            yield orelse
        case ast.If(test, body, orelse):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Raise() | ast.Expr(ast.Call()):
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()
        case ast.Call(function, arguments, keywords):
            for keyword in keywords:
                if keyword.arg != "strict":
                    yield ast.Call(function, arguments, [other for other in keywords if other is not keyword])
            if isinstance(function, ast.Attribute) and function.attr in NAMES:
                yield ast.Call(ast.Attribute(function.value, NAMES[function.attr], ast.Load()), arguments, keywords)


def places(node: ast.AST, path: tuple = ()) -> Iterator[tuple[tuple, ast.AST]]:
    """Yield (path, node) for every node whose change can matter: not annotations, messages or declarations."""
    yield path, node
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "type_params"} or isinstance(node, ast.Raise):
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(node).startswith(("__all__", "_T", "_S")):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST):
                yield from places(child, (*path, (name, index)))


def mutants(source: str) -> Iterator[tuple[ast.Module, str]]:
    """Yield every mutant of a module with a line that tells the change."""
    tree = ast.parse(source)
    for path, node in places(tree):
        for change in changes(node) if path else ():
            mutant = copy.deepcopy(tree)
            parent: ast.AST = mutant
            for name, index in path[:-1]:
                parent = getattr(parent, name) if index is None else getattr(parent, name)[index]
            name, index = path[-1]
            changed = ast.copy_location(copy.deepcopy(change), node)
            if index is None:
                setattr(parent, name, changed)
            else:
                getattr(parent, name)[index] = changed
            lines = [ast.unparse(item).splitlines()[0] for item in (node, change)]
            yield ast.fix_missing_locations(mutant), f"{node.lineno}: {lines[0]}  ->  {lines[1]}"


# ---- tests -------------------------------------------------------------------------------------------------------


class Mutated(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module from a changed tree."""

    def __init__(self, file: Path, tree: ast.Module) -> None:
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        super().__init__(name, str(file))
        self.tree = tree

    def find_spec(self, name: str, path: object = None, target: object = None):
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, name: str):
        return compile(self.tree, self.path, "exec", dont_inherit=True)


def run_tests(tests: Sequence[str]) -> int:
    """Run the tests in this process, which is a fork; return pytest's exit status."""
    import hypothesis
    import pytest

    hypothesis.settings.register_profile(
        "mutants",
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
        deadline=None,
    )
    hypothesis.settings.load_profile("mutants")
    # Plugins that are imported in advance cannot be rewritten, of which pytest warns.
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    ]
    return int(pytest.main([*options, *tests]))


def in_fork(limit: float, tests: Sequence[str], mutated: Mutated, log: Path, modules: Path | None = None) -> int:
    """Return KILLED if the tests fail on the mutant, or take longer than the limit in seconds, else SURVIVED."""
    child = os.fork()
    if not child:
        status = BROKEN
        try:
            os.setpgid(0, 0)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.meta_path.insert(0, mutated)
            importlib.import_module(mutated.name)
            status = run_tests(tests)
            if modules:
                modules.write_text("\n".join(sys.modules))
        except BaseException as error:
            print(repr(error))
        finally:
            sys.stdout.flush()
            os._exit(status)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return SURVIVED if status == 0 else KILLED
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return KILLED


def import_libraries(names: Sequence[str]) -> None:
    """Import what the tests imported and is not part of this repository, so that each fork has it."""
    here = {path.stem for path in [*ROOT.iterdir(), *(ROOT / "examples").iterdir()]} | {"conftest"}
    for name in names:
        if name.partition(".")[0] not in here and not name.startswith(("_pytest", "pytest_", "__")):
            try:
                importlib.import_module(name)
            except BaseException:  # what only a test can import is imported there
                continue


def examine(entry: str, tests: Sequence[str], sample: int, seed: int, folder: Path) -> tuple[int, int]:
    """Print the mutants of an entry that survive; return how many were killed, of how many."""
    top = ROOT / entry
    files = sorted(top.rglob("*.py")) if top.is_dir() else [top]
    pairs = [(file, *mutant) for file in files for mutant in mutants(file.read_text(encoding="utf-8"))]
    chosen = random.Random(seed).sample(pairs, min(sample, len(pairs)))
    modules = folder / "modules"
    log = folder / "log"
    unchanged = Mutated(files[0], ast.parse(files[0].read_text(encoding="utf-8")))
    if in_fork(900, tests, unchanged, log, modules):
        sys.exit(f"{entry}: the tests fail without a change:\n{log.read_text()[-3000:]}")
    import_libraries(modules.read_text().splitlines())
    start = time.monotonic()
    if in_fork(900, tests, unchanged, log):
        sys.exit(f"{entry}: the tests fail after imports in advance:\n{log.read_text()[-3000:]}")
    seconds = time.monotonic() - start
    print(f"{entry}: {len(pairs)} mutants, {len(chosen)} of them tested, {seconds:.1f} s without a change", flush=True)
    killed = 0
    for file, tree, text in sorted(chosen, key=lambda item: (item[0], int(item[2].partition(":")[0]))):
        status = in_fork(20 + 4 * seconds, tests, Mutated(file, tree), log)
        killed += status
        if status == SURVIVED:
            print(f"  survives: {file.relative_to(ROOT)}:{text}", flush=True)
    print(f"{entry}: {killed} of {len(chosen)} killed, {time.monotonic() - start:.0f} s\n", flush=True)
    return killed, len(chosen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)

    options = parser.parse_args()
    os.chdir(ROOT)
    # As tests/conftest.py does before a library reads them.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_ENDPOINT": "http://127.0.0.1:9", "MPLBACKEND": "agg"}
    sys.path[:0] = [str(ROOT)]
    sys.dont_write_bytecode = False
    chosen = [entry for entry in MODULES if not options.names or any(name in entry for name in options.names)]
    with tempfile.TemporaryDirectory() as folder:
        totals = [
            (entry, *examine(entry, MODULES[entry], options.sample, options.seed, Path(folder))) for entry in chosen
        ]
    for entry, killed, of in totals:
        print(f"{killed:4d} of {of:3d}  {entry}")
    print(f"{sum(row[1] for row in totals):4d} of {sum(row[2] for row in totals):3d}  all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
