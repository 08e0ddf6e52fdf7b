"""Ordinal losses of raw scores for boosting: gradients and diagonals of the Hessian, in one pass over the rows.

Blocks of rows lie class by class in buffers of each thread, so that every loop over the rows of a block vectorises,
whatever the number of classes and however the scores are laid out. Arithmetic is float64. `scores` (rows, classes) are
any floats in any layout; `labels` (rows,) are whole numbers kept as float64; `weights` (rows,) or (0,) for ones.
`costs` is (classes, classes), or (0, 0) where the loss is that of the `gaps` (classes - 1,), at power 2.

The reference implementation is `otloss.boosting.derivatives.gradients_in_numpy`, with the notation used here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from otloss._kernels._compile import compiled, exp64, inner
from otloss._kernels._threads import next_task

LARGEST_WEIGHT = 1e12  # of a row, as in otloss.boosting.derivatives
ROWS = 64  # of a block: five classes of it, in all buffers, stay in the first cache


@inner()
def _read(inputs: Any, first: int, last: int, rows: Any) -> int:
    """Read labels and weights of a block; return how many of them, or of its scores, are invalid."""
    scores, labels, weights = inputs
    label, weight = rows
    classes, bad = scores.shape[1], 0
    for b in range(last - first):
        y = labels[first + b]
        fits = y >= 0 and y < classes and y == np.floor(y)
        label[b] = np.int64(y) if fits else 0
        w = weights[first + b] if weights.shape[0] > 0 else 1.0
        weight[b] = w
        bad += 0 if fits and w >= 0 and w <= LARGEST_WEIGHT else 1
    for k in range(classes):
        for b in range(last - first):
            bad += 0 if abs(scores[first + b, k]) < np.inf else 1
    return bad


@inner()
def _softmax(scores: Any, first: int, count: int, P: Any, parts: Any) -> None:
    """Probabilities of a block (classes, rows), the largest score, and one over the sum of exp(score - largest)."""
    classes = scores.shape[1]
    top, total = parts
    total[:] = 0
    for b in range(count):
        top[b] = scores[first + b, 0]
    for k in range(classes):
        for b in range(count):
            z = np.float64(scores[first + b, k])
            P[k, b] = z
            top[b] = max(top[b], z)
    for k in range(classes):
        for b in range(count):
            e = exp64(P[k, b] - top[b])
            P[k, b] = e
            total[b] += e
    for b in range(count):
        total[b] = 1 / total[b]
    for k in range(classes):
        for b in range(count):
            P[k, b] *= total[b]


@inner()
def _cumulative(P: Any, F: Any, count: int) -> None:
    for b in range(count):
        F[0, b] = P[0, b]
    for k in range(1, F.shape[0] - 1):
        for b in range(count):
            F[k, b] = F[k - 1, b] + P[k, b]


@inner()
def _potential(loss: Any, label: Any, F: Any, s: Any, count: int) -> None:
    """Write the derivative of the transport term in the probabilities."""
    gaps, costs = loss
    classes = s.shape[0]
    if costs.shape[0] > 0:
        for k in range(classes):
            for b in range(count):
                s[k, b] = costs[label[b], k]
        return
    s[classes - 1, :count] = 0
    for k in range(classes - 2, -1, -1):
        for b in range(count):
            s[k, b] = s[k + 1, b] + 2 * gaps[k] * (F[k, b] - (1.0 if label[b] <= k else 0.0))


@inner()
def _of_squares(gaps: Any, P: Any, F: Any, curvature: Any, count: int) -> None:
    """Write the diagonal of 2 sum_k d_k J_k J_k^T."""
    classes = P.shape[0]
    total = np.zeros(ROWS)
    for i in range(classes - 1, -1, -1):
        if i < classes - 1:
            for b in range(count):
                total[b] += gaps[i] * (1 - F[i, b]) ** 2
        for b in range(count):
            curvature[i, b] = total[b]
    total[:] = 0
    for i in range(classes):
        if i > 0:
            for b in range(count):
                total[b] += gaps[i - 1] * F[i - 1, b] ** 2
        for b in range(count):
            curvature[i, b] = 2 * P[i, b] ** 2 * (curvature[i, b] + total[b])


@inner()
def _bound(P: Any, s: Any, mean: Any, curvature: Any, count: int) -> None:
    """Write a diagonal that bounds the Hessian of P.s."""
    classes = P.shape[0]
    total = np.zeros(ROWS)
    for k in range(classes):
        for b in range(count):
            total[b] += P[k, b] * max(s[k, b] - mean[b], 0.0) * (1 - P[k, b])
    for k in range(classes):
        for b in range(count):
            p = P[k, b]
            own = p * max(s[k, b] - mean[b], 0.0) * (1 - p)
            curvature[k, b] = 2 * (own * (1 - p) + p * (total[b] - own))


@inner()
def _average(P: Any, s: Any, mean: Any, count: int) -> None:
    mean[:count] = 0
    for k in range(P.shape[0]):
        for b in range(count):
            mean[b] += P[k, b] * s[k, b]


@inner()
def _write(block: Any, rows: Any, settings: Any, answers: Any, first: int, count: int) -> None:
    P, s, curvature = block
    label, weight, mean = rows
    transport, cross_entropy, factor, entropy_factor, least = settings
    gradient, hessian = answers
    for k in range(P.shape[0]):
        for b in range(count):
            p, own = P[k, b], 1.0 if label[b] == k else 0.0
            moved = p * (s[k, b] - mean[b])
            second = transport * factor * curvature[k, b] + cross_entropy * entropy_factor * p * (1 - p)
            gradient[first + b, k] = weight[b] * (transport * moved + cross_entropy * (p - own))
            hessian[first + b, k] = weight[b] * max(second, least)


@compiled()
def gradients(
    counter: Any, inputs: Any, class_weights: Any, loss: Any, settings: Any, answers: Any, threads: int
) -> int:
    """Write gradient and hessian (rows, classes); return the number of invalid scores, labels and weights.

    `inputs` are (scores, labels, weights), `loss` is (gaps, costs), `answers` are (gradient, hessian), and `settings`
    (transport, cross_entropy, factor, entropy_factor, least).
    """
    count, classes = inputs[0].shape
    blocks = (count + ROWS - 1) // ROWS
    bad = 0
    while True:
        thread = next_task(counter)
        if thread >= threads:
            return bad
        P, F, s = np.empty((classes, ROWS)), np.empty((classes, ROWS)), np.empty((classes, ROWS))
        curvature = np.empty((classes, ROWS))
        label, weight = np.zeros(ROWS, np.int64), np.ones(ROWS)
        mean, top, total = np.empty(ROWS), np.empty(ROWS), np.empty(ROWS)
        for block in range(blocks * thread // threads, blocks * (thread + 1) // threads):
            first = block * ROWS
            last = min(first + ROWS, count)
            size = last - first
            bad += _read(inputs, first, last, (label, weight))
            for b in range(size):
                weight[b] *= class_weights[label[b]]
            _softmax(inputs[0], first, size, P, (top, total))
            _cumulative(P, F, size)
            _potential(loss, label, F, s, size)
            _average(P, s, mean, size)
            if loss[1].shape[0] > 0:
                _bound(P, s, mean, curvature, size)
            else:
                _of_squares(loss[0], P, F, curvature, size)
            _write((P, s, curvature), (label, weight, mean), settings, answers, first, size)
    return bad
