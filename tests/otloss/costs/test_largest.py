"""`largest` is a bound of every cost as it is computed, rounding and subnormal numbers included."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from otloss.costs import Cost, GridCost, LineCost, PointCost


def between_clouds(dtype: torch.dtype) -> Iterator[Cost]:
    """Costs between clouds at any scale, also with all points at two corners of a box, or on one axis."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for d, scale, origin in itertools.product((1, 3, 300, 2000), (1e-25, 1e-20, 1.0, 1e15), (0.0, 1e4)):
        x, y, one_axis = normal(5, d), normal(7, d), torch.arange(d) == 0
        corners = torch.ones(1, d, dtype=torch.float64)
        for first, second in ((x, y), (x, -x), (corners, -corners), (x * one_axis, y * one_axis), (corners, corners)):
            a, b = ((scale * t + origin).to(dtype) for t in (first, second))
            for metric in ("sqeuclidean", "euclidean", "l1"):
                yield PointCost(a, b, metric=metric)


def on_lines_and_grids(dtype: torch.dtype) -> Iterator[Cost]:
    generator = torch.Generator().manual_seed(0)
    for power, scale in itertools.product((0.3, 1.0, 1.5, 2.0, 7.3), (1e-20, 1.0, 1e4)):
        x = scale * torch.randn(40, generator=generator, dtype=torch.float64)
        yield LineCost(x.to(dtype), power=power)
        for shape, spacing in itertools.product(((7,), (3, 5), (2, 3, 4)), (0.1, 1 / 19, 0.7)):
            yield GridCost(shape, power=power, spacing=scale * spacing).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("costs", [between_clouds, on_lines_and_grids])
def test_no_cost_exceeds_the_bound(costs: Callable[[torch.dtype], Iterator[Cost]], dtype: torch.dtype) -> None:
    for cost in costs(dtype):
        largest = cost.dense().amax((-2, -1))
        assert bool(cost.largest() >= largest), cost


def test_equal_points_have_the_bound_zero() -> None:
    for metric in ("sqeuclidean", "euclidean", "l1"):
        assert PointCost(torch.ones(3, 20), torch.ones(2, 20), metric=metric).largest() == 0


def test_a_grid_whose_costs_overflow_has_an_infinite_bound() -> None:
    assert GridCost((7,), power=7.3, spacing=3.3e5).largest() == torch.inf
