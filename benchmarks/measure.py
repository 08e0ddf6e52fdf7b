"""Interleaved timing, limits and verdicts, the name of the hardware, and the CSV of results."""

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

Row = dict[str, str]  # a row of a CSV file

FOLDER = Path(__file__).parent
MIB = 2**20
TURN = 0.02  # seconds of calls that make one measurement of a short step
SMALL_SIZES = "\nThese sizes only check that everything runs; they say nothing about the limits."
FIELDS = ("date", "benchmark", "case", "name", "seconds", "mebibytes", "error", "ratio", "peer", "rounds", "spread",
          "hardware", "torch")  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What the command line asks of every benchmark.

    Attributes:
        rounds: interleaved repetitions; None takes the default of the benchmark.
        small: tiny sizes, to check that everything runs.
        data: folder that has what the benchmark reads (benchmarks/inputs.py); None without that, as for Zipf labels.
        text: name of the text that the labels come from.
        output: folder for CSV files and figures; None keeps nothing.
        resume: continue with the rows of an interrupted run, if the benchmark can.
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


@dataclass(frozen=True)
class Limit:
    """A row of the final table: the measured ratio is to be at most `limit`, or at least that."""

    what: str
    limit: float
    at_least: bool = False

    @property
    def goal(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:g}"

    def verdict(self, *measured: float) -> list[str]:
        """The median of the measured ratios, and their quartiles if there are several."""
        if not measured:
            return [self.what, self.goal, "not measured"]
        ratio = statistics.median(measured)
        met = ratio >= self.limit if self.at_least else ratio <= self.limit
        verdict = f"{ratio:.3f} {'met' if met else 'missed'}"
        if len(measured) > 1:
            low, _, high = statistics.quantiles(measured, n=4, method="inclusive")
            noise = ", within noise" if low < self.limit < high else ""
            verdict += f" ({low:.3f} to {high:.3f}{noise})"
        return [self.what, self.goal, verdict]


