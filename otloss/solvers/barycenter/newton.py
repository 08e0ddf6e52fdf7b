"""Debiased barycenters by Newton's method, for details much finer than the blur, where the plain iteration is slow.

Each step is at the tau that tells the least error (`debiased_error`). Far from the barycenter that does not converge:
the equations of `equations` are then solved at one tau after the other, which falls as far as rounding allows, and the
steps start there. The barycenters at falling tau converge: once tau is below the small eigenvalues of the equations, by
the factor of the fall.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from otloss.solvers.barycenter.debiased_error import HistogramDetails, find_error
from otloss.solvers.barycenter.equations import (
    DenseProblem,
    Equations,
    NewtonStep,
    complete_step,
    find_newton_step,
    iterate_densely,
    linearise,
)
from otloss.solvers.barycenter.problem import (
    NUMBERS,
    UNKNOWN,
    Array,
    BarycenterProblem,
    BarycenterResult,
    Potentials,
    from_tensor,
)


def take_newton_steps(
    problem: BarycenterProblem, start: Potentials, tolerance: float, max_iterations: int
) -> BarycenterResult:
    """Take steps at the tau of the least error, from the start, and then from where a falling tau leads."""
    search, start = Search.build(problem, tolerance), start.map(lambda t: from_tensor(problem.xp, t))
    result = search.take_steps(start, max_iterations)
    is_open = result.error > tolerance
    if result.iterations < max_iterations and is_open.any():
        search = search.choose(is_open)
        far = search.continue_in_tau(start.choose(is_open), max_iterations - result.iterations)
        result = result.choose_better(is_open, far)
        if (far.error > tolerance).any() and result.iterations < max_iterations:
            near = search.take_steps(far.potentials, max_iterations - result.iterations)
            result = result.choose_better(is_open, near)
    return result.restore(problem)


@dataclass(frozen=True)
class Search:
    """What all steps share."""

    problem: DenseProblem
    details: HistogramDetails
    tolerance: float

    @staticmethod
    def build(problem: BarycenterProblem, tolerance: float) -> Search:
        dense = DenseProblem.build(problem, problem.xp)
        return Search(dense, HistogramDetails.build(dense), tolerance)

    def choose(self, choice: Array) -> Search:
        details = self.details.choose(choice)
        return Search(details.problem, details, self.tolerance)

    def take_steps(self, potentials: Potentials, max_iterations: int) -> BarycenterResult:
        """Take steps, each at the tau that tells the least error, until it is small or does not fall."""
        xp = self.problem.xp
        best = BarycenterResult(potentials, xp.full_like(potentials.log_a[..., 0], UNKNOWN), 0)
        iterations, fruitless = 0, xp.zeros_like(best.error)
        while True:
            equations = linearise(self.problem, potentials)
            error, tau = find_error(self.details, equations, self.tolerance)
            fruitless = xp.where(error < best.error / 2, 0.0, fruitless + 1)
            best = best.choose_better(error >= 0, BarycenterResult(potentials, error, 0))
            is_done = (best.error <= self.tolerance) | (fruitless > NUMBERS.fruitless_steps)
            if iterations >= max_iterations or is_done.all():
                return dataclasses.replace(best, iterations=iterations)
            step = find_newton_step(self.problem, equations, tau)
            potentials = iterate_densely(self.problem, move_bins(xp, potentials, equations, step))
            iterations += 1

    def continue_in_tau(self, potentials: Potentials, max_iterations: int) -> BarycenterResult:
        """Solve the equations at falling tau, and return the potentials of the least error."""
        xp = self.problem.xp
        tau = xp.full_like(potentials.log_a[..., :1], NUMBERS.first_tau)
        best = BarycenterResult(potentials, xp.full_like(tau[..., 0], UNKNOWN), 0)
        iterations = 0
        while iterations < max_iterations and float(tau.max()) >= NUMBERS.smallest_tau:
            end = self.solve_at(tau, potentials, min(NUMBERS.steps, max_iterations - iterations))
            potentials, iterations = end.potentials, iterations + end.iterations
            error = find_error(self.details, linearise(self.problem, potentials), self.tolerance).error + end.error
            converges = end.error < NUMBERS.small_change
            # Where errors are not known, the one at the smallest tau that converged is the best guess.
            is_better = (error < best.error) | (best.error >= UNKNOWN) & converges
            previous_error, result = best.error, BarycenterResult(potentials, error.clip(max=UNKNOWN), 0)
            best = best.replace(is_better, result.choose(is_better))
            # Where rounding makes a tau diverge, smaller ones do too; changes by rounding grow as tau falls.
            diverges = ~converges | (NUMBERS.fall_of_tau * end.error >= best.error) & (end.error > self.tolerance)
            is_last = diverges | (best.error <= self.tolerance)
            if (is_last | (best.error < NUMBERS.near) & (error >= previous_error)).all():
                break
            tau = tau / NUMBERS.fall_of_tau
        return dataclasses.replace(best, iterations=iterations)

    def solve_at(self, tau: Array, potentials: Potentials, max_steps: int) -> BarycenterResult:
        """Take steps at one tau until they change nothing, or rounding stops them: the error is the last change."""
        xp = self.problem.xp
        smallest = change = xp.full_like(tau[..., 0], xp.inf)
        stalled, iterations, is_done = xp.zeros_like(smallest), 0, smallest < 0
        sufficient = max(min(self.tolerance, NUMBERS.sufficient_change), NUMBERS.smallest_change)
        while iterations < max_steps and not is_done.all():
            equations = linearise(self.problem, potentials)
            step = find_newton_step(self.problem, equations, tau)
            potentials, share = move_by_share(xp, potentials, equations, step)
            change, is_whole = (abs(step.by_a) * equations.shares).sum(-1), share == 1
            change = xp.where(share > 0, change, xp.inf)
            stalls = is_whole & (change < NUMBERS.small_change) & (change >= smallest / 2)
            stalled, smallest = xp.where(stalls, stalled + 1, 0.0), xp.minimum(smallest, change)
            is_done = is_whole & (change <= sufficient) | (share == 0) | (stalled >= NUMBERS.stalled_steps)
            iterations += 1
        # An iteration brings the log u of empty bins, which drift from step to step, back to the equations.
        return BarycenterResult(iterate_densely(self.problem, potentials), change, iterations)


def move_bins(xp: Any, potentials: Potentials, equations: Equations, step: NewtonStep) -> Potentials:
    """Return the potentials after a step that changes each bin by no more than the longest step.

    Near the barycenter only bins with little mass change by more. Nearly empty ones may lose all mass in one step.
    """
    by_a = step.by_a.clip(max=NUMBERS.longest_step)
    by_a = xp.where(find_depth(xp, equations) < NUMBERS.empty_log, by_a, by_a.clip(min=-NUMBERS.longest_step))
    return move(xp, potentials, equations, complete_step(equations, by_a), xp.ones_like(by_a[..., :1]))[0]


def move_by_share(xp: Any, potentials: Potentials, equations: Equations, step: NewtonStep) -> tuple[Potentials, Array]:
    """Return the potentials after the step, or a share of it that changes no bin too much, and the share (...)."""
    depth = find_depth(xp, equations)
    # Mass that comes back to an empty bin may do so in one step, and it may leave in one.
    reach = abs(step.by_a) / (NUMBERS.empty_log - depth).clip(min=NUMBERS.longest_step)
    reach = xp.where((step.by_a < 0) & (depth < NUMBERS.empty_log), 0.0, reach)
    return move(xp, potentials, equations, step, 1 / xp.amax(reach, -1)[..., None].clip(min=1.0))


def find_depth(xp: Any, equations: Equations) -> Array:
    """Return log a (..., n) over the largest one."""
    return equations.log_a - xp.amax(equations.log_a, -1)[..., None]


def move(
    xp: Any, potentials: Potentials, equations: Equations, step: NewtonStep, share: Array
) -> tuple[Potentials, Array]:
    """Return the potentials after the share (..., 1) of a step, and the share (...): 0 where it is not finite."""
    log_d = potentials.log_d + share * step.by_d
    log_d = xp.maximum(log_d, xp.amax(log_d, -1)[..., None] - NUMBERS.empty_bin)
    moved = Potentials(potentials.log_u + share[..., None] * step.by_u, log_d, equations.log_a)
    # Singular equations may have a step that is not finite.
    are_finite = xp.isfinite(moved.log_u.sum(-1).sum(-1) + log_d.sum(-1) + equations.log_a.sum(-1))
    moved = potentials.replace(are_finite, moved.choose(are_finite))
    return moved, xp.where(are_finite, share[..., 0], 0.0)
