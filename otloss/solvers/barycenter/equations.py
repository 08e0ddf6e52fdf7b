"""Newton steps on the equations of a barycenter, which also give its derivatives.

At the barycenter the gradient in a, `sum_k w_k log u_k - log d`, is constant. With `tau log a` added it is so for a
barycenter near it; that keeps the equations regular, and gives bins without mass none. With P_k the plans,
M_k = (P_k / a) (P_k / p_k)^T and B = d K d / a, whose rows sum to one, a step is

    (I - M_k) dlog u_k = dlog a - (log(u_k K v_k) - log a),   dlog a = (I + B) dlog d,
    sum_k w_k dlog u_k - dlog d + tau dlog a = constant - (sum_k w_k log u_k - log d + tau log a)

and a keeps the mass of the histograms. Plain barycenters have no d and no tau. The step of `entropic.equations.dual`
does not serve here: it has one plan and fixed marginals, and a is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from otloss.solvers import linear_systems
from otloss.solvers.barycenter.problem import NUMBERS, Array, BarycenterProblem, Potentials, from_tensor, to_tensor


@dataclass(frozen=True)
class DenseProblem:
    """A problem in arrays, with the matrix log K = -C / epsilon (n, m), and the identity of its rows."""

    xp: Any
    debiased: bool
    p: Array
    log_p: Array
    weights: Array
    log_k: Array
    eye: Array

    @staticmethod
    def build(problem: BarycenterProblem, xp: Any) -> DenseProblem:
        log_k = problem.cost.dense() / -problem.epsilon
        eye = torch.eye(len(log_k), dtype=log_k.dtype, device=log_k.device)
        arrays = problem.p, problem.p.log(), problem.weights, log_k, eye
        return DenseProblem(xp, problem.debiased, *(from_tensor(xp, t) for t in arrays))

    @property
    def mass(self) -> Array:
        return self.p.sum(-1).sum(-1) / self.p.shape[-2]

    def choose(self, choice: Array) -> DenseProblem:
        return replace(self, p=self.p[choice], log_p=self.log_p[choice], weights=self.weights[choice])

    def invert(self, matrix: Array) -> Array:
        """Return the inverses, by torch: numpy raises an error where one of the matrices is singular."""
        return from_tensor(self.xp, linear_systems.invert(to_tensor(matrix)))

    def solve(self, matrix: Array, right: Array) -> Array:
        return from_tensor(self.xp, linear_systems.solve_ex(to_tensor(matrix), to_tensor(right))[0])


class Equations(NamedTuple):
    """The linear equations of a step at tau = 0.

    Attributes:
        log_a: (..., n)
        shares: (..., n), of each bin in the mass of a.
        system: (..., n, n), the derivative of the gradient in log a.
        right: (..., n)
        lack: (...), the missing share of the mass.
        log_ratios: (..., k, n), log(u_k K v_k) - log a.
        remainder: (..., k, n, n), the identity minus the inverse of I - M_k with the shares of a added to each row,
            which fix a constant of log u_k. The system sums it with less rounding than the inverse.
        columns, rows: (..., k, m, n) and (..., k, n, m), the plans over p_k, and over their sums.
        among: (..., n, n), B, where there is a d.
        d_by_a: (..., n, n), the derivative of log d in log a.
    """

    log_a: Array
    shares: Array
    system: Array
    right: Array
    lack: Array
    log_ratios: Array
    remainder: Array
    columns: Array
    rows: Array
    among: Array | None
    d_by_a: Array | None


class NewtonStep(NamedTuple):
    """The changes of log a (..., n), log u (..., k, n) and log d (..., n) by a step."""

    by_a: Array
    by_u: Array
    by_d: Array


def linearise(problem: DenseProblem, at: Potentials, *, ridge: float = NUMBERS.ridge) -> Equations:
    """Return the equations at the potentials."""
    xp, weights, eye = problem.xp, problem.weights[..., None], problem.eye
    gradient, log_a, among, d_by_a = (weights * at.log_u).sum(-2), at.log_a, None, None
    if problem.debiased:
        among, log_kd = softmax(xp, problem.log_k + at.log_d[..., None, :])
        log_a, gradient = at.log_d + log_kd, gradient - at.log_d
    shares, log_mass = softmax(xp, log_a)

    log_columns = problem.log_k.T + at.log_u[..., None, :]
    columns, log_sums = softmax(xp, log_columns)
    # For empty bins, by logarithms.
    rows, log_masses = softmax(xp, (log_columns + (problem.log_p - log_sums)[..., None]).swapaxes(-1, -2))
    log_ratios = log_masses - log_a[..., None, :]
    moved = shares[..., None, None, :] - rows @ columns
    # The ridge decides what rounding would where plans fall into parts that hardly exchange mass: 138 in place of 132
    # of 152 hostile debiased problems converge to 1e-5, and the derivatives of plain ones are right there.
    remainder = moved @ problem.invert((1 + ridge) * eye + moved)
    system = -(weights[..., None] * remainder).sum(-3)
    if among is None:
        system = eye + system
    else:
        remainder_of_d = among @ problem.invert(eye + among)
        system, d_by_a = remainder_of_d + system, eye - remainder_of_d
    right = (weights * (log_ratios - multiply(remainder, log_ratios))).sum(-2) - gradient
    lack = problem.mass / xp.exp(log_mass) - 1
    return Equations(log_a, shares, system, right, lack, log_ratios, remainder, columns, rows, among, d_by_a)


def find_newton_step(problem: DenseProblem, equations: Equations, tau: Array | None = None) -> NewtonStep:
    """Return the step at tau (..., 1); plain barycenters have no tau."""
    system, right = equations.system, equations.right
    if tau is not None:
        system, right = system + tau[..., None] * problem.eye, right - tau * equations.log_a
    return complete_step(equations, solve_with_mass(problem, system, equations.shares, right, equations.lack))


def complete_step(equations: Equations, by_a: Array) -> NewtonStep:
    """Return the step that changes log a by by_a."""
    changes = by_a[..., None, :] - equations.log_ratios
    by_d = by_a if equations.d_by_a is None else multiply(equations.d_by_a, by_a)
    return NewtonStep(by_a, changes - multiply(equations.remainder, changes), by_d)


def solve_with_mass(problem: DenseProblem, system: Array, shares: Array, right: Array, lack: Array) -> Array:
    """Return the x, and drop the constant, of system x + constant = right and shares x = lack."""
    right = problem.xp.concatenate([right, lack[..., None]], -1)
    return problem.solve(border(problem.xp, system, shares), right)[..., :-1]


def border(xp: Any, system: Array, shares: Array) -> Array:
    """Return the matrix of system x + constant = right and shares x = lack."""
    ones = xp.ones_like(shares)[..., None]
    last = xp.concatenate([shares, 0 * shares[..., :1]], -1)[..., None, :]
    return xp.concatenate([xp.concatenate([system, ones], -1), last], -2)


def iterate_densely(problem: DenseProblem, at: Potentials) -> Potentials:
    """Return the potentials after one plain iteration (`iteration`) of a debiased problem."""
    log_v = problem.log_p - softmax(problem.xp, problem.log_k.T + at.log_u[..., None, :])[1]
    log_kv = softmax(problem.xp, problem.log_k + log_v[..., None, :])[1]
    log_a = at.log_d + (problem.weights[..., None] * log_kv).sum(-2)
    log_kd = softmax(problem.xp, problem.log_k + at.log_d[..., None, :])[1]
    return Potentials(log_a[..., None, :] - log_kv, (at.log_d + log_a - log_kd) / 2, log_a)


def softmax(xp: Any, logits: Array) -> tuple[Array, Array]:
    """Return the softmax over the last axis, and the logarithm of the sum of exp."""
    largest = xp.amax(logits, -1)[..., None]
    shares = xp.exp(logits - largest)
    total = shares.sum(-1)[..., None]
    return shares / total, (largest + xp.log(total))[..., 0]


def multiply(matrix: Array, x: Array) -> Array:
    return (matrix @ x[..., None])[..., 0]
