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

from otloss.solvers.barycenter.equations import DenseProblem, Equations, border, multiply, solve_with_mass
from otloss.solvers.barycenter.problem import NUMBERS, UNKNOWN, Array


class DebiasedError(NamedTuple):
    """The error (...) as a share of the mass, and the tau (..., 1) that tells it."""

    error: Array
    tau: Array


def find_error(details: HistogramDetails, equations: Equations, tolerance: float) -> DebiasedError:
    """Return the least error of all tau, or the first one within the tolerance."""
    xp, shares = details.problem.xp, equations.shares
    excess = (shares * equations.right).sum(-1)[..., None] - equations.right
    # An empty bin whose gradient is below the constant gains mass: each iteration multiplies it by about
    # exp(-gradient), until it is about -gradient.
    regrown = xp.minimum(-excess, shares * xp.exp((-NUMBERS.patience * excess).clip(0.0, -NUMBERS.smallest_exponent)))
    is_empty = (shares <= NUMBERS.no_mass) & (shares > NUMBERS.compared_mass)
    regrown = xp.amax(xp.where(is_empty, regrown, 0.0), -1)
    best = xp.full_like(equations.lack, UNKNOWN)
    best_tau = xp.full_like(shares[..., :1], NUMBERS.taus[0])
    for tau in NUMBERS.taus:
        parts = find_parts(details, equations, excess, tau)
        error = NUMBERS.error_margin * xp.maximum(parts.step + parts.hidden, regrown)
        error = xp.where(error < UNKNOWN, error, UNKNOWN)  # also where it is NaN
        best_tau = xp.where((error < best)[..., None], tau, best_tau)
        best = xp.minimum(best, error)
        # At smaller tau steps are longer, so that only the hidden details can become less.
        gains_little = ~(NUMBERS.error_margin * parts.step < NUMBERS.share_of_step * best)
        if ((best <= tolerance) | gains_little).all():
            break
    return DebiasedError(best, best_tau)


class ErrorParts(NamedTuple):
    """The step, and the sum of both parts of hidden details, at one tau."""

    step: Array
    hidden: Array


def find_parts(details: HistogramDetails, equations: Equations, excess: Array, tau: float) -> ErrorParts:
    """Return the parts of the error at one tau."""
    problem, xp = details.problem, details.problem.xp
    shares, system, has_mass = equations.shares, equations.system, equations.shares > NUMBERS.no_mass
    # Rounding decides the gradient at bins without mass. A first step finds the bins that empty: they lose more than
    # half of their mass. Only they have a g in the second step.
    excess = xp.where(has_mass, excess.clip(min=tau), excess.clip(min=1.0))
    ridge = excess[..., None] * problem.eye
    first = solve_with_mass(problem, system + ridge, shares, equations.right, equations.lack)
    ridge = xp.where(has_mass & ~(first < -0.5), tau, excess)[..., None] * problem.eye
    inverse = problem.invert(border(xp, system + ridge, shares))
    log_a = xp.where(has_mass, equations.log_a, 0.0)
    second = multiply(inverse, xp.concatenate([equations.right, equations.lack[..., None]], -1))[..., :-1]
    of_a = tau * multiply(inverse[..., :-1, :-1], log_a)
    # The trace counts the eigenvalues below tau.
    trace = (xp.where(has_mass[..., None], inverse[..., :-1, :-1], 0.0) * problem.eye).sum(-1).sum(-1)
    step, second_step, in_a = ((shares * abs(each)).sum(-1) for each in (first, second, of_a))
    in_p = details.hidden_by(tau) * abs(tau * trace).clip(max=1.0)
    return ErrorParts(xp.maximum(step, second_step), in_a + in_p)


@dataclass(frozen=True)
class HistogramDetails:
    """The details of the histograms that the blur may hide.

    Attributes:
        plans: (..., k, n, n), symmetric, with the eigenvalues of B_k.
        roots: (..., k, n), of the masses p_k.
        log_p: (..., k, n), 0 at bins without mass.
    """

    problem: DenseProblem
    plans: Array
    roots: Array
    log_p: Array

    @staticmethod
    def build(problem: DenseProblem) -> HistogramDetails:
        xp, p = problem.xp, problem.p / problem.p.sum(-1)[..., None]
        kernel, d = xp.exp(problem.log_k), xp.sqrt(p)
        for _ in range(NUMBERS.iterations_of_plan):
            d = xp.sqrt(d * p / (d @ kernel).clip(min=NUMBERS.tiny))
        plans = d[..., None] * kernel * d[..., None, :]
        roots = xp.sqrt(plans.sum(-1))
        inverse = xp.where(roots > 0, 1 / roots.clip(min=NUMBERS.tiny), 0.0)
        log_p = xp.where(p > 0, xp.log(p.clip(min=NUMBERS.tiny)), 0.0)
        return HistogramDetails(problem, inverse[..., None] * plans * inverse[..., None, :], roots, log_p)

    def choose(self, choice: Array) -> HistogramDetails:
        parts = (t[choice] for t in (self.plans, self.roots, self.log_p))
        return HistogramDetails(self.problem.choose(choice), *parts)

    def hidden_by(self, tau: float) -> Array:
        """Return the sums over the bins of what tau hides, as a weighted mean of the histograms."""
        hidden = tau * self.problem.solve(self.plans + tau * self.problem.eye, self.roots * self.log_p)
        return (self.problem.weights * (self.roots * abs(hidden)).sum(-1)).sum(-1)
