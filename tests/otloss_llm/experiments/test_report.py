"""The report's table, samples and figure, on made-up results."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from otloss_llm.experiments.compare import HUMAN, START
from otloss_llm.experiments.report import write_report
from otloss_llm.experiments.tables import Mean, half_interval

NASTY = (
    "a | b",
    "`code` and ``more``",
    "first\nsecond\r\nthird",
    "*stars* __under__ [link](x) <b>bold</b> &amp; $x$ ~~no~~ \\ back\\slash \\| end",
    "| --- |",
    "",
    "# head",
    "- item  two  blanks",
)


def made_up(arms: list[str], seeds: list[int], *, judged: bool = True, samples: tuple[str, ...] = ("x",)) -> dict:
    """Results of the shape that run_comparison returns."""
    generator = random.Random(0)
    runs = []
    for seed in seeds:
        for number, arm in enumerate(arms):
            run: dict[str, Any] = {"arm": arm, "training": arm.split("/T=")[0], "seed": seed, "samples": list(samples)}
            run["test_perplexity"] = 20 + number + generator.random()
            run["transport_cost"] = 0.6 - 0.01 * number + 0.001 * generator.random()
            run["seconds_per_step"] = 0.05
            runs.append(run | ({"judge_perplexity": 50 - number + generator.random()} if judged else {}))
    reference = {"samples": list(samples)} | ({"judge_perplexity": 31.0} if judged else {})
    start = {"samples": list(samples), "test_perplexity": 100.0, "transport_cost": 0.7}
    prompts = [f"prompt {i}" for i in range(len(samples))]
    return {"runs": runs, "failures": [], "prompts": prompts, "reference": reference, "start": start}


def unescaped(cell: str) -> str:
    """What a reader of the rendered table sees: its text, line ends from <br>."""
    markdown_it = pytest.importorskip("markdown_it")
    html = markdown_it.MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(f"| a |\n|---|\n| {cell} |\n")
    inner = html.split("<tbody>")[1].split("<td>")[1].split("</td>")[0]
    for entity, char in (("<br>", "\n"), ("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        inner = inner.replace(entity, char)
    return inner


def test_samples_are_shown_as_they_are(tmp_path: Path) -> None:
    results = made_up(["mle", "emo"], [0], samples=NASTY)
    results["prompts"] = list(NASTY)
    write_report(results, tmp_path)
    lines = (tmp_path / "samples.md").read_text(encoding="utf-8").split("\n")
    cells = [line.removeprefix("| mle | ").removesuffix(" |") for line in lines if line.startswith("| mle |")]
    assert len(cells) == len(NASTY)
    for cell, text in zip(cells, NASTY, strict=True):
        assert unescaped(cell).strip() == text.replace("\r\n", "\n").strip()
    for name in (START, "mle", "emo", HUMAN):
        assert sum(line.startswith(f"| {name} |") for line in lines) == len(NASTY)


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
    """Of many arms, some without a number, and of values that differ by a large factor."""
    pytest.importorskip("matplotlib")
    results = made_up([f"mixce:{i / 20}" for i in range(11)] + ["emo", "emo/random", "mle/T=0.8"], [0, 1])
    results["runs"][1] |= {"test_perplexity": 1596.0, "judge_perplexity": 2.0}
    for run in results["runs"][::3]:
        run |= {"test_perplexity": math.nan, "judge_perplexity": math.nan}
    table = write_report(results, tmp_path)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert table.splitlines()[2].startswith(f"| {START} | 100.00 |")
    assert "![figure](figure.png)" in (tmp_path / "report.md").read_text(encoding="utf-8")
