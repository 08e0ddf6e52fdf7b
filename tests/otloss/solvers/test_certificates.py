"""What an answer says of its own error, against optima in 50 digits: gap, potential_error and the warnings."""

import math
import random
import warnings
from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor

import otloss
from otloss import ConvergenceWarning
from otloss.costs import GridCost, PointCost
from otloss.solvers.exact.clouds import CloudLimits
from tests.otloss.oracles import precise_potentials
from tests.samples import sampled


class Case(NamedTuple):
    p: Tensor
    q: Tensor
    cost: Tensor
    epsilon: float
    marginal_penalty: float | None


def hostile(seed: int, *, balanced: bool) -> Case:
    """Small problems with blocks, ties and light bins; in unbalanced ones masses and penalties of any size."""
    chosen, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = chosen.choice([torch.float32, torch.float64])
    n, m = chosen.choice([2, 4, 5]), chosen.choice([2, 4, 5])
    cost = torch.rand(n, m, generator=generator, dtype=torch.float64)
    kind = chosen.choice(["random", "blocks", "ties"])
    if kind == "blocks":
        rows, columns = (torch.randint(0, 2, (k,), generator=generator) for k in (n, m))
        cost = 0.3 * cost + 2.0 * (rows[:, None] != columns)
    elif kind == "ties":
        cost = (5 * cost).floor()
    scale = max(float(cost.mean()), 1e-2)
    light = chosen.choice([0, 0, 1, 5])  # uniform weights have the most plans in parts of equal mass
    p, q = (10 ** (-light * torch.rand(k, generator=generator, dtype=torch.float64)) for k in (n, m))
    p, q = p / p.sum(), q / q.sum()
    penalty = None
    if not balanced:
        penalty = scale * 10 ** chosen.uniform(-1, 7)
        q = q * chosen.choice([1.0, 1.0, 0.1, 3.0])
        size = chosen.choice([1.0, 1.0, 770.0])
        p, q = size * p, size * q
    return Case(p.to(dtype), q.to(dtype), cost.to(dtype), scale * 10 ** chosen.uniform(-2.3, 1), penalty)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("first", sampled(1, [0, 20, 40]))
def test_gap_and_potential_error_hold_what_they_say(first: int, balanced: bool) -> None:
    unknown = 0
    for seed in range(first, first + 20):
        case = hostile(seed, balanced=balanced)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # parts that exchange nothing warn
            try:
                solution = otloss.solve(*case[:3], epsilon=case.epsilon, marginal_penalty=case.marginal_penalty)
            except otloss.solvers.options.SmallEpsilonError:
                continue
        epsilon = float(torch.tensor(case.epsilon, dtype=case.cost.dtype))
        posed = [w.double().tolist() for w in (solution._problem.p, solution._problem.q)]  # balanced in their dtype
        g = solution._solution.potentials[1].tolist()
        told = float(solution._solution.potential_error)
        unknown += math.isinf(told)
        try:
            _, right, optimum = precise_potentials(*posed, case.cost.tolist(), epsilon, case.marginal_penalty, g)
        except ValueError:
            assert math.isinf(told)
            continue
        off = [float(a) - b for a, b in zip(right, g, strict=True)]
        shift = (max(off) + min(off)) / 2 if balanced else 0.0
        rounding = 1e-12 * max(*map(abs, g), epsilon) + 1e-7 * epsilon * (case.cost.dtype == torch.float32)
        assert max(abs(x - shift) for x in off) <= 2 * told + rounding, seed
        missing = float(optimum - float(solution.dual_value))
        assert 0 <= missing <= float(solution.gap), seed
    assert unknown <= 4


