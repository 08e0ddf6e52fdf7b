"""The problems of a batch that Newton's method solves: in float64 on the CPU, and their results among the others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss._checks import has_float64, needs_torch
from otloss._numba import may_run_on
from otloss.costs import DenseCost
from otloss.costs.order import METRIC_NUMBERS, can_leave_out
from otloss.solvers.entropic.arithmetic import detached_in_float64
from otloss.solvers.entropic.equations.updates import build_updates
from otloss.solvers.entropic.interface import Budget, SearchResult, better
from otloss.solvers.entropic.sinkhorn_cpu import MATRIX_LIMITS, is_faster_on_axes
from otloss.solvers.problem import Problem

MAX_ENTRIES_OF_IMAGES = 2**24  # entries of the matrix between images, 64 x 64, where Newton's method takes 4 to 30 s


def is_between_large_clouds(problem: Problem) -> bool:
    """Return whether Newton's method visits only the pairs of points that count, and so needs no matrix."""
    cost = problem.cost.as_points()
    if cost is None or cost.metric not in METRIC_NUMBERS or problem.batch.numel() != 1:
        return False
    return can_leave_out(cost.x, cost.y) and may_run_on(cost.x, cost.y)


def suits_newton(problem: Problem) -> bool:
    """Return whether Newton's method can run in float64 on the CPU, with matrices that fit or without any."""
    if not has_float64(problem.p.device) or needs_torch(problem.p, problem.q, *problem.cost.tensors()):
        return False
    entries = math.prod(problem.cost.shape)
    if is_faster_on_axes(problem):
        return problem.marginal_penalty is None and entries <= MAX_ENTRIES_OF_IMAGES  # images share the matrix
    return entries * problem.batch.numel() <= MATRIX_LIMITS.max_entries or is_between_large_clouds(problem)


def select(problem: Problem, mask: Bool[Tensor, "*batch"]) -> Problem:
    """Return the chosen problems in float64 on the CPU, with one batch axis, or one problem between large clouds."""
    wide = detached_in_float64(problem)
    p, q, epsilon = (t[mask].cpu() for t in (wide.p, wide.q, wide.epsilon))
    cost = wide.cost if is_between_large_clouds(problem) else _choose_matrices(problem, wide, mask)
    penalty = problem.marginal_penalty
    penalty = penalty and penalty.map(lambda rho: rho[mask].cpu())
    if penalty is None:
        q = _without_undetermined(p, q)
    return dataclasses.replace(problem, p=p, q=q, epsilon=epsilon, cost=cost, marginal_penalty=penalty, start=None)


def _choose_matrices(problem: Problem, wide: Problem, mask: Tensor) -> DenseCost:
    """Return the matrices of the chosen problems, as they are stored or computed in float64."""
    matrices = (wide if problem.cost.stored_matrix() is None else problem).cost.dense().detach()
    if matrices.dim() > 2:
        matrices = matrices.expand(*problem.batch, *matrices.shape[-2:])[mask]
    return DenseCost.unchecked(matrices.cpu().double().contiguous())


def _without_undetermined(p: Tensor, q: Float[Tensor, "problems m"]) -> Float[Tensor, "problems m"]:
    """Return the weights q without the columns that are lighter than the rounding of all rows.

    The marginal of such a column says nothing of its potential, in which Newton's steps would go astray. The potentials
    f decide it. Beside a row that is lighter still a column keeps its mass, which counts for the potential of that row.
    """
    lightest_row = p.masked_fill(p == 0, torch.inf).amin(-1, keepdim=True)
    lightest = torch.finfo(torch.float64).eps * torch.minimum(lightest_row, q.amax(-1, keepdim=True))
    return q.masked_fill(q < lightest, 0.0)


def with_empty_rows(problem: Problem, q: Float[Tensor, "problems m"], result: SearchResult) -> SearchResult:
    """Return the result of selected problems with f of the rows without mass by all columns of the given weights q.

    A column that `select` leaves out may decide the potential of such a row.
    """
    q, is_empty = q.detach().cpu().double(), problem.p == 0
    if not bool(is_empty.any()) or not bool(((problem.q == 0) & (q > 0)).any()):
        return result
    f = build_updates(dataclasses.replace(problem, q=q)).f_from(result.g)
    return dataclasses.replace(result, f=torch.where(is_empty, f, result.f))


def scatter(previous: SearchResult, mask: Bool[Tensor, "*batch"], new: SearchResult) -> SearchResult:
    """Return `new` for the chosen problems and `previous` for the others, which have no iterations of this search."""
    values = {**vars(previous), "iterations": torch.zeros_like(previous.iterations)}
    for name, part in vars(new).items():
        values[name] = values[name].clone()
        values[name][mask] = part.to(values[name])
    return SearchResult(**values)


def search_again(
    problem: Problem, result: SearchResult, budget: Budget, search: Callable[[Problem, Budget], SearchResult]
) -> SearchResult:
    """Return the result with another search of the problems that are not within the tolerance, where it is better."""
    mask, unused = ~(result.error <= budget.tolerance), budget.max_iterations - result.iterations_used
    if not bool(mask.any()) or unused < 1:
        return result
    new = search(select(problem, mask), dataclasses.replace(budget, max_iterations=unused))
    return better(result, scatter(result, mask, new), budget.tolerance)
