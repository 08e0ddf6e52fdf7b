"""Sinkhorn's iteration in the log domain: any cost object, any device, balanced or not.

A cost without a matrix needs none. A matrix is copied once, transposed (`updates`).

This is the reference implementation of the numba kernels (`balanced_numba`, `unbalanced_numba`). Stages of
epsilon, updates and over-relaxation are the same method (see `steps_numba`) with the same `Schedule`; the lengths of
stages, and the iterations between looks, suit whole batches and logarithms. A converged problem stays as it is.

Unbalanced problems are also shifted to f + t and g - t, with the best t in closed form. Without that, the balance of
the two masses would converge slowest.

Source: T. Séjourné, F.-X. Vialard, G. Peyré, Faster Unbalanced Optimal Transport: Translation Invariant Sinkhorn, 2022.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._progress import report
from otloss.solvers.entropic.arithmetic import is_queued
from otloss.solvers.entropic.equations.looks import Looks
from otloss.solvers.entropic.equations.updates import Updates, build_updates
from otloss.solvers.entropic.interface import Budget, Method, SearchResult, Start
from otloss.solvers.entropic.sinkhorn_kernels.numbers import CHECK_EVERY, SCHEDULE, STAGE_ITERATIONS
from otloss.solvers.options import of_batch
from otloss.solvers.problem import Problem

MAX_STAGES = 60  # 4**60 = 1e36


class Sinkhorn(Method):
    """The method for every problem that no other method of its rung takes."""

    def applies(self, problem: Problem) -> bool:
        return True

    def run(
        self,
        problem: Problem,
        start: Start | None,
        budget: Budget,
        *,
        relaxation: Float[Tensor, "*batch"] | None = None,
    ) -> SearchResult:
        """Search from the start, or without one in stages of epsilon; see `interface.Method`.

        `relaxation` is the over-relaxation w to begin with, 1 by default.
        """
        updates = build_updates(problem)
        f, g, iterations = torch.zeros_like(updates.log_p), torch.zeros_like(updates.log_q), 0
        if start is not None:
            f, g = start.f.to(f.dtype), start.g.to(g.dtype)
        elif not problem.is_symmetric:
            f, g, iterations = _run_stages(updates, f, g, budget)
        budget = dataclasses.replace(budget, max_iterations=budget.max_iterations - iterations)
        if problem.is_symmetric:
            result = _run_symmetric(updates, g, budget)
        else:
            w = torch.ones_like(updates.epsilon) if relaxation is None else relaxation.to(f.dtype).unsqueeze(-1)
            result = _run_relaxed(updates, f, g, w, budget)
        return dataclasses.replace(result, iterations=result.iterations + iterations)


class _EndOfStages(NamedTuple):
    """The potentials to go on from, and how many iterations led there."""

    f: Tensor
    g: Tensor
    iterations: int


def _run_stages(updates: Updates, f: Tensor, g: Tensor, budget: Budget) -> _EndOfStages:
    """Return the potentials after some iterations at each of the larger values of epsilon."""
    problem, iterations = updates.problem, 0
    for epsilon in falling_epsilons(problem):
        at_stage = updates.at(epsilon)
        for _ in range(min(STAGE_ITERATIONS, budget.max_iterations - iterations - 1)):
            f = at_stage.f_from(g)
            g = at_stage.g_from(f)
            iterations += 1
        if problem.marginal_penalty is None:
            # Without its mean, g does not keep the size that it had at a large epsilon.
            share = updates.log_q.exp()
            g = g - (share * g).sum(-1, keepdim=True) / share.sum(-1, keepdim=True)
    return _EndOfStages(f, g, iterations)


def falling_epsilons(problem: Problem) -> list[Tensor]:
    """Return falling values of epsilon, from a share of the largest cost to four times the epsilon of each problem.

    All problems get the same number of values. Values above both marginal penalties would save no iteration, since the
    penalties bound the potentials.
    """
    largest = SCHEDULE.first_epsilon_over_cost * problem.cost.largest()
    if problem.marginal_penalty is not None:
        largest = largest.clamp(max=of_batch(problem.marginal_penalty.largest))
    stages = (largest / problem.epsilon).log() / -math.log(SCHEDULE.stage_factor)
    stages = torch.where(stages > 0, stages, 0.0).clamp(max=MAX_STAGES)
    count = int(stages.amax()) if stages.numel() else 0
    values = [problem.epsilon / SCHEDULE.stage_factor**k for k in range(count, 0, -1)]
    return [torch.where(epsilon <= largest, epsilon, problem.epsilon) for epsilon in values]


def _run_relaxed(updates: Updates, f: Tensor, g: Tensor, w: Tensor, budget: Budget) -> SearchResult:
    """Run over-relaxed iterations from (f, g), with the w (..., 1) to begin with."""
    schedule, looks = RelaxationSchedule(w.squeeze(-1)), Looks(is_queued=is_queued(updates.problem))
    is_active = torch.ones(f.shape[:-1], dtype=torch.bool, device=f.device)
    is_slow, iterations = ~is_active, torch.zeros_like(is_active, dtype=torch.int64)
    iterations_within = iterations
    for count in itertools.count(1):
        f, g, error, change = _relaxed_updates(updates, f, g, w, is_active)
        report("Sinkhorn iterations", error, tolerance=budget.tolerance)
        iterations, iterations_within = iterations + is_active, iterations_within + (error <= budget.tolerance)
        change = change.masked_fill(iterations_within > SCHEDULE.extra_iterations, 0.0)
        excess = _excess(error, change, budget)
        is_active = is_active & ~(excess <= 1)
        if count % CHECK_EVERY == 0:
            is_slow = schedule.is_too_slow(error, count, budget)
            w = schedule.next_relaxation(error).unsqueeze(-1)
        if count < budget.last_iteration and not looks.is_due(count):
            continue
        if looks.largest_excess(excess, is_active & ~is_slow, count) == 0 or count >= budget.last_iteration:
            result = exact_updates(updates, f, g, iterations)
            is_last = count >= budget.last_iteration or bool(is_active.any())  # active ones are slow
            is_active = ~(result.error <= budget.tolerance)
            if is_last or not bool(is_active.any()):
                return result
    raise AssertionError("the loop has an end")


def _excess(error: Tensor, change: Tensor, budget: Budget) -> Tensor:
    """Return the error, or the change of a potential, over the allowed one, whichever is larger."""
    excess = error / budget.tolerance
    return torch.maximum(excess, change / budget.largest_change) if budget.is_accurate else excess


class _Iterate(NamedTuple):
    """Potentials after an iteration, the error of the marginals before its updates, and the largest relative change."""

    f: Tensor
    g: Tensor
    error: Tensor
    change: Tensor


def _relaxed_updates(updates: Updates, f: Tensor, g: Tensor, w: Tensor, is_active: Tensor) -> _Iterate:
    """Return f and g after one iteration of the active problems."""
    new_f = updates.f_from(g)
    error, change = updates.error_of_rows(f, new_f), updates.largest_change(f, new_f, updates.log_p)
    relaxed_f = _relaxed(f, new_f, w, updates.epsilon)
    new_g = updates.g_from(relaxed_f)
    error = error + updates.error_of_columns(g, new_g)
    change = torch.maximum(change, updates.largest_change(g, new_g, updates.log_q))
    relaxed_f, relaxed_g = updates.with_best_constant(relaxed_f, _relaxed(g, new_g, w, updates.epsilon))
    keep = is_active.unsqueeze(-1)
    return _Iterate(torch.where(keep, relaxed_f, f), torch.where(keep, relaxed_g, g), error, change)


def _relaxed(potential: Tensor, updated: Tensor, w: Tensor, epsilon: Tensor) -> Tensor:
    step = updated - potential
    is_small = (w * step).abs() < SCHEDULE.largest_relaxed_step * epsilon
    return torch.where(is_small, potential + w * step, updated)


def exact_updates(updates: Updates, f: Tensor, g: Tensor, iterations: Tensor) -> SearchResult:
    """Return exact updates of g and then of f, with the error after them.

    Light bins hardly count in the error; the exact updates make their potentials accurate too.
    """
    new_g = updates.g_from(f)
    new_f = updates.f_from(new_g)
    error = updates.error_of_columns(new_g, updates.g_from(new_f))
    return SearchResult.without_estimates(new_f, new_g, error, iterations)


def _run_symmetric(updates: Updates, g: Tensor, budget: Budget) -> SearchResult:
    """Run g <- (g + f(g)) / 2, for equal weights and a symmetric cost, where f = g at the solution."""
    looks = Looks(is_queued=is_queued(updates.problem))
    is_active = torch.ones(g.shape[:-1], dtype=torch.bool, device=g.device)
    iterations = torch.zeros_like(is_active, dtype=torch.int64)
    for count in range(1, budget.last_iteration + 1):
        updated = updates.f_from(g)
        error, change = updates.error_of_rows(g, updated), updates.largest_change(g, updated, updates.log_p)
        report("Sinkhorn iterations", error, tolerance=budget.tolerance)
        excess = _excess(error, change, budget)
        is_active = is_active & ~(excess <= 1)
        iterations = iterations + is_active
        g = torch.where(is_active.unsqueeze(-1), (g + updated) / 2, g)
        if looks.is_due(count) and looks.largest_excess(excess, is_active, count) == 0:
            break
    return exact_updates(updates, g, g, iterations)


class RelaxationSchedule:
    """The over-relaxation w of each problem, from the contraction of the error between two checks.

    Attributes:
        w: (...).
        previous_error: (...), at the last check.
        smallest_error: (...), since w was last lowered.
        is_settling: (...), whether w has just changed, so that the contraction does not belong to it yet.
    """

    def __init__(self, w: Tensor) -> None:
        self.w = w
        self.previous_error = torch.full_like(w, torch.inf)
        self.smallest_error = torch.full_like(w, torch.inf)
        self.is_settling = torch.ones_like(w, dtype=torch.bool)

    def is_too_slow(self, error: Tensor, count: int, budget: Budget) -> Tensor:
        """Return whether the contraction since the last check needs more iterations than the budget has patience."""
        if count < SCHEDULE.early_check:
            return torch.zeros_like(self.is_settling)
        speed = -(error.to(self.w.dtype) / self.previous_error).log() / CHECK_EVERY
        needed = torch.where(speed > 0, (error / budget.tolerance).log() / speed, torch.inf)
        allowed = budget.patience * (1.0 if count >= SCHEDULE.full_check else SCHEDULE.early_factor)
        return (needed > allowed) & ~self.is_settling

    def next_relaxation(self, error: Tensor) -> Tensor:
        """Return w for the next iterations.

        With the eigenvalue l of the round trip, the error contracts by the c with (c + w - 1)^2 = w^2 l c, and
        2 / (1 + sqrt(1 - l)) is the best w.
        """
        error = error.to(self.w.dtype)
        contraction = (error / self.previous_error) ** (1 / CHECK_EVERY)
        is_worse = error > SCHEDULE.overshoot * self.smallest_error
        is_usable = (contraction > self.w - 1) & (contraction < 1) & ~is_worse & ~self.is_settling
        eigenvalue = ((contraction + self.w - 1) ** 2 / (self.w**2 * contraction)).clamp(0, 1)
        best_w = torch.minimum(2 / (1 + (1 - eigenvalue).sqrt()), 1 + self.w / 2)
        is_raised = is_usable & (best_w > self.w + SCHEDULE.smallest_change)
        self.w = torch.where(is_worse, (1 + self.w) / 2, torch.where(is_raised, best_w, self.w))
        self.is_settling = is_worse | is_raised
        self.smallest_error = torch.where(is_worse, error, torch.minimum(self.smallest_error, error))
        self.previous_error = error
        return self.w
