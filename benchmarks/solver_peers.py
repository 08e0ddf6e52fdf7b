"""The contestants of the solvers benchmark, each with its settings in order of cost."""

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
from benchmarks.bench import OURS
from benchmarks.measure import say
from benchmarks.solver_cases import Gaps, Problems, plan_of

OURS_GRADIENTS = f"{OURS}, values and gradients"
POT_METHODS = {"log_sinkhorn": "in logarithms, its default", "sinkhorn": "scaling form"}
ITERATED = "iterations"
SWEEP_SECONDS = 120.0  # no further setting is tried after this time
Result = Any
Step = Callable[[], Any]


@dataclass(frozen=True, eq=False)
class Contestant:
    """One way to solve a problem, with a setting that trades time for accuracy.

    Attributes:
        knob: name of the setting.
        settings: from the cheapest to the most accurate.
        solve: with a setting; this is what is timed.
        errors: of what `solve` returned, to be compared with limits.
    """

    name: str
    knob: str
    settings: Sequence[float]
    solve: Callable[[float], Result]
    errors: Callable[[Result], tuple[float, ...]]


@dataclass(frozen=True)
class Found:
    """The cheapest setting that is accurate enough, its errors and the seconds of its one run.

    Without one, `setting` is None, and the rest belongs to the last setting that was tried.
    """

    setting: float | None
    errors: tuple[float, ...]
    seconds: float


def cheapest(contestant: Contestant, limits: Sequence[float], *, max_seconds: float) -> Found:
    """Try the settings until all errors are within the limits, or a run takes more than `max_seconds`.

    Iterations are then bisected to the smallest number that is accurate enough.
    """
    results, too_few, spent = _tried(contestant, contestant.settings[0], limits), 0, 0.0
    for setting in contestant.settings[1:]:
        spent += results.seconds
        if results.setting is not None or results.seconds > max_seconds or spent > SWEEP_SECONDS:
            break
        too_few, results = too_few + 1, _tried(contestant, setting, limits)
    if results.setting is not None and contestant.knob == ITERATED and too_few:
        low, high = int(contestant.settings[too_few - 1]), int(results.setting)
        while high - low > 1:
            middle = (low + high) // 2
            tried = _tried(contestant, middle, limits)
            low, high = (low, middle) if tried.setting is not None else (middle, high)
            results = tried if tried.setting is not None else results
    _report(contestant, results, limits)
    return results


def _tried(contestant: Contestant, setting: float, limits: Sequence[float]) -> Found:
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing convergence shows in the errors
        result = contestant.solve(setting)
    seconds = time.perf_counter() - started
    errors = contestant.errors(result)
    is_enough = all(error <= limit for error, limit in zip(errors, limits, strict=True))
    return Found(setting if is_enough else None, errors, seconds)


def _report(contestant: Contestant, results: Found, limits: Sequence[float]) -> None:
    errors, within = (", ".join(f"{error:.2g}" for error in numbers) for numbers in (results.errors, limits))
    if results.setting is None:
        say(f"  {contestant.name:<34} not accurate enough: errors {errors}, limits {within}")
    else:
        setting = f"{results.setting:.0f}" if contestant.knob == ITERATED else f"{results.setting:.3g}"
        say(f"  {contestant.name:<34} {contestant.knob} {setting}: errors {errors}, {results.seconds:.2g} s")


# ---- batches of entropic problems ------------------------------------------------------------------------------------

# Twelve per decade; peers get the smallest number of iterations that is accurate enough.
TOLERANCES = [10 ** (-k / 12) for k in range(6, 73)]
ITERATIONS = sorted({round(2 ** (k / 2)) for k in range(34)})


def ours(problems: Problems, epsilon: float, gaps: Gaps) -> Contestant:
    """`otloss.sinkhorn` returns a value; the plan is by `otloss.solve`, which uses the same search."""
    p, q, cost = problems.p, problems.q, problems.cost

    def solve(tolerance: float) -> float:
        otloss.sinkhorn(p, q, cost, epsilon=epsilon, tolerance=tolerance)
        return tolerance

    def errors(tolerance: float) -> tuple[float, ...]:
        f, g = otloss.solve(p, q, cost, epsilon=epsilon, tolerance=tolerance).potentials
        return (float(gaps.of(plan_of(f.detach(), g.detach(), gaps.arrays, epsilon)).max()),)

    return Contestant(OURS, "tolerance", TOLERANCES, solve, errors)


def ours_with_gradients(
    problems: Problems, epsilon: float, marginal_penalty: float | None = None
) -> Callable[[float], Result]:
    inputs = problems.with_gradients()
    options: dict[str, Any] = {"epsilon": epsilon, "marginal_penalty": marginal_penalty}
    return lambda tolerance: torch.autograd.grad(otloss.sinkhorn(*inputs, tolerance=tolerance, **options).sum(), inputs)


