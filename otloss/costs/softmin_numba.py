"""Soft minima and gradients on a CPU, over the rows of matrices and over clouds of points whose matrix is never formed.

    out_i = -eps log sum_j exp((h_j - C_ij) / eps)
    s_i   = sum_j P_ij dC_ij / dx_i,    P_ij = exp((a_i + b_j - C_ij) / eps)

Each row is read once, in pieces that fit the L1 cache. For each piece the scores h - C are computed in a buffer, the
sum so far is scaled to the new maximum, and the terms of the piece are added. Everything runs in the dtype of the
costs. If h is float64 and the costs are float32, the maximum of h is first subtracted in float64. What is then rounded
to float32 is, for every bin that matters, no larger than the range of the costs.

In low dimension few points of a cloud are near each other, so a block of rows first selects its columns. Let the rows
lie in a box with the centre a and the half widths e, and let r be the best column at a. For squared distances

    score_j(x) - score_r(x) <= score_j(a) - score_r(a) + 2 sum_k e_k |y_jk - y_rk|      for all x in the box

For distances 2 |e| replaces the last sum. Columns whose bound is below `-cutoff` are left out; together they make less
than a rounding of the sum. The bound holds for any order of the points. Where neighbours follow each other in memory,
boxes are small and few columns are selected.

Reference implementations: `otloss.costs.cost.softmin_in_torch` and `Cost.plan_gradients`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import broadcast_shape
from otloss._numba.compile import compiled, exp, inner, largest
from otloss._numba.tasks import next_task
from otloss._numba.threads import Work, run_on_threads
from otloss.costs.order import ROWS, tasks

F32, F64 = np.float32, np.float64
PIECE = 1024  # scores of a row made at a time
CHUNK = 16  # columns that are selected together


def answers(problems: int, n: int, dtype: Any, axes: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `out`, `total` and `gradients` for the kernels of this file; with `axes` the last one is filled."""
    shape = (0, n, 0) if axes is None else (problems, n, axes)
    return np.empty((problems, n), dtype), np.empty((problems, n), dtype), np.empty(shape, dtype)


def as_columns(points: np.ndarray, scratch: int = 0) -> np.ndarray:
    """Return points (m, d) as columns (d + 1 + scratch, m): coordinates, their numbers, and rows that a kernel writes.

    Kernels that `select` columns know them by these numbers.
    """
    m, d = points.shape
    columns = np.zeros((d + 1 + scratch, m))
    columns[:d], columns[d] = points.T, np.arange(m)
    return columns


@inner(fastmath={"reassoc", "nsz"})
def _sum(terms: Any, count: int) -> float:
    total = terms[0]
    for j in range(1, count):
        total += terms[j]
    return total


@inner(fastmath=False)
def subtract(h: Any, costs: Any, out: Any) -> None:
    # The caller makes the slices: with an index into a matrix, or an offset, the loop would not be vectorised.
    for j in range(h.shape[0]):
        out[j] = h[j] - costs[j]


@inner(fastmath=False)
def _terms(scores: Any, count: int, inverse: Any, state: Any) -> bool:
    """Turn the scores of a piece into terms relative to the maximum of the row so far, which goes to `state[0]`.

    `state[1]` gets the factor that brings earlier sums to that maximum. `inverse` is 1 / eps, or 0 if only the maximum
    is needed. Returns False if no bin of the piece takes part.
    """
    top = largest(scores, count)
    if top == -np.inf:
        return False
    state[1] = 1.0
    if top > state[0]:
        state[1] = exp((state[0] - top) * inverse) if inverse > 0 else 0.0
        state[0] = top
    top = state[0]
    if inverse > 0:
        for j in range(count):
            scores[j] = exp((scores[j] - top) * inverse)
    return True


@inner(fastmath={"contract"})
def distances_of(x: Any, y: Any, start: int, metric: int, out: Any, count: int) -> None:
    """Write the costs of one point x (d,) to `count` of the points y (d, m)."""
    for k in range(x.shape[0]):
        x_k, y_k = x[k], y[k, start : start + count]
        if metric == 2:
            if k == 0:
                for j in range(count):
                    out[j] = abs(x_k - y_k[j])
            else:
                for j in range(count):
                    out[j] += abs(x_k - y_k[j])
        elif k == 0:
            for j in range(count):
                out[j] = (x_k - y_k[j]) * (x_k - y_k[j])
        else:
            for j in range(count):
                out[j] += (x_k - y_k[j]) * (x_k - y_k[j])
    if metric == 1:
        for j in range(count):
            out[j] = np.sqrt(out[j])


