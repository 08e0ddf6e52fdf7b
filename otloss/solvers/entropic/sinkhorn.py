"""Sinkhorn in the log domain: any cost object, any device, balanced or not; holds no matrix and no history.

This is the reference implementation of the numba kernel `sinkhorn_numba`. Stages of epsilon, updates and
over-relaxation follow the same formulas (see `sinkhorn_steps_numba`), with bounds that suit whole batches and
logarithms. A problem that has converged stays as it is.

Unbalanced problems are also shifted to f + t and g - t, with the best t in closed form. Without that, the balance of
the two masses would converge slowest.

Source: T. Séjourné, F.-X. Vialard, G. Peyré, Faster Unbalanced Optimal Transport: Translation Invariant Sinkhorn, 2022.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._progress import report
from otloss.costs import Cost, DenseCost
from otloss.solvers.entropic.interface import (
    CLEARLY,
    FEWEST,
    FIRST_EPSILON,
    LARGEST_RELAXED_STEP,
    LEAST_CHANGE,
    LEAST_ITERATIONS,
    OVERSHOOT,
    SETTLING,
    STAGE_FACTOR,
    Goal,
    SearchResult,
    log_weights,
)
from otloss.solvers.problem import Problem

STAGE_ITERATIONS = 3
BLOCK = 8  # iterations between two measurements of the contraction


def iterate_in_logs(
    problem: Problem,
    start: tuple[Tensor, Tensor] | None,
    goal: Goal,
    *,
    relaxation: Float[Tensor, "*batch"] | None = None,
) -> SearchResult:
    """Return the potentials, their marginal error and the number of iterations, per problem.

    The search starts with the over-relaxation w = `relaxation`, 1 by default.
    """
    sweep = Sweep.of(problem)
    f, g = (torch.zeros_like(w) for w in (sweep.log_p, sweep.log_q))
    if start is not None:
        f, g = start[0].to(f.dtype), start[1].to(g.dtype)
    done = torch.zeros(problem.batch, dtype=torch.int64, device=f.device)
    left = goal.most
    for epsilon in _steps(problem) if start is None and not goal.symmetric else []:
        staged = sweep.at(epsilon)
        for _ in range(min(STAGE_ITERATIONS, left - 1)):
            f = staged.f_from(g)
            g = staged.g_from(f)
            left -= 1
        if problem.marginal_penalty is None:
            # Without its mean, g does not keep the size that it had at a large epsilon.
            share = sweep.log_q.exp()
            g = g - (share * g).sum(-1, keepdim=True) / share.sum(-1, keepdim=True)
    done, goal = done + (goal.most - left), dataclasses.replace(goal, most=left)
    if goal.symmetric:
        return _symmetric_search(sweep, g, done, goal)
    w = torch.ones_like(sweep.epsilon) if relaxation is None else relaxation.to(f.dtype).unsqueeze(-1)
    return _relaxed_search(sweep, f, g, w, done, goal)


def _steps(problem: Problem) -> list[Tensor]:
    """Return falling values of epsilon, from a share of the largest cost to four times the epsilon of each problem.

    All problems get the same number of values. Values above the marginal penalty would save no iteration, since the
    penalty bounds the potentials.
    """
    largest = FIRST_EPSILON * problem.cost.largest()
    if problem.marginal_penalty is not None:
        largest = largest.clamp(max=problem.marginal_penalty)
    steps: list[Tensor] = []
    epsilon = problem.epsilon / STAGE_FACTOR
    while (epsilon <= largest).any():
        steps.insert(0, torch.where(epsilon <= largest, epsilon, problem.epsilon))
        epsilon = epsilon / STAGE_FACTOR
    return steps


@dataclass(frozen=True)
class Sweep:
    """The two updates of a problem at one epsilon.

    Attributes:
        problem: the problem, whose graph is not followed.
        transposed: its transposed cost. A matrix is transposed in memory once, and not in every soft minimum.
        log_p, log_q: logarithms of the weights, or in balanced problems of the shares of the mass.
        epsilon: (..., 1); like log_p and log_q in the dtype of the potentials.
        damping: (..., 1), the k of `otloss.solvers.entropic`; 1 for balanced problems.
    """

    problem: Problem
    transposed: Cost
    log_p: Tensor
    log_q: Tensor
    epsilon: Tensor
    damping: Tensor

    @staticmethod
    def of(problem: Problem) -> Sweep:
        # On a CPU potentials are float64 also for float32 costs: the rounding of f counts in full in f / epsilon.
        dtype = torch.float64 if problem.p.device.type == "cpu" else problem.cost.dtype
        epsilon = problem.epsilon.to(dtype).unsqueeze(-1)
        p, q = log_weights(problem, dtype)
        transposed = problem.cost.T
        if isinstance(transposed, DenseCost):
            transposed = DenseCost(transposed.matrix.detach().contiguous())
        return Sweep(problem, transposed, p, q, epsilon, epsilon).at(problem.epsilon)

    def at(self, epsilon: Tensor) -> Sweep:
        width = epsilon.detach().to(self.log_p.dtype).unsqueeze(-1)
        rho = self.problem.marginal_penalty
        damping = torch.ones_like(width) if rho is None else rho / (rho + width)
        return dataclasses.replace(self, epsilon=width, damping=damping)

    def softmin_rows(self, g: Tensor) -> Tensor:
        return self.problem.cost.softmin(g + self.epsilon * self.log_q, self.epsilon.squeeze(-1))

    def softmin_columns(self, f: Tensor) -> Tensor:
        return self.transposed.softmin(f + self.epsilon * self.log_p, self.epsilon.squeeze(-1))

    def f_from(self, g: Tensor) -> Tensor:
        return self.damping * self.softmin_rows(g)

    def g_from(self, f: Tensor) -> Tensor:
        return self.damping * self.softmin_columns(f)

    def error(self, potential: Tensor, updated: Tensor, log_weights: Tensor) -> Tensor:
        """Return the sum of |P 1 - t| before an update, over the sum of t, where t is what the rows should hold."""
        rho = self.problem.marginal_penalty
        share = torch.softmax(log_weights if rho is None else log_weights - potential / rho, -1)
        off = ((potential - updated) / (self.damping * self.epsilon)).clamp(max=80.0).expm1().abs()
        return (share * off).sum(-1)

    def shifted(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return f + t, g - t with the best t, for unbalanced problems, whose dual depends on t."""
        rho = self.problem.marginal_penalty
        if rho is None:
            return f, g
        outside_p = torch.logsumexp(self.log_p - f / rho, -1, keepdim=True)
        outside_q = torch.logsumexp(self.log_q - g / rho, -1, keepdim=True)
        shift = rho / 2 * (outside_p - outside_q)
        return f + shift, g - shift


