"""Features as linear models and networks take them: numbers, centred, of deviation 1, and sparse where they can be.

Centred rows are dense, so sparse rows are kept as they came, and mean m and deviation s go into the products:

    ((X - 1 m^T) / s) W = X (W / s) - 1 m^T (W / s)        G^T ((X - 1 m^T) / s) = (G^T X - (G^T 1) m^T) / s
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix, issparse
from sklearn import config_context
from sklearn.preprocessing import StandardScaler

from otloss._checks import check_not_masked
from otloss.metrics.arrays import column_names

LARGEST_FEATURE = 1e100  # Its square is still a finite float.
SMALLEST_FEATURE = 1e-150  # Its square is still a normal float, from which a deviation follows.
_TEMPORAL = ("date", "time", "duration")  # dtypes of polars and pyarrow begin so


def numpy_alone() -> Any:
    """Return the context in which scikit-learn makes arrays of numpy, whatever its global array_api_dispatch is."""
    return config_context(array_api_dispatch=False)


@contextmanager
def reading_features(X: Any, advice: str, *, name: str = "X") -> Iterator[None]:
    """Read X (n, d) into arrays of numpy; name the column where it holds dates, or a body finds text or objects in it.

    The advice may refer to `{column}`.
    """
    check_read_by_numpy(X, name)
    _check_no_dates(X, name)
    try:
        with numpy_alone():
            yield
    except (TypeError, ValueError) as error:
        is_of_a_cell = "could not convert string to float" in str(error) or "float() argument" in str(error)
        cell = _first_other(X) if is_of_a_cell else None
        if cell is None:
            raise
        column, value = cell
        where = f"column {column!r} of {name} holds"
        if isinstance(value, str):
            message = f"{where} text, {value!r}, expected numbers; {advice.format(column=repr(column))}."
        else:  # scikit-learn's own check looks for these words
            message = (
                f"{where} {value!r}, expected numbers; convert it: dates to days since an origin, missing values to "
                "nan. A cell of this argument must be a number, or a string that is a number."
            )
        raise type(error)(message) from error


def _check_no_dates(X: Any, name: str) -> None:
    """Raise TypeError for dates and durations, which as numbers depend on the unit in which a library holds them."""
    for column, kind in types_of_columns(X):
        if getattr(kind, "kind", "") in ("m", "M") or str(kind).lower().startswith(_TEMPORAL):
            what, dates = (name, name) if column is None else (f"column {column!r} of {name}", f"{name}[{column!r}]")
            raise TypeError(
                f"{what} has dtype {kind}, expected numbers; take days since an origin, the same in training and "
                f"prediction: in pandas ({dates} - origin) / pandas.Timedelta(days=1)."
            )


def check_read_by_numpy(X: Any, name: str = "X") -> None:
    """Raise ValueError for masked arrays, and nulls among categories of Arrow, which numpy takes for the last one."""
    check_not_masked(X)
    for place, (column, kind) in enumerate(types_of_columns(X)):
        if hasattr(kind, "index_type") and X.column(place).null_count:
            raise ValueError(
                f"column {column!r} of {name} holds nulls among its categories, a {kind}, which are not read as "
                f"missing; pass {name}.to_pandas()."
            )


def types_of_columns(X: Any) -> Iterable[tuple[Any, Any]]:
    """Return names and dtypes of the columns of a pandas, polars or pyarrow table; None and the dtype of an array."""
    types: Any = getattr(X, "dtypes", None)
    if hasattr(types, "items"):
        return types.items()
    if isinstance(types, list):
        return zip(X.columns, types, strict=True)
    if hasattr(getattr(X, "schema", None), "types"):
        return zip(X.schema.names, X.schema.types, strict=True)
    return [(None, getattr(X, "dtype", None))]


def _first_other(X: Any) -> tuple[Any, Any] | None:
    """Return the name or number of the first column that holds text or an object that is no number, and that cell."""
    table = np.asarray(X, dtype=object)
    if table.ndim != 2:
        return None
    for place, name in enumerate(column_names(X) or range(table.shape[1])):
        for value in table[:, place]:
            try:
                float(np.nan if value is None else value)  # numpy reads None as nan
            except (TypeError, ValueError):
                return name, value
    return None


def warn_of_tiny_columns(X: Any, smallest: float, *, stacklevel: int) -> None:
    """Warn of columns of X (n, d), dense or sparse, that hold no number as large as `smallest`, but not zeros alone."""
    if issparse(X):
        sizes = abs(X).max(axis=0).toarray().ravel()
    else:  # reductions by column, because X may be too large to copy; NaN marks missing values
        sizes = np.maximum(np.fmax.reduce(X, axis=0), -np.fmin.reduce(X, axis=0))
    tiny = np.flatnonzero((sizes > 0) & (sizes < smallest))
    if len(tiny):
        warnings.warn(
            f"column {tiny[0]} of X holds numbers up to {sizes[tiny[0]]:g} in size ({len(tiny)} such columns): the "
            f"model takes numbers below {smallest:g} for zeros. Multiply such features by a power of ten.",
            stacklevel=stacklevel + 1,
        )


def check_size(name: str, values: np.ndarray) -> None:
    """Raise ValueError if a number is too large for its square to be a float."""
    largest = np.abs(values).max(initial=0.0)
    if largest > LARGEST_FEATURE:
        raise ValueError(
            f"{name} holds numbers up to {largest:g} in size, expected at most {LARGEST_FEATURE:g}. Look for marks of "
            "missing values such as 1e300, or divide by a power of ten."
        )


def fitted_scaler(X: Any, weights: np.ndarray, *, with_std: bool) -> StandardScaler:
    """Return the means and, with `with_std`, deviations of the columns of X (n, d), dense or sparse, by weight.

    Raises:
        ValueError: if a feature is too large for its square to be a float.
    """
    check_size("X", X.data if issparse(X) else X)
    weights = np.ldexp(weights, -np.frexp(weights.max())[1])  # exact, and their products do not overflow
    scaler = StandardScaler(with_mean=not issparse(X), with_std=with_std).set_output(transform="default")
    with np.errstate(invalid="ignore"):  # the weighted variance of a constant column may be rounding below 0
        scaler.fit(X, sample_weight=weights)  # "default": arrays, whatever scikit-learn's global transform_output is
    if issparse(X):  # scikit-learn divides sparse features by deviations only.
        scaler.mean_ = X.T @ weights / weights.sum()
        scaler.set_params(with_mean=True)
    return scaler


def standardised(X: Any, scaler: StandardScaler) -> Any:
    """Features (n, d) that can be multiplied, `X @ W` and `G @ X`: an array, or `SparseRows` where X is sparse."""
    if not issparse(X):
        return scaler.transform(X)
    mean, scale = scaler.mean_, np.ones(X.shape[1]) if scaler.scale_ is None else scaler.scale_
    is_full = np.bincount(X.indices, minlength=X.shape[1]) == X.shape[0]  # rows have an entry of each column at most
    if is_full.any():  # such as times, whose mean is so much larger than their deviation that it would cancel
        X = csr_matrix((X.data - np.where(is_full, mean, 0.0)[X.indices], X.indices, X.indptr), shape=X.shape)
        mean = np.where(is_full, 0.0, mean)
    return SparseRows(X, mean, scale)


@dataclass(frozen=True, eq=False)
class SparseRows:
    """(rows - mean) / scale, of which only the products exist."""

    rows: Any  # a scipy.sparse CSR matrix (n, d)
    mean: np.ndarray  # 0 for columns that are centred already
    scale: np.ndarray

    __array_ufunc__ = None  # so that `array @ self` comes here

    @property
    def shape(self) -> tuple[int, int]:
        n, d = self.rows.shape
        return int(n), int(d)

    def __matmul__(self, W: np.ndarray) -> np.ndarray:
        scaled = W / self.scale[:, None]
        product: np.ndarray = self.rows @ scaled - self.mean @ scaled
        return product

    def __rmatmul__(self, G: np.ndarray) -> np.ndarray:
        product: np.ndarray = ((self.rows.T @ G.T).T - np.outer(G.sum(1), self.mean)) / self.scale
        return product

    def mean_squares(self, weight: np.ndarray) -> np.ndarray:
        """Return sum_i weight_i x_ij^2, (d,), for weights (n,) of sum 1 by which the columns are centred."""
        squares = self.rows.multiply(self.rows).T @ weight - self.mean**2
        means: np.ndarray = np.maximum(squares, 0.0) / self.scale**2
        return means
