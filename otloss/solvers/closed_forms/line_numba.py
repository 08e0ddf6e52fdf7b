"""Closed forms of transport on the line, row by row: values and gradients of CDF differences and of quantile matching.

Each row is a problem, and an operand with one row serves all problems. Weights and positions are float32 or float64,
C-contiguous; sums, levels and differences are float64. `order_x` (rows, n) sorts the positions of a row.

`scales` (2, problems) multiply the weights of p and q, so that both sides hold the same mass. The kernels of values
write them; they are NaN where the masses differ by more than `tolerance` or a weight is invalid. `upstream` (problems,)
multiplies the gradients. The gradients in weights have mean zero over the bins of a row.

The reference implementation is `otloss.solvers.closed_forms.line`, with the notation used here. The kernels of
quantiles visit the levels F_i and G_j, the cumulative masses of both sides, in increasing order. The mass between two
neighbouring levels moves from the current bin of p to the current bin of q.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from otloss._numba.compile import compiled, inner
from otloss._numba.sums import balance
from otloss._numba.tasks import next_task


class Side(NamedTuple):
    """The rows of the floats of one side of a problem: an entry for each bin with mass, sorted, or for each bin.

    Attributes:
        level: the cumulative masses, after a 0.
        place: the positions.
        price: the potentials.
        force: the gradients in the positions of bins with mass.
        by_weight, by_place: the gradients in the weights and positions of all bins.
    """

    level: int = 0
    place: int = 1
    price: int = 2
    force: int = 3
    by_weight: int = 4
    by_place: int = 5


class Bins(NamedTuple):
    """The rows of the whole numbers of one side: the indices of bins with mass, and the last partner of each."""

    occupied: int = 0
    partner: int = 1


SIDE, BINS = Side(), Bins()


def allocate_values(problems: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return `values` and `scales` for the kernels of values."""
    return np.empty(problems, dtype), np.empty((2, problems))


def allocate_gradients(problems: int, inputs: Any, wanted: Any) -> tuple[np.ndarray, ...]:
    """Return the arrays for the gradients in the inputs (weights and positions, a row per problem or one row)."""
    return tuple(
        np.empty((problems if want else 0, rows.shape[1]), rows.dtype)
        for want, rows in zip(wanted, inputs, strict=True)
    )  # fmt: skip


@inner()
def _price(difference: float, order: float) -> float:
    if order == 1.0:
        return abs(difference)
    if order == 2.0:
        return difference * difference
    return abs(difference) ** order


@inner()
def _derivative(difference: float, order: float) -> float:
    if order == 2.0:
        return 2.0 * difference
    sign = 1.0 if difference > 0 else (-1.0 if difference < 0 else 0.0)
    if order == 1.0:
        return sign
    return sign * order * abs(difference) ** (order - 1.0)


@inner()
def _share_of(problems: int, thread: int, threads: int) -> tuple[int, int]:
    return problems * thread // threads, problems * (thread + 1) // threads


@inner(allocates=True)
def _row_of(operand: Any, row: int) -> Any:
    return operand[row if operand.shape[0] > 1 else 0]


@inner()
def _write_gradient(values: Any, factor: float, target: Any, row: int) -> None:
    if target.shape[0] > 0:
        for k in range(target.shape[1]):
            target[row, k] = values[k] * factor


@inner()
def _write_gaps(x: Any, order: Any, gaps: Any) -> None:
    for k in range(gaps.shape[0]):
        gaps[k] = np.float64(x[order[k + 1]]) - np.float64(x[order[k]])


@inner()
def _cdf_value(p: Any, q: Any, scales: Any, gaps: Any, order: Any, power: float) -> float:
    scale_p, scale_q = scales
    apart, total = 0.0, 0.0
    for k in range(gaps.shape[0]):
        at = order[k]
        apart += p[at] * scale_p - q[at] * scale_q
        total += gaps[k] * _price(apart, power)
    return total


