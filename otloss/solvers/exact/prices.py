"""Large finite costs as prices: problems whose bins only such pairs connect are solved again, block by block.

`blocks` has the formulas.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from otloss.solvers.exact.batch import solve_batch
from otloss.solvers.exact.blocks import (
    PRICE_LIMITS,
    Blocks,
    blocks_of_matrix,
    price_of,
    rounding_of_flows,
    shift_blocks,
    warn_of_prices,
    with_lowered_prices,
)
from otloss.solvers.exact.results import MAX_PIVOTS, OUTCOME, Results, check_outcome


def _largest_potential(f: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Return the largest absolute value (...) of f and g."""
    return np.maximum(np.abs(f).max(-1, initial=0.0), np.abs(g).max(-1, initial=0.0))


def settle_prices(
    weights: list[np.ndarray], matrices: np.ndarray, owners: np.ndarray, results: Results, rounding: float, *,
    warns: bool,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Solve problems again whose bins fall into blocks that only priced pairs connect; fill their results.

    The second time the masses of both sides agree in each block where rounding explains their difference.

    Returns:
        `Optimum.largest_potential` and `Optimum.payment`.
    """
    outcome = results.outcome
    value, scale = outcome[:, OUTCOME.value], outcome[:, OUTCOME.scale]
    largest, payments = _largest_potential(results.f, results.g), np.zeros(len(outcome))
    candidates = np.flatnonzero(scale > PRICE_LIMITS.price_ratio * value)
    if not candidates.size:
        return largest, payments
    bins = sum(w.shape[1] for w in weights)
    payments[candidates] = bins * np.finfo(np.float64).eps * scale[candidates]  # by rounding, at prices
    masses = weights[0][candidates].sum(1)
    costs = matrices[owners[candidates][:, None], results.cells[candidates, 0], results.cells[candidates, 1]]
    prices = price_of(costs, results.flows[candidates], masses, rounding)
    has_prices = scale[candidates] >= prices * masses
    for k, price in zip(candidates[has_prices], prices[has_prices], strict=True):
        single = Results(*(array[k : k + 1] for array in results))  # views, so that their problem is filled
        p, q, matrix = weights[0][k], weights[1][k], matrices[owners[k]]
        settled = _settle_problem(
            p, q, matrix, single, price=price, rounding=rounding, payment=payments[k], warns=warns
        )
        if settled is not None:
            largest[k], payments[k] = settled
    return largest, payments


class _Settled(NamedTuple):
    """`Optimum.largest_potential` and `Optimum.payment` of a problem that was solved again."""

    largest_potential: float
    payment: float


def _settle_problem(
    p: np.ndarray, q: np.ndarray, matrix: np.ndarray, results: Results, *, price: float, rounding: float,
    payment: float, warns: bool,
) -> _Settled | None:  # fmt: skip
    """Solve one problem again and fill its results; None where it stays as it is. `payment` is the one so far."""
    f, g, cells, flows = results.f[0], results.g[0], results.cells[0], results.flows[0]
    blocks = blocks_of_matrix(matrix < price)
    balanced = blocks.balanced(p, q, rounding)
    if warns and balanced.differs.any():
        warn_of_prices(blocks, p, q, flows, cells, matrix, price=price, rounding=rounding)
    if blocks.count == 1 or balanced.differs.all():
        return None
    first_value = results.outcome[0, OUTCOME.value]
    if balanced.differs.any():
        again = _solve_single(p, balanced.q, matrix)
    else:
        again = _avoid_prices(p, balanced.q, matrix, price, blocks)
    for old, new in zip(results, again, strict=True):
        old[0] = new[0]
    largest = float(_largest_potential(f, g))
    joined = blocks.joined_by(cells, flows, balanced.differs, rounding_of_flows(p, balanced.q))
    shift_blocks(joined, p, balanced.q, matrix, f=f, g=g)
    value = results.outcome[0, OUTCOME.value]
    results.outcome[0, OUTCOME.gap] = value - (p @ f + balanced.q @ g)
    check_outcome(results.outcome, [p[None], balanced.q[None]], torch.Size())
    payment += abs(first_value - value)
    if not balanced.differs.any():
        payment += blocks.payment(p, q, float(matrix.max()))
    return _Settled(largest, payment)


def _solve_single(p: np.ndarray, q: np.ndarray, matrix: np.ndarray) -> Results:
    results = solve_batch(p[None], q[None], matrix[None], np.zeros(1, np.int64), start=None, max_pivots=MAX_PIVOTS)
    check_outcome(results.outcome, [p[None], q[None]], torch.Size())
    return results


def _avoid_prices(p: np.ndarray, q: np.ndarray, matrix: np.ndarray, price: float, blocks: Blocks) -> Results:
    """Return results of a problem whose blocks have equal masses, where no mass pays a price between blocks."""
    crosses, rounding = blocks.rows[:, None] != blocks.columns, rounding_of_flows(p, q)
    for is_price in (matrix >= price, crosses):  # within a block some mass may have to pay one
        lowered = with_lowered_prices(matrix, is_price)
        results = _solve_single(p, q, lowered)
        (rows, columns), flows = results.cells[0], results.flows[0]
        is_lowered = lowered[rows, columns] < matrix[rows, columns]
        if flows[is_lowered].max(initial=0.0) <= rounding:
            break
    is_rounding = is_lowered & (flows <= rounding)
    results.outcome[0, OUTCOME.value] -= flows[is_rounding] @ lowered[rows, columns][is_rounding]
    flows[is_rounding] = 0.0
    return results
