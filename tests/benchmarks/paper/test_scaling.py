"""Comparisons over sizes of the model and of the text."""

from pathlib import Path

import pytest

from tests.benchmarks.paper.conftest import compare_options
from tests.otloss_llm.conftest import Cli, Tiny, read


@pytest.mark.slow
def test_each_size_and_share_is_a_comparison_of_its_own(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    sizes = {"model_sizes": [tiny.gpt2], "data_fractions": [0.25, 1], "seeds": [0], "max_steps": 2}
    ended = cli(*compare_options(tiny, tmp_path, **sizes))
    assert ended.code == 0, ended.err
    actual = read(tmp_path / "scaling.json")
    assert [(one["model"], one["fraction"]) for one in actual] == [(str(tiny.gpt2), 0.25), (str(tiny.gpt2), 1.0)]
    assert actual[0]["settings"]["test_blocks"] == actual[1]["settings"]["test_blocks"]
    assert actual[0]["settings"]["train_blocks"] != actual[1]["settings"]["train_blocks"]
    rows = [line.split("|")[1:6] for line in ended.out.splitlines()[2:] if line]
    assert len(rows) == 4
    emo = next(run for run in actual[1]["runs"] if run["arm"] == "emo")
    last = [field.strip() for field in rows[-1]]
    assert last == ["gpt2", f"{actual[1]['parameters']:,}", "1", "emo", f"{emo['test_perplexity']:.2f}"]
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    assert cli(*compare_options(tiny, tmp_path, **sizes)).out == ended.out  # read from the folders
