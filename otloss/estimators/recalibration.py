"""Recalibration of ordinal forecasts: match predicted to observed frequencies on held-out data.

With F_k = P(Y <= k) a forecast (k = 0 .. K - 2), G_k = 1[y <= k], and the ranked probability score (RPS)
sum_k d_k (F_k - G_k)^2 for gaps d_k between class values:

    Temperature             P'_j proportional to P_j^(1 / T)
    OrdinalRecalibration    logit F'_k = a_k + b_k logit F_k with b_k > 0, then F' made non-decreasing in k

For a given k the score is a Brier score of F'_k alone, so every threshold is fitted by itself. Thresholds that then
cross are put in order by the projection on non-decreasing vectors in the norm of the RPS. The G of every outcome is
such a vector, and a projection on a convex set brings one nearer to each of its points: it never raises the RPS.

Both minimise the mean score plus m / (16 n) times the squared logarithms of T or b and squared a: shrinkage to the
identity as strong as m examples of forecast 1/2, of which each has the curvature 1/16 in a. The maps of the thresholds
are pulled four times as strongly to the map that is best for all of them: few examples tell a common error, many the
differences. The identity is among the candidates of each, so the score on the data of the fit is never above what it
was.

Sources: C. Guo et al., On calibration of modern neural networks, ICML 2017 (temperature); J. Platt, Probabilistic
outputs for support vector machines, 1999 (logits), here by the Brier score; R. E. Barlow et al., Statistical inference
under order restrictions, 1972 (projection by pooling neighbours).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from otloss._checks import check_not_negative
from otloss.metrics.arrays import column_names, read_probabilities, read_values, read_weights
from otloss.metrics.distribution import Distribution
from otloss.metrics.inputs import columns_of
from otloss.metrics.rank_labels import Labels, in_order_of_labels, plain_labels, shown

# Temperatures and slopes stay between exp(-3) and exp(3).
_LARGEST_LOG = 3.0
_LARGEST_OFFSET = 20.0
_UNCHANGED = 1e-3
_PULL_TO_COMMON = 4.0
_GROUPS = 256


class Temperature(BaseEstimator):
    """One temperature for all classes: P'_j proportional to P_j^(1 / T).

    T > 1 tones down a forecaster that is too sure. Probabilities of 0 stay 0; which class is most likely stays.

    Args:
        criterion: "rps", the ranked probability score, or "nll", minus the logarithm of the probability of y.
        values: (K,) strictly increasing class values for the score, 0 to K - 1 by default; unused with "nll".
        shrinkage: the m of the module's formula, in examples; 0 for none.

    Attributes:
        temperature_: the T that was learned, between exp(-3) and exp(3); 1 where none is better.

    Example:
        >>> Temperature(shrinkage=0).fit([[0.9, 0.1]] * 4, [0, 0, 0, 1]).predict([[0.9, 0.1]]).round(3)
        array([[0.75, 0.25]])
    """

    def __init__(self, *, criterion: str = "rps", values: ArrayLike | None = None, shrinkage: float = 4.0) -> None:
        self.criterion = criterion
        self.values = values
        self.shrinkage = shrinkage

    def fit(self, proba: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Learn the temperature.

        Args:
            proba: (n, K) held-out forecasts, columns in rank order.
            y: (n,) positions 0 to K - 1 of the classes that came true.
            sample_weight: (n,) weights >= 0; only their ratios matter.

        Raises:
            ValueError: if rows are no probabilities, a position is out of range, sizes differ, a weight is negative,
                or with "nll" a class came true that was given probability 0.
        """
        if self.criterion not in ("rps", "nll"):
            raise ValueError(f'criterion is {self.criterion!r}, expected "rps" or "nll".')
        check_not_negative("shrinkage", self.shrinkage)
        data = _CalibrationData.read(proba, y, sample_weight)
        if self.criterion == "nll" and (data.proba[np.arange(data.y.size), data.y] == 0).any():
            raise ValueError(
                'a class came true that was given probability 0, so "nll" is infinite; use criterion="rps".'
            )
        score = self._score(data, _log(data.proba))
        step = 0.4
        candidates = [0.0, *np.linspace(-_LARGEST_LOG, _LARGEST_LOG, round(2 * _LARGEST_LOG / step) + 1).tolist()]
        # The score may have several local minima, so a grid is searched first; equal scores change nothing.
        valley = min(candidates, key=score)
        bounds = max(valley - step, -_LARGEST_LOG), min(valley + step, _LARGEST_LOG)
        refined = minimize_scalar(score, bounds=bounds, method="bounded", options={"xatol": 1e-6})
        best = min((valley, float(refined.x)), key=score)
        self.temperature_ = float(np.exp(best))
        return self

    def predict(self, proba: ArrayLike) -> Float[np.ndarray, "n classes"]:
        """Return the probabilities at the learned temperature.

        Args:
            proba: (n, K) forecasts, columns in rank order. Those of a `Distribution` keep their labels.

        Raises:
            ValueError: if rows are no probabilities, or proba is a data frame with other columns than 0 to K - 1.
            sklearn.exceptions.NotFittedError: before `fit`.
        """
        check_is_fitted(self, "temperature_")
        table, labels = _read_forecasts(proba), _labels_of(proba)
        return _labelled(table if self.temperature_ == 1 else _tempered(_log(table), self.temperature_), labels)

    def _score(self, data: _CalibrationData, logs: Float[np.ndarray, "n classes"]) -> Callable[[float], float]:
        """Return the pulled score as a function of log T."""
        # The gaps' sum is the unit of the score, and the pull has none.
        gaps = np.diff(data.values(self.values))
        gaps = gaps / max(gaps.sum(), np.finfo(float).tiny)
        at_labels = (np.arange(data.y.size), data.y)

        def score(log_temperature: float) -> float:
            tempered = _tempered(logs, np.exp(log_temperature))
            if self.criterion == "rps":
                mean = data.weight @ ((tempered.cumsum(1)[:, :-1] - data.was_below) ** 2 @ gaps)
                return float(mean + self.shrinkage * data.pull * log_temperature**2)
            # An event of probability 1/2 has the curvature 1/8 in its logit, twice the Brier score's.
            return float(data.weight @ -_log(tempered[at_labels]) + 2 * self.shrinkage * data.pull * log_temperature**2)

        return score


