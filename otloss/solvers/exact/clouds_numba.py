"""The network simplex between two clouds of points on few cells of the plan, and the search for cells, compiled.

Pivots follow the rule of `tree_numba`, and masses are whole numbers as in `simplex_numba`. Everything that takes n m
time or memory there is different here:

- Cells are a list, with their costs. Each pivot looks at some of them, and the cell of the least reduced cost enters.
- The children of a node are a linked list. So a pivot takes time in proportion to its cycle and to the smaller part of
  the tree.
- `near_cells` searches for the cells to list. It selects columns for boxes of rows by the bound of `softmin_numba`, so
  in low dimension it never looks at most pairs of points.

Notation: node v < n is point v of x, node n + j is point j of y. `LINKED` names the rows of `tree`. `flow[v]`, in whole
units, and `cost[v]` belong to the edge from v to its parent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from otloss._numba.compile import compiled, inner, spliced
from otloss._numba.tasks import is_stopped, next_task
from otloss.costs.order import BLOCK, ROWS
from otloss.costs.pair_cost_numba import pair_cost
from otloss.costs.softmin_numba import CHUNK, PIECE, add_slack, distances_of, keep_columns, scores_in_box, subtract
from otloss.solvers.exact.simplex_numba import NONE, whole_masses
from otloss.solvers.exact.tree_numba import PIVOT_LIMITS


class LinkedTree(NamedTuple):
    """The rows of the array of a tree.

    Attributes:
        parent: the parent of each node; the root is its own.
        size: the number of nodes in the subtree of each node.
        child: the first child of each node.
        following, previous: the neighbours of each node among the children of its parent.
    """

    parent: int = 0
    size: int = 1
    child: int = 2
    following: int = 3
    previous: int = 4


LINKED = LinkedTree()


# ---- cells -------------------------------------------------------------------------------------------------------


@inner(fastmath=False)
def _insert(value: float, best: Any, count: int) -> int:
    """Insert a number into the list of the largest so far, in falling order; return the length of the list."""
    size = best.shape[0]
    if count == size and value <= best[size - 1]:
        return count
    at = count if count < size else size - 1
    count = at + 1
    while at > 0 and best[at - 1] < value:
        best[at] = best[at - 1]
        at -= 1
    best[at] = value
    return count


@inner(allocates=True, fastmath=False)
def _select(
    points: Any, above: Any, y: Any, g: Any, count: int, metric: int, best: Any, bounds: Any, slack: Any, near: Any,
    near_g: Any,
) -> int:  # fmt: skip
    """Copy the columns that may be among the K best of any of the points, with C - g below the point's `above`.

    `best` has K numbers. Let the score of column j be g_j - C_ij, and r the best column at the centre of the box.
    Within the box, the difference of the scores of j and r changes by at most `slack`.
    """
    half = np.empty(points.shape[1])
    top = scores_in_box(points, y, g, count, metric, half, bounds)
    if top < 0:
        return 0
    for j in range(count):
        slack[j] = 0.0
    add_slack(y, top, half, metric, slack[:count])
    largest_gap = -np.inf
    for i in range(points.shape[0]):
        largest_gap = max(largest_gap, above[i] + g[top] - pair_cost(points[i], y[:, top], metric))
    threshold, count_of_best = bounds[top] - largest_gap, 0
    for start in range(0, count, CHUNK):
        stop, largest_bound = min(start + CHUNK, count), -np.inf
        for j in range(start, stop):
            low = bounds[j] - slack[j]
            largest_bound = low if low > largest_bound else largest_bound
        if count_of_best < best.shape[0] or largest_bound > best[best.shape[0] - 1]:
            for j in range(start, stop):
                count_of_best = _insert(bounds[j] - slack[j], best, count_of_best)
    if count_of_best == best.shape[0]:
        threshold = max(threshold, best[count_of_best - 1])
    for j in range(count):
        bounds[j] += slack[j]
    return keep_columns(y, g, count, bounds, threshold, near, near_g)


def allocate_near_cells(n: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `columns` and `prices` for `near_cells`."""
    return np.empty((n, count), np.int64), np.empty((n, count))


