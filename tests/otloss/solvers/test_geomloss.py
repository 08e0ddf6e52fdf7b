"""A start by GeomLoss ends at the same potentials, with our gradient."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import otloss
from otloss.costs import PointCost
from otloss.solvers.entropic import geomloss as _geomloss
from otloss.solvers.entropic.potentials import find_potentials
from otloss.solvers.entropic.problem import Settings, entropic_problem


def clouds() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(k, 3, generator=generator, dtype=torch.float64) for k in (30, 40))
    p, q = (torch.rand(k, generator=generator, dtype=torch.float64) + 0.1 for k in (30, 40))
    return p / p.sum(), q / q.sum(), x, y + 0.3


@pytest.mark.parametrize(
    ("metric", "marginal_penalty"), [("sqeuclidean", None), ("euclidean", None), ("euclidean", 0.3)]
)
def test_the_start_is_near_and_the_answer_the_same(
    metric: str, marginal_penalty: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_geomloss, "_SCALING", 0.98)  # nearly converged: so its units can be told from ours
    p, q, x, y = clouds()
    options: dict[str, Any] = {"epsilon": 0.1, "marginal_penalty": marginal_penalty, "tolerance": 1e-10}
    problem = entropic_problem(
        p, q, PointCost(x, y, metric=metric), epsilon=0.1, settings=Settings(marginal_penalty=marginal_penalty)
    )
    f, g = _geomloss.start_from_geomloss(problem)
    solved = find_potentials(problem, Settings(marginal_penalty=marginal_penalty, impl="torch"))
    # Up to a constant that goes from f to g, and GeomLoss' own error.
    for ours, theirs in ((solved.f, f), (solved.g, g)):
        assert float((ours - theirs).std()) < 0.02 * float(ours.std())
    value, plain = (
        otloss.sinkhorn(p, q, PointCost(x, y, metric=metric), impl=impl, **options) for impl in ("geomloss", "torch")
    )
    np.testing.assert_allclose(float(value), float(plain), rtol=1e-9)


def test_the_gradient_is_ours() -> None:
    """Where `SamplesLoss` with its default scaling of 0.5 is 15 % off."""
    p, q, x, y = clouds()

    def value(x: Tensor, y: Tensor) -> Tensor:
        return otloss.sinkhorn_divergence(p, q, PointCost(x, y), epsilon=0.05, impl="geomloss", tolerance=1e-10)

    assert gradcheck(value, (x.requires_grad_(), y.requires_grad_()), fast_mode=True)


def test_problems_that_it_cannot_start_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q, x, y = clouds()
    options: dict[str, Any] = {"epsilon": 0.1, "impl": "geomloss"}
    for weights, cost in (
        (p, PointCost(x, y, metric="l1")),
        (p, PointCost(x, y).dense()),
        (p.expand(2, -1), PointCost(x, y)),
    ):
        with pytest.raises(ValueError, match="one problem and a PointCost"):
            otloss.sinkhorn(weights, q, cost, **options)
    monkeypatch.setattr(_geomloss, "_MOST_WITHOUT_KEOPS", 100)
    monkeypatch.setattr(_geomloss, "has_keops", lambda: False)
    with pytest.raises(ImportError, match=r"torch-otloss\[keops\]"):
        otloss.sinkhorn(p, q, PointCost(x, y), **options)
    monkeypatch.setitem(sys.modules, "geomloss", None)  # an import of it fails
    with pytest.raises(ImportError, match=r'^impl="geomloss" needs GeomLoss: pip install "torch-otloss\[geomloss\]"$'):
        otloss.sinkhorn(p, q, PointCost(x, y), **options)
