"""The sweeps of `rows` as Triton kernels: any of float32, bfloat16 and float16, row-major, in float32 arithmetic.

Notation: as in `rows`; m, s, d are the running maximum and the sums relative to it, over blocks of columns.

    m' = max(m, max z)    s' = s exp(m - m') + exp(z - m')    d' = d exp(m - m') + exp(z - m') c
    w' = (w + (m - m') s) exp(m - m') + exp(z - m') (z - m'), the sum that the entropy needs, where it is asked for

The first sweep reads logits and costs once and writes nothing but a few numbers a row; the second reads them again and
puts the gradient in the place of the logits. On an H100 they take 1.3 to 1.7 times as long as its memory needs for 2
bytes a logit in the first sweep, 4 in the second, and the costs, which rows of one label find in the cache when they
run side by side.

This is the only module that imports Triton. On CPU tensors the kernels run in its interpreter (TRITON_INTERPRET=1),
for tests: it checks values, not races.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss_llm.kernels.rows import CostRows, GradientCoefficients, RowSums

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheels for this system
    triton = tl = None

# 256 threads with 16 columns each: two 16-byte loads of 16-bit logits a thread and two of costs. Compiled for sm_90
# the first sweep takes 80 registers (8192 columns: 158) and the second 48, none spilled: 3 rows share a multiprocessor,
# with 48 KiB of loads under way, where 25 KiB hide the memory's latency. A vocabulary of 128256 is 32 blocks.
BLOCK = 4096
WARPS = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_usable(device: torch.device, dtype: torch.dtype) -> None:
    """Raise unless the kernels run on such tensors here, saying what would."""
    if triton is None:
        raise ImportError(
            'impl="triton" needs Triton, which builds of torch for CUDA install on Linux; install one of them, or use '
            'impl="chunked".'
        )
    if dtype == torch.float64:
        raise ValueError(
            'impl="triton" got torch.float64, expected float32, bfloat16 or float16: its arithmetic is float32; '
            'use impl="chunked".'
        )
    if device.type == "cpu" and not _interpreted():
        raise ValueError(
            'impl="triton" got device cpu, expected a CUDA tensor; move the tensors, set TRITON_INTERPRET=1 (slow, for '
            'tests), or use impl="chunked".'
        )


def softmax_rows(
    z: Float[Tensor, "rows columns"], label: Int[Tensor, " rows"], cost: CostRows | None, entropy: bool = False
) -> RowSums:
    """The sums of each row; leaves `z` as it is."""
    rows, columns = z.shape
    sums = z.new_empty(6 if entropy else 5 if cost is not None else 3, rows, dtype=torch.float32)
    if rows:
        arguments = _first_arguments(z, label, cost)
        with _on(z.device):
            _kernels(_interpreted()).softmax[(rows,)](
                *arguments, sums, columns, rows, **_options(columns, cost, entropy)
            )
    top, others, z_y = sums[:3]
    logit = sums[5] if entropy else None
    if cost is None:
        return RowSums(top, others, None, z_y, None, logit)
    return RowSums(top, others, sums[3], z_y, sums[4], logit)


def gradient_rows(
    z: Float[Tensor, "rows columns"],
    top: Float[Tensor, " rows"],
    label: Int[Tensor, " rows"],
    cost: CostRows | None,
    coefficients: GradientCoefficients,
) -> None:
    """Overwrite `z`, as `softmax_rows` left it, with the gradient in the logits, in its own dtype."""
    rows, columns = z.shape
    if not rows:
        return
    if coefficients.b is None or coefficients.transport is None:
        cost = None
    unused = coefficients.a
    vectors = [
        top,
        coefficients.a,
        coefficients.at_label,
        *((coefficients.b, coefficients.transport) if cost is not None else (unused, unused)),
        unused if coefficients.h is None else coefficients.h,
    ]
    arguments = (
        *_first_arguments(z, label, cost),
        *(v.to(torch.float32).contiguous() for v in vectors if v is not None),
    )
    options = _options(columns, cost, coefficients.h is not None)
    # Rows vary fastest: neighbours have one label, and read the same block of its costs at the same time.
    grid = (rows, -(-columns // options["BLOCK"]))
    with _on(z.device):
        _kernels(_interpreted()).gradient[grid](*arguments, columns, **options)


def _first_arguments(z: Tensor, label: Tensor, cost: CostRows | None) -> tuple[Any, ...]:
    """The first arguments of both kernels; without costs, tensors that are not read take their place."""
    assert z.stride(1) == 1
    assert z.dtype in DTYPES
    if cost is None:
        return z, z.stride(0), label.contiguous(), z, label, 0, 0
    return z, z.stride(0), label.contiguous(), cost.rows, cost.which.contiguous(), *cost.rows.stride()


def _options(columns: int, cost: CostRows | None, entropy: bool) -> dict[str, Any]:
    block = min(BLOCK, max(16, 1 << (columns - 1).bit_length()))
    warps = min(WARPS, max(1, block // 512))
    # Contraction to fused multiply-adds is the default so far, but Triton 3.9 warns unless it is asked for.
    asked = {"WITH_COST": cost is not None, "WITH_ENTROPY": entropy}
    return asked | {"BLOCK": block, "num_warps": warps, "enable_fp_fusion": True}


def _on(device: torch.device) -> Any:
    """Triton launches on the current device, whatever device the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _interpreted() -> bool:
    if hasattr(triton, "knobs"):
        return bool(triton.knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET") == "1"


# ---- kernels ---------------------------------------------------------------------------------------------------------
# Row numbers and column offsets are int64 before they meet a stride: 16384 rows of 131072 columns are 2^31 entries.
# Sums and maxima are spelled `tl.reduce`: whether `tl.sum` is compiled or interpreted is settled when Triton is first
# imported, by whoever does that.


def _softmax(  # type: ignore[no-untyped-def]
    z, z_stride, label, costs, which, cost_stride, cost_step, sums, columns, rows,
    WITH_COST: tl.constexpr, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(label + row)
    z += row * z_stride
    z_y = tl.load(z + y, mask=y >= 0, other=-float("inf")).to(tl.float32)
    if WITH_COST:
        costs += tl.load(which + row).to(tl.int64) * cost_stride
    top = z_y
    # One sum per place in the block, added up in the end: fewer roundings, and only the maximum is reduced in the loop.
    s = tl.full((BLOCK,), 0.0, tl.float32)
    d = tl.full((BLOCK,), 0.0, tl.float32)
    w = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        x = tl.load(z + i, mask=i < columns, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.reduce(x, 0, tl.standard._elementwise_max))
        shift = tl.where(new == -float("inf"), 0.0, new)
        shrink = tl.exp(top - shift)
        e = tl.where(i == y, 0.0, tl.exp(x - shift))
        if WITH_ENTROPY:
            step = tl.where(top == -float("inf"), 0.0, top - shift)
            w = (w + step * s) * shrink + e * tl.where(e == 0.0, 0.0, x - shift)
        s = s * shrink + e
        if WITH_COST:
            c = tl.load(costs + i * cost_step, mask=i < columns, other=0.0).to(tl.float32)
            d = d * shrink + e * c
        top = new
    others = tl.reduce(s, 0, tl.standard._sum_combine)
    # Maxima pass over NaN. In the sum NaN shows, and +inf too, since inf - inf is NaN; only the label is not in it.
    broken = (others != others) | (z_y != z_y)
    tl.store(sums + row, tl.where(broken, float("nan"), top))
    tl.store(sums + rows + row, others)
    tl.store(sums + 2 * rows + row, z_y)
    if WITH_ENTROPY:
        tl.store(sums + 5 * rows + row, tl.reduce(w, 0, tl.standard._sum_combine))
    if WITH_COST:
        tl.store(sums + 3 * rows + row, tl.reduce(d, 0, tl.standard._sum_combine))
        tl.store(sums + 4 * rows + row, tl.load(costs + y * cost_step, mask=y >= 0, other=0.0).to(tl.float32))


def _gradient(  # type: ignore[no-untyped-def]
    z, z_stride, label, costs, which, cost_stride, cost_step, top, a, at_label, b, transport, h, columns,
    WITH_COST: tl.constexpr, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z += row * z_stride + i
    x = tl.load(z, mask=i < columns, other=-float("inf")).to(tl.float32)
    shift = tl.load(top + row)
    shift = tl.where(shift == -float("inf"), 0.0, shift)
    factor = tl.load(a + row)
    if WITH_COST:
        costs += tl.load(which + row).to(tl.int64) * cost_stride
        c = tl.load(costs + i * cost_step, mask=i < columns, other=0.0).to(tl.float32)
        factor = factor + tl.load(b + row) * (c - tl.load(transport + row))
    if WITH_ENTROPY:
        factor = factor - tl.load(h + row) * tl.where(x == -float("inf"), 0.0, x - shift)
    gradient = tl.where(i == tl.load(label + row), tl.load(at_label + row), tl.exp(x - shift) * factor)
    tl.store(z, gradient.to(z.dtype.element_ty), mask=i < columns)


class _Kernels(NamedTuple):
    softmax: Any
    gradient: Any


@functools.cache
def _kernels(interpreted: bool) -> _Kernels:
    """Both kernels, compiled or for the interpreter: `triton.jit` looks itself, the argument keeps the two apart."""
    jit: Callable[[Any], Any] = triton.jit
    return _Kernels(jit(_softmax), jit(_gradient))
