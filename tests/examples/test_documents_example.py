"""The example of documents: a table and a figure, of a few questions and of docstrings."""

from __future__ import annotations

import runpy
from pathlib import Path

import data
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/documents.py"


@pytest.mark.parametrize("real", [True, False])
def test_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, real: bool
) -> None:
    pytest.importorskip("matplotlib").use("agg")
    main = runpy.run_path(str(EXAMPLE))["main"]
    with pytest.raises(SystemExit, match=r"lacks nlu/trec-train\.txt, words/glove_twitter_25d\.npz"):
        main(["--quick", "--data", str(tmp_path)])
    if real and not (data.BESIDE / "nlu/trec-train.txt").exists():
        pytest.skip("no data")
    if not real:
        monkeypatch.setattr(data, "BESIDE", tmp_path)
    main(["--quick", "--output", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(data.OTHER) != real
    accuracies = {line[:26].strip(): float(line[26:].split()[0]) for line in lines[-3:]}
    assert list(accuracies) == ["tf-idf, cosine", "word mover's distance", "the same, tf-idf weights"]
    assert min(accuracies.values()) > 0.4
    assert (tmp_path / "documents.png").stat().st_size > 10_000
