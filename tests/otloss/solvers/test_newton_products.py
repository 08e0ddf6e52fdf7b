"""Newton's method by products with the plan, its conjugate gradients, and how rarely the host looks at a device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import otloss
from otloss.costs import Cost, DenseCost, PointCost
from otloss.costs.cost import plan_rows
from otloss.solvers.entropic import newton
from otloss.solvers.entropic.equations.conjugate_gradients import Equations, conjugate_gradients
from otloss.solvers.entropic.equations.dual import build_dual
from otloss.solvers.entropic.equations.looks import Looks
from otloss.solvers.entropic.equations.updates import build_updates
from otloss.solvers.entropic.interface import Budget, Start
from otloss.solvers.entropic.newton_products import NewtonByProducts, Point
from otloss.solvers.entropic.objectives import dual_value
from otloss.solvers.entropic.sinkhorn import Sinkhorn
from otloss.solvers.options import Settings
from otloss.solvers.problem import Problem, pose

PENALTIES = (None, (0.7, 0.3), (None, 2.0), (2.0, None))


def clusters(*, seed: int = 0, batch: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weights, some of them 0, and clouds of three parts far apart with different masses; n != m."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    x, y = (
        centres[torch.arange(n) * 3 // n] + 0.3 * torch.randn(batch, n, 2, generator=generator, dtype=torch.float64)
        for n in (12, 15)
    )
    p, q = (torch.rand(batch, n, generator=generator, dtype=torch.float64) + 0.2 for n in (12, 15))
    p[0, 2], q[-1, 4] = 0.0, 0.0
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True), x, y


def problem_of(cost: Cost, p: Tensor, q: Tensor, *, epsilon: Any, impl: str = "torch", **options: Any) -> Problem:
    problem = pose(p, q, cost, epsilon=epsilon, settings=Settings(impl="torch", **options))
    return dataclasses.replace(problem, impl=impl)  # "triton" also where its kernels do not run


# ---- conjugate gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_queued", [False, True])
def test_conjugate_gradients_against_a_dense_solution(is_queued: bool) -> None:
    """In another inner product, with a preconditioner; a problem of zeros, and one that is singular."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(4, 9, generator=generator, dtype=torch.float64) + 0.1
    factor = torch.randn(4, 9, 9, generator=generator, dtype=torch.float64)
    factor[3, :, 8] = factor[3, :, 7]  # A e = 0 for e = (0, ..., 1, -1)
    symmetric = factor.mT @ factor
    symmetric[:3] += torch.eye(9, dtype=torch.float64)
    matrix = symmetric / weights.unsqueeze(-1)  # self-adjoint in the inner product of the weights
    right = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    right[2] = 0.0
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    equations = Equations(
        lambda v: (matrix @ v.unsqueeze(-1)).squeeze(-1),
        lambda a, b: (weights * a * b).sum(-1, keepdim=True),
        lambda v: v / diagonal,
    )
    got = conjugate_gradients(equations, right, 1e-12, max_products=60, looks=Looks(is_queued=is_queued))
    assert got.is_solved.tolist() == [True, True, True, False]
    exact = torch.linalg.solve(matrix[:3], right[:3])
    torch.testing.assert_close(got.solution[:3], exact, rtol=1e-8, atol=1e-10)


