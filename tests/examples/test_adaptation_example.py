"""The example of adaptation at a tiny size: its table and its figure, with wines of both forms and without."""

from __future__ import annotations

import runpy
from pathlib import Path

import data
import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/adaptation.py"


def test_adaptation(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.setattr(data, "BESIDE", tmp_path / "none")
    main = runpy.run_path(str(EXAMPLE))["main"]
    main(["--quick", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed.startswith(f"{data.OTHER}the digits alone. ordinal/gagolews/winequality-red.csv is not here")
    assert all(name in printed for name in ("source only", "map, linear", "joint loss, unbalanced"))
    assert (tmp_path / "adaptation.png").stat().st_size > 5_000


def test_wines_of_uci_and_of_gagolews(tmp_path: Path) -> None:
    """The grades 5, 6 and 7 of UCI's files are 3, 4 and 5 in those with commas."""
    wine_rows, rng = runpy.run_path(str(EXAMPLE))["wine_rows"], np.random.default_rng(0)
    for colour in ("red", "white"):
        grades = 3 + np.arange(60) % 6
        table = np.column_stack([rng.normal(size=(60, 3)) + grades[:, None], grades])
        for form, header, moved, sign in (
            ("uci", '"a";"b";"c";"quality"', 0, ";"),
            ("other", "a,b,c,response", 2, ","),
        ):
            path = tmp_path / form / f"ordinal/gagolews/winequality-{colour}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [sign.join(map(str, [*row[:3], int(row[3]) - moved])) for row in table]
            path.write_text("\n".join([header, *lines]), encoding="utf-8")
    found = wine_rows(tmp_path / "uci", 0, 20)
    assert found == wine_rows(tmp_path / "other", 0, 20)
    assert found["no map"] > 0.5
