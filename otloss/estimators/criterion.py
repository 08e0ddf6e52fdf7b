"""The loss over the classes that a training set holds, and checks of the settings of an estimator.

Classes without a training row are left out, which is exact: they have no mass, so the CDF distance over all K classes
equals that over the m classes seen.

Training divides distances by a unit, so that penalties, tolerances and bounds on curvatures mean the same whether
values are euros or cents. The unit is the mean gap of all K values, or the largest cost divided by K - 1; it is 1 for
the values 0..K-1 and for their distances. If the labels imply the categories, K is replaced by m: labels 10, 20, 30
train as 0, 1, 2 do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from otloss._checks import check_number
from otloss._ordered_classes import check_terms, class_costs, class_values
from otloss.estimators.label_order import LabelOrder
from otloss.metrics.rank_labels import in_rank_order

_FIX = "Name all classes with categories=; without it, every integer between whole labels is one."


@dataclass(frozen=True)
class Criterion:
    """transport * L + cross_entropy * (-log P_y), the loss of one row over m positions.

    Attributes:
        values: (m,) class values, increasing; 0..K-1 cut to the positions where none are given.
        power: of the CDF differences; unused with a cost.
        cost: (m, m) cost[true, predicted] or None.
        transport: weight of the transport loss L.
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
        """Arguments of the loss that say how far classes are apart, in units of `unit`."""
        if self.cost is not None:
            return {"cost": self.cost / self.unit}
        x = (self.values - self.values[0]) / self.unit
        return {"power": self.power} if np.array_equal(x, np.arange(len(x))) else {"x": x, "power": self.power}


def make_criterion(order: LabelOrder, settings: Any) -> Criterion:
    """Return the loss over the positions of `order`, by the `settings` of an estimator.

    Raises:
        ValueError: if values are not K increasing finite numbers, power is not 1 or 2, a cost is not K x K,
            finite and non-negative, values and cost are both given, or transport or cross_entropy is negative, or
            both are 0.
    """
    if settings.values is not None and settings.cost is not None:
        raise ValueError("values and cost are both given, expected one: a cost matrix holds all distances already.")
    check_terms(settings.power, settings.transport, settings.cross_entropy)
    number = len(order.categories)
    values = class_values("values", in_rank_order("values", settings.values, order.names, fix=_FIX), number, fix=_FIX)
    cost, span = None, values[-1] - values[0]
    if settings.cost is not None:
        every_cost = class_costs("cost", in_rank_order("cost", settings.cost, order.names, fix=_FIX), number, fix=_FIX)
        cost, span = np.ascontiguousarray(every_cost[np.ix_(order.ranks, order.ranks)]), every_cost.max()
    unit = float(span) / max((number if order.is_explicit else len(order.classes)) - 1, 1)
    return Criterion(
        values[order.ranks],
        int(settings.power),
        cost,
        float(settings.transport),
        float(settings.cross_entropy),
        unit=unit or 1.0,
    )


def check_real(name: str, value: Any, *, minimum: float, above: bool = False, maximum: float = np.inf) -> float:
    """Return `value` if it is a finite number from `minimum` (or above it) up to `maximum`, else raise."""
    number = check_number(name, value)
    if not (minimum < number if above else minimum <= number) or not number <= maximum or number == np.inf:
        top = "" if maximum == np.inf else f" and at most {maximum:g}"
        raise ValueError(f"{name} is {value}, expected a finite number {'above' if above else '>='} {minimum:g}{top}.")
    return number
