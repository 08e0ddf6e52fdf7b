"""How kernels are compiled, and elementary functions that compilers can vectorise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from otloss._numba import notices as notices  # registers its listener
from otloss._numba.cache import KernelCache

F32, F64 = np.float32, np.float64
LOG2_E_32, LOG2_E_64 = F32(1.4426950408889634), F64(1.4426950408889634)
# ln 2 in two parts; the first has so few bits that n * LN2_HIGH is exact.
LN2_HIGH_32, LN2_LOW_32 = F32(0.693359375), F32(-2.12194440e-4)
LN2_HIGH_64, LN2_LOW_64 = F64(6.93147180369123816490e-01), F64(1.90821492927058770002e-10)
ROUNDER_32, ROUNDER_64 = F32(1.5 * 2**23), F64(1.5 * 2**52)  # numbers of this size are whole
ONE_BITS_32, ONE_BITS_64 = np.int32(0x3F800000), np.int64(0x3FF0000000000000)  # 1.0
SMALLEST_32, SMALLEST_64 = F32(-87.0), F64(-708.0)  # below, exp leaves the normal numbers
# exp(r) = 1 + r + r^2 P(r) on [-ln 2 / 2, ln 2 / 2], P the minimax polynomial of Cephes' expf.
P0, P1, P2 = F32(1.9875691500e-4), F32(1.3981999507e-3), F32(8.3334519073e-3)
P3, P4, P5 = F32(4.1665795894e-2), F32(1.6666665459e-1), F32(5.0000001201e-1)
# Taylor's coefficients 1 / k!: at |r| <= ln 2 / 2 the first one left out, 1 / 14!, adds 4e-18.
Q13, Q12, Q11, Q10 = F64(1 / 6227020800), F64(1 / 479001600), F64(1 / 39916800), F64(1 / 3628800)
Q9, Q8, Q7, Q6 = F64(1 / 362880), F64(1 / 40320), F64(1 / 5040), F64(1 / 720)
Q5, Q4, Q3 = F64(1 / 120), F64(1 / 24), F64(1 / 6)
SQRT_HALF_BITS, ROUNDER_BITS_64 = np.int64(0x3FE6A09E667F3BCD), np.int64(0x4338000000000000)
L3, L5, L7, L9, L11 = F64(1 / 3), F64(1 / 5), F64(1 / 7), F64(1 / 9), F64(1 / 11)
L13, L15, L17, L19 = F64(1 / 13), F64(1 / 15), F64(1 / 17), F64(1 / 19)


def compiled(*, seconds: int = 1, **options: Any) -> Callable[[Any], Any]:
    """`numba.njit` with the options of this library: compiled at the first call for each dtype, and kept on disk.

    `seconds` is about how long compilation takes on one core, for the log line that announces it. Floating-point sums
    are reordered only where `fastmath=` asks for it. NaN and infinity always keep their meaning.
    """
    chosen: dict[str, Any] = {
        "fastmath": {"contract", "nsz"}, "error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True, **options,
    }  # fmt: skip

    def decorate(function: Any) -> Any:
        function.seconds = seconds
        kernel = njit(**chosen)(function)
        # Without a folder to keep it in (a read-only installation without a home) each process compiles for itself.
        with suppress(RuntimeError, OSError):
            kernel._cache = KernelCache(function)
        return kernel

    return decorate


def inner(**options: Any) -> Callable[[Any], Any]:
    """`numba.njit` for a function that other kernels call. It is not cached on its own.

    It has no wrappers for Python, so it compiles in half the time, and a call from Python crashes.
    """
    chosen: dict[str, Any] = {"fastmath": {"contract", "nsz"}, "error_model": "numpy", **options}
    return njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **chosen)


# For a large function with one caller. Its body becomes a part of the caller's and is compiled once, with the caller's
# options; an `inner` function would be optimised by itself and again in the caller.
spliced = njit(inline="always")


def _reinterpreted(source: Any, target: Any) -> Any:
    # Arithmetic in numba makes integers 64 bits wide. The signature names the width that they are cut to.
    kinds = {
        types.float32: ir.FloatType(),
        types.float64: ir.DoubleType(),
        types.int32: ir.IntType(32),
        types.int64: ir.IntType(64),
    }

    @intrinsic
    def cast(typing_context: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], kinds[target])

        return target(source), codegen

    return cast


float32_of_bits, bits_of_float32 = (
    _reinterpreted(types.int32, types.float32),
    _reinterpreted(types.float32, types.int32),
)
float64_of_bits, bits_of_float64 = (
    _reinterpreted(types.int64, types.float64),
    _reinterpreted(types.float64, types.int64),
)


# LLVM inlines the next three functions, and numba does not, so they keep their own flags: a caller whose sums may be
# reordered does not cancel the rounding by `ROUNDER`.
@njit(forceinline=True, fastmath={"contract"})
def exp32(x: Any) -> Any:
    """exp of x <= 0 in float32, with a relative error of 1.2e-7, in operations that the compiler vectorises.

    It is 0 for x <= -87, and NaN for NaN.
    """
    bounded = SMALLEST_32 if x < SMALLEST_32 else x
    shifted = bounded * LOG2_E_32 + ROUNDER_32  # its last bits are the nearest whole number n
    n = shifted - ROUNDER_32
    r = bounded - n * LN2_HIGH_32
    r = r - n * LN2_LOW_32
    p = ((((P0 * r + P1) * r + P2) * r + P3) * r + P4) * r + P5
    power = float32_of_bits((bits_of_float32(shifted) << np.int32(23)) + ONE_BITS_32)  # 2^n
    y = (p * (r * r) + (r + F32(1.0))) * power
    return F32(0.0) if x <= SMALLEST_32 else y


@njit(forceinline=True, fastmath={"contract"})
def exp64(x: Any) -> Any:
    """exp of x <= 0 in float64, with a relative error of 4e-16, in operations that the compiler vectorises.

    It is 0 for x <= -708, and NaN for NaN.
    """
    bounded = SMALLEST_64 if x < SMALLEST_64 else x
    shifted = bounded * LOG2_E_64 + ROUNDER_64
    n = shifted - ROUNDER_64
    r = bounded - n * LN2_HIGH_64
    r = r - n * LN2_LOW_64
    p = ((((Q13 * r + Q12) * r + Q11) * r + Q10) * r + Q9) * r + Q8
    p = (((((p * r + Q7) * r + Q6) * r + Q5) * r + Q4) * r + Q3) * r + F64(0.5)
    power = float64_of_bits((bits_of_float64(shifted) << np.int64(52)) + ONE_BITS_64)
    y = (p * (r * r) + (r + F64(1.0))) * power
    return F64(0.0) if x <= SMALLEST_64 else y


@njit(forceinline=True, fastmath={"contract"})
def log64(x: Any) -> Any:
    """log of a positive normal number in float64, in operations that the compiler vectorises.

    The error is at most 3e-16 max(1, |log x|).
    """
    bits = bits_of_float64(x)
    power = (bits - SQRT_HALF_BITS) >> np.int64(52)
    mantissa = float64_of_bits(bits - (power << np.int64(52)))  # from sqrt(1/2) to sqrt(2)
    # Small whole numbers become floats by their bits, which older processors can do in vectors.
    n = float64_of_bits(power + ROUNDER_BITS_64) - ROUNDER_64
    s = (mantissa - F64(1.0)) / (mantissa + F64(1.0))
    z = s * s
    # log(mantissa) = 2 s (1 + z/3 + z^2/5 + ...); at z <= 0.0295 the first term left out is 2e-17.
    series = ((((L19 * z + L17) * z + L15) * z + L13) * z + L11) * z + L9
    series = (((series * z + L7) * z + L5) * z + L3) * z
    return n * LN2_HIGH_64 + (n * LN2_LOW_64 + (F64(2.0) * s + F64(2.0) * s * series))


def exp(x: Any) -> Any:
    """`exp32` or `exp64`, by the width of x; in compiled code."""
    raise NotImplementedError("compiled code only")


@overload(exp, jit_options={"fastmath": {"contract"}, "forceinline": True})
def _exp_of_its_width(x: Any) -> Any:
    def narrow(x: Any) -> Any:
        return exp32(x)

    def wide(x: Any) -> Any:
        return exp64(x)

    return narrow if x == types.float32 else wide


def largest(scores: Any, count: int) -> Any:
    """The largest of the first scores; in compiled code."""
    raise NotImplementedError("compiled code only")


@overload(largest)
def _largest_of_its_width(scores: Any, count: Any) -> Any:
    # The compiler vectorises the maximum of whole numbers, and not that of floats. The bits of floats, read as whole
    # numbers, have the order of the floats once the bits of negative floats are flipped.
    def narrow(scores: Any, count: Any) -> Any:
        top = np.int32(-(2**31))
        for j in range(count):
            bits = bits_of_float32(scores[j])
            bits = np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(2**31 - 1)))
            top = bits if bits > top else top
        return float32_of_bits(np.int32(top ^ ((top >> np.int32(31)) & np.int32(2**31 - 1))))

    def wide(scores: Any, count: Any) -> Any:
        top = np.int64(-(2**63))
        for j in range(count):
            bits = bits_of_float64(scores[j])
            bits = bits ^ ((bits >> np.int64(63)) & np.int64(2**63 - 1))
            top = bits if bits > top else top
        return float64_of_bits(top ^ ((top >> np.int64(63)) & np.int64(2**63 - 1)))

    return narrow if scores.dtype == types.float32 else wide
