"""Conjugate gradients for batches of equations A b = c that are known by products, on any device.

A is self-adjoint and positive in an inner product that belongs to each problem. `newton_kernels.equations_numba` has
conjugate gradients for one plan, whose cells give the preconditioner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss.solvers.entropic.equations.looks import Looks


class Equations(NamedTuple):
    """The equations A b = c of a batch.

    Attributes:
        times: v to A v.
        inner: a and b to their inner product (..., 1).
        precondition: v to an approximation of A^-1 v, self-adjoint and positive too.
    """

    times: Callable[[Tensor], Tensor]
    inner: Callable[[Tensor, Tensor], Tensor]
    precondition: Callable[[Tensor], Tensor] = lambda v: v


class Conjugate(NamedTuple):
    """The solution of each problem, and whether its residual is within the precision."""

    solution: Float[Tensor, "*batch m"]
    is_solved: Bool[Tensor, "*batch"]


def conjugate_gradients(
    equations: Equations, right: Float[Tensor, "*batch m"], precision: float | Tensor, *, max_products: int,
    looks: Looks, check: Callable[[Tensor], None] | None = None,
) -> Conjugate:  # fmt: skip
    """Return the solution whose preconditioned residual has a share `precision` (..., 1) of its first length.

    A problem ends, unsolved, where rounding leaves no positive curvature. `check` is called with the solution so far
    whenever the host looks, and may raise.
    """
    rounding, inner = torch.finfo(right.dtype).eps, equations.inner
    b, residual, direction = torch.zeros_like(right), right, equations.precondition(right)
    energy = inner(residual, direction)
    allowed = precision**2 * energy
    is_active = energy > allowed
    for count in range(1, max_products + 1):
        image = equations.times(direction)
        curvature = inner(direction, image)
        is_active = is_active & (curvature > rounding * inner(direction, direction))
        step = torch.where(is_active, energy / torch.where(is_active, curvature, 1.0), 0.0)
        b, residual = b + step * direction, residual - step * image
        preconditioned, previous = equations.precondition(residual), energy
        energy = inner(residual, preconditioned)
        direction = preconditioned + torch.where(is_active, energy / previous, 0.0) * direction
        is_active = is_active & (energy > allowed)
        if looks.is_due(count):
            if check is not None:
                check(b)
            if looks.largest_excess((energy / allowed).sqrt(), is_active, count) == 0:
                break
    return Conjugate(b, (energy <= allowed).squeeze(-1))
