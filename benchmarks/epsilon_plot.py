"""Errors against exact transport, and times, over epsilon: draws `docs/guide/solvers.png`.

Run as `python -m benchmarks.epsilon_plot [file]`. 64 problems of 64 points each in the unit square, random weights,
squared distances scaled to a largest of 1 in each problem; float32, default tolerance. A marker is hollow if some of
the problems stopped at the default limit of iterations.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

import otloss
from benchmarks.charts import line, panels, save
from benchmarks.measure import hardware, timed_rounds
from otloss.costs import PointCost

FILE = Path(__file__).parents[1] / "docs" / "guide" / "solvers.png"
EPSILONS = [10 ** (-k / 3) for k in range(13)]
# Colours of Okabe and Ito; the markers also distinguish them in grey.
VALUE, LINEAR, DEBIASED, EXACT = ("#D55E00", "D"), ("#0072B2", "^"), ("#009E73", "o"), ("#000000", "s")
NAMES = {
    "value": ("entropic value, sinkhorn", VALUE),
    "linear": ("cost of its plan, linear_cost", LINEAR),
    "debiased": ("sinkhorn_divergence", DEBIASED),
}


def problems(batch: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p, q (B, n), and points x, y (B, n, 2) whose largest squared distance is 1 in each problem."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(batch, n, 2, generator=generator) for _ in range(2))
    p, q = (torch.rand(batch, n, generator=generator) + 0.05 for _ in range(2))
    largest = PointCost(x, y).dense().amax((-2, -1), keepdim=True).sqrt()
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True), x / largest, y / largest


def measured(epsilons: list[float], *, batch: int, n: int, rounds: int) -> dict[str, Any]:
    """Return errors relative to the exact values, (epsilons, B), median seconds, and how many problems converged."""
    p, q, x, y = problems(batch, n)
    matrix = PointCost(x, y).dense()
    among = {"cost_p": PointCost(x).dense(), "cost_q": PointCost(y).dense()}
    exact = otloss.emd(p, q, matrix)
    errors: dict[str, list[Tensor]] = {name: [] for name in NAMES}
    converged: list[int] = []
    steps: dict[str, Any] = {"exact": lambda: otloss.emd(p, q, matrix)}
    for epsilon in epsilons:
        solution = otloss.solve(p, q, matrix, epsilon=epsilon)
        converged.append(int(solution.converged.sum()))
        debiased = otloss.sinkhorn_divergence(p, q, matrix, epsilon=epsilon, **among)
        for name, results in (("value", solution.value), ("linear", solution.linear_cost), ("debiased", debiased)):
            errors[name].append((results - exact).abs() / exact)
        steps[f"value {epsilon}"] = lambda e=epsilon: otloss.sinkhorn(p, q, matrix, epsilon=e)
        steps[f"debiased {epsilon}"] = lambda e=epsilon: otloss.sinkhorn_divergence(p, q, matrix, epsilon=e, **among)
    timings = timed_rounds(steps, rounds=rounds)
    seconds = {name: [timings[f"{name} {e}"].median for e in epsilons] for name in ("value", "debiased")}
    return {
        "errors": {name: torch.stack(rows) for name, rows in errors.items()},
        "seconds": seconds,
        "exact": timings["exact"].median,
        "converged": converged,
    }


def _plot(ax: Axes, x: list[float], y: Any, style: tuple[str, str], name: str, hollow: list[bool]) -> None:
    line(ax, x, y, name, *style)
    at = [i for i, is_hollow in enumerate(hollow) if is_hollow]
    ax.plot([x[i] for i in at], [y[i] for i in at], style[1], color=style[0], markerfacecolor="white", markersize=4.5)


def draw(file: Path, epsilons: list[float], results: dict[str, Any], *, title: str) -> None:
    """Write the figure: errors on the left, times on the right."""
    figure, ((left, right),) = panels(10, 4.4, 1, 2, sharex=True)
    hollow = [count < results["errors"]["value"].shape[-1] for count in results["converged"]]
    for name, (label, style) in NAMES.items():
        errors = results["errors"][name]
        _plot(left, epsilons, errors.median(-1).values, style, label, hollow)
        left.fill_between(epsilons, errors.quantile(0.1, -1), errors.quantile(0.9, -1), color=style[0], alpha=0.15)
    left.set_ylabel("|value - exact| / exact\nmedian and middle 80 % of the problems")
    for name, seconds in results["seconds"].items():
        _plot(right, epsilons, [1000 * s for s in seconds], NAMES[name][1], NAMES[name][0], hollow)
    for ax, level in ((left, []), (right, [1000 * results["exact"]])):  # on the left for the legend alone
        ax.hlines(level, epsilons[0], epsilons[-1], color=EXACT[0], linestyle="--", linewidth=1.5, label="exact, emd")
    right.set_ylabel("time for the whole batch, values only (ms)")
    for ax in (left, right):
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("epsilon / largest cost")
    right.set_ylim(bottom=1)
    save(figure, file, title=title, legend_of=left)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.epsilon_plot", description=__doc__, allow_abbrev=False)
    parser.add_argument("file", nargs="?", type=Path, default=FILE)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    batch, n = (4, 8) if options.small else (64, 64)
    epsilons = EPSILONS[::4] if options.small else EPSILONS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otloss.ConvergenceWarning)  # hollow markers show it
        results = measured(epsilons, batch=batch, n=n, rounds=options.rounds)
    for i, epsilon in enumerate(epsilons):
        medians = {name: float(errors[i].median()) for name, errors in results["errors"].items()}
        print(f"epsilon {epsilon:.2g}: {results['converged'][i]} of {batch} converged,", ", ".join(
            f"{name} {error:.2g}" for name, error in medians.items()
        ))  # fmt: skip
    print(f"{hardware()}, torch {torch.__version__}")
    draw(options.file, epsilons, results, title=f"{batch} problems of {n} points in the plane, squared distances")


if __name__ == "__main__":
    main()
