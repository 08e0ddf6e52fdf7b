"""Transport on the line by cumulative distributions, row by row: the values, and their gradients.

Rows are problems. An operand with one row serves them all. Weights and positions are float32 or float64, C-contiguous;
sums, levels and differences are float64. `order_x` (rows, n) sorts the positions of a row.
`scales` (2, problems) multiply the weights of p and q, so that both sides hold the same mass; the kernels of values
write them, and NaN where the masses differ by more than `tolerance` or a weight is no weight. An `upstream` derivative
(problems,) multiplies the gradients. Slopes in weights come centred, as mean zero over the bins of a row.

What `otloss.solvers.line` computes in torch operations is the specification, with the notation used here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from otloss._kernels._compile import compiled, inner
from otloss._kernels._threads import next_task
from otloss._kernels.histograms import balance


@inner()
def price(difference: float, order: float) -> float:
    if order == 1.0:
        return abs(difference)
    if order == 2.0:
        return difference * difference
    return abs(difference) ** order


@inner()
def derivative(difference: float, order: float) -> float:
    if order == 2.0:
        return 2.0 * difference
    sign = 1.0 if difference > 0 else (-1.0 if difference < 0 else 0.0)
    if order == 1.0:
        return sign
    return sign * order * abs(difference) ** (order - 1.0)


@inner()
def share_of(problems: int, thread: int, threads: int) -> tuple[int, int]:
    return problems * thread // threads, problems * (thread + 1) // threads


@inner()
def row_of(operand: Any, row: int) -> Any:
    return operand[row if operand.shape[0] > 1 else 0]


@inner()
def put(values: Any, factor: float, target: Any, row: int) -> None:
    if target.shape[0] > 0:
        for k in range(target.shape[1]):
            target[row, k] = values[k] * factor


@inner()
def _gaps(x: Any, order: Any, gaps: Any) -> None:
    for k in range(gaps.shape[0]):
        gaps[k] = np.float64(x[order[k + 1]]) - np.float64(x[order[k]])


@inner()
def _cdf_value(p: Any, q: Any, scales: Any, gaps: Any, order: Any, power: float) -> float:
    scale_p, scale_q = scales
    apart, total = 0.0, 0.0
    for k in range(gaps.shape[0]):
        at = order[k]
        apart += p[at] * scale_p - q[at] * scale_q
        total += gaps[k] * price(apart, power)
    return total


@inner()
def _cdf_values(problem: Any, settings: Any, values: Any, scales: Any, share: Any) -> None:
    p, q, x, order = problem
    power, tolerance = settings
    gaps = np.empty(x.shape[1] - 1)
    for r in range(share[0], share[1]):
        if r == share[0] or x.shape[0] > 1:
            _gaps(row_of(x, r), row_of(order, r), gaps)
        scale_p, scale_q, _ = balance(row_of(p, r), row_of(q, r), tolerance)
        scales[0, r], scales[1, r] = scale_p, scale_q
        values[r] = _cdf_value(row_of(p, r), row_of(q, r), (scale_p, scale_q), gaps, row_of(order, r), power)


@compiled()
def cdf_values(counter: Any, problem: Any, settings: Any, values: Any, scales: Any, threads: int) -> None:
    """Write sum_k gap_k |F_k - G_k|^power of each problem (p, q, x, order_x); settings are (power, tolerance)."""
    while True:
        thread = next_task(counter)
        if thread >= threads:
            return
        _cdf_values(problem, settings, values, scales, share_of(scales.shape[1], thread, threads))


@inner()
def _cdf_gradients_of_row(p: Any, q: Any, scales: Any, gaps: Any, order: Any, power: float, out: Any) -> None:
    """Write the gradients in p, q and x into the rows of `out`; its last row is for work."""
    scale_p, scale_q = scales
    by_p, by_q, by_x, gradients = out[0], out[1], out[2], out[3]
    n = order.shape[0]
    front, back = n, n - 1  # the first and the last bin with mass
    apart, before, here = 0.0, 0.0, 0.0
    for k in range(n):
        at = order[k]
        if p[at] > 0 or q[at] > 0:
            front = min(front, k)
            back = k
        apart += p[at] * scale_p - q[at] * scale_q
        gradients[k] = gaps[k] * derivative(apart, power) if k < n - 1 else 0.0
        here = price(apart, power) if k < n - 1 else 0.0
        by_x[at] = before - here
        before = here
    one_sided = power == 1.0 and front < n
    to_p, to_q, sum_p, sum_q = 0.0, 0.0, 0.0, 0.0
    for k in range(n - 1, -1, -1):
        # Where both are already, or still, empty, |F - G| rises on either side; rounding must not choose one.
        if back <= k < n - 1:
            end = gaps[k] if one_sided else 0.0
            to_p -= end
            to_q -= end
        elif one_sided and k < front:
            to_p += gaps[k]
            to_q += gaps[k]
        else:
            to_p += gradients[k]
            to_q -= gradients[k]
        by_p[order[k]] = to_p
        by_q[order[k]] = to_q
        sum_p += to_p
        sum_q += to_q
    for k in range(n):
        by_p[k] = (by_p[k] - sum_p / n) * scale_p
        by_q[k] = (by_q[k] - sum_q / n) * scale_q


@inner()
def _cdf_gradients(problem: Any, power: float, upstream: Any, scales: Any, gradients: Any, share: Any) -> None:
    p, q, x, order = problem
    by_p, by_q, by_x = gradients
    n = x.shape[1]
    gaps, out = np.empty(n - 1), np.empty((4, n))
    for r in range(share[0], share[1]):
        if r == share[0] or x.shape[0] > 1:
            _gaps(row_of(x, r), row_of(order, r), gaps)
        scale = (scales[0, r], scales[1, r])
        _cdf_gradients_of_row(row_of(p, r), row_of(q, r), scale, gaps, row_of(order, r), power, out)
        put(out[0], upstream[r], by_p, r)
        put(out[1], upstream[r], by_q, r)
        put(out[2], upstream[r], by_x, r)


@compiled()
def cdf_gradients(
    counter: Any, problem: Any, power: float, upstream: Any, scales: Any, gradients: Any, threads: int
) -> None:
    """Write the gradients of `cdf_values` into `gradients`, (by_p, by_q, by_x), those without rows left out."""
    while True:
        thread = next_task(counter)
        if thread >= threads:
            return
        _cdf_gradients(problem, power, upstream, scales, gradients, share_of(scales.shape[1], thread, threads))
