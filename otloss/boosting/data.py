"""What the libraries pass to a callable, made into rows: scores of K classes, labels and weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otloss.boosting.settings import Floats, as_floats

INTERFACES = ("native", "sklearn")
LABELS_MEND = (
    "number the classes from 0 in their order, for example by sklearn.preprocessing.OrdinalEncoder(categories=[[...]])."
)


@dataclass(frozen=True)
class Rows:
    """Attributes:
    scores: (n, K).
    labels: (n,).
    weights: (n,), or (0,) where there are none.
    shape: of the predictions as they came.
    single: whether they were one score, for the second of two classes.
    """

    scores: NDArray[Any]
    labels: Floats
    weights: Floats
    shape: tuple[int, ...]
    single: bool


def rows_of(predictions: Any, data: Any, *, num_classes: int) -> Rows:
    """Return the rows of a `DMatrix` or a `Dataset`."""
    if not (hasattr(data, "get_label") and hasattr(data, "get_weight")):
        raise TypeError(
            f"the second argument is a {type(data).__name__}, expected an xgboost.DMatrix or a lightgbm.Dataset; for "
            'XGBClassifier and LGBMClassifier, which pass (y_true, y_pred), choose interface="sklearn".'
        )
    return rows_of_arrays(data.get_label(), predictions, data.get_weight(), num_classes=num_classes)


def rows_of_arrays(labels: Any, predictions: Any, weights: ArrayLike | None, *, num_classes: int) -> Rows:
    """Check shapes; labels, weights and scores themselves are checked where they are read."""
    if hasattr(predictions, "get_label"):
        raise TypeError(
            f"the second argument is a {type(predictions).__name__}, expected an array of predictions; for "
            'xgboost.train and lightgbm.train, which pass (predictions, data), choose interface="native".'
        )
    if labels is None:
        raise ValueError("the data has no labels, expected one for each row; pass label= to DMatrix or Dataset.")
    scores, labels = np.asarray(predictions), as_floats("labels", labels, mend=LABELS_MEND)
    if not np.issubdtype(scores.dtype, np.floating):
        scores = as_floats("predictions", scores, mend="pass the array that the library predicts.")
    weights = np.zeros(0) if weights is None else as_floats("weights", weights, mend="pass an array of dtype float.")
    shape, rows = scores.shape, labels.shape[0] if labels.ndim else -1
    single = num_classes == 2 and shape in ((rows,), (rows, 1))
    if labels.ndim != 1 or not (single or shape == (rows, num_classes)):
        raise ValueError(
            f"the predictions have shape {shape} beside labels of shape {labels.shape}, expected {num_classes} scores "
            f'for each label; set num_class={num_classes} (for XGBoost with objective="multi:softprob"), and let '
            "num_classes be the number of classes in the training labels of a scikit-learn classifier."
        )
    if weights.shape not in ((0,), (rows,)):
        raise ValueError(f"the weights have shape {weights.shape}, expected ({rows},): one for each label.")
    if single:
        scores = np.stack([np.zeros_like(scores.reshape(-1)), scores.reshape(-1)], axis=1)
    return Rows(scores, labels, weights, shape, single)
