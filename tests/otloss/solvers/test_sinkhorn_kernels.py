"""The Sinkhorn kernels give up where their contraction says that too many iterations are left."""

import numpy as np
import pytest
import torch

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
