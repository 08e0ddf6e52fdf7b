"""Costs between clouds against loops in float64: few dimensions and many, coincident points, far from the origin."""

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from otloss import cloud_loss, emd, lower_bound, sinkhorn
from otloss.costs import DenseCost, PointCost, costs_within
from tests.errors import raising
from tests.otloss.draws import normal
from tests.otloss.gradient_cases import quartic
from tests.otloss.operations import Operations
from tests.otloss.oracles import check_questions

METRICS = ["sqeuclidean", "euclidean", "l1", "cosine"]
EVERY: list[Any] = [*METRICS, quartic]


def pair_cost(a: list[float], b: list[float], metric: str) -> float:
    if metric == "cosine":
        lengths = math.hypot(*a) * math.hypot(*b)
        if lengths == 0:
            return float(any(a) or any(b))
        return 1 - sum(s * t for s, t in zip(a, b, strict=True)) / lengths
    apart = [abs(s - t) for s, t in zip(a, b, strict=True)]
    return {"sqeuclidean": sum(s * s for s in apart), "euclidean": math.hypot(*apart), "l1": sum(apart)}[metric]


def loop(x: Tensor, y: Tensor, metric: str) -> Tensor:
    return torch.tensor([[pair_cost(a, b, metric) for b in y.tolist()] for a in x.tolist()], dtype=torch.float64)


def clouds(n: int = 6, m: int = 5, d: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(size, d, generator=generator, dtype=torch.float64).to(dtype) for size in (n, m))
    y[1] = x[2]
    return x, y


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 20), st.booleans(), st.sampled_from(METRICS), st.data())
def test_costs_are_the_definition(n: int, m: int, d: int, tied: bool, metric: str, data: st.DataObject) -> None:
    entry = st.integers(-2, 2).map(float) if tied else st.floats(-3, 3).map(lambda v: round(v, 6))
    drawn = [data.draw(st.lists(entry, min_size=k * d, max_size=k * d)) for k in (n, m)]
    x, y = (torch.tensor(numbers, dtype=torch.float64).reshape(-1, d) for numbers in drawn)
    cost = PointCost(x, y, metric=metric)
    check_questions(cost, loop(x, y, metric))
    for own in (PointCost(x, metric=metric), *costs_within(cost)):
        assert own.dense().diagonal().abs().max() == 0
        assert own.diagonal().abs().max() == 0
        assert own.T is own
        torch.testing.assert_close(own.apply(torch.ones(own.shape[0]).double()), own.dense().sum(-1))


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean"])
def test_the_bound_of_the_costs_is_near_them_with_many_axes(metric: str) -> None:
    x, y = normal(2, 1, 30, 500), 3 + normal(4, 20, 500, seed=1)
    cost = PointCost(x, y, metric=metric)
    largest = cost.dense().amax((-2, -1))
    assert (cost.largest() >= largest).all()
    assert (cost.largest() <= 2 * largest).all()  # a box has 20 times as much, or 5 times as a distance


@pytest.mark.parametrize("metric", EVERY)
def test_a_cloud_per_problem(metric: str) -> None:
    x, y, v = normal(2, 1, 6, 3), normal(4, 5, 3, seed=1), normal(4, 5, seed=2)
    cost = PointCost(x, y, metric=metric)
    assert (cost.shape, cost.batch_shape, cost.dense().shape) == ((6, 5), (2, 4), (2, 4, 6, 5))
    for i, j in itertools.product(range(2), range(4)):
        one = PointCost(x[i, 0], y[j], metric=metric)
        torch.testing.assert_close(cost.dense()[i, j], one.dense())
        torch.testing.assert_close(cost.apply(v)[i, j], one.apply(v[j]))
        torch.testing.assert_close(cost.largest().expand(2, 4)[i, j], one.largest())
    assert cost.T.batch_shape == (2, 4)
    assert [own.batch_shape for own in costs_within(cost)] == [(2, 1), (4,)]
    assert metric == "cosine" or all(own.x is own.y for own in costs_within(cost))
    square = PointCost(x[..., :5, :], y, metric=metric)
    torch.testing.assert_close(square.diagonal(), square.dense().diagonal(dim1=-2, dim2=-1))
    with pytest.raises(ValueError, match=r"batch axes \(2, 4\) are ambiguous"):
        cost.rows(torch.tensor([0]))


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


