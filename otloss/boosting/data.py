"""What XGBoost and LightGBM pass to a callable, by their native and their scikit-learn interfaces, as rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otloss._ordered_classes import Floats, as_floats, check_choice
from otloss.boosting.settings import RowLoss

INTERFACES = ("native", "sklearn")
LABELS_FIX = (
    "number the classes from 0 in their order, for example by sklearn.preprocessing.OrdinalEncoder(categories=[[...]])."
)


@dataclass(frozen=True)
class ScoredRows:
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


@dataclass(frozen=True)
class RowFunction:
    """A callable for XGBoost or LightGBM: picklable and immutable.

    Attributes:
        library: "xgboost" or "lightgbm".
        loss: of a row.
        interface: "native", called with (predictions, DMatrix or Dataset), or "sklearn", called with
            (y_true, y_pred, sample_weight).
    """

    library: str
    loss: RowLoss
    interface: str

    def __post_init__(self) -> None:
        check_choice("interface", self.interface, INTERFACES)

    no_jit = True  # Without it CatBoost sets attributes, to compile methods.

    def calc_ders_multi(self, *_: Any) -> None:
        """Raise TypeError: what CatBoost calls of an objective or a metric."""
        subject = f"{self.library}_objective and {self.library}_metric make"
        raise TypeError(
            f"CatBoost was given a function that {subject}; expected one with CatBoost's own methods. Use XGBoost or "
            "LightGBM, for example by otloss.estimators.OrdinalBoostingClassifier."
        )

    calc_ders_range = evaluate = is_max_optimal = calc_ders_multi

    def rows(self, first: Any, second: Any, sample_weight: Any) -> ScoredRows:
        """Return the rows; shapes are checked here, numbers where they are read."""
        native = self.interface == "native"
        if native != hasattr(second, "get_label"):
            expected, other = "an xgboost.DMatrix or a lightgbm.Dataset", "sklearn"
            if not native:
                expected, other = "an array of predictions", "native"
            raise TypeError(
                f'the second argument is a {type(second).__name__}, expected {expected} with interface="'
                f'{self.interface}"; choose interface="{other}" ("native" is for xgboost.train and lightgbm.train, '
                '"sklearn" for XGBClassifier and LGBMClassifier).'
            )
        predictions, labels = (first, second.get_label()) if native else (second, first)
        weights = second.get_weight() if native else sample_weight
        scores, labels = np.asarray(predictions), as_floats("labels", labels, fix=LABELS_FIX)
        if not np.issubdtype(scores.dtype, np.floating):
            scores = as_floats("predictions", scores, fix="pass the array that the library predicts.")
        fix = "pass an array of dtype float."
        weights = np.zeros(0) if weights is None else as_floats("weights", weights, fix=fix)
        return _checked_rows(scores, labels, weights, self.loss.num_classes)


def _checked_rows(scores: NDArray[Any], labels: Floats, weights: Floats, num_classes: int) -> ScoredRows:
    shape, rows = scores.shape, labels.shape[0] if labels.ndim else -1
    single = num_classes == 2 and shape in ((rows,), (rows, 1))
    if rows == 0 < scores.size:
        raise ValueError("the data set has no labels, expected one for each row; give it label=.")
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
    return ScoredRows(scores, labels, weights, shape, single)
