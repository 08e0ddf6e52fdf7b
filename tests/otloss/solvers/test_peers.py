"""What goes wrong in other libraries, as tests that it does not go wrong here.

Each case holds this library to finite differences or to a linear program where a peer's answer is far off (POT 0.9.7,
GeomLoss 0.3.1, SciPy 1.17). Where a later version of the peer is right, its own part of the test is skipped, after
ours has passed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import ot
import pytest
import scipy.stats
import torch
from torch import Tensor

import otloss
from otloss.costs import PointCost
from tests.otloss.oracles import as_double, central_gradients, linprog_value, weight_gradients

TIGHT: dict[str, Any] = {"tolerance": 1e-11, "max_iterations": 100_000}
EPSILON = 0.1


def still_wrong(wrong: bool, peer: str) -> None:
    if not wrong:
        pytest.skip(f"ours is right, and {peer} is too by now")


def problem(n: int = 4, m: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(k, generator=generator, dtype=torch.float64) + 0.1 for k in (n, m))
    return p / p.sum(), q / q.sum(), torch.rand(n, m, generator=generator, dtype=torch.float64)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in tensors]


def weight_error(gradient: Tensor, slopes: tuple[int, np.ndarray]) -> float:
    """Largest error of the differences to the heaviest bin, relative to the largest slope."""
    heaviest, expected = slopes
    return float(np.abs((gradient - gradient[heaviest]).numpy() - expected).max() / np.abs(expected).max())


def relative(found: Any, expected: Any) -> float:
    return float(np.abs(np.asarray(found) - np.asarray(expected)).max() / np.abs(np.asarray(expected)).max())


def own(**options: Any) -> Callable[..., Tensor]:
    return lambda p, q, matrix: otloss.sinkhorn(p, q, matrix, epsilon=EPSILON, **TIGHT, **options)


def p_slopes(value: Callable[..., Tensor]) -> tuple[int, np.ndarray]:
    p, q, matrix = problem()
    return weight_gradients(lambda w: float(value(as_double(w), q, matrix)), p.numpy(), 1e-7)


def cost_slopes(value: Callable[..., Tensor], scale: float = 1.0) -> np.ndarray:
    p, q, matrix = problem()
    return central_gradients(lambda c: float(value(scale * p, q, as_double(c))), matrix.numpy(), 1e-5)


def pot_solve(p: Tensor, q: Tensor, matrix: Tensor, grad: str = "detach") -> Tensor:
    return ot.solve(matrix, p, q, reg=EPSILON, max_iter=100_000, tol=1e-13, grad=grad).value


def test_weight_gradients_where_the_envelope_of_pot_forgets_a_term() -> None:
    """Of KL(P | p q^T): by finite differences -0.142, by POT's envelope -0.206."""
    for grad in ("envelope", "implicit"):
        p, q, matrix = leaves(*problem())
        own(grad=grad)(p, q, matrix).backward()
        assert p.grad is not None
        assert weight_error(p.grad, p_slopes(own())) < 1e-5
    p, q, matrix = leaves(*problem())
    pot_solve(p, q, matrix, "envelope").backward()
    assert p.grad is not None
    still_wrong(weight_error(p.grad, p_slopes(pot_solve)) > 0.1, "ot.solve(grad='envelope')")


@pytest.mark.parametrize("argument", ["p", "cost"])
def test_gradients_where_the_last_step_of_pot_is_not_enough(argument: str) -> None:
    ours, theirs = leaves(*problem()), leaves(*problem())
    own()(*ours).backward()
    pot_solve(*theirs, "last_step").backward()
    errors = []
    for (p, _, matrix), value in ((ours, own()), (theirs, pot_solve)):
        if argument == "p":
            assert p.grad is not None
            errors.append(weight_error(p.grad, p_slopes(value)))
        else:
            assert matrix.grad is not None
            errors.append(relative(matrix.grad, cost_slopes(value)))
    assert errors[0] < 1e-5
    still_wrong(errors[1] > 0.1, "ot.solve(grad='last_step')")


