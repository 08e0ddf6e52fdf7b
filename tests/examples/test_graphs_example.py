"""The example of graphs: distances and a figure at a tiny size."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/graphs.py"


def test_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib").use("agg")
    runpy.run_path(str(EXAMPLE))["main"](["--quick", "--output", str(tmp_path)])
    times, correlation = capsys.readouterr().out.splitlines()
    assert times.startswith("µs a pair of nodes: exact ")
    assert float(correlation.rpartition(" ")[2]) > 0.8
    assert (tmp_path / "graphs.png").stat().st_size > 10_000
