"""A call that `torch.compile` leaves alone; in a module of its own, for the decorator imports the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(
    reason="functions of otloss read the numbers of their tensors: they run outside of a compiled graph, which breaks "
    "there. Leave fullgraph=True out, or compile the model without its loss"
)
def uncompiled(function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """`function(*args, **settings)`, outside of any graph that is being traced."""
    return function(*args, **settings)
