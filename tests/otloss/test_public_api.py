"""The public face: names, signatures, warm_up, and the other package of the name otloss."""

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
import otloss_llm
from otloss.solvers.options import Settings
from tests.errors import raising


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


def test_what_was_compiled_once_is_not_compiled_again(tmp_path: Path) -> None:
    call = "import torch, otloss; torch.set_num_threads(2); otloss.warm_up('cdf_distance')"
    first, second = (run(call, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert (first.returncode, second.returncode, second.stderr) == (0, 0, "")
    lines = first.stderr.splitlines()
    assert all("takes about 1 s, once; kept in" in line and str(tmp_path) in line for line in lines)
    for kernel in ("cdf_values for float32", "cdf_gradients for float32", "cdf_values for float64"):
        assert sum(kernel in line for line in lines) == 1


test_names_and_dtypes_are_checked = raising(
    (["emdd"], [torch.float32], "no kernels are known for .'emdd'.; expected some of"),
    ([], [torch.float16], "dtypes are .torch.float16.; expected torch.float32, torch.float64 or both"),
    call=lambda names, dtypes: otloss.warm_up(*names, dtypes=dtypes),
)


def test_every_name_runs_also_where_gradients_are_off() -> None:
    otloss.warm_up()
    with torch.inference_mode():
        otloss.warm_up("emd")
        otloss_llm.warm_up()


ROOT = Path(__file__).parents[2]


def test_another_package_that_comes_before_ours_raises(tmp_path: Path) -> None:
    (tmp_path / "first" / "otloss").mkdir(parents=True)
    (tmp_path / "first" / "otloss" / "__init__.py").write_text("", encoding="utf-8")
    code = f"import sys; sys.path.insert(1, {str(ROOT)!r}); import otloss_llm"
    done = run(code, tmp_path / "first")
    assert re.search(r"ImportError: import otloss finds .*first.*pip uninstall otloss", done.stderr), done.stderr
