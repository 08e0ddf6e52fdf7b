"""What the user chose: the loss of a row, checked once and kept unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otloss._checks import check_number

HESSIANS = ("auto", "gauss-newton", "bound", "absolute")
# Gradients are float32: at these bounds sums of them over 1e8 rows are finite still.
STEEPEST, LARGEST_WEIGHT = 1e18, 1e12

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RowLoss:
    """transport * (cost of moving the probabilities to the label) + cross_entropy * (-log of the label's probability).

    Attributes:
        num_classes: K.
        power: 1 or 2; unused with a cost.
        x: the K class values, None for 0 to K - 1.
        cost: K rows of K costs, [true][predicted], None for a loss on the line.
        transport: factor of the first term.
        cross_entropy: factor of the second.
        class_weight: K factors of the weights of rows, None for ones.
    """

    num_classes: int
    power: int = 2
    x: tuple[float, ...] | None = None
    cost: tuple[tuple[float, ...], ...] | None = None
    transport: float = 1.0
    cross_entropy: float = 0.0
    class_weight: tuple[float, ...] | None = None

    @property
    def is_square(self) -> bool:
        """Whether the transport term is the sum of squares of power 2; else it is linear in the probabilities."""
        return self.cost is None and self.power == 2

    @cached_property
    def gaps(self) -> Floats:
        """(K - 1,) where the transport term is a sum of squares, else (0,)."""
        return np.diff(self._values) if self.is_square else np.zeros(0)

    @cached_property
    def costs(self) -> Floats:
        """(K, K) where the transport term is linear, else (0, 0)."""
        if self.is_square:
            return np.zeros((0, 0))
        if self.cost is not None:
            return np.array(self.cost)
        return np.abs(np.subtract.outer(self._values, self._values))

    @property
    def furthest(self) -> float:
        """What the transport term is at most, before its factor."""
        return float(self.gaps.sum() if self.is_square else self.costs.max())

    @property
    def steepest(self) -> float:
        """What no gradient of a row of weight 1 exceeds."""
        return float(self.class_weights.max()) * (self.transport * self.furthest + self.cross_entropy)

    @cached_property
    def class_weights(self) -> Floats:
        return np.ones(self.num_classes) if self.class_weight is None else np.array(self.class_weight)

    @property
    def _values(self) -> Floats:
        return np.arange(self.num_classes, dtype=np.float64) if self.x is None else np.array(self.x)

    def __repr__(self) -> str:
        shown = [str(self.num_classes)]
        for name in ("power", "x", "cost", "transport", "cross_entropy", "class_weight"):
            value = getattr(self, name)
            if name == "power" and self.cost is not None:
                continue
            if name == "power" or value != type(self).__dataclass_fields__[name].default:
                shown.append(f"{name}={value}")
        return ", ".join(shown)


def row_loss(
    num_classes: Any, *, power: Any, x: Any, cost: Any, transport: Any, cross_entropy: Any, class_weight: Any
) -> RowLoss:
    """Check what the user passed.

    Raises:
        TypeError: if a number is none.
        ValueError: if a setting cannot be one; the message says which.
    """
    classes = check_classes(num_classes)
    if check_number("power", power) not in (1, 2):
        raise ValueError(f"power is {power!r}, expected 1 or 2; other prices of a distance go into cost=.")
    if cost is not None and x is not None:
        raise ValueError("both cost and x are given, expected one of them: a cost matrix says all that x would say.")
    for name, value in (("transport", transport), ("cross_entropy", cross_entropy)):
        if not 0 <= check_number(name, value) < np.inf:
            raise ValueError(f"{name} is {value}, expected a finite number, at least 0.")
    if transport == cross_entropy == 0:
        raise ValueError("transport and cross_entropy are both 0, expected one above 0: nothing is left to learn from.")
    loss = RowLoss(
        num_classes=classes,
        power=int(power),
        x=_checked_values(x, classes),
        cost=_checked_cost(cost, classes),
        transport=float(transport),
        cross_entropy=float(cross_entropy),
        class_weight=_checked_class_weight(class_weight, classes),
    )
    _check_size(loss)
    return loss


def check_classes(num_classes: Any) -> int:
    """Return the number of classes if it is one, else raise TypeError or ValueError."""
    if not 2 <= check_number("num_classes", num_classes) < np.inf or num_classes != int(num_classes):
        raise ValueError(f"num_classes is {num_classes}, expected a whole number, at least 2.")
    return int(num_classes)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {choices}.")
    return value


def check_hessian(hessian: Any, loss: RowLoss) -> str:
    """Return `hessian` if it is one that this loss has, else raise ValueError."""
    check_choice("hessian", hessian, HESSIANS)
    if hessian == "gauss-newton" and loss.transport > 0 and not loss.is_square:
        what = "a cost matrix" if loss.cost is not None else "power 1"
        raise ValueError(
            f'hessian is "gauss-newton" with {what}: that loss is linear in the probabilities, and its Gauss-Newton '
            'matrix is zero. Choose "bound", "absolute" or "auto".'
        )
    return str(hessian)


def as_floats(name: str, values: Any, *, mend: str) -> Floats:
    """Return a float64 copy of numbers, else raise TypeError; text is none, even where it spells numbers."""
    try:
        array = np.asarray(values)
        text = [value for value in array.flat if isinstance(value, str | bytes)] if array.dtype.kind in "OSU" else []
        if not text and array.dtype.kind in "biufO":
            return np.array(array, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # the last from tensors with a graph
        raise TypeError(f"{name} cannot be read: {error}; expected numbers; {mend}") from error
    found = repr(str(text[0])) if text else f"values of dtype {array.dtype}"
    raise TypeError(f"{name}: found {found}, expected numbers; {mend}")


def _by_position(name: str, values: Any, classes: int) -> Any:
    """A pandas Series or DataFrame as an array in the order of the class positions that its index names."""
    if not (hasattr(values, "axes") and hasattr(values, "to_numpy")):
        return values
    array = values.to_numpy()
    for axis, index in enumerate(values.axes):
        keys = list(index)
        if _strangers(keys, classes) or not len(keys) == len(set(keys)) == classes:
            raise ValueError(
                f"the index of {name} is {keys}, expected each of the class positions 0 to {classes - 1} once; "
                f"reindex(range({classes})) shows what is missing, and {name}.to_numpy() is read in the order it has."
            )
        array = np.take(array, np.argsort(keys), axis=axis)
    return array


def _strangers(keys: Iterable[Any], classes: int) -> list[Any]:
    """Keys that are no class positions."""
    return [key for key in keys if isinstance(key, bool | np.bool_) or key not in range(classes)]


def _check_size(loss: RowLoss) -> None:
    with np.errstate(over="ignore"):
        steepest, furthest = loss.steepest, loss.furthest
    if not steepest <= STEEPEST:
        what = "the largest cost" if loss.cost is not None else "the span of x"
        raise ValueError(
            f"gradients reach {steepest:.3g}: transport {loss.transport:g} times {what} {furthest:g}, plus "
            f"cross_entropy {loss.cross_entropy:g}, times the largest class weight {loss.class_weights.max():g}; "
            f"expected at most {STEEPEST:g}, for the libraries hold them in float32. Divide them by one number."
        )


def _array(name: str, values: Any, classes: int) -> Floats:
    array = as_floats(name, _by_position(name, values, classes), mend="pass an array of dtype float.")
    if not np.isfinite(array).all():
        first = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        raise ValueError(f"{name} holds {array[first]} at index {first}, expected finite numbers.")
    return array


def _checked_values(x: Any, classes: int) -> tuple[float, ...] | None:
    if x is None:
        return None
    array = _array("x", x, classes)
    if array.shape != (classes,):
        raise ValueError(f"x has shape {array.shape}, expected ({classes},): one value for each class.")
    falls = np.flatnonzero(array[1:] <= array[:-1])
    if falls.size:
        k = int(falls[0])
        raise ValueError(
            f"x[{k}] is {array[k]} and x[{k + 1}] is {array[k + 1]}, expected strictly increasing values; "
            "number the classes in the order of their values, and give each its own."
        )
    return tuple(array.tolist())


def _checked_cost(cost: Any, classes: int) -> tuple[tuple[float, ...], ...] | None:
    if cost is None:
        return None
    array = _array("cost", cost, classes)
    if array.shape != (classes, classes):
        raise ValueError(
            f"cost has shape {array.shape}, expected ({classes}, {classes}): a row for each true class, a column for "
            "each predicted one."
        )
    if (array < 0).any():
        first = tuple(int(i) for i in np.argwhere(array < 0)[0])
        raise ValueError(
            f"cost[{first[0]}, {first[1]}] is {array[first]}, expected costs >= 0; add a constant to that row, which "
            "changes no gradient."
        )
    return tuple(tuple(row) for row in array.tolist())


def _checked_class_weight(class_weight: Any, classes: int) -> tuple[float, ...] | None:
    if class_weight is None:
        return None
    if isinstance(class_weight, str):
        raise ValueError(
            f"class_weight is {class_weight!r}, expected {classes} numbers, or a dict from class position to number; "
            f'for "balanced" pass sklearn.utils.class_weight.compute_class_weight("balanced", classes=..., y=...).'
        )
    if isinstance(class_weight, Mapping):
        strangers = _strangers(class_weight, classes)
        if strangers:
            raise ValueError(
                f"class_weight has the key {strangers[0]!r}, expected class positions 0 to {classes - 1}: a class goes "
                "by its position in the order of the classes, not by its label."
            )
        class_weight = [class_weight.get(k, 1.0) for k in range(classes)]
    array = _array("class_weight", class_weight, classes)
    if array.shape != (classes,):
        raise ValueError(f"class_weight has shape {array.shape}, expected ({classes},): one weight for each class.")
    if (array < 0).any():
        k = int(np.flatnonzero(array < 0)[0])
        raise ValueError(f"class_weight[{k}] is {array[k]}, expected weights >= 0.")
    return tuple(array.tolist())
