"""The report of a comparison: a Markdown table (mean and standard deviation over seeds), a figure, JSON, samples."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.compare import HUMAN, RIGHT, START
from benchmarks.paper.folders import write_json, write_text
from benchmarks.paper.tables import Mean, half_interval, markdown_table, runs_by_arm, save_figure

# key, heading, number format, which way is better
COLUMNS = (
    ("exact_match", "exact match, % ↑", "{:.1f}"),
    ("number_accuracy", "number accuracy, % ↑", "{:.1f}"),
    ("median_absolute_error", "median absolute error ↓", "{:.3g}"),
    ("mean_absolute_error", "mean absolute error ↓", "{:.3g}"),
    ("capped_relative_error", "capped relative error ↓", "{:.3f}"),
    ("order_of_magnitude_accuracy", "right order of magnitude, % ↑", "{:.1f}"),
    ("mean_log_error", "log error ↓", "{:.3f}"),
    ("answered", "answered, %", "{:.1f}"),
    ("answer_nll", "nll of answers ↓", "{:.3f}"),
    ("test_perplexity", "test perplexity ↓", "{:.2f}"),
    ("judge_perplexity", "judge perplexity of samples ↓", "{:.2f}"),
    ("transport_cost", "transport cost ↓", "{:.4f}"),
    ("mauve", "MAUVE, % ↑", "{:.1f}"),
    ("rouge_1", "ROUGE-1, % ↑", "{:.1f}"),
    ("rouge_l", "ROUGE-L, % ↑", "{:.1f}"),
    ("number_token_accuracy", "number tokens right, % ↑", "{:.1f}"),
    ("number_token_log_error", "log error of number tokens ↓", "{:.3f}"),
    ("distinct_2", "distinct-2", "{:.3f}"),
    ("distinct_3", "distinct-3", "{:.3f}"),
    ("seconds_per_step", "ms / step", "{:.0f}"),
)
_SHARES = ("exact_match", "number_accuracy", "order_of_magnitude_accuracy", "answered", "number_token_accuracy",
           "mauve", "rouge_1", "rouge_l")  # fmt: skip
_SCALE = dict.fromkeys(_SHARES, 100.0) | {"seconds_per_step": 1000.0}

NOTES_ON_NUMBERS = """\
- `number_token`: likelihood plus the distance between the predicted number tokens and the right one; `/log`, ...: the
  scaling of that distance. `emo+number`: EMO whose cost between number tokens is their distance, and the embedding's
  everywhere else.
"""
NOTES_ON_NUMBER_TOKENS = """\
- *number tokens right*: share of the number tokens in the {where} for which the likeliest token has the right value y,
  given the true text before; *log error of number tokens*: mean of |s(v) - s(y)|, s(v) = sign(v) log(1 + |v|), over the
  values v of number tokens under the model's distribution among them.
"""
NOTES_ON_ALL = """\
- `/random`: with a random embedding, a control without semantics.
- `{start}`: the model that every arm starts from, measured in the same way.
- *ms / step*: median wall time of an optimizer step, as measured on this machine in this run.
"""
NOTES_ON_QUESTIONS = """\
- Mean ± standard deviation over {seeds} seed{plural}; a seed sets the order of batches, for all arms alike.
- {count} test questions, answered greedily (the likeliest token each time); answers are read in the style `{style}`.
- *exact match*: share of right answers. {numeric} of the right answers are numbers, and the other columns cover only
  these. *number accuracy*: share with the right value; *right order of magnitude*: with the right sign, and within a
  factor of √10. *answered*: share for which a number was predicted; the others count as wrong in both shares.
- With the right value y and the predicted p: *absolute error* |p - y|, whose mean a few extreme answers can dominate;
  *capped relative error*: mean of min(|p - y| / max(|y|, 1), 1), 1 if no number was predicted; *log error*: mean of
  |s(p) - s(y)|, s(v) = sign(v) log(1 + |v|). Absolute and log error cover only answered questions.
- *nll of answers*: nats per token of the right answer and its end, given the true tokens before.
- An empty cell: one of the seeds has no such value, for example because it answered no question with a number.
- {cut_short} of the right answers are longer than the {longest} tokens that an answer may have, and cannot be given.
- {seen} of the test questions are also training questions, and may be memorised.
"""
NOTES_ON_TEXT = """\
- Mean ± standard deviation over {seeds} seed{plural}; a seed sets the order of batches and the samples, for all
  arms alike.
