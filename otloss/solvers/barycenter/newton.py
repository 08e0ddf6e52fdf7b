"""Debiased barycenters by Newton's method, for details much finer than the blur, where the plain iteration is slow.

Each step is at the tau that tells the least error (`debiased_error`). Far from the barycenter that does not converge:
the equations of `equations` are then solved at one tau after the other, which falls as far as rounding allows, and the
steps start there. The barycenters at falling tau converge: once tau is below the small eigenvalues of the equations, by
the factor of the fall.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from otloss.solvers.barycenter.debiased_error import HistogramDetails, find_error
from otloss.solvers.barycenter.equations import Equations, NewtonStep, complete_step, find_newton_step, linearise
from otloss.solvers.barycenter.iteration import LogStep
from otloss.solvers.barycenter.problem import NUMBERS, UNKNOWN, BarycenterProblem, BarycenterResult, Potentials


def take_newton_steps(
    problem: BarycenterProblem, start: Potentials, tolerance: float, max_iterations: int
) -> BarycenterResult:
    """Take steps at the tau of the least error, from the start, and then from where a falling tau leads."""
    matrix = problem.cost.dense()
    search = Search(problem, matrix, HistogramDetails.build(problem, matrix), tolerance)
    result = search.take_steps(start, max_iterations)
    is_open = result.error > tolerance
    if result.iterations < max_iterations and bool(is_open.any()):
        search = dataclasses.replace(search, problem=problem.choose(is_open), details=search.details.choose(is_open))
        far = search.continue_in_tau(start.choose(is_open), max_iterations - result.iterations)
        result = result.choose_better(is_open, far)
        if bool((far.error > tolerance).any()) and result.iterations < max_iterations:
            near = search.take_steps(far.potentials, max_iterations - result.iterations)
            result = result.choose_better(is_open, near)
    return result


@dataclass(frozen=True)
class Search:
    """What all steps share."""

    problem: BarycenterProblem
    matrix: Float[Tensor, "n n"]
    details: HistogramDetails
    tolerance: float

    def linearise(self, potentials: Potentials) -> Equations:
        return linearise(self.problem, self.matrix, potentials)

    def take_steps(self, potentials: Potentials, max_iterations: int) -> BarycenterResult:
        """Take steps, each at the tau that tells the least error, until it is small or does not fall."""
        best = BarycenterResult(potentials, torch.full_like(potentials.log_a[..., 0], UNKNOWN), 0)
        iteration, iterations, fruitless = LogStep.build(self.problem), 0, torch.zeros_like(best.error)
        while True:
            equations = self.linearise(potentials)
            error, tau = find_error(equations, self.details, self.tolerance)
            fruitless = torch.where(error < best.error / 2, 0.0, fruitless + 1)
            everything = torch.ones_like(error, dtype=torch.bool)
            best = best.choose_better(everything, BarycenterResult(potentials, error, 0))
            is_done = (best.error <= self.tolerance) | (fruitless > NUMBERS.fruitless_steps)
            if iterations >= max_iterations or bool(is_done.all()):
                return dataclasses.replace(best, iterations=iterations)
            potentials = iteration.update(move_bins(potentials, equations, find_newton_step(equations, tau)))
            iterations += 1

    def continue_in_tau(self, potentials: Potentials, max_iterations: int) -> BarycenterResult:
        """Solve the equations at falling tau, and return the potentials of the least error."""
        tau = torch.full_like(potentials.log_a[..., :1], NUMBERS.first_tau)
        best = BarycenterResult(potentials, torch.full_like(tau[..., 0], UNKNOWN), 0)
        iterations = 0
        while iterations < max_iterations and float(tau.max()) >= NUMBERS.smallest_tau:
            end = self.solve_at(tau, potentials, min(NUMBERS.steps, max_iterations - iterations))
            potentials, iterations = end.potentials, iterations + end.iterations
            error = find_error(self.linearise(potentials), self.details, self.tolerance).error + end.change
            converges = end.change < NUMBERS.small_change
            # Where errors are not known, the one at the smallest tau that converged is the best guess.
            is_better = (error < best.error) | (best.error >= UNKNOWN) & converges
            previous_error, result = best.error, BarycenterResult(potentials, error.clamp(max=UNKNOWN), 0)
            best = best.replace(is_better, result.choose(is_better))
            # Where rounding makes a tau diverge, smaller ones do too; changes by rounding grow as tau falls.
            is_last = ~converges | (NUMBERS.fall_of_tau * end.change >= best.error) | (best.error <= self.tolerance)
            if bool((is_last | (best.error < NUMBERS.near) & (error >= previous_error)).all()):
                break
            tau = tau / NUMBERS.fall_of_tau
        return dataclasses.replace(best, iterations=iterations)

    def solve_at(self, tau: Tensor, potentials: Potentials, max_steps: int) -> NewtonEnd:
        """Take Newton steps at one tau until they change nothing, or rounding stops them."""
        smallest = change = torch.full_like(tau[..., 0], torch.inf)
        stalled, iterations = torch.zeros_like(smallest), 0
        sufficient = max(min(self.tolerance, NUMBERS.sufficient_change), NUMBERS.smallest_change)
        is_done = torch.zeros_like(smallest, dtype=torch.bool)
        while iterations < max_steps and not bool(is_done.all()):
            equations = self.linearise(potentials)
            step = find_newton_step(equations, tau)
            potentials, share = move_by_share(potentials, equations, step)
            change, is_whole = (step.by_a.abs() * equations.shares).sum(-1), share == 1
            change = torch.where(share > 0, change, torch.inf)
            stalls = is_whole & (change < NUMBERS.small_change) & (change >= smallest / 2)
            stalled, smallest = torch.where(stalls, stalled + 1, 0.0), torch.minimum(smallest, change)
            is_done = is_whole & (change <= sufficient) | (share == 0) | (stalled >= NUMBERS.stalled_steps)
            iterations += 1
        # An iteration brings the log u of empty bins, which drift from step to step, back to the equations.
        return NewtonEnd(LogStep.build(self.problem).update(potentials), change, iterations)


@dataclass(frozen=True)
class NewtonEnd:
    """The state in which Newton's method ends at one tau.

    Attributes:
        potentials: the last ones.
        change: what the last step changed of a, as a share of its mass.
        iterations: the number of steps.
    """

    potentials: Potentials
    change: Float[Tensor, "*batch"]
    iterations: int


def move_bins(potentials: Potentials, equations: Equations, step: NewtonStep) -> Potentials:
    """Return the potentials after a step that changes each bin by no more than the longest step.

    Near the barycenter only bins with little mass change by more. Nearly empty ones may lose all mass in one step.
    """
    depth = equations.log_a - equations.log_a.amax(-1, keepdim=True)
    by_a = step.by_a.clamp(max=NUMBERS.longest_step)
    by_a = torch.where(depth < NUMBERS.empty_log, by_a, by_a.clamp(min=-NUMBERS.longest_step))
    return move(potentials, equations, complete_step(equations, by_a), torch.ones_like(by_a[..., :1]))[0]


def move_by_share(
    potentials: Potentials, equations: Equations, step: NewtonStep
) -> tuple[Potentials, Float[Tensor, "*batch"]]:
    """Return the potentials after the step, or a share of it that changes no bin too much, and the share."""
    depth = equations.log_a - equations.log_a.amax(-1, keepdim=True)
    # Mass that comes back to an empty bin may do so in one step, and it may leave in one.
    reach = step.by_a.abs() / (NUMBERS.empty_log - depth).clamp(min=NUMBERS.longest_step)
    reach = reach.masked_fill((step.by_a < 0) & (depth < NUMBERS.empty_log), 0.0)
    return move(potentials, equations, step, 1 / reach.amax(-1, keepdim=True).clamp(min=1.0))


def move(
    potentials: Potentials, equations: Equations, step: NewtonStep, share: Tensor
) -> tuple[Potentials, Float[Tensor, "*batch"]]:
    """Return the potentials after the share (..., 1) of a step, and the share: 0 where the step is not finite."""
    log_d = potentials.log_d + share * step.by_d
    log_d = torch.maximum(log_d, log_d.amax(-1, keepdim=True) - NUMBERS.empty_bin)
    moved = Potentials(potentials.log_u + share.unsqueeze(-1) * step.by_u, log_d, equations.log_a)
    are_finite = moved.are_finite  # Singular equations may have a step that is not finite.
    moved = potentials.replace(are_finite, moved.choose(are_finite))
    return moved, torch.where(are_finite, share[..., 0], 0.0)
