"""The ladder: which methods search for the potentials of an entropic problem, in which order, and when the search ends.

A rung is a tuple of methods of which the first that applies is taken. The next rung starts from what was found:

1. Sinkhorn's iteration: from clusters of large clouds, by the numba kernel for matrices, from blocks of large images,
   or in logarithms for any other problem. It ends early where its contraction says that the tolerance is far.
2. Newton's method takes the problems that are left, balanced ones from the potentials of exact transport.
3. Sinkhorn's iteration in float64, without a limit but that of the call: where Newton's method does not apply or fails.

Potentials that have to be accurate themselves, for gradients of the weights or because `solve` returns them, are
improved after the ladder, by `dense_newton`.
"""

from __future__ import annotations

import dataclasses

from otloss.solvers.entropic.clusters import Clusters
from otloss.solvers.entropic.coarse_images import CoarseImages
from otloss.solvers.entropic.interface import Budget, Method, SearchResult, in_float64, rounds_costs
from otloss.solvers.entropic.meanwhile import run_method
from otloss.solvers.entropic.newton import SparseNewton
from otloss.solvers.entropic.sinkhorn import Sinkhorn
from otloss.solvers.entropic.sinkhorn_cpu import SinkhornOnCPU
from otloss.solvers.entropic.sinkhorn_float64 import SinkhornInFloat64
from otloss.solvers.entropic.updates import measured
from otloss.solvers.problem import Problem

LADDER: tuple[tuple[Method, ...], ...] = (
    (Clusters(), SinkhornOnCPU(), CoarseImages(), Sinkhorn()),
    (SparseNewton(),),
    (SinkhornInFloat64(),),
)
PATIENCE = 250  # Newton's method with its exact start takes less time than so many iterations of Sinkhorn


def search(problem: Problem, budget: Budget) -> tuple[Problem, SearchResult]:
    """Return the potentials, for each problem the best that the methods have found, and the problem in their dtype.

    The budget is for all methods together. All but the last have `PATIENCE` only. Where potentials are so large that
    the rounding of float32 costs changes the plan, the problem is in float64 from there on, and errors are measured
    again.
    """
    rungs = [next((method for method in rung if method.applies(problem)), None) for rung in LADDER]
    methods = [method for method in rungs if method is not None]
    result = None if problem.start is None else SearchResult.at_start(problem)
    for method in methods:
        patience = budget.patience if method is methods[-1] else PATIENCE
        part = dataclasses.replace(budget, patience=patience)
        result = run_method(method, problem, result, part)
        if rounds_costs(problem, result):
            is_solved = result.is_within(budget.tolerance)
            problem = in_float64(problem)
            result = measured(problem, result)  # else its error, that of rounded costs, would count as the smaller one
            if is_solved:
                result = run_method(method, problem, result, part)
        if result.is_within(budget.tolerance) or result.most_iterations >= budget.max_iterations:
            break
    assert result is not None
    return problem, result
