"""The recalibration example runs, offline and quickly, and shows what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "recalibrate_forecast.py"


def test_recalibration_lowers_score_and_calibration_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = tmp_path / "reliability.png"
    command = [sys.executable, "-W", "error", str(EXAMPLE), "--quick", "--figure", str(figure)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert figure.stat().st_size > 10_000
    rows = {line[:17].strip(): [float(m) for m in re.findall(r"(\d\.\d+) ±", line)] for line in lines[1:5]}
    assert list(rows) == ["as it is", "temperature", "temperature (nll)", "by threshold"]
    before = rows.pop("as it is")
    for after in rows.values():
        assert after[0] < 0.95 * before[0]
        assert after[2] < 0.8 * before[2]
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 150
