"""Debiased barycenters by Newton's method, for details much finer than the blur, where the plain iteration is slow.

It solves the equations of `equations` at a tau that falls as far as rounding allows. The barycenters at falling tau
converge: once tau is below the small eigenvalues of the equations, by the factor of the fall.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss.solvers.barycenter.equations import find_newton_step
from otloss.solvers.barycenter.iteration import LogStep
from otloss.solvers.barycenter.problem import NUMBERS, UNKNOWN, BarycenterProblem, BarycenterResult, Potentials


def continue_in_tau(
    problem: BarycenterProblem, start: Potentials, tolerance: float, max_iterations: int
) -> BarycenterResult:
    """Take Newton steps at falling tau, and return the result at the tau of the least error."""
    matrix, potentials = problem.cost.dense(), start
    tau = torch.full_like(start.log_a[..., :1], NUMBERS.first_tau)
    best = BarycenterResult(start, torch.full_like(tau[..., 0], NUMBERS.first_error), 0, tau)
    errors, iterations, fruitless = TauErrors(problem, start.log_a), 0, torch.zeros_like(best.error)
    while iterations < max_iterations and float(tau.max()) >= NUMBERS.least_tau:
        steps = min(NUMBERS.steps, max_iterations - iterations)
        settled = settle(problem, matrix, potentials, tau, tolerance, steps)
        potentials, iterations = settled.potentials, iterations + settled.iterations
        error = errors.append(settled)
        is_settled = settled.change < NUMBERS.small_change
        # Details far below the blur move a only once tau is small: an error before that was too low.
        is_better = (error < best.error) | (errors.moved > best.error) & is_settled & ~settled.is_stalled
        found = BarycenterResult(potentials, error, 0, tau)
        best = best.replace(is_better, found.choose(is_better))
        fruitless = torch.where(is_better, 0.0, fruitless + 1)
        is_last = (best.error < NUMBERS.small_change) & (fruitless >= NUMBERS.fruitless_falls)
        # Where rounding makes a tau diverge, smaller ones do too.
        is_last = is_last | ~is_settled & ~settled.is_stalled
        if bool((is_last | (best.error <= tolerance / 2)).all()):
            break
        tau = tau / NUMBERS.fall_of_tau
    error = best.error.masked_fill(best.error == NUMBERS.first_error, UNKNOWN)
    return verify(problem, dataclasses.replace(best, error=error, iterations=iterations))


def verify(problem: BarycenterProblem, result: BarycenterResult) -> BarycenterResult:
    """Raise errors to what an iteration changes: it shows what rounding may hide from the equations of a step."""
    now, weights = result.potentials, problem.weights.unsqueeze(-1)
    shares = torch.softmax(now.log_a, -1)
    # The equations leave a constant of each log u_k open.
    excess = (shares.unsqueeze(-2) * (now.log_u - now.log_d.unsqueeze(-2))).sum(-1, keepdim=True)
    now = dataclasses.replace(now, log_u=now.log_u - excess)
    after = LogStep.build(problem).update(now)
    shares = torch.softmax(after.log_a, -1)
    change = (weights * (after.log_u - now.log_u).abs()).sum(-2) + (after.log_d - now.log_d).abs()
    error = torch.maximum(result.error, (shares * change).sum(-1)).nan_to_num(UNKNOWN).clamp(max=UNKNOWN)
    return dataclasses.replace(result, potentials=now, error=error)


@dataclass(frozen=True)
class Settled:
    """Where Newton's method ends at one tau.

    Attributes:
        potentials: the last ones.
        change: what the last step changed of a, as a share of its mass.
        is_stalled: whether rounding ended the steps.
        iterations: the number of steps.
    """

    potentials: Potentials
    change: Float[Tensor, "*batch"]
    is_stalled: Bool[Tensor, "*batch"]
    iterations: int


def settle(
    problem: BarycenterProblem, matrix: Tensor, potentials: Potentials, tau: Tensor, tolerance: float, steps: int
) -> Settled:
    """Take Newton steps at one tau until they change nothing, or rounding stops them."""
    smallest = change = torch.full_like(tau[..., 0], torch.inf)
    small_steps, iterations = torch.zeros_like(smallest), 0
    for _ in range(steps):
        iterations += 1
        step = find_newton_step(problem, matrix, potentials, tau)
        depth = step.log_a - step.log_a.amax(-1, keepdim=True)
        # Mass that comes back to an empty bin may do so in one step, and it may leave in one.
        reach = step.by_a.abs() / (-25 - depth).clamp(min=NUMBERS.longest_step)
        reach = reach.masked_fill((step.by_a < 0) & (depth < -25), 0.0)
        share = 1 / reach.amax(-1, keepdim=True).clamp(min=1.0)
        log_d = potentials.log_d + share * step.by_d
        log_d = torch.maximum(log_d, log_d.amax(-1, keepdim=True) - NUMBERS.empty_bin)
        potentials = Potentials(potentials.log_u + share.unsqueeze(-1) * step.by_u, log_d, step.log_a)
        change, is_whole = (step.by_a.abs() * torch.softmax(step.log_a, -1)).sum(-1), share[..., 0] == 1
        stalls = is_whole & (change < NUMBERS.small_change) & (change >= smallest / 2)
        small_steps, smallest = torch.where(stalls, small_steps + 1, 0.0), torch.minimum(smallest, change)
        is_done = is_whole & (change <= max(tolerance / 100, NUMBERS.least_change))
        if iterations > NUMBERS.steps_to_fall:
            is_done = is_done | (change > NUMBERS.divergence * smallest)
        if bool((is_done | (small_steps >= NUMBERS.stalled_steps)).all()):
            break
    return Settled(potentials, change, small_steps >= NUMBERS.stalled_steps, iterations)


@dataclass
class TauErrors:
    """The errors at falling tau: what the last fall moved, times what the next ones move by its ratios."""

    problem: BarycenterProblem
    log_a: Float[Tensor, "*batch n"]
    moved: Float[Tensor, "*batch"] = field(init=False)  # by the last fall, as a share of the mass
    ratios: list[Tensor] = field(init=False)  # of what the last falls moved

    def __post_init__(self) -> None:
        self.moved = torch.zeros_like(self.problem.mass)
        self.ratios = [torch.full_like(self.moved, NUMBERS.largest_ratio)] * NUMBERS.window

    def append(self, settled: Settled) -> Float[Tensor, "*batch"]:
        """Return the error of a settled tau."""
        mass, previous = self.problem.mass, self.moved
        a = settled.potentials.log_a.exp()
        self.moved = ((a - self.log_a.exp()).abs().sum(-1) / mass).nan_to_num(torch.inf)
        self.log_a = settled.potentials.log_a
        ratio = (self.moved / previous).nan_to_num(torch.inf).clamp(1 / NUMBERS.fall_of_tau, NUMBERS.largest_ratio)
        self.ratios = [*self.ratios[1:], ratio]
        slowest = torch.stack(self.ratios).amax(0)
        error = settled.change + (a.sum(-1) / mass - 1).abs() + self.moved * slowest / (1 - slowest)
        return error.nan_to_num(UNKNOWN).clamp(max=UNKNOWN)
