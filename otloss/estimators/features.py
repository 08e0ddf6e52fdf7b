"""Features of mean 0, and of deviation 1 where asked for, as linear and multi-layer models are trained on them.

They are centred always: the biases take the mean up exactly, and an optimiser need not find out that 1e4 + x is x.
"""

from __future__ import annotations

from copy import deepcopy

import numpy as np
from sklearn.preprocessing import StandardScaler

LARGEST_FEATURE = 1e100  # whose square is a float


def fitted_scaler(
    X: np.ndarray, weights: np.ndarray, *, standardize: bool, known: StandardScaler | None = None
) -> StandardScaler:
    """A scaler for the rows X (n, d) of weights (n,), and those that `known` has seen."""
    if known is not None and known.with_std == standardize:
        return deepcopy(known).partial_fit(X, sample_weight=weights)
    return StandardScaler(with_std=standardize).fit(X, sample_weight=weights)


def centre_of(scaler: StandardScaler) -> np.ndarray:
    """(d,) what is subtracted."""
    return np.asarray(scaler.mean_)


def scale_of(scaler: StandardScaler) -> np.ndarray:
    """(d,) what the difference is divided by."""
    return np.ones(scaler.n_features_in_) if scaler.scale_ is None else scaler.scale_
