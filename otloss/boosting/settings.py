"""The settings of a loss of rows, checked once for objectives and metrics."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from otloss._checks import check_number
from otloss._ordered_classes import Floats, check_terms, class_costs, class_table, class_values


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
    def largest_transport(self) -> float:
        """Upper bound of the transport term, before its factor."""
        return float(self.gaps.sum() if self.is_square else self.costs.max())

    @property
    def largest_gradient(self) -> float:
        """Upper bound of the gradient of a row of weight 1."""
        return float(self.class_weights.max()) * (self.transport * self.largest_transport + self.cross_entropy)


class LossSettings(TypedDict, total=False):
    """The settings of the loss of a row, as `xgboost_objective` describes them."""

    power: int
    x: ArrayLike | None
    cost: ArrayLike | None
    transport: float
    cross_entropy: float
    class_weight: ArrayLike | None


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
    check_terms(power, transport, cross_entropy)
    if cost is not None and x is not None:
        raise ValueError("both cost and x are given, expected one of them: a cost matrix replaces x.")
    for name, table in (("x", x), ("cost", cost), ("class_weight", class_weight)):
        _check_not_pandas(name, table)
    values = class_values("x", x, classes)
    name = "cost" if cost is not None else "rps" if power == 2 else "emd"
    costs = np.zeros((0, 0)) if name == "rps" else np.abs(np.subtract.outer(values, values))
    weights = np.ones(classes)
    if class_weight is not None:
        weights = class_table("class_weight", class_weight, (classes,), minimum=0.0)
    return RowLoss(
        name=name,
        gaps=np.diff(values) if name == "rps" else np.zeros(0),
        costs=costs if cost is None else class_costs("cost", cost, classes),
        transport=float(transport),
        cross_entropy=float(cross_entropy),
        class_weights=weights,
    )


_Factory = TypeVar("_Factory", bound=Callable[..., Any])


def shows_settings(factory: _Factory) -> _Factory:
    """Decorate a function of (num_classes, **settings): `help` and completion show the settings and their defaults."""
    own = inspect.signature(factory, eval_str=False)
    parameters = dict(own.parameters)
    parameters.pop("settings")
    declared = inspect.signature(row_loss).parameters
    types = LossSettings.__annotations__
    settings = [declared[name].replace(annotation=types[name].__forward_arg__) for name in types]
    first, *others = parameters.values()
    factory.__signature__ = own.replace(parameters=[first, *settings, *others])  # type: ignore[attr-defined]
    return factory


def check_classes(num_classes: Any) -> int:
    """Return the number of classes if it is a whole number of at least 2."""
    if not 2 <= check_number("num_classes", num_classes) < np.inf or num_classes != int(num_classes):
        raise ValueError(f"num_classes is {num_classes}, expected a whole number, at least 2.")
    return int(num_classes)


def _check_not_pandas(name: str, table: Any) -> None:
    if hasattr(table, "iloc"):
        ordered = f"{name}.loc[order{', order' * (table.ndim > 1)}]"
        raise TypeError(
            f"{name} is a pandas {type(table).__name__}, whose order may not be the order of the classes; expected an "
            f"array: pass {ordered}.to_numpy(), where order lists its names of the classes, lowest first."
        )
