"""Debiased barycenters by Newton's method, for details much finer than the blur, where the plain iteration is slow.

It solves the equations of `equations` at a tau that falls as far as rounding allows. The barycenters at falling tau
converge: once tau is below the small eigenvalues of the equations, by the factor of the fall.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss.solvers.barycenter.equations import Equations, NewtonStep, find_error, find_newton_step, linearise
from otloss.solvers.barycenter.iteration import LogStep
from otloss.solvers.barycenter.problem import NUMBERS, UNKNOWN, BarycenterProblem, BarycenterResult, Potentials


def continue_in_tau(
    problem: BarycenterProblem, start: Potentials, tolerance: float, max_iterations: int
) -> BarycenterResult:
    """Take Newton steps at falling tau, and return the result at the tau of the least error."""
    matrix = problem.cost.dense()
    tau = torch.full_like(start.log_a[..., :1], NUMBERS.first_tau)
    best = BarycenterResult(start, torch.full_like(tau[..., 0], UNKNOWN), 0, tau)
    potentials, equations = start, linearise(problem, matrix, start)
    iterations, fruitless = 0, torch.zeros_like(best.error)
    while iterations < max_iterations and float(tau.max()) >= NUMBERS.smallest_tau:
        steps = min(NUMBERS.steps, max_iterations - iterations)
        end = solve_at(problem, matrix, potentials, equations, tau, tolerance, steps)
        potentials, equations, iterations = end.potentials, end.equations, iterations + end.iterations
        # Where errors are not known, the one at the smallest tau that converged is the best guess.
        is_guess = (best.error >= UNKNOWN) & (end.change < NUMBERS.small_change)
        is_better = (end.error < best.error) | is_guess
        best = best.replace(is_better, BarycenterResult(potentials, end.error, 0, tau).choose(is_better))
        fruitless = torch.where(is_better, 0.0, fruitless + 1)
        is_last = (best.error < NUMBERS.small_change) & (fruitless >= NUMBERS.fruitless_falls)
        # Where rounding makes a tau diverge, smaller ones do too; changes by rounding grow as tau falls.
        is_last = is_last | ~(end.change < NUMBERS.small_change) & ~end.is_stalled
        is_last = is_last | end.is_stalled & (NUMBERS.fall_of_tau * end.change >= best.error)
        if bool((is_last | (best.error <= tolerance)).all()):
            break
        tau = tau / NUMBERS.fall_of_tau
    return dataclasses.replace(best, iterations=iterations)


@dataclass(frozen=True)
class NewtonEnd:
    """The state in which Newton's method ends at one tau.

    Attributes:
        potentials: the last ones.
        equations: the linear equations at these potentials.
        change: what the last step changed of a, as a share of its mass.
        is_stalled: whether rounding ended the steps.
        iterations: the number of steps.
    """

    potentials: Potentials
    equations: Equations
    change: Float[Tensor, "*batch"]
    is_stalled: Bool[Tensor, "*batch"]
    iterations: int

    @property
    def error(self) -> Float[Tensor, "*batch"]:
        """The error of a as a share of its mass: what a step at tau = 0 would change, and what the last step did."""
        return (find_error(self.equations) + self.change).clamp(max=UNKNOWN)


def solve_at(
    problem: BarycenterProblem, matrix: Tensor, potentials: Potentials, equations: Equations, tau: Tensor,
    tolerance: float, steps: int,
) -> NewtonEnd:  # fmt: skip
    """Take Newton steps at one tau until they change nothing, or rounding stops them."""
    smallest = change = torch.full_like(tau[..., 0], torch.inf)
    small_steps, iterations = torch.zeros_like(smallest), 0
    for iterations in range(1, steps + 1):
        step = find_newton_step(equations, tau)
        potentials, share = move(potentials, equations, step)
        change, is_whole = (step.by_a.abs() * equations.shares).sum(-1), share == 1
        change = torch.where(share > 0, change, torch.inf)
        stalls = is_whole & (change < NUMBERS.small_change) & (change >= smallest / 2)
        small_steps, smallest = torch.where(stalls, small_steps + 1, 0.0), torch.minimum(smallest, change)
        is_done = is_whole & (change <= max(tolerance / 100, NUMBERS.smallest_change)) | (share == 0)
        if iterations > NUMBERS.steps_to_fall:
            is_done = is_done | (change > NUMBERS.divergence * smallest)
        if bool((is_done | (small_steps >= NUMBERS.stalled_steps)).all()):
            break
        if iterations < steps:
            equations = linearise(problem, matrix, potentials)
    # An iteration brings the log u of empty bins, which drift from step to step, back to the equations.
    potentials = LogStep.build(problem).update(potentials)
    equations = linearise(problem, matrix, potentials)
    return NewtonEnd(potentials, equations, change, small_steps >= NUMBERS.stalled_steps, iterations)


def move(potentials: Potentials, equations: Equations, step: NewtonStep) -> tuple[Potentials, Float[Tensor, "*batch"]]:
    """Return the potentials after the step, or a share of it that changes no bin too much, and the share.

    Singular equations may have a step that is not finite: its share is 0.
    """
    depth = equations.log_a - equations.log_a.amax(-1, keepdim=True)
    # Mass that comes back to an empty bin may do so in one step, and it may leave in one.
    reach = step.by_a.abs() / (NUMBERS.empty_log - depth).clamp(min=NUMBERS.longest_step)
    reach = reach.masked_fill((step.by_a < 0) & (depth < NUMBERS.empty_log), 0.0)
    share = 1 / reach.amax(-1, keepdim=True).clamp(min=1.0)
    log_d = potentials.log_d + share * step.by_d
    log_d = torch.maximum(log_d, log_d.amax(-1, keepdim=True) - NUMBERS.empty_bin)
    moved = Potentials(potentials.log_u + share.unsqueeze(-1) * step.by_u, log_d, equations.log_a)
    are_finite = moved.are_finite
    moved = potentials.replace(are_finite, moved.choose(are_finite))
    return moved, torch.where(are_finite, share[..., 0], 0.0)
