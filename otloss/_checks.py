"""Argument checks: every message names the value that came in, what was expected, and how to mend it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

REDUCTIONS = ("mean", "sum", "none")


def check_tensor(name: str, value: Any) -> Tensor:
    """Return `value` if it is a tensor, else raise TypeError."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} is a {type(value).__name__}, expected a torch.Tensor; "
            f"convert it first, for example with torch.as_tensor({name})."
        )
    return value


def check_floating(name: str, value: Any) -> Tensor:
    """Return `value` if it is a floating-point tensor, else raise TypeError."""
    tensor = check_tensor(name, value)
    if not tensor.is_floating_point():
        raise TypeError(f"{name} has dtype {tensor.dtype}, expected a floating dtype; call {name}.float().")
    return tensor


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise ValueError naming the first NaN or infinity in `tensor`."""
    bad = ~torch.isfinite(tensor.detach())
    if bad.any():
        first = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"{name} holds {int(bad.sum())} NaN or infinite values, the first at index {first} "
            f"({float(tensor.detach()[first])}); expected finite numbers. Find where they arise before this call."
        )


def check_reduction(reduction: str) -> None:
    """Raise ValueError unless `reduction` is one of "mean", "sum", "none"."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected one of {REDUCTIONS}.")