@pytest.mark.parametrize("kind", ["entropy", "kl"])
def test_weight_gradients_of_a_batch_where_pot_has_none(kind: str) -> None:
    """None with its entropy term, and the constant -epsilon with its KL term."""
    p, q, matrix = problem()
    pairs = torch.stack([p, p.flip(0)]).requires_grad_()
    own()(pairs, q, matrix).sum().backward()
    assert pairs.grad is not None
    assert weight_error(pairs.grad[0], p_slopes(own())) < 1e-5
    theirs = pairs.detach().clone().requires_grad_()
    args = {"a": theirs, "b": q.expand(2, -1), "reg": EPSILON, "reg_type": kind, "max_iter": 10_000, "tol": 1e-12}
    ot.solve_batch(matrix.expand(2, -1, -1).clone().requires_grad_(), **args).value.sum().backward()
    constant = theirs.grad is None or bool((theirs.grad - theirs.grad.mean(-1, keepdim=True)).abs().max() < 1e-6)
    still_wrong(constant, "ot.solve_batch")


def test_slopes_at_empty_bins_where_pot_has_the_wrong_sign() -> None:
    p = np.array([0.0, 0.5, 0.5, 0.0])
    q = np.array([0.0, 0.2, 0.8, 0.0])
    matrix = np.abs(np.subtract.outer(np.arange(4.0), np.arange(4.0)))
    expected = weight_gradients(lambda w: linprog_value(w, q, matrix), p, 1e-6)
    np.testing.assert_allclose(expected[1], [1, 0, -1, 0], atol=1e-6)  # an outer bin is one step farther from q
    places = torch.arange(4.0, dtype=torch.float64)
    for value in (
        lambda w: otloss.emd(w, as_double(q), as_double(matrix)),
        lambda w: otloss.wasserstein_1d(w, as_double(q)),
        lambda w: otloss.wasserstein_1d(w, as_double(q), places, places.clone()),
        lambda w: otloss.cdf_distance(w, as_double(q), power=1),
        lambda w: otloss.solve(w, as_double(q), as_double(matrix)).value,
    ):
        weights = as_double(p, grad=True)
        value(weights).backward()
        assert weights.grad is not None
        assert weight_error(weights.grad, expected) < 1e-5
    weights = as_double(p, grad=True)
    ot.emd2(weights, as_double(q), as_double(matrix)).backward()
    assert weights.grad is not None
    still_wrong(float(weights.grad[0] - weights.grad[1]) < 0, "ot.emd2")


def test_small_epsilon_in_float32_where_pot_gives_next_to_nothing() -> None:
    """`ot.sinkhorn2` underflows, warns, and returns 4e-6 for 0.045."""
    rng = np.random.default_rng(0)
    p, q = (torch.tensor(rng.dirichlet(np.ones(16)), dtype=torch.float32) for _ in range(2))
    x, y = (torch.tensor(rng.random((16, 2)), dtype=torch.float32) for _ in range(2))
    matrix = torch.cdist(x, y).square()
    exact = linprog_value(p.double().numpy() / float(p.double().sum()), q.double().numpy(), matrix.double().numpy())
    for impl in ("compiled", "torch"):
        value = otloss.sinkhorn(p / p.sum(), q / q.sum(), matrix, epsilon=1e-3, impl=impl, tolerance=1e-4)
        assert exact - 1e-4 < float(value) < exact + 1e-3 * np.log(16) + 1e-4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = float(ot.sinkhorn2(p, q, matrix, 1e-3))
    still_wrong(theirs < 0.5 * exact, "ot.sinkhorn2 in float32")


