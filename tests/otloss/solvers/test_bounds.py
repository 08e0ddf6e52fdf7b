"""lower <= exact <= upper, degenerate cases included; gradients, precision, memory, messages."""

import numpy as np
import torch
from hypothesis import given
from torch import Tensor

from otloss import emd, lower_bound, upper_bound
from otloss.costs import CosineCost, Cost, DenseCost, GridCost, LineCost, PointCost
from tests.errors import raising
from tests.otloss.draws import draw, weights
from tests.otloss.gradient_cases import quartic
from tests.otloss.oracles import as_double
from tests.otloss.strategies import problems, square_problems

SquareProblem = tuple[np.ndarray, np.ndarray, np.ndarray]
COUPLINGS = ("independent", "residual", "best")


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
    independent, residual, best = (upper_bound(p, q, cost, coupling=coupling) for coupling in COUPLINGS)
    assert (lower_bound(p, q, cost) <= exact + slack).all()
    assert (exact <= torch.minimum(independent, residual) + slack).all()
    assert torch.equal(best, torch.minimum(independent, residual))
    if metric:
        assert (residual <= independent + slack).all()


@given(square_problems())
def test_sandwich_on_degenerate_problems(problem: SquareProblem) -> None:
    p, q, points = map(as_double, problem)
    for name, cost in square_costs(points).items():
        check_sandwich(3 * p, 3 * q, cost, metric=name in METRIC_COSTS)


@given(problems())
def test_sandwich_on_rectangular_costs(problem: SquareProblem) -> None:
    p, q, matrix = map(as_double, problem)
    exact, slack = emd(p, q, matrix), 1e-9
    assert lower_bound(p, q, matrix) - slack <= exact <= upper_bound(p, q, matrix) + slack
    if matrix.shape[0] == matrix.shape[1]:  # costs of staying are counted
        assert exact <= upper_bound(p, q, matrix, coupling="residual") + slack


def test_bounds_are_exact_where_the_plan_is_unique() -> None:
    q, matrix = weights(7), draw(7, 7)
    for cost in (CosineCost(matrix[:, :3]), LineCost(matrix[:, 0]), DenseCost(matrix)):
        for target, one_hot in enumerate(torch.eye(7, dtype=torch.float64)):
            expected = cost.dense()[target] @ q
            for coupling in COUPLINGS if isinstance(cost, LineCost) else ("independent",):
                torch.testing.assert_close(upper_bound(one_hot, q, cost, coupling=coupling), expected)
            if isinstance(cost, DenseCost):
                torch.testing.assert_close(lower_bound(one_hot, q, cost), expected)
            other = torch.eye(7, dtype=torch.float64)[2]
            torch.testing.assert_close(lower_bound(one_hot, other, cost), cost.dense()[target, 2])
    # Cheap cells in columns and rows without mass do not count.
    cheap = torch.tensor([[0.0, 5.0, 6.0], [0.0, 7.0, 9.0], [0.0, 0.0, 0.0]])
    value = lower_bound(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.5, 0.5]), cheap)
    assert value.item() == 6.0  # 0.5 * 5 + 0.5 * 7, against 0.5 * 5 + 0.5 * 6


def test_relaxed_bounds_equal_the_loop_over_pairs() -> None:
    (p, q), (x, y) = weights(2, 6), draw(2, 6, 2)
    p[2], q[0], q[3] = 0, 0, 0
    p, q = p / p.sum(), q / q.sum()
    for cost in (PointCost(x, y, metric=quartic), LineCost(x[:, 0], power=0.5), GridCost((2, 3), power=0.5)):
        matrix = cost.to(torch.float64).dense()
        there = sum(p[i] * min(matrix[i, j] for j in range(6) if q[j] > 0) for i in range(6))
        back = sum(q[j] * min(matrix[i, j] for i in range(6) if p[i] > 0) for j in range(6))
        torch.testing.assert_close(lower_bound(p, q, cost), torch.maximum(there, back), rtol=1e-6, atol=1e-9)


def test_rounding_below_zero_keeps_the_gradient() -> None:
    cost = CosineCost(torch.randn(30, 7, generator=torch.Generator().manual_seed(0)))
    p, q = torch.eye(30).requires_grad_(), torch.eye(30)
    value = upper_bound(p, q, cost, coupling="independent")
    assert ((value >= 0) & (value < 1e-6)).all()
    expected = cost.dense() - cost.dense().mean(-1, keepdim=True)
    torch.testing.assert_close(torch.autograd.grad(value.sum(), p)[0], expected, atol=1e-6, rtol=0)


