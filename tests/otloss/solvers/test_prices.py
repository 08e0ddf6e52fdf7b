"""Finite prices for pairs that must not be: blocks of bins, each solved by itself, are the reference."""

import math
import random
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import otloss
from otloss import ConvergenceWarning
from otloss.costs import PointCost
from otloss.solvers.exact.clouds import CloudLimits
from tests.otloss.oracles import linprog_value


class Priced(NamedTuple):
    """A problem in blocks: rows and columns give the block of each bin."""

    p: Tensor
    q: Tensor
    cost: Tensor
    rows: Tensor
    columns: Tensor


def priced(seed: int, dtype: torch.dtype, *, largest: float) -> Priced:
    """Blocks of equal mass up to the rounding of the dtype, with bins without mass, in any order."""
    chosen, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    blocks, price = chosen.choice([2, 3, 5]), 10 ** chosen.uniform(3.5, largest)
    of_rows, of_columns = (
        torch.arange(3 * blocks)[torch.randperm(3 * blocks, generator=generator)] % blocks for _ in "pq"
    )
    n = len(of_rows)
    cost, spread = (torch.rand(n, n, generator=generator, dtype=torch.float64) for _ in range(2))
    cost = torch.where(of_rows[:, None] == of_columns, cost, price * (1 + spread))
    mass = torch.rand(blocks, generator=generator, dtype=torch.float64) + 0.1
    sides = []
    for labels in (of_rows, of_columns):
        weights = torch.rand(n, generator=generator, dtype=torch.float64) + 0.01
        weights[torch.nonzero(labels == 0)[0]] = 0.0
        sums = torch.zeros(blocks, dtype=torch.float64).index_add_(0, labels, weights)
        weights = (weights * (mass / sums)[labels]).to(dtype)
        sides.append(weights / weights.sum())
    return Priced(*sides, cost.to(dtype), of_rows, of_columns)


def by_blocks(problem: Priced, epsilon: float | None) -> tuple[float, Tensor, Tensor]:
    """The value in float64, and the derivatives in the weights, centred over the bins of each block that hold mass."""
    value, gradients = 0.0, [torch.zeros(len(w), dtype=torch.float64) for w in problem[:2]]
    for k in range(int(problem.rows.max()) + 1):
        inside = problem.rows == k, problem.columns == k
        p, q = (w[part].double() for w, part in zip(problem[:2], inside, strict=True))
        q = q * (p.sum() / q.sum())
        leaves = [w.requires_grad_() for w in (p, q)]
        part = otloss.solve(*leaves, problem.cost[inside[0]][:, inside[1]].double(), epsilon=epsilon)
        mass = float(p.detach().sum())
        # The entropy against p q^T is that against p q^T / mass, less the logarithm of the mass.
        value += float(part.value.detach()) - (0.0 if epsilon is None else epsilon * mass * math.log(mass))
        for gradient, places, found in zip(gradients, inside, torch.autograd.grad(part.value, leaves), strict=True):
            gradient[places] = found
    return value, *(centred(g, *labels) for g, labels in zip(gradients, labels_of(problem), strict=True))


def labels_of(problem: Priced) -> list[tuple[Tensor, Tensor]]:
    return [(problem.p, problem.rows), (problem.q, problem.columns)]


