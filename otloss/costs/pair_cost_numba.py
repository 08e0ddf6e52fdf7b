"""The cost of one pair of points, for kernels."""

from __future__ import annotations

import math
from typing import Any

from otloss._numba.compile import inner
from otloss.costs.order import METRIC_NUMBERS

EUCLIDEAN, L1 = METRIC_NUMBERS["euclidean"], METRIC_NUMBERS["l1"]


@inner()
def pair_cost(x: Any, y: Any, metric: int) -> float:
    """Return the cost of the points x (d,) and y, which may have more entries than d; `metric` is its number."""
    total = 0.0
    for k in range(x.shape[0]):
        difference = x[k] - y[k]
        total += abs(difference) if metric == L1 else difference * difference
    return math.sqrt(total) if metric == EUCLIDEAN else total
