"""Probabilities, sample weights and class values, checked and in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike

from otloss._checks import check_not_masked, significant_bits
from otloss._ordered_classes import as_floats, class_values


def read_probabilities(name: str, proba: ArrayLike) -> Float[np.ndarray, "n classes"]:
    """Return (n, K) probabilities in float64, each row divided by its sum, which is 1 up to rounding."""
    array = as_array(proba)
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(
            f"{name} has shape {array.shape}, expected (n, K): a row for each example, a column for each class."
        )
    if array.dtype.kind not in "fiu":
        raise TypeError(
            f"{name} has dtype {array.dtype}, expected floating-point probabilities; convert them, a data "
            "frame with .to_numpy(dtype=float)."
        )
    table = array.astype(float)
    sums = table.sum(1)
    # A bfloat16 tensor arrives as float32, with the rounding of bfloat16.
    size = proba.dtype.itemsize if isinstance(proba, torch.Tensor) else array.dtype.itemsize
    tolerance = 1e-2 if size < 4 else 1e-4
    bad = ~(np.isfinite(table).all(1) & (table.min(1) >= 0) & (np.abs(sums - 1) <= tolerance))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"{name}[{row}] is {table[row]}, of sum {sums[row]:.6g}; expected probabilities >= 0 of sum 1. "
            "Scores and logits need a softmax first."
        )
    return table / sums[:, None]


def read_weights(sample_weight: ArrayLike | None, count: int) -> Float[np.ndarray, " n"]:
    """Return (n,) weights >= 0, some of them above 0; ones by default."""
    if sample_weight is None:
        return np.ones(count)
    weight = as_array(sample_weight)
    if weight.dtype.kind not in "biufO":
        got = repr(sample_weight) if weight.ndim == 0 else f"of dtype {weight.dtype}"
        raise TypeError(f"sample_weight is {got}, expected real numbers; estimators have class_weight=.")
    fix = "pass one real number for each example; estimators have class_weight=."
    weight = as_floats("sample_weight", weight, fix=fix)
    if weight.shape != (count,):
        raise ValueError(f"sample_weight has shape {weight.shape}, expected ({count},): one for each example.")
    bad = ~(np.isfinite(weight) & (weight >= 0))
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        raise ValueError(f"sample_weight[{first}] is {weight[first]}, expected finite weights >= 0.")
    if not weight.any():
        raise ValueError("sample_weight is zero everywhere, expected a sum above 0.")
    return weight


def read_shares(sample_weight: ArrayLike | None, count: int) -> Float[np.ndarray, " n"]:
    """Return (n,) weights of sum 1."""
    weight = read_weights(sample_weight, count)
    weight = weight / weight.max()  # This avoids overflow and underflow.
    return weight / weight.sum()


def read_values(values: ArrayLike | None, classes: int) -> Float[np.ndarray, " classes"]:
    """Return the K class values in rank order, 0 to K - 1 by default."""
    return class_values("values", None if values is None else as_array(values), classes)


def column_names(table: Any) -> list[Any]:
    """Return the names of the columns of a pandas, polars or pyarrow table; none of an array."""
    return list(getattr(table, "column_names", getattr(table, "columns", [])))  # pyarrow's `columns` are the data


def array_bits(values: ArrayLike) -> int:
    """Return to how many bits an array, a table or a list of numbers has been rounded, as `significant_bits` says."""
    array = as_array(values)
    dtype = values.dtype if isinstance(values, torch.Tensor) else array.dtype.name  # bfloat16 comes as float32
    return significant_bits(array.astype(np.float64), dtype)


def in_bits(numbers: Float[np.ndarray, "*shape"], bits: int) -> Float[np.ndarray, "*shape"]:
    """Return numbers rounded to so many significant bits."""
    mantissa, exponent = np.frexp(numbers)
    return np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits)


def as_array(values: Any) -> np.ndarray:
    """`np.asarray`, also of tensors that are on another device, carry a graph, or are bfloat16."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
    check_not_masked(values)
    return np.asarray(values)
