"""Barycenters of clouds against plain loops of assignments, closed forms, and the derivatives of what they minimise."""

import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

import otloss
from otloss import ConvergenceWarning, cloud_barycenter
from otloss.costs import PointCost
from tests.otloss.oracles import as_double


def by_assignments(clouds: np.ndarray, x: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Points and value of the fixed point, for clouds of as many points as there are in x."""
    while True:
        moved, value = np.zeros_like(x), 0.0
        for cloud, weight in zip(clouds, weights, strict=True):
            costs = np.square(x[:, None] - cloud).sum(-1)
            rows, columns = linear_sum_assignment(costs)
            moved, value = moved + weight * cloud[columns], value + weight * costs[rows, columns].mean()
        if np.allclose(moved, x):
            return x, value
        x = moved


def test_equal_sizes_are_the_fixed_point_of_assignments() -> None:
    draw = np.random.default_rng(0)
    clouds, start = draw.normal(size=(2, 3, 7, 2)), draw.normal(size=(7, 2))
    clouds[1, 0] += 1e3  # far away
    weights = np.array([[0.5, 0.3, 0.2], [0.1, 0.0, 0.9]])
    solution = cloud_barycenter(as_double(clouds), None, as_double(weights), start=as_double(start))
    assert bool(solution.converged.all())
    for k in range(2):
        points, value = by_assignments(clouds[k], start, weights[k])
        np.testing.assert_allclose(solution.points[k], points, atol=1e-9)
        assert solution.value[k].item() == pytest.approx(value)


def test_on_a_line_it_is_the_mean_of_the_quantiles() -> None:
    """Clouds of different sizes as a list; and a single point is the mean."""
    draw = np.random.default_rng(1)
    clouds = [as_double(draw.normal(size=(size, 1))) for size in (4, 8, 12)]
    quantiles = [np.sort(cloud[:, 0].numpy()).reshape(4, -1).mean(1) for cloud in clouds]
    solution = cloud_barycenter(clouds, start=as_double(draw.normal(size=(4, 1))))
    np.testing.assert_allclose(np.sort(solution.points[:, 0].numpy()), np.mean(quantiles, 0), atol=1e-9)
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    single = cloud_barycenter(clouds, None, weights, start=1, generator=torch.Generator().manual_seed(0))
    expected = sum(w * cloud.mean() for w, cloud in zip(weights, clouds, strict=True))
    assert single.points.item() == pytest.approx(float(expected))


@pytest.mark.parametrize("epsilon", [None, 0.3])
def test_the_points_are_stationary_and_the_value_has_its_gradient(epsilon: float | None) -> None:
    """Weights that are not uniform, zeros among them, and outliers; by derivatives of `emd` and the divergence."""
    draw = np.random.default_rng(2)
    clouds, masses = as_double(draw.normal(size=(3, 6, 2)), grad=True), draw.random((3, 6))
    masses[0, 2], masses[1, :3] = 0.0, 1e-6
    masses = as_double(masses / masses.sum(-1, keepdims=True))
    with torch.no_grad():
        clouds[2, 0] = 30.0
    solution = cloud_barycenter(
        clouds, masses, start=4, epsilon=epsilon, generator=torch.Generator().manual_seed(1), tolerance=1e-7
    )

    def value(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, cost = torch.full((3, 4), 0.25, dtype=torch.float64), PointCost(x, y)
        if epsilon is None:
            return otloss.emd(a, masses, cost).mean()
        return otloss.sinkhorn_divergence(a, masses, cost, epsilon=epsilon, tolerance=1e-11).mean()

    x = solution.points.clone().requires_grad_()
    here = value(x, clouds)
    by_x, by_clouds = torch.autograd.grad(here, (x, clouds))
    assert solution.value.item() == pytest.approx(here.item(), rel=1e-6)
    assert float(by_x.abs().max()) <= 1e-5
    torch.testing.assert_close(torch.autograd.grad(solution.value, clouds)[0], by_clouds, rtol=1e-5, atol=1e-6)
    for seed in range(5):
        other = solution.points + 1e-3 * torch.randn(4, 2, generator=torch.Generator().manual_seed(seed))
        assert value(other, clouds.detach()) >= here.detach() - 1e-9


def test_batches_dtypes_and_warnings() -> None:
    clouds = torch.randn(2, 3, 5, 2, generator=torch.Generator().manual_seed(4))
    start = clouds[:, 0] + 0.1
    both = cloud_barycenter(clouds, start=start)
    assert both.points.dtype == both.value.dtype == torch.float32
    for k in range(2):
        alone = cloud_barycenter(clouds[k], start=start[k])
        torch.testing.assert_close(alone.points, both.points[k])
        assert alone.iterations == both.iterations[k]
    with pytest.warns(ConvergenceWarning, match="2 of 2 barycenters of clouds did not converge in 1 iterations"):
        cloud_barycenter(clouds, start=start, max_iterations=1)
    for options, message in (
        ({"start": 0}, "start is 0"), ({"start": torch.zeros(3, 4)}, "start has shape"),
        ({"start": 2, "weights": torch.ones(3)}, "weights sum to 3"),
        ({"start": 2, "masses": torch.ones(3, 4)}, "masses"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            cloud_barycenter(clouds[0], **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="several clouds"):
        cloud_barycenter(clouds[0, 0], start=2)


def test_weights_that_sum_to_one_up_to_rounding_move_no_points() -> None:
    clouds = 1000 + torch.rand(2, 5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = clouds[0]
    expected, found = (
        otloss.cloud_barycenter(clouds, weights=factor * torch.tensor([0.5, 0.5], dtype=torch.float64), start=start)
        for factor in (1.0, 1.0005)
    )
    torch.testing.assert_close(found.points, expected.points, rtol=1e-9, atol=0)


def test_points_without_mass_far_away_and_clouds_without_weight_change_nothing() -> None:
    draw = torch.Generator().manual_seed(5)
    clouds = torch.randn(3, 5, 2, generator=draw, dtype=torch.float64)
    masses, weights = torch.full((3, 5), 0.25, dtype=torch.float64), torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    masses[:, 4], far = 0.0, clouds.clone()
    far[:, 4], far[2] = 1e9, -100.0
    options = {"start": clouds[0, :4], "epsilon": 0.3}
    expected = cloud_barycenter(clouds[:2, :4], **options)
    found = cloud_barycenter(far, masses, weights, **options)
    assert found.iterations == expected.iterations > 1
    torch.testing.assert_close(found.points, expected.points, rtol=1e-6, atol=1e-6)


def test_several_starts_are_one_call_and_lists_of_half_precision_have_equal_masses() -> None:
    clouds = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(6))
    starts = torch.stack([clouds[0], clouds[1]])
    both = cloud_barycenter(clouds, start=starts)
    for k in range(2):
        torch.testing.assert_close(cloud_barycenter(clouds, start=starts[k]).points, both.points[k])
    assert bool(cloud_barycenter([clouds[0].bfloat16(), clouds[1, :3].bfloat16()], start=clouds[0]).converged)


@pytest.mark.parametrize("options", [{}, {"epsilon": 0.5}, {"optimize": "masses"}])
def test_gradients_of_masses_are_centred_over_the_points_of_each_cloud(options: dict[str, object]) -> None:
    """And not over the places that fill a list up."""
    generator = torch.Generator().manual_seed(3)
    clouds = [torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (5, 3)]
    masses = [torch.rand(n, generator=generator, dtype=torch.float64) + 0.1 for n in (5, 3)]
    masses = [(m / m.sum()).requires_grad_() for m in masses]
    value = cloud_barycenter(clouds, masses, start=clouds[0][:4], **options).value
    for gradient in torch.autograd.grad(value, masses):
        assert abs(float(gradient.sum())) < 1e-9 * float(gradient.abs().max())


def test_points_of_a_barycenter_may_be_changed() -> None:
    start = torch.randn(3, 2, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    expected = start.clone()
    cloud_barycenter(torch.stack([start, start + 1]), start=start, optimize="masses").points.zero_()
    torch.testing.assert_close(start, expected, rtol=0, atol=0)
    masses = cloud_barycenter(torch.stack([start, start + 1]), start=start).masses
    masses[0] = 0.5  # of a tensor of its own, without repeated entries
    torch.testing.assert_close(masses[1:], torch.full((2,), 1 / 3, dtype=torch.float64))


def test_inputs_that_make_no_problem_are_named() -> None:
    clouds = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(7))
    for given, masses, message in (
        ([], None, "at least one cloud"),
        ([clouds[0], clouds[1, :, :1]], None, "of one d"),
        ([clouds], None, "expected at least one cloud"),
        (clouds, [torch.ones(3)] * 2, "masses is a list"),
        (clouds, -torch.ones(2, 3), "negative"),
        (clouds, torch.zeros(2, 3), "without mass"),
        (clouds, torch.full((2, 3), torch.nan), "masses holds 6 NaN"),
        (clouds, torch.tensor([[1.0], [2.0]]).expand(2, 3), "masses have sums from 3 to 6"),
        (list(clouds), [[0.5, 0.5, 0.5]] * 2, r"masses\[0\] is a list"),
        (clouds[:0], None, "several clouds"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            cloud_barycenter(given, masses, start=2)
    with pytest.raises(ValueError, match="overflow"):
        cloud_barycenter(1e25 * clouds, start=2)
    with pytest.raises(TypeError, match="epsilon is a Tensor"):
        cloud_barycenter(clouds, start=2, epsilon=torch.tensor([0.1, 0.2]))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masses_and_weights_of_16_bits_have_equal_sums(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(8)
    clouds, masses = torch.randn(3, 50, 2, generator=draw), torch.rand(3, 50, generator=draw)
    masses, weights = (masses / masses.sum(-1, keepdim=True)).to(dtype), torch.tensor([0.3, 0.3, 0.4]).to(dtype)
    sums = masses.double().sum(-1)
    assert float(sums.max() - sums.min()) > 1e-5
    found = cloud_barycenter(clouds, masses, weights, start=clouds[0])
    exact = masses.double() / sums[:, None] * sums[0], weights.double() / weights.double().sum()
    torch.testing.assert_close(found.value, cloud_barycenter(clouds, *exact, start=clouds[0]).value)


@pytest.mark.parametrize("mass", [1e-16, 1.0])
def test_an_outlier_does_not_stop_the_search_early(mass: float) -> None:
    clouds = torch.randn(3, 30, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    start, masses = clouds[1, :10].clone(), torch.ones(3, 30, dtype=torch.float64)
    clouds[0, 0], masses[0, 0] = 1e6, mass
    masses = masses / masses.sum(-1, keepdim=True)
    found = cloud_barycenter(clouds, masses, start=start)
    again = cloud_barycenter(clouds, masses, start=start, tolerance=1e-9, max_iterations=1000)
    assert bool(found.converged)
    assert found.iterations > 2
    torch.testing.assert_close(found.value, again.value, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.points, again.points, rtol=0, atol=1e-3)


def test_points_do_not_stand_where_another_optimal_plan_leads_down() -> None:
    """Costs between whole numbers tie, and the map of the plan that was found may keep the points."""
    clouds = torch.tensor([[[1, 2], [1, 0]], [[0, 0], [2, 1]], [[2, 1], [0, 1]]], dtype=torch.float64)
    assert float(cloud_barycenter(clouds, start=clouds[0]).value) == pytest.approx(4 / 9)
    grid = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0)).double()
    generator = torch.Generator().manual_seed(0)
    clouds = torch.stack([grid[torch.randperm(9, generator=generator)[:3]] for _ in range(60)]).unflatten(0, (20, 3))
    solution = cloud_barycenter(clouds, start=clouds[:, 0])
    for _ in range(4):
        beside = solution.points + 1e-6 * torch.randn(solution.points.shape, generator=generator, dtype=torch.float64)
        assert (cloud_barycenter(clouds, start=beside).value > solution.value - 1e-9).all()


def test_a_problem_that_stands_early_does_not_depend_on_the_others_of_its_batch() -> None:
    """The first problem stands after two iterations, where another plan leads down; the second one takes longer."""
    generator = torch.Generator().manual_seed(7)
    tied = torch.randint(0, 3, (3, 5, 2), generator=generator).double()
    draws = [torch.randn((3, 5, 2), generator=torch.Generator().manual_seed(seed)).double() for seed in range(8)]
    slow = max(draws, key=lambda clouds: int(cloud_barycenter(clouds, start=clouds[0]).iterations))
    for limit in (2, 3, 4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            alone = cloud_barycenter(tied, start=tied[0], max_iterations=limit)
            both = torch.stack([tied, slow])
            together = cloud_barycenter(both, start=both[:, 0], max_iterations=limit)
        assert (int(together.iterations[0]), bool(together.converged[0])) == (int(alone.iterations), limit > 2)
        assert bool(alone.converged) == (limit > 2)
        torch.testing.assert_close(together.value[0], alone.value)


@pytest.mark.parametrize(
    ("clouds", "epsilon", "value"),
    [
        ([[[2, 0], [2, 1], [1, 2]], [[0, 0], [1, 2], [2, 0]]], 0.1, 0.41644),
        ([[[3, 3], [1, 1], [2, 3]], [[2, 0], [0, 0], [2, 2]]], 0.01, 1.08333),
    ],
)
def test_a_symmetric_start_does_not_end_at_a_saddle(
    clouds: list[list[list[int]]], epsilon: float, value: float
) -> None:
    """Steps from points that are as symmetric as the clouds keep the symmetry, and end at .562 and 1.248."""
    given = torch.tensor(clouds, dtype=torch.float64)
    solution = cloud_barycenter(given, start=given[0], epsilon=epsilon)
    assert float(solution.value) == pytest.approx(value, abs=1e-4)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        start = solution.points + 1e-2 * torch.randn((3, 2), generator=generator, dtype=torch.float64)
        assert cloud_barycenter(given, start=start, epsilon=epsilon).value > solution.value - 1e-6
