"""Entropic transport converges on clouds with modes, heavy tails and outliers, where Sinkhorn alone takes thousands.

A warning is an error. A solution proves itself: its plan has the marginals, and its price is the value.
"""

import pytest
import torch
from torch import Tensor

import otloss
from otloss.costs import PointCost
from tests.samples import sampled

KINDS = ("clusters", "heavy", "outlier", "axes")


def cloud(kind: str, problems: int, count: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    points = torch.randn(problems, count, 2, generator=draw)
    if kind == "clusters":
        centres = 5 * torch.randn(problems, 8, 2, generator=torch.Generator().manual_seed(0))
        at = torch.randint(8, (problems, count), generator=draw)
        return centres.gather(1, at.unsqueeze(-1).expand(-1, -1, 2)) + 0.3 * points
    if kind == "heavy":
        return points / torch.rand(problems, count, 1, generator=draw).clamp(min=1e-2)
    if kind == "outlier":
        points[:, 0] = 100 * (1 + seed)
    if kind == "axes":
        points[..., 0] *= 100
    return points


def price(cost: Tensor, epsilon: float, penalty: float | None, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """What the plan of potentials between uniform histograms costs, and the errors of its marginals."""
    (n, m), exponent = cost.shape[-2:], (f.unsqueeze(-1) + g.unsqueeze(-2) - cost) / epsilon
    plan = exponent.exp() / (n * m)
    value = (plan * (cost + epsilon * (exponent - 1))).sum((-2, -1)) + epsilon
    errors = []
    for side, potential in ((plan.sum(-1), f), (plan.sum(-2), g)):
        weights = torch.full_like(side, 1 / side.shape[-1])
        wanted = weights if penalty is None else weights * (-potential / penalty).exp()
        errors.append((side - wanted).abs().sum(-1))
        if penalty is not None:
            value = value + penalty * (torch.xlogy(side, side / weights) - side + weights).sum(-1)
    return value, torch.stack(errors)


CASES = [(kind, penalty) for kind in KINDS for penalty in (None, 1.0, 100.0)]


@pytest.mark.parametrize(("kind", "penalty"), sampled(6, CASES[::2] + CASES[1::2]))
def test_converges(kind: str, penalty: float | None) -> None:
    x, y = (cloud(kind, 3, 96, seed).double() for seed in (1, 2))
    for epsilon in (5e-3, 1e-3):
        solution, narrow = (
            otloss.solve(None, None, cost, epsilon=epsilon, marginal_penalty=penalty)
            for cost in (PointCost(x, y), PointCost(x.float(), y.float()))
        )
        expected, errors = price(torch.cdist(x, y).square(), epsilon, penalty, *solution.potentials)
        assert float(errors.max()) < 1e-7
        torch.testing.assert_close(solution.value, expected, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(narrow.value.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", sampled(2, KINDS))
def test_large_clouds_converge(kind: str) -> None:
    x, y = (cloud(kind, 1, 2100, seed)[0] for seed in (1, 2))
    value = otloss.sinkhorn(None, None, PointCost(x, y), epsilon=0.01)
    exact = otloss.emd(None, None, PointCost(x, y))
    assert float(exact) - 1e-3 * float(exact) <= float(value) <= 1.001 * float(exact) + 0.01 * 7.7


@pytest.mark.parametrize("kind", KINDS)
def test_barycenters_converge(kind: str) -> None:
    """The objective is convex: no way from its minimum to another histogram goes down at first."""
    places = cloud(kind, 1, 64, 3)[0].double()
    draw = torch.Generator().manual_seed(4)
    p, others = (torch.rand(count, 64, dtype=torch.float64, generator=draw) + 0.1 for count in (3, 5))
    p, others = p / p.sum(-1, keepdim=True), others / others.sum(-1, keepdim=True)
    cost, epsilon = PointCost(places, places), 0.01
    a = otloss.barycenter(p, cost, epsilon=epsilon)

    def objective(histograms: Tensor) -> Tensor:
        transport = otloss.sinkhorn(histograms.unsqueeze(1), p, cost, epsilon=epsilon, tolerance=1e-10).mean(1)
        return transport + epsilon * torch.xlogy(histograms, histograms).sum(-1)

    smallest = float(objective(a.unsqueeze(0)))
    for share in (1e-3, 0.1):
        value = float(objective((1 - share) * a + share * torch.cat([p, others])).min())
        assert value > smallest - 1e-7 * abs(smallest)


@pytest.mark.parametrize("blur", sampled(1, [0.02, 0.1]))
@pytest.mark.parametrize("kind", [*KINDS, "apart"])
def test_gradients_in_float32(kind: str, blur: float) -> None:
    gradients = []
    for dtype in (torch.float32, torch.float64):
        x, y = (cloud("uniform" if kind == "apart" else kind, 3, 96, seed) for seed in (1, 2))
        if kind == "apart":  # some mass crosses from one mode to the other
            x[..., :20, :] += 50
            y[..., :30, :] += 50
        x, y = x.to(dtype).requires_grad_(), y.to(dtype)
        loss = otloss.cloud_loss(x, y, blur=blur).sum()
        gradients.append(torch.autograd.grad(loss, x)[0].double())
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-3 * float(gradients[1].abs().max()))
