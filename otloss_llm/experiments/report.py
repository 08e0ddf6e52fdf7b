"""The report of a comparison: a Markdown table (mean and standard deviation over seeds), a figure, JSON, samples."""

from __future__ import annotations

import html
import math
import re
import statistics
from pathlib import Path
from typing import Any

from otloss_llm.experiments.compare import HUMAN, RIGHT, START
from otloss_llm.training.folders import write_json, write_text

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
    ("number_token_accuracy", "number tokens right, % ↑", "{:.1f}"),
    ("number_token_log_error", "log error of number tokens ↓", "{:.3f}"),
    ("distinct_2", "distinct-2", "{:.3f}"),
    ("distinct_3", "distinct-3", "{:.3f}"),
    ("seconds_per_step", "ms / step", "{:.0f}"),
)
_SHARES = ("exact_match", "number_accuracy", "order_of_magnitude_accuracy", "answered", "number_token_accuracy")
_SCALE = dict.fromkeys(_SHARES, 100.0) | {"seconds_per_step": 1000.0}

NOTES_ON_NUMBERS = """\
- `number_token`: likelihood, and beside it the distance of the number tokens that are expected from the right one;
  `/mse`, `/log`, ...: form and scaling of that distance; `/span-log`: between the whole numbers that tokens make.
  `emo+number`: EMO whose cost between number tokens is their distance, and the embedding's everywhere else.
"""
NOTES_ON_NUMBER_TOKENS = """\
- *number tokens right*: share of the number tokens in the {where} for which the likeliest token has the right value y,
  given the true text before; *log error of number tokens*: |s(v) - s(y)|, s(v) = sign(v) log(1 + |v|), of the token
  values v expected under the model's distribution among number tokens.
"""

NOTES_ON_QUESTIONS = """\
- Mean ± standard deviation over {seeds} seed{plural} of training; a seed sets the order of batches, for all arms alike.
- {count} test questions, answered greedily (the likeliest token each time); answers are read in the style `{style}`.
- *exact match*: share of answers that are right. {numeric} of the right answers are numbers, and what follows is about
  these. *number accuracy*: share with the right value; *right order of magnitude*: with the right sign, and within a
  factor of √10. *answered*: share for which a number was predicted at all; in the shares before it, the rest are wrong.
- With the right value y and the predicted p: *absolute error* |p - y|, of which a few wild answers decide the mean;
  *capped relative error*: mean of min(|p - y| / max(|y|, 1), 1), 1 where no number was predicted; *log error*: mean of
  |s(p) - s(y)|, s(v) = sign(v) log(1 + |v|). Absolute and log error are over what was answered, to be read beside it.
- *nll of answers*: in nats per token, given the true answer up to there; its end included.
- An empty cell: one of the seeds has no such value, as where it answered no question with a number.
- {cut_short} of the right answers are longer than the {longest} tokens that an answer may have, and cannot be given.
- {seen} of the test questions are among the training questions too, and may be known by heart.
{numbers}- `/random`: with a random embedding, a control without semantics.
- `{start}`: where every arm begins, measured in the same way.
- *ms / step*: median wall time of an optimizer step of the whole training, as measured on this machine in this run.
"""

NOTES = """\
- Mean ± standard deviation over {seeds} seed{plural}; a seed sets the order of batches and the samples, for all
  arms alike.
- *test perplexity*: of held-out text under the model itself, at the temperature of the arm. *judge perplexity*: of
  sampled continuations under an independent model. It falls both when samples become better and when they become
  blander: read it together with distinct-n (share of different n-grams), and against `{human}` (what the judge makes of
  the real continuations).
- *transport cost*: mean exact earth mover's distance between prediction and token on the test text, in the geometry of
  the start model's head (1 - cosine). It also falls when predictions merely retreat to frequent tokens: low cost at a
  high test perplexity is collapse.
- `/random`: EMO with a random embedding, a control without semantics. `/T=...`: the same trained model at that
  temperature (logits / T) in every column, a control for sharpening alone.
{numbers}- Samples continue {prompts} beginnings of the test text.
- `{start}`: where every arm begins, measured in the same way.
- *ms / step*: median wall time of an optimizer step of the whole training, as measured on this machine in this run.
"""


