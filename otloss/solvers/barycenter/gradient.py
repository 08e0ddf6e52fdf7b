"""The derivatives of a barycenter in the histograms, the weights and the cost, by a Newton step."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch import Tensor

from otloss._checks import has_tangent
from otloss.solvers.barycenter.equations import find_newton_step, linearise
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
    equations = linearise(problem, problem.cost.dense(), result.potentials)
    tau = torch.full_like(equations.shares[..., :1], NUMBERS.gradient_tau) if problem.debiased else None
    step = find_newton_step(equations, tau)
    if not bool(torch.isfinite(step.by_a.detach()).all()):
        raise RuntimeError("the gradient of the barycenter is singular to rounding; raise epsilon.")
    sizes = [torch.linalg.matrix_norm(t, torch.inf) for t in (equations.rows.matrix, equations.rows.inverse)]
    uncertain = (sizes[0] * sizes[1]).amax(-1) > NUMBERS.largest_condition
    if not problem.debiased and bool(uncertain.any()):
        warnings.warn(
            f"the gradient of {int(uncertain.sum())} of {uncertain.numel()} barycenters is uncertain: plans fall into "
            "parts that hardly exchange mass, and rounding decides how a change spreads. Raise epsilon. The "
            "barycenters themselves are right.",
            ConvergenceWarning,
            stacklevel=level_of_the_caller(),
        )
    corrected = equations.log_a + step.by_a
    if corrected.requires_grad:
        corrected.register_hook(partial(raise_for_second_derivatives, forward=has_tangent(corrected)))
    return problem.give_mass(result.potentials.log_a + corrected - corrected.detach())


def raise_for_second_derivatives(upstream: Tensor, *, forward: bool) -> None:
    if forward or torch.is_grad_enabled():
        raise RuntimeError("barycenter gives first derivatives only; drop create_graph=True.")
