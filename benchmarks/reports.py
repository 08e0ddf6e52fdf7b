"""The tables and figures of docs/reports, written from the CSV files of this folder.

    python -m benchmarks.reports        # after a benchmark has changed its CSV

`tables.md` has a table between `<!-- table NAME -->` and `<!-- end -->` for each entry of `TABLES`; pages include what
they need of it. The gallery, the gradients and the files of data have commands of their own.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.charts import panels, save
from benchmarks.measure import FOLDER, Row
from benchmarks.paper.frontier import Difference, Frontier, at_equal_recall
from benchmarks.paper.tables import half_interval

REPORTS = FOLDER.parent / "docs/reports"
PAGE = FOLDER / "tables.md"
HEAD = """# Tables of the reports

`python -m benchmarks.reports` writes them; the pages of docs/reports say what they mean.
"""
SEEDS = 3  # a complete cell has so many
LEVEL = 0.8  # arms are compared at the recall that likelihood has at this temperature


@cache
def rows_of(name: str) -> tuple[Row, ...]:
    with (FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as stream:
        return tuple(csv.DictReader(stream))


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose first column holds names, the others numbers."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(heads) - 1), *lines[1:]])


def signed(mean: float, low: float, high: float) -> str:
    """A difference with its 95 % interval, in bold where that leaves out 0."""
    text = f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


# ---- evidence --------------------------------------------------------------------------------------------------------

OBJECTIVES = {
    "emo": "`emo` (default)", "emo/random": "`emo/random` (control)", "eaft": "`eaft`", "gem:0.7": "`gem:0.7`",
    "gem:0.9": "`gem:0.9`", "power:0.5": "`power:0.5`", "dft": "`dft`", "mixce:0.5": "`mixce:0.5`",
    "mle+smoothing:0.1": "`mle+smoothing:0.1`",
}  # fmt: skip
EXPERIMENTS = {
    "enough text": "enough text", "few texts": "256 texts", "LoRA": "LoRA of rank 4", "larger model": "a larger model",
}  # fmt: skip
TRIES = {"emo_by_entropy": "EMO where uncertain (tried)", "emo_first_half": "EMO, then likelihood (tried)"}
MORE = {
    "enough text, WikiText-2": "enough text, WikiText-2", "few texts, WikiText-2": "256 texts, WikiText-2",
    "enough text, GSM8K": "enough text, GSM8K", "few texts, GSM8K": "256 texts, GSM8K",
    "larger model, 5,000 steps": "a larger model of 5,000 steps",
}  # fmt: skip


def runs_of(experiment: str, arm: str, rate: float) -> dict[int, Row]:
    """The rows of objectives.csv that are measured at more than temperature 1, by seed."""
    return {
        int(row["seed"]): row
        for row in rows_of("objectives")
        if (row["experiment"], row["arm"]) == (experiment, arm) and float(row["rate"]) == rate
        and row[f"forward T={LEVEL:g}"]
    }  # fmt: skip


def best_rate(experiment: str, arm: str) -> float:
    """The learning rate, times 1e-3, of the least divergence on validation text with the first seed.

    Of the experiments with all objectives rates beyond 3 are left out: not all objectives have them.
    """
    values = {
        float(row["rate"]): float(row["validation"])
        for row in rows_of("objectives")
        if (row["experiment"], row["arm"], row["seed"]) == (experiment, arm, "0") and row["validation"]
    }
    most = 10 if experiment in MORE else 3
    measured = [rate for rate in values if 0.3 <= rate <= most and runs_of(experiment, arm, rate)]
    return min(measured, key=values.__getitem__)


def frontier(row: Mapping[str, Any]) -> Frontier:
    temperatures = [
        float(name.partition("=")[2]) for name, value in row.items() if name.startswith("forward") and value
    ]
    forward, reverse = ([float(row[f"{side} T={t:g}"]) for t in temperatures] for side in ("forward", "reverse"))
    return Frontier(temperatures, forward, reverse, [0.0] * len(forward), [0.0] * len(forward))


Students = tuple[str, str, float]  # experiment, objective, learning rate


def at_best(experiment: str, arm: str) -> Students:
    return experiment, arm, best_rate(experiment, arm)


def difference(own: Students, other: Students) -> Difference | None:
    """Students minus others, which are of likelihood, at the recall of these at T = 0.8."""
    return difference_of_runs(runs_of(*own), runs_of(*other))


def difference_of_runs(
    ours: Mapping[int, Mapping[str, Any]], theirs: Mapping[int, Mapping[str, Any]]
) -> Difference | None:
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    level = float(np.mean([float(theirs[seed][f"forward T={LEVEL:g}"]) for seed in seeds]))
    return at_equal_recall(*([frontier(runs[seed]) for seed in seeds] for runs in (ours, theirs)), level)


def cell(apart: Difference | None) -> str:
    if apart is None:
        return "-"
    text = f"{apart.mean:+.3f}" if apart.seeds == 1 else signed(apart.mean, apart.low, apart.high)
    return text + (f" ({apart.seeds} of 3 seeds)" if apart.seeds < SEEDS else "")


def objectives_table() -> str:
    """Every objective at its best learning rate."""
    rows = [
        [name, *(cell(difference(at_best(one, arm), at_best(one, "mle"))) for one in EXPERIMENTS)]
        for arm, name in (OBJECTIVES | TRIES).items()
    ]
    return markdown(["each at its best rate", *EXPERIMENTS.values()], rows)


def one_rate_table() -> str:
    """Every objective at the learning rate 1e-3."""
    rows = [
        [name, *(cell(difference((one, arm, 1.0), (one, "mle", 1.0))) for one in EXPERIMENTS)]
        for arm, name in OBJECTIVES.items()
    ]
    return markdown(["all at 1e-3", *EXPERIMENTS.values()], rows)


def more_table() -> str:
    """EMO on more texts, and with a source that was trained for longer."""
    arms, rows = ("emo", "emo/random"), []
    for experiment, name in MORE.items():
        best = [difference(at_best(experiment, arm), at_best(experiment, "mle")) for arm in arms]
        same = [difference((experiment, arm, 1.0), (experiment, "mle", 1.0)) for arm in arms]
        rows.append([name, *map(cell, best + same)])
    heads = [f"`{arm}`, {rate}" for rate in ("best rate", "1e-3") for arm in arms]
    return markdown(["minus likelihood", *heads], rows)


REGULARISERS = (  # the row's name, the experiment, its learning rate, and the objective beside EMO
    ("256 texts, 1e-3", "few texts", 1.0, "mle"), ("label smoothing 0.1", "few texts", 1.0, "mle+smoothing:0.1"),
    ("learning rate 3e-4", "few texts", 0.3, "mle"), ("weight decay 1", "few texts, weight decay 1", 1.0, "mle"),
    ("weight decay 3", "few texts, weight decay 3", 1.0, "mle"), ("50 steps", "few texts, 50 steps", 1.0, "mle"),
    ("100 steps", "few texts, 100 steps", 1.0, "mle"), ("dropout 0.1", "few texts, dropout 0.1", 1.0, "mle"),
    ("dropout 0.3", "few texts, dropout 0.3", 1.0, "mle"), ("dropout 0.5", "few texts, dropout 0.5", 1.0, "mle"),
    ("LoRA, 1e-3", "LoRA", 1.0, "mle"), ("label smoothing 0.1", "LoRA", 1.0, "mle+smoothing:0.1"),
    ("learning rate 3e-3", "LoRA", 3.0, "mle"), ("learning rate 1e-2", "LoRA", 10.0, "mle"),
    ("weight decay 1", "LoRA, weight decay 1", 1.0, "mle"), ("weight decay 3", "LoRA, weight decay 3", 1.0, "mle"),
)  # fmt: skip


def regularisers_table() -> str:
    """Likelihood with other regularisers, and EMO with them."""
    rows = []
    for title, experiment, rate, arm in REGULARISERS:
        both = (experiment, arm, rate), (experiment, "emo", rate)
        with_emo = arm == "mle" and runs_of(*both[1])
        last = [recall_and_precision(both[1]), cell(difference(both[1], both[0]))] if with_emo else ["", ""]
        rows.append([title, recall_and_precision(both[0]), *last])
    return markdown(["recall / precision", "likelihood", "`emo`", "`emo` minus likelihood at equal recall"], rows)


def recall_and_precision(students: Students) -> str:
    """The least KL(source || student) over temperatures, and KL(student || source) at T = 0.8, means over the seeds."""
    runs = runs_of(*students).values()
    if not runs:
        return ""
    least = np.mean([min(frontier(row).forward) for row in runs])
    reverse = np.mean([float(row[f"reverse T={LEVEL:g}"]) for row in runs])
    return f"{least:.2f} / {reverse:.2f}"


def recall_table() -> str:
    """The least divergence from the source over temperatures, and the chosen learning rate."""
    rows = []
    for arm, name in {"mle": "`mle`", **OBJECTIVES}.items():
        cells = []
        for experiment in EXPERIMENTS:
            rate = best_rate(experiment, arm)
            least = [min(frontier(row).forward) for row in runs_of(experiment, arm, rate).values()]
            cells.append(f"{np.mean(least):.3f}" + (f" ({rate:g})" if rate != 1 else ""))
        rows.append([name, *cells])
    return markdown(["objective", *EXPERIMENTS.values()], rows)


COSTS = {
    "default": ("emo/all-but-the-top", "emo"),
    "all rows": ("emo/source", "emo/raw"),
    "random rows": ("emo/random",),
}


def costs_of(kind: str, experiment: str, arms: Sequence[str]) -> tuple[float, float, float] | None:
    """Mean and interval at likelihood's recall at T = 0.8; the first arm is of students, the second of others."""
    wanted = arms[-1] if kind == "fine-tuning" else arms[0]
    for row in rows_of("evidence"):
        key = (row["kind"], row["experiment"], row["arm"], row["at"])
        if key == (kind, experiment, wanted, f"MLE at T={LEVEL:g}"):
            return float(row["mean"]), float(row["low"]), float(row["high"])
    return None


