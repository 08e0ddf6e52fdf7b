"""The example on wine quality runs, with and without a file."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "wine_quality.py"
MODELS = ("logistic regression", "linear", "perceptron", "boosted trees")


@pytest.mark.parametrize("from_file", [False, True])
def test_example_prints_a_line_for_each_model(
    from_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xgboost")
    arguments = [str(EXAMPLE), "--quick"]
    if from_file:
        rows = "\n".join(f'{3 + i % 3},"{i % 3 + 0.1 * (i % 7)}",{i % 5}' for i in range(90))
        path = tmp_path / "wine.csv"
        path.write_text(f'# a comment\n"response","acidity","sugar"\n{rows}\n', encoding="utf-8")
        arguments += ["--data", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert "grades [3, 4, 5]" in lines[0] if from_file else "grades [0, 1, 2, 3, 4]" in lines[0]
    assert [line[:20].strip() for line in lines[2:]] == list(MODELS)
    scores = [float(line[20:28]) for line in lines[2:]]
    assert max(scores) < (0.3 if from_file else 0.75)  # the frequencies alone score 0.44 and 0.8
