"""Entropic problems whose bins fall into blocks that only pairs of a far larger cost connect.

Where the masses of both sides agree in each block up to rounding, no mass has to leave its block. The rounding would:
the optimum sends it at a price that may exceed all other costs, and the search climbs to potentials of the size of the
price, where the differences within a block lose their digits. So the masses of q are scaled to those of p block by
block, and costs between blocks are lowered to a price that the plan avoids all the same (`plain_costs` derives it).
Exact problems are treated after a first solution, which tells what a plan pays (`exact.blocks`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss._checks import has_float64, needs_torch
from otloss.costs import DenseCost
from otloss.solvers.exact.blocks import Blocks, blocks_of_matrix
from otloss.solvers.options import Settings
from otloss.solvers.problem import Problem
from otloss.solvers.reductions.plain_costs import EPSILONS_PER_PAIR
from otloss.solvers.reductions.way_back import WayBack

SMALL_EPSILON = 1e-4  # of the largest cost: above it, neither value nor potentials lose digits that count
NEGLIGIBLE_COST = 1e-3  # epsilons for the mass, which blocks that differ by more than rounding may pay
EPSILONS_OF_A_PRICE = 1e3  # a pair of this cost exchanges nothing that its rows and columns can do without


def reduce(problem: Problem, settings: Settings) -> tuple[Problem, WayBack] | None:
    """Reduce balanced entropic problems with matrices in which blocks of equal mass are found."""
    matrix = problem.cost.stored_matrix()
    if problem.is_exact or problem.marginal_penalty is not None or matrix is None:
        return None
    highest, epsilon = problem.largest_cost, problem.epsilon.detach()
    if not highest.numel() or not epsilon.numel():
        return None
    # Two numbers: for a single problem a comparison by torch takes longer.
    if SMALL_EPSILON * highest.amax().item() <= epsilon.amin().item():
        return None
    if needs_torch(problem.p, problem.q, problem.epsilon, matrix):
        return None
    p, q = (w.detach().to("cpu", torch.float64).reshape(-1, w.shape[-1]).numpy() for w in (problem.p, problem.q))
    blocks = _blocks(problem, matrix, p, q)
    return None if all(each is None for each in blocks) else _reduced(problem, matrix, p, q, blocks)


def _blocks(problem: Problem, matrix: Tensor, p: np.ndarray, q: np.ndarray) -> list[Blocks | None]:
    """Return the blocks of equal mass of each problem, None for a single block."""
    matrices = matrix.detach().cpu().reshape(-1, *matrix.shape[-2:]).numpy()
    owners = np.broadcast_to(np.arange(len(matrices)).reshape(matrix.shape[:-2]), problem.batch).reshape(-1)
    widths = problem.epsilon.detach().cpu().double().reshape(-1).numpy()
    known, blocks = {}, []
    for k, key in enumerate(zip(owners.tolist(), widths.tolist(), strict=True)):
        if key not in known:  # many problems may share a matrix
            known[key] = blocks_of_matrix(matrices[key[0]] < EPSILONS_OF_A_PRICE * key[1])
        balanced = known[key].balanced(p[k], q[k], problem.weight_rounding)
        equal = known[key].merged(balanced.differs)
        pays = abs(balanced.lacking) * float(matrices[key[0]].max()) > NEGLIGIBLE_COST * key[1] * p[k].sum()
        mass_p, mass_q = known[key].masses(p[k], q[k])
        must_leave = (balanced.differs & ((mass_p > 0) != (mass_q > 0))).any()  # the derivative there is a price
        blocks.append(None if pays or must_leave or equal.count == 1 else equal)
    return blocks


def _reduced(
    problem: Problem, matrix: Tensor, p: np.ndarray, q: np.ndarray, blocks: list[Blocks | None]
) -> tuple[Problem, WayBack]:
    """Scale q and cap costs between blocks, in float64: in float32 the scaled masses would differ again."""
    device, batch, (n, m) = matrix.device, problem.batch, matrix.shape[-2:]
    wide = torch.float64 if has_float64(device) else matrix.dtype
    matrix = matrix.to(wide).expand(*batch, n, m)
    flat, widths = matrix.detach().reshape(-1, n, m), problem.epsilon.detach().reshape(-1)
    scales, dropped = np.ones(q.shape), np.zeros(len(q))
    caps = torch.full_like(flat, torch.inf)
    for k, each in enumerate(blocks):
        if each is None:
            continue
        mass_p, mass_q = each.masses(p[k], q[k])
        has_both = (mass_p > 0) & (mass_q > 0)
        scales[k] = np.where(has_both, mass_p / np.where(has_both, mass_q, 1.0), 1.0)[each.columns]
        inside = torch.from_numpy(each.rows[:, None] == each.columns).to(device)
        largest = float(flat[k].masked_fill(~inside, 0.0).amax())
        with_mass = torch.from_numpy((p[k] > 0)[:, None] & (q[k] > 0)).to(device)
        cap = (min(n, m) + 1) * (largest + EPSILONS_PER_PAIR * float(widths[k]))
        caps[k].masked_fill_(with_mass & ~inside, cap)
        dropped[k] = np.abs(mass_p - mass_q)[has_both].sum() * float(flat[k].masked_fill(inside, 0.0).amax())
    reduced = dataclasses.replace(
        problem,
        p=problem.p.to(wide),
        q=problem.q.to(wide) * torch.from_numpy(scales.reshape(*batch, m)).to(device, wide),
        cost=DenseCost.unchecked(torch.minimum(matrix, caps.reshape(*batch, n, m))),
        epsilon=problem.epsilon.to(wide),
    )
    is_lowered = (caps < flat).reshape(*batch, n, m)
    return reduced, _PricedBlocks(torch.from_numpy(dropped.reshape(batch)).to(device), is_lowered)


@dataclass(frozen=True)
class _PricedBlocks(WayBack):
    """Attributes:
    dropped: (...), what the rounding of the masses of blocks would pay, which the gap counts.
    is_lowered: (..., n, m), the pairs of lowered costs, whose mass is rounding.
    """

    dropped: Float[Tensor, "*batch"]
    is_lowered: Bool[Tensor, "*batch n m"]

    def gap(self, gap: Tensor) -> Tensor:
        return gap + self.dropped

    def plan(self, plan: Tensor) -> Tensor:
        return plan.masked_fill(self.is_lowered, 0.0)
