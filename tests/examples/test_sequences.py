"""The example of sequences on a made-up text: the table, the blindness of n = 1 and the figure come out."""

from __future__ import annotations

import runpy
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/sequences.py"


def test_sequences(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib").use("agg")
    main = runpy.run_path(str(EXAMPLE))["main"]
    main(["--quick", "--data", str(tmp_path), "--output", str(tmp_path)])
    assert "expected\n  text/warandpeace.txt" in capsys.readouterr().out
    rng = np.random.default_rng(0)
    words = np.array(["".join(letters) for letters in product("abcdefghijklmnop", repeat=3)])
    for folder in ("text", "words"):
        (tmp_path / folder).mkdir()
    np.savez(
        tmp_path / "words/glove_twitter_25d.npz", words=words, vectors=rng.normal(size=(len(words), 25)).astype("f4")
    )
    text = ". ".join(" ".join(rng.choice(words, rng.integers(8, 13))) for _ in range(30))
    (tmp_path / "text/warandpeace.txt").write_text(text, encoding="utf-8")
    main(["--quick", "--data", str(tmp_path), "--output", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [float(line[52:70]) > 0.9 for line in lines[1:7]] == [True] * 6
    blind, *others = (float(value) for value in lines[8].partition(":")[2].split())
    assert blind == 0
    assert min(others) > 0.1
    assert (tmp_path / "sequences.png").stat().st_size > 10_000
