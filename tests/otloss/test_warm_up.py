"""`warm_up` compiles what is asked for, and a call that compiles says so in one line."""

import os
import subprocess
import sys
from pathlib import Path

import torch

import otloss
import otloss_llm
from tests.errors import raising


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {"capture_output": True, "text": True, "check": True, "timeout": 300, "env": {**os.environ, **environment}}
    return subprocess.run([sys.executable, "-c", code], **given)  # type: ignore[call-overload]


def test_what_was_compiled_once_is_not_compiled_again(tmp_path: Path) -> None:
    """With two threads, a second process compiles for float64."""
    call = "import torch, otloss; torch.set_num_threads(2); otloss.warm_up('cdf_distance')"
    lines = run(call, NUMBA_CACHE_DIR=str(tmp_path)).stderr.splitlines()
    assert all("takes about 1 s, once; kept in" in line and str(tmp_path) in line for line in lines)
    for kernel in ("cdf_values for float32", "cdf_gradients for float32", "cdf_values for float64"):
        assert sum(kernel in line for line in lines) == 1
    assert run(call, NUMBA_CACHE_DIR=str(tmp_path)).stderr == ""


def test_a_process_that_cannot_keep_kernels_says_so() -> None:
    code = (
        "from numba.core.caching import CacheImpl\nCacheImpl._locator_classes = []\nimport torch, otloss, gc\n"
        "otloss.ordinal_loss(torch.zeros(4000, 5), torch.zeros(4000, dtype=torch.long))\nassert gc.isenabled()"
    )
    lines = run(code).stderr.splitlines()
    assert len(lines) == 1
    assert "kept in this process only, as no cache folder can be written to: set NUMBA_CACHE_DIR" in lines[0]


test_names_and_dtypes_are_checked = raising(
    (["emdd"], [torch.float32], "no kernels are known for .'emdd'.; expected some of"),
    ([], [torch.float16], "dtypes are .torch.float16.; expected torch.float32, torch.float64 or both"),
    ([["emd"]], [torch.float32], TypeError, "expected strings one by one"),
    call=lambda names, dtypes: otloss.warm_up(*names, dtypes=dtypes),
)


def test_every_name_runs_also_where_gradients_are_off() -> None:
    otloss.warm_up()
    with torch.inference_mode():
        otloss.warm_up("emd")
        otloss_llm.warm_up()
