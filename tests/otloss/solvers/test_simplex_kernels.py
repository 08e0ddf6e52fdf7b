"""The functions of the network simplex one by one, against numpy, scipy and what their arrays have to keep."""

from typing import Any

import numba
import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse.csgraph import minimum_spanning_tree

from otloss.costs.softmin_numba import as_columns
from otloss.solvers.exact import clouds_numba as clouds
from otloss.solvers.exact import simplex_numba as simplex
from otloss.solvers.exact import tree_numba as tree
from otloss.solvers.exact.simplex_numba import INTEGERS, NONE
from otloss.solvers.exact.tree_numba import PREORDER

SIZES = ((1, 1), (1, 5), (4, 1), (3, 4), (17, 12))


@numba.njit
def entries(rows: Any, price: Any, bound: Any) -> Any:
    n, m = rows.shape
    mask = tree.place_mask(m)
    tree.lower(bound, rows[0], 0.5, m)
    key = tree.best_key(rows[0], price, 3.0, mask, m)
    return mask, tree.min_difference(rows[0], price, m), tree.largest_size(rows, n, m), key


@numba.njit
def greedy(p: Any, q: Any, cost: Any, f: Any, g: Any, whole: Any, nodes: Any, from_prices: bool) -> Any:
    n, m = cost.shape
    simplex.whole_masses(p, q, n, m, whole[INTEGERS.units])
    units, near = whole[INTEGERS.units].copy(), np.empty(n + m)
    whole[INTEGERS.hint] = NONE
    last = n - 1
    for i in range(n):
        whole[INTEGERS.sequence, i] = i
    if from_prices:
        simplex._shortest_tree(cost, f.copy(), g.copy(), n, m, near, whole[INTEGERS.hint], whole[INTEGERS.sequence])
        last = n + m - 1
    else:
        simplex._write_first_prices(cost, n, m, f, g)
    hint = whole[INTEGERS.hint].copy()
    simplex._ship(cost, whole, nodes, f.copy(), g.copy(), n, m, whole[INTEGERS.sequence], last)
    return units, hint


@numba.njit
def pivot(nodes: Any, flow: Any, cost: Any, potential: Any, row: int, column: int) -> None:
    n, m = cost.shape
    reduced = cost[row, column] - potential[row] - potential[n + column]
    tree._pivot(nodes, flow, potential, row, n + column, reduced, n, m)


@numba.njit
def refresh(cost: Any, nodes: Any, potential: Any) -> None:
    tree.refresh(cost, nodes, potential, cost.shape[0], cost.shape[1])


@numba.njit
def extend(matrix: Any, rows: Any, columns: Any, g: Any, f_all: Any, g_all: Any) -> None:
    simplex._extend(matrix, rows, columns, len(rows), len(columns), g, np.empty(len(g_all)), f_all, g_all)


def problem(n: int, m: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m)), rng.random((n, m))


def check_tree(parent: np.ndarray, size: np.ndarray, flow: np.ndarray, units: np.ndarray, n: int) -> list[set[int]]:
    """All nodes hang below one root, each edge joins the two sides, and flows move all units; return the subtrees."""
    count = len(parent)
    (root,) = np.flatnonzero(parent == np.arange(count))
    subtrees: list[set[int]] = [set() for _ in range(count)]
    for v in range(count):
        above = v
        for _ in range(count):
            subtrees[above].add(v)
            if above == root:
                break
            assert (above < n) != (parent[above] < n)
            above = int(parent[above])
        else:
            raise AssertionError("a cycle")
    assert [len(nodes) for nodes in subtrees] == size.tolist()
    others = np.delete(np.arange(count), root)
    assert (flow[others] > 0).all()
    moved = np.zeros(count, np.int64)
    np.add.at(moved, others, flow[others])
    np.add.at(moved, parent[others], flow[others])
    np.testing.assert_array_equal(moved, units)
    return subtrees


def check_preorder(nodes: np.ndarray, subtrees: list[set[int]]) -> None:
    position, order, size = nodes[PREORDER.position], nodes[PREORDER.order], nodes[PREORDER.size]
    np.testing.assert_array_equal(order[position], np.arange(len(order)))
    assert all(set(order[p : p + s]) == below for p, s, below in zip(position, size, subtrees, strict=True))


