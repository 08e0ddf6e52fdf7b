"""Newton's method on the dual, for problems on which Sinkhorn is slow: its start, its call and its result.

Sinkhorn is slow where the plan falls into parts that hardly exchange mass, as between clouds in clusters or with
outliers: an iteration moves next to nothing between the parts. The potentials of the exact problem are right up to a
few epsilons, and from there Newton's method (`otloss.solvers.entropic.newton_numba`) takes ten to twenty steps.

Let b = g / epsilon, and let S be the plan with rows scaled to one. In balanced problems the dual as a function of b has
the gradient q - S^T p and the negative Hessian H = diag(S^T p) - S^T diag(p) S. The error of g is estimated from the
least eigenvalue of H. The equations of `otloss.solvers.derivatives` are these, divided by the weights; they cover
unbalanced problems too.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from otloss._numba import may_run_on
from otloss._numba.threads import Work, run_on_threads
from otloss.costs import Cost, DenseCost, PointCost
from otloss.costs.order import METRICS, can_leave_out, order_of
from otloss.solvers.entropic.dual import ROUNDING, Dual, bound_of_potential, error_of_potential, has_estimate
from otloss.solvers.entropic.interface import ERROR, ITERATIONS, Goal, SearchResult, in_float64
from otloss.solvers.entropic.sinkhorn import Sweep
from otloss.solvers.exact.clouds import solve_between_clouds, takes_clouds
from otloss.solvers.exact.simplex import solve_exactly
from otloss.solvers.problem import Problem

MOST_STEPS = 1000  # of Newton's method
SETTLING_STEPS = 40
SMALL_STEP = 1e-7  # of g / epsilon, with which the dense steps end
RIDGE = 1e-13  # of the masses of the columns: H does not determine parts that exchange nothing


def newton_search(
    problem: Problem, result: SearchResult, chosen: Bool[Tensor, "*batch"], goal: Goal, *, from_exact: bool
) -> SearchResult:
    """Return `result` with the chosen problems solved by Newton's method, where that lessens their error.

    With a finite `goal.settled` the method goes on until exact updates change no factor of a plan by a larger share,
    and the `potential_error` of the chosen problems is estimated.

    Args:
        from_exact: start from exact potentials (balanced problems), not from those of `result`.
    """
    hard = _chosen(problem, chosen)
    g, error, plans = result.g[chosen].cpu().double(), result.error[chosen].cpu().double(), None
    g = torch.where(error.isfinite().unsqueeze(-1), g, 0.0)
    if from_exact:
        g, plans = _exact_start(hard, g)
    f, g, error, steps = _run(hard, g, error, plans, goal)
    if hard.marginal_penalty is not None:  # columns without mass decide the potentials of empty rows
        sweep = Sweep.of(hard)
        g = sweep.g_from(f)
        f = sweep.f_from(g)
    elif bool((hard.q == 0).any()):
        g = torch.where(hard.q > 0, g, Sweep.of(hard).g_from(f))
    # The error of `result` may be NaN.
    is_better = ~(result.error[chosen].cpu().clamp(min=goal.tolerance) < error)
    potential_error = _estimated(hard, g, goal)
    new = SearchResult(f, g, error, steps, potential_error)
    return _with_better(result, chosen, new, is_better)


def settled_search(problem: Problem, result: SearchResult, chosen: Bool[Tensor, "*batch"], goal: Goal) -> SearchResult:
    """Return `result` with accurate potentials of the chosen problems, which are within the tolerance already.

    Slow modes hardly count in the marginal error. So the dense equations of each step are solved up to rounding here,
    and the steps end where one is small or does not reduce the residual beyond rounding.
    """
    hard = _chosen(problem, chosen)
    new = _settled(hard, result, chosen, goal)
    is_better = ~(result.error[chosen].cpu().clamp(min=goal.tolerance) < new.error)
    return _with_better(result, chosen, new, is_better)


def _settled(problem: Problem, result: SearchResult, chosen: Tensor, goal: Goal) -> SearchResult:
    g = result.g[chosen].cpu().double()
    sweep = Sweep.of(problem)
    dual, q = Dual.of(problem, sweep), problem.q
    b = g / sweep.epsilon
    tiny = torch.finfo(b.dtype).tiny
    done = torch.zeros(problem.batch, dtype=torch.int64, device=g.device)
    for _ in range(min(SETTLING_STEPS, goal.most)):
        gradient, curvature = dual.derivatives(b, ridge=RIDGE)
        step, failed = torch.linalg.solve_ex(curvature, gradient)
        spread = step.amax(-1) - step.amin(-1) if dual.is_balanced else 2 * step.abs().amax(-1)
        spread = spread.clamp(min=tiny)
        # A tenth of the tolerance: the last exact update of f is measured on its own.
        off = gradient.abs().sum(-1) / dual.target(b).sum(-1).clamp(min=tiny)
        unfinished = (off > 0.1 * goal.tolerance) | ((spread > SMALL_STEP) & (off > ROUNDING))
        usable = unfinished & (failed == 0) & torch.isfinite(spread)
        if not bool(usable.any()):
            break
        b = torch.where(usable.unsqueeze(-1), b + _shortened(dual, b, step, gradient, spread), b)
        done = done + usable
    f = sweep.f_from(torch.where(q > 0, b * sweep.epsilon, g))
    g = torch.where(q > 0, b * sweep.epsilon, sweep.g_from(f))
    error = sweep.error(g, sweep.g_from(f), sweep.log_q)
    return SearchResult(f, g, error, done, dual.error(g / sweep.epsilon) * problem.epsilon)


def _shortened(dual: Dual, b: Tensor, step: Tensor, gradient: Tensor, spread: Tensor) -> Tensor:
    """Return the step where it halves the derivative of the dual along itself, and elsewhere a safe share of it.

    Along a step h the third derivative of the dual is at most the second times the spread of h, its largest minus its
    least entry. So a step times log(1 + spread) / spread always increases the dual, but it is at most that logarithm.

    Source: F. Bach, Self-concordant analysis for logistic regression, 2010.
    """
    before, after = (gradient * step).sum(-1), (dual.gradient(b + step) * step).sum(-1)
    share = torch.where(after.abs() <= 0.5 * before, 1.0, torch.log1p(spread) / spread)
    return share.unsqueeze(-1) * step


def _chosen(problem: Problem, chosen: Tensor) -> Problem:
    """Return the chosen problems in float64 on the CPU, with one batch axis, or one problem between large clouds."""
    wide, cost = in_float64(problem), problem.cost
    p, q, epsilon = (t[chosen].cpu() for t in (wide.p, wide.q, wide.epsilon))
    costs: Cost
    if is_between_large_clouds(problem):
        costs = wide.cost
    else:
        matrices = (cost if isinstance(cost, DenseCost) else wide.cost).dense().detach()
        if matrices.dim() > 2:
            matrices = matrices.expand(*problem.batch, *matrices.shape[-2:])[chosen]
        costs = DenseCost.unchecked(matrices.cpu().double().contiguous())
    return dataclasses.replace(problem, p=p, q=q, epsilon=epsilon, cost=costs, start=None)


def is_between_large_clouds(problem: Problem) -> bool:
    """Return whether Newton's method visits only the pairs of points that count, and so needs no matrix."""

    cost = problem.cost
    if type(cost) is not PointCost or cost.metric not in METRICS or problem.batch.numel() != 1:
        return False
    return can_leave_out(cost.x, cost.y) and may_run_on(cost.x, cost.y)


