"""Barycenters against POT, closed forms, and finite differences."""

import dataclasses
import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import ot
import pytest
import torch
from torch import Tensor

from otloss import ConvergenceWarning, barycenter, sinkhorn, sinkhorn_divergence
from otloss.costs import Cost, DenseCost, GridCost, LineCost, as_cost
from otloss.solvers.barycenter import iteration
from otloss.solvers.barycenter.barycenter import find_barycenter, read_problem
from tests.errors import raising
from tests.otloss.draws import draw
from tests.samples import sampled


def drawn(*shape: int, seed: int = 0) -> Tensor:
    actual = draw(*shape, seed=seed) * (draw(*shape, seed=seed) > 0.2)
    return actual / actual.sum(-1, keepdim=True)


LINE = LineCost(torch.linspace(0, 1, 12, dtype=torch.float64), power=2)
WEIGHTS = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.0, 0.9]], dtype=torch.float64)


@pytest.mark.parametrize("debiased", [False, True])
def test_is_the_minimum_and_equals_pot(debiased: bool) -> None:
    """The derivative of what it minimises, by `sinkhorn`, is constant over the bins that hold mass."""
    p = drawn(2, 3, 12)
    actual = barycenter(p, LINE, WEIGHTS, epsilon=0.02, debiased=debiased, tolerance=1e-9).requires_grad_()
    torch.testing.assert_close(actual.sum(-1), torch.ones(2, dtype=torch.float64))
    function = sinkhorn_divergence if debiased else sinkhorn
    total = (WEIGHTS * function(actual.unsqueeze(-2), p, LINE, epsilon=0.02, tolerance=1e-11)).sum()
    if not debiased:
        total = total + 0.02 * torch.xlogy(actual, actual).sum()
    (gradient,) = torch.autograd.grad(total, actual)
    above = gradient - gradient.amin(-1, keepdim=True)
    assert (above * actual).max() < 1e-8  # above the least only at bins without mass
    # POT's barycenter starts from a mean without the weights, which stays in the answer.
    theirs, weights = (ot.bregman.barycenter_debiased, WEIGHTS[0]) if debiased else (ot.bregman.barycenter, None)
    arrays = {"A": p[0].T.numpy(), "M": LINE.dense().numpy(), "weights": None if weights is None else weights.numpy()}
    expected = theirs(**arrays, reg=0.02, stopThr=1e-10, numItermax=5_000)
    ours = barycenter(p[0], LINE, weights, epsilon=0.02, debiased=debiased, tolerance=1e-10)
    np.testing.assert_allclose(ours, expected, atol=1e-6)


@pytest.mark.parametrize("weights", [[0.3, 0.0, 0.2, 0.1, 0.4], [0.3, 0.1, 0.2, 0.0001, 0.3999]])
def test_is_the_minimum_where_newtons_method_finds_it(weights: list[float]) -> None:
    """Heavy tails and nearly empty bins: columns without mass, whose potentials move by far."""
    x, y = (draw(48, 2, seed=k).logit() * (1 + 0.3 / draw(48, 1, seed=k + 2)) for k in range(2))
    p = draw(5, 48, seed=4) ** 3 * (draw(5, 48, seed=5) > 0.3) + 1e-12
    p, cost, shares = p / p.sum(-1, keepdim=True), torch.cdist(x, y).square(), torch.tensor(weights).double()
    epsilon = 0.003 * float(cost.mean())
    actual = barycenter(p, cost, shares, epsilon=epsilon, tolerance=1e-9)
    every = torch.cat([actual.unsqueeze(0), 0.999 * actual + 0.001 * torch.eye(48, dtype=torch.float64)])
    values = (shares * sinkhorn(every.unsqueeze(1), p, cost, epsilon=epsilon, tolerance=1e-8)).sum(-1)
    values = values + epsilon * torch.xlogy(every, every).sum(-1)
    assert values[1:].amin() > values[0]  # mass moved to any bin raises what the barycenter minimises


