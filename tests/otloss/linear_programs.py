"""Checks of a transport cost against linear programming: value, derivatives with their size, subgradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.otloss.oracles import as_double, central_gradients, weight_gradients


def check_derivatives(
    value: Callable[..., Tensor], exact: Callable[..., float], *arrays: np.ndarray, atol: float = 5e-5
) -> None:
    """`value(p, q, ...)` and all its gradients are those of `exact`; `arrays` begin with p and q, general weights."""
    leaves = [as_double(a, grad=True) for a in arrays]
    found = value(*leaves)
    assert found.item() == pytest.approx(exact(*arrays), abs=1e-6)
    for k, gradient in enumerate(torch.autograd.grad(found, leaves)):

        def at(array: np.ndarray, k: int = k) -> float:
            return exact(*arrays[:k], array, *arrays[k + 1 :])

        if k < 2:
            heaviest, expected = weight_gradients(at, arrays[k], 1e-6)
            np.testing.assert_allclose((gradient - gradient[heaviest]).numpy(), expected, atol=atol)
            assert abs(gradient.sum()) < 1e-11
        else:
            np.testing.assert_allclose(gradient.numpy(), central_gradients(at, arrays[k], 1e-6), atol=atol)


def check_subgradients(
    value: Callable[[Tensor, Tensor], Tensor], p: np.ndarray, q: np.ndarray, slack: float = 1e-9
) -> None:
    """f.(p' - p) <= value(p') - value(p) for every vertex p', degenerate optima included; the same for q."""
    P, Q = as_double(p, grad=True), as_double(q, grad=True)
    here = value(P, Q)
    by_p, by_q = torch.autograd.grad(here, [P, Q])
    for there in torch.eye(p.size, dtype=torch.float64):
        assert by_p @ (there - P) <= value(there, Q) - here + slack
    for there in torch.eye(q.size, dtype=torch.float64):
        assert by_q @ (there - Q) <= value(P, there) - here + slack


def sparse_weights(rng: np.random.Generator, n: int) -> np.ndarray:
    """General weights of mass 1, a third of them zero."""
    p = rng.dirichlet(np.ones(n))
    p[rng.permutation(n)[: n // 3]] = 0
    weights: np.ndarray = p / p.sum()
    return weights
