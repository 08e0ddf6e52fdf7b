"""Exact problems in blocks: bins that only pairs of far larger costs connect, as prices for pairs that must not be.

Where the masses of both sides agree in each block, the optimal plan stays within the blocks, and the potentials of the
blocks may shift against each other: f + c and g - c in a block, with the constraint c_k - c_l <= S_kl, the least
C_ij - f_i - g_j over rows of block k and columns of block l. But weights carry rounding, so that the masses of a block
agree up to rounding only. The simplex then sends what is left over at the price, which may cost more than all else, and
its potentials differ from block to block by the price, beside which the differences within a block lose their digits.
So what the rounding of a block's own weights explains stays where it is, at no cost, and the shifts are the smallest
that the constraints allow. Blocks whose masses differ by more count as one block.

Source of the shifts: E. McShane, Extension of range of functions, 1934. For wanted shifts d, min over l of
d_l + S_kl (S closed under sums along paths) meets the constraints, and is d where d does.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch

from otloss.solvers.convergence import ConvergenceWarning, level_of_the_caller


@dataclass(frozen=True)
class Limits:
    """What counts as a price and as rounding.

    Attributes:
        price_ratio: of a price to the largest cost that the plan pays.
        roundings: by how many roundings of a block's weights its masses may differ.
        near_roundings: up to how many roundings a difference is named, because it may be meant as none.
        edges_per_bin: up to how many edges for each bin a graph of cheap pairs is searched as a list.
    """

    price_ratio: float = 1e3
    roundings: float = 4.0
    near_roundings: float = 100.0
    edges_per_bin: int = 16


LIMITS = Limits()


@dataclass(frozen=True)
class Blocks:
    """The blocks of one problem.

    Attributes:
        rows, columns: (n,) and (m,), the number of the block of each bin.
        count: the number of blocks.
    """

    rows: np.ndarray
    columns: np.ndarray
    count: int

    def masses(self, p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the masses (count,) of p and of q in each block."""
        return np.bincount(self.rows, p, self.count), np.bincount(self.columns, q, self.count)

    def imbalance(self, p: np.ndarray, q: np.ndarray) -> np.ndarray:
        """Return (count,) the difference of both masses as a share of the larger one, 0 without mass."""
        mass_p, mass_q = self.masses(p, q)
        larger = np.maximum(mass_p, mass_q)
        return np.abs(mass_p - mass_q) / np.where(larger > 0, larger, 1.0)

    def of_equal_mass(self, p: np.ndarray, q: np.ndarray, unit: float) -> Blocks | None:
        """Return the blocks of equal mass; blocks whose masses differ by more than rounding are joined to one.

        The result is None for a single block, and where the joined block is not balanced either: mass has to leave it.
        """
        tolerance = LIMITS.roundings * unit + (len(p) + len(q)) * float(np.finfo(np.float64).eps)
        differs = self.imbalance(p, q) > tolerance
        if not differs.any():
            return self if self.count > 1 else None
        numbers, count = np.where(differs, 0, np.cumsum(~differs)), 1 + int((~differs).sum())
        joined = Blocks(numbers[self.rows], numbers[self.columns], count)
        return joined if count > 1 and joined.imbalance(p, q)[0] <= tolerance else None

    def shift(self, p: np.ndarray, q: np.ndarray, f: np.ndarray, g: np.ndarray, slack: np.ndarray) -> None:
        """Shift potentials in place: f by c_k in block k, g by -c_k, with c_k - c_l <= slack[k, l].

        After that f and g have equal means in each block, over the bins with mass, as far as the slack allows.
        """
        mean_f, mean_g = (
            np.bincount(block, values, self.count) / np.maximum(np.bincount(block, values != 0, self.count), 1)
            for block, values in ((self.rows, np.where(p > 0, f, 0.0)), (self.columns, np.where(q > 0, g, 0.0)))
        )
        shifts = (mean_g - mean_f) / 2
        for _ in range(self.count):
            closer = np.minimum(shifts, (shifts + np.maximum(slack, 0.0)).min(1))
            if np.array_equal(closer, shifts):
                break
            shifts = closer
        f += shifts[self.rows]
        g -= shifts[self.columns]


def unit_of(*dtypes: torch.dtype) -> float:
    """Return the rounding unit of weights of the widest of these dtypes; 16 bits are too few to tell a difference."""
    return min(max(torch.finfo(dtype).eps for dtype in dtypes), torch.finfo(torch.float32).eps)


