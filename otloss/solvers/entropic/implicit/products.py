"""The implicit function theorem without a matrix: streamed products with the plan, and conjugate gradients.

Let T(g) be the g after a round of updates, g -> f -> g, S the plan with rows scaled to one, S' its transpose with rows
scaled to one and k the product of both dampings. At the solution g = T(g), and T' = k S' S. With A = I - k S' S at the
potentials that the search gives, without a graph, the derivatives of

    g + A^-1 (T(g) - g)

in the weights and costs are the first derivatives of the solution; from there, the same step with the same A gives
the second ones too, for its error is of the next order. A is self-adjoint in the inner product weighted by the column
sums c, so the backward pass is a solution with c A c^-1. T is made of soft minima F_i = -eps log sum_j q_j e_ij,
e_ij = exp((g_j - C_ij) / eps). With P_ij = q_j exp((g_j + F_i - C_ij) / eps) and factors u_i,

    d sum_i u_i F_i = sum_ij u_i P_ij (dC_ij - dg_j - eps dq_j / q_j)

which is a product with the transposed plan and, for positive and for negative u_i, a sum of `Cost.plan_gradients` with
|u_i| as weights. Where a derivative is to be differentiated again, it is computed by blocks of rows in torch.

Reference: `otloss.solvers.derivatives`, dense and in float64. It also takes the problems whose equations are too
ill-conditioned for float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import broadcast_shape, has_tangent
from otloss.costs import Cost
from otloss.costs.cost import PlanProducts, recomputed
from otloss.solvers.condition import largest_condition, singular_equations_error
from otloss.solvers.entropic.arithmetic import dtype_of_potentials, is_queued, log_weights
from otloss.solvers.entropic.equations.conjugate_gradients import Conjugate, Equations, conjugate_gradients
from otloss.solvers.entropic.equations.looks import Looks
from otloss.solvers.entropic.equations.updates import damping_of
from otloss.solvers.entropic.implicit.grid import WithGraph
from otloss.solvers.entropic.objectives import balanced_value
from otloss.solvers.entropic.sinkhorn_gpu import is_small
from otloss.solvers.entropic.solution import without_overflow
from otloss.solvers.options import BOTH_KEPT, is_kept
from otloss.solvers.problem import Problem

STEPS = 2  # each gives the derivatives of one more order
RESIDUAL, MAX_PRODUCTS = 1e-6, 1000  # where conjugate gradients end
RESIDUAL_OF_ESTIMATE = 1e-3  # for a random right-hand side, which has every mode
LARGEST_EXPONENT = 80.0  # for a pair with a bin without mass


def suits_products(problem: Problem) -> bool:
    """Return whether the implicit derivatives of a problem may go by streamed products.

    Dense systems of small problems take fewer steps of the host.
    """
    cost = problem.cost
    if problem.impl != "triton" or cost.dtype != torch.float32 or is_small(problem) or not problem.batch.numel():
        return False
    if cost.streamed() is None:
        return False
    tensors = (problem.p, problem.q, problem.epsilon, *cost.tensors())
    return not (problem.epsilon.requires_grad or has_tangent(*tensors))


def with_graph_by_products(problem: Problem, f: Tensor, g: Tensor, value: Tensor) -> WithGraph | None:
    """Return the potentials and the value with their graph; None where float32 does not determine the derivatives."""
    dtype = dtype_of_potentials(problem)
    f, g = f.detach().to(dtype), g.detach().to(dtype)
    with torch.no_grad():
        equations = RoundTrip.build(problem, f, g)
        if not equations.is_well_conditioned():
            return None
    updates = _UpdatesWithGraph.build(problem, dtype)
    moved = g
    for _ in range(STEPS):
        step: Tensor = _Solve.apply(equations, updates.g_from(updates.f_from(moved)) - moved, False)
        moved = moved + (step - step.detach())
    updated = updates.f_from(moved)
    dual = updates.dual(updated, moved)
    return WithGraph(value + (dual - dual.detach()).to(value), f + (updated - updated.detach()), moved)


@dataclass(frozen=True)
class RoundTrip:
    """A = I - k S' S at potentials without a graph, and its transpose; rows of bins without mass are limits.

    Products are in float32, and vectors in float64: of a right-hand side that is rounding, little but the constant is
    left otherwise.

    Attributes:
        to_rows, to_columns: products of which S and S' are made.
        rows_back, columns_back: products of which the transposes of S and S' are made.
        row_sums, column_sums: (..., n) and (..., m), 1 at the solution of a balanced problem but for the weights.
        mass: (..., m), c: the column sums, 0 at bins without mass.
        damping: k.
    """

    to_rows: Callable[[Tensor], PlanProducts]
    to_columns: Callable[[Tensor], PlanProducts]
    rows_back: Callable[[Tensor], PlanProducts]
    columns_back: Callable[[Tensor], PlanProducts]
    row_sums: Tensor
    column_sums: Tensor
    mass: Tensor
    damping: Tensor | float
    problem: Problem

    @staticmethod
    def build(problem: Problem, f: Float[Tensor, "*batch n"], g: Float[Tensor, "*batch m"]) -> RoundTrip:
        f, g = f.double(), g.double()
        cost, transposed, epsilon = problem.cost, problem.cost.T, problem.epsilon.detach().double()
        log_p, log_q = log_weights(problem, f.dtype)
        filled_p, filled_q = (log_w.masked_fill(log_w == -torch.inf, 0.0) for log_w in (log_p, log_q))
        to_rows = cost.plan_products(f, g, filled_p, log_q, epsilon=epsilon)
        to_columns = transposed.plan_products(g, f, filled_q, log_p, epsilon=epsilon)
        rows_back = transposed.plan_products(g, f, log_q, filled_p, epsilon=epsilon)
        columns_back = cost.plan_products(f, g, log_p, filled_q, epsilon=epsilon)
        tiny = torch.finfo(torch.float32).tiny
        row_sums = to_rows(torch.zeros_like(g).unsqueeze(-1)).of_rows.clamp(min=tiny)
        column_sums = to_columns(torch.zeros_like(f).unsqueeze(-1)).of_rows.clamp(min=tiny)
        k_p, k_q = damping_of((problem.marginal_penalty or BOTH_KEPT).map(lambda r: r.to(f.dtype)), epsilon[..., None])
        mass = column_sums.masked_fill(log_q == -torch.inf, 0.0)
        return RoundTrip(
            to_rows, to_columns, rows_back, columns_back, row_sums, column_sums, mass, k_p * k_q, problem
        )  # fmt: skip

    def is_well_conditioned(self) -> bool:
        """Return whether all problems of the batch determine their derivatives in float32."""
        random = torch.Generator("cpu").manual_seed(0)
        noise = torch.randn(self.mass.shape, generator=random, device="cpu", dtype=torch.float64).to(self.mass)
        right = self._centred(torch.where(self.mass > 0, noise * self.mass.clamp(min=1e-30).rsqrt(), 0.0))
        result = self._conjugate_gradients(right, RESIDUAL_OF_ESTIMATE)
        energy = self._inner(result.solution, right)
        bound = largest_condition(torch.float32) * energy
        is_fine = (self._inner(result.solution, result.solution) <= bound).squeeze(-1) & result.is_solved
        return bool(is_fine.all())

    def solve(self, right: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch m"]:
        """Return A^-1 right, less a constant in balanced problems."""
        wide = right.double()
        b = self._inverse(self._centred(torch.where(self.mass > 0, wide, 0.0)))
        return self._centred(wide + self._round_trip(b)).to(right)  # which includes bins without mass

    def solve_transposed(self, right: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch m"]:
        """Return the transpose of `solve`."""
        wide = self._centred_transposed(right.double())
        rows = self.columns_back((wide / self.column_sums).unsqueeze(-1)).values.squeeze(-1)
        back = self.damping * self.rows_back((rows / self.row_sums).unsqueeze(-1)).values.squeeze(-1)
        has_mass = self.mass > 0
        scaled = torch.where(has_mass, back / torch.where(has_mass, self.mass, 1.0), 0.0)
        return (wide + self._centred_transposed(self.mass * self._inverse(self._centred(scaled)))).to(right)

    def _inverse(self, right: Tensor) -> Tensor:
        result = self._conjugate_gradients(right, RESIDUAL)
        if not bool(result.is_solved.all()):
            raise singular_equations_error()
        return result.solution

    def _conjugate_gradients(self, right: Tensor, precision: float) -> Conjugate:
        def times(v: Tensor) -> Tensor:
            return self._centred(torch.where(self.mass > 0, v - self._round_trip(v), 0.0))

        looks = Looks(is_queued=is_queued(self.problem))
        return conjugate_gradients(
            Equations(times, self._inner), right, precision, max_products=MAX_PRODUCTS, looks=looks
        )

    def _round_trip(self, v: Tensor) -> Tensor:
        """Return k S' S v."""
        rows = self.to_rows(v.unsqueeze(-1)).values.squeeze(-1) / self.row_sums
        return self.damping * self.to_columns(rows.unsqueeze(-1)).values.squeeze(-1) / self.column_sums

    def _inner(self, a: Tensor, b: Tensor) -> Float[Tensor, "*batch 1"]:
        return (self.mass * a * b).sum(-1, keepdim=True)

    def _centred(self, b: Tensor) -> Tensor:
        if self.problem.marginal_penalty is not None:
            return b
        return b - (self.mass * b).sum(-1, keepdim=True) / self.mass.sum(-1, keepdim=True)

    def _centred_transposed(self, b: Tensor) -> Tensor:
        if self.problem.marginal_penalty is not None:
            return b
        return b - self.mass * (b.sum(-1, keepdim=True) / self.mass.sum(-1, keepdim=True))


