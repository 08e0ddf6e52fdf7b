"""Log lines from a call that takes longer than ten seconds: what it does, its error, and how long that will take.

The first line comes after ten seconds, and one more each time that the call has taken twice as long. Calls are timed by
a clock that stands still while a kernel is compiled, which has log lines of its own.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import NamedTuple

from torch import Tensor

_log = logging.getLogger("otloss")

SECONDS = 10.0  # after which a call says so
SAMPLE = 0.5  # share of the seconds until the next line, from which a loop's error is looked at
SMALLEST_WAIT = 1.0  # seconds between two looks that an estimate is made from, if the line is less late than that
FARTHEST = (
    100.0  # times the seconds between two looks: an error that hardly falls tells nothing of what is farther away
)


class _Look(NamedTuple):
    time: float
    error: float
    share: float


class _Clock:
    """Seconds, but for those in which any thread compiles a kernel.

    Both numbers change at once, as one tuple: times are wrong by a switch of threads at most, not by the seconds of a
    pause. There is no lock, which another thread could hold at a fork.
    """

    def __init__(self) -> None:
        self._state = 0.0, math.nan  # seconds left out, and when the pause began

    def now(self) -> float:
        while True:
            state = left_out, paused_at = self._state
            now = (time.perf_counter() if math.isnan(paused_at) else paused_at) - left_out
            if state is self._state:  # no pause meanwhile
                return now

    def pause(self) -> None:
        """Stop; numba's own lock lets one thread at a time pause and resume."""
        self._state = self._state[0], time.perf_counter()

    def resume(self) -> float:
        """Return the seconds since `pause`."""
        left_out, paused_at = self._state
        seconds = 0.0 if math.isnan(paused_at) else time.perf_counter() - paused_at
        self._state = left_out + seconds, math.nan
        return seconds


class _Call(threading.local):
    """The outermost public call on this thread."""

    name = ""
    started = 0.0
    due = SECONDS  # the seconds of the call at which the next line is due
    work = ""
    first = _Look(0.0, math.nan, math.nan)


clock = _Clock()
_call = _Call()


def begin(name: str) -> bool:
    """Note the start of a public call; return whether it is the outermost one, which is to `end`."""
    if _call.name:
        return False
    _call.name, _call.started, _call.due, _call.work = name, clock.now(), SECONDS, ""
    return True


def outermost() -> str:
    """Return the name of the outermost public call on this thread, "" outside of all."""
    return _call.name


def end() -> None:
    _call.name = ""


def report(work: str, error: float | Tensor = math.nan, *, tolerance: float = 0.0, share: float = math.nan) -> None:
    """Say what a call that takes long does; loops and kernels call it as often as they like.

    Args:
        work: what the loop does, in words.
        error: its error so far, which is to fall to `tolerance`. A loop that goes on within it improves potentials.
        share: of the loop that is done.
    """
    if not _call.name:
        return
    elapsed, is_new = clock.now() - _call.started, _call.work != work
    if elapsed < _call.due * (SAMPLE if is_new else 1.0):
        return
    worst = float(error.detach().amax()) if isinstance(error, Tensor) else error
    look = _Look(elapsed, worst, share)
    if is_new:
        _call.work, _call.first = work, look
    late = elapsed - _call.due
    if late < 0 or max(late, elapsed - _call.first.time) < SMALLEST_WAIT:
        return
    error_in_words = "" if math.isnan(worst) else f", error {worst:.2g}{_aim(worst, tolerance)}"
    seconds_left = _seconds_left(_call.first, look, tolerance)
    time_left = "the time left is not known" if seconds_left is None else f"about {max(seconds_left, 1):.0f} s left"
    _log.warning("%s runs for %.0f s: %s%s; %s", _call.name, elapsed, work, error_in_words, time_left)
    _call.first = look
    while _call.due <= elapsed:
        _call.due *= 2


def _aim(error: float, tolerance: float) -> str:
    if not tolerance > 0:
        return ""
    if error <= tolerance:
        return f" (within {tolerance:.2g}: further steps make the potentials more accurate)"
    return f" (to fall to {tolerance:.2g})"


def _seconds_left(first: _Look, now: _Look, tolerance: float) -> float | None:
    passed = now.time - first.time
    if now.share > first.share:
        return passed * max(1 - now.share, 0.0) / (now.share - first.share)
    if tolerance > 0 and tolerance < now.error < first.error < math.inf:
        factor = math.log(now.error / tolerance) / math.log(first.error / now.error)
        return passed * factor if factor <= FARTHEST else None
    return None
