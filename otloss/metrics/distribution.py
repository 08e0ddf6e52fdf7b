"""A table of probabilities that knows which class each of its columns is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from otloss.metrics.labels import Labels, plain_labels


class Distribution(np.ndarray):
    """Probabilities (n, K) with the classes of their columns, lowest rank first, in `labels`.

    It is a numpy array. Metrics and plots read its columns by `labels`, whatever order the classes sort in. A selection
    of rows and a copy keep the labels. The result of any other operation has `labels` None, and metrics raise
    ValueError for it unless `columns=` says what its columns are. `np.asarray` returns a plain array, whose columns
    metrics take to be sorted.

    Args:
        table: (n, K) probabilities.
        labels: (K,) the class of each column, in rank order.

    Raises:
        ValueError: if there is not one label for each column.

    Example:
        >>> forecast = Distribution([[0.7, 0.2, 0.1]], labels=["poor", "fair", "good"])
        >>> forecast[:1].labels.tolist()
        ['poor', 'fair', 'good']
    """

    labels: Labels | None

    def __new__(cls, table: ArrayLike, *, labels: ArrayLike) -> Distribution:
        new = np.asarray(table).view(cls)
        new.labels = plain_labels("labels", labels)
        if new.ndim != 2 or new.shape[1] != new.labels.size:
            raise ValueError(
                f"table has shape {new.shape} and there are {new.labels.size} labels; expected (n, K) with K labels."
            )
        return new

    def __array_finalize__(self, other: Any) -> None:
        self.labels = None

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        rows_only = not isinstance(key, tuple) and isinstance(part, Distribution) and part.ndim == 2
        if rows_only and self.ndim == 2 and part.shape[1] == self.shape[1]:
            part.labels = self.labels
        return part if rows_only else np.asarray(part)[()]

    def copy(self, order: Any = "C") -> Distribution:
        """Return a copy with the same labels."""
        new = super().copy(order)
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
