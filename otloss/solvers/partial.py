"""Partial transport: the cheapest plan that moves a given mass, and no more of a bin than it holds.

    min <C, P> (+ epsilon KL)  over  P >= 0,  P 1 <= p,  P^T 1 <= q,  sum P = mass

A dummy bin on either side takes what stays: with D above all costs it is the balanced problem

    p' = (p, sum q - mass)    q' = (q, sum p - mass)    C' = [C 0; 0 D]

Its potentials f', g' give the derivatives. More mass in bin i of p is more in the dummy bin of q too, so

    dV/dp_i = f'_i + g'_dummy    dV/dq_j = g'_j + f'_dummy    dV/dmass = -(f'_dummy + g'_dummy)    dV/dC = P

which no constant moved from f' to g' changes. The entropic problem is that of p', q' and C': its KL also counts what
stays, and has `-epsilon` in dV/dp_i and dV/dq_j, `+2 epsilon` in dV/dmass, from the mass of the dummy bins.
Source: L. Chapel, M. Alaya, G. Gasso, Partial Optimal Transport with Applications on Positive-Unlabeled Learning, 2020.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from otloss._checks import check_broadcast, check_finite, check_floating, check_number
from otloss.costs import DenseCost, as_cost, cost_between
from otloss.solvers.entropic.problem import EntropicProblem, Settings, entropic_problem, has_float64
from otloss.solvers.histograms import HistogramPair, histogram_pair, weights_or_uniform

_ROUNDING = 1e-5  # relative, by which the mass may exceed that of a side
_FORBIDDEN = 60.0  # epsilons above all potentials: exp(-60) of the mass goes from dummy bin to dummy bin


def partial_problem(p: Any, q: Any, cost: Any, mass: Any) -> tuple[HistogramPair, Tensor]:
    """Return the exact problem with its dummy bins, in float64 where there is one, with its graph."""
    p, q = weights_or_uniform(p, q, cost)
    fitted = as_cost(cost)
    pair = histogram_pair(p, q, cost.dtype, balanced=False)
    matrix = cost_between(pair.p, pair.q, fitted).dense()
    check_finite("cost", matrix)
    p, q, matrix, moved = _extended(pair.p, pair.q, matrix, mass, matrix.new_zeros(()))
    return HistogramPair(p, q, moved, pair.dtype), matrix


def partial_entropic_problem(
    p: Any, q: Any, cost: Any, mass: Any, *, epsilon: Any, settings: Settings
) -> EntropicProblem:
    """Return the entropic problem with its dummy bins, with its graph."""
    if settings.marginal_penalty is not None:
        raise ValueError("mass and marginal_penalty are both given, expected one: both let mass stay where it is.")
    if settings.start is not None:
        raise ValueError("start is given with mass=, expected none: the dummy bins have potentials of their own.")
    free = dataclasses.replace(settings, marginal_penalty=1.0)  # masses may differ
    given = entropic_problem(p, q, cost, epsilon=epsilon, settings=free)
    matrix = given.cost.dense()
    p, q, matrix, _ = _extended(given.p, given.q, matrix, mass, given.epsilon)
    return EntropicProblem(p, q, DenseCost(matrix), given.epsilon.to(p.dtype).expand(p.shape[:-1]), None, given.dtype)


def partial_value(value: Tensor, problem: EntropicProblem, settings: Settings) -> Tensor:
    """Return the value with the derivative in the total mass, which `grad="envelope"` leaves out."""
    total = problem.p.sum(-1)
    if settings.grad == "implicit" or not (torch.is_grad_enabled() and total.requires_grad):
        return value
    return value - problem.epsilon.detach() * (total - total.detach())


def _extended(
    p: Tensor, q: Tensor, matrix: Tensor, mass: Any, epsilon: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.float64 if has_float64(p.device) else p.dtype
    p, q, matrix = p.to(wide), q.to(wide), matrix.to(wide)
    total_p, total_q = p.sum(-1), q.sum(-1)
    moved = _checked_mass(mass, total_p, total_q)
    batch = check_broadcast(p=p.shape[:-1], q=q.shape[:-1], cost=matrix.shape[:-2], mass=moved.shape)
    p = torch.cat([p.expand(*batch, -1), (total_q - moved).clamp(min=0).expand(batch).unsqueeze(-1)], -1)
    q = torch.cat([q.expand(*batch, -1), (total_p - moved).clamp(min=0).expand(batch).unsqueeze(-1)], -1)
    largest = matrix.detach().amax((-2, -1)) if matrix.numel() else matrix.new_zeros(matrix.shape[:-2])
    above = 3 * largest + _FORBIDDEN * epsilon.detach().to(matrix)
    above = torch.where(above > 0, above, 1.0)[..., None, None]
    own = matrix if above.dim() == matrix.dim() else matrix.expand(*above.shape[:-2], -1, -1)
    corner = torch.nn.functional.pad(above, (own.shape[-1], 0))
    return p, q, torch.cat([torch.nn.functional.pad(own, (0, 1)), corner.expand(*own.shape[:-2], 1, -1)], -2), moved


def _checked_mass(mass: Any, total_p: Tensor, total_q: Tensor) -> Tensor:
    if isinstance(mass, Tensor):
        moved = check_floating("mass", mass).to(total_p)
    else:
        moved = total_p.new_tensor(float(check_number("mass", mass)))
    least = torch.minimum(total_p.detach(), total_q.detach())
    bad = ~((moved.detach() >= 0) & (moved.detach() <= least * (1 + _ROUNDING)))
    if bad.any():
        got, most = (float(t.expand(bad.shape)[bad][0]) for t in (moved.detach(), least))
        raise ValueError(
            f"mass is {got:.6g}, expected 0 to {most:.6g}, the lesser of the masses of p and q; it is an amount: a "
            "share s of p is s * p.sum(-1)."
        )
    return moved
