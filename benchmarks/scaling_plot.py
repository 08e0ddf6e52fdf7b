"""The figure of the scaling benchmark: time per logit above, peak extra memory below; N, V and u side by side."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from benchmarks.contestants import DENSE, EMO_OURS, MLE_OURS, TORCH
from benchmarks.measure import Row

AXES = {"N": "tokens N", "V": "vocabulary V", "u": "share u of distinct labels"}
COLUMN = {"N": "tokens", "V": "vocab", "u": "u"}
FLOOR = 1e-2  # MiB: a logarithmic axis has no place for what was too small to measure
# Of Okabe and Ito's palette; the markers tell them apart in grey.
STYLES = {DENSE: ("#000000", "s"), TORCH: ("#0072B2", "^"), MLE_OURS: ("#E69F00", "o"), EMO_OURS: ("#D55E00", "D")}


def _style(name: str) -> tuple[str, str]:
    return next((style for start, style in STYLES.items() if name.startswith(start)), ("#888888", "x"))


def _short(number: float) -> str:
    return f"{number / 1000:g}k" if number and number % 1000 == 0 else f"{number:g}"


def _nanoseconds_per_logit(row: Row) -> float:
    return 1e9 * float(row["seconds"]) / (int(row["tokens"]) * int(row["vocab"]))


def _mebibytes(row: Row) -> float:
    return max(float(row["mebibytes"]), FLOOR)


def _lines(above: Axes, below: Axes, rows: list[Row], axis: str) -> None:
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name and row["axis"] == axis and row["seconds"]]
        mine.sort(key=lambda row: float(row[COLUMN[axis]]))
        x = [float(row[COLUMN[axis]]) for row in mine]
        color, marker = _style(name)
        for ax, quantity in ((above, _nanoseconds_per_logit), (below, _mebibytes)):
            ax.plot(x, [quantity(row) for row in mine], color=color, marker=marker, markersize=4.5, linewidth=1.5,
                    label=name.replace(" c=", ", chunks of "))  # fmt: skip


def _dress(above: Axes, below: Axes, rows: list[Row], axis: str) -> None:
    below.set_xlabel(AXES[axis])
    if axis != "u":
        below.set_xscale("log", base=2)
        places = sorted({float(row[COLUMN[axis]]) for row in rows if row["axis"] == axis})
        below.set_xticks(places, [_short(place) for place in places])
        below.tick_params(axis="x", labelsize=8)
    below.set_yscale("log")
    below.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for ax in (above, below):
        ax.minorticks_off()
        ax.grid(color="0.9", linewidth=0.7)
        ax.spines[["top", "right"]].set_visible(False)


def _note_skipped(ax: Axes, rows: list[Row], axis: str) -> None:
    skipped = [row for row in rows if row["axis"] == axis and row["note"]]
    if skipped:
        places = ", ".join(_short(float(row[COLUMN[axis]])) for row in skipped)
        ax.text(0.97, 0.04, f"{skipped[0]['name']} at {axis} = {places}\n{skipped[0]['note']}",
                transform=ax.transAxes, ha="right", va="bottom", fontsize=8, color="0.35")  # fmt: skip


def _fixed(rows: list[Row], axis: str) -> str:
    row = next(row for row in rows if row["axis"] == axis)
    labels = "uniform over k ids" if axis == "u" else row["labels"].split(",")[0]
    sizes = ", ".join(f"{name} = {int(row[COLUMN[name]])}" for name in ("N", "V") if name != axis)
    return f"{sizes}\nlabels: {labels}"


def draw(rows: list[Row], file: Path) -> None:
    """Write the figure of these rows of scaling.csv."""
    figure = Figure(figsize=(10, 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(AXES), sharex="col", sharey="row")
    for (above, below), axis in zip(zip(*grid, strict=True), AXES, strict=True):
        _lines(above, below, rows, axis)
        _dress(above, below, rows, axis)
        _note_skipped(below, rows, axis)
        above.set_title(_fixed(rows, axis), fontsize=9)
    grid[0][0].set_ylim(bottom=0)
    grid[0][0].set_ylabel("forward + backward,\ntime per logit (ns)")
    grid[1][0].set_ylabel("peak memory beyond inputs\nand gradients (MiB)")
    handles, names = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
    first = rows[0]
    title = f"Token losses from hidden states of width {first['width']}, float32"
    figure.suptitle(f"{title}\n{first['hardware']}, torch {first['torch']}", fontsize=10)
    figure.savefig(file, dpi=130)
