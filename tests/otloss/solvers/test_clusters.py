"""Large clouds: pairs that are left out of soft minima, and exact transport, as by the dense solvers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from otloss import emd, sinkhorn, solve
from otloss.costs import PointCost
from otloss.costs.cost import softmin_in_torch
from otloss.costs.order import can_leave_out, grouped
from otloss.solvers.entropic import clusters
from otloss.solvers.exact import clouds as exact_clouds
from otloss.solvers.exact.clouds import solve_between_clouds
from otloss.solvers.exact.solution import solve_exactly
from otloss.solvers.options import Settings
from otloss.solvers.problem import pose
from tests.samples import sampled

F64 = torch.float64
N, M = 1600, 2700  # just above the size from which clusters are used


def cloud(kind: str) -> tuple[Tensor, Tensor]:
    axes = {"line": 1, "outlier in 3-D": 3}.get(kind, 2)
    generator = torch.Generator().manual_seed(3)
    rand = {"generator": generator, "dtype": torch.float64}
    x, y = torch.rand(N, axes, **rand), 0.2 + 0.7 * torch.rand(M, axes, **rand)
    if kind == "equal points":
        return x[torch.randint(30, (N,), generator=generator)], y[torch.randint(40, (M,), generator=generator)]
    if kind == "diagonal far from the origin":
        return x[:, :1] + 1000 + 0 * x, y[:, :1] + 1000.3 + 0 * y
    x[17] = 50.0 if kind == "outlier in 3-D" else x[17]
    return x, y


def _weights(count: int, generator: torch.Generator) -> Tensor:
    """Far from uniform, every ninth is zero."""
    w = torch.rand(count, generator=generator, dtype=torch.float64) ** 3
    w[::9] = 0.0
    return w / w.sum()


DIAGONAL = ("diagonal far from the origin", "sqeuclidean")
OTHERS = [("line", "l1"), ("equal points", "sqeuclidean"), ("outlier in 3-D", "euclidean")]


@pytest.mark.parametrize(("kind", "metric"), [DIAGONAL, *OTHERS])
def test_what_is_left_out_of_a_soft_minimum_is_a_rounding(kind: str, metric: str) -> None:
    # Potentials that solve nothing: rough, with bins that take no part, and with a gradient that moves all minima.
    points_x, points_y = (points[:1100] for points in cloud(kind))
    generator = torch.Generator().manual_seed(3)
    for dtype, rounding in ((torch.float32, 2e-6), (torch.float64, 1e-12)):
        x, y = points_x.to(dtype), points_y.to(dtype)
        assert can_leave_out(x, y)
        dense = PointCost(x.double(), y.double(), metric=metric).dense()
        for epsilon in (0.0, 1e-3, 0.1):
            potential = 3 * epsilon * torch.randn(len(y), generator=generator, dtype=torch.float64) + y.double().sum(-1)
            potential[::7] = -torch.inf
            got = PointCost(x, y, metric=metric).softmin(potential, epsilon)
            expected = softmin_in_torch(dense, potential, epsilon)
            error = float((got - expected).abs().max())
            assert error <= rounding * (epsilon + float(dense.max()) + float(potential.max().abs()) / 10), epsilon


CASES = [(*OTHERS[1], F64), (*OTHERS[0], torch.float32), (*OTHERS[2], F64)]


@pytest.mark.parametrize(("kind", "metric", "dtype"), sampled(2, CASES))
def test_value_and_gradients_equal_those_of_the_matrix(kind: str, metric: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = (_weights(N, generator), _weights(M, generator), *cloud(kind))
    answers = []
    for given, dense in ((inputs, True), ([t.to(dtype) for t in inputs], False)):
        p, q, x, y = leaves = [t.clone().requires_grad_() for t in given]
        cost = PointCost(x, y, metric=metric)
        value = sinkhorn(p, q, cost.dense() if dense else cost, epsilon=0.01 * math.sqrt(x.shape[-1]))
        answers.append((value.detach(), *torch.autograd.grad(value, leaves)))
    tolerance = 1e-8 if dtype == torch.float64 else 1e-4
    for name, theirs, mine in zip(("value", "p", "q", "x", "y"), *answers, strict=True):
        off = float((mine.double() - theirs).norm() / theirs.norm())
        assert off < tolerance * (1 if name == "value" else 100), (name, off)


SMALLEST = 400


@pytest.fixture
def without_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """From this size on the dense solver is left."""
    monkeypatch.setattr(exact_clouds, "CLOUD_LIMITS", exact_clouds.CloudLimits(min_pairs=SMALLEST**2))


def _clouds(n: int, m: int, axes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two clouds, and weights that are far from uniform; a seventh of p and a fifth of q is zero."""
    generator = torch.Generator().manual_seed(n + axes)
    x, y = (torch.rand(k, axes, generator=generator, dtype=torch.float64) for k in (n, m))
    p, q = (torch.rand(k, generator=generator, dtype=torch.float64) ** 2 for k in (n, m))
    p[::7], q[::5] = 0.0, 0.0
    return p / p.sum(), q / q.sum(), x, 0.8 * y + 0.3


