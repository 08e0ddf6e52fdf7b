"""What kernels for the CPU need that numba compiles: how they are compiled, cached and run on several threads.

The kernels themselves are in files named *_numba.py, beside the reference implementation that each is tested against.
numba takes half a second to import, so these files are imported where a kernel is first called. This file and
`threads` import nothing of numba.
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
