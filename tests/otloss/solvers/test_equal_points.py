"""Problems of few distinct points: the problem between all points has the same potentials and derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from otloss import cloud_loss, solve
from otloss.costs import PointCost
from otloss.solvers.entropic import equal_points
from otloss.solvers.entropic.equal_points import merge_equal_points
from otloss.solvers.options import Settings
from otloss.solvers.problem import pose
from tests.samples import sampled

RANDOM = torch.Generator().manual_seed(0)
X, Y = torch.randint(3, (40, 2), generator=RANDOM).double(), torch.randint(3, (30, 2), generator=RANDOM).double()
P, Q = torch.rand(3, 40, generator=RANDOM).double(), torch.rand(3, 30, generator=RANDOM).double()
P[:, ::3], Q[1, ::4] = 0, 0
P, Q = P / P.sum(-1, keepdim=True), Q / Q.sum(-1, keepdim=True)
CASES: list[dict[str, Any]] = [
    {}, {"marginal_penalty": 2.0}, {"marginal_penalty": (0.5, 8.0), "grad": "implicit"}, {"grad": "implicit"},
    {"metric": "euclidean"}, {"metric": "l1", "start": (torch.rand(40).double(), torch.rand(30).double())},
    {"is_matrix": True}, {"is_matrix": True, "marginal_penalty": 2.0, "grad": "implicit"},
    {"is_matrix": True, "is_one_cloud": True}, {"metric": "cosine"},
    {"is_one_cloud": True}, {"is_one_cloud": True, "metric": "cosine"},
]  # fmt: skip


def derived(
    *, metric: str = "sqeuclidean", is_one_cloud: bool = False, is_matrix: bool = False, **settings: Any
) -> list[Tensor]:
    """The value, the derivatives, the errors, and potentials of one constant."""
    x, y, p, q = (t.clone().requires_grad_() for t in (X, Y, P, Q))
    cost, q = (PointCost(x, metric=metric), p) if is_one_cloud else (PointCost(x, y, metric=metric), q)
    cost = cost.dense() if is_matrix else cost
    result = solve(p, q, cost, epsilon=0.3, tolerance=1e-11, **settings)
    inputs = [x, p] if is_one_cloud else [x, y, p, q]
    f, g = (potential.detach() for potential in result.potentials)
    shift = 0 if "marginal_penalty" in settings else (g * q.detach()).sum(-1, keepdim=True)
    assert bool(result.converged.all())
    return [result.value.detach(), f + shift, g - shift, *torch.autograd.grad(result.value.sum(), inputs)]


@pytest.mark.parametrize("case", sampled(5, CASES))
def test_merged_points_have_the_derivatives_of_all_points(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = derived(**case)
    monkeypatch.setattr(equal_points, "_FEWEST_PAIRS", 1)
    for actual, wanted in zip(derived(**case), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-7, atol=1e-8)


def test_what_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points on nine places; not where few points are equal, and not of clouds for each problem."""
    monkeypatch.setattr(equal_points, "_FEWEST_PAIRS", 1)

    def merged_shape(x: Tensor, y: Tensor, **changes: Any) -> tuple[int, int]:
        settings = {"metric": "sqeuclidean", "impl": "auto"} | changes
        cost = PointCost(x, y, metric=settings["metric"])
        problem = pose(None, None, cost, epsilon=0.3, settings=Settings(impl=settings["impl"]))
        return merge_equal_points(problem).problem.cost.shape

    assert merged_shape(X, Y) == (9, 8)  # no point of Y is at one of the places
    assert merged_shape(X, Y, metric="cosine") == (6, 5)  # directions, and the origin
    assert merged_shape(X, Y, impl="torch") == (40, 30)
    assert merged_shape(X.expand(3, 40, 2), Y) == (40, 30)
    assert merged_shape(torch.rand(40, 2).double(), torch.rand(10, 2).double()) == (40, 10)
    distinct = merge_equal_points(pose(P, Q, PointCost(X, Y), epsilon=0.3, settings=Settings()))
    torch.testing.assert_close(distinct.problem.p.sum(-1), torch.ones(3).double())
    assert distinct.x is not None
    torch.testing.assert_close(distinct.problem.cost.as_points().x[distinct.x.places], X)  # type: ignore[union-attr]


def test_binary_features() -> None:
    """The value between 600 points on two places is that between the two places with their masses."""
    x, y = (torch.rand(600, 1, generator=RANDOM) < share for share in (0.3, 0.4))
    counts = torch.stack([(cloud == place).double().mean() for cloud in (x, y) for place in (0, 1)]).view(2, 2)
    expected = cloud_loss(*(torch.tensor([[0.0], [1.0]]).double(),) * 2, *counts, blur=0.2)
    torch.testing.assert_close(cloud_loss(x.double(), y.double(), blur=0.2), expected, rtol=1e-6, atol=1e-9)


def test_points_that_torch_keeps_negated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The imaginary part of a conjugate is a view that numpy cannot have."""
    monkeypatch.setattr(equal_points, "_FEWEST_PAIRS", 1)
    x = torch.complex(torch.zeros_like(X), -X).conj().imag
    assert x.is_neg()
    values = [float(solve(None, None, PointCost(points, Y), epsilon=0.3).value) for points in (x, X)]
    assert values[0] == values[1]
