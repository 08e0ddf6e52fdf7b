"""lower <= exact <= upper on thousands of cases, degenerate ones included; gradients, precision, memory, messages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from otloss import emd, lower_bound, upper_bound
from otloss.costs import CosineCost, Cost, DenseCost, GridCost, LineCost, PointCost
from tests.otloss.oracles import as_double, central_gradients
from tests.otloss.strategies import problems, square_problems

SquareProblem = tuple[np.ndarray, np.ndarray, np.ndarray]


def square_costs(points: Tensor) -> dict[str, Cost]:
    return {
        "euclidean": DenseCost(torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")),
        "squared": DenseCost((points.unsqueeze(0) - points.unsqueeze(1)).square().sum(-1)),
        "cosine": CosineCost(points),
        "line": LineCost(points[:, 0]),
        "root": LineCost(points[:, 0], power=0.5),
        **{
            f"point {metric}": PointCost(points, metric=metric)
            for metric in ("sqeuclidean", "euclidean", "l1", "cosine")
        },
        **{f"grid {power}": GridCost((len(points),), power=power).to(points.dtype) for power in (0.5, 1, 1.5, 2)},
    }


METRIC_COSTS = ("euclidean", "line", "root", "point euclidean", "point l1", "grid 0.5", "grid 1")


def check_sandwich(p: Tensor, q: Tensor, cost: Cost, *, metric: bool) -> None:
    exact = emd(p, q, cost)
    slack = 1e-9 * (1 + exact)
    independent, residual, best = (
        upper_bound(p, q, cost, coupling=coupling) for coupling in ("independent", "residual", "best")
    )
    assert (lower_bound(p, q, cost) <= exact + slack).all()
    assert (exact <= torch.minimum(independent, residual) + slack).all()
    assert torch.equal(best, torch.minimum(independent, residual))
    if metric:
        assert (residual <= independent + slack).all()


@settings(max_examples=100, deadline=None)
@given(square_problems())
def test_sandwich_on_degenerate_problems(problem: SquareProblem) -> None:
    p, q, points = map(as_double, problem)
    for name, cost in square_costs(points).items():
        check_sandwich(p, q, cost, metric=name in METRIC_COSTS)


@settings(max_examples=150, deadline=None)
@given(problems())
def test_sandwich_on_rectangular_costs(problem: SquareProblem) -> None:
    p, q, matrix = map(as_double, problem)
    exact, slack = emd(p, q, matrix), 1e-9
    assert lower_bound(p, q, matrix) <= exact + slack
    assert exact <= upper_bound(p, q, matrix) + slack
    if matrix.shape[0] == matrix.shape[1]:  # costs of staying are counted
        assert exact <= upper_bound(p, q, matrix, coupling="residual") + slack


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 5.0])
def test_sandwich_on_thousands_of_random_problems(sharpness: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for size, dimension in ((2, 1), (5, 2), (12, 4), (20, 30)):
        points = torch.randn(size, dimension, generator=generator, dtype=torch.float64)
        scores = sharpness * torch.randn(2, 60, size, generator=generator, dtype=torch.float64)
        p, q = scores.softmax(-1)
        mass = torch.rand(60, 1, generator=generator, dtype=torch.float64) * 5
        for name, cost in square_costs(points).items():
            check_sandwich(p * mass, q * mass, cost, metric=name in METRIC_COSTS)


def test_cosine_cost_can_break_the_order_of_the_couplings() -> None:
    # 1 - cos grows with the square of a small angle. Keeping bin 1 in place leaves one step of 0.8, at 0.303 per unit;
    # the product coupling goes by way of bin 1, in two steps of 0.4 at 0.079 each.
    angles = torch.tensor([0.0, 0.4, 0.8], dtype=torch.float64)
    cost = CosineCost(torch.stack([angles.cos(), angles.sin()], dim=-1))
    p, q = torch.tensor([0.1, 0.9, 0.0], dtype=torch.float64), torch.tensor([0.0, 0.9, 0.1], dtype=torch.float64)
    independent, residual = (upper_bound(p, q, cost, coupling=c).item() for c in ("independent", "residual"))
    assert residual == pytest.approx(0.1 * (1 - np.cos(0.8)))
    assert independent == pytest.approx(0.18 * (1 - np.cos(0.4)) + 0.01 * (1 - np.cos(0.8)))
    assert independent < residual
    assert emd(p, q, cost).item() == pytest.approx(0.2 * (1 - np.cos(0.4)))
    assert upper_bound(p, q, cost).item() == independent


@settings(max_examples=200, deadline=None)
@given(square_problems(), st.integers(-10, 0))
def test_residual_is_zero_iff_equal(problem: SquareProblem, exponent: int) -> None:
    p, q, _ = map(as_double, problem)
    cost = LineCost(torch.arange(p.numel(), dtype=torch.float64))
    assert upper_bound(p, p.clone(), cost, coupling="residual") == 0
    assert lower_bound(p, p.clone(), CosineCost(torch.eye(p.numel(), dtype=torch.float64))) == 0
    near = p + (q - p) * 10.0**exponent
    # Equal masses are made by rescaling, which may remove a difference of one rounding.
    if ((p - near).abs() > 4 * torch.finfo(torch.float64).eps * torch.maximum(p, near)).any():
        assert upper_bound(p, near, cost, coupling="residual") > 0


def test_residual_sees_a_difference_whose_square_underflows() -> None:
    p = torch.tensor([1.0, 0.0, 1e-30])
    q = torch.tensor([1.0, 1e-30, 0.0])
    value = upper_bound(p, q, LineCost(torch.arange(3.0)), coupling="residual")
    assert value.item() == pytest.approx(1e-30, rel=1e-6, abs=0)


@pytest.mark.parametrize("coupling", ["independent", "residual", "best"])
def test_upper_bounds_are_exact_where_the_plan_is_unique(coupling: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.rand(7, generator=generator, dtype=torch.float64).softmax(-1)
    for cost in (
        CosineCost(torch.randn(7, 3, generator=generator, dtype=torch.float64)),
        LineCost(torch.rand(7).double()),
    ):
        for target in range(7):
            one_hot = torch.eye(7, dtype=torch.float64)[target]
            expected = cost.rows(torch.tensor([target]))[0] @ q
            torch.testing.assert_close(upper_bound(one_hot, q, cost, coupling=coupling), expected)
            torch.testing.assert_close(upper_bound(q, one_hot, cost, coupling=coupling), expected)


def test_lower_bounds_are_exact_between_points() -> None:
    points = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-2.0, 0.0], [0.0, 0.0], [3.0, 4.0]]).double()
    cost = CosineCost(points)
    for i, p in enumerate(torch.eye(5).double()):
        torch.testing.assert_close(lower_bound(p, torch.eye(5).double(), cost), cost.dense()[i])
    matrix = torch.rand(5, 4, generator=torch.Generator().manual_seed(0)).double()
    q = torch.tensor([0.0, 0.5, 0.2, 0.3], dtype=torch.float64)
    for i, p in enumerate(torch.eye(5).double()):
        torch.testing.assert_close(lower_bound(p, q, matrix), matrix[i] @ q)
    # Two-sided zeros: the cheap cells lie in columns and rows without mass, and must not count.
    cheap = torch.tensor([[0.0, 5.0, 6.0], [0.0, 7.0, 9.0], [0.0, 0.0, 0.0]])
    value = lower_bound(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.5, 0.5]), cheap)
    assert value.item() == 6.0  # 0.5 * 5 + 0.5 * 7, against 0.5 * 5 + 0.5 * 6


POINT_KINDS = ["sqeuclidean", "euclidean", "l1", "point cosine"]


def cost_of(kind: str, data: Tensor) -> Cost:
    if kind in POINT_KINDS:
        return PointCost(data, metric=kind.removeprefix("point "))
    return {"cosine": CosineCost, "line": LineCost, "matrix": DenseCost}[kind](data)


def gradient_cases() -> list[tuple[str, str]]:
    kinds = ["cosine", "line", "matrix", *POINT_KINDS, "two clouds"]
    return [(kind, which) for kind in kinds for which in ("independent", "residual", "best", "lower")]


@pytest.mark.parametrize(("kind", "which"), gradient_cases())
def test_gradients_match_finite_differences(kind: str, which: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(3):
        p, q = 2 * rng.dirichlet(np.ones(6)), 2 * rng.dirichlet(np.ones(6))
        data = {"line": rng.normal(size=6), "matrix": rng.random((6, 6))}.get(kind, rng.normal(size=(6, 3)))
        if "cosine" in kind:
            data[2] = 0
        other = as_double(data).flip(0) + 0.3

        def value(p: Tensor, q: Tensor, data: Tensor) -> Tensor:
            cost = PointCost(data, other, metric="euclidean") if kind == "two clouds" else cost_of(kind, data)  # noqa: B023
            return lower_bound(p, q, cost) if which == "lower" else upper_bound(p, q, cost, coupling=which)

        leaves = [as_double(a, grad=True) for a in (p, q, data)]
        by_p, by_q, by_data = (g.numpy() for g in torch.autograd.grad(value(*leaves), leaves))
        # Mass leaves bin 0 for bin i: the slope within the simplex, with its size.
        directions = np.eye(6) - np.eye(6)[0]
        for i in range(1, 6):
            d = 1e-6 * directions[i]
            ahead, behind = ((p + s * d, q, data) for s in (1, -1))
            slope = (value(*map(as_double, ahead)) - value(*map(as_double, behind))).item() / 2e-6
            assert by_p @ directions[i] == pytest.approx(slope, abs=1e-7)
            ahead, behind = ((p, q + s * d, data) for s in (1, -1))
            slope = (value(*map(as_double, ahead)) - value(*map(as_double, behind))).item() / 2e-6
            assert by_q @ directions[i] == pytest.approx(slope, abs=1e-7)
        slopes = central_gradients(lambda a: value(as_double(p), as_double(q), as_double(a)).item(), data, 1e-6)  # noqa: B023
        moving = slice(None) if "cosine" not in kind else [0, 1, 3, 4, 5]  # a zero row has no direction to move
        np.testing.assert_allclose(by_data[moving], slopes[moving], atol=1e-7)
        assert abs(by_p.sum()) < 1e-12
        assert abs(by_q.sum()) < 1e-12


@pytest.mark.parametrize("weights", [[0.25, 0.75, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
def test_gradients_at_equality_and_without_mass_are_finite(weights: list[float]) -> None:
    for cost in (
        CosineCost(torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])),
        LineCost(torch.arange(3.0)),
        torch.rand(3, 3),
    ):
        p, q = (torch.tensor(weights, requires_grad=True) for _ in range(2))
        for value in (
            *(upper_bound(p, q, cost, coupling=c) for c in ("independent", "residual", "best")),
            lower_bound(p, q, cost),
        ):
            assert torch.isfinite(value)
            assert all(torch.isfinite(g).all() for g in torch.autograd.grad(value, [p, q]))


def test_rounding_below_zero_keeps_the_gradient() -> None:
    embedding = torch.randn(30, 7, generator=torch.Generator().manual_seed(0))
    cost = CosineCost(embedding)
    for i in range(30):
        p, q = torch.eye(30)[i].requires_grad_(), torch.eye(30)[i]
        value = upper_bound(p, q, cost, coupling="independent")
        assert 0 <= value < 1e-6
        (by_p,) = torch.autograd.grad(value, p)
        expected = cost.rows(torch.tensor([i]))[0]
        torch.testing.assert_close(by_p, expected - expected.mean(), atol=1e-6, rtol=0)


def test_batches_broadcast_equal_a_loop_and_permute() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(3, 1, 5, generator=generator, dtype=torch.float64).softmax(-1)
    q = torch.rand(4, 5, generator=generator, dtype=torch.float64).softmax(-1)
    own = torch.rand(3, 1, 5, 5, generator=generator, dtype=torch.float64)
    points = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    shuffle = torch.randperm(5, generator=generator)
    for function in (lower_bound, upper_bound, lambda *a: upper_bound(*a, coupling="independent")):
        for cost in (CosineCost(points), LineCost(points[:, 0]), own):
            batched = function(p, q, cost)
            assert batched.shape == (3, 4)
            single = own[2, 0] if cost is own else cost
            torch.testing.assert_close(batched[2, 3], function(p[2, 0], q[3], single))
        torch.testing.assert_close(
            function(p[..., shuffle], q[..., shuffle], CosineCost(points[shuffle])), function(p, q, CosineCost(points))
        )
        assert function(p[:0], q, own[:0]).shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (3 * torch.randn(2, 8, 100, generator=generator)).softmax(-1).to(dtype)
    matrix = torch.rand(100, 100, generator=generator).to(dtype)
    wide = [w.double() / w.double().sum(-1, keepdim=True) for w in (p, q)]
    for function in (lower_bound, upper_bound):
        value = function(p, q, matrix)
        assert value.dtype == dtype
        torch.testing.assert_close(
            value.double(), function(*wide, matrix.double()), rtol=4 * torch.finfo(dtype).eps + 1e-5, atol=0
        )
        assert function(p, q, CosineCost(matrix)).dtype == torch.float32  # a cost object answers in its own precision


@pytest.mark.parametrize("function", [lower_bound, upper_bound])
def test_cosine_bounds_never_form_the_matrix(function: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("formed V x V")

    monkeypatch.setattr(CosineCost, "rows", refuse)
    monkeypatch.setattr(CosineCost, "dense", refuse)
    p = torch.rand(2, 60_000).softmax(-1).requires_grad_()
    function(p, torch.rand(60_000).softmax(-1), CosineCost(torch.randn(60_000, 4))).sum().backward()  # type: ignore[operator]


half = torch.tensor([0.5, 0.5])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: upper_bound(half, half, torch.eye(2), coupling="exact"),
            ValueError,
            "coupling is 'exact', expected one of",
        ),
        (
            lambda: upper_bound(half, torch.ones(1), torch.ones(2, 1), coupling="residual"),
            ValueError,
            r"shape \(2, 1\).*same bins",
        ),
        (lambda: upper_bound(half, half, torch.ones(2, 3)), ValueError, r"cost has shape \(2, 3\), expected \(2, 2\)"),
        (lambda: lower_bound(half, half, LineCost(torch.arange(3.0))), ValueError, r"cost has shape \(3, 3\)"),
        (lambda: lower_bound(half, half * 2, torch.eye(2)), ValueError, "p and q hold different masses: 1 and 2"),
        (lambda: upper_bound(half.long(), half, torch.eye(2)), TypeError, "p has dtype torch.int64"),
        (lambda: upper_bound(half, half, torch.eye(2).long()), TypeError, "cost has dtype"),
        (lambda: upper_bound(half, half - 1, torch.eye(2)), ValueError, "q holds -0.5 in bin 0"),
        (lambda: upper_bound(half.expand(3, 2), half, torch.ones(4, 2, 2)), ValueError, r"cost \(4,\)"),
    ],
)
def test_bad_input(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()  # type: ignore[operator]


def test_squared_distances_on_the_line_have_the_centroid_bound() -> None:
    generator = torch.Generator().manual_seed(3)
    x = 1e3 + 5 * torch.rand(9, generator=generator, dtype=torch.float64)
    p, q = torch.rand(2, 50, 9, generator=generator, dtype=torch.float64).softmax(-1)
    bound, exact = lower_bound(p, q, LineCost(x, power=2)), emd(p, q, LineCost(x, power=2))
    torch.testing.assert_close(bound, ((p - q) @ x).square(), rtol=1e-6, atol=1e-12)
    assert (bound <= exact + 1e-12).all()
    shifted = torch.eye(9, dtype=torch.float64)
    torch.testing.assert_close(
        lower_bound(shifted[:1], shifted[4:5], LineCost(x, power=2)), (x[:1] - x[4]).square(), rtol=1e-9, atol=0
    )