def write_report(results: dict[str, Any], folder: Path, *, title: str = "Comparison of objectives") -> str:
    """Write report.md, report.json, samples.md and (with matplotlib) figure.png; returns table and failures."""
    table = markdown_table(results) + _failures(results)
    notes = _by_kind(results) + _notes(results)
    figure = _write_figure(results, folder / "figure.png")
    picture = "\n![figure](figure.png)\n" if figure else '\n(no figure: pip install "otloss[plot]")\n'
    write_json(folder / "report.json", results)
    write_text(folder / "samples.md", _samples(results))
    shown = "Answers" if "questions" in results else "Samples"
    links = f"{shown} side by side: [samples.md](samples.md). Every number and setting: report.json."
    write_text(folder / "report.md", f"# {title}\n\n{table}\n{notes}{picture}\n{links}\n")
    return table


def _notes(results: dict[str, Any]) -> str:
    seeds = len({run["seed"] for run in results["runs"]})
    told = results.get("questions")
    shared = {"seeds": seeds, "plural": "" if seeds == 1 else "s", "start": START}
    shared["numbers"] = _notes_on_numbers(results["runs"], "test text" if told is None else "right answers")
    if told is None:
        return NOTES.format(human=HUMAN, prompts=len(results["prompts"]), **shared)
    numeric = round(results["start"]["numeric"] * told["count"])
    return NOTES_ON_QUESTIONS.format(
        numeric=numeric, longest=results["settings"]["max_new_tokens"],
        **{key: told[key] for key in ("count", "style", "cut_short", "seen")}, **shared,
    )  # fmt: skip


def _notes_on_numbers(runs: list[dict[str, Any]], where: str) -> str:
    """What is said of number tokens and of the arms that know them, where there are any."""
    measured = any("number_token_accuracy" in run for run in runs)
    arms = any("number" in run["arm"] for run in runs)
    return (NOTES_ON_NUMBER_TOKENS.format(where=where) if measured else "") + (NOTES_ON_NUMBERS if arms else "")


def _by_kind(results: dict[str, Any]) -> str:
    """Exact match of each kind of question, where there are several."""
    kinds = results.get("questions", {}).get("kinds", {})
    if len(kinds) < 2:
        return ""
    arms = list(dict.fromkeys(run["arm"] for run in results["runs"]))
    lines = ["", "Exact match, %, by kind of question:", "", f"| kind | questions | {' | '.join(arms)} |"]
    lines.append("|---|---:|" + "---:|" * len(arms))
    for kind, count in kinds.items():
        of_arms = [[run["by_kind"][kind] for run in results["runs"] if run["arm"] == arm] for arm in arms]
        lines.append(
            f"| {_in_table(kind)} | {count} | " + " | ".join(f"{100 * statistics.fmean(x):.1f}" for x in of_arms) + " |"
        )
    return "\n".join(lines) + "\n\n"


def summarise(results: dict[str, Any]) -> dict[str, dict[str, tuple[float, float]]]:
    """`{arm: {key: (mean, standard deviation over seeds)}}`, arms in the order they were asked for."""
    summary: dict[str, dict[str, tuple[float, float]]] = {}
    for arm in dict.fromkeys(run["arm"] for run in results["runs"]):
        runs = [run for run in results["runs"] if run["arm"] == arm]
        summary[arm] = {}
        for key, *_ in COLUMNS:
            values = [run[key] * _SCALE.get(key, 1.0) for run in runs if run.get(key) is not None]
            if len(values) == len(runs):  # a mean over some of the seeds would not be told from one over all
                spread = statistics.stdev(values) if len(values) > 1 else math.nan
                summary[arm][key] = (statistics.fmean(values), spread)
    return summary


def markdown_table(results: dict[str, Any]) -> str:
    """One row an arm, one for the start, and of text one for the text itself; no column without a value."""
    summary = summarise(results)
    columns = [column for column in COLUMNS if any(column[0] in row for row in summary.values())]
    headings = [heading + _counts(key, summary, results["runs"]) for key, heading, _ in columns]
    lines = [f"| arm | {' | '.join(headings)} |", "|---|" + "---:|" * len(columns)]
    rows = {START: _single(results["start"])} | summary
    if "questions" not in results:
        rows[HUMAN] = _single(results["reference"])
    for arm, row in rows.items():
        lines.append(f"| {arm} | " + " | ".join(_cell(row.get(key), form) for key, _, form in columns) + " |")
    return "\n".join(lines) + "\n"