@compiled(allocates=True)
def near_cells(counter: Any, x: Any, y: Any, g: Any, above: Any, metric: int, columns: Any, prices: Any) -> None:
    """Write for each point of x the K columns (n, K) of the smallest C - g, out of those with C - g below `above` (n,).

    Where there are fewer, NONE fills the row. The points x (n, d) and y, as `as_columns` returns it, are in orders in
    which neighbours follow each other. `prices` (n, K) is scratch.
    """
    (n, d), m, width = x.shape, y.shape[1], columns.shape[1]
    scores, distances, best = np.empty(PIECE), np.empty(PIECE), np.empty(width)
    bounds, slack = np.empty(m + CHUNK), np.empty(m)
    near, near_g = np.empty((2, *y.shape)), np.empty((2, m))
    while True:
        first = next_task(counter) * ROWS * BLOCK
        if first >= n:
            return
        last = min(first + ROWS * BLOCK, n)
        boxed = _select(
            x[first:last], above[first:last], y, g, m, metric, best, bounds, slack, near[0], near_g[0]
        )  # fmt: skip
        size = 0
        for i in range(first, last):
            if i % ROWS == 0:
                stop = min(i + ROWS, last)
                size = _select(
                    x[i:stop], above[i:stop], near[0], near_g[0], boxed, metric, best, bounds, slack, near[1], near_g[1]
                )
            # Insert into the list of the best columns, the best first.
            count = 0
            for start in range(0, size, PIECE):
                in_piece = size - start if size - start < PIECE else PIECE
                distances_of(x[i], near[1], start, metric, distances, in_piece)
                subtract(near_g[1, start : start + in_piece], distances, scores)
                for j in range(in_piece):
                    price = -scores[j]
                    if price >= above[i] or (count == width and price >= prices[i, width - 1]):
                        continue
                    at = count if count < width else width - 1
                    count = at + 1
                    while at > 0 and prices[i, at - 1] > price:
                        prices[i, at], columns[i, at] = prices[i, at - 1], columns[i, at - 1]
                        at -= 1
                    prices[i, at], columns[i, at] = price, np.int64(near[1, d, start + j])
            for k in range(count, width):
                columns[i, k] = NONE


# ---- the tree ----------------------------------------------------------------------------------------------------


@inner()
def _detach(tree: Any, v: int) -> None:
    up, following, previous = tree[LINKED.parent, v], tree[LINKED.following, v], tree[LINKED.previous, v]
    if previous == NONE:
        tree[LINKED.child, up] = following
    else:
        tree[LINKED.following, previous] = following
    if following != NONE:
        tree[LINKED.previous, following] = previous


@inner()
def _attach(tree: Any, v: int, up: int) -> None:
    first = tree[LINKED.child, up]
    tree[LINKED.parent, v], tree[LINKED.following, v], tree[LINKED.previous, v] = up, first, NONE
    if first != NONE:
        tree[LINKED.previous, first] = v
    tree[LINKED.child, up] = v


@inner()
def _after_subtree(tree: Any, v: int, root: int) -> int:
    """Return the node that follows the subtree of v in the preorder of the subtree of `root`; `root` after the last."""
    while v != root and tree[LINKED.following, v] == NONE:
        v = tree[LINKED.parent, v]
    return v if v == root else tree[LINKED.following, v]


@inner()
def _after(tree: Any, v: int, root: int) -> int:
    """Return the node that follows v in the preorder of the subtree of `root`; `root` after the last."""
    return tree[LINKED.child, v] if tree[LINKED.child, v] != NONE else _after_subtree(tree, v, root)


@inner()
def _refresh(tree: Any, cost: Any, potential: Any, root: int) -> None:
    """Compute the potentials from the tree alone, without the rounding of earlier pivots."""
    potential[root] = 0.0
    v = _after(tree, root, root)
    while v != root:
        potential[v] = cost[v] - potential[tree[LINKED.parent, v]]
        v = _after(tree, v, root)


@inner()
def _ship(tree: Any, flow: Any, cost: Any, units: Any, v: int, w: int, price: float) -> tuple[int, int]:
    """Ship all units that remain at the lighter of two open nodes to the other one. Return (lighter, other).

    The lighter node is closed by that, and becomes a leaf below the other one.
    """
    leaf, other = (v, w) if units[v] <= units[w] else (w, v)
    tree[LINKED.parent, leaf], flow[leaf], cost[leaf] = other, units[leaf], price
    units[other] -= units[leaf]
    units[leaf] = 0
    return leaf, other


@inner()
def _link_children(tree: Any, leaves_first: Any, count: int) -> None:
    """Write sizes and children from the parents of the first `count` nodes of `leaves_first`, leaves first."""
    for v in range(count + 1):
        tree[LINKED.size, v], tree[LINKED.child, v] = 1, NONE
        tree[LINKED.following, v], tree[LINKED.previous, v] = NONE, NONE
    for t in range(count):
        v = leaves_first[t]
        tree[LINKED.size, tree[LINKED.parent, v]] += tree[LINKED.size, v]
        _attach(tree, v, tree[LINKED.parent, v])


