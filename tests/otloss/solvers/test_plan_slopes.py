"""Slopes of <C, P> at a fixed plan against finite differences, by kernels and in torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from otloss.costs import CosineCost, Cost, DenseCost, GridCost, LineCost, PointCost
from tests.otloss.oracles import central_gradients

METRICS = ["sqeuclidean", "euclidean", "l1"]


def quartic(x: Tensor, y: Tensor) -> Tensor:
    return (x.unsqueeze(-2) - y.unsqueeze(-3)).pow(4).sum(-1)


def every_metric() -> list[str | Callable[[Tensor, Tensor], Tensor]]:
    return [*METRICS, "cosine", quartic]


def clouds(n: int = 6, m: int = 5, d: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(size, d, generator=generator, dtype=torch.float64) for size in (n, m))
    y[1] = x[2]
    return x, y


def plan_arguments(n: int, m: int, batch: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    f, g, log_p, log_q = (
        torch.randn(*batch, k, generator=generator, dtype=torch.float64).to(dtype) for k in (n, m, n, m)
    )
    log_p, log_q = log_p.log_softmax(-1), log_q.log_softmax(-1)
    log_p[..., 1], log_q[..., 0] = -torch.inf, -torch.inf
    return f, g, log_p, log_q


def moved_cost(cost: Cost, name: str, array: np.ndarray, arguments: tuple[Tensor, ...], upstream: Tensor) -> float:
    """sum upstream <C, P> where the cost moves and the plan stays."""
    f, g, log_p, log_q = arguments
    plan = ((f.unsqueeze(-1) + g.unsqueeze(-2) - cost.dense().detach()) / 0.7).exp()
    plan = plan * log_p.exp().unsqueeze(-1) * log_q.exp().unsqueeze(-2)
    moved = cost._replaced({id(getattr(cost, name)): torch.from_numpy(array)})
    return float((upstream[..., None, None] * plan * moved.dense()).detach().sum())


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("metric", every_metric())
def test_slopes_at_a_fixed_plan(metric: str, batch: tuple[int, ...]) -> None:
    x, y = clouds()
    y[1] += 0.1 if metric == "cosine" else 0.0  # off the sphere, where this moves it, the clamp at 0 is a kink
    x, y = x.requires_grad_(), y.requires_grad_()
    upstream = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64) if batch else torch.tensor(2.0).double()
    one = PointCost(x, metric=metric)
    for cost in (PointCost(x, y, metric=metric), PointCost(x, y.detach(), metric=metric), one):
        arguments = plan_arguments(*cost.shape, batch, torch.float64)
        found = cost.plan_gradients(*arguments, epsilon=0.7, upstream=upstream)
        names = ["x", "y"][: len(found)]
        assert len(found) == len(cost.parameters()) == (2 if cost.y.requires_grad and cost is not one else 1)
        for name, slopes in zip(names, found, strict=True):
            at = getattr(cost, name).detach().numpy()
            expected = central_gradients(
                lambda a, n=name, c=cost, r=arguments: moved_cost(c, n, a, r, upstream), at, 1e-6
            )
            np.testing.assert_allclose(slopes.numpy(), expected, atol=2e-6 * (1 + np.abs(expected).max()))
        again = Cost.plan_gradients(cost, *arguments, epsilon=0.7, upstream=upstream)
        for fast, slow in zip(found, again, strict=True):
            torch.testing.assert_close(fast, slow)


@pytest.mark.parametrize("metric", METRICS)
def test_slopes_of_kernels_and_torch_agree_in_float32(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(3, 1, 70, 3, generator=generator) + 100).requires_grad_()
    y = (torch.randn(2, 1100, 3, generator=generator) + 100).requires_grad_()
    cost = PointCost(x, y, metric=metric)
    epsilon, upstream = torch.tensor([0.5, 4.0]), torch.tensor([[1.0, -2.0]] * 3)
    _, g, log_p, log_q = plan_arguments(70, 1100, (3, 2), torch.float64)
    f = cost.softmin(g + epsilon[:, None] * log_q, epsilon).detach()
    arguments = (f, g, log_p, log_q)
    found = cost.plan_gradients(*arguments, epsilon=epsilon, upstream=upstream)
    monkeypatch.setattr(PointCost, "_has_kernel", lambda *_: False)
    wide = PointCost(x.detach().double().requires_grad_(), y.detach().double().requires_grad_(), metric=metric)
    f = wide.softmin(g + epsilon[:, None] * log_q, epsilon).detach()
    expected = wide.plan_gradients(f, *arguments[1:], epsilon=epsilon.double(), upstream=upstream.double())
    for got, right, points in zip(found, expected, (x, y), strict=True):
        assert (got.shape, got.dtype) == (points.shape, torch.float32)
        assert (got - right).abs().max() <= 2e-5 * right.abs().max()


def test_slopes_of_other_costs_at_a_fixed_plan() -> None:
    x, y = clouds(5, 5)
    own = torch.rand(3, 5, 4, dtype=torch.float64, requires_grad=True)
    shared = torch.rand(5, 4, dtype=torch.float64, requires_grad=True)
    costs: list[tuple[Cost, str]] = [
        (DenseCost(own), "matrix"),
        (DenseCost(shared), "matrix"),
        (LineCost(y[:, 0].clone().requires_grad_(), power=2), "x"),
        (LineCost(x[:, 0].clone().requires_grad_(), power=1.5), "x"),
        (CosineCost(x.clone().requires_grad_()), "unit"),
    ]
    upstream = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    for cost, name in costs:
        arguments = plan_arguments(*cost.shape, (3,), torch.float64)
        (slopes,) = cost.plan_gradients(*arguments, epsilon=0.7, upstream=upstream)
        at = getattr(cost, name).detach().numpy()
        expected = central_gradients(lambda a, c=cost, n=name, r=arguments: moved_cost(c, n, a, r, upstream), at, 1e-6)
        np.testing.assert_allclose(slopes.numpy(), expected, atol=1e-7 * (1 + np.abs(expected).max()))
        if isinstance(cost, DenseCost):
            torch.testing.assert_close(Cost.plan_gradients(cost, *arguments, epsilon=0.7, upstream=upstream)[0], slopes)
    arguments = plan_arguments(4, 4, (), torch.float64)
    assert GridCost((2, 2)).plan_gradients(*arguments, epsilon=0.7, upstream=torch.tensor(1.0)) == ()
    assert DenseCost(torch.ones(4, 4)).plan_gradients(*arguments, epsilon=0.7, upstream=torch.tensor(1.0)) == ()