@compiled(allocates=True)
def matrix_softmin(counter: Any, matrices: Any, which: Any, h: Any, inverse: Any, out: Any, total: Any) -> None:
    """Write the largest score of row i of problem b to `out[b, i]`, and the sum of exp relative to it to `total[b, i]`.

    matrices are (K, n, m), and problem b uses number `which[b]`; h is (B, m), inverse (B,), out and total are (B, n).
    """
    n, m = matrices.shape[1:]
    problems = h.shape[0]
    scores, state = np.empty(PIECE, h.dtype), np.empty(2, h.dtype)
    while True:
        task = next_task(counter)
        first, b = task // problems * ROWS, task % problems
        if first >= n:
            return
        for i in range(first, first + ROWS if first + ROWS < n else n):
            row, added = matrices[which[b], i], h.dtype.type(0)
            state[0] = -np.inf
            for start in range(0, m, PIECE):
                count = m - start if m - start < PIECE else PIECE
                subtract(h[b, start : start + count], row[start : start + count], scores)
                if _terms(scores, count, inverse[b], state) and inverse[b] > 0:
                    added = added * state[1] + _sum(scores, count)
            out[b, i], total[b, i] = state[0], added


@inner(fastmath={"contract", "nsz"})
def add_slack(y: Any, best: int, half: Any, metric: int, bounds: Any) -> None:
    """Add to the scores at the centre of a box what they can gain, within the box, on the score of the best column."""
    if metric == 0:
        for k in range(half.shape[0]):
            y_k, twice, at = y[k], half[k] + half[k], y[k, best]
            for j in range(bounds.shape[0]):
                bounds[j] += twice * abs(y_k[j] - at)
        return
    radius = bounds.dtype.type(0)
    for k in range(half.shape[0]):
        radius += half[k] * half[k] if metric == 1 else half[k]
    radius = np.sqrt(radius) if metric == 1 else radius
    for j in range(bounds.shape[0]):
        bounds[j] += radius + radius


@inner(fastmath=False)
def _first_of(value: Any, scores: Any, count: int) -> int:
    """Return the first place of the value among the scores; the last place of all if it is NaN."""
    start = 0
    while start + PIECE < count and largest(scores[start : start + PIECE], PIECE) != value:
        start += PIECE
    while start + 1 < count and scores[start] != value:
        start += 1
    return start


@inner(allocates=True, fastmath=False)
def scores_in_box(points: Any, y: Any, h: Any, count: int, metric: int, half: Any, scores: Any) -> int:
    """Write the scores at the centre of the box of points (rows, d), and the half widths of the box.

    Returns the best column, or -1 if no column takes part.
    """
    d = points.shape[1]
    centre = np.empty(d, h.dtype)
    for k in range(d):
        low = high = points[0, k]
        for i in range(1, points.shape[0]):
            low, high = min(low, points[i, k]), max(high, points[i, k])
        centre[k] = low + (high - low) * h.dtype.type(0.5)
        half[k] = max(high - centre[k], centre[k] - low)
    distances_of(centre, y, 0, metric, scores, count)
    subtract(h[:count], scores, scores)
    top = largest(scores, count)
    return -1 if top == -np.inf else _first_of(top, scores, count)


@inner(fastmath=False)
def keep_columns(y: Any, h: Any, count: int, bounds: Any, threshold: Any, near: Any, near_h: Any) -> int:
    """Copy chunks of columns with a bound of at least `threshold`, or of NaN, to `near`; return the number of columns.

    All rows of y are copied, also those beyond d.
    """
    for j in range(count, count + CHUNK):
        bounds[j] = -np.inf
    copied = 0
    for start in range(0, count, CHUNK):
        hits = np.int32(0)
        for j in range(CHUNK):
            hits += np.int32(not bounds[start + j] < threshold)
        if hits > 0:
            in_chunk = min(CHUNK, count - start)
            for k in range(y.shape[0]):
                for j in range(in_chunk):
                    near[k, copied + j] = y[k, start + j]
            for j in range(in_chunk):
                near_h[copied + j] = h[start + j]
            copied += in_chunk
    return copied


