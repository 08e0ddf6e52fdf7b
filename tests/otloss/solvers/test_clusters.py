"""Large clouds in low dimension: pairs that are left out of soft minima, and the search from clusters to points."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from otloss import sinkhorn, solve
from otloss._kernels.points import can_leave_out
from otloss.costs import PointCost
from otloss.costs.cost import softmin_in_torch

N, M = 1600, 2700  # just above the size from which clusters are used


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def _square(axes: int) -> tuple[Tensor, Tensor]:
    generator = _generator()
    rand = {"generator": generator, "dtype": torch.float64}
    return torch.rand(N, axes, **rand), 0.2 + 0.7 * torch.rand(M, axes, **rand)


def _equal_points() -> tuple[Tensor, Tensor]:
    x, y = _square(2)
    return x[torch.randint(30, (N,), generator=_generator())], y[torch.randint(40, (M,), generator=_generator())]


def _diagonal_far_away() -> tuple[Tensor, Tensor]:
    x, y = _square(1)
    return x @ torch.ones(1, 2).double() + 1000, y @ torch.ones(1, 2).double() + 1000.3


def _with_an_outlier() -> tuple[Tensor, Tensor]:
    x, y = _square(3)
    x[17] = 50.0
    return x, y


CLOUDS = {
    "line": lambda: _square(1), "equal points": _equal_points,
    "diagonal far from the origin": _diagonal_far_away, "outlier in 3-D": _with_an_outlier,
}  # fmt: skip


def _weights(count: int, generator: torch.Generator) -> Tensor:
    """Far from uniform, every ninth is zero."""
    w = torch.rand(count, generator=generator, dtype=torch.float64) ** 3
    w[::9] = 0.0
    return w / w.sum()


@pytest.mark.parametrize(
    ("cloud", "metric"),
    [("line", "l1"), ("equal points", "sqeuclidean"), ("diagonal far from the origin", "sqeuclidean"),
     ("outlier in 3-D", "euclidean")],
)  # fmt: skip
def test_what_is_left_out_of_a_soft_minimum_is_a_rounding(cloud: str, metric: str) -> None:
    # Potentials that solve nothing: rough, with bins that take no part, and with a gradient that moves all minima.
    points_x, points_y = (points[:1100] for points in CLOUDS[cloud]())
    generator = _generator()
    for dtype, rounding in ((torch.float32, 2e-6), (torch.float64, 1e-12)):
        x, y = points_x.to(dtype), points_y.to(dtype)
        assert can_leave_out(x, y)
        dense = PointCost(x.double(), y.double(), metric=metric).dense()
        for epsilon in (0.0, 1e-3, 0.1):
            potential = 3 * epsilon * torch.randn(len(y), generator=generator, dtype=torch.float64) + y.double().sum(-1)
            potential[::7] = -torch.inf
            got = PointCost(x, y, metric=metric).softmin(potential, epsilon)
            expected = softmin_in_torch(dense, potential, epsilon)
            error = float((got - expected).abs().max())
            assert error <= rounding * (epsilon + float(dense.max()) + float(potential.max().abs()) / 10), epsilon


@pytest.mark.parametrize(
    ("cloud", "metric", "dtype"),
    [("line", "sqeuclidean", torch.float32), ("equal points", "sqeuclidean", torch.float64),
     ("outlier in 3-D", "euclidean", torch.float64)],
)  # fmt: skip
def test_value_and_gradients_equal_those_of_the_matrix(cloud: str, metric: str, dtype: torch.dtype) -> None:
    generator = _generator()
    p, q = _weights(N, generator), _weights(M, generator)
    x, y = CLOUDS[cloud]()
    epsilon = 0.01 * math.sqrt(x.shape[-1])
    expected = _value_and_gradients(p, q, x, y, lambda x, y: PointCost(x, y, metric=metric).dense(), epsilon)
    got = _value_and_gradients(
        *(t.to(dtype) for t in (p, q, x, y)), lambda x, y: PointCost(x, y, metric=metric), epsilon
    )
    tolerance = 1e-8 if dtype == torch.float64 else 1e-4
    for name, mine, theirs in zip(("value", "p", "q", "x", "y"), got, expected, strict=True):
        off = float((mine.double() - theirs).norm() / theirs.norm())
        assert off < tolerance * (1 if name == "value" else 100), (name, off)


def _value_and_gradients(
    p: Tensor, q: Tensor, x: Tensor, y: Tensor, cost: Callable[[Tensor, Tensor], object], epsilon: float
) -> tuple[Tensor, ...]:
    given = [t.clone().requires_grad_() for t in (p, q, x, y)]
    value = sinkhorn(given[0], given[1], cost(given[2], given[3]), epsilon=epsilon)  # type: ignore[arg-type]
    return value.detach(), *torch.autograd.grad(value, given)


def test_few_iterations_at_any_epsilon() -> None:
    # One by one, Sinkhorn's iterations are hundreds here, and were.
    x, y = (t.float() for t in _square(2))
    for epsilon, most in ((0.02, 8), (2e-3, 20), (5e-4, 60)):
        actual = solve(torch.full((N,), 1 / N), torch.full((M,), 1 / M), PointCost(x, y), epsilon=epsilon)
        assert int(actual.iterations) <= most
        assert float(actual.gap) <= 1e-4 * float(actual.value)
