"""Differentiate: the derivatives of the value of a transport problem, exact and entropic, in one place.

Envelope. At the optimum the dual does not change with its potentials, so only its explicit dependence counts:

    dV/dp = f,   dV/dq = g,   dV/dC = P,   dV/depsilon = KL(P | p q^T / M)

and, with a marginal penalty, `dV/dp_i = rho_p (1 - exp(-f_i / rho_p)) - epsilon (exp(-f_i / rho_p) - mass of q)`.
These are first derivatives, exact at convergence, and hold no history of the iterations.

Implicit. At the solution (f, g) of an entropic problem write a = (f' - f) / epsilon and b = (g' - g) / epsilon for the
solution f', g' of a changed problem, and G = exp((f + g - C) / epsilon), balanced over the mass. Balanced, they solve

    a = -log(G (q e^b)),   b = -log(G^T (p e^a))

and unbalanced the same with `k_p (-f / rho_p - log ...)`, k_p = rho_p / (rho_p + epsilon). Newton's method on b, from
b = 0 and with every step in the graph, gives the derivatives of b by p, q, C and epsilon: one step the first, two steps
the second and third, for the error of a step is the square of that before. Weights stand as factors, not as logarithms,
so that bins without mass have their one-sided derivatives. The system has the size of the smaller side.

Where epsilon is small the plan falls into parts that hardly exchange mass, and the system is singular to rounding: it
does not determine how potentials of two parts compare. Neither the plan nor its derivatives in
the costs depend on that, so a tiny multiple of the identity is added and changes nothing. Derivatives in the weights do
depend on it (mass that must move from one part to another): they raise RuntimeError where the condition of the system
is above a bound that is far from what rounding makes of a singular one (`condition.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._autograd import (
    cached_with_graph,
    change_gradient,
    check_no_tangent,
    check_no_transform,
    once_only,
    release,
)
from otloss._checks import float64_or, is_differentiated
from otloss._progress import outermost
from otloss.costs.cost import makes_graph
from otloss.solvers.condition import SMALL_STEP, check_condition, corrected, singular_equations_error
from otloss.solvers.entropic.equations.updates import damping_of
from otloss.solvers.entropic.implicit.grid import suits_axes, with_graph_by_axes
from otloss.solvers.entropic.implicit.products import (
    linear_cost_with_graph,
    suits_products,
    with_graph_by_products,
)
from otloss.solvers.entropic.objectives import balanced_value, dual_term
from otloss.solvers.entropic.solution import EntropicSolution, without_overflow
from otloss.solvers.exact.solution import ExactSolution
from otloss.solvers.linear_systems import solve as solve_systems
from otloss.solvers.options import BOTH_KEPT, MarginalPenalty, is_kept
from otloss.solvers.problem import Problem

NEWTON_STEPS = 2
IMPLICIT_RIDGE = 1e-11
LARGEST_EXPONENT = 0.95  # over the largest one of which the exponential is finite
_SECOND_OF_EXACT = (
    "a second derivative of emd was asked for, but emd is piecewise linear and gives first derivatives only; "
    "drop create_graph=True, or use a smooth (entropic) transport cost."
)
_WITH_GRAD = ("sinkhorn", "sinkhorn_divergence", "solve")  # the functions that have the option `grad`

_S = TypeVar("_S", ExactSolution, EntropicSolution)


# ---- envelope ----------------------------------------------------------------------------------------------------


def with_envelope(solution: _S) -> _S:
    """Return the solution with a value that has its first derivatives in p, q, epsilon and the cost."""
    problem = solution.problem
    if isinstance(solution, EntropicSolution):
        advice = 'use grad="implicit" of sinkhorn, sinkhorn_divergence or solve, or reverse mode.'
        check_no_tangent(advice, *problem.inputs, *problem.cost.tensors())
    inputs = solution.inputs
    if not makes_graph(*inputs):
        return solution
    check_no_transform()
    value: Tensor = _Envelope.apply(solution, _no_second_derivative(problem), *inputs)
    return dataclasses.replace(solution, value=value)


def _no_second_derivative(problem: Problem) -> str:
    """Return why there is none, with advice that the function takes which was called."""
    if problem.is_exact:
        return _SECOND_OF_EXACT
    if (name := outermost()) in _WITH_GRAD:
        return (
            f'a second derivative of {name} was asked for, and grad="envelope" gives first ones only; use '
            'grad="implicit", or drop create_graph=True.'
        )
    return (
        f"a second derivative of {name or 'an entropic transport value'} was asked for, which gives first ones only; "
        'drop create_graph=True, or compute the cost by sinkhorn(..., grad="implicit") or '
        'sinkhorn_divergence(..., grad="implicit").'
    )


def _weight_gradients(solution: ExactSolution | EntropicSolution) -> tuple[Tensor, Tensor]:
    """Return dV/dp and dV/dq; exact partial transport gives a bin and a dummy bin without mass their joint derivative.

    Each of them alone has the price of its way to the bins with mass. They get mass together, which may also go from
    the one to the other, at no cost.
    """
    f, g = solution.weight_gradients
    problem = solution.problem
    if not (problem.has_dummy_bins and problem.is_exact):
        return f, g
    p, q = (w.detach().to(f.device) == 0 for w in (problem.p, problem.q))
    return _not_above(f, -g[..., -1:], p & q[..., -1:]), _not_above(g, -f[..., -1:], q & p[..., -1:])


def _not_above(potential: Tensor, limit: Tensor, empty: Tensor) -> Tensor:
    """Return the potential, at most the limit at these bins; the dummy bin, the last one, keeps its own."""
    lowered = torch.where(empty, torch.minimum(potential, limit), potential)
    return torch.cat([lowered[..., :-1], potential[..., -1:]], -1)


class _Envelope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, solution: ExactSolution | EntropicSolution, no_second: str, *inputs: Tensor) -> Tensor:
        ctx.solution, ctx.no_second, ctx.count = solution, no_second, len(inputs)
        # Tensors without a gradient too: torch then notices where one of them was changed in place in between.
        ctx.save_for_backward(*inputs, *solution.problem.cost.tensors())
        return solution.value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[: ctx.count]
        upstream, wanted = gradients[0].detach(), ctx.needs_input_grad[2:]
        solution: ExactSolution | EntropicSolution = ctx.solution
        release(ctx, "solution")
        with torch.no_grad():
            by_inputs: list[Tensor | None] = [None] * ctx.count
            if wanted[0] or wanted[1]:
                by_weights = _weight_gradients(solution)
                for k in (0, 1):
                    if wanted[k]:
                        factor = upstream.to(by_weights[k]).unsqueeze(-1)
                        by_inputs[k] = (factor * by_weights[k]).to(inputs[k])
            if wanted[2] and isinstance(solution, EntropicSolution):
                by_inputs[2] = upstream * solution.relative_entropy
            if any(wanted[3:]):
                by_inputs[3:] = solution.cost_gradients(upstream)
        return None, None, *(
            None if t is None else once_only(t.to(i.dtype), ctx.no_second, gradients[0], *inputs)
            for t, i in zip(by_inputs, inputs, strict=True)
        )  # fmt: skip

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, p: Tensor | None, q: Tensor | None, ___: None, *cost: Tensor | None) -> Tensor:
        """Exact transport alone: `with_envelope` raises before for entropic problems."""
        solution: ExactSolution = ctx.solution
        change = torch.zeros_like(solution.optimum.value)
        for tangent, potential in zip((p, q), _weight_gradients(solution), strict=True):
            if tangent is not None:
                change = change + (tangent.to(potential) * potential).sum(-1)
        for tangent in cost:
            if tangent is not None:
                change = change + solution.cost_tangent(tangent)
        return change.to(solution.value)


# ---- implicit ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImplicitSolution(EntropicSolution):
    """An entropic solution of which the potentials, the plan and the linear cost have graphs too.

    Attributes:
        with_graph: f and g, in the arithmetic dtype of the potentials.
        plan_of_equations: (..., n, m), P, where the equations have made it; None where it is made at first use.
    """

    with_graph: tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch m"]]
    plan_of_equations: Float[Tensor, "*batch n m"] | None = None
    _grad_enabled: bool = field(default_factory=torch.is_grad_enabled, repr=False)  # for `cached_with_graph`

    only_value_has_gradients: ClassVar[str | None] = None

    @property
    def potentials(self) -> tuple[Tensor, Tensor]:
        return self.with_graph

    @cached_with_graph
    def dense_plan(self) -> Float[Tensor, "*batch n m"]:
        """P."""
        if self.plan_of_equations is not None:
            return self.plan_of_equations
        self._unchanged.check("the plan")
        (f, g), problem = self.with_graph, self.problem
        p, q, epsilon, matrix = (t.to(f) for t in (problem.p, problem.q, problem.epsilon, problem.cost.dense()))
        ratio = ratio_of(problem, f, g, p, epsilon, matrix)
        return p.unsqueeze(-1) * ratio * q.unsqueeze(-2)

    @cached_with_graph
    def linear_cost(self) -> Tensor:
        self._unchanged.check("linear_cost")
        if self.plan_of_equations is None and suits_products(self.problem):
            return linear_cost_with_graph(self.problem, *self.with_graph)
        return (self.dense_plan * self.problem.cost.dense().to(self.dense_plan)).sum((-2, -1))

    def plan_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        yield slice(None), self.dense_plan

    def streamed_product(self, v: Tensor, *, is_transposed: bool, per_mass: bool = False) -> Tensor | None:
        return None  # a product with a graph


def with_implicit_derivatives(solution: EntropicSolution) -> ImplicitSolution:
    """Return the solution with derivatives of first, second and third order by the implicit function theorem."""
    problem, (f, g) = solution.problem, solution.potentials
    if suits_axes(problem):
        value, f, g = with_graph_by_axes(problem, f, g)
        return ImplicitSolution(problem, solution.search, solution.tolerance, value, (f, g))
    if suits_products(problem) and (graph := with_graph_by_products(problem, f, g, solution.value)) is not None:
        return ImplicitSolution(problem, solution.search, solution.tolerance, graph.value, (graph.f, graph.g))
    wide = float64_or(f.dtype, f.device)
    f, g, p, q, epsilon = (t.to(wide) for t in (f, g, problem.p, problem.q, problem.epsilon))
    p, q = (_cut_off(weights) if problem.marginal_penalty is not None else weights for weights in (p, q))
    matrix = problem.cost.dense().to(wide)
    if problem.is_symmetric:
        f = g = (f + g) / 2
        matrix = (matrix + matrix.mT) / 2
    exponents = log_ratio_of(problem, f, g, p, epsilon, matrix)
    width, through_weights = epsilon.unsqueeze(-1), is_differentiated(p, q)
    penalty = problem.marginal_penalty or BOTH_KEPT
    rows, columns = scale_sums(exponents, q), scale_sums(exponents.mT, p)
    if problem.is_symmetric:
        a, b = _SymmetricEquations(rows, columns, p, q, f, g, width, penalty, through_weights).newton()
    elif p.shape[-1] >= q.shape[-1]:
        a, b = _Equations(rows, columns, p, q, f, g, width, penalty, through_weights).newton()
    else:
        b, a = _Equations(columns, rows, q, p, g, f, width, penalty.swapped, through_weights).newton()
    ratio = exp_or_largest(exponents)
    plan = (p * a.exp()).unsqueeze(-1) * ratio * (q * b.exp()).unsqueeze(-2)
    f, g = f + epsilon.unsqueeze(-1) * a, g + epsilon.unsqueeze(-1) * b
    value = _dual(problem, p, q, f, g, plan)
    return ImplicitSolution(problem, solution.search, solution.tolerance, value, (f, g), plan)


def _cut_off(weights: Tensor) -> Tensor:
    """Return the weights, with gradients that are cut off at bins without mass."""
    weights = weights.view_as(weights)
    detached = weights.detach()
    change_gradient(weights, lambda gradient: without_overflow(detached, gradient))
    return weights


def ratio_of(problem: Problem, f: Tensor, g: Tensor, p: Tensor, epsilon: Tensor, matrix: Tensor) -> Tensor:
    """Return G, P over p q^T; between two bins without mass at most a number that is finite."""
    return exp_or_largest(log_ratio_of(problem, f, g, p, epsilon, matrix))


def log_ratio_of(problem: Problem, f: Tensor, g: Tensor, p: Tensor, epsilon: Tensor, matrix: Tensor) -> Tensor:
    exponents = (f.unsqueeze(-1) + g.unsqueeze(-2) - matrix) / epsilon[..., None, None]
    return exponents if problem.marginal_penalty is not None else exponents - p.sum(-1).log()[..., None, None]


def exp_or_largest(exponents: Tensor) -> Tensor:
    return exponents.clamp(max=LARGEST_EXPONENT * math.log(torch.finfo(exponents.dtype).max)).exp()


class ScaledRatio(NamedTuple):
    """G (..., n, m), with each row divided by its sum with the weights of the columns, and the logarithm of that sum.

    Rows that keep no mass, as all their pairs are forbidden, have sums that underflow.
    """

    ratio: Float[Tensor, "*batch n m"]
    log_sum: Float[Tensor, "*batch n"]


def scale_sums(exponents: Tensor, weights: Tensor) -> ScaledRatio:
    log_sum = (exponents.detach() + weights.detach().log().unsqueeze(-2)).logsumexp(-1)
    return ScaledRatio(exp_or_largest(exponents - log_sum.unsqueeze(-1)), log_sum)


def _dual(problem: Problem, p: Tensor, q: Tensor, f: Tensor, g: Tensor, plan: Tensor) -> Float[Tensor, "*batch"]:
    """The dual objective, whose derivatives in the potentials vanish."""
    epsilon, moved, penalty = problem.epsilon.to(f.dtype), plan.sum((-2, -1)), problem.marginal_penalty
    if penalty is None:
        return balanced_value(p, q, f, g) - epsilon * (moved - p.sum(-1))
    outside = _dual_of_side(p, f, penalty.p) + _dual_of_side(q, g, penalty.q)
    return outside - epsilon * (moved - p.sum(-1) * q.sum(-1))


def _dual_of_side(weights: Tensor, potential: Tensor, rho: float | Tensor) -> Float[Tensor, "*batch"]:
    """Return a side's part of the dual, in which bins without mass have none: their exponential may overflow."""
    if not is_kept(rho):
        largest = LARGEST_EXPONENT * math.log(torch.finfo(potential.dtype).max)
        lowest = -largest * rho
        potential = torch.maximum(potential, lowest) if isinstance(lowest, Tensor) else potential.clamp(min=lowest)
    return (weights * dual_term(potential, rho)).sum(-1)


