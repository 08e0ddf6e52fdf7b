"""The last method: Sinkhorn's iteration in float64, from where the other methods ended."""

from __future__ import annotations

import torch

from otloss.solvers.entropic.interface import Budget, Method, SearchResult, in_float64
from otloss.solvers.entropic.newton import SparseNewton
from otloss.solvers.entropic.sinkhorn import Sinkhorn
from otloss.solvers.entropic.sinkhorn_cpu import SinkhornOnCPU, iterate
from otloss.solvers.problem import Problem


class SinkhornInFloat64(Method):
    """The method for what the others may leave: they end early, or underflow.

    It does not apply where the first method is the same iteration in the same arithmetic and nothing lies between: that
    one has the whole budget.
    """

    def applies(self, problem: Problem) -> bool:
        if SparseNewton().applies(problem) or problem.cost.dtype == torch.float32:
            return True
        return problem.marginal_penalty is not None and SinkhornOnCPU().applies(problem)  # that kernel may underflow

    def run(self, problem: Problem, previous: SearchResult | None, budget: Budget) -> SearchResult:
        """Search from where another search ended; see `interface.Method`."""
        problem = in_float64(problem)
        run = iterate if problem.marginal_penalty is None else Sinkhorn().run  # whose logarithms do not underflow
        return run(problem, previous, budget)