- *test perplexity*: of held-out text under the model itself, at the temperature of the arm. *judge perplexity*: of
  sampled continuations under an independent model. It falls both when samples become better and when they become
  blander: read it together with distinct-n (share of different n-grams), and against `{human}` (the judge perplexity of
  the real continuations).
- *transport cost*: mean exact earth mover's distance between prediction and token on the test text, in the geometry of
  the start model's head (1 - cosine). It also falls when predictions merely retreat to frequent tokens: low cost at a
  high test perplexity is collapse.
- `/T=...`: the same trained model at that temperature (logits / T) in every column, a control for sharpening alone.
- Samples continue {prompts} beginnings of the test text.
"""
NOTES_ON_MAUVE = """\
- *MAUVE*: of the samples and the real continuations, from features of the judge: mean of 5 seeds of k-means with
  {clusters} clusters, of which one has a standard deviation of up to {noise:.1f}. In the row `{human}` are the real
  continuations and as much other real text: what a perfect model would reach with as few texts.
"""
NOTES_ON_ROUGE = """\
- *ROUGE*: mean F1 of a sample and the real continuation; high if the words are the same.
"""


def write_report(results: dict[str, Any], folder: Path, *, title: str = "Comparison of objectives") -> str:
    """Write report.md, report.json, samples.md and (with matplotlib) figure.png; returns table and failures."""
    table = results_table(results) + _failures(results)
    notes = _changes(results) + _by_kind(results) + _notes(results)
    draw = _figure_of_questions if "questions" in results else _figure_of_text
    picture = "\n" + save_figure(lambda: draw(results), folder / "figure.png")
    write_json(folder / "report.json", results)
    write_text(folder / "samples.md", _samples(results))
    shown = "Answers" if "questions" in results else "Samples"
    links = f"{shown} side by side: [samples.md](samples.md). Every number and setting: report.json."
    write_text(folder / "report.md", f"# {title}\n\n{table}\n{notes}{picture}\n{links}\n")
    return table


def _notes(results: dict[str, Any]) -> str:
    runs, about = results["runs"], results.get("questions")
    seeds = len({run["seed"] for run in runs})
    values: dict[str, Any] = {"seeds": seeds, "plural": "" if seeds == 1 else "s", "start": START, "human": HUMAN}
    values |= {"prompts": len(results["prompts"]), "where": "test text" if about is None else "right answers"}
    if about is not None:
        numeric = round(results["start"]["numeric"] * about["count"])
        values |= about | {"numeric": numeric, "longest": results["settings"]["max_new_tokens"]}
    notes = NOTES_ON_TEXT if about is None else NOTES_ON_QUESTIONS
    notes += NOTES_ON_NUMBER_TOKENS if any("number_token_accuracy" in run for run in runs) else ""
    mauves = [scores for scores in (*runs, results["reference"]) if "mauve" in scores]
    if mauves:
        values |= {"noise": 100 * max(run["mauve_std"] for run in mauves), "clusters": mauves[0]["mauve_clusters"]}
        notes += NOTES_ON_MAUVE
    notes += NOTES_ON_ROUGE if any("rouge_1" in run for run in runs) else ""
    notes += NOTES_ON_NUMBERS if any("number" in run["arm"] for run in runs) else ""
    return (notes + NOTES_ON_ALL).format(**values)


def _changes(results: dict[str, Any]) -> str:
    """Return how far each arm lies from the first, paired within a seed; "" where there are no two seeds or arms."""
    (base, base_runs), *others = runs_by_arm(results).items()
    first = {run["seed"]: run for run in base_runs}
    changes: dict[str, dict[str, Mean]] = {}
    for arm, runs in others:
        pairs = [(run, first[run["seed"]]) for run in runs if run["seed"] in first]
        changes[arm] = {}
        for key, *_ in COLUMNS:
            values = [(run[key] - other[key]) * _SCALE.get(key, 1.0) for run, other in pairs
                      if run.get(key) is not None and other.get(key) is not None]  # fmt: skip
            if 2 <= len(values) == len(runs) and key != "seconds_per_step":
                changes[arm][key] = half_interval(values)
    columns = columns_of(changes.values())
    if not columns:
        return ""
    rows = ([arm, *cells(row, columns)] for arm, row in changes.items())
    table = markdown_table(["arm", *(heading for _, heading, _ in columns)], rows)
    return f"\nChanges against `{base}`, paired within a seed, ± half of the 95 % interval (Student's t):\n\n{table}\n"


def _by_kind(results: dict[str, Any]) -> str:
    """Return exact match of each kind of question, if there are several."""
    kinds = results.get("questions", {}).get("kinds", {})
    if len(kinds) < 2:
        return ""
    arms = runs_by_arm(results)
    rows = [
        [
            _in_table(kind),
            str(count),
            *(f"{100 * Mean.of([run['by_kind'][kind] for run in runs]).mean:.1f}" for runs in arms.values()),
        ]
        for kind, count in kinds.items()
    ]
    table = markdown_table(["kind", "questions", *arms], rows)
    return f"\nExact match, %, by kind of question:\n\n{table}\n\n"


def summarise(results: dict[str, Any]) -> dict[str, dict[str, Mean]]:
    """Return `{arm: {key: mean with deviation over seeds}}`, arms in the order of the runs."""
    summary: dict[str, dict[str, Mean]] = {}
    for arm, runs in runs_by_arm(results).items():
        summary[arm] = {}
        for key, *_ in COLUMNS:
            values = [run[key] * _SCALE.get(key, 1.0) for run in runs if run.get(key) is not None]
            if len(values) == len(runs):  # a mean over some of the seeds would look like one over all
                summary[arm][key] = Mean.of(values)
    return summary


def results_table(results: dict[str, Any]) -> str:
    """Return one row per arm, one for the start, and for text one for the text itself; without empty columns."""
    summary = summarise(results)
    columns = columns_of(summary.values())
    rows = {START: _single(results["start"])} | summary
    if "questions" not in results:
        rows[HUMAN] = _single(results["reference"])
    heads = ["arm", *(heading for _, heading, _ in columns)]
    return markdown_table(heads, ([arm, *cells(row, columns)] for arm, row in rows.items()))


def columns_of(rows: Iterable[dict[str, Mean]]) -> list[tuple[str, str, str]]:
    """Return the columns that a row has."""
    keys = {key for row in rows for key in row}
    return [column for column in COLUMNS if column[0] in keys]


def cells(row: dict[str, Mean], columns: Sequence[tuple[str, str, str]]) -> list[str]:
    return [row[key].shown(form) if key in row else "" for key, _, form in columns]


def _single(scores: dict[str, Any]) -> dict[str, Mean]:
    return {key: Mean(value * _SCALE.get(key, 1.0)) for key, value in scores.items() if isinstance(value, float)}


def _failures(results: dict[str, Any]) -> str:
    """Return a line for each failed run."""
    failures = results["failures"]
    lines = [f"- failed: {failure['arm']}, seed {failure['seed']}: {failure['error']}" for failure in failures]
    return "".join(f"{line}\n" for line in (["", *lines] if lines else []))


def _samples(results: dict[str, Any], *, shown: int = 8) -> str:
    """The first seed's continuations of the same prompts, or its answers to the same questions, arm beside arm."""
    first, prompts, asked = results["runs"][0]["seed"], results["prompts"], "questions" in results
    columns = {START: results["start"]["samples"]}
    columns |= {run["arm"]: run["samples"] for run in results["runs"] if run["seed"] == first}
    columns[RIGHT if asked else HUMAN] = results["reference"]["samples"]
    lines = [f"# {'Answers to the same questions' if asked else 'Continuations of the same prompts'} (seed {first})\n"]
    for i, prompt in enumerate(prompts[:shown]):
        lines.append(f"## {'Question' if asked else 'Prompt'} {i + 1}\n\n| | {_in_table(prompt)} |\n|---|---|")
        for name, texts in columns.items():
            lines.append(f"| {name} | {_in_table(texts[i * (len(texts) // len(prompts))])} |")
        lines.append("")
    return "\n".join(lines)


