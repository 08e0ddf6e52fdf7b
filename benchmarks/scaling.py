"""Time and peak memory of the token losses with the number of tokens N, the vocabulary V, and the distinct labels u.

Forward and backward from hidden states of width 256. Every measured number goes to scaling.csv at once; the figure is
drawn from that file at the end, so an interrupted run can go on (`--resume`).
"""

from __future__ import annotations

import csv
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch

from benchmarks.contestants import DENSE, EMO_OURS, HAS_TORCH, MLE_OURS, Problem, steps, torch_name
from benchmarks.labels import Labels, labels_for, share_distinct, uniform
from benchmarks.measure import Row, Settings, append, hardware, say, timed_rounds
from benchmarks.memory import MIB, extra_bytes

ROUNDS, SMALL_ROUNDS = 3, 1
WIDTH = 256
MOST_BYTES = 8 * 2**30  # dense contestants that would take more are skipped
CHUNK = 512  # rows of F.linear_cross_entropy: near its best at most sizes
FIELDS = ("date", "axis", "tokens", "vocab", "width", "u", "labels", "name", "seconds", "mebibytes", "note", "rounds",
          "hardware", "torch")  # fmt: skip
CSV, PNG = "scaling.csv", "scaling.png"
SKIPPED = f"skipped: over {MOST_BYTES / 2**30:.0f} GiB"


@dataclass(frozen=True)
class Point:
    """One place on one axis ("N", "V" or "u"), and how its labels are drawn."""

    axis: str
    tokens: int
    vocab: int
    labels: Callable[[Settings], Labels]

    @property
    def where(self) -> tuple[str, int, int]:
        return self.axis, self.tokens, self.vocab


def _text(vocab: int) -> Callable[[Settings], Labels]:
    return lambda settings: labels_for(settings, vocab)


def _kinds(kinds: int) -> Callable[[Settings], Labels]:
    return lambda settings: uniform(kinds)


def points(small: bool) -> list[Point]:
    """What is measured: N at V = 32000, V at N = 1024, and u at N = 2048, V = 32000."""
    if small:
        by_size = [Point("N", 64, 500, _text(500)), Point("N", 128, 500, _text(500)), Point("V", 64, 900, _text(900))]
        return [*by_size, Point("u", 64, 500, _kinds(8))]
    by_tokens = [Point("N", 2**k, 32000, _text(32000)) for k in range(9, 16)]
    by_vocab = [Point("V", 1024, 8000 * 2**k, _text(8000 * 2**k)) for k in range(6)]
    by_share = [Point("u", 2048, 32000, _kinds(kinds)) for kinds in (1, 256, 700, 1500, 4000, 32000)]
    return by_tokens + by_vocab + by_share


def contestants() -> list[str]:
    return [DENSE, *([torch_name(CHUNK)] if HAS_TORCH else []), MLE_OURS, EMO_OURS]


def _too_large(name: str, point: Point) -> bool:
    return name == DENSE and 3 * point.tokens * point.vocab * 4 > MOST_BYTES


def measure(point: Point, settings: Settings) -> list[Row]:
    """One row for each contestant; what the dense ones cannot do stays without numbers and says so."""
    rounds = settings.rounds or (SMALL_ROUNDS if settings.small else ROUNDS)
    labels = point.labels(settings)
    y = labels.draw(point.tokens, 0)
    common = {"date": date.today().isoformat(), "axis": point.axis, "tokens": str(point.tokens),
              "vocab": str(point.vocab), "width": str(WIDTH), "u": f"{share_distinct(y):.5f}", "labels": labels.name,
              "rounds": str(rounds), "hardware": hardware(), "torch": torch.__version__}  # fmt: skip
    names = [name for name in contestants() if not _too_large(name, point)]
    problem = Problem.random(point.tokens, point.vocab, WIDTH, y)
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
    """Rows of a scaling.csv; none where there is no file."""
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def _done(rows: list[Row]) -> set[tuple[str, int, int, str]]:
    return {(row["axis"], int(row["tokens"]), int(row["vocab"]), row["labels"]) for row in rows
            if row["hardware"] == hardware() and row["torch"] == torch.__version__}  # fmt: skip


def run(settings: Settings, folder: Path) -> None:
    """Measure all points into `folder`, then draw them."""
    file = folder / CSV
    if not settings.resume:
        file.unlink(missing_ok=True)
    done, started, todo = _done(read(file)), time.perf_counter(), points(settings.small)
    say(f"\nscaling: d={WIDTH} float32, forward and backward\n  {hardware()}, torch {torch.__version__}")
    for i, point in enumerate(todo, 1):
        if (*point.where, point.labels(settings).name) in done:
            continue
        rows = measure(point, settings)
        append(file, FIELDS, rows)
        cells = [f"{row['name']} {1000 * float(row['seconds']):.0f} ms {row['mebibytes']} MiB" if "seconds" in row
                 else f"{row['name']} {row['note']}" for row in rows]  # fmt: skip
        place = f"{point.axis}: N={point.tokens} V={point.vocab} u={float(rows[0]['u']):.3f}"
        say(f"  [{i}/{len(todo)}, {time.perf_counter() - started:.0f} s] {place}: {'; '.join(cells)}")
    _draw(read(file), folder / PNG)


def _draw(rows: list[Row], file: Path) -> None:
    try:
        from benchmarks.scaling_plot import draw
    except ImportError:
        say('No figure: pip install "otloss[plot]"')
        return
    draw(rows, file)
    say(f"  figure: {file.name}")


def main(settings: Settings) -> None:
    if settings.output is not None:
        settings.output.mkdir(parents=True, exist_ok=True)
        run(settings, settings.output)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(replace(settings, resume=False), Path(folder))
