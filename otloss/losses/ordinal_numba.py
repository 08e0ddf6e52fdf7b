"""Losses of logits over ordered classes, row by row: ranked probability scores, and what boosting takes.

    ranked_scores               sum_k gap_k (F_k - G_k)^2 + mix * nll, and its gradient in the logits
    gradients_and_curvatures    of transport * T + cross_entropy * nll: gradients and a diagonal for the Hessian

Each thread copies a block of rows into a buffer, class by class. Loops over the rows of a block then vectorise for any
number of classes and any layout of the logits. Sums are float64. A last block that is not full repeats its last row.

The reference implementations are `otloss.losses.geometry` and `otloss.boosting.derivatives.gradients_in_numpy`, with
the notation used here. In ranked scores the tails |F - G| are summed from the end at which each begins. The derivatives
s in the probabilities are zero at the label and positive elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from otloss._numba.compile import compiled, exp, inner
from otloss._numba.tasks import next_task

LARGEST_WEIGHT = 1e12  # of a row, as in otloss.boosting.derivatives
ROWS = 64  # of a block: its buffers for five classes fit the first cache


def answers_of_scores(logits: np.ndarray, *, with_gradients: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return `values` and `gradients` for `ranked_scores`."""
    rows, classes = logits.shape
    return np.empty(rows, logits.dtype), np.empty((rows if with_gradients else 0, classes), logits.dtype)