@pytest.mark.parametrize("metric", EVERY)
def test_gradient_of_every_question(metric: str) -> None:
    x, y = (t.requires_grad_() for t in (clouds()[0], clouds()[1] + 0.1))
    v = normal(2, 5, seed=1)
    questions = [lambda cost: cost.rows(torch.tensor([4, 0])), lambda cost: cost.apply(v)]
    for question in (*questions, lambda cost: cost.dense(), lambda cost: cost.softmin(v, 0.3)):
        ask = lambda x, y, question=question: question(PointCost(x, y, metric=metric))  # noqa: E731
        assert torch.autograd.gradcheck(ask, (x, y))
        if metric in ("sqeuclidean", quartic):
            assert torch.autograd.gradgradcheck(ask, (x, y))
    assert torch.autograd.gradcheck(lambda x, y: PointCost(x[:5], y, metric=metric).diagonal(), (x, y))
    assert torch.autograd.gradcheck(lambda y: PointCost(y, metric=metric).apply(v), y)


@pytest.mark.parametrize("metric", METRICS[:3])
def test_far_from_the_origin_in_float32(metric: str) -> None:
    x, y = ((t + 1e4).requires_grad_() for t in clouds(40, 30, 3, torch.float32))
    wide = [t.detach().double().requires_grad_() for t in (x, y)]
    v = torch.rand(30)
    near, exact = PointCost(x, y, metric=metric), PointCost(*wide, metric=metric)
    torch.testing.assert_close(near.dense().double(), exact.dense(), rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(near.apply(v).double(), exact.apply(v), rtol=1e-5, atol=0)
    for got, right in zip(*(torch.autograd.grad(cost.softmin(v, 0.2).sum(), leaves)
                            for cost, leaves in ((near, (x, y)), (exact, wide))), strict=True):  # fmt: skip
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-4)


def test_metrics_of_the_user_directed_and_with_parameters(request: pytest.FixtureRequest) -> None:
    x, y = clouds()

    def directed(x: Tensor, y: Tensor) -> Tensor:
        return (x[:, None, 0] - y[None, :, 0]).relu()

    cost, expected = PointCost(x, y, metric=directed), directed(x, y)
    for actual in (cost.dense(), cost.T.dense().T, cost.T.T.dense()):
        torch.testing.assert_close(actual, expected)
    assert cost.largest() == expected.max()
    torch.testing.assert_close(costs_within(cost)[1].dense(), directed(y, y))
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    cost = PointCost(x, y, metric=lambda x, y: weight * quartic(x, y))
    (whole,) = torch.autograd.grad(cost.softmin(torch.zeros(5), 0.3).sum(), weight)
    request.getfixturevalue("small_blocks")
    (in_blocks,) = torch.autograd.grad(cost.softmin(torch.zeros(5), 0.3).sum(), weight)
    assert in_blocks.item() == pytest.approx(whole.item())
    assert whole > 0
    with pytest.raises(ValueError, match="the metric has parameters of its own"):
        cost.parameters()


def test_a_function_with_parameters_in_float32_is_called_in_float32() -> None:
    """Solvers widen points where Newton's method ends a slow search; the function's own tensors stay as they are."""
    torch.manual_seed(1)
    x, y, frozen = 5 * torch.randn(60, 3), 5 * torch.randn(50, 3) + 1, torch.nn.Linear(3, 3).requires_grad_(False)

    def metric(one: Tensor, other: Tensor) -> Tensor:
        return torch.cdist(frozen(one), frozen(other), compute_mode="donot_use_mm_for_euclid_dist").square()

    moved = frozen(x), frozen(y)
    for epsilon in (0.01, 1.0):
        expected = cloud_loss(*moved, epsilon=epsilon)
        actual = cloud_loss(x, y, metric=metric, epsilon=epsilon)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert PointCost(x + 100, metric=metric).is_symmetric()


