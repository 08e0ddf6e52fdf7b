"""Labels of any type as rank positions: which label comes after which, and which of them a training set holds.

Three numberings meet in a classifier of ordered labels, and this module is the only place that translates them:

- `categories`: all labels in rank order, lowest first; the user's knowledge, or else what the labels imply by the rule
  of the metrics (`implied_order`): of whole numbers, every integer from the smallest to the largest. Ranks 0..K-1 count
  them.
- `classes`: the labels seen in training, sorted as scikit-learn sorts them; columns of `predict_proba` follow these.
- positions 0..m-1: the labels seen, in rank order; a model has one output per position. A label that no training row
  holds has no output and probability zero, and the class values of the labels seen keep their distances.

scikit-learn's `VotingClassifier`, `StackingClassifier`, `BaggingClassifier` and `cross_val_predict` do not pass labels
on: they pass the index of each label among the sorted labels. Such codes are recognised where they are unmistakable.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from sklearn.utils.multiclass import check_classification_targets

from otloss.metrics.labels import implied_order, plain_labels, positions, shown

Array = np.ndarray


class EncodedLabelsWarning(UserWarning):
    """Labels were read as indices into the sorted categories, or may have been meant so: see whether that is right."""


class LabelOrderWarning(UserWarning):
    """Labels were put in an order that they do not tell, such as the alphabet: name their order by `categories`."""


@dataclass(frozen=True)
class LabelOrder:
    """Labels in rank order, and where the labels seen in training stand among them.

    Attributes:
        categories: (K,) labels in rank order, in the terms of the labels passed to `fit`.
        classes: (m,) labels seen, sorted.
        ranks: (m,) rank of each position, increasing.
        columns: (m,) position of each of `classes`: column j of a table over classes is column `columns[j]` of a table
            over positions.
        names: (K,) the user's own labels in rank order; differs from `categories` where codes were passed.
        told: whether the user gave the categories; else the labels imply them.
    """

    categories: Array
    classes: Array
    ranks: Array
    columns: Array
    names: Array
    told: bool

    @property
    def by_position(self) -> Array:
        """(m,) labels seen, in rank order."""
        return self.classes[np.argsort(self.columns)]

    def positions(self, y: Array) -> Array:
        """Positions (n,) of labels `y`, all of them among `classes`.

        Raises:
            ValueError: if a label is not among the classes.
        """
        seen, inverse = np.unique(y, return_inverse=True)
        column_of = {label: column for column, label in enumerate(self.classes.tolist())}
        unknown = [label for label in seen.tolist() if label not in column_of]
        if unknown:
            raise ValueError(
                f"y holds the label {unknown[0]!r}, which is none of the classes {self.classes.tolist()} that this "
                "estimator was first fitted to; name all labels from the start: categories= or partial_fit(classes=)."
            )
        return self.columns[[column_of[label] for label in seen.tolist()]][inverse]


def label_order(y: Array, categories: Any = None, classes: Any = None) -> LabelOrder:
    """The order of the labels `y` (n,), given the rank order `categories` or, without it, as the labels imply.

    Args:
        y: labels of a training set.
        categories: all labels in rank order, or None for what `otloss.metrics.labels.implied_order` makes of y; it
            warns where that is in doubt.
        classes: labels to keep an output for though `y` may lack them, or None for those of `y`.

    Raises:
        ValueError: if a label is missing (NaN, None) or unknown, or if categories repeat.
    """
    seen = _sorted_labels(y)
    if classes is not None:
        kept = _sorted_labels(_as_labels("classes", classes))
        unknown = [label for label in seen.tolist() if label not in set(kept.tolist())]
        if unknown:
            raise ValueError(f"y holds the label {unknown[0]!r}, which is none of classes={kept.tolist()}.")
        seen = kept
    if categories is None:
        check_classification_targets(y)
        return _implied(seen)
    names = _as_labels("categories", categories)
    known = _as_codes(seen, names) if _are_codes(seen, names) else names
    rank_of = {label: rank for rank, label in enumerate(known.tolist())}
    unknown = [label for label in seen.tolist() if label not in rank_of]
    if unknown:
        raise ValueError(
            f"y holds the label {unknown[0]!r}, which is none of categories={names.tolist()}; "
            "expected only labels named there. Add it at its rank, or drop its rows."
        )
    rank_of_class = np.array([rank_of[label] for label in seen.tolist()])
    return _ordered(known, seen, rank_of_class, names, told=True)


def _implied(seen: Array) -> LabelOrder:
    plain = plain_labels("y", seen)
    every, doubt = implied_order(plain)
    if doubt:
        warnings.warn(
            f"{doubt}. They are ordered as {shown(every)}, lowest first; pass categories=, all labels in rank order, "
            "or y as an ordered pandas Categorical.",
            LabelOrderWarning,
            stacklevel=5,
        )
    # Objects and unsigned integers stay what they are; texts may be longer between the first and the last.
    categories = every if seen.dtype.kind in "US" else every.astype(seen.dtype)
    return _ordered(categories, seen, positions("y", plain, every), categories, told=False)


def _ordered(categories: Array, seen: Array, rank_of_class: Array, names: Array, *, told: bool) -> LabelOrder:
    ranks = np.sort(rank_of_class)
    return LabelOrder(categories, seen, ranks, np.searchsorted(ranks, rank_of_class), names, told)


def refuse_missing_objects(y: Any) -> None:
    """Raise ValueError where `y` (n,) of Python objects lacks a label; pandas.NA stops scikit-learn's own checks."""
    labels = np.asarray(y) if hasattr(y, "dtype") else np.zeros(0)
    if labels.dtype.kind == "O" and labels.ndim == 1:
        _refuse_missing("y", labels)


