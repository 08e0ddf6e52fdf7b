"""Entropic transport between large images: a start from blocks of cells; balanced, on a CPU.

Potentials are smooth at the scale of sqrt(epsilon). So potentials between blocks of cells are near the potentials
between the cells. The same holds for the eigenvalues that decide how fast the iterations converge, and so for the best
over-relaxation w. The search takes both from the blocks. Blocks change only the way to the solution: the error that
ends the search is the error of the cells.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate, pad

from otloss._numba import may_run_on
from otloss.costs import GridCost
from otloss.solvers.entropic.interface import Budget, Method, SearchResult, Start
from otloss.solvers.entropic.sinkhorn import Sinkhorn
from otloss.solvers.entropic.sinkhorn_cpu import SinkhornOnCPU
from otloss.solvers.problem import Problem


@dataclass(frozen=True)
class Coarsening:
    """When images are coarsened, and how far.

    Attributes:
        smallest: cells of an image that is coarsened, at least.
        largest_coarse: blocks of a problem that the kernel for matrices solves, at most.
        tolerance, max_iterations: of the problem between blocks.
    """

    smallest: int = 1024
    largest_coarse: int = 512
    tolerance: float = 1e-3
    max_iterations: int = 300


COARSENING = Coarsening()
SIZE = 4  # cells along each axis that become one block
_INTERPOLATION = {2: "bilinear", 3: "trilinear"}


class CoarseImages(Method):
    """The method for large balanced images on a CPU: Sinkhorn from the potentials and the w of a coarser image."""

    def applies(self, problem: Problem) -> bool:
        cost = problem.cost.as_grid()
        if cost is None or problem.marginal_penalty is not None or problem.impl != "auto":
            return False
        if not may_run_on(problem.p):
            return False
        return problem.start is None and len(cost.cells) in _INTERPOLATION and cost.shape[0] > COARSENING.smallest

    def run(self, problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
        """Search from a coarser image; see `interface.Method`."""
        if start is not None:
            return Sinkhorn().run(problem, start, budget)
        start, relaxation = _start_from_blocks(problem)
        return Sinkhorn().run(problem, start, budget, relaxation=relaxation)


def _start_from_blocks(problem: Problem) -> tuple[Start, Float[Tensor, "*batch"]]:
    """Return potentials and an over-relaxation w to start from."""
    cost = problem.cost.as_grid()
    assert cost is not None
    larger = cost.coarser(SIZE)
    coarse = _in_blocks(problem, cost, larger)
    budget = Budget(COARSENING.tolerance, COARSENING.max_iterations)
    if coarse.cost.shape[0] > COARSENING.largest_coarse:
        start, w = _start_from_blocks(coarse)
        result = Sinkhorn().run(coarse, start, budget, relaxation=w)
    else:
        # Any change is small enough, but the kernel estimates the smallest eigenvalue.
        result = SinkhornOnCPU().run(coarse, None, dataclasses.replace(budget, largest_change=sys.float_info.max))
        w = 2 / (1 + result.smallest_eigenvalue.clamp(0, 1).sqrt())
        w = torch.where(w.isnan(), 1.0, w)
    f, g = (_interpolated(t, larger.cells, cost.cells) for t in (result.start.f, result.start.g))
    return Start(f, g, torch.full_like(result.error, torch.inf)), w


def _in_blocks(problem: Problem, cost: GridCost, larger: GridCost) -> Problem:
    """Return the problem between blocks of cells, with their summed weights and the cost `larger`."""
    cells = larger.cells
    padding = [k for size in reversed(cost.cells) for k in (0, -size % SIZE)]
    split = [k for size in cells for k in (size, SIZE)]
    sums = []
    for weights in (problem.p, problem.q):
        image = pad(weights.detach().reshape(*problem.batch, *cost.cells), padding)
        blocks = image.reshape(*problem.batch, *split).sum([2 * k - 2 * len(cells) + 1 for k in range(len(cells))])
        sums.append(blocks.reshape(*problem.batch, math.prod(cells)))
    return dataclasses.replace(problem, p=sums[0], q=sums[1], cost=larger, epsilon=problem.epsilon.detach())


def _interpolated(potential: Tensor, coarse: tuple[int, ...], cells: tuple[int, ...]) -> Tensor:
    batch = potential.shape[:-1]
    image = potential.reshape(batch.numel(), 1, *coarse)
    values = interpolate(image, scale_factor=SIZE, mode=_INTERPOLATION[len(cells)], align_corners=False)
    for axis, size in enumerate(cells):
        values = values.narrow(axis + 2, 0, size)
    return values.reshape(*batch, math.prod(cells))
