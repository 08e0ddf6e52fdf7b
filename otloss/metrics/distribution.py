"""A table of probabilities that knows which class each of its columns is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from otloss.metrics.arrays import as_array, column_names
from otloss.metrics.rank_labels import Labels, categories_of, names_in_another_order, plain_labels, shown

_ROWS = (0, -2)  # the axis of rows


class Distribution(np.ndarray):
    """Probabilities (n, K) with the classes of their columns, lowest rank first, in `labels`.

    It is a numpy array. Metrics and plots read its columns by `labels`, whatever order the classes sort in. Rows that
    are selected by an index or `take`, copies, and concatenations of rows keep the labels. Any other table that comes
    out of an operation on it has `labels` None, as has one that is sorted in place, and metrics raise ValueError for it
    unless `columns=` says what its columns are. Numbers written into it are not looked at: a shuffle of its columns in
    place keeps the labels. What converts it to something else loses them without a trace: `np.asarray`, `list`,
    `torch.as_tensor`, an average of a list of them. Metrics take the columns of plain arrays to be sorted; pass
    `columns="rank"` there.

    Args:
        table: (n, K) probabilities.
        labels: (K,) the class of each column, in rank order.

    Raises:
        ValueError: if there is not one label for each column, or the table names its columns by the labels in another
            order.

    Example:
        >>> forecast = Distribution([[0.7, 0.2, 0.1]], labels=["poor", "fair", "good"])
        >>> forecast[:1].labels.tolist()
        ['poor', 'fair', 'good']
    """

    labels: Labels | None

    def __new__(cls, table: ArrayLike, *, labels: ArrayLike) -> Distribution:
        new = as_array(table).view(cls)
        new.labels = plain_labels("labels", labels).copy()  # of an estimator they are its attribute
        if contradicting := names_in_another_order(own_names(table), new.labels):
            raise ValueError(
                f"labels is {shown(new.labels)}, and the table names its columns {contradicting!r}; expected labels in "
                "rank order, with the columns of the table in this order."
            )
        own, names = categories_of(labels), new.labels.tolist()
        order = names if own is None else [label for label in own if label in names]
        if order != names:
            raise ValueError(
                f"labels is {shown(new.labels)}, and their Categorical has the order {order}; expected labels in rank "
                "order, with the columns of the table."
            )
        if new.ndim != 2 or new.shape[1] != new.labels.size:
            raise ValueError(
                f"table has shape {new.shape} and there are {new.labels.size} labels; expected (n, K) with K labels."
            )
        return new

    def __array_finalize__(self, other: Any) -> None:
        self.labels = None

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return _table_or_plain(array)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = _table_or_plain(super().__array_function__(function, types, args, kwargs))
        if isinstance(result, Distribution) and function in (np.concatenate, np.vstack, np.copy):
            first = args[0] if args else next(iter(kwargs.values()))
            rows = [first] if isinstance(first, Distribution) else list(first)
            axis = kwargs.get("axis", args[1] if function is np.concatenate and len(args) > 1 else 0)
            if axis in _ROWS or function is np.copy:
                result.labels = _common_labels(rows, result.shape[1])
        return result

    def __getitem__(self, key: Any) -> Any:
        part = _table_or_plain(super().__getitem__(key))
        if isinstance(part, Distribution) and self.ndim == 2:
            other_axes = key[1:] if isinstance(key, tuple) else ()
            if all(_is_everything(item) for item in other_axes) and part.shape[1] == self.shape[1]:
                part.labels = self.labels
        return part

    def take(self, indices: Any, axis: Any = None, out: Any = None, mode: Any = "raise") -> Any:
        """Return a selection, with the same labels if it is one of rows."""
        part = _table_or_plain(super().take(indices, axis, out, mode))
        if axis in _ROWS and isinstance(part, Distribution):
            part.labels = self.labels
        return part

    def sort(self, *args: Any, **kwargs: Any) -> None:
        """Sort each row or column by itself, in place: its columns no longer follow the labels."""
        super().sort(*args, **kwargs)
        self.labels = None

    def partition(self, *args: Any, **kwargs: Any) -> None:
        """Sort each row or column in part, in place: its columns no longer follow the labels."""
        super().partition(*args, **kwargs)
        self.labels = None

    def copy(self, order: Any = "C") -> Distribution:
        """Return a copy with the same labels."""
        new = super().copy(order)
        new.labels = self.labels
        return new

    def round(self, decimals: Any = 0, out: Any = None) -> Any:
        """Return rounded probabilities with the same labels."""
        new = _table_or_plain(np.asarray(self).round(decimals, out))
        if isinstance(new, Distribution):  # a vector, such as `table.dot(values)`, is a plain array
            new.labels = self.labels
        return new

    def __copy__(self) -> Distribution:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Distribution:
        return self.copy()

    def __reduce__(self) -> Any:
        rebuild, arguments, state = tuple(super().__reduce__())
        return rebuild, arguments, (state, self.labels)

    def __setstate__(self, state: Any) -> None:
        of_array, self.labels = state
        super().__setstate__(of_array)


def own_names(table: Any) -> list[Any]:
    """Return the names that a table itself gives its columns; [] without."""
    if isinstance(table, Distribution):
        return [] if table.labels is None else table.labels.tolist()
    return column_names(table)


def _is_everything(item: Any) -> bool:
    return item is Ellipsis or (isinstance(item, slice) and item == slice(None))


def _table_or_plain(result: Any) -> Any:
    """Return a table as a Distribution without labels, and everything else as numpy has it."""
    if not isinstance(result, np.ndarray):
        return result
    if result.ndim == 2:
        return result if isinstance(result, Distribution) else result.view(Distribution)
    return np.asarray(result)[()]


def _common_labels(rows: list[Any], columns: int) -> Labels | None:
    """Return the labels of tables with the same ones; None where one lacks them or has others."""
    first, *others = [getattr(part, "labels", None) for part in rows]
    if first is None or first.size != columns:
        return None
    return first if all(other is not None and np.array_equal(first, other) for other in others) else None
