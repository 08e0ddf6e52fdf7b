"""What all searches for the potentials of an entropic problem share.

A method of the ladder (`ladder.LADDER`) is a class with the two members of `Method`. It takes a reduced problem and
the potentials to begin with, and returns potentials with the error of the marginals, per problem.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss.solvers.entropic.arithmetic import dtype_of_potentials
from otloss.solvers.problem import Problem

ERROR, ITERATIONS = range(2)  # the first columns of what the numba kernels write for each problem


@dataclass(frozen=True)
class Budget:
    """When a search ends. It counts iterations and not seconds: results must not depend on how busy a machine is.

    The exception is a first call: iterations that are done while a kernel is compiled (`meanwhile`) count too.

    Attributes:
        tolerance: the error of the marginals to reach.
        max_iterations: the largest number of iterations.
        patience: Sinkhorn's iteration also ends after so many iterations, or where its contraction says that it needs
            more than so many further ones. Finite in the first rung, where the ladder has another method for the
            problem; other methods have rules of their own, and do not read it.
        largest_change: if finite, a search that is within the tolerance continues until its last update changes no
            factor of the plan by a larger share, and estimates the error of g.
    """

    tolerance: float
    max_iterations: int
    patience: float = math.inf
    largest_change: float = math.inf

    @property
    def last_iteration(self) -> int:
        """The last iteration of Sinkhorn."""
        return int(min(self.max_iterations, self.patience))

    @property
    def is_accurate(self) -> bool:
        """Whether the potentials themselves have to be accurate, and not the marginals alone."""
        return self.largest_change < math.inf


class Start(NamedTuple):
    """The potentials to begin a search with.

    Attributes:
        f: (..., n), g: (..., m), finite; zeros in problems without a start.
        error: (...), which an earlier search has measured; infinite where none has.
    """

    f: Float[Tensor, "*batch n"]
    g: Float[Tensor, "*batch m"]
    error: Float[Tensor, "*batch"]

    @staticmethod
    def zeros(problem: Problem) -> Start:
        dtype = dtype_of_potentials(problem)
        f, g = (torch.zeros_like(weights, dtype=dtype) for weights in (problem.p, problem.q))
        return Start(f, g, torch.full_like(problem.epsilon, torch.inf, dtype=dtype))


@dataclass(frozen=True)
class SearchResult:
    """The end of a search for the potentials, per problem and without a graph.

    Attributes:
        f: (..., n), g: (..., m), finite on all bins; f is an exact update from g. They say nothing where the error is
            not finite.
        error: (...), the sum of the errors of both marginals, relative to the mass; infinite where it is not known.
        iterations: (...).
        potential_error: (...), an estimate of the largest error of g. This and the next two are NaN where they were not
            asked for or are not known.
        potential_range: (...), the largest g minus the smallest, over bins with mass. Infinite: no error is uncertain.
        smallest_eigenvalue: (...), of the equations for g, or a bound from above.
    """

    f: Float[Tensor, "*batch n"]
    g: Float[Tensor, "*batch m"]
    error: Float[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]
    potential_error: Float[Tensor, "*batch"]
    potential_range: Float[Tensor, "*batch"]
    smallest_eigenvalue: Float[Tensor, "*batch"]

    @staticmethod
    def without_estimates(f: Tensor, g: Tensor, error: Tensor, iterations: Tensor) -> SearchResult:
        unknown = torch.full_like(error, torch.nan)
        return SearchResult(f, g, error, iterations, unknown, unknown, unknown)

    def to(self, device: torch.device) -> SearchResult:
        """Return the same numbers on another device."""
        return SearchResult(**{name: t.to(device) for name, t in vars(self).items()})

    def is_within(self, tolerance: float) -> bool:
        """Return whether all errors are within the tolerance; NaN is not."""
        return not self.error.numel() or self.error.amax().item() <= tolerance

    @property
    def start(self) -> Start:
        """The potentials as a start of another search."""
        is_finite = self.error.isfinite().unsqueeze(-1)
        return Start(torch.where(is_finite, self.f, 0.0), torch.where(is_finite, self.g, 0.0), self.error)

    @property
    def iterations_used(self) -> int:
        return int(self.iterations.amax()) if self.iterations.numel() else 0

    @staticmethod
    def without_search(problem: Problem) -> SearchResult:
        """Return zeros with an infinite error, after no iteration."""
        f, g, error = Start.zeros(problem)
        return SearchResult.without_estimates(f, g, error, torch.zeros_like(error, dtype=torch.int64))


def better(previous: SearchResult | None, new: SearchResult, tolerance: float) -> SearchResult:
    """Return for each problem the result with the smaller error, the new one if both are within the tolerance."""
    if previous is None:
        return new
    old_error, new_error = (result.error.nan_to_num(nan=torch.inf, posinf=torch.inf) for result in (previous, new))
    is_new = new_error <= old_error.clamp(min=tolerance)
    merged = {
        name: torch.where(is_new.unsqueeze(-1) if name in ("f", "g") else is_new, value, getattr(previous, name))
        for name, value in vars(new).items()
    }
    return SearchResult(**{**merged, "iterations": previous.iterations + new.iterations})


def user_start(problem: Problem) -> Start | None:
    """Return the start that the user has given, of which no error is known."""
    if problem.start is None:
        return None
    dtype = dtype_of_potentials(problem)
    f, g = (potential.to(dtype) for potential in problem.start)
    return Start(f, g, torch.full_like(problem.epsilon, torch.inf, dtype=dtype))


class Method(ABC):
    """A way to find the potentials of entropic problems.

    In each rung of the ladder one method runs, the first that applies. What its `run` does not solve is left to the
    next rung, also where it gives up before its first iteration (`SearchResult.without_search`). So `applies` alone
    leaves a problem to later methods of the same rung. A method ends where the problem is not solved soon: Sinkhorn's
    iteration in the first rung where the patience of its budget is used up, any other by a rule of its own.

    In each result f is an exact update from g. Where `budget.is_accurate` a method may estimate `potential_error`,
    `potential_range` and `smallest_eigenvalue`, if that costs it little; the others are estimated after the ladder.

    Whether `impl` is possible on the device, and the start finite, is checked before (`pose_for_device`, `potentials`).

    Attributes:
        replaces: a method of a later rung that would do the same once more; it is left out after this one.
    """

    replaces: ClassVar[type[Method] | None] = None

    @abstractmethod
    def applies(self, problem: Problem) -> bool:
        """Return whether the method is for this problem: its sizes, options, device, start and cost."""

    @abstractmethod
    def run(self, problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
        """Search until the tolerance is reached, the budget is used up, or the search is too slow.

        Args:
            start: where an earlier method ended, or potentials of a similar problem, or None.

        Returns:
            The result of this search, with its own iterations. The error of problems that `start` has solved may be
            infinite: the ladder keeps their earlier result.
        """
