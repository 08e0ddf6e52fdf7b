"""The demo at a hundredth of its length, with fewer documents, and what it says of differences."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("matplotlib")

from otloss_llm.experiments.frontier import Difference

DEMO = Path(__file__).parents[3] / "examples/emo_demo.py"
CORNER = 150  # documents of each package


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DEMO.parent))  # it imports docstring_corpus.py
    spec = importlib.util.spec_from_file_location("emo_demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    whole = module.docstring_corpus
    monkeypatch.setattr(module, "docstring_corpus", lambda package: whole(f"{package}.linear_model"
                        if package == "sklearn" else f"{package}.stats")[:CORNER])  # fmt: skip
    return module


def test_the_demo_leaves_table_report_and_figure(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    monkeypatch.setattr(sys, "argv", ["emo_demo.py", "--output", str(tmp_path), "--scale", "0.01", "--seeds", "1"])
    try:
        demo.main()
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


def test_the_sentences_say_what_came_out(demo: Any) -> None:
    real, chance = Difference(-0.03, -0.05, -0.01, 3), Difference(0.02, -0.01, 0.05, 3)
    assert demo.sentence("a", "b", real) == (
        "a is 0.030 nats per token nearer to the source than b (difference -0.030, 95 % interval -0.050 to -0.010)."
    )
    assert "0.020 nats per token farther" in demo.sentence("a", "b", chance)
    assert demo.sentence("a", "b", chance).endswith("the interval holds 0, so this may be chance.")
    assert "one seed" in demo.sentence("a", "b", Difference(-0.03, -math.inf, math.inf, 1))
    assert demo.sentence("a", "b", None) == "a against b: one of them does not reach this recall."
