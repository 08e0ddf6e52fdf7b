"""The sweeps of `rows` on a CPU: float32, vectorised, on all cores.

A row of 32k logits stays in a core's cache between reading and writing; in torch every elementwise operation goes
through memory once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
import torch
from jaxtyping import Float, Int
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic
from torch import Tensor

from otloss_llm.kernels.rows import CostRows, RowSums, Slopes

F32 = np.float32
LOG2_E = F32(1.4426950408889634)
# ln 2 in two parts; the first has so few bits that n * LN2_HIGH is exact.
LN2_HIGH, LN2_LOW = F32(0.693359375), F32(-2.12194440e-4)
BLOCK_ENTRIES = 2**16  # of logits read twice in a row: 256 KiB stay in a core's cache
ROUNDER = F32(1.5 * 2**23)  # float32 numbers of this size are whole
ONE_BITS = np.int32(0x3F800000)  # 1.0
SMALLEST = F32(-87.0)  # below, exp leaves the normal numbers of float32
# exp(r) = 1 + r + r^2 P(r) on [-ln 2 / 2, ln 2 / 2], P the minimax polynomial of Cephes' expf.
P0, P1, P2 = F32(1.9875691500e-4), F32(1.3981999507e-3), F32(8.3334519073e-3)
P3, P4, P5 = F32(4.1665795894e-2), F32(1.6666665459e-1), F32(5.0000001201e-1)


@intrinsic
def _float_of_bits(typing_context: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def _bits_of_float(typing_context: Any, number: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@njit(inline="always", fastmath={"contract"})
def _exp(x: Any) -> Any:
    """exp of x <= 0 in float32 to 1.2e-7, in operations that the compiler vectorises; 0 to exp(-87), NaN for NaN."""
    bounded = SMALLEST if x < SMALLEST else x
    shifted = bounded * LOG2_E + ROUNDER  # its last bits are the nearest whole number n
    n = shifted - ROUNDER
    r = bounded - n * LN2_HIGH
    r = r - n * LN2_LOW
    p = ((((P0 * r + P1) * r + P2) * r + P3) * r + P4) * r + P5
    power = _float_of_bits((_bits_of_float(shifted) << np.int32(23)) + ONE_BITS)  # 2^n
    y = (p * (r * r) + (r + F32(1.0))) * power
    return F32(0.0) if x <= SMALLEST else y


def _sweep(function: Any) -> Any:
    """Compile on first use, and keep the result on disk where there is a place that may be written to."""
    options: dict[str, Any] = {"parallel": True, "fastmath": {"contract", "nsz"}, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # "no locator available": a read-only installation without a home
        return njit(**options)(function)


@njit(inline="always")
def _spread(costs: Any, which: Any, c: Any) -> None:
    """The cost of each token, from that of each label: by itself, since a gather keeps a loop from being vectorised."""
    for t in range(c.shape[0]):
        c[t] = costs[which[t]]


@_sweep
def _softmax(z: Any, cost: Any, which: Any, top: Any, others: Any, others_cost: Any, block: int) -> None:
    """Each part of the vocabulary (axis 0 of the results) apart: its largest logit, and the sums relative to that."""
    vocab, tokens = z.shape
    parts = top.shape[0]
    with_cost = cost.shape[0] > 0
    for part in prange(parts):
        first, last = vocab * part // parts, vocab * (part + 1) // parts
        m, s, d = top[part], others[part], others_cost[part]
        new, block_s, block_d = np.empty(tokens, F32), np.empty(tokens, F32), np.empty(tokens, F32)
        c = np.empty(tokens, F32)
        m[:], s[:], d[:] = -np.inf, 0.0, 0.0
        for start in range(first, last, block):
            stop = min(start + block, last)
            new[:], block_s[:], block_d[:] = m, 0.0, 0.0
            for i in range(start, stop):
                row = z[i]
                for t in range(tokens):
                    new[t] = row[t] if row[t] > new[t] else new[t]
            for t in range(tokens):
                shift = F32(0.0) if new[t] == F32(-np.inf) else new[t]
                shrink = _exp(m[t] - shift)
                s[t] *= shrink
                d[t] *= shrink
                m[t] = new[t]
                new[t] = shift
            for i in range(start, stop):
                row = z[i]
                if with_cost:
                    _spread(cost[i], which, c)
                    for t in range(tokens):
                        e = _exp(row[t] - new[t])
                        block_s[t] += e
                        block_d[t] += e * c[t]
                else:
                    for t in range(tokens):
                        block_s[t] += _exp(row[t] - new[t])
            for t in range(tokens):
                s[t] += block_s[t]
                d[t] += block_d[t]


@_sweep
def _gradient(z: Any, top: Any, cost: Any, which: Any, a: Any, b: Any, transport: Any, parts: int) -> None:
    vocab, tokens = z.shape
    with_cost = cost.shape[0] > 0
    for part in prange(parts):
        c = np.empty(tokens, F32)
        for i in range(vocab * part // parts, vocab * (part + 1) // parts):
            row = z[i]
            if with_cost:
                _spread(cost[i], which, c)
                for t in range(tokens):
                    row[t] = _exp(row[t] - top[t]) * (a[t] + b[t] * (c[t] - transport[t]))
            else:
                for t in range(tokens):
                    row[t] = _exp(row[t] - top[t]) * a[t]


def softmax_rows(z: Float[Tensor, "rows columns"], label: Int[Tensor, " rows"], cost: CostRows | None) -> RowSums:
    """The sums of each row; leaves the logits in `z`, -inf at the label."""
    here = label >= 0
    column = label.clamp(min=0)
    positions = torch.arange(len(label))
    z_y = torch.where(here, z[positions, column], -torch.inf)
    z[positions[here], label[here]] = -torch.inf
    parts, block = _parts(z), max(1, BLOCK_ENTRIES // max(1, len(label)))
    top, others, others_cost = (z.new_empty(parts, len(label)) for _ in range(3))
    with _as_many_threads_as_torch():
        _softmax(_columns(z), *_arrays(cost, z), top.numpy(), others.numpy(), others_cost.numpy(), block)
    overall = torch.maximum(top.amax(0), z_y)
    shrink = (top - overall).nan_to_num_(nan=-torch.inf).exp_()
    others = (others * shrink).sum(0)
    # A logit that is NaN or +inf shows in its sum only.
    overall = torch.where(others.isfinite() & (overall < torch.inf), overall, torch.nan)
    if cost is None:
        return RowSums(overall, others, None, z_y, None)
    c_y = torch.where(here, cost.rows[cost.which, column], 0.0)
    return RowSums(overall, others, (others_cost * shrink).sum(0), z_y, c_y)


def gradient_rows(
    z: Float[Tensor, "rows columns"],
    top: Float[Tensor, " rows"],
    label: Int[Tensor, " rows"],
    cost: CostRows | None,
    slopes: Slopes,
) -> None:
    """Overwrite `z`, as `softmax_rows` left it, with the gradient in the logits."""
    nothing = torch.zeros_like(top)
    b = nothing if slopes.b is None else slopes.b
    transport = nothing if slopes.transport is None else slopes.transport
    vectors = [v.to(torch.float32).contiguous().numpy() for v in (slopes.a, b, transport)]
    with _as_many_threads_as_torch():
        _gradient(_columns(z), top.numpy(), *_arrays(None if slopes.b is None else cost, z), *vectors, _parts(z))
    here = label >= 0
    z[here.nonzero().squeeze(-1), label[here]] = slopes.at_label[here]


def _parts(z: Tensor) -> int:
    return max(1, min(4 * torch.get_num_threads(), z.shape[1]))


def _columns(z: Tensor) -> np.ndarray:
    assert z.T.is_contiguous()
    return z.T.numpy()


def _arrays(cost: CostRows | None, z: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Cost rows as the sweeps want them, a column each: none at all where no cost is asked for."""
    if cost is None:
        return np.empty((0, 0), dtype=np.float32), np.empty(0, dtype=np.uint32)
    return cost.rows.to(z.dtype).T.contiguous().numpy(), cost.which.numpy().astype(np.uint32)


_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def _as_many_threads_as_torch() -> Iterator[None]:
    # numba's layer of last resort ends the process when two threads are in it, and the number of threads is shared.
    with _ONE_AT_A_TIME:
        # torch and numba share one OpenMP, whose number of threads each of them sets: numba when it starts its own.
        of_torch, of_numba = torch.get_num_threads(), numba.get_num_threads()
        numba.set_num_threads(max(1, min(of_torch, numba.config.NUMBA_NUM_THREADS)))
        try:
            yield
        finally:
            numba.set_num_threads(of_numba)
            if torch.get_num_threads() != of_torch:
                torch.set_num_threads(of_torch)