@inner(allocates=True, fastmath=False)
def select(
    points: Any, y: Any, h: Any, count: int, cutoff: Any, metric: int, bounds: Any, near: Any, near_h: Any
) -> int:
    """Copy the first `count` columns that count for any of the points (rows, d); return their number."""
    half = np.empty(points.shape[1], h.dtype)
    best = scores_in_box(points, y, h, count, metric, half, bounds)
    if best < 0:
        return 0
    threshold = bounds[best] - cutoff
    add_slack(y, best, half, metric, bounds[:count])
    return keep_columns(y, h, count, bounds, threshold, near, near_h)


@inner(fastmath={"reassoc", "contract", "nsz"})
def _pull(terms: Any, x_k: Any, y_k: Any, is_sign: bool, count: int) -> float:
    """Return sum_j terms_j (x_k - y_kj), or with `is_sign` the same with the signs of the differences."""
    total = terms.dtype.type(0)
    if is_sign:
        for j in range(count):
            total += terms[j] if x_k > y_k[j] else (-terms[j] if x_k < y_k[j] else terms.dtype.type(0))
    else:
        for j in range(count):
            total += terms[j] * (x_k - y_k[j])
    return total


@inner(fastmath=False)
def _add_pulls(
    terms: Any, distances: Any, point: Any, cloud: Any, start: int, metric: int, factor: Any, pulls: Any, count: int
) -> None:
    """Scale the sums over earlier pieces by `factor`, and add the sums of terms times differences of this piece."""
    if metric == 1:
        for j in range(count):
            terms[j] = terms[j] / distances[j] if distances[j] > 0 else terms.dtype.type(0)
    for k in range(point.shape[0]):
        pull = _pull(terms, point[k], cloud[k, start : start + count], metric == 2, count)
        pulls[k] = pulls[k] * factor + pull


@compiled(allocates=True)
def points_rows(counter: Any, problems: Any, a: Any, span: int, metric: int, answers: Any) -> None:
    """As `matrix_softmin`, for the distances between points, by tasks of `span` rows.

        problems    x (K, n, d), y (L, d, m), the number of each that problem b uses, which_x (B,) and which_y (B,);
                    h (B, m), inverse (B,), and cutoff (B,): infinite where all columns count. Otherwise each task
                    selects its columns, and each block of ROWS rows selects among those
        answers     out (B, n) and total (B, n), or gradients

    If gradients are (B, n, d), and not (0, n, d), the kernel writes s of the module to them, for a (B, n) in float64,
    b = h and inverse above 0; `out` and `total` stay as they are.
    """
    x, y, which_x, which_y, h, inverse, cutoff = problems
    out, total, gradients = answers
    (n, d), m = x.shape[1:], y.shape[2]
    problems, with_gradients = h.shape[0], gradients.shape[0] > 0
    scores, distances, state = np.empty(PIECE, h.dtype), np.empty(PIECE, h.dtype), np.empty(2, h.dtype)
    bounds, near, near_h = np.empty(m + CHUNK, h.dtype), np.empty((2, *y.shape[1:]), h.dtype), np.empty((2, m), h.dtype)
    pulls = np.empty(d, F64)
    while True:
        task = next_task(counter)
        first, b = task // problems * span, task % problems
        if first >= n:
            return
        cloud, potential, columns_of_block, columns_of_task = y[which_y[b]], h[b], m, m
        last = first + span if first + span < n else n
        if cutoff[b] < np.inf:
            columns_of_task = select(
                x[which_x[b], first:last], cloud, potential, m, cutoff[b], metric, bounds, near[0], near_h[0]
            )
        for i in range(first, last):
            if cutoff[b] < np.inf and i % ROWS == 0:
                points = x[which_x[b], i : min(i + ROWS, last)]
                columns_of_block = select(
                    points, near[0], near_h[0], columns_of_task, cutoff[b], metric, bounds, near[1], near_h[1]
                )
                cloud, potential = near[1], near_h[1]
            point, added = x[which_x[b], i], h.dtype.type(0)
            state[0] = -np.inf
            for k in range(d):
                pulls[k] = 0.0
            for start in range(0, columns_of_block, PIECE):
                count = columns_of_block - start if columns_of_block - start < PIECE else PIECE
                distances_of(point, cloud, start, metric, distances, count)
                subtract(potential[start : start + count], distances, scores)
                if _terms(scores, count, inverse[b], state):
                    if with_gradients:
                        _add_pulls(scores, distances, point, cloud, start, metric, state[1], pulls, count)
                    elif inverse[b] > 0:
                        added = added * state[1] + _sum(scores, count)
            if with_gradients:
                weight = 0.0
                if state[0] > -np.inf and a[b, i] > -np.inf:
                    weight = np.exp((a[b, i] + state[0]) * inverse[b]) * (2.0 if metric == 0 else 1.0)
                for k in range(d):
                    gradients[b, i, k] = weight * pulls[k]
            else:
                out[b, i], total[b, i] = state[0], added


