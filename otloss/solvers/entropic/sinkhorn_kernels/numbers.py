"""The numbers of Sinkhorn's iteration, in torch and in the kernels, and the columns that the numba kernels write."""

from __future__ import annotations

from typing import NamedTuple

# In logarithms, so in torch and on a GPU: iterations at each larger epsilon, and between two looks at the contraction.
STAGE_ITERATIONS, CHECK_EVERY = 3, 8
# The columns after `interface.ERROR` and `ITERATIONS`; `sinkhorn_cpu.KernelResults` explains them.
POTENTIAL_ERROR, POTENTIAL_RANGE, SMALLEST_EIGENVALUE = range(2, 5)


class Schedule(NamedTuple):
    """The numbers of Sinkhorn's schedule, the same in torch and in the numba kernels, which read them as constants.

    Attributes:
        stage_factor: epsilon of a stage over epsilon of the stage before.
        first_epsilon_over_cost: epsilon of the first stage over the largest cost, at most.
        early_check, early_factor: after `early_check` iterations a problem ends as slow if it needs `early_factor`
            times the iterations that the budget's patience allows.
        full_check: after so many iterations it ends if it needs more than the patience allows.
        extra_iterations: the most iterations within the tolerance until the potentials of light bins are accurate too.
        overshoot: an error this many times the smallest one shows that the over-relaxation w is too large.
        smallest_change: a smaller change of w is not made.
        largest_relaxed_step: larger steps of a potential over epsilon are not over-relaxed.
        largest_estimate: the estimate of the error of g over epsilon is a linear model, whose second order is the
            square of the estimate. Larger estimates count as infinite.
    """

    stage_factor: float = 0.25
    first_epsilon_over_cost: float = 0.25
    early_check: int = 20
    early_factor: float = 8.0
    full_check: int = 60
    extra_iterations: int = 200
    overshoot: float = 3.0
    smallest_change: float = 0.02
    largest_relaxed_step: float = 1.5
    largest_estimate: float = 0.1


SCHEDULE = Schedule()