def _in_table(text: str) -> str:
    """Return text as the content of a Markdown table's cell, which shows it as it is: no mark-up, line ends as <br>."""
    escaped = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", html.escape(text, quote=False))
    return re.sub(r"\r\n?|\n", "<br>", escaped)


def _figure_of_text(results: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    summary = summarise(results)
    has_judge = any("judge_perplexity" in row for row in summary.values())
    rows = {arm: row["transport_cost"] for arm, row in summary.items()}
    height = max(4.4, 1.4 + 0.32 * len(rows)) + (0.25 * math.ceil((len(summary) + 1) / 6) if has_judge else 0.0)
    figure = Figure(figsize=(11.0 if has_judge else 6.0, height), layout="constrained")
    axes = figure.subplots(1, 2 if has_judge else 1, squeeze=False)[0]
    if has_judge:
        _draw_trade(axes[0], results, summary)
        figure.legend(loc="outside lower center", ncols=6, fontsize=8)
    _draw_rows(
        axes[-1], rows, form="{:.4f}", label="mean transport cost on test text\n← errors fall on more similar tokens",
        title="Distance of predictions, in the embedding's geometry",
    )  # fmt: skip
    return figure


def _figure_of_questions(results: dict[str, Any]) -> Any:
    """Return the share of right answers, and the error of the numbers, of each arm."""
    from matplotlib.figure import Figure

    summary = summarise(results)
    both = (
        ("exact_match", "{:.1f}", "exact match, %\nmore often right →", "Share of right answers"),
        ("mean_log_error", "{:.3f}", "mean log error of answered numbers\n← numbers nearer to the right one",
         "Error of the numbers"),
    )  # fmt: skip
    arms = runs_by_arm(results)
    panels = [panel for panel in both if any(panel[0] in row for row in summary.values())]
    height = max(3.2, 1.4 + 0.4 * len(summary))
    figure = Figure(figsize=(5.5 * len(panels), height), layout="constrained")
    for axes, (key, form, label, title) in zip(
        figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True
    ):
        rows = {arm: row.get(key, Mean(math.nan)) for arm, row in summary.items()}
        _draw_rows(axes, rows, form=form, label=label, title=title)
        for number, arm in enumerate(rows):
            points = [run[key] * _SCALE.get(key, 1.0) for run in arms[arm] if run.get(key) is not None]
            axes.scatter(points, [number] * len(points), color="grey", alpha=0.6, s=18, zorder=3)
    return figure


def _draw_trade(axes: Any, results: dict[str, Any], summary: dict[str, dict[str, Mean]]) -> None:
    """Every run as a point: its perplexity on real text, and the judge's perplexity on its samples."""
    x, y = "test_perplexity", "judge_perplexity"
    human = results["reference"].get(y)
    rows_with_y = {arm: row for arm, row in summary.items() if y in row}
    for number, (arm, row) in enumerate(rows_with_y.items()):
        style = {"color": f"C{number % 10}", "marker": "osD^v"[number // 10 % 5]}
        points = [(run[x], run[y]) for run in results["runs"] if run["arm"] == arm]
        axes.scatter(*zip(*points, strict=True), alpha=0.35, s=25, **style)
        axes.scatter(row[x].mean, row[y].mean, s=90, label=arm, edgecolor="black", linewidth=0.6, **style)
    if human is not None:
        axes.axhline(human, color="grey", linestyle="--", linewidth=1, label="real text under the judge")
    _log_if_wide(axes.xaxis, [row[x].mean for row in rows_with_y.values()])
    _log_if_wide(axes.yaxis, [row[y].mean for row in rows_with_y.values()] + ([] if human is None else [human]))
    axes.set_xlabel("test perplexity: real text under the model\n← predicts real text better")
    axes.set_ylabel("judge perplexity: its own text under a judge\n← more like the judge's training text")
    axes.set_title("Trade-off of each objective", fontsize=11)


def _log_if_wide(axis: Any, values: list[float]) -> None:
    """Make the axis logarithmic if the values differ by more than a factor of 8."""
    from matplotlib.ticker import LogLocator, NullFormatter

    values = [value for value in values if math.isfinite(value)]
    if values and max(values) > 8 * min(values) > 0:
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def _draw_rows(axes: Any, rows: dict[str, Mean], *, form: str, label: str, title: str) -> None:
    """A line for each name with its mean and spread, from the top downwards."""
    means = [row.mean for row in rows.values()]
    spreads = [0.0 if math.isnan(row.deviation) else row.deviation for row in rows.values()]
    axes.errorbar(means, range(len(rows)), xerr=spreads, fmt="o", markersize=8, capsize=4, color="C0")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.4, -0.8)
    axes.margins(x=0.2)
    _log_if_wide(axes.xaxis, means)
    for number, mean in enumerate(means):
        if not math.isnan(mean):
            place = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": 8}
            axes.annotate(form.format(mean), (mean, number), **place)
    axes.set_xlabel(label)
    axes.set_title(title, fontsize=11)
