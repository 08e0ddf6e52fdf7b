"""The problems of a batch that Newton's method solves: in float64 on the CPU, and their results among the others."""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Bool
from torch import Tensor

from otloss._checks import has_float64, needs_torch
from otloss._numba import may_run_on
from otloss.costs import Cost, DenseCost
from otloss.costs.order import METRIC_NUMBERS, can_leave_out
from otloss.solvers.entropic.arithmetic import in_float64
from otloss.solvers.entropic.interface import SearchResult
from otloss.solvers.entropic.sinkhorn_cpu import MATRIX_LIMITS
from otloss.solvers.problem import Problem

MAX_ENTRIES_OF_IMAGES = 2**24  # entries of the matrix between images, 64 x 64, where Newton's method takes 4 to 30 s


def is_between_large_clouds(problem: Problem) -> bool:
    """Return whether Newton's method visits only the pairs of points that count, and so needs no matrix."""
    cost = problem.cost.as_points()
    if cost is None or cost.metric not in METRIC_NUMBERS or problem.batch.numel() != 1:
        return False
    return can_leave_out(cost.x, cost.y) and may_run_on(cost.x, cost.y)


def is_faster_on_axes(problem: Problem) -> bool:
    """Return whether updates along the axes of images are faster than by a matrix."""
    entries = math.prod(problem.cost.shape)
    return problem.cost.softmin_work() < entries and entries > MATRIX_LIMITS.largest_image


def suits_newton(problem: Problem) -> bool:
    """Return whether Newton's method can run in float64 on the CPU, with matrices that fit or without any."""
    if not has_float64(problem.p.device) or needs_torch(problem.p, problem.q, *problem.cost.tensors()):
        return False
    entries = math.prod(problem.cost.shape)
    if is_faster_on_axes(problem):
        return problem.marginal_penalty is None and entries <= MAX_ENTRIES_OF_IMAGES  # images share the matrix
    return entries * problem.batch.numel() <= MATRIX_LIMITS.max_entries or is_between_large_clouds(problem)


def select(problem: Problem, mask: Bool[Tensor, "*batch"]) -> Problem:
    """Return the chosen problems in float64 on the CPU, with one batch axis, or one problem between large clouds.

    Of balanced ones a column that is lighter than the rounding of all rows has no mass: its marginal says nothing of
    its potential, in which Newton's steps would go astray. The potentials f decide it. Beside a row that is lighter
    still a column keeps its mass, which counts for the potential of that row.
    """
    wide, cost = in_float64(problem), problem.cost
    p, q, epsilon = (t[mask].cpu() for t in (wide.p, wide.q, wide.epsilon))
    costs: Cost = wide.cost
    if not is_between_large_clouds(problem):
        matrices = (wide.cost if cost.stored_matrix() is None else cost).dense().detach()
        if matrices.dim() > 2:
            matrices = matrices.expand(*problem.batch, *matrices.shape[-2:])[mask]
        costs = DenseCost.unchecked(matrices.cpu().double().contiguous())
    penalty = problem.marginal_penalty
    penalty = penalty and penalty.map(lambda rho: rho[mask].cpu())
    if penalty is None:
        lightest_row = p.masked_fill(p == 0, torch.inf).amin(-1, keepdim=True)
        lightest = torch.finfo(torch.float64).eps * torch.minimum(lightest_row, q.amax(-1, keepdim=True))
        q = q.masked_fill(q < lightest, 0.0)
    return dataclasses.replace(problem, p=p, q=q, epsilon=epsilon, cost=costs, marginal_penalty=penalty, start=None)


def scatter(previous: SearchResult, mask: Bool[Tensor, "*batch"], new: SearchResult) -> SearchResult:
    """Return `new` for the chosen problems and `previous` for the others, which have no iterations of this search."""
    values = {**vars(previous), "iterations": torch.zeros_like(previous.iterations)}
    for name, part in vars(new).items():
        values[name] = values[name].clone()
        values[name][mask] = part.to(values[name])
    return SearchResult(**values)
