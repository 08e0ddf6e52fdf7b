"""The ladder: which methods search for the potentials of an entropic problem, in which order, and when the search ends.

A rung is a tuple of methods of which the first that applies runs. The next rung starts from where it ended:

1. Sinkhorn's iteration, in the form that the device and the cost allow, until its contraction says that the tolerance
   is far; but Newton's method between clouds whose points are epsilons apart, if they are too small for `Clusters`.
2. With impl="triton", Newton's method by products with the plan, on the device.
3. Between large images, Sinkhorn's iteration in float64, as long as Newton's method would take.
4. Newton's method, for balanced problems from the potentials of exact transport, unless it was the first one.
5. Sinkhorn's iteration in float64, with no limit but the budget.

A new method is a class in a file of its own, its import here, and its place in a rung before the last one.
"""

from __future__ import annotations

import dataclasses
import math

from otloss.solvers.entropic.clusters import Clusters
from otloss.solvers.entropic.coarse_images import CoarseImages
from otloss.solvers.entropic.interface import Budget, Method, SearchResult, better, user_start
from otloss.solvers.entropic.meanwhile import run_method
from otloss.solvers.entropic.newton import NewtonFirst, SparseNewton
from otloss.solvers.entropic.newton_products import NewtonByProducts
from otloss.solvers.entropic.sinkhorn import Sinkhorn
from otloss.solvers.entropic.sinkhorn_cpu import SinkhornOnCPU
from otloss.solvers.entropic.sinkhorn_float64 import ImagesInFloat64, SinkhornAsLastResort, differs_from_first
from otloss.solvers.entropic.sinkhorn_gpu import SinkhornOnGPU
from otloss.solvers.problem import Problem

LADDER: tuple[tuple[Method, ...], ...] = (
    (SinkhornOnGPU(), Clusters(), NewtonFirst(), SinkhornOnCPU(), CoarseImages(), Sinkhorn()),
    (NewtonByProducts(),),
    (ImagesInFloat64(),),
    (SparseNewton(),),
    (SinkhornAsLastResort(),),
)
PATIENCE = 250  # Newton's method with its exact start takes less time than so many iterations of Sinkhorn


def search(problem: Problem, budget: Budget) -> SearchResult:
    """Return for each problem the best potentials that the methods find, with one budget for all of them."""
    methods: list[Method] = []
    for rung in LADDER:
        first = next((method for method in rung if method.applies(problem)), None)
        if first is not None and type(first) not in {earlier.replaces for earlier in methods}:
            methods.append(first)
    last_repeats_first = len(methods) == 2 and not differs_from_first(problem)
    start, result, unused = user_start(problem), None, budget.max_iterations
    patience: float = math.inf if last_repeats_first else PATIENCE
    for method in methods:
        limits = dataclasses.replace(budget, max_iterations=unused, patience=patience)
        result = better(result, run_method(method, problem, start, limits), budget.tolerance)
        start, unused, patience = result.start, budget.max_iterations - result.iterations_used, math.inf
        if result.is_within(budget.tolerance) or unused < 1:
            break
    assert result is not None
    return result
