"""Time and peak memory of the token losses over the number of tokens N, the vocabulary V, and the distinct labels u.

Forward and backward pass from hidden states of width 256. Every measurement is written to scaling.csv at once, and the
figure is drawn from that file at the end, so an interrupted run can be resumed (`--resume`).
"""

from __future__ import annotations

import csv
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.charts import line, panels, save
from benchmarks.contestants import DENSE, EMO_OURS, HAS_TORCH, MLE_OURS, TORCH, Problem, steps, torch_name
from benchmarks.labels import Labels, labels_for, share_distinct, uniform
from benchmarks.measure import MIB, Row, Settings, append, hardware, say, timed_rounds
from benchmarks.memory import extra_bytes
from otloss._checks import install_hint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROUNDS, SMALL_ROUNDS = 3, 1
WIDTH = 256
MAX_BYTES = 8 * 2**30  # dense cross-entropy is skipped above this
CHUNK = 512  # for F.linear_cross_entropy: near its best at most sizes
FIELDS = ("date", "axis", "tokens", "vocab", "width", "u", "labels", "name", "seconds", "mebibytes", "note", "rounds",
          "hardware", "torch")  # fmt: skip
CSV, PNG = "scaling.csv", "scaling.png"
SKIPPED = f"skipped: over {MAX_BYTES / 2**30:.0f} GiB"


@dataclass(frozen=True)
class Point:
    """One measurement on one axis ("N", "V" or "u"), and the source of its labels."""

    axis: str
    tokens: int
    vocab: int
    labels: Callable[[Settings], Labels]


def points(small: bool) -> list[Point]:
    """N at V = 32000, V at N = 1024, and u at N = 2048, V = 32000."""

    def of_text(axis: str, tokens: int, vocab: int) -> Point:
        return Point(axis, tokens, vocab, lambda settings: labels_for(settings, vocab))

    def of_kinds(kinds: int, tokens: int, vocab: int) -> Point:
        return Point("u", tokens, vocab, lambda settings: uniform(kinds))

    if small:
        return [of_text("N", 64, 500), of_text("N", 128, 500), of_text("V", 64, 900), of_kinds(8, 64, 500)]
    by_tokens = [of_text("N", 2**k, 32000) for k in range(9, 16)]
    by_vocab = [of_text("V", 1024, 8000 * 2**k) for k in range(6)]
    by_share = [of_kinds(kinds, 2048, 32000) for kinds in (1, 256, 700, 1500, 4000, 32000)]
    return by_tokens + by_vocab + by_share


def contestants() -> list[str]:
    return [DENSE, *([torch_name(CHUNK)] if HAS_TORCH else []), MLE_OURS, EMO_OURS]


def measure(point: Point, settings: Settings) -> list[Row]:
    """One row per contestant; a skipped one has a note instead of numbers."""
    rounds = settings.rounds or (SMALL_ROUNDS if settings.small else ROUNDS)
    labels = point.labels(settings)
    y = labels.draw(point.tokens, 0)
    common = {"date": date.today().isoformat(), "axis": point.axis, "tokens": str(point.tokens),
              "vocab": str(point.vocab), "width": str(WIDTH), "u": f"{share_distinct(y):.5f}", "labels": labels.name,
              "rounds": str(rounds), "hardware": hardware(), "torch": torch.__version__}  # fmt: skip
    too_large = 3 * point.tokens * point.vocab * 4 > MAX_BYTES
    names = [name for name in contestants() if name != DENSE or not too_large]
    problem = Problem.random(point.vocab, WIDTH, y)
    timings = timed_rounds(steps(names, problem), rounds=rounds)
    del problem
    extra = extra_bytes(names, y, point.vocab, WIDTH, processes="here" if settings.small else "one")
    return [
        {**common, "name": name, "seconds": f"{timings[name].median:.6f}", "mebibytes": f"{extra[name] / MIB:.1f}"}
        if name in timings
        else {**common, "name": name, "note": SKIPPED}
        for name in contestants()
    ]


