"""Pairs of minibatches against scipy's assignment, and the frequencies of draws against the plan."""

import pytest
import torch
from scipy.optimize import linear_sum_assignment

import otloss
from tests.errors import raising
from tests.otloss.draws import normal


@pytest.mark.parametrize(("n", "m"), [(30, 30), (20, 31)])
def test_exact_pairs_are_the_nearest_permutation(n: int, m: int) -> None:
    x0, x1 = normal(n, 2, 3, seed=0) + 100, normal(m, 2, 3, seed=1) + 100
    cost = (x0.flatten(1)[:, None] - x1.flatten(1)).double().square().sum(-1)
    actual = otloss.pair(x0, x1)
    assert actual.unique().numel() == n
    best = linear_sum_assignment(cost.numpy())
    assert cost[torch.arange(n), actual].sum().item() == pytest.approx(cost[best].sum().item(), rel=1e-6)


def test_conditions_agree_as_often_as_possible_and_then_the_nearest_is_taken() -> None:
    x0, x1 = normal(40, 2, seed=2), normal(40, 2, seed=3)
    labels = torch.arange(40) % 4, (torch.arange(40) % 5).clamp(max=3)  # 10 each; 8, 8, 8 and 16
    actual = otloss.pair(x0, x1, condition=labels)
    assert int((labels[0] == labels[1][actual]).sum()) == 34
    assert actual.unique().numel() == 40
    equal = labels[0], labels[0].flip(0)
    actual = otloss.pair(x0, x1, condition=equal)
    for label in range(4):
        of0, of1 = (torch.nonzero(side == label).squeeze(-1) for side in equal)
        assert torch.equal(actual[of0], of1[otloss.pair(x0[of0], x1[of1])])
    drawn_pairs = otloss.pair(x0, x1, condition=equal, epsilon=0.5)
    assert torch.equal(equal[0], equal[1][drawn_pairs])


def test_draws_follow_the_entropic_plan() -> None:
    x0, x1 = normal(5, 3, seed=4), normal(4, 3, seed=5)
    cost = (x0[:, None] - x1).square().sum(-1)
    rows = 5 * otloss.solve(None, None, cost, epsilon=1.0).plan()
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([otloss.pair(x0, x1, epsilon=1.0, generator=generator) for _ in range(800)])
    actual = torch.nn.functional.one_hot(draws, 4).double().mean(0)
    assert (actual - rows).abs().max() < 0.07  # four standard errors of a share


x = normal(4, 2, seed=6)


test_bad_input = raising(
    (lambda: otloss.pair(x, x[:3]), "at least as many of x1"),
    (lambda: otloss.pair(x, x[:, :1]), "the same axes after the first"),
    (lambda: otloss.pair(x, x, condition=(torch.arange(3), torch.arange(4))), r"condition\[0\] has shape \(3,\)"),
    (lambda: otloss.pair(x, x, condition=(torch.arange(4),)), TypeError, "is a tuple of 1, expected a pair"),  # type: ignore[arg-type]
)
