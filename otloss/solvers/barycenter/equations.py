"""Newton steps on the equations of a barycenter, which also give its derivatives.

At the barycenter the gradient in a, `sum_k w_k log u_k - log d`, is constant. With `tau log a` added it is so for a
barycenter near it; that keeps the equations regular, and gives bins without mass none. With P_k the plans,
M_k = (P_k / a) (P_k / p_k)^T and B = d K d / a, whose rows sum to one, a step is

    (I - M_k) dlog u_k = dlog a - (log(u_k K v_k) - log a),   dlog a = (I + B) dlog d,
    sum_k w_k dlog u_k - dlog d + tau dlog a = constant - (sum_k w_k log u_k - log d + tau log a)

and the mass of a is that of the histograms. Plain barycenters have no d and no tau. Derivatives hold at bins with a
share of the mass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from otloss.solvers.barycenter.problem import NUMBERS, BarycenterProblem, Potentials


class NewtonStep(NamedTuple):
    """log a and the changes of a step; log_a and by_a have a graph in p, the weights and the cost matrix."""

    log_a: Float[Tensor, "*batch n"]
    by_a: Float[Tensor, "*batch n"]
    by_u: Float[Tensor, "*batch k n"]
    by_d: Float[Tensor, "*batch n"]
    rows: Rows


class Rows(NamedTuple):
    """The equations of the log u_k."""

    sums: Float[Tensor, "*batch k n"]  # log(u_k K v_k), with a graph
    matrix: Float[Tensor, "*batch k n n"]  # I - M_k and the shares of a in each row, which fix a constant of log u_k
    inverse: Float[Tensor, "*batch k n n"]
    remainder: Float[Tensor, "*batch k n n"]  # identity minus inverse, which the system sums with less rounding


def find_newton_step(problem: BarycenterProblem, matrix: Tensor, at: Potentials, tau: Tensor) -> NewtonStep:
    """Return the step from the potentials at tau (..., 1)."""
    weights = problem.weights.unsqueeze(-1)
    shares = torch.softmax(at.log_a.detach(), -1)
    misfit, log_a, by_d = (weights * at.log_u).sum(-2), at.log_a, None
    if problem.debiased:
        log_a, among = find_debiased_equations(problem, matrix, at)
        misfit = misfit - at.log_d + tau * log_a
        shares = torch.softmax(log_a.detach(), -1)
    rows = find_rows(problem, matrix, at, shares)
    off = rows.sums - log_a.unsqueeze(-2)
    off = torch.where((shares > NUMBERS.no_mass).unsqueeze(-2), off, off.detach())

    eye = torch.eye(log_a.shape[-1], dtype=log_a.dtype, device=log_a.device)
    by_row = eye - rows.remainder
    fixed = problem.weights.detach()[..., None, None]
    if problem.debiased:
        remainder_of_d = among @ torch.linalg.inv_ex(eye + among).inverse
        by_d = eye - remainder_of_d
        system = remainder_of_d - (fixed * rows.remainder).sum(-3) + tau.unsqueeze(-1) * eye
    else:
        system = (fixed * by_row).sum(-3)
    right = (weights.detach() * (by_row @ off.unsqueeze(-1)).squeeze(-1)).sum(-2) - misfit
    lack = problem.mass / log_a.exp().sum(-1) - 1
    by_a = solve_with_mass(system, shares, right, lack)
    by_u = (by_row @ (by_a.unsqueeze(-2) - off).unsqueeze(-1)).squeeze(-1)
    return NewtonStep(log_a, by_a, by_u, by_a if by_d is None else (by_d @ by_a.unsqueeze(-1)).squeeze(-1), rows)


def find_rows(problem: BarycenterProblem, matrix: Tensor, at: Potentials, shares: Tensor) -> Rows:
    p, log_k, change = problem.p, -matrix.detach() / problem.epsilon, attach_graph(problem, matrix)
    log_v = -torch.logsumexp(log_k.mT + at.log_u.unsqueeze(-2), -1)  # of p = 1: empty bins have derivatives too
    scaled = at.log_u.unsqueeze(-1) + log_v.unsqueeze(-2) + log_k
    log_rows = torch.logsumexp(scaled + p.detach().log().unsqueeze(-2), -1)
    ratio, plan = (scaled + change).exp(), (scaled - log_rows.unsqueeze(-1) + change).exp()
    sums = log_rows + (plan @ (p / ratio.sum(-2)).unsqueeze(-1)).squeeze(-1).log()
    moved = ((plan.detach() * p.detach().unsqueeze(-2)) @ ratio.detach().mT).neg_().add_(shares[..., None, None, :])
    matrix = moved + torch.eye(moved.shape[-1], dtype=moved.dtype, device=moved.device)
    inverse = torch.linalg.inv_ex(matrix).inverse
    return Rows(sums, matrix, inverse, moved @ inverse)


def find_debiased_equations(problem: BarycenterProblem, matrix: Tensor, at: Potentials) -> tuple[Tensor, Tensor]:
    """Return log a = log(d K d), with a graph, and B."""
    log_k = -matrix.detach() / problem.epsilon
    log_kd = torch.logsumexp(log_k + at.log_d.unsqueeze(-2), -1)
    among = (log_k + at.log_d.unsqueeze(-2) - log_kd.unsqueeze(-1) + attach_graph(problem, matrix)).exp()
    return at.log_d + log_kd + among.sum(-1).log(), among.detach()


def attach_graph(problem: BarycenterProblem, matrix: Tensor) -> Tensor:
    """Return zeros whose derivatives are those of -C / epsilon."""
    return (matrix.detach() - matrix) / problem.epsilon


def solve_with_mass(system: Tensor, shares: Tensor, right: Tensor, lack: Tensor) -> Tensor:
    """Return the x, and drop the constant, of system x + constant = right and shares x = lack."""
    system = torch.cat([system, torch.ones_like(system[..., :1])], -1)
    system = torch.cat([system, torch.nn.functional.pad(shares, (0, 1)).unsqueeze(-2)], -2)
    return torch.linalg.solve_ex(system, torch.cat([right, lack.unsqueeze(-1)], -1)).result[..., :-1]
