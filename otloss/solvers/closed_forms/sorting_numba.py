"""Sorting many rows of floats, by radix: a byte of the numbers' bits at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from otloss._numba.compile import compiled, inner
from otloss._numba.tasks import next_task


def allocate_results(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of each row, and whether its numbers are finite, to be filled by `sort_rows`."""
    return np.empty(bits.shape, np.int32), np.empty(bits.shape[0], np.bool_)


@inner()
def _sort_row(bits: Any, order: Any, keys: Any, spare: Any, places: Any, counts: Any) -> bool:
    """Write the stable order of a row to `order`, by radix sort; return whether all numbers are finite."""
    n, width = bits.shape[0], bits.itemsize * 8
    mask = np.int64(0x7FFFFFFF) if width == 32 else np.int64(0x7FFFFFFFFFFFFFFF)
    exponent = np.int64(0x7F800000) if width == 32 else np.int64(0x7FF0000000000000)
    finite, ascending = True, True
    for k in range(n):
        number = np.int64(bits[k])
        finite &= (number & exponent) != exponent
        # Flipped bits of negative floats give whole numbers in the order of the floats; -0 becomes 0.
        keys[k] = (number ^ mask) + 1 if number < 0 else number
        ascending &= k == 0 or keys[k - 1] <= keys[k]
        order[k] = k
    if not ascending:
        _by_radix(keys, spare, order, places, counts, width // 8 - 1)
    return finite


@inner()
def _by_radix(keys: Any, spare: Any, order: Any, places: Any, counts: Any, last: int) -> None:
    n = keys.shape[0]
    for digit in range(last + 1):
        for value in range(256):
            counts[digit, value] = 0
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
        for k in range(n):
            order[k] = places[k]


@compiled(allocates=True)
def sort_rows(counter: Any, bits: Any, orders: Any, finite: Any, threads: int) -> None:
    """Write into `orders` what sorts each row of two arrays of floats, given by their bits as integers."""
    while True:
        thread = next_task(counter)
        if thread >= threads:
            return
        for side in range(2):
            numbers, order, is_finite = bits[side], orders[side], finite[side]
            rows, n = numbers.shape
            keys, spare = np.empty(n, np.int64), np.empty(n, np.int64)
            places, counts = np.empty(n, np.int32), np.empty((8, 256), np.int64)
            for row in range(rows * thread // threads, rows * (thread + 1) // threads):
                is_finite[row] = _sort_row(numbers[row], order[row], keys, spare, places, counts)