def _cases() -> dict[str, tuple[Tensor | None, Tensor | None, PointCost]]:
    p, q, x, y = _clouds(500, 330, 3)
    _, _, line_x, line_y = _clouds(500, 330, 1)
    _, _, many, others = _clouds(400, 400, 12)
    grid = torch.cartesian_prod(torch.arange(20.0), torch.arange(20.0)).double()
    groups = torch.randn(330, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-9
    groups[::3] += 1.0
    return {
        "squares in 3-D": (p, q, PointCost(x, y)),
        "squares, uniform": (None, None, PointCost(x, y)),
        "lengths": (p, q, PointCost(x, y, metric="euclidean")),
        "l1 on a line": (p, q, PointCost(line_x, line_y, metric="l1")),
        "squares on a line": (p, q, PointCost(line_x, line_y)),
        "ties of a grid": (None, None, PointCost(grid, grid + 3.0, metric="l1")),
        "ties of a grid, squares": (None, None, PointCost(grid, grid[torch.randperm(400)] + 0.5)),
        "equal points": (p, q, PointCost(x[torch.arange(500) % 9], y[torch.arange(330) % 5])),
        "one point": (p, q, PointCost(x[:1].expand(500, 3), y)),
        "all points equal": (p, q, PointCost(x[:1].expand(500, 3), x[:1].expand(330, 3))),
        "two tiny groups": (p, q, PointCost(torch.cat([groups, groups[:170]]), groups)),
        "one cloud": (None, torch.roll(p, 1), PointCost(x)),
        "twelve dimensions": (None, None, PointCost(many, others)),
        "small": (p, q, PointCost(1e-6 * x, 1e-6 * y)),
        "large": (p, q, PointCost(1e6 * x, 1e6 * y, metric="euclidean")),
        "far from the origin": (p, q, PointCost(x + 1e4, y + 1e4)),
        "float32": (p.float(), q.float(), PointCost(x.float(), y.float())),
        "heavy tails": (p, q, PointCost((3 * x).sinh().sinh(), -(3 * y).sinh().sinh())),
        "masses of all sizes": (torch.linspace(-28, 0, 500).double().softmax(0), None, PointCost(x, y)),
    }


@pytest.mark.parametrize("name", _cases())
def test_the_optimum_is_that_of_the_dense_solver(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(
        exact_clouds, "CLOUD_LIMITS", exact_clouds.CloudLimits(largest_matrix=32)
    )  # clusters of clusters
    p, q, cost = _cases()[name]
    wide = PointCost(cost.x.double(), cost.y.double(), metric=cost.metric)  # rounds no cost
    problem = pose(p, q, cost, epsilon=None, settings=Settings())
    same = replace(problem, p=problem.p.double(), q=problem.q.double(), cost=wide)
    solution, expected, matrix = solve_between_clouds(problem), solve_exactly(same), wide.dense()
    rounding = 1e-12 * float(matrix.max())
    assert float((solution.optimum.value - expected.optimum.value).abs()) <= rounding
    assert abs(float(solution.optimum.gap)) <= rounding
    f, g = solution.potentials
    assert float((f[:, None] + g - matrix).max()) <= rounding
    plan = torch.cat([block for _, block in solution.plan_blocks()])
    torch.testing.assert_close(plan, solution.optimum.plan())
    assert float((plan * matrix).sum() - solution.optimum.value) == pytest.approx(0, abs=rounding)
    assert float((plan.sum(1) - problem.p).abs().sum() + (plan.sum(0) - problem.q).abs().sum()) < 1e-6
    assert float(solution.marginal_error) < 1e-6


class Half(PointCost):
    """Costs that differ from the costs of the metric."""

    def row_block(self, start: int, stop: int) -> Tensor:
        return super().row_block(start, stop) / 2


def test_a_subclass_with_other_costs_is_not_solved_between_clusters_of_its_metric(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clusters, "CLUSTERING", clusters.Clustering(smallest=0, counts=(4, 8, 8)))
    cost = Half(*(points[:60] for points in cloud("plane")))
    torch.testing.assert_close(sinkhorn(None, None, cost, epsilon=0.1), sinkhorn(None, None, cost.dense(), epsilon=0.1))


@pytest.mark.usefixtures("without_matrix")
@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "l1"])
def test_gradients_are_those_of_the_matrix(metric: str) -> None:
    p, q, x, y = _clouds(SMALLEST, SMALLEST, 2)
    p = torch.where(p > 0, p, 1e-4)
    p = p / p.sum()
    inputs = [t.clone().requires_grad_() for t in (p, q, x, y)]
    value = emd(inputs[0], inputs[1], PointCost(inputs[2], inputs[3], metric=metric))
    got = torch.autograd.grad(3 * value, inputs)
    same = emd(inputs[0], inputs[1], PointCost(inputs[2], inputs[3], metric=metric).dense())
    expected = torch.autograd.grad(3 * same, inputs)
    torch.testing.assert_close(value, same, rtol=1e-10, atol=0)
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.usefixtures("without_matrix")
@pytest.mark.parametrize("axes", [1, 2])
def test_tight_groups_far_apart(axes: int) -> None:
    """Newton's steps between such clusters are long: their constant rounded potentials, and the error was 0."""
    generator = torch.Generator().manual_seed(1)
    places = [torch.randint(2, (count, axes), generator=generator) for count in (2500, 2500)]
    x, y = (place + 1e-6 * torch.randn(place.shape, generator=generator) for place in places)
    distinct, p, q = _between_places(*places)
    expected = sinkhorn(p, q, PointCost(distinct), epsilon=0.0025, tolerance=1e-12)
    result = solve(None, None, PointCost(x, y), epsilon=0.0025)
    assert bool(result.converged)
    assert float(result.gap) < 1e-4
    torch.testing.assert_close(result.value.double(), expected, rtol=1e-3, atol=1e-6)


