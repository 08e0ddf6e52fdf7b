"""The example of documents: a message without its data, and a table and a figure of a few questions with it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/documents.py"
DATA = Path(__file__).parents[3] / "shared/data"


def test_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib").use("agg")
    main = runpy.run_path(str(EXAMPLE))["main"]
    main(["--quick", "--data", str(tmp_path)])
    assert "lacks the data, expected\n  nlu/trec-train.txt" in capsys.readouterr().out
    if not (DATA / "nlu/trec-train.txt").exists():
        pytest.skip("no data")
    main(["--quick", "--data", str(DATA), "--output", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    accuracies = {line[:26].strip(): float(line[26:].split()[0]) for line in lines[-3:]}
    assert list(accuracies) == ["tf-idf, cosine", "word mover's distance", "the same, tf-idf weights"]
    assert min(accuracies.values()) > 0.4
    assert (tmp_path / "documents.png").stat().st_size > 10_000
