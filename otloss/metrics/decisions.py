"""Metrics of predicted labels, each a function of one table.

With O[i, j] the weight of the examples of true class i that were predicted as j (ranks 0 to K - 1), a and b the sums
of its rows and columns, T its total, and v the class values:

    weighted kappa      1 - sum_ij w_ij O_ij / sum_ij w_ij a_i b_j / T;    w_ij is |i - j| or (i - j)^2
    MAE                 sum_ij |v_i - v_j| O_ij / T;    of class i: sum_j |v_i - v_j| O_ij / a_i
    Kendall's tau-b     (concordant - discordant) / sqrt((T^2 - sum a^2) / 2 * (T^2 - sum b^2) / 2)

A class that nobody has keeps its row and its rank: the distance between its neighbours stays two. A weight of 2 counts
like an example that occurs twice; two copies of one example are a pair tied in both orders.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from otloss.metrics.inputs import read_decisions
from otloss.metrics.numbers import read_shares, read_values, read_weights

Table = Float[np.ndarray, "classes classes"]


def ordinal_confusion_matrix(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
) -> Table:
    """Return the (K, K) weight of each pair of true class (row) and predicted class (column), in rank order.

    Args:
        y_true: (n,) labels.
        y_pred: (n,) labels.
        labels: (K,) all classes in rank order, of any label type, also the intervals of `pandas.cut`; their positions
            are 0 to K - 1. By default the order of an ordered pandas Categorical; of whole numbers, also as text,
            every integer from the smallest label to the largest, so that 1, 2, 5 have the positions 0, 1, 4; of dates
            and intervals the sorted labels.
        sample_weight: (n,) weights >= 0; counts by default.

    Raises:
        ValueError: if a label is missing or not among `labels`, labels are words or have fractions and `labels` is
            not given, lengths differ, a weight is negative, their sum is infinite, or ordered Categoricals differ in
            their order.
        TypeError: if the labels are of different types.

    Example:
        >>> ordinal_confusion_matrix(["low", "high"], ["mid", "high"], labels=["low", "mid", "high"])
        array([[0., 1., 0.],
               [0., 0., 0.],
               [0., 0., 1.]])
    """
    true, predicted, order = read_decisions(y_true, y_pred, labels)
    weight = read_weights(sample_weight, true.size)
    cells = np.bincount(true * order.size + predicted, weight, minlength=order.size**2)
    if not np.isfinite(cells).all():
        raise ValueError(
            f"sample_weight is up to {weight.max()} and adds to infinity, expected a finite sum; divide by its maximum."
        )
    return cells.reshape(order.size, order.size)


def quadratic_weighted_kappa(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
    undefined: float = 1.0,
) -> float:
    """Return Cohen's kappa with weights (i - j)^2: 1 for perfect agreement, 0 for that of chance.

    Args:
        y_true, y_pred, labels, sample_weight: as for `ordinal_confusion_matrix`.
        undefined: what is returned where all true and predicted labels are one and the same class: no disagreement is
            seen and none is expected. By default 1, as every prediction is right. Where y_true alone holds one class
            the kappa is 0.

    Raises:
        ValueError, TypeError: as `ordinal_confusion_matrix`.

    Source:
        J. Cohen, Weighted kappa, Psychological Bulletin 70 (1968), 213-220.

    Example:
        >>> round(quadratic_weighted_kappa([0, 1, 2, 2], [0, 2, 2, 2]), 6)
        0.833333
    """
    table = _table(y_true, y_pred, labels, sample_weight)
    return _weighted_kappa(table, 2, undefined)


def linear_weighted_kappa(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
    undefined: float = 1.0,
) -> float:
    """Return Cohen's kappa with weights |i - j|.

    Args, Raises, Source: as `quadratic_weighted_kappa`.

    Example:
        >>> round(linear_weighted_kappa([0, 1, 2, 2], [0, 2, 2, 2]), 6)
        0.714286
    """
    table = _table(y_true, y_pred, labels, sample_weight)
    return _weighted_kappa(table, 1, undefined)


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
        y_true, y_pred, labels, sample_weight: as for `ordinal_confusion_matrix`.
        values: (K,) strictly increasing class values in rank order, the unit of the result; by default the ranks
            0 to K - 1, also where the labels are numbers.

    Raises:
        ValueError, TypeError: as `ordinal_confusion_matrix`; ValueError also for values that do not increase.

    Example:
        >>> ordinal_mae(["low", "mid", "high"], ["mid", "mid", "low"], labels=["low", "mid", "high"])
        1.0
        >>> ordinal_mae([0, 1, 2], [1, 1, 0], labels=[0, 1, 2], values=[0, 10, 30])
        13.333333333333334
    """
    table = _table(y_true, y_pred, labels, sample_weight)
    return float((table * _distances(values, len(table))).sum() / table.sum())


