"""Who competes in the solvers benchmark, each with its settings from the cheapest on."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import geomloss.ot
import numpy as np
import ot
import torch
from torch import Tensor

import otloss
from benchmarks.measure import say
from benchmarks.solver_cases import Problems, Ruler, plan_of

OURS, OURS_GRADIENTS = "otloss", "otloss, values and gradients"
POT_METHODS = {"log_sinkhorn": "in logarithms, its default", "sinkhorn": "scaling form"}
ITERATED = "iterations"
Result = Any


@dataclass(frozen=True, eq=False)
class Contestant:
    """One way to solve a batch of entropic problems.

    Attributes:
        knob: what its settings are called.
        settings: from the cheapest to the most precise.
        solve: with a setting; this is what is timed.
        plan: (B, n, m) of what `solve` returned.
    """

    name: str
    knob: str
    settings: Sequence[float]
    solve: Callable[[float], Result]
    plan: Callable[[Result], np.ndarray]


@dataclass(frozen=True)
class Found:
    """The cheapest setting that reached the gap; None, and the best gap, where the time was up before."""

    setting: float | None
    gap: float


def cheapest(contestant: Contestant, ruler: Ruler, *, gap: float, most_seconds: float) -> Found:
    """Go through the settings until the worst problem's gap is small enough, or one run takes too long.

    Iterations are then bisected down to the least number that is enough.
    """
    best, enough, too_few = np.inf, None, 0
    for setting in contestant.settings:
        worst, seconds = _tried(contestant, ruler, setting)
        best = min(best, worst)
        if worst <= gap:
            enough = Found(setting, worst)
            break
        if seconds > most_seconds:
            break
        too_few = int(setting)
    if enough is None or enough.setting is None:
        return Found(None, best)
    if contestant.knob == ITERATED:
        most = int(enough.setting)
        while most - too_few > 1:
            middle = (too_few + most) // 2
            worst, _ = _tried(contestant, ruler, middle)
            if worst <= gap:
                most, enough = middle, Found(middle, worst)
            else:
                too_few = middle
    return enough


def _tried(contestant: Contestant, ruler: Ruler, setting: float) -> tuple[float, float]:
    """The worst problem's gap, and the seconds of this run."""
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what does not converge shows in the gap
        result = contestant.solve(setting)
    seconds = time.perf_counter() - started
    return float(ruler.gaps(contestant.plan(result)).max()), seconds


# Twelve to a decade: peers get the least number of iterations that is enough.
TOLERANCES = [10 ** (-k / 12) for k in range(6, 73)]
ITERATIONS = sorted({round(2 ** (k / 2)) for k in range(34)})


def ours(problems: Problems, epsilon: float) -> Contestant:
    """`otloss.sinkhorn` returns a value; the plan comes from `otloss.solve`, which searches in the same way."""
    p, q, cost = problems.p, problems.q, problems.cost
    arrays = problems.arrays()

    def plan(tolerance: float) -> np.ndarray:
        f, g = otloss.solve(p, q, cost, epsilon=epsilon, tolerance=tolerance).potentials
        return plan_of(f.detach(), g.detach(), arrays, epsilon)

    def solve(tolerance: float) -> float:
        otloss.sinkhorn(p, q, cost, epsilon=epsilon, tolerance=tolerance)
        return tolerance

    return Contestant(OURS, "tolerance", TOLERANCES, solve, plan)


def ours_with_gradients(problems: Problems, epsilon: float) -> Callable[[float], Result]:
    inputs = problems.with_gradients()
    return lambda tolerance: torch.autograd.grad(
        otloss.sinkhorn(*inputs, epsilon=epsilon, tolerance=tolerance).sum(), inputs
    )


def pot(problems: Problems, epsilon: float) -> list[Contestant]:
    """Both methods of `ot.batch.solve_batch`, in torch and numpy; without gradients, which is the cheapest it has.

    Iterations are given, and its own look at convergence every ten of them never ends the search, so no number in
    between is passed over. The scaling form forms exp(-C / epsilon), which underflows at small epsilon: in float32
    sooner, so float64 competes too.
    """
    kinds = itertools.product(POT_METHODS, ("torch", "numpy"), ("float32", "float64"))
    return [_pot(problems, epsilon, *kind) for kind in kinds]


def _pot(problems: Problems, epsilon: float, method: str, library: str, dtype: str) -> Contestant:
    tensors = [t.to(getattr(torch, dtype)) for t in (problems.p, problems.q, problems.cost)]
    p, q, cost = [t.numpy() for t in tensors] if library == "numpy" else tensors

    def solve(iterations: float) -> Result:
        with np.errstate(all="ignore"):
            return ot.batch.solve_batch(
                cost, epsilon, p, q, max_iter=int(iterations), tol=0.0, method=method, reg_type="kl", grad="detach"
            )

    return Contestant(
        f"POT {method}, {library} {dtype}", ITERATED, ITERATIONS, solve, lambda result: np.asarray(result.plan)
    )


