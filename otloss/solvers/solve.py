"""solve: a transport problem, exact or entropic, with its plan, potentials and error bounds."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss._autograd import Unchanged, eager, without_gradient
from otloss._checks import check_finite, check_floating
from otloss._foreign import explains_foreign_keywords
from otloss.costs import Cost
from otloss.solvers.bounds import lower_bound, upper_bound
from otloss.solvers.entropic.log_domain import Sweep
from otloss.solvers.entropic.problem import (
    EntropicProblem,
    Settings,
    default_tolerance,
    entropic_problem,
    in_float64,
)
from otloss.solvers.entropic.value import (
    dual_value,
    duality_gap,
    linear_cost,
    plan_blocks,
    rounded_linear_cost,
)
from otloss.solvers.exact import ExactSolution, exact_problem, exact_value, solve_exact
from otloss.solvers.histograms import HistogramPair, weights_or_uniform
from otloss.solvers.partial import partial_entropic_problem, partial_problem, partial_value
from otloss.solvers.plain import PlainCost, is_plain, plain_cost
from otloss.solvers.sinkhorn import solved


class Certificate(NamedTuple):
    """Bounds of the exact transport cost, per problem, which hold without convergence.

    Attributes:
        lower: (...), the best of the dual value of the potentials (made feasible) and of `lower_bound`.
        upper: (...), the least of the cost of the plan (made feasible) and of `upper_bound`.
    """

    lower: Float[Tensor, "*batch"]
    upper: Float[Tensor, "*batch"]


class Transport(ABC):
    """The answer of `solve`, per problem; parts that take another pass over the cost are computed at first use.

    Attributes:
        value: (...), the optimum of the problem that was asked for, differentiable like `emd` or `sinkhorn`.
        potentials: (f, g), (..., n) and (..., m): the derivatives of the value in p and q, up to a constant. Those of
            exact transport obey f + g <= C everywhere: where bins of p and of q hold no mass their two one-sided
            derivatives may not, and g is less there.
        marginal_error: (...), sum of the errors of both marginals relative to the mass.
        converged: (...), whether that is within the tolerance.
        iterations: (...), of Sinkhorn, or pivots of the simplex.
        potential_error: (...), an estimate of the error of the potentials, and so of the gradients of the weights: the
            largest one of g, in the unit of the cost. Where the plan falls into parts that hardly
            exchange mass it is large although the marginal error is small. Infinite where rounding decides them, NaN
            where it is not known (without the numba kernel, above 2**20 entries or on a GPU), 0 for exact transport,
            whose potentials are optimal, and one pair of many where the optimum is degenerate. With a marginal penalty
            it is a bound, too large by up to the penalty over 2 epsilon, for bins that keep mass.
    """

    value: Float[Tensor, "*batch"]
    potentials: tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch m"]]
    marginal_error: Float[Tensor, "*batch"]
    converged: Bool[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]
    potential_error: Float[Tensor, "*batch"]

    @property
    @abstractmethod
    def linear_cost(self) -> Float[Tensor, "*batch"]:
        """(...), `<C, P>`: what the plan itself costs, without the entropy."""

    @property
    @abstractmethod
    def dual_value(self) -> Float[Tensor, "*batch"]:
        """(...), the dual objective at the potentials, a lower bound of the optimum; in float64, without a graph."""

    @property
    @abstractmethod
    def gap(self) -> Float[Tensor, "*batch"]:
        """(...), at least 0: the objective of a plan that keeps the marginals, minus `dual_value`; likewise.

        The true optimum lies between `dual_value` and `dual_value + gap`.
        """

    @property
    @abstractmethod
    def certificate(self) -> Certificate:
        """Bounds of the exact transport cost, in float64 and without a graph."""

    @abstractmethod
    def plan(self) -> Float[Tensor, "*batch n m"]:
        """Return the plan P as a dense tensor."""

    def apply(self, v: Float[Tensor, "*batch m k"]) -> Float[Tensor, "*batch n k"]:
        """Return P v, for example (divided by p) the mean position that each bin of p moves to."""
        return _product(self.plan(), _columns("v", v, self.potentials[1]))

    def apply_transpose(self, u: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch m k"]:
        """Return P^T u."""
        return _product(self.plan().mT, _columns("u", u, self.potentials[0]))

    def barycentric_map(self, y: Float[Tensor, "*batch m d"]) -> Float[Tensor, "*batch n d"]:
        """Return where each bin of p moves on average: P y over the mass of its row in P, which may differ from p.

        NaN in rows of P without mass, which have no mean. The map is the minimum of squared distances; other costs fit
        other means.
        """
        columns = _columns("y", y, self.potentials[1])
        moved = self.apply(torch.cat([columns, torch.ones_like(columns[..., :1])], -1))
        held = moved[..., -1:]
        return torch.where(held > 0, moved[..., :-1] / torch.where(held > 0, held, 1.0), torch.nan)

    def __repr__(self) -> str:
        count, done = self.converged.numel(), int(self.converged.sum())
        shape = (self.potentials[0].shape[-1], self.potentials[1].shape[-1])
        error = float(self.marginal_error.amax()) if count else 0.0
        return (
            f"Transport(problems={tuple(self.converged.shape)}, bins={shape}, converged={done}/{count}, "
            f"worst marginal_error={error:.2g}, dtype={self.value.dtype}, device='{self.value.device}')"
        )


@explains_foreign_keywords
@eager
def solve(
    p: Float[Tensor, "*batch n"] | None,
    q: Float[Tensor, "*batch m"] | None,
    cost: Cost | Float[Tensor, "*batch n m"],
    *,
    epsilon: float | Float[Tensor, "*batch"] | None = None,
    mass: float | Float[Tensor, "*batch"] | None = None,
    epsilon_relative_to: str | None = None,
    marginal_penalty: float | None = None,
    grad: str = "envelope",
    tolerance: float | None = None,
    max_iterations: int = 10_000,
    start: tuple[Tensor, Tensor] | None = None,
    strict: bool = False,
    impl: str = "auto",
    reach: float | None = None,
) -> Transport:
    """Return the solutions of transport problems, exact or entropic, with an error bound for each.

    Args:
        p, q, cost: as for `emd` and `sinkhorn`.
        epsilon: None for exact transport, else as for `sinkhorn`.
        mass: the amount that is moved, as for `emd` and `sinkhorn`; None for all.
        grad: as for `sinkhorn`. "implicit" makes `linear_cost`, `potentials`, `plan()` and its products differentiable
            too; with "envelope" a backward pass through them raises RuntimeError.
        start: potentials (f, g) of a similar problem, for exact transport too.
        epsilon_relative_to, marginal_penalty, tolerance, max_iterations, strict, impl, reach: as for `sinkhorn`. Exact
            transport takes none of them but `strict`, which changes nothing there.

    Returns:
        A `Transport`.

    Raises:
        TypeError, ValueError, RuntimeError: as `emd` and `sinkhorn`; ValueError also for an option that exact
            transport does not take.

    Example:
        >>> p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
        >>> cost = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> answer = solve(p, q, cost, epsilon=0.1)
        >>> answer.converged, answer.gap < 1e-5
        (tensor(True), tensor(True))
        >>> solve(p, q, cost).plan()
        tensor([[0.2500, 0.2500],
                [0.0000, 0.5000]])
    """
    settings = Settings(
        epsilon_relative_to, marginal_penalty, grad, tolerance, max_iterations, start, strict, impl, reach
    )
    return transport(p, q, cost, epsilon=epsilon, mass=mass, settings=settings)


def transport(
    p: Any, q: Any, cost: Any, *, epsilon: Any, mass: Any, settings: Settings, settle: bool | None = True
) -> Transport:
    """As `solve`, with checked options; `settle` as for `find_potentials`."""
    if not is_plain(cost):
        return _with_plain_cost(p, q, cost, epsilon=epsilon, mass=mass, settings=settings, settle=settle)
    if epsilon is None:
        not_taken = sorted(settings.changed - {"start", "strict"})
        if not_taken:
            raise ValueError(
                f"exact transport (epsilon=None) does not take {not_taken}; give an epsilon, or drop them."
            )
        if mass is None:
            return _Exact(*exact_problem(p, q, cost), settings.start)
        if settings.start is not None:
            raise ValueError("start is given with mass=, expected none: the dummy bins have potentials of their own.")
        return _Partial(_Exact(*partial_problem(p, q, cost, mass), None))
    if mass is not None:
        part = partial_entropic_problem(p, q, cost, mass, epsilon=epsilon, settings=settings)
        inner = _Entropic(part, settings, settle)
        inner.value = partial_value(inner.value, part, settings).to(part.dtype)
        return _Partial(inner)
    return _Entropic(entropic_problem(p, q, cost, epsilon=epsilon, settings=settings), settings, settle)


def _with_plain_cost(
    p: Any, q: Any, cost: Tensor, *, epsilon: Any, mass: Any, settings: Settings, settle: bool | None
) -> Transport:
    if settings.epsilon_relative_to is not None:
        raise ValueError(
            "the cost matrix has negative or infinite entries, and the mean of those is no scale; give epsilon itself "
            "in place of epsilon_relative_to."
        )
    plain = plain_cost(cost, epsilon=epsilon, marginal_penalty=settings.marginal_penalty)
    p, q = weights_or_uniform(p, q, cost)
    dtype = functools.reduce(torch.promote_types, (w.dtype for w in (p, q) if isinstance(w, Tensor)), cost.dtype)
    if epsilon is not None and settings.tolerance is None:
        settings = dataclasses.replace(settings, tolerance=default_tolerance(dtype))
    start = settings.start
    if isinstance(start, tuple | list) and len(start) == 2 and all(isinstance(t, Tensor) for t in start):
        settings = dataclasses.replace(settings, start=(start[0] - plain.low.unsqueeze(-1), start[1]))
    inner = transport(p, q, plain.matrix, epsilon=epsilon, mass=mass, settings=settings, settle=settle)
    return _WithPlainCost(inner, plain, (p, q), mass, dtype)


class _Entropic(Transport):
    def __init__(self, problem: EntropicProblem, settings: Settings, settle: bool | None) -> None:
        self._problem = problem
        found, self._state, value = solved(problem, settings, settle=settle)
        self._found = found
        self._unchanged = Unchanged(problem.p, problem.q, problem.epsilon, *problem.cost.tensors())
        self.value = self._cast(value)
        if self._state is None:
            self.potentials = (self._without_gradient(found.f), self._without_gradient(found.g))
        else:
            self.potentials = (self._cast(self._state.f), self._cast(self._state.g))
        self.marginal_error = self._cast(found.error)
        self.converged, self.iterations = found.converged, found.iterations
        unknown = torch.full_like(found.error, torch.nan)
        self.potential_error = self._cast(unknown if found.potential_error is None else found.potential_error)

    @cached_property
    def linear_cost(self) -> Tensor:
        if self._state is not None:
            return self._cast(self._state.linear_cost)
        self._unchanged.check("linear_cost")
        return self._without_gradient(linear_cost(self._problem, self._found.f, self._found.g))

    @cached_property
    def _judged(self) -> tuple[EntropicProblem, Tensor, Tensor]:
        """The problem in float64, with f an exact update there: bounds must not be off by rounding."""
        self._unchanged.check("what certifies the answer")
        problem = in_float64(self._problem)
        with torch.no_grad():
            g = self._found.g.to(problem.p.dtype)
            f = Sweep.of(problem).f_from(g)
        empty = (problem.p.sum(-1, keepdim=True) == 0) | (problem.q.sum(-1, keepdim=True) == 0)
        return problem, f.masked_fill(empty, 0.0), g

    @cached_property
    def dual_value(self) -> Tensor:
        return dual_value(*self._judged) - self._rounding

    @cached_property
    def gap(self) -> Tensor:
        return duality_gap(*self._judged) + 2 * self._rounding

    @property
    def _rounding(self) -> Tensor:
        """What rounding may add to a sum over bins, so that bounds stay bounds."""
        problem, f, g = self._judged
        p, q, epsilon = problem.p, problem.q, problem.epsilon
        mass = p.sum(-1) + q.sum(-1)
        terms = (p * f.abs()).sum(-1) + (q * g.abs()).sum(-1) + epsilon * mass
        return 4 * torch.finfo(terms.dtype).eps * terms

    @cached_property
    def certificate(self) -> Certificate:
        problem, f, g = self._judged
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
            lower = torch.maximum(dual, lower_bound(p, q, problem.cost).to(f.dtype)) - self._rounding
            upper = torch.minimum(primal, upper_bound(p, q, problem.cost).to(f.dtype)) + self._rounding
        # Both bounds are off by rounding where they meet.
        return Certificate(lower, torch.maximum(lower, upper))

    def plan(self) -> Tensor:
        if self._state is not None:
            return self._cast(self._state.plan)
        return self._without_gradient(torch.cat([plan for _, plan in self._plan_blocks()], dim=-2))

    def apply(self, v: Tensor) -> Tensor:
        v = _columns("v", v, self.potentials[1])
        if self._state is not None:
            return super().apply(v)
        found = [_product(plan, v.detach().to(plan)) for _, plan in self._plan_blocks()]
        return self._without_gradient(torch.cat(found, dim=-2), v)

    def apply_transpose(self, u: Tensor) -> Tensor:
        u = _columns("u", u, self.potentials[0])
        if self._state is not None:
            return super().apply_transpose(u)
        total: Tensor | None = None
        for part, plan in self._plan_blocks():
            share = _product(plan.mT, u.detach().to(plan)[..., part, :])
            total = share if total is None else total + share
        assert total is not None
        return self._without_gradient(total, u)

    def _plan_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        self._unchanged.check("the plan")
        for part, plan, _ in plan_blocks(self._problem, self._found.f, self._found.g):
            yield part, plan

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._problem.dtype)

    def _without_gradient(self, tensor: Tensor, *more: Tensor) -> Tensor:
        message = (
            'grad="envelope" gives the derivative of `value` alone; solve with grad="implicit" to go through the plan, '
            "the potentials or the linear cost."
        )
        return without_gradient(self._cast(tensor), message, *self._problem.inputs, *more)


class _Exact(Transport):
    def __init__(self, pair: HistogramPair, matrix: Tensor, start: tuple[Tensor, Tensor] | None) -> None:
        self._pair, self._matrix = pair, matrix
        self._solution: ExactSolution = solve_exact(self._pair.p, self._pair.q, self._matrix, start=start)
        self.value = exact_value(self._pair, self._matrix, self._solution)
        self._potentials = self._solution.f, self._feasible_g()
        self.iterations = self._solution.iterations.to(self._pair.p.device)
        self.converged = torch.ones_like(self.iterations, dtype=torch.bool)
        self.potential_error = torch.zeros_like(self.value.detach())

    @cached_property
    def potentials(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        f, g = self._potentials
        return self._without_gradient(f), self._without_gradient(g)

    def _feasible_g(self) -> Tensor:
        """g, lowered at bins without mass so that f + g <= C holds too where both bins have none."""
        solution, (p, q) = self._solution, (w.detach().to("cpu") for w in (self._pair.p, self._pair.q))
        if not bool((p == 0).any() and (q == 0).any()):
            return solution.g
        slack = self._matrix.detach().to("cpu", torch.float64) - solution.f.unsqueeze(-1)
        least = slack.masked_fill((p > 0).unsqueeze(-1), torch.inf).amin(-2)
        return torch.where(q == 0, torch.minimum(solution.g, least), solution.g)

    @cached_property
    def marginal_error(self) -> Tensor:  # type: ignore[override]
        plan = self._solution.plan()
        p, q = (w.detach().to(plan) for w in (self._pair.p, self._pair.q))
        off = (plan.sum(-1) - p).abs().sum(-1) + (plan.sum(-2) - q).abs().sum(-1)
        return self._cast(off / p.sum(-1).clamp(min=torch.finfo(p.dtype).tiny))

    @property
    def linear_cost(self) -> Tensor:
        return self.value

    @cached_property
    def dual_value(self) -> Tensor:
        return (self._solution.value - self._solution.gap).to(self._matrix.device)

    @cached_property
    def gap(self) -> Tensor:
        return self._solution.gap.clamp(min=0).to(self._matrix.device)

    @property
    def certificate(self) -> Certificate:
        return Certificate(self.dual_value, self.dual_value + self.gap)

    def plan(self) -> Tensor:
        return self._without_gradient(self._solution.plan())

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._pair.p.device, self._pair.dtype)

    def _without_gradient(self, tensor: Tensor) -> Tensor:
        message = (
            "an exact plan and its potentials jump where they change at all, so they have no derivative; use `value`, "
            'or an epsilon with grad="implicit".'
        )
        return without_gradient(self._cast(tensor), message, self._pair.p, self._pair.q, self._matrix)


class _Within(Transport):
    """A problem whose solution follows from that of another, `inner`: values differ by `shift`."""

    def __init__(self, inner: Transport, shift: Tensor | float = 0.0, dtype: torch.dtype | None = None) -> None:
        self._inner, self._shift, self._dtype = inner, shift, dtype or inner.value.dtype
        self.value = self._shifted(inner.value)
        self.converged, self.iterations = inner.converged, inner.iterations
        self.marginal_error, self.potential_error = inner.marginal_error, inner.potential_error

    @property
    def potentials(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self._inner.potentials

    def _shifted(self, value: Tensor) -> Tensor:
        return (value + self._shift).to(self._dtype)

    @property
    def linear_cost(self) -> Tensor:
        return self._shifted(self._inner.linear_cost)

    @property
    def dual_value(self) -> Tensor:
        return self._inner.dual_value + self._shift

    @property
    def gap(self) -> Tensor:
        return self._inner.gap

    @property
    def certificate(self) -> Certificate:
        return Certificate(*(bound + self._shift for bound in self._inner.certificate))

    def plan(self) -> Tensor:
        return self._inner.plan()


class _Partial(_Within):
    """The solution of a problem with dummy bins, without them; its bounds are those of the problem with them."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)

    @cached_property
    def potentials(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        f, g = self._inner.potentials
        return f[..., :-1] + g[..., -1:], g[..., :-1] + f[..., -1:]

    def plan(self) -> Tensor:
        return self._inner.plan()[..., :-1, :-1]


class _WithPlainCost(_Within):
    """The solution of a problem with forbidden pairs or negative costs, from that of its `PlainCost`."""

    def __init__(
        self, inner: Transport, cost: PlainCost, weights: tuple[Tensor, Tensor], mass: Any, dtype: torch.dtype
    ) -> None:
        p, q = (w.detach().sum(-1, dtype=torch.float64) for w in weights)
        moved = (p + q) / 2 if mass is None else mass
        shift = cost.low * moved
        if cost.forbidden is not None:
            shift = shift - cost.price * cost.check_avoids(inner.plan().detach(), moved, dtype)
        super().__init__(inner, shift, dtype)
        self.marginal_error, self.potential_error = (e.to(dtype) for e in (self.marginal_error, self.potential_error))
        # With a mass to be moved its derivative takes the constant, and those of the weights have none.
        self._low = cost.low.unsqueeze(-1) if mass is None else 0.0
        self._forbidden = cost.forbidden

    @cached_property
    def potentials(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        f, g = self._inner.potentials
        return (f + self._low).to(self._dtype), g.to(self._dtype)

    def plan(self) -> Tensor:
        plan = self._inner.plan().to(self._dtype)
        return plan if self._forbidden is None else plan.masked_fill(self._forbidden, 0.0)


def _product(plan: Tensor, columns: Tensor) -> Tensor:
    with torch.autocast(plan.device.type, enabled=False):
        return plan @ columns


def _columns(name: str, values: Tensor, like: Tensor) -> Tensor:
    check_finite(name, check_floating(name, values))
    if values.dim() < 2 or values.shape[-2] != like.shape[-1]:
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}, expected (..., {like.shape[-1]}, k), a column for each quantity; "
            f"a single one is {name}[..., None]."
        )
    return values.to(like.dtype)
