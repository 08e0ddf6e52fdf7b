"""Potentials of a few Sinkhorn iterations, from which an exact assignment of two clouds begins."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss._numba import may_run_on
from otloss.costs import PointCost
from otloss.solvers.entropic.interface import ERROR, Budget
from otloss.solvers.entropic.sinkhorn_cpu import MatrixProblems, run_kernel
from otloss.solvers.problem import Problem


class WarmStartLimits(NamedTuple):
    """Which assignments start from Sinkhorn's iteration, and how long it runs. Others take less time than the start.

    Attributes:
        smallest, smallest_in_more_axes: points of a cloud, in up to three dimensions, and in more.
        shift: of means and standard deviations of the clouds, in standard deviations.
        epsilon: as a share of the mean size of centred costs.
    """

    smallest: int = 256
    smallest_in_more_axes: int = 512
    shift: float = 0.5
    epsilon: float = 0.003
    tolerance: float = 0.2
    max_iterations: int = 30


WARM_START_LIMITS = WarmStartLimits()


def _are_apart(cost: PointCost) -> bool:
    """Whether two clouds of as many points differ in their means and standard deviations."""
    n, axes = cost.shape[0], cost.x.shape[-1]
    if n != cost.shape[1] or n < (WARM_START_LIMITS.smallest if axes <= 3 else WARM_START_LIMITS.smallest_in_more_axes):
        return False
    x, y = cost.x.detach(), cost.y.detach()
    deviation_x, deviation_y = x.std(-2), y.std(-2)
    apart = (x.mean(-2) - y.mean(-2)).square() + (deviation_x - deviation_y).square()
    variance = (deviation_x.square() + deviation_y.square()) / 2
    return bool((apart.sum(-1) >= WARM_START_LIMITS.shift**2 * variance.sum(-1)).any())


def assignment_start(problem: Problem, matrix: Float[Tensor, "*batch n n"]) -> tuple[Tensor, Tensor] | None:
    """Return potentials near the optimal ones of assignments between clouds that lie apart, or None.

    Other problems gain too little.
    """
    points = problem.cost.as_points()
    if points is None or not _are_apart(points):
        return None
    n = matrix.shape[-1]
    p, q, batch = problem.p.detach(), problem.q.detach(), matrix.shape[:-2]
    if not may_run_on(p, q, matrix) or not matrix.numel() or problem.batch != batch:
        return None
    if not all(bool((w == w[..., :1]).all()) and bool((w[..., 0] > 0).all()) for w in (p, q)):
        return None

    costs = matrix.reshape(-1, n, n)
    by_row, by_column = costs.mean(-1, keepdim=True), costs.mean(-2, keepdim=True)
    by_column -= by_column.mean(-1, keepdim=True)
    costs = (costs - by_row).sub_(by_column)
    epsilon = WARM_START_LIMITS.epsilon / n**2 * torch.linalg.vector_norm(costs, 1, (-2, -1)).double()
    if not bool((epsilon > 0).all()):
        return None
    costs = costs.sub_(costs.amin((-2, -1), keepdim=True))
    problems = MatrixProblems(
        p.reshape(-1, n), q.reshape(-1, n), costs, owner=np.arange(len(costs)), epsilon=epsilon.numpy()
    )
    f, g, outcome = run_kernel(problems, Budget(WARM_START_LIMITS.tolerance, WARM_START_LIMITS.max_iterations))
    if not bool(outcome[:, ERROR].isfinite().all()):
        return None
    return f.reshape(*batch, n), (g + by_column.squeeze(-2)).reshape(*batch, n)
