"""The public face: names, signatures, and the other package of the name otloss."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

import otloss
import otloss.boosting
import otloss.losses
from otloss.solvers.options import Settings


def test_all_lists_every_public_name() -> None:
    own = [name for name, value in vars(otloss).items() if callable(value) or name in ("costs", "nn")]
    public = {name for name in own if not name.startswith("_")}
    assert public | {"__version__"} == set(otloss.__all__)
    assert list(otloss.__all__) == sorted(otloss.__all__)


def test_signatures_show_every_option() -> None:
    """`help` and completion need names and defaults: no public function takes `**options`, and no default differs."""
    shown = {
        name: inspect.signature(value).parameters
        for module in (otloss, otloss.nn, otloss.losses, otloss.boosting)
        for name, value in vars(module).items()
        if inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, torch.nn.Module))
    }
    assert not [name for name, parameters in shown.items() for p in parameters.values() if p.kind is p.VAR_KEYWORD]
    options = list(inspect.signature(Settings).parameters.values())
    for name in ("sinkhorn", "sinkhorn_divergence", "solve", "Sinkhorn", "SinkhornDivergence"):
        actual = [p for p in shown[name].values() if p.name in {option.name for option in options}]
        assert [(p.name, p.default) for p in actual] == [(p.name, p.default) for p in options], name


def run(code: str, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code; in the folder, if one is given, which is then before all others."""
    environment |= {} if folder is None else {"PYTHONPATH": str(folder)}
    given = {"env": os.environ | environment, "cwd": folder, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run([sys.executable, "-c", code], check=False, **given)  # type: ignore[call-overload]


ROOT = Path(__file__).parents[2]


def test_another_package_that_comes_before_ours_raises(tmp_path: Path) -> None:
    (tmp_path / "first" / "otloss").mkdir(parents=True)
    (tmp_path / "first" / "otloss" / "__init__.py").write_text("", encoding="utf-8")
    code = f"import sys; sys.path.insert(1, {str(ROOT)!r}); import otloss_llm"
    done = run(code, tmp_path / "first")
    assert re.search(r"ImportError: import otloss finds .*first.*pip uninstall otloss", done.stderr), done.stderr
