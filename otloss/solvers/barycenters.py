"""Barycenters of histograms: the histogram that is nearest to several ones on average.

    min over a of  sum_k w_k OT(a, p_k)        OT(a, p) = min <C, P> + epsilon sum P (log P - 1)

With K = exp(-C / epsilon) the plans are diag(u_k) K diag(v_k), and the iteration is

    v_k = p_k / K^T u_k,   a = d prod_k (K v_k)^w_k,   u_k = a / K v_k,   d = 1, or debiased sqrt(d a / K d)

(J.-D. Benamou et al., Iterative Bregman Projections for Regularized Transportation Problems, 2015). The entropy blurs
a; debiased, a is the minimum of the weighted Sinkhorn divergences, and the barycenter of equal histograms is that
histogram (H. Janati, M. Cuturi, A. Gramfort, Debiased Sinkhorn barycenters, 2020).

Derivatives are those of the fixed point, by the series of the transposed Jacobian. All of it is written in changes of
log u and log d from where they ended, so that weights stand as factors and bins of p without mass have derivatives too.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._autograd import eager
from otloss._checks import check_broadcast, check_finite, check_floating, check_last_axis, check_positive
from otloss.costs import Cost, as_cost
from otloss.costs.cost import makes_graph
from otloss.solvers.entropic.potentials import ConvergenceWarning
from otloss.solvers.entropic.problem import DEFAULT_TOLERANCE, level_of_the_caller
from otloss.solvers.histograms import MASS_TOLERANCE

_MOST_ENTRIES = 2**26  # of the plans of all problems together, which the gradient holds


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
        tolerance: sum of the errors of the marginals relative to the mass, None for 1e-5 in float32, 1e-8 in float64.
        max_iterations: at most; a `ConvergenceWarning` tells where they are not enough.

    Returns:
        (..., n), in the promoted dtype, of the mass of the histograms. Differentiable once in p, the weights and the
        cost; the gradient holds the plans, k n m entries per problem.

    Raises:
        TypeError: if p, the weights or a cost matrix is not a floating tensor.
        ValueError: if shapes or masses do not fit, a number is negative or not finite, or debiased=True and the cost is
            not square.
        RuntimeError: if a gradient is asked for that does not converge, or a second derivative.

    Source:
        J.-D. Benamou et al., 2015; H. Janati, M. Cuturi, A. Gramfort, Debiased Sinkhorn barycenters, 2020.

    Example:
        >>> from otloss.costs import LineCost
        >>> ends = torch.eye(5)[[0, 4]]
        >>> barycenter(ends, LineCost(torch.arange(5.0), power=2), epsilon=0.1, debiased=True).round(decimals=4)
        tensor([0., 0., 1., 0., 0.])
    """
    problem = _checked(p, cost, weights, epsilon, debiased)
    tolerance = DEFAULT_TOLERANCE[problem.answer] if tolerance is None else check_positive("tolerance", tolerance)
    with torch.no_grad():
        state, error = problem.solved(tolerance, max_iterations)
    if not bool((error <= tolerance).all()):
        warnings.warn(
            f"the barycenter did not converge: a marginal error of {float(error.max()):.3g} where {tolerance:.3g} was "
            f"asked for, after {max_iterations} iterations. Raise epsilon, max_iterations or the tolerance.",
            ConvergenceWarning,
            stacklevel=level_of_the_caller(),
        )
    if not makes_graph(problem.p, problem.weights, *problem.cost.parameters()):
        return state.log_a.exp().to(problem.dtype)
    return _with_gradient(problem, state, tolerance, max_iterations).to(problem.dtype)


@dataclass(frozen=True)
class _State:
    """log u (..., k, n), log v without p (..., k, m), log d (..., n) and log a (..., n)."""

    log_u: Tensor
    log_v: Tensor
    log_d: Tensor
    log_a: Tensor


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

    def solved(self, tolerance: float, most: int) -> tuple[_State, Tensor]:
        """The iteration, in logs."""
        batch, epsilon, weights = self.p.shape[:-2], self.epsilon, self.weights.unsqueeze(-1)
        log_p, mass = self.p.log(), self.p.sum((-2, -1)) / self.p.shape[-2]
        log_u = self.p.new_zeros(*self.p.shape[:-1], self.cost.shape[0])
        log_d = self.p.new_zeros(*batch, self.cost.shape[0])
        transposed = self.cost.T
        for _ in range(max(1, most)):
            log_v = transposed.softmin(epsilon * log_u, epsilon) / epsilon
            log_kv = self.cost.softmin(epsilon * (log_p + log_v), epsilon) / -epsilon
            log_a = log_d + (weights * log_kv).sum(-2)
            rows, log_u = (log_u + log_kv).exp(), log_a.unsqueeze(-2) - log_kv
            off = (weights * (rows - log_a.exp().unsqueeze(-2)).abs()).sum((-2, -1))
            if self.debiased:
                moved = (log_a + self.cost.softmin(epsilon * log_d, epsilon) / epsilon - log_d) / 2
                log_d = log_d + moved
                off = off + (log_a.exp() * moved.abs()).sum(-1)
            if bool((off <= tolerance * mass).all()):
                break
        return _State(log_u, transposed.softmin(epsilon * log_u, epsilon) / epsilon, log_d, log_a), off / mass


