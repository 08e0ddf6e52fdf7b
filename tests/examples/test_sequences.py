"""The example of sequences on a made-up text and on docstrings: table, blindness of n = 1 and figure come out."""

from __future__ import annotations

import runpy
from itertools import product
from pathlib import Path
from typing import Any

import data
import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/sequences.py"


def check_table(lines: list[str]) -> None:
    assert lines[0].startswith(data.OTHER)
    assert [float(line[52:70]) > 0.9 for line in lines[2:5]] == [True] * 3
    blind, *others = (float(value) for value in lines[9].partition(":")[2].split())
    assert blind == 0
    assert min(others) > 0.1


def test_sequences(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib").use("agg")
    main = runpy.run_path(str(EXAMPLE))["main"]
    with pytest.raises(SystemExit, match=r"lacks text/warandpeace\.txt, words/glove_twitter_25d\.npz; name a folder"):
        main(["--quick", "--data", str(tmp_path)])
    monkeypatch.setattr(data, "BESIDE", tmp_path)
    main(["--quick", "--output", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{data.OTHER}sentences of the docstrings")
    check_table(lines)
    (tmp_path / "sequences.png").unlink()
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
    check_table(lines)
    assert [float(line[52:70]) > 0.9 for line in lines[5:8]] == [True] * 3
    assert (tmp_path / "sequences.png").stat().st_size > 10_000
