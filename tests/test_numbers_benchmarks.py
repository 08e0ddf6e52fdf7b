"""The benchmarks of numbers at tiny sizes: what they print, keep, and refuse."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("ntloss")

from benchmarks import mathematics
from benchmarks.labels import BESIDE
from benchmarks.measure import Settings

ROOT = Path(__file__).parents[1]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
HAS_DATA = (BESIDE / "math").is_dir() and (BESIDE / "tokenizers/gpt2").is_dir()
pytestmark = pytest.mark.skipif(not HAS_DATA, reason="no questions and tokenizer at hand")


def _run(name: str, output: Path) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--small", "--rounds", "2", "--output", str(output)],
        cwd=ROOT, env=os.environ | ONE_THREAD, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_prices(tmp_path: Path) -> None:
    said = _run("numbers", tmp_path)
    assert "extra of number_token, 10 digits / extra of ntloss digits" in said
    with (tmp_path / "results.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert "| (number_token, all numbers - otloss MLE) / otloss MLE" in said
    assert {row["benchmark"] for row in rows} == {"numbers", "numbers narrow", "numbers memory"}
    assert all("% of labels numbers" in row["case"] for row in rows)


def test_mathematics(tmp_path: Path) -> None:
    said = _run("mathematics", tmp_path)
    assert "| number_token |" in said
    with (tmp_path / mathematics.MEANS).open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["case"] for row in rows} == {"digits", "multi-digit BPE"}
    assert {"exact_match", "median_absolute_error", "answer_nll"} <= {row["measure"] for row in rows}
    with pytest.raises(FileExistsError, match="go on with --resume"):
        mathematics.main(Settings(small=True, data=BESIDE, output=tmp_path))
