"""One log line from a call that takes longer than ten seconds: what it does, its error, and how long that will take."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import NamedTuple

from torch import Tensor

_log = logging.getLogger("otloss")

SECONDS = 10.0  # after which a call says so
SAMPLE = 0.5  # share of SECONDS, from which a loop's error is looked at
LEAST_WAIT = 1.0  # seconds between two looks that an estimate is made from


class _Look(NamedTuple):
    time: float
    error: float
    share: float


class _Call(threading.local):
    """The outermost public call on this thread."""

    name = ""
    started = 0.0
    is_told = False
    work = ""
    first = _Look(0.0, math.nan, math.nan)


_call = _Call()


def begin(name: str) -> bool:
    """Note the start of a public call; return whether it is the outermost one, which is to `end`."""
    if _call.name:
        return False
    _call.name, _call.started, _call.is_told, _call.work = name, time.perf_counter(), False, ""
    return True


def end() -> None:
    _call.name = ""


def report(work: str, error: float | Tensor = math.nan, *, tolerance: float = 0.0, share: float = math.nan) -> None:
    """Say once what a call that takes long does; loops and kernels call it as often as they like.

    Args:
        work: what the loop does, in words.
        error: its error so far, which is to fall to `tolerance`.
        share: of the loop that is done.
    """
    if not _call.name or _call.is_told:
        return
    elapsed = time.perf_counter() - _call.started
    if elapsed < SAMPLE * SECONDS:
        return
    worst = float(error.detach().amax()) if isinstance(error, Tensor) else error
    look = _Look(elapsed, worst, share)
    if _call.work != work:
        _call.work, _call.first = work, look
    if elapsed < SECONDS or elapsed - _call.first.time < LEAST_WAIT:
        return
    _call.is_told = True
    known = "" if math.isnan(worst) else f", error {worst:.2g}" + f" (to fall to {tolerance:.2g})" * (tolerance > 0)
    left = _seconds_left(_call.first, look, tolerance)
    time_left = "the time left is not known" if left is None else f"about {left:.2g} s left"
    _log.warning("%s runs for %.0f s: %s%s; %s", _call.name, elapsed, work, known, time_left)


def _seconds_left(first: _Look, now: _Look, tolerance: float) -> float | None:
    passed = now.time - first.time
    if now.share > first.share:
        return passed * max(1 - now.share, 0.0) / (now.share - first.share)
    if tolerance > 0 and tolerance < now.error < first.error < math.inf:
        return passed * math.log(now.error / tolerance) / math.log(first.error / now.error)
    return None
