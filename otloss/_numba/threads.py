"""Run one kernel on torch's own threads, which take tasks from a shared counter.

Kernels run in the thread pool that torch has: `GOMP_parallel` is what GNU's compiler calls for a parallel region.
numba's `parallel=True` would compile each kernel a second time, for several seconds, and bring a second pool. Threads
of OpenMP spin while they wait for work, up to 5 ms after the last parallel operation, so two pools on the same cores
take turns: with a pool of Python's threads a soft minimum between 4,000 and 4,000 points takes 1.2 times as long on two
cores, and `ordinal_loss` of 4,096 rows 1.25 times. Kernels release the GIL.

A parallel region ends when its last thread does. Where other processes keep the cores busy, that thread may wait for
its turn for 10 to 20 ms, while the whole work takes some ms. After a region that took longer than one thread would
have, kernels therefore run on the calling thread alone for a while.

Python handles signals on its main thread only, between two steps of Python. So work that may take long runs on another
thread, and the main thread waits. On Ctrl-C the main thread raises the counter beyond all tasks. Kernels notice that at
their next task, or where they call `is_stopped`.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from otloss._numba.background import check_compiled
from otloss._progress import report

# Below so many exponentials, or operations like them, waking up a thread takes longer than it saves.
MIN_ENTRIES = 10_000
PASSES = 200  # how often an iterative kernel visits all costs, where nothing is known


class Counter(NamedTuple):
    """The places of a counter, and the value that stops it.

    Attributes:
        task: the number of the next task.
        error, share: the bits of the error of a task and of the share of it that is done, as the last thread has
            written them.
        stopped: the number of the next task from which on kernels leave.
    """

    task: int = 0
    error: int = 1
    share: int = 2
    stopped: int = 2**62


@dataclass(frozen=True)
class Limits:
    """When kernels run on one thread, and when the main thread watches them.

    Attributes:
        patience: seconds that a region may take longer than one thread would: above what it takes to start a thread.
        pause: after a region that took longer, kernels run on one thread for so many times its duration.
        long: entries that a kernel visits in a second or so. The main thread watches such a kernel from another thread.
            To wait for that thread, which has OpenMP threads of its own, takes up to a millisecond.
        look: seconds between two looks at a long kernel.
    """

    patience: float = 1e-3
    pause: float = 20.0
    long: int = 2**29
    look: float = 0.2


COUNTER, LIMITS = Counter(), Limits()

_alone_until = 0.0  # by time.perf_counter
_is_forked = False
_pool: ThreadPoolExecutor | None = None
_watched: ThreadPoolExecutor | None = None  # one thread, for long kernels
_work_of_region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run_on_threads(
    kernel: Callable[..., Any],
    tasks: int,
    arguments: Sequence[Any],
    scratch: Callable[[], Sequence[Any]] = tuple,
    *,
    one_thread: bool = False,
    work: Work | None = None,
) -> list[Any]:
    """Return what `kernel(counter, *arguments, *scratch())` returns on each of as many threads as torch uses.

    The kernel does task `next_task(counter)` until that number reaches its number of tasks. Each thread gets its own
    `scratch()`. The calling thread works alone with `one_thread`, with `work` below MIN_ENTRIES, in a forked process (a
    worker of a DataLoader), and while other processes keep the cores busy. Ctrl-C stops `work` that is long.
    """
    if tasks == 0:
        return []
    check_compiled((kernel, tuple(arguments), lambda: (np.zeros(3, np.int64), *arguments, *scratch())))
    one_thread = one_thread or (work is not None and work.entries < MIN_ENTRIES)
    if one_thread and (work is None or not work.is_long):  # as below, in half the time for a small problem
        return [kernel(np.zeros(3, np.int64), *arguments, *scratch())]
    alone = one_thread or _is_forked or time.perf_counter() < _alone_until
    threads = 1 if alone else min(torch.get_num_threads(), tasks)
    counter = np.zeros(3, np.int64)
    calls = [(counter, *arguments, *scratch()) for _ in range(threads)]
    if work is None or not work.is_long or threading.current_thread() is not threading.main_thread():
        return _run(kernel, calls)
    return _while_waiting(lambda: _run(kernel, calls), counter, tasks, work)


def _run(kernel: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
    if len(calls) == 1:
        return [kernel(*calls[0])]
    timed = _Timed(kernel)
    results = _in_region(timed, calls) if _openmp is not None else _in_pool(timed, calls)
    _go_alone_after(timed)
    return results


class Work(NamedTuple):
    """What a kernel does.

    Attributes:
        name: what it does, in words, or "" for a part of a loop.
        entries: the number of costs.
        tolerance: what the error has to fall to.
        passes: about how often it visits all costs.
    """

    name: str
    entries: int
    tolerance: float = 0.0
    passes: int = PASSES

    @property
    def is_long(self) -> bool:
        return self.entries * self.passes >= LIMITS.long


def _while_waiting(run: Callable[[], list[Any]], counter: np.ndarray, tasks: int, work: Work) -> list[Any]:
    """Return `run()`, from another thread."""
    global _watched
    if _watched is None:
        _watched = ThreadPoolExecutor(1, thread_name_prefix="otloss")
    future = _watched.submit(run)
    try:
        while not wait((future,), LIMITS.look).done:
            if work.name:
                error, share = counter[COUNTER.error : COUNTER.share + 1].view(np.float64).tolist()
                if tasks > 1:
                    share = min(counter[0], tasks) / tasks
                    error = error if error > work.tolerance else math.nan  # the task has ended, and others go on
                report(work.name, error or math.nan, tolerance=work.tolerance, share=share)
        return future.result()
    except BaseException:
        counter[0] = COUNTER.stopped
        wait((future,))
        raise


class _Timed:
    """A kernel whose calls are timed, in seconds of work and, for the thread that made this object, by the clock."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self._kernel = kernel
        self._caller, self.started = threading.get_ident(), time.perf_counter()
        self.work: list[float] = []
        self.delay = 1.0  # seconds by the clock per second of work, of the calling thread

    def __call__(self, *arguments: Any) -> Any:
        started, worked = time.perf_counter(), time.thread_time()
        result = self._kernel(*arguments)
        work = time.thread_time() - worked
        self.work.append(work)
        if threading.get_ident() == self._caller:
            self.delay = (time.perf_counter() - started) / max(work, 1e-6)
        return result


