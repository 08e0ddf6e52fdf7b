"""Write docs/contributors/tree.md: the first line of each module's docstring, and its public names.

python docs/write_tree.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/contributors/tree.md"
MOST_NAMES = 4
HEAD = """# What is where

A folder has one job, and imports go down. Each file is named with the first line of its docstring and what it defines.
[Design](design.md) has the rules, [contributing](contributing.md) the recipes.

The path of a transport problem is pose (problem.py), reduce (reductions/), solve (exact/, entropic/ or closed_forms/),
differentiate (derivatives.py) and restore (transport.py), which solve.py puts together. A numba kernel is in a file
named *_numba.py beside its reference implementation. tests/ has the folders of the sources; examples/ has a script for
each application (emo_demo.py is `make demo`, data.py says where data comes from); benchmarks/ measures ratios to other
packages in the same run.
"""


def described(path: Path) -> tuple[str, list[str]]:
    """The first line of the module's docstring, and the public functions and classes that it defines."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    names = [node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return (ast.get_docstring(module) or "").partition("\n")[0], [name for name in names if not name.startswith("_")]


def sections() -> Iterator[str]:
    for package in ("otloss", "otloss_llm"):
        folders = {path.parent for path in (ROOT / package).rglob("*.py")}
        for folder in sorted(folders):
            files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
            initial = folder / "__init__.py"
            purpose = described(initial)[0] if initial.exists() else ""
            yield f"\n## {folder.relative_to(ROOT).as_posix()}/\n\n{purpose}\n"
            for path in files:
                line, names = described(path)
                more = ", ..." if len(names) > MOST_NAMES else ""
                listed = ", ".join(f"`{name}`" for name in names[:MOST_NAMES]) + more
                yield f"- **{path.name}**: {line}" + f" ({listed})" * bool(names)


def tree() -> str:
    return HEAD + "\n".join(sections()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(tree(), encoding="utf-8")
