"""The loss of a row that the user chose, checked once and immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otloss._checks import check_number

Floats = NDArray[np.float64]


class LossSettings(TypedDict, total=False):
    """The settings of a loss; `xgboost_objective` describes them."""

    power: int
    x: ArrayLike | None
    cost: ArrayLike | None
    transport: float
    cross_entropy: float
    class_weight: ArrayLike | dict[int, float] | None


@dataclass(frozen=True)
class RowLoss:
    """transport * (cost of moving the probabilities to the label) + cross_entropy * (-log of the label's probability).

    Attributes:
        num_classes: K.
        power: 1 or 2; unused with a cost.
        x: the K class values.
        cost: K rows of K costs, [true][predicted], None for a loss on the line.
        transport: factor of the first term.
        cross_entropy: factor of the second.
        class_weight: K factors of the weights of rows.
    """

    num_classes: int
    power: int
    x: tuple[float, ...]
    cost: tuple[tuple[float, ...], ...] | None
    transport: float
    cross_entropy: float
    class_weight: tuple[float, ...]

    @property
    def is_square(self) -> bool:
        """Whether the transport term is the sum of squares of power 2; else it is linear in the probabilities."""
        return self.cost is None and self.power == 2

    @cached_property
    def gaps(self) -> Floats:
        """(K - 1,) where the transport term is a sum of squares, else (0,)."""
        return np.diff(self.x) if self.is_square else np.zeros(0)

    @cached_property
    def costs(self) -> Floats:
        """(K, K) where the transport term is linear, else (0, 0)."""
        if self.is_square:
            return np.zeros((0, 0))
        return np.abs(np.subtract.outer(self.x, self.x)) if self.cost is None else np.array(self.cost)

    @cached_property
    def class_weights(self) -> Floats:
        return np.array(self.class_weight)

    @property
    def furthest(self) -> float:
        """Upper bound of the transport term, before its factor."""
        return float(self.gaps.sum() if self.is_square else self.costs.max())

    @property
    def steepest(self) -> float:
        """Upper bound of the gradient of a row of weight 1."""
        return float(self.class_weights.max()) * (self.transport * self.furthest + self.cross_entropy)


def row_loss(
    num_classes: Any,
    *,
    power: Any = 2,
    x: Any = None,
    cost: Any = None,
    transport: Any = 1.0,
    cross_entropy: Any = 0.0,
    class_weight: Any = None,
) -> RowLoss:
    """Return the loss with these settings.

    Raises:
        TypeError: if a setting that must be numeric is not.
        ValueError: if a setting is out of range.
    """
    classes = check_classes(num_classes)
    if check_number("power", power) not in (1, 2):
        raise ValueError(f"power is {power!r}, expected 1 or 2; use cost= for other costs of a distance.")
    if cost is not None and x is not None:
        raise ValueError("both cost and x are given, expected one of them: a cost matrix replaces x.")
    for name, value in (("transport", transport), ("cross_entropy", cross_entropy)):
        if not 0 <= check_number(name, value) < np.inf:
            raise ValueError(f"{name} is {value}, expected a finite number, at least 0.")
    if transport == cross_entropy == 0:
        raise ValueError("transport and cross_entropy are both 0, expected one above 0.")
    values = np.arange(classes, dtype=np.float64) if x is None else _array("x", x, (classes,))
    if (np.diff(values) <= 0).any():
        k = int(np.flatnonzero(np.diff(values) <= 0)[0])
        raise ValueError(
            f"x[{k}] is {values[k]} and x[{k + 1}] is {values[k + 1]}, expected strictly increasing values; number "
            "the classes in the order of their values, and give each its own."
        )
    costs = None if cost is None else _array("cost", cost, (classes, classes), least=0.0)
    return RowLoss(
        num_classes=classes,
        power=int(power),
        x=tuple(values.tolist()),
        cost=None if costs is None else tuple(tuple(row) for row in costs.tolist()),
        transport=float(transport),
        cross_entropy=float(cross_entropy),
        class_weight=tuple(_class_weights(class_weight, classes).tolist()),
    )


def check_classes(num_classes: Any) -> int:
    """Return the number of classes if it is a whole number of at least 2."""
    if not 2 <= check_number("num_classes", num_classes) < np.inf or num_classes != int(num_classes):
        raise ValueError(f"num_classes is {num_classes}, expected a whole number, at least 2.")
    return int(num_classes)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {choices}.")


def as_floats(name: str, values: Any, *, fix: str) -> Floats:
    """Return a float64 copy of numbers; text raises TypeError."""
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # the last from tensors with a graph
        raise TypeError(f"{name} cannot be read: {error}; expected numbers; {fix}") from error


def _array(name: str, values: Any, shape: tuple[int, ...], least: float = -np.inf) -> Floats:
    array = as_floats(name, _by_position(name, values, shape[0]), fix="pass an array of dtype float.")
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, expected {shape}: by class, for a cost [true, predicted].")
    wrong = np.argwhere(~(np.isfinite(array) & (array >= least)))
    if len(wrong):
        first = tuple(int(i) for i in wrong[0])
        limit = "" if least == -np.inf else f" of at least {least:g}"
        raise ValueError(f"{name}{list(first)} is {array[first]}, expected finite numbers{limit}.")
    return array


def _by_position(name: str, values: Any, classes: int) -> Any:
    """Return a pandas Series or DataFrame in the order of the class positions that its index names."""
    if not hasattr(values, "sort_index"):
        return values
    for axis, index in enumerate(values.axes):
        if set(index) != set(range(classes)) or len(index) != classes:
            raise ValueError(
                f"the index of {name} is {list(index)}, expected each of the class positions 0 to {classes - 1} once; "
                f"reindex it, or pass {name}.to_numpy() if it is in the order of the classes."
            )
        values = values.sort_index(axis=axis)
    return values


def _class_weights(class_weight: Any, classes: int) -> Floats:
    if class_weight is None:
        return np.ones(classes)
    if isinstance(class_weight, str):
        raise ValueError(
            f"class_weight is {class_weight!r}, expected {classes} numbers, or a dict from class position to number; "
            f'for "balanced" pass sklearn.utils.class_weight.compute_class_weight("balanced", classes=..., y=...).'
        )
    if isinstance(class_weight, Mapping):
        unknown = [key for key in class_weight if key not in range(classes)]
        if unknown:
            raise ValueError(
                f"class_weight has the key {unknown[0]!r}, expected class positions 0 to {classes - 1}: keys are "
                "positions in the order of the classes, not labels."
            )
        class_weight = [class_weight.get(k, 1.0) for k in range(classes)]
    return _array("class_weight", class_weight, (classes,), least=0.0)
