"""Compilation by other processes, while this one goes on without the kernel.

A method that can be done without runs within `declining()`. There a kernel that is neither in memory nor on disk raises
`StillCompilingError`, and processes begin to compile it. What they compile stays on disk, even if this one ends first.

    python -m otloss._numba.background    compiles what its input names: pickled modules, names and signatures
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from otloss._progress import clock

Result = TypeVar("Result")
Kernel = tuple[Any, tuple[Any, ...]]  # with its signature
MAX_ENTRIES_IN_TORCH = 2**25  # a second of the processor in torch; a kernel compiles in 2 to 5


class StillCompilingError(Exception):
    """Kernels are compiled by these processes."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        super().__init__("a kernel is compiled by another process")
        self._processes = processes

    def wait(self) -> None:
        """Wait for the processes. The clock of the call stands still."""
        from otloss._numba.cache import LONGEST

        clock.pause()
        try:
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LONGEST)
        finally:
            clock.resume()


class _State(threading.local):
    declines = False
    processes = 1


@dataclass
class _Compilation:
    """Kernels that are awaited, when their compilation began, and the processes that this one has started for them."""

    kernels: tuple[Kernel, ...]
    start_time: float
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.processes if process.poll() is None]


class _Switch:
    """Whether other processes compile at all. Processes of `warm_up` and of the tests compile for themselves."""

    is_on = True


SWITCH = _Switch()
_state = _State()
_compilations: dict[Kernel, _Compilation] = {}
_lock = threading.RLock()  # for the compilations
_ready: set[Any] = set()


@contextmanager
def compiling_here() -> Iterator[None]:
    """Within this context no other process compiles."""
    was_on, SWITCH.is_on = SWITCH.is_on, False
    try:
        yield
    finally:
        SWITCH.is_on = was_on


@contextmanager
def declining(entries: int = 0, *, processes: int = 1) -> Iterator[None]:
    """Within this context kernels that are not compiled raise `StillCompilingError`.

    They do not where torch would compute more than `MAX_ENTRIES_IN_TORCH` of costs in their place. A call that waits
    has a core for a second process.
    """
    previous_state = _state.declines, _state.processes
    _state.declines, _state.processes = SWITCH.is_on and entries <= MAX_ENTRIES_IN_TORCH, processes
    try:
        yield
    finally:
        _state.declines, _state.processes = previous_state


class Counts(NamedTuple):
    """How many iterations are done without a kernel: until one looks for it again, in total, and the smallest count."""

    until_look: int
    total: int
    smallest: int


def run_when_compiled(
    run: Callable[[Result | None], Result], iterate: Callable[[Result | None, int], Result],
    is_solved: Callable[[Result], bool], *, counts: Counts, entries: int = 0, processes: int = 1,
) -> Result:  # fmt: skip
    """Return what `run` returns; as long as its kernel is compiled elsewhere, iterate without it.

    The iterations may solve the problem, and then `run` is not needed. Where fewer than the smallest count are left,
    they would hardly help, and the call waits.

    Args:
        run, iterate: begin from the previous result, None at first; `iterate` also gets the number of iterations.
        entries, processes: as for `declining`.
    """
    result, remaining = None, counts.total
    while True:
        try:
            with declining(entries, processes=processes):
                return run(result)
        except StillCompilingError as compilation:
            count = min(counts.until_look, remaining)
            if count < counts.smallest:
                compilation.wait()
                continue
            result, remaining = iterate(result, count), remaining - count
            if is_solved(result):
                return result


def check_compiled(*calls: tuple[Any, Any, Callable[[], tuple[Any, ...]]]) -> None:
    """Raise StillCompilingError within `declining()` if a kernel is missing.

    Each call has the kernel, the arguments from which the types of the others follow, and what makes them all.
    """
    if not _state.declines:
        return
    missing = []
    for kernel, deciding, all_arguments in calls:
        kinds = kernel, _kinds(deciding)
        if kinds in _ready:
            continue
        signature = tuple(map(kernel.typeof_pyval, all_arguments()))
        if _is_ready(kernel, signature):
            _ready.add(kinds)
        else:
            missing.append((kernel, signature))
    if not missing:
        return
    with _lock:
        processes = _processes_for(missing)
    if processes:
        raise StillCompilingError(processes)


def _kinds(arguments: Any) -> Any:
    """Return what the signature follows from, in a tenth of the time that numba takes."""
    if isinstance(arguments, tuple):
        return tuple(map(_kinds, arguments))
    kind = type(arguments)
    return (arguments.dtype.char, arguments.ndim, arguments.flags.num) if kind is np.ndarray else kind


def _is_ready(kernel: Any, signature: tuple[Any, ...]) -> bool:
    """Whether a call compiles nothing, or no other process could compile for this one."""
    from otloss._numba.notices import is_compiled

    return is_compiled(kernel, signature) or kernel.stats.cache_path is None or not can_start_python()


def _processes_for(missing: Sequence[Kernel]) -> list[subprocess.Popen[bytes]]:
    """Return the processes to wait for; new ones are started, unless some of this process compile other kernels.

    Several programs may start some each. The cache lets one of all processes compile a kernel, and the others wait.
    """
    from otloss._numba.cache import LONGEST
    from otloss._numba.notices import announce

    new = tuple(kernel for kernel in missing if kernel not in _compilations)
    if new:
        _compilations.update(dict.fromkeys(new, _Compilation(new, start_time=time.monotonic())))
        announce(new, elsewhere=True)
    for compilation in (_compilations[kernel] for kernel in missing):
        if time.monotonic() > compilation.start_time + LONGEST:
            continue  # it has failed
        if not compilation.processes:
            running = [process for other in _compilations.values() for process in other.running()]
            if running:
                return running
            compilation.processes = _start(compilation.kernels, max(1, min(_state.processes, torch.get_num_threads())))
        if compilation.running():
            return compilation.running()
    return []


def _start(kernels: Sequence[Kernel], processes: int) -> list[subprocess.Popen[bytes]]:
    """Start processes that compile kernels, at most one for each; none if that fails."""
    jobs = pickle.dumps([(kernel.py_func.__module__, kernel.py_func.__name__, types) for kernel, types in kernels])
    started = []
    with suppress(OSError):  # no process
        for _ in range(min(processes, len(kernels))):
            process = start_python("-m", __name__, stdin=subprocess.PIPE)
            assert process.stdin is not None
            with process.stdin as pipe:
                pipe.write(jobs)
            started.append(process)
    return started


def can_start_python() -> bool:
    """Whether `sys.executable` is Python. In a frozen program it is the program, which would start itself again."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def start_python(*arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start a process that compiles: the same Python and packages, one thread, and nothing is printed."""
    # The import system passes over what is not a string. An empty string stands for the current folder, which the
    # new process searches for modules only if this one does.
    paths = os.pathsep.join(path or os.curdir for path in sys.path if isinstance(path, str))
    return subprocess.Popen(
        [sys.executable, *arguments], stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def _compile_all() -> None:
    from otloss._numba.notices import compile_apart

    jobs = pickle.load(sys.stdin.buffer)
    compile_apart([(getattr(import_module(module), name), signature) for module, name, signature in jobs])


def _after_fork() -> None:
    # The processes are children of the parent alone, one of whose threads may have held the lock.
    global _lock
    _lock = threading.RLock()
    _compilations.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
if __name__ == "__main__":
    _compile_all()
