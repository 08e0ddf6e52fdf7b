"""Run one kernel on several threads, which take tasks from a shared counter.

Kernels are compiled without numba's `parallel=True`: that compiles a kernel a second time (several seconds each for the
solvers), and its OpenMP ends a forked process. Kernels release the GIL, so plain threads do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

# Exponentials, or the like, below which waking up a thread takes longer than it saves.
ENTRIES = 10_000

_pool: ThreadPoolExecutor | None = None
_is_forked = False


@intrinsic
def next_task(typing_context: Any, counter: Any) -> Any:
    """Return the number in `counter` (an int64 array of one element) and raise it by one, atomically."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", array.data, context.get_constant(types.int64, 1), "monotonic")

    return types.int64(counter), codegen


def run_on_threads(
    kernel: Callable[..., Any],
    tasks: int,
    arguments: Sequence[Any],
    scratch: Callable[[], Sequence[Any]] = tuple,
    *,
    one_thread: bool = False,
) -> list[Any]:
    """Return what `kernel(counter, *arguments, *scratch())` returns on each of as many threads as torch uses.

    The kernel does task `next_task(counter)` until that number reaches its number of tasks. Each thread gets its own
    `scratch()`. Only the calling thread works with `one_thread`, and in a forked process (a worker of a DataLoader).
    """
    if tasks == 0:
        return []
    threads = 1 if one_thread or _is_forked else min(torch.get_num_threads(), tasks)
    counter = np.zeros(1, np.int64)
    others = [_executor().submit(kernel, counter, *arguments, *scratch()) for _ in range(threads - 1)]
    own = kernel(counter, *arguments, *scratch())
    return [own, *(other.result() for other in others)]


def _executor() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="otloss")
    return _pool


def _after_fork() -> None:
    # The threads of the pool exist in the parent alone.
    global _pool, _is_forked
    _pool, _is_forked = None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
