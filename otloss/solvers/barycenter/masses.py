"""The masses of given points that bring them nearest to several clouds on average, by linear programming.

At given points the value is convex and piecewise linear in their masses a, and the least one is a linear programme in
a and the plans P_k (E. Anderes, S. Borgwardt, J. Miller, Discrete Wasserstein barycenters: optimal transport for
discrete data, 2016):

    min over a, P_k >= 0 of  sum_k w_k <C_k, P_k>      P_k 1 = a,  P_k^T 1 = b_k

Any potentials g_k of the clouds give a lower bound: sum_k <g_k, b_k> + mass min_i sum_k min_j (w_k C_k - g_k)_ij. Those
of the programme are the derivatives of the least value in b_k. The potentials of `emd` at the best masses are not: the
plans have fewer entries than masses at random, and for fixed a the value then has a kink. Few entries of the plans are
not 0: the programme starts with those that a guess of the potentials makes likely, and adds others until the bound
over all entries equals its value. The tolerances of its solver are absolute. Where one cost is much larger than the
value, the programme is therefore solved again in the unit of its value. The gap is the value of `emd` minus the bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss.solvers.solve import emd


@dataclass(frozen=True)
class Programme:
    """The thresholds of the linear programme.

    Attributes:
        tolerance: for costs and masses near 1: the smallest that HiGHS takes.
        no_gap: smaller gaps are the rounding of the programme.
        small_value: in the unit of the costs: smaller values lose digits to the tolerance.
        smallest_unit: of the next programme over the last one: the value may be rounding.
        units: the largest number of programmes in smaller and smaller units.
        rounding: of the gap, over the value of the best single point: masses are off by their rounding.
        entries: in each row and column of the plans that count as likely: 3 need more programmes, 12 longer ones.
        no_mass: the share of the mass below which a point has none: rounding of the programme.
    """

    tolerance: float = 1e-10
    no_gap: float = 1e-9
    small_value: float = 1e-3
    smallest_unit: float = 1e-5
    units: int = 4
    rounding: float = 2e-15
    entries: int = 6
    no_mass: float = 1e-9


PROGRAMME = Programme()


class Masses(NamedTuple):
    """The masses of the points, per problem; equal, with NaN as potentials and gap, where there is no solution.

    Attributes:
        masses: (..., s).
        potentials: (..., k, n), g_k, up to a constant for each cloud.
        value: (...), what the masses minimise, by `emd`.
        gap: (...), by how much the value is larger than the least one, at most; 0 where that is rounding.
    """

    masses: Float[Tensor, "*batch s"]
    potentials: Float[Tensor, "*batch k n"]
    value: Float[Tensor, "*batch"]
    gap: Float[Tensor, "*batch"]


def find_masses(
    costs: Float[Tensor, "*batch k s n"],
    clouds: Float[Tensor, "*batch k n"],
    weights: Float[Tensor, "*batch k"],
    *,
    active: Bool[Tensor, "*batch"],
    guess: Float[Tensor, "*batch k n"],
) -> Masses:
    """Return the masses that minimise the weighted costs of transport to clouds of given masses, of one sum.

    They are NaN for problems that are not active. The guess of the potentials matters for the time alone.
    """
    *batch, k, s, n = costs.shape
    weighted = _double(weights[..., None, None] * costs).reshape(-1, k, s, n)
    b, guesses = _double(clouds).reshape(-1, k, n), _double(guess).reshape(-1, k, n)
    shares, total = b / b.sum(-1, keepdims=True), b[:, 0].sum(-1)
    masses, potentials = np.full((len(b), s), np.nan), np.full_like(b, np.nan)
    for i in np.flatnonzero(active.cpu().numpy()):
        best = _find(weighted[i], shares[i], guesses[i])
        masses[i], potentials[i] = total[i] * best.masses, best.potentials
    a = torch.from_numpy(masses).to(clouds).reshape(*batch, s)
    g = torch.from_numpy(potentials).to(clouds).reshape(*batch, k, n)
    value, gap = (clouds.new_full(active.shape, torch.nan) for _ in range(2))
    problem = a[active], g[active], costs[active], clouds[active], weights[active]
    value[active], gap[active] = _value_and_gap(*problem)
    return Masses(a, g, value, gap)


def _value_and_gap(a: Tensor, g: Tensor, costs: Tensor, clouds: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of masses a, and its distance to the lower bound of the potentials g."""
    value = (weights * emd(a.unsqueeze(-2), clouds, costs)).sum(-1)
    weighted = weights[..., None, None] * costs
    reduced = weighted - g.unsqueeze(-2)
    lowest = reduced.masked_fill(clouds.unsqueeze(-2) == 0, torch.inf).amin(-1).sum(-2).amin(-1)
    bound = (g * clouds).sum((-2, -1)) + clouds[..., 0, :].sum(-1) * lowest
    gap, single = value - bound, (weighted * clouds.unsqueeze(-2)).sum((-3, -1)).amin(-1)
    return value, torch.where(gap <= PROGRAMME.rounding * single, 0.0, gap)


