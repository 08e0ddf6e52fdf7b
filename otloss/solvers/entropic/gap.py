"""The duality gap at potentials, and an upper bound of the exact transport cost.

The gap needs a feasible plan, one with the marginals p and q; let their mass be one here. Since f is an exact update,
the rows of P are right and only its columns are off. With y = min(1, q / P^T 1), the plan A = P diag(y) is nowhere too
large. Let r and s be the mass that A lacks in its rows and columns, and d = sum r = sum s. The plan B = r s^T / d moves
it, so A + B is feasible. By the convexity of the entropy, for every t

    primal(A + B) <= <C, A> + epsilon sum A log(A / (t p q^T)) + <C, B> + epsilon sum B log(B / ((1 - t) p q^T)) + ...

and t = sum A / mass is the best. In the first two terms the costs cancel, because log(A / p q^T) consists of f, g and
C. The last two take one product with C.

In unbalanced problems every plan is feasible, and with q kept every plan with the columns of an exact update of g.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from otloss.solvers.entropic.equations.updates import build_updates
from otloss.solvers.entropic.objectives import dual_sum, dual_value, linear_cost, log_marginal_ratios
from otloss.solvers.options import is_kept
from otloss.solvers.problem import Problem


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
