"""The potentials of an entropic problem: where they are searched, how accurate they are, and what the call is told."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from otloss._checks import has_float64, needs_torch
from otloss._numba import may_run_on
from otloss.costs.cost import makes_graph
from otloss.solvers.entropic.arithmetic import in_float64
from otloss.solvers.entropic.dense_newton import with_accurate_potentials, with_estimates
from otloss.solvers.entropic.equal_points import merge_equal_points
from otloss.solvers.entropic.equations.dual import with_best_constant
from otloss.solvers.entropic.equations.slow_modes import with_lanczos_error
from otloss.solvers.entropic.equations.updates import build_updates
from otloss.solvers.entropic.interface import Budget, SearchResult
from otloss.solvers.entropic.ladder import search
from otloss.solvers.entropic.messages import check_epsilon, warn_of_errors, warn_of_slow_images, warn_of_uncertain
from otloss.solvers.entropic.sinkhorn_cpu import MATRIX_LIMITS
from otloss.solvers.entropic.sinkhorn_gpu import is_measured_faster
from otloss.solvers.options import Settings
from otloss.solvers.problem import Problem, tolerance_of


class PotentialLimits(NamedTuple):
    """When potentials are accurate, costs are computed in float64, and a start is usable.

    Attributes:
        largest_change: potentials are accurate if the last update changes no factor of the plan by a larger share.
        largest_change_float32: the same for potentials of float32 problems.
        largest_cost_float32: largest cost over epsilon for which costs are computed in float32.
        largest_start: a start is not from a similar problem if it exceeds so many times the largest cost plus a hundred
            epsilons.
    """

    largest_change: float = 1e-5
    largest_change_float32: float = 1e-3
    largest_cost_float32: float = 5e3
    largest_start: float = 100.0


POTENTIAL_LIMITS = PotentialLimits()


def find_potentials(problem: Problem, settings: Settings, *, is_accurate: bool = False) -> tuple[Problem, SearchResult]:
    """Return the potentials of a reduced entropic problem, and the problem in the arithmetic that they belong to.

    Args:
        is_accurate: whether the potentials themselves have to be accurate; the value is far less sensitive. They are
            where a gradient of the weights is wanted.

    Raises:
        SmallEpsilonError: if the rounding of the potentials would decide the plan.
        ValueError: if impl="compiled" and the tensors are not on a CPU, or the start is not finite.

    Warns:
        ConvergenceWarning: if the tolerance is not reached.
    """
    if not problem.is_symmetric:  # a few iterations
        warn_of_slow_images(problem, settings.grad)
    problem = _choose_cost(problem)
    has_weight_graph = makes_graph(problem.p, problem.q)
    budget = _build_budget(problem, settings, is_accurate=is_accurate or has_weight_graph)
    with torch.no_grad():
        searched = _prepare(problem)
        distinct = merge_equal_points(searched)
        distinct_result = _refine(distinct.problem, search(distinct.problem, budget), budget)
        result = distinct.expand(distinct_result).to(problem.p.device)
    if not result.is_within(budget.tolerance):
        warn_of_errors(problem, result, settings)
        return problem, _without_unknown(result)
    if settings.grad == "envelope" and has_weight_graph:  # "implicit" raises instead
        result = with_lanczos_error(problem, result)
        if not problem.is_symmetric and _may_be_symmetric(problem):
            result = _with_equal_potentials(problem, result)
        warn_of_uncertain(problem, result)
    return problem, result


def _choose_cost(problem: Problem) -> Problem:
    """Return the problem with the form of its cost, and in the arithmetic, that the search uses."""
    if problem.impl == "triton":
        problem = dataclasses.replace(problem, cost=problem.cost.streamed() or problem.cost)
    if _rounds_costs(problem):
        with torch.enable_grad():
            problem = in_float64(problem)
    cost = problem.cost.with_matrix()
    return problem if cost is problem.cost else dataclasses.replace(problem, cost=cost)


def _build_budget(problem: Problem, settings: Settings, *, is_accurate: bool) -> Budget:
    tolerance, change = tolerance_of(problem, settings), math.inf
    if is_accurate:
        is_wide = problem.cost.dtype == torch.float64
        change = POTENTIAL_LIMITS.largest_change if is_wide else POTENTIAL_LIMITS.largest_change_float32
        change = max(change, 100 * tolerance)
    return Budget(tolerance, settings.max_iterations, largest_change=change)


def _refine(problem: Problem, result: SearchResult, budget: Budget) -> SearchResult:
    """Return the result of the ladder with accurate potentials, and what is known of them, if the budget asks for it.

    In unbalanced problems the constant between f and g becomes the best one in any case. Raises SmallEpsilonError where
    the rounding of the potentials would decide the plan.
    """
    if budget.is_accurate and not problem.is_symmetric:
        result = with_estimates(problem, result)
    result = with_best_constant(problem, result)
    check_epsilon(problem, result, budget.tolerance)
    if not budget.is_accurate:
        return result
    if problem.is_symmetric:
        return _with_equal_potentials(problem, result)
    accurate_result = with_accurate_potentials(problem, result, budget)
    return result if accurate_result is result else with_best_constant(problem, accurate_result)


def _without_unknown(result: SearchResult) -> SearchResult:
    """Return the result with potentials of NaN where the error is not known, so that the value is NaN too."""
    unknown = ~result.error.isfinite().unsqueeze(-1)
    f, g = (potential.masked_fill(unknown, torch.nan) for potential in (result.f, result.g))
    return dataclasses.replace(result, f=f, g=g)


def _may_be_symmetric(problem: Problem) -> bool:
    """Return whether p equals q in a problem whose transpose has the same cost and penalties, so that f = g there.

    Where its plan falls into parts that exchange next to nothing, the potentials of a side alone are uncertain. Their
    mean is not.
    """
    p, q, penalty, (n, m) = problem.p, problem.q, problem.marginal_penalty, problem.cost.shape
    if n != m or n * m > MATRIX_LIMITS.largest_matrix or needs_torch(p, q, *problem.cost.tensors()):
        return False
    if penalty is not None:
        sides = (torch.as_tensor(rho, dtype=torch.float64, device="cpu") for rho in (penalty.p, penalty.q))
        if not torch.equal(*sides):
            return False
    return bool((p == q).all(-1).any()) and problem.cost.is_symmetric()


def _with_equal_potentials(problem: Problem, result: SearchResult) -> SearchResult:
    """Return the result with (f + g) / 2 for f and g where p equals q, and its update at bins without mass.

    f and g are equal at the solution. Where parts of the plan, or light bins, exchange little mass, the search ends
    while they differ, by errors that are opposite and cancel in their mean; at a bin without mass, whose f and g follow
    from its neighbours, they do not cancel.
    """
    is_symmetric, is_empty = (problem.p == problem.q).all(-1), problem.p == 0
    mean = (result.f + result.g) / 2
    if is_empty.any():
        updates = build_updates(problem)
        mean = torch.where(is_empty, updates.f_from(mean.to(updates.log_p.dtype)).to(mean), mean)
    f, g = (torch.where(is_symmetric.unsqueeze(-1), mean, t) for t in (result.f, result.g))
    error = result.potential_error.masked_fill(is_symmetric, torch.nan)
    return dataclasses.replace(result, f=f, g=g, potential_error=error)


def _rounds_costs(problem: Problem) -> bool:
    """Return whether the rounding of costs that are computed in float32 may change entries of the plan.

    The cost of two points, for example, carries a rounding of 1e-7 of itself, which changes an entry of the plan by
    1e-4 where the cost is a thousand times epsilon. Pairs that exchange mass cost at most a few times less than the
    bound of all costs does. Between a cloud and itself their costs are a few epsilon. The entries of a matrix are data.
    """
    cost = problem.cost
    if problem.is_symmetric or cost.dtype != torch.float32 or not has_float64(cost.device):
        return False
    if cost.stored_matrix() is not None or cost.as_grid() is not None:  # whose entries are whole numbers of steps
        return False
    if needs_torch(problem.p, problem.q, *cost.tensors()) or not problem.batch.numel():
        return False
    return bool((cost.largest() > POTENTIAL_LIMITS.largest_cost_float32 * problem.epsilon.detach()).any())


def is_faster_on_cpu(problem: Problem) -> bool:
    """Return whether the potentials of a problem on a GPU are searched on the CPU: the search is many small steps."""
    on_gpu = problem.p.device.type != "cpu" and has_float64(problem.p.device)
    if problem.impl != "auto" or not on_gpu or needs_torch(problem.p, problem.q, *problem.cost.tensors()):
        return False
    (n, m), batch = problem.cost.shape, problem.batch.numel()
    if is_measured_faster(problem):
        return False
    suits = problem.cost.as_points() is not None or n * m <= MATRIX_LIMITS.largest_matrix
    return suits and problem.cost.as_grid() is None and batch * n * m <= MATRIX_LIMITS.max_entries


def _prepare(problem: Problem) -> Problem:
    """Return the problem to search, perhaps on the CPU, with a start that has been checked."""
    if problem.impl == "compiled" and not may_run_on(problem.p):
        raise ValueError(
            f'impl="compiled" runs on the CPU, outside of torch.func transforms; got tensors on '
            f'{problem.p.device}. Use impl="torch" or "auto".'
        )
    start = problem.start
    if is_faster_on_cpu(problem):
        p, q, epsilon = (t.detach().cpu() for t in (problem.p, problem.q, problem.epsilon))
        penalty = problem.marginal_penalty and problem.marginal_penalty.map(lambda rho: rho.cpu())
        problem = dataclasses.replace(
            problem, p=p, q=q, epsilon=epsilon, cost=problem.cost.to("cpu").with_matrix(), marginal_penalty=penalty
        )
        start = None if start is None else (start[0].cpu(), start[1].cpu())
    if start is None:
        return problem
    return dataclasses.replace(problem, start=_usable_start(problem, *start))


def _usable_start(problem: Problem, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the start in the dtype of the problem; zeros if it is far too large."""
    q = problem.q.detach()
    f, g = f.to(q), g.to(q)
    for name, potential in (("f", f), ("g", g)):
        if not torch.isfinite(potential).all():
            raise ValueError(
                f"start {name} holds a NaN or an infinity (in {potential.dtype}), expected the potentials of a similar "
                "problem."
            )
    # Potentials differ by no more than the costs do, plus epsilon times the logarithms of weights.
    bound = POTENTIAL_LIMITS.largest_start * (problem.cost.largest() + 100 * problem.epsilon.detach()).unsqueeze(-1)
    is_sane = (g.masked_fill(q == 0, 0.0).abs() <= bound).all(-1, keepdim=True)
    g = torch.where(is_sane & (g.abs() <= bound), g, 0.0)
    return torch.where(is_sane, f, 0.0), g
