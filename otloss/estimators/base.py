"""The base of the classifiers: labels in and out, weights of rows, validation rows, calibration, decoding."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import issparse
from scipy.special import log_softmax, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import _safe_indexing, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.validation import _num_samples, check_is_fitted, validate_data

from otloss._ordered_classes import check_choice
from otloss.estimators.criterion import check_real, make_criterion
from otloss.estimators.decode import RULES, decode
from otloss.estimators.features import numpy_alone, reading_features
from otloss.estimators.label_order import EncodedLabelsWarning, LabelOrder, label_order
from otloss.estimators.recalibration import OrdinalRecalibration, Temperature
from otloss.metrics.arrays import read_weights
from otloss.metrics.distribution import Distribution
from otloss.metrics.rank_labels import categories_of, in_one_precision, plain_items, plain_labels, shown

CALIBRATIONS = {"temperature": Temperature, "ordinal": OrdinalRecalibration}
ENOUGH_TO_HOLD_OUT = 50  # With at least so many rows early_stopping="auto" keeps some for validation.
# Rows of at least this mean weight may be cells of a table of counts, which are divided as so many cases at most.
LEAST_COUNT, _MOST_CASES = 2.0, 10**6
# Power 1 and costs drive probabilities below the smallest float, out of which no map could bring them back.
SMALLEST_CALIBRATED = 1e-6


@dataclass(kw_only=True, eq=False, repr=False)
class OrdinalBase(ClassifierMixin, BaseEstimator):
    """Frame of a classifier of ordered labels; a subclass checks its own settings, trains, and returns logits."""

    categories: Any = None
    values: Any = None
    power: int = 2
    cost: Any = None
    transport: float = 1.0
    cross_entropy: float = 0.2
    class_weight: Any = None
    decode: str = "median"
    calibration: str | None = None
    validation_fraction: float = 0.2
    random_state: Any = None

    _advice_for_text = "encode it, for example with sklearn.preprocessing.OneHotEncoder"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def predict(self, X: Any) -> np.ndarray:
        """Return the label of each row, (n,), by the rule `decode`."""
        distribution = self._distribution(X)
        self._check_decode()
        criterion = self._criterion
        return self._order.by_position[decode(distribution, self.decode, values=criterion.values, cost=criterion.cost)]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the accuracy of `predict` on features X (n, d) with labels y (n,), by weight."""
        predicted = self.predict(X)
        with numpy_alone():
            labels = plain_labels("y", column_or_1d(plain_items(y)))
            check_consistent_length(predicted, labels)
        if (labels.dtype.kind in "biuf") != (predicted.dtype.kind in "biuf"):
            raise ValueError(f"y holds labels such as {labels[0].item()!r}, expected some of {shown(self.classes_)}.")
        labels, predicted = in_one_precision(labels, predicted)
        weights = None if sample_weight is None else read_weights(sample_weight, len(labels))
        return float(np.average(labels == predicted, weights=weights))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return probabilities (n, len(classes_)), columns in the order of `classes_`, which is sorted."""
        return self._distribution(X)[:, self._order.columns]

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return natural logarithms of `predict_proba`, (n, len(classes_)).

        Without calibration they are finite also where the probability itself rounds to 0.
        """
        check_is_fitted(self)
        if self._calibration is None:
            return log_softmax(self._finite_logits(self._features(X)), 1)[:, self._order.columns]
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def decision_function(self, X: Any) -> np.ndarray:
        """Return `predict_log_proba`, (n, len(classes_)), whatever `decode` is; of two classes the log-odds, (n,).

        scikit-learn's `CalibratedClassifierCV` fits its maps to it, and its ranking scores read it. Of two classes it
        is above 0 where the second one is more probable. `predict` chooses the largest with `decode="argmax"` only.
        """
        each = self.predict_log_proba(X)
        return each[:, 1] - each[:, 0] if each.shape[1] == 2 else each

    def predict_distribution(self, X: Any) -> Distribution:
        """Return probabilities (n, K), columns in rank order as `categories_`; 0 for labels not seen in training.

        It is an array with the class of each column in `labels`, by which metrics and plots read it.
        """
        distribution = self._distribution(X)
        everything = np.zeros((len(distribution), len(self._order.categories)))
        everything[:, self._order.ranks] = distribution
        return Distribution(everything, labels=self._order.categories)

    def expected_value(self, X: Any) -> np.ndarray:
        """Return the expected class value of each row, (n,): of `values`, or of the ranks 0..K-1 of `categories_`."""
        return self._distribution(X) @ self._criterion.values

    def _distribution(self, X: Any) -> np.ndarray:
        """Return calibrated probabilities (n, m) over positions."""
        check_is_fitted(self)
        distribution = softmax(self._finite_logits(self._features(X)), 1)
        return distribution if self._calibration is None else self._calibration.predict(above_zero(distribution))

    def _features(self, X: Any) -> Any:
        """Return features (n, d) as training took them."""
        with reading_features(X, self._advice_for_text):
            return self._as_features(validate_data(self, X, reset=False, **self._accepts()))

    def _as_features(self, X: Any) -> Any:
        """Return X (n, d) as `_train` and `_logits` take it: an array, unless a subclass takes sparse matrices."""
        return dense(X)

    def _finite_logits(self, X: Any) -> np.ndarray:
        if len(self.classes_) == 1:
            return np.zeros((_num_samples(X), 1))
        logits = self._logits(X)
        if not np.isfinite(logits).all():
            row = int(np.flatnonzero(~np.isfinite(logits).all(1))[0])
            raise ValueError(
                f"the scores of row {row} overflow: its features lie too far from the training rows. Look for wrong "
                "units, and for marks of missing values such as 1e300."
            )
        return logits

    def _fit(self, X: Any, y: Any, sample_weight: Any, **training: Any) -> None:
        """Check everything, train, and calibrate; `training` goes to `_train`."""
        own_categories = categories_of(y)  # of an ordered Categorical, which holds labels for certain
        categories = own_categories if self.categories is None else self.categories
        X, y = self._checked(X, plain_items(y))
        self._check_settings()
        self._order = label_order(y, categories)
        names_labels = self.values is not None or self.cost is not None or isinstance(self.class_weight, dict)
        if own_categories is None and (self._order.gaps_in_doubt or (self._order.doubt and names_labels)):
            warnings.warn(f"{self._order.doubt}.", EncodedLabelsWarning, stacklevel=3)
        self._criterion = make_criterion(self._order, self)
        self.classes_, self.categories_ = self._order.classes, self._order.categories
        X, positions, weights = self._weighted_rows(self._as_features(X), y, sample_weight)
        random = checked_random_state(self.random_state)
        self._calibration = None
        if self.calibration is None or len(self.classes_) == 1:
            self._train(X, positions, weights, random=random, **training)
            return
        kept, other = hold_out(
            X, positions, weights, self.validation_fraction, random=random, purpose="calibration"
        )  # fmt: skip
        self._train(X[kept.rows], positions[kept.rows], kept.weights, random=random, **training)
        raw = softmax(self._finite_logits(X[other.rows]), 1)
        calibration: Any = CALIBRATIONS[self.calibration](values=self._criterion.values)
        self._calibration = calibration.fit(above_zero(raw), positions[other.rows], sample_weight=other.weights)

    def _checked(self, X: Any, y: Any) -> tuple[Any, np.ndarray]:
        """Return features (n, d) and labels (n,) of training, and remember the columns."""
        with reading_features(X, self._advice_for_text):
            checked: tuple[Any, np.ndarray] = validate_data(self, X, y, **self._accepts())
        return checked

    def _weighted_rows(self, X: Any, y: np.ndarray, sample_weight: Any) -> tuple[Any, np.ndarray, np.ndarray]:
        """Return features, positions and weights of the rows that have weight: without it, a row is one left out."""
        positions = self._order.positions(y)
        weights = row_weights(sample_weight, self.class_weight, order=self._order, positions=positions)
        kept = np.flatnonzero(weights > 0)
        if len(kept) == len(weights):
            return X, positions, weights
        return _safe_indexing(X, kept), positions[kept], weights[kept]

    def _check_settings(self) -> None:
        """Raise where a setting that all estimators have is wrong; subclasses extend this."""
        self._check_decode()
        check_choice("calibration", self.calibration, (None, *CALIBRATIONS))
        check_real("validation_fraction", self.validation_fraction, minimum=0.0, above=True, maximum=0.9)
        checked_random_state(self.random_state)

    def _check_decode(self) -> None:
        check_choice("decode", self.decode, RULES)
        if self.decode == "cost" and self.cost is None:
            raise ValueError("decode is 'cost' without a cost matrix; give cost=, or decode by 'median' or 'mean'.")

    def _check_early_stopping(self) -> None:
        check_choice("early_stopping", self.early_stopping, (True, False, "auto"))

    def _stops_early(self, rows: int) -> bool:
        return rows >= ENOUGH_TO_HOLD_OUT if self.early_stopping == "auto" else bool(self.early_stopping)

    def _accepts(self) -> dict[str, Any]:
        return {"dtype": np.float64, "accept_sparse": "csr"}

    def _train(self, X: Any, positions: np.ndarray, weights: np.ndarray, *, random: np.random.RandomState) -> None:
        raise NotImplementedError

    def _logits(self, X: Any) -> np.ndarray:
        raise NotImplementedError


