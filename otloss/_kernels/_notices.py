"""One log line before and after a kernel is compiled, which takes seconds; the garbage collector is off meanwhile.

numba calls the listener for the functions of every package; it ignores those of others.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from contextlib import suppress
from typing import Any

from numba import types
from numba.core import event

_log = logging.getLogger("otloss")


class _Listener(event.Listener):
    """Logs a line when a kernel of this library is about to be compiled, and one when it is.

    Meanwhile Python's garbage collector is off; it would take a quarter of the time. numba does not catch the errors of
    listeners, so nothing here may raise.
    """

    def __init__(self) -> None:
        self._depth, self._collects, self._start = 0, False, 0.0

    def on_start(self, occurrence: Any) -> None:
        self._depth += self._depth > 0 or _is_ours(occurrence.data["dispatcher"])
        if self._depth == 1:
            self._collects, self._start = gc.isenabled(), time.perf_counter()
            gc.disable()
            with suppress(Exception):
                _announce(occurrence.data["dispatcher"], occurrence.data["args"])

    def on_end(self, occurrence: Any) -> None:
        if self._depth == 1:
            if self._collects:
                gc.enable()
            seconds = time.perf_counter() - self._start
            with suppress(Exception):
                _log.info("compiled the CPU kernel %s in %.1f s", _name(occurrence.data["dispatcher"]), seconds)
        self._depth -= self._depth > 0

    def after_fork(self) -> None:
        """Reset the state: a child that was forked while another thread compiled never sees that end."""
        if self._depth > 0 and self._collects:
            gc.enable()
        self._depth = 0


def _announce(dispatcher: Any, arguments: Any) -> None:
    folder = dispatcher.stats.cache_path
    kept = f"kept in {folder}" if folder else (
        "kept in this process only, as no cache folder can be written to: set NUMBA_CACHE_DIR to one that can"
    )  # fmt: skip
    name, seconds = _name(dispatcher) + _dtype(arguments), getattr(dispatcher.py_func, "seconds", 1)
    _log.warning("compiling the CPU kernel %s: takes about %d s, once; %s", name, seconds, kept)


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