def test_lower_bounds_of_points_and_grids_see_the_distance_of_the_means() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 50 + torch.randn(2, 1, 7, 3, generator=generator, dtype=torch.float64)
    y = 51 + torch.randn(3, 5, 3, generator=generator, dtype=torch.float64)
    p, q = (3 * torch.rand(*k, generator=generator, dtype=torch.float64).softmax(-1) for k in ((2, 1, 7), (3, 5)))
    apart = ((p.unsqueeze(-1) * x).sum(-2) - (q.unsqueeze(-1) * y).sum(-2)) / 3
    by_means = {"sqeuclidean": apart.square().sum(-1), "euclidean": apart.norm(dim=-1), "l1": apart.abs().sum(-1)}
    for metric in ("sqeuclidean", "euclidean", "l1", "cosine"):
        bound, exact = (f(p, q, PointCost(x, y, metric=metric)) for f in (lower_bound, emd))
        assert (3 * by_means.get(metric, 0.0) - 1e-9 <= bound).all()
        assert (bound <= exact + 1e-9).all()
        if metric == "sqeuclidean":
            torch.testing.assert_close(bound, 3 * by_means[metric])
    p, q = torch.rand(2, 20, 12, generator=generator, dtype=torch.float64).softmax(-1) * 3
    where = torch.cartesian_prod(torch.arange(3.0), 0.5 * torch.arange(4.0)).double()
    for power in (0.7, 1, 1.5, 2):
        cost = GridCost((3, 4), power=power, spacing=(1.0, 0.5)).to(torch.float64)
        bound = lower_bound(p, q, cost)
        assert (bound <= emd(p, q, cost) + 1e-9).all()
        if power >= 1:
            assert (bound >= 3 * (((p - q) @ where / 3).abs() ** power).sum(-1) - 1e-9).all()


def test_float32_bounds_within_a_far_cluster() -> None:
    """Mass moves near its place, 1e4 from the centre, where squares have roundings as large as its costs."""
    far = 1e4 * (torch.arange(60) >= 30).unsqueeze(1)
    x, p = (draw(60, 40, seed=0) + far).float().requires_grad_(), weights(60, seed=1).float()
    q = torch.cat([p[:10].flip(0), p[10:]])
    of_points, of_matrix = (upper_bound(p, q, cost) for cost in (PointCost(x), PointCost(x).dense()))
    torch.testing.assert_close(of_points, of_matrix, rtol=1e-5, atol=0)
    gradients = [torch.autograd.grad(value, x)[0] for value in (of_points, of_matrix)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5 * float(gradients[1].abs().max()))
    assert of_points >= emd(p, q, PointCost(x))


half = torch.tensor([0.5, 0.5])
test_bad_input = raising(
    (upper_bound, (half, torch.ones(1), torch.ones(2, 1)), {"coupling": "residual"}, r"shape \(2, 1\).*same bins"),
    (lower_bound, (half, half, LineCost(torch.arange(3.0))), {}, r"cost has shape \(3, 3\)"),
    (lower_bound, (half, half * 2, torch.eye(2)), {}, "different masses: 1 and 2"),
    call=lambda function, arguments, options: function(*arguments, **options),
)


def test_lower_bounds_of_near_equal_histograms_move_no_rounding() -> None:
    """Masses of float32 that differ by rounding would move along the mean direction, which the histograms share."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10_000, 3, generator=generator) + torch.tensor([3.0, 0.0, 0.0])
    p = torch.rand(10_000, generator=generator)
    q = p * (1 + 1e-4 * torch.randn(10_000, generator=generator))
    p, q = p / p.sum(), q / q.sum()
    wide_p, wide_q = p.double() / p.double().sum(), q.double() / q.double().sum()
    costs: list[Cost] = [CosineCost(x), PointCost(x, metric="cosine"), PointCost(x), LineCost(x[:, 0], power=2)]
    for cost in [*costs, GridCost((100, 100), power=2)]:
        expected = lower_bound(wide_p, wide_q, cost.to(torch.float64))
        torch.testing.assert_close(lower_bound(p, q, cost).double(), expected, rtol=1e-5, atol=0.0)
