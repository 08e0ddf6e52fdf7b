"""Metrics of predicted probabilities.

With F_k = P(Y <= k) the forecast of one example, y its true class, G_k = 1[y <= k], and gaps d_k = v_{k+1} - v_k:

    ranked probability score    sum_k d_k (F_k - G_k)^2        proper: its mean is least at the true probabilities
    ordinal EMD                 sum_k d_k |F_k - G_k| = sum_j P(Y = j) |v_j - v_y|        not proper: rewards certainty
    threshold k's calibration   sum over bins b of F_k:  share_b |mean of F_k in b - mean of G_k in b|
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from otloss._checks import check_count
from otloss.metrics.arrays import array_bits
from otloss.metrics.inputs import Forecast, read_forecast

NORMAL_95 = 1.959964  # the middle 95 % of a normal variable, in deviations


@dataclass(frozen=True, eq=False)  # arrays have no single truth value
class Reliability:
    """How often the true class was at most a threshold, against how often it was forecast to be.

    Attributes:
        threshold: the label k of P(Y <= k).
        forecast: (B,) mean forecast in each bin that holds examples, increasing.
        observed: (B,) share of examples at or below the threshold.
        share: (B,) of the weight of all examples; sum 1.
        count: (B,) examples; where they have weights w, (sum w)^2 / sum w^2, the number that would be as precise.
    """

    threshold: object
    forecast: Float[np.ndarray, " bins"]
    observed: Float[np.ndarray, " bins"]
    share: Float[np.ndarray, " bins"]
    count: Float[np.ndarray, " bins"]

    @property
    def error(self) -> float:
        """The expected calibration error of this threshold."""
        return float((self.share * np.abs(self.forecast - self.observed)).sum())

    @property
    def interval(self) -> tuple[Float[np.ndarray, " bins"], Float[np.ndarray, " bins"]]:
        """Ends of the 95 % interval of each observed share: Wilson's, which is right for a handful of examples too."""
        correction = NORMAL_95**2 / self.count
        middle = (self.observed + correction / 2) / (1 + correction)
        half = np.sqrt(correction * (self.observed * (1 - self.observed) + correction / 4)) / (1 + correction)
        low, high = np.maximum(middle - half, 0.0), np.minimum(middle + half, 1.0)
        # Rounding may put an end on the wrong side of a share near 0 or 1.
        return np.minimum(low, self.observed), np.maximum(high, self.observed)


