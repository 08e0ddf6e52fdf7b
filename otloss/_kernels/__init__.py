"""Kernels for the CPU, compiled by numba. Each has a reference implementation that it is tested against.

`_compile` says how they are compiled, `_threads` on how many threads they run. numba takes half a second to import, so
a kernel's module is imported where it is first called, and this file imports nothing of it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def may_run_on(*tensors: Tensor) -> bool:
    """Whether kernels may work on these tensors: on a CPU, not inside `torch.func` transforms, which hold no data."""
    if torch._C._are_functorch_transforms_active():
        return False
    return all(tensor.device.type == "cpu" for tensor in tensors)
