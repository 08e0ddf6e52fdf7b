"""The solution of an entropic problem at potentials: its value, plan, linear cost, duality gap and bounds.

All of it is computed from soft minima and products, so a cost without a matrix needs none here. The value is the dual
objective at the potentials, D = f.p + g.q - epsilon (sum P - mass). In unbalanced problems rho_p (1 - exp(-f / rho_p))
replaces f, rho_q (1 - exp(-g / rho_q)) replaces g, and mass_p mass_q replaces the mass. On a side that is kept the
potential stays.

The gap needs a feasible plan, one with the marginals p and q; let their mass be one here. Since f is an exact update,
the rows of P are right and only its columns are off. With y = min(1, q / P^T 1), the plan A = P diag(y) is nowhere too
large. Let r and s be the mass that A lacks in its rows and columns, and d = sum r = sum s. The plan B = r s^T / d moves
it, so A + B is feasible. By the convexity of the entropy, for every t

    primal(A + B) <= <C, A> + epsilon sum A log(A / (t p q^T)) + <C, B> + epsilon sum B log(B / ((1 - t) p q^T)) + ...

and t = sum A / mass is the best. In the first two terms the costs cancel, because log(A / p q^T) consists of f, g and
C. The last two take one product with C.

In unbalanced problems every plan is feasible, and with q kept those with the columns of an exact update of g.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._autograd import Unchanged
from otloss.solvers.bounds import lower_bound, upper_bound
from otloss.solvers.entropic.arithmetic import detached_in_float64, potential_of_plan
from otloss.solvers.entropic.equations.slow_modes import with_known_error
from otloss.solvers.entropic.equations.updates import build_updates
from otloss.solvers.entropic.interface import SearchResult
from otloss.solvers.options import is_kept
from otloss.solvers.problem import Problem

_PLAN_BLOCK_ENTRIES = 2**20  # several arrays of this size exist at a time
_LARGEST_EXPONENT = 80.0  # in a derivative; exp(80) is below the largest float32


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
            error = with_known_error(self.problem, self.search).potential_error
        return error

    @cached_property
    def linear_cost(self) -> Tensor:
        self._unchanged.check("linear_cost")
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
            g = self.search.g.to(problem.p.dtype)
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
        return _weight_gradient(f, mass_q, epsilon, penalty.p), _weight_gradient(g, mass_p, epsilon, penalty.q)

    @property
    def relative_entropy(self) -> Tensor:
        return relative_entropy(self.problem, *self.potentials)

    def cost_gradients(self, upstream: Float[Tensor, "*batch"]) -> tuple[Tensor, ...]:
        problem, (f, g) = self.problem, self.potentials
        log_p, log_q = (w.detach().to(f.dtype).log() for w in (problem.p, problem.q))
        epsilon = problem.epsilon.detach().to(f.dtype)
        return problem.cost.plan_gradients(
            potential_of_plan(problem, f), g, log_p, log_q, epsilon=epsilon, upstream=upstream
        )


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


def _weight_gradient(potential: Tensor, mass: Tensor, epsilon: Tensor, rho: float | Tensor) -> Tensor:
    """Return dV/dp from f, or dV/dq from g, where the other side has the mass `mass` (...)."""
    # At bins without mass this may overflow. It is cut off, so that a mask of zeros times it is zero.
    potential = potential.clamp(min=-_LARGEST_EXPONENT * rho)
    share = (-potential / rho).exp()
    return dual_term(potential, rho) - epsilon.unsqueeze(-1) * (share - mass.unsqueeze(-1))


def dual_term(potential: Tensor, rho: float | Tensor) -> Tensor:
    """Return a potential's term in the dual: `rho (1 - exp(-f / rho))`, or itself for a side that is kept."""
    return potential if is_kept(rho) else -rho * torch.expm1(-potential / rho)


def kept_mass(weights: Tensor, potential: Tensor, rho: float | Tensor) -> Tensor:
    """Return w_i exp(-f_i / rho), 0 at bins without mass: exp(-f_i / rho) alone may overflow at light bins."""
    return (weights.log() - potential / rho).exp()


