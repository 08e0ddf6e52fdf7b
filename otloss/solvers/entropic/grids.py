"""From coarse to fine: the start of balanced problems between large images, and how far to over-relax.

Potentials are smooth at the scale of sqrt(epsilon), so those of an image with blocks of cells in place of cells are
near those of the image. So are the eigenvalues that decide how fast the iterations converge, and with them the best w,
which the search would have to find first. Neither changes the problem that is solved.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import interpolate, pad

from otloss._kernels import may_run_on
from otloss.costs import GridCost
from otloss.solvers.entropic.log_domain import iterate_in_logs
from otloss.solvers.entropic.problem import EntropicProblem, level_of_the_caller

BLOCK = 4  # cells along each axis that become one
LEAST_CELLS, MOST_CELLS = 1024, 512  # of problems that are coarsened, and of those that the numba kernel solves
TOLERANCE, ITERATIONS = 1e-3, 300
_MODES = {2: "bilinear", 3: "trilinear"}
# Work on a CPU from which a warning is due, some ten seconds: pairs of cells in line for the iterations of a small
# epsilon, and cells to the power of three for the linear system of "implicit".
SLOW_PAIRS, SLOW_SYSTEM = 2**21, 10**10


def warn_where_slow(problem: EntropicProblem, grad: str) -> None:
    """Warn of problems between the cells of a grid that take far longer than its products along the axes do."""
    cost = problem.cost
    if not isinstance(cost, GridCost) or len(cost.cells) < 2 or not may_run_on(problem.p):
        return
    cells, problems = cost.shape[0], problem.batch.numel()
    what = f"{' x '.join(map(str, cost.cells))} cells ({problems} problem{'s' * (problems > 1)})"
    if grad == "implicit" and problems * cells**3 >= SLOW_SYSTEM:
        warnings.warn(
            f'grad="implicit" between {what} forms and solves dense systems of {cells} equations: the time grows with '
            'the number of cells to the power of three. Use grad="envelope" if first derivatives are enough, or sum '
            "blocks of cells to a coarser grid.",
            stacklevel=level_of_the_caller(),
        )
    least = cost.least_epsilon_for_products
    smallest = float(problem.epsilon.detach().amin()) if problems else least
    if smallest < least and problems * cells * sum(cost.cells) >= SLOW_PAIRS:
        warnings.warn(
            f"epsilon is {smallest:.3g} between {what}: below {least:.3g} products along the axes would underflow, an "
            "iteration takes about ten times as long, and hundreds to thousands of them are needed. Raise epsilon to "
            f"{least:.3g}, or sum blocks of cells to a coarser grid.",
            stacklevel=level_of_the_caller(),
        )


def takes_blocks(problem: EntropicProblem) -> bool:
    """Whether `start_from_blocks` is for this problem."""
    cost = problem.cost
    if not isinstance(cost, GridCost) or problem.marginal_penalty is not None or not may_run_on(problem.p):
        return False
    return len(cost.cells) in _MODES and cost.shape[0] > LEAST_CELLS


def start_from_blocks(
    problem: EntropicProblem, solve: Callable[..., Any], *, symmetric: bool
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return potentials (f, g) to start from, and w (...); `solve` gives (f, g, least eigenvalue) of small problems."""
    cost = problem.cost
    assert isinstance(cost, GridCost)
    coarse = _in_blocks(problem, cost)
    if coarse.cost.shape[0] > MOST_CELLS:
        start, w = start_from_blocks(coarse, solve, symmetric=symmetric)
        f, g, _, _ = iterate_in_logs(
            coarse, start, tolerance=TOLERANCE, most=ITERATIONS, symmetric=symmetric, relaxation=w
        )
    else:
        f, g, least = solve(coarse, tolerance=TOLERANCE, most=ITERATIONS, symmetric=symmetric)
        w = 2 / (1 + least.clamp(0, 1).sqrt())
    assert isinstance(coarse.cost, GridCost)
    fine = [_interpolated(potential, coarse.cost.cells, cost.cells) for potential in (f, g)]
    return (fine[0], fine[1]), w


def _in_blocks(problem: EntropicProblem, cost: GridCost) -> EntropicProblem:
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
    found = interpolate(image, scale_factor=BLOCK, mode=_MODES[len(cells)], align_corners=False)
    for axis, size in enumerate(cells):
        found = found.narrow(axis + 2, 0, size)
    return found.reshape(*batch, math.prod(cells))
