"""The example of boosting and the benchmark of training times, at tiny sizes."""

import csv
import runpy
from pathlib import Path

import data
import numpy as np
import pytest

pytest.importorskip("xgboost")
pytest.importorskip("lightgbm")
EXAMPLE = Path(__file__).parents[3] / "examples/boosting.py"


def test_all_arms_learn(tmp_path: Path, capsys: pytest.CaptureFixture[str], no_data: Path) -> None:
    pytest.importorskip("matplotlib").use("agg")
    example = runpy.run_path(str(EXAMPLE))
    with pytest.raises(SystemExit, match=r"missing\.csv lacks ordinal/gagolews/skill\.csv"):
        example["main"](["--quick", "--data", str(tmp_path / "missing.csv"), "--output", str(tmp_path)])
    capsys.readouterr()
    shares = example["main"](["--quick", "--output", str(tmp_path)])
    assert len(shares) == 8
    for (library, arm), values in shares.items():
        assert (np.diff(values) <= 0).all(), "a share of larger errors is a part of the share of smaller ones"
        if "median" in arm:
            probable = shares[library, arm.replace("median", "most probable")]
            assert values[:, 2].mean() < probable[:, 2].mean(), "the median makes fewer errors of two grades and more"
    assert capsys.readouterr().out.startswith(f"{data.OTHER}diabetes of scikit-learn in five grades")
    assert (tmp_path / "boosting.png").stat().st_size > 10_000


def test_the_benchmark_runs(tmp_path: Path) -> None:
    from benchmarks import boosting
    from benchmarks.measure import Settings

    boosting.main(Settings(rounds=1, small=True, output=tmp_path))
    with (tmp_path / "results.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 10
    assert all(float(row["ratio"]) > 0 for row in rows)
