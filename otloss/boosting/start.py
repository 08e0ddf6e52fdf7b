"""The scores that boosting starts from: those of a model that knows the frequencies of the classes alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otloss.boosting.data import LABELS_MEND
from otloss.boosting.rows import check_rows
from otloss.boosting.settings import as_floats, check_classes


def start_scores(
    labels: ArrayLike, num_classes: int, *, sample_weight: ArrayLike | None = None, single: bool = False
) -> NDArray[np.float64]:
    """Return the logarithms of the frequencies of the classes, (K,): the constant scores of least cross-entropy.

    They are also those of least ranked probability score. A class that never occurs counts as half a row (of mean
    weight), so that its score is finite.

    XGBoost 3.1 and later keep them in the model, where prediction finds them: `"base_score": scores.tolist()`. Else,
    `DMatrix(..., base_margin=numpy.tile(scores, (n, 1)))` for training, validation and prediction alike. LightGBM takes
    `Dataset(..., init_score=numpy.tile(scores, (n, 1)))`, and adds nothing when it predicts: add them to its raw scores
    before the softmax.

    Args:
        labels: (n,) class positions, 0 to K - 1.
        num_classes: K.
        sample_weight: (n,) weights >= 0; multiply them with the class weights where the objective has some.
        single: with two classes, return the one score (1,) of a model that has one: log-odds of the second class. In
            XGBoost it is a `base_margin`; the `base_score` of its "binary:logistic" is a probability.

    Returns:
        (K,), or (1,).

    Raises:
        TypeError: if labels or weights hold no numbers.
        ValueError: if a label or weight is none, all weights are zero, or `single` is asked of more than two classes.

    Examples:
        >>> start_scores([0, 0, 0, 2], 3).round(3).tolist()
        [-0.405, -2.197, -1.504]
    """
    classes = check_classes(num_classes)
    if single and classes != 2:
        raise ValueError(f"single is asked of {classes} classes, expected 2; a score each is what more need.")
    y = _vector("labels", labels, mend=LABELS_MEND)
    weights = _vector("sample_weight", sample_weight, mend="pass an array of dtype float.")
    if not y.size:
        raise ValueError("labels are empty, expected at least one.")
    if sample_weight is not None and weights.shape != y.shape:
        raise ValueError(f"sample_weight has shape {weights.shape}, expected {y.shape}: one for each label.")
    check_rows(np.zeros((1, classes)), y, weights)
    weights = weights if weights.size else np.ones(y.size)
    if not weights.any():
        raise ValueError("sample_weight is 0 everywhere, expected some weight.")
    scores: NDArray[np.float64] = np.log(class_shares(y.astype(np.int64), weights, classes))
    return scores[1:] - scores[:1] if single else scores


def class_shares(positions: NDArray[np.int64], weights: NDArray[np.float64], classes: int) -> NDArray[np.float64]:
    """Shares (K,) of the weight by position, sum 1; an absent class counts as half a row of mean weight."""
    masses = np.bincount(positions, weights, minlength=classes)
    masses = np.where(masses > 0, masses, 0.5 * masses.sum() / np.count_nonzero(weights))
    return np.asarray(masses / masses.sum())


def _vector(name: str, values: Any, *, mend: str) -> NDArray[np.float64]:
    array = np.zeros(0) if values is None else as_floats(name, values, mend=mend)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}, expected one axis.")
    return array
