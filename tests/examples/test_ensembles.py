"""The example of ensembles at a tiny size: the table and the figure come out."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/ensembles.py"


def test_ensembles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib").use("agg")
    runpy.run_path(str(EXAMPLE))["main"](["--quick", "--output", str(tmp_path)])
    rows = capsys.readouterr().out.splitlines()[3:9]
    scores = {line[:36].strip(): float(line[36:].split()[0]) for line in rows}
    assert scores["leaves of at least 10, recalibrated"] < scores["leaves of at least 10, as it is"]
    assert (tmp_path / "ensembles.png").stat().st_size > 10_000