def test_what_a_cost_keeps_of_its_points_does_not_grow() -> None:
    cost, sizes = PointCost(torch.rand(1600, 2), torch.rand(1600, 2)), []
    for _ in range(8):
        emd(None, None, cost)
        sizes.append(len(pickle.dumps(cost)))
    assert sizes[-1] == sizes[-3]


def test_no_matrix_is_formed() -> None:
    x, y = torch.randn(30_000, 2).requires_grad_(), torch.randn(2_000, 2)
    cost, zero = PointCost(x, y), torch.zeros(30_000)
    with Operations() as ran:
        cost.apply(torch.ones(2_000)).sum().backward()
        cost.largest()
        with torch.no_grad():
            f = cost.softmin(zero[:2_000], 0.1)
        cost.plan_gradients(f, zero[:2_000], zero, zero[:2_000], epsilon=0.1, upstream=torch.tensor(1.0))
    assert ran.largest < 10 * x.numel()


pairs, wide = torch.zeros(3, 2), torch.tensor(1.0, requires_grad=True)
test_bad_input = raising(
    (lambda: PointCost(torch.ones(3)), r"x has shape \(3,\).*pass x\[:, None\], or use LineCost"),
    (lambda: PointCost(pairs, torch.ones(3, 4)), "x has 2 coordinates on cpu, y 4"),
    (lambda: PointCost(pairs, metric=lambda x, y: x @ y.mT - 1).dense(), "costs from -1.0 to -1.0"),
    (lambda: PointCost(pairs).softmin(torch.ones(3), wide), "epsilon requires a gradient"),
    (lambda: costs_within(DenseCost(torch.tensor([[0.0, 1.0], [2.0, 0.0]]))), "cost_p= and cost_q="),
)


