"""Entropic transport where it is easily wrong: light bins, tiny and huge epsilon, slow modes, forward mode."""

import dataclasses
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import otloss
from otloss import ConvergenceWarning
from otloss.costs import PointCost
from otloss.solvers.entropic import newton, potentials
from otloss.solvers.entropic.interface import Budget, SearchResult
from otloss.solvers.entropic.ladder import search
from otloss.solvers.entropic.newton import NewtonFirst
from otloss.solvers.entropic.sinkhorn_float64 import SinkhornAsLastResort
from otloss.solvers.problem import Problem


def value_in_logs(p: Tensor, q: Tensor, cost: Tensor, epsilon: float, iterations: int = 300) -> float:
    """Plain Sinkhorn in the log domain in float64, with every bin in play."""
    p, q, cost = p.double() / p.double().sum(), q.double() / q.double().sum(), cost.double()
    f, g = torch.zeros_like(p), torch.zeros_like(q)
    for _ in range(iterations):
        f = -epsilon * torch.logsumexp(q.log() + (g - cost) / epsilon, -1)
        g = -epsilon * torch.logsumexp((p.log() + f / epsilon).unsqueeze(-1) - cost / epsilon, -2)
    return float((f * p).sum() + (g * q).sum())


def bump(x: Tensor, centre: float, width: float) -> Tensor:
    weights = torch.exp(-((x - centre) ** 2) / (2 * width**2))
    return weights / weights.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_light_bins(dtype: torch.dtype) -> None:
    x = torch.linspace(0, 1, 50, dtype=dtype)
    cost = (x[:, None] - x) ** 2
    far = (torch.softmax(-50 * (4 * x - 2) ** 2, -1), 16 * cost)
    for p, q, c, epsilon in (
        (bump(x, 0.3, 0.05), bump(x, 0.7, 0.05), cost, 1e-3), (far[0], far[0], far[1], 1e-2),
    ):  # fmt: skip
        expected = value_in_logs(p, q, c, epsilon)
        assert float(otloss.sinkhorn(p, q, c, epsilon=epsilon)) == pytest.approx(expected, rel=1e-4)
        assert float(otloss.solve(p, q, c, epsilon=epsilon).gap) < 1e-4 * expected
        own = otloss.sinkhorn_divergence(p, q, c, epsilon=epsilon, cost_p=c, cost_q=c)
        halves = sum(value_in_logs(w, w, c, epsilon) / 2 for w in (p, q))
        assert float(own) == pytest.approx(expected - halves, rel=1e-3, abs=1e-5 * expected)


@pytest.mark.parametrize(("dtype", "light"), [(torch.float32, 1e-25), (torch.float64, 1e-160)])
def test_bins_so_light_that_the_kernel_leaves_them_out_on_both_sides(dtype: torch.dtype, light: float) -> None:
    p = torch.tensor([1.0, light], dtype=dtype)
    cost = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=dtype, requires_grad=True)
    solution = otloss.solve(p, p, cost, epsilon=0.001)
    solution.value.backward()
    # Entries of light bins are of their mass, not 1e36, though not to many digits.
    for plan in (solution.plan().detach(), cost.grad):
        assert bool(((plan - torch.diag(p)).abs() <= 2 * light).all())
    assert float(solution.linear_cost.detach()) < 2 * light


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_hold_or_epsilon_is_out_of_range(dtype: torch.dtype) -> None:
    p, q = torch.tensor([0.5, 0.5], dtype=dtype), torch.tensor([0.25, 0.75], dtype=dtype)
    cost = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=dtype)
    for epsilon in (1e-30, 1e-20, 1e-16, 1e-11):
        for call in (otloss.sinkhorn, otloss.solve):
            with pytest.raises(ValueError, match="rounding"):
                call(p, q, cost, epsilon=epsilon)
    for epsilon in (1e8, 1e12, 1e20):  # the product of the weights
        solution = otloss.solve(p, q, cost, epsilon=epsilon)
        assert float(solution.dual_value) <= 0.5 <= float(solution.dual_value + solution.gap) < 0.5 + 1e-6
        torch.testing.assert_close(otloss.sinkhorn(p, q, cost, epsilon=epsilon), solution.value.new_tensor(0.5))
    for epsilon in (1e-7, 1e-4, 1e3, 1e7):
        solution = otloss.solve(p, q, cost, epsilon=epsilon)
        # Of four cells one is free: P_11 = t, and a one-dimensional minimum.
        t = torch.linspace(0, 0.25, 200_001, dtype=torch.float64)
        plan = torch.stack([t, 0.5 - t, 0.25 - t, 0.25 + t])
        product = torch.tensor([0.125, 0.375, 0.125, 0.375], dtype=torch.float64)[:, None]
        objective = plan[1] + plan[2] + epsilon * torch.xlogy(plan, plan / product).sum(0)
        assert float(solution.dual_value) <= float(objective.min()) + 1e-15 * epsilon
        smallest = float(objective.min()) - 1e-9 * (1 + epsilon)  # the grid's own error
        assert smallest <= float(solution.dual_value + solution.gap)
        assert float(solution.certificate.lower) <= 0.25 <= float(solution.certificate.upper) + 1e-8


