"""warm_up: names and dtypes, and several processes that compile each kernel once, show errors and end together."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import otloss
import otloss_llm
from otloss import _warm_up
from tests.errors import raising

ROOT = Path(__file__).parents[2]


def start(*arguments: str, cache: Path, threads: int = 1) -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "NUMBA_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": str(threads),
    }
    return subprocess.Popen(
        [sys.executable, *arguments], env=os.environ | environment, stderr=subprocess.PIPE, text=True
    )


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


def test_the_command_compiles_in_processes_what_is_not_compiled_yet(tmp_path: Path) -> None:
    command = ["-m", "otloss.warm_up", "cdf_distance"]
    said = [start(*command, cache=tmp_path, threads=2).communicate(timeout=300)[1].splitlines() for _ in range(2)]
    first = ["compiling CPU kernels in 2 processes, once", *(f"{k} of 2 are compiled after" for k in range(3))]
    assert [line for line in said[0] if not line.startswith(tuple(first))] == []
    assert said[0][0] == first[0]
    assert said[0][-1].startswith(first[-1])
    assert said[1] == [], "a second time it reads what is there"


def test_two_processes_compile_each_kernel_once(tmp_path: Path) -> None:
    program = "import logging, otloss._warm_up; logging.basicConfig(level='INFO'); otloss._warm_up.work()"
    folder = tmp_path / "tasks"
    folder.mkdir()
    tasks = ["cdf_distance float32", "cdf_distance  float32"]  # one task under two names
    processes = [start("-c", program, str(folder), *tasks, cache=tmp_path / "cache") for _ in range(2)]
    said = "".join(process.communicate(timeout=300)[1] for process in processes)
    compiled = re.findall(r"compiled the CPU kernel (\S+)", said)
    assert len(compiled) == len(set(compiled)) > 1, said
    assert sorted(path.name for path in folder.iterdir()) == [f"{task}.done" for task in sorted(tasks)]


def test_the_error_of_a_process_is_shown_and_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="ended with exit code 1, see its error above"):
        _warm_up._compile_in_processes(["nothing float32"], 2)
    assert "KeyError: 'nothing'" in capfd.readouterr().err


def test_the_command_and_the_function_share_a_name() -> None:
    import otloss.warm_up

    with pytest.raises(ValueError, match="no kernels are known"):
        otloss.warm_up("emdd")
    process = start("-m", "otloss.warm_up", "emdd", cache=Path())
    assert "no kernels are known for emdd; expected some of sinkhorn, emd" in process.communicate(timeout=300)[1]
    assert process.returncode == 2
