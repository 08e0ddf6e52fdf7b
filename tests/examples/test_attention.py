"""The example of attention at a tiny size: rows and columns sum to one, and the table and the figure come out."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples/attention.py"


def test_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib").use("agg")
    made = runpy.run_path(str(EXAMPLE))
    weights = made["Attention"]("Sinkhorn")(torch.rand(3, 6, 64))
    for axis in (-1, -2):
        torch.testing.assert_close(weights.sum(axis), torch.ones(3, 6), atol=1e-3, rtol=0)
    made["main"](["--quick", "--output", str(tmp_path)])
    right = {line.split()[0]: float(line.split()[1]) for line in capsys.readouterr().out.splitlines()[1:]}
    assert right["Sinkhorn"] > 0.2
    assert right["softmax"] > 0.2
    assert (tmp_path / "attention.png").stat().st_size > 10_000
