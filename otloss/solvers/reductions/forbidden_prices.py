"""Entropic problems with prices for pairs that must not be, beside a small epsilon: pairs that no plan needs get +inf.

Finite prices of 1e6 to 1e15 stand for "must not be". The potentials climb towards them where cheap pairs alone do not
tie the bins together, and a small epsilon is then below the rounding of the potentials (`SmallEpsilonError`). If some
plan avoids all pairs above a level, and these cost more than the price that `plain_costs` gives to +inf, the optimum
avoids them too, and +inf in their place changes nothing but the numbers of the search.

This is tried where the search has failed: to find such a plan takes an exact solution, at a cost of 1 for each pair
above the level and 0 for the others. What the rounding of the weights forces onto such pairs counts as nothing, where
it pays no more than the rounding of the weights at the costs of the posed problem, which the gap holds. A light bin
that has to pay a price may hold less than the rounding of the whole mass, but it is meant to pay.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss._checks import needs_torch
from otloss.costs.dense import posed_cost
from otloss.solvers.exact.blocks import rounding_of_flows
from otloss.solvers.exact.optimum import solve_arrays
from otloss.solvers.histograms import of_equal_mass
from otloss.solvers.problem import Problem
from otloss.solvers.reductions.plain_costs import EPSILONS_PER_PAIR
from otloss.solvers.weight_rounding import rounding_of_value

MAX_ENTRIES = 2**22  # all matrices together
SMALLEST_RATIO = 1e3  # a price over the largest cost below it, as for exact problems


def without_prices(problem: Problem) -> Problem | None:
    """Return the problem with +inf for prices that no plan needs; None if it has none."""
    is_balanced = problem.marginal_penalty is None and problem.mass is None and not problem.is_symmetric
    if problem.is_exact or not is_balanced or problem.cost.stored_matrix() is None:
        return None
    (n, m), batch = problem.cost.shape, problem.batch
    if needs_torch(problem.p, problem.q, *problem.cost.tensors()) or batch.numel() * n * m > MAX_ENTRIES:
        return None
    matrix = problem.cost.dense().expand(*batch, n, m)
    with torch.no_grad():
        wide = matrix.cpu().double().reshape(-1, n, m)
        p, q = (w.cpu().double().reshape(-1, w.shape[-1]) for w in (problem.p, problem.q))
        q, widths = of_equal_mass(p, q), problem.epsilon.cpu().double().reshape(-1).tolist()
        budgets = rounding_of_value(problem).cpu().reshape(-1).tolist()
        is_dear = torch.stack([
            _dear_pairs(p[k], q[k], wide[k], epsilon=widths[k], budget=budgets[k], rounding=problem.weight_rounding)
            for k in range(len(p))
        ])  # fmt: skip
    if not bool(is_dear.any()):
        return None
    forbidden = matrix.masked_fill(is_dear.reshape(*batch, n, m).to(matrix.device), torch.inf)
    return dataclasses.replace(problem, cost=posed_cost(forbidden), start=None)


def _dear_pairs(
    p: Tensor, q: Tensor, cost: Tensor, *, epsilon: float, budget: float, rounding: float
) -> Bool[Tensor, "n m"]:
    """Return the pairs above the lowest level at which some plan avoids them all; none where there is no such level.

    `budget` is what the rounding of the weights may pay.
    """
    smallest = rounding_of_flows(p.numpy(), q.numpy())
    for level in levels_of_prices(cost, epsilon):
        is_dear = cost > level
        optimum = solve_arrays(p, q, is_dear.double(), rounding=rounding)
        flows = optimum.flows * is_dear[optimum.rows, optimum.columns]
        forced = flows.masked_fill(flows <= smallest, 0.0)
        if float((forced * cost[optimum.rows, optimum.columns].nan_to_num(posinf=0.0)).sum()) <= budget:
            return is_dear
    return torch.zeros_like(cost, dtype=torch.bool)


def levels_of_prices(cost: Float[Tensor, "n m"], epsilon: float) -> list[float]:
    """Return the costs, from the smallest, above which the next one is a price and exceeds what +inf becomes."""
    entries = cost[cost.isfinite()].unique()
    if not entries.numel():
        return []
    shifted = entries - entries[0].clamp(max=0.0)
    price = (min(cost.shape) + 1) * (shifted[:-1] + EPSILONS_PER_PAIR * epsilon)
    is_level = shifted[1:] > torch.maximum(price, SMALLEST_RATIO * shifted[:-1])
    levels: list[float] = entries[:-1][is_level].tolist()
    return levels
