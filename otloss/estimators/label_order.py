"""Labels of any type as rank positions: which label comes after which, and which of them a training set holds.

Three numberings meet in a classifier of ordered labels, and this module is the only place that translates them:

- `categories`: all labels in rank order, lowest first; the user's knowledge, or else what the labels imply by the rule
  of the metrics (`otloss.metrics.rank_labels.implied_order`). Ranks 0..K-1 count them.
- `classes`: the labels seen in training, sorted as scikit-learn sorts them; columns of `predict_proba` follow these.
- positions 0..m-1: the labels seen, in rank order; a model has one output per position. A label that no training row
  holds has no output and probability zero, and the class values of the labels seen keep their distances.

scikit-learn's `VotingClassifier`, `StackingClassifier`, `BaggingClassifier` and `cross_val_predict` pass the index of
each label among the sorted labels in place of the label. The labels and the categories alone decide what `y` holds,
never the caller: integers that are not all categories are indices among the sorted categories. Integers that are all
categories are labels, also where they could be indices: both are the same only for the categories 0 to K - 1, each of
which occurs.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.utils.multiclass import check_classification_targets

from otloss.metrics.rank_labels import Labels, implied_order, in_own_order, is_whole, plain_labels, shown

_TO_BE_CERTAIN = "Use the labels 0, 1, 2, ..., K - 1 with a row of each to be certain of values, cost and class_weight"
_READ_AS_INDICES = (
    "y holds the integers {}, which are not all among categories={}: read as indices of the sorted categories, as "
    "scikit-learn's Voting, Stacking, Bagging and cross_val_predict pass them. If they are labels, correct y or "
    "categories. " + _TO_BE_CERTAIN
)
_READ_AS_LABELS = (
    "y holds the integers {}, read as labels of categories={}. They may also be indices of the labels that occur, if "
    "scikit-learn's Voting, Stacking, Bagging or cross_val_predict passed them and a lower category has no row: then "
    "leave it out of categories. If they are labels, filter this warning. " + _TO_BE_CERTAIN
)


class EncodedLabelsWarning(UserWarning):
    """Integers may be labels as well as indices into the sorted categories, and it matters which they are."""


class LabelOrderWarning(UserWarning):
    """Labels were put in an order that they do not tell, such as the alphabet: name their order by `categories`."""


@dataclass(frozen=True)
class LabelOrder:
    """Labels in rank order, and the positions of the labels seen in training among them.

    Attributes:
        categories: (K,) labels in rank order, as they come in `y`.
        names: (K,) the user's own labels in rank order; differs from `categories` where `y` holds indices.
        classes: (m,) labels seen, sorted.
        ranks: (m,) rank of each position, increasing.
        columns: (m,) position of each of `classes`: column j of a table over classes is column `columns[j]` of a table
            over positions.
        is_explicit: whether the user gave the categories; else the labels imply them.
        doubt: what else the integers of `y` may be, where it matters which label is which; empty if there is no doubt.
        gaps_in_doubt: whether the other reading has other gaps between the labels, and so another loss.
    """

    categories: Labels
    names: Labels
    classes: Labels
    ranks: np.ndarray
    columns: np.ndarray
    is_explicit: bool
    doubt: str = ""
    gaps_in_doubt: bool = False

    @property
    def by_position(self) -> Labels:
        """(m,) labels seen, in rank order."""
        return self.classes[np.argsort(self.columns)]

    def positions(self, y: Any) -> np.ndarray:
        """Return positions (n,) of the labels `y`; ValueError if one of them is not among the classes."""
        labels = plain_labels("y", y)
        _check_labels(labels, self.classes, f"the labels {shown(self.classes)} of training; drop its rows")
        return self.columns[np.searchsorted(self.classes, labels)]


def label_order(y: np.ndarray, categories: Any = None) -> LabelOrder:
    """Return the order of the labels `y` (n,), given the rank order `categories` or, without it, as the labels imply.

    Raises:
        ValueError, TypeError: if a label is missing (NaN, None) or unknown, or if categories repeat or have no order.
    """
    labels = plain_labels("y", y)
    present = np.unique(labels)
    if categories is None:
        _check_are_classes(labels, present)
    if present.dtype.kind == "f" and not is_whole(present).all():
        _warn_of_fractions(present)
    if categories is None:
        return _ordered(present, _implied(present), is_explicit=False)
    categories = in_own_order(categories)
    if hasattr(categories, "categories"):
        raise ValueError(f"categories is {categories!r}, expected a CategoricalDtype with ordered=True.")
    names = plain_labels("categories", categories)
    if not names.size or np.unique(names).size != names.size:
        raise ValueError(f"categories is {shown(names)}, expected each label once, lowest rank first.")
    if present.dtype.kind in "iu" and (names.dtype.kind == "U" or not np.isin(present, names).all()):
        order = _ordered(present, _indices(present, names), names=names, is_explicit=True)
        is_text = names.dtype.kind == "U"
        return order if is_text else replace(order, doubt=_READ_AS_INDICES.format(shown(present), shown(names)))
    _check_labels(present, names, f"one of categories={shown(names)}; add it at its rank, or drop its rows")
    order = _ordered(present, names, is_explicit=True)
    if not _may_be_indices(present, names):
        return order
    return replace(order, doubt=_READ_AS_LABELS.format(shown(present), shown(names)), gaps_in_doubt=0 in present)


def _may_be_indices(present: Labels, names: Labels) -> bool:
    """Whether integers that are all categories may be indices of the labels that occur, and not the labels.

    Indices count from 0 among the labels of all rows; the rows at hand may lack the lowest.
    """
    if present.dtype.kind not in "iu" or len(present) == len(names):
        return False
    first = 0 if 0 in names else 1
    return np.array_equal(present, np.arange(first, first + len(present)))


def _check_are_classes(y: np.ndarray, present: Labels) -> None:
    """Make scikit-learn's check; numbers with a fraction are classes too where they repeat, twice on average."""
    if present.dtype.kind != "f" or not np.isfinite(present).all() or is_whole(present).all():
        check_classification_targets(y)
    elif 2 * len(present) > len(y):
        raise ValueError(
            f"Unknown label type: continuous. y holds {len(present)} different numbers with fractions in {len(y)} "
            "rows, expected classes of two rows or more on average; pass categories=, or use a regressor."
        )