def ranked_probability_score(
    y_true: ArrayLike,
    proba: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    columns: ArrayLike = "sorted",
    values: ArrayLike | None = None,
    normalize: bool = False,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Return the mean over examples of sum_k d_k (F_k - G_k)^2, G the step at what came true.

    Args:
        y_true: (n,) labels.
        proba: (n, K) probabilities, as `predict_proba` gives them.
        labels: (K,) all classes in rank order, at the positions 0 to K - 1. By default the order of an ordered pandas
            Categorical; of whole numbers in y_true and `columns` every integer from the smallest to the largest, so
            that 1, 2, 5 have the positions 0, 1, 4; of numbers with a fraction the sorted labels. Without `columns`,
            either the labels of y_true or all classes are as many as the columns.
        columns: the order of the columns of `proba`: "sorted" by label, as in scikit-learn; "rank", the order of
            `labels`; or the label of each column, such as `model.classes_`. A class without column has probability 0.
            A data frame needs one of the last two.
        values: (K,) strictly increasing class values in rank order; 0 to K - 1 by default.
        normalize: divide by the distance between the first class and the last (K - 1 by default), for a score between
            0 and 1; otherwise, by default, by nothing.
        sample_weight: (n,) weights >= 0.

    Raises:
        ValueError: if a label is missing or not among `labels`, labels are text and `labels` is not given, rows are no
            probabilities, sizes differ, the columns cannot be told, a weight is negative, or the values do not
            increase.
        TypeError: if the labels are of different types.

    Source:
        E. S. Epstein, A scoring system for probability forecasts of ranked categories, J. Appl. Meteorology 8 (1969).

    Example:
        >>> ranked_probability_score([0, 2], [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], labels=[0, 1, 2])
        0.125
        >>> ranked_probability_score([0, 2], [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], labels=[0, 1, 2], normalize=True)
        0.0625
    """
    forecast = read_forecast(y_true, proba, labels, columns, sample_weight)
    return _mean_distance(forecast, values, normalize, power=2)


def ordinal_emd(
    y_true: ArrayLike,
    proba: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    columns: ArrayLike = "sorted",
    values: ArrayLike | None = None,
    normalize: bool = False,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Return the mean over examples of the earth mover's distance W_1 between the forecast and the true class.

    Args, Raises: as `ranked_probability_score`; the unit is the unit of the values. W_1 is no proper score: a forecast
    that is sure of its median does best.

    Example:
        >>> ordinal_emd([0, 2], [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], labels=[0, 1, 2])
        0.25
    """
    forecast = read_forecast(y_true, proba, labels, columns, sample_weight)
    return _mean_distance(forecast, values, normalize, power=1)


def threshold_calibration_error(
    y_true: ArrayLike,
    proba: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    columns: ArrayLike = "sorted",
    bins: int = 10,
    strategy: str = "uniform",
    sample_weight: ArrayLike | None = None,
) -> float:
    """Return the expected calibration error of the K - 1 forecasts P(Y <= k), averaged over the thresholds k.

    Args:
        y_true, proba, labels, columns, sample_weight: as for `ranked_probability_score`.
        bins: how many; those without examples do not count. With few examples to a bin the error is too large, by
            about sqrt(p (1 - p) / examples).
        strategy: "uniform" bins of one width in [0, 1], or "quantile" bins of one weight; equal forecasts share a bin.

    Raises:
        ValueError, TypeError: as `ranked_probability_score`; also for a single class or other bins.

    Source:
        M. P. Naeini, G. Cooper, M. Hauskrecht, Obtaining well calibrated probabilities using Bayesian binning,
        AAAI 2015, for one event; here each threshold is one.

    Example:
        >>> threshold_calibration_error([0, 1, 1, 1], [[0.5, 0.5]] * 4)
        0.25
    """
    forecast = _read_thresholds(y_true, proba, labels, columns, sample_weight, bins, strategy)
    curves = _curves(forecast, bins, strategy, _rounding(proba))
    # The thresholds between two classes that occur have one and the same curve.
    return float(np.average([curve.error for curve in curves], weights=np.diff(forecast.order.ranks)))


def threshold_reliability(
    y_true: ArrayLike,
    proba: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    columns: ArrayLike = "sorted",
    bins: int = 10,
    strategy: str = "uniform",
    sample_weight: ArrayLike | None = None,
) -> list[Reliability]:
    """Return the reliability curve of P(Y <= k) for each class but the last, in rank order.

    Of a range of whole numbers, the classes that occur in y_true or `columns` have one: up to the next of them, the
    curves of all thresholds are the same.

    Args, Raises, Source: as `threshold_calibration_error`.

    Example:
        >>> curve, = threshold_reliability([0, 1, 1, 1], [[0.5, 0.5]] * 4)
        >>> curve.forecast, curve.observed
        (array([0.5]), array([0.25]))
    """
    forecast = _read_thresholds(y_true, proba, labels, columns, sample_weight, bins, strategy)
    return _curves(forecast, bins, strategy, _rounding(proba))


def _rounding(proba: ArrayLike) -> float:
    """Return by how much, relative to them, sums of these probabilities may differ and be equal."""
    return max(2.0 ** (3 - array_bits(proba)), 1e-12)


def _read_thresholds(
    y_true: ArrayLike, proba: ArrayLike, labels: Any, columns: ArrayLike, sample_weight: Any, bins: int, strategy: str
) -> Forecast:
    """Return the forecast, of two classes or more."""
    check_count("bins", bins)
    if strategy not in ("uniform", "quantile"):
        raise ValueError(f'strategy is {strategy!r}, expected "uniform" or "quantile".')
    forecast = read_forecast(y_true, proba, labels, columns, sample_weight, every_class=True)
    if forecast.order.labels.size < 2:
        raise ValueError(
            f"labels is {forecast.order.labels.tolist()}, expected at least two classes; one class has no threshold."
        )
    return forecast


def _curves(forecast: Forecast, bins: int, strategy: str, rounding: float) -> list[Reliability]:
    curves = []
    for k, (below, was_below) in enumerate(zip(forecast.below.T, forecast.was_below.T, strict=True)):
        index = _bin_index(below, forecast.weight, bins, strategy, rounding)
        weight, forecast_mass, observed_mass = (
            np.bincount(index, forecast.weight * factor, minlength=bins) for factor in (1.0, below, was_below)
        )
        is_filled = weight > 0
        count = weight[is_filled] ** 2 / np.bincount(index, forecast.weight**2, minlength=bins)[is_filled]
        weight, forecast_mass, observed_mass = (x[is_filled] for x in (weight, forecast_mass, observed_mass))
        label = forecast.order.labels[k].item()
        curves.append(Reliability(label, forecast_mass / weight, observed_mass / weight, weight, count))
    return curves


def _bin_index(below: np.ndarray, weight: np.ndarray, bins: int, strategy: str, rounding: float) -> np.ndarray:
    """Return the bin of each forecast; those such as 0.1 + 0.2 and 0.3, which are equal up to rounding, share it."""
    if strategy == "uniform":
        return np.minimum(np.floor(below * bins * (1 + rounding)), bins - 1).astype(int)
    distinct, inverse = np.unique(below, return_inverse=True)
    inverse = _groups(distinct, rounding)[inverse]
    mass = np.bincount(inverse, weight)
    middle = mass.cumsum() - mass / 2
    return np.minimum((middle * bins + 1e-9).astype(int), bins - 1)[inverse]


def _groups(ascending: np.ndarray, rounding: float) -> np.ndarray:
    """Return the group of each number: a new one begins where a gap, or the group, would be wider than the rounding."""
    begins = np.diff(ascending, prepend=-np.inf) > rounding * ascending
    first = ascending[begins][begins.cumsum() - 1]
    part = np.floor((ascending - first) / (rounding * np.maximum(first, np.finfo(float).tiny)))
    return (begins | (np.diff(part, prepend=0) != 0)).cumsum() - 1


def _mean_distance(forecast: Forecast, values: ArrayLike | None, normalize: bool, *, power: int) -> float:
    v = forecast.order.values(values)
    apart = np.abs(forecast.below - forecast.was_below) ** power @ np.diff(v)  # (n,)
    scale = v[-1] - v[0] if normalize and v.size > 1 else 1.0
    return float(forecast.weight @ apart / scale)