def read(file: Path) -> list[Row]:
    """Rows of a scaling.csv; an empty list if there is no file."""
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def run(settings: Settings, folder: Path) -> None:
    """Measure all points into `folder`, then draw them."""
    file = folder / CSV
    if not settings.resume:
        file.unlink(missing_ok=True)
    done = {(row["axis"], row["tokens"], row["vocab"], row["labels"]) for row in read(file)
            if row["hardware"] == hardware() and row["torch"] == torch.__version__}  # fmt: skip
    started, todo = time.perf_counter(), points(settings.small)
    say(f"\nscaling: d={WIDTH} float32, forward and backward\n  {hardware()}, torch {torch.__version__}")
    for i, point in enumerate(todo, 1):
        if (point.axis, str(point.tokens), str(point.vocab), point.labels(settings).name) in done:
            continue
        rows = measure(point, settings)
        append(file, FIELDS, rows)
        cells = [f"{row['name']} {1000 * float(row['seconds']):.0f} ms {row['mebibytes']} MiB" if "seconds" in row
                 else f"{row['name']} {row['note']}" for row in rows]  # fmt: skip
        place = f"{point.axis}: N={point.tokens} V={point.vocab} u={float(rows[0]['u']):.3f}"
        say(f"  [{i}/{len(todo)}, {time.perf_counter() - started:.0f} s] {place}: {'; '.join(cells)}")
    try:
        draw(read(file), folder / PNG)
    except ImportError:
        say(f"No figure: {install_hint('plot')}")


def main(settings: Settings) -> None:
    if settings.output is not None:
        settings.output.mkdir(parents=True, exist_ok=True)
        run(settings, settings.output)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(replace(settings, resume=False), Path(folder))


# ---- the figure: time per logit above, peak extra memory below; N, V and u side by side ------------------------------

AXES = {"N": "tokens N", "V": "vocabulary V", "u": "share u of distinct labels"}
COLUMN = {"N": "tokens", "V": "vocab", "u": "u"}
LEAST_MIB = 1e-2  # a logarithmic axis cannot show 0
# Colours of Okabe and Ito; the markers also distinguish them in grey.
STYLES = {DENSE: ("#000000", "s"), TORCH: ("#0072B2", "^"), MLE_OURS: ("#E69F00", "o"), EMO_OURS: ("#D55E00", "D")}


def _short(number: float) -> str:
    return f"{number / 1000:g}k" if number and number % 1000 == 0 else f"{number:g}"


def _lines(above: Axes, below: Axes, rows: list[Row], axis: str) -> None:
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name and row["axis"] == axis and row["seconds"]]
        mine.sort(key=lambda row: float(row[COLUMN[axis]]))
        x = [float(row[COLUMN[axis]]) for row in mine]
        per_logit = [1e9 * float(row["seconds"]) / (int(row["tokens"]) * int(row["vocab"])) for row in mine]
        memory = [max(float(row["mebibytes"]), LEAST_MIB) for row in mine]
        color, marker = next((style for start, style in STYLES.items() if name.startswith(start)), ("#888888", "x"))
        for ax, quantity in ((above, per_logit), (below, memory)):
            line(ax, x, quantity, name.replace(" c=", ", chunks of "), color, marker)


def _label_axes(above: Axes, below: Axes, rows: list[Row], axis: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    mine = [row for row in rows if row["axis"] == axis]
    labels = "uniform over k ids" if axis == "u" else mine[0]["labels"].split(",")[0]
    sizes = ", ".join(f"{name} = {int(mine[0][COLUMN[name]])}" for name in ("N", "V") if name != axis)
    above.set_title(f"{sizes}\nlabels: {labels}", fontsize=9)
    below.set_xlabel(AXES[axis])
    if axis != "u":
        below.set_xscale("log", base=2)
        places = sorted({float(row[COLUMN[axis]]) for row in mine})
        below.set_xticks(places, [_short(place) for place in places])
        below.tick_params(axis="x", labelsize=8)
    below.set_yscale("log")
    below.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for ax in (above, below):
        ax.minorticks_off()
    skipped = [row for row in mine if row["note"]]
    if skipped:
        places_skipped = ", ".join(_short(float(row[COLUMN[axis]])) for row in skipped)
        below.text(0.97, 0.04, f"{skipped[0]['name']} at {axis} = {places_skipped}\n{skipped[0]['note']}",
                   transform=below.transAxes, ha="right", va="bottom", fontsize=8, color="0.35")  # fmt: skip


def draw(rows: list[Row], file: Path) -> None:
    """Write the figure of these rows of scaling.csv."""
    figure, grid = panels(10, 6.2, 2, len(AXES), sharex="col", sharey="row")
    for (above, below), axis in zip(zip(*grid, strict=True), AXES, strict=True):
        _lines(above, below, rows, axis)
        _label_axes(above, below, rows, axis)
    grid[0][0].set_ylim(bottom=0)
    grid[0][0].set_ylabel("forward + backward,\ntime per logit (ns)")
    grid[1][0].set_ylabel("peak memory beyond inputs\nand gradients (MiB)")
    title = f"Token losses from hidden states of width {rows[0]['width']}, float32"
    save(figure, file, title=title, legend_of=grid[0][0])
