"""Time and memory of transport between two clouds over their size: exact, and the debiased divergence with gradients.

Points in 3-D, squared distances; uniform weights in exact problems. Each measurement is one call after a small one,
with one thread, in a process of its own: seconds of the processor, and the growth of its resident memory. Draws
`docs/reports/scaling_clouds.png`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ot
import torch

import otloss
from benchmarks.bench import OURS
from benchmarks.charts import line, panels, save
from benchmarks.measure import MIB, Settings, heading, keep, say
from benchmarks.memory import MALLOC, peak_growth
from benchmarks.solver_clouds import BLUR, HAS_KEOPS, Clouds, geomloss_answer, our_answer
from otloss._checks import install_hint
from otloss.costs import PointCost

if TYPE_CHECKING:
    from benchmarks.measure import Row

EXACT, WEIGHTED, DIVERGENCE = "exact", "exact, random weights of x", f"divergence, blur {BLUR}"
LAZY, DENSE = "POT emd2_lazy", "POT emd2"
GEOMLOSS_SCALING = 0.9  # faster than at our error: its own error is in the rows
SIZES = (1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
SMALL = (100, 200)
# The largest clouds of each, for time (about five minutes) or memory.
MAX_POINTS = {
    (EXACT, OURS): 100_000, (EXACT, LAZY): 20_000, (EXACT, DENSE): 10_000,
    (WEIGHTED, OURS): 20_000, (WEIGHTED, LAZY): 10_000,
}  # fmt: skip
MAX_POINTS_OF_BACKEND = {"tensorized": 10_000, "multiscale": 50_000}
PNG = Path(__file__).parents[1] / "docs" / "reports" / "scaling_clouds.png"
COLORS = {OURS: "#0072B2"}  # peers are grey, with a marker each
MARKERS = ("o", "s", "^", "D")


def contestants(work: str) -> dict[str, Callable[[Clouds], float]]:
    """What computes the value, of each library."""
    if work == DIVERGENCE:
        backends = ("tensorized", "multiscale") if HAS_KEOPS else ("tensorized",)
        peers = {f"GeomLoss SamplesLoss, {backend}": _geomloss(backend) for backend in backends}
        return {OURS: lambda clouds: our_answer(clouds, 1e-5, blur=BLUR)[0], **peers}
    return {OURS: _ours, LAZY: _lazy, **({DENSE: _dense} if work == EXACT else {})}


def _geomloss(backend: str) -> Callable[[Clouds], float]:
    return lambda clouds: geomloss_answer(clouds, GEOMLOSS_SCALING, backend=backend, blur=BLUR)[0]


def _ours(clouds: Clouds) -> float:
    """Return the value; the time includes the gradients of the points."""
    x = clouds.x.clone().requires_grad_()
    value = otloss.emd(clouds.p, clouds.q, PointCost(x, clouds.y))
    value.backward()
    return value.item()


def _lazy(clouds: Clouds) -> float:
    arrays = (t.numpy() for t in (clouds.x, clouds.y, clouds.p, clouds.q))
    value, _ = ot.lp.emd2_lazy(*arrays, metric="sqeuclidean", numItermax=10**9, log=True, return_matrix=False)
    return float(value)


def _dense(clouds: Clouds) -> float:
    x, y, p, q = (t.numpy() for t in (clouds.x, clouds.y, clouds.p, clouds.q))
    return float(ot.emd2(p, q, ot.dist(x, y), numItermax=10**9))


def clouds_of(work: str, n: int) -> Clouds:
    clouds = Clouds.random(n)
    if work == DIVERGENCE:
        return clouds
    x, y, p, q = (t.double() for t in (clouds.x, clouds.y, clouds.p, clouds.q))
    uniform = torch.full_like(q, 1 / n)
    return Clouds(x, y, p / p.sum() if work == WEIGHTED else uniform, uniform)


def measured(work: str, name: str, n: int, *, warm: int) -> dict[str, float]:
    """Seconds, MiB and the value of one call in this process, after one with `warm` points."""
    step = contestants(work)[name]
    step(clouds_of(work, warm))
    clouds, solution = clouds_of(work, n), {}

    def run() -> None:
        started = time.process_time()
        solution["value"] = step(clouds)
        solution["seconds"] = time.process_time() - started

    return {"mebibytes": peak_growth(run) / MIB, **solution}


def _in_own_process(work: str, name: str, n: int) -> dict[str, float]:
    environment = os.environ | MALLOC | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.scaling_clouds", work, name, str(n)]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True, env=environment,
                          cwd=Path(__file__).parents[1])  # fmt: skip
    solution: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return solution


def main(settings: Settings) -> None:
    rows: list[Row] = []
    for work in (EXACT, WEIGHTED, DIVERGENCE):
        for n in SMALL if settings.small else SIZES:
            case = f"{work}, two clouds of {n} points in 3-D"
            heading("scaling_clouds", case, "one call each")
            answers: dict[str, dict[str, float]] = {}
            for name in contestants(work):
                if n > MAX_POINTS.get((work, name), MAX_POINTS_OF_BACKEND.get(name.split()[-1], SIZES[-1])):
                    continue
                own = measured(work, name, n, warm=n) if settings.small else _in_own_process(work, name, n)
                answers[name] = own
                say(f"  {name:<34} {own['seconds']:9.3f} s   {own['mebibytes']:9.1f} MiB   value {own['value']:.9g}")
            kept = [_row(name, own, answers[OURS]) for name, own in answers.items() if OURS in answers]
            keep(settings.output, "scaling_clouds", case, kept)
            rows += [{**row, "work": work, "n": str(n)} for row in kept]
    if settings.output is None:
        return
    try:
        draw(rows, settings.output / PNG.name if settings.small else PNG)
    except ImportError:
        say(f"No figure: {install_hint('plot')}")


def _row(name: str, own: dict[str, float], ours: dict[str, float]) -> Row:
    return {
        "name": name, "seconds": f"{own['seconds']:.6f}", "mebibytes": f"{own['mebibytes']:.1f}",
        "error": f"{abs(own['value'] / ours['value'] - 1):.1e} from ours", "peer": OURS, "rounds": "1",
        "ratio": f"{own['seconds'] / max(ours['seconds'], 1e-9):.4f}",
    }  # fmt: skip


def draw(rows: list[Row], file: Path) -> None:
    """Time above and memory below, exact transport on the left and the divergence on the right."""
    figure, grid = panels(9, 6.4, 2, 2, sharex=True, sharey="row")
    for column, work, title in (
        (0, EXACT, "exact, ours with gradients"),
        (1, DIVERGENCE, "divergence, with gradients"),
    ):
        names = dict.fromkeys(row["name"] for row in rows if row["work"] == work)
        for row_of_axes, quantity, smallest in ((0, "seconds", 1e-3), (1, "mebibytes", 1.0)):
            ax: Any = grid[row_of_axes][column]
            for name, marker in zip(names, MARKERS, strict=False):
                mine = [row for row in rows if row["name"] == name and row["work"] == work]
                x, y = [int(row["n"]) for row in mine], [max(float(row[quantity]), smallest) for row in mine]
                line(ax, x, y, name, COLORS.get(name, "0.55"), marker)
            ax.set_xscale("log")
            ax.set_yscale("log")
        grid[0][column].set_title(title, fontsize=10)
        grid[0][column].legend(frameon=False, fontsize=8)
        grid[1][column].set_xlabel("points in each cloud")
    grid[0][0].set_ylabel("processor time (s), one thread")
    grid[1][0].set_ylabel("peak memory beyond the inputs (MiB)")
    save(figure, file, title="Between large clouds otloss takes the least time at every size")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measured(sys.argv[1], sys.argv[2], int(sys.argv[3]), warm=min(2000, int(sys.argv[3])))))
