"""Soft minima and gradients on a CPU, over the rows of matrices and over clouds of points whose matrix is never formed.

    out_i = -eps log sum_j exp((h_j - C_ij) / eps)
    s_i   = sum_j P_ij dC_ij / dx_i,    P_ij = exp((a_i + b_j - C_ij) / eps)

Each row is read once, in pieces that fit the L1 cache: the scores h - C of a piece are made in a buffer, the sum so far
is scaled to the new maximum, and the terms of the piece are added. Everything runs in the dtype of the costs. A
potential in float64 over costs in float32 is first moved by its own maximum, in float64: what is then rounded to
float32 is, for every bin that matters, no larger than the range of the costs.

In low dimension few points of a cloud are near each other. A block of rows that lie in a box with the centre a
and the half widths e therefore first selects its columns: with r the best column at a, and for the squared distance,

    score_j(x) - score_r(x) <= score_j(a) - score_r(a) + 2 sum_k e_k |y_jk - y_rk|      for all x in the box

and (2 |e| in place of the last sum, for distances). Columns below `-cutoff` add up to less than a rounding of the sum
that they are left out of. The bound holds for any order of the points; where neighbours are close to each other in
memory, boxes are small and few columns are selected.

Reference implementations: `otloss.costs.cost.softmin_in_torch` and `Cost.plan_gradients`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import broadcast_shape
from otloss._kernels._compile import compiled, exp, inner, largest
from otloss._kernels._threads import Work, next_task, run_on_threads

F32, F64 = np.float32, np.float64
PIECE = 1024  # scores of a row made at a time
ROWS = 16  # rows that are read for one problem after the other while they are in cache
CHUNK = 16  # columns that are selected together
BLOCK = 8  # tasks of rows that select columns together, before each selects among those
SQUARED, EUCLIDEAN, ABSOLUTE = 0, 1, 2


def tasks(n: int, problems: int, rows: int = ROWS) -> int:
    """Return the number of blocks of so many rows."""
    return (n + rows - 1) // rows * problems


@inner(fastmath={"reassoc", "nsz"})
def _sum(terms: Any, count: int) -> Any:
    total = terms[0]
    for j in range(1, count):
        total += terms[j]
    return total


@inner(fastmath=False)
def subtract(h: Any, costs: Any, out: Any) -> None:
    # With slices made by the caller: an index into a matrix or an offset would keep the loop from being vectorised.
    for j in range(h.shape[0]):
        out[j] = h[j] - costs[j]


@inner(fastmath=False)
def _terms(scores: Any, count: int, inverse: Any, state: Any) -> bool:
    """Turn the scores of a piece into terms relative to the row's maximum so far, `state[0]`.

    `state[1]` is then the factor that brings earlier sums to that maximum. `inverse` is 1 / eps, or 0 where nothing
    but the maximum is asked for. False if no bin of the piece takes part.
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
    """The costs of one point x (d,) to `count` of the points y (d, m)."""
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


@compiled()
def matrix_softmin(counter: Any, matrices: Any, which: Any, h: Any, inverse: Any, out: Any, total: Any) -> None:
    """Per problem b and row i: the largest score in `out[b, i]`, and the sum of exp relative to it in `total[b, i]`.

    matrices (K, n, m), of which problem b uses `which[b]`; h (B, m); inverse (B,); out, total (B, n).
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
    """Add to the scores at the centre of a box what they can gain on that of the best column within it."""
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
    start = 0
    while start + PIECE < count and largest(scores[start : start + PIECE], PIECE) != value:
        start += PIECE
    while scores[start] != value:
        start += 1
    return start


@inner(fastmath=False)
def scores_in_box(points: Any, y: Any, h: Any, count: int, metric: int, half: Any, scores: Any) -> int:
    """Write the scores at the centre of the box of points (rows, d), and its half widths; return the best column.

    -1 if no column takes part.
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
def keep_columns(y: Any, h: Any, count: int, bounds: Any, least: Any, near: Any, near_h: Any) -> int:
    """Copy the columns, in chunks, that reach `least` somewhere to `near`; return their number.

    y and `near` may have rows beyond d, which are copied with the others.
    """
    for j in range(count, count + CHUNK):
        bounds[j] = -np.inf
    found = 0
    for start in range(0, count, CHUNK):
        hits = np.int32(0)
        for j in range(CHUNK):
            hits += np.int32(bounds[start + j] >= least)
        if hits > 0:
            taken = min(CHUNK, count - start)
            for k in range(y.shape[0]):
                for j in range(taken):
                    near[k, found + j] = y[k, start + j]
            for j in range(taken):
                near_h[found + j] = h[start + j]
            found += taken
    return found


