"""Distances between clouds of points, to a few roundings also far from the origin and between near points.

In few dimensions they are sums over differences. In many, on a CPU, a matrix product is ten times faster:

    |x_i - y_j|^2 = s_ij - 2 (x_i - c).(y_j - c)        s_ij = |x_i - c|^2 + |y_j - c|^2,  c the mean of y

Its error is some roundings of s_ij, which are large beside the distance of points that are nearer to each other than
to c. A product is kept where it is at least a share of s_ij that depends on its dtype. In float32 that share is 1/2,
and the error 6e-7 at most and 1e-7 in the mean, as large as for differences in 64 dimensions. The few pairs of a
block that are nearer are computed again from differences. Where they are many (the points form clusters) the block is
computed again, for float32 by a product in float64, which has digits to spare, and from differences otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import broadcast_shape

# Per dtype of the points: the dtypes of the products to try, and the least share of s_ij at which they are right.
Tries = tuple[tuple[torch.dtype, float], ...]
_DTYPES: dict[torch.dtype, Tries] = {
    torch.float32: ((torch.float32, 0.5), (torch.float64, 1e-6)),
    torch.float64: ((torch.float64, 1 / 16),),
}
# In a search the potentials are as large as s_ij, or nearly so, and have the roundings of that.
_DTYPES_OF_SEARCH: dict[torch.dtype, Tries] = _DTYPES | {torch.float64: ((torch.float64, 1e-6),)}


@dataclass(frozen=True)
class Products:
    """The sizes from which a product of matrices is the faster way on a CPU.

    Attributes:
        min_axes, min_coordinates, min_multiplications: dimensions, coordinates of the smaller cloud, and
            multiplications in all.
        min_coordinates_of_gradients: of the smaller cloud, for the gradients of distances.
        block_entries: of a block of rows, 8 MiB at most: they stay in the cache between product and comparison.
        max_kept_entries: of all matrices that a search keeps, a quarter of what Newton's method may hold.
        max_entries_in_both: of matrices that it keeps in float32 and in float64.
        sample: points of a cloud, to tell whether many pairs are near.
    """

    min_axes: int = 24
    min_coordinates: int = 2**10
    min_multiplications: int = 2**18
    min_coordinates_of_gradients: int = 2**13
    block_entries: int = 2**20
    max_kept_entries: int = 2**26
    max_entries_in_both: int = 2**24
    sample: int = 32


PRODUCTS = Products()


def distances(
    x: Float[Tensor, "*batch n d"],
    y: Float[Tensor, "*batch m d"],
    *,
    order: float = 2.0,
    squared: bool = False,
    for_search: bool = False,
) -> Float[Tensor, "*batch n m"]:
    """Return the distances of all points of x to all of y in the norm of `order`, 1 or 2, without a graph.

    `for_search` allows float64 distances an error of some roundings of s_ij, down to 1e-6 of it.
    """
    if order != 2 or not suit_products(x, y):
        lengths = _from_differences(x, y, order)
        return lengths.square_() if squared else lengths
    tries = (_DTYPES_OF_SEARCH if for_search else _DTYPES)[x.dtype]
    return by_problems(lambda a, b: (_by_rows(a, b, squared, tries),), x, y)[0]


def _by_rows(x: Tensor, y: Tensor, squared: bool, tries: Tries) -> Tensor:
    batch, (n, m) = broadcast_shape(x.shape[:-2], y.shape[:-2]), (x.shape[-2], y.shape[-2])
    centred = _Centred(y, tries)
    step = max(1, PRODUCTS.block_entries // (batch.numel() * m))
    with torch.autocast(x.device.type, enabled=False):
        if step >= n:
            squares = _squares(x, centred, 0 if x is y else None)
            return (squares if squared else squares.sqrt_()).to(x.dtype)
        lengths = x.new_empty(*batch, n, m)
        for start in range(0, n, step):
            first, block = start if x is y else None, slice(start, start + step)
            squares = _squares(x[..., block, :], centred, first)
            lengths[..., block, first:] = squares if squared else squares.sqrt_()
            if x is y:  # the half below the diagonal follows from the half above
                lengths[..., block.stop :, block] = lengths[..., block, block.stop :].mT
    return lengths


def by_problems(function: Callable[..., tuple[Tensor, ...]], x: Tensor, y: Tensor, *others: Tensor) -> list[Tensor]:
    """Return what `function` gives for all problems, from calls with so few that their copies stay in the cache."""
    batch, (n, d), m = x.shape[:-2], x.shape[-2:], y.shape[-2]
    together = max(1, PRODUCTS.block_entries // 8 // max(n * d, m * d, n * m))
    if batch.numel() <= together or any(t.shape[:-2] != batch for t in (y, *others)):
        return list(function(x, y, *others))
    flat = [t.reshape(-1, *t.shape[-2:]).split(together) for t in (x, y, *others)]
    blocks = [function(*block) for block in zip(*flat, strict=True)]
    return [torch.cat(parts).unflatten(0, batch) for parts in zip(*blocks, strict=True)]


def are_near(x: Tensor, y: Tensor) -> bool:
    """Whether float32 products are not right for many pairs of points, by a sample of x."""
    dtype, share = _DTYPES[torch.float32][0]
    sample = x[..., :: -(-x.shape[-2] // PRODUCTS.sample), :]
    squares, sums = _product(sample, _Centred(y, ()), dtype, None)
    near = int((squares >= sums.mul_(share)).logical_not_().sum()) - (len(sample) if x is y else 0)
    return near * x.shape[-1] > squares.numel()


def suit_products(x: Tensor, y: Tensor, *, coordinates: int = PRODUCTS.min_coordinates) -> bool:
    """Whether a product is the faster way to these distances. Other devices are slow in float64, or lack it."""
    axes = x.shape[-1]
    if axes < PRODUCTS.min_axes or x.device.type != "cpu" or x.dtype not in _DTYPES:
        return False
    n, m = x.shape[-2], y.shape[-2]
    problems = broadcast_shape(x.shape[:-2], y.shape[:-2]).numel()
    return min(n, m) * axes >= coordinates and problems * n * m * axes >= PRODUCTS.min_multiplications


class _CentredPoints(NamedTuple):
    """The centre (..., 1, d), the points relative to it (..., m, d), and their squared lengths (..., 1, m)."""

    centre: Tensor
    points: Tensor
    squares: Tensor


class _Centred:
    """The points y relative to their centre, in each dtype that is asked for.

    `tries` are the products for the next block of rows: those that were not right for a block are left out.
    """

    def __init__(self, y: Tensor, tries: Tries) -> None:
        self.y = y
        self.tries = tries
        self._cache: dict[torch.dtype, _CentredPoints] = {}

    def in_dtype(self, dtype: torch.dtype) -> _CentredPoints:
        if dtype not in self._cache:
            y = self.y.to(dtype)
            centre = y.mean(-2, keepdim=True)
            y = y - centre
            self._cache[dtype] = _CentredPoints(centre, y, y.square().sum(-1).unsqueeze(-2))
        return self._cache[dtype]


def _squares(x: Tensor, centred: _Centred, first: int | None) -> Tensor:
    """Return the squared distances of rows x to all points, or to those from `first` on, which the rows begin with."""
    y = centred.y[..., first:, :]
    for dtype, share in centred.tries:
        squares, sums = _product(x, centred, dtype, first)
        if not sums.amax() < torch.inf:
            continue
        # Written so that NaN, the difference of two infinities, counts as near.
        near = (squares >= sums.mul_(share)).logical_not_()
        if first is not None:  # points and themselves
            near.diagonal(0, -2, -1).fill_(False)
            squares.diagonal(0, -2, -1).fill_(0.0)
        pairs = near.nonzero()
        if len(pairs) * x.shape[-1] <= PRODUCTS.block_entries:
            return _from_near(squares, pairs, x, y)
        centred.tries = centred.tries[1:]
    return _from_differences(x, y, 2.0).square_()


def _product(x: Tensor, centred: _Centred, dtype: torch.dtype, first: int | None) -> tuple[Tensor, Tensor]:
    """Return |x_i - y_j|^2 by a product, and s_ij."""
    centre, points, y_squares = centred.in_dtype(dtype)
    a, b = x.to(dtype) - centre, points[..., first:, :]
    sums = a.square().sum(-1, keepdim=True) + y_squares[..., first:]
    return sums - 2 * (a @ b.mT) if sums.dim() > 2 else torch.addmm(sums, a, b.mT, alpha=-2), sums


def _from_near(squares: Tensor, near: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the squares with those at the places `near` computed again, from differences in float64."""
    if len(near):
        *problem, row, column = near.unbind(-1)
        x, y = (t.expand(*squares.shape[:-2], *t.shape[-2:]) for t in (x, y))
        apart = x[*problem, row].double() - y[*problem, column]
        squares[*problem, row, column] = apart.square_().sum(-1).to(squares.dtype)
    return squares


def _from_differences(x: Tensor, y: Tensor, order: float) -> Tensor:
    # By default torch takes the product for larger clouds: in the dtype of the points, also for near points.
    return torch.cdist(x, y, p=order, compute_mode="donot_use_mm_for_euclid_dist")
