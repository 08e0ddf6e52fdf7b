"""Masses of barycenters of clouds against the dual linear programme, quantiles on a line, and finite differences."""

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from otloss import ConvergenceWarning, cloud_barycenter, emd
from otloss.solvers.barycenter.masses import find_masses
from tests.otloss.oracles import as_double


def by_the_dual(clouds: list[np.ndarray], masses: list[np.ndarray], weights: np.ndarray, x: np.ndarray) -> float:
    """max of sum_k <g_k, b_k> + t  with  f_k + g_k <= w_k C_k  and  sum_k f_k >= t at each point, for mass one."""
    s, sizes = len(x), [len(cloud) for cloud in clouds]
    count, rows, limits = len(clouds) * s + sum(sizes) + 1, [], []
    for k, cloud in enumerate(clouds):
        for i in range(s):
            for j in range(sizes[k]):
                row = np.zeros(count)
                row[k * s + i] = row[len(clouds) * s + sum(sizes[:k]) + j] = 1.0
                rows.append(row)
                limits.append(weights[k] * np.square(x[i] - cloud[j]).sum())
    for i in range(s):
        row = np.zeros(count)
        row[[k * s + i for k in range(len(clouds))]], row[-1] = -1.0, 1.0
        rows.append(row)
        limits.append(0.0)
    objective = -np.concatenate([np.zeros(len(clouds) * s), *masses, [1.0]])
    return -linprog(objective, A_ub=np.array(rows), b_ub=limits, bounds=(None, None)).fun


def draw_problem(seed: int, *, sizes: tuple[int, ...] = (5, 3, 6)) -> tuple[list[np.ndarray], list[np.ndarray]]:
    draw = np.random.default_rng(seed)
    masses = [draw.random(size) ** 2 for size in sizes]
    return [draw.normal(size=(size, 2)) for size in sizes], [mass / mass.sum() for mass in masses]


@pytest.mark.parametrize("case", ["plain", "zeros", "duplicates", "far", "outlier"])
def test_masses_of_given_points_are_those_of_the_linear_programme(case: str) -> None:
    clouds, masses = draw_problem(0)
    weights, x = np.array([0.5, 0.2, 0.3]), np.random.default_rng(1).normal(size=(7, 2))
    if case == "zeros":
        weights = np.array([0.6, 0.0, 0.4])
        masses[0][1] = 0.0
        masses[0] /= masses[0].sum()
        clouds[0][1], clouds[1][0] = 1e8, -1e8
    if case == "duplicates":
        x[3], clouds[2][1] = x[2], clouds[2][0]
    if case == "far":
        clouds, x = [cloud + 1e6 for cloud in clouds], x + 1e6
    if case == "outlier":
        clouds[0][0] = 1e4
    found = cloud_barycenter(
        [as_double(cloud) for cloud in clouds], [as_double(mass) for mass in masses], as_double(weights),
        start=as_double(x), optimize="masses",
    )  # fmt: skip
    if case == "zeros":  # The points without mass or weight would spoil the accuracy of the dual alone.
        clouds[0][1], clouds[1][0] = 0.0, 0.0
    expected = by_the_dual(clouds, masses, weights, x)
    assert bool(found.converged)
    assert found.iterations == 1
    assert found.value.item() == pytest.approx(expected, rel=1e-8)
    assert found.masses.sum().item() == pytest.approx(1.0, rel=1e-12)
    assert float(found.masses.min()) >= 0
    torch.testing.assert_close(found.points, as_double(x), rtol=0, atol=0)


@pytest.mark.parametrize("guess", ["zero", "random", "none"])
def test_more_entries_than_the_first_programme_has(guess: str) -> None:
    """The value does not depend on the potentials that the search starts with."""
    sizes = (40, 30, 35)
    clouds, masses = draw_problem(8, sizes=sizes)
    draw = np.random.default_rng(9)
    weights, x = np.array([0.5, 0.2, 0.3]), draw.normal(size=(25, 2))
    costs, padded = np.zeros((3, 25, 40)), np.zeros((3, 40))
    for k, size in enumerate(sizes):
        costs[k, :, :size], padded[k, :size] = np.square(x[:, None] - clouds[k]).sum(-1), masses[k]
    guesses = {"zero": np.zeros((3, 40)), "random": draw.normal(size=(3, 40)), "none": np.full((3, 40), np.nan)}
    best = find_masses(
        as_double(costs), as_double(padded), as_double(weights), active=torch.tensor(True),
        guess=as_double(guesses[guess]),
    )  # fmt: skip
    expected = by_the_dual(clouds, masses, weights, x)
    assert float(best.gap) <= 1e-9
    assert float(best.value) == pytest.approx(expected, rel=1e-8)
    # `emd` at these masses finds the same value by another algorithm.
    exact = [float(emd(best.masses, as_double(padded[k]), as_double(costs[k]))) for k in range(3)]
    assert float(weights @ exact) == pytest.approx(expected, rel=1e-8)