def _counts(key: str, summary: dict[str, dict[str, Any]], runs: list[dict[str, Any]]) -> str:
    """Over how many number tokens a column is, and how many arms it has, unless it has all."""
    tokens = {run["number_tokens"] for run in runs if key.startswith("number_token_") and "number_tokens" in run}
    have = sum(key in row for row in summary.values())
    said = [f"n = {min(tokens)}"] if len(tokens) == 1 else []
    said += [f"{have} of {len(summary)} arms"] if have < len(summary) else []
    return f" ({', '.join(said)})" if said else ""


def _single(scores: dict[str, Any]) -> dict[str, tuple[float, float]]:
    return {key: (value * _SCALE.get(key, 1.0), math.nan) for key, value in scores.items() if isinstance(value, float)}


def _cell(value: tuple[float, float] | None, form: str) -> str:
    if value is None:
        return ""
    mean, spread = value
    return form.format(mean) + ("" if math.isnan(spread) else f" ± {form.format(spread)}")


def _failures(results: dict[str, Any]) -> str:
    """Which runs the table goes without."""
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
    """Text as the content of a Markdown table's cell, which shows it as it is: no mark-up, line ends as <br>."""
    escaped = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", html.escape(text, quote=False))
    return re.sub(r"\r\n?|\n", "<br>", escaped)


def _write_figure(results: dict[str, Any], path: Path) -> bool:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    figure = _figure_of_questions(results) if "questions" in results else _figure_of_text(results)
    figure.savefig(path, dpi=130)
    return True


