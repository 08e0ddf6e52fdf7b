"""The example of generators at a tiny size: the table and the figure come out."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/generators.py"


def test_generators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib").use("agg")
    runpy.run_path(str(EXAMPLE))["main"](["--quick", "--output", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    exact = {line[:22].strip(): float(line[22:].split()[0]) for line in lines[2:6]}
    assert exact["no critic: transport"] < min(exact.pop(name) for name in list(exact)[:3])  # after four steps already
    assert (tmp_path / "generators.png").stat().st_size > 10_000
