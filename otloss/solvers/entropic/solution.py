"""The solution of an entropic problem: what its caller reads, from the potentials that a search has found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._autograd import Unchanged
from otloss.solvers.bounds import lower_bound, upper_bound
from otloss.solvers.entropic.arithmetic import detached_in_float64, potential_of_plan
from otloss.solvers.entropic.equations.slow_modes import with_lanczos_error
from otloss.solvers.entropic.equations.updates import build_updates
from otloss.solvers.entropic.gap import duality_gap, rounded_linear_cost
from otloss.solvers.entropic.interface import SearchResult
from otloss.solvers.entropic.objectives import (
    dual_term,
    dual_value,
    linear_cost,
    plan_blocks,
    relative_entropy,
    sizes_of_terms,
)
from otloss.solvers.problem import Problem

_LARGEST_DERIVATIVE = 1e16  # at a bin without mass; the norm of many such gradients is below the largest float32


@dataclass(frozen=True)
class EntropicSolution:
    """The solution of an entropic problem, as `otloss.solvers.transport.Solution` describes it."""

    problem: Problem
    search: SearchResult
    tolerance: float
    value: Float[Tensor, "*batch"]
    _unchanged: Unchanged = field(init=False, repr=False)

    only_value_has_gradients: ClassVar[str | None] = (
        'grad="envelope" gives the derivative of `value` alone; solve with grad="implicit" to go through the plan, '
        "the potentials or the linear cost."
    )

    def __post_init__(self) -> None:
        problem = self.problem
        unchanged = Unchanged(problem.p, problem.q, problem.epsilon, *problem.cost.tensors())
        object.__setattr__(self, "_unchanged", unchanged)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that the value depends on."""
        return self.problem.inputs

    @property
    def potentials(self) -> tuple[Tensor, Tensor]:
        return self.search.f, self.search.g

    @property
    def marginal_error(self) -> Tensor:
        return self.search.error

    @property
    def converged(self) -> Tensor:
        return self.search.error <= self.tolerance

    @property
    def iterations(self) -> Tensor:
        return self.search.iterations

    @cached_property
    def potential_error(self) -> Tensor:
        error = self.search.potential_error
        if bool(error.isnan().any()):
            self._unchanged.check("the error of the potentials")
            error = with_lanczos_error(self.problem, self.search).potential_error
        return error

    @cached_property
    def linear_cost(self) -> Tensor:
        self._unchanged.check("linear_cost")
        with torch.no_grad():
            return linear_cost(self.problem, *self.potentials)

    @cached_property
    def dual_value(self) -> Tensor:
        return dual_value(*self._in_float64) - self._rounding_bound

    @cached_property
    def gap(self) -> Tensor:
        gap = duality_gap(*self._in_float64) + 2 * self._rounding_bound
        return gap.masked_fill(gap.isnan() & self.value.detach().isfinite(), torch.inf)  # no bound is known

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Bounds of the exact transport cost."""
        problem, f, g = self._in_float64
        if problem.marginal_penalty is not None:
            raise ValueError(
                "exact transport holds both marginals, so an unbalanced problem (marginal_penalty) does not bound it."
            )
        with torch.no_grad():
            p, q = problem.p, problem.q
            # The c-transform over the bins that hold mass makes the potentials feasible for the exact dual.
            hard = problem.cost.softmin(g.masked_fill(q == 0, -torch.inf), 0.0).masked_fill(p == 0, 0.0)
            dual = (p * hard).sum(-1) + (q * g).sum(-1)
            primal = rounded_linear_cost(problem, f, g)
            lower = torch.maximum(dual, lower_bound(p, q, problem.cost).to(f.dtype)) - self._rounding_bound
            upper = torch.minimum(primal, upper_bound(p, q, problem.cost).to(f.dtype)) + self._rounding_bound
        # Where both bounds meet, rounding could exchange them.
        return lower, torch.maximum(lower, upper)

    def plan_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        self._unchanged.check("the plan")
        for part, plan, _ in plan_blocks(self.problem, *self.potentials):
            yield part, plan

    def streamed_product(
        self, v: Float[Tensor, "*batch m k"], *, is_transposed: bool, per_mass: bool = False
    ) -> Tensor | None:
        """Return P v or P^T v, without a graph, for impl="triton"; None for others, which form blocks of the plan.

        `per_mass` divides the rows by p, or q: 0 where there is no mass, and no underflow where there is little.
        """
        problem, (f, g) = self.problem, self.potentials
        if problem.impl != "triton":
            return None
        self._unchanged.check("the plan")
        f, epsilon = potential_of_plan(problem, f), problem.epsilon.detach().to(f.dtype)
        log_p, log_q = (w.detach().to(f.dtype).log() for w in (problem.p, problem.q))
        if per_mass:
            log_p, log_q = (log_p, _one_where_mass(log_q)) if is_transposed else (_one_where_mass(log_p), log_q)
        if is_transposed:
            products = problem.cost.T.plan_products(g, f, log_q, log_p, epsilon=epsilon)
        else:
            products = problem.cost.plan_products(f, g, log_p, log_q, epsilon=epsilon)
        return products(v.detach().to(f.dtype)).values

    @cached_property
    def _in_float64(self) -> _InFloat64:
        """Return the problem in float64, with f an exact update there, so that rounding does not spoil the bounds."""
        self._unchanged.check("a bound")
        problem = detached_in_float64(self.problem)
        with torch.no_grad():
            g = self.search.g.to(problem.p.dtype).nan_to_num(nan=0.0)  # unknown ones: any potentials give bounds
            return _InFloat64(problem, build_updates(problem).f_from(g), g)

    @cached_property
    def _rounding_bound(self) -> Tensor:
        """Return what rounding may add to a sum over bins. Bounds include it."""
        problem, f, g = self._in_float64
        return 4 * torch.finfo(f.dtype).eps * sizes_of_terms(problem, f, g)

    # ---- derivatives of the value ----

    @property
    def weight_gradients(self) -> tuple[Tensor, Tensor]:
        """Return dV/dp and dV/dq; in balanced problems they are defined up to a constant."""
        problem, (f, g) = self.problem, self.potentials
        epsilon, penalty = problem.epsilon.detach().to(f.dtype), problem.marginal_penalty
        if penalty is None:
            return f, g
        mass_p, mass_q = (w.detach().to(f.dtype).sum(-1) for w in (problem.p, problem.q))
        by_p = _weight_gradient(problem.p, f, mass_q, epsilon, penalty.p)
        by_q = _weight_gradient(problem.q, g, mass_p, epsilon, penalty.q)
        largest = torch.finfo(torch.promote_types(problem.dtype, torch.float32)).max
        return by_p.clamp(-largest, largest), by_q.clamp(-largest, largest)

    @property
    def relative_entropy(self) -> Tensor:
        return relative_entropy(self.problem, *self.potentials)

    def cost_gradients(self, upstream: Float[Tensor, "*batch"]) -> tuple[Tensor, ...]:
        problem, (f, g) = self.problem, self.potentials
        log_p, log_q = (w.detach().to(f.dtype).log() for w in (problem.p, problem.q))
        f, epsilon = potential_of_plan(problem, f), problem.epsilon.detach().to(f.dtype)
        return problem.cost.plan_gradients(f, g, log_p, log_q, epsilon=epsilon, upstream=upstream)


class _InFloat64(NamedTuple):
    """A problem and its potentials."""

    problem: Problem
    f: Tensor
    g: Tensor


def solution_of(problem: Problem, search: SearchResult, tolerance: float) -> EntropicSolution:
    """Return the solution, whose value has no graph yet; a problem whose value is not finite has not converged."""
    with torch.no_grad():
        value = dual_value(problem, search.f, search.g)
        if not bool(value.isfinite().all()):
            search = dataclasses.replace(search, error=search.error.masked_fill(~value.isfinite(), torch.inf))
        return EntropicSolution(problem, search, tolerance, value)


def _weight_gradient(
    weights: Tensor, potential: Tensor, mass: Tensor, epsilon: Tensor, rho: float | Tensor
) -> Float[Tensor, "*batch bins"]:
    """Return dV/dp from f, or dV/dq from g, where the other side has the mass `mass` (...)."""
    share = (-potential / rho).exp()
    return without_overflow(weights, dual_term(potential, rho) - epsilon.unsqueeze(-1) * (share - mass.unsqueeze(-1)))


def without_overflow(weights: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of weights, cut off at bins without mass, so that a mask of zeros times it is zero."""
    return torch.where(weights == 0, gradient.clamp(-_LARGEST_DERIVATIVE, _LARGEST_DERIVATIVE), gradient)


def _one_where_mass(log_weights: Float[Tensor, "*batch bins"]) -> Float[Tensor, "*batch bins"]:
    """Return the logarithms of weights of one in place of those above zero."""
    return torch.zeros_like(log_weights).where(log_weights > -torch.inf, -torch.inf)
