"""The probability integral transform (PIT) of ensembles: where among the members the observation came true.

An observation between the members r and r + 1 of m sorted ones has its PIT spread evenly over [r, r + 1] / (m + 1);
members that equal it widen the interval to [number below, number at most equal + 1] / (m + 1). PITs of a calibrated
ensemble are uniform: too many near 0 and 1 say that it is too sure, too many in the middle that it is not sure enough.

Source: T. Hamill, Interpretation of rank histograms for verifying ensemble forecasts, Mon. Weather Rev. 129 (2001).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from otloss._checks import check_count
from otloss._ordered_classes import as_floats
from otloss.metrics.arrays import array_bits, as_array, in_bits, read_shares


def pit_histogram(
    y_true: ArrayLike, ensemble: ArrayLike, *, bins: int = 10, sample_weight: ArrayLike | None = None
) -> Float[np.ndarray, " bins"]:
    """Return the share of observations whose probability integral transform lies in each of `bins` equal bins.

    Args:
        y_true: (n,) what came true.
        ensemble: (n, m) forecasts of m members each.
        bins: how many; of a calibrated ensemble each holds a share of 1 / bins.
        sample_weight: (n,) weights >= 0; only their ratios matter.

    Raises:
        ValueError: if sizes differ, a number is NaN or infinite, bins is below 1, or a weight is
            negative.

    Example:
        >>> pit_histogram([0.5, 9.0], [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], bins=4)
        array([0.5, 0. , 0. , 0.5])
    """
    bins = check_count("bins", bins)
    members, true = read_ensemble(ensemble, y_true)
    weight = read_shares(sample_weight, len(members))
    bits = min(array_bits(ensemble), array_bits(y_true))  # 0.7 in float32 equals 0.7 in float64
    members, true = in_bits(members, bits), in_bits(true, bits)
    low = (members < true[:, None]).sum(1) / (members.shape[1] + 1)
    high = ((members <= true[:, None]).sum(1) + 1) / (members.shape[1] + 1)
    edges = np.linspace(0, 1, bins + 1)[:, None]
    return np.diff(((edges - low) / (high - low)).clip(0, 1) @ weight)


def read_ensemble(ensemble: ArrayLike, y: ArrayLike | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return finite members (n, m) and observations (n,) in float64; NaN where no observations are given."""
    fix = "pass an array of dtype float."
    members = as_floats("ensemble", as_array(ensemble), fix=fix)
    if members.ndim != 2 or 0 in members.shape:
        raise ValueError(
            f"ensemble has shape {members.shape}, expected (n, m): a row for each forecast, a column for each member."
        )
    true = np.full(len(members), np.nan) if y is None else as_floats("y", as_array(y), fix=fix)
    if true.shape != (len(members),):
        raise ValueError(f"y has shape {true.shape} and ensemble {members.shape}, expected ({len(members)},) for y.")
    for name, array in (("ensemble", members), ("y", true)):
        if (y is not None or name == "ensemble") and not np.isfinite(array).all():
            first = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
            raise ValueError(f"{name} holds {array[first]} at {first}, expected finite numbers; drop such rows.")
    return members, true
