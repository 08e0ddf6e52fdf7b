"""The masses of given points that bring them nearest to several clouds on average, by linear programming.

At given points the value is convex and piecewise linear in their masses a, and the least one is a linear programme in
a and the plans P_k (E. Anderes, S. Borgwardt, J. Miller, Discrete Wasserstein barycenters: optimal transport for
discrete data, 2016):

    min over a, P_k >= 0 of  sum_k w_k <C_k, P_k>      P_k 1 = a,  P_k^T 1 = b_k

Any potentials g_k of the clouds give a lower bound: sum_k <g_k, b_k> + mass min_i sum_k min_j (w_k C_k - g_k)_ij. Those
of the programme are the derivatives of the least value in b_k. The potentials of `emd` at the best masses are not: the
plans have fewer entries than masses at random, and for fixed a the value then has a kink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

TOLERANCE = 1e-10  # of the linear programme, for costs and masses near 1: the smallest that HiGHS takes
NO_GAP = 1e-9  # Smaller gaps are its rounding.
NO_MASS = 1e-9  # the share of the mass below which a point has none: rounding of the linear programme


class Masses(NamedTuple):
    """The masses of the points, per problem; NaN where the linear programme has no solution, and the masses are equal.

    Attributes:
        masses: (..., s).
        potentials: (..., k, n), g_k, up to a constant for each cloud.
        value: (...), what the masses minimise.
        gap: (...), by how much the value is larger than the least one, at most; 0 where that is within the tolerance
            of the linear programme.
    """

    masses: Float[Tensor, "*batch s"]
    potentials: Float[Tensor, "*batch k n"]
    value: Float[Tensor, "*batch"]
    gap: Float[Tensor, "*batch"]


def find_masses(
    costs: Float[Tensor, "*batch k s n"],
    clouds: Float[Tensor, "*batch k n"],
    weights: Float[Tensor, "*batch k"],
    active: Bool[Tensor, "*batch"],
) -> Masses:
    """Return the masses that minimise the weighted costs of transport to clouds of given masses, of one sum.

    They are NaN for problems that are not active.
    """
    *batch, k, s, n = costs.shape
    costs, b = _double(weights[..., None, None] * costs).reshape(-1, k, s, n), _double(clouds).reshape(-1, k, n)
    shares, total = b / b.sum(-1, keepdims=True), b[:, 0].sum(-1)
    masses, potentials = np.full((len(b), s), np.nan), np.full_like(b, np.nan)
    value, gap = np.full((2, len(b)), np.nan)
    for i in np.flatnonzero(active.cpu().numpy()):
        best = _find(costs[i], shares[i])
        masses[i], potentials[i] = total[i] * best.masses, best.potentials
        value[i], gap[i] = total[i] * best.value, total[i] * best.gap
    each = [(masses, (s,)), (potentials, (k, n)), (value, ()), (gap, ())]
    return Masses(*(torch.from_numpy(array).to(clouds).reshape((*batch, *shape)) for array, shape in each))


def _double(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().cpu().double().numpy()
    return array


@dataclass(frozen=True)
class _Best:
    """For clouds of sum 1: masses (s,) of sum 1, g (k, n) or one (n_k,) for each cloud, value and gap."""

    masses: np.ndarray
    potentials: np.ndarray | list[np.ndarray]
    value: float
    gap: float


def _find(costs: np.ndarray, clouds: np.ndarray) -> _Best:
    """Pose and solve the linear programme of costs (k, s, n) near 1, without bins and clouds that do not count."""
    # A constant for each column changes the values of all masses alike. Without it the numbers of outliers are smaller.
    lowest = costs.min(1)
    reduced, counts = costs - lowest[:, None], costs.any((1, 2))
    counts[0] |= not counts.any()
    each = [(reduced[k][:, clouds[k] > 0], clouds[k][clouds[k] > 0]) for k in np.flatnonzero(counts)]
    scale = float(np.mean([cost.mean() for cost, _ in each])) or 1.0
    best = _solve([cost / scale for cost, _ in each], [mass for _, mass in each])
    potentials = np.zeros_like(clouds)
    for k, (cost, _), g in zip(np.flatnonzero(counts), each, best.potentials, strict=True):
        f = (cost - scale * g).min(1, keepdims=True)
        potentials[k] = (costs[k] - f).min(0)  # of bins without mass too
    return _Best(best.masses, potentials, best.value * scale + (lowest * clouds).sum(), best.gap * scale)


def _solve(costs: list[np.ndarray], masses: list[np.ndarray]) -> _Best:
    from scipy.optimize import linprog  # `import otloss` does not load it.
    from scipy.sparse import block_diag, csr_array, eye_array, hstack, kron, vstack

    s, k = costs[0].shape[0], len(costs)
    rows = block_diag([kron(eye_array(s), np.ones((1, cost.shape[1]))) for cost in costs])
    columns = block_diag([kron(np.ones((1, s)), eye_array(cost.shape[1])) for cost in costs])
    of_a = kron(np.ones((k, 1)), eye_array(s))
    result = linprog(
        np.concatenate([*(cost.ravel() for cost in costs), np.zeros(s)]),
        A_eq=vstack([hstack([rows, -of_a]), hstack([columns, csr_array((columns.shape[0], s))])]),
        b_eq=np.concatenate([np.zeros(k * s), *masses]),
        method="highs-ds",
        options={"primal_feasibility_tolerance": TOLERANCE, "dual_feasibility_tolerance": TOLERANCE},
    )
    if result.x is None:
        return _Best(np.full(s, 1 / s), [np.full_like(mass, np.nan) for mass in masses], np.nan, np.nan)
    a = np.where(result.x[-s:] > NO_MASS, result.x[-s:], 0.0)
    ends = np.cumsum([mass.size for mass in masses])[:-1]
    potentials = np.split(result.eqlin.marginals[k * s :], ends)
    reduced = np.sum([(cost - g).min(1) for cost, g in zip(costs, potentials, strict=True)], axis=0)
    bound = reduced.min() + sum(g @ mass for g, mass in zip(potentials, masses, strict=True))
    gap = float(result.fun - bound)
    return _Best(a / a.sum(), potentials, float(result.fun), gap if gap > NO_GAP else 0.0)
