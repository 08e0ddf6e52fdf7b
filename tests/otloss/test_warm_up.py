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
    call = "import torch, otloss; torch.set_num_threads(2); otloss.warm_up('cdf_distance')"
    lines = run(call, NUMBA_CACHE_DIR=str(tmp_path)).stderr.splitlines()
    assert all("takes about 1 s, once; kept in" in line and str(tmp_path) in line for line in lines)
    for kernel in ("cdf_values for float32", "cdf_gradients for float32", "cdf_values for float64"):
        assert sum(kernel in line for line in lines) == 1
    assert run(call, NUMBA_CACHE_DIR=str(tmp_path)).stderr == ""


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
