"""Newton's method on the dual over the cells of the plan, for problems on which Sinkhorn is slow.

Sinkhorn is slow where the plan falls into parts that hardly exchange mass, as between clouds in clusters or with
outliers: an iteration moves next to nothing between the parts. The potentials of the exact problem are right up to a
few epsilons, and from there Newton's method (`newton_numba`) takes ten to twenty steps. Unbalanced problems start from
what an earlier search has found, or from a larger epsilon.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss._numba.threads import Work, run_on_threads
from otloss.costs import PointCost
from otloss.costs.order import METRIC_NUMBERS, order_of
from otloss.solvers.entropic.equations.updates import build_updates
from otloss.solvers.entropic.interface import ERROR, ITERATIONS, Budget, Method, SearchResult, Start
from otloss.solvers.entropic.light_columns import drop_light_columns, restore_light_columns
from otloss.solvers.entropic.messages import check_epsilon, is_astray, smallest_epsilon_over_potential
from otloss.solvers.entropic.newton_batch import scatter, search_again, select, suits_newton, with_empty_rows
from otloss.solvers.entropic.sinkhorn_cpu import penalties_of
from otloss.solvers.exact.clouds import solve_between_clouds, suits_clouds
from otloss.solvers.exact.solution import solve_exactly
from otloss.solvers.problem import Problem

if TYPE_CHECKING:
    from otloss.solvers.entropic.newton_kernels.cells_numba import Pairs
    from otloss.solvers.entropic.newton_kernels.newton_numba import NewtonProblems

MAX_STEPS = 1000
MAX_SMALL_STEPS, SMALL_PAIRS = 10_000, 2**12  # from zeros, in problems of few pairs: so many take a second or two


class ApartLimits(NamedTuple):
    """When the plan is nearly the plan of exact transport, and Sinkhorn's iteration would be slow and end early.

    This is so where epsilon tells the places of each cloud apart, and the clouds do not nearly coincide. Costs between
    the clouds alone do not show it: two groups of points may be many epsilons apart, and the plan between them smooth.

    Attributes:
        points: of each cloud, which are looked at.
        largest_count: the median of the places within about epsilon of such a point, up to which Newton's method alone
            takes a third to nine tenths of the time, in all rows of `benchmarks.hard_clouds` of 500 and more points.
        same_place: points within this share of epsilon are counted as one place.
        smallest_cost: the median of the costs to the nearest point of the other cloud over epsilon. Below it Sinkhorn's
            iteration begins near the solution.
        largest_share: the median of these costs over the median of all. Above it pairs cost nearly the same, as with
            hundreds of independent axes: exact transport takes long, and Sinkhorn's iteration half of the time.
    """

    points: int = 16
    largest_count: float = 1.5
    same_place: float = 0.01
    smallest_cost: float = 1.0
    largest_share: float = 0.75


APART_LIMITS = ApartLimits()


class SparseNewton(Method):
    """The method for slow problems: between points, or on matrices that fit the memory; in float64 on the CPU."""

    def applies(self, problem: Problem) -> bool:
        return not problem.is_symmetric and suits_newton(problem)

    def run(self, problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
        """Solve the problems that the start has not solved; see `interface.Method`."""
        unsolved, start = SearchResult.without_search(problem), start or Start.zeros(problem)
        mask = ~(start.error <= budget.tolerance)
        if not bool(mask.any()):
            return unsolved
        slow = select(problem, mask)
        solve = _solve_balanced if slow.marginal_penalty is None else _solve_unbalanced
        result = solve(slow, start.g[mask].cpu().double(), budget)
        result = with_empty_rows(slow, problem.q[mask], result)
        if not result.is_within(budget.tolerance):
            result = dataclasses.replace(result, error=result.error.masked_fill(is_astray(slow, result), torch.inf))
            check_epsilon(slow, result, budget.tolerance)  # before the last method uses up the budget
        return scatter(unsolved, mask, result)


class NewtonFirst(SparseNewton):
    """Newton's method before any iteration, for clouds whose points are epsilons apart."""

    replaces = SparseNewton

    def applies(self, problem: Problem) -> bool:
        points, is_balanced = problem.cost.as_points(), problem.marginal_penalty is None
        if points is None or not is_balanced or problem.impl != "auto" or problem.start is not None:
            return False
        if not super().applies(problem) or not problem.p.numel():
            return False
        epsilon = problem.epsilon[..., None, None]
        x, y = (cloud[..., :: max(1, cloud.shape[-2] // APART_LIMITS.points), :] for cloud in (points.x, points.y))
        costs = PointCost(x, points.y, metric=points.metric).dense() / epsilon
        nearest = costs.amin(-1).median()
        if nearest < APART_LIMITS.smallest_cost or nearest > APART_LIMITS.largest_share * costs.median():
            return False
        return all(
            _places(PointCost(some, cloud, metric=points.metric).dense() / epsilon) <= APART_LIMITS.largest_count
            for some, cloud in ((x, points.x), (y, points.y))
        )


def _places(costs: Float[Tensor, "*batch k n"]) -> float:
    """Return the median number of places within about 1 of a point, itself among them."""
    counts = (-costs).exp().sum(-1) / (-costs / APART_LIMITS.same_place).exp().sum(-1)
    return float(counts.median())


def _solve_balanced(problem: Problem, g: Tensor, budget: Budget) -> SearchResult:
    """Return the result from exact potentials, with exact updates at the columns without mass."""
    result = _run_from_exact(problem, g, budget)
    result = search_again(problem, result, budget, _search_heavy_columns)
    if not bool((problem.q == 0).any()):
        return result
    return dataclasses.replace(result, g=torch.where(problem.q > 0, result.g, build_updates(problem).g_from(result.f)))


def _search_heavy_columns(problem: Problem, budget: Budget) -> SearchResult:
    """Return the result of a search without the light columns, in which Newton's steps go astray."""
    searched = drop_light_columns(problem)
    if torch.equal(searched.q, problem.q):
        return SearchResult.without_search(problem)
    result = _run_from_exact(searched, torch.zeros_like(searched.q), budget)
    return restore_light_columns(problem, searched, result, budget)


def _solve_unbalanced(problem: Problem, g: Tensor, budget: Budget) -> SearchResult:
    """Return the result from g, and with exact updates, since columns without mass decide the potentials of empty rows.

    Light columns, which hardly count, may decide the estimate of the error: it gives no warning.
    """
    result = _run_kernel(problem, g, None, budget)
    result = search_again(problem, result, budget, _search_from_zeros)
    updates = build_updates(problem)
    g = updates.g_from(result.f)
    return dataclasses.replace(
        result, f=updates.f_from(g), g=g, potential_range=torch.full_like(result.error, torch.inf)
    )


def _search_from_zeros(problem: Problem, budget: Budget) -> SearchResult:
    """Return the result of a search of unbalanced problems through larger epsilons.

    Beside a tiny epsilon a start with a large error is a corner that Newton's method hardly leaves.
    """
    max_steps = MAX_SMALL_STEPS if math.prod(problem.cost.shape) <= SMALL_PAIRS else MAX_STEPS
    result = _run_kernel(problem, torch.zeros_like(problem.q), None, budget, max_steps=max_steps)
    # Where numbers overflowed, the next method has the whole budget.
    return dataclasses.replace(result, iterations=result.iterations.masked_fill(~result.error.isfinite(), 0))


def _run_from_exact(problem: Problem, g: Tensor, budget: Budget) -> SearchResult:
    """Return where the kernel ends from potentials of exact transport, or from g where the exact solver fails."""
    from otloss.solvers.entropic.newton_kernels.newton_numba import find_kernels

    find_kernels()  # If they are not compiled yet, exact transport would be solved again at each look for them.
    exact_problem, plans = dataclasses.replace(problem, is_exact=True), None
    try:
        solve = solve_between_clouds if suits_clouds(exact_problem) else solve_exactly
        optimum = solve(exact_problem, warns=False).optimum
        g, plans = optimum.g, torch.stack([optimum.rows, optimum.columns], -2)
    except RuntimeError:  # not certified; Newton's method measures its own error
        pass
    return _run_kernel(problem, g, plans, budget)


class _Order(NamedTuple):
    """The order of rows and columns in the kernel; neighbours among points follow each other."""

    rows: Tensor
    columns: Tensor


def _order(problem: Problem) -> _Order:
    points = problem.cost.as_points()
    if points is not None:
        return _Order(order_of(points.x), order_of(points.y))
    n, m = problem.cost.shape
    return _Order(torch.arange(n, device="cpu"), torch.arange(m, device="cpu"))


def _pairs(problem: Problem, order: _Order) -> Pairs:
    """Return the costs for the kernel; `matrix` has a first axis of matrices."""
    from otloss.costs.softmin_numba import as_columns
    from otloss.solvers.entropic.newton_kernels.cells_numba import Pairs

    cost, points = problem.cost, problem.cost.as_points()
    if points is None:
        matrices = cost.dense().reshape(-1, *cost.shape).contiguous().numpy()
        return Pairs(matrices, np.empty((0, 0)), np.empty((0, 0)), metric=0)
    x, y = points.x[order.rows].contiguous().numpy(), as_columns(points.y[order.columns].numpy(), scratch=1)
    return Pairs(np.empty((1, 0, 0)), x, y, METRIC_NUMBERS[str(points.metric)])


def _kernel_problems(problem: Problem, plans: Tensor | None, order: _Order, *, has_start: Tensor) -> NewtonProblems:
    """Return the problems for the kernel, in its order, with the cells (problems, 2, cells) of exact plans."""
    from otloss.solvers.entropic.newton_kernels.newton_numba import NewtonProblems

    p, q = problem.p, problem.q
    if problem.marginal_penalty is None:
        p, q = (w / w.sum(-1, keepdim=True) for w in (p, q))
    cells = np.empty((len(p), 2, 0), np.int64)
    if plans is not None:
        cells = np.stack([torch.argsort(order[side])[plans[:, side]].numpy() for side in range(2)], 1)
    pairs = _pairs(problem, order)
    return NewtonProblems(
        p=p[:, order.rows].contiguous().numpy(), q=q[:, order.columns].contiguous().numpy(), pairs=pairs,
        owner=np.arange(len(p)) % len(pairs.matrix), epsilon=problem.epsilon.contiguous().numpy(),
        penalties=penalties_of(problem), has_start=has_start.numpy(), plans=np.ascontiguousarray(cells),
    )  # fmt: skip


def _run_kernel(
    problem: Problem, g: Tensor, plans: Tensor | None, budget: Budget, *, max_steps: int = MAX_STEPS
) -> SearchResult:
    """Call the kernel, from g and the cells (problems, 2, cells) of the exact plans."""
    from otloss.solvers.entropic.newton_kernels.newton_numba import (
        NewtonLimits,
        build_results,
        find_kernels,
        newton_problems,
    )

    order, (n, m) = _order(problem), problem.cost.shape
    problems = _kernel_problems(problem, plans, order, has_start=(g != 0).any(-1))
    limits = NewtonLimits(
        budget.tolerance,
        budget.largest_change,
        min(budget.max_iterations, max_steps),
        # With a marginal penalty, potentials of bins that keep no mass may be larger.
        1 / smallest_epsilon_over_potential(budget.tolerance) if problem.marginal_penalty is None else np.inf,
    )
    results = build_results(n, g[:, order.columns].contiguous().numpy())
    work = Work("Newton's method", len(g) * n * m, budget.tolerance)
    run_on_threads(newton_problems, len(g), (find_kernels(), problems, limits, results), work=work)
    f, g = (torch.from_numpy(potential) for potential in (results.f, results.g))
    f, g = (torch.empty_like(t).index_copy_(1, places, t) for t, places in zip((f, g), order, strict=True))
    outcome = torch.from_numpy(results.outcome)
    return SearchResult.without_estimates(f, g, outcome[:, ERROR], outcome[:, ITERATIONS].long())
