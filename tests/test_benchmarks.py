"""The benchmarks run at tiny sizes, from timing to figure, and keep their results where they are told to."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("emo")
pytest.importorskip("matplotlib")

from benchmarks import labels, memory, token_loss
from benchmarks.measure import Timing, ratios

ROOT = Path(__file__).parents[1]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}  # steps of a millisecond wait long for busy cores


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_all_of_them_small(tmp_path: Path) -> None:
    committed = {name: ROOT / "benchmarks" / name for name in ("results.csv", "scaling.csv", "scaling.png")}
    before = {name: file.read_bytes() for name, file in committed.items() if file.exists()}
    said = []
    for name in ("token_loss", "scaling"):  # the others have tests of their own
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks", name, "--small", "--rounds", "1", "--output", str(tmp_path)],
            cwd=ROOT, env=os.environ | ONE_THREAD, capture_output=True, text=True,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        said.append(ended.stdout)
    assert before == {name: file.read_bytes() for name, file in committed.items() if file.exists()}

    assert "| N=" not in "".join(said), "toy sizes get no verdict"

    results = rows(tmp_path / "results.csv")
    assert {row["benchmark"] for row in results} == {"token_loss", "token_loss memory", "token_loss gradient error"}
    errors = [float(row["error"]) for row in results if row["error"] and "bf16" not in row["case"]]
    assert errors
    assert max(errors) < 1e-5, "every contestant computes what it is compared with"
    scaling = rows(tmp_path / "scaling.csv")
    assert {row["axis"] for row in scaling} == {"N", "V", "u"}
    assert all(float(row["seconds"]) > 0 and row["hardware"] for row in scaling)
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_verdicts() -> None:
    limit = token_loss.Limit("time", 1.1)
    assert limit.judged() == ["time", "<= 1.10", "not measured"]
    assert limit.judged(1.1)[-1] == "1.100 met"
    assert limit.judged(1.2, 1.3, 1.4)[-1] == "1.300 missed (1.250 to 1.350)"
    assert limit.judged(1.0, 1.08, 1.3)[-1] == "1.080 met (1.040 to 1.190, within noise)"


def test_ratios_are_those_of_a_round() -> None:
    slow, fast, mine = Timing((4.0, 8.0)), Timing((2.0, 4.0)), Timing((3.0, 3.0))
    assert ratios(mine, slow, fast) == [1.5, 0.75]


@pytest.mark.skipif(not memory.CLEAR.exists(), reason="reads /proc")
def test_peak_counts_what_is_given_back() -> None:
    grown = memory.peak_growth(lambda: torch.ones(2**24).sum())
    assert 60 <= grown / memory.MIB < 72  # 64, less what the process had at hand


@pytest.mark.skipif(labels.find_data(None, "wikitext2-valid") is None, reason="no text and tokenizer at hand")
def test_labels_of_text_repeat_like_text() -> None:
    source = labels.from_text(labels.BESIDE, "wikitext2-valid", 32000)
    drawn = source.draw(2048, 1)
    assert drawn.shape == (2048,)
    assert int(drawn.max()) < 32000
    assert torch.equal(drawn, source.draw(2048, 1))
    assert not torch.equal(drawn, source.draw(2048, 2))
    assert 0.25 < labels.share_distinct(drawn) < 0.5
    assert "of ids >= V dropped" in source.name