def dual_sum(weights: Tensor, potential: Tensor, rho: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_i w_i rho (1 - exp(-f_i / rho)) and the mass sum_i w_i exp(-f_i / rho)."""
    if is_kept(rho):
        return (weights * potential).sum(-1), weights.sum(-1)
    exponent, mass = -potential / rho, kept_mass(weights, potential, rho)
    gain = torch.where(exponent > 1, mass - weights, weights * exponent.clamp(max=1.0).expm1())
    return (-rho * gain).sum(-1), mass.sum(-1)


def sizes_of_terms(problem: Problem, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
    """Return the sum of the sizes of all terms of the primal and dual objectives, each times its own conditioning."""
    p, q, epsilon = (t.detach().to(f.dtype) for t in (problem.p, problem.q, problem.epsilon))
    penalty, mass_p, mass_q = problem.marginal_penalty, p.sum(-1), q.sum(-1)
    if penalty is None:
        return (p * f.abs()).sum(-1) + (q * g.abs()).sum(-1) + epsilon * (mass_p + mass_q)
    total = epsilon * mass_p * mass_q
    for weights, potential, rho in ((p, f, penalty.p), (q, g, penalty.q)):
        kept, size = kept_mass(weights, potential, rho), potential.abs()
        # The exponential in the kept mass has the relative error of its exponent.
        gain = torch.where(size > rho, rho * (weights + kept), weights * size)
        total = total + (gain + kept * (size + epsilon.unsqueeze(-1) * (1 + size / rho))).sum(-1)
    return total


def dual_value(problem: Problem, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
    """Return D at potentials of which f is an exact update from g."""
    penalty = problem.marginal_penalty
    if penalty is None:
        return (f * problem.p.detach()).sum(-1) + (g * problem.q.detach()).sum(-1)
    p, q, epsilon = (t.detach().to(f.dtype) for t in (problem.p, problem.q, problem.epsilon))
    mass_p, mass_q = p.sum(-1), q.sum(-1)
    (from_p, kept), (from_q, _) = dual_sum(p, f, penalty.p), dual_sum(q, g, penalty.q)
    return from_p + from_q - epsilon * (kept - mass_p * mass_q)


def log_marginal_ratios(problem: Problem, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return log(P 1 / p) and log(P^T 1 / q), as their limits at bins without mass."""
    updates = build_updates(problem)
    return (f - updates.softmin_rows(g)) / updates.epsilon, (g - updates.softmin_columns(f)) / updates.epsilon


def marginals(problem: Problem, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return P 1 and P^T 1."""
    ratios = log_marginal_ratios(problem, f, g)
    p, q = ((w.detach().to(f.dtype).log() + x).exp() for w, x in zip((problem.p, problem.q), ratios, strict=True))
    return p, q


def linear_cost(problem: Problem, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
    """Return `<C, P>`, block by block of rows, or by the rows that a kernel sums."""
    log_p, log_q = (w.detach().to(f.dtype).log() for w in (problem.p, problem.q))
    with torch.no_grad():
        costs = problem.cost.plan_costs(
            potential_of_plan(problem, f), g, log_p, log_q, epsilon=problem.epsilon.detach().to(f.dtype)
        )
    if costs is not None:
        return costs.sum(-1)
    total = f.new_zeros(problem.batch)
    for _, plan, rows in plan_blocks(problem, f, g):
        total += (plan * rows).sum((-2, -1))
    return total


def relative_entropy(problem: Problem, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
    """Return the entropy term, `sum P log(P / p q^T)` or KL: the derivative of the value in epsilon."""
    rows, columns = marginals(problem, f, g)
    inner = (f * rows).sum(-1) + (g * columns).sum(-1) - linear_cost(problem, f, g)
    entropy = inner / problem.epsilon.detach().to(f.dtype)
    if problem.marginal_penalty is None:
        return entropy
    mass = problem.p.detach().to(f.dtype).sum(-1) * problem.q.detach().to(f.dtype).sum(-1)
    return entropy - rows.sum(-1) + mass


def plan_blocks(problem: Problem, f: Tensor, g: Tensor) -> Any:
    """Yield (slice of rows, P there, C there), in the dtype of the potentials."""
    n, m = problem.cost.shape
    log_p, log_q = (w.detach().to(f.dtype).log() for w in (problem.p, problem.q))
    f, epsilon = potential_of_plan(problem, f), problem.epsilon.detach().to(f.dtype)[..., None, None]
    step = max(1, _PLAN_BLOCK_ENTRIES // max(1, m * problem.batch.numel()))
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        with torch.no_grad():
            rows = problem.cost.row_block(part.start, part.stop).to(f.dtype)
            exponent = (f[..., part, None] + g[..., None, :] - rows) / epsilon
            exponent = exponent + log_p[..., part, None] + log_q[..., None, :]
            # exp is ten times slower where its result underflows, and an entry of exp(-200) counts as 0.
            nothing = exponent <= -200.0
            yield part, exponent.clamp_(min=-200.0).exp_().masked_fill_(nothing, 0.0), rows


def duality_gap(problem: Problem, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
    """Return a bound of primal minus dual at a feasible plan, at least 0, in the unit of the value."""
    with torch.no_grad():
        gap = _gap_unbalanced(problem, f, g) if problem.marginal_penalty is not None else _gap_balanced(problem, f, g)
        return gap.clamp(min=0)


class _PartialPlan(NamedTuple):
    """The plan A = P diag(y) of the module's docstring, which is nowhere too large.

    Attributes:
        log_y: (..., m).
        r, s: (..., n) and (..., m), the masses that A lacks in its rows and columns.
    """

    log_y: Tensor
    r: Tensor
    s: Tensor


def _partial_plan(problem: Problem, f: Tensor, g: Tensor) -> _PartialPlan:
    updates = build_updates(problem)
    p, q = problem.p.detach().to(f.dtype), problem.q.detach().to(f.dtype)
    log_ratio = (updates.softmin_columns(f) - g) / updates.epsilon  # log(q / P^T 1)
    log_y = log_ratio.clamp(max=0.0)
    columns = torch.minimum(q, (q.log() - log_ratio).exp())  # the ratio alone may overflow at bins without mass
    rows = (p.log() + (f - updates.softmin_rows(g + updates.epsilon * log_y)) / updates.epsilon).exp()
    return _PartialPlan(log_y, p - torch.minimum(rows, p), q - columns)


def _cost_of_lacking(problem: Problem, r: Tensor, s: Tensor) -> Tensor:
    """Return <C, B> = <C, r s^T / d>."""
    lack = (r.sum(-1) + s.sum(-1)) / 2
    return (r * problem.cost.apply(s)).sum(-1) / lack.clamp(min=torch.finfo(r.dtype).tiny)


def rounded_linear_cost(problem: Problem, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
    """Return the cost of the plan made feasible, A + B: an upper bound of the exact transport cost."""
    log_y, r, s = _partial_plan(problem, f, g)
    kept = linear_cost(problem, f, g + problem.epsilon.detach().to(f.dtype).unsqueeze(-1) * log_y)
    return kept + _cost_of_lacking(problem, r, s)


def _gap_balanced(problem: Problem, f: Tensor, g: Tensor) -> Tensor:
    log_y, r, s = _partial_plan(problem, f, g)
    p, q, epsilon = (t.detach().to(f.dtype) for t in (problem.p, problem.q, problem.epsilon))
    lack, mass = (r.sum(-1) + s.sum(-1)) / 2, p.sum(-1)
    share = (lack / mass.clamp(min=torch.finfo(mass.dtype).tiny)).clamp(max=1.0)
    log_terms = torch.xlogy(r, r / p).nan_to_num(nan=0.0).sum(-1) + torch.xlogy(s, s / q).nan_to_num(nan=0.0).sum(-1)
    entropy = log_terms - 2 * torch.xlogy(lack, share)
    # The terms of the dual are left out on both sides, so that a small gap is a difference of small numbers.
    kept = -(f * r).sum(-1) - (g * s).sum(-1) + epsilon * (log_y * (q - s)).sum(-1)
    kept = kept - epsilon * torch.xlogy(mass - lack, 1 - share)
    return torch.where(lack == 0, 0.0, kept + _cost_of_lacking(problem, r, s) + epsilon * entropy)


def _gap_unbalanced(problem: Problem, f: Tensor, g: Tensor) -> Tensor:
    penalty = problem.marginal_penalty
    assert penalty is not None
    if is_kept(penalty.q):  # the columns have to be right: the gap of an exact update of g, which raises the dual
        updated, (p, q) = build_updates(problem).g_from(f), (problem.p, problem.q)
        transposed = dataclasses.replace(problem, p=q, q=p, cost=problem.cost.T, marginal_penalty=penalty.swapped)
        raised = dual_value(transposed, updated, f) - dual_value(problem, f, g)
        return _gap_unbalanced(transposed, updated, f) + raised
    p, q = (w.detach().to(f.dtype) for w in (problem.p, problem.q))
    ratio_p, ratio_q = log_marginal_ratios(problem, f, g)
    rows, columns = (p.log() + ratio_p).exp(), (q.log() + ratio_q).exp()
    # The entropy term of the plan consists of f, g and C, so the costs cancel; -epsilon (sum P - mass) stands in both.
    primal = (f * rows).sum(-1) + (g * columns).sum(-1)
    primal = primal + _divergence(columns, q, ratio_q, penalty.q)
    if not is_kept(penalty.p):  # else the rows are right, since f is an exact update
        primal = primal + _divergence(rows, p, ratio_p, penalty.p)
    return primal - dual_sum(p, f, penalty.p)[0] - dual_sum(q, g, penalty.q)[0]


def _divergence(marginal: Tensor, weights: Tensor, log_ratio: Tensor, rho: float | Tensor) -> Tensor:
    """Return rho KL(marginal | weights) = rho sum_i w_i (x_i e^x_i - e^x_i + 1), x the logarithm of their ratio."""
    small = log_ratio.clamp(max=1.0)
    terms = torch.where(
        log_ratio > 1.0,
        marginal * (log_ratio - 1) + weights,
        weights * (small * small.exp() - small.expm1()),
    )
    return (rho * terms).sum(-1)


def _one_where_mass(log_weights: Float[Tensor, "*batch bins"]) -> Float[Tensor, "*batch bins"]:
    """Return the logarithms of weights of one in place of those above zero."""
    return torch.zeros_like(log_weights).where(log_weights > -torch.inf, -torch.inf)
