"""Entropic transport between large images: a start from blocks of cells; balanced, on a CPU.

Potentials are smooth at the scale of sqrt(epsilon). So potentials between blocks of cells are near the potentials
between the cells. The same holds for the eigenvalues that decide how fast the iterations converge, and so for the best
over-relaxation w. The search takes both from the blocks. Blocks change only the way to the solution: the error that
ends the search is the error of the cells.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate, pad

from otloss._numba import may_run_on
from otloss.costs import GridCost
from otloss.solvers.entropic.interface import (
    COARSE_TOLERANCE,
    Goal,
    Solver,
)
from otloss.solvers.entropic.sinkhorn import iterate_in_logs
from otloss.solvers.problem import Problem

BLOCK = 4  # cells along each axis that become one
LEAST_CELLS, MOST_BLOCKS = 1024, 512  # the fewest cells of an image that is coarsened, the most blocks of a problem
BLOCK_ITERATIONS = 300
_INTERPOLATION = {2: "bilinear", 3: "trilinear"}


def takes_blocks(problem: Problem) -> bool:
    """Return whether `start_from_blocks` applies to this problem."""
    cost = problem.cost
    if not isinstance(cost, GridCost) or problem.marginal_penalty is not None or not may_run_on(problem.p):
        return False
    return len(cost.cells) in _INTERPOLATION and cost.shape[0] > LEAST_CELLS


def start_from_blocks(
    problem: Problem, solve: Solver, *, symmetric: bool
) -> tuple[tuple[Tensor, Tensor], Float[Tensor, "*batch"]]:
    """Return potentials (f, g) and an over-relaxation w to start from. `solve` solves the problem between blocks."""
    cost = problem.cost
    assert isinstance(cost, GridCost)
    coarse = _in_blocks(problem, cost)
    # A finite `settled` makes the kernel estimate the least eigenvalue.
    goal = Goal(COARSE_TOLERANCE, BLOCK_ITERATIONS, settled=1e3, symmetric=symmetric)
    if coarse.cost.shape[0] > MOST_BLOCKS:
        start, w = start_from_blocks(coarse, solve, symmetric=symmetric)
        result = iterate_in_logs(coarse, start, goal, relaxation=w)
    else:
        result = solve(coarse, None, goal)
        least = result.least_eigenvalue
        w = torch.ones_like(result.error) if least is None else 2 / (1 + least.clamp(0, 1).sqrt())
    assert isinstance(coarse.cost, GridCost)
    fine = [_interpolated(potential, coarse.cost.cells, cost.cells) for potential in (result.f, result.g)]
    return (fine[0], fine[1]), w


def _in_blocks(problem: Problem, cost: GridCost) -> Problem:
    cells = tuple(-(-size // BLOCK) for size in cost.cells)
    padding = [k for size in reversed(cost.cells) for k in (0, -size % BLOCK)]
    split = [k for size in cells for k in (size, BLOCK)]
    sums = []
    for weights in (problem.p, problem.q):
        image = pad(weights.detach().reshape(*problem.batch, *cost.cells), padding)
        blocks = image.reshape(*problem.batch, *split).sum([2 * k - 2 * len(cells) + 1 for k in range(len(cells))])
        sums.append(blocks.reshape(*problem.batch, math.prod(cells)))
    larger = GridCost(cells, power=cost.power, spacing=[BLOCK * step for step in cost.spacing])
    return dataclasses.replace(
        problem, p=sums[0], q=sums[1], cost=larger.to(cost.device, cost.dtype), epsilon=problem.epsilon.detach()
    )


def _interpolated(potential: Tensor, coarse: tuple[int, ...], cells: tuple[int, ...]) -> Tensor:
    batch = potential.shape[:-1]
    image = potential.reshape(batch.numel(), 1, *coarse)
    values = interpolate(image, scale_factor=BLOCK, mode=_INTERPOLATION[len(cells)], align_corners=False)
    for axis, size in enumerate(cells):
        values = values.narrow(axis + 2, 0, size)
    return values.reshape(*batch, math.prod(cells))
