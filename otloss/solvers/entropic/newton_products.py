"""Newton's method on the dual without a matrix: products with the plan, and conjugate gradients.

Let b = g / epsilon, let S be the plan with rows scaled to one, S' its transpose with rows scaled to one, c the sums of
the plan's columns and t what they should be. Newton's equations of `dual`, divided by c, are

    (1 + r_q t / c - k_p S' S) step = t / c - 1

whose left side is self-adjoint in the inner product weighted by c. S v is P v over P 1 from one pass over the pairs, so
vectors that are constant in parts of the plan keep their digits: their differences decide the slow modes.

Far from the solution the equations of parts that exchange nothing are singular, and a step leads nowhere. So a search
that is not near begins at a large epsilon, where all parts exchange mass, and lowers it; potentials of a larger epsilon
are a few epsilons off.

`Cost.plan_products` makes the products: streamed kernels in float32, or blocks of rows in torch. In float32 the
error of the marginals falls to about the rounding of potentials over epsilon. Where that is above the tolerance, a few
more steps follow in float64, on the same device. A search whose error no longer falls ends with the error that it has.

References: `dense_newton`, the same steps with dense equations, and `newton_numba` for the cells of one plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss._checks import has_float64
from otloss._progress import report
from otloss.costs.cost import PlanProducts
from otloss.solvers.entropic.arithmetic import detached_in_float64, is_queued
from otloss.solvers.entropic.dense_newton import shortened
from otloss.solvers.entropic.equations.conjugate_gradients import Equations, conjugate_gradients
from otloss.solvers.entropic.equations.looks import Looks
from otloss.solvers.entropic.equations.updates import Updates, build_updates
from otloss.solvers.entropic.interface import Budget, Method, SearchResult, Start
from otloss.solvers.entropic.sinkhorn import exact_updates, falling_epsilons
from otloss.solvers.problem import Problem


class StepLimits(NamedTuple):
    """When Newton's steps end, and how accurate each of them is.

    Attributes:
        max_steps: at one epsilon.
        max_without_gain: steps in a row after none of which the error was `gain` times the smallest one.
        residual: conjugate gradients end at this share of the right-hand side.
        max_products: of conjugate gradients, in a step.
        stage_error: of the marginals, at which a larger epsilon is lowered; and below which a search is near.
        stage_iterations: of Sinkhorn, after epsilon was lowered.
    """

    max_steps: int = 60
    max_without_gain: int = 8
    gain: float = 0.9
    residual: float = 0.1
    max_products: int = 200
    stage_error: float = 0.01
    stage_iterations: int = 3


STEP_LIMITS = StepLimits()
LARGEST_LOGARITHM = 40.0  # in t / c: exponentials stay finite in float32 also when they are multiplied


class NewtonByProducts(Method):
    """The method for slow problems of impl="triton", on their device and in their arithmetic."""

    def applies(self, problem: Problem) -> bool:
        return problem.impl == "triton" and not problem.is_symmetric

    def run(self, problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
        """Search from near potentials, else in stages of epsilon, and then in float64; see `interface.Method`."""
        result = _search_in_own_dtype(problem, start or Start.zeros(problem), budget)
        is_at_end = result.is_within(budget.tolerance) or result.iterations_used >= budget.max_iterations
        if problem.cost.dtype == torch.float32 and has_float64(problem.p.device) and not is_at_end:
            precise = _search_in_own_dtype(detached_in_float64(problem), result.start, budget)
            result = dataclasses.replace(precise, iterations=result.iterations + precise.iterations)
        return result


def _search_in_own_dtype(problem: Problem, start: Start, budget: Budget) -> SearchResult:
    """Return where the steps end in the arithmetic of the problem."""
    updates = build_updates(problem)
    is_near = start.error <= STEP_LIMITS.stage_error
    g, steps = start.g.to(updates.log_q), torch.zeros_like(start.error, dtype=torch.int64)
    if start.error.numel() and not bool(is_near.all()):
        staged = _lower_epsilon(updates, budget)
        g, steps = torch.where(is_near.unsqueeze(-1), g, staged.g), torch.where(is_near, 0, staged.steps)
    end = _run_steps(updates, g, budget.tolerance, min(STEP_LIMITS.max_steps, budget.max_iterations))
    return exact_updates(updates, updates.f_from(end.g), end.g, steps + end.steps)


class _NewtonEnd(NamedTuple):
    """The g with the smallest error, and the steps that each problem took."""

    g: Float[Tensor, "*batch m"]
    steps: Int[Tensor, "*batch"]


def _lower_epsilon(updates: Updates, budget: Budget) -> _NewtonEnd:
    """Return potentials for the problem's own epsilon, from falling larger ones."""
    problem = updates.problem
    g, steps = torch.zeros_like(updates.log_q), torch.zeros_like(problem.epsilon, dtype=torch.int64)
    for epsilon in falling_epsilons(problem):
        stage = updates.at(epsilon)
        for _ in range(STEP_LIMITS.stage_iterations):
            g = stage.g_from(stage.f_from(g))
        end = _run_steps(stage, g, STEP_LIMITS.stage_error, min(STEP_LIMITS.max_steps, budget.max_iterations))
        g, steps = end.g, steps + end.steps
    for _ in range(STEP_LIMITS.stage_iterations):
        g = updates.g_from(updates.f_from(g))
    return _NewtonEnd(g, steps)