class OrdinalRecalibration(BaseEstimator):
    """A monotone map for each threshold's forecast P(Y <= k), by the ranked probability score; never crossing.

    Corrects forecasts that are too sure or not sure enough, and that lean to one side, differently for low and high
    classes. It does not keep which class is most likely. A thousandth of the forecast is left as it was, so that no
    class of positive probability (above 1e-305, less than which a thousandth is 0) ends with 0.

    Args:
        values: (K,) strictly increasing class values, the gaps of the score; 0 to K - 1 by default.
        shrinkage: the m of the module's formula, in examples; 0 for none. By default 8: less gains little on many
            examples and makes a good forecast worse on few.

    Attributes:
        offset_: (K - 1,), a_k; 0 where no map is better than the identity.
        slope_: (K - 1,), b_k, above 0; 1 where no map is better than the identity.
        smallest_: the least probability of the fit; new ones below are taken for half of it.
        labels_: (K,) the labels of a `Distribution`, else None.

    Example:
        >>> proba, y = [[0.8, 0.1, 0.1]] * 4, [0, 1, 1, 2]
        >>> OrdinalRecalibration(shrinkage=0).fit(proba, y).predict(proba[:1]).round(2)
        array([[0.25, 0.5 , 0.25]])
    """

    def __init__(self, *, values: ArrayLike | None = None, shrinkage: float = 8.0) -> None:
        self.values = values
        self.shrinkage = shrinkage

    def fit(self, proba: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Learn the maps.

        Args:
            proba: (n, K) held-out forecasts, columns in rank order.
            y: (n,) positions 0 to K - 1 of the classes that came true; some may be absent.
            sample_weight: (n,) weights >= 0; only their ratios matter.

        Raises:
            ValueError: if rows are no probabilities, a position is out of range or may be a label, sizes differ, a
                weight is negative, the values do not increase, or a Distribution has lost its labels.
        """
        check_not_negative("shrinkage", self.shrinkage)
        data = _CalibrationData.read(proba, y, sample_weight)
        self.gaps_ = np.diff(data.values(self.values))
        self.labels_ = data.labels
        below, above = _both_sides(data.proba)
        both = np.concatenate([below, above])
        self.smallest_ = float(both[both > 0].min(initial=1.0))
        logits = self._logits(below, above)
        thresholds = data.classes - 1
        everything = (below.ravel(), logits.ravel(), data.was_below.ravel(), np.repeat(data.weight, thresholds))
        common = _fit_map(*everything, self.shrinkage * data.pull * thresholds, (0.0, 0.0))
        pull = _PULL_TO_COMMON * self.shrinkage * data.pull
        columns = zip(below.T, logits.T, data.was_below.T, strict=True)
        maps = [_fit_map(*column, data.weight, pull, common) for column in columns]
        self.offset_, log_slope = np.array(maps).reshape(-1, 2).T
        self.slope_ = np.exp(log_slope)
        return self

    def predict(self, proba: ArrayLike) -> Float[np.ndarray, "n classes"]:
        """Return the recalibrated probabilities.

        Args:
            proba: (n, K) forecasts, columns in rank order. Those of a `Distribution` keep their labels.

        Raises:
            ValueError: if rows are no probabilities, their number or their labels are not as in the fit, or proba is a
                data frame with other columns than 0 to K - 1.
            sklearn.exceptions.NotFittedError: before `fit`.
        """
        check_is_fitted(self, "offset_")
        table = _read_forecasts(proba)
        if table.shape[1] != self.offset_.size + 1:
            raise ValueError(f"proba has {table.shape[1]} columns, expected {self.offset_.size + 1} as in the fit.")
        labels = _labels_of(proba)
        if labels is not None and self.labels_ is not None and not np.array_equal(labels, self.labels_):
            raise ValueError(f"proba has the labels {shown(labels)}, expected {shown(self.labels_)} as in the fit.")
        below, above = _both_sides(table)
        is_changed = (self.offset_ != 0) | (self.slope_ != 1)
        mapped = np.where(is_changed, expit(self.offset_ + self.slope_ * self._logits(below, above)), below)
        mapped = np.diff(in_order(mapped, self.gaps_), axis=1, prepend=0.0, append=1.0)
        return _labelled(mapped + _UNCHANGED * (table - mapped) if is_changed.any() else table, labels)

    def _logits(self, below: np.ndarray, above: np.ndarray) -> Float[np.ndarray, "n thresholds"]:
        smallest = max(self.smallest_ / 2, np.finfo(float).tiny)  # Half of the smallest float is 0.
        return np.log(np.maximum(below, smallest)) - np.log(np.maximum(above, smallest))


@dataclass(frozen=True)
class _CalibrationData:
    """Checked held-out data: forecasts (n, K), their labels, positions (n,), weights (n,) above 0 of sum 1."""

    proba: Float[np.ndarray, "n classes"]
    y: Int[np.ndarray, " n"]
    weight: Float[np.ndarray, " n"]
    labels: Labels | None

    @classmethod
    def read(cls, proba: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None) -> Self:
        table, labels = _read_forecasts(proba), _labels_of(proba)
        index = _positions_of_columns(y, table.shape[1], labels)
        if index.size != len(table):
            raise ValueError(f"y has {index.size} classes and proba {len(table)} rows, expected as many.")
        weight = read_weights(sample_weight, index.size)
        has_weight = weight > 0
        return cls(table[has_weight], index[has_weight], weight[has_weight] / weight.sum(), labels)

    @property
    def classes(self) -> int:
        return self.proba.shape[1]

    def values(self, values: Any) -> Float[np.ndarray, " classes"]:
        """Return the class values, of a Series in the order of the labels."""
        if self.labels is None:
            return read_values(values, self.classes)
        return in_order_of_labels(self.labels).values(values)

    @property
    def was_below(self) -> Float[np.ndarray, "n thresholds"]:
        return (self.y[:, None] <= np.arange(self.classes - 1)).astype(float)

    @property
    def pull(self) -> float:
        """1 / (16 n), with the n of as many examples of equal weight."""
        return float(self.weight @ self.weight) / 16


def _read_forecasts(proba: ArrayLike) -> Float[np.ndarray, "n classes"]:
    """Return (n, K) probabilities; ValueError for a data frame, unless its columns are named 0 to K - 1 in order."""
    columns = column_names(proba)
    if columns != list(range(len(columns))):
        raise ValueError(
            f"proba is a data frame with the columns {shown(np.array(columns, dtype=object))}, which need not be in "
            "rank order; pass proba[order].to_numpy(), where order lists the classes, lowest first."
        )
    return read_probabilities("proba", proba)


def _labels_of(proba: ArrayLike) -> Labels | None:
    """Return the labels of a `Distribution`; ValueError if an operation has lost them."""
    return columns_of(proba) if isinstance(proba, Distribution) else None


def _labelled(table: Float[np.ndarray, "n classes"], labels: Labels | None) -> Float[np.ndarray, "n classes"]:
    """Return the table, as a `Distribution` if there are labels."""
    return table if labels is None else Distribution(table, labels=labels)


def _positions_of_columns(y: ArrayLike, columns: int, names: Labels | None) -> Int[np.ndarray, " n"]:
    """Return positions (n,); ValueError for labels, also for those that the columns have and that could be both."""
    labels = plain_labels("y", y)
    wrong = ~np.isin(labels, np.arange(columns)) if labels.dtype.kind in "biuf" else np.ones(labels.shape, bool)
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"y[{first}] is {labels[first].item()!r}, expected 0 to {columns - 1}, the column of proba in rank order "
            "that is of the class that came true; of labels take the place in the rank order, such as "
            "[order.index(label) for label in y]."
        )
    index = labels.astype(np.int64)
    if names is None or names.dtype.kind not in "biuf":
        return index
    if np.isin(labels, names).all() and (names[index] != labels).any():
        raise ValueError(
            f"y holds labels of proba, {shown(names)}, that may be positions from 0 too; pass positions, and "
            "np.asarray(proba). Of labels they are [proba.labels.tolist().index(label) for label in y]."
        )
    return index


def _fit_map(
    below: np.ndarray,
    logit: np.ndarray,
    was_below: np.ndarray,
    weight: np.ndarray,
    pull: float,
    centre: tuple[float, float],
) -> tuple[float, float]:
    """Return (a, log b) of least Brier score, pulled to `centre`; (0, 0) if that is not below the score of `below`."""

    if not logit.size:  # one class has no threshold
        return 0.0, 0.0

    def score(parameters: np.ndarray, unit: float = 1.0) -> tuple[float, np.ndarray]:
        slope = np.exp(parameters[1])
        mapped = expit(parameters[0] + slope * logit)
        error, change = mapped - was_below, parameters - centre
        by_logit = 2 * weight * error * mapped * (1 - mapped)
        gradient = np.array([by_logit.sum(), by_logit @ logit * slope]) + 2 * pull * change
        return float(weight @ error**2 + pull * change @ change) / unit, gradient / unit

    starts = [centre, (0.0, 0.0), _best_on_a_grid(logit, was_below, weight, pull, centre)]
    start = min(starts, key=lambda s: score(np.array(s))[0])
    bounds = [(-_LARGEST_OFFSET, _LARGEST_OFFSET), (-_LARGEST_LOG, _LARGEST_LOG)]
    # In units of the score, which is small of a rare event, because the optimiser's tolerances are absolute.
    unit = max(score(np.array(start))[0], np.finfo(float).tiny)
    best = minimize(score, np.array(start), (unit,), jac=True, method="L-BFGS-B", bounds=bounds).x
    better = weight @ (expit(best[0] + np.exp(best[1]) * logit) - was_below) ** 2 < weight @ (below - was_below) ** 2
    return (float(best[0]), float(best[1])) if better else (0.0, 0.0)


def _best_on_a_grid(
    logit: np.ndarray, was_below: np.ndarray, weight: np.ndarray, pull: float, centre: tuple[float, float]
) -> tuple[float, float]:
    """Return the (a, log b) on a grid of least score: it may have several minima, and is flat near 0 and 1.

    Groups of neighbouring logits stand for the examples, of nearly equal weights.
    """
    order = logit.argsort()
    last = weight[order].cumsum()
    group = np.minimum(last / last[-1] * _GROUPS, _GROUPS - 1).astype(int)
    size = np.bincount(group, weight[order])
    is_filled = size > 0
    size = size[is_filled]
    middle, below = (np.bincount(group, (weight * of)[order])[is_filled] / size for of in (logit, was_below))
    offset = np.linspace(-_LARGEST_OFFSET, _LARGEST_OFFSET, 81)[:, None]
    log_slope = np.linspace(-_LARGEST_LOG, _LARGEST_LOG, 25)
    mapped = expit(offset[..., None] + np.exp(log_slope)[:, None] * middle)
    score = (mapped**2 - 2 * mapped * below) @ size + pull * ((offset - centre[0]) ** 2 + (log_slope - centre[1]) ** 2)
    place = np.unravel_index(score.argmin(), score.shape)
    return float(offset[place[0], 0]), float(log_slope[place[1]])


def in_order(below: Float[np.ndarray, "n thresholds"], gaps: Float[np.ndarray, " thresholds"]) -> np.ndarray:
    """Return the nearest rows that do not decrease, in the norm sum_k gap_k (.)^2.

    Pooled neighbours hold max over i <= k of min over j >= k of the weighted mean of entries i to j.
    """
    crossing = (np.diff(below, axis=1) < 0).any(1)
    if not crossing.any():
        return below
    rows = below[crossing]
    sums = np.pad((rows * gaps).cumsum(1), ((0, 0), (1, 0)))
    widths = np.pad(gaps.cumsum(), (1, 0))
    nearest = np.zeros_like(rows)
    for i in range(gaps.size):
        means = (sums[:, i + 1 :] - sums[:, i : i + 1]) / (widths[i + 1 :] - widths[i])  # (rows, j from i on)
        smallest = np.minimum.accumulate(means[:, ::-1], axis=1)[:, ::-1]
        nearest[:, i:] = np.maximum(nearest[:, i:], smallest)
    ordered = below.copy()
    ordered[crossing] = np.maximum.accumulate(nearest.clip(0, 1), axis=1)
    return ordered


def _both_sides(proba: Float[np.ndarray, "n classes"]) -> tuple[np.ndarray, np.ndarray]:
    """Return (n, K - 1) P(Y <= k) and P(Y > k), each summed from its own end: small ones keep their digits."""
    return proba.cumsum(1)[:, :-1].clip(max=1), proba[:, ::-1].cumsum(1)[:, -2::-1].clip(max=1)


def _tempered(logs: Float[np.ndarray, "n classes"], temperature: float) -> Float[np.ndarray, "n classes"]:
    scaled = logs / temperature
    weights = np.exp(scaled - scaled.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def _log(proba: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(proba)
