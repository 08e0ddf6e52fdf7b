"""Problems in blocks: bins that only pairs of far larger costs connect, as prices for pairs that must not be used.

Weights carry rounding, so that the masses of both sides in a block may differ by some roundings. The optimum sends what
is left over at the price, which may cost more than all else, and its potentials differ from block to block by the
price, beside which the differences within a block lose their digits. So where rounding explains the difference, the
weights of q are scaled to the mass of p in the block, and the problem is solved again. That is the exact solution for
weights that differ from the given ones by their rounding, and it sends mass between blocks where that pays.

The potentials of blocks that exchange nothing may shift against each other: f + c and g - c in a block, with the
constraint c_k - c_l <= S_kl, the least C_ij - f_i - g_j over rows of block k and columns of block l. They get the
smallest values that the constraints allow.

Source of the shifts: E. McShane, Extension of range of functions, 1934. For wanted shifts d, min over l of
d_l + S_kl (S closed under sums along paths) meets the constraints, and is d where d does.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from otloss.solvers.convergence import ConvergenceWarning, level_of_the_caller


@dataclass(frozen=True)
class PriceLimits:
    """What counts as a price and as rounding.

    Attributes:
        price_ratio: of a price to the largest cost that the plan pays.
        roundings: by how many roundings of a block's weights its masses may differ.
        near_roundings: up to how many roundings a difference is named, because it may be meant as none; roundings of
            at least `rounding_of_others`.
        edges_per_bin: up to how many edges for each bin a graph of cheap pairs is searched as a list.
        blocks_per_bin: up to how many blocks for each bin of either side are groups of bins, where nothing else tells:
            with more, most bins are alone, as they are wherever p is near q.
        small_matrix: entries of matrices that are searched together.
        shift_rounding: of the largest potential, by how much shifted ones may exceed costs.
        max_blocks: up to how many blocks are shifted against each other: memory grows with the square.
    """

    price_ratio: float = 1e3
    roundings: float = 4.0
    near_roundings: float = 100.0
    rounding_of_others: float = 1e-8
    edges_per_bin: int = 16
    blocks_per_bin: float = 0.375
    small_matrix: int = 2**14
    shift_rounding: float = 1e-9
    max_blocks: int = 1024


PRICE_LIMITS = PriceLimits()


class Balanced(NamedTuple):
    """Weights of q that have the masses of p in blocks.

    Attributes:
        q: (m,), the weights.
        differs: (count,), whether the masses of a block differ by more than rounding.
        lacking: by how much the masses of all these blocks differ together.
    """

    q: np.ndarray
    differs: np.ndarray
    lacking: float


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

    def members(self, labels: np.ndarray) -> list[np.ndarray]:
        """Return the bins of each block, in order, from `rows` or `columns`."""
        return np.split(np.argsort(labels, kind="stable"), np.cumsum(np.bincount(labels, minlength=self.count))[:-1])

    def differing(self, p: np.ndarray, q: np.ndarray, rounding: float) -> np.ndarray:
        """Return by how much the masses of p and q differ (count,), 0 where it is a few roundings of themselves."""
        mass_p, mass_q = self.masses(p, q)
        tolerance = PRICE_LIMITS.roundings * rounding + (len(p) + len(q)) * float(np.finfo(np.float64).eps)
        difference = np.abs(mass_p - mass_q)
        return np.where(difference > tolerance * np.maximum(mass_p, mass_q), difference, 0.0)

    def balanced(self, p: np.ndarray, q: np.ndarray, rounding: float) -> Balanced:
        """Return q with the masses of p in each block where rounding explains the difference.

        What the other blocks lack or hold too much of comes from these, in proportion to their masses: it is less than
        their rounding too.
        """
        mass_p, mass_q = self.masses(p, q)
        differs = self.differing(p, q, rounding) > 0
        lacking = float((mass_p - mass_q)[differs].sum())
        total = float(mass_p[~differs].sum())
        if abs(lacking) > PRICE_LIMITS.near_roundings * rounding * total:
            return Balanced(q, np.ones_like(differs), lacking)
        factor = 1 + (lacking / total if total > 0 else 0.0)
        scales = np.where(~differs & (mass_q > 0), factor * mass_p / np.where(mass_q > 0, mass_q, 1.0), 1.0)
        return Balanced(q * scales[self.columns], differs, lacking)

    def merged(self, mask: np.ndarray) -> Blocks:
        """Return the blocks with the chosen ones (count,) as a single one."""
        if not mask.any():
            return self
        numbers = np.where(mask, 0, np.cumsum(~mask))
        return Blocks(numbers[self.rows], numbers[self.columns], 1 + int((~mask).sum()))

    def joined_by(self, cells: np.ndarray, flows: np.ndarray, differs: np.ndarray, rounding: float) -> Blocks:
        """Return the blocks that exchange nothing: cells (2, cells) of a tree join blocks by their flows (cells,).

        Flows up to `rounding` do not count, but blocks that `differ` exchange mass even if it is rounded to zero.
        """
        joins = (flows > rounding) | differs[self.rows[cells[0]]] | differs[self.columns[cells[1]]]
        cells = cells[:, joins]
        count, parts = _connected_parts(self.rows[cells[0]], self.columns[cells[1]], self.count)
        return Blocks(parts[self.rows], parts[self.columns], count)

    def payment(self, p: np.ndarray, q: np.ndarray, price: float) -> float:
        """Return the most that the masses of p and q in each block pay for their difference, at this largest cost."""
        mass_p, mass_q = self.masses(p, q)
        return float(np.abs(mass_p - mass_q).sum()) / 2 * price

    def shift(self, p: np.ndarray, q: np.ndarray, f: np.ndarray, g: np.ndarray, slack: np.ndarray) -> bool:
        """Shift potentials in place: f by c_k in block k, g by -c_k, with c_k - c_l <= slack[k, l].

        Return whether there are such c, up to rounding.

        After that f and g have equal medians in each block, over the bins with mass, as far as the slack allows: where
        some bins of a block pay a price, most keep potentials of the size of their costs.
        """
        shifts = (_medians(g, self.columns, q > 0, self.count) - _medians(f, self.rows, p > 0, self.count)) / 2
        slack = np.where(np.eye(self.count, dtype=bool), 0.0, slack)
        for _ in range(self.count):  # shortest paths by Bellman and Ford: slack may be negative between blocks
            closer = np.minimum(shifts, (shifts + slack).min(1))
            if np.array_equal(closer, shifts):
                break
            shifts = closer
        f += shifts[self.rows]
        g -= shifts[self.columns]
        rounding = PRICE_LIMITS.shift_rounding * max(np.abs(f).max(initial=0.0), np.abs(g).max(initial=0.0))
        return bool((shifts[:, None] - shifts <= slack + rounding).all())


def _medians(values: np.ndarray, blocks: np.ndarray, counts: np.ndarray, count: int) -> np.ndarray:
    """Return the (lower) median (count,) of the values that count in each block, 0 without any."""
    values, blocks = values[counts], blocks[counts]
    order = np.lexsort((values, blocks))
    sizes = np.bincount(blocks, minlength=count)
    middle = np.cumsum(sizes) - sizes + (sizes - 1).clip(0) // 2
    has_values = sizes > 0
    medians = np.zeros(count)
    medians[has_values] = values[order][middle[has_values]]
    return medians


def largest_payment(costs: np.ndarray, flows: np.ndarray, mass: np.ndarray | float, unit: float) -> np.ndarray:
    """Return the largest cost (...) that plans pay for more than what may be rounding.

    Args:
        costs, flows: (..., cells), of the cells of plans.
        mass: (...), of the plans.
    """
    share = PRICE_LIMITS.near_roundings * max(unit, PRICE_LIMITS.rounding_of_others)
    may_be_rounding = flows <= share * np.asarray(mass)[..., None]
    largest: np.ndarray = np.where(may_be_rounding, 0.0, costs).max(-1)
    return largest


def blocks_of_matrix(is_cheap: np.ndarray) -> Blocks:
    """Return the connected parts of the graph whose edges are the pairs (row, column) that are cheap."""
    n, m = is_cheap.shape
    if np.count_nonzero(is_cheap) <= PRICE_LIMITS.edges_per_bin * (n + m):
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


def blocks_of_matrices(are_cheap: np.ndarray) -> list[Blocks]:
    """Return the blocks of each matrix (count, n, m). Small ones make one graph: each search takes 0.2 ms to begin."""
    count, n, m = are_cheap.shape
    if count == 1 or n * m > PRICE_LIMITS.small_matrix:
        return [blocks_of_matrix(is_cheap) for is_cheap in are_cheap]
    matrix, row, column = np.nonzero(are_cheap)
    first = matrix * (n + m)
    _, labels = _connected_parts(first + row, first + n + column, count * (n + m))
    labels = labels.reshape(count, n + m)
    labels -= labels.min(1, keepdims=True)  # parts are numbered by their first node
    return [Blocks(parts[:n], parts[n:], int(parts.max()) + 1) for parts in labels]


def blocks_of_cells(rows: np.ndarray, columns: np.ndarray, n: int, m: int) -> Blocks:
    """Return the connected parts of the graph whose edges are these cells of an n by m matrix."""
    count, labels = _connected_parts(rows, columns + n, n + m)
    return Blocks(labels[:n], labels[n:], count)


def _connected_parts(first: np.ndarray, second: np.ndarray, nodes: int) -> tuple[int, np.ndarray]:
    """Return the number of connected parts of a graph with these edges, and the part of each node."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = coo_array((np.ones(len(first), bool), (first, second)), (nodes, nodes))
    count, labels = connected_components(edges, directed=False)
    return int(count), labels


