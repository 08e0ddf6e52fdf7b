"""The search for the potentials of an entropic problem, by the numba kernel or in the log domain on any device.

The ladder:

1. A few iterations of Sinkhorn: by the kernel for matrices on a CPU, else in logarithms. Large images start from blocks
   of cells. Large clouds start from clusters of points, where clusters are not much wider than the blur.
2. The contraction of the error says how many more iterations the tolerance needs. Up to PATIENCE, they are made.
3. Otherwise the problems that are left, and no others, start from exact potentials, in float64. Clouds that clusters do
   not resolve come here at once. Unbalanced problems start from what step 1 has found, or from a larger epsilon.
4. Newton's method on the dual, over the cells of the plan that hold mass, with a search along each step.
5. Sinkhorn's iteration again, in float64, where 4 does not apply (matrices over 1 GiB) or has failed.
6. The error of the marginals decides what is returned. Where gradients of the weights are wanted and the potentials
   are uncertain, Newton's method with dense equations makes them accurate.

Tensors on a GPU go through all of it on the CPU, where that is faster (`is_faster_on_cpu`).
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from otloss._checks import has_float64, needs_torch
from otloss.costs import DenseCost, GridCost, PointCost
from otloss.costs.cost import makes_graph
from otloss.solvers.entropic.blocks import start_from_blocks, takes_blocks
from otloss.solvers.entropic.clusters import search_from_clusters, takes_clusters
from otloss.solvers.entropic.dual import (
    bound_of_potential,
    error_of_potential,
    has_estimate,
    shifted_to_equal_mass,
)
from otloss.solvers.entropic.interface import (
    Goal,
    SearchResult,
    in_float64,
)
from otloss.solvers.entropic.newton import is_between_large_clouds, newton_search, settled_search
from otloss.solvers.entropic.sinkhorn import iterate_in_logs
from otloss.solvers.entropic.sinkhorn_cpu import (
    LARGEST_FOR_KERNEL,
    LARGEST_GRID,
    MOST_FOR_KERNEL,
    MOST_FOR_PLANS,
    RESOLVED_EIGENVALUE,
    _by_kernel,
    runs_on_kernel,
)
from otloss.solvers.entropic.warnings import (
    LARGEST_LEAST,
    LEAST_EPSILON,
    NEGLIGIBLE_ERROR,
    _check_not_too_small,
    _warn_of_errors,
    _warn_of_uncertain,
    warn_where_slow,
)
from otloss.solvers.options import Settings
from otloss.solvers.problem import Problem, tolerance_of

# Newton's method with its exact start takes less time than so many iterations of Sinkhorn, done or expected.
PATIENCE = 250
# Potentials are settled if the last update changes no factor of the plan by a larger share, and their error is at most
# this share of their spread.
SETTLED = {torch.float32: 1e-3, torch.float64: 1e-5}
# Rounding of float32, and the share of an entry of the plan that the rounding of a cost may change.
ROUNDING, LARGEST_CHANGE = 1e-7, 1e-4
# A start is not from a similar problem if it exceeds so many times the largest cost plus a hundred epsilons.
LARGEST_START = 100.0


def find_potentials(
    problem: Problem, settings: Settings, *, symmetric: bool = False, accurate: bool | None = None
) -> tuple[Problem, SearchResult]:
    """Return the potentials of a reduced entropic problem, and the problem in the arithmetic that they belong to.

    That is float64 where the rounding of costs that are computed in float32 would change the plan.

    Args:
        symmetric: whether p equals q and the cost its transpose, which saves iterations.
        accurate: whether the potentials themselves have to be accurate; the value is far less sensitive. None stands
            for True where a gradient of the weights is wanted, and for False elsewhere.

    Raises:
        SmallEpsilonError: if the rounding of the potentials would decide the plan.

    Warns:
        ConvergenceWarning: if the tolerance is not reached.
    """
    if not symmetric:  # a few iterations
        warn_where_slow(problem, settings.grad)
    if accurate is None:
        accurate = makes_graph(problem.p, problem.q)
    tolerance = tolerance_of(problem, settings)
    settled = max(SETTLED[problem.cost.dtype], 100 * tolerance) if accurate else math.inf
    goal = Goal(tolerance, settings.max_iterations, settled, symmetric, _takes_plan(problem) and not symmetric)
    with torch.no_grad():
        searched = _on_cpu(problem) if is_faster_on_cpu(problem, settings.impl) else problem
        searched, result = _search(searched, settings, goal)
        result = shifted_to_equal_mass(searched, result)
        _check_not_too_small(searched, result, min(LEAST_EPSILON / tolerance, LARGEST_LEAST))
        if accurate:
            accurate_result = _with_accurate_potentials(searched, result, goal)
            if accurate_result is not result:
                result = shifted_to_equal_mass(searched, accurate_result)
        result = result.to(problem.p.device)
    if searched.cost.dtype != problem.cost.dtype:
        problem = in_float64(problem, with_graph=True)
    if _is_within(result.error, tolerance):
        if settings.grad == "envelope" and makes_graph(problem.p, problem.q):  # "implicit" raises instead
            _warn_of_uncertain(problem, result)
        return problem, result
    _warn_of_errors(problem, result, settings)
    unknown = ~result.error.isfinite().unsqueeze(-1)  # a value whose error is not known must be NaN
    f, g = (potential.masked_fill(unknown, torch.nan) for potential in (result.f, result.g))
    return problem, dataclasses.replace(result, f=f, g=g, plan=None)


def is_faster_on_cpu(problem: Problem, impl: str) -> bool:
    """Return whether the potentials of a problem on a GPU are searched on the CPU: the search is many small steps."""
    on_gpu = problem.p.device.type != "cpu" and has_float64(problem.p.device)
    if impl != "auto" or not on_gpu or needs_torch(problem.p, problem.q, *problem.cost.tensors()):
        return False
    (n, m), batch = problem.cost.shape, problem.batch.numel()
    suits = isinstance(problem.cost, PointCost) or n * m <= LARGEST_FOR_KERNEL
    return suits and not isinstance(problem.cost, GridCost) and batch * n * m <= MOST_FOR_KERNEL


def _on_cpu(problem: Problem) -> Problem:
    """Return the same problem without a graph, on the CPU."""
    p, q, epsilon = (t.detach().cpu() for t in (problem.p, problem.q, problem.epsilon))
    start = None if problem.start is None else (problem.start[0].cpu(), problem.start[1].cpu())
    return dataclasses.replace(problem, p=p, q=q, epsilon=epsilon, cost=problem.cost.to("cpu"), start=start)


def _is_within(error: Tensor, tolerance: float) -> bool:
    """Return whether all errors are within the tolerance; NaN is not."""
    return not error.numel() or error.amax().item() <= tolerance


def _takes_plan(problem: Problem) -> bool:
    """Return whether the kernel should write the plan, which is the gradient of the costs, while it has its factors."""
    cost = problem.cost
    if not isinstance(cost, DenseCost) or not makes_graph(cost.matrix):
        return False
    return cost.batch_shape == problem.batch and cost.matrix.numel() <= MOST_FOR_PLANS


def _rounds_costs(problem: Problem, result: SearchResult) -> bool:
    """Return whether the rounding of costs that are computed in float32 would change entries of the plan."""
    cost = problem.cost
    if cost.dtype != torch.float32 or isinstance(cost, (DenseCost, GridCost)) or not has_float64(cost.device):
        return False
    if needs_torch(problem.p, problem.q, *cost.tensors()) or not (result.f.numel() and result.g.numel()):
        return False
    largest = torch.maximum(result.f.abs().amax(-1), result.g.abs().amax(-1))
    return bool((ROUNDING * largest > LARGEST_CHANGE * problem.epsilon.detach()).any())


def _search(problem: Problem, settings: Settings, goal: Goal) -> tuple[Problem, SearchResult]:
    """Run steps 1 to 5 of the module; the problem that is returned may be in float64."""
    on_kernel = runs_on_kernel(problem, settings.impl)
    newton = not goal.symmetric and _can_take_newton(problem)
    # Float32 in logarithms may be too narrow; and the kernel for unbalanced problems may underflow, or be slow.
    widen = not on_kernel and problem.cost.dtype == torch.float32 and has_float64(problem.p.device)
    in_logs_again = on_kernel and problem.marginal_penalty is not None
    start = None if problem.start is None else _usable_start(problem, *problem.start)
    first = goal
    if goal.most > PATIENCE and (newton or widen or in_logs_again):
        first = dataclasses.replace(goal, most=PATIENCE)
    if newton:
        first = dataclasses.replace(first, patience=PATIENCE)
    result, left = None, goal.most - first.most
    if settings.impl == "auto" and start is None and takes_clusters(problem):
        result = search_from_clusters(problem, _by_kernel, goal, only_resolved=on_kernel or newton)
        if result is None and newton:
            result = SearchResult.unknown(problem)
    if result is None:
        result = _sinkhorn(problem, start, first, on_kernel=on_kernel)
    else:
        left = goal.most - int(result.iterations.amax())
    if _rounds_costs(problem, result):
        problem = in_float64(problem)
        if _is_within(result.error, goal.tolerance):
            few = dataclasses.replace(first, most=max(1, min(left, first.most)))
            more = _sinkhorn(problem, (result.f, result.g), few, on_kernel=on_kernel)
            result = dataclasses.replace(more, iterations=result.iterations + more.iterations)
            left -= int(more.iterations.amax())
    if left <= 0 or _is_within(result.error, goal.tolerance):
        return problem, result
    if newton:
        is_slow = ~(result.error <= goal.tolerance)
        rest = dataclasses.replace(goal, most=left)
        better = newton_search(problem, result, is_slow, rest, from_exact=problem.marginal_penalty is None)
        left -= int((better.iterations - result.iterations).amax())
        result = better
        if _rounds_costs(problem, result):  # Newton's method takes costs in float64
            problem = in_float64(problem)
    if left <= 0 or _is_within(result.error, goal.tolerance):
        return problem, result
    again = in_float64(problem) if widen or in_logs_again else problem
    is_finite = result.error.isfinite().unsqueeze(-1)
    start = torch.where(is_finite, result.f, 0.0), torch.where(is_finite, result.g, 0.0)
    rest = dataclasses.replace(goal, most=left)
    more = _sinkhorn(again, start, rest, on_kernel=on_kernel and not in_logs_again)
    more = dataclasses.replace(more, iterations=result.iterations + more.iterations)
    return again if _rounds_costs(problem, more) else problem, more


def _sinkhorn(problem: Problem, start: tuple[Tensor, Tensor] | None, goal: Goal, *, on_kernel: bool) -> SearchResult:
    if goal.symmetric and problem.marginal_penalty is not None:
        on_kernel = False  # it does not know these, and logarithms take few iterations
    return _by_kernel(problem, start, goal) if on_kernel else _in_logs(problem, start, goal)


def _in_logs(problem: Problem, start: tuple[Tensor, Tensor] | None, goal: Goal) -> SearchResult:
    relaxation = None
    if start is None and takes_blocks(problem):
        start, relaxation = start_from_blocks(problem, _by_kernel, symmetric=goal.symmetric)
    result = iterate_in_logs(problem, start, goal, relaxation=relaxation)
    if goal.settled == math.inf or goal.symmetric:
        return result
    is_empty = problem.q.detach() == 0
    if problem.p.device.type != "cpu" or not has_estimate(problem):
        if problem.marginal_penalty is None:
            return result
        return dataclasses.replace(result, potential_error=bound_of_potential(problem, result.g))
    spread = result.g.masked_fill(is_empty, -torch.inf).amax(-1) - result.g.masked_fill(is_empty, torch.inf).amin(-1)
    return dataclasses.replace(
        result,
        potential_error=error_of_potential(problem, result.g),
        spread=spread,
        least_eigenvalue=torch.ones_like(spread),
    )


def _can_take_newton(problem: Problem) -> bool:
    """Return whether Newton's method applies: between points, or on a matrix that fits the memory."""
    (n, m), cost = problem.cost.shape, problem.cost
    if not has_float64(problem.p.device) or needs_torch(problem.p, problem.q, *cost.tensors()):
        return False
    if isinstance(cost, GridCost) and len(cost.cells) > 1 and n * m > LARGEST_GRID:
        return False
    return n * m * problem.batch.numel() <= MOST_FOR_KERNEL or is_between_large_clouds(problem)