def check_edges(parent: np.ndarray, potential: np.ndarray, cost: np.ndarray) -> None:
    n, nodes = len(cost), np.flatnonzero(parent != np.arange(len(parent)))
    rows, columns = np.minimum(nodes, parent[nodes]), np.maximum(nodes, parent[nodes]) - n
    np.testing.assert_allclose(potential[rows] + potential[n + columns], cost[rows, columns], atol=1e-13)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_entries_of_a_row(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    for m in (1, 2, 5, 64, 100):
        rows, price = rng.normal(size=(3, m)).astype(dtype), rng.normal(size=m)
        bound = rng.normal(size=m)
        expected = np.minimum(bound, rows[0].astype(float) - 0.5)
        mask, smallest, largest, key = entries(rows, price, bound)
        np.testing.assert_array_equal(bound, expected)
        assert m - 1 <= mask < max(2 * m, 2)
        assert smallest == (rows[0] - price).min()
        assert largest == abs(rows).max()
        gains = 3.0 + price - rows[0]
        assert key == -1 if gains.max() < 0 else gains[key & mask] == pytest.approx(gains.max(), rel=1e-11)


@pytest.mark.parametrize(("n", "m"), SIZES)
@pytest.mark.parametrize("from_prices", [False, True])
def test_a_tree_stays_a_plan_and_its_potentials_fit_after_each_pivot(from_prices: bool, n: int, m: int) -> None:
    p, q, cost = problem(n, m)
    rng = np.random.default_rng(1)
    f, g, potential = rng.random(n), rng.random(m) - 1, np.empty(n + m)
    whole, nodes = np.empty((6, n + m), np.int64), np.empty((5, n + m), np.int32)
    units, hint = greedy(p, q, cost, f, g, whole, nodes, from_prices)
    np.testing.assert_allclose(units / 2.0**61, np.concatenate([p, q]), atol=1e-15)
    assert units[:n].sum() == units[n:].sum()
    flow = whole[INTEGERS.flow]
    if from_prices:
        # The hints are a shortest spanning tree by reduced costs.
        lengths = np.maximum(cost - f[:, None] - g, 0.0)
        shortest = np.zeros((n + m, n + m))
        shortest[:n, n:] = 1 + lengths  # scipy takes 0 for a missing edge
        lengths_of_hints = [lengths[min(v, h), max(v, h) - n] for v, h in enumerate(hint) if h != NONE]
        assert len(lengths_of_hints) == n + m - 1
        assert sum(lengths_of_hints) + n + m - 1 == pytest.approx(minimum_spanning_tree(shortest).sum())
    else:
        np.testing.assert_array_equal(g, cost.min(0))
    refresh(cost, nodes, potential)
    for _ in range(30):
        check_preorder(nodes, check_tree(nodes[PREORDER.parent], nodes[PREORDER.size], flow, units, n))
        check_edges(nodes[PREORDER.parent], potential, cost)
        row, column = rng.integers(n), rng.integers(m)
        if nodes[PREORDER.parent, row] != n + column and nodes[PREORDER.parent, n + column] != row:
            pivot(nodes, flow, cost, potential, row, column)


def test_potentials_of_all_bins_are_c_transforms() -> None:
    matrix, rows, columns = problem(7, 6)[2], np.array([0, 2, 5]), np.array([1, 2])
    g, f_all, g_all = np.array([0.3, -0.2]), np.empty(7), np.empty(6)
    extend(matrix, rows, columns, g, f_all, g_all)
    f = (matrix[np.ix_(rows, columns)] - g).min(1)
    np.testing.assert_array_equal(f_all[rows], f)
    np.testing.assert_array_equal(g_all, (matrix[rows] - f[:, None]).min(0))
    np.testing.assert_array_equal(np.delete(f_all, rows), (matrix[[1, 3, 4, 6]][:, columns] - g_all[columns]).min(1))


# ---- between clouds ----


def metric_costs(x: np.ndarray, y: np.ndarray, metric: int) -> np.ndarray:
    apart = x[:, None] - y
    squares = (apart**2).sum(-1)
    costs: np.ndarray = (squares, np.sqrt(squares), abs(apart).sum(-1))[metric]
    return costs


@pytest.mark.parametrize("metric", range(3))
def test_near_cells_are_the_cells_of_smallest_reduced_cost(metric: int) -> None:
    rng = np.random.default_rng(metric)
    for n, m, d in ((1, 1, 1), (3, 700, 2), (300, 40, 3)):
        x, y = np.sort(rng.random((n, d)), 0), np.sort(rng.random((m, d)), 0)
        g, above = 0.1 * rng.random(m), np.where(np.arange(n) % 3 == 0, np.inf, 0.2)
        columns, prices = clouds.allocate_near_cells(n, 4)
        clouds.near_cells(np.zeros(3, np.int64), x, as_columns(y), g, above, metric, columns, prices)
        reduced = metric_costs(x, y, metric) - g
        for i in range(n):
            expected = [j for j in np.argsort(reduced[i])[:4] if reduced[i, j] < above[i]]
            assert columns[i, : len(expected)].tolist() == expected
            assert (columns[i, len(expected) :] == NONE).all()


@pytest.mark.parametrize("metric", range(3))
@pytest.mark.parametrize(("n", "m"), SIZES)
def test_a_tree_between_clouds_stays_a_plan_until_it_is_optimal(n: int, m: int, metric: int) -> None:
    p, q, _ = problem(n, m)
    rng = np.random.default_rng(2)
    x, y = rng.random((n, 2)), rng.random((m, 2))
    cost, units = metric_costs(x, y, metric), np.empty(n + m, np.int64)
    whole_masses(p, q, units)
    rows, columns = np.divmod(np.arange(n * m), m)
    listed = rng.permutation(n * m)[: n + m]
    root, nodes, flow, edges, potential = clouds.first_tree(
        x, y, p, q, np.zeros(m), metric, rows[listed], columns[listed]
    )
    pivots = -1
    while pivots < 0:
        check_tree(nodes[clouds.LINKED.parent], nodes[clouds.LINKED.size], flow, units, n)
        check_edges(nodes[clouds.LINKED.parent], potential, cost)
        check_children(nodes)
        pivots = clouds.search_cells(
            np.zeros(3, np.int64), rows, columns + n, cost.reshape(-1), nodes, flow, edges, potential, n, root, 2
        )
    assert (cost - potential[:n, None] - potential[n:] >= -1e-14).all()
    moved, plan = clouds.flows_of(nodes, p, q, root), np.zeros((n, m))
    for v in np.delete(np.arange(n + m), root):
        above = nodes[clouds.LINKED.parent, v]
        plan[min(v, above), max(v, above) - n] += moved[v]
    np.testing.assert_allclose(plan.sum(1), p, atol=1e-15)
    np.testing.assert_allclose(plan.sum(0), q, atol=1e-15)
    sums = np.concatenate([np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))])
    expected = linprog(cost.reshape(-1), A_eq=sums, b_eq=np.concatenate([p, q])).fun
    assert (plan * cost).sum() == pytest.approx(expected)


