"""Optimal plans that tie: which other ones an exact search looks at before it ends.

At a plan P that is optimal at the cost grad E(P) other plans may be optimal too, as between unweighted graphs, and lead
to a lower E. Costs that are moved a little in a fixed random direction have one of them as their optimal plan.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

APART = 1e-9  # Plans that differ by more of their mass are two.
TRIES = 4  # directions, from the last fall on
NUDGE = 1e-7  # of the largest cost: by how much costs are moved
# Multipliers of a hash of row, column and direction, and its number of bits.
ROW, COLUMN, DIRECTION, SPREAD, BITS = 73856093, 19349663, 83492791, 2654435761, 32


def direction_of_costs(n: int, m: int, number: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch n m"]:
    """Return numbers from 0 to 1 without a pattern, in float64; others for each number."""
    rows, columns = (torch.arange(size, device=number.device) for size in (n, m))
    code = (rows.unsqueeze(-1) * ROW) ^ (columns * COLUMN) ^ (number[..., None, None] * DIRECTION)
    return (code * SPREAD % 2**BITS).double() / 2**BITS


def nudged(
    cost: Float[Tensor, "*batch n m"], number: Int[Tensor, "*batch"], *, has_mass: Bool[Tensor, "*batch n m"]
) -> Float[Tensor, "*batch n m"]:
    """Return costs >= 0 that are moved in the direction of this number, 1 to TRIES; 0 moves none.

    The size of the move follows the largest cost between bins that have mass.
    """
    largest = cost.where(has_mass, 0.0).amax((-2, -1), keepdim=True)
    size = NUDGE * torch.where(largest > 0, largest, 1.0) * (number > 0)[..., None, None]
    return cost + size * direction_of_costs(cost.shape[-2], cost.shape[-1], number)
