"""The dual objective of an entropic problem as a function of one side's potential: Newton's equations, and how far off
potentials are.

Let b = g / epsilon, let f be the exact update from g, and let S be the plan with rows scaled to one. The rows of the
plan sum to a = p exp(-f / rho_p), and its columns should sum to t = q exp(-g / rho_q). With r_p = epsilon / rho_p,
r_q = epsilon / rho_q and k_p = 1 / (1 + r_p), the dual has in b

    the gradient            t - S^T a
    the negative Hessian    H = diag(S^T a + r_q t) - k_p S^T diag(a) S

On a side that is kept rho is infinite: a = p and k_p = 1, or t = q and r_q = 0. Where both are, a constant in b changes
nothing. Where both penalties are large, a constant changes next to nothing: the marginal error, an error of masses,
tells it only up to the penalty times the tolerance. But the best constant has a closed form (`with_best_constant`).

The error of g is at most the largest relative error of the columns over the smallest eigenvalue of H, where constants
are left out, and where both are taken in the metric of t. This is a linear model. Near the limit of its validity the
true error may be many times larger, so that an estimate above `Schedule.largest_estimate` becomes infinite.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss.solvers.entropic.equations.updates import Updates, build_updates, damping_of, log_mass_ratio
from otloss.solvers.entropic.interface import SearchResult
from otloss.solvers.entropic.sinkhorn_kernels.numbers import SCHEDULE
from otloss.solvers.linear_systems import factor, solve_factored
from otloss.solvers.options import of_batch
from otloss.solvers.problem import Problem

LARGEST_FOR_EIGENVALUE = 2**20  # entries of a matrix, for the estimate of the error of potentials
ROUNDING, INVERSE_ITERATIONS = 1e-15, 4
NEGLIGIBLE_SHIFT = 1e-3  # relative to epsilon: the marginal error allows a shift of itself times the marginal penalty
NO_SHARE = 1e-100  # counts as 0 in a row: products of smaller shares are subnormal, on which processors are slow


@dataclass(frozen=True)
class Dual:
    """The dual of a batch of problems.

    Attributes:
        scores: (..., n, m), log q - C / epsilon.
        log_p, log_q: logarithms of the weights, or in balanced problems of the shares of the mass.
        ratio_p, ratio_q: (..., 1), r_p and r_q.
    """

    scores: Float[Tensor, "*batch n m"]
    log_p: Float[Tensor, "*batch n"]
    log_q: Float[Tensor, "*batch m"]
    ratio_p: Float[Tensor, "*batch 1"]
    ratio_q: Float[Tensor, "*batch 1"]
    is_balanced: bool

    def target(self, b: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch m"]:
        """Return t, what the columns of the plan should sum to."""
        return (self.log_q - self.ratio_q * b).exp()

    def gradient(self, b: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch m"]:
        """Return t - S^T a."""
        _, _, received = self._plan(b)
        return self.target(b) - received

    def derivatives(self, b: Float[Tensor, "*batch m"], *, ridge: float = 0.0) -> tuple[Tensor, Tensor]:
        """Return the gradient t - S^T a, and H plus a ridge, in balanced problems plus the projection on constants."""
        rows, masses, received = self._plan(b)
        target, damping = self.target(b), 1 / (1 + self.ratio_p)
        curvature = torch.diag_embed(received + (self.ratio_q + ridge) * target)
        curvature -= damping.unsqueeze(-1) * (rows * masses.unsqueeze(-1)).mT @ rows
        return target - received, curvature + _constants(target) if self.is_balanced else curvature

    def _plan(self, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return S, a and S^T a."""
        exponents = self.scores + b.masked_fill(self.log_q == -torch.inf, 0.0).unsqueeze(-2)
        rows = torch.softmax(exponents, -1)
        rows.masked_fill_(rows < NO_SHARE, 0.0)
        pull = self.ratio_p / (1 + self.ratio_p)
        masses = (self.log_p if self.is_balanced else self.log_p + pull * torch.logsumexp(exponents, -1)).exp()
        return rows, masses, (masses.unsqueeze(-2) @ rows).squeeze(-2)

    def error(self, b: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch"]:
        """Return the largest relative error of columns over the smallest eigenvalue of H, infinite where unknown."""
        gradient, curvature = self.derivatives(b)
        target = self.target(b)
        if not self.is_balanced:
            curvature = curvature + _constants(target)
        has_mass = target > 0
        scale = torch.where(has_mass, target, 1.0).sqrt()
        # Bins without mass get the eigenvalue 1. The projection gives it to the constant.
        scaled = curvature / (scale.unsqueeze(-1) * scale.unsqueeze(-2)) + torch.diag_embed((~has_mass).to(b.dtype))
        smallest = _smallest_eigenvalue(scaled)
        residual = torch.where(has_mass, gradient / scale.square(), 0.0).abs().amax(-1)
        error = (residual + ROUNDING) / smallest
        return torch.where(error <= SCHEDULE.largest_estimate, error, torch.inf)


def build_dual(updates: Updates) -> Dual:
    """Return the dual of the problems of the updates, with their costs as dense matrices."""
    problem, log_q = updates.problem, updates.log_q
    scores = -problem.cost.dense().to(log_q.dtype) / updates.epsilon.unsqueeze(-1) + log_q.unsqueeze(-2)
    ratios = (updates.epsilon / updates.penalty.p, updates.epsilon / updates.penalty.q)
    return Dual(scores, updates.log_p, log_q, *ratios, is_balanced=problem.marginal_penalty is None)


def is_dense_fast(problem: Problem) -> bool:
    """Return whether dense equations take less time than the search."""
    return math.prod(problem.cost.shape) <= LARGEST_FOR_EIGENVALUE


def estimate_error(problem: Problem, g: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch"]:
    """Return the largest error of g in the unit of the cost, NaN where it is not known.

    It is an estimate from the dense matrix, or in larger unbalanced problems a bound: two updates contract the error by
    k_p k_q there.
    """
    updates = build_updates(problem)
    epsilon, g = updates.epsilon, g.to(updates.epsilon.dtype)
    if problem.p.device.type == "cpu" and is_dense_fast(problem):
        return build_dual(updates).error(g / epsilon) * epsilon.squeeze(-1)
    if problem.marginal_penalty is None:
        return torch.full_like(epsilon.squeeze(-1), math.nan)
    change = (updates.g_from(updates.f_from(g)) - g).abs().masked_fill(problem.q.detach() == 0, 0.0).amax(-1)
    return change / (1 - of_batch(updates.damping[0] * updates.damping[1]))


def range_over_mass(problem: Problem, g: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch"]:
    """Return the largest g minus the smallest, over bins with mass."""
    is_empty = problem.q.detach() == 0
    return g.masked_fill(is_empty, -torch.inf).amax(-1) - g.masked_fill(is_empty, torch.inf).amin(-1)


def with_best_constant(problem: Problem, result: SearchResult) -> SearchResult:
    """Return the potentials g - s and f + k_p s of unbalanced problems, with the s that maximises the dual.

    f stays the exact update from g. The rows of the plan sum to p exp(-f / rho_p); they have the mass that its columns
    should have, sum_j q_j exp(-g_j / rho_q), for

        s (k_p / rho_p + 1 / rho_q) = log(sum_i p_i exp(-f_i / rho_p) / sum_j q_j exp(-g_j / rho_q))

    Source: T. Sejourne, F.-X. Vialard, G. Peyre, Faster Unbalanced Optimal Transport: Translation Invariant Sinkhorn,
    2022.
    """
    penalty, error = problem.marginal_penalty, result.error
    if penalty is None or not error.numel():
        return result
    penalty = penalty.map(lambda rho: rho.to(result.f.dtype))
    uncertain, price = result.potential_error, of_batch(2 * penalty.of_constant)
    largest = price.amax().item() if isinstance(price, Tensor) else price
    rounding = 4 * torch.finfo(problem.p.dtype).eps  # an error below its rounding may be measured as 0
    if largest * (error.amax().item() + rounding) <= NEGLIGIBLE_SHIFT * problem.epsilon.amin().item():  # NaN goes on
        return dataclasses.replace(result, potential_error=uncertain + price * (error + rounding))
    f, g = result.f, result.g
    epsilon = problem.epsilon.detach().to(f.dtype).unsqueeze(-1)
    log_p, log_q = (weights.detach().to(f.dtype).log() for weights in (problem.p, problem.q))
    damping, _ = damping_of(penalty, epsilon)
    shift = log_mass_ratio(log_p, log_q, f, g, penalty) / (damping / penalty.p + 1 / penalty.q)
    shift = shift.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)  # empty sides
    uncertain = uncertain + 4 * torch.finfo(f.dtype).eps * price  # by the rounding of the logarithms
    return dataclasses.replace(result, f=f + damping * shift, g=g - shift, potential_error=uncertain)


def _constants(target: Tensor) -> Tensor:
    """Return t t^T over the mass of t: it maps a constant to t, and what t weighs to zero it maps to zero."""
    tiny, total = torch.finfo(target.dtype).tiny, target.sum(-1, keepdim=True)
    return target.unsqueeze(-1) * target.unsqueeze(-2) / total.clamp(min=tiny).unsqueeze(-1)


def _smallest_eigenvalue(matrix: Float[Tensor, "*batch m m"]) -> Float[Tensor, "*batch"]:
    """Return the smallest eigenvalue of symmetric matrices with eigenvalues of at least 0; 0 if they are singular."""
    factors, pivots, failed = factor(matrix)
    # A vector with a pattern is orthogonal to some eigenvectors of uniform weights.
    # Random numbers of torch are an error inside torch.vmap.
    random = torch.from_numpy(np.random.default_rng(0).random(matrix.shape[-1]) - 0.5)
    x = random.to(matrix.device, matrix.dtype).expand(matrix.shape[:-1]).unsqueeze(-1)
    smallest = torch.ones_like(matrix[..., 0, 0])
    for _ in range(INVERSE_ITERATIONS):
        x = x / torch.linalg.vector_norm(x, dim=-2, keepdim=True)
        x = solve_factored(factors, pivots, x)
        smallest = 1 / torch.linalg.vector_norm(x, dim=(-2, -1))
    return smallest.masked_fill((failed != 0) | ~smallest.isfinite(), 0.0)
