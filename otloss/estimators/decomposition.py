"""Any classifier as one of ordered labels: K - 1 binary problems "above class k or not", put together.

With s_k an estimate of P(y > k) for each threshold alone, sorted in decreasing order (which brings monotone
probabilities nearer, whichever of them were out of order):    P_k = s_{k-1} - s_k,  s_{-1} = 1,  s_{K-1} = 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn import get_config
from sklearn.base import clone, is_classifier
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.utils import check_array, column_or_1d, get_tags, indexable
from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping, get_routing_for_object, process_routing
from sklearn.utils.validation import has_fit_parameter, validate_data

from otloss._ordered_classes import check_choice
from otloss.estimators.base import SMALLEST_CALIBRATED, OrdinalBase, unchanged_on_error
from otloss.estimators.decode import RULES
from otloss.estimators.features import check_read_by_numpy

_REQUESTS = (
    "set_fit_request(sample_weight=True) of the classifier, and set_fit_request(sample_weight=False) of each step "
    "before it that takes weights, such as StandardScaler"
)


class OrdinalDecomposition(OrdinalBase):
    """Classifier of ordered labels out of binary classifiers, one clone for each threshold between two classes.

    Args:
        estimator: a classifier with `predict_proba`, cloned for each threshold; `LogisticRegression()` by default. It
            gets X as it is, and checks it: it may be a pipeline that fills in missing values or encodes text. A
            pipeline gets weights through scikit-learn's metadata routing: its classifier requests them by
            `set_fit_request(sample_weight=True)`, and steps that take weights, such as `StandardScaler`, say
            `set_fit_request(sample_weight=False)`.
        categories: all labels in rank order, as for `OrdinalClassifier`.
        values: (K,) increasing class values of `decode="mean"` and `expected_value`, 0 to K - 1 by default.
        decode: "median", "argmax" or "mean", as for `OrdinalClassifier`.

    Attributes:
        estimators_: (m - 1) binary classifiers; number k tells the labels above the first k + 1 seen from the others.
        classes_, categories_: as for `OrdinalClassifier`.

    Source:
        E. Frank, M. Hall, A simple approach to ordinal classification, ECML 2001; V. Chernozhukov, I. Fernández-Val,
        A. Galichon, Improving point and interval estimators of monotone functions by rearrangement, Biometrika 96
        (2009), 559-575 (the order).

    Example:
        >>> from sklearn.neighbors import KNeighborsClassifier
        >>> X, y = np.arange(12.0)[:, None], np.repeat(["low", "mid", "high"], 4)
        >>> model = OrdinalDecomposition(KNeighborsClassifier(3), categories=["low", "mid", "high"]).fit(X, y)
        >>> model.predict([[1.0], [6.0], [11.0]]).tolist()
        ['low', 'mid', 'high']
    """

    # What `OrdinalBase` asks of its subclasses, and what this one leaves to its binary classifiers.
    power, cost, transport, cross_entropy = 2, None, 1.0, 0.0
    class_weight, calibration, early_stopping, validation_fraction, random_state = None, None, False, 0.2, None

    def __init__(self, estimator: Any = None, *, categories: Any = None, values: Any = None, decode: str = "median"):
        self.estimator = estimator
        self.categories = categories
        self.values = values
        self.decode = decode

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> OrdinalDecomposition:
        """Fit to features X (n rows of what `estimator` takes), labels y (n,), and weights (n,) if given; return self.

        Raises:
            ValueError, TypeError: if a label, a weight, a feature or a setting is wrong; the message says which.
        """
        with unchanged_on_error(self):
            self._fit(X, y, sample_weight)
        return self

    def get_metadata_routing(self) -> MetadataRouter:
        """Return how weights reach `estimator`: as it requests them, where scikit-learn's routing is on."""
        router = MetadataRouter(owner=self).add_self_request(self)
        if self.estimator is None:  # the default one gets the weights that this classifier gets
            return router
        to_estimator = MethodMapping().add(caller="fit", callee="fit")
        return router.add(estimator=self._binary(), method_mapping=to_estimator)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags = get_tags(self._binary()).input_tags
        return tags

    def _binary(self) -> Any:
        if self.estimator is None:
            return LogisticRegression()
        if isinstance(self.estimator, type) or not hasattr(self.estimator, "fit"):
            raise TypeError(
                f"estimator is {self.estimator!r}, expected a classifier object, such as LogisticRegression()."
            )
        return self.estimator

    def _check_decode(self) -> None:
        check_choice("decode", self.decode, RULES[:-1])  # There is no cost here.

    def _check_settings(self) -> None:
        super()._check_settings()
        self._binary()  # which checks it

    def _checked(self, X: Any, y: Any) -> tuple[Any, np.ndarray]:
        check_read_by_numpy(X)
        X, y = indexable(*validate_data(self, X, y, skip_check_array=True))
        return X, check_array(column_or_1d(y, warn=True), ensure_2d=False, dtype=None, input_name="y")

    def _features(self, X: Any) -> Any:
        check_read_by_numpy(X)
        return validate_data(self, X, reset=False, skip_check_array=True, ensure_2d=False)  # names of columns

    def _as_features(self, X: Any) -> Any:
        return X

    def _train(self, X: Any, positions: np.ndarray, weights: np.ndarray, *, random: np.random.RandomState) -> None:
        weighted = self._routed(weights) if (weights != 1).any() else {}
        self.estimators_ = []
        for k in range(len(self.classes_) - 1):
            above = (positions > k).astype(int)
            if above.min() == above.max():  # the classes of one side have no weight
                constant = DummyClassifier(strategy="constant", constant=above[0])
                self.estimators_.append(constant.fit(np.zeros((2, 1)), [0, 1]))
            else:
                self.estimators_.append(clone(self._binary()).fit(X, above, **weighted))
                _check_probabilities(self.estimators_[-1])

    def _routed(self, weights: np.ndarray) -> dict[str, Any]:
        """Return the keywords that hand weights to the fit of `estimator`."""
        if self.estimator is not None and get_config()["enable_metadata_routing"]:
            if not get_routing_for_object(self._binary()).consumes("fit", ["sample_weight"]):
                raise ValueError(
                    f"sample_weight is given, and {type(self._binary()).__name__} does not request it by this name; "
                    f"call {_REQUESTS}, or leave it out."
                )
            return dict(process_routing(self, "fit", sample_weight=weights).estimator.fit)
        if not has_fit_parameter(self._binary(), "sample_weight"):
            raise ValueError(
                f"sample_weight is given, and the fit of {type(self._binary()).__name__} takes none; leave it out. In "
                "a BaggingClassifier, with weights of its own, call sklearn.set_config(enable_metadata_routing=True); "
                f"for your own weights in a pipeline also call {_REQUESTS}."
            )
        return {"sample_weight": weights}

    def _logits(self, X: Any) -> np.ndarray:
        above = np.column_stack([_probability_above(binary, X) for binary in self.estimators_])
        above = -np.sort(-above, axis=1)
        padded = np.pad(above, ((0, 0), (1, 1)), constant_values=((0, 0), (1, 0)))
        return np.log(np.maximum(-np.diff(padded), np.finfo(float).tiny))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return log-probabilities (n, len(classes_)), of at least `SMALLEST_CALIBRATED`.

        Trees and neighbours vote 0 for a class, and the logarithm of next to nothing would decide a calibration.
        """
        return np.log(np.maximum(self.predict_proba(X), SMALLEST_CALIBRATED))


def _check_probabilities(fitted: Any) -> None:
    """Raise TypeError for a classifier without them; an ensemble may have them only once it is fitted."""
    if not hasattr(fitted, "predict_proba"):
        fix = "; wrap it in sklearn.calibration.CalibratedClassifierCV" if is_classifier(fitted) else ""
        raise TypeError(
            f"estimator is a {type(fitted).__name__} without predict_proba, expected a classifier with "
            f"probabilities{fix}."
        )


def _probability_above(fitted: Any, X: Any) -> np.ndarray:
    """Return the probability (n,) of the class 1 by a classifier of 0 and 1, which may have them in another order."""
    classes = getattr(fitted, "classes_", None)
    column = 0 if classes is not None and classes[0] in (1, "1") else 1
    probability = np.asarray(fitted.predict_proba(X))[:, column]
    if not np.isfinite(probability).all():
        raise ValueError(f"predict_proba of {type(fitted).__name__} returns NaN or infinity, expected probabilities.")
    return probability
