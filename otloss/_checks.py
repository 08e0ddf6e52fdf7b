"""Argument checks: every message names the value that came in, what was expected, and how to fix it."""

from __future__ import annotations

import re
import sys
from numbers import Integral
from types import FrameType
from typing import Any, NoReturn, TypeGuard

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import forward_ad
from torch.masked import MaskedTensor

REDUCTIONS = ("mean", "sum", "none")
_NUMBERS = (int, float, np.integer, np.floating)
_PLAIN = (Tensor, torch.nn.Parameter)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TRANSFORMS = torch._C._functorch.TransformType
_OF_DECORATORS = ("otloss._per_example", "otloss._public", "otloss._uncompiled")


def is_recorded() -> bool:
    """Return whether a program is recorded, which cannot depend on numbers of its tensors."""
    return torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None


def check_not_recorded() -> None:
    """Raise RuntimeError while a program is recorded, in which numbers of this call would be constants."""
    if is_recorded():
        recorder = "torch.export" if torch.compiler.is_exporting() else "torch.jit.trace"
        raise RuntimeError(
            f"{called()} reads the numbers of its tensors, so {recorder} "
            "cannot record it; record the module without it, or use torch.compile without fullgraph=True."
        )


def check_not_batched(tensor: Tensor) -> None:
    """Raise NotImplementedError for a tensor that `torch.vmap` maps over, whose numbers cannot be read."""
    if torch._C._are_functorch_transforms_active() and _plain(tensor)[1]:
        raise_inside_vmap()


def transform_kinds() -> list[Any]:
    """Return the kinds of the active transforms of torch.func, the outermost first."""
    if not torch._C._are_functorch_transforms_active():
        return []
    return [level.key() for level in torch._C._functorch.get_interpreter_stack()]


def raise_inside_vmap() -> NoReturn:
    if TRANSFORMS.Jvp in transform_kinds():
        raise NotImplementedError(
            f"{called()} has no derivative in forward mode inside torch.vmap, which jacfwd and hessian of torch.func "
            "take; use torch.func.jacrev, or pass the batch itself in one call and differentiate by "
            "torch.autograd.grad."
        )
    name = called()
    instead = " Call cloud_loss on the points, which works there; or:" if name == "PointCost" else ""
    raise NotImplementedError(
        f"{name} does not work inside torch.vmap: it reads the numbers of its tensors.{instead} Leading axes are batch "
        "axes: pass the batch itself in one call, or one problem at a time in a loop, and differentiate by "
        "torch.autograd.grad."
    )


