"""The metrics as scorers, for `scoring=` of scikit-learn's model selection.

`sklearn.metrics.make_scorer` serves no metric of ordinal probabilities: for two classes it hands on one column, and a
model that was fitted on a fold without some class has fewer columns than the metric has classes. A scorer here asks the
model for its `classes_` and gives the missing class probability 0.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped
from numpy.typing import ArrayLike

from otloss.metrics import decisions as _decisions
from otloss.metrics import forecasts as _forecasts
from otloss.metrics.rank_labels import RankOrder, is_whole, plain_labels, rank_order

# The metric and its sign: as a score, larger is better.
_OF_LABELS: dict[str, tuple[Callable[..., float], int]] = {
    "off_by_one_accuracy": (_decisions.off_by_one_accuracy, 1),
    "ordinal_mae": (_decisions.ordinal_mae, -1),
    "macro_mae": (_decisions.macro_mae, -1),
    "maximum_mae": (_decisions.maximum_mae, -1),
    "minimum_sensitivity": (_decisions.minimum_sensitivity, 1),
}
_OF_PROBABILITIES: dict[str, tuple[Callable[..., float], int]] = {
    "ranked_probability_score": (_forecasts.ranked_probability_score, -1),
    "ordinal_emd": (_forecasts.ordinal_emd, -1),
    "threshold_calibration_error": (_forecasts.threshold_calibration_error, -1),
}
_METRICS = {**_OF_LABELS, **_OF_PROBABILITIES}


class OrdinalScorer:
    """A callable (estimator, X, y) -> float, larger is better; made by `scorer`."""

    def __init__(self, metric: str, labels: ArrayLike | None, options: dict[str, Any]) -> None:
        self.metric = self.__name__ = metric  # by which displays name their axis
        self.labels = labels
        self.options = options
        self._requests: dict[str, Any] = {}

    def __call__(
        self, estimator: Any, X: Any, y: Shaped[np.ndarray, " n"], *, sample_weight: ArrayLike | None = None
    ) -> float:
        """Return the metric of the estimator's predictions for X, with the opposite sign where less is better."""
        metric, sign = _METRICS[self.metric]
        options = self.options if sample_weight is None else {**self.options, "sample_weight": sample_weight}
        if self.metric in _OF_LABELS:
            predicted = estimator.predict(X)
            if not hasattr(estimator, "classes_"):  # a regressor: the metric takes whole numbers alone
                return sign * metric(y, predicted, labels=self.labels, **options)
            labels = self._labels(estimator, y=y, predicted=predicted, classes=estimator.classes_)
            return sign * metric(y, predicted, labels=labels, **options)
        if not hasattr(estimator, "classes_"):
            raise TypeError(
                f"{type(estimator).__name__} has no classes_, so the columns of predict_proba have no labels; "
                "expected a fitted classifier."
            )
        labels = self._labels(estimator, y=y, classes=estimator.classes_)
        proba: Float[np.ndarray, "n classes"] = estimator.predict_proba(X)
        return sign * metric(y, proba, labels=labels, columns=estimator.classes_, **options)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"scorer({self.metric!r}, labels={self.labels!r}{options})"

    def _labels(self, estimator: Any, **targets: ArrayLike) -> ArrayLike | RankOrder:
        if self.labels is not None:
            return self.labels
        estimator = _last(estimator)
        order = getattr(estimator, "categories_", None)
        # Encoders have a list of arrays here.
        if not isinstance(order, np.ndarray) or not hasattr(estimator, "classes_"):
            return rank_order(None, **targets)
        labels = plain_labels("y", targets["y"])
        are_known = np.isin(labels, order).all()
        if not are_known and getattr(estimator, "categories", None) is not None:
            return order
        if _is_range(order):
            # The fold may have whole numbers that the model's training set did not have; they extend the range.
            return rank_order(None, estimator=np.union1d(estimator.classes_, order[[0, -1]]), y=labels)
        return order if are_known else rank_order(None, estimator=order, y=labels)

    def set_score_request(self, *, sample_weight: bool | str | None = None) -> OrdinalScorer:
        """Ask scikit-learn's metadata routing for sample weights (True, or the name they go by), or not (False)."""
        self._requests = {"sample_weight": sample_weight}
        return self

    def _accept_sample_weight(self) -> bool:
        """Tell scikit-learn that a search with several scorers may pass weights on to this one."""
        return True

    def get_metadata_routing(self) -> Any:
        """Return what was asked for, in the form of scikit-learn's metadata routing."""
        from sklearn.utils.metadata_routing import MetadataRequest

        request = MetadataRequest(owner=self)
        request.score.add_request(param="sample_weight", alias=self._requests.get("sample_weight"))
        return request


def scorer(metric: str, *, labels: ArrayLike | None = None, **options: Any) -> OrdinalScorer:
    """Return a scorer for `scoring=` of GridSearchCV, cross_val_score and their like.

    Larger is better: errors and scores of which less is better come back negative, as from scikit-learn's own
    "neg_..." scorers. Classes that are missing from a fold are fine.

    Args:
        metric: "off_by_one_accuracy", "minimum_sensitivity", "ordinal_mae", "macro_mae", "maximum_mae" of `predict`, or
            "ranked_probability_score", "ordinal_emd", "threshold_calibration_error" of `predict_proba`. For a kappa use
            `make_scorer(cohen_kappa_score, weights="quadratic", labels=...)` of scikit-learn.
        labels: (K,) all classes in rank order. By default the order that the model uses, the `categories_` of the
            estimators here, also as the last step of a pipeline or the best of a search; for other models the rank
            order of an ordered pandas Categorical, or what the labels of model and fold imply, as in the metrics: whole
            numbers stand for every integer from the smallest to the largest, and text raises.
        options: other arguments of the metric, such as `values`.

    Raises:
        ValueError: if there is no such metric.
        TypeError: if it has no such option. The value of an option is checked with the first fold.

    Example:
        >>> from sklearn.linear_model import LogisticRegression
        >>> from sklearn.model_selection import cross_val_score
        >>> X, y = np.arange(30.0)[:, None], np.repeat(["low", "mid", "high"], 10)
        >>> scoring = scorer("ordinal_mae", labels=["low", "mid", "high"])
        >>> cross_val_score(LogisticRegression(), X, y, scoring=scoring, cv=5)
        array([-0.33333333, -0.        , -0.        , -0.        , -0.33333333])
    """
    if metric not in _METRICS:
        raise ValueError(f"metric is {metric!r}, expected one of {sorted(_METRICS)}.")
    own = set(signature(_METRICS[metric][0]).parameters)
    own -= {"y_true", "y_pred", "proba", "labels", "columns", "sample_weight"}
    for option in options:
        if option not in own:
            raise TypeError(f"{option!r} is not an argument of {metric} for a scorer, expected one of {sorted(own)}.")
    return OrdinalScorer(metric, labels, options)


def _is_range(order: np.ndarray) -> bool:
    """Return whether the classes are all integers from the first to the last."""
    if order.dtype.kind not in "iuf" or not is_whole(order).all():
        return False
    return bool((np.diff(order.astype(object)) == 1).all())  # uint8 would wrap


def _last(estimator: Any) -> Any:
    """Return the estimator that predicts: the best of a search, the last step of a pipeline."""
    if hasattr(estimator, "best_estimator_"):
        return _last(estimator.best_estimator_)
    steps = getattr(estimator, "steps", None)
    return _last(steps[-1][1]) if isinstance(steps, list) else estimator