class _Solve(torch.autograd.Function):
    """A^-1 of the right-hand side, or of its transpose; A has no graph."""

    @staticmethod
    def forward(ctx: Any, equations: RoundTrip, right: Tensor, is_transposed: bool) -> Tensor:
        ctx.equations, ctx.is_transposed = equations, is_transposed
        return equations.solve_transposed(right) if is_transposed else equations.solve(right)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, _Solve.apply(ctx.equations, gradients[0], not ctx.is_transposed), None


@dataclass(frozen=True)
class _UpdatesWithGraph:
    """Sinkhorn's two updates with the graphs of the weights and the cost.

    Attributes:
        p, q: the weights, or in balanced problems the shares of the mass.
    """

    problem: Problem
    p: Tensor
    q: Tensor
    epsilon: Float[Tensor, "*batch 1"]

    @staticmethod
    def build(problem: Problem, dtype: torch.dtype) -> _UpdatesWithGraph:
        p, q, epsilon = (t.to(dtype) for t in (problem.p, problem.q, problem.epsilon.detach()))
        if problem.marginal_penalty is None:
            mass = p.sum(-1, keepdim=True)
            p, q = p / mass, q / mass
        return _UpdatesWithGraph(problem, p, q, epsilon.unsqueeze(-1))

    def f_from(self, g: Tensor) -> Tensor:
        return self._damping[0] * _softmin(self.problem.cost, g, self.q, self.epsilon.squeeze(-1))

    def g_from(self, f: Tensor) -> Tensor:
        return self._damping[1] * _softmin(self.problem.cost.T, f, self.p, self.epsilon.squeeze(-1))

    def dual(self, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
        """Return the dual value at potentials of which f is an exact update from g."""
        problem = self.problem
        p, q = problem.p.to(f), problem.q.to(g)
        if (penalty := problem.marginal_penalty) is None:
            return balanced_value(p, q, f, g)
        kept, outside = p, f.new_zeros(())
        for weights, potential, rho in ((p, f, penalty.p), (q, g, penalty.q)):
            if is_kept(rho):
                outside = outside + (weights * potential).sum(-1)
                continue
            gain = -rho * (-potential / rho).clamp(max=LARGEST_EXPONENT).expm1()
            outside = outside + (weights * without_overflow(weights, gain)).sum(-1)
        if not is_kept(penalty.p):
            kept = p * (-f / penalty.p).clamp(max=LARGEST_EXPONENT).exp()
        return outside - self.epsilon.squeeze(-1) * (kept.sum(-1) - p.sum(-1) * q.sum(-1))

    @property
    def _damping(self) -> tuple[Tensor | float, Tensor | float]:
        penalty = (self.problem.marginal_penalty or BOTH_KEPT).map(lambda rho: rho.to(self.epsilon))
        return damping_of(penalty, self.epsilon)


def _softmin(cost: Cost, g: Tensor, q: Tensor, epsilon: Tensor) -> Tensor:
    """Return -eps log sum_j q_j exp((g_j - C_ij) / eps), with derivatives of every order in g, q and the cost."""
    values: Tensor = _Softmin.apply(cost, epsilon, g, q, *cost.parameters())
    return values


class _Softmin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cost: Cost, epsilon: Tensor, g: Tensor, q: Tensor, *parameters: Tensor) -> Tensor:
        values = cost.softmin_at(epsilon)(g + epsilon.unsqueeze(-1) * q.log())
        ctx.cost = cost
        ctx.save_for_backward(epsilon, g, q, values, *parameters)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        epsilon, g, q, values, *parameters = ctx.saved_tensors
        if torch.is_grad_enabled():  # a derivative that may be differentiated again
            own = ctx.cost.parameters()
            # g depends on the weights and the cost too: views tell the paths apart.
            views = [t.view_as(t) for t in (g, q, *own)]
            cost = ctx.cost.with_tensors({id(t): view for t, view in zip(own, views[2:], strict=True)})
            softmin = _softmin_by_blocks(cost, epsilon, views[0], views[1])
            wanted = [t for t in views if t.requires_grad]
            derivatives = iter(torch.autograd.grad(softmin, wanted, gradients[0], create_graph=True, allow_unused=True))
            return None, None, *(next(derivatives) if t.requires_grad else None for t in views)
        return None, None, *_streamed_gradients(ctx.cost, (epsilon, g, q, values), gradients[0], len(parameters))


