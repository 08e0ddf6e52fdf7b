"""Costs between cells of a grid against loops over pairs."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import otloss
from otloss.costs import GridCost, costs_within
from otloss.solvers.entropic.sinkhorn_cpu import SinkhornOnCPU
from otloss.solvers.options import Settings
from otloss.solvers.problem import pose
from tests.errors import raising
from tests.otloss.draws import draw
from tests.otloss.operations import Operations
from tests.otloss.oracles import check_questions


def loop(cells: tuple[int, ...], power: float, spacing: tuple[float, ...]) -> Tensor:
    where = list(itertools.product(*map(range, cells)))
    pairs = [list(zip(spacing, a, b, strict=True)) for a in where for b in where]
    rows = torch.tensor([sum((s * abs(i - j)) ** power for s, i, j in pair) for pair in pairs], dtype=torch.float64)
    return rows.reshape(len(where), len(where))


@pytest.mark.parametrize(("cells", "power"), [((5,), 1), ((3, 4), 0.5), ((1, 6), 2), ((2, 3, 4), 1.7), ((1,), 2)])
def test_costs_are_the_definition(cells: tuple[int, ...], power: float) -> None:
    spacing = (0.1, 2.0, 0.7)[: len(cells)]
    cost = GridCost(cells, power=power, spacing=spacing).to(torch.float64)
    matrix = loop(cells, power, spacing)
    check_questions(cost, matrix)
    assert GridCost(cells, power=power, spacing=np.array(spacing)).spacing == cost.spacing
    assert (cost.T, costs_within(cost)) == (cost, (cost, cost))
    v = torch.randn(2, 3, len(matrix), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(cost.softmin(v, 0.0), (matrix - v.unsqueeze(-2)).amin(-1))
    each = torch.tensor([[0.2, 1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(cost.softmin(v, each)[1, 1], cost.softmin(v[1, 1], 1.0))
    torch.testing.assert_close(cost.softmin(v, each)[0, 2], cost.softmin(v[0, 2], 0.0))


def test_images_are_quick_and_never_dense() -> None:
    cost = GridCost((256, 256), spacing=1 / 256)
    v = torch.rand(65536)
    with Operations() as ran:
        assert cost.softmin(v, 1e-3).shape == cost.apply(v).shape == (65536,)
        # Between cells far apart in units of epsilon the soft minimum is the hard one.
        assert (cost.softmin(v, 1e-9) - cost.softmin(v, 0.0)).abs().max() < 1e-6
        assert (cost.softmin(torch.zeros(65536), 0.0) == 0).all()
    assert ran.largest <= 256 * 65536, "each cell has the costs of one axis"


# One product for all axes, or one for each.
@pytest.mark.parametrize(("cells", "epsilon"), [((40, 33), 0.3), ((40, 33), 0.003), ((11, 10, 12), 0.05)])
def test_transport_of_images_is_that_of_the_matrix(cells: tuple[int, ...], epsilon: float) -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(2, math.prod(cells), generator=generator, dtype=torch.float64) for _ in range(2))
    p, q = ((w * (w > 0.3)).div((w * (w > 0.3)).sum(-1, keepdim=True)).requires_grad_() for w in (p, q))
    cost = GridCost(cells, spacing=[1.0 / size for size in cells], power=2).to(torch.float64)
    assert not SinkhornOnCPU().applies(pose(p, q, cost, epsilon=epsilon, settings=Settings()))
    actual = []
    for impl in ("auto", "compiled"):
        value = otloss.sinkhorn(p, q, cost, epsilon=epsilon, impl=impl, tolerance=1e-9)
        actual.append((value, *torch.autograd.grad(value.sum(), (p, q))))
    for ours, dense, atol in zip(*actual, (1e-10, 1e-7, 1e-7), strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("share", [1.0, 1.3, 2.0])
@pytest.mark.parametrize("cells", [(30, 20), (600,), (1, 600), (2, 300)])
def test_products_at_the_least_epsilon(cells: tuple[int, ...], share: float) -> None:
    cost = GridCost(cells, spacing=(1.0, 1.4)[: len(cells)]).to(torch.float64)
    epsilon = share * cost.smallest_epsilon_for_products
    h = torch.randn(4, 600, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    h[1] *= 300 * epsilon
    h[2, 1:] = -torch.inf
    h[3] = (h[3] - 1000 * epsilon).masked_fill(h[3] < 0, -torch.inf)
    h[3, 0] = 0.0
    expected = -epsilon * ((h.unsqueeze(-2) - cost.dense()) / epsilon).logsumexp(-1)
    torch.testing.assert_close(cost.softmin(h, epsilon), expected, atol=1e-9 * epsilon, rtol=1e-12)


@pytest.mark.parametrize("cells", [(5, 6), (7,), (3, 4, 2)])
def test_implicit_derivatives_by_products_equal_dense_ones(cells: tuple[int, ...], request: Any) -> None:
    cost = GridCost(cells, spacing=0.2, power=1.5).to(torch.float64)
    given, ways = draw(2, 3, cost.shape[0]), draw(2, 3, cost.shape[0], seed=1)
    given[:, 1, 2], given[1, :, -1] = 0.0, 0.0
    epsilon = torch.tensor([0.05, 0.2, 0.1], dtype=torch.float64)

    def results() -> list[Tensor]:
        leaf = (given / given.sum(-1, keepdim=True)).requires_grad_()
        t = otloss.solve(*leaf, cost, epsilon=epsilon, grad="implicit", tolerance=1e-9)
        (first,) = torch.autograd.grad(t.value.sum(), leaf, create_graph=True)
        moved = t.apply(ways[0, 0, :, None]).squeeze(-1)
        sums = [(part * ways).sum() for part in (first, torch.stack(t.potentials), moved)]
        parts = [torch.autograd.grad(s, leaf, retain_graph=True)[0] for s in (*sums, t.linear_cost.sum())]
        return [t.value, t.linear_cost, t.plan(), *t.potentials, first, *parts]

    dense = results()
    request.getfixturevalue("small_blocks")
    torch.testing.assert_close(results(), dense, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("cells", [(23, 23), (600,)])
def test_implicit_derivatives_of_spots_are_those_of_their_matrix(cells: tuple[int, ...]) -> None:
    """Between cells without mass, most of them, exp((f + g - C) / epsilon) overflows."""
    cost = GridCost(cells, spacing=1.0 if len(cells) == 2 else 0.05).to(torch.float64)
    cell, size = cost.spacing[0], cells[0]
    axes = torch.meshgrid(*(torch.arange(n).double() * cell for n in cells), indexing="ij")

    def spot(centre: float) -> Tensor:
        distance = sum((axis - centre) ** 2 for axis in axes)
        image = torch.where(distance < 9, (-distance / 4).exp(), 0.0).flatten()
        return image / image.sum()

    found = []
    for each in (cost, cost.dense()):
        p, q = (spot(cell * size * share).requires_grad_() for share in (0.3, 0.4))
        t = otloss.solve(p, q, each, epsilon=0.7, grad="implicit")
        gradient = torch.autograd.grad(t.value, (p, q), create_graph=True)
        moment = sum((g * w * axes[0].flatten()).sum() for g, w in zip(gradient, (p, q), strict=True))
        second = torch.autograd.grad(moment, (p, q), retain_graph=True)
        linear = torch.autograd.grad(t.linear_cost, (p, q))
        has_mass = [(w > 0).detach() for w in (p, q)] * 3
        found.append([t.linear_cost, *(g[m] for g, m in zip((*gradient, *second, *linear), has_mass, strict=True))])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)


def test_implicit_derivatives_of_images_form_no_matrix() -> None:
    cost = GridCost((33, 33), spacing=1 / 32)
    images = torch.rand(2, 1089, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.01
    p, q = images / images.sum(-1, keepdim=True)
    p.requires_grad_()
    with Operations() as ran:
        value = otloss.sinkhorn(p, q, cost.to(torch.float64), epsilon=0.05, grad="implicit")
        (first,) = torch.autograd.grad(value, p, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), p, create_graph=True)
    assert ran.largest < 1089**2
    with pytest.raises(RuntimeError, match="third derivatives between the cells of a grid"):
        torch.autograd.grad(second.sum(), p)


@pytest.mark.filterwarnings("ignore::otloss.ConvergenceWarning")
@pytest.mark.parametrize("by_products", [False, True])
def test_implicit_derivatives_raise_where_parts_hardly_exchange_mass(by_products: bool, request: Any) -> None:
    """The condition is 3e5 at epsilon 0.1 and above 1e15 at 0.02, however far the search got; rounding is no matter."""
    if by_products:
        request.getfixturevalue("small_blocks")
    generator = torch.Generator().manual_seed(0)
    corners = torch.zeros(2, 9, 9, dtype=torch.float64)
    corners[:, :2, :2], corners[:, -2:, -2:] = torch.rand(2, 2, 2, 2, generator=generator, dtype=torch.float64) + 0.1
    for part in (corners[:, :5], corners[:, 5:]):
        part /= 2 * part.sum((1, 2), keepdim=True)
    cost = GridCost((9, 9), spacing=1 / 8).to(torch.float64)
    gradients = []
    for units in (0, 8):
        p, q = corners.flatten(1) * (1 + torch.randint(-1, 2, (2, 81), generator=generator) * units * 2.0**-52)
        value = otloss.sinkhorn(p.requires_grad_(), q, cost, epsilon=0.1, grad="implicit", tolerance=1e-9)
        gradients.append(torch.autograd.grad(value, p)[0])
        for options in ({}, {"max_iterations": 10}):
            with pytest.raises(RuntimeError, match='"implicit" has no answer here'):
                otloss.sinkhorn(p, q, cost, epsilon=0.02, grad="implicit", **options)
    torch.testing.assert_close(*gradients, atol=1e-8, rtol=0)


def test_slow_problems_warn() -> None:
    cost, large = GridCost((48, 48), spacing=1 / 48), GridCost((128, 128), spacing=1 / 128)
    smallest = large.smallest_epsilon_for_products
    with pytest.raises(UserWarning, match=r'"implicit" between 48 x 48 cells \(1 problem\).*Use grad="envelope"'):
        otloss.sinkhorn(None, None, cost, epsilon=0.05, grad="implicit", marginal_penalty=1.0)
    with pytest.raises(UserWarning, match="needs a matrix of 4096 x 4096 costs"):
        otloss.sinkhorn(None, None, GridCost((64, 64)), epsilon=1.0, mass=0.5)
    with pytest.raises(UserWarning, match=rf"epsilon is {0.95 * smallest:.3g} .*below .* products .* Raise epsi"):
        otloss.sinkhorn(None, None, large, epsilon=0.95 * smallest, tolerance=1.0, max_iterations=1)
    square = GridCost((128, 128), spacing=1 / 127)  # whose limit has more than three digits
    with pytest.raises(UserWarning, match="Raise epsilon to") as warned:
        otloss.sinkhorn(None, None, square, epsilon=1e-4, tolerance=1.0, max_iterations=1)
    enough = float(str(warned.value).partition("Raise epsilon to ")[2].partition(",")[0])
    otloss.sinkhorn(None, None, square, epsilon=enough, tolerance=1.0)
    otloss.sinkhorn(None, None, cost, epsilon=0.05, grad="implicit")
    otloss.solve(None, None, large, epsilon=1.05 * smallest, tolerance=1.0)


test_bad_input = raising(
    ((3, 0), {}, ValueError, r"\(3, 0\).*least one cell"),
    ((3, 2), {"spacing": -1.0}, ValueError, "spacing is -1.0"),
    ((3, 2), {"spacing": (1.0, 1.0, 1.0)}, ValueError, "3 spacings, expected .* one spacing or one per axis"),
    call=lambda cells, options: GridCost(cells, **options),
)