def test_light_bins_of_a_divergence_are_settled() -> None:
    x = torch.arange(5.0)
    cost = (x[:, None] - x).abs()
    p, q = torch.tensor([1.0, 0, 0, 0, 0]), torch.tensor([1e-6, 1e-6, 1 - 4e-6, 1e-6, 1e-6])
    actual = []
    for impl, tolerance in (("compiled", None), ("torch", None), ("torch", 1e-12)):
        weights = q.double().requires_grad_() if tolerance else q.clone().requires_grad_()
        other, matrix = p.to(weights), cost.to(weights)
        weights_of_one = weights if not tolerance else weights / weights.detach().sum()
        options = {"impl": impl, "tolerance": tolerance, "cost_p": matrix, "cost_q": matrix}
        otloss.sinkhorn_divergence(weights_of_one, other, matrix, epsilon=0.1, **options).backward()  # type: ignore[arg-type]
        actual.append(weights.grad.float())
    for gradient in actual[:2]:
        torch.testing.assert_close(gradient, actual[2], rtol=2e-3, atol=2e-3)


def test_weight_gradients_of_slow_modes() -> None:
    """Uniform weights at small epsilon: parts of the plan hardly exchange mass, which the marginal error cannot see."""
    generator = torch.Generator().manual_seed(0)
    costs, n, epsilon = torch.rand(16, 32, 32, dtype=torch.float64, generator=generator), 32, 0.003
    for dtype in (torch.float32, torch.float64):
        p, q = torch.full((16, n), 1 / n, dtype=dtype), torch.full((16, n), 1 / n, dtype=dtype, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # single problems may warn
            otloss.sinkhorn(p, q, costs.to(dtype), epsilon=epsilon).sum().backward()
        solution = otloss.solve(p, q.detach(), costs.to(dtype), epsilon=epsilon)
        sure = []
        for k in range(16):
            right, smallest = _newton(costs[k].to(dtype).double(), epsilon, solution.potentials[1][k].double())
            off = float((q.grad[k].double() - right).norm() / right.norm())
            told = float(solution.potential_error[k] / right.std(correction=0))
            if smallest > 1e-12:  # rounding decides about the others, and they say so
                assert off < 1e-3
                assert off < 10 * told + 1e-4
                sure.append(k)
            else:
                assert off < 10 * told + 1e-3
        assert len(sure) > 8


def _newton(cost: Tensor, epsilon: float, g: Tensor) -> tuple[Tensor, float]:
    """Centred potentials of uniform weights by Newton's method, and the second eigenvalue of its equations."""
    n = len(cost)
    scores, b = -cost / epsilon - math.log(n), g / epsilon
    for _ in range(100):
        rows = torch.softmax(scores + b, -1)
        hessian = torch.diag(rows.mean(0)) - rows.mT @ rows / n + 1 / n**2
        step = torch.linalg.solve(hessian, 1 / n - rows.mean(0))
        spread = float(step.max() - step.min())
        if spread < 1e-9:
            break
        b = b + step * (math.log1p(spread) / spread if spread > 1e-3 else 1.0)
    smallest = float(torch.linalg.eigvalsh(hessian * n).amin())
    return epsilon * (b - b.mean()), smallest


@pytest.mark.parametrize(("light", "dtype"), [(1e-3, torch.float32), (1e-6, torch.float64), (1e-8, torch.float32)])
def test_gradients_at_bins_that_are_light_on_both_sides(light: float, dtype: torch.dtype) -> None:
    x = torch.arange(5, dtype=torch.float64)
    cost = (x[:, None] - x).abs()
    p, q = torch.full((2, 5), light, dtype=torch.float64)
    p[0], q[3] = 1, 1
    p, q = (w / w.sum() for w in (p, q))
    exact = otloss.solve(p, q, cost, epsilon=0.1, tolerance=1e-14, max_iterations=100_000)
    solution = otloss.solve(p.to(dtype), q.to(dtype), cost.to(dtype), epsilon=0.1)
    allowed = float(solution.potential_error) + 1e-5
    assert allowed < (2e-3 if dtype == torch.float32 else 5e-5)
    for actual, expected in zip(solution.potentials, exact.potentials, strict=True):
        torch.testing.assert_close((actual - actual.mean()).double(), expected - expected.mean(), atol=allowed, rtol=0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("apart", "size"), [(30.0, 8), (1e2, 8), (1e4, 10), (1e5, 10), (1e3, 200)])
def test_far_clusters_pay_nothing_for_the_rounding_of_weights(apart: float, size: int, seed: int) -> None:
    """Two clusters of equal mass up to rounding, in any order; each solved by itself in float64 is the reference."""
    generator, epsilon = torch.Generator().manual_seed(seed), 0.1
    x = torch.randn(size, 2, generator=generator)
    first = torch.randperm(size, generator=generator) < size // 2
    x[~first, 0] += apart
    p = torch.rand(size, generator=generator)
    p = p / p.sum()
    q = (p.double() * (1 + 6e-8 * torch.randn(size, generator=generator, dtype=torch.float64))).float()
    x.requires_grad_()
    solution = otloss.solve(p, q, PointCost(x, x.detach().clone()), epsilon=epsilon)
    (gradient,) = torch.autograd.grad(solution.value, x)
    expected = 0.0
    for part in (first, ~first):
        of_p, of_q = p[part].double(), q[part].double()
        mass, points = of_p.sum(), x.detach()[part].double().requires_grad_()
        cost = PointCost(points, points.detach().clone())
        alone = otloss.sinkhorn(of_p, of_q * (mass / of_q.sum()), cost, epsilon=epsilon)
        # The entropy against p q^T is that against p q^T / mass, less the logarithm of the mass.
        expected += float(alone.detach() - epsilon * mass * mass.log())
        if apart > 30:  # below, costs between the clusters are hardly far: mass may cross, and the gap says so
            torch.testing.assert_close(
                gradient[part].double(), torch.autograd.grad(alone, points)[0], rtol=1e-3, atol=1e-5
            )
    error = abs(float(solution.value.detach()) - expected)
    assert error <= float(solution.gap) + 1e-7 * expected
    assert error <= (1e-3 if apart == 30 else 1e-6) * expected


@pytest.mark.parametrize("epsilon", [(0.05,), (0.05, 1e-3)], ids=["one", "beside a slow one"])
@pytest.mark.parametrize("limit", [25, 40, 10_000])
def test_errors_are_those_of_the_costs_in_float64(
    epsilon: tuple[float, ...], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between far clouds the search turns to float64. An error that it has measured with rounded costs is too small."""
    results = []
    monkeypatch.setattr(potentials, "search", lambda *arguments: results.append(search(*arguments)) or results[-1])
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(60, 2, generator=generator), torch.rand(60, 2, generator=generator) + 100
    p = torch.full((len(epsilon), 60), 1 / 60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        otloss.sinkhorn(p, p, PointCost(x, y), epsilon=torch.tensor(epsilon), max_iterations=limit)
    (result,) = results
    costs = torch.cdist(x.double(), y.double()).square()
    exponent = result.f.double()[..., :, None] + result.g.double()[..., None, :] - costs
    plan = (exponent / torch.tensor(epsilon).double()[:, None, None]).exp() / 3600
    error = sum((plan.sum(axis) - 1 / 60).abs().sum(-1) for axis in (-1, -2))
    assert bool((error <= 2 * result.error + 1e-6).all()), (error, result.error)


@pytest.mark.parametrize(("apart", "dtype"), [(100, torch.float64), (1, torch.float32)])
def test_arithmetic_is_decided_before_the_search(
    apart: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = []

    def record(problem: Problem, budget: Budget) -> SearchResult:
        dtypes.append(problem.cost.dtype)
        return search(problem, budget)

    monkeypatch.setattr(potentials, "search", record)
    x = torch.rand(20, 2, generator=torch.Generator().manual_seed(0))
    otloss.sinkhorn(None, None, PointCost(x, x + apart), epsilon=0.05)
    assert dtypes == [dtype]


def test_newton_comes_first_between_points_that_are_far_apart() -> None:
    x, y = torch.rand(2, 40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def is_first(other: Tensor, epsilon: float) -> bool:
        p = torch.full((40,), 1 / 40, dtype=torch.float64)
        return NewtonFirst().applies(Problem(p, p, PointCost(x, other), p.new_tensor(epsilon), p.dtype))

    assert is_first(y, 1e-5)
    assert not is_first(y, 0.1)
    assert not is_first(x + 1e-4, 1e-5)  # Sinkhorn's iteration starts near the solution
    assert not is_first(y + 10, 0.1)  # far apart, with a plan as between x and y
    x, y = x[:10].repeat(4, 1), y[:10].repeat(4, 1)
    assert is_first(y, 1e-5)  # four points at each place
    x, y = torch.randn(2, 40, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert not is_first(y, 5.0)  # all pairs cost nearly the same, 1700 to 2300


def test_a_small_epsilon_is_known_before_the_last_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        raise AssertionError("the last method runs")

    monkeypatch.setattr(SinkhornAsLastResort, "run", run)
    costs = torch.rand(20, 20, generator=torch.Generator().manual_seed(0))
    with pytest.raises(otloss.SmallEpsilonError) as caught:
        otloss.sinkhorn(None, None, costs, epsilon=1e-12, marginal_penalty=1.0)
    copied = pickle.loads(pickle.dumps(caught.value))  # as processes pass it on
    assert (str(copied), copied.least) == (str(caught.value), caught.value.least)
    monkeypatch.undo()
    with warnings.catch_warnings(action="ignore", category=otloss.ConvergenceWarning):
        otloss.sinkhorn(None, None, costs, epsilon=copied.least, marginal_penalty=1.0)


def test_newtons_method_ends_where_rounding_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outliers have potentials of 1e13: the error stays at the rounding of these, and steps cannot reduce it."""
    steps, run = [], newton._run_kernel

    def counted(*arguments: Any) -> Any:
        result = run(*arguments)
        steps.append(int(result.iterations))
        return result

    monkeypatch.setattr(newton, "_run_kernel", counted)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 5, generator=generator) for n in (60, 50))
    x[:3] *= 1e6
    y[:3] *= 1e6
    with pytest.raises(otloss.SmallEpsilonError):
        otloss.sinkhorn(None, None, PointCost(x, y), epsilon=2.0)
    assert len(steps) == 1
    assert steps[0] < 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rho", [(None, 5.6), 5.6, 0.5, (None, 50.0)])
