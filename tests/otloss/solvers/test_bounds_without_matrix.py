"""Bounds of costs that form no matrix: between two clouds, on grids, by hard minima over the bins with mass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from otloss import emd, lower_bound, upper_bound
from otloss.costs import GridCost, LineCost, PointCost


def test_lower_bounds_between_two_clouds() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 50 + torch.randn(2, 1, 7, 3, generator=generator, dtype=torch.float64)
    y = 51 + torch.randn(3, 5, 3, generator=generator, dtype=torch.float64)
    x[0, 0, 2], y[1, 4] = 0, 0  # no direction for cosines
    p = torch.rand(2, 1, 7, generator=generator, dtype=torch.float64)
    q = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    p, q = 2 * p / p.sum(-1, keepdim=True), 2 * q / q.sum(-1, keepdim=True)
    means = (p.unsqueeze(-1) * x).sum(-2) / 2 - (q.unsqueeze(-1) * y).sum(-2) / 2
    by_means = {"sqeuclidean": means.square().sum(-1), "euclidean": means.norm(dim=-1), "l1": means.abs().sum(-1)}
    for metric in ("sqeuclidean", "euclidean", "l1", "cosine"):
        cost = PointCost(x, y, metric=metric)
        bound, exact = lower_bound(p, q, cost), emd(p, q, cost)
        assert bound.shape == (2, 3)
        assert (bound <= exact + 1e-9).all()
        assert (upper_bound(p, q, cost) >= exact - 1e-9).all()
        if metric in by_means:
            assert (bound >= 2 * by_means[metric] - 1e-9).all()
        if metric == "sqeuclidean":
            torch.testing.assert_close(bound, 2 * by_means[metric])


def test_lower_bounds_on_grids_see_each_axis() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 20, 12, generator=generator, dtype=torch.float64).softmax(-1) * 3
    where = torch.cartesian_prod(torch.arange(3.0), 0.5 * torch.arange(4.0)).double()
    for power in (0.7, 1, 1.5, 2):
        cost = GridCost((3, 4), power=power, spacing=(1.0, 0.5)).to(torch.float64)
        bound, exact = lower_bound(p, q, cost), emd(p, q, cost)
        assert (bound <= exact + 1e-9).all()
        if power >= 1:
            assert (bound >= 3 * (((p - q) @ where / 3).abs() ** power).sum(-1) - 1e-9).all()
    corners = torch.eye(12, dtype=torch.float64)
    torch.testing.assert_close(lower_bound(corners[0], corners[11], cost), cost.dense()[0, 11])


def test_relaxed_bounds_equal_the_loop_over_pairs() -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = torch.rand(2, 6, generator=generator, dtype=torch.float64).softmax(-1)
    p[2], q[0], q[3] = 0, 0, 0
    p, q = p / p.sum(), q / q.sum()
    x, y = torch.rand(2, 6, 2, generator=generator, dtype=torch.float64)

    def to_the_fourth(x: Tensor, y: Tensor) -> Tensor:
        return (x.unsqueeze(-2) - y.unsqueeze(-3)).pow(4).sum(-1)

    for cost in (PointCost(x, y, metric=to_the_fourth), LineCost(x[:, 0], power=0.5), GridCost((2, 3), power=0.5)):
        matrix = cost.to(torch.float64).dense()
        there = sum(p[i] * min(matrix[i, j] for j in range(6) if q[j] > 0) for i in range(6))
        back = sum(q[j] * min(matrix[i, j] for i in range(6) if p[i] > 0) for j in range(6))
        torch.testing.assert_close(lower_bound(p, q, cost), torch.maximum(there, back), rtol=1e-6, atol=1e-9)


def test_bounds_between_many_points_form_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PointCost, "row_block", lambda *_: pytest.fail("formed rows"))
    monkeypatch.setattr(GridCost, "rows", lambda *_: pytest.fail("formed rows"))
    weights = torch.rand(2, 20_000).softmax(-1)
    p, q = weights[0].requires_grad_(), weights[1]
    x = torch.randn(20_000, 3)
    for cost in (PointCost(x), PointCost(x, metric="cosine"), PointCost(x, torch.randn(20_000, 3))):
        lower_bound(p, q, cost).backward()
        upper_bound(p, q, cost).backward()
    lower_bound(p.detach()[:5000] * 4, p.detach()[:5000] * 4, PointCost(x[:5000], metric="euclidean"))
    lower_bound(p, q, GridCost((100, 200), power=1)).backward()
    upper_bound(p, q, GridCost((100, 200), power=1)).backward()
