"""Accurate potentials, for gradients of the weights and for `solve`: Newton's method with dense equations.

Slow modes of g hardly count in the marginal error that ends a search. Here the equations of each step (`dual`) are
solved up to rounding, and the steps end where one is small or does not reduce the residual beyond rounding.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from otloss.solvers.entropic.equations.dual import (
    ROUNDING,
    build_dual,
    estimate_error,
    is_dense_fast,
    range_over_mass,
)
from otloss.solvers.entropic.equations.updates import build_updates
from otloss.solvers.entropic.interface import Budget, SearchResult, better
from otloss.solvers.entropic.newton_batch import scatter, select, suits_newton, with_empty_rows
from otloss.solvers.linear_systems import solve_ex
from otloss.solvers.problem import Problem


class DenseNewtonLimits(NamedTuple):
    """When potentials count as accurate, and when the steps with dense equations end.

    Attributes:
        negligible_error: a smaller error of potentials over epsilon never counts, even if the potentials hardly differ.
        resolved_eigenvalue: a few steps of Lanczos' method tell this eigenvalue apart from smaller ones.
        max_steps: of Newton's method.
        smallest_step: the steps end with one that changes no g / epsilon by more.
        ridge: of the masses of the columns: the equations do not determine parts that exchange nothing.
    """

    negligible_error: float = 1e-5
    resolved_eigenvalue: float = 0.005
    max_steps: int = 40
    smallest_step: float = 1e-7
    ridge: float = 1e-13


DENSE_NEWTON_LIMITS = DenseNewtonLimits()


def with_estimates(problem: Problem, result: SearchResult) -> SearchResult:
    """Return the result with the error of g and what belongs to it, also where the search has not estimated them."""
    is_missing = result.error.isfinite() & result.potential_error.isnan()
    if not bool(is_missing.any()):
        return result
    if problem.p.device.type == "cpu" and is_dense_fast(problem):
        error = torch.full_like(result.error, torch.nan)
        error[is_missing] = estimate_error(select(problem, is_missing), result.g[is_missing]).to(error)
    else:
        error = estimate_error(problem, result.g)
    estimates = {
        "potential_error": error,
        "potential_range": range_over_mass(problem, result.g),
        "smallest_eigenvalue": torch.ones_like(error),  # the estimate has taken account of it
    }
    fields = vars(result)
    return dataclasses.replace(
        result,
        **{name: torch.where(fields[name].isnan(), estimate, fields[name]) for name, estimate in estimates.items()},
    )


def with_accurate_potentials(problem: Problem, result: SearchResult, budget: Budget) -> SearchResult:
    """Return the result with accurate potentials of the problems within the tolerance, where that is possible.

    It is the result itself where all are accurate.
    """
    allowed = budget.largest_change * result.potential_range
    allowed = allowed + DENSE_NEWTON_LIMITS.negligible_error * problem.epsilon.detach()
    is_unresolved = result.smallest_eigenvalue < DENSE_NEWTON_LIMITS.resolved_eigenvalue
    is_inaccurate = (~(result.potential_error <= allowed) | is_unresolved) & (result.error <= budget.tolerance)
    if not bool(is_inaccurate.any()) or not (is_dense_fast(problem) and suits_newton(problem)):
        return result
    max_iterations = budget.max_iterations - int(result.iterations.amax())
    if max_iterations < 1:
        return result
    budget = dataclasses.replace(budget, max_iterations=max_iterations)
    selected = select(problem, is_inaccurate)
    new = _run_dense(selected, result.g[is_inaccurate].cpu().double(), budget)
    new = with_empty_rows(selected, problem.q[is_inaccurate], new)
    merged = better(result, scatter(result, is_inaccurate, new), budget.tolerance)
    has_failed = is_inaccurate.clone()
    has_failed[is_inaccurate] = ~(new.error <= budget.tolerance).to(is_inaccurate.device)
    return dataclasses.replace(merged, potential_error=merged.potential_error.masked_fill(has_failed, torch.inf))


def _run_dense(problem: Problem, g: Tensor, budget: Budget) -> SearchResult:
    """Take Newton's steps with dense equations from g, and an exact update of f."""
    updates = build_updates(problem)
    dual, q = build_dual(updates), problem.q
    b = g / updates.epsilon
    tiny = torch.finfo(b.dtype).tiny
    steps = torch.zeros(problem.batch, dtype=torch.int64, device=g.device)
    for _ in range(min(DENSE_NEWTON_LIMITS.max_steps, budget.max_iterations)):
        gradient, curvature = dual.derivatives(b, ridge=DENSE_NEWTON_LIMITS.ridge)
        step, failed = solve_ex(curvature, gradient)
        step_range = range_of_step(step, is_balanced=dual.is_balanced)
        # A tenth of the tolerance: the last exact update of f is measured on its own.
        error = gradient.abs().sum(-1) / dual.target(b).sum(-1).clamp(min=tiny)
        is_moving = (step_range > DENSE_NEWTON_LIMITS.smallest_step) & (error > ROUNDING)
        is_active = ((error > 0.1 * budget.tolerance) | is_moving) & (failed == 0) & torch.isfinite(step_range)
        if not bool(is_active.any()):
            break
        step = shortened(step, gradient, dual.gradient(b + step), is_balanced=dual.is_balanced)
        b = torch.where(is_active.unsqueeze(-1), b + step, b)
        steps = steps + is_active
    f = updates.f_from(torch.where(q > 0, b * updates.epsilon, g))
    g = torch.where(q > 0, b * updates.epsilon, updates.g_from(f))
    return dataclasses.replace(
        SearchResult.without_estimates(f, g, updates.error_of_columns(g, updates.g_from(f)), steps),
        potential_error=dual.error(g / updates.epsilon) * problem.epsilon,
        potential_range=range_over_mass(problem, g),
    )


def shortened(
    step: Float[Tensor, "*batch m"], gradient: Tensor, gradient_after: Tensor, *, is_balanced: bool
) -> Float[Tensor, "*batch m"]:
    """Return the step where it halves the derivative of the dual along itself, and elsewhere a safe share of it.

    A derivative below 0 at the end says nothing: the dual may have fallen along nearly all of a long step.

    Along a step h the third derivative of the dual is at most the second times the range of h, its largest minus its
    smallest entry. So a step times log(1 + range) / range always increases the dual, but it is at most that logarithm.

    Args:
        gradient, gradient_after: of the dual, before and after the step.
        is_balanced: whether a constant changes nothing.

    Source: F. Bach, Self-concordant analysis for logistic regression, 2010.
    """
    at_start, at_end = (gradient * step).sum(-1), (gradient_after * step).sum(-1)
    is_halved = (at_end >= 0) & (at_end <= 0.5 * at_start)
    share = torch.where(is_halved, 1.0, safe_share(step, is_balanced=is_balanced))
    return share.unsqueeze(-1) * step


def safe_share(step: Float[Tensor, "*batch m"], *, is_balanced: bool) -> Float[Tensor, "*batch"]:
    """Return the share of a step that always increases the dual; see `shortened`."""
    step_range = range_of_step(step, is_balanced=is_balanced)
    return torch.log1p(step_range) / step_range


def range_of_step(step: Float[Tensor, "*batch m"], *, is_balanced: bool) -> Float[Tensor, "*batch"]:
    """Return the largest entry of a step minus the smallest, or twice the largest size where a constant counts."""
    step_range = step.amax(-1) - step.amin(-1) if is_balanced else 2 * step.abs().amax(-1)
    return step_range.clamp(min=torch.finfo(step.dtype).tiny)
