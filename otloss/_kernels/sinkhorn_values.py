"""Entropic values from what the user gave: arguments checked, masses balanced, problems solved and summed in one go.

For the many small problems of a loss the operations around a solver take longer than the solver. What the way through
`otloss._entropic` computes is the specification.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange

from otloss._kernels._compile import compiled, largest_cost
from otloss._kernels.histograms import balance
from otloss._kernels.sinkhorn import NEGLIGIBLE_32, NEGLIGIBLE_64, solve_one


@njit
def _checked_highest(cost: Any) -> float:
    """The largest cost; NaN where one is negative, NaN or infinite."""
    top = 0.0
    for i in range(cost.shape[0]):
        row = largest_cost(cost[i], cost.shape[1])
        if not row <= top:  # NaN stays
            top = row
            if not row < np.inf:
                return np.nan
    return top


@njit
def _weighted(potential: Any, weights: Any, scale: float) -> float:
    total = 0.0
    for i in range(weights.shape[0]):
        total += potential[i] * np.float64(weights[i])
    return total * scale


@njit
def _value(p: Any, q: Any, cost: Any, epsilon: float, limits: Any, negligible: float) -> float:
    mass_tolerance, widest, tolerance, most = limits
    highest = _checked_highest(cost)
    scale_p, scale_q, mean = balance(p, q, mass_tolerance)
    if not (highest < np.inf and mean < np.inf) or 0 < widest * highest < epsilon:
        return np.nan
    if mean == 0:
        return 0.0
    f, g = np.empty(p.shape[0]), np.zeros(q.shape[0])
    error, _ = solve_one(p, q, cost, f, g, highest, epsilon, negligible, tolerance, most, False, False)
    if not error <= tolerance:
        return np.nan
    # f is that of p as it came, whose mass is not yet the mean of both.
    shift = epsilon * math.log(scale_p) * mean
    return _weighted(f, p, scale_p) + _weighted(g, q, scale_q) - shift


@compiled(parallel=True)
def sinkhorn_values(p: Any, q: Any, costs: Any, epsilon: float, limits: Any, values: Any) -> None:
    """Write the dual value of problem (p[k], q[k], costs[k]); NaN where it is none, or took too many iterations.

    p, q: (B, n), (B, m), costs: (B, n, m), in float32 or float64. values: (B,) in float64. limits: the relative
    difference of masses, epsilon over the largest cost, tolerance and iterations that are allowed.
    """
    negligible = NEGLIGIBLE_32 if costs.itemsize == 4 else NEGLIGIBLE_64
    for k in prange(p.shape[0]):
        values[k] = _value(p[k], q[k], costs[k], epsilon, limits, negligible)
