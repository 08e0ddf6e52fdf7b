"""Sliced Wasserstein distance between weighted point clouds: the mean of closed forms along random directions.

    SW = mean over directions u, |u| = 1, of W_order^order(sum_i a_i delta(u . x_i), sum_j b_j delta(u . y_j))

(N. Bonneel, J. Rabin, G. Peyre, H. Pfister, Sliced and Radon Wasserstein Barycenters of Measures, 2015). Directions are
drawn once per call and shared by the batch. Both clouds are moved by the mean of all their points before they are
projected, in float64 where the device has it: the distance stays, and clouds far from the origin, or with clusters far
from each other, keep their digits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import (
    broadcast_shape,
    check_broadcast,
    check_cloud,
    check_count,
    check_finite,
    check_floating,
    check_last_axis,
    device_of,
    has_float64,
)
from otloss._per_example import per_example
from otloss._public import public
from otloss.costs.cost import recomputed
from otloss.costs.products import product
from otloss.solvers.closed_forms.line import finite_in, wasserstein_1d
from otloss.solvers.histograms import check_masses

# Projected coordinates held at once; beyond, directions are taken block by block, and again in the backward pass.
_BLOCK = 2**23


@public
@per_example(x=2, y=2, a=1, b=1)
def sliced_wasserstein(
    x: Float[Tensor, "*batch n d"],
    y: Float[Tensor, "*batch m d"],
    a: Float[Tensor, "*batch n"] | None = None,
    b: Float[Tensor, "*batch m"] | None = None,
    *,
    order: float = 2,
    projections: int | Float[Tensor, "k d"] = 128,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "*batch"]:
    """Return the mean over directions of W_order^order between the clouds projected on each.

    Formulas: docs/guide/definitions.md#def-line

    Args:
        x: (..., n, d) points. The leading axes of x, y, a and b broadcast.
        y: (..., m, d) points.
        a: (..., n) weights >= 0 of x, 1 / n each by default.
        b: (..., m) weights >= 0 of y with the mass of a, up to rounding; 1 / m each by default.
        order: at least 1.
        projections: how many directions to draw, uniform on the sphere; or the directions themselves, (k, d), which
            are scaled to length 1. The error of random directions falls with 1 / sqrt(k).
        generator: source of the directions, on any device; the same state gives the same directions. Without one,
            torch's default generator.

    Returns:
        (...), in the promoted dtype; its unit is the unit of the points to the power `order`, times the unit of the
        mass. Differentiable in x, y, given directions and the weights (centred over all points; one-sided derivatives
        at points without mass). Memory is bounded: directions that do not fit at once are taken in blocks, and
        recomputed for the gradient.

    Raises:
        TypeError: if x, y, a or b is not a floating tensor, or order not a number.
        ValueError: if shapes do not fit, masses differ, a weight is negative, a number is not finite, projections is
            not at least 1, a given direction is zero, or the value overflows.

    Source:
        N. Bonneel et al., Sliced and Radon Wasserstein Barycenters of Measures, JMIV 51, 2015.

    Example:
        >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
        >>> sliced_wasserstein(x, x + torch.tensor([3.0, 4.0]), projections=torch.eye(2))
        tensor(12.5000)
    """
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in _check_clouds(x, y, a, b)))
    arithmetic = torch.float64 if has_float64(x.device) else torch.promote_types(dtype, torch.float32)
    directions = _directions(projections, x.shape[-1], generator).to(device=x.device, dtype=arithmetic)
    x, y = _centred(x.to(arithmetic), y.to(arithmetic))
    a = x.new_full((x.shape[-2],), 1 / x.shape[-2]) if a is None else a
    b = y.new_full((y.shape[-2],), 1 / y.shape[-2]) if b is None else b
    check_masses(a, b, ("a", "b"))
    a, b = a.unsqueeze(-2), b.unsqueeze(-2)  # (..., 1, n)
    problems = broadcast_shape(*(t.shape[:-2] for t in (x, y, a, b))).numel()
    blocks = directions.split(max(1, _BLOCK // max(1, problems * (x.shape[-2] + y.shape[-2]))))
    inputs, count = (x, y, a, b, order), directions.shape[0]
    if len(blocks) == 1:
        value = _share_of_mean(directions, count, *inputs)
    else:
        value = torch.stack([recomputed(_share_of_mean, block, count, *inputs) for block in blocks]).sum(0)
    return finite_in(dtype, value, order)


def _share_of_mean(directions: Tensor, count: int, x: Tensor, y: Tensor, a: Tensor, b: Tensor, order: float) -> Tensor:
    along_x, along_y = product(directions, x.mT), product(directions, y.mT)  # (..., k, n)
    # Divided before the sum, which could overflow where the mean does not.
    return (wasserstein_1d(a, b, x=along_x, y=along_y, order=order) / count).sum(-1)


def _centred(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    # Without a graph: the distance does not depend on the origin.
    n, m = x.shape[-2], y.shape[-2]
    mean_x, mean_y = (cloud.detach().mean(-2, keepdim=True, dtype=torch.float64) for cloud in (x, y))
    centre = (mean_x * (n / (n + m)) + mean_y * (m / (n + m))).to(x.dtype)
    return x - centre, y - centre


def _directions(projections: Any, d: int, generator: torch.Generator | None) -> Tensor:
    """Return directions (k, d) of length 1."""
    if isinstance(projections, Tensor):
        check_finite("projections", check_floating("projections", projections))
        if projections.dim() != 2 or projections.shape[0] == 0 or projections.shape[1] != d:
            raise ValueError(
                f"projections has shape {tuple(projections.shape)}, expected (k, {d}) with k >= 1: "
                "one direction per row, in the dimension of the points."
            )
        directions = projections.to(torch.float64)
        directions = directions / directions.detach().abs().amax(-1, keepdim=True)  # no overflow in the squares
        if not torch.isfinite(directions).all():
            row = int((~torch.isfinite(directions)).any(-1).nonzero()[0])
            raise ValueError(f"projections[{row}] is zero, expected directions; drop this row.")
    else:
        check_count("projections", projections)
        # Drawn in float64 whatever the clouds' dtype, so that the same generator gives the same directions.
        device = device_of(generator)
        directions = torch.randn(int(projections), d, generator=generator, device=device, dtype=torch.float64)
    return directions / directions.norm(dim=-1, keepdim=True)


def _check_clouds(x: Any, y: Any, a: Any, b: Any) -> list[Tensor]:
    """Return the given ones of the four, checked; `wasserstein_1d` checks the weights further."""
    inputs = {"x": check_cloud("x", x), "y": check_cloud("y", y)}
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"x has dimension {x.shape[-1]} and y {y.shape[-1]}, expected the same; x is (..., n, d).")
    shapes = {"x": x.shape[:-2], "y": y.shape[:-2]}
    for name, weights, cloud in (("a", a, x), ("b", b, y)):
        if weights is not None:
            inputs[name] = check_floating(name, weights)
            check_last_axis(name, weights, cloud.shape[-2])
            shapes[name] = weights.shape[:-1]
    devices = {name: str(tensor.device) for name, tensor in inputs.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"the tensors are on different devices, {devices}; expected one; move them with .to().")
    check_broadcast(**shapes)
    return list(inputs.values())