def macro_mae(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    values: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Return the mean, over the classes that occur in y_true, of the mean absolute error of each.

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


def off_by_one_accuracy(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Return the share of examples whose predicted rank is the true one or a neighbour of it.

    Args, Raises: as `ordinal_confusion_matrix`.

    Example:
        >>> off_by_one_accuracy([0, 1, 2, 3], [0, 0, 0, 0])
        0.5
    """
    table = _table(y_true, y_pred, labels, sample_weight)
    return float(table[_distances(None, len(table)) <= 1].sum() / table.sum())


def kendall_tau_b(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
    undefined: float = 0.0,
) -> float:
    """Return Kendall's rank correlation tau-b of true and predicted classes, corrected for ties.

    Args:
        y_true, y_pred, labels, sample_weight: as for `ordinal_confusion_matrix`.
        undefined: what is returned where y_true or y_pred is one class, so that no pair of examples is ordered. By
            default 0, no association.

    Raises:
        ValueError, TypeError: as `ordinal_confusion_matrix`.

    Source:
        M. G. Kendall, The treatment of ties in ranking problems, Biometrika 33 (1945), 239-251.

    Example:
        >>> round(kendall_tau_b([0, 1, 2, 2], [0, 2, 2, 2]), 6)
        0.774597
    """
    table = _table(y_true, y_pred, labels, sample_weight)
    table = table / table.sum()
    rows, columns = table.sum(1), table.sum(0)
    if np.count_nonzero(rows) < 2 or np.count_nonzero(columns) < 2:
        return undefined
    before = np.zeros((len(table) + 1, len(table) + 1))
    before[1:, 1:] = table.cumsum(0).cumsum(1)  # before[i, j] = sum of O[:i, :j]
    lower = before[:-1, :-1]  # both ranks below those of the cell
    crossed = before[:-1, -1:] - before[:-1, 1:]  # true rank below, predicted rank above
    ordered_rows = (rows[1:] * rows.cumsum()[:-1]).sum()
    ordered_columns = (columns[1:] * columns.cumsum()[:-1]).sum()
    return float((table * (lower - crossed)).sum() / np.sqrt(ordered_rows * ordered_columns))


def _table(y_true: ArrayLike, y_pred: ArrayLike, labels: ArrayLike | None, sample_weight: ArrayLike | None) -> Table:
    """Return the confusion matrix up to a factor: counts, or shares of weights, which of any unit do not overflow."""
    shares = None if sample_weight is None else read_shares(sample_weight, np.size(sample_weight))
    return ordinal_confusion_matrix(y_true, y_pred, labels=labels, sample_weight=shares)


def _weighted_kappa(table: Table, power: int, undefined: float) -> float:
    weights = _distances(None, len(table)) ** power
    shares = table / table.sum()
    expected = (weights * np.outer(shares.sum(1), shares.sum(0))).sum()
    return float(1 - (weights * shares).sum() / expected) if expected > 0 else undefined


def _errors_by_class(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    labels: ArrayLike | None,
    values: ArrayLike | None,
    sample_weight: ArrayLike | None,
) -> Float[np.ndarray, " present"]:
    table = _table(y_true, y_pred, labels, sample_weight)
    errors, weight = (table * _distances(values, len(table))).sum(1), table.sum(1)
    return errors[weight > 0] / weight[weight > 0]


def _distances(values: ArrayLike | None, classes: int) -> Table:
    v = read_values(values, classes)
    return np.abs(v[:, None] - v)