def sources() -> list[tuple[str, str]]:
    kinds = ("fine-tuning", "students")
    return list(dict.fromkeys((row["kind"], row["experiment"]) for row in rows_of("evidence") if row["kind"] in kinds))


PUBLISHED = {
    "emo:clip=none/source": "as published: no clip, all rows", "emo:clip=none/all-but-the-top": "no clip",
    "emo:clip=3/source": "clip of 3, all rows", "emo:clip=3/random": "clip of 3, random rows",
    "mixce:0.2": "`mixce:0.2`",
}  # fmt: skip


def published_table() -> str:
    cells = {
        (row["experiment"], row["arm"]): signed(*(float(row[name]) for name in ("mean", "low", "high")))
        for row in rows_of("evidence")
        if row["kind"] == "earlier" and row["at"] == f"MLE at T={LEVEL:g}"
    }
    columns = [name for name in dict.fromkeys(experiment for experiment, _ in cells) if name.startswith("docstrings")]
    rows = [[name, *(cells.get((column, arm), "-") for column in columns)] for arm, name in PUBLISHED.items()]
    return markdown(["EMO", *(column.partition(", vocabulary")[0] for column in columns)], rows)


def demo_table() -> str:
    names = {"emo/all-but-the-top": "default", "emo/source": "all rows", "emo/random": "random rows"}
    rows = []
    for arm, name in names.items():
        found = {
            row["at"]: signed(*(float(row[key]) for key in ("mean", "low", "high")))
            for row in rows_of("evidence")
            if row["experiment"].endswith("(the demo)") and row["arm"] == arm
        }
        rows.append([name, found[f"MLE at T={LEVEL:g}"], found["shared range"]])
    return markdown(["EMO, cost of", "at likelihood's recall at T = 0.8", "mean over the shared range"], rows)


