"""Newton's method on the dual of plain barycenters, by the kernel of `ascent_numba`."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from otloss._numba.background import Counts, run_when_compiled
from otloss._numba.threads import Work, run_on_threads
from otloss.costs import DenseCost
from otloss.solvers.barycenter.iteration import iterate
from otloss.solvers.barycenter.problem import NUMBERS, BarycenterProblem, BarycenterResult, Potentials
from otloss.solvers.entropic.potentials import find_potentials
from otloss.solvers.options import Settings
from otloss.solvers.problem import Problem


def ascend_once_compiled(
    problem: BarycenterProblem, start: Potentials, tolerance: float, max_iterations: int, *, with_graph: bool
) -> BarycenterResult:
    """Return the result of `ascend`, or of iterations that reach the tolerance while its kernel is compiled."""

    def run(previous: BarycenterResult | None) -> BarycenterResult:
        used = 0 if previous is None else previous.iterations
        return ascend(problem, tolerance, max(1, max_iterations - used), with_graph=with_graph)

    def go_on(previous: BarycenterResult | None, count: int) -> BarycenterResult:
        if previous is None:
            return iterate(problem, start, tolerance, count)
        result = iterate(problem, previous.potentials, tolerance, count)
        return dataclasses.replace(result, iterations=previous.iterations + result.iterations)

    entries = problem.p.numel() * problem.cost.shape[0]
    count = max(NUMBERS.cycle * NUMBERS.window, NUMBERS.entries_until_check // entries)
    counts = Counts(count, max_iterations // 2, NUMBERS.cycle)
    return run_when_compiled(
        run, go_on, lambda result: bool((result.error <= tolerance).all()), counts=counts, entries=count * entries
    )


def ascend(problem: BarycenterProblem, tolerance: float, max_iterations: int, *, with_graph: bool) -> BarycenterResult:
    """Return the result for problems with one axis of batch.

    Without a graph the log u of histograms without weight are 0: only derivatives need them.
    """
    mass, weights = problem.p.sum(-1, keepdim=True).cpu(), problem.weights.cpu()
    p, costs = problem.p.cpu() / mass, problem.cost.dense().cpu().double().contiguous()
    (count, k, _), n = p.shape, len(costs)
    log_u, log_a, error = p.new_zeros(count, k, n), p.new_zeros(count, n), p.new_zeros(count)
    takes_part, steps = weights > 0, min(max_iterations, NUMBERS.ascent_steps)
    for counted in takes_part.unique(dim=0):  # problems in which the same histograms have a weight
        (same,) = (takes_part == counted).all(-1).nonzero(as_tuple=True)
        part = same.unsqueeze(-1), counted.nonzero().squeeze(-1)
        result = run_kernel(p[part], weights[part], costs, problem.epsilon, tolerance / NUMBERS.ascent_factor, steps)
        log_u[part], log_a[same], outcome = result
        error[same] = NUMBERS.ascent_factor * outcome[:, 0]
    # A histogram without weight has no part in the barycenter.
    for b, i in (~takes_part).nonzero().tolist() if with_graph else []:
        a, epsilon = log_a[b].exp(), p.new_tensor(problem.epsilon)
        plan = Problem(a, p[b, i] * a.sum(), DenseCost(costs), epsilon, p.dtype)
        settings = Settings(tolerance=max(tolerance, 2 * float(error[b])), grad="envelope")
        log_u[b, i] = log_a[b] + find_potentials(plan, settings)[1].f / problem.epsilon
    log_u, log_a, error = (t.to(problem.p.device) for t in (log_u, log_a + mass[..., 0, :].log(), error))
    return BarycenterResult(Potentials(log_u, torch.zeros_like(log_a), log_a), error, steps)


def run_kernel(
    p: Tensor, weights: Tensor, costs: Tensor, epsilon: float, tolerance: float, max_iterations: int
) -> list[Tensor]:
    """Return log u, log a and the outcome of `barycenter_problems`."""
    from otloss.solvers.barycenter.ascent_numba import (
        AscentLimits,
        AscentProblems,
        address_of_step,
        allocate_results,
        barycenter_problems,
    )

    (count, k, m), n = p.shape, len(costs)
    results = allocate_results(count, k, n)
    rows, shares, matrix = (t.contiguous().numpy() for t in (p, weights, costs.mT))
    problems = AscentProblems(rows, shares, matrix, epsilon)
    limits = AscentLimits(tolerance, max_iterations)
    work = Work("Newton's method on the dual of a barycenter", count * k * n * m, tolerance)
    arguments = problems, limits, results
    run_on_threads(barycenter_problems, count, (address_of_step(*arguments), *arguments), work=work)
    return [torch.from_numpy(t) for t in results]
