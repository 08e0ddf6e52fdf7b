"""One debiased divergence between two clouds: value and gradient in the positions, at equal accuracy.

GeomLoss has the cost |x - y|^2 / 2 and epsilon = blur^2; ours is |x - y|^2, so our epsilon is 2 blur^2 and our value
twice theirs. The errors of value and gradient are measured against our float64 result at a tight tolerance.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from geomloss import SamplesLoss
from torch import Tensor

import otloss
from benchmarks.solver_peers import OURS, Contestant
from otloss.costs import PointCost

BLUR = 0.05
LIMITS = (1e-3, 1e-2)  # relative errors of value and gradient
SCALINGS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.98, 0.99)
TOLERANCES = [10 ** (-k / 4) for k in range(4, 21)]
HAS_KEOPS = importlib.util.find_spec("pykeops") is not None
BACKENDS = ("tensorized", "online", "multiscale") if HAS_KEOPS else ("tensorized",)
WHICH = f"GeomLoss {', '.join(BACKENDS)}" if HAS_KEOPS else "KeOps not installed: GeomLoss tensorized only"
Answer = tuple[float, Tensor]  # the value in units of |x - y|^2, and its gradient in x


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


def our_answer(clouds: Clouds, tolerance: float, *, blur: float) -> Answer:
    x = clouds.x.clone().requires_grad_()
    value = otloss.sinkhorn_divergence(
        clouds.p, clouds.q, PointCost(x, clouds.y), epsilon=2 * blur**2, tolerance=tolerance
    )
    return value.item(), torch.autograd.grad(value, x)[0]


def geomloss_answer(clouds: Clouds, scaling: float, *, backend: str, blur: float) -> Answer:
    x = clouds.x.clone().requires_grad_()
    loss = SamplesLoss("sinkhorn", p=2, blur=blur, scaling=scaling, backend=backend)
    value = 2 * loss(clouds.p, x, clouds.q, clouds.y)
    return value.item(), torch.autograd.grad(value, x)[0]


def reference(clouds: Clouds, *, blur: float = BLUR, tolerance: float = 1e-6) -> Answer:
    """Value and gradient in float64."""
    p, q = clouds.p.double(), clouds.q.double()
    in_double = Clouds(clouds.x.double(), clouds.y.double(), p / p.sum(), q / q.sum())
    return our_answer(in_double, tolerance, blur=blur)


def errors_of(answer: Answer, exact: Answer) -> tuple[float, float]:
    """Relative errors of value and gradient."""
    (got, got_gradient), (value, gradient) = answer, exact
    return abs(got / value - 1), float((got_gradient.double() - gradient).norm() / gradient.norm())


def ours(clouds: Clouds, exact: Answer, *, blur: float = BLUR) -> Contestant:
    return Contestant(OURS, "tolerance", TOLERANCES, lambda tolerance: our_answer(clouds, tolerance, blur=blur),
                      lambda answer: errors_of(answer, exact))  # fmt: skip


def geomloss(clouds: Clouds, exact: Answer, backend: str, *, blur: float = BLUR) -> Contestant:
    return Contestant(
        f"GeomLoss SamplesLoss, {backend}", "scaling", SCALINGS,
        lambda scaling: geomloss_answer(clouds, scaling, backend=backend, blur=blur),
        lambda answer: errors_of(answer, exact),
    )  # fmt: skip
