"""The error of a debiased barycenter, by the equations of Newton's method.

At any tau it is about the sum of three parts, and the smallest sum counts. At eigenvalues of the equations below tau
the gradient tells little, as rounding decides it there:

    the step        (H + g + tau)^-1 (constant - gradient), which changes a where eigenvalues are above tau
    details of a    tau (H + g + tau)^-1 log a: the part of log a at eigenvalues below tau, which may be wrong
    details of p_k  tau (B_k + tau)^-1 log p_k: the part of log p_k that the blur hides. The barycenter has about as
                    much of it, whatever a has; and none where all eigenvalues of H + g are far above tau.

H is the derivative of the gradient in log a, and B_k = diag(d) K diag(d) / p_k the plan of p_k to itself. At a bin that
the barycenter leaves empty the gradient exceeds the constant by g > 0, and the equation is a g = 0: its derivative adds
g dlog a, so that such a bin loses no more than its mass. Other bins have no g. The error is a sum over the bins of the
absolute changes of a.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss.solvers.barycenter.equations import Equations, border, solve_with_mass
from otloss.solvers.barycenter.problem import NUMBERS, UNKNOWN, BarycenterProblem
from otloss.solvers.linear_systems import invert, solve_ex


class DebiasedError(NamedTuple):
    """The error as a share of the mass, and the tau that tells it."""

    error: Float[Tensor, "*batch"]
    tau: Float[Tensor, "*batch 1"]


def find_error(equations: Equations, details: HistogramDetails, tolerance: float) -> DebiasedError:
    """Return the least error of all tau, or the first one within the tolerance."""
    shares, has_mass = equations.shares, equations.shares > NUMBERS.no_mass
    excess = (shares * equations.right).sum(-1, keepdim=True) - equations.right
    # An empty bin whose gradient is below the constant gains mass: each iteration multiplies it by about
    # exp(-gradient), until it is about -gradient.
    regrown = torch.minimum(-excess, (shares.log() + (-NUMBERS.patience * excess).clamp(min=0.0)).exp())
    regrown = torch.where(~has_mass & (shares > NUMBERS.judged_mass), regrown, 0.0).amax(-1)
    best = torch.full_like(equations.lack, UNKNOWN)
    best_tau = torch.full_like(shares[..., :1], NUMBERS.taus[0])
    for tau in NUMBERS.taus:
        parts = find_parts(equations, excess, tau, details.hidden_by(tau))
        error = NUMBERS.error_margin * torch.maximum(parts.step + parts.hidden, regrown).clamp(max=UNKNOWN)
        best_tau = torch.where((error < best).unsqueeze(-1), tau, best_tau)
        best = torch.minimum(best, error)
        # At smaller tau steps are longer, so that only the hidden details can become less.
        gains_little = NUMBERS.error_margin * parts.step >= NUMBERS.share_of_step * best
        if bool(((best <= tolerance) | gains_little).all()):
            break
    return DebiasedError(best, best_tau)


class ErrorParts(NamedTuple):
    """The step, and the sum of both parts of hidden details, at one tau."""

    step: Float[Tensor, "*batch"]
    hidden: Float[Tensor, "*batch"]


def find_parts(equations: Equations, excess: Tensor, tau: float, hidden: Tensor) -> ErrorParts:
    """Return the parts of the error at one tau; `hidden` counts the details of the histograms."""
    shares, system, has_mass = equations.shares, equations.system, equations.shares > NUMBERS.no_mass
    # Rounding decides the gradient at bins without mass. A first step finds the bins that empty: they lose more than
    # half of their mass. Only they have a g in the second step.
    excess = torch.where(has_mass, excess.clamp(min=tau), excess.clamp(min=1.0))
    first = solve_with_mass(system + torch.diag_embed(excess), shares, equations.right, equations.lack)
    excess = torch.where(has_mass & ~(first < -0.5), tau, excess)
    inverse = invert(border(system + torch.diag_embed(excess), shares))
    log_a = torch.where(has_mass, equations.log_a, 0.0)
    columns = torch.stack([equations.right, tau * log_a], -1)
    lack = torch.stack([equations.lack, torch.zeros_like(equations.lack)], -1)
    second, of_a = (inverse @ torch.cat([columns, lack.unsqueeze(-2)], -2))[..., :-1, :].unbind(-1)
    # The trace counts the eigenvalues below tau.
    hidden_eigenvalues = tau * torch.where(has_mass, inverse.diagonal(dim1=-2, dim2=-1)[..., :-1], 0.0).sum(-1)
    step, second_step, in_a = ((shares * each.abs()).sum(-1) for each in (first, second, of_a))
    in_p = hidden * hidden_eigenvalues.abs().clamp(max=1.0)
    return ErrorParts(torch.maximum(step, second_step).nan_to_num(UNKNOWN), (in_a + in_p).nan_to_num(UNKNOWN))


@dataclass(frozen=True)
class HistogramDetails:
    """The details of the histograms that the blur may hide.

    Attributes:
        plans: (..., k, n, n), symmetric, with the eigenvalues of B_k.
        roots: (..., k, n), of the masses p_k.
        log_p: (..., k, n), 0 at bins without mass.
        weights: (..., k)
    """

    plans: Float[Tensor, "*batch k n n"]
    roots: Float[Tensor, "*batch k n"]
    log_p: Float[Tensor, "*batch k n"]
    weights: Float[Tensor, "*batch k"]

    @staticmethod
    def build(problem: BarycenterProblem, matrix: Float[Tensor, "n n"]) -> HistogramDetails:
        kernel, p = (-matrix / problem.epsilon).exp(), problem.p / problem.p.sum(-1, keepdim=True)
        d = p.sqrt()
        for _ in range(NUMBERS.iterations_of_plan):
            d = (d * p / (d @ kernel).clamp(min=torch.finfo(p.dtype).tiny)).sqrt()
        plan = d.unsqueeze(-1) * kernel * d.unsqueeze(-2)
        roots = plan.sum(-1).sqrt()
        inverse = (1 / roots).masked_fill(roots == 0, 0.0)
        plans = inverse.unsqueeze(-1) * plan * inverse.unsqueeze(-2)
        return HistogramDetails(plans, roots, p.log().masked_fill(p == 0, 0.0), problem.weights)

    def choose(self, choice: Bool[Tensor, "*batch"]) -> HistogramDetails:
        return HistogramDetails(self.plans[choice], self.roots[choice], self.log_p[choice], self.weights[choice])

    def hidden_by(self, tau: float) -> Float[Tensor, "*batch"]:
        """Return the sums over the bins of what tau hides, as a weighted mean of the histograms."""
        system = self.plans + tau * torch.eye(self.plans.shape[-1], dtype=self.plans.dtype, device=self.plans.device)
        hidden = tau * solve_ex(system, self.roots * self.log_p)[0]
        return (self.weights * (self.roots * hidden.abs()).sum(-1)).sum(-1)
