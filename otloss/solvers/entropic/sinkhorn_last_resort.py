"""The last method: Sinkhorn's iteration in float64, from where the other methods ended."""

from __future__ import annotations

import torch

from otloss.solvers.entropic.interface import Budget, Method, SearchResult, in_float64
from otloss.solvers.entropic.newton import SparseNewton
from otloss.solvers.entropic.sinkhorn import Sinkhorn
from otloss.solvers.entropic.sinkhorn_cpu import iterate
from otloss.solvers.problem import Problem


class SinkhornAsLastResort(Method):
    """The method for what the others leave, in float64: they end early, or underflow.

    It does not apply where the first method is the same iteration in the same arithmetic, and no other one applies:
    then the first one has the whole budget.
    """

    def applies(self, problem: Problem) -> bool:
        is_unbalanced = problem.marginal_penalty is not None  # factors may underflow
        others_apply = problem.impl == "triton" or SparseNewton().applies(problem)
        return problem.cost.dtype == torch.float32 or is_unbalanced or others_apply

    def run(self, problem: Problem, previous: SearchResult | None, budget: Budget) -> SearchResult:
        """Search from where another search ended; see `interface.Method`."""
        problem = in_float64(problem)
        run = iterate if problem.marginal_penalty is None else Sinkhorn().run  # whose logarithms do not underflow
        return run(problem, previous, budget)
