"""Batches of dense transport problems by the network simplex, compiled, one problem per thread.

    min <C, P>  over  P >= 0,  P 1 = p,  P^T 1 = q

Only the bins with mass take part in the search (`_kernels.simplex`). Masses are whole numbers there: those of p's bins
one unit above a multiple of more than n, those of q's such multiples. So no partial sums of the two agree, no edge is
ever empty, every pivot lowers the cost, and the search ends without rules against cycling (the perturbation of
A. Charnes, 1952). The units are 2^-61 of the mass; the flows that are returned are summed up from the real masses along
the last tree.

The search starts from a greedy plan. Bins ship, one after the other, to their cheapest partners that are open, until
they are empty; each shipment closes one of its two bins, and hangs it below the other as a leaf. From potentials of a
similar problem, bins ship in the order of leaves of a shortest spanning tree by reduced costs, which is the tree of the
optimum if the potentials are still optimal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from otloss._kernels._compile import bits_of_float64, compiled
from otloss._kernels.simplex import (
    ORDER,
    PARENT,
    SPARE,
    VECTOR,
    best_key,
    largest,
    least,
    lower,
    number,
    place_mask,
    refresh,
    search,
)

UNITS = 2.0**61
NONE = -1


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
def _nearest(near: Any, mask: int) -> Any:
    """The place of the smallest of numbers >= 0."""
    key = np.int64(0x7FFFFFFFFFFFFFFF)
    for v in range(near.size):
        key = min(key, (bits_of_float64(near[v]) & ~mask) | v)
    return key & mask


@compiled(fastmath=VECTOR)
def _approach(near: Any, hint: Any, row: Any, price: Any, by: float, node: int) -> None:
    """Offer `node` to all bins of a side at row - by - price."""
    for j in range(near.size):
        away = max(row[j] - by - price[j], 0.0)
        closer = away < near[j]
        near[j] = away if closer else near[j]
        hint[j] = node if closer else hint[j]


@compiled()
def _shortest_tree(cost: Any, f: Any, g: Any, hint: Any, order: Any) -> None:
    """Prim's shortest spanning tree by reduced costs: nodes as they come in, and the node each comes in by."""
    n, m = cost.shape
    mask = place_mask(n + m)
    near = np.full(n + m, np.inf)
    # Bins that are in get the price -inf: nothing comes nearer to them.
    f_out, g_out = f.copy(), g.copy()
    v = 0
    hint[0] = NONE
    for t in range(n + m):
        if t:
            v = _nearest(near, mask)
        order[t] = v
        near[v] = np.inf
        if v < n:
            f_out[v] = -np.inf
            _approach(near[n:], hint[n:], cost[v], g_out, f[v], v)
        else:
            g_out[v - n] = -np.inf
            _approach(near[:n], hint[:n], cost[:, v - n], f_out, g[v - n], v)


@compiled()
def _cheapest(cost: Any, f_open: Any, g_open: Any, v: int, base: float) -> int:
    """The open node that v ships to at the least reduced cost."""
    n, m = cost.shape
    if v < n:
        mask = place_mask(m)
        return n + (best_key(cost[v], g_open, base, mask) & mask)
    mask = place_mask(n)
    return best_key(cost[:, v - n], f_open, base, mask) & mask


@compiled()
def _ship(cost: Any, left: Any, f_open: Any, g_open: Any, hint: Any, order: Any, tree: Any, flow: Any) -> None:
    """Empty the nodes from the end of `order`, first to the node in `hint`, then to the cheapest; build the tree."""
    n, m = cost.shape
    # So large that open bins have positive keys, whatever their price. Closed ones get the price -inf.
    prices = max(largest(f_open.reshape(1, n)), largest(g_open.reshape(1, m)))
    base = 2 * (largest(cost) + prices) or 1.0
    closed, done, t = tree[SPARE], 0, order.size
    other = 0
    while done < n + m - 1:
        t -= 1
        v = order[t]
        while left[v] > 0 and done < n + m - 1:
            w = hint[v]
            if w == NONE or left[w] == 0:
                w = _cheapest(cost, f_open, g_open, v, base)
            leaf, other = (v, w) if left[v] <= left[w] else (w, v)
            tree[PARENT, leaf], flow[leaf] = other, left[leaf]
            left[other] -= left[leaf]
            left[leaf] = 0
            if leaf < n:
                f_open[leaf] = -np.inf
            else:
                g_open[leaf - n] = -np.inf
            closed[done] = leaf
            done += 1
    closed[done], tree[PARENT, other] = other, other
    number(tree)


@compiled()
def _start(cost: Any, left: Any, columns: Any, given: Any, tree: Any, flow: Any) -> None:
    """A first tree, from potentials of q's bins or from nothing."""
    n, m = cost.shape
    hint = np.full(n + m, NONE)
    f, g = np.zeros(n), np.full(m, np.inf)
    if given.size == 0:
        for i in range(n):
            lower(g, cost[i], 0.0)
        _ship(cost, left, f, g, hint, np.arange(n), tree, flow)
        return
    for j in range(m):
        g[j] = given[columns[j]]
    for i in range(n):
        f[i] = least(cost[i], g)
    order = np.empty(n + m, np.int64)
    _shortest_tree(cost, f, g, hint, order)
    _ship(cost, left, f, g, hint, order, tree, flow)


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
        f_all[i] = least(matrix[i], g_all)
    price = np.full(g_all.size, -np.inf)
    g_all[:] = np.inf
    for i in rows:
        lower(g_all, matrix[i], f_all[i])
    for j in columns:
        price[j] = g_all[j]
    if rows.size < f_all.size:
        occupied = np.zeros(f_all.size, np.bool_)
        occupied[rows] = True
        for i in range(f_all.size):
            if not occupied[i]:
                f_all[i] = least(matrix[i], price)


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
            f[i] = least(matrix[i], g)
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
    _start(cost, left, columns, start, tree, flow)
    refresh(cost, tree, potential)
    pivots = search(cost, tree, flow, potential, most)
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
    end[0], end[1], end[2], end[3] = value, value - dual, largest(cost) * mass, pivots


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
