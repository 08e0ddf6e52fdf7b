"""The reference implementation of `newton_numba`: Newton's method on the dual, with dense matrices in float64.

The notation is the kernel's: b = g / epsilon, s_p = epsilon / rho_p, k_p = 1 / (1 + s_p), and for all i and j

    f_i = -epsilon k_p log sum_j q_j exp(b_j - C_ij / epsilon)      the exact update from g
    S_ij = q_j exp(b_j - C_ij / epsilon) / sum_l q_l exp(b_l - C_il / epsilon)
    r_i = p_i exp(-f_i / rho_p),  c = S^T r,  t_j = q_j exp(-s_q b_j)
    D(b) = D_p + D_q - sum_i r_i,  D_p = -sum_i r_i / s_p,  D_q = -sum_j t_j / s_q
    D_p = sum_i p_i f_i / epsilon,  D_q = sum_j q_j b_j           on sides that are kept: rho infinite, s = 0, k = 1
    dD / db = t - c,   -d^2 D / db^2 = H = diag(c + s_q t) - k_p S^T diag(r) S

Cells that do not take part have an infinite cost. Nothing but tests calls this file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np


class Plan(NamedTuple):
    """f, the masses r of the rows and c of the columns, what the columns should hold, and the shares of the rows."""

    f: np.ndarray
    r: np.ndarray
    c: np.ndarray
    t: np.ndarray
    shares: np.ndarray

    @property
    def error(self) -> float:
        return float(np.abs(self.t - self.c).sum() / self.t.sum())


@dataclass(frozen=True)
class DenseDual:
    """The dual of one problem as a function of b, with the weights p and q and the costs (n, m)."""

    p: np.ndarray
    q: np.ndarray
    cost: np.ndarray
    epsilon: float
    rho_p: float = math.inf
    rho_q: float = math.inf

    @property
    def is_balanced(self) -> bool:
        return self.rho_p == self.rho_q == math.inf

    @property
    def ratios(self) -> tuple[float, float]:
        """k_p and s_q."""
        return 1 / (1 + self.epsilon / self.rho_p), self.epsilon / self.rho_q

    def plan(self, b: np.ndarray) -> Plan:
        s_p, s_q = self.epsilon / self.rho_p, self.epsilon / self.rho_q
        with np.errstate(divide="ignore"):
            scores = b - self.cost / self.epsilon + np.log(self.q)
        top = scores.max(1, keepdims=True)
        sums = np.exp(scores - top).sum(1)
        f = -self.epsilon / (1 + s_p) * (top[:, 0] + np.log(sums))
        shares, r = np.exp(scores - top) / sums[:, None], self.p * np.exp(-f / self.rho_p)
        return Plan(f, r, shares.T @ r, self.q * np.exp(-s_q * b), shares)

    def value(self, b: np.ndarray) -> float:
        plan, s_p, s_q = self.plan(b), self.epsilon / self.rho_p, self.epsilon / self.rho_q
        rows = -plan.r.sum() / s_p if s_p > 0 else self.p @ plan.f / self.epsilon
        columns = -plan.t.sum() / s_q if s_q > 0 else self.q @ b
        return float(rows + columns - plan.r.sum())

    def curvature(self, b: np.ndarray) -> np.ndarray:
        plan, s_p, s_q = self.plan(b), self.epsilon / self.rho_p, self.epsilon / self.rho_q
        return np.diag(plan.c + s_q * plan.t) - (plan.shares.T * plan.r) @ plan.shares / (1 + s_p)

    def update(self, b: np.ndarray, columns: np.ndarray | None = None) -> np.ndarray:
        """Return b after an exact update from f, in all columns or in the columns of a mask."""
        s_q, f = self.epsilon / self.rho_q, self.plan(b).f
        with np.errstate(divide="ignore"):
            scores = (f[:, None] - self.cost) / self.epsilon + np.log(self.p)[:, None]
        top = scores.max(0)
        exact = -(top + np.log(np.exp(scores - top).sum(0))) / (1 + s_q)
        return np.where(self.q > 0 if columns is None else columns, exact, b)

    def on_cells(self, is_cell: np.ndarray) -> DenseDual:
        return replace(self, cost=np.where(is_cell, self.cost, math.inf))

    def step(self, b: np.ndarray, ridge: float = 1e-13) -> np.ndarray:
        """Return the smallest solution of (H + ridge diag(t)) x = t - c; the null space of H holds the constants."""
        plan = self.plan(b)
        matrix = self.curvature(b) + ridge * np.diag(plan.t)
        return np.linalg.lstsq(matrix, plan.t - plan.c, rcond=None)[0]

    def search(self, b: np.ndarray, x: np.ndarray, remaining: float = 0.5) -> np.ndarray:
        """Return b + x, with x halved while the derivative along it is below minus this share of the first one."""
        plan, length = self.plan(b), 1.0
        first = (plan.t - plan.c) @ x
        while True:
            plan = self.plan(b + length * x)
            if (plan.t - plan.c) @ x >= -remaining * first:
                return b + length * x
            length /= 2

    def solve(self, b: np.ndarray, tolerance: float, max_steps: int = 1000) -> np.ndarray:
        """Return b with an error of at most the tolerance: updates of both sides, steps and searches."""
        for _ in range(max_steps):
            b = self.update(b)
            if self.plan(b).error <= tolerance:
                return b
            b = self.search(b, self.step(b))
        raise RuntimeError(f"Newton's method has an error of {self.plan(b).error:.1e} after {max_steps} steps")


def solve_in_stages(dual: DenseDual, tolerance: float, factor: float = 4.0) -> np.ndarray:
    """Return b for the tolerance, from zeros and a sequence of epsilons that falls from the largest cost."""
    stages = max(0, math.ceil(math.log(dual.cost.max() / dual.epsilon, factor)))
    g = np.zeros_like(dual.q)
    for stage in range(stages, -1, -1):
        width = dual.epsilon * factor**stage
        g = width * replace(dual, epsilon=width).solve(g / width, tolerance if stage == 0 else 1e-2)
    return g / dual.epsilon
