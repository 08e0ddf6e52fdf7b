"""Distances in many dimensions: as right as sums over differences are, by products that are ten times faster."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from otloss import lower_bound
from otloss.costs import PointCost
from tests.otloss.operations import Operations


def cloud(kind: str, seed: int, *, n: int = 90, d: int = 300) -> Tensor:
    """In float64, of numbers that float32 holds."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(2, n, d, generator=generator)[1]
    if kind == "far from the origin":
        points = points + 1e4
    if kind == "one tight cluster":
        points = 3 + 1e-4 * points
    if kind == "two tight clusters":
        points = 1e-3 * points + (torch.arange(n) % 2).unsqueeze(-1)
    if kind == "some points near":
        points[10:20] = 1.0 + 1e-3 * points[10:20]
        points[20] = 1.0
    return points.double()


def exact_squares(x: Tensor, y: Tensor) -> np.ndarray:
    x, y = (t.numpy().astype(np.longdouble) for t in (x, y))
    return ((x[..., :, None, :] - y[..., None, :, :]) ** 2).sum(-1)


KINDS = ["apart", "far from the origin", "one tight cluster", "two tight clusters", "some points near"]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_those_of_differences(kind: str) -> None:
    x, y = cloud(kind, 0), cloud(kind, 1)
    y[7] = x[3]
    for first, second in ((x, y), (x, x), (torch.stack([x, y]), torch.stack([y, x]))):
        expected = exact_squares(first, second)
        for dtype, tolerance in ((torch.float32, 1.3e-6), (torch.float64, 2e-14)):
            actual = PointCost(first.to(dtype), second.to(dtype)).dense().numpy()
            assert (actual[expected == 0] == 0).all()
            assert (abs(actual - expected) <= tolerance * expected).all()
            roots = PointCost(first.to(dtype), second.to(dtype), metric="euclidean").dense().numpy()
            assert (abs(roots - np.sqrt(expected)) <= tolerance * np.sqrt(expected)).all()


def test_many_dimensions_take_products() -> None:
    for kind in ("apart", "some points near"):
        x, y = cloud(kind, 0), cloud(kind, 1)
        with Operations() as ran:
            PointCost(x, y).dense()
            PointCost(x.float(), y.float(), metric="euclidean").dense()
        assert "addmm" in ran.names
        assert not [name for name in ran.names if "cdist" in name]


def test_squares_beyond_float32_leave_distances() -> None:
    x, y = 1e25 * cloud("apart", 0).float(), 1e25 * cloud("apart", 1).float()
    expected = np.sqrt(exact_squares(x.double(), y.double())).astype(np.float64)
    np.testing.assert_allclose(PointCost(x, y, metric="euclidean").dense(), expected, rtol=1e-6)
    assert (PointCost(x.double() * 1e200, y.double() * 1e200).dense() == torch.inf).all()


@pytest.mark.parametrize("batch", [(), (3,)])
def test_blocks_of_rows_and_of_problems_make_the_whole(batch: tuple[int, ...], request: Any) -> None:
    x = torch.stack([cloud("apart", seed) for seed in range(3)]).float().requires_grad_()
    y = cloud("some points near", 3).float().expand(*batch, 90, 300)
    p, q = (torch.rand(3, 90, generator=torch.Generator().manual_seed(seed)).softmax(-1) for seed in (0, 1))

    def results() -> tuple[torch.Tensor, ...]:
        cost = PointCost(x, y, metric="euclidean")
        matrix, bound = cost.dense(), lower_bound(p, q, cost)
        return matrix, bound, *torch.autograd.grad(matrix.sqrt().sum(), x), *torch.autograd.grad(bound.sum(), x)

    whole = results()
    request.getfixturevalue("small_blocks")
    for part, expected in zip(results(), whole, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_float32_distances(kind: str) -> None:
    x, y = cloud(kind, 0), cloud(kind, 1)
    y[7] = x[3]
    upstream = torch.rand(90, 90, generator=torch.Generator().manual_seed(5), dtype=torch.float64) - 0.5
    actual = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype).requires_grad_() for t in (x, y)]
        actual.append(torch.autograd.grad(PointCost(*leaves, metric="euclidean").dense(), leaves, upstream.to(dtype)))
    for narrow, wide in zip(*actual, strict=True):
        assert wide.abs().max() > 0.1
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-5, atol=1e-5)
