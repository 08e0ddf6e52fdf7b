"""Transport on the circle against linear programming; more of its gradients is in test_gradient_matrix."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from otloss import wasserstein_circular
from tests.otloss.linear_programs import check_subgradients
from tests.otloss.oracles import as_double, linprog_value
from tests.otloss.strategies import line_problems

Problem = tuple[np.ndarray, np.ndarray, np.ndarray]


def arcs(x: np.ndarray, period: float) -> np.ndarray:
    apart = np.abs(np.subtract.outer(x, x)) % period
    return np.minimum(apart, period - apart)


@settings(max_examples=100, deadline=None)
@given(line_problems(max_size=7), st.sampled_from([1.0, 2.5, 7.0, 100.0]))
def test_is_the_linear_program_and_gradients_are_subgradients(problem: Problem, period: float) -> None:
    p, q, x = problem

    def value(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return wasserstein_circular(p, q, as_double(x), period=period)

    expected = linprog_value(p, q, arcs(x, period))
    assert value(as_double(p), as_double(q)).item() == pytest.approx(expected, abs=1e-6 * period)
    check_subgradients(value, p, q, slack=1e-10 * (10 + period))


def test_batches_broadcast_and_equal_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(3, 1, 5, generator=generator).softmax(-1), torch.rand(4, 5, generator=generator).softmax(-1)
    for x in (None, 9 * torch.rand(5, generator=generator), 9 * torch.rand(3, 4, 5, generator=generator)):
        batched = wasserstein_circular(p, q, x, period=5)
        assert batched.shape == (3, 4)
        own = x if x is None or x.dim() == 1 else x[2, 1]
        torch.testing.assert_close(batched[2, 1], wasserstein_circular(p[2, 0], q[1], own, period=5))
    assert wasserstein_circular(p[:0], q).shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_layouts(dtype: torch.dtype) -> None:
    p = torch.rand(9, 4, dtype=torch.float64).softmax(0).T.to(dtype).requires_grad_()  # strided
    q = torch.rand(4, 9, dtype=torch.float64).softmax(-1).to(dtype)
    value = wasserstein_circular(p, q)
    assert torch.autograd.grad(value.sum(), p)[0].dtype == value.dtype == dtype
    wide = wasserstein_circular(*(w.detach().double() / w.detach().double().sum(-1, keepdim=True) for w in (p, q)))
    torch.testing.assert_close(value.double(), wide, rtol=3 * torch.finfo(dtype).eps + 1e-6, atol=1e-7)


def test_no_mass_and_equal_histograms_have_finite_gradients() -> None:
    for weights in (torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.0, 1.0, 0.0]), torch.zeros(3)):
        leaves = [weights.clone().requires_grad_(), weights.clone().requires_grad_(), torch.rand(3).requires_grad_()]
        value = wasserstein_circular(*leaves, period=2.0)
        assert value.item() == 0.0
        assert all(torch.isfinite(g).all() for g in torch.autograd.grad(value, leaves))


def test_bad_input() -> None:
    third = torch.full((3,), 1 / 3)
    with pytest.raises(ValueError, match="x is given without a period"):
        wasserstein_circular(third, third, third)
    with pytest.raises(ValueError, match="period is 0, expected a finite number above"):
        wasserstein_circular(third, third, period=0)
    with pytest.raises(ValueError, match="p has 3 bins and q 1"):
        wasserstein_circular(third, torch.ones(1))
    with pytest.raises(ValueError, match="x holds 3 NaN or infinite"):
        wasserstein_circular(third, third, third / 0, period=1)