def centred(gradient: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
    gradient = gradient.double().clone()
    for k in range(int(labels.max()) + 1):
        gradient[labels == k] -= gradient[(labels == k) & (weights > 0)].mean()
    return gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("epsilon", [None, 0.05])
def test_blocks_that_only_prices_connect(epsilon: float | None, dtype: torch.dtype) -> None:
    size = (2e-5 if dtype == torch.float32 else 1e-9) * (1 if epsilon is None else 20)
    for seed in range(12):
        problem = priced(seed, dtype, largest=18 if epsilon is None else 12)
        leaves = [w.requires_grad_() for w in problem[:3]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # how blocks compare is uncertain
            solution = otloss.solve(*leaves, epsilon=epsilon)
        gradients = torch.autograd.grad(solution.value, leaves)
        problem = Priced(*(t.detach() for t in problem))
        value, *expected = by_blocks(problem, epsilon)
        assert float(solution.value.detach()) == pytest.approx(value, abs=size)
        for gradient, labels, right in zip(gradients, labels_of(problem), expected, strict=False):
            torch.testing.assert_close(centred(gradient, *labels), right, rtol=0.0, atol=5 * size)
        crossing = gradients[2][problem.rows[:, None] != problem.columns].sum()
        assert 0 <= float(crossing) < 1e-5
        # What the rounding of the weights would pay is left.
        assert 0 <= float(solution.gap) < 1e3 * size + 40 * torch.finfo(dtype).eps * float(problem.cost.max())
        if epsilon is None:
            f, g = (potential.detach().double() for potential in solution.potentials)
            assert float((f[:, None] + g - problem.cost.double()).max()) < size


def test_a_divergence_with_prices() -> None:
    """Its arithmetic is wider than its weights, whose rounding counts."""
    problem = priced(3, torch.float32, largest=4)
    inside = problem.rows[:, None] == problem.columns
    among = 1 - torch.eye(len(problem.p))
    values = []
    for price in (1e5, 1e9):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            cost = torch.where(inside, problem.cost, price)
            values.append(otloss.sinkhorn_divergence(*problem[:2], cost, epsilon=0.05, cost_p=among, cost_q=among))
    torch.testing.assert_close(*values)


def test_mass_that_may_be_rounding_is_named() -> None:
    """Two millionths of the mass have to pay: more than float32 explains, and less than a user may mean."""
    cost = torch.full((4, 4), 1e9)
    cost[:3, :3], cost[3, 3] = torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 2.0], [3.0, 2.0, 1.0]]), 0.0
    p, q = torch.tensor([0.2, 0.2, 0.3, 0.3]), torch.tensor([0.2, 0.2, 0.300002, 0.299998])
    with pytest.warns(ConvergenceWarning, match="a mass of 2e-06 moves at costs of up to 1e"):
        value = otloss.emd(p, q, cost)
    assert float(value) == pytest.approx(2e-6 * 1e9, rel=0.1)
    assert float(otloss.solve(p, p.flip(0), cost[:3, :1].new_ones(4, 4)).potential_error) < 1e-6


@pytest.mark.parametrize("light", [1e-30, 1e-7, 4e-7])
@pytest.mark.parametrize("epsilon", [None, 0.05])
def test_light_weights_are_no_rounding(light: float, epsilon: float | None) -> None:
    """A bin of a small weight on one side alone has to pay, whatever the rounding of all others together is."""
    x = torch.tensor([1.0, 2.0, 3.0, 10.0, 1000.0, 1e6])
    cost = (x[:, None] - x).abs()
    p = torch.tensor([0.5, 0.3, 0.2 - light, 0.0, 0.0, light], requires_grad=True)
    solution = otloss.solve(p, torch.eye(6)[1], cost, epsilon=epsilon)
    (gradient,) = torch.autograd.grad(solution.value, p)
    right = float(p.detach().double() @ cost[:, 1].double())
    assert float(solution.value.detach()) == pytest.approx(right, rel=1e-6)
    assert float(gradient[-1] - gradient[0]) == pytest.approx(1e6 - 3, rel=1e-5)
    assert float(solution.dual_value) <= right * (1 + 1e-6) <= float(solution.dual_value + solution.gap) + 1e-5


def test_weights_of_16_bits_are_as_they_are() -> None:
    p, q = torch.tensor([0.3, 0.3, 0.4]).bfloat16(), torch.tensor([0.31, 0.3, 0.39]).bfloat16()
    x = torch.arange(3.0)
    p32, q32 = (w.float() / w.float().sum() for w in (p, q))
    values = [otloss.sinkhorn(*sides, (x[:, None] - x).abs(), epsilon=5e-5) for sides in ((p, q), (p32, q32))]
    assert float(values[0]) == pytest.approx(float(values[1]), rel=0.02)


