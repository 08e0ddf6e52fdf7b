"""Real numbers that come as tensors: which dtypes hold them, and which floating dtype holds whole ones exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from otloss._checks import check_tensor


def check_real(name: str, value: Any) -> Tensor:
    """Return `value` if it is a tensor of real numbers and not of truth values, else raise TypeError."""
    tensor = check_not_complex(name, value)
    if tensor.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {tensor.dtype}, expected real numbers; call {name}.float().")
    return tensor


def check_not_complex(name: str, value: Any) -> Tensor:
    """Return `value` if it is a tensor that is not complex, else raise TypeError."""
    tensor = check_tensor(name, value)
    if tensor.is_complex():
        raise TypeError(f"{name} has dtype {tensor.dtype}, expected real numbers; pass {name}.real.")
    return tensor


def wide_enough(name: str, numbers: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return `dtype`, or float64 where the numbers are whole ones that `dtype` rounds: seconds since 1970 in float32.

    Raises:
        ValueError: if float64 would round them too.
    """
    if numbers.is_floating_point() or numbers.numel() == 0:
        return dtype
    low, high = (int(end) for end in torch.aminmax(numbers.long()))
    for candidate in (dtype, torch.float64):
        if max(-low, high) <= 2 / torch.finfo(candidate).eps:
            return candidate
    raise ValueError(
        f"{name} reaches from {low} to {high}, expected whole numbers up to 2^53 = {2**53}, which float64 holds "
        "exactly; subtract a common origin, or count in a coarser unit."
    )
