"""No file imports another one that imports it, directly or over others, where modules are executed at import."""

import ast
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


def cycles(root: Path) -> list[list[str]]:
    """Return the sets of files that import each other; façades (`__init__` files) are left out."""
    files = {module_of(p, root): p for package in PACKAGES for p in (root / package).rglob("*.py")}
    own = {name for name, path in files.items() if path.name != "__init__.py"}
    graph = {name: imports_of(files[name], set(files)) & own for name in own}
    actual, index, low, stack, counter = [], {}, {}, [], 0

    def visit(node: str) -> None:
        nonlocal counter
        index[node] = low[node] = counter
        counter += 1
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = [stack.pop()]
            while component[-1] != node:
                component.append(stack.pop())
            if len(component) > 1 or node in graph[node]:
                actual.append(sorted(component))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return actual


def test_no_file_imports_itself_over_others() -> None:
    assert cycles(ROOT) == []


def test_a_planted_cycle_is_found(tmp_path: Path) -> None:
    for name, text in (
        ("a", "from otloss.b import x"),
        ("b", "def f():\n    import otloss.c"),
        ("c", "from otloss import a"),
        ("d", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import otloss.d"),
    ):
        (tmp_path / "otloss").mkdir(exist_ok=True)
        (tmp_path / "otloss" / f"{name}.py").write_text(text)
    assert cycles(tmp_path) == [["otloss.a", "otloss.b", "otloss.c"]]
