"""Entropic transport between large clouds in few dimensions, from clusters to points; balanced, on a CPU.

Clusters change only the way to the solution: the error that ends the search is the error of the points.

Let b = g / epsilon, and let M be the Markov matrix of the round trip from the points of q to the points of p and back.
Near the solution Sinkhorn's iteration turns an error e into M e. It is slow where e hardly changes over a distance of
sqrt(epsilon), since M e is nearly e there. Such errors are nearly equal for all points of a cluster, so a problem
between clusters is enough to find them. If one iteration changes b by d, the solution is

    b + (I - M)^-1 d = b + d + M (I - M)^-1 d

The last term is smooth, and is computed between clusters. d is averaged over each cluster; (I - M)^-1 is the one of the
problem between clusters, which is dense and small, and factorised once; and the remaining M, a soft minimum over
clusters, extends the result to the points. Each iteration then divides the error by ten or more, at any epsilon that
clusters resolve.

For a smaller epsilon the problem between clusters is solved at a larger one. That still corrects the smoothest errors,
for which I - M is nearly proportional to epsilon. Anderson's acceleration reduces the other errors.

Between a cloud and itself f = g. One update turns the error e into -M e, and the mean of two consecutive updates has
the error (M^2 - M) e / 2, which is at most an eighth of e. So clusters do not correct it, and only give the start and
sums through a grid where they nearly resolve epsilon.

The clusters also give the start. While the error is large, soft minima leave out pairs of points that together
contribute a smaller share of a sum than the error. The potentials that are returned, and their error, come from soft
minima over all pairs. For squared distances between very large clouds these go through a grid (`costs.gaussian_sums`),
and the bound of what the grid leaves out is a part of the error.

Sources: J. Feydy, Geometric Data Analysis, Beyond Convolutions, 2020, for the start; D. Anderson, Iterative Procedures
for Nonlinear Integral Equations, 1965.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._numba import may_run_on
from otloss._progress import report
from otloss.costs import Cost, PointCost
from otloss.costs.gaussian_sums import GaussianSums, OutOfRangeError
from otloss.costs.order import Groups, grouped
from otloss.solvers.entropic.arithmetic import detached_in_float64, potential_of_plan
from otloss.solvers.entropic.equations.updates import build_updates
from otloss.solvers.entropic.interface import Budget, Method, SearchResult, Start, better
from otloss.solvers.entropic.newton import SparseNewton
from otloss.solvers.entropic.sinkhorn import MAX_STAGES
from otloss.solvers.entropic.sinkhorn_cpu import SinkhornOnCPU, run_sinkhorn
from otloss.solvers.entropic.sinkhorn_kernels.numbers import SCHEDULE, STAGE_ITERATIONS
from otloss.solvers.histograms import of_equal_mass
from otloss.solvers.problem import Problem

CLUSTERED_METRICS = ("sqeuclidean", "euclidean")


@dataclass(frozen=True)
class Clustering:
    """When clouds are put into clusters, and how the search runs.

    Attributes:
        max_axes: in more dimensions clusters are too wide.
        smallest: pairs of points, below which the numba kernel for matrices takes about as long.
        counts: of clusters, tried in this order until they resolve epsilon; the last only for `many_pairs`.
        many_pairs: pairs of points for which more clusters are worth their time.
        tolerance, max_iterations: of the problem between clusters.
        tight_tolerance: of that problem, where its clusters are points but for a small share of epsilon, or by Newton's
            method, where Sinkhorn's iteration does not solve it.
        tight: the epsilon that clusters resolve over epsilon, below which they are such points.
        resolving_epsilon: above this multiple of the variance within a cluster, clusters stand for their points.
        largest_coarsening: epsilon between clusters over epsilon, above which Newton's method from exact potentials
            takes less time; the second number is for a cloud and itself, where iterations from zero are few.
        ridge: of the factorised system.
        depth: of Anderson's acceleration.
        stage_tolerance: of all stages but the last.
        grid_share, grid_share_of_error: the relative error that sums through a grid may have is a share of the
            tolerance and of the error so far, which falls by the factor `grid_step` at once.
        grid_margin: a search with such sums aims at this share of the tolerance, because the bound of the last updates
            is added to its error.
        pairs_margin: a search by pairs that misses the tolerance by less aims at this share of it.
        omitted: an iteration may leave out a share of each sum, this multiple of the last error.
        restart: the acceleration forgets its history where the error exceeds this multiple of the smallest error.
        slow_iterations: a search ends after so many iterations that did not halve the error. It stays at 0.09 between
            the "clusters" of 6,000 points of `benchmarks.hard_kinds` at a blur of 0.3: such a problem takes 5.0, 5.9
            and 6.0 s with 10, 20 and 40, and 17.6 s with 1,000. None of them ends a search early that converges.
        rounding: an error in float32 does not fall below this multiple of the rounding of potentials over epsilon.
    """

    max_axes: int = 3
    smallest: int = 2**22
    counts: tuple[int, ...] = (256, 512, 1024)
    many_pairs: int = 2**26
    tolerance: float = 1e-3
    max_iterations: int = 1000
    tight_tolerance: float = 1e-5
    tight: float = 1e-2
    resolving_epsilon: float = 6.0
    largest_coarsening: tuple[float, float] = (32.0, 4.0)
    ridge: float = 1e-9
    depth: int = 5
    stage_tolerance: float = 0.1
    grid_share: float = 0.1
    grid_share_of_error: float = 1e-2
    grid_step: float = 30.0
    grid_margin: float = 0.5
    pairs_margin: float = 0.2
    omitted: float = 1.0
    restart: float = 2.0
    slow_iterations: int = 20
    rounding: float = 0.25


CLUSTERING = Clustering()


class Clusters(Method):
    """The method for two large clouds in few dimensions, balanced, on a CPU."""

    def applies(self, problem: Problem) -> bool:
        cost = problem.cost.as_points()
        if cost is None or cost.metric not in CLUSTERED_METRICS or problem.marginal_penalty is not None:
            return False
        if problem.impl != "auto" or problem.start is not None or problem.batch.numel() != 1:
            return False
        if cost.x.dim() != 2 or cost.y.dim() != 2 or not may_run_on(cost.x, problem.p):
            return False
        (n, m), axes = cost.shape, cost.x.shape[-1]
        return axes <= CLUSTERING.max_axes and n * m >= CLUSTERING.smallest and min(n, m) > CLUSTERING.counts[0]

    def run(self, problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
        """Search from the potentials between clusters; see `interface.Method`.

        The search gives up where it becomes slow, and before its first iteration where clusters do not help: a side has
        no mass, the problem between clusters was not solved, or clusters are far larger than epsilon resolves. Newton's
        method then takes less time than iterations. Between a cloud and itself Sinkhorn's iteration runs instead. The
        potentials between clusters are better than `start`, which iterations have found while a kernel was compiled.
        """
        p, q, epsilon = problem.p.detach().flatten(), problem.q.detach().flatten(), problem.epsilon.detach().reshape(())
        result = _search_with_clusters(dataclasses.replace(problem, p=p, q=q, epsilon=epsilon), budget)
        if result is None and problem.is_symmetric:
            return run_sinkhorn(problem, start, budget)
        if result is None:
            return SearchResult.without_search(problem)
        f, g, batch = result.f.reshape(problem.p.shape), result.g.reshape(problem.q.shape), problem.batch
        return SearchResult.without_estimates(f, g, result.error.reshape(batch), result.iterations.reshape(batch))


def _search_with_clusters(problem: Problem, budget: Budget) -> SearchResult | None:
    """Return where the search ends; None where clusters do not help, or no error was finite."""
    solution = _solve_between(problem)
    if solution is None:
        return None
    search = _ClusterSearch(problem, solution, share=CLUSTERING.grid_share * budget.tolerance)
    epsilon, tolerance = float(problem.epsilon), max(CLUSTERING.stage_tolerance, budget.tolerance)
    larger = [epsilon / SCHEDULE.stage_factor**k for k in range(MAX_STAGES, 0, -1)]
    for stage in (stage for stage in larger if stage < 0.99 * solution.clusters.epsilon):
        search.run(stage, tolerance, min(search.iterations + STAGE_ITERATIONS, budget.max_iterations - 1))
    aim, by_pairs = budget.tolerance, False
    for with_bound in (False, True):  # the sums without a bound may be less accurate than planned
        search.sums.with_bound = with_bound
        search.run(epsilon, aim, budget.max_iterations, by_pairs=by_pairs)
        result, by_pairs = search.sums.last_updates(search.best, search.iterations), search.sums.by_pairs
        is_near = result.is_within(budget.tolerance / CLUSTERING.pairs_margin)
        is_at_end = search.iterations >= budget.max_iterations or (by_pairs and not is_near)
        if result.is_within(budget.tolerance) or is_at_end:
            break
        aim = CLUSTERING.pairs_margin * aim if by_pairs else aim  # sums by pairs leave out shares, too
    return result if bool(result.error.isfinite()) else None


class _Clusters(NamedTuple):
    """The clusters of both clouds, and the epsilon of the problem between them, at least the epsilon of the points."""

    x: Groups
    y: Groups
    epsilon: float
    are_tight: bool


def _choose_clusters(problem: Problem) -> _Clusters | None:
    """Return as few clusters as resolve epsilon; None if a side has no mass, or all are far too wide for epsilon."""
    cost, epsilon = _points(problem.cost), float(problem.epsilon)
    counts = CLUSTERING.counts if math.prod(cost.shape) >= CLUSTERING.many_pairs else CLUSTERING.counts[:-1]
    widest = CLUSTERING.resolving_epsilon * epsilon
    widest = widest**0.5 if cost.metric == "sqeuclidean" else widest
    for count in counts:
        x = grouped(cost.x.detach(), problem.p, count, widest=widest)
        y = grouped(cost.y.detach(), problem.q, count, widest=widest)
        if not (len(x.masses) and len(y.masses)):
            return None
        resolved = CLUSTERING.resolving_epsilon * max(x.variance, y.variance)
        resolved = resolved if cost.metric == "sqeuclidean" else resolved**0.5
        if epsilon >= resolved:
            break
    if resolved > CLUSTERING.largest_coarsening[int(problem.is_symmetric)] * epsilon:
        return None
    return _Clusters(x, y, max(epsilon, resolved), are_tight=resolved < CLUSTERING.tight * epsilon)


@dataclass(frozen=True)
class _Solution:
    """The solution of the problem between clusters, with its round trip M factorised.

    Attributes:
        f: (K,) potentials of the clusters of p.
        f_of_points: (n,) potentials of the points of p.
        cost: from the points of q to the clusters of p.
        rows: the plan between clusters, with rows scaled to one.
        scale, factor: I - M = diag(1 / scale) L L^T diag(scale) with the factor L, except on constants. None between a
            cloud and itself.
    """

    clusters: _Clusters
    f: Float[Tensor, " K"]
    f_of_points: Float[Tensor, " n"]
    cost: PointCost
    rows: Float[Tensor, "K L"]
    scale: Float[Tensor, " L"]
    factor: Float[Tensor, "L L"] | None

    @cached_property
    def g_of_points(self) -> Float[Tensor, " m"]:
        return self._extended(self.f)

    def _extended(self, f: Tensor) -> Tensor:
        """Return the potential of the points of q that follows from the potential f of the clusters of p."""
        epsilon = self.clusters.epsilon
        return self.cost.softmin(f + epsilon * self.clusters.x.masses.log(), epsilon)

    def correction(self, change: Tensor, weights: Tensor) -> Tensor:
        """Return epsilon M (I - M)^-1 d at the points, for the change d (m,) and the weights of the points."""
        members, labels, _, q, _ = self.clusters.y
        mean = torch.zeros_like(q).index_add_(0, labels, (weights * change)[members]) / q
        assert self.factor is not None
        solution = torch.cholesky_solve((self.scale * mean).unsqueeze(-1), self.factor).squeeze(-1) / self.scale
        solution = solution - (solution * q).sum() / q.sum()
        return self._extended(self.f - self.clusters.epsilon * (self.rows @ solution)) - self.g_of_points


def _solve_between(problem: Problem) -> _Solution | None:
    """Return the solution of the problem between clusters; None where clusters do not help, or that fails."""
    clusters = _choose_clusters(problem)
    if clusters is None:
        return None
    points, (p, q), epsilon = _points(problem.cost), (clusters.x.masses, clusters.y.masses), clusters.epsilon
    # In the dtype of the points, for which the kernel may have been compiled already.
    dtype = points.dtype
    cost = PointCost(clusters.x.centres.to(dtype), clusters.y.centres.to(dtype), metric=points.metric)
    between = Problem(
        p.to(dtype), of_equal_mass(p.to(dtype), q.to(dtype)), cost, points.x.new_tensor(epsilon), dtype,
        is_symmetric=problem.is_symmetric,
    )  # fmt: skip
    tolerance = CLUSTERING.tight_tolerance if clusters.are_tight else CLUSTERING.tolerance
    result = SinkhornOnCPU().run(between, None, Budget(tolerance, CLUSTERING.max_iterations))
    if not result.is_within(tolerance) and not problem.is_symmetric:
        budget = Budget(CLUSTERING.tight_tolerance, CLUSTERING.max_iterations)
        result = better(result, SparseNewton().run(between, result.start, budget), budget.tolerance)
    f, g = result.f.double(), result.g.double()
    if not bool(torch.isfinite(f).all() and torch.isfinite(g).all()):
        return None
    rows = torch.softmax((g - cost.dense().double()) / epsilon + q.log(), -1)
    scale = (p @ rows).sqrt()
    factor = None if problem.is_symmetric else _factor(p.sqrt().unsqueeze(-1) * rows / scale, scale)
    if factor is None and not problem.is_symmetric:
        return None
    x, y = points.x.detach(), points.y.detach()
    f_of_points = PointCost(x, cost.y, metric=points.metric).softmin(g + epsilon * q.log(), epsilon)
    return _Solution(clusters, f, f_of_points, PointCost(y, cost.x, metric=points.metric), rows, scale, factor)


def _factor(half: Tensor, scale: Tensor) -> Tensor | None:
    """Return the factor L of I - B^T B plus the projection on constants, where B^T B is similar to M.

    The constant is the only eigenvector of M with the eigenvalue 1.
    """
    constant = scale / torch.linalg.vector_norm(scale)
    identity = torch.eye(len(scale), dtype=scale.dtype, device=scale.device)
    system = (1 + CLUSTERING.ridge) * identity - half.mT @ half + torch.outer(constant, constant)
    factor, failed = torch.linalg.cholesky_ex(system)
    return None if int(failed) else factor


def _points(cost: Cost) -> PointCost:
    points = cost.as_points()
    assert points is not None  # `Clusters.applies`
    return points


class _Potentials(NamedTuple):
    """Both potentials of the points."""

    f: Float[Tensor, " n"]
    g: Float[Tensor, " m"]


class _ClusterSearch:
    """Iterations that clusters correct, at one epsilon after another.

    `best` are the potentials with the smallest error, at first the ones that follow from the clusters.
    """

    def __init__(self, problem: Problem, solution: _Solution, *, share: float) -> None:
        self.solution, self.sums, self.iterations = solution, _Sums(problem, share=share), 0
        self.weights = problem.q.double()
        self.best = _Potentials(solution.f_of_points.double(), solution.g_of_points.double())

    def run(self, epsilon: float, tolerance: float, last_iteration: int, *, by_pairs: bool = False) -> None:
        """Iterate from the best potentials until the error is within the tolerance, or hardly falls."""
        self.sums.begin(epsilon, by_pairs=by_pairs)
        start, g, acceleration = self.best, self.best.g, _Anderson(self.weights.sqrt())
        smallest_error, halved_error, begin, last_halved = math.inf, math.inf, self.iterations, self.iterations
        while self.iterations < last_iteration:
            updated = self.sums.update(g, self.best.f, min(smallest_error, 1.0))
            if self.sums.by_pairs and not by_pairs and last_halved <= begin + 1 < self.iterations:
                # No step through the grid was of use: it leaves out far pairs that the plan may need.
                self.best = start
                self.run(epsilon, tolerance, last_iteration, by_pairs=True)
                return
            shift = self._mean(updated.g)  # Long steps change the constant, which would round the rest.
            g, updated = g - shift, _Potentials(updated.f + shift, updated.g - shift)
            error = float(self.sums.updates.error_of_columns(g, updated.g))
            self.iterations += 1
            report("Sinkhorn iterations", error, tolerance=tolerance)
            if error < smallest_error:
                self.best, smallest_error = updated, error
            if error <= halved_error / 2:
                halved_error, last_halved = error, self.iterations
            is_slow = self.iterations - last_halved >= CLUSTERING.slow_iterations
            aim = tolerance if self.sums.by_pairs else CLUSTERING.grid_margin * tolerance
            if error <= aim or is_slow or not math.isfinite(error):
                break
            if self.sums.widen_where_rounded(error, g) or error > CLUSTERING.restart * smallest_error:
                acceleration.clear()
            g = acceleration.next(g, self._step(g, updated, epsilon))

    def _mean(self, g: Tensor) -> Tensor:
        return (self.weights * g).sum() / self.weights.sum()

    def _step(self, g: Tensor, updated: _Potentials, epsilon: float) -> Tensor:
        """Return the step from g, of mean zero: what clusters correct, or half of the way of a cloud to itself."""
        if self.solution.factor is None:
            step = (updated.f + updated.g) / 2 - g
        else:
            change = updated.g - g
            step = change + self.solution.correction(change / epsilon, self.weights)
        return step - self._mean(step)


class _Sums:
    """The updates of f and then of g, by sums through a grid or by pairs of points.

    Attributes:
        share: the relative error that sums through a grid may have at the end.
        grid: the sums through a grid that the updates use; None before the first, and by pairs.
        by_pairs: whether sums through a grid take longer, or are not for this problem.
        with_bound: whether all sums through a grid have a bound, and not the last updates alone.
    """

    def __init__(self, problem: Problem, *, share: float) -> None:
        self.updates, self.share = build_updates(problem), share
        self.grid: GaussianSums | None = None
        self.by_pairs = self.with_bound = False

    def begin(self, epsilon: float, *, by_pairs: bool) -> None:
        self.updates = self.updates.at(self.updates.epsilon.new_tensor(epsilon))
        self.grid, self.by_pairs = None, by_pairs

    def update(self, g: Tensor, f: Tensor, error: float) -> _Potentials:
        """Return the updates from g, near f. What sums leave out is small relative to the error so far."""
        if not self.by_pairs:
            share = self.share if self.with_bound else max(self.share, CLUSTERING.grid_share_of_error * error)
            if self.grid is None or share < self.grid.share / CLUSTERING.grid_step:
                self.grid = None  # so that its memory is free
                self.grid = self._grid_near(f, g, share, is_bound=self.with_bound)
            updated = self._through_grid(self.grid, g)
            if updated is not None:
                return updated
            self.by_pairs = True
        updates, omitted = self.updates, CLUSTERING.omitted * error
        rows, columns, epsilon = _points(updates.problem.cost), _points(updates.transposed), updates.epsilon.squeeze(-1)
        f = rows.softmin(g + updates.epsilon * updates.log_q, epsilon, left_out=omitted)
        return _Potentials(f, columns.softmin(f + updates.epsilon * updates.log_p, epsilon, left_out=omitted))

    def _grid_near(self, f: Tensor, g: Tensor, share: float, *, is_bound: bool) -> GaussianSums | None:
        problem, epsilon = self.updates.problem, float(self.updates.epsilon)
        f = potential_of_plan(problem, f)
        return _points(problem.cost).sums_near(f, g, epsilon=epsilon, share=share, is_bound=is_bound)

    def _through_grid(self, grid: GaussianSums | None, g: Tensor) -> _Potentials | None:
        """Return the updates from g through a grid; None without one, or where g has moved too far for it."""
        updates = self.updates
        try:
            if grid is None:
                return None
            f = grid.softmin(g + updates.epsilon * updates.log_q)
            return _Potentials(f, grid.T.softmin(f + updates.epsilon * updates.log_p))
        except OutOfRangeError:
            return None

    def last_updates(self, best: _Potentials, iterations: int) -> SearchResult:
        """Return f and the best g with their error, by accurate updates.

        The sums of the search have left out more, and light bins hardly count in its error.
        """
        updates, epsilon, (f, g), self.grid = self.updates, float(self.updates.epsilon), best, None
        grid = None if self.by_pairs else self._grid_near(f, g, self.share, is_bound=True)
        updated, bound = self._through_grid(grid, g), 0.0
        if updated is not None:
            # The bound holds for sums between f and g as they were.
            change = sum(float((new - old).abs().amax()) for new, old in zip(updated, best, strict=True))
            updated, bound = (updated, self.share * math.exp(change / epsilon)) if change <= epsilon else (None, 0.0)
        if updated is None:
            f = updates.f_from(g)
            updated = _Potentials(f, updates.g_from(f))
        error = updates.error_of_columns(g, updated.g) + bound
        return SearchResult.without_estimates(updated.f, g, error, torch.tensor(iterations, device=g.device))

    def widen_where_rounded(self, error: float, g: Tensor) -> bool:
        """Continue by pairs in float64 where the error has reached the rounding of float32; return whether."""
        problem, epsilon = self.updates.problem, self.updates.epsilon
        rounding = CLUSTERING.rounding * torch.finfo(problem.cost.dtype).eps * (g.amax() - g.amin()) / epsilon
        if not self.by_pairs or problem.cost.dtype == torch.float64 or error >= float(rounding):
            return False
        self.updates = build_updates(detached_in_float64(problem)).at(epsilon.squeeze(-1))
        return True


class _Anderson:
    """Anderson's acceleration: the combination of the last steps that is shortest in the norm of the weights."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale
        self.history: list[tuple[Tensor, Tensor]] = []

    def clear(self) -> None:
        self.history = []

    def next(self, at: Tensor, step: Tensor) -> Tensor:
        """Return the next point after `at`, where a plain step would be `step`."""
        then = at + step
        if self.history:
            steps = torch.stack([step - s for _, s in self.history], -1) * self.scale.unsqueeze(-1)
            shares = torch.linalg.lstsq(steps, (step * self.scale).unsqueeze(-1)).solution.squeeze(-1)
            then = then - torch.stack([at + step - a - s for a, s in self.history], -1) @ shares
        self.history = [*self.history, (at, step)][-CLUSTERING.depth :]
        return then