def pot(problems: Problems, epsilon: float, gaps: Gaps) -> list[Contestant]:
    """Both methods of `ot.batch.solve_batch`, in torch and numpy; without gradients, which is the fastest mode.

    The number of iterations is fixed: with `tol=0` the check of convergence every ten iterations never stops it. The
    scaling form computes exp(-C / epsilon), which underflows at small epsilon, in float32 first, so float64 competes
    too.
    """
    kinds = itertools.product(POT_METHODS, ("torch", "numpy"), ("float32", "float64"))
    return [_pot(problems, epsilon, gaps, *kind) for kind in kinds]


def _pot(problems: Problems, epsilon: float, gaps: Gaps, method: str, library: str, dtype: str) -> Contestant:
    tensors = [t.to(getattr(torch, dtype)) for t in (problems.p, problems.q, problems.cost)]
    p, q, cost = [t.numpy() for t in tensors] if library == "numpy" else tensors

    def solve(iterations: float) -> Result:
        with np.errstate(all="ignore"):
            return ot.batch.solve_batch(
                cost, epsilon, p, q, max_iter=int(iterations), tol=0.0, method=method, reg_type="kl", grad="detach"
            )

    return Contestant(
        f"POT {method}, {library} {dtype}", ITERATED, ITERATIONS, solve,
        lambda result: (float(gaps.of(np.asarray(result.plan)).max()),),
    )  # fmt: skip


def geomloss_batch(problems: Problems, epsilon: float, gaps: Gaps) -> Contestant:
    """`geomloss.ot.solve_batch`: its iterations are also the steps in which epsilon decreases."""

    def solve(iterations: float) -> Result:
        solution = geomloss.ot.solve_batch(
            problems.cost, reg=epsilon, a=problems.p, b=problems.q, max_iter=int(iterations)
        )
        _ = solution.value
        return solution

    return Contestant(
        "GeomLoss ot.solve_batch", ITERATED, ITERATIONS, solve,
        lambda result: (float(gaps.of(result.plan.detach().numpy()).max()),),
    )  # fmt: skip


# ---- exact transport, and the line -----------------------------------------------------------------------------------


def emd_steps(problems: Problems) -> dict[str, Step]:
    """Values and gradients in p, q and the cost; each step returns the values."""
    p, q, cost = problems.with_gradients()
    singles = [[t[k].detach().clone().requires_grad_() for t in (p, q, cost)] for k in range(p.shape[0])]

    def our_step() -> Tensor:
        values = otloss.emd(p, q, cost)
        torch.autograd.grad(values.sum(), (p, q, cost))
        return values.detach()

    def pot_step() -> Tensor:
        values = []
        for single in singles:
            value = ot.emd2(*single, numItermax=10_000_000)
            torch.autograd.grad(value, single)
            values.append(value.detach())
        return torch.stack(values)

    return {OURS: our_step, "POT emd2": pot_step}


@dataclass(frozen=True)
class Lines:
    """Weighted points on the line: p, q (B, n), positions x, y (n,) or (B, n); y is None if the support is shared."""

    p: Tensor
    q: Tensor
    x: Tensor
    y: Tensor | None

    @staticmethod
    def random(batch: int, n: int, *, shared: bool) -> Lines:
        generator = torch.Generator().manual_seed(0)
        p, q = (torch.rand(batch, n, generator=generator) + 0.05 for _ in range(2))
        x, y = (torch.rand(batch, n, generator=generator) for _ in range(2))
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
        return Lines(p, q, torch.linspace(0, 1, n), None) if shared else Lines(p, q, x, y)


def line_steps(lines: Lines, *, gradients: bool) -> dict[str, Step]:
    """Ours and POT's, whose batch is the last axis; a shared support is sorted already and is not sorted again."""
    p, q = (w.clone().requires_grad_(gradients) for w in (lines.p, lines.q))
    y = lines.x if lines.y is None else lines.y
    x, y = (t.expand_as(lines.p).T.contiguous() for t in (lines.x, y))
    a, b = (w.T.contiguous().requires_grad_(gradients) for w in (lines.p, lines.q))
    sort = lines.y is not None
    steps = {f"{OURS} wasserstein_1d": _step(lambda: otloss.wasserstein_1d(p, q, lines.x, lines.y), (p, q))}
    if lines.y is None:
        steps[f"{OURS} cdf_distance"] = _step(lambda: otloss.cdf_distance(p, q, lines.x, power=1), (p, q))
    steps["POT wasserstein_1d, torch"] = _step(lambda: ot.wasserstein_1d(x, y, a, b, p=1, require_sort=sort), (a, b))
    if not gradients:
        arrays = [t.numpy() for t in (x, y, a, b)]
        steps["POT wasserstein_1d, numpy"] = lambda: torch.from_numpy(
            ot.wasserstein_1d(*arrays, p=1, require_sort=sort)
        )
    return steps


def _step(values_of: Callable[[], Tensor], weights: tuple[Tensor, Tensor]) -> Step:
    def run() -> Tensor:
        values = values_of()
        if weights[0].requires_grad:
            torch.autograd.grad(values.sum(), weights)
        return values.detach()

    return run