@dataclass(frozen=True)
class _Equations:
    """Newton's equations for b at the potentials f and g of a solution, with the graph of their inputs.

    They are the equations of `entropic.equations.dual`, divided by the masses of the columns: bins without mass have
    derivatives.
    """

    by_rows: ScaledRatio
    by_columns: ScaledRatio  # transposed
    p: Float[Tensor, "*batch n"]
    q: Float[Tensor, "*batch m"]
    f: Float[Tensor, "*batch n"]
    g: Float[Tensor, "*batch m"]
    epsilon: Float[Tensor, "*batch 1"]
    penalty: MarginalPenalty
    through_weights: bool

    def newton(self) -> tuple[Tensor, Tensor]:
        """Return a, b, for potentials f + epsilon a, g + epsilon b at the optimum, with their derivatives."""
        start = torch.zeros_like(self.g)
        if self.through_weights:
            with torch.no_grad():
                start = corrected(self.checked_step, start)
        b = start
        for _ in range(NEWTON_STEPS):
            b = b + self.solve(*self.system(b))
        # Steps from far away lead nowhere: then they give derivatives alone, and the potentials stay.
        near = (b - start).detach().abs().amax(-1, keepdim=True) < SMALL_STEP
        b = torch.where(near, b, start + (b - b.detach()))
        return self.rows(b), b

    def checked_step(self, b: Tensor) -> Tensor:
        """Return a step of Newton's method from b, if the condition allows it."""
        system, missing = self.system(b)
        check_condition(torch.linalg.cond(system, torch.inf))
        return self.solve(system, missing)

    def rows(self, b: Tensor) -> Tensor:
        """Return the a that fits b."""
        k_p, _ = damping_of(self.penalty, self.epsilon)
        received = (self.by_rows.ratio * (self.q * b.exp()).unsqueeze(-2)).sum(-1)
        return k_p * (-self.f / self.penalty.p - self.by_rows.log_sum - received.log())

    def system(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matrix and the right-hand side of a step of Newton's method from b."""
        k_p, k_q = damping_of(self.penalty, self.epsilon)
        along = self.by_rows.ratio * (self.q * b.exp()).unsqueeze(-2)
        across = self.by_columns.ratio * (self.p * self.rows(b).exp()).unsqueeze(-2)
        received = across.sum(-1)
        missing = k_q * (-self.g / self.penalty.q - self.by_columns.log_sum - received.log()) - b
        # Row-stochastic: what a change of b does to b in one round.
        round_trip = (across / received.unsqueeze(-1)) @ (along / along.sum(-1, keepdim=True))
        identity = torch.eye(b.shape[-1], dtype=b.dtype, device=b.device)
        damping = k_p * k_q
        system = identity - (damping.unsqueeze(-1) if isinstance(damping, Tensor) else damping) * round_trip
        if is_kept(self.penalty.p) and is_kept(self.penalty.q):
            # A constant in b changes nothing; q is what the round trip leaves as it is.
            share = self.q / self.q.sum(-1, keepdim=True)
            system = system + share.unsqueeze(-2).expand_as(system)
            missing = missing - (share * missing).sum(-1, keepdim=True)
        return (system if self.through_weights else system + IMPLICIT_RIDGE * identity), missing

    def solve(self, system: Tensor, right: Tensor) -> Tensor:
        """Return the solution: first for the bins with mass, which those without mass do not change.

        A joint elimination would leave rounding of derivatives between two bins without mass, which may be 1e40.
        """
        has_mass, identity = self.q.detach() > 0, torch.eye(right.shape[-1], dtype=right.dtype, device=right.device)
        among = torch.where(has_mass.unsqueeze(-1), system, identity)
        try:
            solution = solve_systems(among, torch.where(has_mass, right, 0.0).unsqueeze(-1)).squeeze(-1)
        except torch.linalg.LinAlgError:
            raise singular_equations_error() from None
        if not bool(torch.isfinite(solution).all()):
            raise singular_equations_error()
        others = right + ((identity - system) @ solution.unsqueeze(-1)).squeeze(-1)
        return torch.where(has_mass, solution, others)


class _SymmetricEquations(_Equations):
    """The equations where p = q, f = g and C is symmetric: a = b, which leaves no constant between the two.

    The system is regular where a plan falls into parts: a change of b that is constant on each is doubled.
    """

    def system(self, b: Tensor) -> tuple[Tensor, Tensor]:
        k, _ = damping_of(self.penalty, self.epsilon)
        along = self.by_rows.ratio * (self.q * b.exp()).unsqueeze(-2)
        round_half = along / along.sum(-1, keepdim=True)
        damped = (k.unsqueeze(-1) if isinstance(k, Tensor) else k) * round_half
        return torch.eye(b.shape[-1], dtype=b.dtype, device=b.device) + damped, self.rows(b) - b
