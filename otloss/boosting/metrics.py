"""Metrics: the mean loss of held-out rows, for early stopping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from otloss._ordered_classes import check_choice
from otloss.boosting.data import RowFunction, ScoredRows
from otloss.boosting.derivatives import values
from otloss.boosting.settings import LossSettings, row_loss, shows_settings

PREDICTIONS = ("scores", "probabilities")
_SUM_TO_ONE = 1e-4  # The error of float32 sums of probabilities is smaller.


@dataclass(frozen=True)
class RowMetric(RowFunction):
    """Return the weighted mean loss of rows in the form that the library expects."""

    predictions: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("predictions", self.predictions, PREDICTIONS)

    @property
    def __name__(self) -> str:
        return "+".join([self.loss.name] * (self.loss.transport > 0) + ["ce"] * (self.loss.cross_entropy > 0))

    def __call__(self, first: Any, second: Any, sample_weight: Any = None) -> Any:
        rows = self.rows(first, second, sample_weight)
        scores = _as_scores(rows) if self.predictions == "probabilities" else _checked_scores(rows)
        lost = values(scores, rows.labels, rows.weights, loss=self.loss)
        # The objective has the same class weights.
        weights = self.loss.class_weights[rows.labels.astype(np.int64)]
        weights = weights * rows.weights if rows.weights.size else weights
        total = weights.sum()
        if not total > 0:
            raise ValueError(f"the weights of {len(weights)} rows sum to {total}, expected a sum above 0.")
        mean = float((weights * lost).sum() / total)
        if self.library == "lightgbm":
            return self.__name__, mean, False
        return (self.__name__, mean) if self.interface == "native" else mean


@shows_settings
def xgboost_metric(
    num_classes: int,
    *,
    predictions: str = "scores",
    interface: str = "native",
    **settings: Unpack[LossSettings],
) -> RowMetric:
    """Return a metric for XGBoost: the weighted mean of the loss that `xgboost_objective` describes; less is better.

    XGBoost itself keeps six decimals of it: raise `transport`, or the gaps of x, where the loss is small.

    Args:
        predictions: "scores" beside a custom objective; "probabilities" beside an objective of
            the library ("multi:softprob", "binary:logistic"), after which XGBoost passes those. With three classes or
            more the wrong choice raises; with two it cannot be detected, and the mean is wrong.
        interface: "native" for `xgboost.train(custom_metric=)`, "sklearn" for `XGBClassifier(eval_metric=)`.
        num_classes, power, x, cost, transport, cross_entropy, class_weight: as in `xgboost_objective`.

    Returns:
        A picklable, immutable callable. Its `__name__`, under which results and early stopping find it, is "rps" for
        power 2, "emd" for power 1, "cost" for a cost matrix, and followed by "+ce" with cross-entropy ("ce" alone).

    Raises:
        TypeError: if an argument is not numeric.
        ValueError: if an argument is out of range; when called, if a label, weight or prediction is invalid.

    Examples:
        >>> import numpy as np
        >>> metric = xgboost_metric(3, power=1, interface="sklearn")
        >>> metric.__name__, metric(np.array([0, 1]), np.zeros((2, 3)))
        ('emd', 0.8333333333333333)
    """
    return RowMetric("xgboost", row_loss(num_classes, **settings), interface, predictions)


@shows_settings
def lightgbm_metric(
    num_classes: int,
    *,
    predictions: str = "scores",
    interface: str = "native",
    **settings: Unpack[LossSettings],
) -> RowMetric:
    """Return a metric for LightGBM; the loss and the arguments are as in `xgboost_metric`.

    Pass the start of the training as `Dataset(init_score=)` of the validation set too. Create
    `LGBMClassifier(metric="None")`: otherwise it adds its own log-loss, which takes the scores of a custom objective
    for probabilities, and `lightgbm.early_stopping`, which watches every metric, stops by it.

    Args:
        num_classes, power, x, cost, transport, cross_entropy, class_weight, predictions: as for `xgboost_metric`.
        interface: "native" for `lightgbm.train(feval=)`, "sklearn" for `LGBMClassifier.fit(eval_metric=)`.

    Returns:
        A picklable, immutable callable that returns (name, mean loss, False).

    Raises:
        TypeError, ValueError: as `xgboost_metric`.

    Examples:
        >>> import numpy as np
        >>> lightgbm_metric(3, power=1, interface="sklearn")(np.array([0, 1]), np.zeros((2, 3)))
        ('emd', 0.8333333333333333, False)
    """
    return RowMetric("lightgbm", row_loss(num_classes, **settings), interface, predictions)


def _are_probabilities(rows: ScoredRows) -> NDArray[np.bool_]:
    if rows.single:
        return np.array((rows.scores[:, 1] >= 0) & (rows.scores[:, 1] <= 1))
    total = rows.scores.sum(1, dtype=np.float64)
    return np.array((rows.scores >= 0).all(1) & (abs(total - 1) <= _SUM_TO_ONE))


def _as_scores(rows: ScoredRows) -> NDArray[np.float64]:
    fits = _are_probabilities(rows)
    if not fits.all():
        row = int(np.flatnonzero(~fits)[0])
        raise ValueError(
            f"the predictions of row {row} are {rows.scores[row, int(rows.single) :].tolist()}, expected "
            "probabilities; beside a custom objective the libraries pass scores: choose "
            'predictions="scores".'
        )
    P = rows.scores.astype(np.float64)
    if rows.single:
        P[:, 0] = 1 - P[:, 1]
    return np.log(np.maximum(P, np.finfo(np.float32).smallest_subnormal))


def _checked_scores(rows: ScoredRows) -> NDArray[Any]:
    # Before training all rows are equal, and may sum to 1.
    learnt = len(rows.scores) > 1 and (rows.scores != rows.scores[0]).any()
    # Two scores that start at 1/2 always sum to 1, so two classes are not checked.
    if learnt and rows.scores.shape[1] > 2 and _are_probabilities(rows).all():
        raise ValueError(
            "the predictions of all rows are probabilities, expected scores; beside an objective of the library "
            'choose predictions="probabilities".'
        )
    return rows.scores