def numbers(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor, for a check to read: without a graph, and inside `torch.vmap` of all examples.

    The axis that `torch.vmap` maps over comes first.
    """
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return tensor.detach()
    return _plain(tensor)[0].detach()


def _plain(tensor: Tensor) -> tuple[Tensor, bool]:
    """Return what the wrappers of `torch.func` hold, mapped axes first, and whether there are such axes."""
    functorch, is_batched = torch._C._functorch, False
    while functorch.is_functorch_wrapped_tensor(tensor):
        axis = functorch.maybe_get_bdim(tensor) if functorch.is_batchedtensor(tensor) else None
        tensor = functorch.get_unwrapped(tensor)
        if axis is not None:
            tensor, is_batched = tensor.movedim(axis, 0), True
    return tensor, is_batched


def called() -> str:
    """Return the name of the function of this library that the user called."""
    frame: FrameType | None = sys._getframe(1)
    name = "this function"
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("otloss", "otloss_llm", "torch"):
            break
        if (
            module.startswith("otloss")
            and module not in _OF_DECORATORS
            and not frame.f_code.co_qualname.startswith("_")
        ):
            name = frame.f_code.co_qualname.removesuffix(".__init__")
            if frame.f_code.co_name == "forward" and "self" in frame.f_locals:  # perhaps of a base class
                name = type(frame.f_locals["self"]).__name__
        frame = frame.f_back
    return name


def check_tensor(name: str, value: Any, *, is_read: bool = True) -> Tensor:
    """Return `value` if it is a dense tensor of real numbers, no float narrower than 16 bits, else raise TypeError.

    A tensor that is read, by the rest of the function, is not one of a program that is recorded, nor of `torch.vmap`.
    """
    if is_read:
        check_not_recorded()
    if isinstance(value, Tensor):
        if is_read:
            check_not_batched(value)
        check_layout(name, value)
        if value.is_floating_point() and value.dtype not in _FLOATS:
            raise TypeError(
                f"{name} has dtype {value.dtype}, expected float16, bfloat16, float32 or float64; call {name}.float()."
            )
        if value.is_complex():  # float() would drop the imaginary part
            raise TypeError(
                f"{name} has dtype {value.dtype}, expected a floating dtype; give real numbers, {name}.abs() or "
                f"{name}.real, whichever is meant."
            )
        return value
    kind = type(value).__name__
    if isinstance(value, torch.nn.Module):
        has_weight = isinstance(getattr(value, "weight", None), Tensor)
        fix = "; pass the weight of the module, its .weight" if has_weight else ""
        raise TypeError(f"{name} is a module of type {kind}, expected a torch.Tensor{fix}.")
    index = " Rows then go by their place, and not by the index." if hasattr(value, "iloc") else ""
    raise TypeError(
        f"{name} is a {kind}, expected a torch.Tensor; convert it first, for example with "
        f"{code_for_tensor(name, value)}.{index}"
    )


def code_for_tensor(name: str, value: Any) -> str:
    """Return code that makes a tensor of a value, for a message."""
    # torch reads no table of pandas or polars, and warns of arrays that share their memory.
    if hasattr(value, "to_numpy"):
        return f"torch.tensor({name}.to_numpy())"
    if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":  # objects, or text
        return f"torch.tensor({name}.astype(float))"
    return f"torch.as_tensor({name})"


def check_layout(name: str, value: Tensor) -> None:
    """Raise TypeError for a tensor that does not hold one number in each place: sparse, nested, masked or quantized."""
    if type(value) is Tensor and value.layout is torch.strided and not (value.is_nested or value.is_quantized):
        return
    if isinstance(value, MaskedTensor):
        got, call = "a masked tensor", "to_tensor(0.0), or set the masked entries to what they stand for"
    elif value.is_nested:
        got, call = "a nested tensor", "to_padded_tensor(0.0)"
    elif value.layout is not torch.strided:
        got, call = f"of layout {value.layout}", "to_dense()"
    elif value.is_quantized:
        got, call = f"quantized ({value.dtype})", "dequantize()"
    else:  # a parameter, or another subclass
        return
    verb = "pad it with" if value.is_nested else "call"
    raise TypeError(f"{name} is {got}, expected a dense tensor; {verb} {name}.{call}.")


def check_floating(name: str, value: Any, *, is_read: bool = True, may_be_meta: bool = False) -> Tensor:
    """Return `value` if it is a floating-point tensor that holds numbers, else raise TypeError or ValueError.

    Args:
        is_read: as for `check_tensor`.
        may_be_meta: whether it may lie on the meta device, where models are made whose numbers are loaded later.
    """
    is_plain = type(value) in _PLAIN and value.layout is torch.strided and not (value.is_nested or value.is_meta)
    if is_plain and value.dtype in _FLOATS:  # lists of many small tensors would feel the rest
        if is_read:
            check_not_recorded()
            check_not_batched(value)
        return value
    tensor = check_tensor(name, value, is_read=is_read)
    if not tensor.is_floating_point():
        raise TypeError(
            f"{name} has dtype {tensor.dtype}, expected a floating dtype; call {name}.float(), or .astype(float)."
        )
    if not may_be_meta:
        check_not_meta(name, tensor)
    return tensor


def check_not_meta(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise ValueError(
            f"{name} is on the meta device, which holds no numbers; expected a tensor on a CPU or GPU. Load its data "
            "first, for a module with to_empty() and load_state_dict()."
        )


def has_tangent(*tensors: Tensor) -> bool:
    """Whether one of the tensors carries a tangent, as forward mode differentiates it."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:  # outside of all dual levels none does
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def needs_torch(*tensors: Tensor) -> bool:
    """Whether only operations of torch may work on the tensors: with tangents, or inside transforms of torch.func."""
    return torch._C._are_functorch_transforms_active() or has_tangent(*tensors)


def requires_gradient(tensor: Tensor) -> bool:
    """Whether a gradient is wanted at any level of `torch.func`: `torch.vmap` hides outer levels."""
    functorch = torch._C._functorch
    while not tensor.requires_grad and functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def is_differentiated(*tensors: Tensor) -> bool:
    """Whether one of the tensors requires a gradient or carries a tangent."""
    return any(requires_gradient(tensor) for tensor in tensors) or has_tangent(*tensors)


class NotFiniteError(ValueError):
    """Numbers that have to be finite are NaN or infinite."""


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise ValueError naming the first NaN or infinity in `tensor`."""
    check_not_meta(name, tensor)
    tensor = numbers(tensor)
    # A sum is one pass without a temporary, and it is finite only if all numbers are.
    if torch.isfinite(tensor.sum()):
        return
    bad = ~torch.isfinite(tensor)
    if bad.any():
        first = tuple(int(i) for i in bad.nonzero()[0])
        raise NotFiniteError(
            f"{name} holds {int(bad.sum())} NaN or infinite values, the first at index {first} "
            f"({float(tensor[first])}); expected finite numbers. Find where they arise before this call."
        )


def check_below_infinity(name: str, tensor: Tensor) -> None:
    """Raise ValueError if an entry is NaN or +inf; -inf may occur."""
    tensor = numbers(tensor)
    if tensor.numel() and not tensor.amax() < torch.inf:  # NaN where any entry is
        bad = tensor[~(tensor < torch.inf)]
        raise NotFiniteError(
            f"{name} holds {bad.numel()} NaN or +inf, the first {float(bad[0])}; expected finite numbers, or -inf at "
            "bins that take no part. Find where they arise before this call."
        )


def check_reduction(reduction: str) -> None:
    """Raise ValueError unless `reduction` is one of "mean", "sum", "none"."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected one of {REDUCTIONS}.")


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether `value` is a real number of Python or numpy, and no bool.

    Other real numbers, such as fractions and the numbers of sympy, are no operands of tensors.
    """
    return isinstance(value, _NUMBERS) and not isinstance(value, bool)


def _conversion(name: str, value: Any) -> str:
    """Return how to make a number of what is not one of Python or numpy, if it stands for one."""
    try:
        float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        return ""
    return f"; convert it first, for example with float({name})"


def check_number(name: str, value: Any) -> float:
    """Return `value` if it is a real number, of Python or numpy and no bool, else raise TypeError.

    Raises:
        ValueError: for a whole number beyond 64 bits, which neither torch nor numpy takes.
    """
    if not is_number(value):
        raise TypeError(f"{name} is a {type(value).__name__} ({value!r}), expected a number{_conversion(name, value)}.")
    if isinstance(value, Integral):
        _check_64_bits(name, value)
    return value


def _check_64_bits(name: str, value: Integral) -> None:
    if not -(2**63) <= int(value) < 2**63:
        raise ValueError(
            f"{name} is a whole number of {int(value).bit_length()} bits, expected at most 63; write a large number as "
            "a float, such as 1e30."
        )


def check_positive(name: str, value: Any) -> float:
    """Return `value` if it is a finite number above zero, else raise TypeError or ValueError."""
    if not (0 < check_number(name, value) < float("inf")):
        raise ValueError(f"{name} is {value}, expected a finite number above 0.")
    return value


def check_not_negative(name: str, value: Any) -> float:
    """Return `value` if it is a finite number of at least zero, else raise TypeError or ValueError."""
    if not (0 <= check_number(name, value) < float("inf")):
        raise ValueError(f"{name} is {value}, expected a finite number of at least 0.")
    return value


def check_not_masked(value: Any) -> None:
    """Raise ValueError for a masked array of numpy whose masked entries would count: conversions drop the mask."""
    if isinstance(value, np.ma.MaskedArray) and value.mask.any():
        raise ValueError(
            f"a masked array of shape {value.shape} has {int(value.mask.sum())} masked entries, expected numbers; drop "
            "them, or set them to what they stand for with .filled(...)."
        )


def check_generator(generator: Any) -> None:
    """Raise TypeError unless it is a `torch.Generator` or None, which stands for torch's own."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator is {generator!r}, expected a torch.Generator, such as torch.Generator().manual_seed(0)."
        )


