"""Orders of points in which neighbours follow each other, and how soft minima over points are split into tasks."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

ROWS = 16  # rows of a task; in cache, they serve one problem after the other
BLOCK = 8  # tasks that select columns together; each then selects among these columns
SQUARED, EUCLIDEAN, ABSOLUTE = 0, 1, 2
METRICS = {"sqeuclidean": SQUARED, "euclidean": EUCLIDEAN, "l1": ABSOLUTE}
MOST_AXES = 3  # in more dimensions the points of a block lie far apart
LEAST_PAIRS = 2**20  # below, a softmin of all pairs takes less time than the ordering
Orders = tuple[Tensor, Tensor]


def can_leave_out(x: Tensor, y: Tensor) -> bool:
    """Whether soft minima between these clouds get faster by `order_of` both."""
    return x.dim() == y.dim() == 2 and x.shape[-1] <= MOST_AXES and len(x) * len(y) >= LEAST_PAIRS


def order_of(points: Float[Tensor, "n d"], sizes: tuple[int, ...] = (ROWS * BLOCK, ROWS)) -> Int[Tensor, " n"]:
    """Return a permutation after which blocks of `sizes` points lie in small boxes; the last size divides the others.

    The cloud is cut into slabs, one axis after the other.

    Source: S. Leutenegger, M. Lopez, J. Edgington, STR: A Simple and Efficient Algorithm for R-Tree Packing, 1997.
    """
    x = points.detach().double().numpy()
    low, width = x.min(0), np.ptp(x, axis=0)
    axes = [k for k in np.argsort(-width) if width[k] > 0]
    label, order = np.zeros(len(x)), np.arange(len(x))
    unit = sizes[-1]
    held = len(x) / unit  # units in a slab; the slabs below hold powers of two, so that slabs nest
    for size, shape in zip((size // unit for size in sizes), (width, np.ones_like(width)), strict=False):
        for done, k in enumerate(axes):
            left = shape[axes[done:]]
            # The number of slabs along an axis that makes the boxes cubes, if the cloud fills its own box.
            cubes = (held / size) ** (1 / len(left)) * left[0] / left.prod() ** (1 / len(left))
            held = size * 2.0 ** max(0, round(math.log2(max(held / size / max(cubes, 1.0), 1.0))))
            held = size if len(left) == 1 else held
            order = np.argsort(label + 0.999 * (x[:, k] - low[k]) / width[k])
            label[order] = np.arange(len(x)) // (unit * held)
    return torch.from_numpy(order)


def tasks(n: int, problems: int, rows: int = ROWS) -> int:
    """Return the number of blocks of so many rows."""
    return (n + rows - 1) // rows * problems


def grouped(points: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Return the points with mass, their clusters, centres and weights of these, and the mean variance within one."""
    members = weights.nonzero().squeeze(-1)
    points, weights = points[members].double(), weights[members].double()
    size = max(1, -(-len(members) // count))
    of_members = torch.empty_like(members)
    if len(members):
        of_members[order_of(points, sizes=(size,))] = torch.arange(len(members), device=members.device) // size
    masses = weights.new_zeros(-(-len(members) // size)).index_add_(0, of_members, weights)
    centres = points.new_zeros(len(masses), points.shape[1])
    centres.index_add_(0, of_members, points * weights.unsqueeze(-1)).div_(masses.unsqueeze(-1))
    within = (weights * (points - centres[of_members]).square().sum(-1)).sum() / masses.sum()
    return members, of_members, centres, masses, float(within)