def quantile_average(clouds: list[np.ndarray], masses: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Points and masses of the barycenter on a line, for equal weights."""
    orders = [np.argsort(cloud) for cloud in clouds]
    sums = [np.cumsum(mass[order]) for mass, order in zip(masses, orders, strict=True)]
    ends = np.unique(np.concatenate(sums).round(12))
    middles = (ends + np.append(0.0, ends[:-1])) / 2
    points = [
        cloud[order][np.searchsorted(total, middles)] for cloud, order, total in zip(clouds, orders, sums, strict=True)
    ]
    return np.mean(points, 0), np.diff(ends, prepend=0.0)


def test_on_a_line_masses_and_points_are_averages_of_quantiles() -> None:
    planes, masses = draw_problem(2)
    clouds = [plane[:, 0] for plane in planes]
    points, expected = quantile_average(clouds, masses)
    listed = [as_double(cloud)[:, None] for cloud in clouds], [as_double(mass) for mass in masses]
    at_the_points = cloud_barycenter(*listed, start=as_double(points)[:, None], optimize="masses")
    np.testing.assert_allclose(at_the_points.masses, expected, atol=1e-9)
    order = np.argsort(points)
    for start in (points + 1e-3, np.linspace(-2, 2, 60)):  # Many points come close to the least value from anywhere.
        found = cloud_barycenter(*listed, start=as_double(start)[:, None], optimize="both")
        assert bool(found.converged)
        assert float(found.value) >= float(at_the_points.value) - 1e-9
        weight, place = found.masses.numpy(), found.points[:, 0].numpy()
        np.testing.assert_allclose(weight @ place, expected[order] @ points[order], atol=1e-9)  # the mean of the means


def test_one_cloud_and_diracs() -> None:
    """The barycenter of one cloud is that cloud, with its masses; the barycenter of points is their mean."""
    clouds, masses = draw_problem(3, sizes=(6,))
    cloud, mass = as_double(clouds[0]), as_double(masses[0])
    found = cloud_barycenter(cloud[None], 3 * mass[None], start=cloud, optimize="both")
    assert bool(found.converged)
    assert found.value.item() == pytest.approx(0.0, abs=1e-12)
    nearest = torch.cdist(cloud, found.points).argmin(-1)
    torch.testing.assert_close(found.points[nearest], cloud)
    torch.testing.assert_close(found.masses.sum(), as_double(3.0))
    torch.testing.assert_close(found.masses[nearest], 3 * mass)
    ends = as_double([[[0.0, 0.0]], [[4.0, 8.0]]])
    found = cloud_barycenter(
        ends, None, as_double([0.75, 0.25]), start=as_double([[5.0, 5.0], [0.0, 1.0]]), optimize="both"
    )
    mean = (found.masses[:, None] * found.points).sum(0)
    torch.testing.assert_close(mean, as_double([1.0, 2.0]))
    assert found.value.item() == pytest.approx(0.75 * 5 + 0.25 * 45)


@pytest.mark.parametrize("outlier", [None, 1e4])
def test_values_are_no_larger_than_for_equal_masses_and_batches_equal_a_loop(outlier: float | None) -> None:
    draw = torch.Generator().manual_seed(4)
    clouds = torch.randn(3, 3, 12, 2, generator=draw, dtype=torch.float64)
    if outlier is not None:
        clouds[:, 0, 0] = outlier
    masses = torch.rand(3, 3, 12, generator=draw, dtype=torch.float64)
    masses, start = 2 * masses / masses.sum(-1, keepdim=True), clouds[:, 1, :8] + 0.1
    equal = cloud_barycenter(clouds, masses, start=start)
    both = cloud_barycenter(clouds, masses, start=start, optimize="both")
    at_start = cloud_barycenter(clouds, masses, start=start, optimize="masses")
    assert bool((both.value < torch.minimum(equal.value, at_start.value)).all())
    assert bool(both.converged.all())
    torch.testing.assert_close(both.masses.sum(-1), torch.full((3,), 2.0, dtype=torch.float64))
    for k in range(3):
        alone = cloud_barycenter(clouds[k], masses[k], start=start[k], optimize="both")
        torch.testing.assert_close(alone.value, both.value[k])
        assert alone.iterations == both.iterations[k]
        # Masses that are best for the points that were found lower nothing.
        again = cloud_barycenter(clouds[k], masses[k], start=both.points[k], optimize="masses")
        torch.testing.assert_close(again.value, both.value[k], rtol=1e-8, atol=0)
        assert cloud_barycenter(clouds[k], masses[k], start=start[k], optimize="masses").value == at_start.value[k]


def difference(value: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor, direction: torch.Tensor) -> float:
    size = 1e-5
    return float(value(at + size * direction) - value(at - size * direction)) / (2 * size)


@pytest.mark.parametrize("optimize", ["masses", "both"])
def test_the_gradient_is_the_derivative_of_the_least_value(optimize: str) -> None:
    """By finite differences of the whole search, in directions that keep the sums of masses and weights."""
    draw = np.random.default_rng(5)
    clouds, masses = as_double(draw.normal(size=(3, 6, 2)), grad=True), draw.random((3, 6)) + 0.1
    masses = as_double(masses / masses.sum(-1, keepdims=True), grad=True)
    weights, start = as_double([0.5, 0.2, 0.3], grad=True), as_double(draw.normal(size=(5, 2)))

    def value(clouds: torch.Tensor, masses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        options = {"start": start, "optimize": optimize, "tolerance": 1e-10}
        return cloud_barycenter(clouds, masses, weights, **options).value  # type: ignore[arg-type]

    inputs = [clouds, masses, weights]
    gradients = torch.autograd.grad(value(*inputs), inputs)
    fixed = [t.detach() for t in inputs]
    for place, gradient in enumerate(gradients):
        direction = as_double(draw.normal(size=fixed[place].shape))
        if place:
            direction = direction - direction.mean(-1, keepdim=True)

        def along(t: torch.Tensor, place: int = place) -> torch.Tensor:
            return value(*fixed[:place], t, *fixed[place + 1 :])

        expected = difference(along, fixed[place], direction)
        assert (gradient * direction).sum().item() == pytest.approx(expected, rel=1e-5)


def test_the_gradient_at_an_empty_bin_is_one_sided_and_there_is_no_second_one() -> None:
    draw = np.random.default_rng(10)
    clouds, start = as_double(draw.normal(size=(2, 5, 2))), as_double(draw.normal(size=(4, 2)))
    masses = draw.random((2, 5))
    masses[1, 2] = 0.0
    masses = as_double(masses / masses.sum(-1, keepdims=True), grad=True)

    def value(masses: torch.Tensor) -> torch.Tensor:
        return cloud_barycenter(clouds, masses, start=start, optimize="masses").value

    here = value(masses)
    (gradient,) = torch.autograd.grad(here, masses, create_graph=True)
    direction = torch.zeros(2, 5, dtype=torch.float64)
    direction[1, 2], direction[1, 0] = 1.0, -1.0
    size = 1e-6
    change = float(value(masses.detach() + size * direction) - here.detach()) / size
    assert (gradient * direction).sum().item() == pytest.approx(change, rel=1e-5)
    with pytest.raises(RuntimeError, match="second derivative"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("optimize", ["masses", "both"])
def test_no_problems_and_clouds_at_one_place(optimize: str) -> None:
    empty = cloud_barycenter(torch.zeros(0, 2, 3, 2), start=torch.zeros(4, 2), optimize=optimize)
    assert empty.points.shape == (0, 4, 2)
    assert empty.masses.shape == (0, 4)
    one_place = cloud_barycenter(torch.zeros(2, 3, 2), start=torch.ones(4, 2), optimize=optimize)
    assert bool(one_place.converged)
    assert one_place.value.item() == pytest.approx(2.0 if optimize == "masses" else 0.0)
    assert one_place.masses.sum().item() == pytest.approx(1.0)


def test_float32_warnings_and_errors() -> None:
    clouds = torch.randn(2, 6, 2, generator=torch.Generator().manual_seed(6))
    found = cloud_barycenter(clouds, start=clouds[0, :4], optimize="both")
    assert found.masses.dtype == found.points.dtype == found.value.dtype == torch.float32
    double = cloud_barycenter(clouds.double(), start=clouds[0, :4].double(), optimize="both")
    torch.testing.assert_close(found.masses, double.masses.float())
    with pytest.warns(ConvergenceWarning, match="1 of 1 barycenters of clouds did not converge in 2 iterations"):
        cloud_barycenter(clouds, start=clouds[0, :4], optimize="both", max_iterations=2)
    with pytest.raises(ValueError, match="optimize is 'weights'"):
        cloud_barycenter(clouds, start=2, optimize="weights")
    with pytest.raises(ValueError, match="masses are optimised for `emd` alone"):
        cloud_barycenter(clouds, start=2, optimize="both", epsilon=0.1)


def test_masses_without_a_solution_have_not_converged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear programme that fails leaves equal masses and a warning."""
    clouds = torch.randn(2, 6, 2, generator=torch.Generator().manual_seed(7))
    monkeypatch.setattr("scipy.optimize.linprog", lambda *_, **__: type("Result", (), {"x": None})())
    with pytest.warns(ConvergenceWarning):
        found = cloud_barycenter(clouds, start=clouds[0, :4], optimize="masses")
    assert not bool(found.converged)
    torch.testing.assert_close(found.masses, torch.full((4,), 0.25))


@pytest.mark.parametrize("max_iterations", [1, 2, 3])
def test_a_search_that_is_cut_short_costs_no_more_than_for_points_or_masses_alone(max_iterations: int) -> None:
    ends = as_double([[[0.0], [1.0]]] * 2)  # The start is the best one already, but not for equal masses.
    masses = as_double([[0.25, 0.75]] * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        points, best, both = (
            float(cloud_barycenter(ends, masses, start=ends[0], optimize=each, max_iterations=max_iterations).value)
            for each in ("points", "masses", "both")
        )
    assert both <= min(points, best) + 1e-12


@pytest.mark.parametrize("case", ["point", "cluster"])
@pytest.mark.parametrize("distance", [1e3, 1e5, 1e7])
def test_costs_much_larger_than_the_value(case: str, distance: float) -> None:
    """Points far from all clouds have no mass, and clusters far from each other are problems of their own."""
    clouds, masses = draw_problem(11, sizes=(12, 12, 12))
    weights, x = np.array([0.3, 0.3, 0.4]), np.random.default_rng(12).normal(size=(9, 2))
    expected = by_the_dual(clouds, masses, weights, x)
    if case == "point":
        far, mass, start = np.array(clouds), np.array(masses), np.vstack([[[distance, 0.0]], x])
    else:  # The same problem at two places.
        far = np.concatenate([clouds, np.array(clouds) + distance], 1)
        mass, start = np.concatenate([masses, masses], 1) / 2, np.vstack([x, x + distance])
    found = cloud_barycenter(
        as_double(far), as_double(mass), as_double(weights), start=as_double(start), optimize="masses"
    )
    assert bool(found.converged)
    assert found.value.item() == pytest.approx(expected, rel=1e-6)  # Points at 1e7 are rounded to 2e-9.


def test_masses_that_the_programme_cannot_tell_have_not_converged() -> None:
    """A point of mass 1e-16 so far away that it counts: below the tolerance of the linear programme."""
    clouds, masses = draw_problem(13, sizes=(8, 8, 8))
    clouds[0][0], masses[0][0] = 1e8, 1e-16
    masses[0] /= masses[0].sum()
    start = as_double(np.vstack([np.random.default_rng(14).normal(size=(6, 2)), [[1e8, 1e8]]]))
    clouds, masses = [as_double(cloud) for cloud in clouds], [as_double(mass) for mass in masses]
    with pytest.warns(ConvergenceWarning, match="linear programme"):
        found = cloud_barycenter(clouds, masses, start=start, optimize="masses")
    assert not bool(found.converged)


def test_the_gradient_in_masses_does_not_change_by_a_point_far_away() -> None:
    clouds, masses = draw_problem(15, sizes=(6, 6, 6))
    x = np.random.default_rng(16).normal(size=(5, 2))
    gradients = []
    for start in (x, np.vstack([x, [[1e8, 0.0]]])):
        given = as_double(np.array(masses), grad=True)
        found = cloud_barycenter(as_double(np.array(clouds)), given, start=as_double(start), optimize="masses")
        gradients += torch.autograd.grad(found.value, given)
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-9)


def test_clouds_that_are_equal_converge_to_a_value_of_zero_anywhere() -> None:
    draw = np.random.default_rng(17)
    for scale, shift in ((1.0, 0.0), (1.0, 1e6), (1e-150, 0.0), (1e150, 0.0)):
        cloud, mass = as_double(scale * draw.normal(size=(5, 2)) + shift), as_double(draw.dirichlet(np.ones(5)))
        found = cloud_barycenter(cloud.expand(3, 5, 2), mass.expand(3, 5), start=cloud, optimize="masses")
        assert bool(found.converged)
        torch.testing.assert_close(found.masses, mass)