@compiled(allocates=True)
def first_tree(
    x: Any, y: Any, p: Any, q: Any, g: Any, metric: int, rows: Any, columns: Any
) -> tuple[int, Any, Any, Any, Any]:  # fmt: skip
    """Return a greedy plan along these cells: the root of its tree, `tree`, `flow`, `cost`, and the potentials.

    Points ship in the order of the cells. What remains then ships in the order of x, to the cheapest open columns. The
    last two open nodes are the root and its last child.
    """
    n, m = x.shape[0], y.shape[0]
    tree, flow = np.empty((5, n + m), np.int32), np.empty(n + m, np.int64)
    cost, potential = np.empty(n + m), np.empty(n + m)
    units, leaves_first, open_columns = np.empty(n + m, np.int64), np.empty(n + m, np.int64), np.empty(m, np.int64)
    whole_masses(p, q, n, m, units)
    other: Any = np.int64(0)
    done, opened, last = 0, 0, n + m - 1
    for k in range(rows.shape[0]):
        i, v = rows[k], columns[k] + n
        if units[i] > 0 and units[v] > 0 and done < last:
            leaves_first[done], other = _ship(tree, flow, cost, units, i, v, pair_cost(x[i], y[v - n], metric))
            done += 1
    for j in range(m):
        if units[n + j] > 0:
            open_columns[opened] = j
            opened += 1
    for i in range(n):
        while units[i] > 0 and done < last:
            best, place = np.inf, 0
            for k in range(opened):
                price = pair_cost(x[i], y[open_columns[k]], metric) - g[open_columns[k]]
                if price < best:
                    best, place = price, k
            j = open_columns[place]
            leaves_first[done], other = _ship(tree, flow, cost, units, i, n + j, pair_cost(x[i], y[j], metric))
            if leaves_first[done] == n + j:
                opened -= 1
                open_columns[place] = open_columns[opened]
            done += 1
    tree[LINKED.parent, other] = other
    _link_children(tree, leaves_first, last)
    _refresh(tree, cost, potential, other)
    return other, tree, flow, cost, potential


@inner()
def _shift_potentials(tree: Any, potential: Any, node: int, root: int, by: float, n: int) -> None:
    """Raise f and lower g in the subtree of `node`, or do the opposite in the rest of the tree if that is smaller."""
    if 2 * tree[LINKED.size, node] <= potential.shape[0]:
        v = node
        while True:
            potential[v] += by if v < n else -by
            v = _after(tree, v, node)
            if v == node:
                return
    v = root
    while True:
        if v == node:
            v = _after_subtree(tree, v, root)
        else:
            potential[v] -= by if v < n else -by
            v = _after(tree, v, root)
        if v == root:
            return


@inner()
def _find_leaving_edge(
    parent: Any, size: Any, flow: Any, row: int, column: int, n: int
) -> tuple[np.int64, np.int64, bool, np.int64]:
    """Return the mass that moves, the node below the edge that leaves, whether row is below it, and the top node.

    Mass enters at the new edge from row to column. It leaves every second edge of the path between them, from the ends
    on. The top node is where the paths from both ends meet.
    """
    moved, out, behind_row = np.int64(2**62), np.int64(row), True
    u, v = np.int64(row), np.int64(column)
    while u != v:
        if size[u] <= size[v]:
            if u < n and flow[u] < moved:
                moved, out, behind_row = flow[u], u, True
            u = np.int64(parent[u])
        else:
            if v >= n and flow[v] < moved:
                moved, out, behind_row = flow[v], v, False
            v = np.int64(parent[v])
    return moved, out, behind_row, u


