"""What the metrics take in: labels and their rank order, probabilities and their columns, weights, class values.

Labels are turned into positions 0 to K - 1 in rank order, and probabilities into columns of that order, before
anything is computed. Two orders meet here and are kept apart:

    labels     the rank order, given by the user: lowest class first, of any label type
    columns    the order of the columns of `predict_proba`; scikit-learn sorts the labels, so that is the default
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped
from numpy.typing import ArrayLike

# Integers without labels= stand for all integers between the smallest and the largest; more are hardly ranks.
_MOST_CLASSES = 10_000
_KINDS = {"b": "numbers", "i": "numbers", "u": "numbers", "f": "numbers", "U": "strings", "S": "bytes", "M": "dates"}

Labels = Shaped[np.ndarray, " classes"]


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
    true, predicted = positions("y_true", y_true, order), positions("y_pred", y_pred, order)
    if true.shape != predicted.shape:
        raise ValueError(f"y_true has {true.size} labels and y_pred {predicted.size}, expected as many.")
    return true, predicted, order


def read_forecast(
    y_true: ArrayLike, proba: ArrayLike, labels: ArrayLike | None, columns: ArrayLike, sample_weight: ArrayLike | None
) -> Forecast:
    """Return the checked `Forecast`; `columns` is "sorted", "rank", or the label of each column."""
    table = read_probabilities("proba", proba)
    named = None if isinstance(columns, str) else plain_labels("columns", columns)
    if named is None and columns not in ("sorted", "rank"):
        raise ValueError(f'columns is {columns!r}, expected "sorted", "rank", or the label of each column.')
    if labels is None and named is not None and _categories(y_true) is None:
        labels = np.unique(named)
    order = _order_of_columns(y_true, table.shape[1]) if labels is None else rank_order(labels)
    if named is None:
        named = order if columns == "rank" else np.sort(order)
    if table.shape[1] != named.size:
        raise ValueError(
            f"proba has {table.shape[1]} columns, expected {named.size}: one for each of {_shown(named)}. "
            "Where a model was fitted without some class, pass columns=model.classes_."
        )
    ranks = positions("columns", named, order)
    if np.unique(ranks).size != ranks.size:
        raise ValueError(f"columns is {_shown(named)}, expected each label once.")
    in_rank_order = np.zeros((table.shape[0], order.size))
    in_rank_order[:, ranks] = table
    observed = positions("y_true", y_true, order)
    if observed.size != table.shape[0]:
        raise ValueError(f"y_true has {observed.size} labels and proba {table.shape[0]} rows, expected as many.")
    weight = read_weights(sample_weight, observed.size)
    return Forecast(observed, in_rank_order, order, weight / weight.sum())


def rank_order(labels: ArrayLike | None, **targets: ArrayLike) -> Labels:
    """Return `labels` checked, or the order that the targets themselves tell.

    That is the order of an ordered pandas Categorical; all integers from the smallest to the largest where every
    label is a whole number, so that a class nobody has does not bring its neighbours together; else the sorted labels.
    """
    if labels is None:
        labels = next((c for c in map(_categories, targets.values()) if c is not None), None)
    if labels is not None:
        order = plain_labels("labels", labels)
        if order.size == 0 or np.unique(order).size != order.size:
            raise ValueError(f"labels is {_shown(order)}, expected each class once, in rank order.")
        return order
    plain = {name: plain_labels(name, values) for name, values in targets.items()}
    _check_same_kind(**plain)
    for name, given in plain.items():
        if given.size == 0:
            raise ValueError(f"{name} is empty, expected at least one label.")
    seen = np.unique(np.concatenate(list(plain.values())))
    if seen.dtype.kind not in "iuf":
        return seen
    if (seen != np.rint(seen)).any():
        raise ValueError(
            f"the labels hold {seen[seen != np.rint(seen)][0]}, which is no whole number; bring continuous predictions "
            "to the nearest class first, or pass labels=, the classes in rank order."
        )
    if seen[-1] - seen[0] >= _MOST_CLASSES:
        raise ValueError(
            f"the labels go from {seen[0]} to {seen[-1]}; without labels= every integer between is a class. "
            "Pass labels=, the classes in rank order."
        )
    return np.arange(int(seen[0]), int(seen[-1]) + 1)


def positions(name: str, values: ArrayLike, order: Labels) -> Int[np.ndarray, " n"]:
    """Return where in `order` each label stands, else raise ValueError naming the first one that does not."""
    given = plain_labels(name, values)
    if given.size == 0:
        raise ValueError(f"{name} is empty, expected at least one label.")
    _check_same_kind(**{name: given}, labels=order)
    sorter = np.argsort(order)
    place = np.searchsorted(order, given, sorter=sorter).clip(max=order.size - 1)
    found = sorter[place]
    unknown = order[found] != given
    if unknown.any():
        first = int(np.flatnonzero(unknown)[0])
        raise ValueError(
            f"{name}[{first}] is {given[first].item()!r}, expected one of the labels {_shown(order)}; "
            "pass labels=, all classes in rank order."
        )
    return found


def plain_labels(name: str, values: ArrayLike) -> Shaped[np.ndarray, " n"]:
    """Return labels as an array of numbers, strings or dates with one axis, none of them missing."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}, expected one axis of labels; call np.ravel({name}).")
    # numpy turns the numbers of a list into strings where it holds one string.
    mixable = array.dtype.kind == "U" and isinstance(values, Iterable) and not isinstance(values, np.ndarray)
    items = array.tolist() if array.dtype.kind in "OT" else list(values) if mixable else None  # type: ignore[arg-type]
    if items is not None:
        _check_present(name, np.array([v is None or _unequal(v) for v in items], dtype=bool))
        if len({isinstance(v, str) for v in items}) > 1:
            raise TypeError(f"{name} mixes strings with other types, expected labels of one type.")
        array = np.array(items)
    if array.dtype.kind not in _KINDS:
        raise TypeError(f"{name} holds {array.dtype} values, expected labels that are numbers, strings or dates.")
    if array.dtype.kind in "fM":
        _check_present(name, array != array)
    return array