def draw_demo(path: Path) -> None:
    """The gains of the demo over likelihood, with their intervals."""
    figure, ((axes,),) = panels(7.5, 2.6)
    names = {"default": "EMO, default cost", "all rows": "EMO, all rows", "random rows": "EMO, random rows (control)"}
    experiment = next(name for kind, name in sources() if kind == "students" and name.endswith("(the demo)"))
    for place, cost in enumerate(names):
        gain = costs_of("students", experiment, COSTS[cost])
        assert gain is not None
        point(axes, place, gain, "0.5" if cost == "random rows" else "C0", "")
    axes.axvline(0, color="black", lw=1)
    axes.set_yticks(range(len(names)), list(names.values()))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("KL(student ‖ source) minus likelihood's, nats per token\n← nearer to the source than likelihood")
    save(figure, path, title="The text of EMO is a little nearer to the source")


def draw_gains(path: Path) -> None:
    """Both comparisons of docs/reports/evidence.md as points with intervals."""
    figure, ((left,), (right,)) = panels(8.4, 9.4, 2, 1)
    for number, (arm, name) in enumerate(OBJECTIVES.items()):
        for place, experiment in enumerate(EXPERIMENTS):
            apart = difference(at_best(experiment, arm), at_best(experiment, "mle"))
            if apart is not None and apart.seeds > 1:
                gain = (apart.mean, apart.low, apart.high)
                point(left, place + 0.09 * (number - 4), gain, f"C{number}", name.replace("`", "") * (place == 0))
    for number, (name, arms) in enumerate(COSTS.items()):
        for place, (kind, experiment) in enumerate(sources()):
            if (cost := costs_of(kind, experiment, arms)) is not None:
                point(right, place + 0.22 * (number - 1), cost, f"C{number}", name * (place == 0))
    left.set_yticks(range(len(EXPERIMENTS)), list(EXPERIMENTS.values()))
    right.set_yticks(range(len(sources())), [name for _, name in sources()])
    for axes, title in ((left, "Objectives, each at its own learning rate"), (right, "EMO, by cost and source")):
        axes.axvline(0, color="black", lw=1)
        axes.invert_yaxis()
        axes.set_xlim(-0.15, 0.3)
        axes.set_xticks((-0.1, 0, 0.1, 0.2, 0.3))
        axes.set_title(title)
        axes.set_xlabel("KL(student ‖ source) minus likelihood's at equal recall\n← better than likelihood")
        axes.legend(frameon=False)
    save(figure, path, title="")