def _go_alone_after(region: _Timed) -> None:
    global _alone_until
    now = time.perf_counter()
    if now - region.started > sum(region.work) * region.delay + LIMITS.patience:
        _alone_until = now + LIMITS.pause * (now - region.started)


def _in_region(kernel: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
    results: list[Any] = []
    errors: list[BaseException] = []

    def work(_: Any) -> None:
        try:
            results.append(kernel(*calls.pop()))
        except BaseException as error:  # ctypes would print it and go on
            errors.append(error)

    _openmp.GOMP_parallel(_work_of_region(work), None, len(calls), 0)
    if errors:
        raise errors[0]
    # OpenMP may give fewer threads than were asked for; they have done all tasks.
    return results


def _in_pool(kernel: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
    """Run on Python's threads, where torch's OpenMP is another one than GNU's."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="otloss")
    others = [_pool.submit(kernel, *call) for call in calls[1:]]
    own = kernel(*calls[0])
    return [own, *(other.result() for other in others)]


def _find_openmp() -> Any:
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        try:
            library = ctypes.CDLL(str(path))  # torch has loaded it, so this only looks it up
        except OSError:
            continue
        if hasattr(library, "GOMP_parallel"):
            library.GOMP_parallel.argtypes = [_work_of_region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            library.GOMP_parallel.restype = None
            return library
    return None


_openmp = _find_openmp()


def _after_fork() -> None:
    # The threads of either pool exist in the parent alone.
    global _pool, _watched, _is_forked
    _pool, _watched, _is_forked = None, None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