def _relaxed_search(sweep: Sweep, f: Tensor, g: Tensor, w: Tensor, done: Tensor, goal: Goal) -> SearchResult:
    within = 0
    schedule = RelaxationSchedule(w.squeeze(-1))
    active = torch.ones_like(done, dtype=torch.bool)
    counted = 0
    while True:
        new_f = sweep.f_from(g)
        off = sweep.error(f, new_f, sweep.log_p)
        relaxed_f = _relax(f, new_f, w, sweep.epsilon)
        new_g = sweep.g_from(relaxed_f)
        off = off + sweep.error(g, new_g, sweep.log_q)
        report("Sinkhorn iterations", off, tolerance=goal.tolerance)
        relaxed_g = _relax(g, new_g, w, sweep.epsilon)
        relaxed_f, relaxed_g = sweep.shifted(relaxed_f, relaxed_g)
        keep = active.unsqueeze(-1)
        f, g = torch.where(keep, relaxed_f, f), torch.where(keep, relaxed_g, g)
        done = done + active
        counted += 1
        # On other devices every check makes the host wait.
        if f.device.type == "cpu" or counted % BLOCK == 0 or counted >= goal.most:
            finished = off <= goal.tolerance
            if counted >= goal.most or bool(finished[active].all()):
                last_f, last_g, error, change = closed(sweep, f, g)
                active = ~(error <= goal.tolerance)
                within += not bool(active.any())
                if within <= SETTLING:
                    active = active | (change > goal.settled)
                if counted >= goal.most or not bool(active.any()):
                    return SearchResult(last_f, last_g, error, done)
            else:
                active = active & ~finished
        if counted % BLOCK == 0:
            patience = goal.patience * (1.0 if counted >= LEAST_ITERATIONS else CLEARLY)
            hopeless = schedule.left(off, goal.tolerance) > patience
            if counted >= FEWEST and bool((hopeless | ~active).all()):
                goal = dataclasses.replace(goal, most=counted + 1)
            w = schedule.updated(off).unsqueeze(-1)