def point(axes, y: float, gain: tuple[float, float, float], color: str, label: str) -> None:  # type: ignore[no-untyped-def]
    mean, low, high = gain
    error = [[mean - low], [high - mean]]
    axes.errorbar(mean, y, xerr=error, fmt="o", ms=4, capsize=2, lw=1, color=color, label=label or None)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def digits(value: str, count: int) -> str:
    """A positive number to so many digits."""
    return f"{float(value):#.{count}g}".rstrip(".")


def regression_table() -> str:
    arms = {
        "mle": "`mle`", "number_token:1": "`number_token:1`", "number_token:1/shuffled": "its control, shuffled values",
        "number_token:1/equal": "its control, all equal", "NTL-MSE": "NTL-MSE", "regression head": "regression head",
        "constant": "a constant",
    }  # fmt: skip
    values = {
        (row["case"], row["arm"], row["decoding"]): f"{digits(row['mean'], 3)} ± {digits(row['half_interval'], 2)}"
        for row in rows_of("number_regression")
        if row["measure"] == "mae"
    }
    cases = {"1,000 rows, 400 steps": "1,000 rows", "8,000 rows, 1,200 steps": "8,000 rows",
             "radius of cells": "radius of cells", "diabetes": "diabetes"}  # fmt: skip
    rows = []
    for arm, name in arms.items():
        cells = []
        for case in cases:
            for decoding in ("greedy", "median"):
                single = values.get((case, arm, "value"), "-") if decoding == "greedy" else ""
                cells.append(values.get((case, arm, decoding), single))
        rows.append([name, *cells])
    return markdown(["error", *(f"{name}{rule}" for name in cases.values() for rule in ("", ", median"))], rows)


def seeds_cell(name: str, case: str, arm: str, measure: str, scale: float = 1.0, form: str = ".2f") -> str:
    """Mean and half of the 95 % interval over the seeds of a CSV with a row for each."""
    values = [scale * float(r[measure]) for r in rows_of(name) if (r["case"], r["arm"]) == (case, arm) and r[measure]]
    mean = half_interval(values)
    return mean.shown(f"{{:{form}}}") if mean.count else ""


def ratings_table() -> str:
    arms = {
        "mle": "`mle`", "ordinal": "`ordinal_loss`, and 0.2 `mle`", "ordinal/shuffled": "its control, shuffled order",
        "ordinal/equal": "its control, no order", "expected_value:1": "`expected_value:1`",
        "regression head": "regression head",
    }  # fmt: skip
    measures = {"mae argmax": "most probable", "mae median": "median", "mae mean": "mean", "nll": "nll"}
    rows = []
    for arm, name in arms.items():
        pretrained = [seeds_cell("ratings", "1,500 words, one person, pretrained", arm, m) for m in measures]
        rows.append([name, *pretrained, seeds_cell("ratings", "1,500 words, one person", arm, "mae mean")])
    return markdown(["ratings", *measures.values(), "mean, from scratch"], rows)


def digits_table() -> str:
    arms = {
        "mle": "`mle`", "mle, place": "`mle`, weights by place", "number_token": "`number_token`",
        "number_token, place": "`number_token`, all weights by place",
        "number_token, distance": "`number_token`, it alone by place",
        "number_token/shuffled": "its control, shuffled values",
    }  # fmt: skip
    rows = []
    for arm, name in arms.items():
        errors = [
            seeds_cell("place_values", "regression", arm, f"mae {rule}", 1, ".1f") for rule in ("greedy", "median")
        ]
        rows.append([name, seeds_cell("place_values", "sums", arm, "exact", 100, ".0f"), *errors])
    return markdown(["three digits", "exact sums, %", "regression, error", "by the median"], rows)


def mathematics_table() -> str:
    arms = ("mle", "number_token:0.3", "number_token:0.3/equal", "number_token:1", "number_token:3",
            "expected_value:0.3", "emo+number", "emo+number/equal")  # fmt: skip
    measures = (("exact_match", 100, ".1f"), ("too_long", 100, ".0f"), ("nll", 1, ".2f"))
    rows = [
        [f"`{arm}`", *(seeds_cell("mathematics", case, arm, *measure) for case in ("digits", "multi-digit tokens")
                       for measure in measures)]
        for arm in arms
    ]  # fmt: skip
    heads = ["exact, %", "too long, %", "nll"]
    return markdown(["T5", *(f"digits: {head}" for head in heads), *(f"longer tokens: {head}" for head in heads)], rows)


def word_problems_table() -> str:
    rows = rows_of("word_problems")
    cells = [[f"`{row['arm']}`", *list(row.values())[1:]] for row in rows]
    return markdown(["GSM8K, minus `mle`", *list(rows[0])[1:]], cells)


# ---- ordered labels --------------------------------------------------------------------------------------------------