@pytest.mark.parametrize("metric", ["euclidean", "l1"])
def test_coinciding_points_where_pot_has_nan(metric: str) -> None:
    p, _, _ = problem(4, 4)
    x = torch.rand(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[2] = x[1]
    q = p.flip(0)
    for value in (
        lambda x: otloss.emd(p, q, PointCost(x, metric=metric)),
        lambda x: otloss.sinkhorn(p, q, PointCost(x, metric=metric), epsilon=EPSILON),
        lambda x: otloss.sinkhorn(p, q, PointCost(x, x.detach(), metric=metric), epsilon=EPSILON),
        lambda x: otloss.sinkhorn_divergence(p, q, PointCost(x, metric=metric), epsilon=EPSILON),
        lambda x: otloss.upper_bound(p, q, PointCost(x, metric=metric)),
    ):
        leaf = x.clone().requires_grad_()
        value(leaf).backward()
        assert leaf.grad is not None
        assert torch.isfinite(leaf.grad).all()
        assert leaf.grad.abs().sum() > 0
    leaf = x.clone().requires_grad_()
    ot.dist(leaf, leaf, metric="euclidean").sum().backward()
    assert leaf.grad is not None
    still_wrong(bool(leaf.grad.isnan().any()), "ot.dist(metric='euclidean')")


def geomloss_solve(p: Tensor, q: Tensor, matrix: Tensor, unbalanced: float | None = None) -> Tensor:
    from geomloss.ot import solve

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it turns a tensor with a graph into a number
        return solve(matrix, reg=EPSILON, a=p, b=q, unbalanced=unbalanced, max_iter=500).value


def test_the_slope_in_the_cost_where_geomloss_has_twice_the_plan() -> None:
    p, q, matrix = leaves(*problem())
    own()(p, q, matrix).backward()
    assert matrix.grad is not None
    np.testing.assert_allclose(float(matrix.grad.sum()), 1, rtol=1e-9)
    assert relative(matrix.grad, cost_slopes(own())) < 1e-5
    theirs = leaves(*problem())
    geomloss_solve(*theirs).backward()
    assert theirs[2].grad is not None
    still_wrong(abs(float(theirs[2].grad.sum()) - 2) < 0.05, "geomloss.ot.solve")


def test_unbalanced_gradients_where_those_of_geomloss_are_out_of_scale() -> None:
    marginal_penalty, scale = 0.5, 1.5
    p, q, matrix = leaves(*problem())
    heavy = (scale * p.detach()).requires_grad_()
    own(marginal_penalty=marginal_penalty)(heavy, q, matrix).backward()

    def slopes(value: Callable[..., Tensor]) -> np.ndarray:
        p, q, matrix = problem()
        return central_gradients(lambda w: float(value(as_double(w), q, matrix)), (scale * p).numpy(), 1e-6)

    assert heavy.grad is not None
    assert matrix.grad is not None
    assert relative(heavy.grad, slopes(own(marginal_penalty=marginal_penalty))) < 1e-5
    assert relative(matrix.grad, cost_slopes(own(marginal_penalty=marginal_penalty), scale)) < 1e-5
    theirs = (scale * p.detach()).requires_grad_()
    geomloss_solve(theirs, q.detach(), matrix.detach(), marginal_penalty).backward()
    assert theirs.grad is not None
    error = relative(theirs.grad, slopes(lambda *t: geomloss_solve(*t, unbalanced=marginal_penalty)))
    still_wrong(error > 0.05, "geomloss.ot.solve(unbalanced=)")


def test_the_unbalanced_value_where_that_of_pot_is_zero() -> None:
    """The sum of its relative entropies leaves out their masses, and vanishes at every optimum."""
    p, q, matrix = problem()
    p, marginal_penalty = 1.5 * p, 0.5
    solved = ot.solve(matrix, p, q, reg=EPSILON, unbalanced=marginal_penalty, max_iter=20_000, tol=1e-12)
    plan = solved.plan

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log() - a + b).sum()

    value = (
        (plan * matrix).sum()
        + EPSILON * kl(plan, p[:, None] * q)
        + marginal_penalty * (kl(plan.sum(1), p) + kl(plan.sum(0), q))
    )
    assert float(own(marginal_penalty=marginal_penalty)(p, q, matrix)) == pytest.approx(float(value), rel=1e-8)
    still_wrong(abs(float(solved.value)) < 1e-6, "ot.solve(unbalanced=)")


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_empty_bins_on_the_line_where_the_slope_of_pot_is_not_that_of_its_value() -> None:
    p, q, _ = problem()
    p[1], x, y = 0, torch.tensor([0.0, 0.3, 0.9, 0.4]).double(), torch.tensor([0.2, 0.7, 0.1, 0.8, 0.5]).double()
    p = p / p.sum()
    errors = []
    for value in (
        lambda w: otloss.wasserstein_1d(w, q, x, y, order=2),
        lambda w: ot.wasserstein_1d(x, y, w, q, p=2),
    ):
        weights = p.clone().requires_grad_()
        value(weights).backward()
        assert weights.grad is not None
        slopes = weight_gradients(lambda w, value=value: float(value(as_double(w))), p.numpy(), 1e-7)
        errors.append(weight_error(weights.grad, slopes))
    assert errors[0] < 1e-5
    still_wrong(errors[1] > 1e-2, "ot.wasserstein_1d")


