"""The network simplex against POT, assignment and certificates of optimality."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import otloss.solvers.exact as exact
from otloss.costs import LineCost
from otloss.solvers.exact import ExactSolution, emd, solve_exact
from tests.otloss.oracles import as_double, linprog_value
from tests.otloss.pot_solver import solve_by_pot
from tests.otloss.strategies import problems

Problem = tuple[np.ndarray, np.ndarray, np.ndarray]
KINDS = ("general", "zeros", "uniform", "tied", "constant", "points", "skewed", "coarse")


def problem_of(kind: str, seed: int, n: int, m: int) -> Problem:
    rng = np.random.default_rng(seed)
    p, q, matrix = rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m)), rng.random((n, m))
    if kind == "zeros":
        p[rng.permutation(n)[: n // 2]] = 0
        q[rng.permutation(m)[: m // 2]] = 0
    elif kind == "uniform":
        p, q = np.full(n, 1 / n), np.full(m, 1 / m)
    elif kind == "tied":
        matrix = rng.integers(0, 3, (n, m)).astype(float)
    elif kind == "constant":
        matrix = np.full((n, m), 0.7)
    elif kind == "points":
        matrix = ((rng.normal(size=(n, 1, 2)) - rng.normal(size=(1, m, 2))) ** 2).sum(-1)
    elif kind == "skewed":
        p, q, matrix = p ** rng.integers(1, 60), q ** rng.integers(1, 60), matrix ** rng.integers(1, 40)
        p[0], q[-1] = 1e-300, 1e-310
    elif kind == "coarse":
        p, q, matrix = rng.integers(0, 3, n) + np.eye(n)[0], rng.integers(0, 3, m) + np.eye(m)[0], np.floor(3 * matrix)
    return p / p.sum(), q / q.sum(), matrix


def by_pot(monkeypatch: pytest.MonkeyPatch, p: Tensor, q: Tensor, matrix: Tensor) -> ExactSolution:
    with monkeypatch.context() as patch:
        patch.setattr(exact, "solve_compiled", solve_by_pot)
        return solve_exact(p, q, matrix)


def check_optimal(p: Tensor, q: Tensor, matrix: Tensor, found: ExactSolution) -> None:
    """A feasible plan and feasible potentials of equal value prove each other optimal."""
    scale = matrix.abs().max().clamp(min=1e-300)
    plan = found.plan()
    torch.testing.assert_close(plan.sum(-1), p.expand(plan.shape[:-1]), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(plan.sum(-2), q.expand(*plan.shape[:-2], q.shape[-1]), rtol=1e-12, atol=1e-14)
    assert (found.flows >= 0).all()
    slack = (matrix - found.f.unsqueeze(-1) - found.g.unsqueeze(-2)) / scale
    either = (p > 0).unsqueeze(-1) | (q > 0).unsqueeze(-2)
    assert slack[either.expand_as(slack)].min() >= -1e-14
    dual = (found.f * p).sum(-1) + (found.g * q).sum(-1)
    assert ((found.value - dual).abs() / scale).max() < 1e-13
    assert (((matrix * plan).sum((-1, -2)) - found.value).abs() / scale).max() < 1e-13
    assert (found.gap.abs() / scale).max() < 1e-13


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_equals_pot(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, (n, m) in enumerate([(1, 1), (1, 7), (9, 1), (2, 3), (8, 8), (17, 5), (33, 64), (90, 70)]):
        p, q, matrix = (as_double(a) for a in problem_of(kind, seed, n, m))
        fast, slow = solve_exact(p, q, matrix), by_pot(monkeypatch, p, q, matrix)
        check_optimal(p, q, matrix, fast)
        assert abs(fast.value - slow.value) <= 1e-13 * matrix.max()
        if kind in ("general", "zeros", "points"):
            # One optimum only: plans are equal, and potentials up to a constant.
            torch.testing.assert_close(fast.plan(), slow.plan(), rtol=0, atol=1e-14)
            for ours, theirs in ((fast.f, slow.f), (fast.g, slow.g)):
                torch.testing.assert_close(ours - ours.mean(), theirs - theirs.mean(), rtol=0, atol=1e-11)


@settings(max_examples=300, deadline=None)
@given(problems())
def test_small_problems_are_certified(problem: Problem) -> None:
    p, q, matrix = map(as_double, problem)
    found = solve_exact(p, q, matrix)
    check_optimal(p, q, matrix, found)
    assert found.value.item() == pytest.approx(linprog_value(*problem), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_equal_those_by_pot(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    p, q = (torch.randn(5, k, generator=generator, dtype=dtype).mul(2).softmax(-1) for k in (12, 20))
    p, q = (torch.where(w < 0.02, 0.0, w) for w in (p, q))
    p, q = (w / w.sum(-1, keepdim=True) for w in (p, q))
    leaves = [w.requires_grad_() for w in (p, q, torch.rand(5, 12, 20, generator=generator, dtype=dtype))]
    upstream = torch.randn(5, generator=generator, dtype=dtype)
    fast = torch.autograd.grad((emd(*leaves) * upstream).sum(), leaves)
    monkeypatch.setattr(exact, "solve_compiled", solve_by_pot)
    slow = torch.autograd.grad((emd(*leaves) * upstream).sum(), leaves)
    for ours, theirs in zip(fast, slow, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e290])
def test_scales_of_costs_change_nothing(scale: float) -> None:
    p, q, matrix = (as_double(a) for a in problem_of("general", 4, 30, 40))
    plain, scaled = solve_exact(p, q, matrix), solve_exact(p, q, matrix * scale)
    torch.testing.assert_close(scaled.value / scale, plain.value, rtol=1e-13, atol=0)
    torch.testing.assert_close(scaled.plan(), plain.plan(), rtol=0, atol=1e-14)


def test_a_small_cost_beside_huge_ones_is_found() -> None:
    # The largest cost is 1e12 times those that matter; a tolerance of its size would lose them.
    p, q, matrix = problem_of("general", 6, 12, 12)
    wide = np.full((13, 13), 1e12)
    wide[:12, :12], wide[12, 12] = matrix, 0
    p, q = np.append(p, 1) / 2, np.append(q, 1) / 2
    value = emd(as_double(p), as_double(q), as_double(wide)).item()
    assert value == pytest.approx(linprog_value(2 * p[:12], 2 * q[:12], matrix) / 2, abs=1e-7)


def test_uniform_weights_are_an_assignment() -> None:
    generator = torch.Generator().manual_seed(0)
    for n in (2, 50, 200):
        for matrix in (torch.rand(n, n, generator=generator), torch.randint(0, 5, (n, n), generator=generator).float()):
            rows, columns = linear_sum_assignment(matrix.double())
            weights = torch.full((n,), 1 / n)
            value = emd(weights, weights, matrix.double())
            assert value.item() == pytest.approx(matrix.double()[rows, columns].mean().item(), rel=1e-6)


@pytest.mark.parametrize("own", [False, True])
def test_threads_and_batches_change_nothing(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otloss._kernels._threads.ENTRIES", 0)
    generator = torch.Generator().manual_seed(5)
    p, q = (torch.randn(3, 4, k, generator=generator, dtype=torch.float64).softmax(-1) for k in (15, 11))
    matrix = torch.rand(*((4,) if own else ()), 15, 11, generator=generator)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(solve_exact(p, q, matrix))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert found[0].plan().shape == (3, 4, 15, 11)
    single = solve_exact(p[1, 2], q[1, 2], matrix[2] if own else matrix)
    for name in ("value", "f", "g", "rows", "columns", "flows", "gap", "iterations"):
        assert torch.equal(getattr(found[0], name), getattr(found[1], name))
        assert torch.equal(getattr(found[0], name)[1, 2], getattr(single, name))


@pytest.mark.parametrize("kind", ["general", "points", "uniform", "zeros"])
def test_a_start_nearby_saves_pivots_and_changes_no_value(kind: str) -> None:
    cold, warm, again = [], [], []
    for seed in range(4):
        p, q, matrix = (as_double(a) for a in problem_of(kind, seed, 60, 60))
        before = solve_exact(p, q, matrix)
        generator = torch.Generator().manual_seed(seed)
        after = matrix * (1 + 0.01 * torch.rand(matrix.shape, generator=generator, dtype=torch.float64))
        without = solve_exact(p, q, after)
        started = solve_exact(p, q, after, start=(before.f, before.g))
        check_optimal(p, q, after, started)
        torch.testing.assert_close(started.value, without.value, rtol=1e-13, atol=0)
        cold.append(int(without.iterations))
        warm.append(int(started.iterations))
        again.append(int(solve_exact(p, q, matrix, start=(before.f, before.g)).iterations))
    assert sum(warm) < 0.5 * sum(cold)
    # Rows of an assignment may be content with columns that others need.
    assert sum(again) <= (0.1 if kind == "uniform" else 0.05) * sum(cold)


def test_any_start_will_do() -> None:
    p, q, matrix = (as_double(a) for a in problem_of("zeros", 2, 20, 30))
    expected = solve_exact(p, q, matrix).value
    for start in (torch.zeros(30), 1e6 * torch.randn(30), torch.full((30,), -1e-9)):
        found = solve_exact(p, q, matrix, start=(torch.zeros(20), start))
        check_optimal(p, q, matrix, found)
        torch.testing.assert_close(found.value, expected)
    with pytest.raises(ValueError, match="start g holds 1 NaN"):
        solve_exact(p, q, matrix, start=(torch.zeros(20), torch.zeros(30).index_fill(0, torch.tensor(3), torch.nan)))


def test_numbers_beyond_float64_are_refused() -> None:
    p = torch.tensor([0.5, 0.5], dtype=torch.float64) * 1e200
    with pytest.raises(RuntimeError, match=r"duality gap of .* in the problem.*rescale"):
        emd(p, p.flip(0), torch.tensor([[1e150, 2e150], [3e150, 5e150]], dtype=torch.float64))


@pytest.mark.parametrize("power", [1, 1.5, 2])
def test_lines_agree_with_the_general_solver(power: float) -> None:
    for seed in range(4):
        p, q, _ = problem_of("zeros" if seed % 2 else "general", seed, 9, 9)
        x = as_double(np.random.default_rng(seed).normal(size=9), grad=True)
        P, Q = as_double(p, grad=True), as_double(q, grad=True)
        on_line, general = emd(P, Q, LineCost(x, power=power)), emd(P, Q, LineCost(x, power=power).dense())
        torch.testing.assert_close(on_line, general, rtol=1e-12, atol=1e-14)
        ours, theirs = (torch.autograd.grad(v, [P, Q, x]) for v in (on_line, general))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_lines_take_every_dtype_and_are_checked() -> None:
    x = torch.linspace(0, 1, 40)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        p, q = (torch.rand(3, 40, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (0, 1))
        p, q = (w / w.sum(-1, keepdim=True) for w in (p, q))
        value = emd(p, q, LineCost(x, power=2))
        assert value.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(value, emd(p, q, LineCost(x, power=2).dense()), rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match=r"shape \(40, 40\), expected \(40, 7\)"):
        emd(p[0], torch.ones(7, dtype=torch.float64) / 7, LineCost(x))
    below = emd(p, q, LineCost(x, power=0.5))
    torch.testing.assert_close(below, emd(p, q, LineCost(x, power=0.5).dense()))
