"""The network simplex and assignments against POT, scipy and certificates of optimality."""

import numpy as np
import ot
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from otloss import emd
from otloss.solvers.exact.batch import solve_batch
from otloss.solvers.exact.optimum import Optimum, solve_arrays
from otloss.solvers.exact.results import check_outcome
from tests.otloss.draws import draw, normal
from tests.otloss.oracles import as_double

Problem = tuple[np.ndarray, np.ndarray, np.ndarray]
KINDS = ("general", "zeros", "uniform", "tied", "constant", "points", "skewed", "coarse", "beside huge ones")
ASSIGNED = ("general", "tied", "points", "clouds apart", "nearly equal", "products")


def costs(kind: str, rng: np.random.Generator, n: int, m: int) -> np.ndarray:
    if kind in ("points", "clouds apart", "shifted"):
        shift = {"points": 0.0, "clouds apart": 5.0, "shifted": 0.3}[kind]
        actual: np.ndarray = ((rng.normal(size=(n, 1, 2)) - rng.normal(size=(1, m, 2)) - shift) ** 2).sum(-1)
        return actual
    matrix = rng.random((n, m))
    return {
        "tied": np.floor(3 * matrix),
        "coarse": np.floor(3 * matrix),
        "constant": np.full((n, m), 0.7),
        "nearly equal": 1 + 1e-13 * matrix,
        "products": np.outer(np.arange(1.0, n + 1), np.arange(1.0, m + 1)),  # rows agree on the order of the columns
        "skewed": matrix ** rng.integers(1, 40),
    }.get(kind, matrix)


