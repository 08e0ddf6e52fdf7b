"""Metrics: the mean loss of held-out rows, for early stopping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otloss.boosting.data import INTERFACES, Rows, rows_of, rows_of_arrays
from otloss.boosting.rows import ORDERS, values
from otloss.boosting.settings import RowLoss, check_choice, row_loss

PREDICTIONS = ("scores", "probabilities")
_SUM_TO_ONE = 1e-4  # float32 sums of probabilities miss it by less


@dataclass(frozen=True, repr=False)
class _Metric:
    library: str
    loss: RowLoss
    predictions: str
    name: str

    def __repr__(self) -> str:
        interface = "" if isinstance(self, _NativeMetric) else ', interface="sklearn"'
        return f'{self.library}_metric({self.loss!r}, predictions="{self.predictions}"{interface})'

    @property
    def __name__(self) -> str:
        return self.name

    def _mean(self, rows: Rows) -> float:
        """The weighted mean over rows; classes weigh as much as in the objective."""
        scores = _as_scores(rows) if self.predictions == "probabilities" else _checked_scores(rows)
        lost = values(scores, rows.labels, rows.weights, loss=self.loss, order=ORDERS[self.library])
        weights = self.loss.class_weights[rows.labels.astype(np.int64)]
        weights = weights * rows.weights if rows.weights.size else weights
        total = weights.sum()
        if not total > 0:
            raise ValueError(f"the weights of {len(weights)} rows sum to {total}, expected some weight to average by.")
        return float((weights * lost).sum() / total)


@dataclass(frozen=True, repr=False)
class _NativeMetric(_Metric):
    def __call__(self, predictions: NDArray[Any], data: Any) -> Any:
        mean = self._mean(rows_of(predictions, data, num_classes=self.loss.num_classes))
        return (self.name, mean, False) if self.library == "lightgbm" else (self.name, mean)


@dataclass(frozen=True, repr=False)
class _SklearnMetric(_Metric):
    def __call__(self, y_true: ArrayLike, y_pred: NDArray[Any], sample_weight: ArrayLike | None = None) -> Any:
        mean = self._mean(rows_of_arrays(y_true, y_pred, sample_weight, num_classes=self.loss.num_classes))
        return (self.name, mean, False) if self.library == "lightgbm" else mean


def xgboost_metric(
    num_classes: int,
    *,
    power: int = 2,
    x: ArrayLike | None = None,
    cost: ArrayLike | None = None,
    transport: float = 1.0,
    cross_entropy: float = 0.0,
    class_weight: ArrayLike | dict[int, float] | None = None,
    predictions: str = "scores",
    interface: str = "native",
) -> _Metric:
    """Return a metric for XGBoost: the weighted mean of the loss that `xgboost_objective` describes; less is better.

    Args:
        predictions: "scores" beside an objective that is a callable, as ours; "probabilities" beside an objective of
            the library ("multi:softprob", "binary:logistic"), after which XGBoost passes those. The wrong one is told
            with three classes or more; with two, probabilities may well be scores, and the mean would be a wrong one.
        interface: "native" for `xgboost.train(custom_metric=)`, "sklearn" for `XGBClassifier(eval_metric=)`.
        num_classes, power, x, cost, transport, cross_entropy, class_weight: as in `xgboost_objective`.

    Returns:
        A picklable, unchangeable callable. Its `__name__`, under which results and early stopping find it, is "rps" for
        power 2, "emd" for power 1, "cost" for a cost matrix, and followed by "+ce" with cross-entropy ("ce" alone).

    Raises:
        TypeError: if an argument holds no numbers.
        ValueError: if an argument is out of range; when called, if a label, weight or prediction is none.

    Examples:
        >>> import numpy as np
        >>> metric = xgboost_metric(3, power=1, interface="sklearn")
        >>> metric.__name__, metric(np.array([0, 1]), np.zeros((2, 3)))
        ('emd', 0.8333333333333333)
    """
    loss = row_loss(
        num_classes, power=power, x=x, cost=cost, transport=transport, cross_entropy=cross_entropy,
        class_weight=class_weight,
    )  # fmt: skip
    return _metric("xgboost", loss, predictions, interface)


def lightgbm_metric(
    num_classes: int,
    *,
    power: int = 2,
    x: ArrayLike | None = None,
    cost: ArrayLike | None = None,
    transport: float = 1.0,
    cross_entropy: float = 0.0,
    class_weight: ArrayLike | dict[int, float] | None = None,
    predictions: str = "scores",
    interface: str = "native",
) -> _Metric:
    """Return a metric for LightGBM; the loss and the arguments are those of `xgboost_metric`.

    `Dataset(init_score=)` of the validation set holds what the training started from, or its scores lack it. Create
    `LGBMClassifier(metric="None")`: else it adds its own log-loss, which takes the scores of an objective that is a
    callable for probabilities, and `lightgbm.early_stopping`, which watches every metric, stops by it.

    Args:
        interface: "native" for `lightgbm.train(feval=)`, "sklearn" for `LGBMClassifier.fit(eval_metric=)`.

    Returns:
        A picklable, unchangeable callable that returns (name, mean loss, False).

    Raises:
        TypeError: if an argument holds no numbers.
        ValueError: if an argument is out of range; when called, if a label, weight or prediction is none.

    Examples:
        >>> import numpy as np
        >>> lightgbm_metric(3, power=1, interface="sklearn")(np.array([0, 1]), np.zeros((2, 3)))
        ('emd', 0.8333333333333333, False)
    """
    loss = row_loss(
        num_classes, power=power, x=x, cost=cost, transport=transport, cross_entropy=cross_entropy,
        class_weight=class_weight,
    )  # fmt: skip
    return _metric("lightgbm", loss, predictions, interface)


def _metric(library: str, loss: RowLoss, predictions: str, interface: str) -> _Metric:
    check_choice("predictions", predictions, PREDICTIONS)
    kind = _NativeMetric if check_choice("interface", interface, INTERFACES) == "native" else _SklearnMetric
    moved = "cost" if loss.cost is not None else "rps" if loss.power == 2 else "emd"
    name = "+".join([moved] * (loss.transport > 0) + ["ce"] * (loss.cross_entropy > 0))
    return kind(library, loss, predictions, name)


def _are_probabilities(rows: Rows) -> NDArray[np.bool_]:
    if rows.single:
        return np.array((rows.scores[:, 1] >= 0) & (rows.scores[:, 1] <= 1))
    total = rows.scores.sum(1, dtype=np.float64)
    return np.array((rows.scores >= 0).all(1) & (abs(total - 1) <= _SUM_TO_ONE))


def _as_scores(rows: Rows) -> NDArray[np.float64]:
    fits = _are_probabilities(rows)
    if not fits.all():
        row = int(np.flatnonzero(~fits)[0])
        raise ValueError(
            f"the predictions of row {row} are {rows.scores[row, int(rows.single) :].tolist()}, expected "
            "probabilities; beside an objective that is a callable the libraries pass scores: choose "
            'predictions="scores".'
        )
    P = rows.scores.astype(np.float64)
    if rows.single:
        P[:, 0] = 1 - P[:, 1]
    # Where a float32 probability has become zero its score is the smallest that softmax turns back into one.
    return np.log(np.maximum(P, np.finfo(np.float32).smallest_subnormal))


def _checked_scores(rows: Rows) -> NDArray[Any]:
    # Scores that a model has learnt are no probabilities in each and every row; before that all rows are alike.
    learnt = len(rows.scores) > 1 and (rows.scores != rows.scores[0]).any()
    # Scores of two classes that started at 1/2 each sum to 1 for ever: what one gains, the other loses.
    if learnt and rows.scores.shape[1] > 2 and _are_probabilities(rows).all():
        raise ValueError(
            "the predictions of all rows are probabilities, expected scores; beside an objective of the library "
            'choose predictions="probabilities".'
        )
    return rows.scores
