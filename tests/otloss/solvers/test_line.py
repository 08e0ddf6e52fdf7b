"""Closed forms on the line against linear programming and scipy; in torch, and by the kernels.

More of their gradients is in test_gradient_matrix.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from otloss import cdf_distance, wasserstein_1d
from tests.errors import raising
from tests.otloss.linear_programs import check_subgradients
from tests.otloss.oracles import as_double, linprog_value
from tests.otloss.strategies import line_problems, positions, weights

Problem = tuple[np.ndarray, np.ndarray, np.ndarray]
orders = st.sampled_from([1, 1.5, 2, 3.7])
drawn = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True, params=["torch", "kernels"])
def implementation(request: pytest.FixtureRequest) -> None:
    if request.param == "kernels":
        request.getfixturevalue("small_blocks")


def line_matrix(x: np.ndarray, y: np.ndarray, order: float) -> np.ndarray:
    return np.abs(np.subtract.outer(x, y)) ** order


@drawn
@given(st.data())
def test_quantile_merge_is_the_linear_program_and_gradients_are_subgradients(data: st.DataObject) -> None:
    n, m, order = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)), data.draw(orders)
    shared = data.draw(st.booleans())
    n = m if shared else n
    p, q, x, y = (data.draw(s) for s in (weights(n), weights(m), positions(n), positions(m)))
    places = (as_double(x),) if shared else (as_double(x), as_double(y))
    matrix = line_matrix(x, x if shared else y, order)
    value = wasserstein_1d(as_double(p), as_double(q), *places, order=order)
    assert value.item() == pytest.approx(linprog_value(p, q, matrix), abs=1e-6 * max(1.0, matrix.max()))
    slack = 1e-9 * (1 + float(matrix.max()))
    check_subgradients(lambda p, q: wasserstein_1d(p, q, *places, order=order), p, q, slack)


@drawn
@given(line_problems(), st.sampled_from([1, 1.5, 2, 3]))
def test_gradients_of_cdf_distances_are_subgradients(problem: Problem, power: float) -> None:
    p, q, x = problem
    check_subgradients(lambda p, q: cdf_distance(p, q, as_double(x), power=power), p, q, slack=1e-8)


@drawn
@given(line_problems(), st.sampled_from([1, 1.3, 2, 3]))
def test_cdf_distance_is_its_definition(problem: Problem, power: float) -> None:
    p, q, x = problem
    order = np.argsort(x, kind="stable")
    gaps, apart = np.diff(x[order]), np.abs(np.cumsum(p[order] - q[order]))[:-1]
    actual = cdf_distance(*map(as_double, problem), power=power)
    assert actual.item() == pytest.approx((gaps * apart**power).sum(), abs=1e-12)
    if power == 1:
        assert wasserstein_1d(*map(as_double, problem)).item() == pytest.approx(actual.item(), abs=1e-12)


def test_float32_is_as_good_as_its_inputs_on_many_bins() -> None:
    p, q = (torch.rand(50_000, generator=torch.Generator().manual_seed(s)).softmax(-1) for s in (0, 1))
    exact = cdf_distance(p.double() / p.double().sum(), q.double() / q.double().sum(), power=1)
    assert cdf_distance(p, q, power=1).item() == pytest.approx(exact.item(), rel=1e-4)


def test_masses_off_by_rounding_are_balanced() -> None:
    p, q = torch.tensor([[0.1, 0.2, 0.7], [0.3, 0.4, 0.3]], dtype=torch.float64)
    q = q * (1 + 8e-10)
    assert wasserstein_1d(p, q).item() == pytest.approx(0.6 * (1 + 4e-10), rel=1e-12)
    assert wasserstein_1d(q, p).item() == pytest.approx(0.6 * (1 + 4e-10), rel=1e-12)
    assert cdf_distance(p, p * (1 + 1e-10)).item() < 1e-30
    assert wasserstein_1d(p, p * (1 + 1e-10), torch.arange(3), torch.arange(3), order=2).item() < 1e-12
    torch.testing.assert_close(cdf_distance(3 * p, 3 * p.flip(0)), 9 * cdf_distance(p, p.flip(0)))
    assert wasserstein_1d(p, q, torch.tensor([0, 2, 5])).item() == pytest.approx(1.6)  # positions of integers
    assert wasserstein_1d(p.float(), q.float(), torch.arange(3), torch.arange(3).double()).dtype == torch.float64
    uniform = torch.full((3,), 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(
        cdf_distance(None, p, torch.tensor([0, 2, 5])), cdf_distance(uniform, p, torch.tensor([0, 2, 5]))
    )


third = torch.full((3,), 1 / 3)


test_bad_input = raising(
    (lambda: cdf_distance(third, third, power=0.5), ValueError, "power is 0.5, expected a finite number of at"),
    (lambda: wasserstein_1d(third, third, order="1"), TypeError, r"order is a str \('1'\), expected a number"),  # type: ignore[arg-type]
    (lambda: cdf_distance(third, torch.ones(1)), ValueError, "p has 3 bins and q 1.*wasserstein_1d"),
    (lambda: wasserstein_1d(third, torch.ones(1), order=2), ValueError, "pass y, the positions of q's bins"),
    (lambda: cdf_distance(third, third * 2), ValueError, "different masses: 1.* and 2.*relative difference"),
    (lambda: wasserstein_1d(third, third - 0.5, order=2), ValueError, "q holds -0.1666.* in bin 0"),
    (lambda: cdf_distance(third.expand(2, 3), third, torch.rand(5, 3)), ValueError, r"x \(5,\), its weights"),
)
