"""One log line before and after a kernel is compiled, which takes seconds; the garbage collector is off meanwhile.

numba calls the listener for the functions of every package; it ignores all but ours. The clock of a call stands
still while a kernel is compiled.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from numba import types
from numba.core import event

from otloss._numba.cache import KernelCache
from otloss._numba.duration import expected_seconds, rounded
from otloss._progress import clock

_log = logging.getLogger("otloss")

# What some kernels are for. The numbers of a problem ask for these, and not its shape, so they may be compiled late.
_FOR = {
    "newton_problems": "Newton's method, for a problem of slow iterations",
    "barycenter_problems": "Newton's method, for a barycenter of slow iterations",
    "split_flows": "for clouds with equal points",
}


class _Listener(event.Listener):
    """Logs a line when a kernel of this library is about to be compiled, and one when it is.

    Meanwhile Python's garbage collector is off; it would take a sixth of the time, 2.8 of 17 s for five kernels. numba
    does not catch the errors of listeners, so nothing here may raise.
    """

    def __init__(self) -> None:
        self._depth, self._collects = 0, False
        self.is_silent = False
        self.announced: set[tuple[Any, Any]] = set()

    def on_start(self, occurrence: Any) -> None:
        self._depth += self._depth > 0 or _is_ours(occurrence.data["dispatcher"])
        if self._depth == 1:
            self._collects = gc.isenabled()
            clock.pause()
            gc.disable()
            with suppress(Exception):
                compilation = occurrence.data["dispatcher"], tuple(occurrence.data["args"])
                if compilation not in self.announced:
                    announce([compilation])

    def on_end(self, occurrence: Any) -> None:
        if self._depth == 1:
            if self._collects:
                gc.enable()
            seconds = clock.resume()
            with suppress(Exception):
                if not self.is_silent:
                    _log.info("compiled the CPU kernel %s in %.1f s", _name(occurrence.data["dispatcher"]), seconds)
        self._depth -= self._depth > 0

    def after_fork(self) -> None:
        """Reset the state: a child that was forked while another thread compiled never sees that end."""
        if self._depth > 0 and self._collects:
            gc.enable()
        self._depth = 0
        clock.resume()


@contextmanager
def silenced() -> Iterator[None]:
    """Within this context no lines are logged: the caller says itself what is done."""
    was_silent, _listener.is_silent = _listener.is_silent, True
    try:
        yield
    finally:
        _listener.is_silent = was_silent


def compile_together(*calls: tuple[Any, Sequence[Any]]) -> None:
    """Compile kernels for the arguments of a call of each, or read them from disk; one log line announces all.

    This is for a kernel that takes over from another one where the numbers of a problem are hard: a loop over problems
    of one shape compiles it with the first.
    """
    compilations = [(kernel, tuple(map(kernel.typeof_pyval, arguments))) for kernel, arguments in calls]
    missing = [one for one in compilations if not is_compiled(*one)]
    if len(missing) > 1:
        announce(missing)
        _listener.announced.update(missing)
    compile_apart(compilations)


def compile_apart(compilations: list[tuple[Any, Any]]) -> None:
    """Compile kernels or read them from disk; each of the processes that do so at the same time compiles others."""
    while compilations:
        kernel, signature = next((one for one in compilations if not _is_compiled_elsewhere(*one)), compilations[0])
        kernel.compile(signature)
        compilations.remove((kernel, signature))


def is_compiled(kernel: Any, signature: tuple[Any, ...]) -> bool:
    """Whether a kernel is in memory or on disk."""
    if signature in kernel.overloads:
        return True
    return isinstance(kernel._cache, KernelCache) and kernel._cache.is_kept(signature, kernel.targetctx)


def _is_compiled_elsewhere(kernel: Any, signature: tuple[Any, ...]) -> bool:
    """Whether another process seems to compile a kernel that is not in memory."""
    if signature in kernel.overloads or not isinstance(kernel._cache, KernelCache):
        return False
    return kernel._cache.is_locked(signature, kernel.targetctx)


def announce(compilations: Sequence[tuple[Any, Any]], *, elsewhere: bool = False) -> None:
    """Log a line before kernels are compiled, here or by another process."""
    if _listener.is_silent:
        return
    folder = compilations[0][0].stats.cache_path
    kept = f"kept in {folder}" if folder else (
        "kept in this process only, as no cache folder can be written to: set NUMBA_CACHE_DIR to one that can"
    )  # fmt: skip
    # Kernels that others call by address are parts of them, whose names say nothing to a user.
    entries = [each for each in compilations if not each[0].targetoptions.get("no_cpython_wrapper")] or compilations
    names = " and ".join(_name(kernel) + _dtype(arguments) + _purpose(kernel) for kernel, arguments in entries)
    names += f" (in {len(compilations)} parts)" if len(compilations) > len(entries) else ""
    plural = "s" if len(entries) > 1 else ""
    place = " in another process (calls are slower until then)" if elsewhere else ""
    time = rounded(expected_seconds([kernel for kernel, _ in compilations], elsewhere=elsewhere))
    _log.warning("compiling the CPU kernel%s %s%s, which takes %s of the processor, once; %s",
                 plural, names, place, time, kept)  # fmt: skip


def _purpose(kernel: Any) -> str:
    purpose = _FOR.get(kernel.py_func.__name__)
    return f" ({purpose})" if purpose else ""


def _is_ours(dispatcher: Any) -> bool:
    # Functions that programs make have no module.
    module = getattr(dispatcher.py_func, "__module__", None) or ""
    return module.partition(".")[0] in ("otloss", "otloss_llm")


def _name(dispatcher: Any) -> str:
    return f"{dispatcher.py_func.__module__}.{dispatcher.py_func.__name__}"


def _dtype(arguments: Any) -> str:
    """Return the narrowest type of floats among the arrays. Potentials are always in float64, so it is the costs'."""
    apart = [b for a in arguments for b in (a if isinstance(a, types.BaseTuple) else (a,))]
    dtypes = {str(a.dtype) for a in apart if isinstance(a, types.Array) and isinstance(a.dtype, types.Float)}
    return f" for {min(dtypes)}" if dtypes else ""  # "float32" is the smaller string


_listener = _Listener()
event.register("numba:compile", _listener)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_listener.after_fork)
