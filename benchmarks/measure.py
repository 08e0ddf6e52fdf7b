"""Interleaved timing, the name of the hardware, and the CSV of results."""

from __future__ import annotations

import csv
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

Row = dict[str, str]  # of a CSV file

FOLDER = Path(__file__).parent
FIELDS = ("date", "benchmark", "case", "name", "seconds", "mebibytes", "error", "ratio", "peer", "rounds", "spread",
          "hardware", "torch")  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What the command line asks of every benchmark.

    Attributes:
        rounds: interleaved repetitions; None leaves it to the benchmark.
        small: tiny sizes, to see that everything runs.
        data: folder with text/*.txt and tokenizers/gpt2; None for Zipf labels.
        text: which of the texts the labels come from.
        output: folder that the CSV files and figures go to; None keeps nothing.
        resume: go on with the rows of an interrupted run, where the benchmark can.
    """

    rounds: int | None = None
    small: bool = False
    data: Path | None = None
    text: str = "wikitext2-valid"
    output: Path | None = None
    resume: bool = False


@dataclass(frozen=True)
class Timing:
    """Seconds of one contestant in all rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Range of the middle half over the median: what noise does to a single round."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median


def ratios(timing: Timing, *peers: Timing) -> list[float]:
    """Round by round, over the peer with the least median."""
    best = min(peers, key=lambda peer: peer.median)
    return [mine / other for mine, other in zip(timing.seconds, best.seconds, strict=True)]


def hardware() -> str:
    """Processor, threads, and the instruction sets that matter for float32."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    model = next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    sets = [flag for flag in ("avx2", "avx512f", "amx_bf16") if f" {flag} " in text.replace("\n", " ")]
    return f"{model or platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {' '.join(sets)}"


def timed_rounds(
    contestants: dict[str, Callable[[], Any]],
    *,
    rounds: int,
    before_round: Callable[[int], Any] | None = None,
    turn: float = 0.0,
) -> dict[str, Timing]:
    """Each contestant once a round, every round from another one on, so that noise and neighbours meet all alike.

    A warm-up that counts for nothing comes first. With `turn`, in seconds, a contestant is called as often (at most ten
    times) as fills its turn, and the mean counts: what takes a millisecond would else be measured on others' caches.

    `before_round(i)` may change what all of them work on; the warm-up is round 0. All begin with the same number of
    threads, whatever the one before left behind.
    """
    threads = torch.get_num_threads()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(rounds + 1):
        if before_round is not None:
            before_round(i)
        names = list(contestants)
        first = i % len(names)
        for name in names[first:] + names[:first]:
            run = contestants[name]
            torch.set_num_threads(threads)
            calls = 1 if i == 0 else max(1, min(10, round(turn / max(seconds[name][0], 1e-6))))
            started = time.perf_counter()
            for _ in range(calls):
                run()
            seconds[name].append((time.perf_counter() - started) / calls)
    torch.set_num_threads(threads)
    return {name: Timing(tuple(values[1:])) for name, values in seconds.items()}


def interleaved(contestants: dict[str, Callable[[], Any]], *, rounds: int) -> dict[str, float]:
    """Median seconds of each contestant in interleaved rounds."""
    return {name: timing.median for name, timing in timed_rounds(contestants, rounds=rounds).items()}


@contextmanager
def busy_neighbours() -> Iterator[None]:
    """A process on each core that does nothing else than count."""
    started = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        time.sleep(0.2)
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def slowdowns(
    contestants: dict[str, Callable[[], Any]], *, rounds: int, turn: float = 0.0
) -> dict[str, tuple[Timing, Timing]]:
    """Times of each contestant alone and beside one busy process per core, by turns."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in contestants}
    for _ in range(rounds):
        for is_busy in (False, True):
            with busy_neighbours() if is_busy else nullcontext():
                for name, timing in timed_rounds(contestants, rounds=1, turn=turn).items():
                    found[name][is_busy].extend(timing.seconds)
    return {name: (Timing(tuple(quiet)), Timing(tuple(busy))) for name, (quiet, busy) in found.items()}


def report_slowdowns(
    benchmark: str, case: str, found: dict[str, tuple[Timing, Timing]], *, rounds: int, output: Path | None
) -> dict[str, float]:
    """Print how many times as long each takes with busy neighbours, append that to results.csv, and return it."""
    heading(benchmark, case, f"{rounds} rounds, alone and beside {os.cpu_count()} busy processes")
    slower = {name: statistics.median(ratios(busy, quiet)) for name, (quiet, busy) in found.items()}
    rows = []
    for name, ratio in slower.items():
        say(f"  {name:<34} {ratio:6.2f} x itself alone")
        rows.append({"name": name, "ratio": f"{ratio:.4f}", "peer": "itself alone", "rounds": rounds})
    keep(output, benchmark, f"{case}, beside {os.cpu_count()} busy processes", rows)
    return slower


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """`torch.set_float32_matmul_precision` for a while."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def say(text: str) -> None:
    """Progress, at once."""
    print(text, flush=True)


def heading(benchmark: str, case: str, note: str) -> None:
    say(f"\n{benchmark}: {case}\n  {hardware()}, torch {torch.__version__}, {note}")


def table(rows: Sequence[Sequence[str]]) -> None:
    """Columns of equal width; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for i, row in enumerate(rows):
        say("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if i == 0:
            say("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def append(file: Path, fields: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Rows at the end of a CSV file, which begins with its field names; what a row does not have stays empty.

    Raises:
        ValueError: the file has other fields.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    head = file.read_text(encoding="utf-8").partition("\n")[0] if file.exists() else ""
    if head not in ("", ",".join(fields)):
        raise ValueError(f"{file} has the fields {head}, expected {','.join(fields)}; move it away.")
    with file.open("a", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fields, restval="", lineterminator="\n")
        if not head:
            writer.writeheader()
        writer.writerows(rows)


def keep(output: Path | None, benchmark: str, case: str, rows: Sequence[dict[str, Any]]) -> None:
    """Append to results.csv in `output`, with date, hardware and torch named; nothing where that is None."""
    if output is None:
        return
    common = {"date": date.today().isoformat(), "benchmark": benchmark, "case": case, "hardware": hardware(),
              "torch": torch.__version__}  # fmt: skip
    append(output / "results.csv", FIELDS, [{**common, **row} for row in rows])


def report_times(
    benchmark: str, case: str, timings: dict[str, Timing], *, peer: str, rounds: int, output: Path | None
) -> None:
    """Print medians and ratios to `peer`, and append them to results.csv."""
    heading(benchmark, case, f"{rounds} rounds")
    rows = []
    for name, timing in timings.items():
        ratio = timing.median / timings[peer].median
        say(f"  {name:<30} {timing.median * 1000:9.1f} ms ± {timing.spread:4.0%}   {ratio:6.3f} x {peer}")
        rows.append({"name": name, "seconds": f"{timing.median:.6f}", "ratio": f"{ratio:.4f}", "peer": peer,
                     "rounds": rounds, "spread": f"{timing.spread:.3f}"})  # fmt: skip
    keep(output, benchmark, case, rows)
