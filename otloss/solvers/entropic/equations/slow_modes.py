"""The error of the potentials of balanced problems too large for the dense equations of `dual`.

Let S be the plan with rows scaled to one, and S' its transpose with rows scaled to one. `dual` divides the largest
relative error of the columns by the smallest eigenvalue of H, which is 1 - l for the largest eigenvalue l of S' S where
constants are left out. S' S is self-adjoint in the inner product of the weights q, and Lanczos' method finds l in tens
of products, or up to 200 where small eigenvalues are close. Averages S v come from soft minima, since
S (1 + v) = 1 + S v is positive for small v:

    (f_i - softmin(g + epsilon log(1 + v))_i) / epsilon = log(1 + (S v)_i)

Source: G. Golub, C. Van Loan, Matrix Computations, 2013, chapter 10, for the method and for the bound of its error.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from otloss.solvers.entropic.arithmetic import detached_in_float64
from otloss.solvers.entropic.equations.dual import ROUNDING, range_over_mass
from otloss.solvers.entropic.equations.updates import Updates, build_updates
from otloss.solvers.entropic.interface import SearchResult
from otloss.solvers.entropic.sinkhorn_kernels.numbers import SCHEDULE
from otloss.solvers.problem import Problem


class LanczosLimits(NamedTuple):
    """When Lanczos' method ends.

    Attributes:
        min_steps, max_steps: products. Two small eigenvalues that are close to each other take more than a hundred.
        max_numbers: of all vectors, above which there are fewer products.
        resolved: the bound of the error of l over 1 - l. It holds for some eigenvalue, and after the first products for
            the largest. After 14 products, the eigenvalue of one cell that hardly exchanges mass had not shown yet.
        smallest_norm: of a step, below which all eigenvalues are found.
        lightest: bins of at least this share of the mass have an equal part in the first vector, however light they
            are. The eigenvector of one such bin is nearly orthogonal to a vector of equal numbers. Far larger numbers
            at bins that are still lighter would round the others.
    """

    min_steps: int = 24
    max_steps: int = 200
    max_numbers: int = 2**25
    resolved: float = 0.1
    smallest_norm: float = 1e-8
    lightest: float = 1e-12


LANCZOS_LIMITS = LanczosLimits()


def with_lanczos_error(problem: Problem, result: SearchResult) -> SearchResult:
    """Return the result with the error of g and its range, also where the search has not estimated them.

    The error of symmetric problems stays unknown: their slow modes move f and g apart, and both are one potential.
    """
    error = result.potential_error
    if (
        not bool(error.isnan().any())
        or problem.is_symmetric
        or problem.marginal_penalty is not None
        or not problem.batch.numel()
    ):
        return result
    with torch.no_grad():
        estimate = _estimate(build_updates(detached_in_float64(problem)), result.g)
    error = torch.where(error.isnan(), estimate, error)
    return dataclasses.replace(result, potential_error=error, potential_range=range_over_mass(problem, result.g))


def _estimate(updates: Updates, g: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch"]:
    """Return the largest error of g in the unit of the cost, infinite where it is not known."""
    g = g.to(updates.log_q)
    f = updates.f_from(g)
    received = updates.g_from(f)
    differences = ((g - received) / updates.epsilon).clamp(max=80.0).expm1().abs()
    residual = differences.masked_fill(updates.log_q == -torch.inf, 0.0).amax(-1) + ROUNDING
    error = residual / _smallest_eigenvalue(updates, f, g, received)
    return torch.where(error <= SCHEDULE.largest_estimate, error, torch.inf) * updates.epsilon.squeeze(-1)


def _smallest_eigenvalue(updates: Updates, f: Tensor, g: Tensor, received: Tensor) -> Float[Tensor, "*batch"]:
    """Return the smallest eigenvalue of H without constants, less the bound of its error."""
    weights = updates.log_q.exp()
    random = torch.Generator("cpu").manual_seed(0)
    first = torch.rand(weights.shape[-1], dtype=weights.dtype, generator=random, device="cpu") - 0.5
    first = first + 0.5 * first.sign()  # small numbers would be nearly orthogonal to the eigenvector of a single bin
    first = first.to(weights) / weights.clamp(min=LANCZOS_LIMITS.lightest).sqrt()
    basis = torch.ones_like(weights).unsqueeze(-2)  # rows of length one in the inner product of the weights
    step, norm = _orthogonal(first, basis, weights)
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    limits = LANCZOS_LIMITS
    max_steps = max(limits.min_steps, min(limits.max_steps, limits.max_numbers // max(weights.numel(), 1)))
    while True:
        basis = torch.cat([basis, torch.where(norm > 0, step / norm.where(norm > 0, 1.0), 0.0).unsqueeze(-2)], -2)
        image = _round_trip(updates, f, g, received, basis[..., -1, :])
        diagonal.append((weights * image * basis[..., -1, :]).sum(-1))
        step, norm = _orthogonal(image, basis, weights)
        steps = len(diagonal)
        if steps >= limits.min_steps:
            tridiagonal = torch.diag_embed(torch.stack(diagonal, -1))
            for offset in (-1, 1):
                tridiagonal = tridiagonal + torch.diag_embed(torch.stack(beside, -1), offset)
            values, vectors = torch.linalg.eigh(tridiagonal)
            bound, smallest = norm.squeeze(-1) * vectors[..., -1, -1].abs(), 1 - values[..., -1]
            if bool((bound <= limits.resolved * smallest).all()) or steps == max_steps:
                return (smallest - bound).clamp(min=0.0)
        beside.append(norm.squeeze(-1))


def _orthogonal(step: Tensor, basis: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the part of a step (..., m) that is orthogonal to the basis (..., k, m), and its length (..., 1)."""
    for _ in range(2):  # once leaves the rounding of the first products
        shares = basis @ (weights * step).unsqueeze(-1)
        step = step - (shares.mT @ basis).squeeze(-2)
    norm = (weights * step.square()).sum(-1, keepdim=True).sqrt()
    return step, norm.masked_fill(norm < LANCZOS_LIMITS.smallest_norm, 0.0)


def _round_trip(updates: Updates, f: Tensor, g: Tensor, received: Tensor, v: Tensor) -> Tensor:
    """Return S' S v, with the exact updates f of g and `received` of f."""
    epsilon = updates.epsilon
    size = 2 * v.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)
    there = ((f - updates.f_from(g + epsilon * (v / size).log1p())) / epsilon).expm1()
    back = ((received - updates.g_from(f + epsilon * there.log1p())) / epsilon).expm1()
    return size * back
