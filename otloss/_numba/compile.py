"""How kernels are compiled, and elementary functions that compilers can vectorise."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core.cgutils import if_unlikely, unpack_tuple
from numba.extending import intrinsic, overload

from otloss._numba.background import check_compiled
from otloss._numba.cache import KernelCache
from otloss._numba.linked import KernelCompiler, LinkedCompiler
from otloss._numba.notices import compile_together


class _Exp(NamedTuple):
    """The numbers of `exp` in one width: exp(x) = 2^n (1 + r + r^2 P(r)) with x = n ln 2 + r, |r| <= ln 2 / 2.

    Attributes:
        log2_e: log2(e).
        ln2_high, ln2_low: ln 2 in two parts. The first has so few bits that its product with n is exact.
        rounder: a number so large that the sum with it is whole.
        one_bits: the bits of 1.0.
        smallest: the argument below which the result leaves the normal numbers.
        polynomial: the coefficients of P, from the highest power on.
    """

    log2_e: Any
    ln2_high: Any
    ln2_low: Any
    rounder: Any
    one_bits: Any
    smallest: Any
    polynomial: tuple[Any, ...]


_EXP32 = _Exp(
    log2_e=np.float32(1.4426950408889634), ln2_high=np.float32(0.693359375), ln2_low=np.float32(-2.12194440e-4),
    rounder=np.float32(1.5 * 2**23), one_bits=np.int32(0x3F800000), smallest=np.float32(-87.0),
    # The minimax polynomial of Cephes' expf.
    polynomial=tuple(map(np.float32, (
        1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
    ))),
)  # fmt: skip
_EXP64 = _Exp(
    log2_e=1.4426950408889634, ln2_high=6.93147180369123816490e-01, ln2_low=1.90821492927058770002e-10,
    rounder=1.5 * 2**52, one_bits=np.int64(0x3FF0000000000000), smallest=-708.0,
    # Taylor's coefficients: at |r| <= ln 2 / 2 the first one left out, 1 / 14!, adds 4e-18.
    polynomial=tuple(1 / math.factorial(k) for k in range(13, 1, -1)),
)  # fmt: skip
# log(m) = 2 s (1 + z/3 + z^2/5 + ...) with s = (m - 1) / (m + 1) and z = s^2: the coefficients from z^9 down to z.
_LOG_SERIES = tuple(1 / k for k in range(19, 1, -2))


def compiled(*, allocates: bool = False, by_address: bool = False, **options: Any) -> Callable[[Any], Any]:
    """`numba.njit` with the options of this library: compiled at the first call for each dtype, and kept on disk.

    Floating-point sums are reordered only where `fastmath=` asks for it. NaN and infinity always keep their meaning.
    Only a kernel that `allocates` arrays counts references to them. Counts in an inner loop took a fifth of the time of
    Sinkhorn's iterations, and a quarter of the kernel's code.

    A kernel that other kernels call `by_address` (see `call_at`) has no wrapper for Python, so a call from Python
    crashes. Wrappers read each argument, and took a fifth of the time of such kernels, which have many arguments.
    """
    chosen: dict[str, Any] = {
        "fastmath": {"contract", "nsz"}, "error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True,
        "no_cpython_wrapper": by_address, "pipeline_class": KernelCompiler, "_nrt": allocates, **options,
    }  # fmt: skip

    def decorate(function: Any) -> Any:
        if config.DISABLE_JIT:
            raise RuntimeError(
                "NUMBA_DISABLE_JIT is set, and this function needs a compiled CPU kernel; unset it, or pass "
                'impl="torch" to entropic transport.'
            )
        kernel = njit(**chosen)(function)
        # Without a folder to keep it in (a read-only installation without a home) each process compiles for itself.
        with suppress(RuntimeError, OSError):
            kernel._cache = KernelCache(function)
        return kernel

    return decorate


_LINKED: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": LinkedCompiler}


def inner(*, allocates: bool = False, **options: Any) -> Callable[[Any], Any]:
    """`numba.njit` for a function that other kernels call. It is not cached on its own.

    It has no wrappers for Python, so it compiles in half the time, and a call from Python crashes. A function that
    returns arrays to one that `allocates` must do so too, since the caller takes a counted reference over.
    """
    chosen: dict[str, Any] = {"fastmath": {"contract", "nsz"}, "error_model": "numpy", **options}
    return njit(_nrt=allocates, **_LINKED, **chosen)


# For a large function with one caller. Its body becomes a part of the caller's and is compiled once, with the caller's
# options; an `inner` function would be optimised by itself and again in the caller.
spliced = njit(inline="always")


def address_of(kernel: Any, *arguments: Any) -> tuple[int, int]:
    """Return what `call_at` needs of a kernel for arguments like these, compiled or read from disk.

    That is the address and a number that stands for the types of the arguments.
    """
    signature = tuple(map(kernel.typeof_pyval, arguments))
    kernel.compile(signature)
    code = kernel.overloads[signature]
    pointer = int(code.library.get_pointer_to_function(code.fndesc.llvm_func_name))
    return pointer, _number_of(code.signature.return_type, signature)


_addresses: dict[Any, tuple[tuple[int, int], ...]] = {}


def addresses_of(key: Any, caller: Callable[[Any], Any], called: Callable[[], Any]) -> tuple[tuple[int, int], ...]:
    """Return the addresses of the kernels that another kernel calls; all are compiled together.

    Args:
        key: what decides about the kernels and the types of their arguments. It is looked up at each call.
        caller: takes the addresses, and returns the kernel that calls the others, and its arguments.
        called: returns the other kernels and the arguments of each.
    """
    if key not in _addresses:
        calls = tuple(called())
        everything = *calls, caller(((0, 0),) * len(calls))
        check_compiled(*((kernel, values, partial(tuple, values)) for kernel, values in everything))
        compile_together(*everything)
        _addresses[key] = tuple(address_of(kernel, *values) for kernel, values in calls)
    return _addresses[key]


def _number_of(result: Any, arguments: tuple[Any, ...]) -> int:
    """Return the same number in each process for the same types."""
    return crc32(repr(tuple(map(str, (result, *arguments)))).encode())


@intrinsic
def call_at(typing_context: Any, address: Any, arguments: Any) -> Any:
    """Call a kernel that returns nothing by what `address_of` returned, with a tuple of arguments of the same types.

    A kernel that is called so is compiled and kept once, and not again as a part of each caller. Arguments of other
    types raise TypeError.
    """
    return types.none(address, arguments), _call_by_address(types.none, arguments)


@intrinsic
def result_at(typing_context: Any, address: Any, arguments: Any, example: Any) -> Any:
    """Call a kernel as `call_at` does, and return its result, which has the type of `example`.

    A kernel that returns arrays counts references to them, and so must its caller.
    """
    return example(address, arguments, example), _call_by_address(example, arguments)


def _call_by_address(result: Any, arguments: Any) -> Callable[..., Any]:
    """Return what generates the code of such a call."""
    kinds = tuple(map(types.unliteral, arguments))

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer, number = unpack_tuple(builder, values[0])
        with if_unlikely(builder, builder.icmp_signed("!=", number, number.type(_number_of(result, kinds)))):
            text = (
                f"a kernel is called by its address with arguments of the types {kinds} and a result of the type "
                f"{result}, but is compiled for others"
            )
            context.call_conv.return_user_exc(builder, TypeError, (text,))
        function = context.call_conv.get_function_type(result, kinds).as_pointer()
        kernel = builder.inttoptr(pointer, function)
        status, returned = context.call_conv.call_function(
            builder, kernel, result, kinds, unpack_tuple(builder, values[1])
        )
        with if_unlikely(builder, status.is_error):  # an index beyond an array, where these are checked
            context.call_conv.return_status_propagate(builder, status)
        return returned if result != types.none else context.get_dummy_value()

    return codegen


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
# reordered does not cancel the rounding by `rounder`.
_inlined = inner(forceinline=True, fastmath={"contract"})


@_inlined
def exp32(x: Any) -> np.float32:
    """exp of x <= 0 in float32, with a relative error of 1.2e-7, in operations that the compiler vectorises.

    It is 0 for x <= -87, and NaN for NaN.
    """
    bounded = _EXP32.smallest if x < _EXP32.smallest else x
    shifted = bounded * _EXP32.log2_e + _EXP32.rounder  # its last bits are the nearest whole number n
    n = shifted - _EXP32.rounder
    r = bounded - n * _EXP32.ln2_high
    r = r - n * _EXP32.ln2_low
    p5, p4, p3, p2, p1, p0 = _EXP32.polynomial
    p = ((((p5 * r + p4) * r + p3) * r + p2) * r + p1) * r + p0
    power = float32_of_bits((bits_of_float32(shifted) << np.int32(23)) + _EXP32.one_bits)  # 2^n
    y = (p * (r * r) + (r + np.float32(1.0))) * power
    return np.float32(0.0) if x <= _EXP32.smallest else y


@_inlined
def exp64(x: Any) -> float:
    """exp of x <= 0 in float64, with a relative error of 4e-16, in operations that the compiler vectorises.

    It is 0 for x <= -708, and NaN for NaN.
    """
    bounded = _EXP64.smallest if x < _EXP64.smallest else x
    shifted = bounded * _EXP64.log2_e + _EXP64.rounder
    n = shifted - _EXP64.rounder
    r = bounded - n * _EXP64.ln2_high
    r = r - n * _EXP64.ln2_low
    p11, p10, p9, p8, p7, p6, p5, p4, p3, p2, p1, p0 = _EXP64.polynomial
    p = ((((p11 * r + p10) * r + p9) * r + p8) * r + p7) * r + p6
    p = (((((p * r + p5) * r + p4) * r + p3) * r + p2) * r + p1) * r + p0
    power = float64_of_bits((bits_of_float64(shifted) << np.int64(52)) + _EXP64.one_bits)
    y = (p * (r * r) + (r + 1.0)) * power
    return 0.0 if x <= _EXP64.smallest else y


@_inlined
def log64(x: Any) -> float:
    """log of a positive normal number in float64, in operations that the compiler vectorises.

    The error is at most 3e-16 max(1, |log x|).
    """
    bits, sqrt_half, rounder = bits_of_float64(x), np.int64(0x3FE6A09E667F3BCD), np.int64(0x4338000000000000)  # as bits
    power = (bits - sqrt_half) >> np.int64(52)
    mantissa = float64_of_bits(bits - (power << np.int64(52)))  # from sqrt(1/2) to sqrt(2)
    # Small whole numbers become floats by their bits, which older processors can do in vectors.
    n = float64_of_bits(power + rounder) - _EXP64.rounder
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    # At z <= 0.0295 the first term of the series that is left out is 2e-17.
    l9, l8, l7, l6, l5, l4, l3, l2, l1 = _LOG_SERIES
    series = ((((l9 * z + l8) * z + l7) * z + l6) * z + l5) * z + l4
    series = (((series * z + l3) * z + l2) * z + l1) * z
    return n * _EXP64.ln2_high + (n * _EXP64.ln2_low + (2.0 * s + 2.0 * s * series))


def exp(x: Any) -> Any:
    """`exp32` or `exp64`, by the width of x; in compiled code."""
    raise NotImplementedError("compiled code only")


@overload(exp, jit_options={"fastmath": {"contract"}, "forceinline": True, **_LINKED})
def _exp_of_its_width(x: Any) -> Any:
    def narrow(x: Any) -> Any:
        return exp32(x)

    def wide(x: Any) -> Any:
        return exp64(x)

    return narrow if x == types.float32 else wide


def largest(scores: Any, count: int) -> Any:
    """The largest of the first scores; in compiled code."""
    raise NotImplementedError("compiled code only")


@overload(largest, jit_options=_LINKED)
def _largest_of_its_width(scores: Any, count: Any) -> Any:
    # The compiler vectorises the maximum of whole numbers, and not of floats. The bits of floats, read as whole
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
