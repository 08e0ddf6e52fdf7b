"""Newton's method on the dual, for problems on which Sinkhorn is slow.

Where the plan falls into parts that hardly exchange mass, as between clouds of equal weights that nearly match point to
point, an iteration moves next to nothing between the parts. With b = g / epsilon and S the rows of the plan scaled to
one, the dual in b has the gradient q - S^T p, and the curvature

    H = diag(S^T p) - S^T diag(p) S

It is a sum of logarithms of sums of exponentials, whose third derivative along a step h is at most the spread of h
(largest minus smallest entry) times the second: a step shortened to log(1 + spread) / spread always increases the dual
(F. Bach, Self-concordant analysis for logistic regression, 2010). H is symmetric, and zero at bins without
mass. The equations of `otloss.solvers.derivatives`, also for unbalanced problems, are these divided by the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from otloss.solvers.entropic.log_domain import Goal, SearchResult, Sweep
from otloss.solvers.problem import Problem

STEPS, SETTLING_STEPS = 200, 40  # the latter within the tolerance: rounding may leave nothing to settle
ROUNDING, INVERSE_ITERATIONS = 1e-15, 4
RIDGE_OF_MASS = 1e-13  # of the mass: H does not determine the constant in b, nor parts that exchange nothing


def newton_search(problem: Problem, g: Float[Tensor, "*batch m"], goal: Goal) -> SearchResult:
    """Return the potentials from a start g; balanced problems, in float64.

    With a finite `goal.settled` it continues until a step changes no factor of a plan by a larger share. The error of g
    is infinite where the equations are singular to rounding.
    """
    sweep = Sweep.of(problem)
    dual, q = _Dual.of(problem, sweep), sweep.log_q.exp()
    b = g / sweep.epsilon
    done = torch.zeros(problem.batch, dtype=torch.int64, device=g.device)
    for k in range(min(STEPS, goal.most)):
        gradient, curvature = dual.derivatives(b, ridge=RIDGE_OF_MASS)
        step, failed = torch.linalg.solve_ex(curvature, gradient)
        spread = (step.amax(-1) - step.amin(-1)).clamp(min=torch.finfo(b.dtype).tiny)
        # A tenth of the tolerance: the last exact update of f is measured on its own.
        off = gradient.abs().sum(-1) / dual.mass.squeeze(-1)
        unfinished = (off > 0.1 * goal.tolerance) | ((spread > goal.settled) & (off > ROUNDING) & (k < SETTLING_STEPS))
        usable = unfinished & (failed == 0) & torch.isfinite(spread)
        if not bool(usable.any()):
            break
        shortened = (torch.log1p(spread) / spread).unsqueeze(-1) * step
        b = torch.where(usable.unsqueeze(-1), b + shortened, b)
        done = done + usable
    f = sweep.f_from(torch.where(q > 0, b * sweep.epsilon, g))
    g = torch.where(q > 0, b * sweep.epsilon, sweep.g_from(f))
    error = sweep.error(g, sweep.g_from(f), sweep.log_q)
    is_settled = goal.settled == math.inf
    potential_error = error * 0 if is_settled else dual.error(g / sweep.epsilon) * problem.epsilon
    return SearchResult(f, g, error, done, potential_error)


def error_of_potential(problem: Problem, g: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch"]:
    """Return an estimate of the largest error of g, in the unit of the cost; in float64, with the dense matrix."""
    sweep = Sweep.of(problem)
    return _Dual.of(problem, sweep).error(g.to(sweep.epsilon.dtype) / sweep.epsilon) * sweep.epsilon.squeeze(-1)


@dataclass(frozen=True)
class _Dual:
    """The dual as a function of b. scores (..., n, m): log q - C / epsilon; mass (..., 1)."""

    scores: Tensor
    p: Tensor
    q: Tensor
    mass: Tensor

    @staticmethod
    def of(problem: Problem, sweep: Sweep) -> _Dual:
        p, q = sweep.log_p.exp(), sweep.log_q.exp()
        scores = -problem.cost.dense().to(p.dtype) / sweep.epsilon.unsqueeze(-1) + sweep.log_q.unsqueeze(-2)
        return _Dual(scores, p, q, p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny))

    def derivatives(self, b: Tensor, *, ridge: float = 0.0) -> tuple[Tensor, Tensor]:
        """The gradient q - S^T p, and H with the constant and a ridge added."""
        p, q, mass = self.p, self.q, self.mass
        rows = torch.softmax(self.scores + torch.where(q > 0, b, 0.0).unsqueeze(-2), -1)  # S
        received = (p.unsqueeze(-2) @ rows).squeeze(-2)
        curvature = torch.diag_embed(received + ridge * mass) - (rows * p.unsqueeze(-1)).mT @ rows
        return q - received, curvature + q.unsqueeze(-1) * q.unsqueeze(-2) / mass.unsqueeze(-1)

    def error(self, b: Tensor) -> Tensor:
        """Of b: the largest relative error of the columns over the second least eigenvalue of H in the metric of q."""
        gradient, curvature = self.derivatives(b)
        scale = torch.where(self.q > 0, self.q, 1.0).sqrt()
        # Bins without mass get the eigenvalue 1; the constant has it from the product of the weights.
        scaled = curvature / (scale.unsqueeze(-1) * scale.unsqueeze(-2)) + torch.diag_embed((self.q == 0).to(b.dtype))
        least = _least_eigenvalue(scaled)
        residual = torch.where(self.q > 0, gradient / scale.square(), 0.0).abs().amax(-1)
        error = (residual + ROUNDING) / least.clamp(min=ROUNDING)
        return torch.where(least > ROUNDING, error, torch.inf)


def _least_eigenvalue(matrix: Tensor) -> Tensor:
    """Return that of symmetric matrices with eigenvalues in [0, 1], by inverse iteration; 0 where they are singular."""
    factors, pivots, failed = torch.linalg.lu_factor_ex(matrix)
    start = (0.6180339887498949 * torch.arange(1, matrix.shape[-1] + 1, dtype=matrix.dtype, device=matrix.device)) % 1
    x = (start - start.mean()).expand(matrix.shape[:-1]).unsqueeze(-1) + 0.01
    least = torch.ones_like(matrix[..., 0, 0])
    for _ in range(INVERSE_ITERATIONS):
        x = x / torch.linalg.vector_norm(x, dim=-2, keepdim=True)
        x = torch.linalg.lu_solve(factors, pivots, x)
        least = 1 / torch.linalg.vector_norm(x, dim=(-2, -1))
    return least.masked_fill((failed != 0) | ~least.isfinite(), 0.0)
