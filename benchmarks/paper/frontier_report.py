"""What frontiers say: a table, a figure with the arms named at their curves, and which differences are real."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.folders import write_json, write_text
from benchmarks.paper.frontier import Difference, Frontier, at_equal_recall, over_range
from benchmarks.paper.tables import markdown_table, mean_cell, runs_by_arm, save_figure

Frontiers = Mapping[str, Sequence[Frontier]]
_Label = tuple[float, float, str, str]  # x, y, text, color


def frontiers_of(results: dict[str, Any]) -> dict[str, list[Frontier]]:
    """Return the frontiers of each arm, one for each seed, from the results of `run_oracle`."""
    names = [field.name for field in fields(Frontier)]
    return {
        arm: [Frontier(*(run[name] for name in names)) for run in runs] for arm, runs in runs_by_arm(results).items()
    }


NOTES = """\
- Text is sampled from the known source. KL(source ‖ student), *forward*, says what of it a student misses (recall);
  KL(student ‖ source), *reverse*, what the student writes that the source would not (precision). Both are in nats per
  token, exact up to the sampling of {texts} texts; standard errors at T = 1: forward {forward_error:.3f}, reverse
  {reverse_error:.3f}. All arms of a seed share start, batches and random numbers.
- An arm is one training; sampling temperatures make a curve of it. *At the recall of {baseline} at T*: the least
  reverse KL of the arm minus the one of {baseline}, where both have at most this forward KL. Below 0 the arm is better.
  In brackets a 95 % interval over {seeds} seeds (Student's t); in bold where it leaves out 0. *Mean over the shared
  range*: the area between the two curves over the width of the range that both cover.
- *MAUVE* at T = 1 with features of the source; two samples of the source itself have {ceiling:.3f}. It is noisy: the
  standard deviation over k-means seeds is some {mauve_spread:.3f}.
- *k-NN precision* at T = 1 is the share of the student's texts that lie, by the same features, within the distance of a
  text of the source to its fourth nearest neighbour; *k-NN recall* is the reverse. *Cluster JS* is the Jensen-Shannon
  divergence in nats between the shares of both sets in the clusters of MAUVE. Two samples of the source have
  {neighbour_precision:.3f}, {neighbour_recall:.3f} and {cluster_js:.3f}: a perfect student has no better ones.
"""

AT_ONE = {  # columns at temperature 1, which the source itself has too
    "mauve": "MAUVE ↑", "neighbour_precision": "k-NN precision ↑", "neighbour_recall": "k-NN recall ↑",
    "cluster_js": "cluster JS ↓", "rouge_1": "ROUGE-1 ↑", "rouge_l": "ROUGE-L ↑",
}  # fmt: skip


def write_frontiers(results: dict[str, Any], folder: Path, *, title: str = "Frontiers of recall and precision") -> str:
    """Write report.md, report.json and (with matplotlib) frontier.png; return the table and what it says.

    The baseline is "mle", or the first arm if that is not among them.
    """
    frontiers = frontiers_of(results)
    baseline = "mle" if "mle" in frontiers else next(iter(frontiers))
    sentences = "\n".join(f"- {line}" for line in conclusions(frontiers, baseline))
    table = f"{frontier_table(results, baseline)}\n{sentences}\n"
    write_json(folder / "report.json", results)
    picture = save_figure(lambda: draw_frontiers(frontiers, baseline=baseline), folder / "frontier.png")
    write_text(
        folder / "report.md",
        f"# {title}\n\n{picture}\n{table}\n{_notes(results, baseline)}\n{_points(results)}\n{table_at_one(results)}",
    )
    return table


def _notes(results: dict[str, Any], baseline: str) -> str:
    runs = [run for run in results["runs"] if run["arm"] == baseline]
    temperatures = list(runs[0]["temperatures"])
    at = temperatures.index(1.0) if 1.0 in temperatures else 0
    return NOTES.format(
        texts=results["settings"]["texts"], baseline=baseline, seeds=len(runs), ceiling=results["mauve_ceiling"],
        mauve_spread=statistics.fmean(run.get("mauve_spread", math.nan) for run in runs),
        **{name: statistics.fmean(run[name][at] for run in runs) for name in ("forward_error", "reverse_error")},
        **results["overlap_ceiling"],
    )  # fmt: skip


def _points(results: dict[str, Any]) -> str:
    """Return a table of forward and reverse KL of each arm at each temperature, means over seeds."""
    temperatures = results["settings"]["temperatures"]
    rows = []
    for arm, runs in runs_by_arm(results).items():
        means = {name: np.mean([run[name] for run in runs], 0) for name in ("forward", "reverse")}
        rows.append([arm, *(f"{x:.3f} / {y:.3f}" for x, y in zip(means["forward"], means["reverse"], strict=True))])
    return markdown_table(["forward / reverse KL", *(f"T = {t:g}" for t in temperatures)], rows)


def table_at_one(results: dict[str, Any]) -> str:
    """Return a Markdown table of scores of texts at temperature 1; "" if it was not measured.

    Perplexities are of the source's texts under the student, and of the student's texts under the source. With
    MAUVE and ROUGE they are the scores of Table 2 of the EMO paper.
    """
    temperatures = list(results["settings"]["temperatures"])
    if 1.0 not in temperatures:
        return ""
    at = temperatures.index(1.0)
    heads = ["arm at T = 1", "perplexity of the source's texts ↓", "of its own under the source ↓", *AT_ONE.values()]
    rows = []
    for arm, runs in runs_by_arm(results).items():
        texts, own = ([math.exp(r[name][at]) for r in runs] for name in ("cross_entropy", "reverse_cross_entropy"))
        scores = (mean_cell([run[name] for run in runs]) for name in AT_ONE)
        rows.append([arm, mean_cell(texts, "{:.2f}"), mean_cell(own, "{:.2f}"), *scores])
    source = {"mauve": results["mauve_ceiling"]} | results["overlap_ceiling"] | results["rouge_ceiling"]
    rows.append(["the source itself", "", "", *(f"{source[name]:.3f}" for name in AT_ONE)])
    return markdown_table(heads, rows)


def levels_of(baseline: Sequence[Frontier]) -> dict[float, float]:
    """Return the mean forward divergence of the baseline at its temperature of the best recall and all lower ones."""
    temperatures = baseline[0].temperatures
    means = [statistics.fmean(curve.forward[k] for curve in baseline) for k in range(len(temperatures))]
    best = temperatures[int(np.argmin(means))]
    return {t: mean for t, mean in zip(temperatures, means, strict=True) if t <= best}


def frontier_table(results: dict[str, Any], baseline: str = "mle") -> str:
    """Return a Markdown table: how far each arm lies below the baseline's curve, at equal recall and on average.

    Raises:
        ValueError: the baseline is not among the arms.
    """
    frontiers, runs = frontiers_of(results), runs_by_arm(results)
    if baseline not in frontiers:
        raise ValueError(f"the baseline is {baseline!r}, expected one of the arms {list(frontiers)}.")
    other = frontiers[baseline]
    levels = levels_of(other)
    heads = ["arm", "least forward KL", "reverse KL at T = 1", "MAUVE at T = 1", "mean over the shared range"]
    heads += [f"at the recall of {baseline} at T = {t:g}" for t in levels]
    rows = []
    for arm, curves in frontiers.items():
        at_one = [c.reverse[list(c.temperatures).index(1.0)] for c in curves if 1.0 in c.temperatures]
        scores = [run["mauve"] for run in runs[arm] if "mauve" in run]
        cells = [arm, mean_cell([min(c.forward) for c in curves]), mean_cell(at_one), mean_cell(scores)]
        if arm == baseline:
            cells += ["0"] * (len(levels) + 1)
        else:
            cells.append(_cell(over_range(curves, other)))
            cells += [_cell(at_equal_recall(curves, other, level)) for level in levels.values()]
        rows.append(cells)
    return markdown_table(heads, rows)


def conclusions(frontiers: Frontiers, baseline: str = "mle") -> list[str]:
    """Return a sentence for each arm, and each level of recall, that differs from the baseline beyond the interval."""
    other = frontiers[baseline]
    sentences = []
    for arm, curves in frontiers.items():
        if arm == baseline:
            continue
        everywhere = over_range(curves, other)
        places = {"On average over the range of recall that both cover": everywhere}
        smallest = min(min(curve.forward) for curve in curves)
        levels = levels_of(other)
        for temperature, level in levels.items():
            places[f"At the recall of {baseline} at T = {temperature:g}"] = at_equal_recall(curves, other, level)
        missed = [f"{temperature:g}" for temperature, level in levels.items() if level < smallest]
        if not any(places.values()):
            sentences.append(f"{arm} and {baseline} share no recall in all seeds: nothing can be compared.")
        elif missed:
            sentences.append(f"{arm} does not reach the recall of {baseline} at T = {', '.join(missed)}.")
        sentences += [f"{place}, {arm} {_sentence(gap)}" for place, gap in places.items() if gap and gap.is_real]
    return sentences or ["No difference is beyond its 95 % interval."]


def _sentence(difference: Difference) -> str:
    low, high = sorted((abs(difference.low), abs(difference.high)))
    place = "nearer to" if difference.mean < 0 else "farther from"
    return (
        f"writes {abs(difference.mean):.3f} nats per token {place} the "
        f"source (95 % interval {low:.3f} to {high:.3f}, {difference.seeds} seeds)."
    )


def draw_frontiers(frontiers: Frontiers, *, baseline: str = "mle") -> Any:
    """Return a matplotlib figure: the curves, and how far each lies from the baseline's at equal recall."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    other = frontiers[baseline]
    low = min(curve.efficient()[0][0] for curve in other)
    last = max(curve.efficient()[0][-1] for curves in frontiers.values() for curve in curves)
    high = min(last, max(curve.covered[1] for curve in other))
    grid = np.linspace(low, high, 100)
    labels: list[_Label] = []
    for number, (arm, curves) in enumerate(frontiers.items()):
        color = f"C{number % 10}" if arm != baseline else "black"
        forward, reverse = (np.mean([getattr(c, name) for c in curves], 0) for name in ("forward", "reverse"))
        left.plot(forward, reverse, "o-", color=color, ms=3, lw=1.2, label=arm)
        for temperature, x, y in zip(curves[0].temperatures, forward, reverse, strict=True):
            if arm == baseline:
                place = {"xytext": (-4, -3), "textcoords": "offset points", "ha": "right", "fontsize": 7}
                left.annotate(f"T={temperature:g}", (x, y), **place)
        apart = np.array([c.at(grid) - o.at(grid) for c, o in zip(curves, other, strict=True)])
        mean = apart.mean(0)
        right.plot(grid, mean, color=color, lw=1.2)
        if len(curves) > 1 and arm != baseline:
            half = apart.std(0, ddof=1)
            right.fill_between(grid, mean - half, mean + half, color=color, alpha=0.12, lw=0)
        shown = np.flatnonzero(np.isfinite(mean))
        if len(shown):
            labels.append((grid[shown[-1]], mean[shown[-1]], arm, color))
    left.margins(x=0.15)
    left.legend(fontsize=8, frameon=False)
    width = max(high - low, 1e-3)
    right.set_xlim(low - 0.02 * width, high + 0.3 * width)
    _label(right, labels)
    left.set_xlabel("KL(source ‖ model), nats per token\n← misses less of the source")
    left.set_ylabel("KL(model ‖ source), nats per token\n← writes less that the source would not")
    left.set_title("Each curve: one objective, over sampling temperatures T")
    right.set_xlabel("KL(source ‖ model), nats per token")
    right.set_ylabel(f"KL(model ‖ source) minus the one of {baseline}\n← better than {baseline} at the same recall")
    right.set_title("Difference at equal recall (band: deviation over seeds)")
    return figure


def _label(axes: Any, labels: Sequence[_Label]) -> None:
    """Write the names beside the ends of their curves, moved apart vertically where they would overlap."""
    low, high = axes.get_ylim()
    gap, last = 0.04 * (high - low), -math.inf
    for x, y, text, color in sorted(labels, key=lambda label: label[1]):
        last = max(y, last + gap)
        axes.annotate(text, (x, last), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8, color=color)


def _cell(difference: Difference | None) -> str:
    if difference is None:
        return "-"
    if difference.seeds == 1:
        return f"{difference.mean:+.3f} (1 seed)"
    text = f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"
    return f"**{text}**" if difference.is_real else text
