"""The list of experiments."""

import re

import pytest

from benchmarks.__main__ import main
from benchmarks.paper.experiments import EXPERIMENTS


def test_the_list_names_every_experiment_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["paper", "--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(EXPERIMENTS)
    assert all(re.match(r"\w+ +\d+ (min|h) ", line) for line in lines), lines
