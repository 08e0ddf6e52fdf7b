"""Losses of sets against scipy, linear programs and finite differences."""

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment, linprog

from otloss.losses import set_loss
from tests.errors import raising
from tests.otloss.draws import normal

F64 = torch.float64


SIZES = torch.tensor([[5, 3], [4, 4], [5, 0], [0, 0]])


def set_problems() -> tuple[torch.Tensor, torch.Tensor]:
    cost, unmatched = normal(4, 5, 4, seed=4), normal(4, 5, seed=5)
    for k, (n, m) in enumerate(SIZES.tolist()):
        cost[k, n:], cost[k, :, m:], unmatched[k, n:] = torch.nan, torch.nan, torch.nan
    return cost.requires_grad_(), unmatched.requires_grad_()


def test_sets_against_scipy_and_a_linear_program() -> None:
    cost, unmatched = set_problems()
    hard, soft = (set_loss(cost, unmatched, sizes=SIZES, epsilon=e, reduction="none") for e in (None, 1e-3))
    for k, (n, m) in enumerate(SIZES.tolist()):
        c, u = cost[k, :n, :m].detach().numpy(), unmatched[k, :n].detach().numpy()
        i, j = linear_sum_assignment(c - u[:, None])
        assert hard[k].item() == pytest.approx(c[i, j].sum() + u.sum() - u[i].sum())
        if n > 0:  # the transport to the targets and to nothing
            full = np.c_[c, u]
            rows, columns = np.kron(np.eye(n), np.ones(m + 1)), np.kron(np.ones(n), np.eye(m + 1))
            best = linprog(full.ravel(), A_eq=np.r_[rows, columns], b_eq=np.r_[np.ones(n + m), n - m]).fun
            assert soft[k].item() == pytest.approx(best, abs=1e-3 * n * np.log(20))
    for value in (hard, soft):
        by_cost, by_unmatched = torch.autograd.grad(value.sum(), (cost, unmatched))
        sums = by_cost.sum(-1) + by_unmatched
        assert torch.allclose(sums, (torch.arange(5) < SIZES[:, :1]).to(F64), atol=1e-4)
        assert torch.allclose(by_cost.sum(-2), (torch.arange(4) < SIZES[:, 1:]).to(F64), atol=1e-4)


def test_large_losses_of_unmatched_predictions_cost_no_digits() -> None:
    cost = torch.tensor([[0.3, 0.2], [0.1, 0.4]])
    for epsilon, tolerance in ((None, 1e-7), (1e-3, 2e-6)):
        for size in (1e4, 1e8):
            actual = set_loss(cost, torch.full((2,), size), epsilon=epsilon)
            assert float(actual) == pytest.approx(
                0.3 if epsilon is None else float(set_loss(cost, epsilon=epsilon)), abs=tolerance
            )
        assert float(set_loss(torch.zeros(0, 0), epsilon=epsilon)) == 0
        # 99 of 100 are matched; the sum over all would be beyond float16.
        actual = set_loss(torch.ones(100, 99).half(), torch.full((100,), 1000.0).half(), epsilon=epsilon)
        assert actual.dtype == torch.float16
        assert float(actual) == pytest.approx(1099, abs=2)


test_bad_sets = raising(
    (lambda: set_loss(normal(2, 3)), "expected n >= m"),
    (lambda: set_loss(normal(3, 2), normal(2)), r"unmatched has shape \(2,\), expected \(3,\)"),
)
