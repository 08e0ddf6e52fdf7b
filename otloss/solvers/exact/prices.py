"""Large finite costs as prices: problems whose bins only such pairs connect are solved again, block by block.

`blocks` has the formulas. A price is relative to what the plan pays without it. Beyond the largest cost that it pays
for more than what may be rounding, each gap of `price_ratio` among the costs that it pays is a candidate: light bins
may pay costs, so that what looks like rounding beside a heavy bin is all the mass of a block. The lowest candidate is
taken whose blocks agree in their masses, or, if none agrees, the lowest above which no more mass finds its block.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from otloss.solvers.exact.blocks import PRICE_LIMITS, Blocks, largest_payment, rounding_of_flows, warn_of_prices


class Plan(NamedTuple):
    """A plan with potentials.

    Attributes:
        cells, flows: (2, cells), rows and columns, and (cells,), the mass there.
        f, g: (n,) and (m,), potentials.
        value, scale, pivots: as in `results.Outcome`.
    """

    cells: np.ndarray
    flows: np.ndarray
    f: np.ndarray
    g: np.ndarray
    value: float
    scale: float
    pivots: int

    @property
    def largest_potential(self) -> float:
        return max(float(np.abs(self.f).max(initial=0.0)), float(np.abs(self.g).max(initial=0.0)))


class PricedProblem(Protocol):
    """One problem, with a matrix or between clouds.

    Attributes:
        p: (n,), the weights.
        highest, lowest: the largest cost, and the smallest above 0.
        zeros: the number of pairs of cost 0.
    """

    @property
    def p(self) -> np.ndarray: ...

    @property
    def highest(self) -> float: ...

    @property
    def lowest(self) -> float: ...

    @property
    def zeros(self) -> int: ...

    def costs(self, cells: np.ndarray) -> np.ndarray:
        """Return the costs (cells,) of rows and columns (2, cells)."""

    def blocks(self, price: float) -> Blocks:
        """Return the blocks that only pairs of at least this price connect."""

    def solve(self, q: np.ndarray, start: Plan) -> Plan:
        """Return the plan for other weights q; potentials to start from."""

    def solve_blocks(self, q: np.ndarray, start: Plan, blocks: Blocks, price: float) -> Plan:
        """Return the plan of blocks of equal masses, where nothing is exchanged between blocks."""

    def slack(self, plan: Plan, q: np.ndarray, blocks: Blocks) -> np.ndarray:
        """Return lower bounds (count, count) of C_ij - f_i - g_j between blocks, where p and q hold mass."""


class BalancedPlan(NamedTuple):
    """The plan of a problem whose blocks are balanced.

    Attributes:
        plan: its potentials are shifted against each other, block by block.
        q: the weights, of the masses of p in each block where rounding explains the difference.
        payment, largest_potential: as in `Optimum`.
    """

    plan: Plan
    q: np.ndarray
    payment: float
    largest_potential: float


def balance_blocks(problem: PricedProblem, q: np.ndarray, plan: Plan, *, rounding: float, warns: bool) -> BalancedPlan:
    """Return the plan, or a new one where costs are prices.

    The second time the masses of both sides agree in each block where rounding explains their difference.
    """
    p = problem.p
    if not problem.highest * float(p.sum()) > PRICE_LIMITS.price_ratio * plan.value:
        return BalancedPlan(plan, q, 0.0, plan.largest_potential)
    unchanged = BalancedPlan(plan, q, problem.highest * rounding_of_flows(p, q), plan.largest_potential)
    level = _level(problem, q, plan, rounding)
    if level is None:
        return unchanged
    blocks, (balanced, differs, _) = level.blocks, level.blocks.balanced(p, q, rounding)
    if warns and differs.any():
        costs = problem.costs(plan.cells)
        warn_of_prices(blocks, p, q, plan.flows, plan.cells, costs, price=level.price, rounding=rounding)
    is_large = blocks.count > PRICE_LIMITS.max_blocks
    if blocks.count == 1 or differs.all() or (is_large and np.array_equal(balanced, q)):
        return unchanged
    solves_all = differs.any() or is_large
    new = problem.solve(balanced, plan) if solves_all else problem.solve_blocks(balanced, plan, blocks, level.price)
    payment = unchanged.payment + level.payment + abs(plan.value - new.value)
    if not differs.any():
        payment += blocks.payment(p, q, problem.highest)
    largest = new.largest_potential
    joined = blocks.joined_by(new.cells, new.flows, differs, rounding_of_flows(p, balanced))
    if joined.count <= PRICE_LIMITS.max_blocks:
        slack = problem.slack(new, balanced, joined)
        if not joined.shift(p, balanced, new.f, new.g, slack):  # chains of clusters have other potentials alone
            return unchanged
    return BalancedPlan(new, balanced, payment, largest)


class _Level(NamedTuple):
    """The cost from which pairs are priced.

    Attributes:
        price: this cost.
        blocks: what pairs below it connect.
        payment: what rounding may pay at costs below it.
    """

    price: float
    blocks: Blocks
    payment: float


def _level(problem: PricedProblem, q: np.ndarray, plan: Plan, rounding: float) -> _Level | None:
    """Return the lowest level whose blocks agree in their masses, or above which no more mass finds its block."""
    p, level = problem.p, None
    differing, payment = np.zeros(0), 0.0
    costs = problem.costs(plan.cells).astype(np.float64)
    surely = float(largest_payment(costs, plan.flows, float(p.sum()), rounding))
    for cost in _costs_below_gaps(problem, costs[plan.flows > 0], surely, len(p) + len(q)):
        price = max(PRICE_LIMITS.price_ratio * cost, problem.lowest)
        blocks = problem.blocks(price)
        if level is not None:
            own = (differing > 0)[level.blocks.rows], (differing > 0)[level.blocks.columns]
            differing_later = blocks.differing(np.where(own[0], p, 0.0), np.where(own[1], q, 0.0), rounding)
            if differing_later.sum() > differing.sum() / 2:
                continue
            payment += level.blocks.payment(np.where(own[0], 0.0, p), np.where(own[1], 0.0, q), cost)
        differing = blocks.differing(p, q, rounding)
        has_groups = surely > 0 or blocks.count <= PRICE_LIMITS.blocks_per_bin * (len(p) + len(q))
        if not differing.any() and (has_groups or cost > 0):
            return _Level(price, blocks, payment)
        if has_groups and cost > 0 and cost in costs[plan.flows > 0]:
            level = _Level(price, blocks, payment)
    return level


def _costs_below_gaps(problem: PricedProblem, used: np.ndarray, surely: float, bins: int) -> np.ndarray:
    """Return the costs with a gap above each, beyond which there are prices, from the costs that the plan pays.

    The first is the largest cost that it pays for sure, with or without a gap. Where that is 0, all costs are prices
    beside it: the smallest other cost tells more. If no cost is a price beside that one, it may be a price itself.
    """
    ratio, smallest = PRICE_LIMITS.price_ratio, surely or problem.lowest
    costs = np.unique(np.append(used[used > smallest], smallest))
    has_gap = np.append(costs[1:] >= ratio * costs[:-1], True)
    has_gap[0] |= surely > 0
    below_gaps: np.ndarray = costs[has_gap & (ratio * costs <= problem.highest)]
    if below_gaps.size or surely > 0 or not used.any():
        return below_gaps
    has_groups = problem.zeros >= (1 - PRICE_LIMITS.blocks_per_bin) * bins  # a pair joins two blocks at most
    return np.zeros(int(has_groups))
