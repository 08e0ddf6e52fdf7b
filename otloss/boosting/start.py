"""The scores that boosting starts from: log-frequencies of the classes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otloss._ordered_classes import as_floats
from otloss.boosting.data import LABELS_FIX
from otloss.boosting.derivatives import check_rows
from otloss.boosting.settings import check_classes


def start_scores(labels: ArrayLike, num_classes: int, *, sample_weight: ArrayLike | None = None) -> NDArray[np.float64]:
    """Return the logarithms of the frequencies of the classes, (K,): the constant scores of least cross-entropy.

    They also have the least ranked probability score. A class that never occurs counts as half a row (of mean
    weight), so that its score is finite.

    XGBoost 3.1 and later keep them in the model for prediction: `"base_score": scores.tolist()`. Otherwise,
    `DMatrix(..., base_margin=numpy.tile(scores, (n, 1)))` for training, validation and prediction alike. LightGBM takes
    `Dataset(..., init_score=numpy.tile(scores, (n, 1)))`, and adds nothing when it predicts: add them to its raw scores
    before the softmax.

    Args:
        labels: (n,) class positions, 0 to K - 1.
        num_classes: K.
        sample_weight: (n,) weights >= 0; multiplied by class weights if the objective has them.

    Returns:
        (K,). A model with one score for two classes starts from the log-odds, the difference of the two.

    Raises:
        TypeError: if labels or weights are not numeric.
        ValueError: if a label or weight is invalid, or all weights are zero.

    Examples:
        >>> start_scores([0, 0, 0, 2], 3).round(3).tolist()
        [-0.405, -2.197, -1.504]
    """
    classes = check_classes(num_classes)
    y = as_floats("labels", labels, fix=LABELS_FIX)
    if y.ndim != 1 or not y.size:
        raise ValueError(f"labels have shape {y.shape}, expected (n,) with at least one.")
    weight_of_rows = np.ones(y.size) if sample_weight is None else sample_weight
    weights = as_floats("sample_weight", weight_of_rows, fix="pass an array of dtype float.")
    if weights.shape != y.shape or not weights.any():
        raise ValueError(f"sample_weight has shape {weights.shape}, expected {y.shape}, and some weight above 0.")
    check_rows(np.zeros((1, classes)), y, weights)
    return np.asarray(np.log(class_shares(y.astype(np.int64), weights, classes)))


def class_shares(
    positions: NDArray[np.int64], weights: NDArray[np.float64], classes: int, *, row: float | None = None
) -> NDArray[np.float64]:
    """Return shares (K,) of the weight by position, of sum 1.

    An absent class counts as half a row, of this weight or of mean weight.
    """
    masses = np.bincount(positions, weights, minlength=classes)
    row = masses.sum() / np.count_nonzero(weights) if row is None else row
    masses = np.where(masses > 0, masses, 0.5 * row)
    return np.asarray(masses / masses.sum())