def warn_of_prices(
    blocks: Blocks, p: np.ndarray, q: np.ndarray, flows: np.ndarray, cells: np.ndarray, costs: np.ndarray, *,
    price: float, rounding: float,
) -> None:  # fmt: skip
    """Warn of mass that pays a price because the masses of a block differ by little, which may be meant as nothing."""
    mass_p, mass_q = blocks.masses(p, q)
    difference, mass = np.abs(mass_p - mass_q), np.maximum(mass_p, mass_q)
    # A few more roundings, or the roundings of a whole from which a light block was subtracted, are near; weights in
    # float64 are often rounded to float32.
    near = np.maximum(
        PRICE_LIMITS.near_roundings * max(rounding, PRICE_LIMITS.rounding_of_others) * mass, rounding * mass_p.sum()
    )
    tolerance = PRICE_LIMITS.roundings * rounding * mass
    is_near = (difference > tolerance) & (difference <= near) & (mass_p > 0) & (mass_q > 0)
    # What has to leave the other blocks explains as much of the difference, as in light bins without a partner.
    elsewhere = difference[(difference > tolerance) & ~is_near].sum()
    if difference[is_near].sum() <= elsewhere + tolerance[is_near].sum():
        return
    crossing = (costs >= price) & (is_near[blocks.rows[cells[0]]] | is_near[blocks.columns[cells[1]]])
    amounts, moved = flows * costs, float(flows[crossing].sum())
    if amounts[crossing].sum() <= 1e-3 * amounts[~crossing].sum():
        return
    warnings.warn(
        f"a mass of {moved:.2g} moves at costs of up to {costs[crossing].max():.3g}, where all but rounding pays at "
        f"most {price / PRICE_LIMITS.price_ratio:.3g}: the masses of p and q in a group of bins differ by little. "
        "Scale the weights so that they agree, or give +inf for the pairs that must not be used.",
        ConvergenceWarning,
        stacklevel=level_of_the_caller(),
    )


def rounding_of_flows(p: np.ndarray, q: np.ndarray) -> float:
    """Return the mass up to which flows between weights in float64 may be rounding."""
    return (len(p) + len(q)) * float(np.finfo(np.float64).eps) * float(p.sum())