def hardware() -> str:
    """GPU if there is one, processor, threads, and the instruction sets that matter for float32."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    model = next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    sets = [flag for flag in ("avx2", "avx512f", "amx_bf16") if f" {flag} " in text.replace("\n", " ")]
    cpu = f"{model or platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {' '.join(sets)}"
    return f"{torch.cuda.get_device_name()}, {cpu}" if torch.cuda.is_available() else cpu


def timed_rounds(
    contestants: dict[str, Callable[[], Any]],
    *,
    rounds: int,
    before_round: Callable[[int], Any] | None = None,
    turn: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Each contestant once per round. Each round starts with another one, so that noise affects all alike.

    Round 0 is a warm-up and is not counted. With `turn`, in seconds, a contestant is called as often (at most ten
    times) as fills its turn, and the mean counts: a call of a millisecond alone would run with the caches of others.

    `before_round(i)` may change the common inputs. `time.process_time` is the clock for a machine that others use too.
    All contestants start with the same number of threads.
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
            started = clock()
            for _ in range(calls):
                run()
            seconds[name].append((clock() - started) / calls)
    torch.set_num_threads(threads)
    return {name: Timing(tuple(values[1:])) for name, values in seconds.items()}


@contextmanager
def busy_neighbours() -> Iterator[None]:
    """A process on each core that only counts."""
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
    """Times of each contestant alone and beside one busy process per core, alternating."""
    results: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in contestants}
    for _ in range(rounds):
        for is_busy in (False, True):
            with busy_neighbours() if is_busy else nullcontext():
                for name, timing in timed_rounds(contestants, rounds=1, turn=turn).items():
                    results[name][is_busy].extend(timing.seconds)
    return {name: (Timing(tuple(alone)), Timing(tuple(busy))) for name, (alone, busy) in results.items()}


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set `torch.set_float32_matmul_precision` inside the block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def say(text: str) -> None:
    """Print without buffering."""
    print(text, flush=True)


def heading(benchmark: str, case: str, note: str) -> None:
    say(f"\n{benchmark}: {case}\n  {hardware()}, torch {torch.__version__}, {note}")


def table(rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for i, row in enumerate(rows):
        say("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if i == 0:
            say("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def append(file: Path, fields: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Append rows to a CSV file with a header; missing fields stay empty.

    Raises:
        ValueError: the header of the file differs.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    head = file.read_text(encoding="utf-8").partition("\n")[0] if file.exists() else ""
    if head not in ("", ",".join(fields)):
        raise ValueError(f"{file} has the fields {head}, expected {','.join(fields)}; move or delete the file.")
    with file.open("a", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fields, restval="", lineterminator="\n")
        if not head:
            writer.writeheader()
        writer.writerows(rows)


def keep(output: Path | None, benchmark: str, case: str, rows: Sequence[dict[str, Any]]) -> None:
    """Append to results.csv in `output` (unless None), with date, hardware and version of torch."""
    if output is None:
        return
    common = {"date": date.today().isoformat(), "benchmark": benchmark, "case": case, "hardware": hardware(),
              "torch": torch.__version__}  # fmt: skip
    append(output / "results.csv", FIELDS, [{**common, **row} for row in rows])


def report_times(
    benchmark: str,
    case: str,
    timings: dict[str, Timing],
    *,
    peer: str,
    rounds: int,
    output: Path | None,
    notes: dict[str, str] | None = None,
) -> None:
    """Print times and ratios to `peer`, medians over the rounds, and append them to results.csv; `notes` are errors."""
    heading(benchmark, case, f"{rounds} rounds")
    rows, notes = [], notes or {}
    for name, timing in timings.items():
        ratio, note = statistics.median(ratios(timing, timings[peer])), notes.get(name, "")
        say(f"  {name:<34} {timing.median * 1000:10.3f} ms ± {timing.spread:4.0%}   {ratio:8.3f} x {peer}   {note}")
        rows.append({"name": name, "seconds": f"{timing.median:.6f}", "ratio": f"{ratio:.4f}", "peer": peer,
                     "rounds": rounds, "spread": f"{timing.spread:.3f}", "error": note})  # fmt: skip
    keep(output, benchmark, case, rows)


def report_memory(benchmark: str, case: str, extra: dict[str, int], *, peer: str, output: Path | None) -> None:
    """Print peak memory beyond inputs and gradients, in bytes, and append it to results.csv."""
    heading(f"{benchmark} memory", case, "peak beyond inputs and gradients")
    rows = []
    for name, measured in extra.items():
        ratio = measured / extra[peer]
        say(f"  {name:<34} {measured / MIB:9.1f} MiB   {ratio:6.3f} x {peer}")
        rows.append({"name": name, "mebibytes": f"{measured / MIB:.1f}", "ratio": f"{ratio:.4f}", "peer": peer})
    keep(output, f"{benchmark} memory", case, rows)


def report_slowdowns(
    benchmark: str, case: str, results: dict[str, tuple[Timing, Timing]], *, output: Path | None
) -> dict[str, Timing]:
    """Print time beside busy processes over time alone, append it to results.csv, and return it round by round."""
    case, rounds = f"{case}, beside {os.cpu_count()} busy processes", len(next(iter(results.values()))[0].seconds)
    heading(benchmark, case, f"{rounds} rounds")
    slower = {name: Timing(tuple(ratios(busy, alone))) for name, (alone, busy) in results.items()}
    rows = []
    for name, timing in slower.items():
        say(f"  {name:<34} {timing.median:8.3f} x itself alone ± {timing.spread:4.0%}")
        rows.append({"name": name, "ratio": f"{timing.median:.4f}", "peer": "itself alone", "rounds": rounds,
                     "spread": f"{timing.spread:.3f}"})  # fmt: skip
    keep(output, benchmark, case, rows)
    return slower