@compiled(allocates=True)
def cdf_values(counter: Any, problem: Any, settings: Any, values: Any, scales: Any, threads: int) -> None:
    """Write sum_k gap_k |F_k - G_k|^power of each problem (p, q, x, order_x); settings are (power, tolerance)."""
    p, q, x, order = problem
    power, tolerance = settings
    gaps = np.empty(x.shape[1] - 1)
    while True:
        thread = next_task(counter)
        if thread >= threads:
            return
        first, last = _share_of(values.shape[0], thread, threads)
        for r in range(first, last):
            if r == first or x.shape[0] > 1:
                _write_gaps(_row_of(x, r), _row_of(order, r), gaps)
            scale_p, scale_q, _ = balance(_row_of(p, r), _row_of(q, r), tolerance)
            scales[0, r], scales[1, r] = scale_p, scale_q
            values[r] = _cdf_value(_row_of(p, r), _row_of(q, r), (scale_p, scale_q), gaps, _row_of(order, r), power)


@inner()
def _cdf_gradients_of_row(p: Any, q: Any, scales: Any, gaps: Any, order: Any, power: float, out: Any) -> None:
    """Write the gradients in p, q and x into the rows of `out`; its last row is scratch."""
    scale_p, scale_q = scales
    by_p, by_q, by_x, gradients = out[0], out[1], out[2], out[3]
    n = order.shape[0]
    front, back = n, n - 1  # the first and the last bin with mass
    apart, previous_price, price = 0.0, 0.0, 0.0
    for k in range(n):
        at = order[k]
        if p[at] > 0 or q[at] > 0:
            front = min(front, k)
            back = k
        apart += p[at] * scale_p - q[at] * scale_q
        gradients[k] = gaps[k] * _derivative(apart, power) if k < n - 1 else 0.0
        price = _price(apart, power) if k < n - 1 else 0.0
        by_x[at] = previous_price - price
        previous_price = price
    one_sided = power == 1.0 and front < n
    to_p, to_q, sum_p, sum_q = 0.0, 0.0, 0.0, 0.0
    for k in range(n - 1, -1, -1):
        # Before the first mass and behind the last, |F - G| rises in both directions. Rounding must not choose one of
        # them.
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


@compiled(allocates=True)
def cdf_gradients(
    counter: Any, problem: Any, power: float, upstream: Any, scales: Any, gradients: Any, threads: int
) -> None:
    """Write the gradients (by_p, by_q, by_x) of `cdf_values`. An array without rows is skipped."""
    p, q, x, order = problem
    by_p, by_q, by_x = gradients
    n = x.shape[1]
    gaps, out = np.empty(n - 1), np.empty((4, n))
    while True:
        thread = next_task(counter)
        if thread >= threads:
            return
        first, last = _share_of(upstream.shape[0], thread, threads)
        for r in range(first, last):
            if r == first or x.shape[0] > 1:
                _write_gaps(_row_of(x, r), _row_of(order, r), gaps)
            scale = (scales[0, r], scales[1, r])
            _cdf_gradients_of_row(_row_of(p, r), _row_of(q, r), scale, gaps, _row_of(order, r), power, out)
            _write_gradient(out[0], upstream[r], by_p, r)
            _write_gradient(out[1], upstream[r], by_q, r)
            _write_gradient(out[2], upstream[r], by_x, r)


@inner(allocates=True)
def _write_levels(p: Any, q: Any, scales: Any, x: Any, y: Any, orders: Any, sides: Any, bins: Any) -> Any:
    """Write index, cumulative mass and position of the bins that hold mass; return the two numbers of these bins."""
    (scale_p, scale_q), (order_x, order_y), (side_p, side_q) = scales, orders, sides
    levels_p, levels_q = side_p[SIDE.level], side_q[SIDE.level]
    places_p, places_q = side_p[SIDE.place], side_q[SIDE.place]
    occupied_p, occupied_q = bins[0][BINS.occupied], bins[1][BINS.occupied]
    n, m, level_p, level_q = order_x.shape[0], order_y.shape[0], 0.0, 0.0
    count_p, count_q, one = np.uint64(0), np.uint64(0), np.uint64(1)  # such an index needs no test of its sign
    for k in range(max(n, m)):  # both sums in one loop: each step of a sum has to wait for the step before
        if k < n:
            at = np.uint32(order_x[k])
            level_p += p[at] * scale_p
            occupied_p[count_p], levels_p[count_p + one], places_p[count_p] = k, level_p, x[at]
            count_p += np.uint64(p[at] > 0)
        if k < m:
            at = np.uint32(order_y[k])
            level_q += q[at] * scale_q
            occupied_q[count_q], levels_q[count_q + one], places_q[count_q] = k, level_q, y[at]
            count_q += np.uint64(q[at] > 0)
    return np.int64(count_p), np.int64(count_q)


