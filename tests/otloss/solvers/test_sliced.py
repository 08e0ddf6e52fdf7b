"""Sliced distances against linear programs per direction and closed forms; gradients are in test_gradient_matrix."""

import math

import numpy as np
import pytest
import torch

import otloss
from otloss.solvers.sliced import sliced_wasserstein
from tests.errors import raising
from tests.otloss.oracles import as_double, linprog_value


def clouds(seed: int, n: int, m: int, d: int) -> tuple[np.ndarray, ...]:
    """Points and weights, some of them zero, and three directions."""
    rng = np.random.default_rng(seed)
    a, b = rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m))
    a[: n // 3], b[: m // 4] = 0, 0
    return rng.normal(size=(n, d)), rng.normal(size=(m, d)), a / a.sum(), b / b.sum(), rng.normal(size=(3, d))


@pytest.mark.parametrize(("n", "m", "d", "order"), [(5, 5, 2, 2), (4, 6, 3, 1), (4, 3, 2, 1.5), (1, 3, 1, 2)])
def test_values_are_means_of_linear_programs(n: int, m: int, d: int, order: float) -> None:
    x, y, a, b, along = clouds(n + m, n, m, d)
    unit = along / np.linalg.norm(along, axis=1, keepdims=True)
    costs = [np.abs(np.subtract.outer(x @ u, y @ u)) ** order for u in unit]
    expected = np.mean([linprog_value(a, b, cost) for cost in costs])
    value = sliced_wasserstein(*map(as_double, (x, y, a, b)), order=order, projections=as_double(along))
    assert value.item() == pytest.approx(expected, abs=1e-6)


def test_a_shift_costs_its_square_over_the_dimension() -> None:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shift = torch.tensor([3.0, 0.0, -1.0, 2.0], dtype=torch.float64)
    value = sliced_wasserstein(x, x + shift, projections=20_000, generator=torch.Generator().manual_seed(1))
    assert value.item() == pytest.approx(float(shift @ shift) / 4, rel=0.02)
    mean = math.gamma(2) / (math.sqrt(math.pi) * math.gamma(2.5))  # of |u_1| on the sphere in 4 dimensions
    value = sliced_wasserstein(x, x + shift, order=1, projections=20_000, generator=torch.Generator().manual_seed(1))
    assert value.item() == pytest.approx(float(shift.norm()) * mean, rel=0.02)


def test_generators_reproduce() -> None:
    x, y = torch.randn(2, 6, 3)

    def drawn(dtype: torch.dtype, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return sliced_wasserstein(x.to(dtype), y.to(dtype), projections=5, generator=generator)

    assert torch.equal(drawn(torch.float32, 0), drawn(torch.float32, 0))
    assert not torch.equal(drawn(torch.float32, 0), drawn(torch.float32, 1))


@pytest.mark.parametrize("order", [1, 2])
def test_blocks_change_nothing(order: float, request: pytest.FixtureRequest) -> None:
    x, y, a, b, along = clouds(1, 6, 5, 2)
    answers = []
    for in_blocks in (False, True):
        if in_blocks:
            request.getfixturevalue("small_blocks")
        leaves = [as_double(t, grad=True) for t in (x, y, a, b)]
        value = sliced_wasserstein(*leaves, order=order, projections=as_double(along))
        first = torch.autograd.grad(value, leaves, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), leaves[0]) if order == 2 else ()
        answers.append([value, *first, *second])
    for whole, blocked in zip(*answers, strict=True):
        torch.testing.assert_close(whole, blocked)


def test_far_from_the_origin_float32_is_as_good_as_its_inputs() -> None:
    x, y = (torch.randn(2, 50, 3, generator=torch.Generator().manual_seed(0)) + 1e6).requires_grad_()
    along = torch.randn(9, 3)
    exact = sliced_wasserstein(x.double(), y.double(), projections=along)
    assert sliced_wasserstein(x, y, projections=along).item() == pytest.approx(exact.item(), rel=1e-5)


def test_large_numbers_raise_only_where_the_value_overflows() -> None:
    x = torch.rand(2, 30, 3, generator=torch.Generator().manual_seed(0)) * 1e19
    along = torch.eye(3).repeat(9, 1)
    actual, expected = (sliced_wasserstein(t, t.flip(0), projections=along).sum() for t in (x, x.double()))
    assert float(actual) == pytest.approx(float(expected), rel=1e-5)
    for call in (sliced_wasserstein, lambda x, y: otloss.cloud_loss(x, y, kind="sliced")):
        with pytest.raises(ValueError, match=r"distances to the power 2 overflow torch.float32; .* pass float64"):
            call(100 * x, 100 * x + 1e21)


square = torch.rand(4, 2)


test_bad_input = raising(
    ((square[0], square), {}, r"x has shape \(2,\), expected \(..., n, d\)"),
    ((square, square, torch.ones(3)), {}, r"a has shape \(3,\), expected a last axis of 4"),
    ((square, square, torch.ones(4)), {}, "masses"),
    ((square, square), {"projections": 0}, "projections is 0, expected how many"),
    ((square, square), {"projections": torch.zeros(2, 2)}, r"projections\[0\] is zero"),
    ((square, square), {"projections": torch.eye(3)}, r"expected \(k, 2\)"),
    call=lambda arguments, options: sliced_wasserstein(*arguments, **options),
)
