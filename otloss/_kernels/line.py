"""Transport on the line, row by row: masses, sorting, and both closed forms with their slopes.

Rows are problems. An operand with one row serves them all. Weights and positions are float32 or float64, C-contiguous;
sums, levels and differences are float64. `order_x` (rows, n) sorts the positions of a row, as `sort_rows` returns it.
`scales` (2, problems) multiply the weights of p and q, so that both sides hold the same mass. An `upstream` slope
(problems,) multiplies the slopes. Slopes in weights come centred, as mean zero over the bins of a row.

What `otloss._onedim` computes in torch operations is the specification, with the notation used here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from otloss._kernels._compile import compiled

_SUMS = {"reassoc", "nsz", "contract", "arcp"}  # sums in the order that vectorises


@compiled(fastmath=_SUMS)
def _mass(weights: Any) -> Any:
    total = 0.0
    least = weights.dtype.type(0.0)
    for k in range(weights.shape[0]):
        total += weights[k]
        least = min(least, weights[k])
    return total if least >= 0 else np.nan


@compiled(parallel=True)
def row_masses(weights: Any, masses: Any, threads: int) -> None:
    """Sum each row of `weights` into `masses`; NaN where a weight is negative or NaN."""
    rows = weights.shape[0]
    for thread in prange(threads):
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            masses[row] = _mass(weights[row])


@compiled()
def _sort_row(bits: Any, order: Any, keys: Any, spare: Any, places: Any, counts: Any) -> bool:
    """Radix sort, a byte at a time; stable. Return whether all numbers are finite."""
    n, width = bits.shape[0], bits.itemsize * 8
    mask = np.int64(0x7FFFFFFF) if width == 32 else np.int64(0x7FFFFFFFFFFFFFFF)
    exponent = np.int64(0x7F800000) if width == 32 else np.int64(0x7FF0000000000000)
    counts[:] = 0
    finite, ascending = True, True
    for k in range(n):
        number = np.int64(bits[k])
        finite &= (number & exponent) != exponent
        # Floats in the order of two's complement: those below zero have their other bits turned; -0 becomes 0.
        keys[k] = (number ^ mask) + 1 if number < 0 else number
        ascending &= k == 0 or keys[k - 1] <= keys[k]
        order[k] = k
    if ascending:
        return finite
    last = width // 8 - 1
    for k in range(n):
        for digit in range(last):
            counts[digit, (keys[k] >> (8 * digit)) & 255] += 1
        counts[last, ((keys[k] >> (8 * last)) & 255) ^ 128] += 1
    source, target, origin, place = keys, spare, order, places
    swaps = 0
    for digit in range(last + 1):
        flip = 128 if digit == last else 0
        if counts[digit, ((source[0] >> (8 * digit)) & 255) ^ flip] == n:
            continue
        start = 0
        for value in range(256):
            count = counts[digit, value]
            counts[digit, value] = start
            start += count
        for k in range(n):
            value = ((source[k] >> (8 * digit)) & 255) ^ flip
            at = counts[digit, value]
            counts[digit, value] = at + 1
            target[at] = source[k]
            place[at] = origin[k]
        source, target, origin, place = target, source, place, origin
        swaps += 1
    if swaps % 2 == 1:
        order[:] = places
    return finite


@compiled(parallel=True)
def sort_rows(bits: Any, order: Any, finite: Any, threads: int) -> None:
    """Write into `order` what sorts each row of float32 or float64 numbers, given by their bits as integers."""
    rows, n = bits.shape
    for thread in prange(threads):
        keys, spare = np.empty(n, np.int64), np.empty(n, np.int64)
        places, counts = np.empty(n, np.int32), np.empty((8, 256), np.int64)
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            finite[row] = _sort_row(bits[row], order[row], keys, spare, places, counts)


@compiled()
def _price(difference: float, order: float) -> float:
    if order == 1.0:
        return abs(difference)
    if order == 2.0:
        return difference * difference
    return abs(difference) ** order


@compiled()
def _slope(difference: float, order: float) -> float:
    if order == 2.0:
        return 2.0 * difference
    sign = 1.0 if difference > 0 else (-1.0 if difference < 0 else 0.0)
    if order == 1.0:
        return sign
    return sign * order * abs(difference) ** (order - 1.0)


@compiled()
def _row(operand: Any, row: int) -> Any:
    return operand[row if operand.shape[0] > 1 else 0]


@compiled()
def _put(values: Any, factor: float, target: Any, row: int) -> None:
    if target.shape[0] > 0:
        for k in range(values.shape[0]):
            target[row, k] = values[k] * factor


# ------------------------------------------------------------------------------------- cumulative distributions


@compiled()
def _gaps(x: Any, order: Any, gaps: Any) -> None:
    for k in range(gaps.shape[0]):
        gaps[k] = np.float64(x[order[k + 1]]) - np.float64(x[order[k]])


@compiled()
def _cdf_value(p: Any, q: Any, scales: Any, gaps: Any, order: Any, power: float) -> float:
    scale_p, scale_q = scales
    apart, total = 0.0, 0.0
    for k in range(gaps.shape[0]):
        at = order[k]
        apart += p[at] * scale_p - q[at] * scale_q
        total += gaps[k] * _price(apart, power)
    return total


@compiled(parallel=True)
def cdf_values(problem: Any, power: float, values: Any, threads: int) -> None:
    """Write sum_k gap_k |F_k - G_k|^power of each problem (p, q, x, order_x, scales) into `values`."""
    p, q, x, order, scales = problem
    problems, n = values.shape[0], x.shape[1]
    for thread in prange(threads):
        gaps = np.empty(n - 1)
        first = problems * thread // threads
        for r in range(first, problems * (thread + 1) // threads):
            if r == first or x.shape[0] > 1:
                _gaps(_row(x, r), _row(order, r), gaps)
            values[r] = _cdf_value(_row(p, r), _row(q, r), (scales[0, r], scales[1, r]), gaps, _row(order, r), power)


@compiled()
def _cdf_slopes(p: Any, q: Any, scales: Any, gaps: Any, order: Any, power: float, out: Any) -> None:
    """Write the slopes in p, q and x into the rows of `out`; its last row is for work."""
    scale_p, scale_q = scales
    by_p, by_q, by_x, slopes = out[0], out[1], out[2], out[3]
    n = order.shape[0]
    front, back = n, n - 1  # the first and the last bin with mass
    apart, before, here = 0.0, 0.0, 0.0
    for k in range(n):
        at = order[k]
        if p[at] > 0 or q[at] > 0:
            front = min(front, k)
            back = k
        apart += p[at] * scale_p - q[at] * scale_q
        slopes[k] = gaps[k] * _slope(apart, power) if k < n - 1 else 0.0
        here = _price(apart, power) if k < n - 1 else 0.0
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
            to_p += slopes[k]
            to_q -= slopes[k]
        by_p[order[k]] = to_p
        by_q[order[k]] = to_q
        sum_p += to_p
        sum_q += to_q
    for k in range(n):
        by_p[k] = (by_p[k] - sum_p / n) * scale_p
        by_q[k] = (by_q[k] - sum_q / n) * scale_q


@compiled(parallel=True)
def cdf_slopes(problem: Any, power: float, upstream: Any, slopes: Any, threads: int) -> None:
    """Write the slopes of `cdf_values` into `slopes`, (by_p, by_q, by_x), those without rows left out."""
    p, q, x, order, scales = problem
    by_p, by_q, by_x = slopes
    problems, n = upstream.shape[0], x.shape[1]
    for thread in prange(threads):
        gaps, out = np.empty(n - 1), np.empty((4, n))
        first = problems * thread // threads
        for r in range(first, problems * (thread + 1) // threads):
            if r == first or x.shape[0] > 1:
                _gaps(_row(x, r), _row(order, r), gaps)
            scale = (scales[0, r], scales[1, r])
            _cdf_slopes(_row(p, r), _row(q, r), scale, gaps, _row(order, r), power, out)
            _put(out[0], upstream[r], by_p, r)
            _put(out[1], upstream[r], by_q, r)
            _put(out[2], upstream[r], by_x, r)


# --------------------------------------------------------------------------------------------- merged quantiles

# One side of a problem: its bins with mass, sorted, as rows of a float64 and an int64 array.
_LEVEL, _PLACE, _PRICE, _FORCE, _BY_WEIGHT, _BY_PLACE = range(6)
_OCCUPIED, _PARTNER = range(2)


@compiled()
def _levels(weights: Any, scale: float, x: Any, order: Any, side: Any, bins: Any) -> int:
    """Write index, cumulative mass and position of the bins that hold mass; return how many they are."""
    levels, places, occupied = side[_LEVEL], side[_PLACE], bins[_OCCUPIED]
    count, level = 0, 0.0
    for k in range(order.shape[0]):
        at = order[k]
        weight = np.float64(weights[at])
        level += weight * scale
        occupied[count] = k
        levels[count] = level
        places[count] = x[at]
        count += 1 if weight > 0 else 0
    return count


@compiled()
def _merged_value(levels_p: Any, levels_q: Any, x: Any, y: Any, sizes: Any, order: float) -> float:
    n, m = sizes
    if n == 0 or m == 0:
        return 0.0
    mass = levels_p[n - 1]
    # The last levels agree up to rounding: neither may be passed before the other one is reached.
    levels_p[n - 1] = levels_q[m - 1] = np.inf
    i, j, level, total = 0, 0, 0.0, 0.0
    for _ in range(n + m - 2):
        from_p = levels_p[i] <= levels_q[j]
        following = min(levels_p[i], levels_q[j])
        total += (following - level) * _price(x[i] - y[j], order)
        level = following
        i += from_p
        j += 1 - from_p
    return total + (mass - level) * _price(x[i] - y[j], order)


@compiled(parallel=True)
def merged_values(problem: Any, order: float, values: Any, threads: int) -> None:
    """Write the cost of matching quantiles of each problem (p, q, x, y, order_x, order_y, scales) into `values`."""
    p, q, x, y, order_x, order_y, scales = problem
    problems, n, m = values.shape[0], x.shape[1], y.shape[1]
    for thread in prange(threads):
        side_p, bins_p, side_q, bins_q = (
            np.empty((2, n)),
            np.empty((1, n), np.int64),
            np.empty((2, m)),
            np.empty((1, m), np.int64),
        )
        for r in range(problems * thread // threads, problems * (thread + 1) // threads):
            some = _levels(_row(p, r), scales[0, r], _row(x, r), _row(order_x, r), side_p, bins_p)
            others = _levels(_row(q, r), scales[1, r], _row(y, r), _row(order_y, r), side_q, bins_q)
            values[r] = _merged_value(
                side_p[_LEVEL], side_q[_LEVEL], side_p[_PLACE], side_q[_PLACE], (some, others), order
            )


@compiled()
def _walk(side_p: Any, side_q: Any, partner_p: Any, partner_q: Any, sizes: Any, order: float) -> None:
    """Write the slopes in the positions, and for each bin the partner that it meets last."""
    n, m = sizes
    levels_p, levels_q, x, y = side_p[_LEVEL], side_q[_LEVEL], side_p[_PLACE], side_q[_PLACE]
    by_x, by_y = side_p[_FORCE], side_q[_FORCE]
    mass = levels_p[n - 1]
    levels_p[n - 1] = levels_q[m - 1] = np.inf
    by_x[:n] = 0.0
    by_y[:m] = 0.0
    i, j, level = 0, 0, 0.0
    for step in range(n + m - 1):
        following = min(min(levels_p[i], levels_q[j]), mass)
        force = (following - level) * _slope(x[i] - y[j], order)
        level = following
        by_x[i] += force
        by_y[j] -= force
        partner_p[i] = j
        partner_q[j] = i
        if step < n + m - 2:
            from_p = levels_p[i] <= levels_q[j]
            i += from_p
            j += 1 - from_p


@compiled()
def _prices(x: Any, y: Any, partner: Any, n: int, order: float, prices: Any) -> None:
    """Write potentials: neighbours differ by what they cost with the partner that the first of them meets last."""
    prices[n - 1] = 0.0
    for i in range(n - 2, -1, -1):
        there = y[partner[i]]
        prices[i] = prices[i + 1] + _price(x[i] - there, order) - _price(x[i + 1] - there, order)


@compiled()
def _spread(x: Any, order_x: Any, side: Any, bins: Any, n: int, y: Any, scale: float, order: float) -> None:
    """Write the slopes of all bins; an empty one pays the partner that the bin before it meets last."""
    prices, places, forces, occupied, partner = (
        side[_PRICE],
        side[_PLACE],
        side[_FORCE],
        bins[_OCCUPIED],
        bins[_PARTNER],
    )
    by_weight, by_place = side[_BY_WEIGHT], side[_BY_PLACE]
    size, total, count = order_x.shape[0], 0.0, 0
    for k in range(size):
        at = order_x[k]
        if count < n and occupied[count] == k:
            price, by_place[at] = prices[count], forces[count]
            count += 1
        else:
            near = max(count - 1, 0)
            there = y[partner[near] if count > 0 else 0]
            price = prices[near] + _price(x[at] - there, order) - _price(places[near] - there, order)
            by_place[at] = 0.0
        by_weight[at] = price
        total += price
    for k in range(size):
        by_weight[k] = (by_weight[k] - total / size) * scale


@compiled(parallel=True)
def merged_slopes(problem: Any, order: float, upstream: Any, slopes: Any, threads: int) -> None:
    """Write the slopes of `merged_values` into `slopes`, (by_p, by_q, by_x, by_y), those without rows left out."""
    p, q, x, y, order_x, order_y, scales = problem
    by_p, by_q, by_x, by_y = slopes
    problems, n, m = upstream.shape[0], x.shape[1], y.shape[1]
    for thread in prange(threads):
        side_p, bins_p, side_q, bins_q = (
            np.empty((6, n)),
            np.empty((2, n), np.int64),
            np.empty((6, m)),
            np.empty((2, m), np.int64),
        )
        for r in range(problems * thread // threads, problems * (thread + 1) // threads):
            x_row, y_row, order_p, order_q = _row(x, r), _row(y, r), _row(order_x, r), _row(order_y, r)
            some = _levels(_row(p, r), scales[0, r], x_row, order_p, side_p, bins_p)
            others = _levels(_row(q, r), scales[1, r], y_row, order_q, side_q, bins_q)
            if some == 0 or others == 0:
                side_p[_BY_WEIGHT:] = 0.0
                side_q[_BY_WEIGHT:] = 0.0
            else:
                _walk(side_p, side_q, bins_p[_PARTNER], bins_q[_PARTNER], (some, others), order)
                places_p, places_q = side_p[_PLACE], side_q[_PLACE]
                _prices(places_p, places_q, bins_p[_PARTNER], some, order, side_p[_PRICE])
                _prices(places_q, places_p, bins_q[_PARTNER], others, order, side_q[_PRICE])
                _spread(x_row, order_p, side_p, bins_p, some, places_q, scales[0, r], order)
                _spread(y_row, order_q, side_q, bins_q, others, places_p, scales[1, r], order)
            _put(side_p[_BY_WEIGHT], upstream[r], by_p, r)
            _put(side_q[_BY_WEIGHT], upstream[r], by_q, r)
            _put(side_p[_BY_PLACE], upstream[r], by_x, r)
            _put(side_q[_BY_PLACE], upstream[r], by_y, r)
