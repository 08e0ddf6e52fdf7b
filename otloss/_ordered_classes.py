"""Ordered classes: their values, the costs between them and the settings of their losses, checked in one place.

Losses, boosting, estimators and metrics describe K ordered classes by increasing values x_0 < ... < x_{K-1}, by a cost
matrix C[true, predicted], or by neither: then x_k = k. Arrays are float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from otloss._checks import check_not_masked, check_not_negative, check_number

Floats = NDArray[np.float64]


def class_values(name: str, values: Any, classes: int, *, fix: str = "") -> Floats:
    """Return the K class values in rank order, 0 to K - 1 for None; `fix` ends the message for another number of them.

    Raises:
        TypeError: if the values are not numeric.
        ValueError: if their shape is not (K,), or they are not finite and strictly increasing.
    """
    if values is None:
        return np.arange(float(classes))
    array = class_table(name, values, (classes,), fix=fix)
    check_increasing(name, array)
    return array


def class_costs(name: str, cost: Any, classes: int, *, fix: str = "") -> Floats:
    """Return the (K, K) costs [true, predicted]; `fix` ends the message about a wrong shape.

    Raises:
        TypeError: if the costs are not numeric.
        ValueError: if their shape is not (K, K), or one is negative, NaN or infinite.
    """
    return class_table(name, cost, (classes, classes), minimum=0.0, fix=fix)


def class_table(name: str, values: Any, shape: tuple[int, ...], *, minimum: float = -np.inf, fix: str = "") -> Floats:
    """Return finite numbers of at least `minimum` by class position; raise as `class_values` does."""
    array = as_floats(name, values, fix="pass an array of dtype float, by class position.")
    check_table_shape(name, array.shape, shape, fix=fix)
    wrong = np.argwhere(~(np.isfinite(array) & (array >= minimum)))
    if len(wrong):
        first = tuple(int(i) for i in wrong[0])
        limit = "" if minimum == -np.inf else f" of at least {minimum:g}"
        raise ValueError(f"{name}{list(first)} is {array[first]:g}, expected finite numbers{limit}.")
    return array


def check_table_shape(name: str, shape: tuple[int, ...], *expected: tuple[int, ...], fix: str = "") -> None:
    """Raise ValueError unless the shape of values or costs by class is an expected one."""
    if tuple(shape) not in expected:
        shapes = " or ".join(map(str, expected))
        meaning = "one number a class, in rank order" if len(expected[0]) == 1 else "a cost is [true, predicted]"
        raise ValueError(f"{name} has shape {tuple(shape)}, expected {shapes}: {meaning}. {fix}".strip())


def check_increasing(name: str, values: Floats) -> None:
    """Raise ValueError unless finite numbers (K,) increase strictly, with a span that is finite too."""
    wrong = np.flatnonzero(values[1:] <= values[:-1])
    if wrong.size:
        k = int(wrong[0])
        raise ValueError(
            f"{name}[{k}] is {values[k]:.9g} and {name}[{k + 1}] is {values[k + 1]:.9g}, expected strictly increasing "
            "values; number the classes in the order of their values, and merge repeated ones. If rounding to float32 "
            f"has merged them, subtract {name}[0] in float64 first."
        )
    if values.size and not values[-1] / 2 - values[0] / 2 < np.finfo(float).max / 2:
        raise ValueError(
            f"{name} spans {values[0]:g} to {values[-1]:g}, expected finite numbers with a finite span; rescale them."
        )


def check_terms(power: Any, transport: Any, cross_entropy: Any) -> None:
    """Raise unless power is 1 or 2, and the weights of the two terms are finite, at least 0 and not both 0."""
    if check_number("power", power) not in (1, 2):
        raise ValueError(f"power is {power!r}, expected 1 or 2; use cost= for other costs of a distance.")
    check_not_negative("transport", transport)
    check_not_negative("cross_entropy", cross_entropy)
    if transport == cross_entropy == 0:
        raise ValueError("transport and cross_entropy are both 0, expected one above 0.")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`, where True and 1 differ."""
    is_bool = isinstance(value, bool | np.bool_)
    is_one = value is None or isinstance(
        value, str | int | float | np.generic
    )  # torch.compile traces no np.ndim of text
    if not is_one or not any(isinstance(choice, bool) == is_bool and value == choice for choice in choices):
        raise ValueError(f"{name} is {value!r}, expected one of {choices}.")


def as_floats(name: str, values: Any, *, fix: str) -> Floats:
    """Return a float64 copy of numbers; raise TypeError for text, complex numbers, dates, and tensors with a graph."""
    check_not_masked(values)
    try:
        if isinstance(values, torch.Tensor):
            values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
        if np.iscomplexobj(values):  # numpy would drop the imaginary parts
            raise TypeError("complex numbers have no order")
        if getattr(getattr(values, "dtype", None), "kind", "") in ("m", "M") or np.asarray(values).dtype.kind in "mM":
            raise TypeError("numbers of dates and times depend on the unit in which pandas holds them")
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: tensors with a graph
        raise TypeError(f"{name} cannot be read: {error}; expected numbers; {fix}") from error