# ---- products and steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["matrix", "points"])
def test_products_with_plans_by_blocks(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otloss.costs.cost.block_entries", lambda: 60)  # two rows of both problems at a time
    p, q, x, y = clusters()
    cost = PointCost(x, y) if form == "points" else DenseCost(torch.cdist(x, y)[0])
    f, g, v = 0.3 * torch.rand_like(p), 0.3 * torch.rand_like(q), torch.randn(2, 15, 3, dtype=torch.float64)
    epsilon = torch.tensor([0.4, 2.0], dtype=torch.float64)
    got = cost.plan_products(f, g, p.log(), q.log(), epsilon=epsilon)(v)
    plan = plan_rows(cost.dense(), f, g, (p.log(), q.log()), epsilon)
    torch.testing.assert_close(got.values, plan @ v)
    torch.testing.assert_close(got.of_rows, plan.sum(-1))


@pytest.mark.parametrize("penalty", PENALTIES)
def test_the_equations_are_those_of_the_dense_dual(penalty: Any) -> None:
    """Times the sums of the columns, the left side is the dense Hessian and the right side the gradient."""
    p, q, x, y = clusters()
    problem = problem_of(PointCost(x, y), p, q, epsilon=1.0, marginal_penalty=penalty)
    updates = build_updates(problem)
    g = torch.rand_like(q)
    point = Point.build(updates, g)
    gradient, curvature = build_dual(updates).derivatives(g / updates.epsilon)
    scale = build_dual(updates).target(g / updates.epsilon).sum(-1, keepdim=True)  # masses over what they should sum to
    torch.testing.assert_close((point.target - point.received) * scale, gradient, atol=1e-12, rtol=1e-9)
    v = torch.randn_like(g).masked_fill(q == 0, 0.0)
    if penalty is None:  # without constants, which the dense equations project
        v = torch.where(q > 0, v - (point.received * v).sum(-1, keepdim=True), 0.0)
        curvature = curvature - (q.unsqueeze(-1) * q.unsqueeze(-2)) / q.sum(-1)[..., None, None]
    want = (curvature @ v.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(point.received * point.times(v) * scale, want, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("has_start", [False, True])
def test_slow_problems_against_a_tight_reference(penalty: Any, has_start: bool) -> None:
    """Parts that exchange next to nothing, where thousands of iterations are needed; from nothing and from near."""
    p, q, x, y = clusters()
    cost, epsilon = PointCost(x, y), torch.tensor([0.01, 0.03], dtype=torch.float64)
    problem = problem_of(cost, p, q, epsilon=epsilon, impl="triton", marginal_penalty=penalty)
    budget = Budget(1e-8, 400)
    exact = otloss.solve(p, q, cost, epsilon=epsilon, marginal_penalty=penalty, tolerance=1e-10)
    start = None
    if has_start:
        near = exact.potentials[1] + 1e-3 * torch.randn(q.shape, generator=torch.Generator().manual_seed(0)).double()
        start = Start(exact.potentials[0], near, error=0.0 * epsilon)
    got = NewtonByProducts().run(problem, start, budget)
    assert bool((got.error <= budget.tolerance).all()), got.error
    assert int(got.iterations.max()) <= (15 if has_start else 100)
    torch.testing.assert_close(dual_value(problem, got.f, got.g), exact.value, atol=1e-8, rtol=1e-8)


def test_a_budget_and_empty_batches() -> None:
    p, q, x, y = clusters()
    problem = problem_of(PointCost(x, y), p, q, epsilon=0.01, impl="triton")
    short = NewtonByProducts().run(problem, None, Budget(1e-12, 3))
    assert bool(short.f.isfinite().all())
    assert bool((short.error > 1e-12).all())
    empty = problem_of(PointCost(x[:0], y[:0]), p[:0], q[:0], epsilon=0.01, impl="triton")
    assert NewtonByProducts().run(empty, None, Budget(1e-9, 10)).f.shape == (0, 12)


def test_streamed_kernels_on_a_slow_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first iterations end early, it ends on the device; in the interpreter of Triton."""
    pytest.importorskip("triton")
    p, q, x, y = (t[1].float() for t in clusters())
    exact = otloss.solve(p.double(), q.double(), PointCost(x.double(), y.double()), epsilon=0.5)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("otloss.solvers.entropic.sinkhorn_gpu.LARGEST_SIDE", 4)

    def fail(*_: Any) -> None:
        raise AssertionError("the search left the device")

    monkeypatch.setattr(newton.SparseNewton, "run", fail)
    monkeypatch.setattr("otloss.solvers.entropic.ladder.PATIENCE", 2)
    runs = []
    run = NewtonByProducts.run
    monkeypatch.setattr(NewtonByProducts, "run", lambda *given: runs.append(run(*given)) or runs[-1])
    got = otloss.solve(p, q, PointCost(x, y), epsilon=0.5, impl="triton", tolerance=1e-4)
    assert bool(got.converged)
    assert len(runs) == 1
    torch.testing.assert_close(got.value.double(), exact.value, atol=2e-4, rtol=1e-4)


# ---- looks -----------------------------------------------------------------------------------------------------------


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device: numbers that are read, and sizes that depend on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        by_mask = "aten.index" in name and any(t is not None and t.dtype == torch.bool for t in args[1])
        if by_mask or any(part in name for part in ("local_scalar", "nonzero", "masked_select", "aten.equal")):
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_the_host_looks_rarely_and_finds_the_same(is_symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Potentials and iterations equal the ones with a look after each iteration; 200 iterations take some ten looks."""
    monkeypatch.setattr(Cost, "softmin_at", lambda self, width: lambda h: _softmin(self.dense(), h, width))
    monkeypatch.setattr(PointCost, "softmin_at", Cost.softmin_at)
    p, q, x, y = clusters(batch=3)
    cost, other = (PointCost(x), p) if is_symmetric else (PointCost(x, y), q)
    epsilon = torch.tensor([0.6, 1.0, 4.0], dtype=torch.float64)
    for change in (torch.inf, 1e-9):
        budget = Budget(1e-7, 1000, largest_change=change)
        results = []
        for impl in ("torch", "triton"):
            problem = problem_of(cost, p, other, epsilon=epsilon, impl=impl)
            results.append(Sinkhorn().run(dataclasses.replace(problem, is_symmetric=is_symmetric), None, budget))
        each, rare = results
        assert each.iterations.tolist() == rare.iterations.tolist()
        assert torch.equal(each.g, rare.g)
        assert bool((rare.error <= budget.tolerance).all())
    problem = problem_of(cost, p, other, epsilon=0.02 * epsilon, impl="triton")
    problem = dataclasses.replace(problem, is_symmetric=is_symmetric)
    with Waits() as waits:
        result = Sinkhorn().run(problem, None, Budget(1e-14, 200))
    assert int(result.iterations.max()) >= (30 if is_symmetric else 190)
    assert sum(waits.counts.values()) <= 14, waits.counts


def _softmin(matrix: Tensor, h: Tensor, width: Tensor) -> Tensor:
    """The soft minimum without the checks of `Cost.softmin`, which read numbers."""
    width = width[..., None, None]
    return -width.squeeze(-1) * torch.logsumexp((h.unsqueeze(-2) - matrix) / width, -1)


def test_conjugate_gradients_look_rarely() -> None:
    diagonal = torch.logspace(0, 4, 200, dtype=torch.float64)
    equations = Equations(lambda v: diagonal * v, lambda a, b: (a * b).sum(-1, keepdim=True))
    with Waits() as waits:
        got = conjugate_gradients(
            equations, torch.ones(2, 200, dtype=torch.float64), 1e-13, max_products=200, looks=Looks(is_queued=True)
        )
    assert got.solution.shape == (2, 200)
    assert sum(waits.counts.values()) <= 12, waits.counts
