"""Batches of dense transport problems by the network simplex, compiled, one problem per thread.

    min <C, P>  over  P >= 0,  P 1 = p,  P^T 1 = q

Only bins with mass take part in the search (`tree_numba`), which works with whole numbers in place of masses. The
numbers of q's bins are multiples of a number larger than n, and the numbers of p's bins are 1 above such multiples. So
no partial sums of the two sides agree, no edge is ever empty, and every pivot lowers the cost: the search ends without
rules against cycling (the perturbation of A. Charnes, 1952). The unit is 2^-61 of the mass. The flows that are returned
are sums of the real masses along the last tree.

The search starts from a greedy plan. One bin after the other ships to its cheapest open partners until it is empty.
Each shipment closes one of its two bins, which becomes a leaf below the other. If the caller gives the potentials of a
similar problem, bins ship in the order of leaves of a shortest spanning tree by reduced costs. Where these potentials
are still optimal, that is the tree of the optimum.

Kernels take arrays in three tuples. They have no names, since numba takes 2 microseconds more to read a NamedTuple:

    problems    p (B, n), q (B, m), matrices (K, n, m), owners (B,): problem k uses matrices[owners[k]]
    results     f, g, cells, flows and outcome of `allocate_results`, to be filled; pivots are -1 where `max_pivots` do
                not suffice
    memory      whole, real, tree and block of `scratch`, one tuple per thread
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from otloss._numba.compile import bits_of_float64, call_at, compiled, inner, spliced
from otloss._numba.tasks import next_task
from otloss.solvers.exact.results import OUTCOME
from otloss.solvers.exact.tree_numba import (
    PREORDER,
    VECTOR,
    best_key,
    largest_size,
    lower,
    min_difference,
    number_nodes,
    place_mask,
    refresh,
    search,
)

NONE = -1


class SimplexIntegers(NamedTuple):
    """The rows of the whole numbers of a thread.

    Attributes:
        units: the mass of each node that has not been shipped.
        flow: the mass on the edge from each node to its parent.
        hint: the node that each node ships to first, or NONE.
        rows, columns: the bins of p and of q with mass.
        sequence: the nodes in the order in which they enter the shortest tree.
    """

    units: int = 0
    flow: int = 1
    hint: int = 2
    rows: int = 3
    columns: int = 4
    sequence: int = 5


class SimplexFloats(NamedTuple):
    """The rows of the floats of a thread.

    Attributes:
        potential: the potentials of all nodes, f and then g.
        near: the distance of each node to the shortest tree.
        price_p, price_q: the prices of the bins of p and of q with mass.
        mass_p, mass_q: the masses of these bins.
    """

    potential: int = 0
    near: int = 1
    price_p: int = 2
    price_q: int = 3
    mass_p: int = 4
    mass_q: int = 5


INTEGERS, FLOATS = SimplexIntegers(), SimplexFloats()


def scratch(n: int, m: int, dtype: Any) -> tuple[np.ndarray, ...]:
    """Return the memory of a thread: (whole numbers, numbers, tree, costs)."""
    return (
        np.empty((6, n + m), np.int64),
        np.empty((6, n + m)),
        np.empty((5, n + m), np.int32),
        np.empty((n, m), dtype),
    )


def allocate_results(problems: int, n: int, m: int) -> tuple[np.ndarray, ...]:
    """Return the arrays that kernels fill: f, g, cells, flows and outcome."""
    return (
        np.empty((problems, n)),
        np.empty((problems, m)),
        np.empty((problems, 2, n + m - 1), np.int64),
        np.empty((problems, n + m - 1)),
        np.empty((problems, 4)),
    )


@inner()
def _write_occupied(weights: Any, places: Any, masses: Any) -> int:
    """Write the places and the masses of the bins with mass; return their number."""
    count = 0
    for k in range(weights.shape[0]):
        if weights[k] > 0:
            places[count], masses[count] = k, weights[k]
            count += 1
    return count


@inner()
def _sum(values: Any, count: int) -> float:
    total = 0.0
    for k in range(count):
        total += values[k]
    return total


@inner()
def whole_masses(p: Any, q: Any, n: int, m: int, units: Any) -> None:
    """Write the masses as whole numbers of units, balanced at the heaviest bin of q."""
    step = 1
    while step <= n:
        step *= 2
    per_side, mass_p, mass_q = 2.0**61 / step, _sum(p, n), _sum(q, m)
    total, heaviest = 0, 0
    for i in range(n):
        units[i] = int(p[i] / mass_p * per_side) * step + 1
        total += units[i]
    for j in range(m):
        whole = int(q[j] / mass_q * per_side)
        units[n + j] = (whole if whole > 1 else 1) * step
        total -= units[n + j]
        if q[j] > q[heaviest]:
            heaviest = j
    units[n + heaviest] += total


@inner(fastmath=VECTOR)
def _find_nearest(near: Any, mask: int, count: int) -> np.int64:
    """Return the place of the smallest of numbers >= 0."""
    key = np.int64(0x7FFFFFFFFFFFFFFF)
    for v in range(count):
        at = (bits_of_float64(near[v]) & ~mask) | v
        key = at if at < key else key
    return key & mask


@inner()
def _shortest_tree(cost: Any, f: Any, g: Any, n: int, m: int, near: Any, hint: Any, order: Any) -> None:
    """Write a shortest spanning tree by reduced costs, by Prim's algorithm.

    `order` gets the nodes in the order in which they enter, and `hint` the node by which each enters. f and g are
    overwritten: a bin in the tree gets the price -inf, so that no other bin comes nearer to it.
    """
    mask = place_mask(n + m)
    for k in range(n + m):
        near[k] = np.inf
    v = 0
    hint[0] = NONE
    for t in range(n + m):
        if t > 0:
            v = _find_nearest(near, mask, n + m)
        order[t] = v
        near[v] = np.inf
        if v < n:
            by, row = f[v], cost[v]
            f[v] = -np.inf
            for j in range(m):
                distance = row[j] - by - g[j]
                distance = distance if distance > 0 else 0.0
                if distance < near[n + j]:
                    near[n + j], hint[n + j] = distance, v
        else:
            by = g[v - n]
            g[v - n] = -np.inf
            for i in range(n):
                distance = cost[i, v - n] - by - f[i]
                distance = distance if distance > 0 else 0.0
                if distance < near[i]:
                    near[i], hint[i] = distance, v


@inner()
def _find_cheapest(cost: Any, f_open: Any, g_open: Any, n: int, m: int, v: int, base: float) -> int:
    """Return the open node that v ships to at the smallest reduced cost."""
    if v < n:
        mask = place_mask(m)
        return n + (best_key(cost[v], g_open, base, mask, m) & mask)
    best, place = -np.inf, 0
    for i in range(n):
        gain = f_open[i] - cost[i, v - n]
        if gain > best:
            best, place = gain, i
    return place


@spliced
def _ship(cost: Any, whole: Any, tree: Any, f_open: Any, g_open: Any, n: int, m: int, order: Any, last: int) -> None:
    """Empty the nodes order[last], order[last - 1], ..., first to the node in `hint`, then to the cheapest."""
    units, flow, hint = whole[INTEGERS.units], whole[INTEGERS.flow], whole[INTEGERS.hint]
    # A base so large that open bins have positive keys, whatever their price. Closed bins get the price -inf.
    prices = 0.0
    for i in range(n):
        prices = abs(f_open[i]) if abs(f_open[i]) > prices else prices
    for j in range(m):
        prices = abs(g_open[j]) if abs(g_open[j]) > prices else prices
    base = 2 * (largest_size(cost, n, m) + prices)
    base = base if base > 0 else 1.0
    parent, leaves, done, t = tree[PREORDER.parent], tree[PREORDER.spare], 0, last
    other = 0
    while done < n + m - 1:
        v = order[t]
        t -= 1
        while units[v] > 0 and done < n + m - 1:
            w = hint[v]
            if w == NONE or units[w] == 0:
                w = _find_cheapest(cost, f_open, g_open, n, m, v, base)
            leaf, other = v, w
            if units[v] > units[w]:
                leaf, other = w, v
            parent[leaf], flow[leaf] = other, units[leaf]
            units[other] -= units[leaf]
            units[leaf] = 0
            if leaf < n:
                f_open[leaf] = -np.inf
            else:
                g_open[leaf - n] = -np.inf
            leaves[done] = leaf
            done += 1
    leaves[done], parent[other] = other, other
    number_nodes(tree, n + m)


@inner()
def _write_first_prices(cost: Any, n: int, m: int, f: Any, g: Any) -> None:
    """Write the potentials of the greedy plan without a start: f is 0, and g the smallest cost of each column."""
    for i in range(n):
        f[i] = 0.0
    for j in range(m):
        g[j] = np.inf
    for i in range(n):
        lower(g, cost[i], 0.0, m)


@inner()
def _extend(matrix: Any, rows: Any, columns: Any, n: int, m: int, g: Any, price: Any, f_all: Any, g_all: Any) -> None:
    """Write feasible potentials of all bins, by c-transforms over the bins with mass, from potentials g of these."""
    width = g_all.shape[0]
    for j in range(width):
        g_all[j], price[j] = -np.inf, -np.inf
    for j in range(m):
        g_all[columns[j]] = g[j]
    for i in range(n):
        f_all[rows[i]] = min_difference(matrix[rows[i]], g_all, width)
    for j in range(width):
        g_all[j] = np.inf
    for i in range(n):
        lower(g_all, matrix[rows[i]], f_all[rows[i]], width)
    for j in range(m):
        price[columns[j]] = g_all[columns[j]]
    at = 0
    for i in range(f_all.shape[0]):
        if at < n and rows[at] == i:
            at += 1
        else:
            f_all[i] = min_difference(matrix[i], price, width)


@spliced
def _prepare(p: Any, q: Any, matrix: Any, whole: Any, real: Any, block: Any) -> tuple[int, int]:
    """Write places, masses and costs of the bins with mass; return their numbers. The masses get equal sums."""
    rows, columns, a, b = whole[INTEGERS.rows], whole[INTEGERS.columns], real[FLOATS.mass_p], real[FLOATS.mass_q]
    n, m = _write_occupied(p, rows, a), _write_occupied(q, columns, b)
    if n == 0 or m == 0:
        return 0, 0
    scale = _sum(a, n) / _sum(b, m)
    for j in range(m):
        b[j] *= scale
    if n < p.shape[0] or m < q.shape[0]:
        for i in range(n):
            source, target = matrix[rows[i]], block[i]
            for j in range(m):
                target[j] = source[columns[j]]
    whole_masses(a, b, n, m, whole[INTEGERS.units])
    hint = whole[INTEGERS.hint]
    for k in range(n + m):
        hint[k] = NONE
    return n, m


@inner()
def _write_flows(cost: Any, whole: Any, real: Any, tree: Any, n: int, m: int, cells: Any, flows: Any) -> float:
    """Write the cells of the tree and their real masses, summed up from the leaves; return what the plan costs."""
    rows, columns, excess = whole[INTEGERS.rows], whole[INTEGERS.columns], real[FLOATS.potential]
    parent, order, value = tree[PREORDER.parent], tree[PREORDER.order], 0.0
    for i in range(n):
        excess[i] = real[FLOATS.mass_p, i]
    for j in range(m):
        excess[n + j] = -real[FLOATS.mass_q, j]
    for t in range(n + m - 1, 0, -1):
        v = order[t]
        up = parent[v]
        excess[up] += excess[v]
        i, j = (v, up - n) if v < n else (up, v - n)
        # The search worked with rounded masses, so tiny flows may come out negative.
        moved = excess[v] if v < n else -excess[v]
        moved = moved if moved > 0 else 0.0
        cells[0, t - 1], cells[1, t - 1], flows[t - 1] = rows[i], columns[j], moved
        value += moved * cost[i, j]
    for t in range(n + m - 1, flows.shape[0]):
        cells[0, t], cells[1, t], flows[t] = 0, 0, 0.0
    return value


@compiled(by_address=True)
def search_from_tree(
    counter: Any, matrix: Any, cost: Any, n: int, m: int, max_pivots: int, result: Any, memory: Any
) -> None:
    """Search from the tree in `memory` on, and write the result of the problem.

    The search is the larger part of what solves a problem. Kernels call it once a problem by its address, so it is
    compiled once for all starts.
    """
    f, g, cells, flows, outcome = result
    whole, real, tree, _ = memory
    rows, columns = whole[INTEGERS.rows], whole[INTEGERS.columns]
    a, b, potential = real[FLOATS.mass_p], real[FLOATS.mass_q], real[FLOATS.potential]
    refresh(cost, tree, potential, n, m)
    pivots = search(cost, tree, whole[INTEGERS.flow], potential, n, m, max_pivots, counter)
    _extend(matrix, rows, columns, n, m, potential[n:], real[FLOATS.price_q], f, g)
    dual = 0.0
    for i in range(n):
        dual += a[i] * f[rows[i]]
    for j in range(m):
        dual += b[j] * g[columns[j]]
    value = _write_flows(cost, whole, real, tree, n, m, cells, flows)
    outcome[OUTCOME.value], outcome[OUTCOME.gap], outcome[OUTCOME.pivots] = value, value - dual, pivots
    outcome[OUTCOME.scale] = largest_size(cost, n, m) * _sum(a, n)


def build_search_call(dtype: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return `search_from_tree`, and arguments for costs of this dtype."""
    counter, cost, result = (
        np.zeros(3, np.int64),
        np.ones((1, 1), dtype),
        tuple(a[0] for a in allocate_results(1, 1, 1)),
    )
    return search_from_tree, (counter, cost, cost, 1, 1, 1, result, scratch(1, 1, dtype))


