"""Isotonic regression of many rows: pool adjacent violators, in one pass over a row."""

from __future__ import annotations

from typing import Any

from otloss._kernels._compile import compiled
from otloss._kernels._threads import next_task

ROWS = 16  # a task


@compiled()
def falling_fit(counter: Any, values: Any, fit: Any, blocks: Any) -> None:
    """Write the nearest non-increasing row in least squares, and the place where the block of each entry begins.

    values, fit: (rows, n) in float64; blocks: (rows, n) in int64, which holds the sizes of blocks in between.
    """
    rows, n = values.shape
    while True:
        task = next_task(counter)
        if task * ROWS >= rows:
            return
        for row in range(task * ROWS, min(rows, (task + 1) * ROWS)):
            y, mean, size = values[row], fit[row], blocks[row]
            held = 0
            for i in range(n):
                mean[held], size[held] = y[i], 1
                while held > 0 and mean[held - 1] <= mean[held]:
                    total = size[held - 1] + size[held]
                    mean[held - 1] += (mean[held] - mean[held - 1]) * (size[held] / total)
                    size[held - 1] = total
                    held -= 1
                held += 1
            end = n
            for k in range(held - 1, -1, -1):
                begin, value = end - size[k], mean[k]
                for i in range(begin, end):
                    mean[i], size[i] = value, begin
                end = begin


@compiled()
def block_means(counter: Any, values: Any, blocks: Any, means: Any) -> None:
    """Write the mean of each block of entries to all of them; (rows, n) each."""
    rows, n = values.shape
    while True:
        task = next_task(counter)
        if task * ROWS >= rows:
            return
        for row in range(task * ROWS, min(rows, (task + 1) * ROWS)):
            y, begin, mean = values[row], blocks[row], means[row]
            i = 0
            while i < n:
                end, total = i, 0.0
                while end < n and begin[end] == i:
                    total += y[end]
                    end += 1
                for k in range(i, end):
                    mean[k] = total / (end - i)
                i = end