@pytest.mark.parametrize("epsilon", [0.05, 0.02, 0.002])
def test_debiased_at_a_blur_wider_than_the_histograms(epsilon: float) -> None:
    x = torch.linspace(0, 1, 20, dtype=torch.float64)
    cost, v = (x[:, None] - x) ** 2, torch.linspace(-1, 2, 20, dtype=torch.float64).square()
    bumps = torch.stack([torch.exp(-((x - c) ** 2) / 0.01) for c in (0.2, 0.5, 0.8)])
    noise = torch.rand(3, 20, generator=torch.Generator().manual_seed(0)).double()
    shares = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    for weights in (bumps, noise) if epsilon < 0.05 else (bumps,):
        p = weights / weights.sum(-1, keepdim=True)
        leaf = p.clone().requires_grad_()
        tolerance = 2e-3 if epsilon == 0.05 else None  # answers at falling tau differ by up to 7e-4 there, by rounding
        with pytest.warns(ConvergenceWarning, match="is rounded by about") if epsilon == 0.05 else nullcontext():
            actual = barycenter(leaf, cost, shares, epsilon=epsilon, debiased=True, tolerance=tolerance)
        narrow = (p.float(), cost.float(), shares.float())
        rounded = 5e-3 if epsilon == 0.05 else None  # Inputs rounded to float32 tell less.
        single = barycenter(*narrow, epsilon=epsilon, debiased=True, tolerance=rounded)
        assert (single - actual).abs().sum() < 0.01  # at 0.05 what rounding the inputs to float32 changes
        (gradient,) = torch.autograd.grad(actual @ v, leaf)
        assert torch.isfinite(gradient).all()
        if epsilon == 0.05:  # rounding shows in differences of the answers
            continue
        towards = 1e-3 * p * (x - (p @ x).unsqueeze(-1))
        ends = [barycenter(p + s * towards, cost, shares, epsilon=epsilon, debiased=True) @ v for s in (1, -1)]
        torch.testing.assert_close(2 * (gradient * towards).sum(), ends[0] - ends[1], rtol=2e-4, atol=1e-12)
    narrow = drawn(1, 20, seed=3).expand(3, -1)
    assert (barycenter(narrow, cost, epsilon=0.002, debiased=True) - narrow[0]).abs().sum() < 1e-7


@pytest.mark.filterwarnings("ignore:the barycenter did not converge")
@pytest.mark.parametrize("debiased", [False, True])
def test_products_agree_with_logarithms(debiased: bool, request: pytest.FixtureRequest) -> None:
    images = drawn(2, 3, 20 * 15) + 1e-5
    p, grid = images / images.sum(-1, keepdim=True), GridCost((20, 15), spacing=0.05)

    def of(cost: Cost) -> Tensor:
        end: Any = {"max_iterations": 25} if debiased else {"tolerance": 1e-10}  # extrapolations round differently
        return barycenter(p, cost.to(torch.float64), WEIGHTS, epsilon=0.03, debiased=debiased, **end)

    by_axes, by_matrix = of(grid), of(as_cost(grid.dense()))
    line = LineCost(torch.linspace(0, 1, 40, dtype=torch.float64), power=2)
    ends = torch.eye(40, dtype=torch.float64)[[0, 39]]
    middle = barycenter(ends, line, epsilon=2e-4) @ line.x  # exp(-1 / 2e-4) is 0
    torch.testing.assert_close(middle, torch.full_like(middle, 0.5), atol=1e-6, rtol=0)
    request.getfixturevalue("small_blocks")
    in_logs = of(as_cost(grid.dense()))
    torch.testing.assert_close(by_axes, by_matrix, atol=1e-9, rtol=0)
    torch.testing.assert_close(by_matrix, in_logs, atol=1e-9, rtol=0)