def ordered_categories(y: Any) -> Any:
    """The categories of `y` in rank order if it is an ordered pandas Categorical, or a Series or column, else None."""
    columns: Any = getattr(y, "dtypes", None)  # of a data frame; a Series has its dtype there
    alone = columns.iloc[0] if len(getattr(columns, "shape", ())) == 1 and len(columns) == 1 else None
    dtype: Any = getattr(y, "dtype", alone)
    return dtype.categories.tolist() if getattr(dtype, "ordered", False) else None


def in_rank_order(name: str, table: Any, names: Array) -> Any:
    """A pandas Series or DataFrame of numbers by category as an array in rank order; anything else as it is.

    An index 0, 1, 2, ..., as pandas gives by itself, names categories only where these are such numbers.

    Raises:
        ValueError: if an index lacks a category, or holds one twice.
    """
    if not (hasattr(table, "axes") and hasattr(table, "to_numpy")):
        return table
    array, wanted = table.to_numpy(), names.tolist()
    for axis, index in enumerate(table.axes):
        keys = list(index)
        place = {key: where for where, key in enumerate(keys)}
        if len(place) == len(keys) and set(wanted) <= set(keys):
            array = np.take(array, [place[key] for key in wanted], axis=axis)
        elif keys != list(range(len(keys))):
            raise ValueError(
                f"the {('index', 'columns')[axis]} of {name} is {keys}, expected each of the categories {wanted} once; "
                f"name them with categories=, or pass {name}.to_numpy(), which is read in rank order."
            )
    return array


def _as_labels(name: str, labels: Any) -> Array:
    if not np.iterable(labels) and hasattr(labels, "categories"):
        if not getattr(labels, "ordered", False):
            raise ValueError(
                f"{name} is {labels!r}, which has no order, expected a CategoricalDtype with ordered=True or a "
                "sequence of labels, lowest rank first."
            )
        labels = labels.categories
    if isinstance(labels, str | bytes | Set | Mapping) or not np.iterable(labels):
        raise ValueError(f"{name} is {labels!r}, expected a sequence of labels, lowest rank first, such as a list.")
    labels = list(labels)
    array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}, expected one axis with at least one label.")
    if array.dtype.kind in "US" and not all(isinstance(label, str | bytes) for label in labels):
        array = np.asarray(list(labels), dtype=object)  # numpy turns [1, "a"] into ["1", "a"]
    _refuse_missing(name, array)
    repeated = [label for label in array.tolist() if array.tolist().count(label) > 1]
    if repeated:
        raise ValueError(f"{name} holds {repeated[0]!r} more than once, expected distinct labels.")
    return array


