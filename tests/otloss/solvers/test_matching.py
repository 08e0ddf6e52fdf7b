"""Batches of assignments against scipy's, pairs of minibatches, and losses of sets."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

import otloss
from otloss.losses import set_loss
from otloss.solvers.assignment.match import match
from tests.errors import raising
from tests.otloss.draws import normal
from tests.otloss.oracles import linprog_value


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 0.6]))
def test_each_is_as_cheap_as_that_of_scipy(n: int, m: int, seed: int, forbidden: float) -> None:
    # Whole numbers with ties and both signs, so that totals are exact.
    generator = torch.Generator().manual_seed(seed)
    costs = torch.randint(-5, 6, (3, n, m), generator=generator).to((torch.float32, torch.float64)[seed % 2])
    costs[torch.rand(costs.shape, generator=generator) < forbidden] = torch.inf
    try:
        best = [linear_sum_assignment(cost.numpy()) for cost in costs]
    except ValueError:
        with pytest.raises(ValueError, match="has no complete matching"):
            match(costs)
        return
    rows, columns = match(costs)
    assert rows.shape == columns.shape == (3, min(n, m))
    for cost, i, j, pairs in zip(costs, rows, columns, best, strict=True):
        assert len(set(i.tolist())) == len(set(j.tolist())) == min(n, m)
        assert i.tolist() == sorted(i.tolist())
        assert float(cost[i, j].sum()) == float(cost.numpy()[pairs].sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("price", [1e9, 1e16, 3e38])
def test_the_other_pairs_are_the_cheapest_where_prices_must_be_paid(price: float, dtype: torch.dtype) -> None:
    """One column costs the price in every row, as do some other pairs; the sums compared have 1e3 instead."""
    generator = torch.Generator().manual_seed(0)
    cost = torch.randn(200, 5, 7, generator=generator, dtype=dtype)
    cost[:100] = cost[:100].round()
    is_dear = torch.rand(cost.shape, generator=generator) < 0.3
    is_dear[..., 1] = True
    is_dear[..., ::2] |= torch.rand(200, 1, 1, generator=generator) < 0.5  # too few are left
    priced, small = cost.masked_fill(is_dear, price), cost.masked_fill(is_dear, 1e3)
    for problem, (rows, columns) in enumerate(zip(*match(priced), strict=True)):
        expected = small[problem].numpy()[linear_sum_assignment(small[problem].numpy())].sum()
        assert float(small[problem][rows, columns].sum()) == pytest.approx(expected, abs=1e-3)
    for (rows, columns), *batched in zip(match(list(priced.mT)), *match(priced.mT), strict=True):
        assert torch.equal(rows, batched[0])
        assert torch.equal(columns, batched[1])


def test_ragged_batches_and_lists() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (2, 6), (4, 4), (0, 6), (6, 0)]
    costs = [torch.randn(shape, generator=generator) for shape in shapes]
    padded = torch.full((5, 6, 6), float("nan"))
    for k, cost in enumerate(costs):
        padded[k, : cost.shape[0], : cost.shape[1]] = cost
    assert [t.shape for t in match(padded[:0])] == [(0, 6), (0, 6)]
    rows, columns = match(padded, sizes=torch.tensor(shapes))
    assert rows.shape == (5, 4)
    for k, ((i, j), cost) in enumerate(zip(match(costs), costs, strict=True)):
        expected = linear_sum_assignment(cost.numpy())
        assert i.tolist() == expected[0].tolist()
        assert j.tolist() == expected[1].tolist()
        assert rows[k].tolist() == [*i.tolist(), *[-1] * (4 - len(i))]
        assert columns[k].tolist() == [*j.tolist(), *[-1] * (4 - len(j))]


good = torch.zeros(2, 3, 3)
forbidden = good.masked_fill(torch.tensor([[[False]], [[True]]]) & (torch.arange(3) > 0), torch.inf)
one = torch.eye(18).reshape(18, 2, 3, 3)[15]  # problem 1, row 2, column 0
test_bad_input = raising(
    (forbidden.unsqueeze(1), None, r"problem \(1, 0\) has no complete matching"),
    (good.masked_fill(one > 0, torch.nan), None, "problem 1 hold NaN or -inf"),
    (good, torch.tensor([[3, 3], [3, 4]]), "rows up to 3 and columns to 3"),
    call=lambda cost, sizes: match(cost, sizes=sizes),
)


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


@pytest.mark.parametrize("axes", [2, 64])  # distances from differences, and by a product
def test_exact_pairs_within_far_clusters_are_the_nearest(axes: int) -> None:
    apart = 1e4 * (torch.arange(60) % 2).unsqueeze(1)
    x0, x1 = normal(60, axes, seed=7).float() + apart, normal(60, axes, seed=8).float() + apart.flip(0)
    cost = (x0.double()[:, None] - x1.double()).square().sum(-1)
    actual = otloss.pair(x0, x1)
    best = linear_sum_assignment(cost.numpy())
    assert cost[torch.arange(60), actual].sum().item() == pytest.approx(cost[best].sum().item(), rel=1e-5)


@pytest.mark.parametrize("scale", [1e-15, 1e-9, 1e-6, 1e6, 1e15])
def test_conditioned_pairs_do_not_depend_on_the_unit(scale: float) -> None:
    x0, x1 = normal(40, 2, seed=2), normal(40, 2, seed=3)
    labels = torch.arange(40) % 4, (torch.arange(40) % 5).clamp(max=3)
    pairs = otloss.pair(x0, x1, condition=labels)
    assert torch.equal(otloss.pair(scale * x0, scale * x1, condition=labels), pairs)


@pytest.mark.parametrize("epsilon", [1e-2, 1e3, 1e6])
def test_drawn_pairs_agree_in_their_condition_at_any_epsilon(epsilon: float) -> None:
    x0, x1, labels = normal(40, 2, seed=2), normal(40, 2, seed=3), torch.arange(40) % 4
    drawn = otloss.pair(x0, x1, epsilon=epsilon, condition=(labels, labels.flip(0)))
    assert torch.equal(labels, labels.flip(0)[drawn])


def test_drawn_pairs_of_images_with_unequal_counts_of_labels() -> None:
    """Distances in many dimensions are nearly equal: the penalty follows their range, and not their size."""
    x0, x1 = normal(64, 3072, seed=2), normal(64, 3072, seed=3).clamp(-1, 1)
    labels = torch.arange(64) % 4, (torch.arange(64) % 5).clamp(max=3)
    drawn = otloss.pair(x0, x1, epsilon=0.01, condition=labels, generator=torch.Generator().manual_seed(0))
    counts = [torch.bincount(label, minlength=4) for label in labels]
    agreeing = (labels[0] == labels[1][drawn]).sum()
    assert abs(int(agreeing) - int(torch.minimum(*counts).sum())) <= 8  # of 64 draws


def test_draws_follow_the_entropic_plan() -> None:
    x0, x1 = normal(5, 3, seed=4), normal(4, 3, seed=5)
    cost = (x0[:, None] - x1).square().sum(-1)
    rows = 5 * otloss.solve(None, None, cost, epsilon=1.0).plan()
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([otloss.pair(x0, x1, epsilon=1.0, generator=generator) for _ in range(800)])
    actual = torch.nn.functional.one_hot(draws, 4).double().mean(0)
    assert (actual - rows).abs().max() < 0.07  # four standard errors of a share


x = normal(4, 2, seed=6)
test_bad_pairs_and_sets = raising(
    (lambda: match(pd.DataFrame(np.eye(2))), TypeError, r"with torch\.tensor\(cost\.to_numpy\(\)\)"),
    (lambda: match([[1.0, 2.0], [3.0, 4.0]]), TypeError, r"is a list of lists, .*torch\.tensor\(cost\)"),  # type: ignore[list-item]
    (lambda: match(np.eye(2, dtype=object)), TypeError, r"with torch\.tensor\(cost\.astype\(float\)\)"),
    (lambda: set_loss(normal(2, 3)), "expected n >= m"),
    (lambda: otloss.pair(x, x[:3]), "at least as many of x1"),
    (lambda: otloss.pair(x[:, 0], x[0, 0]), r"x1 \(\), expected \(n, ...\)"),
    (lambda: otloss.pair(1e30 * x.float(), x.float()), "distances to the power 2 overflow torch.float32"),
    (lambda: otloss.pair(x, x, condition=(torch.arange(3), torch.arange(4))), r"condition\[0\] has shape \(3,\)"),
)
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
            best = linprog_value(np.ones(n), np.r_[np.ones(m), n - m], np.c_[c, u])
            assert soft[k].item() == pytest.approx(best, abs=1e-3 * n * np.log(20))
    for value in (hard, soft):
        by_cost, by_unmatched = torch.autograd.grad(value.sum(), (cost, unmatched))
        sums = by_cost.sum(-1) + by_unmatched
        assert torch.allclose(sums, (torch.arange(5) < SIZES[:, :1]).double(), atol=1e-4)
        assert torch.allclose(by_cost.sum(-2), (torch.arange(4) < SIZES[:, 1:]).double(), atol=1e-4)