def _check_labels(labels: Labels, expected_labels: Labels, expected: str) -> None:
    unknown = labels[~np.isin(labels, expected_labels)]
    if unknown.size:
        raise ValueError(f"y holds the label {shown(unknown[:1])[1:-1]}, expected {expected}.")


def _ordered(present: Labels, categories: Labels, *, names: Labels | None = None, is_explicit: bool) -> LabelOrder:
    sorter = np.argsort(categories)
    rank_of_class = sorter[np.searchsorted(categories, present, sorter=sorter)]
    ranks = np.sort(rank_of_class)
    columns = np.searchsorted(ranks, rank_of_class)
    return LabelOrder(categories, categories if names is None else names, present, ranks, columns, is_explicit)


def _implied(present: Labels) -> Labels:
    every, doubt = implied_order(present)
    if doubt:
        warnings.warn(
            f"{doubt}. They are ordered as {shown(every)}, lowest first; pass categories=, all labels in rank order, "
            "or y as an ordered pandas Categorical.",
            LabelOrderWarning,
            stacklevel=5,
        )
    return every.astype(present.dtype)  # Unsigned integers keep their dtype.


def _warn_of_fractions(present: Labels) -> None:
    warnings.warn(
        f"y holds the labels {shown(present)}, numbers with fractions, which scikit-learn takes for the target of a "
        "regression: its cross-validation neither shuffles nor stratifies them. Use whole numbers, for example "
        "numpy.searchsorted(labels, y) with values=labels, the sorted labels, or labels of text with categories=.",
        UserWarning,
        stacklevel=5,
    )


def _indices(present: Labels, names: Labels) -> Labels:
    """Return indices (K,) of the categories among the sorted categories, in rank order.

    Warns:
        EncodedLabelsWarning: if some category does not occur, so that the integers may count the labels of `y` alone;
            and if the sorted order is not the rank order.

    Raises:
        ValueError: if the integers may be labels as well, or are no indices.
    """
    by_name = np.sort(names)
    is_text = names.dtype.kind == "U"
    as_text = present.astype(str)
    if (
        is_text
        and np.isin(as_text, names).all()
        and not np.array_equal(by_name[present.clip(0, len(names) - 1)], as_text)
    ):
        raise ValueError(
            f"y holds the integers {shown(present)} and categories is {shown(names)}: each integer may be the label of "
            "that name or the index of another label. Give categories as integers, or call y.astype(str)."
        )
    if not 0 <= present[0] <= present[-1] < len(names):
        raise ValueError(
            f"y holds the integers {shown(present)} and categories is {shown(names)}, expected these labels, or their "
            "indices as scikit-learn's Voting, Stacking, Bagging and cross_val_predict pass them. Use the labels "
            "0, 1, 2, ... in rank order there; elsewhere add the missing labels to categories, or drop their rows."
        )
    if len(present) < len(names) and not (is_text and present[-1] == len(names) - 1):
        warnings.warn(
            f"y holds the integers {shown(present)}, not all of which are among categories={shown(names)}: read as "
            "indices of the sorted categories, as scikit-learn's Voting, Stacking, Bagging and cross_val_predict pass "
            "them for rows that lack some category. If they are labels, correct y or categories; if a category has no "
            "row at all, leave it out of categories.",
            EncodedLabelsWarning,
            stacklevel=5,
        )
    codes = np.searchsorted(by_name, names)
    if (np.diff(codes) < 0).any():
        pairs = ", ".join(f"{code} = {label!r}" for code, label in enumerate(by_name.tolist()))
        warnings.warn(
            f"y holds integers and categories is {shown(names)}: read as indices among the sorted categories "
            f"({pairs}), as scikit-learn's Voting, Stacking, Bagging and cross_val_predict pass them. If they are "
            "ranks, pass categories=range(K) or none.",
            EncodedLabelsWarning,
            stacklevel=5,
        )
    return codes
