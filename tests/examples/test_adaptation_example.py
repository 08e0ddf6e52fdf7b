"""The example of adaptation at a tiny size: its table and its figure."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/adaptation.py"


def test_adaptation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib").use("agg")
    runpy.run_path(str(EXAMPLE))["main"](["--quick", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("source only", "map, linear", "joint loss, unbalanced"))
    assert (tmp_path / "adaptation.png").stat().st_size > 5_000
