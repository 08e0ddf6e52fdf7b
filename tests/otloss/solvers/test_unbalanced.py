"""Unbalanced transport: the numba kernel against the log domain, POT's plans, and where the kernel does not fit."""

from typing import Any

import numpy as np
import ot
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import otloss
from tests.otloss.oracles import precise_potentials


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
    st.sampled_from([1e-3, 0.1, 3.0, 30.0, (0.1, 30.0), (1e3, 1e-3), (None, 0.1), (3.0, None)]),
    st.sampled_from([1e-6, 0.5, 1.0, 1e5]),
)
@example(11157, 3, 3, 0.01, 0.001, 1e-6)  # a column that loses all its mass beside an empty row
def test_kernel_equals_the_log_domain(seed: int, n: int, m: int, epsilon: float, rho: Any, apart: float) -> None:
    p, q, cost = problem(seed, 2, n, m, apart=apart)
    options = {"epsilon": epsilon, "marginal_penalty": rho, "max_iterations": 20_000}
    truth = otloss.solve(p, q, cost, impl="torch", tolerance=1e-10, **options)  # type: ignore[arg-type]
    for dtype, tolerance, size in ((torch.float64, 1e-10, 1e-7), (torch.float32, 1e-5, 1e-4)):
        result = otloss.solve(*(t.to(dtype) for t in (p, q, cost)), impl="compiled", tolerance=tolerance, **options)  # type: ignore[misc]
        assert bool(result.converged.all())
        torch.testing.assert_close(result.value.double(), truth.value, rtol=size, atol=0.0)
        largest = float(truth.plan().max())
        torch.testing.assert_close(result.plan().double(), truth.plan(), rtol=0.0, atol=size * largest)
        rho_p, rho_q = (1e300 if r is None else r for r in (rho if isinstance(rho, tuple) else (rho, rho)))
        constant = 2 / (1 / rho_p + 1 / rho_q)
        scale = 1 + constant * abs(np.log(apart))  # how far the constant in the potentials may be off
        for mine, theirs in zip(result.potentials, truth.potentials, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=size, atol=10 * size * scale)
        g = truth.potentials[1]
        off = (result.potentials[1].double() - g).masked_fill((q == 0) | (g > 40 * rho_q), 0.0).abs().amax(-1)
        rounding = 1e-6 if dtype == torch.float32 else 1e-9
        assert bool((off <= result.potential_error + truth.potential_error + rounding * scale).all())
        assert bool((result.potential_error <= 100 * size * (1 + constant)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_empty_and_light_bins_and_outliers(dtype: torch.dtype) -> None:
    """Shares exp(-f / rho) that overflow at bins without mass, light bins that face each other, a bin out of reach."""
    p, q, cost = problem(3, 3, 6, 8)
    p[:, 1] = 0.0
    p[1, 2:4], q[1, 3:6] = 1e-30, 1e-28
    cost[0] *= 1e3  # a thousand times the costs of the others
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
    solution = otloss.solve(p, q.detach(), cost.detach(), **options)  # type: ignore[arg-type]
    assert not bool(solution.plan()[1].any())
    assert float(solution.gap[1]) == 0.0
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


# ---- a penalty for each side -----------------------------------------------------------------------------------------

PAIRS = [(0.3, 2.0), (1e6, 1e-3), (1e-3, 1e6), (None, 0.1), (0.1, None), (None, 1e4), (1e-3, None), (1e4, 1e4)]


@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize("rho", PAIRS, ids=str)
def test_a_penalty_for_each_side_against_50_digits(rho: tuple[float | None, float | None], impl: str) -> None:
    """Value, potentials, plan, gap and all first derivatives, with light bins, ties and masses that differ."""
    prices = tuple(np.inf if r is None else r for r in rho)
    for seed in range(6):
        draw = np.random.default_rng(seed)
        n, m = draw.integers(1, 6, 2)
        p, q = draw.random(n) + 0.1, 1.5 * draw.random(m) + 0.1
        cost, epsilon = draw.random((n, m)), (0.02, 0.3, 5.0)[seed % 3]
        if seed % 2:
            p[0], q[-1], cost[:, 0] = 1e-7, 1e-9, np.round(cost[:, 0])
        inputs = [torch.tensor(t, requires_grad=True) for t in (p, q, cost)]
        solution = otloss.solve(*inputs, epsilon=epsilon, marginal_penalty=rho, impl=impl, tolerance=1e-10)  # type: ignore[misc]
        f, g, value = precise_potentials(
            p.tolist(), q.tolist(), cost.tolist(), epsilon, prices, solution.potentials[1].tolist()
        )
        f, g = (np.array([float(t) for t in potential]) for potential in (f, g))
        size = 1e-7 * max(1.0, float(np.abs(g).max()), float(np.abs(f).max()))
        assert abs(solution.value.item() - float(value)) <= 1e-8 * max(1.0, abs(float(value)))
        assert solution.dual_value.item() <= float(value) <= (solution.dual_value + solution.gap).item()
        assert solution.gap.item() <= 1e-6 * max(1.0, abs(float(value)))
        plan = p[:, None] * q * np.exp((f[:, None] + g - cost) / epsilon)
        gradients = torch.autograd.grad(solution.value, inputs)
        np.testing.assert_allclose(gradients[2], plan, rtol=1e-6, atol=1e-8 * plan.max())
        np.testing.assert_allclose(solution.plan().detach(), plan, rtol=1e-6, atol=1e-8 * plan.max())
        for actual, potential, price, mass, derivative in zip(
            solution.potentials, (f, g), prices, (q.sum(), p.sum()), gradients, strict=False
        ):
            np.testing.assert_allclose(actual.detach(), potential, rtol=1e-6, atol=size)
            share = np.exp(-potential / price)
            kept = potential if price == np.inf else -price * np.expm1(-potential / price)
            scale = size * (1 + share.max() * (1 + epsilon / price))
            np.testing.assert_allclose(derivative, kept - epsilon * (share - mass), rtol=1e-6, atol=scale)
        for side, (weights, price) in enumerate(zip((p, q), prices, strict=True)):
            if price == np.inf:
                np.testing.assert_allclose(solution.plan().detach().sum(1 - side), weights, rtol=1e-6)


def test_pot_takes_a_penalty_for_each_side() -> None:
    p, q, cost = (t[1].numpy() for t in problem(7, 2, 6, 9, apart=2.0))
    p = p + 0.01
    theirs = ot.unbalanced.sinkhorn_unbalanced(p, q, cost, 0.1, (0.4, 3.0), numItermax=20_000, stopThr=1e-12)
    mine = otloss.solve(*map(torch.tensor, (p, q, cost)), epsilon=0.1, marginal_penalty=(0.4, 3.0), tolerance=1e-10)
    np.testing.assert_allclose(mine.plan(), theirs, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("grad", ["envelope", "implicit"])
def test_penalties_of_a_batch_are_those_of_each_problem(grad: str) -> None:
    p, q, cost = problem(4, 3, 5, 6, apart=1.4)
    p, q, cost = p + 0.01, q + 0.01, cost.requires_grad_()
    rho = torch.tensor([0.1, 1e5, 2.0])
    for pair in (rho, (rho, None), (0.3, rho), (rho, rho.flip(0).double())):
        options = {"epsilon": 0.1, "grad": grad, "tolerance": 1e-10}
        values = otloss.sinkhorn(p, q, cost, marginal_penalty=pair, **options)  # type: ignore[arg-type]
        for k in range(3):
            one = tuple(
                t[k].item() if isinstance(t, Tensor) else t for t in (pair if isinstance(pair, tuple) else (rho, rho))
            )
            alone = otloss.sinkhorn(p[k], q[k], cost[k], marginal_penalty=one, **options)  # type: ignore[arg-type]
            torch.testing.assert_close(values[k], alone, rtol=1e-9, atol=1e-12)
            gradients = (torch.autograd.grad(value, cost, retain_graph=True)[0][k] for value in (values[k], alone))
            torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)
    across = otloss.sinkhorn(p[0], q[0], cost[0], epsilon=0.1, marginal_penalty=rho)
    assert across.shape == (3,)


def test_a_side_that_is_kept_needs_mass_on_the_other() -> None:
    p, q, cost = problem(2, 2, 4, 5)
    q = q * torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    with pytest.raises(ValueError, match="marginal_penalty keeps p, but the other side holds no mass"):
        otloss.sinkhorn(p, q, cost, epsilon=0.1, marginal_penalty=(None, 0.3))
    value = otloss.sinkhorn(p, q, cost, epsilon=0.1, marginal_penalty=(0.3, None))
    torch.testing.assert_close(value[1], 0.3 * p[1].sum())


def test_none_on_both_sides_is_balanced() -> None:
    p, q, cost = (t[0] for t in problem(2, 2, 4, 5))
    both = otloss.sinkhorn(p, q, cost, epsilon=0.1, marginal_penalty=(None, None))
    assert both.item() == otloss.sinkhorn(p, q, cost, epsilon=0.1).item()
    with pytest.raises(ValueError, match="masses"):
        otloss.sinkhorn(p, 2 * q, cost, epsilon=0.1, marginal_penalty=(None, None))


@pytest.mark.parametrize(
    ("rho", "error", "message"),
    [
        ((0.1, 0.2, 0.3), ValueError, "has 3 entries, expected two"),
        ((0.1, -1.0), ValueError, "marginal_penalty is -1.0, expected a finite number above 0"),
        ((0.1, float("inf")), ValueError, "marginal_penalty is inf"),
        (("a", 1.0), TypeError, "marginal_penalty is a str"),
        (torch.tensor([1.0, 0.0]), ValueError, "marginal_penalty holds 0.0"),
        (torch.tensor([1, 2]), TypeError, "floating"),
        (torch.tensor([1.0], requires_grad=True), ValueError, "requires a gradient, which is not given"),
        ((torch.ones(3), None), ValueError, r"do not broadcast.*marginal_penalty\[0\] \(3,\)"),
    ],
)
def test_penalties_that_are_not_valid(rho: Any, error: type[Exception], message: str) -> None:
    p, q, cost = problem(2, 2, 4, 5)
    with pytest.raises(error, match=message):
        otloss.sinkhorn(p, q, cost, epsilon=0.1, marginal_penalty=rho)


@pytest.mark.parametrize("rho", [(0.3, 0.3), (0.3, 2.0), (None, 0.5), (0.5, None)], ids=str)
def test_the_divergence_with_a_penalty_for_each_side(rho: tuple[float | None, float | None]) -> None:
    """S(p, q) - S_p(p, p) / 2 - S_q(q, q) / 2 + epsilon (mass_p - mass_q)^2 / 2 by 50 digits; at least 0."""
    draw = np.random.default_rng(3)
    for epsilon in (0.05, 1.0):
        x, y = draw.random((4, 2)), draw.random((5, 2)) + 0.3
        p, q = draw.random(4) + 0.1, 1.4 * draw.random(5) + 0.1
        expected = epsilon * (p.sum() - q.sum()) ** 2 / 2
        prices = tuple(np.inf if r is None else r for r in rho)
        for a, b, u, v, price, share in (
            (p, q, x, y, prices, 1.0), (p, p, x, x, (prices[0],) * 2, -0.5), (q, q, y, y, (prices[1],) * 2, -0.5),
        ):  # fmt: skip
            cost = np.square(u[:, None] - v).sum(-1)
            if price == (np.inf, np.inf):  # no constant is determined: the limit of large penalties
                price = (1e12, 1e12)
            start = np.zeros(len(b)).tolist()
            expected += share * float(
                precise_potentials(a.tolist(), b.tolist(), cost.tolist(), epsilon, price, start)[2]
            )
        cost = otloss.costs.PointCost(torch.tensor(x), torch.tensor(y))
        options = {"epsilon": epsilon, "marginal_penalty": rho, "tolerance": 1e-11}
        value = otloss.sinkhorn_divergence(torch.tensor(p), torch.tensor(q), cost, **options)  # type: ignore[arg-type]
        assert value.item() == pytest.approx(expected, rel=1e-8, abs=1e-8)
        assert value.item() >= 0
        same = otloss.sinkhorn_divergence(
            torch.tensor(p), torch.tensor(p), otloss.costs.PointCost(torch.tensor(x)), **options
        )  # type: ignore[arg-type]
        assert same.item() >= 0
        assert (same.item() < 1e-8) == (rho[0] == rho[1])
        clouds = otloss.cloud_loss(*map(torch.tensor, (x, y, p, q)), **options)  # type: ignore[arg-type]
        assert clouds.item() == pytest.approx(value.item(), rel=1e-12)


# ---- costs below 0 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", ["envelope", "implicit"])
@pytest.mark.parametrize("rho", [(0.7, 0.7), (0.4, 3.0), (None, 0.6), (0.6, None), (1e4, 0.5)], ids=str)
def test_costs_below_zero_against_50_digits(rho: tuple[float | None, float | None], grad: str) -> None:
    """All parts of the answer, and the derivatives in the weights, the costs and epsilon; one pair is forbidden."""
    prices = tuple(np.inf if r is None else r for r in rho)
    for seed, epsilon, low in ((0, 0.05, -1.0), (1, 0.5, -3.0), (2, 5.0, -1e-3)):
        draw = np.random.default_rng(seed)
        p, q, cost = draw.random(4) + 0.1, 1.5 * draw.random(3) + 0.1, draw.random((4, 3)) + low
        cost[1, 2] = 1e6 if seed else 0.3  # +inf below
        leaves = [torch.tensor(t, dtype=torch.float64, requires_grad=True) for t in (p, q, cost, epsilon)]
        matrix = torch.where(leaves[2] < 1e5, leaves[2], torch.inf)
        options = {"marginal_penalty": rho, "grad": grad, "tolerance": 1e-11}
        solution = otloss.solve(*leaves[:2], matrix, epsilon=leaves[3], **options)  # type: ignore[arg-type]
        start = solution.potentials[1].tolist()
        f, g, value = precise_potentials(p.tolist(), q.tolist(), cost.tolist(), epsilon, prices, start)
        f, g = (np.array([float(t) for t in potential]) for potential in (f, g))
        plan = p[:, None] * q * np.exp((f[:, None] + g - cost) / epsilon)
        size = max(1.0, abs(float(value)), plan.sum())
        close = {"rtol": 1e-7, "atol": 1e-8 * size}
        np.testing.assert_allclose(solution.value.item(), float(value), **close)
        assert solution.dual_value.item() <= float(value) <= (solution.dual_value + solution.gap).item()
        assert solution.gap.item() <= 1e-7 * size
        for actual, expected in (
            (solution.plan(), plan), (solution.linear_cost, (plan * cost).sum()), (solution.potentials[0], f),
            (solution.potentials[1], g),
        ):  # fmt: skip
            np.testing.assert_allclose(actual.detach(), expected, **close)
        shares = [np.exp(-t / price) for t, price in zip((f, g), prices, strict=True)]
        by_weights = [
            (t if price == np.inf else price * (1 - share)) - epsilon * (share - mass)
            for t, share, price, mass in zip((f, g), shares, prices, (q.sum(), p.sum()), strict=True)
        ]
        entropy = (plan * (f[:, None] + g - cost)).sum() / epsilon - plan.sum() + p.sum() * q.sum()
        gradients = torch.autograd.grad(solution.value, leaves)
        for derivative, expected in zip(gradients, (*by_weights, plan, entropy), strict=True):
            np.testing.assert_allclose(derivative, expected, rtol=1e-6, atol=1e-7 * size)


def test_costs_so_far_below_zero_that_the_mass_overflows() -> None:
    p, q = torch.ones(2), torch.ones(2)
    with pytest.raises(ValueError, match=r"far below 0 .* the mass of the plan overflows torch.float32"):
        otloss.sinkhorn(p, q, torch.full((2, 2), -1e3), epsilon=1.0, marginal_penalty=1.0)
    value = otloss.sinkhorn(p, q, torch.full((2, 2), -1e3), epsilon=1.0, marginal_penalty=(None, 1.0))
    assert value.item() == pytest.approx(-2e3, rel=1e-2)


def test_costs_so_far_below_zero_that_rounding_would_decide_the_value() -> None:
    cost = torch.tensor([[-1.0]], dtype=torch.float64)
    for rho in (0.1, 0.03, 0.02):
        size = 2 * rho + 0.001
        value = otloss.sinkhorn(None, None, cost, epsilon=0.001, marginal_penalty=rho)
        assert value.item() == pytest.approx(size * (1 - np.exp(1 / size)), rel=1e-3)
    costs = torch.tensor([[2.0, -1.0, 0.5], [0.0, 1.0, 0.3]], dtype=torch.float64)
    for rho in (0.01, 0.001):  # the value was 0 where it is -4e18 and -5e141
        with pytest.raises(ValueError, match=r"holds -1, far below 0 .* decide the value; expected larger costs, or"):
            otloss.sinkhorn(None, None, costs, epsilon=0.001, marginal_penalty=rho)


def test_bounds_where_the_search_found_nothing() -> None:
    """The value is NaN after so few iterations, but bounds exist, and the other problems of the batch have theirs."""
    p, q = torch.full((15,), 66.7, dtype=torch.float64), torch.tensor([673.0], dtype=torch.float64)
    cost = torch.linspace(0, 7e-5, 15, dtype=torch.float64)[:, None]
    cost = torch.stack([torch.where(torch.arange(15)[:, None] % 3 == 0, 40.0, cost), cost])
    options: dict[str, Any] = {"epsilon": 1.6e-6, "marginal_penalty": 0.0045}
    true = otloss.sinkhorn(p, q, cost, **options)
    with pytest.warns(otloss.ConvergenceWarning):
        solution = otloss.solve(p, q, cost, max_iterations=10, **options)
    assert solution.value.isnan().tolist() == [True, False]
    assert (solution.dual_value <= true).all()
    assert (true <= solution.dual_value + solution.gap).all()


def test_a_bad_start_is_left_for_what_iterations_find() -> None:
    """Errors of unbalanced problems have no largest value, so the start is not kept as the smaller one."""
    generator = torch.Generator().manual_seed(0)
    costs = torch.rand(60, 50, generator=generator, dtype=torch.float64)
    p, q = (torch.rand(n, generator=generator, dtype=torch.float64) for n in (60, 50))
    start = torch.full_like(p, 3.0), torch.full_like(q, 3.0)
    with pytest.warns(otloss.ConvergenceWarning):
        solution = otloss.solve(p, q, costs, epsilon=1e-3, marginal_penalty=0.05, start=start, max_iterations=10)
    assert float((solution.potentials[0] - 3.0).abs().max()) > 0.1
    found = otloss.solve(p, q, costs, epsilon=1e-3, marginal_penalty=0.05, start=start)
    expected = otloss.solve(p, q, costs, epsilon=1e-3, marginal_penalty=0.05)
    torch.testing.assert_close(found.value, expected.value, rtol=1e-8, atol=0)


def test_the_error_of_potentials_includes_the_rounding_of_large_ones() -> None:
    """A penalty of 1e6 on one side makes potentials of millions, of which float32 keeps no tenth."""
    p, q = 1e-3 * torch.rand(8, generator=torch.Generator().manual_seed(0)), torch.tensor([20.0, 15.0, 0.5])
    cost = torch.rand(8, 3, generator=torch.Generator().manual_seed(1))
    exact, rounded = (
        otloss.solve(p.to(dtype), q.to(dtype), cost.to(dtype), epsilon=0.1, marginal_penalty=(1e6, None))
        for dtype in (torch.float64, torch.float32)
    )
    apart = (exact.potentials[0] - rounded.potentials[0]).abs().max()
    assert 1e-3 < apart <= rounded.potential_error
    assert exact.potential_error < 1e-5


def test_a_search_that_overflows_does_not_blame_epsilon() -> None:
    """Newton's method goes astray in a light column that only a price reaches; a later method solves the problem."""
    p, q = torch.tensor([0.0, 1.0779, 0.0079]), torch.tensor([7.6e-17, 1.0823, 3.5e-3, 1.58e-12, 3.8e-17])
    cost = torch.tensor([[3.09, 1e4, 0.03, 1.13, 0.47], [4.39, 2.06, 2.19, 1e4, 0.21], [3.5, 1.18, 1.48, 1e4, 3.09]])
    solution = otloss.solve(p, q, cost, epsilon=0.0177, marginal_penalty=(None, 25.17))
    wide = otloss.solve(p.double(), q.double(), cost.double(), epsilon=0.0177, marginal_penalty=(None, 25.17))
    assert bool(solution.converged)
    torch.testing.assert_close(solution.value.double(), wide.value, rtol=1e-6, atol=0)


@pytest.mark.parametrize("largest", [30.0, 47.8, 60.0])
@pytest.mark.parametrize("transposed", [False, True])
def test_implicit_gradients_beside_a_bin_whose_pairs_are_all_forbidden(largest: float, transposed: bool) -> None:
    """It keeps exp(-f / penalty) of its mass, which underflows: gradients were NaN, or an error said that parts of the
    plan hardly exchange mass."""
    cost = torch.tensor([[torch.inf] * 3, [0.0, largest, torch.inf], [1.0, 0.3, 0.2]], dtype=torch.float64)
    p, q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64)

    def find_gradients(p: Tensor, cost: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (p, q)]
        problem = (*reversed(leaves), cost.mT) if transposed else (*leaves, cost)
        solution = otloss.solve(*problem, epsilon=0.1, marginal_penalty=0.2, grad="implicit")
        return torch.autograd.grad(solution.linear_cost, leaves)

    by_p, by_q = find_gradients(p, cost)
    without_p, without_q = find_gradients(p[1:], cost[1:])
    assert by_p[0] == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close((by_p[1:], by_q), (without_p, without_q), rtol=1e-9, atol=1e-12)


def test_potentials_of_costs_below_0_have_their_derivative_in_epsilon() -> None:
    random = torch.Generator().manual_seed(0)
    p, q, cost = (torch.rand(*shape, generator=random).double() for shape in ((4,), (3,), (4, 3)))

    def potentials(epsilon: Tensor) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"marginal_penalty": 0.5, "grad": "implicit", "tolerance": 1e-13}
        return otloss.solve(p, q, cost - 0.7, epsilon=epsilon, **options).potentials

    epsilon = torch.tensor(0.1, dtype=torch.float64)
    for actual, numbers in zip(
        torch.autograd.functional.jacobian(potentials, epsilon),
        zip(potentials(epsilon + 1e-5), potentials(epsilon - 1e-5), strict=True), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(actual, (numbers[0] - numbers[1]) / 2e-5, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("grad", ["envelope", "implicit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_behind_a_mask_are_finite(dtype: torch.dtype, grad: str) -> None:
    """Pixels: an object lies where only a masked detection is, whose derivative is beyond the largest float32."""
    x = torch.tensor([[100.0, 100.0], [150.0, 120.0], [905.0, 900.0]], dtype=dtype)
    y = torch.tensor([[102.0, 101.0], [900.0, 900.0]], dtype=dtype)
    cost, few = (otloss.costs.PointCost(points, y) for points in (x, x[:2]))
    mask, q = torch.tensor([1.0, 1.0, 0.0], dtype=dtype), torch.ones(2, dtype=dtype)
    for rho in (20.0**2, 60.0**2, 90.0**2):
        w = torch.tensor([0.9, 0.5, 0.4], dtype=dtype, requires_grad=True)
        p = w * mask
        p.retain_grad()
        epsilon = rho / 10
        otloss.sinkhorn(p, q, cost, epsilon=epsilon, marginal_penalty=rho, grad=grad).backward()
        (expected,) = torch.autograd.grad(otloss.sinkhorn(w[:2], q, few, epsilon=epsilon, marginal_penalty=rho), w)
        torch.testing.assert_close(w.grad, expected, rtol=1e-4, atol=1e-4)
        assert p.grad is not None
        assert bool(p.grad.norm().isfinite())
        assert float(p.grad[2]) < -1e9 or grad == "implicit"  # rounding decides its sign there


def test_gradients_that_float16_cannot_hold_are_cut_off() -> None:
    w = torch.tensor([0.9, 0.5, 0.4], dtype=torch.float16, requires_grad=True)
    cost = torch.tensor([[0.0, 900.0], [5.0, 850.0], [880.0, 0.5]])
    mask = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float16)
    otloss.sinkhorn(w * mask, torch.ones(2), cost, epsilon=0.8, marginal_penalty=8.0).backward()
    assert w.grad is not None
    assert w.grad.isfinite().all()
