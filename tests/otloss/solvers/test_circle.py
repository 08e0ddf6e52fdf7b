"""Transport on the circle against linear programming, POT and finite differences."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from otloss import wasserstein_1d, wasserstein_circular
from tests.otloss.linear_programs import check_derivatives, check_subgradients, sparse_weights
from tests.otloss.oracles import as_double, linprog_value
from tests.otloss.strategies import line_problems

Problem = tuple[np.ndarray, np.ndarray, np.ndarray]


def arcs(x: np.ndarray, period: float) -> np.ndarray:
    apart = np.abs(np.subtract.outer(x, x)) % period
    return np.minimum(apart, period - apart)


def sparse_problem(seed: int, n: int) -> Problem:
    """General weights, some of them zero in both."""
    rng = np.random.default_rng(seed)
    p, q = sparse_weights(rng, n), sparse_weights(rng, n)
    p[: n // 4] = q[: n // 4] = 0
    return p / p.sum(), q / q.sum(), rng.uniform(-20, 20, size=n)


@settings(max_examples=100, deadline=None)
@given(line_problems(max_size=7), st.sampled_from([1.0, 2.5, 7.0, 100.0]))
def test_is_the_linear_program_and_gradients_are_subgradients(problem: Problem, period: float) -> None:
    p, q, x = problem

    def value(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return wasserstein_circular(p, q, as_double(x), period=period)

    expected = linprog_value(p, q, arcs(x, period))
    assert value(as_double(p), as_double(q)).item() == pytest.approx(expected, abs=1e-6 * period)
    check_subgradients(value, p, q, slack=1e-10 * (10 + period))


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_gradients_match_finite_differences(n: int) -> None:
    for seed in range(4):
        check_derivatives(
            lambda p, q, x: wasserstein_circular(p, q, x, period=7.0),
            lambda p, q, x: linprog_value(p, q, arcs(x, 7.0)),
            *sparse_problem(seed, n),
        )


def test_second_derivatives() -> None:
    p, q, x = sparse_problem(3, 8)
    leaves = [as_double(np.log(p + 0.05), grad=True), as_double(np.log(q + 0.07), grad=True), as_double(x, grad=True)]
    assert torch.autograd.gradgradcheck(
        lambda a, b, x: wasserstein_circular(a.softmax(-1), b.softmax(-1), x, period=7.0), leaves
    )
    P, X = as_double(p, grad=True), as_double(x, grad=True)

    def by_weights(x: torch.Tensor) -> torch.Tensor:
        value = wasserstein_circular(P, as_double(q), x, period=7.0)
        return torch.autograd.grad(value, P, create_graph=True)[0]

    assert torch.autograd.gradcheck(by_weights, X)  # bins without mass included


def test_pot_agrees() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 6, 20, generator=generator, dtype=torch.float64).softmax(-1)
    x = torch.rand(20, generator=generator, dtype=torch.float64)
    # The peer takes one set of weights a call.
    expected = [ot.wasserstein_circle(x, x, a, b, p=1) for a, b in zip(p, q, strict=True)]
    torch.testing.assert_close(wasserstein_circular(p, q, x, period=1.0), torch.cat(expected))


def test_turning_and_mirroring_change_nothing_and_the_line_is_an_upper_bound() -> None:
    p, q, x = map(as_double, sparse_problem(5, 9))
    value = wasserstein_circular(p, q, x, period=7)
    for other in (x + 3.3, -x, x + 7e3, x.remainder(7)):
        torch.testing.assert_close(wasserstein_circular(p, q, other, period=7), value)
    torch.testing.assert_close(wasserstein_circular(q, p, x, period=7), value)
    assert value <= wasserstein_1d(p, q, x.remainder(7)) + 1e-12
    torch.testing.assert_close(wasserstein_circular(p, q, x + 30, period=1e4), wasserstein_1d(p, q, x))


def test_batches_broadcast_and_equal_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(3, 1, 5, generator=generator).softmax(-1), torch.rand(4, 5, generator=generator).softmax(-1)
    for x in (None, 9 * torch.rand(5, generator=generator), 9 * torch.rand(3, 4, 5, generator=generator)):
        batched = wasserstein_circular(p, q, x, period=5)
        assert batched.shape == (3, 4)
        own = x if x is None or x.dim() == 1 else x[2, 1]
        torch.testing.assert_close(batched[2, 1], wasserstein_circular(p[2, 0], q[1], own, period=5))
    assert wasserstein_circular(p[:0], q).shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
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


third = torch.full((3,), 1 / 3)


@pytest.mark.parametrize(
    ("arguments", "period", "error", "message"),
    [
        ((third, third, third), None, ValueError, "x is given without a period"),
        ((third, third), 0, ValueError, "period is 0, expected a finite number above"),
        ((third, torch.ones(1)), None, ValueError, "p has 3 bins and q 1"),
        ((third, third, torch.ones(2)), 1, ValueError, r"x has shape \(2,\)"),
        ((third, third, third / 0), 1, ValueError, "x holds 3 NaN or infinite"),
        ((third, third, [0, 1, 2]), 3, TypeError, "x is a list"),
        ((third, third * 2), None, ValueError, "p and q hold different masses"),
    ],
)
def test_bad_input(
    arguments: tuple[torch.Tensor, ...], period: float | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        wasserstein_circular(*arguments, period=period)