def device_of(generator: torch.Generator | None) -> torch.device | str:
    """Return the device on which the generator draws; the CPU for torch's own, whatever the default device is."""
    return "cpu" if generator is None else generator.device


def check_count(name: str, value: Any, minimum: int = 1) -> int:
    """Return a whole number as Python's: numpy's may have few bits. Raise TypeError for another or a bool.

    Raises:
        ValueError: if it is below the minimum.
    """
    check_whole(name, value)
    if value < minimum:
        raise ValueError(f"{name} is {value}, expected a whole number of at least {minimum}.")
    return int(value)


def check_whole(name: str, value: Any, expected: str = "a whole number") -> None:
    """Raise TypeError unless `value` is a whole number and no bool, ValueError if it is one beyond 64 bits."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}, expected {expected}.")
    _check_64_bits(name, value)


def check_epsilon(epsilon: Any, *, above_zero: bool = False) -> float | Tensor:
    """Return `epsilon` if it is a number, or a tensor of numbers, that is finite and at least (or above) zero."""
    if not isinstance(epsilon, Tensor):
        check_number("epsilon", epsilon)
        return epsilon if epsilon == 0 and not above_zero else check_positive("epsilon", epsilon)
    if is_differentiated(check_floating("epsilon", epsilon)):
        raise ValueError("epsilon requires a gradient or carries a tangent, which is not given; pass epsilon.detach().")
    low, high = torch.aminmax(epsilon) if epsilon.numel() else (1.0, 1.0)
    if not (low > 0 and high < torch.inf):
        check_finite("epsilon", epsilon)
        if low < 0 or above_zero:
            raise ValueError(f"epsilon is {float(low)}, expected numbers {'above' if above_zero else '>='} 0.")
    return epsilon


def check_integers(name: str, value: Any) -> Tensor:
    """Return `value` if it is an integer tensor, else raise TypeError."""
    tensor = check_tensor(name, value)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {tensor.dtype}, expected integers; call {name}.long().")
    return tensor


def check_index(name: str, index: Any, size: int) -> Tensor:
    """Return `index` as int64 if it is a one-axis integer tensor within [0, size), else raise."""
    tensor = check_integers(name, index)
    if tensor.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected one axis; call {name}.reshape(-1).")
    bad = (tensor < 0) | (tensor >= size)
    if bad.any():
        where = int(bad.nonzero()[0])
        raise ValueError(
            f"{name}[{where}] is {int(tensor[where])}, expected 0 to {size - 1}; "
            "drop ignored labels (such as -100) before asking for their rows."
        )
    return tensor.long()


def check_cloud(name: str, points: Any, *, may_be_meta: bool = False) -> Tensor:
    """Return `points` if they are finite points (..., n, d), else raise; `may_be_meta` as for `check_floating`."""
    check_floating(name, points, may_be_meta=may_be_meta)
    if points.dim() < 2 or 0 in points.shape[-2:]:
        raise ValueError(
            f"{name} has shape {tuple(points.shape)}, expected (..., n, d) with n, d >= 1; for positions on a line "
            f"pass {name}[:, None], or use LineCost."
        )
    if not points.is_meta:
        check_finite(name, points)
    return points


def check_last_axis(name: str, tensor: Tensor, size: int) -> None:
    """Raise ValueError unless the last axis of `tensor` has `size` entries."""
    if tensor.dim() == 0 or tensor.shape[-1] != size:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected a last axis of {size} entries.")


def broadcast_shape(*shapes: tuple[int, ...]) -> torch.Size:
    """`torch.broadcast_shapes`, without its 50 microseconds, and without sympy, which it imports in half a second."""
    if not any(shapes):
        return torch.Size()
    sizes = []  # in a graph with symbolic sizes these are compared only as broadcasting needs it, and never hashed
    for place in range(-max(map(len, shapes)), 0):
        size = 1
        for shape in shapes:
            if len(shape) >= -place and shape[place] != 1:
                if size not in (1, shape[place]):
                    return torch.broadcast_shapes(*shapes)  # which raises
                size = shape[place]
        sizes.append(size)
    return torch.Size(sizes)


def install_hint(extra: str) -> str:
    """Return the command that installs an extra."""
    return f'pip install "torch-otloss[{extra}]"'


def missing_package(error: ImportError, *packages: str) -> str:
    """Return which of the packages an import did not find; raise the error as it is if it has another cause."""
    package = (error.name or "").partition(".")[0]
    if package not in packages:
        raise error
    return package


def check_potentials(start: Any, bins: tuple[int, int], batch: torch.Size) -> tuple[Tensor, Tensor]:
    """Return the pair (f, g) of finite potentials whose leading axes broadcast to `batch`, else raise."""
    if not isinstance(start, tuple | list) or len(start) != 2:
        raise TypeError(f"start is a {type(start).__name__}, expected a pair (f, g) of potentials.")
    for name, potential, size in zip(("start f", "start g"), start, bins, strict=True):
        check_finite(name, check_floating(name, potential))
        check_last_axis(name, potential, size)
        if check_broadcast(start=potential.shape[:-1], problems=batch) != batch:
            raise ValueError(
                f"{name} has shape {tuple(potential.shape)}, expected leading axes of {tuple(batch)}, as the problems."
            )
    return start[0], start[1]


def check_broadcast(**shapes: tuple[int, ...]) -> torch.Size:
    """Return the shape that the named batch shapes broadcast to, else raise ValueError."""
    try:
        return broadcast_shape(*shapes.values())
    except RuntimeError:
        got = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"the batch axes do not broadcast: got {got}; expected equal sizes or 1, counted from the right."
        ) from None


def has_float64(device: torch.device) -> bool:
    """Whether there are float64 numbers on this device."""
    return device.type != "mps"


def float64_or(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return float64 if the device has it, else the dtype."""
    return torch.float64 if has_float64(device) else dtype


