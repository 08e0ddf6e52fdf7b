"""Curves of recall against precision, and which of two is better at equal recall.

A trained model at sampling temperature T has a forward divergence KL(source || model), which says what it misses, and a
reverse one, KL(model || source), which says what it writes that the source would not. Lower temperatures trade the one
for the other, so that one training gives a curve, the *frontier*, and a comparison at one temperature says little. Arms
are compared by the reverse divergence that they reach at equal forward divergence, and by its mean over the range of
forward divergences that both of them cover, paired over seeds that share start, batches and samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.interpolate import PchipInterpolator

from benchmarks.paper.tables import half_interval

GRID = 64  # points of the range over which a mean difference is taken


@dataclass(frozen=True)
class Frontier:
    """Divergences of one trained model over temperatures, in nats per token; lists of one length.

    Attributes:
        temperatures: of sampling, in falling order.
        forward, reverse: KL(source || model) and KL(model || source) at these.
        forward_error, reverse_error: their standard errors from sampling.
    """

    temperatures: Sequence[float]
    forward: Sequence[float]
    reverse: Sequence[float]
    forward_error: Sequence[float]
    reverse_error: Sequence[float]

    def efficient(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (forward, reverse) of the points that no other point beats in both, by rising forward divergence.

        Above the temperature of the best recall both divergences rise, and below some temperature reverse may too.
        """
        order = np.lexsort((self.reverse, self.forward))
        forward, reverse = np.asarray(self.forward)[order], np.asarray(self.reverse)[order]
        best = np.minimum.accumulate(reverse)
        kept = np.ones(len(order), dtype=bool)
        kept[1:] = reverse[1:] < best[:-1]
        return forward[kept], reverse[kept]

    @property
    def covered(self) -> tuple[float, float]:
        """The range of forward divergences in which `at` has values.

        It has no upper end if a lower temperature than the one of the least reverse divergence was measured: then
        cooling further gains nothing, and the least one is the best at any larger forward divergence too.
        """
        x, _ = self.efficient()
        coldest = self.forward[int(np.argmin(self.temperatures))]
        return float(x[0]), float(x[-1]) if coldest == x[-1] else math.inf

    def at(self, forward: float | np.ndarray) -> np.ndarray:
        """Return the least reverse divergence with at most these forward ones; NaN outside of `covered`.

        The curve between its points is a monotone cubic. A line would lie above a convex curve, by more the farther its
        points are apart, and the arms have their points at different places.
        """
        x, y = self.efficient()
        low, high = self.covered
        at = np.asarray(forward, dtype=float)
        reverse = np.asarray(PchipInterpolator(x, y)(at.clip(x[0], x[-1]))) if len(x) > 1 else np.full_like(at, y[0])
        return np.where((at >= low) & (at <= high), reverse, np.nan)


@dataclass(frozen=True)
class Difference:
    """Reverse divergence of one arm minus another's, paired over seeds; below 0 the first arm is better.

    Attributes:
        mean: over seeds, in nats per token.
        low, high: its 95 % interval (Student's t over seeds); infinite with one seed.
        seeds: how many were compared.
        share: of the forward range of both arms together that both of them cover, for `over_range`.
    """

    mean: float
    low: float
    high: float
    seeds: int
    share: float = 1.0

    @property
    def is_real(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def at_equal_recall(arm: Sequence[Frontier], other: Sequence[Frontier], forward: float) -> Difference | None:
    """Return the difference at one forward divergence; None where no seed has both curves there."""
    return _difference([float(a.at(forward) - b.at(forward)) for a, b in _paired(arm, other)])


def over_range(arm: Sequence[Frontier], other: Sequence[Frontier]) -> Difference | None:
    """Return the mean difference over the forward divergences that both curves cover; None where there are none.

    It is the area between the curves over the width of that range.
    """
    means, shares = [], []
    for a, b in _paired(arm, other):
        (x, _), (y, _) = a.efficient(), b.efficient()
        last = max(x[-1], y[-1])
        low, high = max(x[0], y[0]), min(a.covered[1], b.covered[1], last)
        if not low < high:
            continue
        grid = np.linspace(low, high, GRID)
        means.append(float(np.trapezoid(a.at(grid) - b.at(grid), grid) / (high - low)))
        shares.append((high - low) / (last - min(x[0], y[0])))
    return _difference(means, share=statistics.fmean(shares) if shares else 1.0)


def _paired(arm: Sequence[Frontier], other: Sequence[Frontier]) -> list[tuple[Frontier, Frontier]]:
    if len(arm) != len(other):
        raise ValueError(f"the arms have {len(arm)} and {len(other)} seeds, expected the same seeds for both.")
    return list(zip(arm, other, strict=True))


def _difference(values: Sequence[float], share: float = 1.0) -> Difference | None:
    change = half_interval(values)
    if change.count == 0:
        return None
    half = math.inf if change.count == 1 else change.deviation
    return Difference(change.mean, change.mean - half, change.mean + half, change.count, share)
