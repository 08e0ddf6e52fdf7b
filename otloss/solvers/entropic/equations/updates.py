"""Sinkhorn's two updates of an entropic problem in the log domain, and the error of the marginals.

f = k_p softmin(g),  g = k_q softmin(f)        (the notation of `otloss.solvers.entropic`)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from otloss.costs import Cost
from otloss.solvers.entropic.arithmetic import dtype_of_potentials, log_weights
from otloss.solvers.options import BOTH_KEPT, MarginalPenalty, is_kept
from otloss.solvers.problem import Problem


@dataclass(frozen=True)
class Updates:
    """The two updates of a problem at one epsilon.

    Attributes:
        problem: the problem, whose graph is not followed.
        transposed: its transposed cost. A matrix is transposed in memory once, and not in every soft minimum.
        log_p, log_q: logarithms of the weights, or in balanced problems of the shares of the mass.
        epsilon: (..., 1); like log_p and log_q in the dtype of the potentials.
        penalty: rho_p and rho_q, infinite in balanced problems.
        damping: the k_p and k_q of `otloss.solvers.entropic`, (..., 1) or numbers; 1 in balanced problems.
        softmins: of the cost and of its transpose, at this epsilon.
    """

    problem: Problem
    transposed: Cost
    log_p: Tensor
    log_q: Tensor
    epsilon: Tensor
    penalty: MarginalPenalty
    damping: tuple[Tensor | float, Tensor | float] = (1.0, 1.0)
    softmins: tuple[Callable[[Tensor], Tensor], ...] = ()

    def at(self, epsilon: Tensor) -> Updates:
        """Return the updates at another epsilon (...)."""
        epsilon = epsilon.detach().to(self.log_p.dtype)
        rows = self.problem.cost.softmin_at(epsilon)
        columns = rows if self.transposed is self.problem.cost else self.transposed.softmin_at(epsilon)
        width = epsilon.unsqueeze(-1)
        damping = damping_of(self.penalty, width)
        return dataclasses.replace(self, epsilon=width, damping=damping, softmins=(rows, columns))

    def softmin_rows(self, g: Tensor) -> Tensor:
        return self.softmins[0](g + self.epsilon * self.log_q)

    def softmin_columns(self, f: Tensor) -> Tensor:
        return self.softmins[1](f + self.epsilon * self.log_p)

    def f_from(self, g: Tensor) -> Tensor:
        return self.damping[0] * self.softmin_rows(g)

    def g_from(self, f: Tensor) -> Tensor:
        return self.damping[1] * self.softmin_columns(f)

    def error_of_rows(self, f: Tensor, updated: Tensor) -> Tensor:
        """Return the error of the rows before the update of f: sum |P 1 - t| over sum t, t what they should sum to."""
        return self._error(f, updated, self.log_p, self.penalty.p, self.damping[0])

    def error_of_columns(self, g: Tensor, updated: Tensor) -> Tensor:
        return self._error(g, updated, self.log_q, self.penalty.q, self.damping[1])

    def _error(
        self, potential: Tensor, updated: Tensor, log_weights: Tensor, rho: Tensor | float, damping: Tensor | float
    ) -> Tensor:
        share = _shares(potential, log_weights, rho)
        relative = ((potential - updated) / (damping * self.epsilon)).clamp(max=80.0).expm1().abs()
        return (share * relative).sum(-1)

    def share_of_columns(self, g: Tensor) -> Tensor:
        """Return what the columns should sum to, over the sum of that."""
        return _shares(g, self.log_q, self.penalty.q)

    def with_best_constant(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return f + t, g - t with the best t, for unbalanced problems, whose dual depends on t."""
        if self.problem.marginal_penalty is None:
            return f, g
        shift = self.penalty.of_constant * log_mass_ratio(self.log_p, self.log_q, f, g, self.penalty)
        return f + shift, g - shift

    def largest_change(self, potential: Tensor, updated: Tensor, log_weights: Tensor) -> Tensor:
        """Return the largest relative change of a factor of the plan by an update, over bins with mass."""
        change = ((updated - potential) / self.epsilon).abs().masked_fill(log_weights == -torch.inf, 0.0)
        return change.amax(-1)


def _shares(potential: Tensor, log_weights: Tensor, rho: Tensor | float) -> Tensor:
    return torch.softmax(log_weights if is_kept(rho) else log_weights - potential / rho, -1)


def damping_of(penalty: MarginalPenalty, epsilon: Tensor) -> tuple[Tensor | float, Tensor | float]:
    """Return k_p and k_q."""
    k_p = 1.0 if is_kept(penalty.p) else penalty.p / (penalty.p + epsilon)
    if penalty.q is penalty.p:
        return k_p, k_p
    return k_p, 1.0 if is_kept(penalty.q) else penalty.q / (penalty.q + epsilon)


def log_mass_ratio(
    log_p: Tensor, log_q: Tensor, f: Tensor, g: Tensor, penalty: MarginalPenalty
) -> Float[Tensor, "*batch 1"]:
    """Return log(sum_i p_i exp(-f_i / rho_p) / sum_j q_j exp(-g_j / rho_q)), of the masses that rows and columns keep.

    The best constants between f and g are multiples of it: the dual is largest where both masses are equal.
    """
    rows, columns = (
        torch.logsumexp(weights - potential / rho, -1, keepdim=True)
        for weights, potential, rho in ((log_p, f, penalty.p), (log_q, g, penalty.q))
    )
    return rows - columns


def build_updates(problem: Problem) -> Updates:
    """Return the updates of a problem at its own epsilon."""
    dtype = dtype_of_potentials(problem)
    epsilon = problem.epsilon.to(dtype).unsqueeze(-1)
    p, q = log_weights(problem, dtype)
    penalty = problem.marginal_penalty or BOTH_KEPT
    penalty = penalty.map(lambda rho: rho.to(dtype))
    return Updates(problem, problem.cost.T.contiguous(), p, q, epsilon, penalty).at(problem.epsilon)
