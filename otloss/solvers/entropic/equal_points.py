"""Problems with many equal points: the problem between the distinct ones has the same potentials.

Equal points have equal potentials, and the error of both marginals is the same sum. Points are equal in data of few
values, such as binary features, ratings, or colours; Newton's method would take all pairs of their cells. In a cost
matrix, equal rows and equal columns are equal points.
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
from otloss.costs import Cost
from otloss.costs.dense import DenseCost
from otloss.solvers.entropic.interface import SearchResult
from otloss.solvers.problem import Problem

_FEWEST_PAIRS = 2**17  # smaller problems take less time than a look at their points saves


class _Distinct(NamedTuple):
    """The first of each set of equal points, and the place of each point among them."""

    first: Int[Tensor, " k"]
    places: Int[Tensor, " n"]


class MergedProblem(NamedTuple):
    """A problem between distinct points of both sides, or the problem itself where none were merged."""

    problem: Problem
    x: _Distinct | None = None
    y: _Distinct | None = None

    def expand(self, result: SearchResult) -> SearchResult:
        """Return a result of the problem with the potentials of all points."""
        if self.x is None or self.y is None:
            return result
        return dataclasses.replace(result, f=result.f[..., self.x.places], g=result.g[..., self.y.places])


def merge_equal_points(problem: Problem) -> MergedProblem:
    """Return the problem between distinct points, if these have at most half of the pairs."""
    n, m = problem.cost.shape
    if n * m < _FEWEST_PAIRS or problem.impl == "torch" or not may_run_on(problem.p, *problem.cost.tensors()):
        return MergedProblem(problem)
    sides = _rows_of_sides(problem.cost)
    if sides is None or not any(map(_has_equal_rows, sides)):
        return MergedProblem(problem)
    x = _find_distinct(sides[0])
    y = x if problem.is_symmetric else _find_distinct(sides[1])
    if len(x.first) * len(y.first) > n * m / 2:
        return MergedProblem(problem)
    merged = dataclasses.replace(
        problem,
        p=_sum_of_equal(problem.p.detach(), x),
        q=_sum_of_equal(problem.q.detach(), y),
        cost=_between(problem.cost, x.first, y.first),
        start=problem.start and (problem.start[0][..., x.first], problem.start[1][..., y.first]),
    )
    return MergedProblem(merged, x, y)


def _rows_of_sides(cost: Cost) -> tuple[np.ndarray, np.ndarray] | None:
    """Return a row of numbers for each point of both sides; None if each problem has its own, or there are none."""
    points, matrix = cost.as_points(), cost.stored_matrix()
    if matrix is not None:
        sides = matrix, matrix.mT
    elif points is not None:
        sides = points.x, points.y
    else:
        return None
    return None if max(t.dim() for t in sides) > 2 else (sides[0].numpy(force=True), sides[1].numpy(force=True))


def _between(cost: Cost, x: Int[Tensor, " k"], y: Int[Tensor, " l"]) -> Cost:
    points, matrix = cost.as_points(), cost.stored_matrix()
    if matrix is not None:
        return DenseCost.unchecked(matrix.detach()[x][:, y])
    assert points is not None  # `_rows_of_sides`
    of_x = points.x.detach()[x]
    of_y = of_x if points.y is points.x else points.y.detach()[y]
    return points.between(of_x, of_y, points.metric).with_matrix()


def _has_equal_rows(rows: np.ndarray) -> bool:
    """Return whether some of up to 256 rows begin alike: they nearly always do where half of all rows are equal."""
    picked = _picked(len(rows))
    projections = np.sort(_project(rows[picked, :64]))
    return bool((projections[1:] == projections[:-1]).any())


@lru_cache(maxsize=32)
def _picked(count: int) -> np.ndarray:
    """Return up to 256 different places below `count`."""
    return np.unique(np.random.default_rng(0).integers(count, size=256))


def _find_distinct(rows: np.ndarray) -> _Distinct:
    """Return the distinct rows, by a projection, which takes less time than a comparison of rows.

    Rounding may give equal rows two projections, which only merges fewer of them. Where different rows have the same
    projection, none are merged.
    """
    _, first, places = np.unique(_project(rows), return_index=True, return_inverse=True)
    if not np.array_equal(rows[first][places], rows):
        first = places = np.arange(len(rows))
    return _Distinct(torch.from_numpy(first), torch.from_numpy(places))


def _project(rows: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):  # of prices
        return np.asarray(rows @ np.sqrt(np.arange(2, 2 + rows.shape[1], dtype=rows.dtype)))


def _sum_of_equal(weights: Float[Tensor, "*batch n"], side: _Distinct) -> Float[Tensor, "*batch k"]:
    sums = torch.zeros(*weights.shape[:-1], len(side.first), dtype=torch.float64, device="cpu")
    return sums.index_add(-1, side.places, weights.double()).to(weights.dtype)
