"""Settings of the loss, checked and cut down to the classes that a training set holds.

Cutting down is exact: with no mass on the other classes, the CDF distance over all K classes is that over the m seen,
at the class values that these have.

Training sees distances in a unit of their own, so that penalties, tolerances and bounds on curvatures mean the same
whether values are euros or cents: the mean gap of all K values, or the largest cost over K - 1. A cost of
|values[i] - values[j]| has the unit of its values, and both are 1 for 0..K-1. Where the labels imply the categories, m,
the number of labels seen, takes the place of K: labels 10, 20, 30 train as 0, 1, 2 do.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from otloss.estimators.decode import RULES
from otloss.estimators.labels import LabelOrder, in_rank_order

SMALLEST_SPAN = 1e-150  # of values or costs, and one over the largest: their squares are floats


@dataclass(frozen=True)
class Criterion:
    """What one row costs: a transport loss and its mix with cross-entropy, over m positions.

    Attributes:
        values: (m,) class values, increasing; 0..K-1 cut to the positions where none are given.
        power: of the CDF differences; unused with a cost.
        cost: (m, m) cost[true, predicted] or None.
        transport: weight of the transport loss.
        cross_entropy: weight of the cross-entropy added.
        unit: what training divides values or the cost by.
    """

    values: np.ndarray
    power: int
    cost: np.ndarray | None
    transport: float
    cross_entropy: float
    unit: float = 1.0

    @property
    def geometry(self) -> dict[str, Any]:
        """What the loss is told of the distances between classes, in units of `unit`."""
        if self.cost is not None:
            return {"cost": self.cost / self.unit}
        return {"x": (self.values - self.values[0]) / self.unit, "power": self.power}


def make_criterion(
    order: LabelOrder, *, values: Any, power: Any, cost: Any, transport: Any, cross_entropy: Any
) -> Criterion:
    """The loss over the positions of `order`.

    Raises:
        ValueError: if values are not K increasing finite numbers, power is not 1 or 2, a cost is not K x K,
            finite and non-negative, values and cost are both given, or transport or cross_entropy is negative, or
            both are 0.
    """
    if values is not None and cost is not None:
        raise ValueError("values and cost are both given, expected one: a cost matrix holds all distances already.")
    check_choice("power", power, (1, 2))
    check_real("transport", transport, least=0.0)
    check_real("cross_entropy", cross_entropy, least=0.0)
    if transport == 0 and cross_entropy == 0:
        raise ValueError("transport and cross_entropy are both 0, expected one above 0: nothing is left to learn from.")
    number = len(order.categories)
    every_value = np.arange(number, dtype=np.float64)
    if values is not None:
        every_value = _checked_values(in_rank_order("values", values, order.names), number)
    kept_cost, span = None, every_value[-1] - every_value[0]
    if cost is not None:
        every_cost = _checked_cost(in_rank_order("cost", cost, order.names), number)
        kept_cost, span = np.ascontiguousarray(every_cost[np.ix_(order.ranks, order.ranks)]), every_cost.max()
    unit = float(span) / max((number if order.told else len(order.classes)) - 1, 1)
    weights = float(transport), float(cross_entropy)
    return Criterion(every_value[order.ranks], int(power), kept_cost, *weights, unit=unit or 1.0)


def check_decode(rule: Any, *, has_cost: bool) -> str:
    """Return `rule` if it is one of the rules of `decode`, else raise ValueError."""
    check_choice("decode", rule, RULES)
    if rule == "cost" and not has_cost:
        raise ValueError("decode is 'cost' without a cost matrix; give cost=, or decode by 'median' or 'mean'.")
    return rule


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`; True is no 1."""
    if np.ndim(value) or not any(_is_bool(value) == _is_bool(choice) and value == choice for choice in choices):
        raise ValueError(f"{name} is {value!r}, expected one of {choices}.")


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def check_real(name: str, value: Any, *, least: float, above: bool = False, most: float = np.inf) -> None:
    """Raise unless `value` is a finite number from `least` (or above it) up to `most`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}, expected a number.")
    number = float(value)
    if not (least < number if above else least <= number) or not number <= most or not np.isfinite(number):
        top = "" if most == np.inf else f" and at most {most:g}"
        raise ValueError(f"{name} is {value}, expected a finite number {'above' if above else '>='} {least:g}{top}.")


def check_count(name: str, value: Any, *, least: int = 1) -> None:
    """Raise unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}, expected an integer.")
    if value < least:
        raise ValueError(f"{name} is {value}, expected an integer >= {least}.")


def _checked_values(values: Any, number: int) -> np.ndarray:
    array = _as_numbers("values", values)
    if array.shape != (number,):
        raise ValueError(
            f"values has shape {array.shape}, expected ({number},): one number for each category in rank order. "
            "Name all classes with categories=; without it, every integer between whole labels is one."
        )
    rises = array[1:] > array[:-1]
    if not rises.all():
        where = int(np.flatnonzero(~rises)[0])
        raise ValueError(
            f"values[{where}] is {array[where]:g} and values[{where + 1}] is {array[where + 1]:g}, expected strictly "
            "increasing numbers; order categories and values by rank, and merge classes with one value."
        )
    _check_span("values", float(array.max() / 2 - array.min() / 2))
    return array


def _checked_cost(cost: Any, number: int) -> np.ndarray:
    array = _as_numbers("cost", cost)
    if array.shape != (number, number):
        raise ValueError(
            f"cost has shape {array.shape}, expected ({number}, {number}): cost[true, predicted] over the categories "
            "in rank order. Name all classes with categories=; without it, every integer between whole labels is one."
        )
    if (array < 0).any():
        row, column = (int(i) for i in np.argwhere(array < 0)[0])
        raise ValueError(f"cost[{row}, {column}] is {array[row, column]:g}, expected costs >= 0.")
    _check_span("cost", float(array.max() / 2))
    return array


def _check_span(name: str, half: float) -> None:
    if half > 0 and not SMALLEST_SPAN <= half <= 1 / SMALLEST_SPAN:
        raise ValueError(
            f"{name} spans {2 * half:.3g}, expected between {SMALLEST_SPAN:g} and {1 / SMALLEST_SPAN:g}; multiply all "
            "of it by one number: only ratios matter in training."
        )


def _as_numbers(name: str, numbers: Any) -> np.ndarray:
    try:
        array = np.asarray(numbers, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {numbers!r}, expected numbers.") from None
    if not np.isfinite(array).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        raise ValueError(f"{name} holds {array[where]} at {where}, expected finite numbers.")
    return array
