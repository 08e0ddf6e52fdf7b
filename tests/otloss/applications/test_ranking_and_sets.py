"""Losses of rankings and sets against scipy, linear programs and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment, linprog
from scipy.stats import rankdata, spearmanr

from otloss.applications.sorting import soft_top_k
from otloss.losses import set_loss, spearman_loss, top_k_loss

F64 = torch.float64


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
@settings(max_examples=40, deadline=None)
def test_spearman_of_hard_ranks_is_that_of_scipy(pairs: list[tuple[int, int]]) -> None:
    scores, target = torch.tensor(pairs, dtype=F64).T
    if target.unique().numel() == 1:
        with pytest.raises(ValueError, match="all targets of a row are equal"):
            spearman_loss(scores, target)
        return
    expected = 1.0 if scores.unique().numel() == 1 else 1 - spearmanr(scores, target).statistic
    assert float(spearman_loss(scores, target, epsilon=1e-7)) == pytest.approx(expected, abs=1e-9)


def test_target_ranks_are_those_of_scipy() -> None:
    """Of targets of any range and type, ties among them."""
    scores = drawn(4, 12, seed=9)
    for wide in (
        10 ** drawn(4, 12, seed=10).mul(8), torch.tensor([1.0, 1, 2, 6e4] * 3).half().expand(4, -1),
        torch.arange(12).expand(4, -1) % 7 + 2**62, scores > 0,
    ):  # fmt: skip
        actual = spearman_loss(scores, wide, epsilon=1e-7, reduction="none")
        expected = [1 - spearmanr(s, rankdata(t)).statistic for s, t in zip(scores, wide.numpy(), strict=True)]
        np.testing.assert_allclose(actual, expected, atol=1e-9)


def test_gradients_of_rankings() -> None:
    scores, target = drawn(3, 8, seed=1).requires_grad_(), drawn(3, 8, seed=2)
    assert torch.autograd.gradcheck(lambda s: spearman_loss(s, target, epsilon=3.0, reduction="none"), scores)
    assert torch.autograd.gradcheck(lambda s: spearman_loss(s, target, epsilon=0.1, regularization="entropy"), scores)
    for right in (torch.tensor([0, 3, 7]), target > 0.2):
        assert torch.autograd.gradcheck(lambda s, t=right: top_k_loss(s, t, 3, reduction="none"), scores)
    # Descent sorts the scores.
    row = scores.detach()[0].clone().requires_grad_()
    for _ in range(200):
        (gradient,) = torch.autograd.grad(spearman_loss(row, target[0], epsilon=4.0), row)
        row = (row - 0.3 * gradient).detach().requires_grad_()
    assert float(spearman_loss(row.detach(), target[0], epsilon=1e-7)) < 0.05


def test_top_k_is_the_logarithm_of_the_share() -> None:
    logits = drawn(4, 6, seed=3)
    mask = torch.zeros(4, 6, dtype=torch.bool).scatter_(1, torch.tensor([[0, 5], [1, 2], [3, 3], [4, 0]]), True)
    shares = soft_top_k(logits, 2, epsilon=0.3).log()
    actual = top_k_loss(logits, mask, 2, epsilon=0.3, reduction="none")
    torch.testing.assert_close(actual, torch.stack([-s[m].mean() for s, m in zip(shares, mask, strict=True)]))
    worst = top_k_loss(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([0]), 1, epsilon=1e-4)  # a share of 0 in float32
    assert float(worst) == pytest.approx(15000, rel=1e-3)
    assert float(top_k_loss(logits, torch.arange(4), 6)) == 0
    for target, k, message in ((torch.tensor([0, 1, 2, 6]), 2, "out of range"), (mask & False, 2, "without a right"),
                               (torch.arange(3), 2, "expected"), (torch.arange(4), 0, "at least 1")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            top_k_loss(logits, target, k)
    with pytest.raises(TypeError, match=r"target has dtype .*float64, expected integers"):
        top_k_loss(logits, torch.arange(4).double(), 2)


SIZES = torch.tensor([[5, 3], [4, 4], [5, 0], [0, 0]])


def set_problems() -> tuple[torch.Tensor, torch.Tensor]:
    cost, unmatched = drawn(4, 5, 4, seed=4), drawn(4, 5, seed=5)
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
    small, rest = drawn(3, 2, seed=6).requires_grad_(), drawn(3, seed=7).requires_grad_()
    assert torch.autograd.gradcheck(lambda c, u: set_loss(c, u, epsilon=0.3), (small, rest), atol=1e-5)


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


def test_bad_sets() -> None:
    for call, message in (
        (lambda: set_loss(drawn(2, 3)), "expected n >= m"),
        (lambda: set_loss(drawn(3)), r"expected \(..., n, m\)"),
        (lambda: set_loss(drawn(3, 2), drawn(2)), r"unmatched has shape \(2,\), expected \(3,\)"),
        (lambda: set_loss(drawn(3, 2) / 0), "cost holds"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