def _with_gradient(problem: _Problem, state: _State, tolerance: float, most: int) -> Tensor:
    """The barycenter with its derivatives in p, the weights and the cost."""
    matrix = problem.cost.dense()
    entries = problem.p.shape[:-1].numel() * matrix.shape[-2] * matrix.shape[-1]
    if entries > _MOST_ENTRIES:
        raise ValueError(
            f"the gradient of barycenters holds {entries} entries of plans, expected at most {_MOST_ENTRIES}; detach "
            "the histograms and the weights, or take fewer bins."
        )
    change = (matrix.detach() - matrix) / problem.epsilon  # 0, with a graph
    scaled = state.log_u.unsqueeze(-1) + state.log_v.unsqueeze(-2) - matrix.detach() / problem.epsilon
    ratio = (scaled + change).exp()  # u_i K_ij v_j / p_j, and its columns sum to one
    among = None
    if problem.debiased:
        with torch.no_grad():
            log_kd = problem.cost.softmin(problem.epsilon * state.log_d, problem.epsilon) / -problem.epsilon
        among = (state.log_d.unsqueeze(-2) - log_kd.unsqueeze(-1) - matrix.detach() / problem.epsilon + change).exp()

    def step(x: Tensor, ratio: Any, among: Any, p: Any, weights: Any) -> tuple[Tensor, Tensor]:
        """The changes of log u and log d after an iteration, stacked as k + 1 rows; and that of log a."""
        by_u, by_d = x[..., :-1, :], x[..., -1, :]
        received = (ratio.mT @ by_u.exp().unsqueeze(-1)).squeeze(-1)
        log_kv = (ratio @ (p / received).unsqueeze(-1)).squeeze(-1).log()  # of u K v
        log_a = by_d + state.log_d + (weights.unsqueeze(-1) * (log_kv - state.log_u)).sum(-2)
        new_u = log_a.unsqueeze(-2) - log_kv
        if among is None:
            new_d = torch.zeros_like(by_d)
        else:
            new_d = (by_d + log_a - state.log_a - (among @ by_d.exp().unsqueeze(-1)).squeeze(-1).log()) / 2
        return torch.cat([new_u, new_d.unsqueeze(-2)], -2), log_a

    given = (ratio, among, problem.p, problem.weights)
    start = torch.zeros_like(torch.cat([state.log_u, state.log_d.unsqueeze(-2)], -2))
    at_end, _ = step(start, *given)
    inner = start.clone().requires_grad_()
    with torch.enable_grad():
        again, _ = step(inner, *(None if t is None else t.detach() for t in given))

    def solve(upstream: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("barycenter gives first derivatives only; drop create_graph=True.")
        total, term = upstream, upstream
        for _ in range(most):
            (term,) = torch.autograd.grad(again, inner, term, retain_graph=True)
            total = total + term
            if not bool(term.abs().sum() > tolerance * total.abs().sum()):
                return total
        raise RuntimeError(
            f"the gradient of the barycenter did not converge in {most} terms; raise epsilon or max_iterations."
        )

    at_end.register_hook(solve)
    return step(at_end, *given)[1].exp()


def _checked(p: Any, cost: Any, weights: Any, epsilon: Any, debiased: bool) -> _Problem:
    fitted = as_cost(cost)
    check_finite("p", check_floating("p", p))
    if p.dim() < 2 or 0 in p.shape[-2:]:
        raise ValueError(f"p has shape {tuple(p.shape)}, expected (..., k, bins): k histograms of one problem.")
    check_last_axis("p", p, fitted.shape[1])
    mass = p.detach().sum(-1, dtype=torch.float64)
    if bool((p < 0).any()) or not bool(((mass - mass[..., :1]).abs() <= MASS_TOLERANCE[p.dtype] * mass).all()):
        raise ValueError(
            f"p holds weights from {float(p.min()):.3g} and masses from {float(mass.min()):.6g} to "
            f"{float(mass.max()):.6g}, expected weights >= 0 and one mass; normalise p / p.sum(-1, keepdim=True)."
        )
    if bool((mass == 0).any()):
        raise ValueError("p holds a histogram without mass, expected some; leave that problem out.")
    if weights is None:
        weights = p.new_full((p.shape[-2],), 1 / p.shape[-2])
    check_last_axis("weights", check_floating("weights", weights), p.shape[-2])
    total = weights.detach().sum(-1, dtype=torch.float64)
    if bool((weights < 0).any()) or not bool(((total - 1).abs() <= MASS_TOLERANCE[weights.dtype]).all()):
        raise ValueError(f"weights have sums of {total.tolist()}, expected weights >= 0 with sum 1; normalise them.")
    if debiased and fitted.shape[0] != fitted.shape[1]:
        raise ValueError(f"debiased=True needs the costs among the same bins, but the cost has shape {fitted.shape}.")
    dtype = torch.promote_types(torch.promote_types(p.dtype, weights.dtype), cost.dtype)
    wide = torch.float64 if p.device.type != "mps" else torch.float32
    batch = check_broadcast(p=p.shape[:-2], weights=weights.shape[:-1])
    p, weights = p.to(wide).expand(*batch, *p.shape[-2:]), weights.to(wide).expand(*batch, p.shape[-2])
    return _Problem(p, fitted.to(p.device, wide), weights, float(check_positive("epsilon", epsilon)), debiased, dtype)