def problem_of(kind: str, seed: int, n: int, m: int) -> Problem:
    rng = np.random.default_rng(seed)
    p, q, matrix = rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m)), costs(kind, rng, n, m)
    if kind == "zeros":
        p[rng.permutation(n)[: n // 2]] = 0
        q[rng.permutation(m)[: m // 2]] = 0
    elif kind == "uniform":
        p, q = np.full(n, 1 / n), np.full(m, 1 / m)
    elif kind == "skewed":
        p, q = p ** rng.integers(1, 60), q ** rng.integers(1, 60)
        p[0], q[-1] = 1e-300, 1e-310
    elif kind == "coarse":
        p, q = rng.integers(0, 3, n) + np.eye(n)[0], rng.integers(0, 3, m) + np.eye(m)[0]
    elif kind == "beside huge ones":  # a tolerance relative to these would lose the others
        matrix[:-1, -1:], matrix[-1:, :-1], matrix[-1:, -1:] = 1e12, 1e12, 0.0
        p[-1], q[-1] = p[:-1].sum() + (n == 1), q[:-1].sum() + (m == 1)
    return p / p.sum(), q / q.sum(), matrix


def check_optimal(p: Tensor, q: Tensor, matrix: Tensor, actual: Optimum) -> None:
    """A feasible plan and feasible potentials of equal value prove each other optimal."""
    scale = matrix.abs().max().clamp(min=1e-300)
    plan = actual.plan()
    torch.testing.assert_close(plan.sum(-1), p.expand(plan.shape[:-1]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(plan.sum(-2), q.expand(*plan.shape[:-2], q.shape[-1]), rtol=1e-12, atol=1e-12)
    assert (actual.flows >= 0).all()
    slack = (matrix - actual.f.unsqueeze(-1) - actual.g.unsqueeze(-2)) / scale
    either = (p > 0).unsqueeze(-1) | (q > 0).unsqueeze(-2)
    assert slack[either.expand_as(slack)].min() >= -1e-14
    dual = (actual.f * p).sum(-1) + (actual.g * q).sum(-1)
    assert ((actual.value - dual).abs() / scale).max() < 1e-12
    assert (((matrix * plan).sum((-1, -2)) - actual.value).abs() / scale).max() < 1e-12
    assert (actual.gap.abs() / scale).max() < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_solutions_are_certified_and_those_of_pot(kind: str) -> None:
    for seed, (n, m) in enumerate([(1, 1), (1, 7), (9, 1), (2, 3), (8, 8), (17, 5), (33, 64), (90, 70)]):
        p, q, matrix = problem_of(kind, seed, n, m)
        P, Q, C = map(as_double, (p, q, matrix))
        actual = solve_arrays(P, Q, C)
        check_optimal(P, Q, C, actual)
        if kind == "beside huge ones" and min(n, m) > 1:
            rest = solve_arrays(2 * P[:-1], 2 * Q[:-1], C[:-1, :-1])
            assert float(actual.value) == pytest.approx(float(rest.value) / 2, rel=1e-9)
        if kind in ("general", "points"):  # one optimum only
            np.testing.assert_allclose(actual.plan(), ot.emd(p, q, matrix), atol=1e-12)


def uniform(*shape: int) -> Tensor:
    return torch.full(shape, 1 / shape[-1], dtype=torch.float64)


def by_scipy(matrix: Tensor) -> float:
    rows, columns = linear_sum_assignment(matrix.numpy())
    return float(matrix[torch.from_numpy(rows), torch.from_numpy(columns)].mean())


@pytest.mark.parametrize("kind", ASSIGNED)
def test_assignments_are_optimal(kind: str) -> None:
    for n in (1, 2, 3, 17, 120):
        matrix = as_double(costs(kind, np.random.default_rng(n), n, n))
        actual = solve_arrays(uniform(n), uniform(n), matrix)
        check_optimal(uniform(n), uniform(n), matrix, actual)
        assert float(actual.value) == pytest.approx(by_scipy(matrix), rel=1e-12)
        assert set((actual.plan() * n).flatten().round(decimals=12).tolist()) <= {0.0, 1.0}
        value = emd(*uniform(2, n).float(), matrix.float())
        assert value.item() == pytest.approx(by_scipy(matrix.float()), rel=1e-5)


def test_hard_assignments_are_left_to_the_simplex() -> None:
    for n, kinds in ((300, ("general", "products", "points", "clouds apart")), (800, ("shifted",))):
        matrices = torch.stack([as_double(costs(kind, np.random.default_rng(0), n, n)) for kind in kinds])
        actual = solve_arrays(uniform(len(kinds), n), uniform(len(kinds), n), matrices)
        for value, gap, matrix in zip(actual.value, actual.gap, matrices, strict=True):
            assert float(value) == pytest.approx(by_scipy(matrix), rel=1e-12)
            assert abs(float(gap)) <= 1e-12 * float(matrix.max())


@pytest.mark.parametrize("kind", ["general", "uniform", "zeros"])
def test_a_start_nearby_saves_pivots_and_changes_no_value(kind: str) -> None:
    cold = warm = again = 0
    for seed in range(3):
        p, q, matrix = (as_double(a) for a in problem_of(kind, seed, 60, 60))
        before = solve_arrays(p, q, matrix)
        after = matrix * (1 + 0.01 * draw(60, 60, seed=seed))
        without, started = (solve_arrays(p, q, after, start=start) for start in (None, (before.f, before.g)))
        far = solve_arrays(p, q, after, start=(before.f, 10 * normal(60, seed=seed)))
        for actual in (started, far):
            check_optimal(p, q, after, actual)
            torch.testing.assert_close(actual.value, without.value, rtol=1e-12, atol=0)
        cold, warm = cold + int(without.iterations), warm + int(started.iterations)
        again += int(solve_arrays(p, q, matrix, start=(before.f, before.g)).iterations)
    assert warm < 0.5 * cold
    # In an assignment the first step may give rows columns that others need.
    assert again <= (0.2 if kind == "uniform" else 0.1) * cold
    with pytest.raises(ValueError, match="start g holds 60 NaN"):
        solve_arrays(p, q, matrix, start=(before.f, before.g * torch.nan))


def test_batches_may_lie_in_memory_in_any_order() -> None:
    rng = np.random.default_rng(0)
    p, q = (w / w.sum(-1, keepdims=True) for w in (rng.random((4, 6)), rng.random((4, 5))))
    matrices, owners = rng.random((2, 6, 5)), np.array([0, 1, 1, 0])
    expected = solve_batch(p, q, matrices, owners, start=None, max_pivots=1000)
    moved = (np.asfortranarray(array) for array in (p, q, matrices))
    actual = solve_batch(*moved, np.repeat(owners, 2)[::2], start=None, max_pivots=1000)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_solutions_that_are_not_optimal_raise() -> None:
    p = torch.tensor([0.5, 0.5], dtype=torch.float64) * 1e200
    with pytest.raises(RuntimeError, match=r"duality gap of .* in the problem.*rescale"):
        emd(p, p.flip(0), torch.tensor([[1e150, 2e150], [3e150, 5e150]], dtype=torch.float64))
    weights = [w / w.sum(-1, keepdims=True) for w in np.random.default_rng(0).random((2, 6, 30))]
    matrix = np.random.default_rng(1).random((1, 30, 30))
    *_, outcome = solve_batch(*weights, matrix, np.zeros(6, np.int64), start=None, max_pivots=1)
    with pytest.raises(RuntimeError, match=r"stopped early on problem \(0, 0\), 30 by 30 bins with mass"):
        check_outcome(outcome, weights, torch.Size([2, 3]))