def dense_softmin(
    rows: Float[Tensor, "*batch n m"], potential: Float[Tensor, "*batch m"], epsilon: float | Tensor
) -> Float[Tensor, "*batch n"]:
    """Return the soft minimum over the last axis of `rows - potential`, in the dtype of the potential."""
    shape = torch.Size(epsilon.shape) if isinstance(epsilon, Tensor) else torch.Size()
    batch = broadcast_shape(rows.shape[:-2], potential.shape[:-1], shape)
    matrices, which = shared(rows, 2, batch)
    h, shift, inverse, width = centred(potential, epsilon, batch, rows.dtype)
    out, total, _ = answers(len(h), rows.shape[-2], h.dtype)
    run_on_threads(
        matrix_softmin,
        tasks(*out.T.shape),
        (matrices, which, h, inverse, out, total),
        work=Work("", h.size * len(out.T), passes=1),
    )
    return finished(out, total, shift, width).reshape(*batch, rows.shape[-2]).to(potential.dtype)


def shared(data: Tensor, own_axes: int, batch: torch.Size) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct matrices or clouds on one axis, and the number of that which each problem uses."""
    data = data.detach()
    leading, own = data.shape[:-own_axes], data.shape[-own_axes:]
    flat = data.reshape(leading.numel(), *own).contiguous()
    which = torch.arange(leading.numel(), device="cpu").reshape(leading).expand(batch).reshape(-1)
    # In one layout, since a kernel is compiled for each.
    return flat.numpy(), which.contiguous().numpy()


def centred(
    potential: Tensor, epsilon: float | Tensor, batch: torch.Size, dtype: torch.dtype
) -> tuple[np.ndarray, Tensor, np.ndarray, Tensor]:
    """Return potentials (B, m) less their maxima, the maxima (B, 1), 1 / eps (B,) and eps (B, 1).

    The potentials are in the dtype of the costs. 1 / eps is 0 where it would be infinite: the result is then the hard
    minimum.
    """
    potential = potential.detach()
    shift = potential.amax(-1, keepdim=True)
    shift = shift.masked_fill(shift == -torch.inf, 0.0)
    h = (potential - shift).to(dtype)
    m = potential.shape[-1]
    width = torch.as_tensor(epsilon, dtype=torch.float64, device="cpu").expand(batch).reshape(-1, 1)
    inverse = torch.where(width >= torch.finfo(dtype).tiny, 1 / width, 0.0).to(dtype)
    return (
        h.expand(*batch, m).reshape(-1, m).contiguous().numpy(),
        shift.expand(*batch, 1).reshape(-1, 1),
        inverse.squeeze(-1).contiguous().numpy(),
        width,
    )


def finished(out: np.ndarray, total: np.ndarray, shift: Tensor, width: Tensor) -> Tensor:
    """Return -shift - largest score - eps log(sum), (B, n); +inf where no bin takes part."""
    value = -(torch.from_numpy(out).to(torch.float64) + shift)
    log = torch.from_numpy(total).to(torch.float64).clamp_(min=torch.finfo(torch.float64).tiny).log_()
    soft = width >= torch.finfo(torch.float32 if out.dtype == np.float32 else torch.float64).tiny
    value.sub_(torch.where(soft, log * width, 0.0))
    return value.masked_fill_(torch.from_numpy(out == -np.inf), torch.inf)
