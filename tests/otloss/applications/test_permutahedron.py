"""Quadratic sorting against scipy's isotonic regression, quadratic programs and finite differences."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression, minimize
from scipy.stats import rankdata
from torch import Tensor

from otloss.applications.sorting import soft_rank, soft_sort, soft_top_k
from tests.errors import raising

F64 = torch.float64


def rank(x: Tensor, epsilon: float) -> Tensor:
    return soft_rank(x, epsilon=epsilon, regularization="quadratic")


def sort(x: Tensor, epsilon: float) -> Tensor:
    return soft_sort(x, epsilon=epsilon, regularization="quadratic", descending=True)


def top_two(x: Tensor, epsilon: float) -> Tensor:
    return soft_top_k(x, min(2, x.shape[-1]), epsilon=epsilon, regularization="quadratic")


every_operator = pytest.mark.parametrize("operator", [rank, sort, top_two])


def nearest(z: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The convex combination of the permutations of w nearest to z."""
    corners = np.array(list(itertools.permutations(w)))
    best = minimize(
        lambda a: np.sum((a @ corners - z) ** 2), np.full(len(corners), 1 / len(corners)), method="SLSQP",
        bounds=[(0, 1)] * len(corners), constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 1000},
    )  # fmt: skip
    actual: np.ndarray = best.x @ corners
    return actual


@pytest.mark.parametrize("epsilon", [0.4, 1.3, 4.0])
def test_projections_are_the_nearest_combinations_of_permutations(epsilon: float) -> None:
    for x in np.random.default_rng(0).normal(size=(3, 4)):
        u, places = (x - x.min()) / np.ptp(x), np.arange(4.0, 0.0, -1.0)
        row = torch.from_numpy(x)
        np.testing.assert_allclose(rank(row, epsilon), nearest(3 * u / epsilon, places), atol=1e-4)
        np.testing.assert_allclose(top_two(row, epsilon), nearest(u / epsilon, np.array([1.0, 1, 0, 0])), atol=1e-4)
        expected = nearest(places / (3 * epsilon), -np.sort(-x) / np.ptp(x)) * np.ptp(x)
        np.testing.assert_allclose(sort(row, epsilon), expected, atol=1e-4)


@given(
    st.lists(st.lists(st.integers(-4, 4), min_size=5, max_size=5), min_size=1, max_size=40),
    st.sampled_from([1e-7, 0.3, 1.0, 7.0]),
)
@settings(max_examples=40, deadline=None)
def test_rows_with_ties_are_those_of_the_isotonic_regression_of_scipy(entries: list[list[int]], epsilon: float) -> None:
    x = torch.tensor(entries, dtype=torch.float32)
    for row, ranks, ordered in zip(x.double().numpy(), rank(x, epsilon), sort(x, epsilon), strict=True):
        falling, places = -np.sort(-row), np.arange(5.0, 0.0, -1.0)
        spread = np.ptp(row)
        z = (falling - row.min()) * 4 / (spread or 1.0) / epsilon
        expected = z - isotonic_regression(z - places, increasing=False).x
        np.testing.assert_allclose(ranks, expected[rankdata(-row, "ordinal").astype(int) - 1], rtol=1e-6)
        z = places / 4 / epsilon * spread
        np.testing.assert_allclose(ordered, z - isotonic_regression(z - falling, increasing=False).x, atol=1e-5)
        if epsilon < 1e-6:
            np.testing.assert_array_equal(ranks, rankdata(row))
            np.testing.assert_array_equal(ordered, falling)


@every_operator
def test_derivatives(operator: Callable[[Tensor, float], Tensor]) -> None:
    x = torch.randn(3, 7, dtype=F64, generator=torch.Generator().manual_seed(0))
    leaf = x.clone().requires_grad_()
    for epsilon in (0.05, 3.0):
        assert torch.autograd.gradcheck(lambda t, e=epsilon: operator(t, e), leaf)
    (actual,) = torch.autograd.grad(operator(leaf, 0.7).square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative"):
        actual.sum().backward()
    # Entries that tie and share no places have no gradient, and neither have rows of equal ones.
    tied = torch.tensor([[5.0, 5.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0]], requires_grad=True)
    (actual,) = torch.autograd.grad(top_two(tied, 0.1)[:, 0].sum(), tied)
    assert not actual.any()
    assert not torch.autograd.grad(rank(tied, 1.0)[1, 0], tied)[0].any()


@every_operator
@pytest.mark.parametrize("n", [1, 2, 1_000_000])
def test_sizes_and_scale(n: int, operator: Callable[[Tensor, float], Tensor]) -> None:
    x = torch.randn(n, dtype=F64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    actual = operator(x, 1e-3)
    scaled = operator(4 * x + 1, 1e-3)
    torch.testing.assert_close(scaled, 4 * actual + 1 if operator is sort else actual)
    (gradient,) = torch.autograd.grad(actual.square().sum(), x)
    assert gradient.isfinite().all()
    for shape in ((0, 5), (2, 0, 3)):
        assert operator(torch.zeros(shape), 1.0).shape == shape


test_bad_input = raising(
    (lambda: soft_rank(torch.zeros(3), regularization="l2"), "regularization is 'l2', expected one of"),
    (lambda: sort(torch.tensor([-1.7e308, 1.7e308], dtype=F64), 1.0), "the range of a row of x is beyond float64"),
)
