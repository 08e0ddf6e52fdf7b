"""What is done while another process compiles the kernel of a method: iterations that need none."""

from __future__ import annotations

import dataclasses
import math

from otloss._numba.background import Counts, StillCompilingError, declining, run_when_compiled
from otloss.solvers.entropic.interface import Budget, Method, SearchResult, Start, better
from otloss.solvers.entropic.sinkhorn import Sinkhorn
from otloss.solvers.entropic.sinkhorn_cpu import run_sinkhorn
from otloss.solvers.problem import Problem

ENTRIES_UNTIL_CHECK = 2e7  # costs times iterations, some tenths of a second, until one looks for the kernel again
SMALLEST_COUNT = 16  # if these are fewer iterations than so many, all that fit into the time would hardly help
ONE_IN = 4  # one in so many iterations of the budget is done without the kernel, at most


def run_method(method: Method, problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
    """Return the result of a method; as long as its kernel is compiled elsewhere, iterate without it.

    Large problems only wait: their iterations would also take the processor from the compilation. Within a method, soft
    minima of a missing kernel are computed by torch (`_numba.background.declining`).
    """

    def run(previous: SearchResult | None) -> SearchResult:
        if previous is None:
            return method.run(problem, start, budget)
        limits = dataclasses.replace(budget, max_iterations=max(1, budget.max_iterations - previous.iterations_used))
        return better(previous, method.run(problem, previous.start, limits), budget.tolerance)

    def iterate(previous: SearchResult | None, count: int) -> SearchResult:
        limits = dataclasses.replace(budget, patience=math.inf, max_iterations=count)
        new = _iterate(problem, start if previous is None else previous.start, limits)
        return better(previous, new, budget.tolerance)

    count = int(ENTRIES_UNTIL_CHECK / max(1, problem.batch.numel() * math.prod(problem.cost.shape)))
    counts = Counts(count, budget.max_iterations // ONE_IN, SMALLEST_COUNT)
    processes = 1 if count >= SMALLEST_COUNT else 2  # A call that waits has a core for a second process.
    return run_when_compiled(
        run, iterate, lambda result: result.is_within(budget.tolerance), counts=counts, processes=processes
    )


def _iterate(problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
    """Return where iterations end, by the kernel of Sinkhorn if that one is compiled."""
    try:
        with declining():
            return run_sinkhorn(problem, start, budget)
    except StillCompilingError:
        return Sinkhorn().run(problem, start, budget)
