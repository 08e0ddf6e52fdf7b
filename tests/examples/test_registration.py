"""The example of registration at a tiny size: the table and the figure come out, and missing data is named."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/registration.py"


def test_registration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib").use("agg")
    example = runpy.run_path(str(EXAMPLE))
    example["main"](["--data", str(tmp_path)])
    assert "is missing; it is in github.com/alecjacobson" in capsys.readouterr().out
    if not (example["DATA"] / "shapes").exists():
        pytest.skip("needs the bunny")
    example["main"](["--quick", "--output", str(tmp_path)])
    assert len(capsys.readouterr().out.splitlines()) == 10
    assert (tmp_path / "registration.png").stat().st_size > 10_000
