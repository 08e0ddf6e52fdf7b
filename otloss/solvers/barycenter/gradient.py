"""The derivatives of a barycenter in the histograms, the weights and the cost, by a Newton step.

The equations (`equations`) are fixed; what they equate has a graph. Derivatives hold at bins with a share of the mass.
Debiased ones have a tau: where eigenvalues of the equations are below it, rounding would decide the derivatives. The
smaller it is, the more rounding they have; the larger it is, the more of them is lost. So it is chosen by problem.
"""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch import Tensor

from otloss._checks import has_tangent
from otloss.solvers import linear_systems
from otloss.solvers.barycenter.equations import DenseProblem, Equations, border, linearise, multiply, solve_with_mass
from otloss.solvers.barycenter.problem import NUMBERS, BarycenterProblem, BarycenterResult
from otloss.solvers.convergence import ConvergenceWarning, level_of_the_caller


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
    tau = torch.zeros_like(equations.lack)
    if problem.debiased:
        tau, change = choose_tau(fixed, equations)
        warn_of_rounding(change)
    corrected = attach_step(problem, result, fixed, equations, tau.unsqueeze(-1))
    if not bool(torch.isfinite(corrected.detach()).all()):
        raise RuntimeError("the gradient of the barycenter is singular to rounding; raise epsilon.")
    if corrected.requires_grad:
        corrected.register_hook(partial(raise_for_second_derivatives, forward=has_tangent(corrected)))
    return problem.give_mass(result.potentials.log_a + corrected - corrected.detach())


def attach_step(
    problem: BarycenterProblem, result: BarycenterResult, fixed: DenseProblem, equations: Equations, tau: Tensor
) -> Tensor:
    """Return log a after the step, with a graph."""
    potentials, shares, log_a = result.potentials, equations.shares, equations.log_a
    matrix, weights = problem.cost.dense(), problem.weights.unsqueeze(-1)
    factor = ((matrix.detach() - matrix) / problem.epsilon).exp()  # ones with the derivatives of exp(-C / epsilon)
    gradient = (weights * potentials.log_u).sum(-2)
    if equations.among is not None:
        log_a = log_a + (equations.among * factor).sum(-1).log()
        gradient = gradient - potentials.log_d
    columns = equations.columns * factor.mT
    masses = (columns * (problem.p / columns.sum(-1)).unsqueeze(-1)).sum(-2)
    has_mass = (shares > NUMBERS.no_mass).unsqueeze(-2)
    change = torch.where(has_mass, masses / masses.detach().clamp(min=NUMBERS.tiny), 1.0).log()  # 0 with derivatives
    log_ratios = equations.log_ratios + change - (log_a - log_a.detach()).unsqueeze(-2)
    log_ratios = torch.where(has_mass, log_ratios, log_ratios.detach())
    right = (fixed.weights.unsqueeze(-1) * (log_ratios - multiply(equations.remainder, log_ratios))).sum(-2) - gradient
    lack = problem.mass / log_a.exp().sum(-1) - 1
    system = equations.system + tau.unsqueeze(-1) * fixed.eye
    return log_a + solve_with_mass(fixed, system, shares, right - tau * log_a, lack)


def choose_tau(problem: DenseProblem, equations: Equations) -> tuple[Tensor, Tensor]:
    """Return the tau (...) at which derivatives change least, and by how much (...), as a share, since the tau before.

    It compares the derivatives of the masses of a in random directions of log p.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    directions = torch.randn(problem.p.shape[-1], NUMBERS.directions, generator=generator, device="cpu").to(problem.p)
    means = problem.p @ directions / problem.mass[..., None, None]
    at_rows = equations.rows @ (directions - means.unsqueeze(-2))  # of one mass
    right = (problem.weights[..., None, None] * (at_rows - equations.remainder @ at_rows)).sum(-3)
    right = torch.cat([right, torch.zeros_like(right[..., :1, :])], -2)
    chosen, smallest, previous = torch.zeros_like(equations.lack), torch.full_like(equations.lack, torch.inf), None
    for tau in NUMBERS.gradient_taus:
        matrix = border(torch, equations.system + tau * problem.eye, equations.shares)
        factors, pivots, _ = linear_systems.factor(matrix)
        by_a = linear_systems.solve_factored(factors, pivots, right)[..., :-1, :]
        derivatives = equations.shares.unsqueeze(-1) * by_a
        if previous is not None:
            change = (derivatives - previous).abs().sum(-2) / derivatives.abs().sum(-2).clamp(min=NUMBERS.tiny)
            is_smallest = change.amax(-1) < smallest
            chosen, smallest = chosen.masked_fill(is_smallest, tau), torch.where(is_smallest, change.amax(-1), smallest)
        previous = derivatives
    return chosen, smallest


def warn_of_rounding(change: Tensor) -> None:
    if bool((change > NUMBERS.gradient_change).any()):
        warnings.warn(
            f"the gradient of the debiased barycenter is rounded by about {float(change.max()):.1g} of its size: the "
            "blur hides details of the answer. Lower epsilon.",
            ConvergenceWarning,
            stacklevel=level_of_the_caller(),
        )


def raise_for_second_derivatives(upstream: Tensor, *, forward: bool) -> None:
    if forward or torch.is_grad_enabled():
        raise RuntimeError("barycenter gives first derivatives only; drop create_graph=True.")
