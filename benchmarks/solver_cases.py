"""Transport problems of the solvers benchmark, and the duality gap that measures the accuracy of every contestant.

The entropic problem is `min <C, P> + epsilon KL(P | p q^T)` over plans with marginals p and q. The result of a
contestant is turned into a plan, and the plan into one with the right marginals (rows scaled down, then columns, then
the missing mass added as a product: J. Altschuler, J. Weed, P. Rigollet, Near-linear time approximation algorithms for
optimal transport via Sinkhorn iteration, 2017, algorithm 2). Its objective minus the dual objective at accurate
potentials is the gap. The dual objective bounds the optimum from below at any potentials, so an error of ours cannot
make a gap smaller than it is. All of it is numpy in float64, independent of the library.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import xlogy
from torch import Tensor

import otloss

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Problems:
    """A batch in float32: p (B, n), q (B, m), cost (B, n, m) from about 0 to 1."""

    p: Tensor
    q: Tensor
    cost: Tensor

    @staticmethod
    def random(batch: int, n: int, *, dim: int = 2, seed: int = 0, uniform: bool = False) -> Problems:
        """Squared distances between points in a unit cube; weights uniform in (0.05, 1.05), then scaled to sum 1."""
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.rand(batch, n, dim, generator=generator) for _ in range(2))
        cost = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square()
        p, q = (torch.rand(batch, n, generator=generator) + 0.05 for _ in range(2))
        if uniform:
            p, q = torch.ones_like(p), torch.ones_like(q)
        return Problems(
            p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True), cost / cost.amax((-2, -1), keepdim=True)
        )

    def arrays(self) -> Arrays:
        """p, q and the cost in float64, the masses exactly one."""
        p, q = (w.double().numpy() for w in (self.p, self.q))
        return p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True), self.cost.double().numpy()

    def with_gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.p.clone().requires_grad_(), self.q.clone().requires_grad_(), self.cost.clone().requires_grad_()


def rounded(plan: np.ndarray, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """A plan (..., n, m) with its marginals corrected."""
    with np.errstate(divide="ignore", invalid="ignore"):
        plan = plan * np.fmin(1.0, p / plan.sum(-1))[..., None]
        plan = plan * np.fmin(1.0, q / plan.sum(-2))[..., None, :]
    # Rounding leaves -1e-17.
    missing_p, missing_q = np.maximum(p - plan.sum(-1), 0.0), np.maximum(q - plan.sum(-2), 0.0)
    missing = np.maximum(missing_p.sum(-1), np.finfo(float).tiny)[..., None, None]
    return plan + missing_p[..., None] * missing_q[..., None, :] / missing


def objective(plan: np.ndarray, arrays: Arrays, epsilon: float) -> np.ndarray:
    """<C, P> + epsilon KL(P | p q^T) of plans with the right marginals."""
    p, q, cost = arrays
    entropy = xlogy(plan, plan).sum((-2, -1)) - xlogy(p, p).sum(-1) - xlogy(q, q).sum(-1)
    return (cost * plan).sum((-2, -1)) + epsilon * entropy


def plan_of(f: Tensor | np.ndarray, g: Tensor | np.ndarray, arrays: Arrays, epsilon: float) -> np.ndarray:
    """P = p q^T exp((f + g - C) / epsilon)."""
    p, q, cost = arrays
    f, g = (np.asarray(t, dtype=np.float64) for t in (f, g))
    return p[..., None] * q[..., None, :] * np.exp((f[..., None] + g[..., None, :] - cost) / epsilon)


class Gaps:
    """Relative duality gaps for one batch of problems at one epsilon.

    Attributes:
        dual: (B,), the dual objective at potentials solved to a marginal error of `tolerance`.
        own: (B,), the relative gaps of those potentials: the error of this measure itself.
    """

    def __init__(self, problems: Problems, epsilon: float, *, tolerance: float = 1e-9) -> None:
        self.arrays, self.epsilon = problems.arrays(), epsilon
        solution = otloss.solve(
            *map(torch.from_numpy, self.arrays), epsilon=epsilon, tolerance=tolerance, max_iterations=1_000_000
        )
        f, g = (t.detach().numpy() for t in solution.potentials)
        plan = plan_of(f, g, self.arrays, epsilon)
        p, q, _ = self.arrays
        self.dual = (f * p).sum(-1) + (g * q).sum(-1) - epsilon * (plan.sum((-2, -1)) - 1)
        self.own = self.of(plan)

    def of(self, plan: np.ndarray) -> np.ndarray:
        """(B,), for plans (B, n, m); infinite if a plan has negative or non-finite entries."""
        p, q, _ = self.arrays
        plan = np.asarray(plan, dtype=np.float64)
        sound = np.isfinite(plan).all((-2, -1)) & (plan >= 0).all((-2, -1))
        kept = rounded(np.where(sound[:, None, None], plan, 0.0), p, q)
        gaps: np.ndarray = (objective(kept, self.arrays, self.epsilon) - self.dual) / self.dual
        return np.where(sound, gaps, np.inf)
