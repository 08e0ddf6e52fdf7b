"""Sinkhorn's iteration in float64: between large images before Newton's method, and as the last method."""

from __future__ import annotations

import dataclasses

import torch

from otloss.solvers.entropic.arithmetic import detached_in_float64
from otloss.solvers.entropic.interface import Budget, Method, SearchResult, Start
from otloss.solvers.entropic.newton_batch import suits_newton
from otloss.solvers.entropic.sinkhorn import Sinkhorn
from otloss.solvers.entropic.sinkhorn_cpu import is_faster_on_axes, run_sinkhorn
from otloss.solvers.problem import Problem

PATIENCE_ON_AXES = 2000  # iterations; between images of 34 x 34 to 64 x 64 Newton's method takes as long


class ImagesInFloat64(Method):
    """The method for large balanced images whose iterations are slow, but no slower than Newton's method."""

    def applies(self, problem: Problem) -> bool:
        return not problem.is_symmetric and is_faster_on_axes(problem) and suits_newton(problem)

    def run(self, problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
        """Search from the start; see `interface.Method`."""
        budget = dataclasses.replace(budget, patience=PATIENCE_ON_AXES)
        return Sinkhorn().run(detached_in_float64(problem), start, budget)


class SinkhornAsLastResort(Method):
    """The method for what the others leave, in float64: they end early, or underflow."""

    def applies(self, problem: Problem) -> bool:
        return True

    def run(self, problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
        """Search from the start; see `interface.Method`."""
        run = run_sinkhorn if problem.marginal_penalty is None else Sinkhorn().run  # whose logarithms do not underflow
        return run(detached_in_float64(problem), start, budget)


def differs_from_first(problem: Problem) -> bool:
    """Return whether the last method computes with more digits, or a wider range, than the first rung does."""
    return problem.cost.dtype == torch.float32 or problem.marginal_penalty is not None
