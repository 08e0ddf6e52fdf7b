"""Costs between clouds against loops over pairs in float64; gradient at coincident points and far from the origin."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from otloss.costs import CosineCost, DenseCost, GridCost, LineCost, PointCost, costs_within
from tests.errors import raising
from tests.otloss.operations import Operations
from tests.otloss.oracles import check_questions

METRICS = ["sqeuclidean", "euclidean", "l1", "cosine"]


def quartic(x: Tensor, y: Tensor) -> Tensor:
    return (x.unsqueeze(-2) - y.unsqueeze(-3)).pow(4).sum(-1)


def pair_cost(a: list[float], b: list[float], metric: str) -> float:
    if metric == "cosine":
        lengths = math.hypot(*a) * math.hypot(*b)
        return 1.0 if lengths == 0 else 1 - sum(s * t for s, t in zip(a, b, strict=True)) / lengths
    apart = [abs(s - t) for s, t in zip(a, b, strict=True)]
    return {"sqeuclidean": sum(s * s for s in apart), "euclidean": math.hypot(*apart), "l1": sum(apart)}[metric]


def loop(x: Tensor, y: Tensor, metric: str) -> Tensor:
    return torch.tensor([[pair_cost(a, b, metric) for b in y.tolist()] for a in x.tolist()], dtype=torch.float64)


def clouds(n: int = 6, m: int = 5, d: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(size, d, generator=generator, dtype=torch.float64).to(dtype) for size in (n, m))
    y[1] = x[2]
    return x, y


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 20), st.booleans(), st.sampled_from(METRICS), st.data())
def test_costs_are_the_definition(n: int, m: int, d: int, tied: bool, metric: str, data: st.DataObject) -> None:
    entry = st.integers(-2, 2).map(float) if tied else st.floats(-3, 3).map(lambda v: round(v, 6))
    x, y = (
        torch.tensor(data.draw(st.lists(entry, min_size=k * d, max_size=k * d)), dtype=torch.float64).reshape(k, d)
        for k in (n, m)
    )
    cost = PointCost(x, y, metric=metric)
    check_questions(cost, loop(x, y, metric))
    for own in (PointCost(x, metric=metric), *costs_within(cost)):
        assert own.dense().diagonal().abs().max() == 0
        assert own.diagonal().abs().max() == 0
        assert own.T is own
        torch.testing.assert_close(own.apply(torch.ones(own.shape[0]).double()), own.dense().sum(-1))


def every_metric() -> list[str | Callable[[Tensor, Tensor], Tensor]]:
    return [*METRICS, quartic]


@pytest.mark.parametrize("metric", every_metric())
def test_a_cloud_per_problem(metric: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 1, 6, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
    cost = PointCost(x, y, metric=metric)
    assert (cost.shape, cost.batch_shape, cost.dense().shape) == ((6, 5), (2, 4), (2, 4, 6, 5))
    v = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    for i in range(2):
        for j in range(4):
            one = PointCost(x[i, 0], y[j], metric=metric)
            torch.testing.assert_close(cost.dense()[i, j], one.dense())
            torch.testing.assert_close(cost.apply(v)[i, j], one.apply(v[j]))
            torch.testing.assert_close(cost.largest().expand(2, 4)[i, j], one.largest())
    assert cost.T.batch_shape == (2, 4)
    assert [own.batch_shape for own in costs_within(cost)] == [(2, 1), (4,)]
    square = PointCost(x[..., :5, :], y, metric=metric)
    torch.testing.assert_close(square.diagonal(), square.dense().diagonal(dim1=-2, dim2=-1))
    with pytest.raises(ValueError, match=r"batch axes \(2, 4\) are ambiguous"):
        cost.rows(torch.tensor([0]))
    assert PointCost(x[:0], y, metric=metric).softmin(v, 0.1).shape == (0, 4, 6)


@pytest.mark.parametrize("metric", every_metric())
def test_gradient_of_every_question(metric: str) -> None:
    x, y = clouds()
    y[1] += 0.1  # the gradient at a coincident pair has a test of its own
    index = torch.tensor([4, 0])
    square = y.repeat(2, 1)[:6] + 0.01
    with torch.no_grad():
        v = torch.randn(2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for question in (
        lambda x, y: PointCost(x, y, metric=metric).dense(),
        lambda x, y: PointCost(x, y, metric=metric).rows(index),
        lambda x, y: PointCost(x, y, metric=metric).apply(v),
        lambda x, y: PointCost(x, y, metric=metric).softmin(v, 0.3),
    ):
        leaves = (x.clone().requires_grad_(), y.clone().requires_grad_())
        assert torch.autograd.gradcheck(question, leaves)
        if metric in ("sqeuclidean", quartic):
            assert torch.autograd.gradgradcheck(question, leaves)
    leaves = (x.clone().requires_grad_(), square.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda x, y: PointCost(x, y, metric=metric).diagonal(), leaves)
    assert torch.autograd.gradcheck(lambda x: PointCost(x, metric=metric).apply(v.repeat(1, 2)[:, :6]), leaves[0])


@pytest.mark.parametrize("metric", METRICS)
def test_coincident_points_have_gradient(metric: str) -> None:
    """POT's euclidean distances give NaN here."""
    x = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]], requires_grad=True)
    for y in (None, x.detach().clone()):
        cost = PointCost(x, y, metric=metric)
        for value in (cost.dense(), cost.apply(torch.ones(3)), cost.softmin(torch.zeros(3), 0.1), cost.diagonal()):
            if value.requires_grad:
                (gradient,) = torch.autograd.grad(value.sum(), x, retain_graph=True)
                assert torch.isfinite(gradient).all()
        zero = torch.zeros(3)
        (gradient,) = cost.plan_gradients(zero, zero, zero, zero, epsilon=0.5, upstream=torch.tensor(1.0))
        assert torch.isfinite(gradient).all()
    alone = torch.tensor([[3.0, -1.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(PointCost(alone, alone.detach().clone(), metric=metric).dense().sum(), alone)
    assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("metric", METRICS[:3])
def test_far_from_the_origin_in_float32(metric: str) -> None:
    x, y = clouds(40, 30, 3, torch.float32)
    x, y = (x + 1e4).requires_grad_(), (y + 1e4).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (x, y)]
    v = torch.rand(30)
    near, exact = PointCost(x, y, metric=metric), PointCost(*wide, metric=metric)
    torch.testing.assert_close(near.dense().double(), exact.dense(), rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(near.apply(v).double(), exact.apply(v), rtol=1e-5, atol=0)
    actual = torch.autograd.grad(near.softmin(v, 0.2).sum(), [x, y])
    expected = torch.autograd.grad(exact.softmin(v, 0.2).sum(), wide)
    for got, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-4)


def test_a_metric_with_parameters(request: pytest.FixtureRequest) -> None:
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    x, y = clouds()
    cost = PointCost(x, y, metric=lambda x, y: weight * quartic(x, y))
    (gradient,) = torch.autograd.grad(cost.dense().sum(), weight)
    assert gradient > 0
    (whole,) = torch.autograd.grad(cost.softmin(torch.zeros(5), 0.3).sum(), weight)
    request.getfixturevalue("small_blocks")
    (in_blocks,) = torch.autograd.grad(cost.softmin(torch.zeros(5), 0.3).sum(), weight)
    assert in_blocks.item() == pytest.approx(whole.item())
    with pytest.raises(ValueError, match="the metric has parameters of its own"):
        cost.parameters()


def test_metrics_of_the_user() -> None:
    x, y = clouds()

    def directed(x: Tensor, y: Tensor) -> Tensor:
        return (x[:, None, 0] - y[None, :, 0]).relu()

    cost = PointCost(x, y, metric=directed)
    expected = (x[:, None, 0] - y[None, :, 0]).relu()
    torch.testing.assert_close(cost.dense(), expected)
    torch.testing.assert_close(cost.T.dense(), expected.T)
    torch.testing.assert_close(cost.T.T.dense(), expected)
    assert cost.largest() == expected.max()
    torch.testing.assert_close(costs_within(cost)[1].dense(), (y[:, None, 0] - y[None, :, 0]).relu())


def test_no_matrix_is_formed() -> None:
    x = torch.randn(30_000, 2).requires_grad_()
    y = torch.randn(2_000, 2)
    cost = PointCost(x, y)
    zero = torch.zeros(30_000)
    with Operations() as ran:
        cost.apply(torch.ones(2_000)).sum().backward()
        cost.largest()
        with torch.no_grad():
            f = cost.softmin(torch.zeros(2_000), 0.1)
        cost.plan_gradients(f, zero[:2_000], zero, zero[:2_000], epsilon=0.1, upstream=torch.tensor(1.0))
    assert ran.largest < 10 * x.numel()


pairs = torch.zeros(3, 2)


test_bad_input = raising(
    (lambda: PointCost(torch.ones(3)), ValueError, r"x has shape \(3,\).*pass x\[:, None\], or use LineCost"),
    (lambda: PointCost(pairs, torch.ones(3, 4)), ValueError, "x has 2 coordinates on cpu, y 4"),
    (lambda: PointCost(torch.ones(2, 3, 2), torch.ones(4, 3, 2)), ValueError, r"x \(2,\), y \(4,\)"),
    (lambda: PointCost(pairs, metric=lambda x, y: x).dense(), ValueError, r"gave costs of shape \(3, 2\)"),
    (lambda: PointCost(pairs, metric=lambda x, y: x @ y.mT - 1).dense(), ValueError, "costs from -1.0 to -1.0"),
    (lambda: PointCost(pairs).softmin(torch.ones(2, 3), torch.ones(4)), ValueError, r"potential \(2,\).*epsilon"),
    (
        lambda: PointCost(pairs).softmin(torch.ones(3), torch.tensor(1.0, requires_grad=True)),
        ValueError,
        "epsilon requires a gradient",
    ),
    (lambda: costs_within(DenseCost(torch.ones(2, 3))), ValueError, r"shape=\(2, 3\).*which is not square and"),
    (lambda: costs_within(DenseCost(torch.tensor([[0.0, 1.0], [2.0, 0.0]]))), ValueError, "cost_p= and cost_q="),
    (lambda: costs_within(DenseCost(torch.tensor([[3.0]]))), ValueError, "diagonal of zeros"),
)


def test_costs_within() -> None:
    matrix = DenseCost(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    for cost in (matrix, CosineCost(torch.eye(2)), LineCost(torch.arange(3.0)), GridCost((2, 2))):
        assert costs_within(cost) == (cost, cost)
    x, y = (t.requires_grad_() for t in clouds())
    among_p, among_q = costs_within(PointCost(x, y))
    assert among_p.parameters() == (x,)
    assert among_q.x is among_q.y is y