def cloud(kind: str, seed: int, *, n: int = 90, d: int = 300) -> Tensor:
    """In float64, of numbers that float32 holds."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(2, n, d, generator=generator)[1]
    if kind == "far from the origin":
        points = points + 1e4
    if kind == "one tight cluster":
        points = 3 + 1e-4 * points
    if kind == "two tight clusters":
        points = 1e-3 * points + (torch.arange(n) % 2).unsqueeze(-1)
    if kind == "some points near":
        points[10:20] = 1.0 + 1e-3 * points[10:20]
        points[20] = 1.0
    return points.double()


def exact_squares(x: Tensor, y: Tensor) -> np.ndarray:
    x, y = (t.numpy().astype(np.longdouble) for t in (x, y))
    return ((x[..., :, None, :] - y[..., None, :, :]) ** 2).sum(-1)


CLOUDS = ["apart", "far from the origin", "one tight cluster", "two tight clusters", "some points near"]


@pytest.mark.parametrize("kind", CLOUDS)
def test_errors_are_those_of_differences(kind: str) -> None:
    x, y = cloud(kind, 0), cloud(kind, 1)
    y[7] = x[3]
    for first, second in ((x, y), (x, x), (torch.stack([x, y]), torch.stack([y, x]))):
        expected = exact_squares(first, second)
        for dtype, tolerance in ((torch.float32, 1.3e-6), (torch.float64, 2e-14)):
            actual = PointCost(first.to(dtype), second.to(dtype)).dense().numpy()
            assert (actual[expected == 0] == 0).all()
            assert (abs(actual - expected) <= tolerance * expected).all()
            roots = PointCost(first.to(dtype), second.to(dtype), metric="euclidean").dense().numpy()
            assert (abs(roots - np.sqrt(expected)) <= tolerance * np.sqrt(expected)).all()


@pytest.mark.parametrize("batch", [(), (3,)])
def test_blocks_of_rows_and_of_problems_make_the_whole(batch: tuple[int, ...], request: Any) -> None:
    x = torch.stack([cloud("apart", seed) for seed in range(3)]).float().requires_grad_()
    y = cloud("some points near", 3).float().expand(*batch, 90, 300)
    p, q = (torch.rand(3, 90, generator=torch.Generator().manual_seed(seed)).softmax(-1) for seed in (0, 1))

    def results() -> tuple[torch.Tensor, ...]:
        cost = PointCost(x, y, metric="euclidean")
        matrix, bound = cost.dense(), lower_bound(p, q, cost)
        return matrix, bound, *torch.autograd.grad(matrix.sqrt().sum(), x), *torch.autograd.grad(bound.sum(), x)

    whole = results()
    request.getfixturevalue("small_blocks")
    torch.testing.assert_close(results(), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", CLOUDS)
def test_gradients_of_float32_distances(kind: str) -> None:
    x, y = cloud(kind, 0), cloud(kind, 1)
    y[7] = x[3]
    upstream = torch.rand(90, 90, generator=torch.Generator().manual_seed(5), dtype=torch.float64) - 0.5
    actual = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype).requires_grad_() for t in (x, y)]
        actual.append(torch.autograd.grad(PointCost(*leaves, metric="euclidean").dense(), leaves, upstream.to(dtype)))
    for narrow, wide in zip(*actual, strict=True):
        assert wide.abs().max() > 0.1
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-5, atol=1e-5)


def test_gradients_do_not_depend_on_the_other_problems_of_a_batch() -> None:
    """Pulls between near points far from the centre cancel in float32, also beside a problem of large pulls."""
    x, y = cloud("apart", 0, d=8), cloud("apart", 1, d=8)
    far = 1e4 * (torch.arange(90) % 2).unsqueeze(-1)
    x, y = (torch.stack([t + far, 1e6 * t]).float().requires_grad_() for t in (x, y))
    together = torch.autograd.grad(PointCost(x, y).dense().diagonal(0, -2, -1).sum(), x)[0]
    torch.testing.assert_close(together, 2 * (x - y).detach(), rtol=1e-5, atol=1e-5)


def test_points_at_the_origin_cost_nothing_to_each_other() -> None:
    """Whether both clouds are one tensor or not: a cost is a function of its two points."""
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 2.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    expected = torch.tensor([[0, 1, 0.2, 1], [1, 0, 1, 0], [0.2, 1, 0, 1], [1, 0, 1, 0]], dtype=torch.float64)
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    for cost in (PointCost(x, metric="cosine"), PointCost(x, x.detach().clone(), metric="cosine")):
        check_questions(cost, expected)
        exact, bound = (f(p, p.flip(0), cost) for f in (emd, lower_bound))
        torch.testing.assert_close(exact, torch.tensor(0.22, dtype=torch.float64))
        assert bound <= exact
        assert not torch.autograd.grad(exact, x)[0][1::2].any()
    divergence = cloud_loss(x, x.detach().clone(), metric="cosine", epsilon=0.1)
    torch.testing.assert_close(divergence, torch.zeros_like(divergence), atol=1e-12, rtol=0)
    assert PointCost(x[::2], metric="cosine").x.shape == (2, 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own rules use torch.jit
@pytest.mark.parametrize("metric", METRICS)
def test_second_derivatives_where_points_coincide_or_lie_at_the_origin(metric: str) -> None:
    """Those of points beside them, and no NaN, by each way of torch."""
    x, y = clouds(4, 3, 2)
    y[0], x[1], y[1] = x[0], 0, 0

    def value(x: Tensor) -> Tensor:
        return sinkhorn(None, None, PointCost(x, y, metric=metric), epsilon=0.3, grad="implicit")

    expected = torch.autograd.functional.hessian(value, x)
    for ahead, behind in itertools.product((torch.func.jacrev, torch.func.jacfwd), repeat=2):
        torch.testing.assert_close(ahead(behind(value))(x), expected)
    step = 1e-5 * torch.randn(4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    step[:2] = 0
    gradients = [torch.func.grad(value)(x + sign * step) for sign in (1, -1)]
    change = torch.einsum("ijkl,kl->ij", expected, 2 * step)
    torch.testing.assert_close(change, gradients[0] - gradients[1], rtol=1e-5, atol=1e-13)
