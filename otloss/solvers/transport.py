"""Restore: from the solution of a reduced problem, the solution of the problem that was posed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss._autograd import Unchanged, cached_with_graph, without_gradient
from otloss._checks import check_finite, check_floating
from otloss.costs.products import product
from otloss.solvers.problem import Problem
from otloss.solvers.reductions.way_back import WayBack
from otloss.solvers.weight_rounding import rounding_of_value


class Certificate(NamedTuple):
    """Bounds of the exact transport cost, per problem, which hold without convergence.

    Attributes:
        lower: (...), the best of the dual value of the potentials (made feasible) and of `lower_bound`.
        upper: (...), the smaller of the cost of the plan (made feasible) and of `upper_bound`.
    """

    lower: Float[Tensor, "*batch"]
    upper: Float[Tensor, "*batch"]


class Solution(Protocol):
    """What a solver gives for a reduced problem: `ExactSolution`, `EntropicSolution`, `ImplicitSolution`.

    It has the attributes of `Transport`. Only the value has a graph, unless `only_value_has_gradients` is None; else
    that is the message of a backward pass through another part.
    """

    @property
    def value(self) -> Float[Tensor, "*batch"]: ...
    @property
    def only_value_has_gradients(self) -> str | None: ...
    @property
    def potentials(self) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch m"]]: ...
    @property
    def marginal_error(self) -> Float[Tensor, "*batch"]: ...
    @property
    def converged(self) -> Bool[Tensor, "*batch"]: ...
    @property
    def iterations(self) -> Int[Tensor, "*batch"]: ...
    @property
    def potential_error(self) -> Float[Tensor, "*batch"]: ...
    @property
    def linear_cost(self) -> Float[Tensor, "*batch"]: ...
    @property
    def dual_value(self) -> Float[Tensor, "*batch"]: ...
    @property
    def gap(self) -> Float[Tensor, "*batch"]: ...
    @property
    def bounds(self) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]: ...
    def plan_blocks(self) -> Iterator[tuple[slice, Float[Tensor, "*batch rows m"]]]: ...
    def streamed_product(self, v: Tensor, *, is_transposed: bool, per_mass: bool = False) -> Tensor | None:
        """P v or P^T v where kernels compute it without blocks of P, else None; divided by p or q if `per_mass`."""


class Transport:
    """The solutions of `solve`, per problem; parts that take another pass over the cost are computed at first use.

    Attributes:
        value: (...), the optimum, differentiable like `emd` or `sinkhorn`.
        potentials: (f, g), (..., n) and (..., m): the derivatives of the value in p and q, up to a constant.
            Potentials of exact transport obey f + g <= C everywhere: where bins of p and of q hold no mass their two
            one-sided derivatives may not, and g is less there.
        marginal_error: (...), sum of the errors of both marginals relative to the mass that is moved; with
            the mass, as little as rounding, that no plan keeps from pairs of cost +inf, and that is not moved.
        converged: (...), whether the search ended within the tolerance.
        iterations: (...), of Sinkhorn, or pivots of the simplex.
        potential_error: (...), an estimate of the error of the potentials, and so of the gradients of the weights: the
            largest one of g, in the unit of the cost, with the rounding of f and g to their dtype. Where the plan falls
            into parts that hardly exchange mass it is large although the marginal error is small. Infinite where
            rounding decides them. Of balanced problems with more than 2**20 entries the first use may take some tens of
            iterations. Exact potentials are optimal, and one pair of many where the optimum is degenerate: it is their
            rounding. With a marginal penalty and more than 2**20 entries it is a bound, too large by up to the penalty
            over 2 epsilon, for bins that keep mass.
    """

    def __init__(self, problem: Problem, solution: Solution, ways_back: Sequence[WayBack]) -> None:
        self._problem, self._solution = problem, solution
        self._grad_enabled = torch.is_grad_enabled()  # for `cached_with_graph`
        self._unchanged = Unchanged(problem.p, problem.q, *problem.cost.tensors())
        self._ways_back: list[WayBack] = []  # the way back of the last reduction first
        for way_back in reversed(ways_back):
            self._ways_back.append(way_back.after(self._dense_plan))
        value = solution.value
        for step in self._ways_back:
            value = step.value(value)
        self._value = value
        self.value: Float[Tensor, "*batch"] = self._own(value)

    @cached_with_graph
    def potentials(self) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch m"]]:
        """(f, g), (..., n) and (..., m)."""
        f, g = self._potentials
        return self._guarded(self._own(f)), self._guarded(self._own(g))

    @property
    def marginal_error(self) -> Float[Tensor, "*batch"]:
        """(...), relative to the mass that is moved."""
        error = self._solution.marginal_error
        for step in self._ways_back:
            error = step.marginal_error(error)
        return self._own(error)

    @property
    def converged(self) -> Bool[Tensor, "*batch"]:
        """(...), whether the marginal error is within the tolerance."""
        return self._solution.converged.clone()

    @property
    def iterations(self) -> Int[Tensor, "*batch"]:
        """(...), of Sinkhorn, or pivots of the simplex."""
        return self._solution.iterations.clone()

    @property
    def potential_error(self) -> Float[Tensor, "*batch"]:
        """(...), in the unit of the cost."""
        error = self._cast(self._solution.potential_error)
        f, g = (
            self._cast(potential.detach()).abs().masked_fill(weights.detach() == 0, 0.0).amax(-1)
            for potential, weights in zip(self._potentials, (self._problem.p, self._problem.q), strict=True)
        )
        return error + torch.finfo(error.dtype).eps * torch.maximum(f, g).to(error)  # with the rounding of the output

    @cached_with_graph
    def linear_cost(self) -> Float[Tensor, "*batch"]:
        """(...), `<C, P>`: what the plan itself costs, without the entropy."""
        if self._problem.is_exact:
            return self._own(self._value)
        return self._guarded(self._own(self._bound(self._solution.linear_cost)))

    @property
    def dual_value(self) -> Float[Tensor, "*batch"]:
        """(...), the dual objective at the potentials, a lower bound of the optimum; in float64, without a graph."""
        value = self._solution.dual_value
        for step in self._ways_back:
            value = step.dual_value(value).detach()
        return value - self._rounding

    @property
    def gap(self) -> Float[Tensor, "*batch"]:
        """(...), at least 0: the objective of a plan that keeps the marginals, minus `dual_value`; float64, no graph.

        The true optimum lies between `dual_value` and `dual_value + gap`, also for weights without the rounding of
        their dtype: twice what it may change is a part of the gap, but with `marginal_penalty`, where it is not
        counted. A number as epsilon counts as its rounding to the dtype of the cost.
        """
        gap = self._solution.gap
        for step in self._ways_back:
            gap = step.gap(gap)
        return gap + 2 * self._rounding

    @property
    def certificate(self) -> Certificate:
        """Bounds of the exact transport cost, in float64 and without a graph."""
        lower, upper = (self._bound(bound).detach() for bound in self._solution.bounds)
        return Certificate(lower - self._rounding, upper + self._rounding)

    def plan(self) -> Float[Tensor, "*batch n m"]:
        """Return the plan P as a dense tensor."""
        return self._guarded(self._cast(self._dense_plan()))

    def apply(self, v: Float[Tensor, "*batch m k"]) -> Float[Tensor, "*batch n k"]:
        """Return P v, for example (divided by p) the mean position that each bin of p moves to."""
        v = self._columns("v", v, self._problem.q)
        moved = self._streamed_product(v, is_transposed=False)
        if moved is None:
            moved = torch.cat([product(plan, self._factor(v, plan)) for _, plan in self._plan_blocks()], dim=-2)
        return self._guarded(self._cast(moved), v)

    def apply_transpose(self, u: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch m k"]:
        """Return P^T u."""
        u = self._columns("u", u, self._problem.p)
        moved = self._streamed_product(u, is_transposed=True)
        if moved is None:
            parts = [product(plan.mT, self._factor(u, plan)[..., rows, :]) for rows, plan in self._plan_blocks()]
            moved = torch.stack(parts).sum(0)
        return self._guarded(self._cast(moved), u)

    def barycentric_map(self, y: Float[Tensor, "*batch m d"]) -> Float[Tensor, "*batch n d"]:
        """Return where each bin of p moves on average: P y over the mass of its row in P, which may differ from p.

        NaN in rows of P without mass, which have no mean. The map is the minimum of squared distances; other costs fit
        other means.
        """
        columns = self._columns("y", y, self._problem.q)
        columns = torch.cat([columns, torch.ones_like(columns[..., :1])], -1)
        moved = None
        if self._keeps_plan:
            # Per mass of the rows, whose weights may be so small that entries of the plan underflow.
            moved = self._solution.streamed_product(columns, is_transposed=False, per_mass=True)
        moved = self.apply(columns) if moved is None else self._guarded(self._cast(moved), columns)
        mass = moved[..., -1:]
        return torch.where(mass > 0, moved[..., :-1] / torch.where(mass > 0, mass, 1.0), torch.nan)

    def __repr__(self) -> str:
        count, done = self.converged.numel(), int(self.converged.sum())
        shape = (self._problem.p.shape[-1], self._problem.q.shape[-1])
        error = float(self.marginal_error.amax()) if count else 0.0
        return (
            f"Transport(problems={tuple(self.converged.shape)}, bins={shape}, converged={done}/{count}, "
            f"worst marginal_error={error:.2g}, dtype={self.value.dtype}, device='{self.value.device}')"
        )

    @cached_with_graph
    def _potentials(self) -> tuple[Tensor, Tensor]:
        f, g = self._solution.potentials
        for step in self._ways_back:
            f, g = step.potentials(f, g)
        return f, g

    def _dense_plan(self) -> Tensor:
        plan = torch.cat([block for _, block in self._solution.plan_blocks()], dim=-2)
        for step in self._ways_back:
            plan = step.plan(plan)
        return plan

    def _plan_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """The plan by blocks of rows; all of it where a way back changes it."""
        if self._keeps_plan:
            yield from self._solution.plan_blocks()
        else:
            yield slice(None), self._dense_plan()

    def _streamed_product(self, v: Tensor, *, is_transposed: bool) -> Tensor | None:
        return self._solution.streamed_product(v, is_transposed=is_transposed) if self._keeps_plan else None

    @property
    def _keeps_plan(self) -> bool:
        return all(step.keeps_plan for step in self._ways_back)

    @cached_property
    def _rounding(self) -> Float[Tensor, "*batch"]:
        self._unchanged.check("a bound")
        return rounding_of_value(self._problem, self._cast(self._value))

    def _bound(self, bound: Tensor) -> Tensor:
        for step in self._ways_back:
            bound = step.bound(bound, self._dense_plan)
        return bound

    def _columns(self, name: str, values: Tensor, like: Tensor) -> Tensor:
        check_finite(name, check_floating(name, values))
        if values.dim() < 2 or values.shape[-2] != like.shape[-1]:
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}, expected (..., {like.shape[-1]}, k), a column for each "
                f"quantity; a single one is {name}[..., None]."
            )
        return values

    def _factor(self, values: Tensor, plan: Tensor) -> Tensor:
        has_graph = self._solution.only_value_has_gradients is None
        return (values if has_graph else values.detach()).to(plan)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._problem.p.device, self._problem.dtype)

    def _own(self, tensor: Tensor) -> Tensor:
        """Return a copy in the dtype of the user, who may change it: other parts are computed from the original."""
        return tensor.to(self._problem.p.device, self._problem.dtype, copy=True)

    def _guarded(self, tensor: Tensor, *inputs: Tensor) -> Tensor:
        """Return the tensor; a backward pass through it raises where it has no derivative."""
        message = self._solution.only_value_has_gradients
        return tensor if message is None else without_gradient(tensor, message, *self._problem.inputs, *inputs)
