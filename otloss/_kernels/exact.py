"""The network simplex on dense bipartite transport problems, compiled, one problem per thread.

    min <C, P>  over  P >= 0,  P 1 = p,  P^T 1 = q

A basis is a spanning tree on the n + m bins whose edges are cells of the plan. Potentials satisfy f_i + g_j = C_ij on the
edges. A pivot brings in a cell whose reduced cost C_ij - f_i - g_j is negative, moves mass around the cycle it closes, and
drops the edge that runs empty; the part of the tree behind that edge is hung up again at the entering cell
(R. Ahuja, T. Magnanti, J. Orlin, Network Flows, 1993, chapter 11).

Masses are whole numbers during the search. Those of p's bins carry one unit above a multiple of more than n, q's are
multiples: then no partial sums of the two agree, no edge is ever empty, every pivot lowers the cost, and the search ends
without rules against cycling (the perturbation of A. Charnes, 1952). The units are 2^-61 of the mass; the flows that are
returned are summed up from the real masses along the last tree.

Notation: node v < n is bin v of p, node n + j is bin j of q; `tree[v, PARENT]` and so on; `flow[v]` is the mass on the
edge from v to its parent; `potential` holds f, then g. All of it concerns the bins with mass only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from otloss._kernels._compile import _bits_of_float64, _float64_of_bits, compiled

PARENT, SIZE, POSITION, ORDER, SPARE = range(5)
UNITS = 2.0**61
# Reduced costs above this, relative to the numbers they are the difference of, count as zero.
ROUNDING = 4e-16
# Cells looked at for each pivot; at least two rows.
LOOK_AT = 512
VECTOR = {"contract", "nsz", "nnan", "reassoc"}


@compiled()
def _whole_masses(p: Any, q: Any, left: Any) -> None:
    """Write the masses as whole numbers of units, balanced at the heaviest bin of q."""
    n, m = p.size, q.size
    step = 1
    while step <= n:
        step *= 2
    units, mass_p, mass_q = UNITS / step, p.sum(), q.sum()
    total = 0
    for i in range(n):
        left[i] = int(p[i] / mass_p * units) * step + 1
        total += left[i]
    heaviest = 0
    for j in range(m):
        left[n + j] = max(int(q[j] / mass_q * units), 1) * step
        total -= left[n + j]
        if q[j] > q[heaviest]:
            heaviest = j
    left[n + heaviest] += total


@compiled(fastmath=VECTOR)
def _best(row: Any, price: Any, base: float, mask: int) -> int:
    """The largest of base + price - row, with the last bits of the number exchanged for its place; -1 if none is > 0.

    Positive numbers are ordered as their bits are, and compilers vectorise the maximum of whole numbers: this finds the
    best cell and its place ten times faster than comparing numbers does, at a resolution of 2^-40 or so.
    """
    best = np.int64(-1)
    for j in range(row.size):
        key = (_bits_of_float64(base + price[j] - row[j]) & ~mask) | j
        best = max(best, key)
    return best


@compiled(fastmath=VECTOR)
def _least(row: Any, price: Any) -> float:
    """The least of row - price; whole numbers are ordered like the numbers once negative ones are turned over."""
    least = np.int64(0x7FFFFFFFFFFFFFFF)
    for j in range(row.size):
        bits = _bits_of_float64(row[j] - price[j])
        least = min(least, bits ^ ((bits >> 63) & np.int64(0x7FFFFFFFFFFFFFFF)))
    return _float64_of_bits(least ^ ((least >> 63) & np.int64(0x7FFFFFFFFFFFFFFF)))


@compiled(fastmath=VECTOR)
def _largest(cost: Any) -> float:
    """The largest absolute entry."""
    largest = np.int64(0)
    for i in range(cost.shape[0]):
        row = cost[i]
        for j in range(row.size):
            largest = max(largest, _bits_of_float64(abs(np.float64(row[j]))))
    return _float64_of_bits(largest)


@compiled(fastmath=VECTOR)
def _lower(bound: Any, row: Any, by: float) -> None:
    """bound = min(bound, row - by), entry by entry."""
    for j in range(row.size):
        bound[j] = min(bound[j], row[j] - by)


@compiled()
def _mask(m: int) -> int:
    """The bits that hold the numbers below m."""
    mask = np.int64(1)
    while mask < m:
        mask *= 2
    return mask - 1


@compiled()
def _greedy_start(cost: Any, left: Any, price: Any, tree: Any, flow: Any) -> None:
    """Bin after bin of p ships to its cheapest open bins of q. Each shipment closes one bin, a leaf at the other."""
    n, m = cost.shape
    closed = tree[SPARE]
    mask = _mask(m)
    # So large that open bins have positive keys, whatever their price. Closed ones get the price -inf.
    base = 2 * (_largest(cost) + _largest(price.reshape(1, m))) or 1.0
    done = 0
    for i in range(n):
        while True:
            j = _best(cost[i], price, base, mask) & mask
            column = n + j
            if left[column] < left[i]:
                leaf, other = column, i
                price[j] = -np.inf
            else:
                leaf, other = i, column
            tree[PARENT, leaf], flow[leaf] = other, left[leaf]
            left[other] -= left[leaf]
            closed[done] = leaf
            done += 1
            if leaf == i:
                break
    root = closed[done] = n + j
    tree[PARENT, root] = root
    _number(tree)


@compiled()
def _number(tree: Any) -> None:
    """Sizes and positions from the parents, with the nodes in SPARE from the leaves to the root."""
    parent, size, position, order, closed = tree[PARENT], tree[SIZE], tree[POSITION], tree[ORDER], tree[SPARE]
    size[:] = 1
    last = closed.size - 1
    for t in range(last):
        size[parent[closed[t]]] += size[closed[t]]
    # `order` serves as the next free place below each node, until all are placed.
    position[closed[last]], order[closed[last]] = 0, 1
    for t in range(last - 1, -1, -1):
        v = closed[t]
        position[v] = order[parent[v]]
        order[parent[v]] += size[v]
        order[v] = position[v] + 1
    for v in range(last + 1):
        order[position[v]] = v


@compiled()
def _refresh(cost: Any, tree: Any, potential: Any) -> None:
    """Potentials from the tree alone."""
    n = cost.shape[0]
    potential[tree[ORDER, 0]] = 0.0
    for t in range(1, potential.size):
        v = tree[ORDER, t]
        up = tree[PARENT, v]
        potential[v] = (cost[v, up - n] if v < n else cost[up, v - n]) - potential[up]


@compiled()
def _raise(order: Any, potential: Any, begin: int, end: int, by: float, n: int) -> None:
    """Raise f and lower g at the nodes in places begin to end."""
    for t in range(begin, end):
        v = order[t]
        potential[v] += by if v < n else -by


@compiled()
def _hang(tree: Any, flow: Any, node: int, above: int, out: int, moved: int) -> tuple[int, int]:
    """Hang the subtree of `out` below `above` by its `node`; return its new places."""
    parent, size, position, order, spare = tree[PARENT], tree[SIZE], tree[POSITION], tree[ORDER], tree[SPARE]
    begin, count = position[out], size[out]
    # Behind `above` itself or behind all of its subtree, whichever is nearer.
    first, last = position[above] + 1, position[above] + size[above]
    # In preorder the subtree turned over is its old pieces, from the inside out.
    a = b = position[node]
    inner, filled = 0, 0
    while True:
        old_a, old_b, old_size, old_parent, old_flow = a, b, size[node], parent[node], flow[node]
        a, b = position[node], position[node] + old_size
        if inner == 0:
            old_a = old_b = b
        for t in range(a, old_a):
            spare[filled] = order[t]
            filled += 1
        for t in range(old_b, b):
            spare[filled] = order[t]
            filled += 1
        parent[node], flow[node], size[node] = above, moved, count - inner
        if node == out:
            break
        above, node, moved, inner = node, old_parent, old_flow, old_size
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


@compiled()
def _pivot(tree: Any, flow: Any, potential: Any, row: int, column: int, reduced: float, n: int) -> None:
    """Bring in the cell of nodes `row` and `column`."""
    parent, size, position = tree[PARENT], tree[SIZE], tree[POSITION]
    # Mass that enters from row to column leaves every second edge of the path between them, the ends included.
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
    left_behind = parent[out]
    begin, end = _hang(tree, flow, node, above, out, moved)
    while left_behind != top:
        size[left_behind] -= end - begin
        left_behind = parent[left_behind]
    while above != top:
        size[above] += end - begin
        above = parent[above]
    # Potentials count up to a constant: the smaller part moves.
    by = reduced if behind_row else -reduced
    if 2 * (end - begin) <= flow.size:
        _raise(tree[ORDER], potential, begin, end, by, n)
    else:
        _raise(tree[ORDER], potential, 0, begin, -by, n)
        _raise(tree[ORDER], potential, end, flow.size, -by, n)


@compiled()
def _search(cost: Any, tree: Any, flow: Any, potential: Any, most: int) -> int:
    """Pivot until no reduced cost is negative; return the pivots made, or -1 where `most` are not enough."""
    n, m = cost.shape
    f, g = potential[:n], potential[n:]
    mask, together = _mask(m), min(n, max(2, LOOK_AT // m))
    pivots, i, clean, rounding, fresh = 0, 0, 0, ROUNDING, True
    while True:
        best, row = np.int64(-1), 0
        for _ in range(together):
            key = _best(cost[i], g, f[i], mask)
            if key > best:
                best, row = key, i
            i = i + 1 if i + 1 < n else 0
        clean += together
        if best > 0:
            j = best & mask
            reduced = cost[row, j] - f[row] - g[j]
            if reduced < -rounding * (abs(cost[row, j]) + abs(f[row]) + abs(g[j])):
                if pivots == most:
                    return -1
                _pivot(tree, flow, potential, row, n + j, reduced, n)
                pivots += 1
                clean, fresh = 0, False
        if clean >= n:
            if fresh:
                return pivots
            # What rounding has added up over the pivots goes; the same small numbers cannot keep the search going.
            _refresh(cost, tree, potential)
            rounding *= 2
            clean, fresh = 0, True


@compiled()
def _flows(tree: Any, p: Any, q: Any, excess: Any) -> None:
    """Turn `excess` into the real mass on the edge above each node, summed up from the leaves."""
    n = p.size
    excess[:n] = p
    excess[n:] = -q
    for t in range(excess.size - 1, 0, -1):
        v = tree[ORDER, t]
        excess[tree[PARENT, v]] += excess[v]
        # Flows of nearly nothing may come out negative: the search worked with rounded masses.
        excess[v] = max(excess[v] if v < n else -excess[v], 0.0)


@compiled()
def _extend(matrix: Any, rows: Any, columns: Any, g: Any, f_all: Any, g_all: Any) -> None:
    """Feasible potentials of all bins by c-transforms over the bins with mass, from potentials g of those."""
    g_all[:] = -np.inf
    for j in range(columns.size):
        g_all[columns[j]] = g[j]
    for i in rows:
        f_all[i] = _least(matrix[i], g_all)
    price = np.full(g_all.size, -np.inf)
    g_all[:] = np.inf
    for i in rows:
        _lower(g_all, matrix[i], f_all[i])
    for j in columns:
        price[j] = g_all[j]
    if rows.size < f_all.size:
        occupied = np.zeros(f_all.size, np.bool_)
        occupied[rows] = True
        for i in range(f_all.size):
            if not occupied[i]:
                f_all[i] = _least(matrix[i], price)


@compiled()
def _prices(cost: Any, columns: Any, start: Any) -> Any:
    """The prices of q's bins that the start goes by: those given, or the least costs."""
    price = np.full(columns.size, np.inf)
    if start.size:
        for j in range(columns.size):
            price[j] = start[columns[j]]
    else:
        for i in range(cost.shape[0]):
            _lower(price, cost[i], 0.0)
    return price


