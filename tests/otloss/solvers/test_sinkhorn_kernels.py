"""The Sinkhorn kernels give up where their contraction says so, and not where sums of float32 are rounded."""

import numpy as np
import pytest
import torch

from otloss import solve
from otloss.solvers.entropic.interface import ERROR, ITERATIONS, Budget
from otloss.solvers.entropic.sinkhorn_cpu import MatrixProblems, run_kernel
from tests.otloss.solvers.test_hard_clouds import cloud


@pytest.mark.parametrize("count", [64, 96, 128])
def test_slow_problems_end_early_whether_factors_are_absorbed_often_or_not(count: int) -> None:
    x, y = (cloud("heavy", 1, count, seed).double() for seed in (1, 2))
    p = torch.full((1, count), 1 / count, dtype=torch.float64)
    cost = torch.cdist(x, y).square()
    for size in (1e-1, 1e-2, 1e-3):
        problems = MatrixProblems(p, p, cost, owner=np.zeros(1, np.int64), epsilon=np.array([size]))
        outcome = run_kernel(problems, Budget(1e-8, 250, patience=250)).outcome
        assert outcome[0, ITERATIONS] < 200
        assert outcome[0, ERROR] > 1e-8


@pytest.mark.parametrize("shape", [(150_000, 3), (3, 1_500_000)])
@pytest.mark.parametrize("penalty", [None, 1.0])
def test_long_sums_of_float32_reach_the_tolerance(
    shape: tuple[int, int], penalty: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rounding was above it, and Newton's method took over, which begins with minutes of exact transport."""
    monkeypatch.setattr("otloss.solvers.entropic.newton.SparseNewton.applies", lambda *_: False)
    cost = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    solution = solve(None, None, cost, epsilon=0.1, marginal_penalty=penalty, max_iterations=60)
    assert bool(solution.converged)
    exact = solve(None, None, cost.double(), epsilon=0.1, marginal_penalty=penalty)
    torch.testing.assert_close(solution.value.double(), exact.value, rtol=3e-6, atol=0)
