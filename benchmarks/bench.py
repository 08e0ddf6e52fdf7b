"""Rows of the benchmarks: what ours and its peers take for the same work; timed, printed, kept and judged in one way.

A row is a case (its inputs in words), steps by name (ours and the peers, each of which does the work once) and a limit.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.measure import (
    SMALL_SIZES,
    TURN,
    Limit,
    Settings,
    Timing,
    ratios,
    report_times,
    say,
    table,
    timed_rounds,
)

OURS = "otloss"
Steps = Mapping[str, Callable[[], Any]]


def at_least(what: str, limit: float) -> Limit:
    """The fastest peer is to take at least `limit` times as long as we do."""
    return Limit(what, limit, at_least=True)


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Bench:
    """Times the rows of one benchmark, prints and keeps them, and collects the verdicts.

    Args:
        name: of the benchmark in results.csv.
        rounds, small_rounds: interleaved repetitions, unless the settings say otherwise.
    """

    def __init__(self, settings: Settings, name: str, *, rounds: int = 11, small_rounds: int = 1) -> None:
        self.settings, self.name, self.verdicts = settings, name, list[list[str]]()
        self.rounds = settings.rounds or (small_rounds if settings.small else rounds)

    def timed(
        self, case: str, steps: Steps, *, peer: str | None = None, notes: dict[str, str] | None = None,
        most: int | None = None, turn: float = TURN, processor: bool = False,
        before_round: Callable[[int], Any] | None = None,
    ) -> dict[str, Timing]:  # fmt: skip
        """Time, print and keep the steps of a row; ratios are to `peer` (the first of them).

        Args:
            notes: what stands beside a time, such as an error.
            most: rounds of steps that take seconds.
            processor: seconds of the processor, which other programs hardly change.
            turn, before_round: as for `timed_rounds`.
        """
        rounds = min(self.rounds, most or self.rounds)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clock = time.process_time if processor else time.perf_counter
            timings = timed_rounds(dict(steps), rounds=rounds, turn=turn, clock=clock, before_round=before_round)
        peer = peer or next(iter(steps))
        report_times(self.name, case, timings, peer=peer, rounds=rounds, output=self.settings.output, notes=notes)
        return timings

    def judge(self, limit: Limit, mine: Timing, *peers: Timing) -> None:
        """Compare ours with the fastest peer, round by round."""
        if not peers:
            self.verdicts.append(limit.verdict())
            return
        measured = ratios(mine, *peers)
        self.verdicts.append(limit.verdict(*([1 / ratio for ratio in measured] if limit.at_least else measured)))

    def row(self, limit: Limit, steps: Steps, *, ours: str = OURS, **options: Any) -> dict[str, Timing]:
        """Time a row whose case is what the limit names, and judge ours by the fastest step that is not ours."""
        timings = self.timed(limit.what, steps, **options)
        self.judge(limit, timings[ours], *peers_of(timings))
        return timings

    def report(self, title: str) -> None:
        """Print the verdicts; tiny sizes get none."""
        if self.settings.small:
            say(SMALL_SIZES)
            return
        say("")
        table([[title, "limit", "measured"], *self.verdicts])


def peers_of(timings: dict[str, Timing]) -> list[Timing]:
    return [timing for name, timing in timings.items() if not name.startswith(OURS)]
