"""Labels of any type as rank positions: which label comes after which, and which of them a training set holds.

Three numberings meet in a classifier of ordered labels, and this module is the only place that translates them:

- `categories`: all labels in rank order, lowest first; the user's knowledge, or else what the labels imply by the rule
  of the metrics (`otloss.metrics.rank_labels.implied_order`). Ranks 0..K-1 count them.
- `classes`: the labels seen in training, sorted as scikit-learn sorts them; columns of `predict_proba` follow these.
- positions 0..m-1: the labels seen, in rank order; a model has one output per position. A label that no training row
  holds has no output and probability zero, and the class values of the labels seen keep their distances.

scikit-learn's `VotingClassifier`, `StackingClassifier`, `BaggingClassifier` and `cross_val_predict` pass the index of
each label among the sorted labels in place of the label. Integers where all categories are text are such indices. An
integer may be a label and an index. The functions of scikit-learn that are on the stack tell which of them it is, and
an index from which the label cannot be known raises ValueError.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.utils.multiclass import check_classification_targets

from otloss.metrics.rank_labels import Labels, implied_order, is_whole, ordered_categories, plain_labels, shown


class EncodedLabelsWarning(UserWarning):
    """Integers were read as indices into the sorted categories, which are in another order than their ranks."""


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
        told: whether the user gave the categories; else the labels imply them.
    """

    categories: Labels
    names: Labels
    classes: Labels
    ranks: np.ndarray
    columns: np.ndarray
    is_explicit: bool

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
    present = np.unique(plain_labels("y", y))
    encoder = _encoder() if present.dtype.kind in "iu" else None
    if categories is None:
        _check_are_classes(y, present)
        if encoder is not None:
            _check_gaps(encoder)
        return _ordered(present, _implied(present), is_explicit=False)
    if hasattr(categories, "categories"):
        ordered = ordered_categories(categories)
        if ordered is None:
            raise ValueError(f"categories is {categories!r}, expected a CategoricalDtype with ordered=True.")
        categories = ordered
    names = plain_labels("categories", categories)
    if not names.size or np.unique(names).size != names.size:
        raise ValueError(f"categories is {shown(names)}, expected each label once, lowest rank first.")
    if present.dtype.kind in "iu" and names.dtype.kind == "U":
        return _ordered(present, _indices(present, names, encoder), names=names, is_explicit=True)
    if encoder is not None:
        _check_not_encoded(names, encoder)
    _check_labels(present, names, f"one of categories={shown(names)}; add it at its rank, or drop its rows")
    return _ordered(present, names, is_explicit=True)


def _check_are_classes(y: np.ndarray, present: Labels) -> None:
    """As scikit-learn's check, but numbers with a fraction are classes too where they repeat, twice on average."""
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


@dataclass(frozen=True)
class _Encoder:
    """A function of scikit-learn that passes indices among the sorted labels in place of labels.

    Attributes:
        name: what calls that function.
        count: how many different labels there are.
        labels: these, sorted, where they can be known.
    """

    name: str
    count: int
    labels: Labels | None


# The functions in which scikit-learn fits with indices, in the user's process or in a worker's.
_ENCODERS = {
    ("sklearn.ensemble._base", "_fit_single_estimator"): "VotingClassifier or StackingClassifier",
    ("sklearn.ensemble._bagging", "_parallel_build_estimators"): "BaggingClassifier",
    ("sklearn.model_selection._validation", "_fit_and_predict"): "cross_val_predict",
}