MODELS = {
    "otloss vote of networks and trees": "**vote of our networks and trees**",
    "vote of networks and trees, cross-entropy": "the same by cross-entropy",
    "vote of CLM and CORN": "vote of CLM and CORN networks",
    "otloss cumulative network": "`OrdinalNetworkClassifier(head=\"cumulative\")`",
    "cumulative network, cross-entropy": "the same by cross-entropy",
    "otloss network": "`OrdinalNetworkClassifier()`",
    "network, cross-entropy": "the same by cross-entropy",
    "otloss boosting, xgboost": "`OrdinalBoostingClassifier(booster=\"xgboost\")`",
    "boosting, xgboost, cross-entropy": "the same by cross-entropy",
    "otloss boosting, lightgbm": "`OrdinalBoostingClassifier(booster=\"lightgbm\")`",
    "boosting, lightgbm, cross-entropy": "the same by cross-entropy",
    "dlordinal CLM network": "dlordinal, CLM network", "coral-pytorch CORN network": "coral-pytorch, CORN network",
    "skordinal NNPOM": "skordinal, NNPOM network",
    "otloss cumulative": "`CumulativeLinkClassifier()`, linear",
    "skordinal OrdinalDecomposition": "skordinal, decomposition, linear",
    "statsmodels OrderedModel": "statsmodels, OrderedModel, linear", "LogisticRegression": "LogisticRegression",
    "mord LogisticAT": "mord, LogisticAT, linear", "XGBClassifier": "XGBClassifier", "LGBMClassifier": "LGBMClassifier",
}  # fmt: skip


def by_set(measure: str) -> dict[str, dict[str, float]]:
    """The mean over the holdouts, by model and set."""
    values: dict[str, dict[str, float]] = {}
    for row in rows_of("ordinal"):
        values.setdefault(row["model"], {})[row["set"]] = float(row[measure])
    return values


def ranks_table() -> str:
    ranks = {}
    for measure in ("rps_mean", "mae_mean"):
        values = by_set(measure)
        table = np.array([list(one.values()) for one in values.values()])  # (models, sets)
        ranks[measure] = dict(zip(values, stats.rankdata(table, axis=0).mean(1), strict=True))
    seconds = by_set("seconds")
    rows = [
        [
            title,
            *(f"{ranks[measure][model]:.1f}" for measure in ranks),
            f"{np.median(list(seconds[model].values())):.2f}",
        ]
        for model, title in MODELS.items()
    ]
    return markdown([f"mean rank of {len(seconds)}", "ranked probability score", "absolute error", "s per fit"], rows)


def losses_table() -> str:
    """Sets on which our loss is better than cross-entropy in the same model."""
    pairs = {
        "linear": ("otloss linear", "linear, cross-entropy"),
        "cumulative": ("otloss cumulative", "cumulative, cross-entropy"),
        "network": ("otloss network", "network, cross-entropy"),
        "cumulative network": ("otloss cumulative network", "cumulative network, cross-entropy"),
        "XGBoost": ("otloss boosting, xgboost", "boosting, xgboost, cross-entropy"),
        "LightGBM": ("otloss boosting, lightgbm", "boosting, lightgbm, cross-entropy"),
    }
    rows = []
    for name, (ours, other) in pairs.items():
        cells = []
        for measure in ("rps_mean", "mae_mean"):
            values = by_set(measure)
            signs = np.sign([values[other][one] - values[ours][one] for one in values[ours]])
            cells.append(f"{(signs > 0).sum()} / {(signs < 0).sum()}")
        rows.append([name, *cells])
    return markdown(
        ["our loss against cross-entropy, sets won / lost", "ranked probability score", "absolute error"], rows
    )


def decisions_table() -> str:
    cells = {(row["model"], row["measure"]): row["value"] for row in rows_of("decisions") if row["table"] == "diabetes"}
    measures = ("accuracy", "absolute error", "large errors, %")
    rows = [
        [model, *(f"{cells[model, f'{what}, argmax']} / {cells[model, f'{what}, median']}" for what in measures)]
        for model in dict.fromkeys(model for model, _ in cells)
    ]
    return markdown(["most probable / median", *measures], rows)


def grades_table() -> str:
    cells = {(row["model"], row["measure"]): row["value"] for row in rows_of("decisions") if row["table"] == "digits"}
    measures = list(dict.fromkeys(measure for _, measure in cells))
    rows = [[f"`{model}`" if "(" in model else model, *(cells[model, measure] for measure in measures)]
            for model in dict.fromkeys(model for model, _ in cells)]  # fmt: skip
    return markdown(["absolute error", *measures], rows)


# ---- the paper's tables ----------------------------------------------------------------------------------------------


def paper_table(name: str, measures: Mapping[str, str], rows: Mapping[str, str]) -> str:
    cells = {(row["arm"], row["measure"]): row["value"] for row in rows_of("paper_tables") if row["table"] == name}
    lines = [[title, *(cells.get((arm, measure), "") for measure in measures)] for arm, title in rows.items()]
    return markdown([name, *measures.values()], lines)