def geomloss_batch(problems: Problems, epsilon: float) -> Contestant:
    """`geomloss.ot.solve_batch`: its iterations are also the steps that epsilon falls in."""

    def solve(iterations: float) -> Result:
        solution = geomloss.ot.solve_batch(
            problems.cost, reg=epsilon, a=problems.p, b=problems.q, max_iter=int(iterations)
        )
        _ = solution.value
        return solution

    return Contestant(
        "GeomLoss ot.solve_batch", ITERATED, ITERATIONS, solve, lambda result: result.plan.detach().numpy()
    )


# ---- exact transport, and the line -------------------------------------------------------------------------------


def emd_steps(problems: Problems) -> dict[str, Callable[[], list[Tensor]]]:
    """Values, and gradients in p, q and the cost; each step returns values (B,) and gradients."""
    p, q, cost = problems.with_gradients()
    singles = [[t[k].detach().clone().requires_grad_() for t in (p, q, cost)] for k in range(p.shape[0])]

    def our_step() -> list[Tensor]:
        values = otloss.emd(p, q, cost)
        return [values.detach(), *torch.autograd.grad(values.sum(), (p, q, cost))]

    def pot_step() -> list[Tensor]:
        values, gradients = [], []
        for single in singles:
            value = ot.emd2(*single, numItermax=10_000_000)
            gradients.append(torch.autograd.grad(value, single))
            values.append(value.detach())
        return [torch.stack(values), *map(torch.stack, zip(*gradients, strict=True))]

    return {OURS: our_step, "POT emd2": pot_step}


@dataclass(frozen=True)
class Lines:
    """Weighted points on the line: p, q (B, n), positions x, y (n,) or (B, n); y is None where the support is one."""

    p: Tensor
    q: Tensor
    x: Tensor
    y: Tensor | None

    @staticmethod
    def shared(batch: int, bins: int) -> Lines:
        p, q = _weights(batch, bins)
        return Lines(p, q, torch.linspace(0, 1, bins), None)

    @staticmethod
    def apart(batch: int, samples: int) -> Lines:
        p, q = _weights(batch, samples)
        generator = torch.Generator().manual_seed(1)
        x, y = (torch.rand(batch, samples, generator=generator) for _ in range(2))
        return Lines(p, q, x, y)


def _weights(batch: int, bins: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(batch, bins, generator=generator) + 0.05 for _ in range(2))
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def our_lines(lines: Lines, *, gradients: bool) -> dict[str, Callable[[], Tensor]]:
    """Both functions where the support is shared, one where it is not."""
    p, q = (w.clone().requires_grad_(gradients) for w in (lines.p, lines.q))
    steps = {"otloss wasserstein_1d": lambda: otloss.wasserstein_1d(p, q, lines.x, lines.y)}
    if lines.y is None:
        steps["otloss cdf_distance"] = lambda: otloss.cdf_distance(p, q, lines.x, power=1)
    return {name: _stepping(step, (p, q) if gradients else ()) for name, step in steps.items()}


def pot_lines(lines: Lines, *, gradients: bool) -> dict[str, Callable[[], Tensor]]:
    """Its batch is the last axis; a support that is sorted already is not sorted again."""
    y = lines.x if lines.y is None else lines.y
    x, y = (t.expand_as(lines.p).T.contiguous() for t in (lines.x, y))
    p, q = (w.T.contiguous().requires_grad_(gradients) for w in (lines.p, lines.q))
    sort = lines.y is not None
    steps = {"POT wasserstein_1d, torch": lambda: ot.wasserstein_1d(x, y, p, q, p=1, require_sort=sort)}
    if not gradients:
        arrays = [t.numpy() for t in (x, y, p, q)]
        steps["POT wasserstein_1d, numpy"] = lambda: torch.from_numpy(
            ot.wasserstein_1d(*arrays, p=1, require_sort=sort)
        )
    return {name: _stepping(step, (p, q) if gradients else ()) for name, step in steps.items()}


def _stepping(step: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        values = step()
        if inputs:
            torch.autograd.grad(values.sum(), inputs)
        return values.detach()

    return run


def say_found(contestant: Contestant, found: Found, gap: float) -> None:
    if found.setting is None:
        say(f"  {contestant.name:<34} did not reach a gap of {gap:g}: {found.gap:.2g} at best")
    else:
        setting = f"{found.setting:.0f}" if contestant.knob == ITERATED else f"{found.setting:.3g}"
        say(f"  {contestant.name:<34} {contestant.knob} {setting}: gap {found.gap:.2g}")
