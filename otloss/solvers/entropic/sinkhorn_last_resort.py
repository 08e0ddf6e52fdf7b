"""The last method: Sinkhorn's iteration in float64, from where the other methods ended."""

from __future__ import annotations

import torch

from otloss.solvers.entropic.arithmetic import detached_in_float64
from otloss.solvers.entropic.interface import Budget, Method, SearchResult, Start
from otloss.solvers.entropic.sinkhorn import Sinkhorn
from otloss.solvers.entropic.sinkhorn_cpu import run_sinkhorn
from otloss.solvers.problem import Problem


class SinkhornAsLastResort(Method):
    """The method for what the others leave, in float64: they end early, or underflow."""

    def applies(self, problem: Problem) -> bool:
        return True

    def run(self, problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
        """Search from the start; see `interface.Method`."""
        problem = detached_in_float64(problem)
        run = run_sinkhorn if problem.marginal_penalty is None else Sinkhorn().run  # whose logarithms do not underflow
        return run(problem, start, budget)


def differs_from_first(problem: Problem) -> bool:
    """Return whether the last method computes with more digits, or a wider range, than the first rung does."""
    return problem.cost.dtype == torch.float32 or problem.marginal_penalty is not None
