"""Exact problems in blocks: bins that only pairs of far larger costs connect, as prices for pairs that must not be.

Where the masses of both sides agree in each block, the optimal plan stays within the blocks, and the potentials of the
blocks may shift against each other: f + c and g - c in a block, with the constraint c_k - c_l <= S_kl, the least
C_ij - f_i - g_j over rows of block k and columns of block l. But weights carry rounding, so that the masses of a block
agree up to rounding only. The simplex then sends what is left over at the price, which may cost more than all else, and
its potentials differ from block to block by the price, beside which the differences within a block lose their digits.
So masses that rounding explains stay where they are, at no cost, and the shifts are the smallest that the constraints
allow.

Source of the shifts: E. McShane, Extension of range of functions, 1934. For wanted shifts d, min over l of
d_l + S_kl (S closed under sums along paths) meets the constraints, and is d where d does.
"""

from __future__ import annotations

import warnings

import numpy as np

from otloss.solvers.convergence import ConvergenceWarning, level_of_the_caller

LEAST_RATIO = 1e3  # of a price to the largest cost that the plan pays
LEAST_SHARE = 0.01  # of the value, from which mass that may be rounding counts
ROUNDINGS = 4.0  # of the weights' dtype: the share of the mass that rounding may leave over in a block


class Blocks:
    """The blocks of one problem and the shifts of their potentials.

    Attributes:
        rows, columns: (n,) and (m,), the number of the block of each bin.
        count: the number of blocks.
    """

    def __init__(self, rows: np.ndarray, columns: np.ndarray) -> None:
        self.rows, self.columns = rows, columns
        self.count = int(max(rows.max(initial=-1), columns.max(initial=-1))) + 1

    def shifts(self, f: np.ndarray, g: np.ndarray, slack: np.ndarray) -> np.ndarray:
        """Return c (count,) with c_k - c_l <= slack[k, l], after which f and g have equal means in a block if possible.

        f and g are 0 on bins without mass, which do not count.
        """
        mean_f, mean_g = (
            np.bincount(block, values, self.count) / np.maximum(np.bincount(block, values != 0, self.count), 1)
            for block, values in ((self.rows, f), (self.columns, g))
        )
        wanted = (mean_g - mean_f) / 2
        shifts = wanted
        for _ in range(self.count):
            closer = np.minimum(shifts, (shifts + np.maximum(slack, 0.0)).min(1))
            if np.array_equal(closer, shifts):
                break
            shifts = closer
        return shifts


def price_of(costs: np.ndarray, flows: np.ndarray, rounding: float) -> float:
    """Return the cost from which pairs count as priced; infinite where the plan pays nothing.

    `rounding` is the mass of a cell of the plan that rounding explains.
    """
    largest = float(costs[flows > rounding].max(initial=0.0))
    return LEAST_RATIO * largest if largest > 0 else np.inf


def warn_of_prices(costs: np.ndarray, flows: np.ndarray, tolerance: float) -> None:
    """Warn where a share `tolerance` of the mass, which may be rounding, pays far more than the rest and counts.

    Args:
        costs, flows: of the cells of a plan.
    """
    order = np.argsort(-costs)
    is_light = np.cumsum(flows[order]) <= tolerance * flows.sum()
    light, rest = order[is_light], order[~is_light]
    ordinary = float(costs[rest].max(initial=0.0))
    at_a_price = light[costs[light] > LEAST_RATIO * ordinary]
    if ordinary == 0 or costs[at_a_price] @ flows[at_a_price] <= LEAST_SHARE * (costs @ flows):
        return
    warnings.warn(
        f"{flows[at_a_price].sum() / flows.sum():.2g} of the mass moves at costs of up to "
        f"{costs[at_a_price].max():.3g}, where all other mass pays at most {ordinary:.3g}. If that is rounding of the "
        "weights, scale them so that p and q have the same mass in each group of bins that exchanges mass, or give "
        "+inf for the pairs that must not be used.",
        ConvergenceWarning,
        stacklevel=level_of_the_caller(),
    )


