"""What goes wrong in other libraries, as tests that it does not go wrong here.

Each case holds this library to finite differences or to a linear program where a peer's answer is far off (POT 0.9.7,
GeomLoss 0.3.1). Where a later version of the peer is right, its own part of the test is skipped, after
ours has passed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import ot
import pytest
import torch
from torch import Tensor

import otloss
from otloss.costs import PointCost
from tests.otloss.oracles import as_double, linprog_value, weight_gradients

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


def weight_error(gradient: Tensor, expected_gradients: tuple[int, np.ndarray]) -> float:
    """Largest error of the differences to the heaviest bin, relative to the largest gradient."""
    heaviest, expected = expected_gradients
    return float(np.abs((gradient - gradient[heaviest]).numpy() - expected).max() / np.abs(expected).max())


def relative(found: Any, expected: Any) -> float:
    return float(np.abs(np.asarray(found) - np.asarray(expected)).max() / np.abs(np.asarray(expected)).max())


def own(**options: Any) -> Callable[..., Tensor]:
    return lambda p, q, matrix: otloss.sinkhorn(p, q, matrix, epsilon=EPSILON, **TIGHT, **options)


def p_gradients(value: Callable[..., Tensor]) -> tuple[int, np.ndarray]:
    p, q, matrix = problem()
    return weight_gradients(lambda w: float(value(as_double(w), q, matrix)), p.numpy(), 1e-7)


def pot_solve(p: Tensor, q: Tensor, matrix: Tensor, grad: str = "detach") -> Tensor:
    return ot.solve(matrix, p, q, reg=EPSILON, max_iter=100_000, tol=1e-13, grad=grad).value


def test_weight_gradients_where_the_envelope_of_pot_forgets_a_term() -> None:
    """Of KL(P | p q^T): by finite differences -0.142, by POT's envelope -0.206."""
    for grad in ("envelope", "implicit"):
        p, q, matrix = leaves(*problem())
        own(grad=grad)(p, q, matrix).backward()
        assert p.grad is not None
        assert weight_error(p.grad, p_gradients(own())) < 1e-5
    p, q, matrix = leaves(*problem())
    pot_solve(p, q, matrix, "envelope").backward()
    assert p.grad is not None
    still_wrong(weight_error(p.grad, p_gradients(pot_solve)) > 0.1, "ot.solve(grad='envelope')")


def test_gradients_at_empty_bins_where_pot_has_the_wrong_sign() -> None:
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


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_empty_bins_on_the_line_where_the_gradient_of_pot_is_not_that_of_its_value() -> None:
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
        expected_gradients = weight_gradients(lambda w, value=value: float(value(as_double(w))), p.numpy(), 1e-7)
        errors.append(weight_error(weights.grad, expected_gradients))
    assert errors[0] < 1e-5
    still_wrong(errors[1] > 1e-2, "ot.wasserstein_1d")


def clouds(n: int = 12, m: int = 10) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    p, q, _ = problem(n, m)
    x, y = (torch.rand(k, 2, generator=generator, dtype=torch.float64) for k in (n, m))
    return p, q, x, 0.7 * y


def test_float32_clouds_far_from_the_origin() -> None:
    from geomloss import SamplesLoss

    p, q, x, y = (t.float() for t in clouds())
    far = 1000.0
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
