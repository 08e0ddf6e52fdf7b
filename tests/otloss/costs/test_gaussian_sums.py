"""Soft minima of squared distances through a grid, against sums over all pairs in float64."""

import pytest
import torch
from torch import Tensor

import otloss
from otloss.costs import PointCost
from otloss.costs.gaussian_sums import Summation

N, M, BLUR = 600, 450, {1: 0.05, 2: 0.1, 3: 0.3}
SHARE = 1e-6


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid is used whatever time it takes, and few points have as many blocks as many points."""
    summation = Summation(min_pairs=0, gain=1e9, points_in_block=48)
    for module in ("points", "gaussian_sums"):
        monkeypatch.setattr(f"otloss.costs.{module}.SUMMATION", summation)


def _clouds(kind: str, axes: int, n: int = N, m: int = M) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, y, p, q: weights differ, and some are zero."""
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.rand(k, axes, generator=generator, dtype=torch.float64) for k in (n, m))
    if kind == "a sphere":
        x = 0.5 + 0.5 * torch.nn.functional.normalize(x - 0.5, dim=-1)
    if kind == "tight clusters":
        y = torch.rand(5, axes, generator=generator).double()[torch.arange(m) % 5] + 0.001 * y
    if kind == "far from each other":
        y = 0.5 * y + 30
    p, q = (torch.rand(k, generator=generator, dtype=torch.float64) + 0.05 for k in (n, m))
    p[:9], q[5] = 0, 0
    return x, y, p / p.sum(), q / q.sum()


def _square(x: Tensor, y: Tensor) -> Tensor:
    """The same metric as a function, which always takes all pairs."""
    return (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)


KINDS = [("a cube", 1), ("a cube", 3), ("a sphere", 2), ("tight clusters", 1), ("tight clusters", 3)]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("kind", "axes"), [*KINDS, ("far from each other", 2)])
def test_sums_through_a_grid_are_off_by_the_stated_share(kind: str, axes: int) -> None:
    x, y, p, q = _clouds(kind, axes)
    cost, epsilon = PointCost(x, y), 2 * BLUR[axes] ** 2
    solution = otloss.solve(p, q, PointCost(x, y, metric=_square), epsilon=epsilon, tolerance=1e-6)
    f, g = solution.potentials
    a, b = f + epsilon * p.log(), g + epsilon * q.log()
    sums = cost.sums_near(f, g, epsilon=epsilon, share=SHARE)
    assert sums is not None
    scores = (f.unsqueeze(-1) + g - cost.dense()) / epsilon
    rows = f - epsilon * (scores + q.log()).logsumexp(-1)
    torch.testing.assert_close(sums.softmin(b), rows, rtol=0, atol=SHARE * epsilon)
    columns = g - epsilon * (scores + p.log().unsqueeze(-1)).logsumexp(0)
    torch.testing.assert_close(sums.T.softmin(a), columns, rtol=0, atol=SHARE * epsilon)
    plan = (scores + p.log().unsqueeze(-1) + q.log()).exp()
    expected = 2 * (plan.sum(-1, keepdim=True) * x - plan @ y)
    gradient = sums.gradients_in_x(a, b)
    assert gradient is not None
    # A share of P at the other end of the clouds would move the mean by their size.
    assert (gradient - expected).abs().amax() <= 10 * SHARE * p.amax()


@pytest.mark.usefixtures("small_blocks")
def test_divergence_through_a_grid_is_that_of_all_pairs() -> None:
    axes = 3
    x, y, p, q = _clouds("tight clusters", axes)
    answers = []
    for metric in ("sqeuclidean", _square):
        x, y, p, q = (t.detach().requires_grad_() for t in (x, y, p, q))
        cost = PointCost(x, y, metric=metric)
        value = otloss.sinkhorn_divergence(p, q, cost, epsilon=2 * BLUR[axes] ** 2, tolerance=1e-6)
        answers.append((value, *torch.autograd.grad(value, (x, y, p, q))))
    torch.testing.assert_close(answers[0][0], answers[1][0], rtol=1e-8, atol=0)
    for ours, expected in zip(answers[0][1:], answers[1][1:], strict=True):
        assert torch.linalg.vector_norm(ours - expected) <= 1e-5 * torch.linalg.vector_norm(expected)


def test_the_error_of_a_solution_through_a_grid_is_a_bound() -> None:
    x, y, p, q = _clouds("tight clusters", 3, n=2400, m=1800)  # just so many pairs that a grid is used
    cost = PointCost(x, y)
    solution = otloss.solve(p, q, cost, epsilon=2 * BLUR[3] ** 2, tolerance=1e-4)
    f, g = solution.potentials
    assert cost.sums_near(f, g, epsilon=2 * BLUR[3] ** 2, share=1e-5) is not None
    assert solution.converged
    plan = solution.plan()
    off = (plan.sum(-1) - p).abs().sum() + (plan.sum(-2) - q).abs().sum()
    assert 1e-5 <= solution.marginal_error <= 1e-4
    assert off <= solution.marginal_error


@pytest.mark.usefixtures("small_blocks")
def test_where_a_grid_is_too_large_or_weights_too_small_all_pairs_are_taken() -> None:
    x, y, p, q = _clouds("a cube", 3)
    x[0] += 1000.0
    cost, epsilon = PointCost(x, y), 2 * BLUR[3] ** 2
    f = cost.softmin(epsilon * q.log(), epsilon)
    g = cost.T.softmin(f + epsilon * p.log(), epsilon)
    assert cost.sums_near(f, g, epsilon=epsilon, share=SHARE) is None
    x, y, p, q = _clouds("a cube", 2)
    q = torch.where(torch.arange(M) == 3, 1e-80, q)
    values = [
        otloss.sinkhorn_divergence(p, q / q.sum(), PointCost(x, y, metric=metric), epsilon=0.02, tolerance=1e-6)
        for metric in ("sqeuclidean", _square)
    ]
    torch.testing.assert_close(*values, rtol=1e-8, atol=0)