@spliced
def _pivot(
    tree: Any, flow: Any, cost: Any, potential: Any, root: int, row: int, column: int, price: float, reduced: float,
    n: int,
) -> None:  # fmt: skip
    """Let the cell of the nodes `row` and `column` enter the tree."""
    parent, size = tree[LINKED.parent], tree[LINKED.size]
    moved, out, behind_row, top = _find_leaving_edge(parent, size, flow, row, column, n)
    u, v = row, column
    while u != top:
        flow[u] += -moved if u < n else moved
        u = parent[u]
    while v != top:
        flow[v] += moved if v < n else -moved
        v = parent[v]
    node, above = (row, column) if behind_row else (column, row)
    u, total = parent[out], size[out]
    while u != top:
        size[u] -= total
        u = parent[u]
    u = above
    while u != top:
        size[u] += total
        u = parent[u]
    # The path from `node` up to `out` turns over.
    v, amount, inside = node, moved, size[node] - size[node]
    while True:
        old_parent, old_flow, old_cost, old_size = parent[v], flow[v], cost[v], size[v]
        _detach(tree, v)
        _attach(tree, v, above)
        flow[v], cost[v], size[v] = amount, price, total - inside
        if v == out:
            break
        above, v, amount, price, inside = v, old_parent, old_flow, old_cost, old_size
    _shift_potentials(tree, potential, node, root, reduced if behind_row else -reduced, n)


@compiled()
def search_cells(
    counter: Any, rows: Any, columns: Any, costs: Any, tree: Any, flow: Any, cost: Any, potential: Any, n: int,
    root: int, max_pivots: int,
) -> int:  # fmt: skip
    """Pivot until no reduced cost of the cells is negative. `rows` and `columns` are nodes.

    Returns the pivots made, or -1 where `max_pivots` do not suffice.
    """
    count = rows.shape[0]
    cells_at_once = int(np.sqrt(count)) + 1
    pivots, start, cells_looked_at, rounding, is_refreshed = 0, 0, 0, PIVOT_LIMITS.rounding, False
    while True:
        best, at, stop = 0.0, 0, min(start + cells_at_once, count)
        for k in range(start, stop):
            reduced = costs[k] - potential[rows[k]] - potential[columns[k]]
            if reduced < best:
                best, at = reduced, k
        cells_looked_at += stop - start
        start = stop if stop < count else 0
        if best < -rounding * (abs(costs[at]) + abs(potential[rows[at]]) + abs(potential[columns[at]])):
            if pivots == max_pivots or is_stopped(counter, -best, np.nan):
                return -1
            _pivot(tree, flow, cost, potential, root, rows[at], columns[at], costs[at], best, n)
            pivots += 1
            cells_looked_at, is_refreshed = 0, False
        if cells_looked_at >= count:
            if is_refreshed:
                return pivots
            # Search once more with potentials free of the rounding of pivots. The larger tolerance makes the search
            # end.
            _refresh(tree, cost, potential, root)
            rounding *= 2
            cells_looked_at, is_refreshed = 0, True


@compiled(allocates=True)
def flows_of(tree: Any, p: Any, q: Any, root: int) -> Any:
    """Return the real mass on the edge above each node, summed up from the leaves; 0 above the root."""
    n, count = p.shape[0], p.shape[0] + q.shape[0]
    moved, order, v = np.empty(count), np.empty(count, np.int64), root
    for t in range(count):
        order[t] = v
        v = _after(tree, v, root)
        moved[t] = p[t] if t < n else -q[t - n]
    for t in range(count - 1, 0, -1):
        v = order[t]
        moved[tree[LINKED.parent, v]] += moved[v]
        # The search worked with rounded masses, so tiny flows may come out negative.
        moved[v] = max(moved[v] if v < n else -moved[v], 0.0)
    moved[root] = 0.0
    return moved


@compiled(allocates=True)
def split_flows(groups: Any, masses: Any, groups_of_flows: Any, flows: Any) -> tuple[Any, Any, Any]:
    """Divide each flow among the members of the group that it leaves; return member, flow and mass of each part.

    Members and flows are sorted by their groups, which are 0, 1, 2 and so on. There are as many parts as members and
    flows together, less the number of groups, so the parts form a tree again.
    """
    count = groups.shape[0] + flows.shape[0] - (groups[-1] + 1)
    members, parts, moved = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count)
    i, k, gone, used = 0, 0, 0.0, 0.0
    for at in range(moved.shape[0]):
        is_last_member = i + 1 == groups.shape[0] or groups[i + 1] != groups[i]
        is_last_flow = k + 1 == flows.shape[0] or groups_of_flows[k + 1] != groups_of_flows[k]
        units, remaining_flow = max(masses[i] - gone, 0.0), max(flows[k] - used, 0.0)
        closes_member = is_last_flow or (not is_last_member and units <= remaining_flow)
        members[at], parts[at], moved[at] = i, k, units if closes_member else remaining_flow
        gone, used = gone + moved[at], used + moved[at]
        if closes_member:
            i, gone = i + 1, 0.0
        if is_last_member or not closes_member:
            k, used = k + 1, 0.0
    return members, parts, moved