@compiled()
def solve_problems(
    counter: Any, search_address: Any, problems: Any, max_pivots: int, results: Any, memory: Any
) -> None:
    """Fill the results of the problems (see the module) in at most `max_pivots` pivots each.

    `search_address` is the address of `search_from_tree`.
    """
    p, q, matrices, owners = problems
    f, g, cells, flows, outcome = results
    whole, real, tree, block = memory
    sequence, prices_p, prices_q = whole[INTEGERS.sequence], real[FLOATS.price_p], real[FLOATS.price_q]
    while True:
        k = next_task(counter)
        if k >= p.shape[0]:
            return
        matrix = matrices[owners[k]]
        n, m = _prepare(p[k], q[k], matrix, whole, real, block)
        if n == 0:
            continue  # a problem without mass is left to the caller
        cost = matrix if n == p.shape[1] and m == q.shape[1] else block
        _write_first_prices(cost, n, m, prices_p, prices_q)
        for i in range(n):
            sequence[i] = i
        _ship(cost, whole, tree, prices_p, prices_q, n, m, sequence, n - 1)
        result = f[k], g[k], cells[k], flows[k], outcome[k]
        call_at(search_address, (counter, matrix, cost, n, m, max_pivots, result, memory))


@compiled()
def solve_problems_from(
    counter: Any, search_address: Any, start: Any, problems: Any, max_pivots: int, results: Any, memory: Any
) -> None:
    """Do the same from potentials `start` (B, m) of q's bins. It is a kernel of its own, since few calls need it."""
    p, q, matrices, owners = problems
    f, g, cells, flows, outcome = results
    whole, real, tree, block = memory
    sequence, columns = whole[INTEGERS.sequence], whole[INTEGERS.columns]
    prices_p, prices_q = real[FLOATS.price_p], real[FLOATS.price_q]
    open_p, open_q = real[FLOATS.potential], real[FLOATS.near]
    while True:
        k = next_task(counter)
        if k >= p.shape[0]:
            return
        matrix = matrices[owners[k]]
        n, m = _prepare(p[k], q[k], matrix, whole, real, block)
        if n == 0:
            continue
        cost = matrix if n == p.shape[1] and m == q.shape[1] else block
        for j in range(m):
            prices_q[j] = start[k, columns[j]]
        for i in range(n):
            prices_p[i] = min_difference(cost[i], prices_q, m)
            open_p[i] = prices_p[i]
        _shortest_tree(cost, open_p, prices_q, n, m, open_q, whole[INTEGERS.hint], sequence)
        for j in range(m):
            prices_q[j] = start[k, columns[j]]
        _ship(cost, whole, tree, prices_p, prices_q, n, m, sequence, n + m - 1)
        result = f[k], g[k], cells[k], flows[k], outcome[k]
        call_at(search_address, (counter, matrix, cost, n, m, max_pivots, result, memory))
