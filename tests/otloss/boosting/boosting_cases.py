"""Losses of rows for the tests of boosting, and the loss of one row in torch, straight from the definition."""

from typing import Any

import numpy as np
import torch

from otloss.boosting.derivatives import Curvature, curvature
from otloss.boosting.settings import RowLoss, row_loss

NONE = np.zeros(0)
K = 5
VALUES = np.array([-1.0, 0.0, 0.5, 3.0, 4.5])
COST = np.random.default_rng(5).uniform(0, 3, size=(K, K))

LOSSES: dict[str, dict[str, Any]] = {
    "power 2": {},
    "power 1": {"power": 1},
    "power 2, uneven": {"x": VALUES},
    "power 1, uneven": {"power": 1, "x": VALUES},
    "a cost": {"cost": COST},
    "power 2 and cross-entropy": {"x": VALUES, "cross_entropy": 0.3},
    "a cost and cross-entropy": {"cost": COST, "cross_entropy": 0.7, "transport": 2.0},
    "cross-entropy": {"transport": 0.0, "cross_entropy": 1.5},
    "classes that weigh": {"class_weight": [1.0, 0.0, 2.0, 0.5, 3.0], "cross_entropy": 0.1},
}  # fmt: skip


def make(classes: int = K, **settings: Any) -> RowLoss:
    return row_loss(classes, **settings)


def scores_and_labels(rows: int = 60, classes: int = K, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """From undecided rows to certain ones, right and wrong."""
    rng = np.random.default_rng(seed)
    spread = np.repeat([0.1, 1.0, 6.0], -(-rows // 3))[:rows, None]
    return rng.normal(size=(rows, classes)) * spread, rng.integers(0, classes, size=rows).astype(float)


def torch_loss(z: torch.Tensor, y: int, settings: dict[str, Any]) -> torch.Tensor:
    """One row, straight from the definition."""
    log_p = torch.log_softmax(z, -1)
    p, classes = log_p.exp(), len(z)
    x = torch.as_tensor(settings.get("x", np.arange(classes)), dtype=z.dtype)
    if "cost" in settings:
        moved = (p * torch.tensor(settings["cost"][y], dtype=z.dtype)).sum()
    else:
        apart = p.cumsum(0)[:-1] - (torch.arange(classes - 1) >= y).to(z.dtype)
        moved = ((x[1:] - x[:-1]) * apart.abs() ** settings.get("power", 2)).sum()
    weight = settings["class_weight"][y] if "class_weight" in settings else 1.0
    return weight * (settings.get("transport", 1.0) * moved - settings.get("cross_entropy", 0.0) * log_p[y])


def spec(loss: RowLoss) -> Curvature:
    return curvature(loss, library="xgboost", single=False)
