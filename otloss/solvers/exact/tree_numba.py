"""The network simplex on dense bipartite transport problems, compiled: trees, pivots, and the search for them.

A basis is a spanning tree on the n + m bins whose edges are cells of the plan. Potentials satisfy f_i + g_j = C_ij on
the edges. A pivot has three steps. A cell whose reduced cost C_ij - f_i - g_j is negative enters, and closes a cycle.
Mass moves around the cycle until one of its edges is empty. That edge leaves, and the part of the tree behind it is
attached again at the cell that entered.

Nodes are kept in preorder, so a subtree is a run of places. Its potentials change in one loop over the run, a pivot
exchanges runs, and two comparisons tell whether a node lies below another.

Source: R. Ahuja, T. Magnanti, J. Orlin, Network Flows, 1993, chapter 11.

Notation: node v < n is bin v of p, node n + j is bin j of q. `PREORDER` names the rows of `tree`. `flow[v]` is the
mass on the edge from v to its parent, in whole units that never tie (see `simplex_numba`); `potential` holds f, then g.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from otloss._numba.compile import bits_of_float64, float64_of_bits, inner, spliced
from otloss._numba.tasks import is_stopped


class PreorderTree(NamedTuple):
    """The rows of the array of a tree.

    Attributes:
        parent: the parent of each node; the root is its own.
        size: the number of nodes in the subtree of each node.
        position: the place of each node in preorder.
        order: the node at each place.
        spare: scratch.
    """

    parent: int = 0
    size: int = 1
    position: int = 2
    order: int = 3
    spare: int = 4


class PivotLimits(NamedTuple):
    """Numbers of the search.

    Attributes:
        rounding: a negative reduced cost counts as zero if its size is below this, relative to |C_ij| + |f_i| + |g_j|.
            Each of the two differences rounds by 1.1e-16 of these numbers.
        cells_of_a_look: cells looked at for each pivot, in at least two rows: with more of them pivots take longer,
            with fewer there are more pivots.
    """

    rounding: float = 4e-16
    cells_of_a_look: int = 512


PREORDER, PIVOT_LIMITS = PreorderTree(), PivotLimits()
VECTOR = {"contract", "nsz", "nnan", "reassoc"}


@inner(fastmath=VECTOR)
def best_key(row: Any, price: Any, base: float, mask: int, count: int) -> np.int64:
    """Return the bits of the largest base + price - row, whose last bits are replaced by its place; -1 if none is > 0.

    Positive floats have the order of their bits, and compilers vectorise the maximum of whole numbers. This finds the
    best cell and its place ten times as fast as a comparison of floats, with a relative resolution of about 2^-40.
    """
    best = np.int64(-1)
    for j in range(count):
        key = (bits_of_float64(base + price[j] - row[j]) & ~mask) | j
        best = key if key > best else best
    return best


@inner(fastmath=VECTOR)
def min_difference(row: Any, price: Any, count: int) -> float:
    """Return the smallest entry of row - price, as the smallest of whole numbers (see `_numba.compile.largest`)."""
    key = np.int64(0x7FFFFFFFFFFFFFFF)
    for j in range(count):
        bits = bits_of_float64(row[j] - price[j])
        ordered = bits ^ ((bits >> 63) & np.int64(0x7FFFFFFFFFFFFFFF))
        key = ordered if ordered < key else key
    return float64_of_bits(key ^ ((key >> 63) & np.int64(0x7FFFFFFFFFFFFFFF)))


@inner(fastmath=VECTOR)
def largest_size(cost: Any, n: int, m: int) -> float:
    """Return the largest absolute entry."""
    bits = np.int64(0)
    for i in range(n):
        row = cost[i]
        for j in range(m):
            size = bits_of_float64(abs(np.float64(row[j])))
            bits = size if size > bits else bits
    return float64_of_bits(bits)


@inner(fastmath=VECTOR)
def lower(bound: Any, row: Any, by: float, count: int) -> None:
    """bound = min(bound, row - by), entry by entry."""
    for j in range(count):
        price = row[j] - by
        bound[j] = price if price < bound[j] else bound[j]


@inner()
def place_mask(m: int) -> np.int64:
    """Return the bits that hold the numbers below m."""
    mask = np.int64(1)
    while mask < m:
        mask *= 2
    return mask - 1


@inner()
def number_nodes(tree: Any, count: int) -> None:
    """Write sizes and positions from the parents and the nodes in `spare`, in an order from leaves to root."""
    parent, size, position = tree[PREORDER.parent], tree[PREORDER.size], tree[PREORDER.position]
    order, leaves_first = tree[PREORDER.order], tree[PREORDER.spare]
    last = count - 1
    for v in range(count):
        size[v] = 1
    for t in range(last):
        size[parent[leaves_first[t]]] += size[leaves_first[t]]
    # Until all nodes are placed, `order` holds the next free place below each node.
    position[leaves_first[last]], order[leaves_first[last]] = 0, 1
    for t in range(last - 1, -1, -1):
        v = leaves_first[t]
        position[v] = order[parent[v]]
        order[parent[v]] += size[v]
        order[v] = position[v] + 1
    for v in range(last + 1):
        order[position[v]] = v


@inner()
def refresh(cost: Any, tree: Any, potential: Any, n: int, m: int) -> None:
    """Compute the potentials from the tree alone, without the rounding of earlier pivots."""
    order, parent = tree[PREORDER.order], tree[PREORDER.parent]
    potential[order[0]] = 0.0
    for t in range(1, n + m):
        v = order[t]
        up = parent[v]
        potential[v] = (cost[v, up - n] if v < n else cost[up, v - n]) - potential[up]


@inner()
def _shift_potentials(order: Any, potential: Any, begin: int, end: int, by: float, n: int) -> None:
    """Raise f and lower g at the nodes in places begin to end."""
    for t in range(begin, end):
        v = order[t]
        potential[v] += by if v < n else -by


@inner()
def _reverse_path(tree: Any, flow: Any, node: int, above: int, out: int, moved: int) -> None:
    """Make `node` the root of the subtree of `out` and hang it below `above`; write the nodes to `spare` in preorder.

    The order is, for each node on the path up to `out`, its old run without the run of the node before it on the path.
    """
    parent, size, position = tree[PREORDER.parent], tree[PREORDER.size], tree[PREORDER.position]
    order, spare, count = tree[PREORDER.order], tree[PREORDER.spare], tree[PREORDER.size, out]
    a = b = position[node] + size[node]
    size_before, filled = 0, 0
    while True:
        begin, end = position[node], position[node] + size[node]
        for t in range(begin, a):
            spare[filled] = order[t]
            filled += 1
        for t in range(b, end):
            spare[filled] = order[t]
            filled += 1
        a, b, old_size, old_parent, old_flow = begin, end, size[node], parent[node], flow[node]
        parent[node], flow[node], size[node] = above, moved, count - size_before
        if node == out:
            return
        above, node, moved, size_before = node, old_parent, old_flow, old_size


@inner()
def _reattach(tree: Any, flow: Any, node: int, above: int, out: int, moved: int) -> tuple[int, int]:
    """Attach the subtree of `out` below `above`, with `node` as its new root; return its new places."""
    size, position, order, spare = (
        tree[PREORDER.size],
        tree[PREORDER.position],
        tree[PREORDER.order],
        tree[PREORDER.spare],
    )
    begin, count = position[out], size[out]
    # The subtree goes directly behind `above` or behind the subtree of `above`, whichever is nearer.
    first, last = position[above] + 1, position[above] + size[above]
    _reverse_path(tree, flow, node, above, out, moved)
    if last <= begin or (first <= begin and begin - first < last - begin - count):
        target = last if last <= begin else first
        for t in range(begin - 1, target - 1, -1):
            order[t + count] = order[t]
        low, high = target, begin + count
    else:
        target = (first if first >= begin + count else last) - count
        for t in range(begin, target):
            order[t] = order[t + count]
        low, high = begin, target + count
    for t in range(count):
        order[target + t] = spare[t]
    for t in range(low, high):
        position[order[t]] = t
    return target, target + count


@spliced
def _pivot(tree: Any, flow: Any, potential: Any, row: int, column: int, reduced: float, n: int, m: int) -> None:
    """Let the cell of the nodes `row` and `column` enter the tree."""
    parent, size, position = tree[PREORDER.parent], tree[PREORDER.size], tree[PREORDER.position]
    # Mass enters at the new edge from row to column. It leaves every second edge of the path between them, from the
    # ends on.
    moved, out, behind_row = np.int64(2**62), row, True
    u, place = row, position[column]
    while not position[u] <= place < position[u] + size[u]:
        if u < n and flow[u] < moved:
            moved, out = flow[u], u
        u = parent[u]
    top, v = u, column
    while v != top:
        if v >= n and flow[v] < moved:
            moved, out, behind_row = flow[v], v, False
        v = parent[v]
    u, v = row, column
    while u != top:
        flow[u] += -moved if u < n else moved
        u = parent[u]
    while v != top:
        flow[v] += moved if v < n else -moved
        v = parent[v]
    node, above = (row, column) if behind_row else (column, row)
    old_parent = parent[out]
    begin, end = _reattach(tree, flow, node, above, out, moved)
    while old_parent != top:
        size[old_parent] -= end - begin
        old_parent = parent[old_parent]
    while above != top:
        size[above] += end - begin
        above = parent[above]
    # Potentials are defined up to a constant, so only the potentials of the smaller part change.
    by = reduced if behind_row else -reduced
    if 2 * (end - begin) <= n + m:
        _shift_potentials(tree[PREORDER.order], potential, begin, end, by, n)
    else:
        first = begin - begin  # numba would compile another version for a literal 0
        _shift_potentials(tree[PREORDER.order], potential, first, begin, -by, n)
        _shift_potentials(tree[PREORDER.order], potential, end, n + m, -by, n)


@spliced
def search(cost: Any, tree: Any, flow: Any, potential: Any, n: int, m: int, max_pivots: int, counter: Any) -> int:
    """Pivot until no reduced cost is negative; return the pivots made, or -1 where `max_pivots` do not suffice."""
    f, g = potential[:n], potential[n:]
    mask, rows_at_once = place_mask(m), max(PIVOT_LIMITS.cells_of_a_look // m, 2)
    rows_at_once = rows_at_once if rows_at_once < n else n
    pivots, i, rows_looked_at, rounding, is_refreshed = 0, 0, 0, PIVOT_LIMITS.rounding, True
    while True:
        best, row = np.int64(-1), 0
        for _ in range(rows_at_once):
            key = best_key(cost[i], g, f[i], mask, m)
            if key > best:
                best, row = key, i
            i = i + 1 if i + 1 < n else 0
        rows_looked_at += rows_at_once
        if best > 0:
            j = best & mask
            reduced = cost[row, j] - f[row] - g[j]
            if reduced < -rounding * (abs(cost[row, j]) + abs(f[row]) + abs(g[j])):
                if pivots == max_pivots or is_stopped(counter, -reduced, np.nan):
                    return -1
                _pivot(tree, flow, potential, row, n + j, reduced, n, m)
                pivots += 1
                rows_looked_at, is_refreshed = 0, False
        if rows_looked_at >= n:
            if is_refreshed:
                return pivots
            # Search once more with potentials free of the rounding of pivots. The larger tolerance makes the search
            # end.
            refresh(cost, tree, potential, n, m)
            rounding *= 2
            rows_looked_at, is_refreshed = 0, True
