"""When the host looks at what a device has computed."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MIN_WAIT = 4  # iterations between two looks


class Looks:
    """When the host looks at the results of a device. Each look makes it wait for all the work that is queued.

    On a CPU, whose work is never queued, it looks after each iteration. Elsewhere it looks after as many iterations as
    the contraction since the last look asks for, `MIN_WAIT` at least, and at most as many as are done already. So 200
    iterations take some seven looks.

    Args:
        is_queued: whether the work of the device is queued.
    """

    def __init__(self, *, is_queued: bool) -> None:
        self.is_queued = is_queued
        self.next_count = MIN_WAIT
        self.previous_count, self.previous_excess = 0, math.inf

    def is_due(self, count: int) -> bool:
        return not self.is_queued or count >= self.next_count

    def largest_excess(self, excess: Float[Tensor, "..."], is_active: Bool[Tensor, "..."], count: int) -> float:
        """Return the largest excess of an active problem, 0 if none is active, and choose the count of the next look.

        The excess is an error over the one that is allowed.
        """
        worst = float(torch.where(is_active, excess, 0.0).amax()) if excess.numel() else 0.0
        wait = count
        if 1 < worst < self.previous_excess < math.inf:
            speed = math.log(self.previous_excess / worst) / (count - self.previous_count)
            wait = min(count, math.ceil(math.log(worst) / speed))
        self.next_count = count + max(wait, MIN_WAIT)
        self.previous_count, self.previous_excess = count, worst
        return worst
