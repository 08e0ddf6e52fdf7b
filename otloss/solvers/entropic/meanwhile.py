"""What is done while another process compiles the kernel of a method: iterations that need none."""

from __future__ import annotations

import dataclasses
import math

from otloss._numba.background import StillCompilingError, declining
from otloss.solvers.entropic.interface import Budget, Method, SearchResult, Start, better
from otloss.solvers.entropic.sinkhorn import Sinkhorn
from otloss.solvers.entropic.sinkhorn_cpu import run_sinkhorn
from otloss.solvers.problem import Problem

ENTRIES_UNTIL_CHECK = 2e7  # costs times iterations, some tenths of a second, until one looks for the kernel again
SMALLEST_COUNT = 16  # if these are fewer iterations than so many, all that fit into the time would hardly help
SHARE = 4  # one in so many iterations of the budget is done without the kernel, at most


def run_method(method: Method, problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
    """Return the result of a method; as long as its kernel is compiled elsewhere, iterate without it.

    These iterations may reach the tolerance, and then the method does not run. Large problems only wait: their
    iterations would also take the processor from the compilation. Within a method, soft minima of a missing kernel are
    computed by torch (`_numba.background.declining`).
    """
    count = int(ENTRIES_UNTIL_CHECK / max(1, problem.batch.numel() * math.prod(problem.cost.shape)))
    without_kernel = budget.max_iterations // SHARE if count >= SMALLEST_COUNT else 0
    result, processes = None, 1 if without_kernel else 2
    while True:
        try:
            with declining(processes=processes):
                new = method.run(problem, start, budget)
        except StillCompilingError as compilation:
            count = min(without_kernel, count)
            if not count:
                compilation.wait()
                continue
            without_kernel -= count
            new = _iterate(problem, start, dataclasses.replace(budget, patience=math.inf, max_iterations=count))
            result = better(result, new, budget.tolerance)
            if result.is_within(budget.tolerance):
                return result
            start = result.start
            budget = dataclasses.replace(budget, max_iterations=max(1, budget.max_iterations - new.iterations_used))
        else:
            return better(result, new, budget.tolerance)


def _iterate(problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
    """Return where iterations end, by the kernel of Sinkhorn if that one is compiled."""
    try:
        with declining():
            return run_sinkhorn(problem, start, budget)
    except StillCompilingError:
        return Sinkhorn().run(problem, start, budget)
