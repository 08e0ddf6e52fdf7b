"""Metrics of predicted labels.

With w the sample weights, i and j the ranks 0 to K - 1 of the true and the predicted class, and v the class values:

    MAE         sum w |v_i - v_j| / sum w;    of class c: the same over the examples of true class c
    sensitivity of class c: sum w 1[i = j] / sum w over its examples
    off by one  sum w 1[|i - j| <= 1] / sum w

Ranks follow `labels`, so that a class that nobody has keeps its rank: the distance between its neighbours stays two. A
weight of 2 counts like an example that occurs twice. Where no distance between classes counts, scikit-learn and scipy
have the metrics: `confusion_matrix` and `cohen_kappa_score(weights="quadratic")`, which take `labels=` in rank order
too, and `scipy.stats.kendalltau`.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from otloss.metrics.arrays import read_shares
from otloss.metrics.inputs import read_decisions


def ordinal_mae(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    values: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Return the mean distance between true and predicted class.

    Args:
        y_true: (n,) labels.
        y_pred: (n,) labels.
        labels: (K,) all classes in rank order, numbers or strings; their positions are 0 to K - 1. By default the order
            of an ordered pandas Categorical; of whole numbers every integer from the smallest label to the largest, so
            that 1, 2, 5 have the positions 0, 1, 4.
        sample_weight: (n,) weights >= 0.
        values: (K,) strictly increasing class values in rank order, the unit of the result; by default the ranks
            0 to K - 1, also where the labels are numbers.

    Raises:
        ValueError: if a label is missing or not among `labels`, labels are text or have fractions and `labels` is
            not given, lengths differ, a weight is negative, values do not increase, or ordered Categoricals differ in
            their order.
        TypeError: if the labels are of different types.

    Example:
        >>> ordinal_mae(["low", "mid", "high"], ["mid", "mid", "low"], labels=["low", "mid", "high"])
        1.0
        >>> round(ordinal_mae([0, 1, 2], [1, 1, 0], labels=[0, 1, 2], values=[0, 10, 30]), 6)
        13.333333
    """
    error, _, share = _errors(y_true, y_pred, labels, values, sample_weight)
    return float(np.average(error, weights=share))


def macro_mae(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    values: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Return the mean, over the classes that occur in y_true, of the mean absolute error of each: the average MAE.

    Args, Raises: as `ordinal_mae`. A class occurs if its examples weigh more than 0.

    Source:
        S. Baccianella, A. Esuli, F. Sebastiani, Evaluation measures for ordinal regression, ISDA 2009.

    Example:
        >>> macro_mae([0, 0, 0, 3], [0, 0, 0, 0])
        1.5
    """
    return float(_errors_by_class(y_true, y_pred, labels, values, sample_weight).mean())


def maximum_mae(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    values: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Return the mean absolute error of the class, among those that occur in y_true, where it is largest.

    Args, Raises: as `macro_mae`.

    Source:
        M. Cruz-Ramírez et al., Metrics to guide a multi-objective evolutionary algorithm for ordinal classification,
        Neurocomputing 135 (2014), 21-31.

    Example:
        >>> maximum_mae([0, 0, 0, 3], [0, 0, 0, 0])
        3.0
    """
    return float(_errors_by_class(y_true, y_pred, labels, values, sample_weight).max())


def minimum_sensitivity(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Return the share of right predictions in the class, among those that occur in y_true, where it is smallest.

    Args, Raises: as `macro_mae`.

    Source:
        J. C. Fernández, F. J. Martínez, C. Hervás, P. A. Gutiérrez, Sensitivity versus accuracy in multiclass problems
        using memetic Pareto evolutionary neural networks, IEEE Transactions on Neural Networks 21 (2010), 750-770.

    Example:
        >>> minimum_sensitivity([0, 0, 1, 2, 3, 0, 0], [0, 1, 1, 2, 3, 0, 1])
        0.5
    """
    error, true, share = _errors(y_true, y_pred, labels, None, sample_weight)
    return float(_by_class(error == 0, true, share).min())


def off_by_one_accuracy(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Return the share of examples whose predicted rank is the true one or a neighbour of it.

    Args, Raises: as `ordinal_mae`.

    Example:
        >>> off_by_one_accuracy([0, 1, 2, 3], [0, 0, 0, 0])
        0.5
    """
    error, _, share = _errors(y_true, y_pred, labels, None, sample_weight)
    return float(np.average(error <= 1, weights=share))  # the sum of shares of 1 / n may be next to 1


def _errors(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    labels: ArrayLike | None,
    values: ArrayLike | None,
    sample_weight: ArrayLike | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each example's absolute error, index of its true class, and share of the weight: (n,) each."""
    true, predicted, order = read_decisions(y_true, y_pred, labels)
    v = order.values(values)
    return np.abs(v[true] - v[predicted]), true, read_shares(sample_weight, true.size)


def _errors_by_class(*arguments: ArrayLike | None) -> Float[np.ndarray, " present"]:
    return _by_class(*_errors(*arguments))  # type: ignore[arg-type]


def _by_class(error: np.ndarray, true: np.ndarray, share: np.ndarray) -> Float[np.ndarray, " present"]:
    """Return the mean of each class that has weight."""
    total, weight = np.bincount(true, share * error), np.bincount(true, share)
    return total[weight > 0] / weight[weight > 0]
