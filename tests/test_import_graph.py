"""No file imports another one that imports it, directly or over others, where modules are executed at import."""

import ast
import graphlib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("otloss", "otloss_llm")


def module_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """The modules that a file imports anywhere, but for those under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full in modules else node.module)
    return names & modules


def check(root: Path) -> None:
    """Raise CycleError if files import each other; façades (`__init__` files) are left out."""
    files = {module_of(p, root): p for package in PACKAGES for p in (root / package).rglob("*.py")}
    own = {name for name, path in files.items() if path.name != "__init__.py"}
    graphlib.TopologicalSorter({name: imports_of(files[name], set(files)) & own for name in own}).prepare()


def test_no_file_imports_itself_over_others() -> None:
    check(ROOT)
