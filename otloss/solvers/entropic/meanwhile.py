"""What is done while another process compiles the kernel of a method: iterations that need none."""

from __future__ import annotations

import dataclasses
import math

from otloss._numba.background import StillCompilingError, declining
from otloss.solvers.entropic.interface import Budget, Method, SearchResult, better
from otloss.solvers.entropic.sinkhorn import Sinkhorn
from otloss.solvers.entropic.sinkhorn_cpu import iterate
from otloss.solvers.problem import Problem

ENTRIES = 2e7  # costs times iterations, some tenths of a second, until one looks for the kernel again
SMALLEST_COUNT = 16  # if these are fewer iterations than so many, all that fit into the time would hardly help
SHARE = 4  # one in so many iterations of the budget is done without the kernel, at most


def run_method(method: Method, problem: Problem, previous: SearchResult | None, budget: Budget) -> SearchResult:
    """Run a method with what is left of the budget; as long as its kernel is compiled elsewhere, iterate without it.

    Large problems only wait: their iterations would also take the processor from the compilation. Within a method, soft
    minima of a missing kernel are computed by torch (`_numba.background.declining`).
    """
    result, meanwhile = previous, _unused(budget, previous) // SHARE
    count = int(ENTRIES / max(1, problem.batch.numel() * math.prod(problem.cost.shape)))
    if count < SMALLEST_COUNT:
        meanwhile = 0
    processes = 1 if meanwhile else 2
    while True:
        part = dataclasses.replace(budget, max_iterations=max(1, _unused(budget, result)))
        try:
            with declining(processes=processes):
                return better(result, method.run(problem, result, part), budget.tolerance)
        except StillCompilingError as compilation:
            count = min(meanwhile, count)
            meanwhile -= count
            if not count:
                compilation.wait()
                continue
        part = dataclasses.replace(budget, patience=math.inf, max_iterations=count)
        result = better(result, _iterate(problem, result, part), budget.tolerance)
        if result.is_within(budget.tolerance):
            return result


def _unused(budget: Budget, result: SearchResult | None) -> int:
    return budget.max_iterations - (0 if result is None else result.iterations_used)


def _iterate(problem: Problem, previous: SearchResult | None, budget: Budget) -> SearchResult:
    """Return where iterations end, by the kernel of Sinkhorn if that one is compiled."""
    try:
        with declining():
            return iterate(problem, previous, budget)
    except StillCompilingError:
        return Sinkhorn().run(problem, previous, budget)
