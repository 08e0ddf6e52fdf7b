"""Columns of pandas dtype category as the codes that trees split on.

Codes number the categories that the dtype declares, in the order there, whether or not a training row holds them. At
prediction labels are looked up among these: the codes of another data frame may number other categories.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class CategoryColumns:
    """Attributes:
    dtypes: the CategoricalDtype of each such column, by its position.
    """

    dtypes: dict[int, Any]

    @classmethod
    def of(cls, X: Any) -> CategoryColumns:
        """The columns of categories in X (n, d); there are none in what is not a pandas DataFrame."""
        dtypes = X.dtypes if hasattr(X, "isetitem") else []
        return cls({place: dtype for place, dtype in enumerate(dtypes) if hasattr(dtype, "categories")})

    @property
    def unordered(self) -> tuple[int, ...]:
        """Positions of the columns to split by sets of categories; codes of ordered ones are split as numbers."""
        return tuple(place for place, dtype in self.dtypes.items() if not dtype.ordered)

    def coded(self, X: Any) -> Any:
        """X with codes in place of categories, NaN where a value is missing.

        Raises:
            ValueError: if a value is not a category of training, or X is not a DataFrame though training saw one.
        """
        if not self.dtypes:
            return X
        if not hasattr(X, "isetitem"):
            raise ValueError(
                f"X is a {type(X).__name__}, expected a pandas DataFrame as in fit: columns {list(self.dtypes)} hold "
                "categories, which an array cannot name."
            )
        coded = X.copy(deep=False)
        for place, dtype in self.dtypes.items():
            coded.isetitem(place, _codes(X.iloc[:, place], dtype.categories))
        return coded


def _codes(column: Any, categories: Any) -> np.ndarray:
    codes = categories.get_indexer(column)
    unknown = (codes < 0) & column.notna().to_numpy()
    if unknown.any():
        raise ValueError(
            f"column '{column.name}' of X holds {column[unknown].tolist()[0]!r}, expected one of the {len(categories)} "
            "categories of fit. Declare every category in the dtype before fit, or pass NaN."
        )
    return np.where(codes < 0, np.nan, codes)
