"""The derivatives of a barycenter in the histograms, the weights and the cost, by a Newton step.

The equations (`equations`) are fixed; what they equate has a graph. Derivatives hold at bins with a share of the mass.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from otloss._checks import has_tangent
from otloss.solvers.barycenter.equations import DenseProblem, Equations, linearise, multiply, solve_with_mass
from otloss.solvers.barycenter.problem import NUMBERS, BarycenterProblem, BarycenterResult


def attach_gradient(problem: BarycenterProblem, result: BarycenterResult) -> Tensor:
    """Return the barycenter with its derivatives."""
    n, m = problem.cost.shape
    entries = problem.p.shape[:-1].numel() * n * max(n, m)
    if entries > NUMBERS.gradient_entries:
        raise ValueError(
            f"the gradient of barycenters holds {entries} entries of plans, expected at most "
            f"{NUMBERS.gradient_entries}; detach the histograms and the weights, or take fewer bins."
        )
    fixed = DenseProblem.build(problem.detach(), torch)
    ridge = NUMBERS.debiased_gradient_ridge if problem.debiased else NUMBERS.ridge
    equations = linearise(fixed, result.potentials, ridge=ridge)
    corrected = attach_step(problem, result, fixed, equations)
    if not bool(torch.isfinite(corrected.detach()).all()):
        raise RuntimeError("the gradient of the barycenter is singular to rounding; raise epsilon.")
    if corrected.requires_grad:
        corrected.register_hook(partial(raise_for_second_derivatives, forward=has_tangent(corrected)))
    return problem.give_mass(result.potentials.log_a + corrected - corrected.detach())


def attach_step(
    problem: BarycenterProblem, result: BarycenterResult, fixed: DenseProblem, equations: Equations
) -> Tensor:
    """Return log a after the step, with a graph."""
    potentials, shares, log_a = result.potentials, equations.shares, equations.log_a
    matrix, weights, tau = problem.cost.dense(), problem.weights.unsqueeze(-1), 0.0
    factor = ((matrix.detach() - matrix) / problem.epsilon).exp()  # ones with the derivatives of exp(-C / epsilon)
    gradient = (weights * potentials.log_u).sum(-2)
    if equations.among is not None:
        log_a, tau = log_a + (equations.among * factor).sum(-1).log(), NUMBERS.gradient_tau
        gradient = gradient - potentials.log_d
    columns = equations.columns * factor.mT
    masses = (columns * (problem.p / columns.sum(-1)).unsqueeze(-1)).sum(-2)
    has_mass = (shares > NUMBERS.no_mass).unsqueeze(-2)
    change = torch.where(has_mass, masses / masses.detach().clamp(min=NUMBERS.tiny), 1.0).log()  # 0 with derivatives
    off = equations.off + change - (log_a - log_a.detach()).unsqueeze(-2)
    off = torch.where(has_mass, off, off.detach())
    right = (fixed.weights.unsqueeze(-1) * (off - multiply(equations.remainder, off))).sum(-2) - gradient
    lack = problem.mass / log_a.exp().sum(-1) - 1
    system = equations.system + tau * fixed.eye
    return log_a + solve_with_mass(fixed, system, shares, right - tau * log_a, lack)


def raise_for_second_derivatives(upstream: Tensor, *, forward: bool) -> None:
    if forward or torch.is_grad_enabled():
        raise RuntimeError("barycenter gives first derivatives only; drop create_graph=True.")
