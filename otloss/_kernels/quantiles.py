"""Transport on the line by matching quantiles, row by row: the values, and their gradients.

The levels F_i and G_j of both sides are walked through in order; the mass between two neighbouring ones moves from the
bin of p to the bin of q that are next. Rows, scales, settings and gradients are those of `line`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from otloss._kernels._compile import compiled, inner
from otloss._kernels._threads import next_task
from otloss._kernels.histograms import balance
from otloss._kernels.line import derivative, price, put, row_of, share_of

# One side of a problem: its bins with mass, sorted, as rows of a float64 and an int64 array. Levels come behind a 0.
_LEVEL, _PLACE, _PRICE, _FORCE, _BY_WEIGHT, _BY_PLACE = range(6)
_OCCUPIED, _PARTNER = range(2)
_ONE = np.uint64(1)  # an index of this type needs no test whether it is negative


@inner()
def _levels(p: Any, q: Any, scales: Any, x: Any, y: Any, orders: Any, sides: Any, bins: Any) -> Any:
    """Write index, cumulative mass and position of the bins that hold mass; return how many they are."""
    (scale_p, scale_q), (order_x, order_y), (side_p, side_q) = scales, orders, sides
    levels_p, levels_q, places_p, places_q = side_p[_LEVEL], side_q[_LEVEL], side_p[_PLACE], side_q[_PLACE]
    occupied_p, occupied_q = bins[0][_OCCUPIED], bins[1][_OCCUPIED]
    n, m, level_p, level_q = order_x.shape[0], order_y.shape[0], 0.0, 0.0
    count_p, count_q = np.uint64(0), np.uint64(0)
    for k in range(max(n, m)):  # both sums at once, as each has to wait for itself
        if k < n:
            at = np.uint32(order_x[k])
            level_p += p[at] * scale_p
            occupied_p[count_p], levels_p[count_p + _ONE], places_p[count_p] = k, level_p, x[at]
            count_p += np.uint64(p[at] > 0)
        if k < m:
            at = np.uint32(order_y[k])
            level_q += q[at] * scale_q
            occupied_q[count_q], levels_q[count_q + _ONE], places_q[count_q] = k, level_q, y[at]
            count_q += np.uint64(q[at] > 0)
    return np.int64(count_p), np.int64(count_q)


@inner()
def _merged_value(levels_p: Any, levels_q: Any, x: Any, y: Any, sizes: Any, order: float) -> float:
    """Walk over the merged levels from both ends at once, as every step has to wait for the one before it."""
    n, m = sizes
    if n == 0 or m == 0:
        return 0.0
    low, high, total, rest = 0.0, levels_p[n], 0.0, 0.0
    # The last levels agree up to rounding: neither may be passed before the other one is reached.
    levels_p[0] = levels_q[0] = -np.inf
    levels_p[n] = levels_q[m] = np.inf
    i, j, k, o = np.uint64(0), np.uint64(0), np.uint64(n - 1), np.uint64(m - 1)
    for _ in range((n + m - 1) // 2):
        next_p, next_q = levels_p[i + _ONE], levels_q[j + _ONE]
        following = next_p if next_p <= next_q else next_q
        total += (following - low) * price(x[i] - y[j], order)
        low = following
        from_p = np.uint64(next_p <= next_q)
        i += from_p
        j += _ONE - from_p
        last_p, last_q = levels_p[k], levels_q[o]
        previous = last_q if last_q >= last_p else last_p
        rest += (high - previous) * price(x[k] - y[o], order)
        high = previous
        from_q = np.uint64(last_q >= last_p)
        o -= from_q
        k -= _ONE - from_q
    if (n + m) % 2 == 0:  # an odd number of cells: the one in the middle is left
        total += (high - low) * price(x[i] - y[j], order)
    return total + rest


@inner()
def _merged_values(problem: Any, settings: Any, values: Any, scales: Any, share: Any) -> None:
    p, q, x, y, order_x, order_y = problem
    order, tolerance = settings
    n, m = x.shape[1], y.shape[1]
    sides = (np.empty((2, n + 1)), np.empty((2, m + 1)))
    bins = (np.empty((1, n), np.int64), np.empty((1, m), np.int64))
    for r in range(share[0], share[1]):
        p_row, q_row, x_row, y_row, orders = (
            row_of(p, r),
            row_of(q, r),
            row_of(x, r),
            row_of(y, r),
            (row_of(order_x, r), row_of(order_y, r)),
        )
        scale = balance(p_row, q_row, tolerance)[:2]
        scales[0, r], scales[1, r] = scale
        values[r] = 0.0
        if scale[0] > 0:
            sizes = _levels(p_row, q_row, scale, x_row, y_row, orders, sides, bins)
            values[r] = _merged_value(
                sides[0][_LEVEL], sides[1][_LEVEL], sides[0][_PLACE], sides[1][_PLACE], sizes, order
            )


@compiled()
def merged_values(counter: Any, problem: Any, settings: Any, values: Any, scales: Any, threads: int) -> None:
    """Write the cost of matching quantiles of (p, q, x, y, order_x, order_y); settings are (order, tolerance)."""
    while True:
        thread = next_task(counter)
        if thread >= threads:
            return
        _merged_values(problem, settings, values, scales, share_of(scales.shape[1], thread, threads))


@inner()
def _walk(side_p: Any, side_q: Any, partner_p: Any, partner_q: Any, sizes: Any, order: float) -> None:
    """Write the gradients in the positions, and for each bin the partner that it meets last."""
    n, m = sizes
    levels_p, levels_q, x, y = side_p[_LEVEL, 1:], side_q[_LEVEL, 1:], side_p[_PLACE], side_q[_PLACE]
    by_x, by_y = side_p[_FORCE], side_q[_FORCE]
    mass = levels_p[n - 1]
    levels_p[n - 1] = levels_q[m - 1] = np.inf
    for i in range(n):
        by_x[i] = 0.0
    for j in range(m):
        by_y[j] = 0.0
    i, j, level = 0, 0, 0.0
    for step in range(n + m - 1):
        following = min(min(levels_p[i], levels_q[j]), mass)
        force = (following - level) * derivative(x[i] - y[j], order)
        level = following
        by_x[i] += force
        by_y[j] -= force
        partner_p[i] = j
        partner_q[j] = i
        if step < n + m - 2:
            from_p = levels_p[i] <= levels_q[j]
            i += from_p
            j += 1 - from_p


@inner()
def _prices(x: Any, y: Any, partner: Any, n: int, order: float, prices: Any) -> None:
    """Write potentials: neighbours differ by what they cost with the partner that the first of them meets last."""
    prices[n - 1] = 0.0
    for i in range(n - 2, -1, -1):
        there = y[partner[i]]
        prices[i] = prices[i + 1] + (price(x[i] - there, order) - price(x[i + 1] - there, order))


@inner()
def _spread(x: Any, order_x: Any, side: Any, bins: Any, n: int, y: Any, scale: float, order: float) -> None:
    """Write the gradients of all bins; an empty one pays the partner that the bin before it meets last."""
    prices, places, forces = side[_PRICE], side[_PLACE], side[_FORCE]
    occupied, partner = bins[_OCCUPIED], bins[_PARTNER]
    by_weight, by_place = side[_BY_WEIGHT], side[_BY_PLACE]
    size, total, count = order_x.shape[0], 0.0, 0
    for k in range(size):
        at = order_x[k]
        if count < n and occupied[count] == k:
            due, by_place[at] = prices[count], forces[count]
            count += 1
        else:
            near = max(count - 1, 0)
            there = y[partner[near] if count > 0 else 0]
            due = prices[near] + price(x[at] - there, order) - price(places[near] - there, order)
            by_place[at] = 0.0
        by_weight[at] = due
        total += due
    for k in range(size):
        by_weight[k] = (by_weight[k] - total / size) * scale


@inner()
def _merged_gradients(problem: Any, order: float, upstream: Any, scales: Any, gradients: Any, share: Any) -> None:
    p, q, x, y, order_x, order_y = problem
    by_p, by_q, by_x, by_y = gradients
    n, m = x.shape[1], y.shape[1]
    sides = (np.empty((6, n + 1)), np.empty((6, m + 1)))
    bins = (np.empty((2, n), np.int64), np.empty((2, m), np.int64))
    side_p, side_q, bins_p, bins_q = sides[0], sides[1], bins[0], bins[1]
    for r in range(share[0], share[1]):
        scale = (scales[0, r], scales[1, r])
        x_row, y_row, orders = row_of(x, r), row_of(y, r), (row_of(order_x, r), row_of(order_y, r))
        some, others = _levels(row_of(p, r), row_of(q, r), scale, x_row, y_row, orders, sides, bins)
        if some == 0 or others == 0:
            side_p[_BY_WEIGHT:] = 0.0
            side_q[_BY_WEIGHT:] = 0.0
        else:
            _walk(side_p, side_q, bins_p[_PARTNER], bins_q[_PARTNER], (some, others), order)
            places_p, places_q = side_p[_PLACE], side_q[_PLACE]
            _prices(places_p, places_q, bins_p[_PARTNER], some, order, side_p[_PRICE])
            _prices(places_q, places_p, bins_q[_PARTNER], others, order, side_q[_PRICE])
            _spread(x_row, orders[0], side_p, bins_p, some, places_q, scale[0], order)
            _spread(y_row, orders[1], side_q, bins_q, others, places_p, scale[1], order)
        put(side_p[_BY_WEIGHT], upstream[r], by_p, r)
        put(side_q[_BY_WEIGHT], upstream[r], by_q, r)
        put(side_p[_BY_PLACE], upstream[r], by_x, r)
        put(side_q[_BY_PLACE], upstream[r], by_y, r)


@compiled()
def merged_gradients(
    counter: Any, problem: Any, order: float, upstream: Any, scales: Any, gradients: Any, threads: int
) -> None:
    """Write the gradients of `merged_values` into `gradients`, (by_p, by_q, by_x, by_y), those without rows left out."""
    while True:
        thread = next_task(counter)
        if thread >= threads:
            return
        _merged_gradients(problem, order, upstream, scales, gradients, share_of(scales.shape[1], thread, threads))
