"""Maps from raw to calibrated distributions, fitted to rows that training did not see."""

from __future__ import annotations

from typing import Any

import numpy as np

from otloss.estimators.recalibration import OrdinalRecalibration, Temperature

METHODS = {"temperature": Temperature, "ordinal": OrdinalRecalibration}
CALIBRATIONS = (None, *METHODS)
# Power 1 and costs drive probabilities below the smallest float, out of which no map could bring them back.
SMALLEST = 1e-6


def fit_calibration(
    kind: str, distribution: np.ndarray, positions: np.ndarray, *, values: np.ndarray, sample_weight: np.ndarray
) -> Any:
    """The fitted map of `kind` from rows (n, m) of `distribution` to those that match `positions` (n,)."""
    method: Any = METHODS[kind](values=values)
    return method.fit(above_zero(distribution), positions, sample_weight=sample_weight)


def apply_calibration(calibration: Any, distribution: np.ndarray) -> np.ndarray:
    """Calibrated rows (n, m), or `distribution` where `calibration` is None."""
    return distribution if calibration is None else calibration.predict(above_zero(distribution))


def above_zero(distribution: np.ndarray) -> np.ndarray:
    """Rows (n, m) with no probability far below `SMALLEST`."""
    floored = np.maximum(distribution, SMALLEST)
    return floored / floored.sum(1, keepdims=True)