@pytest.mark.parametrize("debiased", [False, True])
def test_arrays_of_numpy_agree_with_tensors(debiased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    p, grid = drawn(2, 3, 30), GridCost((5, 3, 2), spacing=0.2)
    by_numpy = barycenter(p, grid, WEIGHTS, epsilon=0.03, debiased=debiased, tolerance=1e-9)
    monkeypatch.setattr(iteration, "NUMBERS", dataclasses.replace(iteration.NUMBERS, numpy_entries=0))
    by_torch = barycenter(p, grid, WEIGHTS, epsilon=0.03, debiased=debiased, tolerance=1e-9)
    torch.testing.assert_close(by_numpy, by_torch, atol=1e-9, rtol=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own rules use torch.jit
@pytest.mark.parametrize("debiased", [False, True])
def test_no_problems_no_second_derivatives_and_masses_that_agree_up_to_rounding(debiased: bool) -> None:
    leaf = drawn(2, 3, 12).requires_grad_()
    assert barycenter(leaf[:0], LINE, epsilon=0.1, debiased=debiased).shape == (0, 12)
    value = barycenter(leaf, LINE, WEIGHTS, epsilon=0.02, debiased=debiased)[:, 0].sum()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(value, leaf, create_graph=True)

    def first(p: Tensor) -> Tensor:
        return barycenter(p, LINE, epsilon=0.02, debiased=debiased).square().sum()

    tangent = torch.ones_like(leaf.detach())
    along = torch.func.jvp(first, (leaf.detach(),), (tangent,))[1]
    torch.testing.assert_close(along, torch.autograd.grad(first(leaf), leaf)[0].sum())
    with pytest.raises(NotImplementedError, match="first derivatives only, and forward mode"):
        torch.func.jvp(first, (leaf,), (tangent,))
    with pytest.raises(NotImplementedError, match="first derivatives only, and forward mode"):
        torch.func.grad(lambda p: torch.func.jvp(first, (p,), (tangent,))[1])(leaf.detach())
    half = draw(2, 12).softmax(-1).half()  # a ConvergenceWarning would be an error
    solution = barycenter(half, LINE, epsilon=0.1, debiased=debiased)
    torch.testing.assert_close(solution.double().sum(), half.double().sum() / 2, rtol=1e-3, atol=0)


def test_debiased_barycenters_that_do_not_converge_say_so_and_keep_the_mass() -> None:
    cost = LineCost(torch.linspace(0, 1, 30, dtype=torch.float64), power=2)
    gap = draw(2, 30)
    gap[:, 10:20] = 0.0
    below_the_blur = draw(1, 30, seed=1).expand(2, -1)
    for weights, epsilon, most in ((below_the_blur, 0.1, 10_000), (gap, 1e-3, 40), (gap, 0.01, 40)):
        weights = weights / weights.sum(-1, keepdim=True)
        with pytest.warns(ConvergenceWarning, match="did not converge"):
            actual = barycenter(weights, cost, epsilon=epsilon, debiased=True, max_iterations=most)
        torch.testing.assert_close(actual.sum(), torch.ones_like(actual[0]))


@pytest.mark.parametrize("debiased", [False, True])
def test_unconverged_barycenters_have_the_mass_and_its_gradient(debiased: bool) -> None:
    p = 3 * drawn(2, 12)
    p.requires_grad_()
    with pytest.warns(ConvergenceWarning, match="did not converge"):
        actual = barycenter(p, LINE, epsilon=1e-3, debiased=debiased, max_iterations=3)
    torch.testing.assert_close(actual.sum(), actual.new_tensor(3.0))
    (gradient,) = torch.autograd.grad(actual.sum(), p)
    torch.testing.assert_close(gradient, torch.full_like(p, 0.5))


def iterate_plainly(p: Tensor, cost: Tensor, shares: Tensor, u: Tensor) -> Tensor:
    """Return the debiased barycenter (n,) at epsilon 1, by many iterations from u (k, n)."""
    kernel, d = (-cost).exp(), torch.ones_like(p[0])
    for _ in range(20_000):
        kv = (p / (u @ kernel)) @ kernel
        a = d * (shares @ kv.log()).exp()
        u, d = a / kv, (d * a / (kernel @ d)).sqrt()
    return a


@pytest.mark.parametrize("seed", sampled(3, range(12)))
def test_debiased_barycenters_of_few_bins_are_those_of_many_plain_iterations(seed: int) -> None:
    """Zero bins, one-hot histograms, unequal weights, bins that hardly exchange mass."""
    generator = torch.Generator().manual_seed(seed)
    n, count = 2 + seed % 5, 2 + seed % 4
    x = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    p = torch.rand(count, n, generator=generator, dtype=torch.float64)
    p = (
        p * (torch.rand(count, n, generator=generator) > 0.3) + 1e-9
        if seed % 3
        else torch.eye(n).double()[p.argmax(-1)]
    )
    p, shares = p / p.sum(-1, keepdim=True), torch.rand(count, generator=generator, dtype=torch.float64) + 0.1
    cost, shares = torch.cdist(x, x).pow(1 + seed % 2), shares / shares.sum()
    epsilon = (0.02, 0.05, 0.15)[seed % 3] * float(cost.max())
    a = iterate_plainly(p, cost / epsilon, shares, torch.ones_like(p))
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 1e-4)):
        actual = barycenter(p.to(dtype), cost.to(dtype), shares.to(dtype), epsilon=epsilon, debiased=True)
        assert (actual - a).abs().sum() < tolerance


