"""Orders of points in which neighbours follow each other, and how soft minima over points are split into tasks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

ROWS = 16  # rows of a task; in cache, they serve one problem after the other
BLOCK = 8  # tasks that select columns together; each then selects among these columns
METRIC_NUMBERS = {"sqeuclidean": 0, "euclidean": 1, "l1": 2}  # The kernels know the metrics by these numbers.
Orders = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Ordering:
    """The clouds whose soft minima are faster in an order in which neighbours follow each other.

    Attributes:
        max_axes: in more dimensions the points of a block lie far apart.
        min_pairs: with fewer, a soft minimum over all pairs takes less time than the ordering.
    """

    max_axes: int = 3
    min_pairs: int = 2**20


ORDERING = Ordering()
_TIGHTER = 1e-2  # Outliers alone, which a cut sets apart too, lower the variance within clusters less.


class Groups(NamedTuple):
    """The clusters of the points with mass.

    Attributes:
        members: the positions of these points.
        labels: the cluster of each of them.
        centres, masses: of each cluster.
        variance: the mean variance within a cluster.
    """

    members: Int[Tensor, " members"]
    labels: Int[Tensor, " members"]
    centres: Float[Tensor, "clusters d"]
    masses: Float[Tensor, " clusters"]
    variance: float


def can_leave_out(x: Tensor, y: Tensor) -> bool:
    """Whether soft minima between these clouds get faster by `order_of` both."""
    return x.dim() == y.dim() == 2 and x.shape[-1] <= ORDERING.max_axes and len(x) * len(y) >= ORDERING.min_pairs


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
    units = len(x) / unit  # in a slab; the slabs below hold powers of two, so that slabs nest
    for size, shape in zip((size // unit for size in sizes), (width, np.ones_like(width)), strict=False):
        for cut, k in enumerate(axes):
            widths = shape[axes[cut:]]
            # The number of slabs along an axis that makes the boxes cubes, if the cloud fills its own box.
            cubes = (units / size) ** (1 / len(widths)) * widths[0] / widths.prod() ** (1 / len(widths))
            units = size * 2.0 ** max(0, round(math.log2(max(units / size / max(cubes, 1.0), 1.0))))
            units = size if len(widths) == 1 else units
            order = np.argsort(label + 0.999 * (x[:, k] - low[k]) / width[k])
            label[order] = np.arange(len(x)) // (unit * units)
    return torch.from_numpy(order)


def tasks(n: int, problems: int, rows: int = ROWS) -> int:
    """Return the number of blocks of so many rows."""
    return (n + rows - 1) // rows * problems


def grouped(
    points: Float[Tensor, "n d"], weights: Float[Tensor, " n"], count: int, *, widest: float = math.inf
) -> Groups:
    """Return at most `count` clusters of equally many points with mass, neighbours of each other.

    Where that makes them far tighter, they are cut between neighbours farther apart than `widest`, into up to twice as
    many: a cluster with points of two tight groups stands for neither, and would move the mass of one to the other.
    """
    members = weights.nonzero().squeeze(-1)
    points, weights = points[members].double(), weights[members].double()
    size = max(1, -(-len(members) // count))
    order = order_of(points, sizes=(size,)) if len(members) else members
    is_first = torch.arange(len(members), device=members.device) % size == 0
    groups = _grouped_from(is_first, order, members, points, weights)
    is_cut = points[order].diff(dim=0).square().sum(-1) > widest**2
    if not 0 < int(is_cut.sum()) <= count:
        return groups
    is_first[1:] |= is_cut
    cut = _grouped_from(is_first, order, members, points, weights)
    return cut if cut.variance < _TIGHTER * groups.variance else groups


def _grouped_from(is_first: Tensor, order: Tensor, members: Tensor, points: Tensor, weights: Tensor) -> Groups:
    """Return the clusters that begin at these places of the order."""
    labels = torch.empty_like(members)
    labels[order] = is_first.cumsum(0) - 1
    masses = weights.new_zeros(int(is_first.sum())).index_add_(0, labels, weights)
    centres = points.new_zeros(len(masses), points.shape[1])
    centres.index_add_(0, labels, points * weights.unsqueeze(-1)).div_(masses.unsqueeze(-1))
    variance = (weights * (points - centres[labels]).square().sum(-1)).sum() / masses.sum()
    return Groups(members, labels, centres, masses, float(variance))
