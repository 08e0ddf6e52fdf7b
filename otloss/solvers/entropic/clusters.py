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

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import has_float64
from otloss._numba import may_run_on
from otloss._progress import report
from otloss.costs import PointCost
from otloss.costs.gaussian_sums import GaussianSums, OutOfRangeError
from otloss.costs.order import grouped
from otloss.solvers.entropic.arithmetic import in_float64, potential_of_plan
from otloss.solvers.entropic.equations.updates import build_updates
from otloss.solvers.entropic.interface import Budget, Method, SearchResult, Start
from otloss.solvers.entropic.sinkhorn import STAGE_ITERATIONS
from otloss.solvers.entropic.sinkhorn_cpu import SinkhornOnCPU, iterate
from otloss.solvers.entropic.sinkhorn_kernels.numbers import SCHEDULE
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
    resolving_epsilon: float = 6.0
    largest_coarsening: tuple[float, float] = (32.0, 4.0)
    ridge: float = 1e-9
    depth: int = 5
    stage_tolerance: float = 0.1
    grid_share: float = 0.1
    grid_share_of_error: float = 1e-2
    grid_step: float = 30.0
    grid_margin: float = 0.5
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

        The search ends early where it becomes slow, and has no iteration where clusters do not help: a side has no
        mass, the problem between clusters was not solved, or clusters are far larger than epsilon resolves. Between a
        cloud and itself, Sinkhorn's iteration runs without clusters then. The potentials between clusters are better
        than `start`, which is what iterations have found while a kernel was compiled.
        """
        p, q = problem.p.detach().reshape(-1), problem.q.detach().reshape(-1)
        flat = dataclasses.replace(problem, p=p, q=q, epsilon=problem.epsilon.detach().reshape(()))
        clusters = _build_clusters(flat)
        result = None if clusters is None else _search_from_clusters(flat, clusters, budget)
        if result is None and problem.is_symmetric:
            return iterate(problem, start, budget)
        if result is None:
            return SearchResult.without_search(problem)
        return dataclasses.replace(
            result,
            f=result.f.expand(problem.p.shape),
            g=result.g.expand(problem.q.shape),
            error=result.error.expand(problem.batch),
            iterations=result.iterations.expand(problem.batch),
        )


def _search_from_clusters(problem: Problem, clusters: _Clusters, budget: Budget) -> SearchResult | None:
    """Search at falling values of epsilon; None where no error was finite."""
    settings = CLUSTERING
    search = _ClusterSearch(problem, clusters, share=settings.grid_share * budget.tolerance)
    *stages, last = _falling_epsilons(float(problem.epsilon), clusters.epsilon)
    for epsilon in stages:
        max_iterations = min(STAGE_ITERATIONS, budget.max_iterations - 1 - search.iterations)
        search.run(epsilon, tolerance=max(settings.stage_tolerance, budget.tolerance), max_iterations=max_iterations)
    search.run(last, tolerance=budget.tolerance, max_iterations=budget.max_iterations - search.iterations)
    if search.best is None:
        return None
    result = search.last_updates()
    if not result.is_within(budget.tolerance) and not search.by_pairs and search.iterations < budget.max_iterations:
        search.with_bound = True  # the sums without a bound were less accurate than planned
        search.run(last, tolerance=budget.tolerance, max_iterations=budget.max_iterations - search.iterations)
        result = search.last_updates()
    return result


def _falling_epsilons(last: float, first: float) -> list[float]:
    """Return falling values of epsilon, all below `first`, down to the last one."""
    values = [last]
    while values[0] / SCHEDULE.stage_factor < 0.99 * first:
        values.insert(0, values[0] / SCHEDULE.stage_factor)
    return values


@dataclass(frozen=True)
class _Clusters:
    """The solution of the problem between clusters, with its round trip M factorised.

    Attributes:
        epsilon: of the problem between clusters, at least the epsilon of the points.
        f, log_p: (K,) potentials and logarithms of the weights of the clusters of p.
        cost: from the points of q to the clusters of p.
        f_of_points: potentials of the points of p.
        members, of_members: the points of q with mass, and the cluster of each.
        q: weights of the clusters of q.
        rows: the plan between clusters, with rows scaled to one.
        scale, factor: I - M = diag(1 / scale) L L^T diag(scale) with the factor L, except on constants. None between a
            cloud and itself.
    """

    epsilon: float
    f: Float[Tensor, " K"]
    log_p: Float[Tensor, " K"]
    cost: PointCost
    f_of_points: Float[Tensor, " n"]
    members: Int[Tensor, " with_mass"]
    of_members: Int[Tensor, " with_mass"]
    q: Float[Tensor, " L"]
    rows: Float[Tensor, "K L"]
    scale: Float[Tensor, " L"]
    factor: Float[Tensor, "L L"] | None

    def potential_of_points(self, f: Tensor) -> Tensor:
        """Return the potential of the points of q that follows from the potential f of the clusters of p."""
        return self.cost.softmin(f + self.epsilon * self.log_p, self.epsilon)

    def correction(self, change: Tensor, weights: Tensor, g_of_clusters: Tensor) -> Tensor:
        """Return epsilon M (I - M)^-1 d at the points, for the change d (m,) and the weights of the points."""
        sums = torch.zeros_like(self.q).index_add_(0, self.of_members, (weights * change)[self.members])
        mean = sums / self.q
        assert self.factor is not None
        solution = torch.cholesky_solve((self.scale * mean).unsqueeze(-1), self.factor).squeeze(-1) / self.scale
        solution = solution - (solution * self.q).sum() / self.q.sum()
        return self.potential_of_points(self.f - self.epsilon * (self.rows @ solution)) - g_of_clusters


def _build_clusters(problem: Problem) -> _Clusters | None:
    """Solve the problem between clusters; None where that fails, or clusters are too wide for epsilon."""
    cost = problem.cost.as_points()
    assert cost is not None
    x, y, epsilon = cost.x.detach(), cost.y.detach(), float(problem.epsilon)
    counts = CLUSTERING.counts if x.shape[0] * y.shape[0] >= CLUSTERING.many_pairs else CLUSTERING.counts[:-1]
    for count in counts:
        _, _, centres_x, p, within_x = grouped(x, problem.p, count)
        members, of_members, centres_y, q, within_y = grouped(y, problem.q, count)
        if not (len(p) and len(q)):
            return None
        finest = CLUSTERING.resolving_epsilon * max(within_x, within_y)
        finest = finest if cost.metric == "sqeuclidean" else finest**0.5
        if epsilon >= finest:
            break
    if finest > CLUSTERING.largest_coarsening[int(problem.is_symmetric)] * epsilon:
        return None
    epsilon = max(epsilon, finest)
    # In the dtype of the points, for which the kernel may have been compiled already.
    cluster_p, cluster_q = p.to(y.dtype), q.to(y.dtype)
    among = PointCost(centres_x.to(y.dtype), centres_y.to(y.dtype), metric=cost.metric)
    small = Problem(
        cluster_p, cluster_q * (cluster_p.sum() / cluster_q.sum()), among, y.new_tensor(epsilon), y.dtype,
        is_symmetric=problem.is_symmetric,
    )  # fmt: skip
    result = SinkhornOnCPU().run(small, None, Budget(CLUSTERING.tolerance, CLUSTERING.max_iterations))
    f, g = result.f.double(), result.g.double()
    if not bool(torch.isfinite(f).all() and torch.isfinite(g).all()):
        return None
    to_points = PointCost(y, among.x, metric=cost.metric)
    rows = torch.softmax((g - among.dense().double()) / epsilon + q.log(), -1)
    scale = (p @ rows).sqrt()
    factor = None if problem.is_symmetric else _factor(p.sqrt().unsqueeze(-1) * rows / scale, scale)
    if factor is None and not problem.is_symmetric:
        return None
    f_of_points = PointCost(x, among.y, metric=cost.metric).softmin(g + epsilon * q.log(), epsilon)
    return _Clusters(epsilon, f, p.log(), to_points, f_of_points, members, of_members, q, rows, scale, factor)


def _factor(half: Tensor, scale: Tensor) -> Tensor | None:
    """Return the factor L of I - B^T B plus the projection on constants, where B^T B is similar to M.

    The constant is the only eigenvector of M with the eigenvalue 1.
    """
    constant = scale / torch.linalg.vector_norm(scale)
    identity = torch.eye(len(scale), dtype=scale.dtype, device=scale.device)
    system = (1 + CLUSTERING.ridge) * identity - half.mT @ half + torch.outer(constant, constant)
    factor, failed = torch.linalg.cholesky_ex(system)
    return None if int(failed) else factor


class _ClusterSearch:
    """Iterations that clusters correct, at one epsilon after another."""

    def __init__(self, problem: Problem, clusters: _Clusters, *, share: float) -> None:
        self.clusters, self.share = clusters, share
        self.updates, self.iterations = build_updates(problem), 0
        self.g_of_clusters = clusters.potential_of_points(clusters.f)
        self.f, self.g = clusters.f_of_points.double(), self.g_of_clusters.double()
        self.best: Tensor | None = None  # g
        self.sums: GaussianSums | None = None
        self.by_pairs = False  # where sums through a grid take longer, or are not for this problem
        self.with_bound = False  # whether all sums through a grid have a bound, and not the last updates alone

    def run(self, epsilon: float, *, tolerance: float, max_iterations: int) -> None:
        self.updates = self.updates.at(self.g.new_tensor(epsilon))
        self.sums, self.by_pairs = None, False
        weights = self.updates.problem.q.detach().to(self.g.dtype)
        history = _Anderson(weights.sqrt())
        smallest_error, halved_error, iterations = math.inf, math.inf, 0
        for _ in range(max_iterations):
            f, updated = self._next_potentials(min(smallest_error, 1.0))
            errors = self.updates.error_of_columns(self.g, updated)
            self.iterations += 1
            error = float(errors)
            report("Sinkhorn iterations", error, tolerance=tolerance)
            if error < smallest_error:
                smallest_error, self.best, self.f = error, updated, f
            if not error > (tolerance if self.by_pairs else CLUSTERING.grid_margin * tolerance):
                break
            iterations += 1
            if error <= halved_error / 2:
                halved_error, iterations = error, 0
            if iterations >= CLUSTERING.slow_iterations or not error < math.inf:
                break
            if error > CLUSTERING.restart * smallest_error:
                history.clear()
            if self.by_pairs and error < self._rounding(epsilon) and self._widen():
                history.clear()
            if self.updates.problem.is_symmetric:
                step = (f + updated) / 2 - self.g
            else:
                change = (updated - self.g) / epsilon
                step = updated - self.g + self.clusters.correction(change, weights, self.g_of_clusters)
            self.g = history.next(self.g, step)
        if self.best is not None:
            self.g = self.best

    def _next_potentials(self, error: float) -> tuple[Tensor, Tensor]:
        """Return f and then g. What sums leave out is small relative to the error so far."""
        if not self.by_pairs:
            share = self.share if self.with_bound else max(self.share, CLUSTERING.grid_share_of_error * error)
            if self.sums is None or share < self.sums.share / CLUSTERING.grid_step:
                self.sums = None  # so that its memory is free
                self.sums = self._through_grid(self.f, self.g, share, is_bound=self.with_bound)
            updated = None if self.sums is None else self._updated_by(self.sums, self.g)
            if updated is not None:
                return updated
            self.by_pairs = True
        updates, omitted = self.updates, CLUSTERING.omitted * error
        there, back = updates.problem.cost.as_points(), updates.transposed.as_points()
        assert there is not None
        assert back is not None
        epsilon = updates.epsilon.squeeze(-1)
        f = there.softmin(self.g + updates.epsilon * updates.log_q, epsilon, left_out=omitted)
        return f, back.softmin(f + updates.epsilon * updates.log_p, epsilon, left_out=omitted)

    def _through_grid(self, f: Tensor, g: Tensor, share: float, *, is_bound: bool) -> GaussianSums | None:
        cost = self.updates.problem.cost.as_points()
        assert cost is not None
        return cost.sums_near(
            potential_of_plan(self.updates.problem, f),
            g,
            epsilon=float(self.updates.epsilon),
            share=share,
            is_bound=is_bound,
        )

    def _updated_by(self, sums: GaussianSums, g: Tensor) -> tuple[Tensor, Tensor] | None:
        updates = self.updates
        try:
            f = sums.softmin(g + updates.epsilon * updates.log_q)
            return f, sums.T.softmin(f + updates.epsilon * updates.log_p)
        except OutOfRangeError:
            return None

    def last_updates(self) -> SearchResult:
        """Return f and the best g with their error, by accurate updates.

        The sums of the search have left out more, and light bins hardly count in its error.
        """
        updates, g = self.updates, self.best
        assert g is not None
        self.sums, iterations = None, torch.tensor(self.iterations, device=g.device)
        sums = None if self.by_pairs else self._through_grid(self.f, g, self.share, is_bound=True)
        updated = None if sums is None else self._updated_by(sums, g)
        if updated is not None:
            # The bound holds for sums between f and g as they were.
            change = sum(float((new - old).abs().amax()) for new, old in zip(updated, (self.f, g), strict=True))
            if change <= float(updates.epsilon):
                bound = self.share * math.exp(change / float(updates.epsilon))
                return SearchResult(updated[0], g, updates.error_of_columns(g, updated[1]) + bound, iterations)
        f = updates.f_from(g)
        return SearchResult(f, g, updates.error_of_columns(g, updates.g_from(f)), iterations)

    def _rounding(self, epsilon: float) -> float:
        range_of_g = float(self.g.amax() - self.g.amin())
        return CLUSTERING.rounding * torch.finfo(self.updates.problem.cost.dtype).eps * range_of_g / epsilon

    def _widen(self) -> bool:
        """Continue in float64, because the error has reached the rounding of float32."""
        problem = self.updates.problem
        if problem.cost.dtype == torch.float64 or not has_float64(problem.p.device):
            return False
        self.updates = build_updates(in_float64(problem)).at(self.updates.epsilon.squeeze(-1))
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
