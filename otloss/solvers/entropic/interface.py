"""What all searches for potentials share: when they end, what they return, and the numbers of their schedule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import has_float64
from otloss.solvers.histograms import of_equal_mass
from otloss.solvers.problem import Problem

# The columns of what the kernels write for each problem; `sinkhorn_cpu.run_kernel` explains them.
ERROR, ITERATIONS, POTENTIAL_ERROR, SPREAD, LEAST_EIGENVALUE = range(5)

STAGE_FACTOR = 0.25  # epsilon of a stage over that of the stage before
FIRST_EPSILON = 0.25  # of the first stage over the largest cost, at most
LEAST_ITERATIONS, FEWEST, CLEARLY = 60, 20, 8.0  # before a problem may end as slow; FEWEST at CLEARLY the patience
SETTLING = 200  # iterations at most, once within the tolerance, until light bins have settled too
OVERSHOOT = 3.0  # an error this many times the least one shows that w is too large
LEAST_CHANGE = 0.02  # of w
LARGEST_RELAXED_STEP = 1.5  # larger steps of a potential over epsilon are not over-relaxed
# Of the error of g / epsilon by a linear model: larger ones count as infinite. The second order is the square of this.
LARGEST_ESTIMATE = 0.1
COARSE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class SearchResult:
    """Where a search for the potentials ended, per problem and without a graph.

    Attributes:
        f: (..., n), g: (..., m), finite on all bins; f is an exact update from g. NaN where the error is not finite.
        error: (...), the sum of the errors of both marginals, relative to the mass.
        iterations: (...).
        potential_error: (...), an estimate of the largest error of g. This and the next two are None where they were
            not asked for or are not known.
        spread: (...), the largest g minus the least, over bins with mass.
        least_eigenvalue: (...), of the equations for g, or a bound from above.
        plan: (..., n, m), P at these potentials, if the kernel wrote it for the gradient of the costs.
    """

    f: Float[Tensor, "*batch n"]
    g: Float[Tensor, "*batch m"]
    error: Float[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]
    potential_error: Float[Tensor, "*batch"] | None = None
    spread: Float[Tensor, "*batch"] | None = None
    least_eigenvalue: Float[Tensor, "*batch"] | None = None
    plan: Float[Tensor, "*batch n m"] | None = None

    def to(self, device: torch.device) -> SearchResult:
        """Return the same numbers on another device."""
        moved = {name: t.to(device) for name, t in vars(self).items() if t is not None}
        return dataclasses.replace(self, **moved)

    @staticmethod
    def unknown(problem: Problem) -> SearchResult:
        """Where no search has been."""
        f, g = (torch.zeros_like(w, dtype=problem.cost.dtype) for w in (problem.p, problem.q))
        off = torch.full_like(problem.epsilon, torch.inf, dtype=f.dtype)
        return SearchResult(f, g, off, torch.zeros_like(off, dtype=torch.int64))


@dataclass(frozen=True)
class Goal:
    """When a search may end: at the tolerance, or after `most` iterations.

    Attributes:
        tolerance: of the marginal error.
        most: the largest number of iterations.
        settled: if finite, a search goes on until its last update changes no factor of the plan by a larger share.
        symmetric: whether p equals q and the cost its transpose.
        with_plan: whether the kernel writes the plan too.
        patience: a search also ends where its contraction says that it needs more than so many further iterations.
    """

    tolerance: float
    most: int
    settled: float = math.inf
    symmetric: bool = False
    with_plan: bool = False
    patience: float = math.inf


Solver = Callable[[Problem, tuple[Tensor, Tensor] | None, Goal], SearchResult]


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


def log_weights(problem: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return log p and log q, or in balanced problems of the mass M, log(p / M) and log(q / M)."""
    p, q = (w.detach().to(dtype) for w in (problem.p, problem.q))
    if problem.marginal_penalty is None:
        tiny = torch.finfo(dtype).tiny
        p, q = (w / w.sum(-1, keepdim=True).clamp(min=tiny) for w in (p, q))
    return p.log(), q.log()


def of_masses(problem: Problem, f: Tensor) -> Tensor:
    """Return the f for which P_ij = p_i q_j exp((f_i + g_j - C_ij) / epsilon): f - epsilon log M if balanced."""
    if problem.marginal_penalty is not None:
        return f
    mass = problem.p.detach().to(f.dtype).sum(-1).clamp(min=torch.finfo(f.dtype).tiny)
    return f - (problem.epsilon.detach().to(f.dtype) * mass.log()).unsqueeze(-1)
