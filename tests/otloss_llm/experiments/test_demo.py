"""The demo at a hundredth of its length, with fewer documents, and what it says of differences."""

import math
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import emo_demo as demo

from otloss_llm.experiments.frontier import Difference

CORNERS = ("scipy.special", "sklearn.linear_model")


def test_the_demo_leaves_table_report_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

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


def test_the_sentences_say_what_came_out() -> None:
    real, chance = Difference(-0.03, -0.05, -0.01, 3), Difference(0.02, -0.01, 0.05, 3)
    assert demo.sentence("a", "b", real) == (
        "a is 0.030 nats per token nearer to the source than b (difference -0.030, 95 % interval -0.050 to -0.010)."
    )
    assert "0.020 nats per token farther" in demo.sentence("a", "b", chance)
    assert demo.sentence("a", "b", chance).endswith("the interval holds 0, so this may be chance.")
    assert "one seed" in demo.sentence("a", "b", Difference(-0.03, -math.inf, math.inf, 1))
    assert demo.sentence("a", "b", None) == "a against b: one of them does not reach this recall."
