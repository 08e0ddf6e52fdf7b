"""Pairs of histograms on two workers of Dask: partitions that go to a function of ours, beside one call a pair and POT.

The problems are as in examples/many_problems.py, in float64: 64 bins on a line, and on a grid of 8 x 8. The pairs
are in the memory of the process, or of the workers, before the clock starts. The first run has an empty cache: it
includes what compiles there.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ot
import torch
from dask import array
from dask.distributed import Client, LocalCluster, wait

from benchmarks.bench import OURS, Bench, Steps, at_least
from benchmarks.measure import FOLDER, Settings, heading, keep, say

sys.path.append(str(FOLDER.parent / "examples"))
from many_problems import BINS, COST, draw_array, draw_pairs, grid_distances, line_distances

NAME, COUNT, BLOCK = "many_problems", 10_000, 1_000
TWO_WORKERS = f"{OURS}, two workers"
DASK = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
Function = Callable[[np.ndarray], np.ndarray]


def line_by_pot(pairs: np.ndarray) -> np.ndarray:
    places = np.arange(BINS, dtype=float)
    return np.array([ot.wasserstein_1d(places, places, p, q) for p, q in pairs])


def grid_by_pot(pairs: np.ndarray) -> np.ndarray:
    cost = COST.dense().double().numpy()
    return np.array([ot.emd2(p, q, cost) for p, q in pairs])


PROBLEMS: dict[str, tuple[Function, Function]] = {
    "wasserstein_1d, 64 bins": (line_distances, line_by_pot),
    "emd, 8 x 8 bins": (grid_distances, grid_by_pot),
}


def on_dask(function: Function, pairs: array.Array) -> np.ndarray:
    return pairs.map_blocks(function, drop_axis=(1, 2), dtype=float).compute()


def in_a_loop(function: Function, pairs: np.ndarray) -> np.ndarray:
    return np.concatenate([function(pairs[i : i + 1]) for i in range(len(pairs))])


def first_seconds(function: Function, count: int, block: int) -> list[float]:
    """The seconds of the first run of workers with an empty cache of kernels, and of the second one."""
    with tempfile.TemporaryDirectory() as folder:
        cluster: Any = LocalCluster(env={"NUMBA_CACHE_DIR": folder}, **DASK)
        with cluster, Client(cluster):
            wait(pairs := draw_array(count, block).persist())
            seconds = []
            for _ in range(2):
                start = time.perf_counter()
                on_dask(function, pairs)
                seconds.append(time.perf_counter() - start)
            return seconds


def steps_of(ours: Function, by_pot: Function, pairs: np.ndarray, spread: array.Array) -> Steps:
    return {
        TWO_WORKERS: lambda: on_dask(ours, spread),
        f"{OURS}, one call, {torch.get_num_threads()} threads": lambda: ours(pairs),
        f"{OURS}, a call for each pair": lambda: in_a_loop(ours, pairs),
        "POT, two workers": lambda: on_dask(by_pot, spread),
    }


def main(settings: Settings) -> None:
    bench = Bench(settings, NAME, rounds=3)
    count, block = (40, 10) if settings.small else (COUNT, BLOCK)
    pairs = np.concatenate([draw_pairs(block, first) for first in range(0, count, block)])
    for name, problem in PROBLEMS.items():
        case = f"{count} pairs, {name}"
        first, second = first_seconds(problem[0], count, block)
        heading(NAME, case, "two workers, an empty cache")
        say(f"  the first run takes {first:.2f} s, the second {second:.2f} s")
        row = {"name": f"{TWO_WORKERS}, empty cache", "seconds": f"{first:.6f}", "rounds": 1}
        keep(settings.output, NAME, case, [row])
        with LocalCluster(**DASK) as cluster, Client(cluster):
            wait(spread := draw_array(count, block).persist())
            steps = steps_of(*problem, pairs, spread)
            expected = problem[0](pairs)
            errors = {step: f"{abs(run() - expected).max():.1g}" for step, run in steps.items()}
            bench.row(at_least(case, 1.0), steps, ours=TWO_WORKERS, peer=TWO_WORKERS, notes=errors)
    bench.report("how many times as long POT takes")