PAPER_ARMS = {"mle": "`mle`", "tailr:0.001": "`tailr:0.001`", "mixce:0.8": "`mixce:0.8`", "emo:clip=none/raw": "EMO"}


def corpora_table() -> str:
    measures = ("test perplexity", "judge's perplexity", "MAUVE, %")
    cells = {(row["table"], row["arm"], row["measure"]): row["value"] for row in rows_of("paper_tables")}
    rows = [
        [f"{corpus}, {title}", *(cells[corpus, arm, measure] for measure in measures)]
        for corpus in ("Tiny Shakespeare", "WikiText-2", "GSM8K", "docstrings")
        for arm, title in PAPER_ARMS.items()
    ]
    return markdown(["fine-tuning", *measures], rows)


def known_source_table() -> str:
    measures = {name: name for name in ("source's texts", "its own texts", "MAUVE", "ROUGE-1", "ROUGE-L")}
    arms = PAPER_ARMS | {"emo:clip=none/source": "EMO, the source's rows", "emo:clip=none/random": "EMO, random rows",
                         "the source itself": "the source itself"}  # fmt: skip
    return paper_table("text of a known source", measures, arms)


def sizes_table() -> str:
    arms = {row["arm"]: row["arm"] for row in rows_of("paper_tables") if row["table"] == "sizes"}
    return paper_table("sizes", {name: name for name in ("test perplexity", "judge's perplexity", "MAUVE, %")}, arms)


def in_context_table() -> str:
    name = "classification in context"
    arms = {row["arm"]: row["arm"] for row in rows_of("paper_tables") if row["table"] == name}
    return paper_table(name, {key: key for key in ("prompt", "label", "calibrated", "majority", "chance")}, arms)


# ---- benchmarks ------------------------------------------------------------------------------------------------------


def last(benchmark: str, case: str, name: str) -> Row | None:
    """The last row of results.csv of this case, or else of a case that begins so."""
    rows = [
        row
        for row in rows_of("results")
        if row["benchmark"] == benchmark and row["case"].startswith(case) and row["name"] == name
    ]
    exact = [row for row in rows if row["case"] == case]
    return (exact or rows or [None])[-1]


def seconds(row: Row) -> str:
    value = float(row["seconds"])
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"


def ratio(row: Row) -> str:
    value = float(row["ratio"])
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


SPEEDS = (
    ("64 exact problems 64 x 64, gradients", "solvers", "exact, 64 problems 64 x 64", "POT emd2"),
    ("exact, n = 2000 in 3-D, uniform weights, gradients", "solvers", "exact, one problem n=2000 in 3-D, uniform",
     "POT emd2"),
    ("the same, random weights", "solvers", "exact, one problem n=2000 in 3-D, random", "POT emd2"),
    ("8 clouds of 1024, on each other, gradients", "solvers", "exact, 8 moving clouds of 1024 points, normal",
     "POT emd2"),
    ("the same, apart", "solvers", "exact, 8 moving clouds of 1024 points, apart", "POT emd2"),
    ("the same, clustered", "solvers", "exact, 8 moving clouds of 1024 points, clustered", "POT emd2"),
    ("64 entropic problems 64 x 64, epsilon 0.1 of the cost's range", "solvers",
     "entropic, 64 problems 64 x 64, epsilon 0.1 of the cost range, gap 0.001", "POT sinkhorn, torch float32"),
    ("the same, epsilon 0.01", "solvers",
     "entropic, 64 problems 64 x 64, epsilon 0.01 of the cost range, gap 0.001", "POT sinkhorn, torch float32"),
    ("`wasserstein_1d`, 1024 x 1000", "solvers", "line, 1024 x 1000, one support, values", "POT wasserstein_1d, numpy"),
    ("256 pairs of small graphs, fused Gromov", "solvers", "fused Gromov, 256 pairs", "POT, a loop"),
    ("one call: `emd`, 5 bins", "single_problems", "emd, 5 x 5", "POT emd2"),
    ("`emd`, 64 bins", "single_problems", "emd, 64 x 64", "POT emd2"),
    ("`sinkhorn`, 64 bins, epsilon 0.1", "single_problems", "sinkhorn, 64 x 64, epsilon 0.1", "POT sinkhorn"),
    ("`wasserstein_1d`, 100 samples", "single_problems", "wasserstein_1d, 100 samples, order 1", "POT"),
    ("`match`, 100 x 20", "single_problems", "match, 100 x 20", "scipy"),
    ("`fused_gromov`, 30 nodes", "single_problems", "fused_gromov, 30 nodes", "POT"),
    ("`barycenter`, 50 bins, epsilon 0.01", "barycenters", "barycenter of 3 histograms, n=50, epsilon 0.01", "POT"),
    ("1000 bins, epsilon 0.001", "barycenters", "barycenter of 3 histograms, n=1000, epsilon 0.001", "POT"),
    ("images of 128 x 128", "barycenters", "barycenter of 3 images 128 x 128", "POT"),
    ("debiased, 50 bins", "barycenters", "debiased barycenter of 3 histograms, n=50, epsilon 0.01", "POT"),
)  # fmt: skip


