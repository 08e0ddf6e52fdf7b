"""The example of adaptation at a tiny size: its table and its figure, and a message where wine is missing."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest


def test_adaptation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib").use("agg")
    main = runpy.run_path(str(Path(__file__).parents[2] / "examples/adaptation.py"))["main"]
    main(["--quick", "--data", str(tmp_path), "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "the wine rows are left out" in printed
    assert all(name in printed for name in ("source only", "map, linear", "joint loss, unbalanced"))
    assert (tmp_path / "adaptation.png").stat().st_size > 5_000
