"""Newton's method on the dual over the cells of the plan, for problems on which Sinkhorn is slow.

Sinkhorn is slow where the plan falls into parts that hardly exchange mass, as between clouds in clusters or with
outliers: an iteration moves next to nothing between the parts. The potentials of the exact problem are right up to a
few epsilons, and from there Newton's method (`newton_numba`) takes ten to twenty steps. Unbalanced problems start from
what an earlier search has found, or from a larger epsilon.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor

from otloss._checks import has_float64, needs_torch
from otloss._numba.threads import Work, run_on_threads
from otloss.costs import GridCost, PointCost
from otloss.costs.order import METRICS, order_of
from otloss.solvers.entropic.dual import estimate_error
from otloss.solvers.entropic.interface import ERROR, ITERATIONS, Budget, SearchResult
from otloss.solvers.entropic.selection import is_between_large_clouds, scatter, select
from otloss.solvers.entropic.sinkhorn_cpu import LIMITS
from otloss.solvers.entropic.updates import build_updates
from otloss.solvers.exact.clouds import solve_between_clouds, takes_clouds
from otloss.solvers.exact.simplex import solve_exactly
from otloss.solvers.problem import Problem

MAX_STEPS = 1000


class SparseNewton:
    """The method for slow problems: between points, or on matrices that fit the memory; in float64 on the CPU."""

    def applies(self, problem: Problem) -> bool:
        (n, m), cost = problem.cost.shape, problem.cost
        if problem.is_symmetric or not has_float64(problem.p.device):
            return False
        if needs_torch(problem.p, problem.q, *cost.tensors()):
            return False
        if isinstance(cost, GridCost) and len(cost.cells) > 1 and n * m > LIMITS.largest_image:
            return False
        return n * m * problem.batch.numel() <= LIMITS.most_entries or is_between_large_clouds(problem)

    def run(self, problem: Problem, found: SearchResult | None, budget: Budget) -> SearchResult:
        """Solve the problems that `found` has not solved; see `interface.Method`."""
        found = SearchResult.at_start(problem) if found is None else found
        chosen = ~(found.error <= budget.tolerance)
        if not bool(chosen.any()):
            return dataclasses.replace(found, iterations=torch.zeros_like(found.iterations))
        slow = select(problem, chosen)
        g, error, cells = found.start[1][chosen].cpu().double(), found.error[chosen].cpu().double(), None
        if slow.marginal_penalty is None:
            g, cells = _exact_start(slow, g)
        result = _run_kernel(slow, g, error, cells, budget)
        f, g = result.f, result.g
        if slow.marginal_penalty is not None:  # columns without mass decide the potentials of empty rows
            updates = build_updates(slow)
            g = updates.g_from(f)
            f = updates.f_from(g)
        elif bool((slow.q == 0).any()):
            g = torch.where(slow.q > 0, g, build_updates(slow).g_from(f))
        estimate = estimate_error(slow, g) if budget.is_accurate else torch.full_like(slow.epsilon, math.nan)
        return scatter(found, chosen, dataclasses.replace(result, f=f, g=g, potential_error=estimate))


def _exact_start(problem: Problem, g: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return potentials of exact transport and the cells of its plans, or g and None where the exact solver fails."""
    problem = dataclasses.replace(problem, is_exact=True)
    try:
        solution = solve_between_clouds(problem) if takes_clouds(problem) else solve_exactly(problem, warns=False)
    except RuntimeError:  # not certified; Newton's method measures its own error
        return g, None
    optimum = solution.optimum
    return optimum.g, torch.stack([optimum.rows, optimum.columns], -2)


def _run_kernel(problem: Problem, g: Tensor, error: Tensor, plans: Tensor | None, budget: Budget) -> SearchResult:
    """Call the kernel, from g with this error and the cells (problems, 2, cells) of the exact plans."""
    from otloss.costs.softmin_numba import as_columns
    from otloss.solvers.entropic.newton_numba import build_results, newton_problems

    rho, cost = problem.marginal_penalty, problem.cost
    p, q = problem.p, problem.q
    if rho is None:
        p, q = (w / w.sum(-1, keepdim=True) for w in (p, q))
    count, (n, m) = len(p), cost.shape
    cells = np.empty((count, 2, 0), np.int64) if plans is None else plans.numpy()
    by_row, by_column = (torch.arange(size, device="cpu") for size in (n, m))
    if isinstance(cost, PointCost):
        by_row, by_column = order_of(cost.x), order_of(cost.y)
        place = [torch.argsort(order) for order in (by_row, by_column)]
        cells = cells if plans is None else np.stack([place[k][plans[:, k]].numpy() for k in range(2)], 1)
        y = as_columns(cost.y[by_column].numpy(), scratch=1)
        costs = np.empty((1, 0, 0)), cost.x[by_row].contiguous().numpy(), y, METRICS[str(cost.metric)]
    else:
        costs = cost.dense().reshape(-1, n, m).numpy(), np.empty((0, 0)), np.empty((0, 0)), 0
    owner = np.arange(count) % len(costs[0])
    results = build_results(n, g[:, by_column].numpy())
    weights = p[:, by_row].contiguous().numpy(), q[:, by_column].contiguous().numpy()
    penalty = math.inf if rho is None else float(rho)
    has_start = error.isfinite().numpy()
    problems = (*weights, costs, owner, problem.epsilon.contiguous().numpy(), penalty, has_start, cells)
    limits = (budget.tolerance, budget.largest_change, min(budget.max_iterations, MAX_STEPS))
    work = Work("Newton's method", count * n * m, budget.tolerance)
    run_on_threads(newton_problems, count, (problems, limits, results), work=work)
    f, g, outcome = (torch.from_numpy(array) for array in results)
    f, g = (torch.empty_like(t).index_copy_(1, order, t) for t, order in ((f, by_row), (g, by_column)))
    return SearchResult(f, g, outcome[:, ERROR], outcome[:, ITERATIONS].long())
