"""What the metrics take in, as positions in rank order and probabilities in columns of that order.

Two orders meet here and are kept apart, before anything is computed:

    labels     the rank order, given by the user: lowest class first, of any label type
    columns    the order of the columns of `predict_proba`; scikit-learn sorts the labels, so that is the default

The columns of a data frame have names, perhaps in a third order: `columns` has to say what they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from otloss.metrics.arrays import read_probabilities, read_shares
from otloss.metrics.distribution import Distribution
from otloss.metrics.rank_labels import Labels, categories_of, is_whole, plain_labels, positions, rank_order, shown


@dataclass(frozen=True)
class Forecast:
    """Probabilities beside what came true, both in rank order.

    Attributes:
        observed: (n,) positions of the true classes.
        proba: (n, K) float64, each row of sum 1.
        labels: (K,) in rank order.
        weight: (n,) sample weights of sum 1.
    """

    observed: Int[np.ndarray, " n"]
    proba: Float[np.ndarray, "n classes"]
    labels: Labels
    weight: Float[np.ndarray, " n"]

    @property
    def below(self) -> Float[np.ndarray, "n thresholds"]:
        """(n, K - 1), the forecast P(Y <= k); the sum over all classes is 1 and left out."""
        return np.minimum(self.proba.cumsum(1)[:, :-1], 1.0)

    @property
    def was_below(self) -> Float[np.ndarray, "n thresholds"]:
        """(n, K - 1), 1 where the true class is at most k."""
        return (self.observed[:, None] <= np.arange(self.proba.shape[1] - 1)).astype(float)


def read_decisions(
    y_true: ArrayLike, y_pred: ArrayLike, labels: ArrayLike | None
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"], Labels]:
    """Return both label vectors as positions in rank order, and that order."""
    order = rank_order(labels, y_true=y_true, y_pred=y_pred)
    has_order = labels is not None or categories_of(y_true) is not None or categories_of(y_pred) is not None
    if not has_order and order.dtype.kind == "f" and not is_whole(order).all():
        raise ValueError(
            f"the labels hold {order[~is_whole(order)].tolist()[0]!r}, which is no whole number; bring "
            "continuous predictions to the nearest class first, or pass labels=, the classes in rank order."
        )
    true, predicted = positions("y_true", y_true, order), positions("y_pred", y_pred, order)
    if true.shape != predicted.shape:
        raise ValueError(f"y_true has {true.size} labels and y_pred {predicted.size}, expected as many.")
    return true, predicted, order


def read_forecast(
    y_true: ArrayLike, proba: ArrayLike, labels: ArrayLike | None, columns: ArrayLike, sample_weight: ArrayLike | None
) -> Forecast:
    """Return the checked `Forecast`; `columns` is "sorted", "rank", or the label of each column.

    "sorted" is the default, and so the columns of a `Distribution` are then what its labels say.
    """
    table = read_probabilities("proba", proba)
    if isinstance(proba, Distribution) and isinstance(columns, str) and columns == "sorted":
        columns = _columns_of(proba)
        labels = _order_with(proba, labels, y_true)
    column_labels = None if isinstance(columns, str) else plain_labels("columns", columns)
    if column_labels is None and columns not in ("sorted", "rank"):
        raise ValueError(f'columns is {columns!r}, expected "sorted", "rank", or the label of each column.')
    if column_labels is None and columns == "sorted" and hasattr(proba, "columns"):
        raise ValueError(
            "proba is a data frame, whose columns need not be sorted; pass columns=list(proba.columns) if these are "
            "the labels, or the probabilities as an array."
        )
    if labels is None:
        order, of_columns = _implied_order(y_true, table.shape[1], column_labels)
    else:
        order = of_columns = rank_order(labels)
    if column_labels is None:
        column_labels = of_columns if columns == "rank" else np.sort(of_columns)
    if table.shape[1] != column_labels.size:
        raise ValueError(
            f"proba has {table.shape[1]} columns, expected {column_labels.size}: one for each of "
            f"{shown(column_labels)}. Where a model was fitted without some class, pass columns=model.classes_."
        )
    ranks = positions("columns", column_labels, order)
    if np.unique(ranks).size != ranks.size:
        raise ValueError(f"columns is {shown(column_labels)}, expected each label once.")
    in_rank_order = np.zeros((table.shape[0], order.size))
    in_rank_order[:, ranks] = table
    observed = positions("y_true", y_true, order)
    if observed.size != table.shape[0]:
        raise ValueError(f"y_true has {observed.size} labels and proba {table.shape[0]} rows, expected as many.")
    return Forecast(observed, in_rank_order, order, read_shares(sample_weight, observed.size))


def _columns_of(proba: Distribution) -> Labels:
    """Return the labels of the columns; raise if an operation has lost them."""
    if proba.labels is None:
        raise ValueError(
            "proba is the result of an operation on a Distribution, whose classes may have changed; pass "
            'columns="rank" if its columns are in rank order, or the label of each column.'
        )
    return proba.labels


def _order_with(proba: Distribution, labels: ArrayLike | None, y_true: ArrayLike) -> ArrayLike:
    """Return the rank order: `labels`, or that of the distribution, with which an ordered Categorical has to agree."""
    if labels is not None:
        return labels
    order = _columns_of(proba)
    of_target = categories_of(y_true)
    if of_target is not None and list(of_target) != order.tolist():
        raise ValueError(
            f"y_true has the ordered categories {list(of_target)!r} and proba the classes {shown(order)}, expected the "
            "same; pass labels=, the classes in rank order."
        )
    return order


def _implied_order(y_true: ArrayLike, columns: int, column_labels: Labels | None) -> tuple[Labels, Labels]:
    """Return the rank order that labels and columns imply, and the labels of the columns in that order."""
    if categories_of(y_true) is not None:
        order = rank_order(None, y_true=y_true)
        return order, order
    present = np.unique(plain_labels("y_true", y_true))
    if column_labels is not None:
        order = rank_order(None, y_true=y_true, columns=column_labels)
        return order, order[(order[:, None] == column_labels).any(1)]
    order = rank_order(None, y_true=y_true)
    for of_columns in (order[(order[:, None] == present).any(1)], order):
        if of_columns.size == columns:
            return order, of_columns
    raise ValueError(
        f"proba has {columns} columns but y_true holds {present.size} classes, {shown(present)}: which column is of "
        "which class is not known. Pass labels=, all classes in rank order."
    )
