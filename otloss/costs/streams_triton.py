"""Soft minima and sums with plans, streamed through tiles of pairs by Triton kernels in float32.

With the potential h over the points or columns j, the first job is the soft minimum, and the others sum with the plan
P_ij = exp((a_i + h_j - C_ij) / eps), whose entries exist in registers alone:

    softmin    -eps log sum_j exp((h_j - C_ij) / eps)
    product    sum_j P_ij v_j           cost    sum_j P_ij C_ij           gradient    sum_j P_ij dC_ij / dx_i

All but the first give the row sums of P too. Three kernels compute C_ij:

    points     from differences: the axes of a row stay in registers for up to `MAX_AXES`, a loop over the axes for more
    dots       |x_i|^2 + |y_j|^2 - 2 x_i.y_j for points relative to their centre, or 1 - x_i.y_j, by matrix products
    matrix     entries that lie in memory row by row or column by column: neither is copied

Scores h - C keep the unit of the cost, and only differences of them are divided by epsilon. So their rounding is that
of the dense computation in float32, no offset of the points matters where differences are taken, and no epsilon
overflows. Bins that take no part have the score -1e38, since -inf - -inf would be NaN; NaN stays NaN.

Triton lays a tile of ROWS x COLUMNS out with one column, or COLUMNS / (32 warps) of them, for each thread. Sums and
maxima of points and matrices therefore stay two-dimensional, one for each thread and row, and are reduced once at the
end: a reduction inside the loop costs five shuffles a row and tile. The maximum changes once for every UNROLL tiles,
which makes 1 + 1 / UNROLL exponentials of a pair. Matrix products have several columns of a row in each thread, and
reduce every tile.

This module imports Triton, so it is imported late. On CPU tensors the kernels run in its interpreter
(TRITON_INTERPRET=1), for tests: it checks values, not races, and computes every product in full precision.

References: `otloss.costs.cost.softmin_in_torch` and `Cost.plan_gradients`.
"""

# mypy: disable-error-code="assignment"
# Tuples that grow, in kernels.

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import broadcast_shape

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheels for this system
    triton = tl = None

MAX_AXES = 8  # points of more axes do not fit the registers: 16 rows of 8 axes take 128 of 255
LOG2_E = 1 / math.log(2)


class Tile(NamedTuple):
    """The pairs of a program at a time, UNROLL tiles of them between two changes of the maximum, and its warps."""

    rows: int
    columns: int
    unroll: int
    warps: int


class Tiles(NamedTuple):
    """The tiles of the kernels, by what compiling for sm_90 and sm_80 shows; none was measured on a device.

    Attributes:
        few_rows, many_rows: rows of 32 columns in one warp, or of 128 in four, whose maxima and sums are reduced at the
            end. With 16 rows and up to three axes 167 registers, none spilled; 8 rows for more axes, or more sums.
        min_wide: columns from which four warps share a tile. One warp needs no shared memory.
        min_programs: where the rows give fewer programs, each reads part of the columns. 132 multiprocessors hold
            several.
        interpreted: for the interpreter, whose time grows with the number of operations on tiles.
        dots: rows, columns and axes of a matrix product, its warps, and how many loads are ahead, from Hopper on. Of
            up to 64 columns of sums they take 236 registers.
        dots_before: the same for older devices: 241 registers.
    """

    few_rows: int = 8
    many_rows: int = 16
    min_wide: int = 4096
    min_programs: int = 1024
    interpreted: Tile = Tile(64, 128, 1, 4)
    dots: tuple[int, int, int, int, int] = (64, 64, 32, 8, 2)
    dots_before: tuple[int, int, int, int, int] = (64, 32, 32, 8, 2)

    def dots_of(self, device: torch.device) -> tuple[int, int, int, int, int]:
        has_wgmma = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9
        return self.dots if has_wgmma else self.dots_before


TILES = Tiles()
# Three TF32 products are as accurate as float32 ones (a quarter of the time of "ieee"); one of them is not.
PRECISION = "tf32x3"


