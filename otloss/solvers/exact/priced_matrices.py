"""Problems with matrices in which large finite costs are prices: `prices` has the steps, `blocks` the formulas."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from otloss.solvers.exact.batch import solve_batch
from otloss.solvers.exact.blocks import PRICE_LIMITS, Blocks, blocks_of_matrix, largest_payment, rounding_of_flows
from otloss.solvers.exact.prices import Plan, balance_blocks
from otloss.solvers.exact.results import MAX_PIVOTS, OUTCOME, Results, check_outcome


def settle_prices(
    weights: list[np.ndarray], matrices: np.ndarray, owners: np.ndarray, results: Results, rounding: float, *,
    warns: bool,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Solve problems again whose bins fall into blocks that only priced pairs connect; fill their results.

    Returns:
        `Optimum.largest_potential` and `Optimum.payment`.
    """
    outcome = results.outcome
    value, scale = outcome[:, OUTCOME.value], outcome[:, OUTCOME.scale]
    largest = np.maximum(np.abs(results.f).max(-1, initial=0.0), np.abs(results.g).max(-1, initial=0.0))
    payments = np.zeros(len(outcome))
    candidates = np.flatnonzero(scale > PRICE_LIMITS.price_ratio * value)
    if not candidates.size:
        return largest, payments
    bins = sum(w.shape[1] for w in weights)
    payments[candidates] = bins * np.finfo(np.float64).eps * scale[candidates]  # by rounding, at prices
    masses = weights[0][candidates].sum(1)
    costs = matrices[owners[candidates][:, None], results.cells[candidates, 0], results.cells[candidates, 1]]
    sure = largest_payment(costs, results.flows[candidates], masses, rounding)
    for k in candidates[scale[candidates] >= PRICE_LIMITS.price_ratio * sure * masses]:
        problem = _MatrixProblem(weights[0][k], matrices[owners[k]])
        plan = _plan(results, k)
        balanced = balance_blocks(problem, weights[1][k], plan, rounding=rounding, warns=warns)
        largest[k], payments[k] = balanced.largest_potential, balanced.payment
        if balanced.plan is not plan:
            _fill(results, k, problem, balanced.plan, balanced.q)
    return largest, payments


def _plan(results: Results, k: int) -> Plan:
    """Return the plan of problem k."""
    value, _, scale, pivots = results.outcome[k]
    return Plan(results.cells[k], results.flows[k], results.f[k], results.g[k], value, scale, int(pivots))


def _fill(results: Results, k: int, problem: _MatrixProblem, plan: Plan, q: np.ndarray) -> None:
    """Set the results of problem k to this plan, after the check of its gap."""
    p, (f, g) = problem.p, problem.extended(plan, q)
    gap = plan.value - (p @ f + q @ g)
    results.outcome[k] = plan.value, gap, plan.scale, plan.pivots
    check_outcome(results.outcome[k : k + 1], [p[None], q[None]], torch.Size())
    results.cells[k], results.flows[k], results.f[k], results.g[k] = plan.cells, plan.flows, f, g


@dataclass(frozen=True)
class _MatrixProblem:
    """`prices.PricedProblem` of weights p (n,) and a matrix (n, m)."""

    p: np.ndarray
    matrix: np.ndarray

    @cached_property
    def highest(self) -> float:
        return float(self.matrix.max())

    @cached_property
    def lowest(self) -> float:
        return float(self.matrix.min(where=self.matrix > 0, initial=np.inf))

    @property
    def zeros(self) -> int:
        return self.matrix.size - int(np.count_nonzero(self.matrix))

    def costs(self, cells: np.ndarray) -> np.ndarray:
        costs: np.ndarray = self.matrix[cells[0], cells[1]]
        return costs

    def blocks(self, price: float) -> Blocks:
        return blocks_of_matrix(self.matrix < price)

    def solve(self, q: np.ndarray, start: Plan) -> Plan:
        del start
        return _solve(self.p, q, self.matrix)

    def solve_blocks(self, q: np.ndarray, start: Plan, blocks: Blocks, price: float) -> Plan:
        plan = self._avoiding(self.matrix >= price, q)
        if plan is None:  # within a block some mass may have to pay one
            plan = self._avoiding(blocks.rows[:, None] != blocks.columns, q)
        return self.solve(q, start) if plan is None else plan

    def _avoiding(self, is_price: np.ndarray, q: np.ndarray) -> Plan | None:
        """Return the plan that pays none of these prices, or None if it has to.

        It is found with smaller prices, for potentials with more digits. An optimal plan that has no mass on lowered
        costs is optimal for the matrix too. A plan that uses a price of more than min(n, m) times the largest other
        cost costs more than one that avoids prices, by a cycle of at most 2 min(n, m) pairs. So no optimal plan uses
        lowered prices if any plan avoids them.
        """
        price = max(self.lowest, (min(self.matrix.shape) + 1) * float(self.matrix[~is_price].max(initial=0.0)))
        lowered = np.where(is_price, np.minimum(self.matrix, price), self.matrix).astype(self.matrix.dtype)
        plan = _solve(self.p, q, lowered)
        costs = lowered[plan.cells[0], plan.cells[1]]
        is_lowered = costs < self.costs(plan.cells)
        if plan.flows[is_lowered].max(initial=0.0) > rounding_of_flows(self.p, q):
            return None
        value = plan.value - float(plan.flows[is_lowered] @ costs[is_lowered])
        plan.flows[is_lowered] = 0.0
        return plan._replace(value=value)

    def slack(self, plan: Plan, q: np.ndarray, blocks: Blocks) -> np.ndarray:
        rows, columns = np.flatnonzero(self.p > 0), np.flatnonzero(q > 0)
        slack = np.full((blocks.count, blocks.count), np.inf)
        reduced = (self.matrix[np.ix_(rows, columns)] - plan.f[rows][:, None]) - plan.g[columns]
        np.minimum.at(slack, (blocks.rows[rows][:, None], blocks.columns[columns]), reduced)
        return slack

    def extended(self, plan: Plan, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the potentials, by c-transforms at bins without mass."""
        f, g, with_p, with_q = plan.f.copy(), plan.g.copy(), self.p > 0, q > 0
        f[~with_p] = (self.matrix[~with_p][:, with_q] - g[with_q]).min(1, initial=np.inf)
        g[~with_q] = (self.matrix[with_p][:, ~with_q] - f[with_p][:, None]).min(0, initial=np.inf)
        return f, g


def _solve(p: np.ndarray, q: np.ndarray, matrix: np.ndarray) -> Plan:
    results = solve_batch(p[None], q[None], matrix[None], np.zeros(1, np.int64), start=None, max_pivots=MAX_PIVOTS)
    check_outcome(results.outcome, [p[None], q[None]], torch.Size())
    return _plan(results, 0)
