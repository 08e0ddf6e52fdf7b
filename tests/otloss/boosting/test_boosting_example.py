"""The example on early stopping and the benchmark of training times, at tiny sizes."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xgboost")

EXAMPLE = Path(__file__).parents[3] / "examples/xgboost_early_stopping.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("xgboost_early_stopping", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_arms_learn_and_stop(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    results = example.main(["--rows", "600", "--rounds", "40"])
    _, labels = np.unique(example.made_up(600)[1], return_inverse=True)
    frequencies = np.bincount(labels) / len(labels)
    guess, _ = example.judged(np.tile(frequencies, (len(labels), 1)), labels)
    assert all(score < 0.8 * guess for score, _ in results.values())
    assert capsys.readouterr().out.count("stopped at round") == 2


def test_it_reads_a_file(example: Any, tmp_path: Path) -> None:
    X, grades = example.made_up(200)
    path = tmp_path / "grades.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["response", *"abcdef"])
        writer.writerows([[grade, *row] for grade, row in zip(grades, X, strict=True)])
    for ours, theirs in zip(example.from_csv(path), (X, grades), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightgbm")
    from benchmarks import boosting
    from benchmarks.measure import Settings

    boosting.main(Settings(rounds=1, small=True, output=tmp_path))
    with (tmp_path / "results.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 8
    assert all(float(row["ratio"]) > 0 for row in rows)
    assert "at most" not in capsys.readouterr().out, "toy sizes get no verdict"