def _with_accurate_potentials(problem: Problem, result: SearchResult, goal: Goal) -> SearchResult:
    """Run step 6 of the module. Slow modes of g hardly count in the marginal error that ended the search."""
    error, spread, eigenvalue = result.potential_error, result.spread, result.least_eigenvalue
    if error is None or spread is None or eigenvalue is None or not result.iterations.numel():
        return result
    enough = goal.settled * spread + NEGLIGIBLE_ERROR * problem.epsilon.detach()
    poor = (~(error <= enough) | (eigenvalue < RESOLVED_EIGENVALUE)) & (result.error <= goal.tolerance)
    if goal.symmetric or not bool(poor.any()) or not (has_estimate(problem) and _can_take_newton(problem)):
        return result
    goal = dataclasses.replace(goal, most=goal.most - int(result.iterations.amax()))
    if goal.most < 1:
        return result
    better = settled_search(problem, result, poor, goal)
    assert better.potential_error is not None
    return dataclasses.replace(better, potential_error=torch.where(poor, better.potential_error, error))


def _usable_start(problem: Problem, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the start with a constant moved between f and g to reduce rounding; zeros if it is far too large."""
    p, q = problem.p.detach(), problem.q.detach()
    f, g = f.to(p), g.to(q)
    for name, potential in (("f", f), ("g", g)):
        if not torch.isfinite(potential).all():
            raise ValueError(
                f"start {name} holds a NaN or an infinity (in {potential.dtype}), expected the potentials of a similar "
                "problem."
            )
    if problem.marginal_penalty is None:
        shift = (g * q).sum(-1, keepdim=True) / q.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
        f, g = f + shift, g - shift
    # Potentials differ by no more than the costs do, plus epsilon times the logarithms of weights.
    most = LARGEST_START * (problem.cost.largest() + 100 * problem.epsilon.detach()).unsqueeze(-1)
    is_sane = (g.masked_fill(q == 0, 0.0).abs() <= most).all(-1, keepdim=True)
    g = torch.where(is_sane & (g.abs() <= most), g, 0.0)
    return torch.where(is_sane, f, 0.0), g
