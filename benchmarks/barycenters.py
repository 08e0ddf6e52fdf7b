"""Entropic barycenters beside POT's at equal error, on one thread and in seconds of the processor.

The error is the sum of the absolute differences from the barycenter at a tolerance of 1e-11, whose agreement with POT
shows in POT's own error; POT gets the largest threshold at which its error is no larger than ours. Details finer than
the blur hardly change the objective of debiased barycenters: there the error is the excess of the objective, the mean
divergence, over the least that we know, relative to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import ot
import torch
from torch import Tensor

import otloss
from benchmarks.bench import OURS, Bench, at_least, one_thread
from benchmarks.measure import Limit, Settings
from benchmarks.solver_peers import Contestant, Step, cheapest
from otloss.costs import Cost, GridCost, LineCost

TOLERANCE, EXACT = 1e-6, 1e-11
# Smaller relative excesses count as equal. POT's stops near 1e-9, so with a limit of 1e-10 a difference in the last
# digits would decide whether it runs for its most iterations.
LEAST_EXCESS = 1e-8
THRESHOLDS = tuple(10.0**-k for k in range(2, 15))
MAX_SECONDS = 60.0
ROUNDING = 1e-12
ByPot = Callable[[np.ndarray, float], np.ndarray]


def bumps(count: int, *cells: int) -> Tensor:
    """(count, bins): Gaussians on the unit interval or square."""
    generator = torch.Generator().manual_seed(0)
    axes = [torch.linspace(0, 1, size, dtype=torch.float64) for size in cells]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)
    centres = 0.3 + 0.4 * torch.rand(count, 1, len(cells), generator=generator, dtype=torch.float64)
    widths = 0.04 + 0.06 * torch.rand(count, 1, generator=generator, dtype=torch.float64)
    heights = (-(grid - centres).square().sum(-1) / (2 * widths.square())).exp() + 1e-9
    return heights / heights.sum(-1, keepdim=True)


def compare(
    bench: Bench, limit: Limit, p: Tensor, cost: Cost, epsilon: float, by_pot: ByPot, *, debiased: bool = False
) -> None:
    """p is (k, n), or (problems, k, n) and a loop of POT."""

    def ours(tolerance: float) -> Tensor:
        return otloss.barycenter(p, cost, epsilon=epsilon, tolerance=tolerance, debiased=debiased)

    exact = ours(EXACT)

    def objective(weights: Tensor) -> float:
        a = (weights / weights.sum(-1, keepdim=True)).unsqueeze(-2)
        return float(otloss.sinkhorn_divergence(a, p, cost, epsilon=epsilon, tolerance=EXACT).mean())

    smallest = objective(exact) if debiased else 0.0

    def errors(weights: Tensor) -> tuple[float]:
        if debiased:
            return (max(objective(weights) / smallest - 1, LEAST_EXCESS),)
        return (float((weights - exact).abs().sum(-1).max()),)

    def pot(threshold: float) -> Tensor:
        each = [by_pot(row.numpy(), threshold).ravel() for row in p.reshape(-1, *p.shape[-2:])]
        return torch.as_tensor(np.stack(each)).reshape(exact.shape)

    reached = (max(*errors(ours(TOLERANCE)), ROUNDING),)
    peer = Contestant("POT", "threshold", THRESHOLDS, pot, errors)
    weights = cheapest(peer, reached, max_seconds=MAX_SECONDS)
    steps: dict[str, Step] = {OURS: partial(ours, TOLERANCE)}
    notes = {OURS: f"{reached[0]:.1e}"}
    if weights.setting is None:  # no time of POT is one at equal error
        bench.timed(limit.what, steps, notes=notes, processor=True)
        return
    steps[peer.name], notes[peer.name] = partial(pot, weights.setting), f"{weights.errors[0]:.1e}"
    bench.row(limit, steps, notes=notes, processor=True)


def on_a_line(
    bench: Bench, n: int, epsilon: float, *, problems: int = 1, limit: float = 1.0, debiased: bool = False
) -> None:
    cost = LineCost(torch.linspace(0, 1, n, dtype=torch.float64), power=2)
    matrix = cost.dense().numpy().copy()
    p = bumps(3 * problems, n).reshape(problems, 3, n)
    case = f"{'debiased ' * debiased}barycenter of 3 histograms, n={n}, epsilon {epsilon:g}"
    case += f", {problems} at once" * (problems > 1)
    solver = ot.bregman.barycenter_debiased if debiased else ot.bregman.barycenter_sinkhorn

    def by_pot(rows: np.ndarray, threshold: float) -> np.ndarray:
        weights: np.ndarray = solver(rows.T.copy(), matrix, epsilon, stopThr=threshold, numItermax=20_000)
        return weights

    compare(bench, at_least(case, limit), p if problems > 1 else p[0], cost, epsilon, by_pot, debiased=debiased)


def of_images(bench: Bench, side: int, epsilon: float = 0.004) -> None:
    """POT puts the cells of an image on linspace(0, 1)."""
    cost = GridCost((side, side), spacing=1 / (side - 1))

    def by_pot(images: np.ndarray, threshold: float) -> np.ndarray:
        weights: np.ndarray = ot.bregman.convolutional_barycenter2d(
            images.reshape(-1, side, side), epsilon, stopThr=threshold, numItermax=20_000, warn=False
        )
        return weights

    case = f"barycenter of 3 images {side} x {side}, epsilon {epsilon:g}"
    compare(bench, at_least(case, 1.0), bumps(3, side, side), cost.to(torch.float64), epsilon, by_pot)


def main(settings: Settings) -> None:
    bench, small = Bench(settings, "barycenters"), settings.small
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing convergence shows in the errors
        for n, epsilon in ((8, 0.1),) if small else ((50, 0.1), (50, 0.01), (1000, 0.01), (1000, 0.001)):
            on_a_line(bench, n, epsilon)
        for epsilon in (0.1,) if small else (0.05, 0.01):
            on_a_line(bench, 8 if small else 100, epsilon, problems=2 if small else 16, limit=2.0)
        for epsilon in (0.1,) if small else (0.1, 0.01, 0.002):
            on_a_line(bench, 8 if small else 50, epsilon, limit=0.5, debiased=True)
        for side in (6,) if small else (32, 128):
            of_images(bench, side, 0.1 if small else 0.004)
    bench.report("work: how many times as long POT takes")