def checked_random_state(random_state: Any) -> np.random.RandomState:
    """Return `sklearn.utils.check_random_state`, whose error does not name the parameter; raises ValueError."""
    try:
        random: np.random.RandomState = check_random_state(random_state)
    except ValueError as error:
        fix = "; give a RandomState, or the seed itself" if isinstance(random_state, np.random.Generator) else ""
        raise ValueError(
            f"random_state is {random_state!r}, expected None, a whole number from 0 to 2**32 - 1 or a "
            f"numpy.random.RandomState{fix}."
        ) from error
    return random


@contextmanager
def unchanged_on_error(estimator: BaseEstimator) -> Iterator[None]:
    """Restore the attributes of `estimator` if the body raises: parameters of one fit never meet labels of another."""
    attributes = vars(estimator).copy()
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(attributes)
        raise


def above_zero(distribution: np.ndarray) -> np.ndarray:
    """Return rows (n, m) with no probability far below `SMALLEST_CALIBRATED`."""
    clipped = np.maximum(distribution, SMALLEST_CALIBRATED)
    return clipped / clipped.sum(1, keepdims=True)


def _is_whole_number(label: Any) -> bool:
    return isinstance(label, numbers.Real) and float(label).is_integer()


def row_weights(sample_weight: Any, class_weight: Any, *, order: LabelOrder, positions: np.ndarray) -> np.ndarray:
    """Return weights (n,): the sample weights times the weights of the rows' classes.

    `"balanced"` gives every class that has weight the same total, without changing the sum of all.

    Raises:
        ValueError: if weights are negative, not finite, all zero, or not one per row, or if a class weight
            names an unknown label. Whole numbers that no row has are left out if all labels that have a row are named.
    """
    weights = read_weights(sample_weight, len(positions))
    _check_finite_sum("sample_weight", weights)
    if class_weight is None:
        return weights
    if isinstance(class_weight, dict):
        factors = np.ones(len(order.names))
        names = order.names.tolist()
        unknown = []
        for label, factor in zip(plain_items([*class_weight]), class_weight.values(), strict=True):
            factor = check_real(f"class_weight[{label!r}]", factor, minimum=0.0)
            if label in names:
                factors[names.index(label)] = factor
            else:
                unknown.append(label)
        # A whole number may be a class without a row, as in a fold, if all classes with rows are named.
        are_named = not order.is_explicit and all(label in class_weight for label in order.classes.tolist())
        if unknown and not (are_named and all(map(_is_whole_number, [*unknown, *names]))):
            raise ValueError(
                f"class_weight names the label {unknown[0]!r}, expected labels of {names}; give all labels in their "
                "order by categories= where some may have no row."
            )
        weights = weights * factors[order.ranks][positions]
    elif isinstance(class_weight, str) and class_weight == "balanced":
        mass = np.bincount(positions, weights, minlength=len(order.ranks))
        weights = (
            weights * np.divide(mass.sum() / np.count_nonzero(mass), mass, where=mass > 0, out=mass * 0)[positions]
        )
    else:
        raise ValueError(f"class_weight is {class_weight!r}, expected None, 'balanced' or a dict of labels.")
    _check_finite_sum("sample_weight times class_weight", weights)
    if not weights.any():
        raise ValueError(f"class_weight {class_weight!r} leaves no row a weight above zero; expected one at least.")
    return weights


