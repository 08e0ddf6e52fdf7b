"""Exact transport between two large clouds of points, in memory that grows with n + m, certified.

The network simplex needs few of the n m cells of the plan if it is given the right ones:

1. Each cloud is grouped into a quarter as many clusters, of equally many points, so that they are small where points
   are dense. The exact problem between the centres of the clusters is solved in the same way, down to one small enough
   for a matrix, and c-transforms extend its potentials to the points.
2. With these potentials, the first cells are chosen: for each point the `first_cells` of smallest reduced cost
   C_ij - f_i - g_j.
3. The simplex solves the problem on these cells (`clouds_numba`). Its first plan ships along the edges of a
   spanning tree of least reduced costs, leaves first, which is the optimum if the potentials are optimal.
4. All n m pairs are searched for cells of negative reduced cost. The worst of each point are added and the simplex
   continues, until no pair has a negative reduced cost.

So the plan is optimal among all plans, not only among those on the cells. At the end another kernel computes both
c-transforms over all pairs, and the duality gap is checked as for dense problems.

Sources: B. Schmitzer, A Sparse Multiscale Algorithm for Dense Optimal Transport, 2016; S. Gerber, M. Maggioni,
Multiscale Strategies for Computing Optimal Transport, 2017.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._numba import may_run_on
from otloss._numba.threads import Work, run_on_threads
from otloss.costs import PointCost
from otloss.costs.order import BLOCK, METRIC_NUMBERS, ROWS, grouped, order_of, tasks
from otloss.solvers.exact.batch import SIMPLEX
from otloss.solvers.exact.blocks import Blocks, blocks_of_cells
from otloss.solvers.exact.optimum import Optimum, solve_arrays
from otloss.solvers.exact.prices import Plan, balance_blocks
from otloss.solvers.exact.results import check_outcome
from otloss.solvers.exact.solution import ExactSolution
from otloss.solvers.problem import Problem


@dataclass(frozen=True)
class CloudLimits:
    """Numbers of the method.

    Attributes:
        min_pairs, min_points, max_dimensions: with fewer pairs, fewer points on a side or more dimensions, a matrix
            takes less time.
        min_pairs_of_others: with so many pairs the memory of a matrix counts more than the time.
        largest_cost: beyond it numbers may overflow, and the solver of matrices then raises.
        largest_matrix: the number of clusters up to which a matrix of their costs is solved.
        points_of_cluster: the mean number of points of a cluster, at least.
        first_cells, added_cells: the cells of a point to begin with, and those that are added at a time.
        rounding: reduced costs above this, relative to the numbers they are the difference of, count as zero.
        pivots_of_point: the pivots for each point after which the search is given up.
        plan_entries: the entries of the dense plan that are made at a time.
    """

    min_pairs: int = 2**21
    min_points: int = 256
    max_dimensions: int = 3
    min_pairs_of_others: int = 2**25
    largest_cost: float = 1e100
    largest_matrix: int = 1000
    points_of_cluster: int = 4
    first_cells: int = 16
    added_cells: int = 4
    rounding: float = 4e-15
    pivots_of_point: int = 1000
    plan_entries: int = 2**24


CLOUD_LIMITS = CloudLimits()


def suits_clouds(problem: Problem) -> bool:
    """Return whether `solve_between_clouds` solves this exact problem."""
    cost = problem.cost.as_points()
    if cost is None or cost.metric not in METRIC_NUMBERS or problem.has_empty_side:
        return False
    if cost.x.dim() != 2 or cost.y.dim() != 2 or problem.batch.numel() != 1:
        return False
    has_few_axes = cost.x.shape[-1] <= CLOUD_LIMITS.max_dimensions and min(cost.shape) >= CLOUD_LIMITS.min_points
    min_pairs = CLOUD_LIMITS.min_pairs if has_few_axes else CLOUD_LIMITS.min_pairs_of_others
    if cost.shape[0] * cost.shape[1] < min_pairs or not may_run_on(cost.x, cost.y, problem.p, problem.q):
        return False  # forward mode needs the matrix
    return float(cost.largest()) < CLOUD_LIMITS.largest_cost


@dataclass(frozen=True)
class CloudSolution(ExactSolution):
    """An exact solution without a matrix."""

    @cached_property
    def potentials(self) -> tuple[Tensor, Tensor]:
        f, g = self.optimum.f, self.optimum.g
        empty = self.problem.q.detach() == 0
        if not bool(empty.any()):
            return f, g
        self._unchanged.check("potentials of bins without mass")
        with torch.no_grad():
            lowest = self.problem.cost.to(torch.float64).T.softmin(f, 0.0)
        return f, torch.where(empty, torch.minimum(g, lowest), g)

    def plan_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        (n, m), batch = self.problem.cost.shape, self.problem.batch
        rows, columns, flows = (t.reshape(-1) for t in (self.optimum.rows, self.optimum.columns, self.optimum.flows))
        step = max(1, CLOUD_LIMITS.plan_entries // m)
        for first in range(0, n, step):
            inside = (rows >= first) & (rows < first + step)
            block = flows.new_zeros(min(step, n - first), m)
            block.index_put_((rows[inside] - first, columns[inside]), flows[inside])
            yield slice(first, first + len(block)), block.expand(*batch, *block.shape)


def solve_between_clouds(problem: Problem, *, warns: bool = True) -> CloudSolution:
    """Solve a problem that `suits_clouds`. With `warns`, mass that may be rounding and pays a price is named.

    Raises:
        RuntimeError: if the optimum is not reached, or not certified by its potentials.
    """
    cost = problem.cost.as_points()
    assert cost is not None
    with torch.no_grad():
        optimum = _optimum(problem, cost.without_graph().to(torch.float64), warns=warns)
    cell_costs = cost.pairs(optimum.rows, optimum.columns)
    return CloudSolution(problem, optimum, optimum.value.to(problem.p), cell_costs)


def _optimum(problem: Problem, cost: PointCost, *, warns: bool) -> Optimum:
    """Return the optimum at this cost, the cost of the problem in float64 and without a graph."""
    p, q = (w.detach().double().reshape(-1) for w in (problem.p, problem.q))
    points_x, points_y = _Distinct.build(cost.x, p), _Distinct.build(cost.y, q)
    a, b = points_x.masses, points_y.masses * (points_x.masses.sum() / points_y.masses.sum())
    among = PointCost(points_x.points, points_y.points, metric=cost.metric)
    if problem.start is None:
        f, g = _first_potentials(among, a, b)
    else:
        g = a.new_empty(len(b)).index_copy_(0, points_y.groups, problem.start[1].double().reshape(-1)[points_y.members])
        f = among.softmin(g, 0.0)
    basis = _Basis.solve(among, a, b, f, g)
    priced = _CloudProblem(among, a.numpy(), basis)
    balanced = balance_blocks(priced, b.numpy(), priced.plan(basis), rounding=problem.weight_rounding, warns=warns)
    plan, b = balanced.plan, torch.from_numpy(balanced.q)
    by_rows = points_x.split(torch.from_numpy(plan.cells[0]), torch.from_numpy(plan.flows))
    cells = points_y.split(torch.from_numpy(plan.cells[1])[by_rows.places], by_rows.flows)
    g = torch.full_like(q, -torch.inf).index_copy_(0, points_y.members, torch.from_numpy(plan.g)[points_y.groups])
    f = cost.softmin(g, 0.0)
    g = cost.T.softmin(f.masked_fill(p == 0, -torch.inf), 0.0)
    dual = p @ f + (q[points_y.members] * (b / points_y.masses)[points_y.groups]) @ g[points_y.members]
    gap = plan.value - float(dual)
    outcome = np.array([[plan.value, gap, plan.scale, plan.pivots]])
    check_outcome(outcome, [p[None].numpy(), q[None].numpy()], problem.batch)

    def in_batch(field: Tensor) -> Tensor:
        return field.reshape((*problem.batch, *field.shape))

    return Optimum(
        value=in_batch(a.new_tensor(plan.value)),
        gap=in_batch(a.new_tensor(gap)),
        payment=in_batch(a.new_tensor(balanced.payment)),
        iterations=in_batch(torch.tensor(plan.pivots, device="cpu")),
        f=in_batch(f),
        g=in_batch(g),
        rows=in_batch(by_rows.points[cells.places]),
        columns=in_batch(cells.points),
        flows=in_batch(cells.flows),
        largest_potential=in_batch(a.new_tensor(balanced.largest_potential)),
    )


_ROWS_OF_BLOCK = 256  # a block of pairs


@dataclass(frozen=True)
class _CloudProblem:
    """`prices.PricedProblem` of distinct points with weights p, and the cells that the first plan was found on."""

    cost: PointCost
    p: np.ndarray
    basis: _Basis

    @cached_property
    def highest(self) -> float:
        return float(self.cost.largest())

    @property
    def lowest(self) -> float:
        """Near pairs are listed."""
        return float(self.basis.costs.min(where=self.basis.costs > 0, initial=np.inf))

    @property
    def zeros(self) -> int:
        return len(self.basis.costs) - int(np.count_nonzero(self.basis.costs))

    def costs(self, cells: np.ndarray) -> np.ndarray:
        return _costs(self.cost, cells)

    def blocks(self, price: float) -> Blocks:
        return self.basis.blocks(price)

    def plan(self, basis: _Basis) -> Plan:
        cells, flows = basis.plan()
        value = float(flows @ self.costs(cells))
        return Plan(cells, flows, basis.f.numpy(), basis.g.numpy(), value, self.highest * self.p.sum(), basis.pivots)

    def solve(self, q: np.ndarray, start: Plan) -> Plan:
        return self.plan(_Basis.solve(self.cost, *(torch.from_numpy(a) for a in (self.p, q, start.f, start.g))))

    def solve_blocks(self, q: np.ndarray, start: Plan, blocks: Blocks, price: float) -> Plan:
        """Return the plan of blocks, each a problem of its own.

        In one problem, potentials as large as the costs between blocks would lose the digits of the costs within.
        """
        f, g, cells, flows, pivots = np.empty_like(self.p), np.empty_like(q), [], [], 0
        for rows, columns in zip(blocks.members(blocks.rows), blocks.members(blocks.columns), strict=True):
            points = (side[torch.from_numpy(own)] for side, own in ((self.cost.x, rows), (self.cost.y, columns)))
            arrays = (self.p[rows], q[columns], start.f[rows], start.g[columns])
            basis = _Basis.solve(
                PointCost(*points, metric=self.cost.metric), *(torch.from_numpy(array) for array in arrays)
            )
            f[rows], g[columns], (own_cells, own_flows) = basis.f, basis.g, basis.plan()
            cells.append(np.stack([rows[own_cells[0]], columns[own_cells[1]]]))
            flows.append(own_flows)
            pivots = pivots + basis.pivots if min(pivots, basis.pivots) >= 0 else -1
        all_cells, all_flows = np.concatenate(cells, 1), np.concatenate(flows)
        return Plan(all_cells, all_flows, f, g, float(all_flows @ self.costs(all_cells)), start.scale, pivots)

    def slack(self, plan: Plan, q: np.ndarray, blocks: Blocks) -> np.ndarray:
        """The least cost between two blocks is that between the boxes around their points, or that between the points.

        Boxes overlap where blocks are chains.
        """
        (low_x, high_x), (low_y, high_y) = (
            _boxes(points.numpy(), labels, blocks.count)
            for points, labels in ((self.cost.x, blocks.rows), (self.cost.y, blocks.columns))
        )
        apart = np.maximum(0.0, np.maximum(low_x[:, None] - high_y, low_y - high_x[:, None]))
        apart[np.isinf(apart).any(-1)] = 0.0  # a block without points of one side has no mass
        nearest = PointCost(
            torch.from_numpy(apart),
            torch.zeros(1, apart.shape[-1], dtype=torch.float64, device="cpu"),
            metric=self.cost.metric,
        )
        slack = nearest.dense().squeeze(-1).numpy() - _largest(plan.f, blocks.rows, blocks.count)[:, None]
        smallest: np.ndarray = slack - _largest(plan.g, blocks.columns, blocks.count)
        is_proof = smallest[~np.eye(blocks.count, dtype=bool)].min(initial=0.0) >= 0
        return smallest if is_proof else self._slack_of_pairs(plan, q, blocks)

    def _slack_of_pairs(self, plan: Plan, q: np.ndarray, blocks: Blocks) -> np.ndarray:
        smallest = np.full((blocks.count, blocks.count), np.inf)
        f, g = np.where(self.p > 0, plan.f, -np.inf), np.where(q > 0, plan.g, -np.inf)
        order = np.argsort(blocks.columns, kind="stable")
        present, starts = np.unique(blocks.columns[order], return_index=True)
        part = np.full((blocks.count, len(present)), np.inf)
        for start in range(0, len(f), _ROWS_OF_BLOCK):
            rows = slice(start, min(start + _ROWS_OF_BLOCK, len(f)))
            slack = self.cost.row_block(rows.start, rows.stop).double().numpy() - f[rows, None] - g
            np.minimum.at(part, blocks.rows[rows], np.minimum.reduceat(slack[:, order], starts, axis=1))
        smallest[:, present] = part
        return smallest


def _costs(cost: PointCost, cells: np.ndarray) -> np.ndarray:
    """Return the costs of pairs of points, rows and columns (2, cells)."""
    return cost.pairs(torch.from_numpy(cells[0]), torch.from_numpy(cells[1])).numpy()


class _Parts(NamedTuple):
    """Parts of flows: the point that each leaves, the place of the flow that it is a part of, and its mass."""

    points: Int[Tensor, " parts"]
    places: Int[Tensor, " parts"]
    flows: Float[Tensor, " parts"]


@dataclass(frozen=True)
class _Distinct:
    """The distinct points of a cloud that hold mass, in an order that keeps neighbours side by side.

    Attributes:
        points, masses: of each distinct point.
        members, groups, weights: all points with mass, which of the distinct points each is (sorted), and its mass.
    """

    points: Float[Tensor, "n d"]
    masses: Float[Tensor, " n"]
    members: Int[Tensor, " all"]
    groups: Int[Tensor, " all"]
    weights: Float[Tensor, " all"]

    @staticmethod
    def build(points: Tensor, weights: Tensor) -> _Distinct:
        """Return the distinct points that hold mass, sorted."""
        members = weights.nonzero().squeeze(-1)
        distinct, which = torch.unique(points[members], dim=0, return_inverse=True)
        order = order_of(distinct)
        groups, sorting = torch.argsort(order)[which].sort(stable=True)
        members = members[sorting]
        masses = weights.new_zeros(len(distinct)).index_add_(0, groups, weights[members])
        return _Distinct(distinct[order], masses, members, groups, weights[members])

    def split(self, ends: Tensor, flows: Tensor) -> _Parts:
        """Share flows that leave distinct points among the points there."""
        from otloss.solvers.exact.clouds_numba import split_flows

        if len(self.members) == len(self.points):
            return _Parts(self.members[ends], torch.arange(len(ends), device="cpu"), flows)
        ends, sorting = ends.sort(stable=True)
        arrays = (self.groups, self.weights, ends, flows[sorting])
        members, parts, moved = split_flows(*(t.numpy() for t in arrays))
        return _Parts(
            self.members[torch.from_numpy(members)], sorting[torch.from_numpy(parts)], torch.from_numpy(moved)
        )


def _first_potentials(cost: PointCost, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return potentials (f, g) near the optimal ones, from an exact problem between clusters."""
    count = max(2, min(len(p), len(q)) // CLOUD_LIMITS.points_of_cluster)
    _, _, centres_x, p_of_clusters, _ = grouped(cost.x, p, count)
    _, _, centres_y, q_of_clusters, _ = grouped(cost.y, q, count)
    q_of_clusters = q_of_clusters * (p_of_clusters.sum() / q_of_clusters.sum())
    among = PointCost(centres_x, centres_y, metric=cost.metric)
    if max(among.shape) <= CLOUD_LIMITS.largest_matrix:
        potential = solve_arrays(p_of_clusters, q_of_clusters, among.dense()).f
    else:
        potential = _Basis.solve(
            among, p_of_clusters, q_of_clusters, *_first_potentials(among, p_of_clusters, q_of_clusters)
        ).f
    g = PointCost(cost.y, centres_x, metric=cost.metric).softmin(potential, 0.0)
    return cost.softmin(g, 0.0), g


class _Basis:
    """The spanning tree of a plan, and the list of cells that pivots choose from.

    All points hold mass, and their order keeps neighbours side by side.
    """

    def __init__(self, cost: PointCost, p: Tensor, q: Tensor, f: Tensor, g: Tensor) -> None:
        from otloss.solvers.exact.clouds_numba import first_tree

        self.cost, self.metric = cost, METRIC_NUMBERS[str(cost.metric)]
        self.p, self.q, self.x, self.y = (t.contiguous().numpy() for t in (p, q, cost.x, cost.y))
        n, m = cost.shape
        pairs = [
            self._near(None, price, by_rows=by_rows, count=CLOUD_LIMITS.first_cells)
            for price, by_rows in ((g, True), (f, False))
        ]
        keys = np.unique(np.concatenate([rows * m + columns for rows, columns in pairs]))
        self.rows, self.columns = keys // m, keys % m
        self.costs = self._costs(self.rows, self.columns)
        reduced = self._reduced(f, g)
        first = np.concatenate([_leaves_first(self.rows, self.columns + n, reduced, n + m), np.argsort(reduced)])
        self.root, self.tree, self.flow, self.edges, self.potential = first_tree(
            self.x, self.y, self.p, self.q, g.numpy(), self.metric, self.rows[first], self.columns[first]
        )
        self.pivots, self.by_rows = 0, True
        self.search()

    @classmethod
    def solve(cls, cost: PointCost, p: Tensor, q: Tensor, f: Tensor, g: Tensor) -> _Basis:
        """Return the optimal basis, or the one that is reached in so many pivots, from potentials (f, g)."""
        basis = cls(cost, p, q, f, g)
        while basis.pivots >= 0 and basis.add_cells():
            basis.search()
        return basis

    @property
    def f(self) -> Tensor:
        return torch.from_numpy(self.potential[: len(self.p)])

    @property
    def g(self) -> Tensor:
        return torch.from_numpy(self.potential[len(self.p) :])

    def search(self) -> None:
        """Pivot until the plan is optimal on the listed cells; `pivots` becomes -1 if that takes too many of them."""
        from otloss.solvers.exact.clouds_numba import search_cells

        n = len(self.p)
        arguments = (
            self.rows, self.columns + n, self.costs, self.tree, self.flow, self.edges, self.potential, n, self.root,
            CLOUD_LIMITS.pivots_of_point * len(self.potential) - self.pivots,
        )  # fmt: skip
        pivots = run_on_threads(search_cells, 1, arguments, work=Work(SIMPLEX, len(self.rows) ** 2))[0]
        self.pivots = self.pivots + pivots if pivots >= 0 else -1

    def add_cells(self) -> bool:
        """Search all pairs for cells of negative reduced cost and list them; return whether there are any.

        Calls search for the worst cells of each row and of each column in turn.
        """
        prices = (self.f, self.g) if self.by_rows else (self.g, self.f)
        rows, columns = self._near(*prices, by_rows=self.by_rows, count=CLOUD_LIMITS.added_cells)
        self.by_rows = not self.by_rows
        costs, f, g = self._costs(rows, columns), self.f.numpy()[rows], self.g.numpy()[columns]
        missing = costs - f - g < -CLOUD_LIMITS.rounding * (costs + np.abs(f) + np.abs(g))
        old, new = (self.rows, self.columns, self.costs), (rows, columns, costs)
        cells = (np.concatenate([listed, added[missing]]) for listed, added in zip(old, new, strict=True))
        self.rows, self.columns, self.costs = cells
        return bool(missing.any())

    def plan(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the cells of the tree, rows and columns (2, n + m - 1), and the mass there."""
        from otloss.solvers.exact.clouds_numba import LINKED, flows_of

        n, moved = len(self.p), flows_of(self.tree, self.p, self.q, self.root)
        nodes = np.delete(np.arange(len(moved)), self.root)
        above = self.tree[LINKED.parent, nodes].astype(np.int64)
        return np.stack([np.minimum(nodes, above), np.maximum(nodes, above) - n]), moved[nodes]

    def blocks(self, price: float) -> Blocks:
        """Return the blocks of points that only pairs of at least this price connect."""
        cheap = self.costs < price
        return blocks_of_cells(self.rows[cheap], self.columns[cheap], len(self.p), len(self.q))

    def _near(self, own: Tensor | None, other: Tensor, *, by_rows: bool, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the cells of smallest reduced cost, at most `count` for each row, or for each column.

        With potentials of the own side, cells of reduced costs that are not negative are left out.
        """
        from otloss.costs.softmin_numba import as_columns
        from otloss.solvers.exact.clouds_numba import allocate_near_cells, near_cells
        from otloss.solvers.exact.simplex_numba import NONE

        x, y = (self.x, self.y) if by_rows else (self.y, self.x)
        places, prices = allocate_near_cells(len(x), count)
        above = np.full(len(x), np.inf) if own is None else own.numpy()
        arguments = (x, as_columns(y), other.numpy(), above, self.metric, places, prices)
        run_on_threads(near_cells, tasks(len(x), 1, ROWS * BLOCK), arguments, work=Work("", len(x) * len(y), passes=1))
        own_points, at = np.nonzero(places != NONE)
        other_points = places[own_points, at]
        return (own_points, other_points) if by_rows else (other_points, own_points)

    def _costs(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        return _costs(self.cost, np.stack([rows, columns]))

    def _reduced(self, f: Tensor, g: Tensor) -> np.ndarray:
        return self.costs - f.numpy()[self.rows] - g.numpy()[self.columns]


def _boxes(points: np.ndarray, labels: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and upper corners (count, d) of the boxes around the points of each label."""
    low, high = np.full((count, points.shape[1]), np.inf), np.full((count, points.shape[1]), -np.inf)
    np.minimum.at(low, labels, points)
    np.maximum.at(high, labels, points)
    return low, high


def _largest(values: np.ndarray, labels: np.ndarray, count: int) -> np.ndarray:
    largest = np.full(count, -np.inf)
    np.maximum.at(largest, labels, values)
    return largest


def _leaves_first(rows: np.ndarray, columns: np.ndarray, lengths: np.ndarray, count: int) -> np.ndarray:
    """Return the edges of a shortest spanning tree of these cells, the edge of a leaf before the edges above it."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import breadth_first_order, minimum_spanning_tree

    # One more node, far from all, connects parts that no cell connects. scipy takes lengths of 0 for missing edges.
    everywhere = np.arange(count)
    far = np.full(count, 1e3 * (lengths.max() - lengths.min()) + 2.0)
    ends = np.concatenate([rows, everywhere]), np.concatenate([columns, np.full(count, count)])
    size = (count + 1, count + 1)
    tree = minimum_spanning_tree(coo_array((np.concatenate([lengths - lengths.min() + 1.0, far]), ends), size).tocsr())
    order, above = breadth_first_order(tree, count, directed=False)
    nodes = order[:0:-1]
    nodes = nodes[above[nodes] < count]
    keys = np.minimum(nodes, above[nodes]) * count + np.maximum(nodes, above[nodes])
    return np.searchsorted(rows * count + columns, keys)
