"""Sinkhorn's two updates of an entropic problem in the log domain, and the error of the marginals.

f = k softmin(g),  g = k softmin(f)        (the notation of `otloss.solvers.entropic`)
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from otloss.costs import Cost
from otloss.solvers.entropic.interface import dtype_of_potentials, log_weights
from otloss.solvers.problem import Problem


@dataclass(frozen=True)
class Updates:
    """The two updates of a problem at one epsilon.

    Attributes:
        problem: the problem, whose graph is not followed.
        transposed: its transposed cost. A matrix is transposed in memory once, and not in every soft minimum.
        log_p, log_q: logarithms of the weights, or in balanced problems of the shares of the mass.
        epsilon: (..., 1); like log_p and log_q in the dtype of the potentials.
        damping: (..., 1), the k of `otloss.solvers.entropic`; 1 for balanced problems.
    """

    problem: Problem
    transposed: Cost
    log_p: Tensor
    log_q: Tensor
    epsilon: Tensor
    damping: Tensor

    def at(self, epsilon: Tensor) -> Updates:
        """Return the updates at another epsilon (...)."""
        width = epsilon.detach().to(self.log_p.dtype).unsqueeze(-1)
        rho = self.problem.marginal_penalty
        damping = torch.ones_like(width) if rho is None else rho / (rho + width)
        return dataclasses.replace(self, epsilon=width, damping=damping)

    def softmin_rows(self, g: Tensor) -> Tensor:
        return self.problem.cost.softmin(g + self.epsilon * self.log_q, self.epsilon.squeeze(-1))

    def softmin_columns(self, f: Tensor) -> Tensor:
        return self.transposed.softmin(f + self.epsilon * self.log_p, self.epsilon.squeeze(-1))

    def f_from(self, g: Tensor) -> Tensor:
        return self.damping * self.softmin_rows(g)

    def g_from(self, f: Tensor) -> Tensor:
        return self.damping * self.softmin_columns(f)

    def error(self, potential: Tensor, updated: Tensor, log_weights: Tensor) -> Tensor:
        """Return the error of one side's marginal before its update: sum |P 1 - t| over sum t.

        t is what the rows of the plan should sum to.
        """
        rho = self.problem.marginal_penalty
        share = torch.softmax(log_weights if rho is None else log_weights - potential / rho, -1)
        relative = ((potential - updated) / (self.damping * self.epsilon)).clamp(max=80.0).expm1().abs()
        return (share * relative).sum(-1)

    def with_best_constant(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return f + t, g - t with the best t, for unbalanced problems, whose dual depends on t."""
        rho = self.problem.marginal_penalty
        if rho is None:
            return f, g
        shift = rho / 2 * log_mass_ratio(self.log_p, self.log_q, f, g, rho)
        return f + shift, g - shift

    def largest_change(self, potential: Tensor, updated: Tensor, log_weights: Tensor) -> Tensor:
        """Return the largest relative change of a factor of the plan by an update, over bins with mass."""
        change = ((updated - potential) / self.epsilon).abs().masked_fill(log_weights == -torch.inf, 0.0)
        return change.amax(-1)


def log_mass_ratio(log_p: Tensor, log_q: Tensor, f: Tensor, g: Tensor, rho: float) -> Float[Tensor, "*batch 1"]:
    """Return log(sum_i p_i exp(-f_i / rho) / sum_j q_j exp(-g_j / rho)), of the masses that rows and columns keep.

    The best constants between f and g are multiples of it: the dual is largest where both masses are equal.
    """
    rows, columns = (
        torch.logsumexp(weights - potential / rho, -1, keepdim=True) for weights, potential in ((log_p, f), (log_q, g))
    )
    return rows - columns


def build_updates(problem: Problem) -> Updates:
    """Return the updates of a problem at its own epsilon."""
    dtype = dtype_of_potentials(problem)
    epsilon = problem.epsilon.to(dtype).unsqueeze(-1)
    p, q = log_weights(problem, dtype)
    return Updates(problem, problem.cost.T.contiguous(), p, q, epsilon, epsilon).at(problem.epsilon)
