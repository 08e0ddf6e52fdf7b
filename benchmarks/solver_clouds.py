"""One debiased divergence between two clouds, its value and its gradient in the positions, at equal accuracy.

GeomLoss has the cost |x - y|^2 / 2 and epsilon = blur^2; ours is |x - y|^2, so our epsilon is 2 blur^2 and our value
twice theirs. Both errors, of value and gradient, are measured against our float64 answer at a tight tolerance, whose
duality gap is printed beside it; every setting is one of a sweep, from the cheapest on.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from geomloss import SamplesLoss
from torch import Tensor

import otloss
from benchmarks.measure import say
from otloss.costs import PointCost

BLUR = 0.05
VALUE_ERROR, GRADIENT_ERROR = 1e-3, 1e-2
SCALINGS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.98, 0.99)
TOLERANCES = [10 ** (-k / 4) for k in range(4, 21)]
HAS_KEOPS = importlib.util.find_spec("pykeops") is not None
BACKENDS = ("tensorized", "online", "multiscale") if HAS_KEOPS else ("tensorized",)
WHICH = f"GeomLoss {', '.join(BACKENDS)}" if HAS_KEOPS else "KeOps not installed: GeomLoss tensorized only"
SWEEP_SECONDS = 120.0  # after which a peer begins no further run
Answer = tuple[float, Tensor]


@dataclass(frozen=True)
class Clouds:
    """x (n, d) uniform in the unit cube, y (n, d) in a smaller one within it; weights p, q uniform in (0.05, 1.05)."""

    x: Tensor
    y: Tensor
    p: Tensor
    q: Tensor

    @staticmethod
    def random(n: int, axes: int = 3) -> Clouds:
        generator = torch.Generator().manual_seed(0)
        x, y = (torch.rand(n, axes, generator=generator) for _ in range(2))
        p, q = (torch.rand(n, generator=generator) + 0.05 for _ in range(2))
        return Clouds(x, 0.2 + 0.7 * y, p / p.sum(), q / q.sum())

    def double(self) -> Clouds:
        p, q = self.p.double(), self.q.double()
        return Clouds(self.x.double(), self.y.double(), p / p.sum(), q / q.sum())


@dataclass(frozen=True, eq=False)
class CloudContestant:
    """`solve(setting)` returns the value, in units of |x - y|^2, and its gradient in x."""

    name: str
    knob: str
    settings: Sequence[float]
    solve: Callable[[float], Answer]


@dataclass(frozen=True)
class CloudFound:
    """The cheapest setting that is accurate enough (None: none was), its errors and the seconds of its one run.

    Where none was, errors and seconds are those of the costliest setting that was tried.
    """

    setting: float | None
    value_error: float
    gradient_error: float
    seconds: float


def ours(clouds: Clouds, *, blur: float = BLUR) -> CloudContestant:
    x = clouds.x.clone().requires_grad_()

    def solve(tolerance: float) -> Answer:
        value = otloss.sinkhorn_divergence(
            clouds.p, clouds.q, PointCost(x, clouds.y), epsilon=2 * blur**2, tolerance=tolerance
        )
        return value.item(), torch.autograd.grad(value, x)[0]

    return CloudContestant("otloss", "tolerance", TOLERANCES, solve)


def geomloss(clouds: Clouds, backend: str, *, blur: float = BLUR) -> CloudContestant:
    x = clouds.x.clone().requires_grad_()

    def solve(scaling: float) -> Answer:
        loss = SamplesLoss("sinkhorn", p=2, blur=blur, scaling=scaling, backend=backend)
        value = 2 * loss(clouds.p, x, clouds.q, clouds.y)
        return value.item(), torch.autograd.grad(value, x)[0]

    return CloudContestant(f"GeomLoss SamplesLoss, {backend}", "scaling", SCALINGS, solve)


def peers(clouds: Clouds) -> list[CloudContestant]:
    """All backends that run here; without pykeops that is the one that holds the matrices."""
    return [geomloss(clouds, backend) for backend in BACKENDS]


def reference(clouds: Clouds, *, blur: float = BLUR, tolerance: float = 1e-6) -> Answer:
    """Value and gradient in float64."""
    return ours(clouds.double(), blur=blur).solve(tolerance)


def errors_of(answer: Answer, truth: Answer) -> tuple[float, float]:
    """Those of the value and of the gradient, relative."""
    (got, slope), (value, gradient) = answer, truth
    return abs(got / value - 1), float((slope.double() - gradient).norm() / gradient.norm())


def cheapest(
    contestant: CloudContestant,
    truth: Answer,
    *,
    most_seconds: float,
    limits: tuple[float, float] = (VALUE_ERROR, GRADIENT_ERROR),
) -> CloudFound:
    """Go through the settings until value and gradient are near enough to the truth, or time is up.

    That is after a run of more than `most_seconds`, or after `SWEEP_SECONDS` in all.
    """
    found, spent = CloudFound(None, float("inf"), float("inf"), 0.0), 0.0
    for setting in contestant.settings:
        started = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what does not converge shows in the errors
            answer = contestant.solve(setting)
        seconds = time.perf_counter() - started
        spent += seconds
        errors = errors_of(answer, truth)
        say(f"  {contestant.name:<34} {contestant.knob} {setting:.3g}: value error {errors[0]:.1e}, gradient error "
            f"{errors[1]:.1e}, {seconds:.1f} s")  # fmt: skip
        if errors[0] <= limits[0] and errors[1] <= limits[1]:
            return CloudFound(setting, *errors, seconds)
        found = CloudFound(None, *errors, seconds)
        if seconds > most_seconds or spent > SWEEP_SECONDS:
            break
    return found