def speeds_table() -> str:
    rows = []
    for title, benchmark, case, peer in SPEEDS:
        row = last(benchmark, case, peer)
        rows.append([title, peer, "" if row is None else ratio(row)])
    return markdown(["work", "peer", "its time over ours"], rows)


def clouds_table() -> str:
    sizes = (2000, 5000, 10_000, 20_000, 50_000, 100_000)
    names = {"otloss": "`otloss.emd`, with gradients", "POT emd2": "POT `emd2`", "POT emd2_lazy": "POT `emd2_lazy`"}
    rows = []
    for name, title in names.items():
        found = [last("scaling_clouds", f"exact, two clouds of {size} points", name) for size in sizes]
        rows.append([title, *("" if one is None else seconds(one) for one in found)])
    divergence = [
        last("scaling_clouds", f"divergence, blur 0.05, two clouds of {size} points", "otloss") for size in sizes
    ]
    rows.append(["debiased divergence, with gradients", *("" if one is None else seconds(one) for one in divergence)])
    return markdown(["points in each cloud", *(f"{size:,}" for size in sizes)], rows)


HARD_SIZES = {"16x256": "16x256", "2000": "2,000", "6000": "6,000"}
GEOMLOSS = "GeomLoss 0.5"  # its default scaling


def hard_row(kind: str, size: str, name: str, *, blur: str = "0.05") -> Row | None:
    key = ("divergence", kind, size, blur, name)
    found = [r for r in rows_of("hard_clouds") if (r["work"], r["kind"], r["size"], r["blur"], r["name"]) == key]
    return found[-1] if found and found[-1]["seconds"] else None


def hard_clouds_table() -> str:
    """Seconds of ours, and of GeomLoss with the relative error of its value."""
    rows = []
    for kind in dict.fromkeys(row["kind"] for row in rows_of("hard_clouds") if "d" not in row["size"]):
        cells = []
        for size in HARD_SIZES:
            ours, other = (hard_row(kind, size, name) for name in ("otloss", GEOMLOSS))
            late = "" if ours is None or ours["converged"] == "yes" else " (not converged)"
            cells.append("" if ours is None else f"{float(ours['seconds']):.2g}{late}")
            error = "" if other is None or not other["value_error"] else f" ({100 * float(other['value_error']):.2g}%)"
            cells.append("" if other is None else f"{float(other['seconds']):.2g}{error}")
        rows.append([kind, *cells])
    heads = [text for title in HARD_SIZES.values() for text in (title, "GeomLoss")]
    return markdown(["clouds", *heads], rows)


def many_axes_table() -> str:
    """Seconds of ours, of GeomLoss where it was measured, and of our exact solver."""
    found = dict.fromkeys((r["kind"], r["size"]) for r in rows_of("hard_clouds") if "d" in r["size"])
    rows = []
    for kind, size in found:
        timed = [hard_row(kind, size, name) for name in ("otloss", GEOMLOSS, "otloss emd")]
        points, axes = size.split("d")
        rows.append(
            [kind, f"{int(points):,} x {axes}", *("" if r is None else f"{float(r['seconds']):.2g}" for r in timed)]
        )
    return markdown(["clouds", "points x axes", "otloss", "GeomLoss", "`emd`"], rows)


def draw_hard_clouds(path: Path) -> None:
    """Error of the value over time, one point for each kind of clouds of 2,000 points."""
    figure, ((axes,),) = panels(6.5, 4)
    for number, name in enumerate(("otloss", GEOMLOSS, "GeomLoss 0.9")):
        found = [hard_row(kind, "2000", name) for kind in dict.fromkeys(r["kind"] for r in rows_of("hard_clouds"))]
        points = [(float(r["seconds"]), max(float(r["value_error"]), 1e-8)) for r in found if r and r["value_error"]]
        axes.loglog(*zip(*points, strict=True), "os^"[number], color=f"C{number}", label=name, ms=6)
    axes.set_xlabel("seconds, with the gradient")
    axes.set_ylabel("relative error of the value")
    axes.legend(frameon=False)
    save(figure, path, title="Ten kinds of clouds of 2,000 points, blur 0.05")


