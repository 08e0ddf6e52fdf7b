"""The loss of a row that the user chose, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otloss._checks import check_not_negative, check_number

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RowLoss:
    """transport * (cost of moving the probabilities to the label) + cross_entropy * (-log of the label's probability).

    Attributes:
        name: of the first term: "rps" at power 2, "emd" at power 1, "cost" by a cost matrix.
        gaps: (K - 1,) between the class values at power 2, where the first term is a sum of squares, else (0,).
        costs: (K, K) [true, predicted] where it is linear in the probabilities, else (0, 0).
        transport: factor of the first term.
        cross_entropy: factor of the second.
        class_weights: (K,) factors of the weights of rows.
    """

    name: str
    gaps: Floats
    costs: Floats
    transport: float
    cross_entropy: float
    class_weights: Floats

    @property
    def num_classes(self) -> int:
        return len(self.class_weights)

    @property
    def is_square(self) -> bool:
        return self.name == "rps"

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
        check_not_negative(name, value)
    if transport == cross_entropy == 0:
        raise ValueError("transport and cross_entropy are both 0, expected one above 0.")
    values = np.arange(classes, dtype=np.float64) if x is None else _array("x", x, (classes,))
    if (np.diff(values) <= 0).any():
        k = int(np.flatnonzero(np.diff(values) <= 0)[0])
        raise ValueError(
            f"x[{k}] is {values[k]} and x[{k + 1}] is {values[k + 1]}, expected strictly increasing values; number "
            "the classes in the order of their values, and give each its own."
        )
    name = "cost" if cost is not None else "rps" if power == 2 else "emd"
    costs = np.abs(np.subtract.outer(values, values))
    if cost is not None:
        costs = _array("cost", cost, (classes, classes), least=0.0)
    weights = np.ones(classes)
    if class_weight is not None:
        weights = _array("class_weight", class_weight, (classes,), least=0.0)
    return RowLoss(
        name=name,
        gaps=np.diff(values) if name == "rps" else np.zeros(0),
        costs=np.zeros((0, 0)) if name == "rps" else costs,
        transport=float(transport),
        cross_entropy=float(cross_entropy),
        class_weights=weights,
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
    if hasattr(values, "iloc"):
        raise TypeError(
            f"{name} is a pandas {type(values).__name__}, whose order may not be that of the classes; expected an "
            f"array, such as {name}.sort_index().to_numpy()."
        )
    array = as_floats(name, values, fix="pass an array of dtype float, by class position.")
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, expected {shape}: by class, for a cost [true, predicted].")
    wrong = np.argwhere(~(np.isfinite(array) & (array >= least)))
    if len(wrong):
        first = tuple(int(i) for i in wrong[0])
        limit = "" if least == -np.inf else f" of at least {least:g}"
        raise ValueError(f"{name}{list(first)} is {array[first]}, expected finite numbers{limit}.")
    return array