def read_probabilities(name: str, proba: ArrayLike) -> Float[np.ndarray, "n classes"]:
    """Return (n, K) probabilities in float64, each row divided by its sum, which is 1 up to rounding."""
    given = np.asarray(proba)
    if given.ndim != 2 or 0 in given.shape:
        raise ValueError(
            f"{name} has shape {given.shape}, expected (n, K): a row for each example, a column for each class."
        )
    if given.dtype.kind not in "fiu":
        raise TypeError(f"{name} has dtype {given.dtype}, expected floating-point probabilities.")
    table = given.astype(float)
    sums = table.sum(1)
    tolerance = 1e-2 if given.dtype.itemsize < 4 else 1e-4
    bad = ~(np.isfinite(table).all(1) & (table.min(1) >= 0) & (np.abs(sums - 1) <= tolerance))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"{name}[{row}] is {table[row]}, of sum {sums[row]:.6g}; expected probabilities >= 0 of sum 1. "
            "Scores and logits need a softmax first."
        )
    return table / sums[:, None]


def read_weights(sample_weight: ArrayLike | None, count: int) -> Float[np.ndarray, " n"]:
    """Return (n,) weights >= 0 of a sum above 0, ones by default."""
    if sample_weight is None:
        return np.ones(count)
    weight = np.asarray(sample_weight, dtype=float)
    if weight.shape != (count,):
        raise ValueError(f"sample_weight has shape {weight.shape}, expected ({count},): one for each example.")
    bad = ~(np.isfinite(weight) & (weight >= 0))
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        raise ValueError(f"sample_weight[{first}] is {weight[first]}, expected finite weights >= 0.")
    if weight.sum() == 0:
        raise ValueError("sample_weight is 0 everywhere, expected a sum above 0.")
    return weight


def read_values(values: ArrayLike | None, classes: int) -> Float[np.ndarray, " classes"]:
    """Return the K class values in rank order, 0 to K - 1 by default."""
    if values is None:
        return np.arange(float(classes))
    array = np.asarray(values, dtype=float)
    if array.shape != (classes,):
        raise ValueError(f"values has shape {array.shape}, expected ({classes},): one for each class, in rank order.")
    if not np.isfinite(array).all() or (np.diff(array) <= 0).any():
        raise ValueError(f"values is {array}, expected finite, strictly increasing numbers in rank order.")
    return array


def _order_of_columns(y_true: ArrayLike, columns: int) -> Labels:
    categories = _categories(y_true)
    order = np.unique(plain_labels("y_true", y_true)) if categories is None else rank_order(categories)
    if order.size != columns:
        raise ValueError(
            f"proba has {columns} columns but y_true holds {order.size} classes, {_shown(order)}: which column is "
            "whose cannot be told. Pass labels=, all classes in rank order."
        )
    return order


def _categories(target: Any) -> Any:
    dtype: Any = getattr(target, "dtype", None)
    return dtype.categories if getattr(dtype, "ordered", False) else None


def _unequal(value: Any) -> bool:
    same = value == value
    return not isinstance(same, bool | np.bool_) or not same  # pandas.NA is neither equal nor unequal to itself


def _check_present(name: str, missing: np.ndarray) -> None:
    if missing.any():
        first = int(np.flatnonzero(missing)[0])
        raise ValueError(f"{name}[{first}] is missing (NaN or None), expected a label; drop such examples first.")


def _check_same_kind(**arrays: np.ndarray) -> None:
    kinds = {name: _KINDS[array.dtype.kind] for name, array in arrays.items() if array.size}
    if len(set(kinds.values())) > 1:
        raise TypeError(f"{' and '.join(f'{n} holds {k}' for n, k in kinds.items())}, expected labels of one type.")


def _shown(labels: np.ndarray) -> str:
    items = labels.tolist()
    return repr(items) if len(items) <= 12 else f"{items[:5]!r} ... {items[-1]!r} ({len(items)} in all)"