@compiled()
def _solve(
    p: Any, q: Any, matrix: Any, start: Any, most: int, f: Any, g: Any, cells: Any, flows: Any, end: Any
) -> None:
    """Solve one problem, as `solve_in_turn` says."""
    rows, columns = np.flatnonzero(p), np.flatnonzero(q)
    n, m = rows.size, columns.size
    cells[:], flows[:] = 0, 0.0
    if n == 0 or m == 0:
        # Without mass f_i + g_j <= C_ij is all that is left: the first grain pays the least of its row.
        g[:] = 0.0
        for i in range(p.size):
            f[i] = _least(matrix[i], g)
        end[:] = 0.0
        return
    a, b, cost = p, q, matrix
    if n < p.size or m < q.size:
        a, b, cost = p[rows], q[columns], np.empty((n, m), matrix.dtype)
        for i in range(n):
            for j in range(m):
                cost[i, j] = matrix[rows[i], columns[j]]
    mass = a.sum()
    b = b * (mass / b.sum())
    left, flow = np.empty(n + m, np.int64), np.empty(n + m, np.int64)
    tree, potential = np.empty((5, n + m), np.int32), np.empty(n + m)
    _whole_masses(a, b, left)
    _greedy_start(cost, left, _prices(cost, columns, start), tree, flow)
    _refresh(cost, tree, potential)
    pivots = _search(cost, tree, flow, potential, most)
    _extend(matrix, rows, columns, potential[n:], f, g)
    dual = 0.0
    for i in range(n):
        dual += a[i] * f[rows[i]]
    for j in range(m):
        dual += b[j] * g[columns[j]]
    _flows(tree, a, b, potential)
    value = 0.0
    for t in range(1, n + m):
        v = tree[ORDER, t]
        i, j = (v, tree[PARENT, v] - n) if v < n else (tree[PARENT, v], v - n)
        cells[0, t - 1], cells[1, t - 1], flows[t - 1] = rows[i], columns[j], potential[v]
        value += potential[v] * cost[i, j]
    end[0], end[1], end[2], end[3] = value, value - dual, _largest(cost) * mass, pivots


@compiled()
def solve_in_turn(
    p: Any, q: Any, matrices: Any, owners: Any, start: Any, most: int, f: Any, g: Any, cells: Any, flows: Any, ends: Any
) -> None:
    """Solve all problems on this thread: p (B, n), q (B, m), matrices (K, n, m) of which problem k uses owners[k].

    `start` (B, m) holds potentials of q's bins to start from, or (B, 0) nothing. Fills f, g, cells (B, 2, n + m - 1),
    flows, and `ends` (B, 4): value, duality gap, the scale the gap is to be judged by, pivots (-1: more than `most`).
    """
    for k in range(p.shape[0]):
        _solve(p[k], q[k], matrices[owners[k]], start[k], most, f[k], g[k], cells[k], flows[k], ends[k])


@compiled(parallel=True)
def solve_at_once(
    p: Any, q: Any, matrices: Any, owners: Any, start: Any, most: int, f: Any, g: Any, cells: Any, flows: Any, ends: Any
) -> None:
    """`solve_in_turn`, on all threads."""
    for k in prange(p.shape[0]):
        _solve(p[k], q[k], matrices[owners[k]], start[k], most, f[k], g[k], cells[k], flows[k], ends[k])
