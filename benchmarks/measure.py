"""Interleaved timing, the name of the hardware, and the CSV of results."""

from __future__ import annotations

import csv
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results.csv"
FIELDS = ("date", "benchmark", "case", "name", "seconds", "ratio", "peer", "rounds", "hardware", "torch")


def hardware() -> str:
    """Processor, threads, and the instruction sets that matter for float32."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    model = next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    sets = [flag for flag in ("avx2", "avx512f", "amx_bf16") if f" {flag} " in text.replace("\n", " ")]
    return f"{model or platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {' '.join(sets)}"


def interleaved(contestants: dict[str, Callable[[], Any]], *, rounds: int) -> dict[str, float]:
    """Median seconds of each contestant; one warm-up, then each once a round, so that noise meets all alike."""
    for run in contestants.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def report(benchmark: str, case: str, medians: dict[str, float], *, peer: str, rounds: int, keep: bool) -> None:
    """Print seconds and ratios to `peer`, and append them to the CSV if `keep`."""
    print(f"\n{benchmark}: {case}\n  {hardware()}, torch {torch.__version__}, {rounds} rounds")
    rows = []
    for name, median in medians.items():
        ratio = median / medians[peer]
        print(f"  {name:<42} {median * 1000:9.1f} ms   {ratio:6.2f} x {peer}")
        rows.append(
            dict(zip(FIELDS, (date.today().isoformat(), benchmark, case, name, f"{median:.6f}", f"{ratio:.4f}", peer,
                              rounds, hardware(), torch.__version__), strict=True))
        )  # fmt: skip
    if keep:
        fresh = not RESULTS.exists()
        with RESULTS.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, FIELDS)
            if fresh:
                writer.writeheader()
            writer.writerows(rows)
