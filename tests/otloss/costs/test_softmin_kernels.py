"""Soft minima by compiled loops and in torch against logsumexp in float64: -inf, every epsilon, batches, accuracy."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from otloss.costs import CosineCost, Cost, DenseCost, GridCost, LineCost, PointCost
from otloss.costs.cost import softmin_in_torch
from tests.otloss.gradient_cases import quartic

Epsilon = float | Tensor


def truth(matrix: Tensor, potential: Tensor, epsilon: Epsilon) -> Tensor:
    """By logsumexp in float64, the hard minimum at 0."""
    scores = potential.double().unsqueeze(-2) - matrix.double()
    width = torch.as_tensor(epsilon, dtype=torch.float64)[..., None]
    soft = -width * torch.logsumexp(scores / width.clamp(min=1e-300).unsqueeze(-1), -1)
    return torch.where(width > 0, soft, -scores.amax(-1))


def clouds(n: int, m: int, d: int, dtype: torch.dtype, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(size, d, generator=generator, dtype=torch.float64).to(dtype) for size in (n, m))
    potential = torch.randn(m, generator=generator, dtype=torch.float64).to(dtype)
    potential[::5] = -torch.inf
    return x, y, potential


def every_cost(dtype: torch.dtype) -> list[Cost]:
    x, y, _ = clouds(37, 37, 3, dtype)
    metrics = ("sqeuclidean", "euclidean", "l1", "cosine", quartic)
    points = [PointCost(x, y, metric=metric) for metric in metrics]
    line = [LineCost(x[:, 0], power=power) for power in (1, 2, 1.5)]
    return [DenseCost(points[1].dense()), CosineCost(x), GridCost((37,)).to(dtype), *points, *line]


@pytest.mark.parametrize(("kind", "dtype"), [(k, (torch.float32, torch.float64)[k % 2]) for k in range(11)])
def test_every_cost_at_every_epsilon(kind: int, dtype: torch.dtype) -> None:
    cost = every_cost(dtype)[kind]
    matrix, potential = cost.dense().double(), clouds(37, 37, 3, dtype)[2]
    scale = float(matrix.max() - matrix.min())
    digits = torch.finfo(dtype).eps
    for epsilon in (0.0, 1e-50, *(scale * 10.0**k for k in range(-6, 4))):
        expected = truth(matrix, potential, epsilon)
        for got in (cost.softmin(potential, epsilon), softmin_in_torch(cost.dense(), potential, epsilon)):
            assert got.dtype == dtype
            error = (got.double() - expected).abs().max()
            # Rounding of the costs, of the value returned, and of the logarithm.
            assert error <= 4 * digits * (scale + float(expected.abs().max())) + 8 * digits * epsilon, (epsilon, error)


def test_potentials_of_float64_over_costs_of_float32() -> None:
    x, y, potential = clouds(300, 2500, 3, torch.float32)
    for cost in (PointCost(x, y), DenseCost(PointCost(x, y).dense()), PointCost(x, y, metric="cosine")):
        matrix = cost.dense().double()
        scale = float(matrix.max())
        wide = potential.double() / 3 + 1e6  # an offset that float32 has no digits left for
        for epsilon in (1e-3 * scale, 0.1 * scale, 10 * scale):
            got = cost.softmin(wide, epsilon)
            assert got.dtype == torch.float64
            assert (got - truth(matrix, wide, epsilon)).abs().max() <= 2e-7 * scale + 1e-6 * epsilon


@given(st.integers(1, 40), st.integers(1, 2100), st.integers(1, 6), st.sampled_from(["sqeuclidean", "euclidean", "l1"]))
def test_any_size(n: int, m: int, d: int, metric: str) -> None:
    x, y, potential = clouds(n, m, d, torch.float64, seed=n + m)
    cost = PointCost(x, y, metric=metric)
    expected = truth(cost.dense(), potential, 0.2)
    torch.testing.assert_close(cost.softmin(potential, 0.2), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(DenseCost(cost.dense()).softmin(potential, 0.2), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", range(11))
def test_degenerate_potentials(kind: int) -> None:
    cost = every_cost(torch.float32)[kind]
    nothing = torch.full((2, 37), -torch.inf)
    one = nothing.index_fill(1, torch.tensor(4), 2.0)
    for epsilon in (0.0, 0.1, torch.tensor([0.0, 3.0])):
        for grad in (False, True):
            assert (cost.softmin(nothing.clone().requires_grad_(grad), epsilon) == torch.inf).all()
            got = cost.softmin(one.clone().requires_grad_(grad), epsilon).detach()
            torch.testing.assert_close(got, (cost.dense()[:, 4] - 2).expand(2, 37), rtol=1e-6, atol=1e-6)
    assert cost.softmin(torch.zeros(0, 3, 37), 0.1).shape == (0, 3, 37)
    spread = torch.randn(2, 37, 2)[..., 0]
    torch.testing.assert_close(cost.softmin(spread, 0.1), cost.softmin(spread.contiguous(), 0.1))


@pytest.mark.parametrize("kind", range(11))
def test_gradients_in_the_potential(kind: int, request: pytest.FixtureRequest) -> None:
    if kind % 2:
        request.getfixturevalue("small_blocks")
    cost = every_cost(torch.float64)[kind]
    potential = clouds(37, 37, 3, torch.float64)[2]
    taking_part = potential > -torch.inf
    epsilon = torch.tensor([0.3, 5.0], dtype=torch.float64)

    def soft(some: Tensor) -> Tensor:
        whole = torch.full((2, 37), -torch.inf, dtype=torch.float64).masked_scatter(taking_part.expand(2, 37), some)
        return cost.softmin(whole, epsilon)

    some = potential[taking_part].repeat(2).requires_grad_()
    torch.testing.assert_close(soft(some), truth(cost.dense(), potential.expand(2, 37), epsilon))
    assert torch.autograd.gradcheck(soft, some, fast_mode=True)
    whole = potential.clone().requires_grad_()
    for width in (0.0, 0.3):
        (gradient,) = torch.autograd.grad(cost.softmin(whole, width).sum(), whole)
        assert gradient[~taking_part].abs().sum() == 0
        assert gradient.sum().item() == pytest.approx(-37)