def token_loss_table() -> str:
    cases = (
        ("N=2048 V=32000 d=768 float32 u=0.34, GPT-2 tokens of wikitext2-valid, 2% of ids >= V dropped, our chunk 1024",
         "N=2048 V=32000 d=768 float32 u=0.35"),
        ("N=4096 V=50257 d=768 float32 u=0.31, GPT-2 tokens of wikitext2-valid, our chunk 656",
         "N=4096 V=50257 d=768 float32 u=0.31"),
    )  # fmt: skip
    names = ("dense cross-entropy", "F.linear_cross_entropy", "otloss MLE", "otloss EMO", "EMOLoss 0.0.3")
    rows = []
    for name in names:
        cells = []
        for case, memory in cases:
            # The name of torch's function contains its best chunk in this case.
            own = f"{name} c=" if name.startswith("F.") else name
            timed = [
                r for r in rows_of("results") if (r["benchmark"], r["case"]) == ("token_loss", case)
                and (r["name"].startswith(own) if own != name else r["name"] == name)
            ]  # fmt: skip
            held = last("token_loss memory", memory, timed[-1]["name"])
            cells += [
                f"{float(timed[-1]['seconds']):.2f} s",
                "" if held is None else f"{float(held['mebibytes']):.0f} MiB",
            ]
        rows.append([f"`{name}`" if name.startswith("F.") else name, *cells])
    return markdown(["tokens x vocabulary", "2048 x 32000", "extra memory", "4096 x 50257", "extra memory"], rows)


def gpu_table() -> str:
    case = "N=8192 V=128256 d=4096 bfloat16 u=0.26 GPT-2 tokens of wikitext2-valid, {} head"
    rows = []
    names = ("dense cross-entropy", "Liger", "Liger, sums in float32", "MLE", "EMO", "EMOLoss 0.0.3")
    for name in names:
        cells = []
        for head in ("trained", "frozen"):
            seconds, memory = (last(kind, case.format(head), name) for kind in ("gpu", "gpu memory"))
            assert seconds is not None
            assert memory is not None
            cells += [f"{1000 * float(seconds['seconds']):.1f} ms", f"{float(memory['mebibytes']):.0f} MiB"]
        rows.append([f"otloss {name}" if name in ("MLE", "EMO") else name, *cells])
    return markdown(["the head is", "trained", "extra memory", "frozen", "extra memory"], rows)


def boosting_times_table() -> str:
    rows = [r for r in rows_of("results") if r["benchmark"] == "boosting" and r["case"].startswith("n=100000")]
    latest = {row["name"]: row for row in rows if "+ CE" not in row["name"]}
    return markdown(
        ["100,000 rows, 5 classes, 100 rounds", "s", "of its own loss"],
        [[name, f"{float(row['seconds']):.2f}", f"{float(row['ratio']):.2f}"] for name, row in latest.items()],
    )


def number_times_table() -> str:
    wide, narrow = (
        {row["name"]: float(row["seconds"]) for row in rows_of("results") if row["benchmark"] == name}
        for name in ("numbers", "numbers narrow")
    )  # the last of each
    mle = wide["otloss MLE"]
    rows = []
    for name, base in {"number_token, 10 digits": "otloss MLE", "number_token, all numbers": "otloss MLE",
                       "emo+number": "otloss EMO", "ntloss digits": "dense cross-entropy"}.items():  # fmt: skip
        times = narrow if name in narrow else wide
        rows.append([name, base, f"{100 * (times[name] - times[base]) / mle:.1f} %"])
    return markdown(["loss", "added to", "time added, of MLE's"], rows)


# ---- pages -----------------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[], str]] = {
    "objectives": objectives_table, "one_rate": one_rate_table, "more": more_table,
    "regularisers": regularisers_table,
    "recall": recall_table, "published": published_table, "demo": demo_table,
    "regression": regression_table, "ratings": ratings_table, "digits": digits_table,
    "mathematics": mathematics_table, "word_problems": word_problems_table, "number_times": number_times_table,
    "ranks": ranks_table, "losses": losses_table, "decisions": decisions_table, "grades": grades_table,
    "corpora": corpora_table, "known_source": known_source_table, "sizes": sizes_table,
    "in_context": in_context_table, "speeds": speeds_table, "clouds": clouds_table,
    "hard_clouds": hard_clouds_table, "many_axes": many_axes_table,
    "token_loss": token_loss_table, "gpu": gpu_table, "boosting_times": boosting_times_table,
}  # fmt: skip


def tables() -> str:
    """The text of `tables.md`."""
    parts = [
        f"## {name.replace('_', ' ').capitalize()}\n\n<!-- table {name} -->\n\n{table()}\n\n<!-- end -->\n"
        for name, table in TABLES.items()
    ]
    return "\n".join([HEAD, *parts])


def main() -> None:
    PAGE.write_text(tables(), encoding="utf-8")
    draw_gains(REPORTS / "evidence.png")
    draw_demo(REPORTS / "demo_gains.png")
    draw_hard_clouds(REPORTS / "hard_clouds.png")


if __name__ == "__main__":
    main()
