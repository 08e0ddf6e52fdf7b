"""Maps from raw to calibrated distributions, fitted to rows that training did not see."""

from __future__ import annotations

from typing import Any

import numpy as np

from otloss._calibration import OrdinalRecalibration, Temperature

METHODS = {"temperature": Temperature, "ordinal": OrdinalRecalibration}
CALIBRATIONS = (None, *METHODS)


def fit_calibration(
    kind: str, distribution: np.ndarray, positions: np.ndarray, *, values: np.ndarray, sample_weight: np.ndarray
) -> Any:
    """The fitted map of `kind` from rows (n, m) of `distribution` to those that match `positions` (n,)."""
    method = METHODS[kind](values=values)
    return method.fit(distribution, positions, sample_weight=sample_weight)
