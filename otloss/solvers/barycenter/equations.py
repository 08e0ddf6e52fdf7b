"""Newton steps on the equations of a barycenter, which also give its derivatives.

At the barycenter the gradient in a, `sum_k w_k log u_k - log d`, is constant. With `tau log a` added it is so for a
barycenter near it; that keeps the equations regular, and gives bins without mass none. With P_k the plans,
M_k = (P_k / a) (P_k / p_k)^T and B = d K d / a, whose rows sum to one, a step is

    (I - M_k) dlog u_k = dlog a - (log(u_k K v_k) - log a),   dlog a = (I + B) dlog d,
    sum_k w_k dlog u_k - dlog d + tau dlog a = constant - (sum_k w_k log u_k - log d + tau log a)

and a keeps the mass of the histograms. Plain barycenters have no d and no tau. Derivatives hold at bins with a share
of the mass. The step of `entropic.equations.dual` does not serve here: it has one plan and fixed marginals, and a is
unknown.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from otloss.solvers.barycenter.problem import NUMBERS, BarycenterProblem, Potentials
from otloss.solvers.linear_systems import invert, solve_ex


class Equations(NamedTuple):
    """The linear equations of a step at tau = 0; log_a and right have a graph in p, the weights and the cost matrix."""

    log_a: Float[Tensor, "*batch n"]
    shares: Float[Tensor, "*batch n"]  # each bin's share of the mass of a
    system: Float[Tensor, "*batch n n"]  # the derivative of the gradient in log a
    right: Float[Tensor, "*batch n"]
    lack: Float[Tensor, "*batch"]  # the missing share of the mass
    rows: Rows
    off: Float[Tensor, "*batch k n"]  # log(u_k K v_k) - log a
    d_by_a: Float[Tensor, "*batch n n"] | None  # the derivative of log d in log a, where there is a d


class Rows(NamedTuple):
    """The equations of the log u_k."""

    sums: Float[Tensor, "*batch k n"]  # log(u_k K v_k), with a graph
    matrix: Float[Tensor, "*batch k n n"]  # I - M_k and the shares of a in each row, which fix a constant of log u_k
    inverse: Float[Tensor, "*batch k n n"]
    remainder: Float[Tensor, "*batch k n n"]  # identity minus inverse, which the system sums with less rounding


class NewtonStep(NamedTuple):
    """The changes of a step; by_a has a graph."""

    by_a: Float[Tensor, "*batch n"]
    by_u: Float[Tensor, "*batch k n"]
    by_d: Float[Tensor, "*batch n"]


def linearise(problem: BarycenterProblem, matrix: Tensor, at: Potentials) -> Equations:
    """Return the equations at the potentials."""
    weights = problem.weights.unsqueeze(-1)
    misfit, log_a, d_by_a = (weights * at.log_u).sum(-2), at.log_a, None
    if problem.debiased:
        log_a, among = find_debiased_equations(problem, matrix, at)
        misfit = misfit - at.log_d
    shares = torch.softmax(log_a.detach(), -1)
    rows = find_rows(problem, matrix, at, shares)
    off = rows.sums - log_a.unsqueeze(-2)
    off = torch.where((shares > NUMBERS.no_mass).unsqueeze(-2), off, off.detach())

    eye = torch.eye(log_a.shape[-1], dtype=log_a.dtype, device=log_a.device)
    by_row = eye - rows.remainder
    fixed = problem.weights.detach()[..., None, None]
    if problem.debiased:
        remainder_of_d = among @ invert(eye + among)
        d_by_a = eye - remainder_of_d
        system = remainder_of_d - (fixed * rows.remainder).sum(-3)
    else:
        system = (fixed * by_row).sum(-3)
    right = (weights.detach() * (by_row @ off.unsqueeze(-1)).squeeze(-1)).sum(-2) - misfit
    lack = problem.mass / log_a.exp().sum(-1) - 1
    return Equations(log_a, shares, system, right, lack, rows, off, d_by_a)


def find_newton_step(equations: Equations, tau: Tensor | None = None) -> NewtonStep:
    """Return the step at tau (..., 1); plain barycenters have no tau."""
    system, right = equations.system, equations.right
    if tau is not None:
        system, right = system + torch.diag_embed(tau.expand(right.shape)), right - tau * equations.log_a
    return complete_step(equations, solve_with_mass(system, equations.shares, right, equations.lack))


def complete_step(equations: Equations, by_a: Tensor) -> NewtonStep:
    """Return the step that changes log a by by_a."""
    changes = by_a.unsqueeze(-2) - equations.off
    by_u = changes - (equations.rows.remainder @ changes.unsqueeze(-1)).squeeze(-1)
    by_d = by_a if equations.d_by_a is None else (equations.d_by_a @ by_a.unsqueeze(-1)).squeeze(-1)
    return NewtonStep(by_a, by_u, by_d)


def find_rows(problem: BarycenterProblem, matrix: Tensor, at: Potentials, shares: Tensor) -> Rows:
    p, log_k, change = problem.p, -matrix.detach() / problem.epsilon, attach_graph(problem, matrix)
    log_v = -torch.logsumexp(log_k.mT + at.log_u.unsqueeze(-2), -1)  # as for p = 1: empty bins have derivatives too
    scaled = at.log_u.unsqueeze(-1) + log_v.unsqueeze(-2) + log_k
    log_rows = torch.logsumexp(scaled + p.detach().log().unsqueeze(-2), -1)
    ratio, plan = (scaled + change).exp(), (scaled - log_rows.unsqueeze(-1) + change).exp()
    sums = log_rows + (plan @ (p / ratio.sum(-2)).unsqueeze(-1)).squeeze(-1).log()
    moved = ((plan.detach() * p.detach().unsqueeze(-2)) @ ratio.detach().mT).neg_().add_(shares[..., None, None, :])
    matrix = moved + torch.eye(moved.shape[-1], dtype=moved.dtype, device=moved.device)
    inverse = invert(matrix)
    return Rows(sums, matrix, inverse, moved @ inverse)


def find_debiased_equations(problem: BarycenterProblem, matrix: Tensor, at: Potentials) -> tuple[Tensor, Tensor]:
    """Return log a = log(d K d), with a graph, and B."""
    log_k = -matrix.detach() / problem.epsilon
    log_kd = torch.logsumexp(log_k + at.log_d.unsqueeze(-2), -1)
    among = (log_k + at.log_d.unsqueeze(-2) - log_kd.unsqueeze(-1) + attach_graph(problem, matrix)).exp()
    return at.log_d + log_kd + among.sum(-1).log(), among.detach()


def attach_graph(problem: BarycenterProblem, matrix: Tensor) -> Tensor:
    """Return zeros with the derivatives of -C / epsilon."""
    return (matrix.detach() - matrix) / problem.epsilon


def solve_with_mass(system: Tensor, shares: Tensor, right: Tensor, lack: Tensor) -> Tensor:
    """Return the x, and drop the constant, of system x + constant = right and shares x = lack."""
    return solve_ex(border(system, shares), torch.cat([right, lack.unsqueeze(-1)], -1))[0][..., :-1]


def border(system: Tensor, shares: Tensor) -> Tensor:
    """Return the matrix of system x + constant = right and shares x = lack."""
    system = torch.cat([system, torch.ones_like(system[..., :1])], -1)
    return torch.cat([system, torch.nn.functional.pad(shares, (0, 1)).unsqueeze(-2)], -2)
