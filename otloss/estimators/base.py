"""What both estimators share: labels in and out, weights, parts held out, calibration, decoding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from otloss.estimators.calibrated import CALIBRATIONS, apply_calibration, fit_calibration
from otloss.estimators.criterion import Criterion, check_choice, check_count, check_decode, check_real, make_criterion
from otloss.estimators.decode import decode
from otloss.estimators.labels import LabelOrder, label_order, ordered_categories, refuse_missing_objects
from otloss.estimators.weights import row_weights, split_off

ENOUGH_TO_HOLD_OUT = 50  # rows from which early_stopping="auto" holds some out


@contextmanager
def unchanged_on_error(estimator: BaseEstimator) -> Iterator[None]:
    """Put back what `estimator` held if the body raises: old weights never meet new labels."""
    before = vars(estimator).copy()
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(before)
        raise


def check_magnitude(X: np.ndarray, largest: float, *, mend: str) -> None:
    """Raise where a number in X (n, d), NaN apart, is beyond `largest`."""
    beyond = np.abs(X) > largest
    if beyond.any():
        row, column = (int(i) for i in np.argwhere(beyond)[0])
        raise ValueError(
            f"X[{row}, {column}] is {X[row, column]:g}, expected numbers of at most {largest:.3g} in size. Look for "
            f"marks of missing values such as 1e300; {mend}."
        )


def as_dense(X: Any) -> np.ndarray:
    """X (n, d) as an array: what a sparse matrix does not hold is 0, where XGBoost would take it for missing."""
    return X.toarray() if issparse(X) else X


class OrdinalBase(ClassifierMixin, BaseEstimator):
    """Frame of a classifier of ordered labels; a subclass checks its own settings, trains, and returns logits."""

    classes_: np.ndarray
    categories_: np.ndarray
    _order: LabelOrder
    _criterion: Criterion
    _calibration: Any

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def predict(self, X: Any) -> np.ndarray:
        """Return the label of each row, (n,), by the rule `decode`."""
        distribution = self._distribution(X)
        criterion = self._criterion
        check_decode(self.decode, has_cost=criterion.cost is not None)
        return self._order.by_position[decode(distribution, self.decode, values=criterion.values, cost=criterion.cost)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return probabilities (n, len(classes_)), columns in the order of `classes_`, which is sorted."""
        return self._distribution(X)[:, self._order.columns]

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return natural logarithms of `predict_proba`, (n, len(classes_)).

        Without calibration they are finite also where the probability itself rounds to 0.
        """
        check_is_fitted(self)
        if self._calibration is None:
            return log_softmax(self._finite_logits(self._checked(X)))[:, self._order.columns]
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict_distribution(self, X: Any) -> np.ndarray:
        """Return probabilities (n, K), columns in rank order as `categories_`; 0 for labels not seen in training."""
        distribution = self._distribution(X)
        everything = np.zeros((len(distribution), len(self._order.categories)))
        everything[:, self._order.ranks] = distribution
        return everything

    def expected_value(self, X: Any) -> np.ndarray:
        """Return the expected class value of each row, (n,): of `values`, or of the ranks 0..K-1 of `categories_`."""
        return self._distribution(X) @ self._criterion.values

    def _distribution(self, X: Any) -> np.ndarray:
        """Calibrated probabilities (n, m) over positions."""
        check_is_fitted(self)
        return apply_calibration(self._calibration, self._raw_distribution(self._checked(X)))

    def _checked(self, X: Any) -> np.ndarray:
        """Features (n, d) as training took them."""
        return as_dense(validate_data(self, X, reset=False, **self._accepts()))

    def _raw_distribution(self, X: np.ndarray) -> np.ndarray:
        return softmax(self._finite_logits(X))

    def _finite_logits(self, X: np.ndarray) -> np.ndarray:
        if len(self.classes_) == 1:
            return np.zeros((len(X), 1))
        logits = self._logits(X)
        if not np.isfinite(logits).all():
            row = int(np.flatnonzero(~np.isfinite(logits).all(1))[0])
            raise ValueError(
                f"the scores of row {row} overflow: its features lie too far from those of training. Look for wrong "
                "units, and for marks of missing values such as 1e300."
            )
        return logits

    def _fit(self, X: Any, y: Any, sample_weight: Any, **training: Any) -> None:
        """Check everything, train, and calibrate; `training` goes to `_train`."""
        refuse_missing_objects(y)
        categories = ordered_categories(y) if self.categories is None else self.categories
        X, y = validate_data(self, X, y, **self._accepts())
        self._check_settings()
        self._set_order(label_order(y, categories))
        X, positions, weights = self._weighted_rows(X, y, sample_weight)
        random = check_random_state(self.random_state)
        self._calibration = None
        if self.calibration is None or len(self.classes_) == 1:
            self._train(X, positions, weights, random=random, **training)
            return
        kept, held = split_off(positions, self.calibration_fraction, random=random, purpose="calibration")
        self._train(X[kept], positions[kept], weights[kept], random=random, **training)
        self._calibration = fit_calibration(
            self.calibration,
            self._raw_distribution(X[held]),
            positions[held],
            values=self._criterion.values,
            sample_weight=weights[held],
        )

    def _weighted_rows(self, X: Any, y: np.ndarray, sample_weight: Any) -> tuple[np.ndarray, ...]:
        """Features, positions and weights of the rows that have weight: without it, a row is one left out."""
        X, positions = as_dense(X), self._order.positions(y)
        weights = row_weights(sample_weight, self.class_weight, order=self._order, positions=positions)
        kept = weights > 0
        if not kept.all():
            X, positions, weights = X[kept], positions[kept], weights[kept]
        self._check_features(X)
        return X, positions, weights

    def _check_features(self, X: np.ndarray) -> None:
        """Raise where features are larger than training or prediction can take."""

    def _set_order(self, order: LabelOrder) -> None:
        self._criterion = make_criterion(
            order,
            values=self.values,
            power=self.power,
            cost=self.cost,
            transport=self.transport,
            cross_entropy=self.cross_entropy,
        )
        self._order, self.classes_, self.categories_ = order, order.classes, order.categories

    def _check_settings(self) -> None:
        """Raise where a setting that both estimators have is wrong; subclasses extend this."""
        check_decode(self.decode, has_cost=self.cost is not None)
        check_choice("calibration", self.calibration, CALIBRATIONS)
        check_real("calibration_fraction", self.calibration_fraction, least=0.0, above=True, most=0.9)
        check_choice("early_stopping", self.early_stopping, (True, False, "auto"))
        check_choice("refit", self.refit, (True, False))
        check_count("verbose", int(self.verbose) if isinstance(self.verbose, bool) else self.verbose, least=0)
        check_count("n_iter_no_change", self.n_iter_no_change)
        check_real("validation_fraction", self.validation_fraction, least=0.0, above=True, most=0.9)

    def _stops_early(self, rows: int) -> bool:
        return rows >= ENOUGH_TO_HOLD_OUT if self.early_stopping == "auto" else bool(self.early_stopping)

    def _accepts(self) -> dict[str, Any]:
        return {"dtype": np.float64, "accept_sparse": "csr"}

    def _train(
        self, X: np.ndarray, positions: np.ndarray, weights: np.ndarray, *, random: np.random.RandomState
    ) -> None:
        raise NotImplementedError

    def _logits(self, X: np.ndarray) -> np.ndarray:
        raise NotImplementedError


def softmax(logits: np.ndarray) -> np.ndarray:
    """Rows of `logits` (n, m) as probabilities."""
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Logarithms of the rows of `softmax(logits)`, (n, m), which lose no digits where probabilities are tiny."""
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