def bits_of_dtype(dtype: object) -> int:
    """Return the significant bits of float16, bfloat16 and float32 by any library's name for them; 53 of others."""
    named = re.search(r"b?float(16|32)|halffloat", str(dtype).lower())
    return 53 if named is None else {"bfloat16": 8, "float16": 11, "halffloat": 11}.get(named[0], 24)


def significant_bits(numbers: Float[np.ndarray, "*shape"], dtype: object) -> int:
    """Return to how many bits numbers have been rounded: 8 (bfloat16), 11 (float16), 24 (float32), else 53.

    Those of float32 may come in float64, and are known by their digits. Of a narrower dtype all numbers have been
    rounded, unless each is whole (of 16 bits: up to 2^bits, above which all are) or a sixteenth up to 2^(bits - 6),
    which leaves two bits that rounded numbers need: 0.25 stands for itself, and 0.1 for all near it.

    Args:
        numbers: in float64.
        dtype: as they came.
    """
    bits = bits_of_dtype(dtype)
    if bits == 53:
        return 24 if are_rounded_to_float32(numbers).any() else 53
    is_whole = (numbers == np.rint(numbers)) & ((bits == 24) | (np.abs(numbers) <= 2**bits))
    sixteenths = 16 * numbers
    is_sixteenth = (sixteenths == np.rint(sixteenths)) & (np.abs(sixteenths) <= 2 ** (bits - 2))
    return 53 if (is_whole | is_sixteenth).all() else bits


def are_rounded_to_float32(numbers: Float[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
    """Return which numbers of float64 have been rounded to float32: 0.30000001192092896, for 0.3, and not 0.25.

    All False if one of them has more bits than float32. The numbers that people write have ten digits or fewer, or are
    fractions of a power of two, with few bits.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if not (numbers == numbers.astype(np.float32)).all():
            return np.zeros(numbers.shape, bool)
    mantissa = np.ldexp(np.frexp(numbers)[0], 16)  # whole for up to 16 bits
    exponent = np.floor(np.log10(np.abs(numbers), out=np.zeros_like(numbers), where=numbers != 0))
    unit = _POWERS_OF_TEN[np.clip(9 - exponent, 0, 22).astype(int)]  # of the tenth digit, or 1
    return (mantissa != np.rint(mantissa)) & (np.rint(numbers * unit) / unit != numbers)


_POWERS_OF_TEN = np.array([float(f"1e{k}") for k in range(23)])  # the exact ones