@pytest.mark.parametrize(
    ("first_bins", "weights", "price", "debiased"),
    [
        (
            (0.9923576809015551, 0.6992249343334145, 0.3427233140812565),
            (0.18268720142521592, 0.6697293883836531),
            100.0,
            False,
        ),
        (
            (0.9995772792193863, 0.28760682695416623, 0.22128533316575782),
            (0.05054163413250895, 0.5113704730705201),
            400.0,
            False,
        ),
        (
            (0.6083261803813409, 0.41717991571155916, 0.5023769354490488, 0.48352869628013967),
            (0.06840696248794774, 0.6149952852286578, 0.1072133980425931),
            100.0,
            True,
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_bins_far_apart_have_the_weighted_median(
    first_bins: tuple[float, ...], weights: tuple[float, ...], price: float, debiased: bool, dtype: torch.dtype
) -> None:
    """Newton's method ended far from it, and extrapolations keep iterations from their end."""
    p = torch.tensor([[share, 1 - share] for share in first_bins], dtype=dtype)
    shares = torch.tensor([*weights, 1 - sum(weights)], dtype=dtype)
    a = barycenter(p, price * (1 - torch.eye(2, dtype=dtype)), shares, epsilon=1.0, debiased=debiased)
    torch.testing.assert_close(a, p[1], rtol=0, atol=1e-5)


def test_mass_moves_where_products_with_the_kernel_are_zero() -> None:
    """A fifth of the second histogram comes over a cost of 890 epsilons, which iterations of products did not see."""
    costs = [[14.53, 8.58, 305.0, 232.6], [161.94, 145.65, 890.2, 7.58], [42.16, 166.4, 245.75, 369.79],
             [35.75, 1.17, 331.62, 241.28]]  # fmt: skip
    p = torch.tensor(
        [[0.465, 0.005, 0.026, 0.504], [0.015, 0.158, 0.798, 0.029], [0.306, 0.085, 0.2, 0.409]], dtype=torch.float64
    )
    cost, shares = torch.tensor(costs, dtype=torch.float64), torch.tensor([0.378, 0.239, 0.383], dtype=torch.float64)
    log_u = torch.zeros_like(p)
    for _ in range(3000):
        log_v = p.log() - (log_u.unsqueeze(-1) - cost).logsumexp(-2)
        log_kv = (log_v.unsqueeze(-2) - cost).logsumexp(-1)
        log_a = shares @ log_kv
        log_u = log_a - log_kv
    a = barycenter(p, cost, shares, epsilon=1.0)
    torch.testing.assert_close(a, log_a.exp(), rtol=0, atol=1e-6)


def test_the_error_of_debiased_barycenters_is_no_smaller_than_the_true_one() -> None:
    """Gaussians of one width have a Gaussian as barycenter. The plain iteration hardly changes where it is far away."""
    x, shares = torch.linspace(0, 1, 50, dtype=torch.float64), torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    centres = torch.tensor([[0.35], [0.5], [0.65]])
    for width, epsilon, tolerance in itertools.product((0.03, 0.05), (0.005, 0.02, 0.05, 0.1), (1e-2, 1e-4, 1e-5)):
        p = torch.softmax(-(x - centres).square() / (2 * width**2), -1)
        problem = read_problem(p, LineCost(x, power=2), shares, epsilon, True)
        result = find_barycenter(problem, tolerance, 10_000, with_graph=False)
        assert (problem.give_mass(result.potentials.log_a) - p[1]).abs().sum() <= result.error


@pytest.mark.filterwarnings("ignore:the barycenter did not converge", "ignore:the debiased barycenter may be one of")
@pytest.mark.parametrize("seed", [44, 62, 239, 326, 341])
def test_debiased_barycenters_at_singular_equations_are_finite(seed: int) -> None:
    """exp(-C / epsilon) of these costs is not positive definite, and steps of Newton's method are not finite."""
    generator = torch.Generator().manual_seed(seed)
    n = 1 + seed % 5
    rows, columns, p, chance = (
        torch.rand(*shape, generator=generator, dtype=torch.float64) for shape in ((n, 1), (n,), (2, n), (2, n))
    )
    cost, p = (rows - columns).square(), p * (chance > 0.2) + 1e-12
    p, epsilon = p / p.sum(-1, keepdim=True), (0.3, 0.03, 1e-3)[seed % 3]
    actual = barycenter(p, cost + cost.mT, epsilon=epsilon, debiased=True, max_iterations=2000)
    torch.testing.assert_close(actual.sum(), torch.ones_like(actual[0]))


def test_sharp_gaussians_converge_without_a_warning() -> None:
    """A wide blur hides most of their details, but the Gaussian between them needs no others."""
    x = torch.linspace(0, 1, 50, dtype=torch.float64)
    for width, epsilon in itertools.product((0.04, 0.06), (0.01, 0.03, 0.1)):
        p = torch.softmax(-(x - torch.tensor([[0.4], [0.5], [0.6]])).square() / (2 * width**2), -1)
        actual = barycenter(p, LineCost(x, power=2), epsilon=epsilon, debiased=True, tolerance=1e-4)
        assert (actual - p[1]).abs().sum() < 1e-4


def test_costs_with_several_debiased_barycenters_warn() -> None:
    """Two bins that are farther from themselves than from each other: the start decides where iterations end."""
    p, shares, cost = torch.full((2, 2), 0.5).double(), torch.full((2,), 0.5).double(), torch.eye(2).double()
    for start, expected in (([1.0, -1.0], [0.0, 1.0]), ([0.0, 0.0], [0.5, 0.5])):
        end = iterate_plainly(p, cost, shares, torch.tensor(start).double().exp().expand(2, 2))
        torch.testing.assert_close(end, torch.tensor(expected).double(), rtol=0, atol=1e-9)
    with pytest.warns(ConvergenceWarning, match="may be one of several"):
        barycenter(p, cost, epsilon=1.0, debiased=True)
    barycenter(p, 1 - cost, epsilon=1.0, debiased=True)


def test_debiased_barycenters_of_grids_are_right_or_warn() -> None:
    """Equal histograms have themselves as barycenter. Many bins; a blur that hides details, and one that does not."""
    side = 18
    p = drawn(side * side)
    grid = GridCost((side, side), spacing=1 / (side - 1))
    for epsilon, warned in (
        (0.04, pytest.warns(ConvergenceWarning, match=r"an error of 0\.")),
        (0.001, nullcontext()),
    ):
        with warned:
            actual = barycenter(torch.stack([p, p]).float(), grid, epsilon=epsilon, debiased=True)
        if epsilon == 0.001:
            assert (actual - p).abs().sum() < 1e-4


test_bad_input = raising(
    ({"p": torch.tensor([[1.0, 0, 0, 0, 0], [2.0, 0, 0, 0, 0]])}, "masses from 1 to 2, expected weights >= 0 and"),
    ({"p": torch.zeros(2, 5)}, "without mass"),
    ({"weights": torch.ones(2)}, r"weights have sums of 2.0, expected"),
    ({"cost": torch.rand(5, 5).triu(), "debiased": True}, r"C\[i, j\] and C\[j, i\] differ"),
    call=lambda change: barycenter(
        **({"p": torch.full((2, 5), 0.2), "cost": torch.ones(5, 5), "epsilon": 0.1} | change)
    ),
)


def test_gradients_where_plans_fall_into_parts() -> None:
    """The barycenter of one histogram is K (p / K^T 1), and of several ones it has differences."""
    cost = torch.cdist(x := draw(40, 2), x).square()
    for epsilon, largest in ((0.02, 1e-6), (5e-4, 1e-4)):
        p, kernel = drawn(40).requires_grad_(), (-cost / epsilon).exp()
        actual = barycenter(p.unsqueeze(0), cost, epsilon=epsilon)
        expected = kernel @ (p / kernel.sum(0))
        torch.testing.assert_close(actual, expected)
        ours, theirs = (torch.autograd.grad((a * x[:, 0]).sum(), p)[0] for a in (actual, expected))
        difference = (ours - (ours * p).sum()) - (theirs - (theirs * p).sum())
        assert difference[p > 0].abs().max() < largest  # Bins without mass count as empty in the barycenter.
    p, steps, epsilon = drawn(3, 40, seed=6), drawn(3, 40, seed=8), 1e-3
    steps = p * (steps - (p * steps).sum(-1, keepdim=True))
    leaf = p.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(barycenter(leaf, cost, epsilon=epsilon) @ x[:, 0], leaf)
    ends = [barycenter(p + s * steps, cost, epsilon=epsilon) @ x[:, 0] for s in (0.01, -0.01)]
    torch.testing.assert_close((gradient * steps).sum(), (ends[0] - ends[1]) / 0.02, rtol=1e-3, atol=0)


def check_gradient_by_differences(
    p: Tensor, cost: Tensor, to: Tensor, steps: Tensor, *, size: float, rtol: float, **options: Any
) -> None:
    """Compare the derivative of the barycenter times `to` along `steps` with the difference of two barycenters."""

    def run(p: Tensor) -> Tensor:
        return barycenter(p, cost, debiased=True, **options) @ to

    leaf = p.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(run(leaf), leaf)
    expected = (run(p + size * steps) - run(p - size * steps)) / (2 * size)
    torch.testing.assert_close((gradient * steps).sum(), expected, rtol=rtol, atol=rtol)


@pytest.mark.filterwarnings("ignore:the barycenter did not converge")
@pytest.mark.parametrize("seed", [2, 8, 21, 42, 43])
def test_gradients_of_debiased_barycenters_where_plans_fall_into_parts(seed: int) -> None:
    """At one tau for all problems, rounding put each of these 7 to 110 % off."""
    generator = torch.Generator().manual_seed(seed)
    random = partial(torch.rand, generator=generator, dtype=torch.float64)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    x = torch.cat([3 * part + random(3) for part in range(3)])
    cost, p, steps = (x[:, None] - x).square(), random(2, 9) + 0.2, normal(2, 9)
    p, steps = p / p.sum(-1, keepdim=True), steps - steps.mean(-1, keepdim=True)
    check_gradient_by_differences(p, cost, normal(9), steps, epsilon=0.2, size=1e-4, rtol=5e-3)


@pytest.mark.parametrize("seed", [1, 2, 9, 12])
def test_gradients_of_debiased_barycenters_need_more_than_the_tolerance_of_float32(seed: int) -> None:
    """At barycenters within the tolerance they were 0.3 to 13 times their size off."""
    x, p, to = draw(6, seed=seed), draw(3, 6, seed=seed + 100), draw(6, seed=7)
    cost = (x[:, None] - x).square()

    def find_gradient(dtype: torch.dtype, tolerance: float | None) -> Tensor:
        leaf = (p / p.sum(-1, keepdim=True)).to(dtype).requires_grad_()
        options = {"epsilon": 0.2 * float(cost.mean()), "debiased": True, "tolerance": tolerance}
        actual = barycenter(leaf, cost.to(dtype), **options)
        (gradient,) = torch.autograd.grad(actual @ to.to(dtype), leaf)
        return gradient.double() - gradient.double().mean(-1, keepdim=True)

    expected = find_gradient(torch.float64, 1e-10)
    allowed = 0.01 * float(expected.abs().max())
    torch.testing.assert_close(find_gradient(torch.float32, None), expected, rtol=0, atol=allowed)


@pytest.mark.filterwarnings("ignore:the barycenter did not converge")
def test_gradients_of_debiased_barycenters_in_fine_details() -> None:
    """At a tau above the eigenvalues of details it was 87 % off."""
    x = torch.linspace(0, 1, 60, dtype=torch.float64)
    p = torch.stack([(-(x - center).square() / 0.02).exp() + 1e-3 for center in (0.2, 0.5, 0.8)])
    p = p / p.sum(-1, keepdim=True)
    steps = p * (6 * x + torch.arange(3.0)[:, None]).sin()
    steps = steps - p * steps.sum(-1, keepdim=True)
    options = {"epsilon": 0.01, "tolerance": 1e-10, "size": 1e-3, "rtol": 0.02}
    check_gradient_by_differences(p, (x[:, None] - x).square(), drawn(60, seed=0) - 1 / 60, steps, **options)


@pytest.mark.parametrize("cells", [(5, 5), (25,)])
def test_a_subclass_of_a_grid_has_its_own_costs(cells: tuple[int, ...]) -> None:
    class Capped(GridCost):
        def rows(self, index: Tensor) -> Tensor:
            return super().rows(index).clamp(max=4.0)

    p, cost = drawn(2, 25), Capped(cells).to(torch.float64)
    expected = barycenter(p, DenseCost(cost.dense()), epsilon=2.0)
    torch.testing.assert_close(barycenter(p, cost, epsilon=2.0), expected, rtol=1e-6, atol=1e-9)
