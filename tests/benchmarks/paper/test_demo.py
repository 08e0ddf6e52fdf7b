"""The demo at a hundredth of its length, with fewer documents and temperatures, and what it says of differences."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import emo_demo as demo

CORNERS = ("scipy.special", "sklearn.linear_model")


def test_the_demo_leaves_table_report_and_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import logging

    monkeypatch.setattr(demo, "TEMPERATURES", (1.0, demo.COMPARED_AT))
    monkeypatch.setattr(demo, "LENGTH", 8)
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        demo.main(["--output", str(tmp_path), "--scale", "0.01", "--seeds", "1"], CORNERS)
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    table = capsys.readouterr().out
    for pair in (("emo/all-but-the-top", "emo/source"), ("emo/all-but-the-top", "emo/random"), ("emo/source", "mle")):
        assert any(all(arm in line for arm in pair) for line in table.splitlines() if line.startswith("- "))
    report = (tmp_path / "compare/report.md").read_text(encoding="utf-8")
    for arm in demo.ARMS:
        assert f"| {arm} |" in table
        assert f"| {arm} |" in report
    assert (tmp_path / "compare/frontier.png").stat().st_size > 10_000
    assert (tmp_path / "compare/report.json").is_file()
