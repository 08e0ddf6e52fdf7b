"""The example of masks at a tiny size: its table and its figure."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest


def test_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib").use("agg")
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples/masks.py"))
    example["main"](["--quick", "--output", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:28].strip() for line in lines[1:-1]] == list(example["LOSSES"])
    assert "nan" not in "".join(lines)
    assert (tmp_path / "masks.png").stat().st_size > 10_000
