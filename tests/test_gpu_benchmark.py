"""The benchmark for a GPU goes its whole way at tiny sizes on a CPU, and says in one line what it needs."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import gpu
from benchmarks.gpu_checks import judge

ROOT = Path(__file__).parents[1]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "benchmarks.gpu", *options]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_dry_run(tmp_path: Path) -> None:
    committed = ROOT / "benchmarks/gpu.csv"
    before = committed.read_bytes() if committed.exists() else None
    ended = run("--dry-run", "--rounds", "1", "--output", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert before == (committed.read_bytes() if committed.exists() else None)
    for said in ("Triton sweeps, torch.bfloat16", "EMO: loss, dh, dW", "EMO chunk=8: ", "trained head", "frozen head"):
        assert said in ended.stdout
    with (tmp_path / "gpu.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["head"] for row in rows} == {"trained", "frozen"}
    assert {"EMO chunk=4", "MLE chunk=8", "dense cross-entropy"} <= {row["name"] for row in rows}
    assert all(float(row["milliseconds"]) > 0 and row["hardware"] and row["triton"] for row in rows)


def test_without_a_gpu_it_says_so() -> None:
    ended = run()
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert (
        ended.stderr == "python -m benchmarks.gpu needs a CUDA device; --dry-run exercises it on a CPU with Triton.\n"
    )


def test_who_cannot_run_is_left_out_aloud(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> gpu.Loss:
        raise ImportError("No module named 'peer'")

    def greedy(problem: gpu.Problem) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    makers = {"peer": missing, "greedy": lambda: greedy, gpu.DENSE: gpu.dense}
    monkeypatch.setattr(gpu, "contestants", lambda size: makers)
    problem = gpu.Problem.random(gpu.DRY, torch.arange(9))
    measured = gpu.race(gpu.DRY, problem, rounds=2)
    assert list(measured) == [gpu.DENSE]
    said = capsys.readouterr().out
    assert "peer is left out: ImportError: No module named 'peer'" in said
    assert "greedy is left out: OutOfMemoryError: CUDA out of memory.\n" in said
    gpu.say_ratio(measured, gpu.DENSE, "peer", goal=1.0)
    assert "not measured" in capsys.readouterr().out


def test_wrong_results_are_not_timed() -> None:
    judge("right", [1e-3], [2e-3])
    for error in (3e-3, float("nan")):
        with pytest.raises(ArithmeticError, match="over its limit"):
            judge("wrong", [error], [2e-3])