def _check_finite_sum(name: str, weights: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        total = weights.sum()
    if not total < np.inf:
        raise ValueError(
            f"{name} is up to {weights.max():g}, whose sum is beyond float64; divide the weights by the largest."
        )


class Half(NamedTuple):
    """One of the two parts of `hold_out`: the places of its rows, and their weights."""

    rows: np.ndarray
    weights: np.ndarray


def hold_out(
    X: Any, positions: np.ndarray, weights: np.ndarray, fraction: float, *, random: np.random.RandomState, purpose: str
) -> tuple[Half, Half]:
    """Return what is kept and what is held out, as `split_off`; of the cells of a table of counts a part of the count.

    Without a whole cell a model would learn that its label never occurs at these features.
    """
    if not _are_counts(X, positions, weights):
        halves = split_off(positions, fraction, random=random, purpose=purpose)
        return Half(halves[0], weights[halves[0]]), Half(halves[1], weights[halves[1]])
    copies = np.maximum(np.rint(weights * min(1.0, _MOST_CASES / weights.sum())), 1).astype(int)
    cases = np.repeat(np.arange(len(weights)), copies)
    _, held = split_off(positions[cases], fraction, random=random, purpose=purpose)
    share = np.bincount(cases[held], minlength=len(weights)) / copies
    parts = [weights * (1 - share), weights * share]
    kept, out = (Half(np.flatnonzero(part), part[part > 0]) for part in parts)
    return kept, out


def _are_counts(X: Any, positions: np.ndarray, weights: np.ndarray) -> bool:
    """Return whether rows are cells of a table: each once, of some weight, and most features with several labels."""
    if len(weights) == 0 or weights.mean() < LEAST_COUNT or (issparse(X) and np.prod(X.shape) > _MOST_CASES):
        return False
    _, kinds = np.unique(dense(X), axis=0, return_inverse=True)
    kinds = kinds.reshape(-1)
    has_other_labels = np.bincount(kinds)[kinds] > 1
    return bool(
        has_other_labels.mean() > 0.5 and len(np.unique(kinds * (positions.max() + 1) + positions)) == len(kinds)
    )


def split_off(
    positions: np.ndarray, fraction: float, *, random: np.random.RandomState, purpose: str
) -> tuple[np.ndarray, np.ndarray]:
    """Indices (kept, held out): of each class about `fraction` of its rows are held out, and at least one is kept.

    One row at least is held out, of the largest class if need be.

    Raises:
        ValueError: if no class has two rows.
    """
    parts: list[np.ndarray] = []
    largest = np.zeros(0, dtype=int)
    # The remainder is carried from class to class, so that small classes get their share too.
    surplus = random.uniform()
    for position in np.unique(positions):
        rows = random.permutation(np.flatnonzero(positions == position))
        wanted = fraction * len(rows) + surplus
        number = min(int(wanted), len(rows) - 1)
        surplus = min(wanted - number, 1.0)
        parts.append(rows[:number])
        largest = rows if len(rows) > len(largest) else largest
    if len(largest) < 2:
        raise ValueError(
            f"{len(positions)} rows leave none to hold out for {purpose}: each class keeps one; add rows, or turn it "
            "off."
        )
    index = np.sort(np.concatenate(parts))
    index = index if len(index) else largest[:1]
    kept = np.ones(len(positions), bool)
    kept[index] = False
    return np.flatnonzero(kept), index


def dense(X: Any) -> np.ndarray:
    """Return X (n, d) as an array: what a sparse matrix does not hold is 0, where XGBoost would take it for missing."""
    return X.toarray() if issparse(X) else X