def test_unbalanced_problems_converge_at_a_tiny_epsilon(
    rho: float | tuple[float | None, float | None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newton's method stalls where Sinkhorn's iteration ends; from zeros, through larger epsilons, it converges."""

    def run(*_: object) -> None:
        raise AssertionError("the last method runs")

    monkeypatch.setattr(SinkhornAsLastResort, "run", run)
    p, q = torch.full((2,), 0.5, dtype=dtype), torch.full((5,), 0.2, dtype=dtype)
    cost = torch.tensor([[2.0, 1.0, 2.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0, 0.0]], dtype=dtype)
    answer = otloss.solve(p, q, cost, epsilon=5.5e-8, marginal_penalty=rho)
    assert bool(answer.converged)
    assert float(answer.gap) < 1e-9


@pytest.mark.parametrize("grad", ["envelope", "implicit"])
@pytest.mark.parametrize("largest", [1.17e8, 1e15])
@pytest.mark.parametrize("is_row", [False, True])
def test_one_bin_on_a_side_has_one_plan_at_any_epsilon(is_row: bool, largest: float, grad: str) -> None:
    """The plan p q^T needs no potentials, whose rounding would be a share of epsilon here."""
    p = torch.tensor([1.344e-7, 1.0446e-4, 1.084e-12], dtype=torch.float64)
    cost = torch.tensor([[largest], [2.25], [1.86]], dtype=torch.float64)
    q = p.sum(0, keepdim=True)
    inputs = (q, p, cost.mT) if is_row else (p, q, cost)
    leaves = tuple(t.clone().requires_grad_() for t in inputs)
    answer = otloss.solve(*leaves, epsilon=0.0476, grad=grad)
    answer.value.backward()
    right = float(p @ cost[:, 0])
    assert float(answer.value.detach()) == pytest.approx(right, rel=1e-12)
    assert float(answer.gap) <= 1e-12 * right
    plan = inputs[0].unsqueeze(-1) * inputs[1] / q
    torch.testing.assert_close(answer.plan().detach(), plan, rtol=1e-8, atol=0.0)
    torch.testing.assert_close(leaves[2].grad, plan, rtol=1e-8, atol=0.0)
    gradient = leaves[1 if is_row else 0].grad
    assert gradient is not None
    torch.testing.assert_close(gradient - gradient[2], cost[:, 0] - cost[2, 0], rtol=1e-12, atol=1e-12 * largest)


def test_potentials_that_drift_along_a_constant_say_nothing_of_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newton's method drifted by 1e13 beside a light column, and SmallEpsilonError blamed an epsilon of 1e-3."""
    drifted, run = [], newton._run_kernel

    def drifting(*arguments: Any, **settings: Any) -> SearchResult:
        result = run(*arguments, **settings)
        drifted.append(1e13)
        error = torch.full_like(result.error, 1e-4)
        return dataclasses.replace(result, f=result.f - drifted[-1], g=result.g + drifted[-1], error=error)

    monkeypatch.setattr(newton, "_run_kernel", drifting)
    cost = torch.rand(20, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with pytest.warns(ConvergenceWarning):  # the last method takes more iterations
        value = otloss.sinkhorn(None, None, cost, epsilon=1e-3)
    monkeypatch.undo()
    assert drifted
    torch.testing.assert_close(value, otloss.sinkhorn(None, None, cost, epsilon=1e-3), rtol=1e-4, atol=0)
