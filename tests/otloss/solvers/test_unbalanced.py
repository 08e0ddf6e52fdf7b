"""Unbalanced transport: the numba kernel against the log domain, POT's plans, and where the kernel does not fit."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import otloss


def problem(seed: int, batch: int, n: int, m: int, *, apart: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Weights that are not uniform, with empty and light bins, and masses that differ by the factor `apart`."""
    generator = torch.Generator().manual_seed(seed)
    p, q, cost = (torch.rand(batch, *shape, generator=generator, dtype=torch.float64) for shape in ((n,), (m,), (n, m)))
    p[:, 0], q[0, -1] = 0.0, 1e-9
    return p / p.sum(-1, keepdim=True), apart * q / q.sum(-1, keepdim=True), cost


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(2, 12),
    st.integers(2, 12),
    st.sampled_from([0.01, 0.05, 1.0]),
    st.sampled_from([1e-3, 0.1, 3.0, 30.0]),
    st.sampled_from([1e-6, 0.5, 1.0, 1e5]),
)
@example(11157, 3, 3, 0.01, 0.001, 1e-6)  # a column that loses all its mass beside an empty row
def test_kernel_equals_the_log_domain(seed: int, n: int, m: int, epsilon: float, rho: float, apart: float) -> None:
    p, q, cost = problem(seed, 2, n, m, apart=apart)
    options = {"epsilon": epsilon, "marginal_penalty": rho, "max_iterations": 20_000}
    truth = otloss.solve(p, q, cost, impl="torch", tolerance=1e-10, **options)  # type: ignore[arg-type]
    for dtype, tolerance, size in ((torch.float64, 1e-10, 1e-7), (torch.float32, 1e-5, 1e-4)):
        result = otloss.solve(*(t.to(dtype) for t in (p, q, cost)), impl="compiled", tolerance=tolerance, **options)  # type: ignore[misc]
        assert bool(result.converged.all())
        torch.testing.assert_close(result.value.double(), truth.value, rtol=size, atol=0.0)
        largest = float(truth.plan().max())
        torch.testing.assert_close(result.plan().double(), truth.plan(), rtol=0.0, atol=size * largest)
        scale = 1 + rho * abs(np.log(apart))  # of the constant in the potentials
        for mine, theirs in zip(result.potentials, truth.potentials, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=size, atol=10 * size * scale)
        g = truth.potentials[1]
        off = (result.potentials[1].double() - g).masked_fill((q == 0) | (g > 40 * rho), 0.0).abs().amax(-1)
        rounding = 1e-6 if dtype == torch.float32 else 1e-9
        assert bool((off <= result.potential_error + truth.potential_error + rounding * scale).all())
        assert bool((result.potential_error <= 100 * size * (1 + rho)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_empty_and_light_bins_and_outliers(dtype: torch.dtype) -> None:
    """Shares exp(-f / rho) that overflow at bins without mass, light bins that face each other, a bin out of reach."""
    p, q, cost = problem(3, 3, 6, 8)
    p[:, 1] = 0.0
    p[1, 2:4], q[1, 3:6] = 1e-30, 1e-28
    cost[0] *= 1e3  # of 0.005
    cost[2, :, 0] = 2e6
    inputs = [t.to(dtype, copy=True).requires_grad_() for t in (p, q, cost)]
    options = {"epsilon": 0.01, "marginal_penalty": 0.05}
    result = otloss.solve(*inputs, **options)  # type: ignore[arg-type]
    truth = otloss.solve(p, q, cost, impl="torch", tolerance=1e-6, **options)  # type: ignore[arg-type]
    size = 1e-4 if dtype == torch.float32 else 1e-7
    torch.testing.assert_close(result.value.double(), truth.value, rtol=size, atol=0.0)
    torch.testing.assert_close(result.plan().double(), truth.plan(), rtol=0.0, atol=size * float(truth.plan().max()))
    assert bool((result.gap >= 0).all())
    gradients = torch.autograd.grad(result.value.sum(), inputs)
    torch.testing.assert_close(gradients[2].double(), truth.plan(), rtol=0.0, atol=size)
    for gradient, weights in zip(gradients, (p, q), strict=False):
        assert bool(gradient.isfinite().all())
        bound = (weights > 1e-3) * gradient
        assert float(bound.abs().max()) < 1.0


@pytest.mark.parametrize("impl", ["compiled", "torch"])
def test_a_side_without_mass_gives_up_the_mass_of_the_other(impl: str) -> None:
    """The value is rho (mass of p + mass of q), with the derivative rho; the other problem of the batch is ordinary."""
    p, q, cost = problem(2, 2, 4, 5)
    q = q.detach()
    p = p.detach() * torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    options = {"epsilon": 0.1, "marginal_penalty": 0.3, "impl": impl}
    q.requires_grad_()
    value = otloss.sinkhorn(p, q, cost.detach(), **options)  # type: ignore[arg-type]
    torch.testing.assert_close(value[1].detach(), 0.3 * q[1].detach().sum())
    (gradient,) = torch.autograd.grad(value[1], q)
    torch.testing.assert_close(gradient[1], torch.full_like(gradient[1], 0.3))
    answer = otloss.solve(p, q.detach(), cost.detach(), **options)  # type: ignore[arg-type]
    assert not bool(answer.plan()[1].any())
    assert float(answer.gap[1]) == 0.0
    with pytest.raises(ValueError, match="holds no mass in a problem"):
        otloss.sinkhorn(p.requires_grad_(), q.detach(), cost.detach(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", [1e4, 1e8])
def test_an_epsilon_far_above_the_penalty(ratio: float, dtype: torch.dtype) -> None:
    a, b = (torch.tensor([mass], dtype=torch.float64, requires_grad=True) for mass in (3.0, 2.0))
    epsilon, cost = 1e6, 0.7
    rho = epsilon / ratio
    share = -(rho * (a * b).log() + cost) / (epsilon + 2 * rho)  # log of the mass of the plan over a b
    expected = rho * (a + b) - 2 * rho * a * b - (epsilon + 2 * rho) * a * b * share.expm1()
    p, q = (weights.detach().to(dtype).requires_grad_() for weights in (a, b))
    value = otloss.sinkhorn(p, q, torch.full((1, 1), cost, dtype=dtype), epsilon=epsilon, marginal_penalty=rho)
    tolerance = {"rtol": 1e-6 if dtype == torch.float32 else 1e-8, "atol": 0.0}
    torch.testing.assert_close(value.double(), expected.squeeze(), **tolerance)
    for actual, true in zip(torch.autograd.grad(value, (p, q)), torch.autograd.grad(expected, (a, b)), strict=True):
        torch.testing.assert_close(actual.double(), true, **tolerance)
