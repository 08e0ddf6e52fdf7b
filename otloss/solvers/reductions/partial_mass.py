"""Partial transport: the cheapest plan that moves a part of the mass, and no more of a bin than it holds.

    min <C, P> (+ epsilon KL)  over  P >= 0,  P 1 <= p,  P^T 1 <= q,  sum P = mass

A dummy bin on either side takes what stays: with D above all costs it is the balanced problem

    p' = (p, sum q - mass)    q' = (q, sum p - mass)    C' = [C 0; 0 D]

Its potentials f', g' give the derivatives. More mass in bin i of p is more in the dummy bin of q too, so

    dV/dp_i = f'_i + g'_dummy    dV/dq_j = g'_j + f'_dummy    dV/dmass = -(f'_dummy + g'_dummy)    dV/dC = P

which no constant moved from f' to g' changes. Where bin i and the dummy bin of q are both without mass, what they get
may also go from the one to the other at no cost: exact transport has dV/dp_i = min(f'_i + g'_dummy, 0) there. The
entropic problem has p', q' and C': its KL also counts what stays.
Source: L. Chapel, M. Alaya, G. Gasso, Partial Optimal Transport with Applications on Positive-Unlabeled Learning, 2020.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from otloss._checks import check_finite, needs_torch
from otloss.costs import DenseCost
from otloss.solvers.convergence import level_of_the_caller
from otloss.solvers.options import Settings
from otloss.solvers.problem import Problem
from otloss.solvers.reductions.way_back import WayBack

SLOW_MATRIX = 2**24  # entries of the matrix between the cells of images, from which iterations on it take seconds
EPSILONS_BETWEEN_DUMMIES = 60.0  # above all potentials: exp(-60) of the mass goes from dummy bin to dummy bin


class _Cut(NamedTuple):
    """Where weights are above twice the mass that is moved; the value does not depend on these."""

    p: Tensor
    q: Tensor


def reduce(problem: Problem, settings: Settings) -> tuple[Problem, WayBack] | None:
    """Reduce problems with a mass that is moved, in float64 where that is possible."""
    if problem.mass is None:
        return None
    _warn_of_slow_images(problem)
    wide = problem.dtype_of_sums
    p, q, matrix, epsilon = (t.to(wide) for t in (problem.p, problem.q, problem.cost.dense(), problem.epsilon))
    if problem.cost.stored_matrix() is None:
        check_finite("cost", matrix)
    cut = None
    if problem.is_exact:
        limit = torch.where(problem.mass > 0, 2 * problem.mass, torch.inf).unsqueeze(-1)
        cut = _Cut(p.detach() > limit.detach(), q.detach() > limit.detach())
        # No bin gives more than the mass. Where far more than that stays, rounding would decide the plan otherwise.
        # Cut at the mass itself, a bin that gives all of it would have many potentials, which are wrong at empty bins.
        p, q = torch.where(cut.p, limit, p), torch.where(cut.q, limit, q)
    stays = [w.sum(-1, keepdim=True) - problem.mass.unsqueeze(-1) for w in (p, q)]
    stays_p, stays_q = (mass - mass.detach().clamp(max=0) for mass in stays)  # rounding below 0 keeps the derivative
    largest = matrix.detach().amax((-2, -1)) if matrix.numel() else matrix.new_zeros(matrix.shape[:-2])
    between_dummies = 3 * largest + EPSILONS_BETWEEN_DUMMIES * epsilon.detach()
    between_dummies = torch.where(between_dummies > 0, between_dummies, 1.0)
    m = matrix.shape[-1]
    rows = pad(matrix, (0, 1)).expand(*problem.batch, -1, m + 1)
    last = pad(between_dummies.unsqueeze(-1), (m, 0)).unsqueeze(-2)
    reduced = dataclasses.replace(
        problem,
        p=torch.cat([p, stays_q], -1),
        q=torch.cat([q, stays_p], -1),
        cost=DenseCost.unchecked(torch.cat([rows, last], -2)),
        epsilon=epsilon,
        mass=None,
        has_dummy_bins=True,
    )
    if problem.is_exact:
        return reduced, _PartialMass(cut=cut)
    share = problem.mass.detach() / reduced.p.detach().sum(-1).clamp(min=torch.finfo(wide).tiny)
    share = share.masked_fill(share <= 0, 1.0)
    return dataclasses.replace(reduced, share_moved=None if needs_torch(share) else share), _PartialMass(share)


def _warn_of_slow_images(problem: Problem) -> None:
    """Warn of entropic problems between images, which lose the products along the axes here."""
    grid, (n, m) = problem.cost.as_grid(), problem.cost.shape
    entries = n * m * problem.batch.numel()
    if problem.is_exact or grid is None or len(grid.cells) < 2 or entries < SLOW_MATRIX:
        return
    warnings.warn(
        f"mass= between {' x '.join(map(str, grid.cells))} cells needs a matrix of {n} x {m} costs: time and memory "
        "grow with the square of the number of cells. Sum blocks of cells to a coarser grid, or use "
        "marginal_penalty=, which keeps the products along the axes.",
        stacklevel=level_of_the_caller(),
    )


class _PartialMass(WayBack):
    """Without the dummy bins. Bounds hold for the problem with them.

    Attributes:
        share: (...), what is moved of all mass with the dummy bins, for entropic problems; 1 where nothing is. The
            search measures its error by all mass, and beside what stays the mass that is moved may be little.
        cut: bins that hold more than twice what is moved, for exact problems.
    """

    def __init__(self, share: Tensor | None = None, cut: _Cut | None = None) -> None:
        self._share, self._cut = share, cut

    def marginal_error(self, error: Tensor) -> Tensor:
        return error if self._share is None else error / self._share.to(error)

    def potentials(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        f, g = f[..., :-1] + g[..., -1:], g[..., :-1] + f[..., -1:]
        return (f, g) if self._cut is None else (f.masked_fill(self._cut.p, 0.0), g.masked_fill(self._cut.q, 0.0))

    def plan(self, plan: Tensor) -> Tensor:
        return plan[..., :-1, :-1]
