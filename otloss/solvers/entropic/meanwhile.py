"""What is done while another process compiles the kernel of a method: iterations that need none."""

from __future__ import annotations

import dataclasses
import math
import time

import torch

from otloss._numba.background import StillCompilingError, declining
from otloss.solvers.entropic.interface import Budget, Method, SearchResult, better
from otloss.solvers.entropic.sinkhorn import Sinkhorn
from otloss.solvers.entropic.sinkhorn_cpu import iterate
from otloss.solvers.problem import Problem

ENTRIES = 2e7  # of all costs and iterations together: some tenths of a second, until one looks for the kernel again
LEAST = 16  # iterations
WORTH = 10.0  # seconds, about as long as a kernel takes to compile
SHARE = 4  # of the iterations of a budget one in so many, at most
PAUSE = 0.05  # seconds between two looks where iterations are not worth while


def run_method(method: Method, problem: Problem, previous: SearchResult | None, budget: Budget) -> SearchResult:
    """Run a method with what is left of the budget; as long as its kernel is compiled elsewhere, go on without it."""
    result, iterations = previous, None
    while True:
        used = 0 if result is None else result.most_iterations
        part = dataclasses.replace(budget, max_iterations=max(1, budget.max_iterations - used)) if used else budget
        try:
            with declining():
                return better(result, method.run(problem, result, part), budget.tolerance)
        except StillCompilingError:
            iterations = iterations or _Iterations(budget, previous)
            result = better(result, iterations.run(problem, result), budget.tolerance)
        if result.is_within(budget.tolerance):
            return result


class _Iterations:
    """Iterations in the place of a method. They are a part of the budget, and end where they would take too long."""

    def __init__(self, budget: Budget, previous: SearchResult | None) -> None:
        self._budget = dataclasses.replace(budget, patience=math.inf)
        used = 0 if previous is None else previous.most_iterations
        self._left = (budget.max_iterations - used) // SHARE

    def run(self, problem: Problem, previous: SearchResult | None) -> SearchResult:
        """Return where some iterations of Sinkhorn end, by its kernel if that one is compiled."""
        entries = problem.batch.numel() * math.prod(problem.cost.shape)
        count = min(self._left, max(LEAST, int(ENTRIES / max(1, entries))))
        self._left -= count
        if count or previous is None:
            began = time.perf_counter()
            result = _run(problem, previous, dataclasses.replace(self._budget, max_iterations=max(1, count)))
            if not self._ends_soon(previous, result, time.perf_counter() - began):
                self._left = 0
        else:
            time.sleep(PAUSE)
            result = dataclasses.replace(previous, iterations=torch.zeros_like(previous.iterations))
        return result

    def _ends_soon(self, previous: SearchResult | None, result: SearchResult, seconds: float) -> bool:
        """Whether the iterations would reach the tolerance within `WORTH` seconds, by what some of them took."""
        if previous is None or not bool(previous.error.isfinite().all()):
            return True  # it is not known yet
        fallen = float((previous.error.log() - result.error.log()).amin())
        needed = math.log(max(float(result.error.amax()), self._budget.tolerance) / self._budget.tolerance)
        return needed * seconds <= WORTH * fallen


def _run(problem: Problem, previous: SearchResult | None, budget: Budget) -> SearchResult:
    try:
        with declining():
            return iterate(problem, previous, budget)
    except StillCompilingError:
        return Sinkhorn().run(problem, previous, budget)
