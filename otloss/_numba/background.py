"""Compilation by another process, while this one goes on without the kernel.

A method that can be done without runs within `declining()`. There a kernel that is neither in memory nor on disk raises
`StillCompilingError`, and a process begins to compile it. What it compiles stays on disk, even if this one ends first.

    python -m otloss._numba.background    compiles what its input names: pickled modules, names and signatures
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

Kernels = tuple[tuple[Any, tuple[Any, ...]], ...]  # with their signatures


class StillCompilingError(Exception):
    """A kernel is compiled by another process."""


class _State(threading.local):
    declines = False


@dataclass
class _Compilation:
    """Since when kernels are awaited, and the process that this one has started for them."""

    since: float
    process: subprocess.Popen[bytes] | None = None


class _Switch:
    """Whether other processes compile at all. Processes of `warm_up` and of the tests compile for themselves."""

    is_on = True


SWITCH = _Switch()
_state = _State()
_compilations: dict[Any, _Compilation] = {}
_ready: set[Any] = set()


@contextmanager
def compiling_here() -> Iterator[None]:
    """Within this context no other process compiles."""
    before, SWITCH.is_on = SWITCH.is_on, False
    try:
        yield
    finally:
        SWITCH.is_on = before


@contextmanager
def declining() -> Iterator[None]:
    """Within this context kernels that are not compiled raise `StillCompilingError`."""
    before, _state.declines = _state.declines, SWITCH.is_on
    try:
        yield
    finally:
        _state.declines = before


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
    if missing and _is_compiling(tuple(missing)):
        raise StillCompilingError


def _kinds(arguments: Any) -> Any:
    """Return what the signature follows from, in a tenth of the time that numba takes."""
    if isinstance(arguments, tuple):
        return tuple(map(_kinds, arguments))
    kind = type(arguments)
    return (arguments.dtype.char, arguments.ndim, arguments.flags.num) if kind is np.ndarray else kind


def _is_ready(kernel: Any, signature: tuple[Any, ...]) -> bool:
    """Whether a call compiles nothing, or no other process could compile for this one."""
    from otloss._numba.notices import is_compiled

    return is_compiled(kernel, signature) or kernel.stats.cache_path is None or not sys.executable


def _is_compiling(missing: Kernels) -> bool:
    """Whether another process compiles; one is started, unless one of this process still compiles other kernels.

    Several programs may start one each. The cache lets one of these compile a kernel, and the others wait for it.
    """
    from otloss._numba.cache import LONGEST
    from otloss._numba.notices import announce

    if missing not in _compilations:
        _compilations[missing] = _Compilation(since=time.monotonic())
        announce(missing, elsewhere=True)
    compilation = _compilations[missing]
    if time.monotonic() > compilation.since + LONGEST:
        return False  # it has failed
    if compilation.process is None:
        if any(other.process is not None and other.process.poll() is None for other in _compilations.values()):
            return True
        try:
            compilation.process = _start(missing)
        except OSError:  # no process
            return False
    return compilation.process.poll() is None


def _start(missing: Kernels) -> subprocess.Popen[bytes]:
    jobs = [(kernel.py_func.__module__, kernel.py_func.__name__, signature) for kernel, signature in missing]
    process = start_python("-m", __name__, stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(pickle.dumps(jobs))
    return process


def start_python(*arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start a process that compiles: the same Python and packages, one thread, and nothing is printed."""
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, *arguments], stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def _compile_all() -> None:
    for module, name, signature in pickle.load(sys.stdin.buffer):
        getattr(import_module(module), name).compile(signature)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_compilations.clear)
if __name__ == "__main__":
    _compile_all()
