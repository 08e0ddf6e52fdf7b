"""warm_up: names and dtypes, and several processes."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import otloss
import otloss_llm
from otloss._warm_up import _tasks
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


def test_kernels_that_are_the_same_for_both_dtypes_are_one_task() -> None:
    """A second process would wait for the first one, which compiles them."""
    names, both = ["emd", "newton"], [torch.float32, torch.float64]
    assert _tasks(names, both) == ["emd float64", "newton float64", "emd float32"]
    assert _tasks(names, [torch.float32]) == ["emd float32", "newton float32"]


def test_it_runs_where_gradients_are_off() -> None:
    """Every name runs in tests/test_readme.py."""
    with torch.inference_mode():
        otloss.warm_up("emd")
        otloss_llm.warm_up()


def test_it_runs_where_stderr_is_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Programs without a console have none, others put a logger in its place."""
    closed = (tmp_path / "log").open("w")
    closed.close()
    for stderr in (None, closed, SimpleNamespace(write=len, flush=int)):
        monkeypatch.setattr(sys, "stderr", stderr)
        otloss.warm_up("match", dtypes=[torch.float32])


@pytest.mark.slow
def test_the_command_compiles_in_processes_and_reads_what_is_there(tmp_path: Path) -> None:
    """`make test` runs the command before the tests."""
    command = ["-m", "otloss.warm_up", "cdf_distance", "match", "--dtypes", "float64"]
    for threads in (2, 1):
        process = start(*command, cache=tmp_path, threads=threads)
        said = process.communicate(timeout=300)[1].splitlines()
        assert process.returncode == 0, said
        assert all(f"{k} of 2 functions and dtypes" in line for k, line in enumerate(said)), said
        kept = {path: path.stat().st_mtime for path in tmp_path.rglob("*.nbc")}
        assert len(kept) >= 2
    assert kept == {path: path.stat().st_mtime for path in tmp_path.rglob("*.nbc")}


def test_the_command_and_the_function_share_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    import otloss.warm_up

    with pytest.raises(ValueError, match="no kernels are known"):
        otloss.warm_up("emdd")
    assert pickle.loads(pickle.dumps(otloss.warm_up)) is otloss.warm_up
    with pytest.raises(SystemExit, match="2"):
        otloss.warm_up.main(["emdd"])
    assert "no kernels are known for emdd; expected some of sinkhorn, " in capsys.readouterr().err