@inner()
def _merged_value(levels_p: Any, levels_q: Any, x: Any, y: Any, sizes: Any, order: float) -> float:
    """Return the sum over the merged levels, from both ends at once: each step has to wait for the one before it."""
    n, m = sizes
    if n == 0 or m == 0:
        return 0.0
    low, high, from_below, from_above = 0.0, levels_p[n], 0.0, 0.0
    # The last levels are equal up to rounding. With infinity in their place neither is passed before the other.
    levels_p[0] = levels_q[0] = -np.inf
    levels_p[n] = levels_q[m] = np.inf
    i, j, k, o, one = np.uint64(0), np.uint64(0), np.uint64(n - 1), np.uint64(m - 1), np.uint64(1)
    for _ in range((n + m - 1) // 2):
        next_p, next_q = levels_p[i + one], levels_q[j + one]
        following = next_p if next_p <= next_q else next_q
        from_below += (following - low) * _price(x[i] - y[j], order)
        low = following
        from_p = np.uint64(next_p <= next_q)
        i += from_p
        j += one - from_p
        last_p, last_q = levels_p[k], levels_q[o]
        previous = last_q if last_q >= last_p else last_p
        from_above += (high - previous) * _price(x[k] - y[o], order)
        high = previous
        from_q = np.uint64(last_q >= last_p)
        o -= from_q
        k -= one - from_q
    if (n + m) % 2 == 0:  # an odd number of cells: the one in the middle is left
        from_below += (high - low) * _price(x[i] - y[j], order)
    return from_below + from_above


@compiled(allocates=True)
def quantile_values(counter: Any, problem: Any, settings: Any, values: Any, scales: Any, threads: int) -> None:
    """Write the cost of matching quantiles of (p, q, x, y, order_x, order_y); settings are (order, tolerance)."""
    p, q, x, y, order_x, order_y = problem
    order, tolerance = settings
    n, m = x.shape[1], y.shape[1]
    sides = (np.empty((2, n + 1)), np.empty((2, m + 1)))
    bins = (np.empty((1, n), np.int64), np.empty((1, m), np.int64))
    side_p, side_q = sides
    while True:
        thread = next_task(counter)
        if thread >= threads:
            return
        first, last = _share_of(values.shape[0], thread, threads)
        for r in range(first, last):
            p_row, q_row, x_row, y_row = _row_of(p, r), _row_of(q, r), _row_of(x, r), _row_of(y, r)
            scale = balance(p_row, q_row, tolerance)[:2]
            scales[0, r], scales[1, r] = scale
            values[r] = 0.0
            if scale[0] > 0:
                orders = (_row_of(order_x, r), _row_of(order_y, r))
                sizes = _write_levels(p_row, q_row, scale, x_row, y_row, orders, sides, bins)
                values[r] = _merged_value(
                    side_p[SIDE.level], side_q[SIDE.level], side_p[SIDE.place], side_q[SIDE.place], sizes, order
                )


@inner()
def _walk(side_p: Any, side_q: Any, partner_p: Any, partner_q: Any, sizes: Any, order: float) -> None:
    """Write the gradients in the positions, and for each bin the last partner that it exchanges mass with."""
    n, m = sizes
    levels_p, levels_q, x, y = side_p[SIDE.level, 1:], side_q[SIDE.level, 1:], side_p[SIDE.place], side_q[SIDE.place]
    by_x, by_y = side_p[SIDE.force], side_q[SIDE.force]
    mass = levels_p[n - 1]
    levels_p[n - 1] = levels_q[m - 1] = np.inf
    for i in range(n):
        by_x[i] = 0.0
    for j in range(m):
        by_y[j] = 0.0
    i, j, level = 0, 0, 0.0
    for step in range(n + m - 1):
        following = min(min(levels_p[i], levels_q[j]), mass)
        force = (following - level) * _derivative(x[i] - y[j], order)
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
    """Write potentials. Two neighbours differ by their costs to the last partner of the first of them."""
    prices[n - 1] = 0.0
    for i in range(n - 2, -1, -1):
        there = y[partner[i]]
        prices[i] = prices[i + 1] + (_price(x[i] - there, order) - _price(x[i + 1] - there, order))


@inner()
def _extend_to_all_bins(x: Any, order_x: Any, side: Any, bins: Any, n: int, y: Any, scale: float, order: float) -> None:
    """Write the gradients of all bins. An empty bin pays its cost to the last partner of the bin before it."""
    prices, places, forces = side[SIDE.price], side[SIDE.place], side[SIDE.force]
    occupied, partner = bins[BINS.occupied], bins[BINS.partner]
    by_weight, by_place = side[SIDE.by_weight], side[SIDE.by_place]
    size, total, count = order_x.shape[0], 0.0, 0
    for k in range(size):
        at = order_x[k]
        if count < n and occupied[count] == k:
            due, by_place[at] = prices[count], forces[count]
            count += 1
        else:
            near = max(count - 1, 0)
            there = y[partner[near] if count > 0 else 0]
            due = prices[near] + _price(x[at] - there, order) - _price(places[near] - there, order)
            by_place[at] = 0.0
        by_weight[at] = due
        total += due
    for k in range(size):
        by_weight[k] = (by_weight[k] - total / size) * scale


@compiled(allocates=True)
def quantile_gradients(
    counter: Any, problem: Any, order: float, upstream: Any, scales: Any, gradients: Any, threads: int
) -> None:
    """Write the gradients (by_p, by_q, by_x, by_y) of `quantile_values`. An array without rows is skipped."""
    p, q, x, y, order_x, order_y = problem
    by_p, by_q, by_x, by_y = gradients
    n, m = x.shape[1], y.shape[1]
    sides = (np.empty((6, n + 1)), np.empty((6, m + 1)))
    bins = (np.empty((2, n), np.int64), np.empty((2, m), np.int64))
    side_p, side_q, bins_p, bins_q = sides[0], sides[1], bins[0], bins[1]
    places_p, places_q = side_p[SIDE.place], side_q[SIDE.place]
    while True:
        thread = next_task(counter)
        if thread >= threads:
            return
        first, last = _share_of(upstream.shape[0], thread, threads)
        for r in range(first, last):
            scale = (scales[0, r], scales[1, r])
            x_row, y_row, orders = _row_of(x, r), _row_of(y, r), (_row_of(order_x, r), _row_of(order_y, r))
            n_p, n_q = _write_levels(_row_of(p, r), _row_of(q, r), scale, x_row, y_row, orders, sides, bins)
            if n_p == 0 or n_q == 0:
                side_p[SIDE.by_weight :] = 0.0
                side_q[SIDE.by_weight :] = 0.0
            else:
                _walk(side_p, side_q, bins_p[BINS.partner], bins_q[BINS.partner], (n_p, n_q), order)
                _prices(places_p, places_q, bins_p[BINS.partner], n_p, order, side_p[SIDE.price])
                _prices(places_q, places_p, bins_q[BINS.partner], n_q, order, side_q[SIDE.price])
                _extend_to_all_bins(x_row, orders[0], side_p, bins_p, n_p, places_q, scale[0], order)
                _extend_to_all_bins(y_row, orders[1], side_q, bins_q, n_q, places_p, scale[1], order)
            _write_gradient(side_p[SIDE.by_weight], upstream[r], by_p, r)
            _write_gradient(side_q[SIDE.by_weight], upstream[r], by_q, r)
            _write_gradient(side_p[SIDE.by_place], upstream[r], by_x, r)
            _write_gradient(side_q[SIDE.by_place], upstream[r], by_y, r)