def _streamed_gradients(
    cost: Cost, saved: tuple[Tensor, Tensor, Tensor, Tensor], upstream: Tensor, count: int
) -> tuple[Tensor, ...]:
    """Return the gradients in g, q and the parameters of the cost."""
    epsilon, g, q, values = saved
    zeros_g, zeros_values, width = torch.zeros_like(g), torch.zeros_like(values), epsilon.unsqueeze(-1)
    products = cost.T.plan_products(g, values, zeros_g, zeros_values, epsilon=epsilon)
    by_share = -products(upstream.unsqueeze(-1)).values.squeeze(-1)
    by_g, by_q = torch.where(q > 0, q * by_share, 0.0).sum_to_size(g.shape), (width * by_share).sum_to_size(q.shape)
    if not count:
        return by_g, by_q
    totals: list[Tensor] = []
    one = torch.ones(broadcast_shape(upstream.shape[:-1], epsilon.shape), dtype=g.dtype, device=g.device)
    for sign in (1.0, -1.0):
        weights = (sign * upstream).clamp(min=0.0).log()
        parts = cost.plan_gradients(values, g, weights, q.log(), epsilon=epsilon, upstream=sign * one)
        totals = [a + b for a, b in zip(totals, parts, strict=True)] if totals else list(parts)
    return by_g, by_q, *totals