def _exact_start(problem: Problem, g: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return potentials of exact transport and the cells of its plans, or g and None where the exact solver fails."""
    problem = dataclasses.replace(problem, is_exact=True)
    try:
        solution = solve_between_clouds(problem) if takes_clouds(problem) else solve_exactly(problem, warns=False)
    except RuntimeError:  # not certified; Newton's method measures its own error
        return g, None
    optimum = solution.optimum
    return optimum.g, torch.stack([optimum.rows, optimum.columns], -2)


def _run(
    problem: Problem, g: Tensor, error: Tensor, plans: Tensor | None, goal: Goal
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Call the kernel, from g with this error: f, g, the error and the steps."""
    from otloss.costs.softmin_numba import as_columns
    from otloss.solvers.entropic.newton_numba import answers, newton_problems

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
    filled = answers(n, g[:, by_column].numpy(), error.numpy())
    weights = p[:, by_row].contiguous().numpy(), q[:, by_column].contiguous().numpy()
    penalty = math.inf if rho is None else float(rho)
    posed = (*weights, costs, owner, problem.epsilon.contiguous().numpy(), penalty, cells)
    limits = (goal.tolerance, goal.settled, min(goal.most, MOST_STEPS))
    work = Work("Newton's method", count * n * m, goal.tolerance)
    run_on_threads(newton_problems, count, (posed, limits, filled), work=work)
    f, g, outcome = (torch.from_numpy(array) for array in filled)
    f, g = (torch.empty_like(t).index_copy_(1, order, t) for t, order in ((f, by_row), (g, by_column)))
    return f, g, outcome[:, ERROR], outcome[:, ITERATIONS].long()


def _estimated(problem: Problem, g: Tensor, goal: Goal) -> Tensor:
    """Return the error of the potentials, NaN where it is not known."""
    if goal.settled < math.inf and has_estimate(problem):
        return error_of_potential(problem, g)
    if goal.settled < math.inf and problem.marginal_penalty is not None:
        return bound_of_potential(problem, g)
    return torch.full_like(problem.epsilon, math.nan)


def _with_better(result: SearchResult, chosen: Tensor, new: SearchResult, is_better: Tensor) -> SearchResult:
    """Return `result` with the better potentials of the chosen problems."""
    assert new.potential_error is not None
    f, g, error, iterations = (t.clone() for t in (result.f, result.g, result.error, result.iterations))
    place, column = f.device, is_better.unsqueeze(-1)
    f[chosen] = torch.where(column, new.f, f[chosen].cpu().double()).to(place, f.dtype)
    g[chosen] = torch.where(column, new.g, g[chosen].cpu().double()).to(place, g.dtype)
    error[chosen] = torch.where(is_better, new.error, error[chosen].cpu().double()).to(place, error.dtype)
    iterations[chosen] += new.iterations.to(place)
    uncertain = torch.full_like(error, torch.nan) if result.potential_error is None else result.potential_error.clone()
    uncertain[chosen] = torch.where(is_better, new.potential_error, torch.inf).to(place, error.dtype)
    return dataclasses.replace(
        result, f=f, g=g, error=error, iterations=iterations, potential_error=uncertain, plan=None
    )