def _figure_of_text(results: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    summary = summarise(results)
    judged = any("judge_perplexity" in row for row in summary.values())
    rows = {arm: row["transport_cost"] for arm, row in summary.items()}
    height = max(4.4, 1.4 + 0.32 * len(rows)) + (0.25 * math.ceil((len(summary) + 1) / 6) if judged else 0.0)
    figure = Figure(figsize=(11.0 if judged else 6.0, height), layout="constrained")
    axes = figure.subplots(1, 2 if judged else 1, squeeze=False)[0]
    if judged:
        _draw_trade(axes[0], results, summary)
        figure.legend(loc="outside lower center", ncols=6, fontsize=8)
    _draw_rows(
        axes[-1], rows, form="{:.4f}", label="mean transport cost on test text\n← misses land on more similar tokens",
        title="How far predictions miss, in the embedding's geometry",
    )  # fmt: skip
    return figure


def _figure_of_questions(results: dict[str, Any]) -> Any:
    """How often each arm is right, and how far off its numbers are."""
    from matplotlib.figure import Figure

    summary = summarise(results)
    both = (
        ("exact_match", "{:.1f}", "exact match, %\nmore often right →", "How often answers are right"),
        ("mean_log_error", "{:.3f}", "mean log error of answered numbers\n← numbers nearer to the right one",
         "How far off the numbers are"),
    )  # fmt: skip
    panels = [panel for panel in both if any(panel[0] in row for row in summary.values())]
    height = max(3.2, 1.4 + 0.4 * len(summary))
    figure = Figure(figsize=(5.5 * len(panels), height), layout="constrained")
    for axes, (key, form, label, title) in zip(
        figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True
    ):
        rows = {arm: row.get(key, (math.nan, math.nan)) for arm, row in summary.items()}
        _draw_rows(axes, rows, form=form, label=label, title=title)
        for number, arm in enumerate(rows):
            seen = [run[key] for run in results["runs"] if run["arm"] == arm and run.get(key) is not None]
            points = [value * _SCALE.get(key, 1.0) for value in seen]
            limits = usual_range([mean for mean, _ in rows.values()])
            places = [_into(point, limits) for point in points]
            axes.scatter(places, [number] * len(points), color="grey", alpha=0.6, s=18, zorder=3)
    return figure


def _draw_trade(axes: Any, results: dict[str, Any], summary: dict[str, dict[str, tuple[float, float]]]) -> None:
    """Every run as a point: how well it predicts real text, and what the judge makes of its own text."""
    x, y = "test_perplexity", "judge_perplexity"
    human = results["reference"].get(y)
    limits: dict[str, tuple[float, float] | None] = {}
    for axis, key in ((axes.xaxis, x), (axes.yaxis, y)):
        shown = [row[key][0] for row in summary.values() if y in row]
        limits[key] = usual_range(shown)
        near = [value for value in shown if _into(value, limits[key]) == value]
        _spread_out(axis, near + ([human] if key == y and human is not None else []))
    for number, (arm, row) in enumerate(summary.items()):
        if y not in row:
            continue
        style = {"color": f"C{number % 10}", "marker": "osD^v"[number // 10 % 5]}
        runs = [run for run in results["runs"] if run["arm"] == arm]
        points = [(_into(run[x], limits[x]), _into(run[y], limits[y])) for run in runs]
        axes.scatter(*zip(*points, strict=True), alpha=0.35, s=25, **style)
        place = _into(row[x][0], limits[x]), _into(row[y][0], limits[y])
        axes.scatter(*place, s=90, label=arm, edgecolor="black", linewidth=0.6, **style)
        if place != (row[x][0], row[y][0]):
            text = f"{arm}, off the axes: {row[x][0]:.4g}, {row[y][0]:.4g}"
            _note_outlier(axes, place, text, height=0.7 - 0.08 * (number % 8))
    if human is not None:
        axes.axhline(human, color="grey", linestyle="--", linewidth=1, label="real text under the judge")
    axes.set_xlabel("test perplexity: real text under the model\n← predicts real text better")
    axes.set_ylabel("judge perplexity: its own text under a judge\n← more like what the judge has read")
    axes.set_title("What each objective trades", fontsize=11)


def usual_range(values: list[float]) -> tuple[float, float] | None:
    """Where the axis of a figure ends, a little outside what is usual; None where no value lies far off.

    Far off: more than 8 median absolute deviations from the median, so that with it the axis would be more than 4 times
    as long as without.

    Example:
        >>> usual_range([1.0, 1.2, 1.1, 50.0]), usual_range([1.0, 1.2, 1.1])
        ((0.96, 1.24), None)
    """
    values = [value for value in values if math.isfinite(value)]
    if len(values) < 3:
        return None
    middle = statistics.median(values)
    deviation = max(statistics.median(abs(value - middle) for value in values), 1e-3 * abs(middle))
    near = [value for value in values if abs(value - middle) <= 8 * deviation]
    width = max(max(near) - min(near), deviation)
    if len(near) == len(values) or max(values) - min(values) <= 4 * width:
        return None
    return round(min(near) - 0.2 * width, 10), round(max(near) + 0.2 * width, 10)


def _into(value: float, limits: tuple[float, float] | None) -> float:
    """The value, or the end of the axis that it lies beyond."""
    return value if limits is None or math.isnan(value) else min(max(value, limits[0]), limits[1])


def _note_outlier(axes: Any, place: tuple[float, float], text: str, *, height: float) -> None:
    """Say at the end of an axis what lies beyond it, with an arrow to the point."""
    axes.annotate(
        text, place, xytext=(0.5, height), textcoords="axes fraction", ha="center", fontsize=8, color="dimgrey",
        arrowprops={"arrowstyle": "->", "color": "dimgrey"},
    )  # fmt: skip


def _spread_out(axis: Any, values: list[float]) -> None:
    """A logarithmic axis where one arm lies so far off that the others would fall together."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if max(values) > 8 * min(values) > 0:
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def _draw_rows(axes: Any, rows: dict[str, tuple[float, float]], *, form: str, label: str, title: str) -> None:
    """A line for each name with its mean and spread, from the top downwards."""
    means = [mean for mean, _ in rows.values()]
    spreads = [0.0 if math.isnan(spread) else spread for _, spread in rows.values()]
    limits = usual_range(means)
    places = [_into(mean, limits) for mean in means]
    # The spread of a point at the end of the axis would be drawn about a place where it is not.
    shown = [spread if place == mean else 0.0 for place, mean, spread in zip(places, means, spreads, strict=True)]
    axes.errorbar(places, range(len(rows)), xerr=shown, fmt="o", markersize=8, capsize=4, color="C0")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.4, -0.8)
    axes.margins(x=0.2)
    for number, mean in enumerate(means):
        if not math.isnan(mean):
            place = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": 8}
            beyond = "" if places[number] == mean else " →" if mean > places[number] else "← "
            text = f"{form.format(mean)}{beyond}" if beyond != "← " else f"{beyond}{form.format(mean)}"
            axes.annotate(text, (places[number], number), **place)
    if limits is not None:
        margin = 0.15 * (limits[1] - limits[0])
        axes.set_xlim(limits[0] - margin, limits[1] + margin)
    axes.set_xlabel(label)
    axes.set_title(title, fontsize=11)
