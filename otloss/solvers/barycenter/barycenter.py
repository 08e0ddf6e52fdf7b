"""Barycenters of histograms: the histogram that is nearest to several ones on average.

    min over a of  sum_k w_k OT(a, p_k)        OT(a, p) = min <C, P> + epsilon sum P (log P - 1)

With K = exp(-C / epsilon) the plans are diag(u_k) K diag(v_k), and the iteration is

    v_k = p_k / K^T u_k,   a = d prod_k (K v_k)^w_k,   u_k = a / K v_k,   d = 1, or debiased sqrt(d a / K d)

(J.-D. Benamou et al., Iterative Bregman Projections for Regularized Transportation Problems, 2015). The entropy blurs
a; debiased, a is the minimum of the weighted Sinkhorn divergences, and the barycenter of equal histograms is that
histogram (H. Janati, M. Cuturi, A. Gramfort, Debiased Sinkhorn barycenters, 2020).

It runs in products with K, for images axis by axis, as long as its numbers fit float64, and then in logarithms. Of
plain barycenters, every tenth log u is extrapolated along the slowest direction.

Where the iteration of plain barycenters is slow, they are found by Newton's method on the dual
(`otloss.solvers.barycenter.ascent_numba`).

A debiased iteration ends where what it changes, over one minus the contraction, is small: details of a much finer than
the blur change slowly, and little at a time.

At the minimum the gradient in a, `sum_k w_k log u_k - log d`, is constant.
Where the iteration is slow and bins are few, debiased barycenters are found by Newton's method on log u and log d, for
the gradient plus `tau log a`, with tau falling as far as rounding allows: that keeps the equations regular, and gives
bins without mass none. With M_k = (P_k / a) (P_k / p_k)^T and B = d K d / a, whose rows sum to one, a step is

    (I - M_k) dlog u_k = dlog a - (log(u_k K v_k) - log a),   dlog a = (I + B) dlog d,
    sum_k w_k dlog u_k - dlog d + tau dlog a = constant - (sum_k w_k log u_k - log d + tau log a)

The derivatives are those of the same equations.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss._autograd import check_no_transform, eager
from otloss._checks import (
    check_broadcast,
    check_count,
    check_finite,
    check_floating,
    check_last_axis,
    check_positive,
    has_tangent,
    needs_torch,
)
from otloss._foreign import explains_calls
from otloss._numba.threads import Work, run_on_threads
from otloss.costs import Cost, DenseCost, GridCost, as_cost
from otloss.costs.cost import makes_graph
from otloss.costs.within import is_symmetric
from otloss.solvers.convergence import ConvergenceWarning, level_of_the_caller
from otloss.solvers.entropic.potentials import find_potentials
from otloss.solvers.histograms import MASS_TOLERANCE
from otloss.solvers.options import DEFAULT_TOLERANCE, Settings
from otloss.solvers.problem import Problem

_LARGEST_CONDITION = 1e15  # of the equations of a gradient; beyond, some are wrong by more than a thousandth
_MOST_ENTRIES = 2**26  # of the plans of all problems together, which the gradient holds
_NEWTON_BINS, _NEWTON_ENTRIES = 256, 2**22  # Newton's method of debiased barycenters is for at most so many
_STEPS = 60  # of Newton's method at each tau
# Rounding stops Newton's method: after so many small steps that do not halve, and so many values of tau without gain.
_MOST_STALLED, _MOST_FRUITLESS, _SMALL_CHANGE = 3, 2, 1e-3
_FALL_OF_TAU = 32.0  # smaller falls take more steps, and end at a larger tau, as rounding adds up
_FIRST_TAU, _LEAST_TAU, _LEAST_CHANGE = 0.25, 1e-14, 1e-12
_FAILED, _FEW = 0.1, 1500  # the error of Newton's method up to which only so many iterations follow
_LARGEST_ERROR = 1.0  # estimates at large tau that are no better say nothing
_SLOWEST = 0.95  # the ratio of convergence in tau where it is slow
_TAU = 1e-8  # for the derivatives of an answer that is not by Newton's method
_UNKNOWN = 2.0  # the error where nothing is known: the most that two histograms of mass one differ
# Plain barycenters with at most _ASCENT_ENTRIES entries of plans are found by Newton's method, of at most _MOST_STEPS,
# where the contraction over _CHECKS checks says that more than _PATIENCE iterations are left; debiased ones likewise.
_ASCENT_ENTRIES = 2**24  # of one problem; each takes 20 bytes on each thread
_PATIENCE, _CHECKS, _MOST_STEPS = 500, 3, 1000
_LARGEST_MATRIX = 2**24  # entries of exp(-C / epsilon) that are held
_LEAST_EXPONENT = -690.0
_CHECK_EVERY = 10  # iterations
_LARGEST_SHARE = 0.99  # of a change of log u in the one before it, by which plain barycenters are extrapolated
_NO_MASS = 1e-12  # the share of the mass below which a bin counts as empty in the derivatives
_EMPTY = 80.0  # log of the largest d over the least one that is told from 0


@explains_calls
@eager
def barycenter(
    p: Float[Tensor, "*batch k m"],
    cost: Cost | Float[Tensor, "n m"],
    weights: Float[Tensor, "*batch k"] | None = None,
    *,
    epsilon: float,
    debiased: bool = False,
    tolerance: float | None = None,
    max_iterations: int = 10_000,
) -> Float[Tensor, "*batch n"]:
    """Return the entropic barycenter of k histograms, per problem.

    Args:
        p: (..., k, m) histograms of one mass.
        cost: (n, m), or a cost object; C[i, j] is the price from bin i of the barycenter to bin j of the histograms.
        weights: (..., k) of the histograms, >= 0 with sum 1; 1 / k each by default.
        epsilon: above 0, in the unit of the cost. It blurs the barycenter, by about sqrt(epsilon / 2) for squared
            distances.
        debiased: whether to take that blur out; for a symmetric cost between the same bins.
        tolerance: None for 1e-5 in float32, 1e-8 in float64: an estimate of the sum of the errors of the answer
            relative to its mass if debiased, and of the errors of the marginals if not. The estimate is what an
            iteration still changes, over one minus the measured contraction, or that of Newton's method, and too low
            where the blur is far wider than details.
        max_iterations: at most; a `ConvergenceWarning` tells where they are not enough, or where rounding does not
            determine a debiased barycenter to the tolerance: at an epsilon whose blur is far wider than the bins.

    Returns:
        (..., n), in the promoted dtype, of the mass of the histograms whether it converged or not. It is found by
        iteration; Newton's method follows where that is slow, debiased with at most 256 bins. Differentiable once in p,
        the weights and the cost; the gradient holds the plans, k n m entries per problem, and inverts k n x n matrices.
        Bins with less than 1e-12 of the mass count as empty there.

    Raises:
        TypeError: if p, the weights or a cost matrix is not a floating tensor.
        ValueError: if shapes or masses do not fit, a number is negative or not finite, or debiased=True and the cost is
            not square and symmetric.
        RuntimeError: if a second derivative is asked for, or a gradient is singular to rounding.

    Source:
        J.-D. Benamou et al., 2015; H. Janati, M. Cuturi, A. Gramfort, Debiased Sinkhorn barycenters, 2020.

    Example:
        >>> from otloss.costs import LineCost
        >>> ends = torch.eye(5)[[0, 4]]
        >>> barycenter(ends, LineCost(torch.arange(5.0), power=2), epsilon=0.1, debiased=True).round(decimals=4)
        tensor([0., 0., 1., 0., 0.])
    """
    check_count("max_iterations", max_iterations)
    problem = _checked(p, cost, weights, epsilon, debiased)
    tolerance = DEFAULT_TOLERANCE[problem.answer] if tolerance is None else check_positive("tolerance", tolerance)
    if not problem.p.numel():  # no problems
        nothing = problem.p.sum((-2, -1)).unsqueeze(-1)
        return nothing.expand(*nothing.shape[:-1], problem.cost.shape[0]).to(problem.dtype)
    given = problem.p, problem.weights, *problem.cost.tensors()
    with_graph = makes_graph(*given)
    if with_graph and not has_tangent(*given):
        check_no_transform()  # torch.func differentiates as create_graph=True does
    with torch.no_grad():
        solve = _solve_debiased if debiased else partial(_solve, with_graph=with_graph)
        state, error = solve(problem.detached(), tolerance, max_iterations)
    if not bool((error <= tolerance).all()):
        warnings.warn(
            f"the barycenter did not converge: an error of {float(error.max()):.3g} where {tolerance:.3g} was asked "
            f"for, after at most {max_iterations} iterations. "
            + (
                "Raise max_iterations; if that changes nothing, the blur hides details of the answer: lower epsilon, "
                "or raise the tolerance."
                if debiased
                else "Raise epsilon, max_iterations or the tolerance."
            ),
            ConvergenceWarning,
            stacklevel=level_of_the_caller(),
        )
    if not with_graph:
        return problem.with_mass(state.log_a).to(problem.dtype)
    return _with_gradient(problem, state).to(problem.dtype)


@dataclass(frozen=True)
class _State:
    """log u (..., k, n), log d (..., n), log a (..., n), and the tau (..., 1) at which they solve the equations."""

    log_u: Tensor
    log_d: Tensor
    log_a: Tensor
    tau: Tensor

    def replaced(self, choice: Bool[Tensor, "*batch"], other: _State) -> _State:
        """With the other state, of the chosen problems alone, in their places."""
        parts = [(t.clone(), part) for t, part in zip(self.tensors(), other.tensors(), strict=True)]
        for t, part in parts:
            t[choice] = part
        return _State(*(t for t, _ in parts))

    def chosen(self, choice: Bool[Tensor, "*batch"]) -> _State:
        return _State(*(t[choice] for t in self.tensors()))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.log_u, self.log_d, self.log_a, self.tau

    @property
    def is_finite(self) -> bool:
        return all(bool(t.isfinite().all()) for t in self.tensors())


@dataclass(frozen=True)
class _Problem:
    p: Float[Tensor, "*batch k m"]
    cost: Cost
    weights: Float[Tensor, "*batch k"]
    epsilon: float
    debiased: bool
    dtype: torch.dtype

    @property
    def answer(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def suits_newton(self) -> bool:
        n, entries = self.cost.shape[0], self.p.numel() * self.cost.shape[0]
        return n <= _NEWTON_BINS and entries <= _NEWTON_ENTRIES and self.p.dtype == torch.float64

    @property
    def suits_ascent(self) -> bool:
        """Whether Newton's method on the dual applies, where the iteration is slow."""
        entries = self.p.shape[-2] * math.prod(self.cost.shape)
        if self.debiased or entries > _ASCENT_ENTRIES or self.p.dtype != torch.float64:
            return False
        return not needs_torch(self.p, self.weights, *self.cost.tensors())

    def detached(self) -> _Problem:
        """Without a graph and without tangents."""
        cost = self.cost._replaced({id(t): t.detach() for t in self.cost.tensors()})
        return dataclasses.replace(self, p=self.p.detach(), weights=self.weights.detach(), cost=cost)

    def chosen(self, choice: Bool[Tensor, "*batch"]) -> _Problem:
        return dataclasses.replace(self, p=self.p[choice], weights=self.weights[choice])

    def with_mass(self, log_a: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """a of the mass of the histograms."""
        return torch.softmax(log_a, -1) * (self.p.sum((-2, -1)) / self.p.shape[-2]).unsqueeze(-1)

    def start(self) -> _State:
        log_u = torch.zeros_like(self.p[..., :1]).expand(*self.p.shape[:-1], self.cost.shape[0])
        return _State(log_u, log_u[..., 0, :], log_u[..., 0, :], torch.full_like(log_u[..., 0, :1], _TAU))


def _iterate(
    problem: _Problem, state: _State, tolerance: float, most: int, *, patience: float = math.inf
) -> tuple[_State, Tensor, int]:
    """Iterate in products, and in logarithms from where products do not fit; return state, error and iterations."""
    ways: list[Any] = [_InLogs.of(problem)]
    kernel = _Kernel.of(problem.cost, problem.epsilon) if problem.p.dtype == torch.float64 else None
    if kernel is not None:
        ways.insert(0, _InProducts(problem, kernel))
    progress, done = _Progress(problem, tolerance, patience, []), 0
    for way in ways:
        now = [way.read(state)]
        while done < most:
            count = min(_CHECK_EVERY, most - done)
            for _ in range(count):
                now = [*now[-2:], way.after(now[-1])]
            latest = [way.logs(factors) for factors in now]
            if not latest[-1].is_finite:
                break  # go on from the last check, in logarithms
            state, done = latest[-1], done + count
            if progress.ends(count, *latest[-2:]):
                return state, progress.error, done
            if not problem.debiased and done < most:
                state = _extrapolated(*latest[-3:])
                now = [way.read(state)]
    return state, progress.error, done


@dataclass(frozen=True)
class _InLogs:
    """One iteration, of logarithms."""

    problem: _Problem
    transposed: Cost
    log_p: Tensor

    @staticmethod
    def of(problem: _Problem) -> _InLogs:
        return _InLogs(problem, problem.cost.T, problem.p.log())

    def read(self, state: _State) -> _State:
        return state

    def logs(self, state: _State) -> _State:
        return state

    def after(self, state: _State) -> _State:
        cost, epsilon = self.problem.cost, self.problem.epsilon
        log_v = self.transposed.softmin(epsilon * state.log_u, epsilon) / epsilon
        log_kv = cost.softmin(epsilon * (self.log_p + log_v), epsilon) / -epsilon
        log_d, log_a = state.log_d, state.log_d + (self.problem.weights.unsqueeze(-1) * log_kv).sum(-2)
        if self.problem.debiased:
            log_d = (log_d + log_a + cost.softmin(epsilon * log_d, epsilon) / epsilon) / 2
        return _State(log_a.unsqueeze(-2) - log_kv, log_d, log_a, state.tau)


@dataclass(frozen=True)
class _InProducts:
    """One iteration, of u, d and a themselves; d and a have the axis of one histogram."""

    problem: _Problem
    kernel: _Kernel

    def read(self, state: _State) -> tuple[Tensor, Tensor, Tensor]:
        return state.log_u.exp(), state.log_d.exp().unsqueeze(-2), state.log_a.exp().unsqueeze(-2)

    def logs(self, factors: tuple[Tensor, Tensor, Tensor]) -> _State:
        u, d, a = factors
        log_a = a.log().squeeze(-2)
        return _State(u.log(), d.log().squeeze(-2), log_a, torch.full_like(log_a[..., :1], _TAU))

    def after(self, factors: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        u, d, _ = factors
        kv = self.kernel.product(self.problem.p / self.kernel.transposed_product(u))
        a = (self.problem.weights.unsqueeze(-2) @ kv.log()).exp_()
        if self.problem.debiased:
            a = a.mul_(d)
            d = self.kernel.product(d).reciprocal_().mul_(a).mul_(d).sqrt_()
        return a / kv, d, a


@dataclass
class _Progress:
    """What is left to an iteration, by what one changes: for debiased barycenters over one minus the contraction."""

    problem: _Problem
    tolerance: float
    patience: float
    changes: list[Tensor]
    speed: Tensor | None = None  # the least fall of log change in an iteration, from the second check on

    def ends(self, count: int, before: _State, after: _State) -> bool:
        """Take up what the last of `count` iterations changed; return whether to end."""
        self.changes = [*self.changes[-_CHECKS:], _change(self.problem, before, after)]
        is_known = len(self.changes) > _CHECKS
        if len(self.changes) > 1:
            falls = [torch.log(a / b) for a, b in itertools.pairwise(self.changes)]
            self.speed = torch.stack(falls).amin(0) / count
        error = self.error
        if not bool((error > self.tolerance).any()):
            return is_known or not self.problem.debiased
        if not is_known or self.speed is None or math.isinf(self.patience):
            return False
        iterations = torch.log(error / self.tolerance) / self.speed
        return not bool(((iterations < self.patience) & (self.speed > 0) | (error <= self.tolerance)).all())

    @property
    def error(self) -> Tensor:
        change = self.changes[-1]
        if not self.problem.debiased:
            return change
        left = torch.zeros_like(change) if self.speed is None else -torch.expm1(-self.speed.clamp(min=0.0))
        return torch.where(change == 0, 0.0, change / left).nan_to_num(_UNKNOWN).clamp(max=_UNKNOWN)


def _change(problem: _Problem, before: _State, after: _State) -> Float[Tensor, "*batch"]:
    """What one iteration changes, as a share of the mass: the error of the marginals, and what d lacks."""
    shares = torch.softmax(after.log_a, -1)
    off = (before.log_u - after.log_u).expm1().abs()
    off = (problem.weights.unsqueeze(-1) * shares.unsqueeze(-2) * off).sum((-2, -1))
    return off + (shares * (after.log_d - before.log_d).abs()).sum(-1)


def _extrapolated(earlier: _State, before: _State, after: _State) -> _State:
    """The limit of log u if each change is the same multiple of the one before."""
    first, second = before.log_u - earlier.log_u, after.log_u - before.log_u
    share = (first * second).sum((-2, -1), keepdim=True) / first.square().sum((-2, -1), keepdim=True)
    share = share.nan_to_num(0.0, 0.0, 0.0).clamp(0.0, _LARGEST_SHARE)
    return dataclasses.replace(after, log_u=after.log_u + share / (1 - share) * second)


@dataclass(frozen=True)
class _Kernel:
    """Products with K = exp(-C / epsilon), as one matrix, or for images as one matrix for each axis."""

    factors: tuple[Tensor, ...]
    cells: tuple[int, ...]

    @staticmethod
    def of(cost: Cost, epsilon: float) -> _Kernel | None:
        if isinstance(cost, GridCost):
            return _Kernel(tuple(_exp(cost.axis_costs(k), epsilon) for k in range(len(cost.cells))), cost.cells)
        n, m = cost.shape
        return _Kernel((_exp(cost.dense(), epsilon),), (m,)) if n * m <= _LARGEST_MATRIX else None

    def product(self, v: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch n"]:
        """K v."""
        if len(self.factors) == 1:
            return v @ self.factors[0].mT
        image = v.unflatten(-1, self.cells)
        for axis, factor in enumerate(self.factors):
            image = (image.movedim(axis - len(self.cells), -1) @ factor).movedim(-1, axis - len(self.cells))
        return image.flatten(-len(self.cells))

    def transposed_product(self, u: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:
        """K^T u; the factors of images are symmetric."""
        return u @ self.factors[0] if len(self.factors) == 1 else self.product(u)


def _exp(cost: Tensor, epsilon: float) -> Tensor:
    """exp(-C / epsilon), and 0 below the normal numbers, products with which are slow."""
    exponent = cost.double() / -epsilon
    return torch.where(exponent > _LEAST_EXPONENT, exponent.clamp(min=_LEAST_EXPONENT).exp(), 0.0)


def _solve(problem: _Problem, tolerance: float, most: int, *, with_graph: bool) -> tuple[_State, Tensor]:
    """The state and the error of its marginals: by the iteration, and where that is slow by Newton's method."""
    patience = _PATIENCE if problem.suits_ascent else math.inf
    state, error, done = _iterate(problem, problem.start(), tolerance, most, patience=patience)
    is_slow = ~(error <= tolerance)
    if problem.suits_ascent and done < most and bool(is_slow.any()):
        log_u, log_a = state.log_u.clone(), state.log_a.clone()
        log_u[is_slow], log_a[is_slow], error[is_slow] = _ascend(
            problem, is_slow, tolerance, most - done, with_graph=with_graph
        )
        state = dataclasses.replace(state, log_u=log_u, log_a=log_a)
    return state, error


def _ascend(
    problem: _Problem, chosen: Bool[Tensor, "*batch"], tolerance: float, most: int, *, with_graph: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """log u, log a and the errors of the chosen problems, by Newton's method.

    Without a graph the log u of histograms without weight are 0: only derivatives need them.
    """
    p, weights = problem.p[chosen].cpu(), problem.weights[chosen].cpu()
    mass = p.sum(-1, keepdim=True)
    p = p / mass
    costs = problem.cost.dense().cpu().double().contiguous()
    (count, k, _), n = p.shape, len(costs)
    log_u, log_a, error = p.new_zeros(count, k, n), p.new_zeros(count, n), p.new_zeros(count)
    takes_part = weights > 0
    for counted in takes_part.unique(dim=0):  # problems in which the same histograms have a weight
        (same,) = (takes_part == counted).all(-1).nonzero(as_tuple=True)
        part = same.unsqueeze(-1), counted.nonzero().squeeze(-1)
        log_u[part], log_a[same], error[same] = _run_kernel(
            p[part], weights[part], costs, problem.epsilon, tolerance, min(most, _MOST_STEPS)
        )
    # A histogram without weight has no part in the barycenter.
    for b, i in (~takes_part).nonzero().tolist() if with_graph else []:
        a, epsilon = log_a[b].exp(), p.new_tensor(problem.epsilon)
        plan = Problem(a, p[b, i] * a.sum(), DenseCost(costs), epsilon, p.dtype)
        settings = Settings(tolerance=max(tolerance, 2 * float(error[b])), grad="envelope")
        log_u[b, i] = log_a[b] + find_potentials(plan, settings)[1].f / problem.epsilon
    place = problem.p.device
    return log_u.to(place), (log_a + mass[..., 0, :].log()).to(place), error.to(place)


def _run_kernel(
    p: Tensor, weights: Tensor, costs: Tensor, epsilon: float, tolerance: float, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    from otloss.solvers.barycenter.ascent_numba import answers, barycenter_problems

    (count, k, m), n = p.shape, len(costs)
    filled = answers(count, k, n)
    posed = (*(t.contiguous().numpy() for t in (p, weights, costs.mT)), epsilon)
    work = Work("Newton's method on the dual of a barycenter", count * k * n * m, tolerance)
    run_on_threads(barycenter_problems, count, (posed, (tolerance, most), filled), work=work)
    log_u, log_a, outcome = map(torch.from_numpy, filled)
    return log_u, log_a, outcome[:, 0]


def _solve_debiased(problem: _Problem, tolerance: float, most: int) -> tuple[_State, Tensor]:
    """The state, and its error: by the iteration, where that is slow by Newton's method, else by more iterations."""
    patience = _PATIENCE if problem.suits_newton else math.inf
    start, error, done = _iterate(problem, problem.start(), tolerance, most, patience=patience)
    state = start
    if not problem.suits_newton:
        return state, error
    is_slow, few = ~(error <= tolerance), most
    for way in (_descend, _iterate):
        if done == most or not bool(is_slow.any()):
            break
        other, other_error, more = way(problem.chosen(is_slow), start.chosen(is_slow), tolerance, min(few, most - done))
        is_better, done = is_slow.clone(), done + more
        is_better[is_slow] = other_error < error[is_slow]
        state = state.replaced(is_better, other.chosen(is_better[is_slow]))
        error[is_better] = other_error[is_better[is_slow]]
        # A smaller error of Newton's method is mostly rounding, which more iterations do not beat.
        few, is_slow = most if bool((other_error > _FAILED).any()) else _FEW, ~(error <= tolerance)
    return state, error


def _descend(problem: _Problem, start: _State, tolerance: float, most: int) -> tuple[_State, Tensor, int]:
    """Newton's method at falling tau; return the state, its error and the number of steps."""
    mass, matrix, left = problem.p.sum((-2, -1)) / problem.p.shape[-2], problem.cost.dense(), most
    best = state = dataclasses.replace(start, tau=torch.full_like(start.tau, _FIRST_TAU))
    least, fruitless = torch.full_like(mass, _LARGEST_ERROR), 0
    moved, ratios = torch.zeros_like(mass), [torch.full_like(mass, _SLOWEST)] * 3  # of the last three falls of tau
    while left > 0:
        at_larger_tau, moved_before = state, moved
        state, change, stalled, steps = _settle(problem, matrix, state, tolerance, min(_STEPS, left))
        left -= steps
        # The error falls as tau does at the end, and hardly as long as tau exceeds small eigenvalues.
        a = state.log_a.exp()
        moved = (a - at_larger_tau.log_a.exp()).abs().sum(-1) / mass
        ratios = [*ratios[1:], (moved / moved_before).nan_to_num(torch.inf).clamp(1 / _FALL_OF_TAU, _SLOWEST)]
        slowest = torch.stack(ratios).amax(0)
        error = change + (a.sum(-1) / mass - 1).abs() + moved * slowest / (1 - slowest)
        error = error.nan_to_num(torch.inf)
        is_better = error < least
        # Details far below the blur move the answer only once tau is small: an estimate before that was too low.
        was_wrong = (moved > least) & (change < _SMALL_CHANGE) & ~stalled
        is_better = is_better | was_wrong
        least, best = torch.where(is_better, error, least), best.replaced(is_better, state.chosen(is_better))
        is_final = stalled & (least < _SMALL_CHANGE) | (least <= tolerance / 2)
        fruitless = fruitless + 1 if bool(is_final.all()) and not bool(is_better.any()) else 0
        is_last = float(state.tau.max()) <= _LEAST_TAU or fruitless == _MOST_FRUITLESS
        # Where rounding makes a tau diverge, smaller ones do too.
        is_last = is_last or bool((~stalled & (change >= _SMALL_CHANGE) & (least < _LARGEST_ERROR)).all())
        if bool((least <= tolerance / 2).all()) or bool((error > 1e3 * least).all()) or is_last:
            break
        state = dataclasses.replace(state, tau=state.tau / _FALL_OF_TAU)
    # An iteration shows what rounding may hide from the equations of a step, which leave a constant of log u open.
    excess = (torch.softmax(best.log_a, -1).unsqueeze(-2) * (best.log_u - best.log_d.unsqueeze(-2))).sum(
        -1, keepdim=True
    )
    best = dataclasses.replace(best, log_u=best.log_u - excess)
    after = _InLogs.of(problem).after(best)
    error = torch.maximum(least, _change(problem, best, after)).nan_to_num(_UNKNOWN)
    return best, error.masked_fill(least == _LARGEST_ERROR, _UNKNOWN), most - left


def _settle(
    problem: _Problem, matrix: Tensor, state: _State, tolerance: float, most: int
) -> tuple[_State, Tensor, Tensor, int]:
    """Take Newton steps at one tau; return the state, its last change, whether rounding stops it, and their number."""
    log_u, log_d, log_a, tau = state.log_u, state.log_d, state.log_a, state.tau
    smallest = torch.full_like(tau[..., 0], torch.inf)
    stalled, change, left = torch.zeros_like(smallest), smallest, most
    while left > 0:
        left -= 1
        log_a, by_a, by_u, by_d, _ = _newton_step(problem, matrix, (log_u, log_d, log_a), tau)
        falls = log_a - log_a.amax(-1, keepdim=True)
        # Mass that comes back to an empty bin may do so in one step, and it may leave in one.
        reach = (by_a.abs() / (-25 - falls).clamp(min=2.0)).masked_fill((by_a < 0) & (falls < -25), 0.0)
        share = 1 / reach.amax(-1, keepdim=True).clamp(min=1.0)
        log_u, log_d = log_u + share.unsqueeze(-1) * by_u, log_d + share * by_d
        log_d = torch.maximum(log_d, log_d.amax(-1, keepdim=True) - _EMPTY)
        change, is_whole = (by_a.abs() * torch.softmax(log_a, -1)).sum(-1), share[..., 0] == 1
        stalls = is_whole & (change < _SMALL_CHANGE) & (change >= smallest / 2)
        stalled, smallest = torch.where(stalls, stalled + 1, 0.0), torch.minimum(smallest, change)
        is_done = is_whole & (change <= max(tolerance / 100, _LEAST_CHANGE))
        if bool((is_done | (stalled >= _MOST_STALLED)).all()):
            break
    return _State(log_u, log_d, log_a, tau), change, stalled >= _MOST_STALLED, most - left


def _newton_step(
    problem: _Problem, matrix: Tensor, at: tuple[Tensor, Tensor, Tensor], tau: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """log a, the steps of log a, log u and log d, and a condition number (...) of the equations of log u.

    The first two have a graph in p, the weights and the matrix.
    """
    (log_u, log_d, log_a), p, weights = at, problem.p, problem.weights.unsqueeze(-1)
    log_k, change = -matrix.detach() / problem.epsilon, (matrix.detach() - matrix) / problem.epsilon  # 0, with a graph
    log_v = -torch.logsumexp(log_k.mT + log_u.unsqueeze(-2), -1)  # of p = 1: bins without mass have derivatives too
    scaled = log_u.unsqueeze(-1) + log_v.unsqueeze(-2) + log_k
    log_rows = torch.logsumexp(scaled + p.detach().log().unsqueeze(-2), -1)
    ratio, shares = (scaled + change).exp(), (scaled - log_rows.unsqueeze(-1) + change).exp()
    moved = ((shares.detach() * p.detach().unsqueeze(-2)) @ ratio.detach().mT).neg_()
    by_d, misfit = None, (weights * log_u).sum(-2)
    if problem.debiased:
        log_kd = torch.logsumexp(log_k + log_d.unsqueeze(-2), -1)
        among = (log_k + log_d.unsqueeze(-2) - log_kd.unsqueeze(-1) + change).exp()
        log_a = log_d + log_kd + among.sum(-1).log()
        misfit = misfit - log_d + tau * log_a
    off = log_rows + (shares @ (p / ratio.sum(-2)).unsqueeze(-1)).squeeze(-1).log() - log_a.unsqueeze(-2)
    n, weights = log_a.shape[-1], weights.detach()
    eye, part = torch.eye(n, dtype=p.dtype, device=p.device), torch.softmax(log_a.detach(), -1)
    off = torch.where((part > _NO_MASS).unsqueeze(-2), off, off.detach())
    # A constant may go from one log u to another; part, in each row, fixes it.
    moved = moved.add_(part[..., None, None, :])
    inverse = torch.linalg.inv_ex(eye + moved).inverse
    sizes = [torch.linalg.matrix_norm(matrix, torch.inf) for matrix in (eye + moved, inverse)]
    condition = (sizes[0] * sizes[1]).amax(-1)
    less = moved @ inverse
    by_row = eye - less  # the inverse; what the system needs of it is less rounded without the identity
    if problem.debiased:
        less_d = among.detach() @ torch.linalg.inv_ex(eye + among.detach()).inverse
        by_d = eye - less_d
        system = less_d - (weights.unsqueeze(-1) * less).sum(-3) + tau.unsqueeze(-1) * eye
    else:
        system = (weights.unsqueeze(-1) * by_row).sum(-3)
    system = torch.cat([system, torch.ones_like(system[..., :1])], -1)
    system = torch.cat([system, torch.nn.functional.pad(part, (0, 1)).unsqueeze(-2)], -2)
    right = (weights * (by_row @ off.unsqueeze(-1)).squeeze(-1)).sum(-2) - misfit
    lack = p.sum((-2, -1)) / p.shape[-2] / log_a.exp().sum(-1) - 1
    by_a = torch.linalg.solve_ex(system, torch.cat([right, lack.unsqueeze(-1)], -1)).result[..., :n]
    by_u = (by_row @ (by_a.unsqueeze(-2) - off).unsqueeze(-1)).squeeze(-1)
    by_d = by_a if by_d is None else (by_d @ by_a.unsqueeze(-1)).squeeze(-1)
    return log_a, by_a, by_u, by_d, condition


def _with_gradient(problem: _Problem, state: _State) -> Tensor:
    """The barycenter with its derivatives in p, the weights and the cost: those of a step of Newton's method."""
    n, m = problem.cost.shape
    entries = problem.p.shape[:-1].numel() * n * max(n, m)
    if entries > _MOST_ENTRIES:
        raise ValueError(
            f"the gradient of barycenters holds {entries} entries of plans, expected at most {_MOST_ENTRIES}; detach "
            "the histograms and the weights, or take fewer bins."
        )
    at = state.log_u, state.log_d, state.log_a
    log_a, by_a, _, _, condition = _newton_step(problem, problem.cost.dense(), at, state.tau)
    if not bool(torch.isfinite(by_a.detach()).all()):
        raise RuntimeError("the gradient of the barycenter is singular to rounding; raise epsilon.")
    if not problem.debiased and bool((uncertain := condition > _LARGEST_CONDITION).any()):
        warnings.warn(
            f"the gradient of {int(uncertain.sum())} of {uncertain.numel()} barycenters is uncertain: plans fall into "
            "parts that hardly exchange mass, and rounding decides how a change spreads. Raise epsilon. The "
            "barycenters themselves are right.",
            ConvergenceWarning,
            stacklevel=level_of_the_caller(),
        )
    corrected = log_a + by_a
    if corrected.requires_grad:
        corrected.register_hook(partial(_raise_for_second, forward=has_tangent(corrected)))
    return problem.with_mass(state.log_a + corrected - corrected.detach())


def _raise_for_second(upstream: Tensor, *, forward: bool) -> None:
    if forward or torch.is_grad_enabled():
        raise RuntimeError("barycenter gives first derivatives only; drop create_graph=True.")


def _checked(p: Any, cost: Any, weights: Any, epsilon: Any, debiased: bool) -> _Problem:
    fitted = as_cost(cost)
    check_floating("p", p)
    if p.dim() < 2 or 0 in p.shape[-2:]:
        raise ValueError(
            f"p has shape {tuple(p.shape)}, expected (..., k, bins): k histograms of one problem; join single ones "
            "with torch.stack."
        )
    check_last_axis("p", p, fitted.shape[1])
    mass = p.detach().sum(-1, dtype=torch.float64)
    is_equal = (mass - mass[..., :1]).abs() <= MASS_TOLERANCE[p.dtype] * mass  # not for NaN and infinity
    if not bool(is_equal.all()) or (p.numel() and bool(p.detach().amin() < 0)):
        check_finite("p", p)
        raise ValueError(
            f"p holds weights from {float(p.min()):.3g} and masses from {float(mass.min()):.6g} to "
            f"{float(mass.max()):.6g}, expected weights >= 0 and one mass; normalise p / p.sum(-1, keepdim=True)."
        )
    if bool((mass == 0).any()):
        raise ValueError("p holds a histogram without mass, expected some; leave that problem out.")
    if weights is None:
        weights = p.new_full((p.shape[-2],), 1 / p.shape[-2])
    else:
        check_last_axis("weights", check_floating("weights", weights), p.shape[-2])
        total = weights.detach().sum(-1, dtype=torch.float64)
        if bool((weights < 0).any()) or not bool(((total - 1).abs() <= MASS_TOLERANCE[weights.dtype]).all()):
            raise ValueError(
                f"weights have sums of {total.tolist()}, expected weights >= 0 with sum 1; normalise them."
            )
    if debiased and fitted.shape[0] != fitted.shape[1]:
        raise ValueError(f"debiased=True needs the costs among the same bins, but the cost has shape {fitted.shape}.")
    if fitted.batch_shape:
        raise ValueError(f"the cost has leading axes {tuple(fitted.batch_shape)}, expected one matrix (n, m) for all.")
    if debiased and not is_symmetric(fitted):
        raise ValueError(
            "debiased=True needs the costs among the same bins, but C[i, j] and C[j, i] differ; pass "
            "(cost + cost.mT) / 2, or PointCost(x)."
        )
    dtype = torch.promote_types(torch.promote_types(p.dtype, weights.dtype), cost.dtype)
    wide = torch.float64 if p.device.type != "mps" else torch.float32
    batch = check_broadcast(p=p.shape[:-2], weights=weights.shape[:-1])
    # Masses, and the sum of the weights, agree up to rounding, which may exceed the tolerance.
    p = p.to(wide) * (mass.mean(-1, keepdim=True) / mass).to(wide).unsqueeze(-1)
    weights = weights.to(wide) / weights.detach().to(wide).sum(-1, keepdim=True)
    p, weights = p.expand(*batch, *p.shape[-2:]), weights.expand(*batch, p.shape[-2])
    return _Problem(p, fitted.to(p.device, wide), weights, float(check_positive("epsilon", epsilon)), debiased, dtype)
