"""What the kernels of exact transport write, and the check that each answer is certified."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

MAX_PIVOTS = 10_000_000  # the simplex needs a small multiple of n + m
_GAP_TOLERANCE = 1e-7  # the duality gap allowed, relative to the largest cost times the mass


class Outcome(NamedTuple):
    """The columns of the outcome of problems.

    Attributes:
        value: the transport cost.
        gap: the duality gap.
        scale: what the gap is relative to, the largest cost times the mass.
        pivots: the number of pivots, -1 where the optimum was not reached.
    """

    value: int = 0
    gap: int = 1
    scale: int = 2
    pivots: int = 3


OUTCOME = Outcome()


class Results(NamedTuple):
    """The results of B problems.

    Attributes:
        f, g: (B, n) and (B, m), the potentials.
        cells: (B, 2, n + m - 1), rows and columns of the cells of the plans.
        flows: (B, n + m - 1), the mass of these cells.
        outcome: (B, 4), with the columns `Outcome`.
    """

    f: np.ndarray
    g: np.ndarray
    cells: np.ndarray
    flows: np.ndarray
    outcome: np.ndarray


def check_outcome(outcome: np.ndarray, weights: list[np.ndarray], batch: torch.Size) -> None:
    """Raise RuntimeError if the search for an optimum ended early, or the duality gap is too large."""
    value, gap, scale, pivots = (outcome[:, column] for column in OUTCOME)
    if len(outcome) == 1 and pivots[0] >= 0 and abs(gap[0]) <= _GAP_TOLERANCE * scale[0] < math.inf:
        return  # as below, for a single problem
    stopped = pivots < 0
    # Not "gap > ...": an overflow leaves a NaN, or an infinity in both.
    apart = ~(np.abs(gap) <= _GAP_TOLERANCE * np.maximum(scale, np.finfo(np.float64).tiny)) | ~np.isfinite(value)
    if not (stopped | apart).any():
        return
    k = int((stopped | apart).argmax())
    name = f"problem {tuple(int(i) for i in np.unravel_index(k, batch))}" if batch else "the problem"
    if stopped[k]:
        sizes = " by ".join(str(int((w[k] > 0).sum())) for w in weights)
        raise RuntimeError(
            f"the exact solver stopped early on {name}, {sizes} bins with mass: "
            f"{MAX_PIVOTS} pivots were not enough; use an entropic transport cost for problems of this size."
        )
    raise RuntimeError(
        f"the exact solver left a duality gap of {float(gap[k]):.3g} at a value of {float(value[k]):.6g} in "
        f"{name}, expected at most {_GAP_TOLERANCE:g} of the largest cost times the mass, "
        f"{float(scale[k]):.3g}; rescale costs or masses that overflow float64."
    )