def rounding_of(mass: float, bins: int, unit: float) -> float:
    """Return the mass that the rounding of weights, with this unit of their dtype, may leave over in a block."""
    return mass * (ROUNDINGS * unit + bins * float(np.finfo(np.float64).eps) / 2)


def blocks_of_matrix(is_cheap: np.ndarray) -> Blocks:
    """Return the connected parts of the graph whose edges are the pairs (row, column) that are cheap."""
    n, m = is_cheap.shape
    rows, columns = np.full(n, -1), np.full(m, -1)
    count = 0
    for start in range(n):
        if rows[start] >= 0:
            continue
        new_rows = np.array([start])
        rows[start] = count
        while new_rows.size:
            new_columns = np.flatnonzero(is_cheap[new_rows].any(0) & (columns < 0))
            columns[new_columns] = count
            new_rows = np.flatnonzero(is_cheap[:, new_columns].any(1) & (rows < 0))
            rows[new_rows] = count
        count += 1
    alone = np.flatnonzero(columns < 0)
    columns[alone] = count + np.arange(len(alone))
    return Blocks(rows, columns)


def blocks_of_cells(rows: np.ndarray, columns: np.ndarray, n: int, m: int) -> Blocks:
    """Return the same for the graph whose edges are these cells."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = coo_array((np.ones(len(rows), bool), (rows, columns + n)), (n + m, n + m))
    _, labels = connected_components(edges, directed=False)
    return Blocks(labels[:n], labels[n:])


def blocks_of_plan(
    matrix: np.ndarray, cells: np.ndarray, flows: np.ndarray, rounding: float
) -> Blocks | None:  # fmt: skip
    """Return the blocks that only priced pairs connect; None for one block.

    Pairs at which the plan pays with more mass than rounding explains are not priced, so they connect blocks.
    """
    price = price_of(matrix[cells[0], cells[1]], flows, rounding)
    if not matrix.max() >= price:
        return None
    blocks = blocks_of_matrix(matrix < price)
    return blocks if blocks.count > 1 else None


def with_capped_prices(matrix: np.ndarray, blocks: Blocks) -> np.ndarray:
    """Return the matrix with smaller prices between blocks, which the optimal plan avoids all the same.

    A plan that uses such a pair differs from one that does not by a cycle of at most 2 min(n, m) pairs.
    """
    inside = blocks.rows[:, None] == blocks.columns
    price = (min(matrix.shape) + 1) * float(matrix[inside].max(initial=0.0))
    return np.where(inside, matrix, np.minimum(matrix, price)).astype(matrix.dtype)


def settle(
    p: np.ndarray, q: np.ndarray, matrix: np.ndarray, blocks: Blocks, f: np.ndarray, g: np.ndarray, cells: np.ndarray,
    flows: np.ndarray,
) -> tuple[float, float]:  # fmt: skip
    """Shift the potentials of the blocks and drop the flows between them, in place; return the value and the gap.

    Args:
        p, q: (n,) and (m,), weights of equal mass.
        matrix: (n, m).
        f, g: (n,) and (m,), optimal potentials, by c-transforms at bins without mass.
        cells, flows: (2, cells) and (cells,), the optimal plan.
    """
    with_p, with_q = p > 0, q > 0
    slack = np.full((blocks.count, blocks.count), np.inf)
    reduced = (matrix - f[:, None]) - g
    np.minimum.at(slack, (blocks.rows[with_p][:, None], blocks.columns[with_q]), reduced[np.ix_(with_p, with_q)])
    shifts = blocks.shifts(np.where(with_p, f, 0.0), np.where(with_q, g, 0.0), slack)
    f += shifts[blocks.rows]
    g -= shifts[blocks.columns]
    f[~with_p] = (matrix[~with_p][:, with_q] - g[with_q]).min(1, initial=np.inf)
    g[~with_q] = (matrix[with_p][:, ~with_q] - f[with_p][:, None]).min(0, initial=np.inf)
    flows[blocks.rows[cells[0]] != blocks.columns[cells[1]]] = 0.0
    value = float(matrix[cells[0], cells[1]].astype(np.float64) @ flows)
    return value, value - float(p @ f + q @ g)
