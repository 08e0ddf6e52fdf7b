"""Clouds with many equal points: the problem between their distinct points has the same potentials.

Equal points have equal potentials, and the error of both marginals is the same sum. Points are equal in data of few
values, such as binary features, ratings, or colours; Newton's method would take all pairs of their cells.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._numba import may_run_on
from otloss.solvers.entropic.interface import SearchResult
from otloss.solvers.problem import Problem

_METRICS = ("sqeuclidean", "euclidean", "l1")  # equal points at the origin differ for "cosine" from a cloud to itself
_FEWEST_PAIRS = 2**16  # smaller problems take less time than a look at their points saves


class DistinctPoints(NamedTuple):
    """A problem between distinct points, and the place of each point among them; None where points were not merged."""

    problem: Problem
    x_places: Int[Tensor, " n"] | None = None
    y_places: Int[Tensor, " m"] | None = None

    def expand(self, result: SearchResult) -> SearchResult:
        """Return a result of the problem with the potentials of all points."""
        if self.x_places is None or self.y_places is None:
            return result
        return dataclasses.replace(result, f=result.f[..., self.x_places], g=result.g[..., self.y_places])


def merge_equal_points(problem: Problem) -> DistinctPoints:
    """Return the problem between the distinct points of two clouds, if these have at most half of the pairs."""
    cost, (n, m) = problem.cost.as_points(), problem.cost.shape
    if cost is None or cost.metric not in _METRICS or n * m < _FEWEST_PAIRS or problem.impl == "torch":
        return DistinctPoints(problem)
    if cost.x.dim() != 2 or cost.y.dim() != 2 or not may_run_on(cost.x, problem.p):
        return DistinctPoints(problem)
    clouds = [cost.x.detach()] if cost.x is cost.y else [cost.x.detach(), cost.y.detach()]
    if not any(map(_has_equal_points, clouds)):
        return DistinctPoints(problem)
    counts = [_count_distinct(cloud.numpy()) for cloud in clouds]
    if counts[0] * counts[-1] > n * m / 2:
        return DistinctPoints(problem)
    found = [torch.unique(cloud, dim=0, return_inverse=True) for cloud in clouds]
    (x, x_places), (y, y_places) = found[0], found[-1]
    start = problem.start and (_at_distinct(problem.start[0], x_places), _at_distinct(problem.start[1], y_places))
    merged = dataclasses.replace(
        problem,
        p=_sum_of_equal(problem.p.detach(), x_places),
        q=_sum_of_equal(problem.q.detach(), y_places),
        cost=cost.between(x, y, cost.metric).with_matrix(),
        start=start,
    )
    return DistinctPoints(merged, x_places, y_places)


def _has_equal_points(cloud: Float[Tensor, "n d"]) -> bool:
    """Return whether some of up to 256 points are equal: they nearly always are where half of all points are."""
    return _count_distinct(cloud.numpy()[_picked(len(cloud))]) < len(_picked(len(cloud)))


@lru_cache(maxsize=32)
def _picked(count: int) -> np.ndarray:
    """Return up to 256 different places below `count`."""
    return np.unique(np.random.default_rng(0).integers(count, size=256))


def _count_distinct(points: np.ndarray) -> int:
    """Return the number of distinct rows, by a projection, which takes less time than a comparison of rows.

    Different points may have the same projection, and rounding may give equal points two.
    """
    projections = points @ np.sqrt(np.arange(2, 2 + points.shape[1], dtype=points.dtype))
    projections.sort()
    return 1 + int(np.count_nonzero(projections[1:] != projections[:-1]))


def _sum_of_equal(weights: Float[Tensor, "*batch n"], places: Int[Tensor, " n"]) -> Float[Tensor, "*batch k"]:
    sums = torch.zeros(*weights.shape[:-1], int(places.max()) + 1, dtype=torch.float64, device="cpu")
    return sums.index_add(-1, places, weights.double()).to(weights.dtype)


def _at_distinct(potential: Float[Tensor, "*batch n"], places: Int[Tensor, " n"]) -> Float[Tensor, "*batch k"]:
    """Return a potential at distinct points, that of the last of equal ones."""
    last = torch.zeros(int(places.max()) + 1, dtype=torch.int64, device="cpu")
    last[places] = torch.arange(len(places), device="cpu")
    return potential[..., last]
