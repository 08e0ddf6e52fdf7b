"""Projections onto the permutahedron against scipy's isotonic regression and a quadratic program over permutations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression, minimize

from otloss.solvers.permutahedron import falling_regression, project


@given(st.lists(st.lists(st.integers(-4, 4), min_size=5, max_size=5), min_size=1, max_size=40))
@settings(max_examples=30, deadline=None)
def test_regression_is_that_of_scipy(rows: list[list[int]]) -> None:
    values = torch.tensor(rows, dtype=torch.float64) / 3
    found = falling_regression(values)
    for row, fit in zip(values, found, strict=True):
        expected = isotonic_regression(row.numpy(), increasing=False).x
        torch.testing.assert_close(fit, torch.from_numpy(expected.copy()))


def test_projection_is_the_nearest_combination_of_permutations() -> None:
    rng = np.random.default_rng(0)
    w = np.array([3.0, 2.0, 0.5])
    corners = np.array(list(itertools.permutations(w)))
    for _ in range(5):
        z = rng.normal(size=3) * 2
        best = minimize(
            lambda a, z=z: np.sum((a @ corners - z) ** 2), np.full(6, 1 / 6), method="SLSQP", bounds=[(0, 1)] * 6,
            constraints={"type": "eq", "fun": lambda a: a.sum() - 1}, options={"ftol": 1e-14},
        )  # fmt: skip
        found = project(torch.from_numpy(z), torch.from_numpy(w))
        np.testing.assert_allclose(found.numpy(), best.x @ corners, atol=1e-5)


def test_derivatives() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(3, 7, dtype=torch.float64, generator=generator).requires_grad_()
    w = torch.sort(torch.randn(7, dtype=torch.float64, generator=generator), descending=True).values.requires_grad_()
    assert torch.autograd.gradcheck(project, (z, w))
    assert torch.autograd.gradgradcheck(project, (z, w))


@pytest.mark.parametrize("n", [1, 2, 1_000_000])
def test_sizes(n: int) -> None:
    z = torch.randn(n, generator=torch.Generator().manual_seed(1)).requires_grad_()
    w = torch.arange(n, 0, -1, dtype=torch.float64)
    found = project(z, w)
    assert found.sum().item() == pytest.approx(n * (n + 1) / 2, rel=1e-12)
    (gradient,) = torch.autograd.grad(found.square().sum(), z)
    assert gradient.isfinite().all()
