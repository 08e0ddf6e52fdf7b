"""The comparison of objectives over sizes of the model and shares of the training text: one table, one figure.

Each size and share is a comparison (`benchmarks.paper.compare`) in a folder of its own, so that an interrupted
run continues, and sizes, shares, arms and seeds can be added. All of them have the same test text, prompts and judge. A
share takes the first blocks of the training text; the test and validation text stay whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from benchmarks.paper.compare import Comparison, run_comparison
from benchmarks.paper.data.blocks import PackedBlocks
from benchmarks.paper.folders import write_json, write_text
from benchmarks.paper.measuring import Data
from benchmarks.paper.models import load_model, load_tokenizer
from benchmarks.paper.report import COLUMNS, cells, columns_of, summarise
from benchmarks.paper.tables import Mean, markdown_table, save_figure

NOTES = """\
- Mean ± standard deviation over {seeds} seeds. The arms of a size and share start from one model, on the same batches.
  A share is of the training text; all rows have the same test text and prompts.
"""


def run_scaling(
    comparison: Comparison,
    models: Sequence[str],
    fractions: Sequence[float],
    data: Data,
    tokenizer: Any,
    args: TrainingArguments,
    *,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return the results of a comparison for each model and share: the ones of `run_comparison`, and what they are of.

    Args:
        comparison: of which `start` is replaced by each model.
        models: folders (or hub names) of models with one tokenizer.
        fractions: shares of the training blocks, in (0, 1].

    Raises:
        ValueError: shares or models that are not valid or named twice, a model with another tokenizer, or what
            `run_comparison` raises.
    """
    _check(models, fractions, tokenizer)
    comparisons = []
    for model in models:
        parameters = sum(weight.numel() for weight in load_model(model).parameters())
        for fraction in fractions:
            say(f"{model}, {fraction:g} of the training text")
            count = max(1, round(fraction * len(data.train)))
            own = copy.copy(args)
            own.output_dir = str(Path(args.output_dir) / f"{Path(model).name}-{fraction:g}")
            part = replace(data, train=PackedBlocks(data.train.ids[:count]))
            results = run_comparison(replace(comparison, start=model), part, tokenizer, own, say=say)
            comparisons.append({"model": model, "parameters": parameters, "fraction": fraction} | results)
    return comparisons


def _check(models: Sequence[str], fractions: Sequence[float], tokenizer: Any) -> None:
    names = [Path(model).name for model in models]  # names of folders
    for name, values in (("model_sizes", names), ("data_fractions", fractions)):
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name} is {list(values)}, expected at least one, each once.")
    if not all(0 < fraction <= 1 for fraction in fractions):
        raise ValueError(f"data_fractions is {list(fractions)}, expected shares of the training text above 0, up to 1.")
    for model in models:
        if load_tokenizer(model).get_vocab() != tokenizer.get_vocab():
            raise ValueError(
                f"{model!r} has another tokenizer than the model that the text is tokenised for; sizes are compared on "
                "the same tokens, so take models of one family."
            )


def write_scaling(comparisons: Sequence[dict[str, Any]], folder: Path) -> str:
    """Write scaling.md, scaling.json and (with matplotlib) scaling.png; returns the table."""
    rows = [(one, arm, scores) for one in comparisons for arm, scores in summarise(one).items()]
    columns = columns_of(scores for _, _, scores in rows)
    table = markdown_table(
        ["model", "parameters", "text", "arm", *(heading for _, heading, _ in columns)],
        (
            [Path(one["model"]).name, f"{one['parameters']:,}", f"{one['fraction']:g}", arm, *cells(scores, columns)]
            for one, arm, scores in rows
        ),
    )
    seeds = max(len({run["seed"] for run in one["runs"]}) for one in comparisons)
    write_json(folder / "scaling.json", comparisons)
    picture = "\n" + save_figure(lambda: _draw(rows), folder / "scaling.png")
    write_text(folder / "scaling.md", f"# Scaling\n\n{table}\n{NOTES.format(seeds=seeds)}{picture}")
    return table


def _draw(rows: Sequence[tuple[dict[str, Any], str, dict[str, Mean]]]) -> Any:
    """A curve for each arm: over sizes with the most text, and over shares of the text with the largest model."""
    from matplotlib.figure import Figure

    drawn = ("mauve", "judge_perplexity", "test_perplexity")
    key = next(key for key in drawn if all(key in scores for _, _, scores in rows))
    label = {name: heading for name, heading, _ in COLUMNS}[key]
    figure = Figure(figsize=(10.0, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, over, other in zip(panels, ("parameters", "fraction"), ("fraction", "parameters"), strict=True):
        largest = max(one[other] for one, _, _ in rows)
        for arm in dict.fromkeys(arm for _, arm, _ in rows):
            points = sorted(
                (one[over], s[key].mean, s[key].deviation)
                for one, name, s in rows
                if name == arm and one[other] == largest
            )
            x, y, spread = zip(*points, strict=True)
            axes.errorbar(x, y, yerr=[0.0 if e != e else e for e in spread], marker="o", capsize=3, label=arm)
        axes.set_xscale("log")
        ticks = sorted({one[over] for one, _, _ in rows})
        axes.set_xticks(ticks, [f"{tick:,}" if over == "parameters" else f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    panels[0].set(xlabel="parameters of the model", ylabel=label, title="Size of the model, all of the text")
    panels[1].set(xlabel="share of the training text", title="Size of the text, largest model")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", title="arm")
    return figure
