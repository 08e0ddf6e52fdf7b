"""The report's table, samples and figure, on made-up results."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks.paper.compare import START
from benchmarks.paper.report import write_report
from benchmarks.paper.tables import Mean, half_interval


def test_a_mean_leaves_out_the_seeds_without_a_number_and_says_so() -> None:
    for numbers in ([1.5, 2.0, 4.5], [3.0]):
        deviation = half = math.nan
        if len(numbers) > 1:
            deviation = np.std(numbers, ddof=1)
            half = stats.t.interval(0.95, len(numbers) - 1, scale=stats.sem(numbers))[1]
        for missing in (0, 2):
            values = [*numbers[:1], *missing * [math.nan], *numbers[1:]]
            for mean, spread in ((Mean.of(values), deviation), (half_interval(values), half)):
                assert (mean.mean, mean.deviation) == pytest.approx((np.mean(numbers), spread), nan_ok=True)
                assert (mean.count, mean.left_out) == (len(numbers), missing)
    assert Mean.of([1.0, math.nan, 3.0]).shown("{:.1f}") == "2.0 ± 1.4 (2 of 3 seeds)"
    assert Mean.of([math.nan, math.nan]).shown("{:.1f}") == "nan (0 of 2 seeds)"
    assert half_interval([1.0, math.inf]).shown("{:.1f}") == "inf"


def test_the_figure_is_drawn_without_a_warning(tmp_path: Path) -> None:
    """There are many arms, some without a number, and values that differ by a large factor."""
    pytest.importorskip("matplotlib")
    draw, arms = random.Random(0), [*(f"mixce:{i / 20}" for i in range(11)), "emo", "emo/random", "mle/T=0.8"]
    runs: list[dict[str, Any]] = [
        {"arm": arm, "training": arm.split("/T=")[0], "seed": seed, "samples": ["a | b"], "seconds_per_step": 0.05,
         "test_perplexity": 20 + draw.random(), "transport_cost": draw.random(), "judge_perplexity": 50 + draw.random()}
        for seed in (0, 1) for arm in arms
    ]  # fmt: skip
    start = {"samples": ["x"], "test_perplexity": 100.0, "transport_cost": 0.7}
    reference = {"samples": ["x"], "judge_perplexity": 31.0}
    results = {"runs": runs, "failures": [], "prompts": ["prompt"], "reference": reference, "start": start}
    runs[1] |= {"test_perplexity": 1596.0, "judge_perplexity": 2.0}
    for run in runs[::3]:
        run |= {"test_perplexity": math.nan, "judge_perplexity": math.nan}
    table = write_report(results, tmp_path)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert table.splitlines()[2].startswith(f"| {START} | 100.00 |")
    assert "| mle/T=0.8 | a \\| b |" in (tmp_path / "samples.md").read_text(encoding="utf-8")
    assert "![figure](figure.png)" in (tmp_path / "report.md").read_text(encoding="utf-8")