def answers_of_curvatures(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `answers` for `gradients_and_curvatures`, in the memory order of the scores."""
    return np.empty_like(scores, np.float32), np.empty_like(scores, np.float32)


@inner()
def _softmax(logits: Any, first: int, count: int, P: Any, sums: Any) -> None:
    """Write probabilities (classes, rows), and the largest logit and the sum of exponentials of each row."""
    top, total, scale = sums
    classes = P.shape[0]
    for k in range(classes):
        for b in range(count):
            P[k, b] = logits[first + b, k]
        for b in range(count, P.shape[1]):
            P[k, b] = P[k, count - 1]
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
def _cumulative(P: Any, F: Any) -> None:
    """Write the sums of probabilities up to each class, in float64."""
    for b in range(P.shape[1]):
        F[0, b] = P[0, b]
    for k in range(1, P.shape[0]):
        for b in range(P.shape[1]):
            F[k, b] = F[k - 1, b] + np.float64(P[k, b])


@inner()
def _block_values(P: Any, label: Any, gaps: Any, value: Any, run: Any) -> None:
    classes = P.shape[0]
    for b in range(P.shape[1]):
        value[b] = 0.0
        run[b] = 0.0
    for k in range(classes - 1):
        gap = np.float64(gaps[k])
        for b in range(P.shape[1]):
            tail = run[b] + np.float64(P[k, b])
            run[b] = tail
            value[b] += gap * tail * tail if k < label[b] else 0.0
    for b in range(P.shape[1]):
        run[b] = 0.0
    for k in range(classes - 1, 0, -1):
        gap = np.float64(gaps[k - 1])
        for b in range(P.shape[1]):
            tail = run[b] + np.float64(P[k, b])
            run[b] = tail
            value[b] += gap * tail * tail if k > label[b] else 0.0


@inner()
def _block_gradients(P: Any, label: Any, gaps: Any, mix: float, tails: Any, sums: Any) -> None:
    """Turn probabilities into gradients in the logits, and write the values into the first of `sums`."""
    value, others, run, total = sums
    classes = P.shape[0]
    for b in range(P.shape[1]):
        value[b] = 0.0
        others[b] = 0.0
        run[b] = 0.0
        total[b] = 0.0
    _cumulative(P, tails)
    for k in range(classes - 1, -1, -1):
        gap = np.float64(gaps[k]) if k < classes - 1 else 0.0
        for b in range(P.shape[1]):
            p = np.float64(P[k, b])
            tail = tails[k, b] if k < label[b] else run[b]
            derivative = 2.0 * gap * tail
            value[b] += gap * tail * tail
            so_far = total[b] + (derivative if k < label[b] else 0.0)
            total[b] = so_far
            tails[k, b] = so_far if k < label[b] else derivative  # s below the label, its terms from the label on
            run[b] += p
            others[b] += 0.0 if k == label[b] else p
    for b in range(P.shape[1]):
        total[b] = 0.0
    for k in range(classes):
        for b in range(P.shape[1]):
            p, term, so_far = np.float64(P[k, b]), tails[k, b], total[b]
            s = term if k < label[b] else so_far
            total[b] = so_far + (0.0 if k < label[b] else term)
            # P . s is twice the value, since the score is quadratic in P.
            P[k, b] = p * (s - 2.0 * value[b]) + mix * (-others[b] if k == label[b] else p)


@inner()
def _load_histograms(T_of: Any, first: int, count: int, T: Any, sums: Any, tolerance: float) -> None:
    """Write soft labels (classes, rows), scaled to mass one, and for each row 0, or NaN if it is not a distribution."""
    wrong, mass, smallest = sums
    classes = T.shape[0]
    for b in range(T.shape[1]):
        row = first + min(b, count - 1)
        for k in range(classes):
            T[k, b] = T_of[row, k]
    for b in range(T.shape[1]):
        mass[b] = 0.0
        smallest[b] = 0.0
    for k in range(classes):
        for b in range(T.shape[1]):
            t = np.float64(T[k, b])
            mass[b] += t
            smallest[b] = t if t < smallest[b] else smallest[b]
    for b in range(T.shape[1]):
        wrong[b] = 0.0 if smallest[b] >= 0.0 and abs(mass[b] - 1.0) <= tolerance else np.nan
        mass[b] = 1.0 / mass[b]
    for k in range(classes):
        for b in range(T.shape[1]):
            T[k, b] *= mass[b]


@inner()
def _block_to_histograms(P: Any, T: Any, gaps: Any, tails: Any, sums: Any, low: Any) -> None:
    """Write the values into the first of `sums`, and into `tails` what `_gradients_to_histograms` needs.

    F - G is summed from the end that holds less of both masses: from the first class below class `low` of a row, and
    from the last class above it.
    """
    value, whole, apart, behind, total = sums
    classes = P.shape[0]
    for b in range(P.shape[1]):
        value[b] = 0.0
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
            value[b] += gap * r * r
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
            term, so_far = tails[k, b], total[b]
            s = term if k < low[b] else so_far
            total[b] = so_far + (0.0 if k < low[b] else term)
            tails[k, b] = s
            mean[b] += np.float64(P[k, b]) * s
    for k in range(classes):
        for b in range(P.shape[1]):
            p, t = np.float64(P[k, b]), np.float64(T[k, b])
            P[k, b] = p * (tails[k, b] - mean[b]) + mix * (p - t)


@inner()
def _entropy(z: Any, t: Any, top: float, log_mass: float) -> float:
    """Return the cross-entropy of soft labels; a class without mass may have a logit of -inf."""
    nll = 0.0
    for k in range(z.size):
        if t[k] > 0:
            nll += np.float64(t[k]) * (log_mass + (top - np.float64(z[k])))
    return nll


@compiled(allocates=True)
def ranked_scores(
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

    Both are multiplied by `share`, which is one over the number of rows for a mean. The masses of soft labels must be
    one up to `tolerance`.
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
def _potential(loss: Any, label: Any, F: Any, s: Any) -> None:
    """Write the derivative of the transport term in the probabilities."""
    gaps, costs = loss
    classes = s.shape[0]
    if costs.shape[0] > 0:
        for k in range(classes):
            for b in range(s.shape[1]):
                s[k, b] = costs[label[b], k]
        return
    s[classes - 1, :] = 0
    for k in range(classes - 2, -1, -1):
        for b in range(s.shape[1]):
            s[k, b] = s[k + 1, b] + 2 * gaps[k] * (F[k, b] - (1.0 if label[b] <= k else 0.0))


@inner(allocates=True)
def _of_squares(gaps: Any, P: Any, F: Any, curvature: Any) -> None:
    """Write the diagonal of 2 sum_k d_k J_k J_k^T."""
    classes = P.shape[0]
    total = np.zeros(ROWS)
    for i in range(classes - 1, -1, -1):
        if i < classes - 1:
            for b in range(P.shape[1]):
                total[b] += gaps[i] * (1 - F[i, b]) ** 2
        for b in range(P.shape[1]):
            curvature[i, b] = total[b]
    total[:] = 0
    for i in range(classes):
        if i > 0:
            for b in range(P.shape[1]):
                total[b] += gaps[i - 1] * F[i - 1, b] ** 2
        for b in range(P.shape[1]):
            curvature[i, b] = 2 * P[i, b] ** 2 * (curvature[i, b] + total[b])


@inner(allocates=True)
def _bound(P: Any, s: Any, mean: Any, curvature: Any) -> None:
    """Write a diagonal that bounds the Hessian of P.s."""
    classes = P.shape[0]
    total = np.zeros(ROWS)
    for k in range(classes):
        for b in range(P.shape[1]):
            total[b] += P[k, b] * max(s[k, b] - mean[b], 0.0) * (1 - P[k, b])
    for k in range(classes):
        for b in range(P.shape[1]):
            p = P[k, b]
            own = p * max(s[k, b] - mean[b], 0.0) * (1 - p)
            curvature[k, b] = 2 * (own * (1 - p) + p * (total[b] - own))


@inner()
def _average(P: Any, s: Any, mean: Any) -> None:
    mean[:] = 0
    for k in range(P.shape[0]):
        for b in range(P.shape[1]):
            mean[b] += P[k, b] * s[k, b]


@inner()
def _write(block: Any, rows: Any, settings: Any, answers: Any, first: int, count: int) -> None:
    P, s, curvature = block
    label, weight, mean = rows
    transport, cross_entropy, factor, entropy_factor, smallest = settings
    gradient, hessian = answers
    for k in range(P.shape[0]):
        for b in range(count):
            p, own = P[k, b], 1.0 if label[b] == k else 0.0
            moved = p * (s[k, b] - mean[b])
            second = transport * factor * curvature[k, b] + cross_entropy * entropy_factor * p * (1 - p)
            gradient[first + b, k] = weight[b] * (transport * moved + cross_entropy * (p - own))
            hessian[first + b, k] = weight[b] * max(second, smallest)


@compiled(allocates=True)
def gradients_and_curvatures(
    counter: Any, inputs: Any, class_weights: Any, loss: Any, settings: Any, answers: Any, threads: int
) -> int:
    """Write gradient and hessian (rows, classes); return the number of invalid scores, labels and weights.

    `inputs` are (scores, labels, weights), `loss` is (gaps, costs), `answers` are (gradient, hessian), and `settings`
    (transport, cross_entropy, factor, entropy_factor, smallest).
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
        mean, top, total, scale = np.empty(ROWS), np.empty(ROWS), np.empty(ROWS), np.empty(ROWS)
        for block in range(blocks * thread // threads, blocks * (thread + 1) // threads):
            first = block * ROWS
            last = min(first + ROWS, count)
            size = last - first
            bad += _read(inputs, first, last, (label, weight))
            for b in range(size):
                weight[b] *= class_weights[label[b]]
            _softmax(inputs[0], first, size, P, (top, total, scale))
            _cumulative(P, F)
            _potential(loss, label, F, s)
            _average(P, s, mean)
            if loss[1].shape[0] > 0:
                _bound(P, s, mean, curvature)
            else:
                _of_squares(loss[0], P, F, curvature)
            _write((P, s, curvature), (label, weight, mean), settings, answers, first, size)
    return bad