def _between_places(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The corners of the unit cube, and the shares of both clouds at them."""
    distinct, inverse = torch.unique(torch.cat([x, y]), dim=0, return_inverse=True)
    counts = (part.bincount(minlength=len(distinct)).double() for part in (inverse[: len(x)], inverse[len(x) :]))
    p, q = (count / count.sum() for count in counts)
    return distinct.double(), p, q


def test_a_constant_of_long_steps_rounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (points.float() for points in cloud("equal points"))
    generator = torch.Generator().manual_seed(0)
    x, y = (points + 1e-3 * torch.rand(points.shape, generator=generator) for points in (x, y))
    expected = solve(None, None, PointCost(x, y), epsilon=0.01).value
    correction = clusters._Solution.correction
    monkeypatch.setattr(clusters._Solution, "correction", lambda *given: correction(*given) + 1e12)
    torch.testing.assert_close(solve(None, None, PointCost(x, y), epsilon=0.01).value, expected, rtol=1e-4, atol=0)


def test_a_transport_between_clouds_answers_as_others_do() -> None:
    p, q, x, y = _clouds(SMALLEST, SMALLEST, 3)
    cost = PointCost(x, y)
    answer, dense = solve(p[None], q, cost), solve(p[None], q, cost.dense())
    assert answer.value.shape == answer.iterations.shape == (1,)
    torch.testing.assert_close(answer.plan(), dense.plan(), rtol=0, atol=1e-12)
    torch.testing.assert_close(answer.apply(y), dense.apply(y), rtol=0, atol=1e-10)
    assert float(answer.gap) <= 1e-12
    f, g = answer.potentials
    assert float((f[0][:, None] + g[0] - cost.dense()).max()) <= 1e-12
    # From its own potentials the search makes few pivots.
    again = solve(p[None], q, cost, start=(f, g))
    assert int(again.iterations) < int(answer.iterations) / 4
    torch.testing.assert_close(again.value, answer.value, rtol=1e-12, atol=0)


@pytest.mark.usefixtures("without_matrix")
def test_what_has_no_answer_raises() -> None:
    _, _, x, y = _clouds(SMALLEST, SMALLEST, 3)
    target = y.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(emd(None, None, PointCost(x, target)), target, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        gradient.sum().backward()
    with pytest.raises((ValueError, RuntimeError), match=r"finite|rescale"):
        emd(None, None, PointCost(1e200 * x, y))
    p = torch.cat([torch.zeros(1), torch.ones(SMALLEST - 1)]).double() / (SMALLEST - 1)
    answer = solve(p, p, PointCost(x, y))
    x.mul_(3.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        _ = answer.potentials


@pytest.mark.parametrize("count", [64, 300])
def test_clusters_are_few_where_few_points_have_nearly_all_of_the_mass(count: int) -> None:
    """All gaps may then be wide, and clusters be as tight as one likes."""
    generator = torch.Generator().manual_seed(0)
    points, logits = torch.randn(1200, 2, generator=generator), 30 * torch.randn(1200, generator=generator)
    groups = grouped(points, torch.softmax(logits.double(), -1), count, widest=1e-3)
    assert len(groups.masses) <= 2 * count
    assert float(groups.masses.sum()) == pytest.approx(1)
