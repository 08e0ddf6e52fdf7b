"""One small problem a call, beside POT and scipy: what a call costs in itself. One thread, seconds of the processor.

And one problem between two images, by products along the axes, beside the same solver with the cost as a matrix.
"""

from __future__ import annotations

import warnings
from typing import Any

import ot
import torch
from scipy.optimize import linear_sum_assignment

import otloss
from benchmarks.bench import OURS, Bench, Steps, at_least, one_thread
from benchmarks.measure import Settings
from benchmarks.solver_cases import Problems
from otloss.costs import GridCost

EPSILON = 0.1
# Sides, epsilons as shares of the squared side, and derivatives.
IMAGES = ((64, 0.001, "envelope"), (32, 0.01, "implicit"))


def exact(n: int) -> Steps:
    one = Problems.random(1, n)
    p, q, cost = one.p[0].double(), one.q[0].double(), one.cost[0].double()
    p, q = p / p.sum(), q / q.sum()
    return {OURS: lambda: otloss.emd(p, q, cost), "POT emd2": lambda: ot.emd2(p, q, cost)}


def entropic(n: int) -> Steps:
    """POT's scaling form, to the same marginal error."""
    one = Problems.random(1, n)
    p, q, cost = one.p[0].double(), one.q[0].double(), one.cost[0].double()
    p, q = p / p.sum(), q / q.sum()

    def by_pot() -> Any:
        plan = ot.sinkhorn(p, q, cost, EPSILON, stopThr=1e-9)
        return (cost * plan).sum() + EPSILON * (plan * (plan / torch.outer(p, q)).log()).sum()

    return {OURS: lambda: otloss.sinkhorn(p, q, cost, epsilon=EPSILON), "POT sinkhorn": by_pot}


def on_a_line(samples: int, order: int) -> Steps:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(samples, generator=generator, dtype=torch.float64) for _ in range(2))
    w = torch.full((samples,), 1 / samples, dtype=torch.float64)
    return {
        OURS: lambda: otloss.wasserstein_1d(w, w, x, y, order=order),
        "POT": lambda: ot.wasserstein_1d(x, y, p=order),
    }


def detection(queries: int, targets: int) -> Steps:
    cost = torch.randn(queries, targets, generator=torch.Generator().manual_seed(0))

    def by_scipy() -> Any:
        return [torch.as_tensor(index) for index in linear_sum_assignment(cost.numpy())]

    return {OURS: lambda: otloss.match(cost), "scipy": by_scipy}


def graphs(n: int) -> Steps:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    C, D, M, w = torch.cdist(x, x), torch.cdist(y, y), torch.cdist(x, y), torch.full((n,), 1 / n, dtype=torch.float64)
    arrays = [t.numpy() for t in (M, C, D, w, w)]
    return {
        OURS: lambda: otloss.fused_gromov(C, D, M, w, w, alpha=0.5).value,
        "POT": lambda: torch.tensor(ot.gromov.fused_gromov_wasserstein2(*arrays, alpha=0.5)),
    }


def images(side: int, share: float, grad: str) -> Steps:
    """Squared distances between cells, epsilon as a share of the squared side; with the gradient of an image."""
    grid = GridCost((side, side))
    matrix = grid.dense()
    p, q = (w.softmax(-1) for w in torch.randn(2, side * side, generator=torch.Generator().manual_seed(0)))

    def by(cost: GridCost | torch.Tensor) -> float:
        weights = p.clone().requires_grad_()
        value = otloss.sinkhorn(weights, q, cost, epsilon=share * side**2, grad=grad)
        value.backward()
        return value.item()

    return {OURS: lambda: by(grid), "the same, by a matrix": lambda: by(matrix)}


def main(settings: Settings) -> None:
    bench, small = Bench(settings, "single_problems"), settings.small
    n, few = (4, 3) if small else (100, 20)
    sizes = (4,) if small else (5, 32, 64)
    rows: list[tuple[str, float, Steps]] = [
        *((f"emd, {n} x {n}", 1.0 if n > 5 else 0.5, exact(n)) for n in sizes),
        *((f"sinkhorn, {n} x {n}, epsilon {EPSILON:g}", 1.0, entropic(n)) for n in sizes),
        *((f"wasserstein_1d, {n} samples, order {order}", 0.5, on_a_line(n, order)) for order in (1, 2)),
        (f"match, {n} x {few}", 0.5, detection(n, few)),
        *((f"fused_gromov, {n} nodes", 1.0, graphs(n)) for n in ((4,) if small else (12, 30))),
    ]
    for side, share, grad in ((4, 0.01, "envelope"),) if small else IMAGES:
        case = f"sinkhorn between images {side} x {side}, epsilon {share:g} side^2, {grad}"
        rows.append((case, 1.0, images(side, share, grad)))
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # POT compares the masses of its own sums
        for case, limit, steps in rows:
            answers = {name: step() for name, step in steps.items()}
            notes = {name: "" if "match" in case else f"{float(value):.9g}" for name, value in answers.items()}
            bench.row(at_least(case, limit), steps, notes=notes, processor=True)
    bench.report("work: how many times as long the peer takes")