@numba.njit
def whole_masses(p: Any, q: Any, units: Any) -> None:
    simplex.whole_masses(p, q, len(p), len(q), units)


def check_children(nodes: np.ndarray) -> None:
    """The lists of children hold each node below its parent once, in both directions."""
    names, found = clouds.LINKED, []
    for above, child in enumerate(nodes[names.child]):
        previous, node = NONE, child
        while node != NONE:
            assert (nodes[names.parent, node], nodes[names.previous, node]) == (above, previous)
            found.append(node)
            previous, node = node, nodes[names.following, node]
    assert sorted(found) == np.flatnonzero(nodes[names.parent] != np.arange(nodes.shape[1])).tolist()


def test_flows_of_equal_points_are_split_among_them() -> None:
    groups, masses = np.array([0, 0, 0, 1, 2, 2]), np.array([0.1, 0.2, 0.1, 0.3, 0.2, 0.1])
    ends, flows = np.array([0, 0, 1, 2, 2, 2]), np.array([0.25, 0.15, 0.3, 0.05, 0.15, 0.1])
    members, parts, moved = clouds.split_flows(groups, masses, ends, flows)
    assert len(moved) == len(groups) + len(ends) - 3
    np.testing.assert_array_equal(groups[members], ends[parts])
    np.testing.assert_allclose(np.bincount(members, moved), masses)
    np.testing.assert_allclose(np.bincount(parts, moved), flows)
