"""Entropic problems whose bins fall into blocks that only pairs of a far larger cost connect.

Where the masses of both sides agree in each block up to rounding, no mass has to leave its block. The rounding would:
the optimum sends it at a price that may exceed all other costs, and the search climbs to potentials of the size of the
price, where the differences within a block lose their digits. So the masses of q are scaled to the masses of p block by
block, and costs between blocks are lowered to a price that the plan avoids all the same (`plain_costs` derives it).
Pairs connect bins if they cost at most 10,000 epsilons, or else at most a level above which the next cost is a price.
Costs that are computed, as those between points, become a matrix for it where they are few enough and have such blocks.
Exact problems are treated after a first solution, which tells what a plan pays (`exact.blocks`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss._checks import float64_or, needs_torch
from otloss.costs import Cost, DenseCost
from otloss.solvers.exact.blocks import Blocks, blocks_of_matrices
from otloss.solvers.options import Settings
from otloss.solvers.problem import Problem
from otloss.solvers.reductions.forbidden_prices import levels_of_prices
from otloss.solvers.reductions.plain_costs import EPSILONS_PER_PAIR
from otloss.solvers.reductions.way_back import WayBack

SMALL_EPSILON = 1e-4  # relative to a price; less, whether a cost or the largest one, takes no digits that count
NEGLIGIBLE_COST = 1e-3  # epsilons for the mass, which blocks that differ by more than rounding may pay
MAX_ENTRIES = 2**24  # all matrices that are computed here: 128 MiB in float64; with more, the gap tells
STEPS = 10  # from a bin to all others, in clouds that are one block


def reduce(problem: Problem, settings: Settings) -> tuple[Problem, WayBack] | None:
    """Reduce balanced entropic problems in which blocks of equal mass are found; problems with p = q move nothing."""
    if problem.is_exact or problem.marginal_penalty is not None or problem.is_symmetric:
        return None
    highest, epsilon = problem.largest_cost, problem.epsilon.detach()
    if not highest.numel() or not epsilon.numel():
        return None
    # Two numbers: for a single problem a comparison by torch takes longer.
    price = epsilon.amin().item() / SMALL_EPSILON
    if highest.amax().item() <= price:
        return None
    if needs_torch(problem.p, problem.q, problem.epsilon, *problem.cost.tensors()) or not _suits(problem):
        return None
    with torch.no_grad():
        if _is_single(problem.cost, price):
            return None
        matrix = problem.cost.dense()
        is_connected = _is_connected(matrix < price)
    if bool(is_connected.all()):
        return None
    p, q = (w.detach().to("cpu", torch.float64).reshape(-1, w.shape[-1]).numpy() for w in (problem.p, problem.q))
    blocks = _blocks(problem, matrix, is_connected, p, q)
    return None if all(each is None for each in blocks) else _reduced(problem, p, q, blocks)


def _suits(problem: Problem) -> bool:
    """Return whether the cost holds its matrix, or takes one that is small enough and may be needed."""
    cost, pairs = problem.cost, math.prod(problem.cost.shape)
    if cost.stored_matrix() is not None:
        return True
    if cost.as_grid() is not None or cost.batch_shape.numel() * pairs > MAX_ENTRIES:
        return False
    # The masses of blocks of equal weights differ by whole bins, and so by no rounding.
    return len({bound.item() for w in (problem.p, problem.q) for bound in torch.aminmax(w.detach())}) > 1


def _is_single(cost: Cost, price: float) -> bool:
    """Return whether a row in the middle has no price, nor a column: then all bins are one block, without a matrix."""
    sides = ((cost, cost.shape[0] // 2), (cost.T, cost.shape[1] // 2))
    return all(side.row_block(k, k + 1).amax().item() < price for side, k in sides)


def _is_connected(is_cheap: Bool[Tensor, "*matrices n m"]) -> Bool[Tensor, "*matrices"]:
    """Return where a few steps along cheap pairs lead from the first row to all bins: a quick test of all matrices."""
    edges = is_cheap.to(torch.float32)
    rows = torch.zeros_like(edges[..., :1])
    rows[..., 0, :] = 1.0
    for _ in range(STEPS):
        columns = (edges.mT @ rows).clamp_(max=1.0)
        rows = (edges @ columns).clamp_(max=1.0)
        is_connected = (columns.amin((-2, -1)) > 0) & (rows.amin((-2, -1)) > 0)
        if bool(is_connected.all()):
            break
    return is_connected


def _blocks(
    problem: Problem, matrix: Tensor, is_connected: Tensor, p: np.ndarray, q: np.ndarray
) -> list[Blocks | None]:
    """Return the blocks of equal mass of each problem, None for a single block."""
    matrices = matrix.detach().cpu().reshape(-1, *matrix.shape[-2:]).numpy()
    connected = is_connected.reshape(-1).tolist()
    owners = np.broadcast_to(np.arange(len(matrices)).reshape(matrix.shape[:-2]), problem.batch).reshape(-1)
    widths = problem.epsilon.detach().cpu().double().reshape(-1).numpy()
    keys = list(zip(owners.tolist(), widths.tolist(), strict=True))
    apart = [key for key in dict.fromkeys(keys) if not connected[key[0]]]  # many problems may share a matrix
    owner, width = (np.array(side) for side in zip(*apart, strict=True))
    by_key = dict(zip(apart, blocks_of_matrices(matrices[owner] < width[:, None, None] / SMALL_EPSILON), strict=True))
    blocks: list[Blocks | None] = []
    for k, key in enumerate(keys):
        if key not in by_key:
            blocks.append(None)
            continue
        costs, largest = matrices[key[0]], float(matrices[key[0]].max())
        budget = NEGLIGIBLE_COST * key[1] * p[k].sum() / largest
        splits = itertools.chain((by_key[key],), _blocks_at_levels(costs, key[1]))
        equal = (_equal_blocks(each, p[k], q[k], problem.weight_rounding, budget) for each in splits)
        blocks.append(next((each for each in equal if each is not None), None))
    return blocks


def _blocks_at_levels(costs: np.ndarray, epsilon: float) -> Iterator[Blocks]:
    """Yield the blocks of one matrix whose ordinary costs exceed the usual limit, from the lowest level of prices."""
    for level in levels_of_prices(torch.from_numpy(costs), epsilon):
        if level >= epsilon / SMALL_EPSILON:
            yield blocks_of_matrices(costs[None] <= level)[0]


def _equal_blocks(blocks: Blocks, p: np.ndarray, q: np.ndarray, rounding: float, budget: float) -> Blocks | None:
    """Return the blocks, joining all of unequal masses; None if a single one remains, or it lacks more mass."""
    if blocks.count == 1:
        return None
    balanced = blocks.balanced(p, q, rounding)
    equal = blocks.merged(balanced.differs)
    mass_p, mass_q = blocks.masses(p, q)
    must_leave = (balanced.differs & ((mass_p > 0) != (mass_q > 0))).any()  # the derivative there is a price
    return None if abs(balanced.lacking) > budget or must_leave or equal.count == 1 else equal


def _reduced(problem: Problem, p: np.ndarray, q: np.ndarray, blocks: list[Blocks | None]) -> tuple[Problem, WayBack]:
    """Scale q and cap costs between blocks, in float64: in float32 the scaled masses would differ again."""
    cost, batch, (n, m) = problem.cost, problem.batch, problem.cost.shape
    device, wide = cost.device, float64_or(cost.dtype, cost.device)
    # A stored matrix is data; costs that are computed get the digits of float64.
    matrix = cost.dense().to(wide) if cost.stored_matrix() is not None else cost.to(wide).dense()
    matrix = matrix.expand(*batch, n, m)
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
