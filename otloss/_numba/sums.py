"""The masses of a pair of histograms, and the factors that make them equal, for kernels.

`otloss.solvers.problem` is the reference implementation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from otloss._numba.compile import inner


@inner(fastmath={"reassoc", "nsz", "contract", "arcp"})  # a sum in the order that vectorises
def mass_of(weights: Any) -> float:
    """Return the sum; NaN where a weight is negative or NaN."""
    total, negative = 0.0, 0.0
    for k in range(weights.shape[0]):
        total += np.float64(weights[k])
        negative += 1.0 if weights[k] < 0 else 0.0
    return total if negative == 0 else np.nan


@inner()
def balance(p: Any, q: Any, tolerance: float) -> tuple[float, float, float]:
    """Return two factors that bring both masses to their mean, and the mean.

    All are NaN where a weight is invalid or the masses differ by more than the tolerance.
    """
    mass_p, mass_q = mass_of(p), mass_of(q)
    mean, apart = (mass_p + mass_q) / 2, abs(mass_p - mass_q)
    # Written so that NaN fails too.
    if not (apart <= tolerance * (mass_p if mass_p > mass_q else mass_q) and mean < np.inf):
        return np.nan, np.nan, np.nan
    return mean / mass_p if mass_p > 0 else 1.0, mean / mass_q if mass_q > 0 else 1.0, mean