def closed(sweep: Sweep, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return exact updates of g and then of f, the error after them, and the largest relative change of a factor.

    Light bins hardly count in the error; the exact updates make their potentials accurate too.
    """
    new_g = sweep.g_from(f)
    new_f = sweep.f_from(new_g)
    change = torch.zeros_like(sweep.epsilon.squeeze(-1))
    for potential, new, logs in ((f, new_f, sweep.log_p), (g, new_g, sweep.log_q)):
        moved = ((new - potential) / sweep.epsilon).abs().masked_fill(logs == -torch.inf, 0.0)
        change = torch.maximum(change, moved.amax(-1))
    return new_f, new_g, sweep.error(new_g, sweep.g_from(new_f), sweep.log_q), change


def _symmetric_search(sweep: Sweep, g: Tensor, done: Tensor, goal: Goal) -> SearchResult:
    for _ in range(goal.most):
        update = sweep.f_from(g)
        off = sweep.error(g, update, sweep.log_p)
        report("Sinkhorn iterations", off, tolerance=goal.tolerance)
        unfinished = ~(off <= goal.tolerance)
        if goal.settled < math.inf:
            moved = ((update - g) / sweep.epsilon).abs().masked_fill(sweep.log_p == -torch.inf, 0.0)
            unfinished = unfinished | (moved.amax(-1) > goal.settled)
        if not bool(unfinished.any()):
            break
        done = done + unfinished
        g = torch.where(unfinished.unsqueeze(-1), (g + update) / 2, g)
    f, g, error, _ = closed(sweep, g, g)
    return SearchResult(f, g, error, done)


def _relax(potential: Tensor, updated: Tensor, w: Tensor, epsilon: Tensor) -> Tensor:
    step = updated - potential
    return torch.where((w * step).abs() < LARGEST_RELAXED_STEP * epsilon, potential + w * step, updated)


class RelaxationSchedule:
    """The w of each problem, by the rule of the numba kernel, from the contraction over BLOCK iterations."""

    def __init__(self, w: Tensor) -> None:
        self.w = w
        self.before = torch.full_like(w, torch.inf)
        self.least = torch.full_like(w, torch.inf)
        self.settling = torch.ones_like(w, dtype=torch.bool)

    def left(self, off: Tensor, tolerance: float) -> Tensor:
        """Return how many more iterations the tolerance takes at the contraction of the last BLOCK."""
        speed = -(off.to(self.w.dtype) / self.before).log() / BLOCK
        enough = torch.where(speed > 0, (off / tolerance).log() / speed, torch.inf)
        return torch.where(self.settling, 0.0, enough)

    def updated(self, off: Tensor) -> Tensor:
        off = off.to(self.w.dtype)
        contraction = (off / self.before) ** (1 / BLOCK)
        worse = off > OVERSHOOT * self.least
        is_usable = (contraction > self.w - 1) & (contraction < 1) & ~worse & ~self.settling
        eigenvalue = ((contraction + self.w - 1) ** 2 / (self.w**2 * contraction)).clamp(0, 1)
        better = torch.minimum(2 / (1 + (1 - eigenvalue).sqrt()), 1 + self.w / 2)
        raised = is_usable & (better > self.w + LEAST_CHANGE)
        self.w = torch.where(worse, (1 + self.w) / 2, torch.where(raised, better, self.w))
        self.settling = worse | raised
        self.least = torch.where(worse, off, torch.minimum(self.least, off))
        self.before = off
        return self.w