def price_of(costs: np.ndarray, flows: np.ndarray, mass: np.ndarray | float, unit: float) -> np.ndarray:
    """Return the cost (...) from which pairs count as priced; infinite where the plan pays nothing.

    Args:
        costs, flows: (..., cells), of the cells of plans. Flows that may be rounding do not count.
        mass: (...), of the plans.
    """
    may_be_rounding = flows <= LIMITS.near_roundings * unit * np.asarray(mass)[..., None]
    largest = np.where(may_be_rounding, 0.0, costs).max(-1)
    return np.where(largest > 0, LIMITS.price_ratio * largest, np.inf)


def blocks_of_matrix(is_cheap: np.ndarray) -> Blocks:
    """Return the connected parts of the graph whose edges are the pairs (row, column) that are cheap."""
    n, m = is_cheap.shape
    if np.count_nonzero(is_cheap) <= LIMITS.edges_per_bin * (n + m):
        cells = np.nonzero(is_cheap)
        return blocks_of_cells(cells[0], cells[1], n, m)
    rows, columns, count = np.full(n, -1), np.full(m, -1), 0
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
    return Blocks(rows, columns, count + len(alone))


def blocks_of_cells(rows: np.ndarray, columns: np.ndarray, n: int, m: int) -> Blocks:
    """Return the connected parts of the graph whose edges are these cells of an n by m matrix."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = coo_array((np.ones(len(rows), bool), (rows, columns + n)), (n + m, n + m))
    count, labels = connected_components(edges, directed=False)
    return Blocks(labels[:n], labels[n:], int(count))


def blocks_of_plan(
    p: np.ndarray, q: np.ndarray, matrix: np.ndarray, cells: np.ndarray, flows: np.ndarray, *, price: float,
    unit: float, warns: bool,
) -> Blocks | None:  # fmt: skip
    """Return the blocks of equal mass that only pairs of at least this price connect; None for one block.

    With `warns`, blocks of nearly equal mass whose difference pays a price are named.
    """
    blocks = blocks_of_matrix(matrix < price)
    equal = blocks.of_equal_mass(p, q, unit)
    if warns and equal is not blocks:
        costs, imbalance = matrix[cells[0], cells[1]], blocks.imbalance(p, q)
        is_near = (imbalance > LIMITS.roundings * unit) & (imbalance <= LIMITS.near_roundings * unit)
        crossing = (costs >= price) & (is_near[blocks.rows[cells[0]]] | is_near[blocks.columns[cells[1]]])
        _warn_of_prices(float(flows[crossing].sum()), float(costs[crossing].max(initial=0.0)), price)
    return equal


def _warn_of_prices(mass: float, cost: float, price: float) -> None:
    if mass == 0:
        return
    warnings.warn(
        f"a mass of {mass:.2g} moves at costs of up to {cost:.3g}, where all but rounding pays at most "
        f"{price / LIMITS.price_ratio:.3g}: the masses of p and q in a group of bins differ by a few roundings. Scale "
        "the weights so that they agree, or give +inf for the pairs that must not be used.",
        ConvergenceWarning,
        stacklevel=level_of_the_caller(),
    )


def with_capped_prices(matrix: np.ndarray, blocks: Blocks) -> np.ndarray:
    """Return the matrix with smaller prices between blocks, which the optimal plan avoids all the same.

    A plan that uses such a pair differs from one that does not by a cycle of at most 2 min(n, m) pairs.
    """
    inside = blocks.rows[:, None] == blocks.columns
    price = (min(matrix.shape) + 1) * float(matrix[inside].max(initial=0.0))
    return np.where(inside, matrix, np.minimum(matrix, price)).astype(matrix.dtype)


def shift_blocks(
    blocks: Blocks, p: np.ndarray, q: np.ndarray, matrix: np.ndarray, *, f: np.ndarray, g: np.ndarray
) -> None:
    """Shift optimal potentials f (n,) and g (m,) of the blocks, in place; by c-transforms at bins without mass."""
    with_p, with_q = p > 0, q > 0
    slack = np.full((blocks.count, blocks.count), np.inf)
    reduced = (matrix - f[:, None]) - g
    np.minimum.at(slack, (blocks.rows[with_p][:, None], blocks.columns[with_q]), reduced[np.ix_(with_p, with_q)])
    blocks.shift(p, q, f, g, slack)
    f[~with_p] = (matrix[~with_p][:, with_q] - g[with_q]).min(1, initial=np.inf)
    g[~with_q] = (matrix[with_p][:, ~with_q] - f[with_p][:, None]).min(0, initial=np.inf)