def _sorted_labels(y: Array) -> Array:
    _refuse_missing("y", y)
    try:
        return np.unique(y)
    except TypeError:
        kinds = sorted({type(label).__name__ for label in y.tolist()})
        raise ValueError(
            f"y mixes labels of the types {', '.join(kinds)}, which cannot be sorted; expected one type. "
            "Convert them, for example with [str(label) for label in y]."
        ) from None


def _refuse_missing(name: str, labels: Array) -> None:
    if labels.dtype.kind == "f":
        missing = ~np.isfinite(labels)
    elif labels.dtype.kind in "mM":
        missing = np.isnat(labels)
    elif labels.dtype.kind == "O":
        missing = np.array([_is_missing(label) for label in labels.tolist()], dtype=bool)
    else:
        return
    if missing.any():
        where = int(np.flatnonzero(missing)[0])
        raise ValueError(
            f"Input {name} contains NaN, None or infinity: {name}[{where}] is {labels[where]!r}; "
            "expected a label in each row. Drop the rows without one."
        )


def _is_missing(label: Any) -> bool:
    try:
        return label is None or bool(label != label)
    except TypeError:  # pandas.NA is neither equal nor unequal to anything
        return True


def _are_codes(seen: Array, names: Array) -> bool:
    """Whether the labels seen are indices into the sorted categories, by the proof that the text below gives.

    An index is among 0..K-1, and some label is no category. The largest index must be there: if it is not, then the
    indices may count fewer labels than there are categories, and which they leave out cannot be known. Indices that are
    all categories themselves are taken for labels: 1, 2, 3 of the categories 1 to 4 stand for themselves, which keeps
    their order, but a fold of the indices 0 to 3 without a 0 is one rank too low for `values` or a cost: a warning
    says so.
    """
    if seen.dtype.kind not in "iu" or seen[0] < 0 or seen[-1] >= len(names):
        return False
    if set(seen.tolist()) <= set(names.tolist()):
        if sorted(names.tolist()) != list(range(len(names))):
            warnings.warn(
                f"y holds {seen.tolist()} out of categories={names.tolist()}: read as these labels. If they are "
                "indices among the sorted categories, as scikit-learn's Voting, Stacking, Bagging and "
                "cross_val_predict pass them, each is taken for another category. Labels 0, 1, 2, ... are the same "
                "either way.",
                EncodedLabelsWarning,
                stacklevel=5,
            )
        return False
    if seen[-1] < len(names) - 1:
        raise ValueError(
            f"y holds the label {_first_unknown(seen, names)!r}, which is none of categories={names.tolist()}. Labels "
            f"{seen.tolist()} could be indices among the sorted categories, as scikit-learn's Voting, Stacking, "
            f"Bagging and cross_val_predict pass them; but without the last, {len(names) - 1}, which categories they "
            "count is not certain. Use labels 0, 1, 2, ... in rank order there."
        )
    return True


def _as_codes(seen: Array, names: Array) -> Array:
    """Indices (K,) of the categories among the sorted categories, in rank order."""
    by_name = _sorted_labels(names)
    codes = np.searchsorted(by_name, names)
    # Numbers that are no categories are as likely labels that the user forgot.
    are_numbers = all(isinstance(name, Real) for name in names.tolist())
    if are_numbers or ((np.diff(codes) < 0).any() and len(seen) > 1):
        pairs = ", ".join(f"{code} = {label!r}" for code, label in enumerate(by_name.tolist()))
        warnings.warn(
            f"y holds {seen.tolist()} and none of categories={names.tolist()}: read as indices among the sorted "
            f"categories ({pairs}), as scikit-learn's Voting, Stacking, Bagging and cross_val_predict pass them. "
            "If you meant ranks, pass categories=range(K) or none.",
            EncodedLabelsWarning,
            stacklevel=5,
        )
    return codes


def _first_unknown(seen: Array, names: Array) -> Any:
    return next(label for label in seen.tolist() if label not in set(names.tolist()))
