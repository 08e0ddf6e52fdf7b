"""The example of registration at a tiny size: the table and the figure come out, with and without the bunny."""

from __future__ import annotations

import runpy
from pathlib import Path

import data
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/registration.py"


def test_registration(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib").use("agg")
    main = runpy.run_path(str(EXAMPLE))["main"]
    with pytest.raises(SystemExit, match=r"typo lacks shapes/stanford-bunny\.obj"):
        main(["--data", str(tmp_path / "typo")])
    if data.BESIDE.exists():
        main(["--quick", "--output", str(tmp_path)])
        assert len(capsys.readouterr().out.splitlines()) == 10
    monkeypatch.setattr(data, "BESIDE", tmp_path)
    main(["--quick", "--output", str(tmp_path)])
    first, *table = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{data.OTHER}a surface that is made by a formula. shapes/stanford-bunny.obj is not here")
    assert len(table) == 10
    assert (tmp_path / "registration.png").stat().st_size > 10_000
