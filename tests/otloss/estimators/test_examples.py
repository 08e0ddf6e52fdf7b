"""The examples on wine quality and on recalibration run, offline and quickly, and show what they say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import data
import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def printed(name: str, output: Path, *arguments: str, capsys: Any) -> list[str]:
    pytest.importorskip("matplotlib").use("agg")
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](["--quick", "--output", str(output), *arguments])
    assert (output / f"{name}.png").stat().st_size > 10_000
    return capsys.readouterr().out.splitlines()


def test_wine_quality(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xgboost")
    rows = "\n".join(f'{3 + i % 3},"{i % 3 + 0.1 * (i % 7)}",{i % 5}' for i in range(90))
    path = tmp_path / "wine.csv"
    path.write_text(f'# a comment\n"response","acidity","sugar"\n{rows}\n', encoding="utf-8")
    lines = printed("wine_quality", tmp_path, "--data", str(path), capsys=capsys)
    assert lines[0] == f"{data.OTHER}wine.csv, which is not ordinal/gagolews/winequality-red.csv by its SHA-256."
    assert "grades [3, 4, 5]" in lines[1]
    names = ["logistic regression", "linear", "perceptron", "boosted trees"]
    assert [line[:20].strip() for line in lines[3:]] == names
    assert max(float(line[20:28]) for line in lines[3:]) < 0.3  # the frequencies alone score 0.44
    monkeypatch.setattr(data, "BESIDE", tmp_path / "none")
    lines = printed("wine_quality", tmp_path, capsys=capsys)
    assert lines[0].startswith(f"{data.OTHER}diabetes of scikit-learn in five grades")
    assert "grades [0, 1, 2, 3, 4]" in lines[1]


def test_recalibration_lowers_score_and_calibration_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed("recalibrate_forecast", tmp_path, capsys=capsys)
    rows = {line[:17].strip(): [float(m) for m in re.findall(r"(\d\.\d+) ±", line)] for line in lines[1:5]}
    before = rows.pop("as it is")
    assert list(rows) == ["temperature", "temperature (nll)", "by threshold"]
    for after in rows.values():
        assert after[0] < 0.95 * before[0]
        assert after[2] < 0.8 * before[2]
