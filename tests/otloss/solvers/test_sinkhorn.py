"""sinkhorn and sinkhorn_divergence against POT, closed forms and matrices; gradients are in test_gradient_matrix."""

import itertools
import math
import warnings
from functools import partial
from typing import Any

import numpy as np
import ot
import pytest
import torch

from otloss.costs import CosineCost, LineCost, PointCost
from otloss.solvers.convergence import ConvergenceWarning
from otloss.solvers.divergence import sinkhorn_divergence
from otloss.solvers.solve import sinkhorn, solve
from tests.errors import raising
from tests.otloss.draws import normal, transport_problem

TIGHT: dict[str, Any] = {"tolerance": 1e-11, "max_iterations": 100_000}
IMPLS = ("compiled", "torch")


def pot_value(p: np.ndarray, q: np.ndarray, matrix: np.ndarray, epsilon: float) -> float:
    """POT in logs, without the bins that hold no mass, of which POT makes NaN."""
    rows, columns = p > 0, q > 0
    a, b, block = p[rows], q[columns], matrix[np.ix_(rows, columns)]
    _, log = ot.sinkhorn(a, b, block, epsilon, method="sinkhorn_log", numItermax=200_000, stopThr=1e-13, log=True)
    f, g = epsilon * log["log_u"], epsilon * log["log_v"]  # for the plan without p q^T
    plan = np.exp((f[:, None] + g - block) / epsilon)
    kept = plan > 0
    return float((block * plan).sum() + epsilon * (plan[kept] * np.log((plan / (a[:, None] * b))[kept])).sum())


@pytest.mark.parametrize(("impl", "epsilon"), [("compiled", 0.02), ("compiled", 1.0), ("torch", 0.02), ("torch", 0.1)])
def test_equals_pot(impl: str, epsilon: float) -> None:
    p, q, matrix = transport_problem((3,))
    ours = sinkhorn(p, q, matrix, epsilon=epsilon, impl=impl, **TIGHT)
    theirs = [pot_value(p[k].numpy(), q[k].numpy(), matrix[k].numpy(), epsilon) for k in range(3)]
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-9)


def test_a_mass_other_than_one() -> None:
    """The value is homogeneous in the mass; POT's entropy is that against p q^T, which is less by log(mass) a unit."""
    p, q, matrix = transport_problem(zeros=False)
    for mass in (0.01, 7.0):
        values = [sinkhorn(mass * p, mass * q, matrix, epsilon=0.1, impl=impl, **TIGHT) for impl in IMPLS]
        theirs = ot.solve(matrix.numpy(), (mass * p).numpy(), (mass * q).numpy(), reg=0.1, max_iter=100_000, tol=1e-12)
        expected = theirs.value + 0.1 * mass * math.log(mass)
        np.testing.assert_allclose([float(v) for v in values], expected, rtol=1e-7)


GENERATOR = torch.Generator().manual_seed(3)
X, Y = torch.rand(4, 3, generator=GENERATOR, dtype=torch.float64), torch.rand(5, 3, generator=GENERATOR).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_equals_the_log_domain(dtype: torch.dtype) -> None:
    """Many problems, costs with a large constant, masses that differ by rounding, light and empty bins."""
    p, q, matrix = (t.to(dtype) for t in transport_problem((6, 2), n=20, m=30))
    p[0, :, 3], p[1] = 1e-30, 0.0
    p[0, :, 4:], q[1] = p[0, :, 4:] * (1 + 4e-6), 0.0
    p, q = p / p.sum(-1, keepdim=True).clamp(min=1e-9), q / q.sum(-1, keepdim=True).clamp(min=1e-9)
    matrix[2] += 100
    tight, rtol, atol = (1e-6, 1e-4, 2e-5) if dtype == torch.float32 else (1e-11, 1e-8, 1e-9)
    results = []
    for impl in ("compiled", "torch"):
        inputs = [t.clone().requires_grad_() for t in (p, q, matrix)]
        value = sinkhorn(*inputs, epsilon=0.1, impl=impl, tolerance=tight)
        weights = torch.linspace(-1, 1, 12, dtype=dtype).reshape(6, 2)
        results.append((value.detach(), *torch.autograd.grad((value * weights).sum(), inputs)))
    torch.testing.assert_close(*results, rtol=rtol, atol=atol)


@pytest.mark.parametrize("marginal_penalty", [None, 0.5])
def test_divergence_is_zero_at_equality_and_positive_else(marginal_penalty: float | None) -> None:
    p, _, _ = transport_problem((3,), n=5)
    for cost in (PointCost(Y), PointCost(Y, metric="euclidean"), CosineCost(Y), LineCost(Y[:, 0], power=1)):
        same = sinkhorn_divergence(p, p, cost, epsilon=0.1, marginal_penalty=marginal_penalty)
        np.testing.assert_allclose(same, 0.0, atol=1e-8)
        apart = sinkhorn_divergence(p, p.flip(-1), cost, epsilon=0.1, marginal_penalty=marginal_penalty)
        assert (apart > 1e-4).all()


