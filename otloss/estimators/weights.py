"""Row weights out of `sample_weight` and `class_weight`, and parts of the rows held out of training."""

from __future__ import annotations

from typing import Any

import numpy as np

from otloss.estimators.labels import LabelOrder

LARGEST_WEIGHT = 1e12  # of a row; gradients of boosting are float32


def row_weights(sample_weight: Any, class_weight: Any, *, order: LabelOrder, positions: np.ndarray) -> np.ndarray:
    """Weights (n,): the sample weights times those of the rows' classes.

    `"balanced"` gives every class that has weight the same total, without changing the sum of all.

    Raises:
        ValueError: if weights are negative, not finite, all zero, or not one per row, or if a class weight
            names an unknown label.
    """
    weights = checked_sample_weight(sample_weight, len(positions))
    if class_weight is None:
        return weights
    weights = weights * _class_weights(class_weight, order, positions, weights)[positions]
    if not weights.any():
        raise ValueError(f"class_weight {class_weight!r} leaves no row a weight above zero; expected one at least.")
    _check_size(weights)
    return weights


def checked_sample_weight(sample_weight: Any, rows: int) -> np.ndarray:
    """`sample_weight` as (rows,) float64, ones where it is None, else ValueError."""
    if sample_weight is None:
        return np.ones(rows)
    try:
        weights = np.array(sample_weight, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"sample_weight is {sample_weight!r}, expected one number per row.") from None
    if weights.ndim == 0:
        weights = np.full(rows, float(weights))
    if weights.ndim != 1:
        raise ValueError(f"Sample weights must be 1D array or scalar, got {weights.ndim}D array of {weights.shape}.")
    if weights.shape != (rows,):
        raise ValueError(
            f"sample_weight has shape {weights.shape}, expected ({rows},): one weight per row of X. "
            "Cut it together with X and y."
        )
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        where = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"sample_weight[{where}] is {weights[where]}, expected finite weights >= 0. "
            "Negative values in data passed to sample_weight are no weights."
        )
    if not weights.any():
        raise ValueError("Sample weights must contain at least one non-zero number; all are zero.")
    _check_size(weights)
    return weights


def _check_size(weights: np.ndarray) -> None:
    # A weight of two is a row given twice, beside penalties that stay: a common factor cannot be taken out here.
    largest = float(weights.max())
    if not 1 / LARGEST_WEIGHT <= largest <= LARGEST_WEIGHT:
        raise ValueError(
            f"the largest weight of a row (sample weight times class weight) is {largest:g}, expected between "
            f"{1 / LARGEST_WEIGHT:g} and {LARGEST_WEIGHT:g}; multiply all weights by one number."
        )


def split_off(
    positions: np.ndarray, fraction: float, *, random: np.random.RandomState, purpose: str
) -> tuple[np.ndarray, np.ndarray]:
    """Indices (kept, held out): of each class about `fraction` of its rows are held out, and at least one is kept.

    One row at least is held out, of the largest class if need be.

    Raises:
        ValueError: if no class has two rows.
    """
    held: list[np.ndarray] = []
    largest = np.zeros(0, dtype=int)
    surplus = random.uniform()  # carried from class to class, so that small classes are held out in proportion
    for position in np.unique(positions):
        rows = random.permutation(np.flatnonzero(positions == position))
        wanted = fraction * len(rows) + surplus
        number = min(int(wanted), len(rows) - 1)
        surplus = min(wanted - number, 1.0)
        held.append(rows[:number])
        largest = rows if len(rows) > len(largest) else largest
    chosen = np.sort(np.concatenate(held))
    if len(chosen) == 0:
        chosen = largest[:1]
    if len(largest) < 2:
        raise ValueError(
            f"{len(positions)} rows leave none to hold out for {purpose}: each class keeps one; add rows, or turn it "
            "off."
        )
    kept = np.ones(len(positions), dtype=bool)
    kept[chosen] = False
    return np.flatnonzero(kept), chosen


def _class_weights(class_weight: Any, order: LabelOrder, positions: np.ndarray, weights: np.ndarray) -> np.ndarray:
    mass = np.bincount(positions, weights=weights, minlength=len(order.ranks))
    if isinstance(class_weight, str):
        if class_weight != "balanced":
            raise ValueError(f"class_weight is {class_weight!r}, expected None, 'balanced' or a dict of labels.")
        return np.divide(mass.sum() / np.count_nonzero(mass), mass, out=np.zeros_like(mass), where=mass > 0)
    if not isinstance(class_weight, dict):
        raise ValueError(f"class_weight is {class_weight!r}, expected None, 'balanced' or a dict of labels.")
    factors = np.ones(len(order.categories))
    # The user's own labels come first: of 1, 2, 3, which are passed on as 0, 1, 2, the 1 is the first.
    names = order.names.tolist()
    if not any(label in names for label in class_weight):
        names = order.categories.tolist()
    for label, factor in class_weight.items():
        if label not in names:
            raise ValueError(f"class_weight names the label {label!r}, which is none of {names}.")
        if not np.isfinite(factor) or factor < 0:
            raise ValueError(f"class_weight[{label!r}] is {factor}, expected a finite number >= 0.")
        factors[names.index(label)] = factor
    return factors[order.ranks]
