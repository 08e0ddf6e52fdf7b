"""Labels that are numbers or strings, their rank order, and their positions 0 to K - 1 in it.

`implied_ranks` is the one rule by which labels without a given order are read. Metrics, scorers and the estimators all
follow it, so that they agree on the position of each class. A range of integers may be long: metrics hold the classes
of it that occur, with their positions; the estimators, by `implied_order`, all of them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from enum import EnumType
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped
from numpy.typing import ArrayLike

from otloss._checks import check_not_masked
from otloss.metrics.arrays import array_bits, as_array, column_names, in_bits, read_values

_MAX_CLASSES = 10_000  # A longer range of integers is unlikely to be a range of ranks.
KINDS = {"b": "numbers", "i": "numbers", "u": "numbers", "f": "numbers", "U": "strings"}

Labels = Shaped[np.ndarray, " classes"]


@dataclass(frozen=True)
class RankOrder:
    """Classes in rank order.

    Attributes:
        labels: (m,) the classes that count: all that were given, or those that occur.
        ranks: (m,) their positions among all classes, 0 to K - 1.
    """

    labels: Labels
    ranks: Float[np.ndarray, " classes"]

    @property
    def count(self) -> int:
        """K, the number of all classes."""
        return int(self.ranks[-1]) + 1

    def values(self, values: Any) -> Float[np.ndarray, " classes"]:
        """Return the values (m,) of the classes that count, of the values (K,) of all; their ranks by default."""
        if values is None:
            return self.ranks
        if hasattr(values, "axes") and len(values) >= self.count:  # of a shorter Series the message tells both lengths
            first = self.labels[0].item()
            every = self.labels if self.count == self.labels.size else np.arange(first, first + self.count)
            values = in_rank_order("values", values, every)
        return read_values(values, self.count)[self.ranks.astype(np.int64)]


def in_order_of_labels(labels: Labels) -> RankOrder:
    """Return the order of labels that are all classes, lowest first."""
    return RankOrder(labels, np.arange(float(labels.size)))


def rank_order(labels: ArrayLike | RankOrder | None, **targets: ArrayLike) -> RankOrder:
    """Return `labels` checked, or the order that the targets themselves tell.

    That is the order of the ordered pandas Categoricals among them, which must agree; else `implied_ranks` gives it.

    Raises:
        ValueError: if the targets imply no order, or an ordered Categorical disagrees with another.
    """
    if isinstance(labels, RankOrder):
        return labels
    told: Any = _common_categories(targets) if labels is None else in_own_order(labels)
    if told is not None:
        classes = plain_labels("labels", told)
        if classes.size == 0 or np.unique(classes).size != classes.size:
            raise ValueError(f"labels is {shown(classes)}, expected each class once, in rank order.")
        return in_order_of_labels(classes)
    plain = {name: plain_labels(name, values) for name, values in targets.items()}
    _check_same_kind(**plain)
    for name, vector in plain.items():
        if vector.size == 0:
            raise ValueError(f"{name} is empty, expected at least one label.")
    order, doubt = implied_ranks(np.unique(np.concatenate(in_one_precision(*plain.values()))))
    if doubt:
        raise ValueError(f"{doubt}. Pass labels=, all classes in rank order, or an ordered pandas Categorical.")
    return order


def implied_ranks(labels: Labels) -> tuple[RankOrder, str]:
    """Return the rank order that the sorted distinct labels seen imply, and why it is in doubt, or "".

    - Whole numbers: every integer from the smallest to the largest is a class, so the distance between two labels is
      their difference, and a class that no row has does not bring its neighbours together. Labels 1, 2, 5 stand for the
      classes 1 to 5, at the positions 0, 1 and 4.
    - Numbers with a fraction and booleans: the labels seen in their order, 1 apart.
    - Text: as above, but in doubt, for its order is alphabetical. One label alone needs no order.
    """
    in_order = in_order_of_labels(labels)
    if labels.dtype.kind == "U":
        reason = f"the labels {shown(labels)} are text, whose rank order is not known: it is seldom the alphabet"
        return in_order, reason if labels.size > 1 else ""
    if labels.dtype.kind == "b" or not is_whole(labels).all():
        return in_order, ""
    if labels.dtype.kind == "f":
        # From there on floats are whole whatever was meant.
        if not np.abs(labels).max() < 2.0 ** (np.finfo(labels.dtype).nmant + 1):
            return in_order, f"the labels {shown(labels)} are too large for floats to tell integers apart"
        labels = labels.astype(np.int64)
    bits = labels.astype(np.uint64)  # Their differences are right modulo 2^64, where differences of int64 may overflow.
    return RankOrder(labels, (bits - bits[0]).astype(float)), ""


def implied_order(labels: Labels) -> tuple[Labels, str]:
    """Return all classes in the rank order that the sorted distinct labels seen imply, and why it is in doubt, or "".

    As `implied_ranks`; a longer range of integers than `_MAX_CLASSES` is in doubt: they are the labels seen, 1 apart.
    """
    order, doubt = implied_ranks(labels)
    if doubt or order.count == labels.size:
        return order.labels, doubt
    if order.count > _MAX_CLASSES:
        return labels, f"the labels go from {labels[0]} to {labels[-1]}, and every integer between would be a class"
    return np.arange(int(labels[0]), int(labels[-1]) + 1), ""


def in_rank_order(name: str, table: Any, labels: Labels, *, fix: str = "") -> Any:
    """Return a pandas Series or DataFrame with the rows and columns in the order of `labels`, lowest rank first.

    An index 0, 1, 2, ..., as pandas gives by itself, counts ranks, whatever the classes are named; anything but pandas
    is returned as it is. `fix` ends the message for an index that lacks a class.

    Raises:
        ValueError: if an index lacks a class, if one that pandas may have given by itself has the names of the classes
            in another order, or a table whose rows have no names has the columns in another order.
    """
    names = labels.tolist()
    if not hasattr(table, "axes"):  # as an index, which has numbers alone
        columns = column_names(table)
        if names_in_another_order(columns, labels):
            raise ValueError(
                f"{name} has the columns {columns!r}, expected them, as its rows, in rank order: {shown(labels)}."
            )
        return table
    counts_ranks = [_counts_ranks(index, names) for index in table.axes]
    for axis, index in enumerate(table.axes):
        own, counted = list(index), list(range(len(names)))
        if counts_ranks[axis]:
            if names != own and set(names) == set(own):
                by_class = f"{names!r}" if table.ndim == 1 else f"index={names!r}, columns={names!r}"
                raise ValueError(
                    f"{name} has the index {own}, which may count ranks or name the classes {shown(labels)}. Pass an "
                    f"array, which goes by rank, or {name}.reindex({by_class}) for a table that goes by class."
                )
            continue
        if names != counted and any(counts_ranks) and own != names:  # perhaps the index was read as a column
            raise ValueError(
                f"{name} names the classes on one axis alone, as {own!r}, and the other one counts ranks; expected "
                f"names on both, as by pandas.read_csv(..., index_col=0), or the order {shown(labels)}."
            )
        lacking = [label for label in names if label not in index]
        if lacking:
            ending = " ".join(filter(None, (fix, "An array goes by rank.")))
            raise ValueError(
                f"{name} has the index {own!r}, expected all of {shown(labels)}, and it lacks {lacking[0]!r}. {ending}"
            )
        table = table.reindex(names, axis=axis)
    return table.to_numpy()


def names_in_another_order(names: list[Any], labels: Labels) -> list[Any]:
    """Return the labels in the order of the names of columns, where these are the labels in another order; else [].

    1, 1.0 and, where labels are numbers, the text "1.0" are one label, and so are numbers that are equal in float32.
    """
    for plain in (_as_number, _as_float32) if labels.dtype.kind in "iuf" else (_as_text, str):
        own, ranked = ([plain(name) for name in each] for each in (names, labels.tolist()))
        if own != ranked and set(own) == set(ranked):
            by_name = dict(zip(ranked, labels.tolist(), strict=True))
            return [by_name[name] for name in own]
    return []


def _as_text(name: Any) -> str:
    return str(int(name) if isinstance(name, float) and name.is_integer() else name)


def _as_number(name: Any) -> Any:
    if isinstance(name, str):
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(name)
    return name


def _as_float32(name: Any) -> Any:
    number = _as_number(name)
    with np.errstate(over="ignore"):
        return float(np.float32(number)) if isinstance(number, float) else number


def _counts_ranks(index: Any, names: list[Any]) -> bool:
    """Return whether an index is 0, 1, 2, ... as pandas gives it, and the classes are not named so."""
    counted = list(range(len(index)))
    # Where the classes are 0 to m - 1 and the index has more entries, it names them.
    return list(index) == counted and (names == counted or names != counted[: len(names)])


def is_whole(numbers: Shaped[np.ndarray, " n"]) -> np.ndarray:
    """Return which of the numbers are integers."""
    return numbers == np.rint(numbers)


def in_one_precision(*labels: Labels) -> list[Labels]:
    """Return labels of which those with fractions have the digits of the narrowest dtype: 0.1 is one label in each."""
    has_fractions = [each.dtype.kind == "f" and not is_whole(each).all() for each in labels]
    bits = [array_bits(each) for each, has in zip(labels, has_fractions, strict=True) if has]
    if len(set(bits)) < 2:
        return list(labels)
    pairs = zip(labels, has_fractions, strict=True)
    return [in_bits(each.astype(np.float64), min(bits)) if has else each for each, has in pairs]


def positions(name: str, values: ArrayLike, order: Labels) -> Int[np.ndarray, " n"]:
    """Return the position of each label in `order`, else raise ValueError naming the first that has none."""
    vector = plain_labels(name, values)
    if vector.size == 0:
        raise ValueError(f"{name} is empty, expected at least one label.")
    _check_same_kind(**{name: vector}, labels=order)
    observed, classes = in_one_precision(vector, order)
    sorter = np.argsort(classes)
    place = np.searchsorted(classes, observed, sorter=sorter).clip(max=classes.size - 1)
    ranks = sorter[place]
    unknown = classes[ranks] != observed
    if unknown.any():
        first = int(np.flatnonzero(unknown)[0])
        is_continuous = vector.dtype.kind == "f" and not is_whole(vector[first])
        remedy = "bring continuous predictions to the nearest class first, or " if is_continuous else ""
        raise ValueError(
            f"{name}[{first}] is {vector[first].item()!r}, expected one of the labels {shown(order)}; "
            f"{remedy}pass labels=, all classes in rank order."
        )
    return ranks


def plain_labels(name: str, values: ArrayLike) -> Shaped[np.ndarray, " n"]:
    """Return labels as an array of numbers or strings with one axis, none of them missing."""
    values = plain_items(values)
    try:
        array = as_array(values)
    except ValueError as error:
        if "inhomogeneous" not in str(error):
            raise
        raise ValueError(
            f"{name} is a {type(values).__name__} whose entries differ in length, expected labels with one axis; join "
            "batches with numpy.concatenate."
        ) from error
    if array.ndim != 1:
        got = f"{values!r}, a {type(values).__name__}" if array.ndim == 0 else f"of shape {array.shape}"
        raise ValueError(f"{name} is {got}; expected a list or array of labels with one axis, whose order counts.")
    # numpy turns the numbers of a list into strings where it holds one string.
    items = values if isinstance(values, list) else plain_items(array.tolist()) if array.dtype.kind in "OT" else None
    if items is not None:
        _check_present(name, np.array([v is None or _unequal(v) for v in items], dtype=bool))
        if len({isinstance(v, str) for v in items}) > 1:
            raise TypeError(f"{name} mixes strings with other types, expected labels of one type.")
        if array.dtype.kind in "OT":
            array = np.array(items)
    if array.dtype.kind not in KINDS or array.ndim != 1:
        first = items[0] if items else array[0]
        raise TypeError(
            f"{name} holds {first!r}, a {type(first).__name__}, expected labels that are numbers or strings; of dates "
            "and intervals take the codes of an ordered pandas Categorical."
        )
    if array.dtype.kind == "f":
        _check_present(name, array != array)
    return array


def plain_items(labels: Any) -> Any:
    """Return a list, a class of Enum or categories of Arrow as a list of labels of Python and numpy; others unchanged.

    Of members of a class (str, Enum) numpy makes the first letters of the name of their class, tensors without axes
    are not numbers to it, it takes a null of Arrow for the last category, and scikit-learn does not know pandas' NA.

    Raises:
        ValueError: if labels are masked.
    """
    check_not_masked(labels)
    labels = _as_column(labels)
    arrow = _arrow_categories(labels)
    labels = labels if arrow is None else arrow.to_pylist()
    if not isinstance(getattr(labels, "dtype", np.dtype(float)), np.dtype) and hasattr(labels, "isna"):
        is_missing = np.asarray(labels.isna())
        if is_missing.any():
            labels = [None if is_na else label for label, is_na in zip(labels, is_missing, strict=True)]
    return [_plain_item(label) for label in labels] if isinstance(labels, list | tuple | EnumType) else labels


def _plain_item(label: Any) -> Any:
    if isinstance(label, str):
        return str.__str__(label)
    is_scalar = hasattr(label, "__array__") and not isinstance(label, np.generic) and np.ndim(label) == 0
    return as_array(label)[()] if is_scalar else label


def categories_of(target: Any) -> Any:
    """Return the categories of an ordered Categorical, also of Arrow, or a polars Enum, or of its dtype, lowest first.

    None of anything else.
    """
    column = _as_column(target)
    arrow = _arrow_categories(column)
    if arrow is not None and arrow.type.ordered:  # whose categories are in the data
        orders = [part.dictionary.to_pylist() for part in getattr(arrow, "chunks", [arrow]) if len(part)]
        if any(order != orders[0] for order in orders):
            raise ValueError(
                f"the parts of a column of Arrow have the categories {orders[0]} and others, expected the same ones in "
                "each; make one ordered pandas Categorical of them."
            )
        return orders[0] if orders else None
    return ordered_categories(getattr(column, "dtype", column))


def _arrow_categories(column: Any) -> Any:
    """Return the array of Arrow of a column of categories of Arrow, also in pandas; None of others."""
    data = getattr(column, "array", column)
    if hasattr(getattr(getattr(data, "dtype", None), "pyarrow_dtype", None), "index_type"):
        data = data.__arrow_array__()
    return data if hasattr(getattr(data, "type", None), "index_type") else None


def in_own_order(labels: Any) -> Any:
    """Return the categories of labels of an ordered Categorical, or of its dtype, lowest first; others as they are."""
    own = categories_of(labels)
    return labels if own is None else own


def ordered_categories(dtype: Any) -> Any:
    """Return the categories of an ordered CategoricalDtype or a polars Enum, lowest first; None of anything else."""
    is_enum = type(dtype).__name__ == "Enum" and type(dtype).__module__.partition(".")[0] == "polars"
    if is_enum:
        return list(dtype.categories)
    return getattr(dtype, "categories", None) if getattr(dtype, "ordered", False) else None


def shown(labels: np.ndarray) -> str:
    """Return labels for a message; of many, the first and the last."""
    items = labels.tolist()
    return repr(items) if len(items) <= 12 else f"{items[:5]!r} ... {items[-1]!r} ({len(items)} in all)"


def _as_column(values: Any) -> Any:
    """Return the column of a data frame that has one, which keeps the order of a Categorical; else the values."""
    if getattr(values, "shape", ())[1:] != (1,):
        return values
    if hasattr(values, "iloc"):
        return values.iloc[:, 0]
    if hasattr(values, "column_names"):  # pyarrow
        return values.column(0)
    return values.to_series() if hasattr(values, "to_series") else values  # polars has to_series


def _common_categories(targets: dict[str, Any]) -> Any:
    """Return the categories of the ordered Categoricals among the targets, None without; raise where they differ."""
    orders = [order for target in targets.values() if (order := categories_of(target)) is not None]
    for order in orders:
        if list(order) != list(orders[0]):
            raise ValueError(
                f"{' and '.join(targets)} have the ordered categories {list(orders[0])!r} and {list(order)!r}, "
                "expected the same; pass labels=, the classes in rank order."
            )
    return orders[0] if orders else None


def _unequal(value: Any) -> bool:
    same = value == value
    return not isinstance(same, bool | np.bool_) or not same  # pandas.NA is neither equal nor unequal to itself


def _check_present(name: str, missing: np.ndarray) -> None:
    if missing.any():
        first = int(np.flatnonzero(missing)[0])
        raise ValueError(f"{name}[{first}] is missing (NaN or None), expected a label; drop such examples first.")


def _check_same_kind(**arrays: np.ndarray) -> None:
    kinds = {name: KINDS[array.dtype.kind] for name, array in arrays.items() if array.size}
    if len(set(kinds.values())) > 1:
        raise TypeError(f"{' and '.join(f'{n} holds {k}' for n, k in kinds.items())}, expected labels of one type.")