def _encoder() -> _Encoder | None:
    """The outermost of these functions on the stack and the labels that it began with; the innermost has the count."""
    frame = sys._getframe(1)
    outermost, count, labels = "", 0, None
    while frame is not None:
        module, variables = frame.f_globals.get("__name__", ""), frame.f_locals
        if not outermost and module == "sklearn.multiclass":
            return None  # It made its own labels, 0 and 1.
        name = _ENCODERS.get((module, frame.f_code.co_name))
        if name is not None and variables.get("method") != "predict" and variables.get("y") is not None:
            of_bagging = getattr(variables.get("ensemble"), "classes_", None)  # The other functions encode y.
            outermost, count = name, count or len(np.unique(variables["y"]) if of_bagging is None else of_bagging)
            classes = of_bagging
        elif outermost and module.startswith("sklearn."):
            # Without worker processes, the caller and its encoder are on the stack too.
            caller = variables.get("self")
            encoder = variables.get("le") or getattr(caller, "le_", None) or getattr(caller, "_label_encoder", None)
            classes = getattr(encoder, "classes_", None)
        else:
            classes = None
        labels = classes if classes is not None and len(classes) == count else labels
        frame = frame.f_back  # type: ignore[assignment]
    if not outermost:
        return None
    return _Encoder(outermost, count, None if labels is None else plain_labels("y", labels))


def _check_gaps(encoder: _Encoder) -> None:
    """Raise ValueError if the labels are numbers with gaps, which their indices lose; warn if they are text."""
    labels = encoder.labels
    if labels is None:  # in a worker process
        warnings.warn(
            f"{encoder.name} passes the index of each label among the sorted labels, which are not known in a worker "
            f"process: if they are text or have gaps, their order or their gaps are lost. Fit it to the labels 0 to "
            f"{encoder.count - 1} with categories=range({encoder.count}).",
            LabelOrderWarning,
            stacklevel=6,
        )
        return
    every, doubt = implied_order(labels)
    if doubt:
        warnings.warn(
            f"{encoder.name} passes the index of each label among the sorted labels {shown(labels)}, whose order is "
            "taken for the rank order; name the rank order by categories=.",
            LabelOrderWarning,
            stacklevel=6,
        )
    elif len(every) != len(labels):
        raise ValueError(
            f"{encoder.name} passes the index of each label among the sorted labels {shown(labels)}, so that their "
            f"gaps are lost. Fit it to the labels 0 to {len(labels) - 1}, and give the estimator values="
            f"{labels.tolist()}."
        )


def _check_not_encoded(names: Labels, encoder: _Encoder) -> None:
    """Raise ValueError unless indices among the sorted labels are these labels themselves."""
    by_name = np.sort(names)
    if encoder.labels is None:
        same = np.array_equal(by_name, np.arange(encoder.count))
    else:
        same = np.array_equal(encoder.labels, np.arange(encoder.count)) and bool(np.isin(encoder.labels, by_name).all())
    if same:
        return
    raise ValueError(
        f"{encoder.name} passes the index of each label among the {encoder.count} different labels of y in place of "
        f"the label, and categories is {shown(names)}. Fit it to the labels 0 to {encoder.count - 1} with "
        f"categories=range({encoder.count}), and give the estimator values=, the number that each label stands for."
    )


def _indices(present: Labels, names: Labels, encoder: _Encoder | None) -> Labels:
    """Return indices (K,) of the categories among the sorted categories, in rank order.

    Raises:
        ValueError: if the integers may be labels as well, or may count the labels of `y` alone, of which some category
            is missing: without a known caller the largest index has to be among those seen.
    """
    by_name = np.sort(names)
    complete = encoder is not None and encoder.count == len(names)
    as_text = present.astype(str)
    are_names = encoder is None and bool(np.isin(as_text, names).all())
    if are_names and not np.array_equal(by_name[present.clip(0, len(names) - 1)], as_text):
        raise ValueError(
            f"y holds the integers {shown(present)} and categories is {shown(names)}: each integer may be the label of "
            "that name or the index of another label. Give categories as integers, or call y.astype(str)."
        )
    if present[0] < 0 or present[-1] >= len(names) or not (complete or present[-1] == len(names) - 1):
        who = "scikit-learn's Voting, Stacking, Bagging and cross_val_predict" if encoder is None else encoder.name
        pass_them = "pass them" if encoder is None else "passes them"
        raise ValueError(
            f"y holds the integers {shown(present)} and categories is {shown(names)}, expected these labels, or all "
            f"their indices as {who} {pass_them}. Use the labels 0, 1, 2, ... in rank order there."
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
