"""Ranked probability scores of softmax(logits) at labels, row by row: the values and their gradients.

    value = sum_k gap_k (F_k - G_k)^2 + mix * nll

`logits` (rows, classes) and `gaps` (classes - 1,) are float32 or float64, C-contiguous; `labels` (rows,) are int64,
soft ones (rows, classes) have the dtype of the logits. Sums are float64. Blocks of rows lie class by class in buffers
of each thread, so that running sums over the classes vectorise over the rows. A row gets NaN if its label is not a
class, or if its logits or soft labels are not a distribution.

The reference implementation is `otloss.losses.ordinal_distance`, with the notation used here: the tails |F - G| are
summed from their own ends, and the derivatives s in the probabilities are zero at the label and positive elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from otloss._kernels._compile import compiled, exp, inner
from otloss._kernels._threads import next_task

ROWS = 64  # of a block


@inner()
def _softmax(logits: Any, first: int, count: int, P: Any, sums: Any) -> None:
    """Write probabilities (classes, rows), and the largest logit and the sum of exponentials of each row."""
    top, total, scale = sums
    classes = P.shape[0]
    for b in range(P.shape[1]):
        row = first + min(b, count - 1)  # a last block that is not full repeats its last row
        for k in range(classes):
            P[k, b] = logits[row, k]
    for b in range(P.shape[1]):
        top[b] = P[0, b]
        total[b] = 0.0
    for k in range(1, classes):
        for b in range(P.shape[1]):
            top[b] = P[k, b] if P[k, b] > top[b] else top[b]
    for k in range(classes):
        for b in range(P.shape[1]):
            e = exp(P[k, b] - top[b])
            P[k, b] = e
            total[b] += np.float64(e)
    for b in range(P.shape[1]):
        scale[b] = 1.0 / total[b]
    for k in range(classes):
        for b in range(P.shape[1]):
            P[k, b] *= scale[b]


@inner()
def _block_values(P: Any, label: Any, gaps: Any, found: Any, run: Any) -> None:
    classes = P.shape[0]
    for b in range(P.shape[1]):
        found[b] = 0.0
        run[b] = 0.0
    for k in range(classes - 1):
        gap = np.float64(gaps[k])
        for b in range(P.shape[1]):
            tail = run[b] + np.float64(P[k, b])
            run[b] = tail
            found[b] += gap * tail * tail if k < label[b] else 0.0
    for b in range(P.shape[1]):
        run[b] = 0.0
    for k in range(classes - 1, 0, -1):
        gap = np.float64(gaps[k - 1])
        for b in range(P.shape[1]):
            tail = run[b] + np.float64(P[k, b])
            run[b] = tail
            found[b] += gap * tail * tail if k > label[b] else 0.0


@inner()
def _block_gradients(P: Any, label: Any, gaps: Any, mix: float, tails: Any, sums: Any) -> None:
    """Turn probabilities into gradients in the logits, and write the values into the first of `sums`."""
    found, others, run, total = sums
    classes = P.shape[0]
    for b in range(P.shape[1]):
        found[b] = 0.0
        others[b] = 0.0
        run[b] = 0.0
    for k in range(classes):
        for b in range(P.shape[1]):
            tail = run[b] + np.float64(P[k, b])
            run[b] = tail
            tails[k, b] = tail
    for b in range(P.shape[1]):
        run[b] = 0.0
        total[b] = 0.0
    for k in range(classes - 1, -1, -1):
        gap = np.float64(gaps[k]) if k < classes - 1 else 0.0
        for b in range(P.shape[1]):
            p = np.float64(P[k, b])
            tail = tails[k, b] if k < label[b] else run[b]
            derivative = 2.0 * gap * tail
            found[b] += gap * tail * tail
            so_far = total[b] + (derivative if k < label[b] else 0.0)
            total[b] = so_far
            tails[k, b] = so_far if k < label[b] else derivative  # s below the label; from it on, its terms
            run[b] += p
            others[b] += 0.0 if k == label[b] else p
    for b in range(P.shape[1]):
        total[b] = 0.0
    for k in range(classes):
        for b in range(P.shape[1]):
            p, held, so_far = np.float64(P[k, b]), tails[k, b], total[b]
            s = held if k < label[b] else so_far
            total[b] = so_far + (0.0 if k < label[b] else held)
            # P . s is twice the value: the score is a square of P.
            P[k, b] = p * (s - 2.0 * found[b]) + mix * (-others[b] if k == label[b] else p)


@inner()
def _load_histograms(T_of: Any, first: int, count: int, T: Any, sums: Any, tolerance: float) -> None:
    """Write soft labels (classes, rows) of mass one, and for each row 0, or NaN where they are not a distribution."""
    wrong, mass, least = sums
    classes = T.shape[0]
    for b in range(T.shape[1]):
        row = first + min(b, count - 1)
        for k in range(classes):
            T[k, b] = T_of[row, k]
    for b in range(T.shape[1]):
        mass[b] = 0.0
        least[b] = 0.0
    for k in range(classes):
        for b in range(T.shape[1]):
            t = np.float64(T[k, b])
            mass[b] += t
            least[b] = t if t < least[b] else least[b]
    for b in range(T.shape[1]):
        wrong[b] = 0.0 if least[b] >= 0.0 and abs(mass[b] - 1.0) <= tolerance else np.nan
        mass[b] = 1.0 / mass[b]
    for k in range(classes):
        for b in range(T.shape[1]):
            T[k, b] *= mass[b]


@inner()
def _block_to_histograms(P: Any, T: Any, gaps: Any, tails: Any, sums: Any, low: Any) -> None:
    """Write the values into the first of `sums`, and into `tails` what `_gradients_to_histograms` needs.

    Below class `low` of a row, F - G is summed from the first class on, and from the last one on above it: from that
    end which holds less of both masses.
    """
    found, whole, apart, behind, total = sums
    classes = P.shape[0]
    for b in range(P.shape[1]):
        found[b] = 0.0
        apart[b] = 0.0
        whole[b] = 0.0
    for k in range(classes):
        for b in range(P.shape[1]):
            p, t = np.float64(P[k, b]), np.float64(T[k, b])
            apart[b] += p - t
            whole[b] += p + t
            tails[k, b] = apart[b]
    for b in range(P.shape[1]):
        apart[b] = 0.0
        behind[b] = 0.0
        total[b] = 0.0
        low[b] = 0
    for k in range(classes - 1, -1, -1):
        gap = np.float64(gaps[k]) if k < classes - 1 else 0.0
        for b in range(P.shape[1]):
            p, t = np.float64(P[k, b]), np.float64(T[k, b])
            is_low = 2.0 * behind[b] >= whole[b]
            r = tails[k, b] if is_low else -apart[b]
            found[b] += gap * r * r
            derivative = 2.0 * gap * r
            total[b] += derivative if is_low else 0.0
            tails[k, b] = total[b] if is_low else -derivative
            low[b] += 1 if is_low else 0
            apart[b] += p - t
            behind[b] += p + t


@inner()
def _gradients_to_histograms(P: Any, T: Any, mix: float, tails: Any, sums: Any, low: Any) -> None:
    """Turn probabilities into gradients in the logits."""
    total, mean = sums
    classes = P.shape[0]
    for b in range(P.shape[1]):
        total[b] = 0.0
        mean[b] = 0.0
    for k in range(classes):
        for b in range(P.shape[1]):
            held, so_far = tails[k, b], total[b]
            s = held if k < low[b] else so_far
            total[b] = so_far + (0.0 if k < low[b] else held)
            tails[k, b] = s
            mean[b] += np.float64(P[k, b]) * s
    for k in range(classes):
        for b in range(P.shape[1]):
            p, t = np.float64(P[k, b]), np.float64(T[k, b])
            P[k, b] = p * (tails[k, b] - mean[b]) + mix * (p - t)


@inner()
def _entropy(z: Any, t: Any, top: float, log_mass: float) -> float:
    """Return the cross-entropy of soft labels; a class without mass may have a logit of -inf."""
    found = 0.0
    for k in range(z.size):
        if t[k] > 0:
            found += np.float64(t[k]) * (log_mass + (top - np.float64(z[k])))
    return found


@compiled()
def scores(
    counter: Any,
    logits: Any,
    labels: Any,
    gaps: Any,
    mix: float,
    share: float,
    tolerance: float,
    values: Any,
    gradients: Any,
    threads: int,
) -> None:
    """Write the value of each row and its gradient in the logits (rows, classes), unless `gradients` has no rows.

    All are multiplied by `share`, such as one over the number of rows for a mean. The masses of soft labels must be
    within `tolerance` of one.
    """
    rows, classes = logits.shape
    width, blocks = min(ROWS, rows), (rows + ROWS - 1) // ROWS  # a small batch fills no block
    wanted = gradients.shape[0] > 0
    while True:
        thread = next_task(counter)
        if thread >= threads:
            return
        PT, tails = np.empty((labels.ndim, classes, width), logits.dtype), np.empty((classes, width))
        P, T = PT[0], PT[labels.ndim - 1]
        top, scale = np.empty(width, logits.dtype), np.empty(width, logits.dtype)
        sums, label = np.empty((7, width)), np.empty(width, np.int64)
        mass, wrong, score = sums[0], sums[1], sums[2]
        for block in range(blocks * thread // threads, blocks * (thread + 1) // threads):
            first = block * ROWS
            count = min(ROWS, rows - first)
            if labels.ndim == 1:  # numba compiles one of the branches
                for b in range(width):
                    y = labels[first + min(b, count - 1)]
                    label[b] = y if 0 <= y < classes else 0
                    wrong[b] = 0.0 if 0 <= y < classes else np.nan
            else:
                _load_histograms(labels, first, count, T, (wrong, sums[3], sums[4]), tolerance)
            _softmax(logits, first, count, P, (top, mass, scale))
            if labels.ndim == 1:
                if wanted:
                    _block_gradients(P, label, gaps, mix, tails, (score, sums[3], sums[4], sums[5]))
                else:
                    _block_values(P, label, gaps, score, sums[3])
            else:
                _block_to_histograms(P, T, gaps, tails, (score, sums[3], sums[4], sums[5], sums[6]), label)
                if wanted:
                    _gradients_to_histograms(P, T, mix, tails, (sums[3], sums[4]), label)
            if wanted:
                for b in range(count):
                    for k in range(classes):
                        gradients[first + b, k] = share * P[k, b]
            for b in range(count):
                # The sum of exponentials is NaN where the logits are not a distribution.
                value = score[b] + wrong[b] + 0.0 * mass[b]
                if mix > 0:
                    if labels.ndim == 1:
                        nll = np.log(mass[b]) + (np.float64(top[b]) - np.float64(logits[first + b, label[b]]))
                    else:
                        nll = _entropy(logits[first + b], T[:, b], np.float64(top[b]), np.log(mass[b]))
                    value += mix * nll
                values[first + b] = share * value
