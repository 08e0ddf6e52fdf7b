"""Batches of assignments against scipy's, one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from otloss.applications.matching import match
from tests.errors import raising


@given(
    st.integers(1, 7), st.integers(1, 7), st.integers(0, 10**6), st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([0.0, 0.3, 0.6]),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_each_is_as_cheap_as_that_of_scipy(n: int, m: int, seed: int, dtype: torch.dtype, forbidden: float) -> None:
    # Whole numbers with ties and both signs, so that totals are exact.
    generator = torch.Generator().manual_seed(seed)
    costs = torch.randint(-5, 6, (3, n, m), generator=generator).to(dtype)
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


def test_forbidden_pairs_and_large_problems() -> None:
    rng = np.random.default_rng(0)
    cost = rng.normal(size=(200, 230))
    cost[rng.random(cost.shape) < 0.7] = np.inf
    rows, columns = match(torch.from_numpy(cost))
    best = linear_sum_assignment(cost)
    assert float(cost[rows, columns].sum()) == pytest.approx(cost[best].sum(), rel=1e-12)


good = torch.zeros(2, 3, 3)
forbidden = good.masked_fill(torch.tensor([[[False]], [[True]]]) & (torch.arange(3) > 0), torch.inf)
one = torch.eye(18).reshape(18, 2, 3, 3)[15]  # problem 1, row 2, column 0


test_bad_input = raising(
    (forbidden, None, "problem 1 has no complete matching"),
    (forbidden.unsqueeze(1), None, r"problem \(1, 0\) has no complete matching"),
    (good.masked_fill(one > 0, torch.nan), None, "problem 1 hold NaN or -inf"),
    (good.masked_fill(one > 0, -torch.inf), None, "problem 1 hold NaN or -inf"),
    ([good[0]], torch.tensor([[3, 3]]), "sizes are given for a list"),
    (good, "nonsense", TypeError, "sizes is a str"),
    (iter(good), None, TypeError, "or a list of matrices"),
    (5, None, TypeError, "cost is a int"),
    (good[0, 0], None, "rows are matched with columns"),
    (good, torch.tensor([[3, 3], [3, 4]]), "rows up to 3 and columns to 3"),
    call=lambda cost, sizes: match(cost, sizes=sizes),
)
