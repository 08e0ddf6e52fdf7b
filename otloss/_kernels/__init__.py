"""Compiled kernels for the CPU. Each has a slow twin that it is tested against; what they share is in `_compile`.

numba takes half a second to import, so a kernel's module is imported where it is first called, and this file imports
nothing of it.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

_is_forked = False


def may_run_on(*tensors: Tensor) -> bool:
    """Whether compiled kernels may work on these tensors.

    On a CPU, not in a forked child of the process, and not inside `torch.func` transforms, whose tensors hold no data.
    """
    if _is_forked or torch._C._are_functorch_transforms_active():
        return False
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


# The OpenMP of numba ends a forked process that uses it after its parent has.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
