"""The examples of cost-sensitive classes and of histogram regression at a tiny size: table and figure come out."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import data
import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def table(name: str, folder: Path, capsys: Any, *arguments: str) -> dict[str, list[float]]:
    pytest.importorskip("matplotlib").use("agg")
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](["--quick", "--output", str(folder), *arguments])
    assert (folder / f"{name}.png").stat().st_size > 10_000
    rows = (line for line in capsys.readouterr().out.splitlines() if re.search(r"\d ±", line))
    return {re.split(r"\s{2,}", row)[0]: [float(m) for m in re.findall(r"(\S+) ±", row)] for row in rows}


def test_cost_sensitive(tmp_path: Path, capsys: Any) -> None:
    rows = table("cost_sensitive", tmp_path, capsys)
    assert len(rows) == 4
    for name in ("digits, cross-entropy", "breast cancer, cross-entropy"):
        assert rows[name][1] < rows[name][0], "the decision of least expected cost costs less"


def test_histogram_regression(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "BESIDE", tmp_path / "none")
    assert len(table("histogram_regression", tmp_path, capsys)) == 4  # without abalones
    rng = np.random.default_rng(0)
    lines = [",".join(map(str, [1 + k % 10, *rng.normal(size=7)])) for k in range(80)]
    (tmp_path / "ordinal/gagolews").mkdir(parents=True)
    (tmp_path / "ordinal/gagolews/abalone_ord.csv").write_text("\n".join(["header", *lines]), encoding="utf-8")
    rows = table("histogram_regression", tmp_path, capsys, "--data", str(tmp_path))
    assert len(rows) == 4
    assert all(0 < row[0] < 15 for row in rows.values())


def test_medians_of_histograms() -> None:
    medians = runpy.run_path(str(EXAMPLES / "histogram_regression.py"))["medians"]
    p = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.1, 0.1, 0.8]])
    torch.testing.assert_close(medians(p, torch.tensor([0.0, 1.0, 3.0, 4.0])), torch.tensor([1.0, 2.0, 3.375]))