def test_equal_weights_have_equal_potentials() -> None:
    """Two bins at C / epsilon 50, where the plan has two parts: the closed form, on both sides."""
    p = torch.tensor([[0.3, 0.7], [0.5, 0.5]], dtype=torch.float64).requires_grad_()
    q = torch.tensor([[0.3, 0.7], [0.4, 0.6]], dtype=torch.float64).requires_grad_()
    cost = 1 - torch.eye(2, dtype=torch.float64)
    sinkhorn(p, q, cost, epsilon=0.02)[0].backward()
    expected = -0.01 * torch.tensor([0.3, 0.7], dtype=torch.float64).log()
    for weights in (p, q):
        assert weights.grad is not None
        torch.testing.assert_close(weights.grad[0], expected - expected.mean(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("marginal_penalty", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_a_divergence_is_zero_at_equality_where_parts_exchange_nothing(
    marginal_penalty: float | None, dtype: torch.dtype
) -> None:
    """Potentials of one side are uncertain there: gradients were 0.05 at a mean cost of 3.3, with a warning."""
    cost = (torch.arange(10)[:, None] - torch.arange(10)).abs().to(dtype)
    draws = torch.randn(2, 10, generator=torch.Generator().manual_seed(0))
    first, second = (3 * draws).softmax(-1).to(dtype)
    for weights, equal in ([first], [True]), ([first, second], [True, False]), ([second, first], [False, True]):
        p, q = torch.stack(weights).requires_grad_(), first.clone().requires_grad_()
        value = sinkhorn_divergence(p, q, cost, epsilon=0.0165, marginal_penalty=marginal_penalty)
        at_equality = value[equal]
        gradients = torch.autograd.grad(at_equality.sum(), [p, q])
        assert max(float(each.abs().max()) for each in (at_equality.detach(), *gradients)) < 1e-6
    rho = torch.full((2,), 2.0, dtype=dtype)
    value = sinkhorn_divergence(p, p.detach(), cost, epsilon=0.0165, marginal_penalty=(rho, rho.clone()))
    assert float(torch.autograd.grad(value.sum(), p)[0].abs().max()) < 1e-6


def test_divergence_tends_to_transport_and_to_a_kernel_norm() -> None:
    p, q, _ = transport_problem(zeros=False)
    cost = PointCost(X, Y)
    exact = ot.emd2(p.numpy(), q.numpy(), cost.dense().numpy())
    small = sinkhorn_divergence(p, q, cost, epsilon=1e-3, tolerance=1e-6)
    np.testing.assert_allclose(float(small), exact, atol=2e-3)
    drift = (p @ X - q @ Y).square().sum()  # MMD of the kernel -|x - y|^2 / 2
    np.testing.assert_allclose(float(sinkhorn_divergence(p, q, cost, epsilon=1e5)), float(drift), rtol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("scale", "kind"), [(1e6, "noise"), (1e16, "noise"), (1e16, "constant")])
def test_any_start_leads_to_the_same_and_a_good_one_saves_iterations(scale: float, impl: str, kind: str) -> None:
    p, q, matrix = transport_problem()
    f, g = (normal(4), normal(5, seed=1)) if kind == "noise" else (-torch.ones(4).double(), torch.ones(5).double())
    expected = sinkhorn(p, q, matrix, epsilon=0.05, **TIGHT)
    value = sinkhorn(p, q, matrix, epsilon=0.05, start=(scale * f, scale * g), impl=impl, **TIGHT)
    np.testing.assert_allclose(float(value), float(expected), rtol=1e-9)
    share = 0.05 / float(matrix.mean())
    relative = sinkhorn(p, q, matrix, epsilon=share, epsilon_relative_to="mean_cost", impl=impl, **TIGHT)
    np.testing.assert_allclose(float(relative), float(expected), rtol=1e-7)
    # So far off that no entry of the kernel can be held in float32.
    single = sinkhorn(p.float(), q.float(), matrix.float(), epsilon=0.05, start=(0 * f, 50 * g), impl=impl)
    np.testing.assert_allclose(float(single), float(expected), rtol=1e-4)
    p, q, matrix = transport_problem((4,), n=30, m=30)
    near = solve(p, q, matrix * 1.001, epsilon=0.01, impl=impl)
    start = solve(p, q, matrix, epsilon=0.01, impl=impl).potentials
    again = solve(p, q, matrix * 1.001, epsilon=0.01, impl=impl, start=start)
    np.testing.assert_allclose(again.value, near.value, rtol=1e-8)
    assert again.iterations.sum() < 0.9 * near.iterations.sum()


@pytest.mark.parametrize("impl", IMPLS)
def test_what_does_not_converge_says_so_at_the_line_of_the_caller(impl: str) -> None:
    """After no more iterations than were allowed; with few, Newton's steps of implicit gradients lead nowhere."""
    p, q, matrix = transport_problem((3,), n=30, m=30)
    epsilon = torch.tensor([1.0, 1e-3, 1.0], dtype=torch.float64)
    with pytest.warns(ConvergenceWarning, match=r"1 of 3 .* problem \(1,\).*Raise epsilon") as caught:
        sinkhorn(p, q, matrix, epsilon=epsilon, max_iterations=15, tolerance=1e-4, impl=impl)
    assert {warning.filename for warning in caught} == {__file__}
    for penalty, most in itertools.product((None, 0.5), (1, 10, 1001)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            solved = partial(solve, p[0], q[0], matrix[0], epsilon=1e-3, marginal_penalty=penalty, max_iterations=most)
            solution = solved(impl=impl, tolerance=1e-15)
            assert penalty or 0 < int(solution.iterations) <= most
            try:
                assert abs(float(solved(grad="implicit").value - solved().value)) < 0.02 * float(solution.value)
            except RuntimeError as error:
                assert "has no answer here" in str(error)  # noqa: PT017 - a value or this error


NEARLY = [("compiled", 1e-3, 3), ("compiled", 1e-4, 20), ("torch", 1e-2, 20), ("torch", 1e-4, 3)]


@pytest.mark.parametrize(("impl", "epsilon", "n"), NEARLY)
def test_nearly_matched_points_converge(impl: str, epsilon: float, n: int) -> None:
    x = torch.rand(4, n, 1, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    places = torch.linspace(0, 1, n, dtype=torch.float64)
    cost = (x - places).square()
    weights = torch.full((4, n), 1 / n, dtype=torch.float64)
    weights[1] = torch.linspace(1, 2, n, dtype=torch.float64) / torch.linspace(1, 2, n, dtype=torch.float64).sum()
    solution = solve(weights, weights, cost, epsilon=epsilon, impl=impl)
    assert solution.converged.all()
    assert (solution.gap < 1e-8).all()
    assert (solution.iterations < 1100).all()


p0, q0, matrix0 = transport_problem()
ZEROS = {"cost_q": torch.zeros(5, 5)}
test_bad_input = raising(
    (sinkhorn, {"epsilon": torch.tensor([0.1, torch.inf])}, "epsilon holds"),
    (sinkhorn, {"epsilon": None}, TypeError, "epsilon is None.*emd"),
    (sinkhorn, {"q": 1.1 * q0}, "different masses"),
    (sinkhorn, {"epsilon": 1e-310}, "epsilon is 1e-310, expected at least 2.23e-308"),
    (sinkhorn, {"tolerance": -1.0}, "tolerance is -1.0"),
    (sinkhorn, {"cost": 0 * matrix0, "epsilon_relative_to": "mean_cost"}, "the mean cost is 0"),
    (sinkhorn_divergence, {}, "not square.*cost_p"),
    (sinkhorn_divergence, {"p": q0, "cost": torch.arange(25.0).reshape(5, 5)}, "which is not symmetric"),
    (sinkhorn_divergence, {"p": q0, "cost": torch.full((5, 5), 0.5)}, "up to 0.5 on its diagonal.*compute_mode"),
    (sinkhorn_divergence, {"cost_p": torch.rand(4, 4), **ZEROS}, "not symmetric"),
    call=lambda function, change: function(**({"p": p0, "q": q0, "cost": matrix0, "epsilon": 0.1} | change)),
)


def test_the_error_is_that_of_the_returned_potentials() -> None:
    """With a start and float32 costs, from which the search continues in float64."""
    generator = torch.Generator().manual_seed(0)
    cost = PointCost(torch.randn(60, 2, generator=generator)).dense()
    p, q = torch.rand(2, 60, generator=generator)
    p, q, epsilon = p / p.sum(), q / q.sum(), float((cost.mean() * 1e-3).half())
    first = solve(p, q, cost, epsilon=epsilon)
    solution = solve(p, q, cost, epsilon=epsilon, tolerance=1e-9, start=first.potentials)
    search = solution._solution.search
    f, g = search.f, search.g  # in their own dtype
    p, q = p.double(), q.double() * (p.double().sum() / q.double().sum())
    plan = p[:, None] * ((f[:, None] + g - cost.double()) / epsilon).exp() * q / p.sum()
    assert bool(solution.converged)
    assert float((plan.sum(1) - p).abs().sum() + (plan.sum(0) - q).abs().sum()) < 1e-8


def test_symmetric_float32_problems_reach_tolerances_of_float64() -> None:
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    solution = solve(None, None, PointCost(x), epsilon=0.05, tolerance=1e-9)
    assert bool(solution.converged)
    assert float(solution.marginal_error) <= 1e-9
