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
from otloss.metrics.distribution import Distribution, own_names
from otloss.metrics.rank_labels import (
    Labels,
    RankOrder,
    categories_of,
    in_order_of_labels,
    is_whole,
    names_in_another_order,
    plain_labels,
    positions,
    rank_order,
    shown,
)


@dataclass(frozen=True)
class Forecast:
    """Probabilities beside what came true, both in rank order.

    Attributes:
        observed: (n,) indices of the true classes among those that count.
        proba: (n, m) float64, each row of sum 1.
        order: the m classes that count.
        weight: (n,) sample weights of sum 1.
    """

    observed: Int[np.ndarray, " n"]
    proba: Float[np.ndarray, "n classes"]
    order: RankOrder
    weight: Float[np.ndarray, " n"]

    @property
    def below(self) -> Float[np.ndarray, "n thresholds"]:
        """(n, m - 1), the forecast P(Y <= k); the sum over all classes is 1 and left out."""
        return np.minimum(self.proba.cumsum(1)[:, :-1], 1.0)

    @property
    def was_below(self) -> Float[np.ndarray, "n thresholds"]:
        """(n, m - 1), 1 where the true class is at most k."""
        return (self.observed[:, None] <= np.arange(self.proba.shape[1] - 1)).astype(float)


def read_decisions(
    y_true: ArrayLike, y_pred: ArrayLike, labels: ArrayLike | None
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"], RankOrder]:
    """Return both label vectors as indices into the classes that count, and these in rank order."""
    order = rank_order(labels, y_true=y_true, y_pred=y_pred)
    has_order = labels is not None or categories_of(y_true) is not None or categories_of(y_pred) is not None
    fractions = order.labels[~is_whole(order.labels)] if order.labels.dtype.kind == "f" else order.labels[:0]
    if not has_order and fractions.size:
        raise ValueError(
            f"the labels hold {fractions.tolist()[0]!r}, which is no whole number; bring "
            "continuous predictions to the nearest class first, or pass labels=, the classes in rank order."
        )
    true, predicted = positions("y_true", y_true, order.labels), positions("y_pred", y_pred, order.labels)
    if true.shape != predicted.shape:
        raise ValueError(f"y_true has {true.size} labels and y_pred {predicted.size}, expected as many.")
    return true, predicted, order


def read_forecast(
    y_true: ArrayLike, proba: ArrayLike, labels: ArrayLike | None, columns: ArrayLike, sample_weight: ArrayLike | None,
    *, every_class: bool = False,
) -> Forecast:  # fmt: skip
    """Return the checked `Forecast`; `columns` is "sorted", "rank", or the label of each column.

    "sorted" is the default, and so the columns of a `Distribution` are then what its labels say. Classes that neither
    occur nor are predicted are left out unless `every_class`: the forecast keeps the ranks of the others.
    """
    table = read_probabilities("proba", proba)
    if isinstance(proba, Distribution) and isinstance(columns, str) and columns == "sorted":
        columns = columns_of(proba)
        labels = _order_with(proba, labels, y_true)
    column_labels = None if isinstance(columns, str) else plain_labels("columns", columns)
    if column_labels is None and columns not in ("sorted", "rank"):
        raise ValueError(f'columns is {columns!r}, expected "sorted", "rank", or the label of each column.')
    if column_labels is None and columns == "sorted" and hasattr(proba, "columns"):
        raise ValueError(
            "proba is a data frame, whose columns need not be sorted; pass their names as columns=, in their order, if "
            "these are the labels, or the probabilities as an array."
        )
    if labels is None:
        order, of_columns = _implied_order(y_true, table.shape[1], column_labels)
    else:
        order = rank_order(labels)
        of_columns = order.labels
    if column_labels is None:
        column_labels = of_columns if columns == "rank" else np.sort(of_columns)
    if table.shape[1] != column_labels.size:
        raise ValueError(
            f"proba has {table.shape[1]} columns, expected {column_labels.size}: one for each of "
            f"{shown(column_labels)}. Where a model was fitted without some class, pass columns=model.classes_."
        )
    _check_own_names(proba, column_labels)
    places = positions("columns", column_labels, order.labels)
    if np.unique(places).size != places.size:
        raise ValueError(f"columns is {shown(column_labels)}, expected each label once.")
    observed = positions("y_true", y_true, order.labels)
    if observed.size != table.shape[0]:
        raise ValueError(f"y_true has {observed.size} labels and proba {table.shape[0]} rows, expected as many.")
    weight = read_shares(sample_weight, observed.size)
    if every_class:
        counts = np.ones(order.labels.size, bool)
    else:
        counts = np.zeros(order.labels.size, bool)
        has_mass = table.any(0)
        counts[places[has_mass]] = counts[observed] = True
        counts[[0, -1]] = True  # the first and the last tell how many classes there are
        table, places = table[:, counts[places]], places[counts[places]]
        order = RankOrder(order.labels[counts], order.ranks[counts])
    place_among_counting = np.cumsum(counts) - 1
    in_rank_order = np.zeros((table.shape[0], order.labels.size))
    in_rank_order[:, place_among_counting[places]] = table
    return Forecast(place_among_counting[observed], in_rank_order, order, weight)


def _check_own_names(proba: ArrayLike, column_labels: Labels) -> None:
    """Raise ValueError if the table itself names its columns by the classes, in another order."""
    names = own_names(proba)
    own = names_in_another_order(names, column_labels)
    if own and (isinstance(proba, Distribution) or names != list(range(len(names)))):  # which nobody may have given
        raise ValueError(
            f"the columns are taken to be {shown(column_labels)}, and proba names them {own!r}; pass columns={own!r}, "
            "or the probabilities as an array."
        )


def columns_of(proba: Distribution) -> Labels:
    """Return the labels of the columns; raise ValueError if an operation has lost them."""
    if proba.labels is None:
        raise ValueError(
            "proba is the result of an operation on a Distribution, whose classes may have changed; pass "
            'columns="rank" if its columns are in rank order, or the label of each column.'
        )
    return proba.labels


def _order_with(proba: Distribution, labels: ArrayLike | None, y_true: ArrayLike) -> ArrayLike:
    """Return the rank order: `labels`, or the distribution's, with which an ordered Categorical has to agree."""
    if labels is not None:
        return labels
    order = columns_of(proba)
    of_target = categories_of(y_true)
    if of_target is not None and list(of_target) != order.tolist():
        raise ValueError(
            f"y_true has the ordered categories {list(of_target)!r} and proba the classes {shown(order)}, expected the "
            "same; pass labels=, the classes in rank order."
        )
    return order


def _implied_order(y_true: ArrayLike, columns: int, column_labels: Labels | None) -> tuple[RankOrder, Labels]:
    """Return the rank order that labels and columns imply, and the labels of the columns in that order."""
    if column_labels is not None and categories_of(y_true) is None:
        order = rank_order(None, y_true=y_true, columns=column_labels)
        return order, order.labels[np.isin(order.labels, column_labels)]
    order = rank_order(None, y_true=y_true)
    if categories_of(y_true) is not None or order.labels.size == columns:
        return order, order.labels
    if order.count == columns:  # a column for every integer
        order = in_order_of_labels(np.arange(int(order.labels[0]), int(order.labels[-1]) + 1))
        return order, order.labels
    raise ValueError(
        f"proba has {columns} columns but y_true holds {order.labels.size} classes, {shown(order.labels)}: which "
        "column is of which class is not known. Pass labels=, all classes in rank order."
    )