def clouds(n: int = 12, m: int = 10) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    p, q, _ = problem(n, m)
    x, y = (torch.rand(k, 2, generator=generator, dtype=torch.float64) for k in (n, m))
    return p, q, x, 0.7 * y


def test_positions_where_the_default_of_geomloss_is_far_off() -> None:
    """SamplesLoss, scaling 0.5: its gradient is not the one of its value, nor of the converged value."""
    from geomloss import SamplesLoss

    p, q, x, y = clouds()

    def ours(x: Tensor) -> Tensor:  # GeomLoss' cost is |x - y|^2 / 2
        return otloss.sinkhorn_divergence(p, q, PointCost(x, y), epsilon=2 * 0.05**2, **TIGHT) / 2

    theirs = SamplesLoss("sinkhorn", p=2, blur=0.05, backend="tensorized")
    errors = []
    for value in (ours, lambda x: theirs(p, x, q, y)):
        leaf = x.clone().requires_grad_()
        value(leaf).backward()
        assert leaf.grad is not None
        slopes = central_gradients(lambda t, value=value: float(value(as_double(t))), x.numpy(), 1e-5)
        errors.append(relative(leaf.grad, slopes))
    assert errors[0] < 1e-5
    still_wrong(errors[1] > 0.02, "geomloss.SamplesLoss")


@pytest.mark.parametrize("far", [100.0, 1000.0])
def test_float32_clouds_far_from_the_origin(far: float) -> None:
    from geomloss import SamplesLoss

    p, q, x, y = (t.float() for t in clouds())
    x, y = x + far, y + far  # rounded: the same points are then moved back in float64
    p, q = p / p.sum(), q / q.sum()
    epsilon = 2 * 0.05**2
    near = [t.double() - far for t in (x, y)]
    p64, q64 = p.double() / p.double().sum(), q.double() / q.double().sum()
    truth = float(otloss.sinkhorn_divergence(p64, q64, PointCost(*near), epsilon=epsilon, **TIGHT))
    ours = float(otloss.sinkhorn_divergence(p, q, PointCost(x, y), epsilon=epsilon))
    assert ours == pytest.approx(truth, rel=1e-4)
    assert float(otloss.sliced_wasserstein(x, y, p, q, projections=torch.eye(2))) == pytest.approx(
        float(otloss.sliced_wasserstein(*near, p64, q64, projections=torch.eye(2))), rel=1e-4
    )
    loss = SamplesLoss("sinkhorn", p=2, blur=0.05, scaling=0.9, backend="tensorized")
    reference = float(loss(p64, near[0], q64, near[1]))
    still_wrong(abs(float(loss(p, x, q, y)) / reference - 1) > 1e-3, "geomloss.SamplesLoss in float32")


def test_histograms_are_weights_where_scipy_takes_them_for_places() -> None:
    p, q = np.eye(5)[0], np.eye(5)[4]
    assert float(otloss.wasserstein_1d(as_double(p), as_double(q))) == 4
    assert float(otloss.wasserstein_1d(as_double(p), as_double(q))) == scipy.stats.wasserstein_distance(
        np.arange(5), np.arange(5), p, q
    )
    still_wrong(scipy.stats.wasserstein_distance(p, q) == 0, "scipy.stats.wasserstein_distance(p, q)")