@pytest.mark.parametrize("penalty", [1e5, 1e8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_penalty_leaves_the_gradients_right(penalty: float, dtype: torch.dtype) -> None:
    """The constant between the potentials counts in the marginal error only as itself over the penalty."""
    p = torch.full((3,), 1 / 3, dtype=dtype, requires_grad=True)
    q = torch.tensor([0.2, 0.3, 0.5], dtype=dtype, requires_grad=True)
    cost = torch.tensor([[3.6, 1.8, 4.2], [3.2, 3.7, 4.1], [4.5, 4.7, 4.2]], dtype=dtype)
    epsilon = 2.0**-10
    otloss.sinkhorn(p, q, cost, epsilon=epsilon, marginal_penalty=penalty).backward()
    g = otloss.solve(p.detach(), q.detach(), cost, epsilon=epsilon, marginal_penalty=penalty).potentials[1]
    potentials = precise_potentials(p.tolist(), q.tolist(), cost.tolist(), epsilon, penalty, g.tolist())
    for weights, potential in zip((p, q), potentials, strict=False):
        share = torch.tensor([float(x) for x in potential], dtype=torch.float64) / penalty
        right = -penalty * torch.expm1(-share) - epsilon * torch.expm1(-share)
        torch.testing.assert_close(
            weights.grad.double(), right, rtol=0.0, atol=1e-4 if dtype == torch.float32 else 1e-6
        )


def test_an_unknown_error_of_the_potentials_is_infinite_and_warned_of() -> None:
    """Two parts that exchange exp(-40) of the mass: float64 cannot tell how their potentials compare."""
    p, cost = torch.full((2,), 0.5, dtype=torch.float64), torch.tensor([[0.0, 1.0], [1.5, 0.0]], dtype=torch.float64)
    assert float(otloss.solve(p, p, cost, epsilon=1 / 16).potential_error) < 1e-3
    with pytest.warns(ConvergenceWarning, match="unknown amount"):
        solution = otloss.solve(p.clone().requires_grad_(), p, cost, epsilon=1 / 32)
    assert bool(solution.potential_error.isinf())


def test_parts_of_equally_many_bins_of_equal_mass() -> None:
    """The eigenvector that tells parts {0, 3} and {1, 2} apart is orthogonal to many regular starts."""
    p, q = torch.full((2,), 0.5), torch.full((4,), 0.25)
    cost = torch.tensor([[0.0, 1.56, 3.04, 0.92], [2.63, 0.0, 2.94, 3.07]])
    with pytest.warns(ConvergenceWarning, match="unknown amount"):
        solution = otloss.solve(p.clone().requires_grad_(), q, cost, epsilon=0.03)
    assert bool(solution.potential_error.isinf())


def test_a_light_bin_far_from_its_start() -> None:
    """With a penalty, its potential moves by some hundred epsilons, and hardly counts in the marginal error."""
    p, q = torch.tensor([[1.34, 8e-9], [0.65, 8e-9]], dtype=torch.float64)
    cost = torch.tensor([[0.0, 10.0], [1.0, 0.0]], dtype=torch.float64)
    solution = otloss.solve(p, q, cost, epsilon=0.01, marginal_penalty=12.5)
    f, g, _ = precise_potentials(p.tolist(), q.tolist(), cost.tolist(), 0.01, 12.5, solution.potentials[1].tolist())
    for potential, right in zip(solution.potentials, (f, g), strict=True):
        expected = torch.tensor([float(x) for x in right], dtype=torch.float64)
        torch.testing.assert_close(potential, expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(
    ("p", "q", "far", "epsilon", "penalty", "dtype"),
    [
        ([1.0, 1e-22], [1.0, 1e-22], 7e3, 0.05, 0.01, torch.float32),
        ([1.0, 1e-24], [1.0, 1e-24], 2e4, 0.5, 1.0, torch.float32),
        ([1.0, 1e-7], [3e-25, 1.0], 150.0, 0.5, 1.5, torch.float32),  # heavy bins keep less mass than light ones
    ],
)
def test_bins_too_light_for_the_factors_of_the_kernel(
    p: list[float], q: list[float], far: float, epsilon: float, penalty: float, dtype: torch.dtype
) -> None:
    """With wrong potentials they would hold more mass than all others, and no gradient of theirs would be right."""
    weights, other = (torch.tensor(w, dtype=dtype) for w in (p, q))
    cost = torch.tensor([[0.0, far], [far, 0.0]], dtype=dtype)
    solution = otloss.solve(weights.clone().requires_grad_(), other, cost, epsilon=epsilon, marginal_penalty=penalty)
    epsilon, start = float(torch.tensor(epsilon, dtype=dtype)), solution.potentials[1].tolist()
    f, g, optimum = precise_potentials(weights.tolist(), other.tolist(), cost.tolist(), epsilon, penalty, start)
    rounding = 1e-5 * (penalty + epsilon)
    assert bool(solution.converged)
    assert float(solution.value.detach()) == pytest.approx(float(optimum), abs=rounding)
    assert 0 <= float(optimum - float(solution.dual_value.detach())) <= float(solution.gap.detach()) < rounding
    for potential, right in zip(solution.potentials, (f, g), strict=True):
        assert potential.detach().tolist() == pytest.approx([float(x) for x in right], rel=1e-3, abs=0.1 * epsilon)


@pytest.mark.parametrize("kind", ["exact", "clouds", "partial", "entropic"])
@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean"])
def test_the_gap_counts_the_rounding_of_weights(kind: str, metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At p = q up to rounding all of the value may come from the weights being scaled to equal masses in float32."""
    monkeypatch.setattr("otloss.solvers.exact.clouds.CLOUD_LIMITS", CloudLimits(min_pairs=2**15))
    n = 300 if kind == "clouds" else 12
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        x, p = torch.randn(n, 2, generator=generator), torch.rand(n, generator=generator) + 0.05
        p = p / p.sum()
        q = (p.double() * (1 + 1e-7 * torch.randn(n, generator=generator, dtype=torch.float64))).float()
        wide = p.double(), q.double() * (p.double().sum() / q.double().sum())
        options: dict[str, float] = {"mass": 0.9} if kind == "partial" else {}
        options |= {"epsilon": 0.1} if kind == "entropic" else {}
        solution = otloss.solve(p, q, PointCost(x, x.clone(), metric=metric), **options)
        right = otloss.solve(*wide, PointCost(x.double(), x.clone().double(), metric=metric).dense(), **options)
        error = abs(float(solution.value) - float(right.value))
        assert error <= float(solution.gap) + 1e-7 * abs(float(right.value)), seed
        assert float(solution.gap) < 2e-6 * float(PointCost(x, metric=metric).largest())


@pytest.mark.parametrize("epsilon", [None, 0.5])
@pytest.mark.parametrize("sizes", [(6, 6), (7, 11), (49, 97)])
def test_equal_weights_have_no_rounding_but_of_their_mass(sizes: tuple[int, int], epsilon: float | None) -> None:
    """1 / n in float32 gives a mass of one up to a rounding, and the value is proportional to the mass."""
    x, y = (torch.randn(n, 2, generator=torch.Generator().manual_seed(n)) for n in sizes)
    cost = PointCost(x, y + 1).dense()
    answer = otloss.solve(None, None, cost, epsilon=epsilon, tolerance=None if epsilon is None else 1e-9)
    exact_weights = otloss.solve(None, None, cost.double(), epsilon=epsilon)
    right, lower = float(exact_weights.value), float(answer.dual_value)
    assert lower <= right <= lower + float(answer.gap)
    assert float(answer.gap) < 2e-7 * right
    assert float(otloss.solve(None, None, PointCost(x, x)).gap) < 1e-12


@pytest.mark.parametrize("clusters", [1, 3])
def test_the_error_of_potentials_without_a_matrix_is_that_with_one(
    clusters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    shift = 2.0 * (torch.arange(60) % clusters).double()[:, None]
    x, y = shift + torch.rand(2, 60, 2, generator=generator, dtype=torch.float64)
    p, q = torch.rand(2, 60, generator=generator, dtype=torch.float64) + 0.1
    q[3] = 0
    problem = p / p.sum(), q / q.sum(), PointCost(x, y)
    options = {"epsilon": 0.3, "tolerance": 1e-6, "impl": "torch"}
    right = otloss.solve(*problem, **options)  # type: ignore[arg-type]
    monkeypatch.setattr("otloss.solvers.entropic.equations.dual.LARGEST_FOR_EIGENVALUE", 0)
    solution = otloss.solve(*problem, **options)  # type: ignore[arg-type]
    assert float(solution.potential_error) == pytest.approx(float(right.potential_error), rel=0.5)


def newton_step(p: Tensor, q: Tensor, cost: Tensor, b: Tensor) -> tuple[Tensor, float]:
    """What b = g / epsilon lacks, to first order and with mean 0 over q, and the second eigenvalue of the equations."""
    rows, scale = torch.softmax(q.log() - cost + b, -1), q.sqrt()
    received = p @ rows
    curvature = torch.diag(received) - rows.mT @ (p[:, None] * rows) + q[:, None] * q
    values, vectors = torch.linalg.eigh(curvature / (scale[:, None] * scale))
    step = vectors @ ((vectors.mT @ ((q - received) / scale)) / values) / scale
    return step - q @ step, float(values[0])


@pytest.mark.parametrize("light", [1e-2, 1e-8, 1e-10])
@pytest.mark.parametrize("impl", ["torch", "compiled"])
def test_the_error_of_potentials_without_a_matrix_sees_one_cell_apart(
    impl: Literal["torch", "compiled"], light: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A noisy disc, and one cell at any place, of any weight, that exchanges next to nothing with it."""
    monkeypatch.setattr("otloss.solvers.entropic.equations.dual.LARGEST_FOR_EIGENVALUE", 0)
    size, epsilon = 16, 0.002
    cost = GridCost((size, size), spacing=1 / (size - 1))
    y, x = torch.arange(size)[:, None], torch.arange(size)
    disc = (x - size // 2).square() + (y - size // 2).square() < (size / 4) ** 2
    noise = torch.rand(2, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * disc
    certain = []
    for cell in torch.nonzero(~disc.reshape(-1))[::45, 0]:
        p, q = (noise / noise.sum((-2, -1), keepdim=True)).reshape(2, -1)
        p[cell] = q[cell] = light
        p, q, has_mass = p / p.sum(), q / q.sum(), q > 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            solution = otloss.solve(p, q, cost, epsilon=epsilon, tolerance=1e-5, impl=impl)
        inside = cost.dense().double()[has_mass][:, has_mass] / epsilon
        lacks, smallest = newton_step(p[has_mass], q[has_mass], inside, solution.potentials[1][has_mass] / epsilon)
        told = float(solution.potential_error) / epsilon
        if smallest < 1e-11:  # rounding decides
            assert told == math.inf
        else:
            assert float(lacks.abs().max()) < 3 * told
        certain.append(told < math.inf)
    assert not all(certain)


def test_uncertain_gradients_are_named_without_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otloss.solvers.entropic.equations.dual.LARGEST_FOR_EIGENVALUE", 0)
    p, cost = torch.full((2,), 0.5, dtype=torch.float64), torch.tensor([[0.0, 1.0], [1.5, 0.0]], dtype=torch.float64)
    with pytest.warns(ConvergenceWarning, match="unknown amount"):
        otloss.sinkhorn(p.clone().requires_grad_(), p, cost, epsilon=1 / 32, impl="torch")


def test_the_gap_without_weights() -> None:
    solution = otloss.solve(
        torch.tensor([1.0]), torch.tensor([0.0, 1.0]), torch.tensor([[0.0, 1.0]]), epsilon=1e-4, marginal_penalty=1e-4
    )
    assert 0 <= float(solution.gap) < 1e-9


def test_divergences_are_below_zero_for_a_reason_only() -> None:
    """Equal histograms give 0 at least. A star, whose leaves are five times as far apart as from its hub, does not."""
    x, leaves = torch.arange(12.0), torch.full((6,), 1 / 5)
    star = torch.full((6, 6), 5.0)
    star[0], star[:, 0] = 1.0, 1.0
    star.fill_diagonal_(0.0)
    leaves[0] = 0.0
    for seed in range(10):
        p = torch.rand(12, generator=torch.Generator().manual_seed(seed))
        for penalty in (None, 1.0, 100.0):
            options = {"epsilon": 10.0 ** (seed % 5 - 2), "marginal_penalty": penalty}
            assert float(otloss.sinkhorn_divergence(p, p.clone(), (x[:, None] - x).square(), **options)) >= 0  # type: ignore[arg-type]
    for epsilon in (1e3, 1e4, 1e5):
        value = otloss.sinkhorn_divergence(torch.eye(6)[0], leaves, star, epsilon=epsilon)
        assert float(value) == pytest.approx(-1.0, abs=2e-3)


@pytest.mark.parametrize("epsilon", [None, 0.1])
def test_a_constant_in_the_start_changes_nothing(epsilon: float | None) -> None:
    one, cost = torch.ones(1, dtype=torch.float64), torch.full((1, 1), 0.38, dtype=torch.float64)
    solution = otloss.solve(one, one, cost, epsilon=epsilon, start=(-3e12 * one, 3e12 * one))
    assert float(solution.value) == pytest.approx(0.38)
    assert float(solution.gap) < 1e-12


@pytest.mark.parametrize("epsilon", [0.01, 0.001])
def test_uncertain_gradients_between_images_warn(epsilon: float) -> None:
    n = 33
    p, q = torch.rand(2, n, n, generator=torch.Generator().manual_seed(0))
    options = {"cost": GridCost((n, n), spacing=1 / n), "epsilon": epsilon}
    apart = [torch.cat([w[:, :8] / w[:, :8].sum(), w[:, 8:25] * 0, w[:, 25:] / w[:, 25:].sum()], 1) for w in (p, q)]
    with pytest.warns(ConvergenceWarning, match="unknown amount"):
        otloss.sinkhorn(*_of_mass_one(*apart), **options)  # type: ignore[arg-type]


def test_islands_off_the_blocks_of_coarse_images_warn_too() -> None:
    """Blocks of 4 x 4 cells put them nearer to each other, so their smallest eigenvalue exceeds the one of cells."""
    random = torch.rand(2, 64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    images = []
    for weights, rows, first in zip(random, (slice(0, 16), slice(30, 46)), (29, 31), strict=True):
        islands = [torch.zeros_like(weights) for _ in range(2)]
        for island, columns in zip(islands, (slice(12, first), slice(39, 56)), strict=True):
            island[rows, columns] = weights[rows, columns]
        images.append(sum(island / island.sum() / 2 for island in islands).flatten().requires_grad_())
    with pytest.warns(ConvergenceWarning, match="unknown amount"):
        otloss.sinkhorn(*images, GridCost((64, 64), power=2), epsilon=10.0, tolerance=1e-4, max_iterations=1500)


def _of_mass_one(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    return (p / p.sum()).reshape(-1).requires_grad_(), (q / q.sum()).reshape(-1)


@pytest.mark.parametrize("penalty", [2e4, 1e8])
@pytest.mark.parametrize("kept", [0, 1])
def test_a_marginal_error_of_zero_in_float32_does_not_settle_the_constant(penalty: float, kept: int) -> None:
    """The masses differ by half a rounding of float32, which the penalty multiplies in the potentials."""
    p = torch.tensor([0.23549841344356537, 0.2593940794467926, 0.35235193371772766, 0.15275558829307556])
    cost, one = torch.tensor([[4.75], [5.0], [5.875], [2.625]]), torch.ones(1)
    sides = (penalty, None) if kept else (None, penalty)
    solution = otloss.solve(p, one, cost, epsilon=1.4375, marginal_penalty=sides)
    rho = (penalty, math.inf) if kept else (math.inf, penalty)
    g = solution.potentials[1].tolist()
    f, g, _ = precise_potentials(p.tolist(), [1.0], cost.tolist(), 1.4375, rho, g)
    for potential, right in zip(solution.potentials, (f, g), strict=True):
        off = max(abs(float(a) - b) for a, b in zip(right, potential.tolist(), strict=True))
        assert off <= float(solution.potential_error)


def test_the_gap_counts_the_rounding_of_the_mass_at_costs_below_zero() -> None:
    """The value of a plan with one row is a sum, and the masses differ by a rounding: 1 is as right as their mean."""
    q = torch.tensor([0.00013943611702416092, 0.9998605847358704])
    cost = torch.tensor([[-0.13799306750297546, -0.28177595138549805]])
    shares = q.double() / q.double().sum()
    optimum = float(cost[0].double() @ shares)
    for epsilon in (None, 2.0**-8):
        solution = otloss.solve(torch.ones(1), q, cost, epsilon=epsilon)
        assert float(solution.dual_value) <= optimum <= float(solution.dual_value + solution.gap)


@pytest.mark.parametrize("sizes", [(7, 11), (37, 5)])
def test_the_gap_counts_the_rounding_of_the_masses_of_equal_weights_at_costs_below_zero(sizes: tuple[int, int]) -> None:
    """In float32 the masses of n and of m equal weights differ, and each multiplies a part of the cost."""
    n, m = sizes
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        u, v = 100 * torch.randn(n, 1, generator=generator), 100 * torch.randn(1, m, generator=generator)
        cost = torch.rand(n, m, generator=generator) + u + v
        right = otloss.solve(None, None, cost.double(), epsilon=0.125, tolerance=1e-12).value
        answer = otloss.solve(None, None, cost, epsilon=0.125)
        assert float(answer.dual_value) <= float(right) <= float(answer.dual_value + answer.gap), seed
        assert float(answer.gap) < 1e-6 * float(cost.abs().max()), seed


@pytest.mark.parametrize("sides", [(0.75, None), (None, 0.75), None])
def test_derivatives_of_the_linear_cost_hold_the_shift_of_costs_below_zero(
    sides: tuple[float | None, float | None] | None,
) -> None:
    """The mass that is moved depends on the weights of the kept side, or is given: the shift counts by it."""
    generator = torch.Generator().manual_seed(0)
    p, q, cost = (torch.rand(k, generator=generator, dtype=torch.float64) for k in ((3,), (4,), (3, 4)))
    part = torch.tensor(0.25, dtype=torch.float64)

    def linear_cost(p: Tensor, q: Tensor, cost: Tensor, part: Tensor) -> Tensor:
        moved = {"mass": part} if sides is None else {"marginal_penalty": sides}
        solution = otloss.solve(p + 0.1, q + 0.1, cost - 0.7, epsilon=0.125, grad="implicit", tolerance=1e-13, **moved)
        return solution.linear_cost + 0.0 * part

    leaves = [t.requires_grad_() for t in (p, q, cost, part)]
    assert torch.autograd.gradcheck(linear_cost, leaves, eps=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_light_bin_that_has_to_pay_a_price_is_no_rounding_beside_a_small_epsilon(dtype: torch.dtype) -> None:
    """It holds less than the rounding of the whole mass, but half of the value: either the optimum or an error."""
    p = torch.tensor([2.0**-30, 2.0**-29, 1.0], dtype=dtype)
    q = torch.tensor([0.0625, 0.9375], dtype=dtype)
    cost = torch.tensor([[487.0, 113.0], [2.0**39, 2.0**39], [233.0, 1027.0]], dtype=dtype)
    exact = float(otloss.emd(p, q, cost))
    try:
        solution = otloss.solve(p, q, cost, epsilon=14.0)
    except otloss.SmallEpsilonError:
        return
    assert float(solution.value) >= exact * (1 - 1e-5)


@pytest.mark.parametrize("light", [1e-20, 1e-200, 1e-301])
@pytest.mark.parametrize("seed", [21, 25, 26])
def test_potentials_of_columns_lighter_than_rounding(seed: int, light: float) -> None:
    """Newton's steps went astray there: the derivative was off by up to 1,500, where costs are 50, without a word."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(k, 4, generator=generator, dtype=torch.float64) for k in (5, 30))
    q = torch.rand(30, generator=generator, dtype=torch.float64)
    is_light = torch.rand(30, generator=generator) < 0.4
    cost = torch.cdist(x, y).square()
    for epsilon in (0.002, 0.02):
        plain, other = (
            otloss.solve(None, (lambda t: t / t.sum())(q.masked_fill(is_light, weight)), cost, epsilon=epsilon)
            for weight in (0.0, light)
        )
        torch.testing.assert_close(other.value, plain.value, rtol=1e-6, atol=0.0)
        expected, actual = (t.potentials[1] - t.potentials[1][~is_light].mean() for t in (plain, other))
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-3)


def potentials_in_logs(p: Tensor, q: Tensor, cost: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Plain Sinkhorn in the log domain, with every bin in play."""
    f, g = torch.zeros_like(p), torch.zeros_like(q)
    for _ in range(20_000):
        previous, f = f, -epsilon * ((g - cost) / epsilon + q.log()).logsumexp(-1)
        g = -epsilon * ((f - cost.T) / epsilon + p.log()).logsumexp(-1)
        if bool(((f - previous).abs() < 1e-12).all()):
            break
    return f, g


@pytest.mark.parametrize(
    ("seed", "n", "m", "scale", "epsilon"),
    [
        (35, 15, 15, 40, 0.02), (61, 30, 5, 40, 0.02), (97, 30, 5, 40, 0.05), (842, 15, 15, 20, 0.02),
        (50192, 2, 5, 40, 0.01), (51748, 15, 2, 20, 0.01),
    ],
)  # fmt: skip
def test_potentials_where_rows_and_columns_are_lighter_than_rounding(
    seed: int, n: int, m: int, scale: float, epsilon: float
) -> None:
    """Beside a row of 1e-30 a column of 1e-20 counts.

    Potentials were off by up to 4, where costs are 30, and later two of these problems raised SmallEpsilonError. In the
    last two a step of 1e13 epsilons was taken, which lowered the dual: the value was -89 for 3.7.
    """
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(k, 3, generator=generator, dtype=torch.float64) for k in (n, m))
    p, q = (torch.softmax(scale * torch.randn(k, generator=generator, dtype=torch.float64), -1) for k in (n, m))
    cost = torch.cdist(x, y).square()
    solution = otloss.solve(p, q, cost, epsilon=epsilon)
    f, g = potentials_in_logs(p, q, cost, epsilon)
    torch.testing.assert_close(solution.value, p @ f + q @ g, rtol=1e-7, atol=0.0)
    for found, expected, weights in zip(solution.potentials, (f, g), (p, q), strict=True):
        difference = found - expected
        assert (difference - difference @ weights).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_potentials_of_bins_too_light_for_the_kernel_on_both_sides(dtype: torch.dtype) -> None:
    """A row lighter than a light column took its mass from it: potentials were off by 5, where costs are 18."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1.0, 30.0, 30.0, 60.0]) * (1 if dtype == torch.float32 else 8)
    for scale in sizes.repeat(3):
        p, q = (torch.softmax(scale * torch.randn(6, generator=generator), -1).to(dtype) for _ in range(2))
        cost = (18 * torch.rand(6, 6, generator=generator)).to(dtype)
        solution = otloss.solve(p, q, cost, epsilon=0.1)
        wide = tuple((w / w.sum()).double() for w in (p.double(), q.double()))
        expected = potentials_in_logs(*wide, cost.double(), 0.1)
        assert float(solution.potential_error) < 1e-3
        shift = (solution.potentials[0].double() - expected[0]) @ wide[0]
        torch.testing.assert_close(solution.potentials[0].double() - shift, expected[0], rtol=0.0, atol=2e-3)
        torch.testing.assert_close(solution.potentials[1].double() + shift, expected[1], rtol=0.0, atol=2e-3)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_potentials_of_light_bins_beside_bins_just_above_the_bound(is_transposed: bool) -> None:
    """Twenty light columns gave all their mass to a row that holds a tenth of it: potentials were off by 16."""
    x, y = torch.tensor([0.0, 3.0]), torch.cat([torch.zeros(1), torch.linspace(3.0, 3.5, 20)])
    p, q = torch.tensor([1.0, 2e-20]), torch.tensor([1.0] + [0.9e-20] * 20)
    cost = (x[:, None] - y).square()
    if is_transposed:
        p, q, cost = q, p, cost.T
    solution = otloss.solve(p, q, cost, epsilon=0.1)
    assert float(solution.potential_error) < 1e-3
    for found, expected in zip(solution.potentials, potentials_in_logs(p.double(), q.double(), cost, 0.1), strict=True):
        torch.testing.assert_close(found - found[0], (expected - expected[0]).float(), rtol=0.0, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_derivative_at_a_row_without_mass_counts_light_columns(dtype: torch.dtype) -> None:
    """Newton's method leaves out columns below the rounding of the rows: f of the empty row was 12 too large."""
    x = torch.tensor([[1.4, -1.4], [-2.4, 1.1]], dtype=dtype)
    y = torch.tensor([[-1.1, -0.5], [0.9, -0.3]], dtype=dtype)
    p, q = torch.tensor([1.0, 0.0], dtype=dtype), torch.tensor([1e-18, 1.0], dtype=dtype)
    cost, epsilon = otloss.costs.PointCost(x, y), 0.05
    f = otloss.solve(p, q, cost, epsilon=epsilon).potentials[0]
    first, empty = cost.dense().double()
    # All mass comes from the first row, so g_j = C_1j - f_1.
    expected = -epsilon * ((first - empty) / epsilon + q.double().log()).logsumexp(-1)
    torch.testing.assert_close((f[1] - f[0]).double(), expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_derivatives_of_a_divergence_at_bins_too_light_for_the_kernel(dtype: torch.dtype) -> None:
    """Light bins read f or g of heavy ones, whose errors cancel in their mean alone: derivatives were off by 3.6."""
    generator = torch.Generator().manual_seed(1)
    for scale in (1.0, 40.0, 40.0, 80.0):
        scale = scale if dtype == torch.float32 else 8 * scale
        scores = scale * torch.randn(8, generator=generator, dtype=torch.float64)
        p = torch.softmax(scores, -1).to(dtype).requires_grad_()
        x = torch.randn(8, 2, generator=generator).to(dtype)
        cost, to_one = (x[:, None] - x).square().sum(-1), x.square().sum(-1, keepdim=True)
        value = otloss.sinkhorn_divergence(
            p, torch.ones(1, dtype=dtype), to_one, epsilon=0.02, cost_p=cost, cost_q=torch.zeros(1, 1, dtype=dtype)
        )
        (gradient,) = torch.autograd.grad(value, p)
        weights = p.detach().double() / p.detach().double().sum()
        f = torch.zeros_like(weights)  # equal to g, so that the mean of f and its update tends to it
        for _ in range(200):
            f = (f - 0.02 * ((f - cost.double()) / 0.02 + weights.log()).logsumexp(-1)) / 2
        difference = gradient.double() - (to_one[:, 0].double() - f)
        assert (difference - difference @ weights).abs().max() < 2e-3