def _run_steps(updates: Updates, g: Tensor, tolerance: float, max_steps: int) -> _NewtonEnd:
    """Take Newton's steps from g until the error of the columns is within the tolerance, or does not fall further."""
    best_g, steps = g, torch.zeros(g.shape[:-1], dtype=torch.int64, device=g.device)
    best = torch.full_like(g[..., 0], torch.inf)
    without_gain = torch.zeros_like(steps)
    for _ in range(max_steps + 1):
        point = Point.build(updates, g)
        report("Newton's method by products", point.error, tolerance=tolerance)
        without_gain = torch.where(point.error <= STEP_LIMITS.gain * best, 0, without_gain + 1)
        is_best = point.error < best
        best_g, best = torch.where(is_best.unsqueeze(-1), g, best_g), torch.where(is_best, point.error, best)
        is_active = (best > tolerance) & (without_gain < STEP_LIMITS.max_without_gain) & (steps < max_steps)
        if not bool(is_active.any()):
            break
        g = g + point.step(is_active) * updates.epsilon
        steps = steps + is_active
    return _NewtonEnd(best_g, steps)


@dataclass(frozen=True)
class Point:
    """Potentials, of which f is an exact update from g, and what Newton's equations need there.

    Attributes:
        target, received: (..., m), t and c, both over the mass that the columns should have; 0 at bins without mass.
        excess: (..., m), t / c - 1.
        error: (...), sum |t - c|.
    """

    updates: Updates
    f: Float[Tensor, "*batch n"]
    g: Float[Tensor, "*batch m"]
    target: Float[Tensor, "*batch m"]
    received: Float[Tensor, "*batch m"]
    excess: Float[Tensor, "*batch m"]
    error: Float[Tensor, "*batch"]

    @staticmethod
    def build(updates: Updates, g: Float[Tensor, "*batch m"]) -> Point:
        f = updates.f_from(g)
        log_ratio = (updates.g_from(f) - g) / (updates.damping[1] * updates.epsilon)  # log(t / c)
        target = updates.share_of_columns(g)
        log_ratio = log_ratio.masked_fill(updates.log_q == -torch.inf, 0.0).clamp(-LARGEST_LOGARITHM, LARGEST_LOGARITHM)
        received = target * (-log_ratio).exp()
        return Point(updates, f, g, target, received, log_ratio.expm1(), (target - received).abs().sum(-1))

    def step(self, is_active: Bool[Tensor, "*batch"]) -> Float[Tensor, "*batch m"]:
        """Return the change of b by a step of Newton's method; 0 for problems that are not active."""
        right = self._centred(torch.where(is_active.unsqueeze(-1), self.excess, 0.0))
        precision = self.error.clamp(max=STEP_LIMITS.residual).unsqueeze(-1)
        looks = Looks(is_queued=is_queued(self.updates.problem))
        equations = Equations(self.times, self._inner, lambda v: self._centred(v / self._diagonal))
        end = conjugate_gradients(equations, right, precision, max_products=STEP_LIMITS.max_products, looks=looks)
        after = Point.build(self.updates, self.g + end.solution * self.updates.epsilon)
        gradient, gradient_after = (point.target - point.received for point in (self, after))
        return shortened(end.solution, gradient, gradient_after, is_balanced=self.is_balanced)

    @property
    def is_balanced(self) -> bool:
        return self.updates.problem.marginal_penalty is None

    @cached_property
    def _products(self) -> tuple[Callable[[Tensor], PlanProducts], Callable[[Tensor], PlanProducts]]:
        """P v and P^T u."""
        u, epsilon = self.updates, self.updates.epsilon.squeeze(-1)
        return (
            u.problem.cost.plan_products(self.f, self.g, u.log_p, u.log_q, epsilon=epsilon),
            u.transposed.plan_products(self.g, self.f, u.log_q, u.log_p, epsilon=epsilon),
        )

    @cached_property
    def _diagonal(self) -> Float[Tensor, "*batch m"]:
        """1 + r_q t / c, the part of the left side that may be large; 1 in balanced problems."""
        return 1 + self.updates.epsilon / self.updates.penalty.q * (1 + self.excess)

    def times(self, v: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch m"]:
        """Return the left side of the equations for the step v."""
        updates, round_trip = self.updates, v
        for product in self._products:  # S, and then S'
            values, of_rows = product(round_trip.unsqueeze(-1))
            round_trip = torch.where(of_rows > 0, values.squeeze(-1) / torch.where(of_rows > 0, of_rows, 1.0), 0.0)
        return self._centred(self._diagonal * v - updates.damping[0] * round_trip)

    def _inner(self, a: Tensor, b: Tensor) -> Float[Tensor, "*batch 1"]:
        return (self.received * a * b).sum(-1, keepdim=True)

    def _centred(self, v: Tensor) -> Tensor:
        """Return v without its constant part, which changes nothing in balanced problems; 0 at bins without mass."""
        v = torch.where(self.received > 0, v, 0.0)
        if not self.is_balanced:
            return v
        tiny = torch.finfo(v.dtype).tiny
        mean = (self.received * v).sum(-1, keepdim=True) / self.received.sum(-1, keepdim=True).clamp(min=tiny)
        return torch.where(self.received > 0, v - mean, 0.0)
