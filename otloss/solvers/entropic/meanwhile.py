"""What is done while another process compiles the kernel of a method: iterations that need none."""

from __future__ import annotations

import dataclasses
import math
import time

from otloss._numba.background import StillCompilingError, declining
from otloss.solvers.entropic.interface import Budget, Method, SearchResult, better
from otloss.solvers.entropic.sinkhorn import Sinkhorn
from otloss.solvers.entropic.sinkhorn_cpu import iterate
from otloss.solvers.problem import Problem

ENTRIES = 2e7  # costs times iterations, some tenths of a second, until one looks for the kernel again
SMALLEST_COUNT = 16  # iterations until then, at least
SHARE = 4  # one in so many iterations of the budget is done without the kernel, at most
PAUSE = 0.05  # seconds between two looks after that


def run_method(method: Method, problem: Problem, previous: SearchResult | None, budget: Budget) -> SearchResult:
    """Run a method with what is left of the budget; as long as its kernel is compiled elsewhere, iterate without it."""
    result, meanwhile = previous, _unused(budget, previous) // SHARE
    while True:
        part = dataclasses.replace(budget, max_iterations=max(1, _unused(budget, result)))
        try:
            with declining():
                return better(result, method.run(problem, result, part), budget.tolerance)
        except StillCompilingError:
            entries = max(1, problem.batch.numel() * math.prod(problem.cost.shape))
            count = min(meanwhile, max(SMALLEST_COUNT, int(ENTRIES / entries)))
            meanwhile -= count
        if count or result is None:
            part = dataclasses.replace(budget, patience=math.inf, max_iterations=max(1, count))
            result = better(result, _iterate(problem, result, part), budget.tolerance)
        else:
            time.sleep(PAUSE)
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
