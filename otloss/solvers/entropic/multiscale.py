"""From clusters to points: balanced problems between two large clouds in low dimension, on a CPU.

Sinkhorn's iteration in b = g / eps is slow in its smooth errors: near the solution an error e becomes M e, where M is
the Markov matrix of the round trip from the points of q to those of p and back, and M e is nearly e where e hardly
changes over a distance of sqrt(eps). Clusters of points know these errors as well as the points do. With d the change
that one iteration makes, the solution lies at

    b + (I - M)^-1 d = b + d + M (I - M)^-1 d

and the last term, which is smooth, is found between clusters: d is averaged over them, `(I - M)^-1` is that of the
problem between clusters (dense and small, factorised once), and the remaining M takes the answer to the points, by a
soft minimum over clusters. Each iteration then lessens the error ten times or more, at any epsilon that clusters
resolve. Where they do not, they are solved at a larger epsilon. The smoothest errors are still found, for `I - M` is
nearly proportional to epsilon there, and Anderson's acceleration does the rest.

Between a cloud and itself, where f = g, one update turns the error e into -M e, and the mean of two updates in a row is
off by (M^2 - M) e / 2, an eighth of e at most: nothing else is needed there.

The start comes from the clusters too. None of this changes the problem that is solved: the error that ends the search
is that of the points.

Sources: J. Feydy, Geometric Data Analysis, Beyond Convolutions, 2020, for the start; D. Anderson, Iterative Procedures
for Nonlinear Integral Equations, 1965.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._kernels import may_run_on
from otloss.costs import PointCost
from otloss.solvers.entropic.log_domain import STAGE_FACTOR, STAGE_ITERATIONS, Sweep, closed
from otloss.solvers.entropic.problem import EntropicProblem, has_float64, in_float64

METRICS = ("sqeuclidean", "euclidean")
MOST_AXES = 3
LEAST_PAIRS = 2**22  # below, the compiled kernel for matrices takes about as long
CLUSTERS, MANY_CLUSTERS, MANY_PAIRS = (256, 512), 1024, 2**26
RESOLVED = 6.0  # epsilon over the variance within a cluster, from which clusters stand for their points
MOST_COARSENING = 32.0  # of epsilon, for problems that the compiled kernel can solve
COARSE_TOLERANCE, COARSE_ITERATIONS = 1e-3, 1000
RIDGE = 1e-9
DEPTH = 5  # of Anderson's acceleration
STAGE_TOLERANCE = 0.1
WORSE, SLOW = 2.0, 20  # an error so much above the least one starts again; so many iterations without halving it end it
ROUNDING = 0.25  # roundings of the potentials, over epsilon, at which an error in float32 stops to fall

Found = tuple[Tensor, Tensor, Tensor, Tensor]


def takes_clusters(problem: EntropicProblem) -> bool:
    """Whether this is a problem for `search_from_clusters`."""
    cost = problem.cost
    if not isinstance(cost, PointCost) or cost.metric not in METRICS or problem.marginal_penalty is not None:
        return False
    if cost.x.dim() != 2 or cost.y.dim() != 2 or problem.batch.numel() != 1 or not may_run_on(cost.x, problem.p):
        return False
    n, m = cost.shape
    return cost.x.shape[-1] <= MOST_AXES and n * m >= LEAST_PAIRS and min(n, m) > CLUSTERS[0]


def search_from_clusters(
    problem: EntropicProblem,
    solve_clusters: Callable[..., Found],
    *,
    tolerance: float,
    most: int,
    symmetric: bool,
    only_resolved: bool,
) -> Found | None:
    """Return f, g, the marginal error and the number of iterations, as `iterate_in_logs` does.

    The search ends early where it gets slow; None where clusters are of no use (no mass, or a problem between them that
    is not solved).

    Args:
        solve_clusters: as `iterate_in_logs`, for small problems.
        symmetric: as for `iterate_in_logs`.
        only_resolved: None too where clusters are far larger than epsilon resolves.
    """
    p, q = problem.p.detach().reshape(-1), problem.q.detach().reshape(-1)
    flat = dataclasses.replace(problem, p=p, q=q, epsilon=problem.epsilon.detach().reshape(()))
    clusters = _Clusters.of(flat, solve_clusters, symmetric=symmetric)
    if clusters is None or (only_resolved and clusters.epsilon > MOST_COARSENING * float(flat.epsilon)):
        return None
    search = _Search(flat, clusters, symmetric=symmetric)
    *stages, last = _steps(float(flat.epsilon), clusters.epsilon)
    for epsilon in stages:
        left = most - 1 - search.iterations
        search.run(epsilon, tolerance=max(STAGE_TOLERANCE, tolerance), most=min(STAGE_ITERATIONS, left))
    search.run(last, tolerance=tolerance, most=most - search.iterations)
    if search.best is None:
        return None
    f, g, error, _ = closed(search.sweep, *search.best[:2])
    counted = torch.full(problem.batch, search.iterations, dtype=torch.int64, device=f.device)
    return f.expand(problem.p.shape), g.expand(problem.q.shape), error.expand(problem.batch), counted


def _steps(last: float, first: float) -> list[float]:
    """Epsilons from below that of the clusters down to the last one."""
    steps = [last]
    while steps[0] / STAGE_FACTOR < 0.99 * first:
        steps.insert(0, steps[0] / STAGE_FACTOR)
    return steps


@dataclass(frozen=True)
class _Clusters:
    """The problem between clusters, solved, and its round trip, factorised.

    Attributes:
        epsilon: that of the problem, or larger.
        f: potential of the clusters of p; log_p (K,) their weights.
        cost: from the points of q to the clusters of p.
        members, of_members: the points of q with mass, and the cluster of each.
        q: weights of the clusters of q.
        rows: the plan between clusters with rows scaled to one.
        scale, factor: of I - M = diag(1 / scale) L L^T diag(scale), but for the constant; None between a cloud and
            itself.
    """

    epsilon: float
    f: Float[Tensor, " K"]
    log_p: Float[Tensor, " K"]
    cost: PointCost
    members: Int[Tensor, " held"]
    of_members: Int[Tensor, " held"]
    q: Float[Tensor, " L"]
    rows: Float[Tensor, "K L"]
    scale: Float[Tensor, " L"]
    factor: Float[Tensor, "L L"] | None

    @staticmethod
    def of(problem: EntropicProblem, solve: Callable[..., Found], *, symmetric: bool) -> _Clusters | None:
        cost = problem.cost
        assert isinstance(cost, PointCost)
        x, y, epsilon = cost.x.detach(), cost.y.detach(), float(problem.epsilon)
        pairs = x.shape[0] * y.shape[0]
        for count in (*CLUSTERS, MANY_CLUSTERS) if pairs >= MANY_PAIRS else CLUSTERS:
            _, _, centres_x, p, within_x = _grouped(x, problem.p, count)
            members, of_members, centres_y, q, within_y = _grouped(y, problem.q, count)
            if not (len(p) and len(q)):
                return None
            finest = RESOLVED * max(within_x, within_y)
            finest = finest if cost.metric == "sqeuclidean" else finest**0.5
            if epsilon >= finest:
                break
        epsilon = max(epsilon, finest)
        width = y.new_tensor(epsilon)
        # In the dtype of the points, for which the kernel may have been compiled already.
        few_p, few_q = p.to(y.dtype), q.to(y.dtype)
        among = PointCost(centres_x.to(y.dtype), centres_y.to(y.dtype), metric=cost.metric)
        small = EntropicProblem(few_p, few_q * (few_p.sum() / few_q.sum()), among, width, None, y.dtype)
        f, g, _, _ = solve(small, tolerance=COARSE_TOLERANCE, most=COARSE_ITERATIONS, symmetric=symmetric)
        f, g = f.double(), g.double()
        if not bool(torch.isfinite(f).all() and torch.isfinite(g).all()):
            return None
        to_points = PointCost(y, among.x, metric=cost.metric)
        rows = torch.softmax((g - among.dense().double()) / epsilon + q.log(), -1)
        scale = (p @ rows).sqrt()
        factor = None if symmetric else _factor(p.sqrt().unsqueeze(-1) * rows / scale, scale)
        if factor is None and not symmetric:
            return None
        return _Clusters(epsilon, f, p.log(), to_points, members, of_members, q, rows, scale, factor)

    def potential_of_points(self, f: Tensor) -> Tensor:
        """The potential of the points of q that one of the clusters of p gives."""
        return self.cost.softmin(f + self.epsilon * self.log_p, self.epsilon)

    def correction(self, change: Tensor, weights: Tensor, at_rest: Tensor) -> Tensor:
        """`eps M (I - M)^-1 d` at the points, for d (m,) and their weights."""
        sums = torch.zeros_like(self.q).index_add_(0, self.of_members, (weights * change)[self.members])
        mean = sums / self.q
        assert self.factor is not None
        solution = torch.cholesky_solve((self.scale * mean).unsqueeze(-1), self.factor).squeeze(-1) / self.scale
        solution = solution - (solution * self.q).sum() / self.q.sum()
        return self.potential_of_points(self.f - self.epsilon * (self.rows @ solution)) - at_rest


def _factor(half: Tensor, scale: Tensor) -> Tensor | None:
    """L of `I - B^T B`, B^T B similar to M, with the constant, its only eigenvector without a decay, added."""
    constant = scale / torch.linalg.vector_norm(scale)
    identity = torch.eye(len(scale), dtype=scale.dtype, device=scale.device)
    system = (1 + RIDGE) * identity - half.mT @ half + torch.outer(constant, constant)
    factor, failed = torch.linalg.cholesky_ex(system)
    return None if int(failed) else factor


def _grouped(points: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Points with mass, the cluster of each, the clusters' centres and weights, and the mean variance within one."""
    from otloss._kernels.points import order_of

    members = weights.nonzero().squeeze(-1)
    points, weights = points[members].double(), weights[members].double()
    size = max(1, -(-len(members) // count))
    of_members = torch.empty_like(members)
    if len(members):
        of_members[order_of(points, sizes=(size,))] = torch.arange(len(members), device=members.device) // size
    held = weights.new_zeros(-(-len(members) // size)).index_add_(0, of_members, weights)
    centres = points.new_zeros(len(held), points.shape[1])
    centres.index_add_(0, of_members, points * weights.unsqueeze(-1)).div_(held.unsqueeze(-1))
    within = (weights * (points - centres[of_members]).square().sum(-1)).sum() / held.sum()
    return members, of_members, centres, held, float(within)


class _Search:
    """Iterations with the correction of the clusters, at one epsilon after another."""

    def __init__(self, problem: EntropicProblem, clusters: _Clusters, *, symmetric: bool) -> None:
        self.clusters, self.symmetric = clusters, symmetric
        self.sweep, self.iterations = Sweep.of(problem), 0
        self.at_rest = clusters.potential_of_points(clusters.f)
        self.g = self.at_rest.double()
        self.best: tuple[Tensor, Tensor, Tensor] | None = None

    def run(self, epsilon: float, *, tolerance: float, most: int) -> None:
        self.sweep = self.sweep.at(self.g.new_tensor(epsilon))
        weights = self.sweep.log_q.exp()
        history = _Anderson(weights.sqrt())
        least, halved, since = float("inf"), float("inf"), 0
        for _ in range(most):
            f = self.sweep.f_from(self.g)
            updated = self.sweep.g_from(f)
            error = self.sweep.error(self.g, updated, self.sweep.log_q)
            self.iterations += 1
            off = float(error)
            if off < least:
                least, self.best = off, (f, self.g, error)
            if not off > tolerance:
                break
            since += 1
            if off <= halved / 2:
                halved, since = off, 0
            if since >= SLOW or not off < float("inf"):
                break
            if off > WORSE * least:
                history.clear()
            if off < self._rounding(epsilon) and self._widen():
                history.clear()
            if self.symmetric:
                step = (f + updated) / 2 - self.g
            else:
                change = (updated - self.g) / epsilon
                step = updated - self.g + self.clusters.correction(change, weights, self.at_rest)
            self.g = history.next(self.g, step)
        if self.best is not None:
            self.g = self.best[1]

    def _rounding(self, epsilon: float) -> float:
        spread = float(self.g.amax() - self.g.amin())
        return ROUNDING * torch.finfo(self.sweep.problem.cost.dtype).eps * spread / epsilon

    def _widen(self) -> bool:
        """Continue in float64: the rounding of float32 is reached."""
        problem = self.sweep.problem
        if problem.cost.dtype == torch.float64 or not has_float64(problem.p.device):
            return False
        self.sweep = Sweep.of(in_float64(problem)).at(self.sweep.epsilon.squeeze(-1))
        return True


class _Anderson:
    """The combination of the last steps that would be the shortest, in the norm of the weights."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale
        self.held: list[tuple[Tensor, Tensor]] = []

    def clear(self) -> None:
        self.held = []

    def next(self, at: Tensor, step: Tensor) -> Tensor:
        """Return the next point, after that at `at`, from which a plain step is `step`."""
        then = at + step
        if self.held:
            steps = torch.stack([step - s for _, s in self.held], -1) * self.scale.unsqueeze(-1)
            shares = torch.linalg.lstsq(steps, (step * self.scale).unsqueeze(-1)).solution.squeeze(-1)
            then = then - torch.stack([at + step - a - s for a, s in self.held], -1) @ shares
        self.held = [*self.held, (at, step)][-DEPTH:]
        return then
