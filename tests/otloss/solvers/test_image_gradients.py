"""Gradients of images against the same problem as a matrix in float64, and against the symmetric fixed point."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import otloss
from otloss.costs import DenseCost, GridCost

FUNCTIONS = {"sinkhorn": otloss.sinkhorn, "sinkhorn_divergence": otloss.sinkhorn_divergence}
CELLS = [(6, 7), (3, 4, 5)]
PENALTIES = {"balanced": None, "unbalanced": 0.5, "q is kept": (0.3, None)}
ERRORS = {torch.float64: 1e-6, torch.float32: 2e-4}


def pixels(cells: tuple[int, ...], seed: int, *, empty: bool = True) -> Tensor:
    """Weights of sum one over many decades, and pixels without mass."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(*cells, generator=generator, dtype=torch.float64) ** 3
    weights = weights * ((torch.rand(*cells, generator=generator) > 0.4) | (not empty))
    return weights.flatten() / weights.sum()


def image_cost(cells: tuple[int, ...], power: float) -> GridCost:
    return GridCost(cells, power=power, spacing=1 / max(size - 1 for size in cells))


def gradients(function: Any, p: Tensor, q: Tensor, cost: Any, **options: Any) -> tuple[Tensor, list[Tensor]]:
    leaves = [w.to(cost.dtype).requires_grad_() for w in (p, q)]
    value = function(*leaves, cost, **options)
    return value.detach().double(), [g.double() for g in torch.autograd.grad(value, leaves)]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize(("cells", "power"), list(product(CELLS, (1, 2))))
def test_images_have_the_gradients_of_their_matrix(
    cells: tuple[int, ...], power: float, penalty: str, function: str
) -> None:
    """At wide and narrow blurs, with and without pixels of no mass."""
    for epsilon, empty in ((1.0, False), (0.1, True), (0.01, False), (0.01, True)):
        options: dict[str, Any] = {"epsilon": epsilon, "marginal_penalty": PENALTIES[penalty]}
        p, q = (pixels(cells, seed, empty=empty) for seed in (0, 1))
        q = q if penalty == "balanced" else 1.3 * q
        matrix = DenseCost(image_cost(cells, power).to(torch.float64).dense())
        value, expected = gradients(
            FUNCTIONS[function], p, q, matrix, tolerance=1e-11, max_iterations=100_000, **options
        )
        size = max(float(g.abs().max()) for g in expected)
        for dtype, error in ERRORS.items():
            actual, by_weights = gradients(FUNCTIONS[function], p, q, image_cost(cells, power).to(dtype), **options)
            assert float((actual - value).abs()) < error * float(value.abs()), (dtype, epsilon, empty)
            for gradient, right in zip(by_weights, expected, strict=True):
                assert float((gradient - right).abs().max()) < error * size, (dtype, epsilon, empty)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("kind", ["matrix", "image"])
@pytest.mark.parametrize(("cells", "power", "epsilon"), [((3, 4, 5), 1, 0.01), ((6, 7), 2, 0.002), ((6, 7), 1, 0.01)])
def test_light_pixels_do_not_disturb_the_derivatives_of_empty_ones(
    cells: tuple[int, ...], power: float, epsilon: float, kind: str, dtype: torch.dtype
) -> None:
    """Of the term of p with itself, which is the difference of two gradients, against its fixed point f = T f."""
    p, q, cost = pixels(cells, 0), pixels(cells, 1), image_cost(cells, power)
    C = cost.to(torch.float64).dense()
    f = torch.zeros_like(p)
    for _ in range(200):
        f = (f - epsilon * torch.logsumexp((f - C) / epsilon + p.log(), -1)) / 2
    f = -epsilon * torch.logsumexp((f - C) / epsilon + p.log(), -1)
    tight: dict[str, Any] = {"epsilon": epsilon, "tolerance": 1e-11, "max_iterations": 100_000}
    _, (between, _) = gradients(otloss.sinkhorn, p, q, DenseCost(C), **tight)
    given = cost.to(dtype) if kind == "image" else DenseCost(C.to(dtype))
    _, (whole, _) = gradients(otloss.sinkhorn_divergence, p, q, given, epsilon=epsilon)
    difference = (between - whole) - f
    assert float((difference - difference.mean()).abs().max()) < 1e-2 * ERRORS[dtype] + 5e-6 * (dtype == torch.float32)


def test_gradients_of_a_spot_are_centred_over_all_pixels_wherever_it_is() -> None:
    """Some pixel with mass has nearly the median derivative by chance, while those without have far larger ones."""
    axis = torch.arange(64.0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)

    def spot(x: float, y: float) -> Tensor:
        image = (-((axis[:, None] - y) ** 2 + (axis - x) ** 2) / 8).exp()
        image = image * (image > 0.01)
        return (image / image.sum()).flatten()

    q, cost = spot(45.0, 45.0), GridCost((64, 64))
    functions = {
        "lower_bound": lambda p: otloss.lower_bound(p, q, cost),
        "sinkhorn_divergence": lambda p: otloss.sinkhorn_divergence(p, q, cost, epsilon=4.0),
    }
    for place in 6 + 16 * torch.rand(4, 2, generator=generator):
        for function in functions.values():
            p = spot(*place.tolist()).requires_grad_()
            (gradient,) = torch.autograd.grad(function(p), p)
            assert abs(float(gradient.mean())) < 1e-6 * float(gradient.abs().max())
