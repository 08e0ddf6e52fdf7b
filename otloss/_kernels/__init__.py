"""Kernels for the CPU, compiled by numba. Each has a reference implementation that it is tested against.

`_compile` says how they are compiled, `_threads` on how many threads they run. numba takes half a second to import, so
a kernel's module is imported where it is first called, and this file imports nothing of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otloss._checks import needs_torch

# Entries of the soft minima of all problems together. Up to here torch takes at most 0.2 ms longer than the kernels,
# and needs no compilation.
SMALL = 2**16


def is_small(entries: int) -> bool:
    """Whether a soft minimum over so many costs is left to torch."""
    return entries <= SMALL


def may_run_on(*tensors: Tensor) -> bool:
    """Whether kernels may work on these tensors: dense, on a CPU, without tangents, outside of torch.func."""
    if needs_torch(*tensors):
        return False
    return all(t.device.type == "cpu" and t.layout == torch.strided and not t.is_nested for t in tensors)