@inner(fastmath=False)
def select(
    points: Any, y: Any, h: Any, count: int, cutoff: Any, metric: int, bounds: Any, near: Any, near_h: Any
) -> int:
    """Copy those of the first columns that count for any of the points (rows, d) to `near`; return their number."""
    half = np.empty(points.shape[1], h.dtype)
    best = scores_in_box(points, y, h, count, metric, half, bounds)
    if best < 0:
        return 0
    least = bounds[best] - cutoff
    add_slack(y, best, half, metric, bounds[:count])
    return keep_columns(y, h, count, bounds, least, near, near_h)


@inner(fastmath={"reassoc", "contract", "nsz"})
def _pull(terms: Any, x_k: Any, y_k: Any, is_sign: bool, count: int) -> Any:
    """sum_j terms_j (x_k - y_kj), or with the sign of the difference."""
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
    """Bring the sums over earlier pieces to the new maximum by `factor`, and add those of terms and differences."""
    if metric == 1:
        for j in range(count):
            terms[j] = terms[j] / distances[j] if distances[j] > 0 else terms.dtype.type(0)
    for k in range(point.shape[0]):
        pull = _pull(terms, point[k], cloud[k, start : start + count], metric == 2, count)
        pulls[k] = pulls[k] * factor + pull


@compiled(seconds=3)
def points_rows(
    counter: Any, x: Any, y: Any, which_x: Any, which_y: Any, h: Any, inverse: Any, cutoff: Any, span: int,
    metric: int, out: Any, total: Any, a: Any, gradients: Any,
) -> None:  # fmt: skip
    """As `matrix_softmin`, for the distances of x (K, n, d) to y (L, d, m), by tasks of `span` rows.

    cutoff (B,) is infinite where all columns count; else a task selects its columns, and blocks of it among those.
    With gradients (B, n, d), and not (0, n, d), it writes s of the module above to them, for a (B, n) in float64,
    b = h and inverse above 0, and leaves `out` and `total`.
    """
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
        cloud, potential, held, taken = y[which_y[b]], h[b], m, m
        last = first + span if first + span < n else n
        if cutoff[b] < np.inf:
            taken = select(
                x[which_x[b], first:last], cloud, potential, m, cutoff[b], metric, bounds, near[0], near_h[0]
            )
        for i in range(first, last):
            if cutoff[b] < np.inf and i % ROWS == 0:
                points = x[which_x[b], i : min(i + ROWS, last)]
                held = select(points, near[0], near_h[0], taken, cutoff[b], metric, bounds, near[1], near_h[1])
                cloud, potential = near[1], near_h[1]
            point, added = x[which_x[b], i], h.dtype.type(0)
            state[0] = -np.inf
            for k in range(d):
                pulls[k] = 0.0
            for start in range(0, held, PIECE):
                count = held - start if held - start < PIECE else PIECE
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
    out, total = (np.empty((h.shape[0], rows.shape[-2]), h.dtype) for _ in range(2))
    run_on_threads(
        matrix_softmin,
        tasks(*out.T.shape),
        (matrices, which, h, inverse, out, total),
        work=Work("", h.size * len(out.T)),
    )
    return finished(out, total, shift, width).reshape(*batch, rows.shape[-2]).to(potential.dtype)


def shared(data: Tensor, own_axes: int, batch: torch.Size) -> tuple[np.ndarray, np.ndarray]:
    """The matrices (or clouds) that occur, one behind the other, and which of them each problem uses."""
    data = data.detach()
    leading, own = data.shape[:-own_axes], data.shape[-own_axes:]
    flat = data.reshape(leading.numel(), *own).contiguous()
    which = torch.arange(leading.numel(), device="cpu").reshape(leading).expand(batch).reshape(-1)
    return flat.numpy(), which.numpy()


def centred(
    potential: Tensor, epsilon: float | Tensor, batch: torch.Size, dtype: torch.dtype
) -> tuple[np.ndarray, Tensor, np.ndarray, Tensor]:
    """Potentials (B, m) with maximum 0 in the dtype of the costs, what was taken off (B, 1), 1 / eps (B,), eps (B, 1).

    1 / eps is 0 where it would be infinite: there the hard minimum is asked for.
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
    """-shift - largest score - eps log(sum), (B, n); +inf where no bin takes part."""
    value = -(torch.from_numpy(out).to(torch.float64) + shift)
    log = torch.from_numpy(total).to(torch.float64).clamp_(min=torch.finfo(torch.float64).tiny).log_()
    soft = width >= torch.finfo(torch.float32 if out.dtype == np.float32 else torch.float64).tiny
    value.sub_(torch.where(soft, log * width, 0.0))
    return value.masked_fill_(torch.from_numpy(out == -np.inf), torch.inf)
