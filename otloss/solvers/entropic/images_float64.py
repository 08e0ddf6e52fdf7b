"""Sinkhorn's iteration in float64 between large images, before Newton's method, which needs a matrix for them."""

from __future__ import annotations

import dataclasses

from otloss.solvers.entropic.arithmetic import detached_in_float64
from otloss.solvers.entropic.interface import Budget, Method, SearchResult, Start
from otloss.solvers.entropic.newton import SparseNewton
from otloss.solvers.entropic.sinkhorn import Sinkhorn
from otloss.solvers.entropic.sinkhorn_cpu import is_faster_on_axes
from otloss.solvers.problem import Problem

PATIENCE_ON_AXES = 2000  # iterations; between images of 34 x 34 to 64 x 64 Newton's method takes as long


class ImagesInFloat64(Method):
    """The method for large balanced images whose iterations are slow, but no slower than Newton's method."""

    def applies(self, problem: Problem) -> bool:
        return is_faster_on_axes(problem) and SparseNewton().applies(problem)

    def run(self, problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
        """Search from the start; see `interface.Method`."""
        budget = dataclasses.replace(budget, patience=PATIENCE_ON_AXES)
        return Sinkhorn().run(detached_in_float64(problem), start, budget)
