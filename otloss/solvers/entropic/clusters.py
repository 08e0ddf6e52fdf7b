"""Entropic transport between large clouds in few dimensions, from clusters to points; balanced, on a CPU.

Clusters change only the way to the solution: the error that ends the search is the error of the points.

Let b = g / epsilon, and let M be the Markov matrix of the round trip
from the points of q to those of p and back. Near the solution Sinkhorn's iteration turns an error e into M e. It is
slow where e hardly changes over a distance of sqrt(epsilon), since M e is nearly e there. Such errors are nearly equal
for all points of a cluster, so a problem between clusters is enough to find them. If one iteration changes b by d, the
solution is

    b + (I - M)^-1 d = b + d + M (I - M)^-1 d

The last term is smooth, and is computed between clusters. d is averaged over each cluster; (I - M)^-1 is that of the
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
from otloss.solvers.entropic.interface import (
    COARSE_TOLERANCE,
    STAGE_FACTOR,
    Goal,
    SearchResult,
    Solver,
    in_float64,
    potential_of_plan,
)
from otloss.solvers.entropic.sinkhorn import STAGE_ITERATIONS, Sweep
from otloss.solvers.problem import Problem

METRICS = ("sqeuclidean", "euclidean")
MOST_DIMENSIONS = 3
LEAST_PAIRS = 2**22  # below, the numba kernel for matrices takes about as long
CLUSTERS, MANY_CLUSTERS, MANY_PAIRS = (256, 512), 1024, 2**26
CLUSTER_ITERATIONS = 1000
RESOLVING_EPSILON = 6.0  # above this multiple of the variance within a cluster, clusters stand for their points
MOST_COARSENING = 32.0  # of epsilon, for problems that the numba kernel can solve too
MOST_COARSENING_ALONE = 4.0  # between a cloud and itself, where iterations from zero are few
CLUSTER_RIDGE = 1e-9
DEPTH = 5  # of Anderson's acceleration
STAGE_TOLERANCE = 0.1
# Sums through a grid. The relative error that they may have is a share of the tolerance (GRID_SHARE) and of the error
# so far (GRID_SHARE_OF_ERROR); it falls by the factor GRID_STEP at once. A search with such sums aims at GRID_MARGIN
# times the tolerance, because the bound of the last updates is added to its error.
GRID_SHARE, GRID_SHARE_OF_ERROR, GRID_STEP, GRID_MARGIN = 0.1, 1e-2, 30.0, 0.5
LEFT_OUT = 1.0  # an iteration may leave out a share of each sum, this multiple of the last error
RESTART_FACTOR = 2.0  # the acceleration forgets its history where the error exceeds this multiple of the least error
SLOW_ITERATIONS = 20  # a search ends after so many iterations that did not halve the error
ROUNDING = 0.25  # an error in float32 does not fall below this multiple of the rounding of potentials over epsilon


def takes_clusters(problem: Problem) -> bool:
    """Return whether `search_from_clusters` applies to this problem."""
    cost = problem.cost
    if not isinstance(cost, PointCost) or cost.metric not in METRICS or problem.marginal_penalty is not None:
        return False
    if cost.x.dim() != 2 or cost.y.dim() != 2 or problem.batch.numel() != 1 or not may_run_on(cost.x, problem.p):
        return False
    n, m = cost.shape
    return cost.x.shape[-1] <= MOST_DIMENSIONS and n * m >= LEAST_PAIRS and min(n, m) > CLUSTERS[0]


def search_from_clusters(problem: Problem, solve: Solver, goal: Goal, *, only_resolved: bool) -> SearchResult | None:
    """Return the potentials, their marginal error and the number of iterations.

    The search ends early where it becomes slow. The result is None where clusters do not help: a side has no mass, the
    problem between clusters was not solved, or a symmetric problem has a far smaller epsilon than clusters resolve.

    Args:
        solve: a search for the potentials of small problems.
        only_resolved: return None also where clusters are far larger than epsilon resolves.
    """
    p, q = problem.p.detach().reshape(-1), problem.q.detach().reshape(-1)
    flat = dataclasses.replace(problem, p=p, q=q, epsilon=problem.epsilon.detach().reshape(()))
    clusters = _Clusters.of(flat, solve, symmetric=goal.symmetric)
    if clusters is None or (only_resolved and clusters.epsilon > MOST_COARSENING * float(flat.epsilon)):
        return None
    search = _ClusterSearch(flat, clusters, symmetric=goal.symmetric, share=GRID_SHARE * goal.tolerance)
    *stages, last = _steps(float(flat.epsilon), clusters.epsilon)
    for epsilon in stages:
        left = goal.most - 1 - search.iterations
        search.run(epsilon, tolerance=max(STAGE_TOLERANCE, goal.tolerance), most=min(STAGE_ITERATIONS, left))
    search.run(last, tolerance=goal.tolerance, most=goal.most - search.iterations)
    if search.best is None:
        return None
    f, g, error = search.last_updates()
    if float(error) > goal.tolerance and not search.by_pairs and search.iterations < goal.most:
        search.with_bound = True  # the sums without a bound were less accurate than planned
        search.run(last, tolerance=goal.tolerance, most=goal.most - search.iterations)
        f, g, error = search.last_updates()
    counted = torch.full(problem.batch, search.iterations, dtype=torch.int64, device=f.device)
    return SearchResult(f.expand(problem.p.shape), g.expand(problem.q.shape), error.expand(problem.batch), counted)


def _steps(last: float, first: float) -> list[float]:
    """Return falling values of epsilon, from below that of the clusters down to the last one."""
    steps = [last]
    while steps[0] / STAGE_FACTOR < 0.99 * first:
        steps.insert(0, steps[0] / STAGE_FACTOR)
    return steps


@dataclass(frozen=True)
class _Clusters:
    """The solution of the problem between clusters, with its round trip M factorised.

    Attributes:
        epsilon: of the problem between clusters, at least that of the problem.
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

    @staticmethod
    def of(problem: Problem, solve: Solver, *, symmetric: bool) -> _Clusters | None:
        cost = problem.cost
        assert isinstance(cost, PointCost)
        x, y, epsilon = cost.x.detach(), cost.y.detach(), float(problem.epsilon)
        pairs = x.shape[0] * y.shape[0]
        for count in (*CLUSTERS, MANY_CLUSTERS) if pairs >= MANY_PAIRS else CLUSTERS:
            _, _, centres_x, p, within_x = grouped(x, problem.p, count)
            members, of_members, centres_y, q, within_y = grouped(y, problem.q, count)
            if not (len(p) and len(q)):
                return None
            finest = RESOLVING_EPSILON * max(within_x, within_y)
            finest = finest if cost.metric == "sqeuclidean" else finest**0.5
            if epsilon >= finest:
                break
        if symmetric and finest > MOST_COARSENING_ALONE * epsilon:
            return None
        epsilon = max(epsilon, finest)
        width = y.new_tensor(epsilon)
        # In the dtype of the points, for which the kernel may have been compiled already.
        few_p, few_q = p.to(y.dtype), q.to(y.dtype)
        among = PointCost(centres_x.to(y.dtype), centres_y.to(y.dtype), metric=cost.metric)
        small = Problem(few_p, few_q * (few_p.sum() / few_q.sum()), among, width, y.dtype)
        result = solve(small, None, Goal(COARSE_TOLERANCE, CLUSTER_ITERATIONS, symmetric=symmetric))
        f, g = result.f.double(), result.g.double()
        if not bool(torch.isfinite(f).all() and torch.isfinite(g).all()):
            return None
        to_points = PointCost(y, among.x, metric=cost.metric)
        rows = torch.softmax((g - among.dense().double()) / epsilon + q.log(), -1)
        scale = (p @ rows).sqrt()
        factor = None if symmetric else _factor(p.sqrt().unsqueeze(-1) * rows / scale, scale)
        if factor is None and not symmetric:
            return None
        f_of_points = PointCost(x, among.y, metric=cost.metric).softmin(g + epsilon * q.log(), epsilon)
        return _Clusters(epsilon, f, p.log(), to_points, f_of_points, members, of_members, q, rows, scale, factor)

    def potential_of_points(self, f: Tensor) -> Tensor:
        """Return the potential of the points of q that follows from the potential f of the clusters of p."""
        return self.cost.softmin(f + self.epsilon * self.log_p, self.epsilon)

    def correction(self, change: Tensor, weights: Tensor, at_rest: Tensor) -> Tensor:
        """Return epsilon M (I - M)^-1 d at the points, for the change d (m,) and the weights of the points."""
        sums = torch.zeros_like(self.q).index_add_(0, self.of_members, (weights * change)[self.members])
        mean = sums / self.q
        assert self.factor is not None
        solution = torch.cholesky_solve((self.scale * mean).unsqueeze(-1), self.factor).squeeze(-1) / self.scale
        solution = solution - (solution * self.q).sum() / self.q.sum()
        return self.potential_of_points(self.f - self.epsilon * (self.rows @ solution)) - at_rest


