"""One position per row out of a distribution over ordered classes.

Each rule is the best answer under another loss, given the right distribution: `"argmax"` under the share of errors,
`"median"` under the absolute error, `"mean"` under the squared error of the class values, `"cost"` under a cost matrix.
"""

from __future__ import annotations

import numpy as np

_ROUNDING = 1e-6  # of sums of probabilities, which classifiers may compute in float32
RULES = ("argmax", "median", "mean", "cost")


def decode(distribution: np.ndarray, rule: str, *, values: np.ndarray, cost: np.ndarray | None = None) -> np.ndarray:
    """Return positions (n,) for rows of `distribution` (n, m), by class values (m,) or cost[true, predicted] (m, m).

    Ties go to the lower position. Raises ValueError for "cost" without one.

    >>> decode(np.array([[0.45, 0.15, 0.4]]), "median", values=np.arange(3.0))
    array([1])
    """
    if rule == "argmax":
        return distribution.argmax(1)
    if rule == "median":
        # Rounding may put a sum such as 0.1 + 0.4 slightly below one half; equal errors would differ by it.
        return (distribution.cumsum(1) >= 0.5 - _ROUNDING).argmax(1)
    if rule == "mean":
        return np.abs((distribution @ values)[:, None] - values).argmin(1)
    if cost is None:
        raise ValueError("decode is 'cost' and the fit had no cost matrix; fit again with cost=, or decode otherwise.")
    return (distribution @ cost).argmin(1)
