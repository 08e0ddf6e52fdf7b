"""The examples of matching and pairing at a tiny size: their tables and figures come out."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("name", "row"), [("set_prediction", "scipy loop"), ("flow_matching", "paired")])
def test_example(name: str, row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib").use("agg")
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](["--quick", "--output", str(tmp_path)])
    assert any(line.startswith(row) and "±" in line for line in capsys.readouterr().out.splitlines())
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
