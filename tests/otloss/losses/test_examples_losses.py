"""The example of age histograms at a tiny size: the table and the figure come out, and training helps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).parents[3] / "examples/age_histogram.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("age_histogram", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "age_histogram", module)  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def test_the_table_and_the_figure_come_out(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    figure = tmp_path / "ages.png"
    monkeypatch.setattr(sys, "argv", ["age_histogram.py", "--quick", "--people", "5", "--figure", str(figure)])
    example.main()
    table = capsys.readouterr().out
    assert all(name in table for name in (*example.LOSSES, "W1 (years)", "KL (nats)"))
    assert "nan" not in table
    assert figure.stat().st_size > 10_000


@pytest.mark.parametrize("name", ["EMD, power 2", "EMD, power 1 + CE"])
def test_training_helps(example: Any, name: str) -> None:
    data = example.draw_neighbourhoods(200, 30, torch.Generator().manual_seed(0))
    scores = []
    for steps in (1, 100):
        loss = example.HistogramLoss(bins=example.EDGES, **example.LOSSES[name])
        network = example.train(data, loss, steps=steps, seed=0)
        with torch.no_grad():
            scores.append(example.judge(network(data.features), data.truth))
    assert scores[1]["W1 (years)"] < 0.8 * scores[0]["W1 (years)"]