def test_one_far_and_light_point_of_a_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otloss.solvers.exact.clouds.CLOUD_LIMITS", CloudLimits(min_pairs=2**15))
    x, y = torch.randn(2, 300, 2, generator=torch.Generator().manual_seed(0))
    x[0], weights = 1e4, torch.ones(300)
    weights[0] = 1e-4
    weights = weights / weights.sum()
    by_matrix = otloss.emd(weights, torch.full((300,), 1 / 300), PointCost(x, y).dense())
    torch.testing.assert_close(otloss.cloud_loss(x, y, weights, kind="emd"), by_matrix, rtol=1e-4, atol=0.0)
    assert float(by_matrix) > 1e8 * 1e-4 / 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clouds_far_apart_keep_small_potentials(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a matrix: nothing is exchanged between two clusters, so that any constant between them is optimal."""
    monkeypatch.setattr("otloss.solvers.exact.clouds.CLOUD_LIMITS", CloudLimits(min_pairs=2**15))
    x, y = torch.randn(2, 300, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:150], y[:150] = x[:150] + 1e4, y[:150] + 1e4
    cost = PointCost(x.to(dtype), y.to(dtype))
    solution = otloss.solve(None, None, cost)
    near = otloss.solve(None, None, PointCost(cost.x[:150], cost.y[:150])).value
    rest = otloss.solve(None, None, PointCost(cost.x[150:], cost.y[150:])).value
    torch.testing.assert_close(solution.value, (near + rest) / 2)
    assert max(float(potential.abs().max()) for potential in solution.potentials) < 1e3
    assert float(solution.gap) < 1e-4  # what rounding of weights in float64 would pay between the clusters


def test_clusters_so_far_apart_that_costs_between_them_have_no_digits_for_those_within(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("otloss.solvers.exact.clouds.CLOUD_LIMITS", CloudLimits(min_pairs=2**15))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 300, 1, generator=generator, dtype=torch.float64)
    p, q = torch.rand(2, 300, generator=generator, dtype=torch.float64) + 0.01
    parts = slice(0, 140), slice(140, 299), slice(299, 300)
    for k, part in enumerate(parts):
        x[part], y[part], q[part] = x[part] + k * 1e8, y[part] + k * 1e8, q[part] * (p[part].sum() / q[part].sum())
    weights = (p / p.sum()).requires_grad_()
    solution = otloss.solve(weights, q / q.sum(), PointCost(x, y))
    (gradient,) = torch.autograd.grad(solution.value, weights)
    right = 0.0
    for part in parts:
        own = (p[part] / p[part].sum()).requires_grad_()
        value = otloss.emd(own, q[part] / q[part].sum(), PointCost(x[part], y[part]))
        (expected,) = torch.autograd.grad(value, own)
        right += float(value.detach() * p[part].sum() / p.sum())
        torch.testing.assert_close(gradient[part] - gradient[part].mean(), expected)
    assert float(solution.value.detach()) == pytest.approx(right, rel=1e-7)
    assert float(solution.potential_error.detach()) < 1e-12


@pytest.mark.parametrize("epsilon", [None, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_prices_beside_infinite_ones(dtype: torch.dtype, epsilon: float | None) -> None:
    """Rounding of flows, times a price above all finite ones, must not become a part of the value."""
    for seed in range(12):
        problem = priced(seed, dtype, largest=16.0)
        among = problem.rows[:, None] != problem.columns
        matrix = problem.cost.masked_fill(among & (torch.rand(among.shape) < 0.5), torch.inf)
        right = otloss.solve(problem.p, problem.q, problem.cost, epsilon=epsilon)
        solution = otloss.solve(problem.p, problem.q, matrix, epsilon=epsilon)
        torch.testing.assert_close(solution.value, right.value, rtol=1e-4, atol=1e-5)


def test_gradients_of_points_in_clusters_far_apart() -> None:
    """Sums over float32 coordinates of 1e4 cancel to differences of 1."""
    x, y = torch.randn(2, 16, 2, generator=torch.Generator().manual_seed(1))
    x[:8], y[:8] = x[:8] + 1e4, y[:8] + 1e4
    gradients = []
    for dtype in (torch.float32, torch.float64):
        points = x.detach().to(dtype, copy=True).requires_grad_()
        p = torch.full((16,), 1 / 16, dtype=dtype)
        otloss.sinkhorn(p, p, PointCost(points, y.to(dtype)), epsilon=0.2, tolerance=1e-6).backward()
        gradients.append(points.grad.double())
    torch.testing.assert_close(
        gradients[0], gradients[1], rtol=0.0, atol=1e-3 * float(gradients[1].norm(dim=-1).mean())
    )


def test_a_chain_of_dear_pairs_within_a_block_costs_more_than_leaving_it() -> None:
    """Light bins next to no rounding leave their block at 1,000, since three pairs of 900 within it cost more."""
    light, far = 60, 1e9
    n = light + 6
    cost = torch.full((n, n), far)
    cost.fill_diagonal_(0.0)
    heavy = torch.arange(light, n)
    cost[heavy, heavy] = 1.0
    a, b = heavy[:3], heavy[3:]
    cost[:light, :light] = far
    cost[:light, a[0]] = cost[a[0], a[1]] = cost[a[1], a[2]] = cost[a[2], :light] = 900.0
    cost[:light, b[0]] = cost[b[0], :light] = 1000.0
    cost[b[0], b[1]] = cost[b[1], b[2]] = cost[b[2], b[0]] = 900.0
    p = torch.ones(n)
    p[:light] = 6e-5
    p /= p.sum()
    for dear in (far, 2e4):
        matrix = torch.where(cost == far, dear, cost)
        right = linprog_value(p.double().numpy(), p.double().numpy(), matrix.double().numpy())
        assert float(otloss.emd(p, p, matrix)) == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("wide", [False, True], ids=["float32 costs", "float64 costs"])
@pytest.mark.parametrize("light", [(0.0, 0.0), (1e-12, 1e-12), (1e-30, 3e-30)])
def test_weights_of_float32_are_balanced_by_block_beside_bins_of_next_to_no_mass(
    light: tuple[float, float], wide: bool
) -> None:
    """Three bins, one that fits only itself, and one that is light, or empty as padding is: as with +inf for 1e9."""
    cost = torch.full((5, 5), 1e9)
    cost[:3, :3] = torch.tensor([[3.6, 1.8, 4.2], [3.2, 3.7, 4.1], [4.5, 4.7, 4.2]])
    cost[3, 3] = cost[4, 4] = 0.0
    p = torch.tensor([0.31, 0.26, 0.23, 0.2, light[0]], requires_grad=True)
    q = torch.tensor([0.22, 0.29, 0.29, 0.2, light[1]])
    solution = otloss.solve(p, q, cost.double() if wide else cost)
    (gradient,) = torch.autograd.grad(solution.value, p)
    assert float(solution.value.detach()) == pytest.approx(2.44, rel=1e-5)
    assert float(gradient[1] - gradient[0]) == pytest.approx(-0.1, abs=1e-3)


def test_float64_weights_that_were_rounded_to_float32_are_named() -> None:
    cost = torch.full((4, 4), 1e9, dtype=torch.float64)
    cost[:3, :3], cost[3, 3] = torch.tensor([[3.6, 1.8, 4.2], [3.2, 3.7, 4.1], [4.5, 4.7, 4.2]]).double(), 0.0
    p, q = torch.tensor([0.31, 0.26, 0.23, 0.2]), torch.tensor([0.22, 0.29, 0.29, 0.2])
    with pytest.warns(ConvergenceWarning, match="Scale the weights so that they agree"):
        otloss.emd(p.double(), q.double(), cost)


def near_equal(seed: int, dtype: torch.dtype, difference: float) -> Priced:
    """Two blocks of three bins with q near p, at cost 0 from p to q in place."""
    generator = torch.Generator().manual_seed(seed)
    labels, x = torch.arange(6) // 3, torch.arange(6) % 3
    p, noise = torch.rand(6, generator=generator).double() + 0.1, torch.randn(2, 6, generator=generator).double()
    p /= p.sum()
    change = difference * (noise[0] - torch.stack([noise[0, :3].mean(), noise[0, 3:].mean()])[labels])
    q = p.to(dtype).double() * (1 + torch.finfo(dtype).eps / 2 * noise[1]) + change
    return Priced(p.to(dtype), q.to(dtype), (x[:, None] - x).abs().to(dtype), labels, labels)


@pytest.mark.parametrize("price", [1e5, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_that_agree_up_to_rounding_pay_no_price(dtype: torch.dtype, price: float) -> None:
    """The end of a training: all but rounding stays in place, so that the price is the largest cost of all by far."""
    for seed, difference in ((0, 0.0), (1, 0.0), (2, 1e-6), (3, 1e-5)):
        problem = near_equal(seed, dtype, difference)
        among = problem.rows[:, None] != problem.columns
        value, _, _ = by_blocks(problem, None)
        p = problem.p.clone().requires_grad_()
        solution = otloss.solve(p, problem.q, problem.cost.masked_fill(among, price))
        (gradient,) = torch.autograd.grad(solution.value, p)
        infinite = otloss.emd(problem.p, problem.q, problem.cost.masked_fill(among, torch.inf))
        size = 2 * torch.finfo(dtype).eps
        assert float(solution.value.detach()) == pytest.approx(value, abs=size, rel=1e-5)
        assert float(infinite) == pytest.approx(value, abs=size, rel=1e-2)
        f, g = (potential.detach().double() for potential in solution.potentials)
        assert float((f[:, None] + g - problem.cost.masked_fill(among, price)).max()) < size
        assert float(problem.p.double() @ f + problem.q.double() @ g) == pytest.approx(value, abs=8 * size, rel=1e-4)
        assert float(gradient.abs().max()) < 3
        assert 0 < float(solution.gap) < 20 * size * price


def test_weights_that_stay_in_place_with_prices_between_them() -> None:
    """The plan pays nothing but the price: which costs are small is seen in the matrix."""
    problem = near_equal(4, torch.float32, 0.0)
    q = (problem.p.double() * (1 + torch.tensor([1e-7, -1e-7]).double()[problem.rows])).float()
    cost = torch.where(problem.rows[:, None] == problem.columns, problem.cost, 1e9)
    p = problem.p.clone().requires_grad_()
    value = otloss.emd(p, q, cost)
    assert float(value.detach()) < 1e-6
    assert float(torch.autograd.grad(value, p)[0].abs().max()) < 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tail_beside_one_heavy_bin(dtype: torch.dtype) -> None:
    """Each bin of the tail is as light as rounding of the whole; together they are a block."""
    sizes = (1e-3, 1e-5) if dtype == torch.float32 else (5e-7,)
    for mass in sizes:
        generator = torch.Generator().manual_seed(0)
        tails = mass * torch.softmax(torch.rand(2, 60, generator=generator, dtype=torch.float64), -1)
        p, q = (torch.cat([1 - tail.sum().reshape(1), tail]).to(dtype).requires_grad_() for tail in tails)
        cost = torch.full((61, 61), 1e9, dtype=dtype)
        cost[0, 0], cost[1:, 1:] = 0.0, torch.rand(60, 60, generator=generator)
        values, gradients = [], []
        for price in (1e9, torch.inf):
            value = otloss.emd(p, q, cost.masked_fill(cost == 1e9, price))
            values.append(value.detach())
            gradients.append([w[1:] - w[1:].mean() for w in torch.autograd.grad(value, (p, q))])
        torch.testing.assert_close(*values, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_near_points_are_no_prices_for_others() -> None:
    """Weights that agree to 1e-11 in float64, a pair of points 1e-6 apart, no warning: all of that is ordinary."""
    x = torch.tensor([0.0, 1e-6, 0.7, 1.3, 2.1], dtype=torch.float64)
    p = torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15], dtype=torch.float64)
    q = p + 1e-12 * torch.tensor([2.0, -1.0, 3.0, -2.0, -2.0], dtype=torch.float64)
    right = 1e-12 * (0.7**2 + 2 * 0.6**2 + 2 * 0.8**2)
    assert float(otloss.emd(p, q, (x[:, None] - x).square())) == pytest.approx(right, rel=1e-3)


def test_groups_of_bins_without_costs() -> None:
    """All positive costs are prices between groups; where each bin is a group, they are the costs that there are."""
    problem = near_equal(4, torch.float32, 0.0)
    among = problem.rows[:, None] != problem.columns
    assert float(otloss.emd(problem.p, problem.q, 1e9 * among.float())) < 1e-6
    p, q = (w.double() for w in problem[:2])
    value = otloss.emd(problem.p, problem.q, 1 - torch.eye(6))
    assert float(value) == pytest.approx(float((p - q * (p.sum() / q.sum())).abs().sum()) / 2, rel=1e-3)


def test_prices_below_a_thousand_times_what_is_paid() -> None:
    """They are costs like any: rounding pays them, the gap holds it, and the potentials are optimal for it."""
    for seed in range(24):
        dtype = (torch.float32, torch.float64)[seed % 2]
        problem = priced(seed, dtype, largest=3.5)
        among = problem.rows[:, None] != problem.columns
        cost = torch.where(among, problem.cost * 10 ** (-2.5 * (seed + 1) / 24), problem.cost)
        solution = otloss.solve(*problem[:2], cost)
        p, q, wide = (t.double() for t in (*problem[:2], cost))
        right = linprog_value(p.numpy(), (q * (p.sum() / q.sum())).numpy(), wide.numpy())
        f, g = (potential.double() for potential in solution.potentials)
        rounding = 4 * torch.finfo(dtype).eps * float(cost.max())
        assert abs(float(solution.value) - right) <= float(solution.gap) + 1e-7 * right, seed
        assert float((f[:, None] + g - wide).max()) <= rounding
        assert float(p @ f + q @ g) == pytest.approx(right, abs=rounding)


def test_light_bins_that_have_to_pay_are_not_named() -> None:
    """What a light point far away moves is not rounding, though it is a rounding of the heavy bins."""
    x = torch.tensor([0.0, 1.0, 2.0, 3.0, 1e3], dtype=torch.float64)
    p = torch.tensor([0.3, 0.2, 0.4, 0.1, 3e-7], dtype=torch.float64)
    q = torch.tensor([0.1, 0.4, 0.2, 0.3 + 3e-7, 0.0], dtype=torch.float64)
    cost = (x[:, None] - x).square()
    assert float(otloss.emd(p, q, cost)) == pytest.approx(linprog_value(p.numpy(), q.numpy(), cost.numpy()), rel=1e-6)


def far_clusters(count: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Clouds in clusters of equal mass, and the cluster of each point."""
    generator = torch.Generator().manual_seed(count)
    labels = torch.arange(count * size) % count
    centres = 1e4 * torch.stack([labels % 10, labels // 10], -1)
    x, y = torch.randn(2, count * size, 2, generator=generator, dtype=torch.float64) + centres
    return x, y, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [65, 100])
def test_many_far_clusters(count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otloss.solvers.exact.clouds.CLOUD_LIMITS", CloudLimits(min_pairs=2**15))
    x, y, labels = far_clusters(count, 4)
    weights = torch.rand(2, len(labels), generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    sums = torch.zeros(2, count, dtype=torch.float64).index_add_(1, labels, weights)
    p, q = (weights / sums[:, labels] / count).to(dtype)
    cost = PointCost(x.to(dtype), y.to(dtype))
    right = 0.0
    for k in range(count):
        own, among = labels == k, PointCost(cost.x[labels == k].double(), cost.y[labels == k].double())
        right += float(otloss.emd(p[own].double(), q[own].double() * (p[own].sum() / q[own].sum()), among))
    p.requires_grad_()
    solution = otloss.solve(p, q, cost)
    (gradient,) = torch.autograd.grad(solution.value, p)
    assert float(solution.value.detach()) == pytest.approx(right, rel=1e-5)
    assert float(gradient.abs().max()) < 100
    assert 0 < float(solution.gap) < 3 * len(labels) * torch.finfo(dtype).eps * float(cost.largest())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "scale"), [(20, 1e4), (80, 1e4), (80, 1e3)])
def test_chains_of_far_clusters(count: int, scale: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Distances between clusters lie on both sides of a price: blocks are chains, and boxes around them overlap."""
    monkeypatch.setattr("otloss.solvers.exact.clouds.CLOUD_LIMITS", CloudLimits(min_pairs=2**15))
    generator = torch.Generator().manual_seed(2)
    centres = scale * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    labels = torch.randint(count, (600,), generator=generator)
    x, y = (centres[labels] + torch.randn(600, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    weights = torch.rand(2, 600, generator=generator, dtype=torch.float64) + 0.05
    sums = torch.zeros(2, count, dtype=torch.float64).index_add_(1, labels, weights)
    p, q = (weights / sums[:, labels] / len(labels.unique())).to(dtype)
    cost = PointCost(x.to(dtype), y.to(dtype), metric="euclidean")
    solution = otloss.solve(p, q, cost)
    exact = otloss.emd(p.double(), q.double(), cost.to(torch.float64).dense())
    rounding = torch.finfo(dtype).eps * float(cost.largest())
    assert abs(float(solution.value) - float(exact)) <= float(solution.gap) + 4 * rounding


@pytest.mark.parametrize("separation", [1e3, 1e4])
@pytest.mark.parametrize("size", [10, 300], ids=["matrix", "no matrix"])
def test_equal_clouds_with_weights_that_agree_up_to_rounding(
    size: int, separation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("otloss.solvers.exact.clouds.CLOUD_LIMITS", CloudLimits(min_pairs=2**15))
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(size, 2, generator=generator), torch.randn(size, generator=generator, dtype=torch.float64)
    x[size // 2 :, 0] += separation
    weights = torch.rand(size, generator=generator) + 0.1
    weights /= weights.sum()
    others = (weights.double() * (1 + 6e-8 * noise)).float()
    weights.requires_grad_()
    value = otloss.cloud_loss(x, x.clone(), weights, others, kind="emd")
    assert 0 <= float(value.detach()) < 1e-6
    assert float(torch.autograd.grad(value, weights)[0].abs().max()) < 100


def test_clouds_with_float64_weights_that_were_rounded_to_float32_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otloss.solvers.exact.clouds.CLOUD_LIMITS", CloudLimits(min_pairs=2**15))
    x, y, labels = far_clusters(2, 150)
    p, q = torch.rand(2, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    for w in (p, q):
        w /= torch.zeros(2, dtype=torch.float64).index_add_(0, labels, w)[labels]
    with pytest.warns(ConvergenceWarning, match="Scale the weights so that they agree"):
        otloss.solve((p / 2).float().double(), (q / 2).float().double(), PointCost(1e3 * x, 1e3 * y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_prices_of_several_sizes_beside_a_small_epsilon_are_as_infinite_ones(dtype: torch.dtype) -> None:
    """Between blocks and within them, in batches with and without prices; a plan that avoids them all exists."""
    for seed in range(60):
        chosen, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        blocks, size = chosen.choice([(2, 1), (2, 2), (2, 3), (3, 3), (5, 3)])
        rows, columns = (torch.randperm(blocks * size, generator=generator) % blocks for _ in "pq")
        n, largest = len(rows), chosen.choice([1.0, 10.0, 300.0])
        cost, uniform, weights = (torch.rand(n, n, generator=generator, dtype=torch.float64) for _ in range(3))
        is_dear = (rows[:, None] != columns) | (uniform < 0.3)
        is_dear[rows.argsort(), columns.argsort()] = False
        plan = weights.masked_fill(is_dear, 0.0) / n
        p, q = plan.sum(1).to(dtype), plan.sum(0).to(dtype)
        prices = torch.tensor([1e6, 1e9, 1e12, 1e15], dtype=torch.float64)[: chosen.randint(1, 4)]
        dear = prices[torch.randint(len(prices), (n, n), generator=generator)]
        matrix = torch.where(is_dear, dear, largest * cost).to(dtype)
        problems = torch.stack([matrix, (largest * cost).to(dtype)])
        options = {"epsilon": largest * 10 ** chosen.uniform(-5, -1.5), "max_iterations": 100_000, "tolerance": 1e-8}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            both = otloss.sinkhorn(p, q, problems, **options)  # type: ignore[arg-type]
            right = otloss.sinkhorn(p, q, problems.masked_fill(problems >= 1e5, torch.inf), **options)  # type: ignore[arg-type]
        torch.testing.assert_close(both, right, rtol=1e-4 if dtype == torch.float32 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("price", [1e6, 1e12])
def test_a_chain_that_the_weights_leave_no_choice(price: float) -> None:
    """Row 2 fits column 2 alone, so that row 1 has to take column 1: the potentials would climb to half the price."""
    p = torch.tensor([0.5, 0.5], dtype=torch.float64, requires_grad=True)
    cost = torch.tensor([[3.0, 1.0], [price, 2.0]], dtype=torch.float64, requires_grad=True)
    with pytest.warns(ConvergenceWarning, match="gradients of the weights are uncertain"):
        solution = otloss.solve(p, p.detach(), cost, epsilon=1e-3)
    solution.value.backward()
    plan = torch.diag(torch.full((2,), 0.5, dtype=torch.float64))
    assert float(solution.value.detach()) == pytest.approx(2.5 + 1e-3 * math.log(2))
    torch.testing.assert_close(cost.grad, plan, rtol=0.0, atol=1e-9)
    torch.testing.assert_close(solution.plan().detach(), plan, rtol=0.0, atol=1e-9)
    q = p.detach() + torch.tensor([-1e-3, 1e-3], dtype=torch.float64)
    assert float(otloss.sinkhorn(p, q, cost, epsilon=1e-3).detach()) < 3
    with pytest.raises(otloss.SmallEpsilonError):  # a thousandth has to pay
        otloss.sinkhorn(p, q.flip(0), cost, epsilon=1e-6)


@pytest.mark.parametrize("seed", [0, 7, 10, 27, 30])
def test_blocks_whose_ordinary_costs_are_many_epsilons_pay_no_price_for_rounding(seed: int) -> None:
    """Bins joined by cheap pairs alone were smaller than the blocks, whose masses differed: up to 7e-4 of the value.

    One row of each block has mass, so that the plan is known.
    """
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    cost = 8e9 * 2.0 ** torch.randint(0, 2, (11, 5), generator=generator).double()
    cost[:4, :2], cost[4:10, 2:4] = 2.5e5 * numbers(4, 2), 2.5e5 * numbers(6, 2)
    p, q, epsilon = torch.zeros(11, dtype=torch.float64), torch.zeros(5, dtype=torch.float64), 0.7
    p[3:5] = numbers(2) + 0.1
    share = numbers(1)[0]
    q[1:4] = torch.stack([p[3], p[4] * share, p[4] * (1 - share)]) / p.sum()
    p, q, cost = (p / p.sum()).float(), q.float(), cost.float()
    held, costs = q.double()[1:4], cost.double()[[3, 4, 4], [1, 2, 3]]
    held = torch.cat([p.double()[3:4], held[1:] * (p.double()[4] / held[1:].sum())])
    expected = (held * (costs - epsilon * p.double()[[3, 4, 4]].log())).sum()
    value = otloss.solve(p, q, cost, epsilon=epsilon).value
    assert value.item() == pytest.approx(expected.item(), rel=2e-6)


@pytest.mark.parametrize("grad", ["envelope", "implicit"])
def test_masses_that_differ_by_rounding_do_not_multiply_a_price_that_light_mass_pays(grad: str) -> None:
    p, q = torch.tensor([1.0, 3e-8]), torch.tensor([0.0, 3e-7, 2.5e-5, 0.9999745])
    cost = torch.tensor([[4.7, 1e4, 1e4, 2.4], [1.2, 5.0, 3.3, 1.2]])
    value = otloss.solve(p, q, cost, epsilon=0.01, grad=grad).value
    wide = otloss.solve(p.double(), q.double(), cost.double(), epsilon=0.01).value
    assert float(p.double().sum() - q.double().sum()) != 0
    torch.testing.assert_close(value.double(), wide, rtol=1e-6, atol=0)


@pytest.mark.parametrize("epsilon", [None, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mass_that_no_plan_keeps_from_infinite_costs_is_a_marginal_error(
    dtype: torch.dtype, epsilon: float | None
) -> None:
    p, q = torch.tensor([1 - 1e-9, 1e-9], dtype=dtype), torch.tensor([9e-7, 1 - 9e-7], dtype=dtype)
    cost = torch.tensor([[torch.inf, 1.0], [2.0, 3.0]], dtype=dtype)
    solution = otloss.solve(p, q, cost, epsilon=epsilon)
    plan = solution.plan().double()
    error = (plan.sum(1) - p.double()).abs().sum() + (plan.sum(0) - q.double()).abs().sum()
    assert float(error) > 1e-6
    assert float(solution.marginal_error) == pytest.approx(float(error), rel=0.1)


def test_gradients_of_bins_with_mass_are_centred_where_other_bins_are_light() -> None:
    """Two derivatives of q differ by 8e-6 and the third by 1: their mean is not taken for the work of a price."""
    cost = torch.tensor([[1.0, 3.0, 2.0], [3.0, 3.0, 2.0]], dtype=torch.float64)
    for light in (1e-4, 1e-5, 3e-6, 1e-6, 0.0):
        q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64, requires_grad=True)
        p = torch.tensor([light, 1 - light], dtype=torch.float64)
        (gradient,) = torch.autograd.grad(otloss.sinkhorn(p, q, cost, epsilon=1.0), q)
        expected = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64) / 3
        torch.testing.assert_close(gradient, expected, rtol=0, atol=10 * light + 1e-9)
    cost = torch.tensor([[1.0, 1.0], [1.00001, 1.0], [3.0, 3.0]], dtype=torch.float64)
    q = torch.tensor([0.4, 0.6], dtype=torch.float64)
    for light in (1e-5, 3e-6, 1e-9):  # of the side itself: one bin has nothing to lose
        p = torch.tensor([light, 1 - 2 * light, light], dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(otloss.sinkhorn(p, q, cost, epsilon=0.1), p)
        expected = torch.tensor([-2.0, -2.0, 4.0], dtype=torch.float64) / 3
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5)
