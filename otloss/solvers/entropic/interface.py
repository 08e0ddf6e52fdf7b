"""What all searches for the potentials of an entropic problem share.

A method of the ladder (`ladder.LADDER`) is a class with the two members of `Method`. It takes a reduced problem and
what an earlier method has found, and returns potentials with the error of the marginals, per problem.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import has_float64
from otloss.solvers.histograms import of_equal_mass
from otloss.solvers.problem import Problem

# The columns of what the kernels write for each problem; `sinkhorn_cpu.KernelResults` explains them.
ERROR, ITERATIONS, POTENTIAL_ERROR, POTENTIAL_RANGE, SMALLEST_EIGENVALUE = range(5)


class Schedule(NamedTuple):
    """The numbers of Sinkhorn's schedule, the same in torch and in the numba kernels, which read them as constants.

    Attributes:
        stage_factor: epsilon of a stage over epsilon of the stage before.
        first_epsilon_over_cost: epsilon of the first stage over the largest cost, at most.
        first_check: iterations before a problem may end as slow.
        early_check, early_factor: a problem may end after `early_check` iterations already if it needs `early_factor`
            times the iterations that the budget's patience allows.
        extra_iterations: the most iterations within the tolerance until the potentials of light bins are accurate too.
        overshoot: an error this many times the smallest one shows that the over-relaxation w is too large.
        smallest_change: a smaller change of w is not made.
        largest_relaxed_step: larger steps of a potential over epsilon are not over-relaxed.
        largest_estimate: the estimate of the error of g over epsilon is a linear model, whose second order is the
            square of the estimate. Larger estimates count as infinite.
    """

    stage_factor: float = 0.25
    first_epsilon_over_cost: float = 0.25
    first_check: int = 60
    early_check: int = 20
    early_factor: float = 8.0
    extra_iterations: int = 200
    overshoot: float = 3.0
    smallest_change: float = 0.02
    largest_relaxed_step: float = 1.5
    largest_estimate: float = 0.1


SCHEDULE = Schedule()
UNMEASURED = 1e30  # the error of a start of an unbalanced problem: any error that is measured is smaller


@dataclass(frozen=True)
class Budget:
    """When a search ends. It counts iterations and not seconds: results must not depend on how busy a machine is.

    The exception is a first call: iterations that are done while a kernel is compiled (`meanwhile`) count too.

    Attributes:
        tolerance: the error of the marginals to reach.
        max_iterations: the largest number of iterations.
        patience: Sinkhorn's iteration also ends after so many iterations, or where its contraction says that it needs
            more than so many further ones. Finite where the ladder has another method for the problem.
        largest_change: if finite, a search that is within the tolerance continues until its last update changes no
            factor of the plan by a larger share, and estimates the error of g.
    """

    tolerance: float
    max_iterations: int
    patience: float = math.inf
    largest_change: float = math.inf

    @property
    def is_accurate(self) -> bool:
        """Whether the potentials themselves have to be accurate, and not the marginals alone."""
        return self.largest_change < math.inf


@dataclass(frozen=True)
class SearchResult:
    """The end of a search for the potentials, per problem and without a graph.

    Attributes:
        f: (..., n), g: (..., m), finite on all bins; f is an exact update from g. NaN where the error is not finite.
        error: (...), the sum of the errors of both marginals, relative to the mass; infinite where it is not known.
        iterations: (...).
        potential_error: (...), an estimate of the largest error of g, NaN where it is not known. This and the next two
            are None where they were not asked for or are not known.
        potential_range: (...), the largest g minus the least, over bins with mass.
        smallest_eigenvalue: (...), of the equations for g, or a bound from above.
    """

    f: Float[Tensor, "*batch n"]
    g: Float[Tensor, "*batch m"]
    error: Float[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]
    potential_error: Float[Tensor, "*batch"] | None = None
    potential_range: Float[Tensor, "*batch"] | None = None
    smallest_eigenvalue: Float[Tensor, "*batch"] | None = None

    def to(self, device: torch.device) -> SearchResult:
        """Return the same numbers on another device."""
        moved = {name: t.to(device) for name, t in vars(self).items() if t is not None}
        return dataclasses.replace(self, **moved)

    def is_within(self, tolerance: float) -> bool:
        """Return whether all errors are within the tolerance; NaN is not."""
        return not self.error.numel() or self.error.amax().item() <= tolerance

    @property
    def start(self) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch m"]]:
        """The potentials, as a start of another search: zeros where the error is not finite."""
        is_finite = self.error.isfinite().unsqueeze(-1)
        return torch.where(is_finite, self.f, 0.0), torch.where(is_finite, self.g, 0.0)

    @property
    def iterations_used(self) -> int:
        return int(self.iterations.amax()) if self.iterations.numel() else 0

    @staticmethod
    def at_start(problem: Problem) -> SearchResult:
        """Return the start of the problem, or zeros, as the result of no iteration."""
        dtype = dtype_of_potentials(problem)
        f, g = (torch.zeros_like(weights, dtype=dtype) for weights in (problem.p, problem.q))
        error = torch.full_like(problem.epsilon, torch.inf, dtype=dtype)
        if problem.start is not None:
            f, g = (potential.to(dtype) for potential in problem.start)
            error = torch.full_like(error, 2.0 if problem.marginal_penalty is None else UNMEASURED)
        return SearchResult(f, g, error, torch.zeros_like(error, dtype=torch.int64))


def better(previous: SearchResult | None, new: SearchResult, tolerance: float) -> SearchResult:
    """Return for each problem the result with the smaller error, the new one if both are within the tolerance."""
    if previous is None:
        return new
    is_new = ~(previous.error.clamp(min=tolerance) < new.error)  # an error may be NaN
    column = is_new.unsqueeze(-1)
    merged = {
        name: _where(is_new, getattr(new, name), getattr(previous, name))
        for name in ("potential_error", "potential_range", "smallest_eigenvalue")
    }
    return SearchResult(
        torch.where(column, new.f, previous.f),
        torch.where(column, new.g, previous.g),
        torch.where(is_new, new.error, previous.error),
        previous.iterations + new.iterations,
        **merged,
    )


def _where(is_new: Tensor, new: Tensor | None, previous: Tensor | None) -> Tensor | None:
    """Return the one or the other number, NaN where it is not known."""
    if new is None and previous is None:
        return None
    return torch.where(is_new, torch.nan if new is None else new, torch.nan if previous is None else previous)


class Method(Protocol):
    """A way to find the potentials of entropic problems.

    In each result f is an exact update from g. Where `budget.is_accurate` and the problem is not symmetric, a result
    should hold `potential_error`, `potential_range` and `smallest_eigenvalue`. With None for one of the first two the
    caller is not warned of uncertain gradients, and with None for any of them `dense_newton` keeps the result as it is.

    `applies` decides by `impl`, the device and whether there is a start; Newton's method runs with any `impl`. Whether
    `impl` is possible on the device and the start finite is checked before (`solve_problem`, `potentials`).
    """

    def applies(self, problem: Problem) -> bool:
        """Return whether the method is for problems of these sizes and options, on this device and with this cost."""
        ...

    def run(self, problem: Problem, previous: SearchResult | None, budget: Budget) -> SearchResult:
        """Search until the tolerance is reached, the budget is used up, or the search is too slow.

        Args:
            previous: where an earlier method ended, to start from, or None.

        Returns:
            The result of this search, with its own iterations. Problems that `previous` has solved may be left as they
            are.
        """
        ...


def in_float64(problem: Problem, *, with_graph: bool = False) -> Problem:
    """Return the same problem without a graph, or with its graph, in float64 if the device has it."""
    wide = torch.float64 if has_float64(problem.p.device) else problem.cost.dtype
    with torch.set_grad_enabled(with_graph):
        inputs = (problem.p, problem.q, problem.epsilon)
        p, q, epsilon = (t.to(wide) if with_graph else t.detach().to(wide) for t in inputs)
        if problem.marginal_penalty is None:
            q = of_equal_mass(p, q)
        cost = problem.cost if problem.cost.dtype == wide else problem.cost.to(wide)
    return dataclasses.replace(problem, p=p, q=q, cost=cost, epsilon=epsilon)


def is_queued(problem: Problem) -> bool:
    """Return whether the host does not wait for the work of the device: on a CPU, it does but for Triton's tests."""
    return problem.p.device.type != "cpu" or problem.impl == "triton"


def dtype_of_potentials(problem: Problem) -> torch.dtype:
    """Return float64 on a CPU also for float32 costs: the rounding of f counts in full in f / epsilon."""
    return torch.float64 if problem.p.device.type == "cpu" else problem.cost.dtype


def log_weights(problem: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return log p and log q, or in balanced problems of the mass M, log(p / M) and log(q / M)."""
    p, q = (w.detach().to(dtype) for w in (problem.p, problem.q))
    if problem.marginal_penalty is None:
        tiny = torch.finfo(dtype).tiny
        p, q = (w / w.sum(-1, keepdim=True).clamp(min=tiny) for w in (p, q))
    return p.log(), q.log()


def potential_of_plan(problem: Problem, f: Tensor) -> Tensor:
    """Return the f for which P_ij = p_i q_j exp((f_i + g_j - C_ij) / epsilon): f - epsilon log M if balanced."""
    if problem.marginal_penalty is not None:
        return f
    mass = problem.p.detach().to(f.dtype).sum(-1).clamp(min=torch.finfo(f.dtype).tiny)
    return f - (problem.epsilon.detach().to(f.dtype) * mass.log()).unsqueeze(-1)
