"""Costs against loops in float64: rows, products, soft minima, degenerate rows, dtypes, messages."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from otloss.costs import CosineCost, Cost, DenseCost, LineCost, as_cost
from tests.errors import raising
from tests.otloss.oracles import as_double, check_questions, cosine_matrix
from tests.otloss.strategies import square_problems


def embedding(dtype: torch.dtype = torch.float64) -> Tensor:
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[3] = 0
    rows[7] = rows[8] * 3
    rows[9] = -rows[8]
    return rows.to(dtype)


def costs() -> list[Cost]:
    matrix = torch.rand(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.tensor([2.0, -1.0, 2.0, 5.0], dtype=torch.float64)
    return [DenseCost(matrix), CosineCost(embedding()), LineCost(x), LineCost(x, power=2), LineCost(x, power=0.5)]


@pytest.mark.parametrize("cost", costs(), ids=repr)
def test_every_question_agrees_with_the_matrix(cost: Cost) -> None:
    check_questions(cost, cost.dense())
    assert cost.dense().min() >= 0
    assert cost.shape[0] != cost.shape[1] or cost.diagonal().abs().max() == 0


@settings(max_examples=100, deadline=None)
@given(square_problems())
def test_cosine_rows_are_the_definition(problem: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    points = as_double(problem[2])
    cost = CosineCost(points)
    dense = cost.dense()
    usable = (points.abs().amax(-1) > 1e-100) | cost.zero_rows  # the loop's own squares vanish below
    torch.testing.assert_close(dense[usable][:, usable], cosine_matrix(points)[usable][:, usable], atol=1e-12, rtol=0)
    assert cost.zero_rows.tolist() == [not row.any() for row in problem[2]]
    assert dense.diagonal().abs().max() == 0
    assert dense.min() >= 0
    assert dense.max() <= 2


@pytest.mark.parametrize("scale", [1e-45, 1e-30, 3e37])
def test_norms_of_any_size(scale: float) -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0], [0.0, 0.0]])
    scaled = rows.clone()
    scaled[2] *= scale
    dense = CosineCost(scaled).dense()
    torch.testing.assert_close(dense, cosine_matrix(rows).float(), atol=3e-7, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_zero_rows_duplicates_and_precision(dtype: torch.dtype) -> None:
    rows, v = embedding(dtype), torch.rand(40)
    cost, exact = CosineCost(rows), cosine_matrix(rows)
    dense = cost.dense()
    assert dense[3].tolist() == dense[:, 3].tolist() == [1.0] * 3 + [0.0] + [1.0] * 36
    assert dense.diagonal().abs().max() == 0 == cost.unit[3].abs().sum()
    assert 0 <= dense[8, 7] < 10 * torch.finfo(dtype).eps
    assert cost.dtype == cost.rows(torch.tensor([1])).dtype == dense.dtype == torch.promote_types(dtype, torch.float32)
    assert (dense - exact).abs().max() < 1e-6
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (cost.dense() - exact).abs().max() < 1e-6
        assert (cost.apply(v) - exact @ v.double()).abs().max() < 1e-6 * v.sum()
    assert cost.apply(v.to(dtype)).dtype == cost.dtype
    assert DenseCost(torch.ones(2, 2, dtype=dtype)).dtype == LineCost(torch.ones(2, dtype=dtype)).dtype == cost.dtype


def test_gradients_at_kinks_are_finite() -> None:
    rows = embedding()[:9].clone().requires_grad_()  # with a row of zeros and duplicates
    (by_rows,) = torch.autograd.grad(CosineCost(rows).dense().square().sum(), rows)
    assert torch.isfinite(by_rows).all()
    assert by_rows[3].abs().sum() == 0
    for power in (0.5, 1, 1.5, 2):
        x = torch.tensor([0.0, 1.0, 3.5], dtype=torch.float64, requires_grad=True)
        upper = torch.ones(3, 3).triu(1).bool()
        assert torch.autograd.gradcheck(lambda x, p=power, u=upper: LineCost(x, power=p).dense()[u], x)
        (by_x,) = torch.autograd.grad(LineCost(x, power=power).dense().sum(), x)
        assert torch.isfinite(by_x).all()


three = LineCost(torch.arange(3.0))
test_bad_input = raising(
    (lambda: DenseCost(torch.tensor([[0.0, -0.25]])), r"holds -0.25 at index \(0, 1\).*clamp rounding"),
    (lambda: CosineCost(torch.tensor([[1.0], [torch.inf], [torch.nan]])), "embedding row 1 holds"),
    (lambda: three.rows(torch.tensor([-100])), r"index\[0\] is -100.*drop ignored labels"),
    (lambda: as_cost(np.eye(2)), TypeError, r"cost is a ndarray, .*torch.as_tensor\(cost\)"),  # type: ignore[arg-type]
    (lambda: three.softmin(torch.ones(3), torch.tensor([0.0, torch.nan])), "epsilon holds 1 NaN"),
)