class Epsilon(NamedTuple):
    """Epsilon and log2(e) / epsilon, (...)."""

    epsilon: Tensor
    scale: Tensor

    @staticmethod
    def build(epsilon: float | Tensor, device: torch.device) -> Epsilon:
        wide = torch.as_tensor(epsilon, device=device).detach().double()
        largest = torch.finfo(torch.float32).max
        return Epsilon(wide.float(), (LOG2_E / wide).clamp(max=largest).float())


class Sums(NamedTuple):
    """What a job sums over the columns, and the row sums of the plan.

    In the gradients of one cloud by matrix products, the diagonal of the plan is in neither.
    """

    values: Float[Tensor, "*batch n columns"]
    of_rows: Float[Tensor, "*batch n"]


class Points:
    """The costs between two clouds in float32, by differences or by products of matrices.

    Args:
        x, y: (..., n, d) and (..., m, d), without a graph; of length one for "cosine".
        metric: one of `otloss.costs.points.METRICS`.
        is_one_cloud: whether y is x, so that C_ii = 0 for "cosine" too, without rounding.
    """

    def __init__(self, x: Tensor, y: Tensor, metric: str, *, is_one_cloud: bool) -> None:
        self.x, self.y, self.metric, self.is_one_cloud = x.detach(), y.detach(), metric, is_one_cloud
        self.shape = x.shape[-2], y.shape[-2]
        self.batch_shape = broadcast_shape(x.shape[:-2], y.shape[:-2])
        self.axes = x.shape[-1]
        # Distances of near points, of which gradients are made, need differences.
        self.by_dots = self.axes > MAX_AXES and metric in ("sqeuclidean", "cosine")

    @functools.cached_property
    def _centred(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The points relative to the centre of y, and their squared lengths; as they are for "cosine"."""
        x, y = self.x, self.y
        if self.metric == "cosine":
            unused = x.new_zeros(1)
            return x, y, unused, unused
        centre = y.double().mean(-2, keepdim=True)
        x, y = ((cloud.double() - centre).float() for cloud in (x, y))
        x_squares, y_squares = (cloud.double().square().sum(-1).float() for cloud in (x, y))
        return x, y, x_squares, y_squares

    @functools.cached_property
    def _columns_of_y(self) -> Tensor:
        """y (..., d, m) for a loop over the axes: neighbouring threads read neighbouring numbers."""
        return self.y.mT.contiguous()

    def run(self, job: str, launch: Launch, v: Tensor | None) -> Sums:
        if self.by_dots:
            return self._run_dots(job, launch, v)
        axes = self.axes if self.axes <= MAX_AXES else 0
        y = self.y if axes else self._columns_of_y
        columns = self.axes if job == "gradient" else 1 if v is None else v.shape[-1]
        kept = axes if axes and job == "gradient" else min(8, _power(columns))
        small = axes > 4 if job == "softmin" else axes > 3 or kept > 4
        tile = launch.tile(TILES.few_rows if small else TILES.many_rows, job, registers=axes)
        (x, x_batch), (y, y_batch) = launch.flat(self.x, 2), launch.flat(y, 2)
        steps = (self.axes, 1) if axes else (1, self.shape[1])
        return launch.start(
            _kernels(interpreted()).points, job, v, tile, columns=columns, kept=kept,
            tensors=(x, y), numbers=(self.axes, x_batch, y_batch, *steps),
            constants={"METRIC": self.metric, "AXES": axes, "ONE_CLOUD": self.is_one_cloud and self.metric == "cosine"},
        )  # fmt: skip

    def _run_dots(self, job: str, launch: Launch, v: Tensor | None) -> Sums:
        x, y, x_squares, y_squares = self._centred
        if job == "gradient":
            v = y
        rows, columns, block, warps, stages = TILES.dots_of(self.x.device)
        if interpreted():
            rows, columns, block = 64, 128, max(16, _power(self.axes))
        kept = min(64, max(16, _power(v.shape[-1]))) if v is not None else 16
        data = (launch.flat(x, 2), launch.flat(y, 2), launch.flat(x_squares, 1), launch.flat(y_squares, 1))
        sums = launch.start(
            _kernels(interpreted()).dots, job, v, Tile(rows, columns, 1, warps),
            columns=1 if v is None else v.shape[-1], kept=kept,
            tensors=tuple(tensor for tensor, _ in data), numbers=(self.axes, *(batch for _, batch in data)),
            constants={
                "METRIC": self.metric, "ONE_CLOUD": self.is_one_cloud, "BLOCK": block, "PRECISION": PRECISION,
                "num_stages": stages,
            },
        )  # fmt: skip
        if job != "gradient":
            return sums
        if self.metric == "cosine":
            return Sums(-sums.values, sums.of_rows)
        return Sums(2 * (x * sums.of_rows.unsqueeze(-1) - sums.values), sums.of_rows)


class Matrix:
    """The costs of a matrix (..., n, m) in float32, whose rows or whose columns lie in memory one after the other."""

    def __init__(self, matrix: Tensor) -> None:
        matrix = matrix.detach()
        self.by_rows = matrix.stride(-1) == 1 or matrix.stride(-2) != 1
        self.matrix = matrix if self.by_rows else matrix.mT
        self.shape, self.batch_shape = (matrix.shape[-2], matrix.shape[-1]), matrix.shape[:-2]

    def run(self, job: str, launch: Launch, v: Tensor | None) -> Sums:
        flat, batch = launch.flat(self.matrix, 2)
        row = self.matrix.shape[-1]
        kept = 1 if v is None else min(8, _power(v.shape[-1]))
        small = kept > 4 or (job != "softmin" and not self.by_rows)
        tile = launch.tile(TILES.few_rows if small else TILES.many_rows, job, registers=1)
        return launch.start(
            _kernels(interpreted()).matrix, job, v, tile, columns=1 if v is None else v.shape[-1], kept=kept,
            tensors=(flat,), numbers=(batch, *((row, 1) if self.by_rows else (1, row))),
            constants={"AXIS": 1 if self.by_rows else 0}, outputs_lie_in_columns=not self.by_rows,
        )  # fmt: skip


def softmin(
    costs: Points | Matrix, potential: Float[Tensor, "*batch m"], epsilon: Epsilon
) -> Float[Tensor, "*batch n"]:
    """Return the soft minimum in the dtype of the potential, +inf in rows without a bin that takes part."""
    batch = broadcast_shape(costs.batch_shape, potential.shape[:-1], epsilon.scale.shape)
    h, shift = _in_float32(potential)
    launch = Launch(costs.shape, batch, epsilon, h, h)
    values = costs.run("softmin", launch, None).values.squeeze(-1)
    return values if shift is None else values.to(potential.dtype) - shift


def plan_sums(
    costs: Points | Matrix,
    job: str,
    a: Float[Tensor, "*batch n"],
    h: Float[Tensor, "*batch m"],
    epsilon: Epsilon,
    v: Float[Tensor, "*batch m columns"] | None = None,
) -> Sums:
    """Return the sums of a job with the plan P_ij = exp((a_i + h_j - C_ij) / eps), in float32.

    a and h are -inf at bins without mass. `v` belongs to the job "product" and has the values of the columns.
    """
    leading = () if v is None else v.shape[:-2]
    batch = broadcast_shape(costs.batch_shape, a.shape[:-1], h.shape[:-1], epsilon.scale.shape, leading)
    single, shift = _in_float32(h)
    a = (a if shift is None else a + shift).float()
    return costs.run(job, Launch(costs.shape, batch, epsilon, single, a), v)


def _in_float32(potential: Tensor) -> tuple[Tensor, Tensor | None]:
    """The potential in float32, less its maximum where float64 has more digits: what matters is near the maximum."""
    potential = potential.detach()
    if potential.dtype != torch.float64:
        return potential.float(), None
    shift = potential.amax(-1, keepdim=True)
    shift = shift.masked_fill(shift == -torch.inf, 0.0)
    return (potential - shift).float(), shift


@dataclass(frozen=True)
class Launch:
    """One launch: the sizes (outputs, terms of a sum), the problems, and the potentials a and h in float32."""

    shape: tuple[int, int]
    batch: torch.Size
    epsilon: Epsilon
    h: Tensor
    a: Tensor

    def flat(self, tensor: Tensor, own_axes: int) -> tuple[Tensor, int]:
        """Return the data of the problems in a row, and the step from one to the next: 0 where they share it."""
        leading, own = tensor.shape[: tensor.dim() - own_axes], tensor.shape[tensor.dim() - own_axes :]
        if leading.numel() == 1:
            return tensor.reshape(own).contiguous(), 0
        if leading != self.batch:
            tensor = tensor.expand(*self.batch, *own)
        return tensor.reshape(self.batch.numel(), *own).contiguous(), own.numel()

    def tile(self, rows: int, job: str, *, registers: int) -> Tile:
        """Return the tile of points and matrices; with a loop over the axes (no registers) without UNROLL."""
        if interpreted():
            return TILES.interpreted
        wide = max(self.shape) >= TILES.min_wide
        unroll = 4 if job == "softmin" and registers else 1
        return Tile(rows, 128 if wide else 32, unroll, 4 if wide else 1)

    def start(
        self, kernel: Any, job: str, v: Tensor | None, tile: Tile, *, columns: int, kept: int,
        tensors: tuple[Tensor, ...], numbers: tuple[int, ...], constants: dict[str, Any],
        outputs_lie_in_columns: bool = False,
    ) -> Sums:  # fmt: skip
        """Launch a kernel with the arguments that all of them share, and return the sums of all parts of the columns.

        A program has a block of outputs of one problem, one part (`span`) of the terms, and `kept` of the columns of v.
        """
        (n, m), problems = self.shape, self.batch.numel()
        (h, h_batch), (a, a_batch) = self.flat(self.h, 1), self.flat(self.a, 1)
        (scale, scale_batch), (width, _) = (self.flat(t, 0) for t in (self.epsilon.scale, self.epsilon.epsilon))
        values, v_batch = (h, 0) if v is None else self.flat(v.float(), 2)
        outputs, terms = (tile.columns, tile.rows) if outputs_lie_in_columns else (tile.rows, tile.columns)
        blocks, groups, step = -(-n // outputs), -(-columns // kept), terms * tile.unroll
        parts = min(-(-m // (4 * step)), TILES.min_programs // max(1, problems * blocks * groups))
        span = -(-m // (max(1, parts) * step)) * step
        parts = -(-m // span) if m else 1
        out = h.new_empty(problems, parts, n, columns)
        sums = h.new_empty((problems, parts, n) if job != "softmin" else 1)
        if out.numel():
            with _on(h.device):
                kernel[(problems * parts * blocks, groups)](
                    *tensors, h, a, values, scale, width, out, sums, n, m, *numbers,
                    h_batch, a_batch, v_batch, scale_batch, columns, blocks, parts, span,
                    JOB=job, ROWS=tile.rows, COLUMNS=tile.columns, UNROLL=tile.unroll, KEPT=kept, **constants,
                    num_warps=tile.warps, enable_fp_fusion=True,
                )  # fmt: skip
        return self._joined(job, out, sums)

    def _joined(self, job: str, out: Tensor, sums: Tensor) -> Sums:
        if job == "softmin":
            values = out[:, 0]
            if out.shape[1] > 1:
                smallest = out.amin(1)
                smallest = smallest.masked_fill(smallest == torch.inf, 0.0)
                width = self.epsilon.epsilon.expand(self.batch).reshape(-1, 1, 1)
                values = smallest - width * ((smallest.unsqueeze(1) - out) / width.unsqueeze(1)).exp().sum(1).log()
            return Sums(values.reshape(*self.batch, *values.shape[1:]), sums)
        values, of_rows = out.sum(1), sums.sum(1)
        return Sums(values.reshape(*self.batch, *values.shape[1:]), of_rows.reshape(*self.batch, *of_rows.shape[1:]))


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _on(device: torch.device) -> Any:
    """Triton launches on the current device, whatever device the tensors are on; exponents may be -inf, as on a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else np.errstate(over="ignore")


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels."""
    if hasattr(triton, "knobs"):
        return bool(triton.knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET") == "1"


def is_usable(device: torch.device) -> bool:
    """Return whether the kernels run on tensors of this device here."""
    return triton is not None and (device.type == "cuda" or (device.type == "cpu" and interpreted()))


# ---- kernels ---------------------------------------------------------------------------------------------------------
# Program numbers are int64 before they meet a stride. Where `columns` is no multiple of KEPT, the last column is summed
# and stored again, and all groups of columns store the same row sums. Sums and maxima are spelled `tl.reduce`: whether
# `tl.sum` is compiled or interpreted is settled when Triton is first imported, by whoever does that.


def _points(  # type: ignore[no-untyped-def]
    x, y, h, a, v, scale, width, out, sums, n, m, d, x_batch, y_batch, y_point, y_axis,
    h_batch, a_batch, v_batch, scale_batch, columns, blocks, parts, span,
    JOB: tl.constexpr, METRIC: tl.constexpr, AXES: tl.constexpr, ONE_CLOUD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, UNROLL: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    program, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, part = program // (blocks * parts), program // blocks % parts
    i = program % blocks * ROWS + tl.arange(0, ROWS)
    is_row = i < n
    x += b * x_batch + i * d
    y += b * y_batch
    h += b * h_batch
    v += b * v_batch
    factor = tl.load(scale + b * scale_batch)
    rows = ()
    for k in tl.static_range(AXES):
        rows = rows + (tl.load(x + k, mask=is_row, other=0.0)[:, None],)  # noqa: RUF005 - what Triton compiles
    if JOB != "softmin":
        own = tl.load(a + b * a_batch + i, mask=is_row, other=-1e38)
        own = tl.where(own < -1e38, -1e38, own)[:, None]
    top = tl.full((ROWS, COLUMNS), -1e38, tl.float32)
    total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    kept = ()
    for _ in tl.static_range(KEPT):
        kept = kept + (tl.full((ROWS, COLUMNS), 0.0, tl.float32),)  # noqa: RUF005
    first = part * span
    for start in range(first, tl.minimum(first + span, m), COLUMNS * UNROLL):
        newest = top
        scores = ()
        for u in tl.static_range(UNROLL):
            j = start + u * COLUMNS + tl.arange(0, COLUMNS)
            is_column = j < m
            potential = tl.load(h + j, mask=is_column, other=-1e38)
            potential = tl.where(potential < -1e38, -1e38, potential)[None, :]
            cost = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
            aparts = ()
            if AXES > 0:
                for k in tl.static_range(AXES):
                    y_k = tl.load(y + j * y_point + k * y_axis, mask=is_column, other=0.0)[None, :]
                    if METRIC == "cosine":
                        cost += rows[k] * y_k
                        aparts = aparts + (-y_k,)  # noqa: RUF005
                    else:
                        apart = rows[k] - y_k
                        cost += tl.abs(apart) if METRIC == "l1" else apart * apart
                        aparts = aparts + (apart,)  # noqa: RUF005
            else:
                for k in range(d):
                    x_k = tl.load(x + k, mask=is_row, other=0.0)[:, None]
                    y_k = tl.load(y + j * y_point + k * y_axis, mask=is_column, other=0.0)[None, :]
                    apart = x_k - y_k
                    cost += tl.abs(apart) if METRIC == "l1" else apart * apart
            if METRIC == "euclidean":
                cost = tl.sqrt(cost)
            if METRIC == "cosine":
                cost = tl.minimum(tl.maximum(1.0 - cost, 0.0), 2.0)
                if ONE_CLOUD:
                    cost = tl.where(i[:, None] == j[None, :], 0.0, cost)
            if JOB == "softmin":
                score = potential - cost
                newest = tl.maximum(newest, score)
                scores = scores + (score,)  # noqa: RUF005
            else:
                plan = tl.exp2((potential - cost + own) * factor)
                total += plan
                force = plan
                if JOB == "gradient":
                    if METRIC == "sqeuclidean":
                        force = 2.0 * plan
                    if METRIC == "euclidean":
                        force = tl.where(cost > 0.0, plan / tl.where(cost > 0.0, cost, 1.0), 0.0)
                    if ONE_CLOUD:
                        force = tl.where(i[:, None] == j[None, :], 0.0, plan)
                added = ()
                for q in tl.static_range(KEPT):
                    if JOB == "cost":
                        term = plan * cost
                    if JOB == "product":
                        c = tl.minimum(group * KEPT + q, columns - 1)
                        term = plan * tl.load(v + j * columns + c, mask=is_column, other=0.0)[None, :]
                    if JOB == "gradient":
                        if AXES > 0:
                            apart = aparts[q]
                        else:
                            k = tl.minimum(group * KEPT + q, d - 1)
                            x_k = tl.load(x + k, mask=is_row, other=0.0)[:, None]
                            y_k = tl.load(y + j * y_point + k * y_axis, mask=is_column, other=0.0)[None, :]
                            apart = x_k - y_k
                        if METRIC == "l1":
                            term = tl.where(apart > 0.0, force, tl.where(apart < 0.0, -force, 0.0))
                        else:
                            term = force * apart
                    added = added + (kept[q] + term,)  # noqa: RUF005
                kept = added
        if JOB == "softmin":
            total = total * tl.exp2((top - newest) * factor)
            for u in tl.static_range(UNROLL):
                total += tl.exp2((scores[u] - newest) * factor)
            top = newest
    place = (b * parts + part) * n + i
    if JOB == "softmin":
        largest = tl.reduce(top, 1, tl.standard._elementwise_max)
        total = tl.reduce(total * tl.exp2((top - largest[:, None]) * factor), 1, tl.standard._sum_combine)
        value = -largest - tl.load(width + b * scale_batch) * 0.6931471805599453 * tl.log2(total)
        tl.store(out + place, tl.where((largest < -5e37) & (total == total), float("inf"), value), mask=is_row)
    else:
        for q in tl.static_range(KEPT):
            c = tl.minimum(group * KEPT + q, columns - 1)
            tl.store(out + place * columns + c, tl.reduce(kept[q], 1, tl.standard._sum_combine), mask=is_row)
        tl.store(sums + place, tl.reduce(total, 1, tl.standard._sum_combine), mask=is_row)


def _dots(  # type: ignore[no-untyped-def]
    x, y, x_squares, y_squares, h, a, v, scale, width, out, sums, n, m, d, x_batch, y_batch, x_square_batch,
    y_square_batch, h_batch, a_batch, v_batch, scale_batch, columns, blocks, parts, span,
    JOB: tl.constexpr, METRIC: tl.constexpr, ONE_CLOUD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, part = program // (blocks * parts), program // blocks % parts
    begin_of_rows = (program % blocks * ROWS).to(tl.int32)  # 32 bits within a problem, but for the places of points
    i = begin_of_rows + tl.arange(0, ROWS)
    is_row = i < n
    x += b * x_batch + program % blocks * ROWS * d
    y += b * y_batch
    h += b * h_batch
    v += b * v_batch
    factor = tl.load(scale + b * scale_batch)
    axis = tl.arange(0, BLOCK)
    row_places, column_places = tl.arange(0, ROWS)[:, None] * d, tl.arange(0, COLUMNS)[:, None] * d  # in 32 bits
    if METRIC == "sqeuclidean":
        own_square = tl.load(x_squares + b * x_square_batch + i, mask=is_row, other=0.0)[:, None]
        y_squares += b * y_square_batch
    if JOB != "softmin":
        own = tl.load(a + b * a_batch + i, mask=is_row, other=-1e38)
        own = tl.where(own < -1e38, -1e38, own)[:, None]
    top = tl.full((ROWS,), -1e38, tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    if JOB == "product" or JOB == "gradient":
        kept = tl.full((ROWS, KEPT), 0.0, tl.float32)
        c = group * KEPT + tl.arange(0, KEPT)
    if JOB == "cost":
        kept = tl.full((ROWS,), 0.0, tl.float32)
    first = (part * span).to(tl.int32)
    y += part * span * d
    for start in range(first, tl.minimum(first + span, m), COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        is_column = j < m
        product = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for begin in range(0, d, BLOCK):
            k = begin + axis
            x_k = tl.load(x + (row_places + k[None, :]), mask=is_row[:, None] & (k < d)[None, :], other=0.0)
            y_k = tl.load(y + (column_places + k[None, :]), mask=is_column[:, None] & (k < d)[None, :], other=0.0)
            product = tl.dot(x_k, tl.trans(y_k), product, input_precision=PRECISION)
        y += COLUMNS * d
        if METRIC == "sqeuclidean":
            squares = tl.load(y_squares + j, mask=is_column, other=0.0)[None, :]
            cost = tl.maximum(own_square + squares - 2.0 * product, 0.0)
        else:
            cost = tl.minimum(tl.maximum(1.0 - product, 0.0), 2.0)
        if ONE_CLOUD:
            cost = tl.where(i[:, None] == j[None, :], 0.0, cost)
        potential = tl.load(h + j, mask=is_column, other=-1e38)
        score = tl.where(potential < -1e38, -1e38, potential)[None, :] - cost
        if JOB == "softmin":
            newest = tl.maximum(top, tl.reduce(score, 1, tl.standard._elementwise_max))
            terms = tl.exp2((score - newest[:, None]) * factor)
            total = total * tl.exp2((top - newest) * factor) + tl.reduce(terms, 1, tl.standard._sum_combine)
            top = newest
        else:
            plan = tl.exp2((score + own) * factor)
            if JOB == "gradient" and ONE_CLOUD:  # nothing pulls a point to itself: in the sums that would not cancel
                plan = tl.where(i[:, None] == j[None, :], 0.0, plan)
            total += tl.reduce(plan, 1, tl.standard._sum_combine)
            if JOB == "product" or JOB == "gradient":
                is_value = is_column[:, None] & (c < columns)[None, :]
                values = tl.load(v + j[:, None] * columns + c[None, :], mask=is_value, other=0.0)
                kept = tl.dot(plan, values, kept, input_precision=PRECISION)
            else:
                kept += tl.reduce(plan * cost, 1, tl.standard._sum_combine)
    place = (b * parts + part) * n + i
    if JOB == "softmin":
        value = -top - tl.load(width + b * scale_batch) * 0.6931471805599453 * tl.log2(total)
        tl.store(out + place, tl.where((top < -5e37) & (total == total), float("inf"), value), mask=is_row)
    else:
        if JOB == "product" or JOB == "gradient":
            tl.store(out + place[:, None] * columns + c[None, :], kept, mask=is_row[:, None] & (c < columns)[None, :])
        else:
            tl.store(out + place, kept, mask=is_row)
        tl.store(sums + place, total, mask=is_row)


def _matrix(  # type: ignore[no-untyped-def]
    costs, h, a, v, scale, width, out, sums, n, m, cost_batch, cost_row, cost_column,
    h_batch, a_batch, v_batch, scale_batch, columns, blocks, parts, span,
    JOB: tl.constexpr, AXIS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """i are the outputs and j the terms; the columns of a tile, along AXIS 1, are neighbours in memory."""
    OUTPUTS: tl.constexpr = ROWS if AXIS == 1 else COLUMNS
    TERMS: tl.constexpr = COLUMNS if AXIS == 1 else ROWS
    program, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, part = program // (blocks * parts), program // blocks % parts
    i = program % blocks * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = i < n
    costs += b * cost_batch
    h += b * h_batch
    v += b * v_batch
    factor = tl.load(scale + b * scale_batch)
    if JOB != "softmin":
        own = tl.load(a + b * a_batch + i, mask=is_output, other=-1e38)
        own = tl.expand_dims(tl.where(own < -1e38, -1e38, own), AXIS)
    # In a tile of columns, each thread has all terms of its column: it sums them at once, and holds one number.
    STATE: tl.constexpr = (ROWS, COLUMNS) if AXIS == 1 else (1, COLUMNS)
    top = tl.full(STATE, -1e38, tl.float32)
    total = tl.full(STATE, 0.0, tl.float32)
    kept = ()
    for _ in tl.static_range(KEPT):
        kept = kept + (tl.full(STATE, 0.0, tl.float32),)  # noqa: RUF005
    place_of_output, mask_of_output = tl.expand_dims(i * cost_row, AXIS), tl.expand_dims(is_output, AXIS)
    first = part * span
    for start in range(first, tl.minimum(first + span, m), TERMS * UNROLL):
        newest = top
        scores = ()
        for u in tl.static_range(UNROLL):
            j = start + u * TERMS + tl.arange(0, TERMS)
            is_term = j < m
            potential = tl.load(h + j, mask=is_term, other=-1e38)
            potential = tl.expand_dims(tl.where(potential < -1e38, -1e38, potential), 1 - AXIS)
            inside = mask_of_output & tl.expand_dims(is_term, 1 - AXIS)
            cost = tl.load(costs + place_of_output + tl.expand_dims(j * cost_column, 1 - AXIS), mask=inside, other=0.0)
            score = potential - cost
            if JOB == "softmin":
                scores = scores + (score,)  # noqa: RUF005
                if AXIS == 0:
                    score = tl.expand_dims(tl.reduce(score, 0, tl.standard._elementwise_max), 0)
                newest = tl.maximum(newest, score)
            else:
                plan = tl.exp2((score + own) * factor)
                added = ()
                for q in tl.static_range(KEPT):
                    if JOB == "cost":
                        term = plan * cost
                    else:
                        c = tl.minimum(group * KEPT + q, columns - 1)
                        value = tl.load(v + j * columns + c, mask=is_term, other=0.0)
                        term = plan * tl.expand_dims(value, 1 - AXIS)
                    if AXIS == 0:
                        term = tl.expand_dims(tl.reduce(term, 0, tl.standard._sum_combine), 0)
                    added = added + (kept[q] + term,)  # noqa: RUF005
                kept = added
                if AXIS == 0:
                    plan = tl.expand_dims(tl.reduce(plan, 0, tl.standard._sum_combine), 0)
                total += plan
        if JOB == "softmin":
            total = total * tl.exp2((top - newest) * factor)
            for u in tl.static_range(UNROLL):
                term = tl.exp2((scores[u] - newest) * factor)
                if AXIS == 0:
                    term = tl.expand_dims(tl.reduce(term, 0, tl.standard._sum_combine), 0)
                total += term
            top = newest
    place = (b * parts + part) * n + i
    if JOB == "softmin":
        largest = tl.reduce(top, AXIS, tl.standard._elementwise_max)
        total *= tl.exp2((top - tl.expand_dims(largest, AXIS)) * factor)
        total = tl.reduce(total, AXIS, tl.standard._sum_combine)
        value = -largest - tl.load(width + b * scale_batch) * 0.6931471805599453 * tl.log2(total)
        tl.store(out + place, tl.where((largest < -5e37) & (total == total), float("inf"), value), mask=is_output)
    else:
        for q in tl.static_range(KEPT):
            c = tl.minimum(group * KEPT + q, columns - 1)
            tl.store(out + place * columns + c, tl.reduce(kept[q], AXIS, tl.standard._sum_combine), mask=is_output)
        tl.store(sums + place, tl.reduce(total, AXIS, tl.standard._sum_combine), mask=is_output)


class _Kernels(NamedTuple):
    points: Any
    dots: Any
    matrix: Any


@functools.cache
def _kernels(interpreted: bool) -> _Kernels:
    """The kernels, compiled or for the interpreter: `triton.jit` looks itself, the argument keeps the two apart."""
    jit: Callable[[Any], Any] = triton.jit
    return _Kernels(jit(_points), jit(_dots), jit(_matrix))
