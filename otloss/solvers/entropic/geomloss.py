"""Large point clouds on a GPU: the adapter for GeomLoss and KeOps, which no other module imports.

GeomLoss makes the start: a few soft minima per scale, multiscale or by KeOps, without a matrix. The search in logs
continues from there to the given tolerance, and value, gradient and certificate are our own: GeomLoss stops after a
fixed schedule without an error estimate, and its default one is 15 % off in the gradient.

Its costs are `|x - y|^2 / 2` and `|x - y|`, its epsilon `blur^2` and `blur`, its reach likewise: twice its potentials
are ours for the squared distance. Source: J. Feydy, Geometric Data Analysis, Beyond Convolutions, 2020.
"""

from __future__ import annotations

import dataclasses
import math
from importlib.util import find_spec

import torch
from torch import Tensor

from otloss._checks import missing_package
from otloss._distribution import install_hint
from otloss.costs import PointCost
from otloss.solvers.entropic.problem import EntropicProblem, Settings

# Half and whole: our cost over GeomLoss'. And its exponent p.
_METRICS = {"sqeuclidean": (2.0, 2), "euclidean": (1.0, 1)}
# Without KeOps GeomLoss holds several n x m matrices.
_MOST_WITHOUT_KEOPS = 2**26
_SCALING = 0.7


def has_keops() -> bool:
    """Whether KeOps is installed; without importing it, because the import compiles."""
    return find_spec("pykeops") is not None


def has_geomloss() -> bool:
    """Whether GeomLoss is installed."""
    return find_spec("geomloss") is not None


def with_start(problem: EntropicProblem, settings: Settings) -> Settings:
    """Return the settings, with a start from GeomLoss where that is asked for, or "auto" finds it worth it."""
    n, m = problem.cost.shape
    large = problem.p.device.type == "cuda" and n * m > _MOST_WITHOUT_KEOPS
    chosen = settings.impl == "auto" and large and _fits(problem) and has_keops() and has_geomloss()
    if settings.start is not None or not (chosen or settings.impl == "geomloss"):
        return settings
    return dataclasses.replace(settings, start=start_from_geomloss(problem))


def start_from_geomloss(problem: EntropicProblem) -> tuple[Tensor, Tensor]:
    """Return potentials (f, g) to start from.

    Raises:
        ValueError: if the problem is not one pair of clouds with a cost that GeomLoss has.
        ImportError: if GeomLoss is not installed, or the clouds are so large that it needs KeOps, which is not.
    """
    if not _fits(problem):
        raise ValueError(
            f'impl="geomloss" is for one problem and a PointCost of metric {sorted(_METRICS)}; got {problem.cost!r} '
            f'and a batch of {tuple(problem.batch)}. Use impl="auto".'
        )
    try:
        from geomloss import SamplesLoss
    except ImportError as error:
        missing_package(error, "geomloss")
        raise ImportError(f'impl="geomloss" needs GeomLoss: {install_hint("geomloss")}') from error
    n, m = problem.cost.shape
    if n * m > _MOST_WITHOUT_KEOPS and not has_keops():
        raise ImportError(f'GeomLoss needs KeOps for {n} by {m} points: {install_hint("keops")}, or give impl="torch".')
    cost = problem.cost
    assert isinstance(cost, PointCost)
    factor, exponent = _METRICS[str(cost.metric)]
    epsilon = float(problem.epsilon) / factor
    reach = None if problem.marginal_penalty is None else (problem.marginal_penalty / factor) ** (1 / exponent)
    x, y, p, q = (t.detach() for t in (cost.x, cost.y, problem.p.reshape(-1), problem.q.reshape(-1)))
    loss = SamplesLoss(
        "sinkhorn", p=exponent, blur=epsilon ** (1 / exponent), reach=reach, scaling=_SCALING, debias=False,
        potentials=True, backend="auto" if has_keops() else "tensorized", diameter=_diameter(x, y),
    )  # fmt: skip
    f, g = loss(p, x, q, y)
    return factor * f.reshape(p.shape), factor * g.reshape(q.shape)


def _fits(problem: EntropicProblem) -> bool:
    cost = problem.cost
    return (
        isinstance(cost, PointCost) and cost.metric in _METRICS and not cost.batch_shape and problem.batch.numel() == 1
    )


def _diameter(x: Tensor, y: Tensor) -> float:
    low, high = torch.minimum(x.amin(0), y.amin(0)), torch.maximum(x.amax(0), y.amax(0))
    return max(math.sqrt(float((high - low).square().sum())), torch.finfo(x.dtype).tiny)