def _double(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().cpu().double().numpy()
    return array


@dataclass(frozen=True)
class _Best:
    """The solution for clouds of sum 1: masses (s,) of sum 1, g (k, n), and the value by the linear programme."""

    masses: np.ndarray
    potentials: np.ndarray
    value: float


def _find(costs: np.ndarray, clouds: np.ndarray, guess: np.ndarray) -> _Best:
    """Pose and solve the linear programme of costs (k, s, n) near 1, without bins and clouds that do not count."""
    # A constant for each column changes the values of all masses alike. Without it the numbers of outliers are smaller.
    lowest, has_mass = costs.min(1), clouds[:, None] > 0
    counts = np.any(costs != 0, axis=(1, 2))
    counts = counts if counts.any() else np.ones_like(counts)
    reduced = np.where(has_mass, costs - lowest[:, None], np.inf)[counts]
    best, unit = _solve_in_units(reduced, clouds[counts], (guess - lowest)[counts])
    g = unit * best.potentials
    f = (reduced - g[:, None]).min(2, keepdims=True)
    potentials = np.zeros_like(clouds)
    # Where a bin has mass, the minimum is its potential, but with the rounding of the largest costs.
    potentials[counts] = np.where(clouds[counts] > 0, g + lowest[counts], (costs[counts] - f).min(1))
    return _Best(best.masses, potentials, best.value * unit + (lowest * clouds).sum())


def _solve_in_units(costs: np.ndarray, clouds: np.ndarray, guess: np.ndarray) -> tuple[_Best, float]:
    """Return the solution of costs over a unit, and the unit: near the value, which its tolerance is relative to."""
    finite = np.where(np.isfinite(costs), costs, 0.0)
    unit = (finite * clouds[:, None]).sum((0, 2)).min() or finite.mean() or 1.0  # the value of the best single point
    best = _generate_columns(costs / unit, clouds, guess / unit)
    for _ in range(PROGRAMME.units - 1):
        ratio = max(best.value, PROGRAMME.smallest_unit)
        if not best.value < PROGRAMME.small_value or unit * ratio < np.finfo(np.float64).tiny:
            break
        rescaled = _generate_columns(costs / (unit * ratio), clouds, best.potentials / ratio)
        if np.isnan(rescaled.value):
            break
        best, unit = rescaled, unit * ratio
    return best, unit


def _generate_columns(costs: np.ndarray, clouds: np.ndarray, guess: np.ndarray) -> _Best:
    """Solve the programme of some entries of the plans, and add those that lower its value, until none does."""
    k, s, n = costs.shape
    entries = _likely_entries(costs, guess)
    while True:
        result = _solve(costs, clouds, entries)
        if result.x is None:
            return _Best(np.full(s, 1 / s), np.full((k, n), np.nan), np.nan)
        f, g = result.eqlin.marginals[: k * s].reshape(k, s, 1), result.eqlin.marginals[k * s :].reshape(k, n)
        reduced = costs - g[:, None]
        gap = float(result.fun - (g * clouds).sum() - reduced.min(2).sum(0).min())
        missing = ~entries & ((reduced < f) | _likely_entries(costs, g))  # Likely ones halve the number of programmes.
        if gap <= PROGRAMME.no_gap or not missing.any():
            break
        entries |= missing
    a = np.where(result.x[-s:] > PROGRAMME.no_mass, result.x[-s:], 0.0)
    return _Best(a / a.sum(), g, float(result.fun))


def _likely_entries(costs: np.ndarray, potentials: np.ndarray) -> np.ndarray:
    """Return the entries of the plans (k, s, n) that potentials make likely, with all of the best single point."""
    entries = np.zeros(costs.shape, dtype=bool)
    entries[:, np.where(np.isfinite(costs), costs, 0.0).sum((0, 2)).argmin()] = True
    reduced = costs - potentials[:, None]
    reduced = reduced - reduced.min(2, keepdims=True)
    for axis in (1, 2):
        count = min(PROGRAMME.entries, costs.shape[axis])
        entries |= reduced <= np.partition(reduced, count - 1, axis).take([count - 1], axis)
    return entries & np.isfinite(costs)


def _solve(costs: np.ndarray, clouds: np.ndarray, entries: np.ndarray) -> Any:
    from scipy.optimize import linprog  # `import otloss` does not load it.
    from scipy.sparse import csc_array

    k, s, n = costs.shape
    cloud, point, bins = np.nonzero(entries)
    count = len(cloud)
    rows = np.concatenate([cloud * s + point, k * s + cloud * n + bins, np.arange(k * s)])
    columns = np.concatenate([np.tile(np.arange(count), 2), count + np.tile(np.arange(s), k)])
    factors = np.concatenate([np.ones(2 * count), -np.ones(k * s)])
    return linprog(
        np.concatenate([costs[entries], np.zeros(s)]),
        A_eq=csc_array((factors, (rows, columns)), shape=(k * (s + n), count + s)),
        b_eq=np.concatenate([np.zeros(k * s), clouds.ravel()]),
        method="highs-ds",
        options={
            "primal_feasibility_tolerance": PROGRAMME.tolerance,
            "dual_feasibility_tolerance": PROGRAMME.tolerance,
        },
    )