def _softmin_by_blocks(cost: Cost, epsilon: Tensor, g: Tensor, q: Tensor) -> Tensor:
    """The reference implementation, in torch with a graph that holds no block of rows."""
    width = epsilon[..., None, None]

    def part(start: int, stop: int) -> Tensor:
        scores = (g.unsqueeze(-2) - cost.row_block(start, stop).to(g)) / width
        top = scores.detach().masked_fill((q <= 0).unsqueeze(-2), -torch.inf).amax(-1, keepdim=True)
        terms = q.unsqueeze(-2) * (scores - top).clamp(max=LARGEST_EXPONENT).exp()
        return -width.squeeze(-1) * (top.squeeze(-1) + terms.sum(-1).log())

    batch = broadcast_shape(g.shape[:-1], q.shape[:-1], cost.batch_shape)
    return torch.cat([recomputed(part, *block) for block in cost.row_blocks(batch)], -1)


def linear_cost_with_graph(problem: Problem, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
    """Return <C, P> for potentials with a graph, by blocks of rows that are computed again in the backward pass."""
    cost, p, q = problem.cost, problem.p.to(f), problem.q.to(g)
    if problem.marginal_penalty is None:
        q = q / p.sum(-1, keepdim=True)
    width = problem.epsilon.to(f)[..., None, None]

    def part(start: int, stop: int) -> Tensor:
        rows, block = cost.row_block(start, stop).to(f), slice(start, stop)
        exponents = (f[..., block, None] + g.unsqueeze(-2) - rows) / width
        plan = p[..., block, None] * exponents.clamp(max=LARGEST_EXPONENT).exp() * q.unsqueeze(-2)
        return (plan * rows).sum((-2, -1))

    return torch.stack([recomputed(part, *block) for block in cost.row_blocks(problem.batch)]).sum(0)
