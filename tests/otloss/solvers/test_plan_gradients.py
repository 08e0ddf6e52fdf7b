"""Gradients of <C, P> at a fixed plan against finite differences, by kernels and in torch."""

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


def every_cost() -> list[tuple[Cost, str]]:
    x, y = (t.requires_grad_() for t in clouds())
    apart = (y.detach() + 0.1).requires_grad_()  # where this moves it off the sphere, the cosine cost's clamp is a kink
    own, shared = (torch.rand(*size, dtype=torch.float64).requires_grad_() for size in ((3, 6, 5), (6, 5)))
    return [
        *((PointCost(x, apart if metric == "cosine" else y, metric=metric), "x") for metric in every_metric()),
        (PointCost(x.detach(), y), "y"), (PointCost(x), "x"), (DenseCost(own), "matrix"), (DenseCost(shared), "matrix"),
        (LineCost(y[:, 0].detach().clone().requires_grad_(), power=2), "x"),
        (CosineCost(x.detach().clone().requires_grad_()), "unit"),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", range(len(every_cost())))
def test_gradients_at_a_fixed_plan(kind: int) -> None:
    cost, name = every_cost()[kind]
    upstream = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    arguments = plan_arguments(*cost.shape, (3,), torch.float64)
    found = cost.plan_gradients(*arguments, epsilon=0.7, upstream=upstream)
    assert len(found) == len(cost.parameters())
    at = getattr(cost, name).detach().numpy()
    expected = central_gradients(lambda a: moved_cost(cost, name, a, arguments, upstream), at, 1e-6)
    np.testing.assert_allclose(found[0].numpy(), expected, atol=2e-6 * (1 + np.abs(expected).max()))
    for fast, slow in zip(found, Cost.plan_gradients(cost, *arguments, epsilon=0.7, upstream=upstream), strict=True):
        torch.testing.assert_close(fast, slow)


@pytest.mark.parametrize("metric", METRICS)
def test_gradients_of_kernels_and_torch_agree_in_float32(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_costs_without_a_gradient_give_none() -> None:
    arguments = plan_arguments(4, 4, (), torch.float64)
    for cost in (GridCost((2, 2)), DenseCost(torch.ones(4, 4))):
        assert cost.plan_gradients(*arguments, epsilon=0.7, upstream=torch.tensor(1.0)) == ()
