"""Entropic problems whose bins fall into blocks that only pairs of a far larger cost connect.

Where the masses of both sides agree in each block up to rounding, no mass has to leave its block. The rounding would:
the optimum sends it at a price that may exceed all other costs, and the search climbs to potentials of the size of the
price, where the differences within a block lose their digits. So the masses of q are scaled to those of p block by
block, and costs between blocks are lowered to a price that the plan avoids all the same (`plain_costs` derives it).
Exact problems are treated after a first solution, which tells what a plan pays (`exact_blocks`).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from otloss._checks import needs_torch
from otloss.costs import DenseCost
from otloss.solvers.exact_blocks import Blocks, blocks_of_matrix, rounding_of
from otloss.solvers.problem import Problem, Settings, has_float64
from otloss.solvers.reductions.plain_costs import EPSILONS_PER_PAIR
from otloss.solvers.reductions.way_back import WayBack

LEAST_RATIO = 1e4  # of the largest cost to epsilon: below it, neither value nor potentials lose digits that count
EPSILONS_OF_A_PRICE = 1e3  # a pair of this cost exchanges nothing that its rows and columns can do without


def reduce(problem: Problem, settings: Settings) -> tuple[Problem, WayBack] | None:
    """Reduce balanced entropic problems with matrices in which blocks of equal mass are found."""
    cost = problem.cost
    if problem.is_exact or problem.marginal_penalty is not None or type(cost) is not DenseCost:
        return None
    highest, epsilon = problem.largest_cost, problem.epsilon.detach()
    if not highest.numel() or not epsilon.numel():
        return None
    # Two numbers: for a single problem a comparison by torch takes longer.
    if highest.amax().item() <= LEAST_RATIO * epsilon.amin().item():
        return None
    if needs_torch(problem.p, problem.q, problem.epsilon, cost.matrix):
        return None
    batch, (n, m) = problem.batch, cost.shape
    p, q = (w.detach().to("cpu", torch.float64).reshape(-1, w.shape[-1]).numpy() for w in (problem.p, problem.q))
    matrices = cost.matrix.detach().cpu().expand(*batch, n, m).reshape(-1, n, m).numpy()
    widths = epsilon.cpu().reshape(-1).double().numpy()
    unit = max(torch.finfo(dtype).eps for dtype in (problem.dtype, problem.p.dtype))
    between, scales = np.zeros(matrices.shape, bool), np.ones(q.shape)
    caps = np.full(len(p), np.inf)
    for k, (matrix, width) in enumerate(zip(matrices, widths, strict=True)):
        blocks = blocks_of_matrix(matrix < EPSILONS_OF_A_PRICE * width)
        factors = _factors(blocks, p[k], q[k], unit)
        if factors is None:
            continue
        scales[k] = factors[blocks.columns]
        inside = blocks.rows[:, None] == blocks.columns
        between[k] = ~inside & (p[k] > 0)[:, None] & (q[k] > 0)
        caps[k] = (min(n, m) + 1) * (float(matrix[inside].max(initial=0.0)) + EPSILONS_PER_PAIR * width)
    if not between.any():
        return None
    return _reduced(
        problem, cost, between.reshape(*batch, n, m), caps.reshape(batch), scales.reshape(*batch, m)
    ), WayBack()


def _factors(blocks: Blocks, p: np.ndarray, q: np.ndarray, unit: float) -> np.ndarray | None:
    """Return the mass of p over that of q in each block.

    None for one block, or where masses of blocks differ by more than rounding.
    """
    if blocks.count < 2:
        return None
    mass_p, mass_q = np.bincount(blocks.rows, p, blocks.count), np.bincount(blocks.columns, q, blocks.count)
    if not (np.abs(mass_p - mass_q) <= rounding_of(float(p.sum()), len(p) + len(q), unit)).all():
        return None
    has_both = (mass_p > 0) & (mass_q > 0)
    return np.where(has_both, mass_p / np.where(has_both, mass_q, 1.0), 1.0)


def _reduced(problem: Problem, cost: DenseCost, between: np.ndarray, caps: np.ndarray, scales: np.ndarray) -> Problem:
    """Return the problem with those factors and costs, in float64: in float32 the scaled masses would differ again."""
    device = cost.device
    wide = torch.float64 if has_float64(device) else cost.dtype
    matrix, cap = cost.matrix.to(wide), torch.from_numpy(caps).to(device, wide)[..., None, None]
    capped = torch.where(torch.from_numpy(between).to(device) & (matrix.detach() > cap), cap, matrix)
    return dataclasses.replace(
        problem,
        p=problem.p.to(wide),
        q=problem.q.to(wide) * torch.from_numpy(scales).to(device, wide),
        cost=DenseCost.unchecked(capped),
        epsilon=problem.epsilon.to(wide),
    )