def _factor(half: Tensor, scale: Tensor) -> Tensor | None:
    """Return the factor L of I - B^T B plus the projection on constants, where B^T B is similar to M.

    The constant is the only eigenvector of M with the eigenvalue 1.
    """
    constant = scale / torch.linalg.vector_norm(scale)
    identity = torch.eye(len(scale), dtype=scale.dtype, device=scale.device)
    system = (1 + CLUSTER_RIDGE) * identity - half.mT @ half + torch.outer(constant, constant)
    factor, failed = torch.linalg.cholesky_ex(system)
    return None if int(failed) else factor


class _ClusterSearch:
    """Iterations that clusters correct, at one epsilon after another."""

    def __init__(self, problem: Problem, clusters: _Clusters, *, symmetric: bool, share: float) -> None:
        self.clusters, self.symmetric, self.share = clusters, symmetric, share
        self.sweep, self.iterations = Sweep.of(problem), 0
        self.at_rest = clusters.potential_of_points(clusters.f)
        self.f, self.g = clusters.f_of_points.double(), self.at_rest.double()
        self.best: Tensor | None = None  # g
        self.sums: GaussianSums | None = None
        self.by_pairs = False  # where sums through a grid take longer, or are not for this problem
        self.with_bound = False  # whether all sums through a grid have one, and not those of the last updates alone

    def run(self, epsilon: float, *, tolerance: float, most: int) -> None:
        self.sweep = self.sweep.at(self.g.new_tensor(epsilon))
        self.sums, self.by_pairs = None, False
        weights = self.sweep.problem.q.detach().to(self.g.dtype)
        history = _Anderson(weights.sqrt())
        least, halved, since = float("inf"), float("inf"), 0
        for _ in range(most):
            f, updated = self._updates(LEFT_OUT * min(least, 1.0))
            error = self.sweep.error(self.g, updated, self.sweep.log_q)
            self.iterations += 1
            off = float(error)
            report("Sinkhorn iterations", off, tolerance=tolerance)
            if off < least:
                least, self.best, self.f = off, updated, f
            if not off > (tolerance if self.by_pairs else GRID_MARGIN * tolerance):
                break
            since += 1
            if off <= halved / 2:
                halved, since = off, 0
            if since >= SLOW_ITERATIONS or not off < float("inf"):
                break
            if off > RESTART_FACTOR * least:
                history.clear()
            if self.by_pairs and off < self._rounding(epsilon) and self._widen():
                history.clear()
            if self.symmetric:
                step = (f + updated) / 2 - self.g
            else:
                change = (updated - self.g) / epsilon
                step = updated - self.g + self.clusters.correction(change, weights, self.at_rest)
            self.g = history.next(self.g, step)
        if self.best is not None:
            self.g = self.best

    def _updates(self, least: float) -> tuple[Tensor, Tensor]:
        """Return f and then g. What sums leave out is small relative to the least error so far."""
        if not self.by_pairs:
            share = self.share if self.with_bound else max(self.share, GRID_SHARE_OF_ERROR * min(least, 1.0))
            if self.sums is None or share < self.sums.share / GRID_STEP:
                self.sums = None  # so that its memory is free
                self.sums = self._through_grid(self.f, self.g, share, is_bound=self.with_bound)
            updates = None if self.sums is None else self._updates_of(self.sums, self.g)
            if updates is not None:
                return updates
            self.by_pairs = True
        sweep, left_out = self.sweep, LEFT_OUT * min(least, 1.0)
        there, back = sweep.problem.cost, sweep.transposed
        assert isinstance(there, PointCost)
        assert isinstance(back, PointCost)
        epsilon = sweep.epsilon.squeeze(-1)
        f = there.softmin(self.g + sweep.epsilon * sweep.log_q, epsilon, left_out=left_out)
        return f, back.softmin(f + sweep.epsilon * sweep.log_p, epsilon, left_out=left_out)

    def _through_grid(self, f: Tensor, g: Tensor, share: float, *, is_bound: bool) -> GaussianSums | None:
        cost = self.sweep.problem.cost
        assert isinstance(cost, PointCost)
        return cost.sums_near(
            potential_of_plan(self.sweep.problem, f), g, epsilon=float(self.sweep.epsilon), share=share, is_bound=is_bound
        )

    def _updates_of(self, sums: GaussianSums, g: Tensor) -> tuple[Tensor, Tensor] | None:
        sweep = self.sweep
        try:
            f = sums.softmin(g + sweep.epsilon * sweep.log_q)
            return f, sums.T.softmin(f + sweep.epsilon * sweep.log_p)
        except OutOfRangeError:
            return None

    def last_updates(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return f, g and their error, by accurate updates from the best g.

        The sums of the search have left out more, and light bins hardly count in its error.
        """
        sweep, g = self.sweep, self.best
        assert g is not None
        self.sums = None
        sums = None if self.by_pairs else self._through_grid(self.f, g, self.share, is_bound=True)
        updates = None if sums is None else self._updates_of(sums, g)
        if updates is not None:
            # The bound is that of sums between f and g as they were.
            moved = sum(float((new - old).abs().amax()) for new, old in zip(updates, (self.f, g), strict=True))
            if moved <= float(sweep.epsilon):
                bound = self.share * math.exp(moved / float(sweep.epsilon))
                return updates[0], g, sweep.error(g, updates[1], sweep.log_q) + bound
        f = sweep.f_from(g)
        return f, g, sweep.error(g, sweep.g_from(f), sweep.log_q)

    def _rounding(self, epsilon: float) -> float:
        spread = float(self.g.amax() - self.g.amin())
        return ROUNDING * torch.finfo(self.sweep.problem.cost.dtype).eps * spread / epsilon

    def _widen(self) -> bool:
        """Continue in float64, because the error has reached the rounding of float32."""
        problem = self.sweep.problem
        if problem.cost.dtype == torch.float64 or not has_float64(problem.p.device):
            return False
        self.sweep = Sweep.of(in_float64(problem)).at(self.sweep.epsilon.squeeze(-1))
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
        self.history = [*self.history, (at, step)][-DEPTH:]
        return then
