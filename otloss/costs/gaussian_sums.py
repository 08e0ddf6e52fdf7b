"""Soft minima of squared distances between large clouds in up to three dimensions, through a regular grid.

Let s^2 = eps / 2. The kernel exp(-|x - y|^2 / eps) is a Gaussian of width s, so it is a convolution of three narrower
Gaussians, of the widths t, s' and t with t = s / 2 and s'^2 = s^2 - 2 t^2. Sums over the nodes z and z' of a grid of
spacing h replace the two integrals of the convolution:

    exp(-|x - y|^2 / 2 s^2) = c sum_z sum_z' exp(-|x - z|^2 / 2 t^2 - |z - z'|^2 / 2 s'^2 - |z' - y|^2 / 2 t^2)

A sum over the points y then takes three steps:

1. From the points y to the nodes z'. The sums are kept as logarithms.
2. From the nodes z' to the nodes z, one axis after the other (`GridCost`).
3. From the nodes z to the points x. The mean of z, with the weights of this sum, is x + (T(x) - x) t^2 / s^2. Here T(x)
   is the barycentric projection of x, which gives the gradient.

Error. The summand is a Gaussian function of z, and also of z', of the variance v = t^2 (1 - t^2 / s^2). By Poisson's
summation formula the two sums together are off by the share 4 exp(-2 pi^2 v / h^2) per axis. This share does not depend
on the distance of x and y. A fast Gauss transform bounds the absolute error instead, which is not enough here:
potentials over eps differ by hundreds.

Blocks. The points are divided into blocks that lie in small boxes, and each block reads only the nodes in a box of its
own. A bound says how much lies outside. Let f and g be the potentials, C the cost and P = exp((f + g - C) / eps) the
density of the plan. P sums to 1 over the weights of either side, so two blocks contribute at most the largest P between
their points. As a function of z this contribution is a Gaussian around x + (y - x) t^2 / s^2. If the boxes of points
have the centres a, b and the half widths d, e, then 2 x.y = 2 x.b + 2 a.y - 2 a.b + 2 (x - a).(y - b) gives

    eps log P <= max_x (f - |x|^2 + 2 x.b) + max_y (g - |y|^2 + 2 a.y) - 2 a.b + 2 d.e

Range. Exponents of a block are stored relative to a linear function of z, its tilt. It follows from the vector between
the centres of the two boxes of the block, and keeps the terms that count in the range of float64.

Sources: L. Greengard, J. Strain, The Fast Gauss Transform, 1991; L. Trefethen, J. Weideman, The Exponentially
Convergent Trapezoidal Rule, 2014.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss.costs.grid import GridCost


@dataclass(frozen=True)
class Summation:
    """How sums go through a grid, and for which clouds.

    Attributes:
        max_axes, min_pairs: clouds in more dimensions, and with fewer pairs, are not tried.
        ratio: t / s. The two outer Gaussians are as wide as each other, and the one in between has a real width.
        points_in_block, max_halvings: about so many points in a block, and at most 2^max_halvings blocks.
        blocks_in_product: whose boxes get one size, so that one product does for all.
        max_nodes: of the grid, which is 32 MiB then.
        max_peak: log P is small at a solution. Potentials before it may have a larger one; where the share is an
            estimate, log P counts as at most this.
        pairs_in_step: of a point and a block, whose sums are made at a time.
        smallest_exponent, smallest_weight: of factors and of weights within a block. Their sum stays above the
            logarithm of float64's smallest number.
        gain: the grid is used where it takes less than this share of the time of the pairs, since making it takes time
            too.
    """

    max_axes: int = 3
    min_pairs: int = 2**22
    ratio: float = 0.5
    points_in_block: int = 192
    max_halvings: int = 11
    blocks_in_product: int = 4
    max_nodes: int = 2**22
    max_peak: float = 20.0
    pairs_in_step: int = 2**20
    smallest_exponent: float = -600.0
    smallest_weight: float = -100.0
    gain: float = 0.45


@dataclass(frozen=True)
class Nanoseconds:
    """What a soft minimum takes.

    Attributes:
        pair: of points, in a sum over pairs; estimates from blocks see half of the pairs.
        point: that is read or written through the grid.
        entry: of a point and a node of two axes of its box.
        box_node: a node of the box of a block.
        node, log_node: a node of the grid and a cell of one of its axes, in products or in logarithms.
    """

    pair: float = 3.2
    point: float = 350.0
    entry: float = 1.1
    box_node: float = 12.0
    node: float = 0.16
    log_node: float = 2.0


SUMMATION, NANOSECONDS = Summation(), Nanoseconds()

CloudInBlocks = tuple[Tensor, Tensor]  # the points, and `in_blocks` of them


def in_blocks(points: Float[Tensor, "n d"]) -> Int[Tensor, "blocks points"]:
    """Return the positions of the points of each block.

    The cloud is cut in half across its longest axis, then each half, and so on. Sizes of blocks differ by at most one;
    a smaller block repeats its last point.
    """
    x, n = points.detach().double().numpy(), len(points)
    halvings = min(SUMMATION.max_halvings, max(0, round(math.log2(n / SUMMATION.points_in_block))))
    order, ends = np.arange(n), np.array([0, n])
    for done in range(halvings):
        ends = (np.arange(2**done + 1) << (halvings - done)) * n >> halvings
        block, rows = np.repeat(np.arange(2**done), np.diff(ends)), x[order]
        low = np.minimum.reduceat(rows, ends[:-1])
        width = np.maximum.reduceat(rows, ends[:-1]) - low
        axis = width.argmax(1)
        along = (rows[np.arange(n), axis[block]] - low[block, axis[block]]) / np.maximum(width.max(1), 1e-300)[block]
        order = order[np.argsort(block + 0.999 * along)]
    ends = np.arange(2**halvings + 1) * n >> halvings
    places = ends[:-1, None] + np.arange(np.diff(ends).max())
    return torch.from_numpy(order[np.minimum(places, ends[1:, None] - 1)])


class OutOfRangeError(ArithmeticError):
    """Numbers within a block differ by more than float64 holds."""


@dataclass(frozen=True)
class _Cloud:
    """One cloud, divided into blocks, with coordinates relative to its mean.

    Attributes:
        order: the points of each block (`in_blocks`).
        points: (blocks, points, 3), with zeros for missing axes.
        centre, half: (blocks, 3) centres and half widths of the boxes that hold the points of each block.
    """

    order: Int[Tensor, "blocks points"]
    points: Float[Tensor, "blocks points 3"]
    mean: Float[Tensor, " d"]
    centre: Float[Tensor, "blocks 3"]
    half: Float[Tensor, "blocks 3"]

    @staticmethod
    def build(x: Tensor, order: Tensor) -> _Cloud:
        mean = x.detach().double().mean(0)
        points = torch.nn.functional.pad(x.detach().double() - mean, (3 - x.shape[1], 0))[order]
        low, high = points.amin(1), points.amax(1)
        return _Cloud(order, points, mean, (low + high) / 2, (high - low) / 2)

    def __len__(self) -> int:
        return int(self.order.amax()) + 1

    def blocks_of(self, values: Tensor) -> Float[Tensor, "blocks points"]:
        """Return the values of the points of each block, with -inf at a repeated point."""
        values = values.detach().double()[self.order]
        values[:, 1:].masked_fill_(self.order[:, 1:] == self.order[:, :-1], -torch.inf)
        return values

    def largest_sums(self, potential: Tensor, centres: Tensor) -> Float[Tensor, "blocks others"]:
        """Return, for each block and each b in `centres`, the maximum of potential + 2 x.b over the points x."""
        columns = torch.cat([centres.T * 2, torch.ones_like(centres.T[:1])])
        step = max(1, SUMMATION.pairs_in_step // (self.points.shape[1] * len(centres)))
        rows = torch.cat([self.points, potential.unsqueeze(-1)], -1).split(step)
        return torch.cat([(x @ columns).amax(1) for x in rows])

    def restored(self, values: Tensor) -> Tensor:
        """Return values (blocks, points, ...) in the order of the points (points, ...)."""
        out = values.new_empty(len(self), *values.shape[2:])
        out[self.order] = values
        return out


@dataclass(frozen=True)
class _Blocks:
    """Some blocks whose boxes of nodes have one size.

    Let u be the vector from the centre of a block's points to the centre of its nodes. Then

        exp(-(z - x)^2 / 2 t^2) = exp(-(z - x - u)^2 / 2 t^2) exp(-u z / t^2) exp((u x + u^2 / 2) / t^2)

    The first is the factor, u z / t^2 the tilt, and the last exponent is `constant` of `_Side`.

    Attributes:
        index: the numbers of the blocks.
        boxes: the slices of the grid that hold their nodes.
        nodes: for each axis the coordinates z, (blocks, nodes).
        factors: for each axis (blocks, points, nodes).
        tilts: for each axis (blocks, nodes).
    """

    index: Tensor
    boxes: list[tuple[slice, ...]]
    nodes: list[Tensor]
    factors: list[Tensor]
    tilts: list[Tensor]

    def tilt(self, workspace: _Workspace, start: Tensor | None = None) -> Float[Tensor, "blocks i j k"]:
        """Return the sum of the tilts of the axes at the nodes, or `start` (blocks,) minus that sum."""
        first, second, third = self.tilts
        plane = first.unsqueeze(-1) + second.unsqueeze(1)
        if start is not None:
            plane, third = start[self.index, None, None] - plane, -third
        out = workspace.array("tilt", (*plane.shape, third.shape[1]))
        return torch.add(plane.unsqueeze(-1), third[:, None, None], out=out)

    def planes(self, first: Tensor, workspace: _Workspace) -> Float[Tensor, "blocks points ij"]:
        """Return the products of `first` (blocks, points, i) with the factors of the second axis."""
        second = self.factors[1]
        out = workspace.array("planes", (*first.shape, second.shape[-1]))
        return torch.mul(first.unsqueeze(-1), second.unsqueeze(-2), out=out).flatten(2)


class _Workspace:
    """Memory that one step after the other uses again. To allocate new arrays would take longer than to fill them."""

    def __init__(self) -> None:
        self._arrays: dict[str, Tensor] = {}

    def array(self, name: str, shape: Sequence[int]) -> Tensor:
        size = math.prod(shape)
        if name not in self._arrays or self._arrays[name].numel() < size:
            self._arrays[name] = torch.empty(size, dtype=torch.float64, device="cpu")
        return self._arrays[name][:size].view(shape)


@dataclass(frozen=True)
class _Side:
    """A cloud and the boxes of nodes of its blocks. `constant` (blocks, points) is explained at `_Blocks`."""

    cloud: _Cloud
    blocks: list[_Blocks]
    constant: Tensor

    @staticmethod
    def build(cloud: _Cloud, first: Tensor, sizes: Tensor, low: Tensor, h: float, cells: Tensor, t: float) -> _Side:
        u = low + h * (first + (sizes.double() - 1) / 2) - cloud.centre
        u = torch.where(cells > 1, u, 0.0)
        constant = ((u.unsqueeze(1) * cloud.points).sum(-1) + u.square().sum(-1, keepdim=True) / 2) / t**2
        blocks = []
        for index in sizes.prod(-1).argsort().split(SUMMATION.blocks_in_product):
            size = sizes[index].amax(0)
            start = torch.minimum(first[index], cells - size)
            boxes = [tuple(slice(a, a + b) for a, b in zip(at, size.tolist(), strict=True)) for at in start.tolist()]
            nodes, factors, tilts = [], [], []
            for k in range(3):
                z = low[k] + h * (start[:, k, None] + torch.arange(int(size[k]), device="cpu")).double()
                apart = z.unsqueeze(1) - (cloud.points[index, :, k] + u[index, None, k]).unsqueeze(-1)
                nodes.append(z)
                factors.append(apart.square_().mul_(-0.5 / t**2).exp_())
                tilts.append(u[index, k, None] * z / t**2)
            blocks.append(_Blocks(index, boxes, nodes, factors, tilts))
        return _Side(cloud, blocks, constant)

    def to_nodes(self, logs: Float[Tensor, " n"], cells: tuple[int, ...]) -> Tensor:
        """Return log sum_j exp(logs_j - |z - y_j|^2 / 2 t^2) at the nodes z."""
        logs = self.cloud.blocks_of(logs) + self.constant
        top = logs.amax(1, keepdim=True)
        logs = logs - top.masked_fill(top == -torch.inf, 0.0)
        if bool(((logs < SUMMATION.smallest_weight) & (logs > -torch.inf)).any()):
            raise OutOfRangeError
        weights, top, workspace = logs.exp_(), top.squeeze(-1), _Workspace()
        highest = torch.full(cells, torch.finfo(torch.float64).min, dtype=torch.float64, device="cpu")
        for blocks in self.blocks:
            for box, part in zip(blocks.boxes, blocks.tilt(workspace, top), strict=True):
                torch.maximum(highest[box], part, out=highest[box])
        total = torch.zeros_like(highest)
        for blocks in self.blocks:
            planes = blocks.planes(blocks.factors[0] * weights[blocks.index].unsqueeze(-1), workspace)
            scale = blocks.tilt(workspace, top)
            sums = workspace.array("sums", (len(planes), planes.shape[2], scale.shape[3]))
            torch.bmm(planes.mT, blocks.factors[2], out=sums)
            for box, part, below in zip(blocks.boxes, sums.view(scale.shape), scale, strict=True):
                total[box] += below.sub_(highest[box]).exp_().mul_(part)
        return total.log_().add_(highest)

    def from_nodes(self, logs: Tensor, *, with_means: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return log sum_z exp(logs_z - |x - z|^2 / 2 t^2) at the points x.

        With `with_means` the second result is the mean of z - x with the weights of this sum.
        """
        out, workspace = torch.empty_like(self.constant), _Workspace()
        means = torch.empty_like(self.cloud.points) if with_means else None
        for blocks in self.blocks:
            terms = blocks.tilt(workspace)
            for box, part in zip(blocks.boxes, terms, strict=True):
                torch.sub(logs[box], part, out=part)
            top = terms.amax((1, 2, 3), keepdim=True)
            terms = terms.sub_(top).exp_().flatten(1, 2)
            planes = blocks.planes(blocks.factors[0], workspace)
            lines = workspace.array("lines", blocks.factors[2].shape)
            torch.bmm(planes, terms, out=lines).mul_(blocks.factors[2])  # sums over the first two axes
            total = lines.sum(-1)
            if not bool((total > math.exp(SUMMATION.smallest_exponent)).all()):
                raise OutOfRangeError
            out[blocks.index] = total.log().add_(top[:, 0, 0])
            if means is not None:
                by_plane = workspace.array("by_plane", planes.shape)
                torch.bmm(blocks.factors[2], terms.mT, out=by_plane).mul_(planes)
                by_axes = by_plane.view(*total.shape, len(blocks.nodes[0][0]), -1)
                for k, shares in enumerate((by_axes.sum(-1), by_axes.sum(-2), lines)):
                    means[blocks.index, :, k] = (shares @ blocks.nodes[k].unsqueeze(-1)).squeeze(-1) / total
        if means is not None:
            means = self.cloud.restored(means - self.cloud.points)
        return self.cloud.restored(out + self.constant), means


@dataclass(frozen=True)
class GaussianSums:
    """Soft minima between two clouds, made for given potentials and accurate near them.

    Attributes:
        share: the largest relative error of a sum at the potentials that this was made for.
    """

    rows: _Side
    columns: _Side
    grid: GridCost
    epsilon: float
    share: float

    @staticmethod
    def build(
        x: CloudInBlocks, y: CloudInBlocks, f: Float[Tensor, " n"], g: Float[Tensor, " m"], *,
        epsilon: float, share: float, is_bound: bool = True,
    ) -> GaussianSums | None:  # fmt: skip
        """Return the sums for these potentials, or None where sums over pairs of points take less time.

        x (n, d) and y (m, d) come with their blocks (`in_blocks`). Without `is_bound` the mean potential of a block
        replaces its bound: boxes are smaller, and the share is an estimate.
        """
        one = _Cloud.build(*x)
        other = one if y[0] is x[0] else _Cloud.build(*y)
        n, m, d = len(x[0]), len(y[0]), x[0].shape[1]
        log_p, pairs = _densities(one, other, f, g, epsilon, share, is_bound=is_bound)
        if SUMMATION.gain * NANOSECONDS.pair * pairs < NANOSECONDS.point * (n + m):
            return None
        s = math.sqrt(epsilon / 2)
        width = SUMMATION.ratio * s * math.sqrt(1 - SUMMATION.ratio**2)
        h = math.pi * width * math.sqrt(2 / math.log(10 * d / share))
        cut = math.log(4 * d / share)
        max_peak = math.inf if is_bound else SUMMATION.max_peak
        ranges = [_ranges(one, other, log_p, width, cut, max_peak), _ranges(other, one, log_p.T, width, cut, max_peak)]
        axes = torch.arange(3, device="cpu") >= 3 - d
        low = torch.where(axes, torch.minimum(ranges[0][0].amin(0), ranges[1][0].amin(0)), 0.0)
        first = [torch.where(axes, (ends[0] - low) / h, 0.0).floor().long() for ends in ranges]
        last = [torch.where(axes, (ends[1] - low) / h, 0.0).ceil().long() for ends in ranges]
        cells = torch.maximum(last[0].amax(0), last[1].amax(0)) + 1
        sizes = [end - start + 1 for start, end in zip(first, last, strict=True)]
        furthest = max(float((size * (h / (2 * SUMMATION.ratio * s))).square().sum(-1).amax()) / 2 for size in sizes)
        if math.prod(cells.tolist()) > SUMMATION.max_nodes or furthest > -SUMMATION.smallest_exponent:
            return None
        grid = GridCost(cells.tolist(), spacing=h).to(torch.float64)
        if _nanoseconds((one, other), sizes, grid, epsilon) > SUMMATION.gain * NANOSECONDS.pair * pairs:
            return None
        rows, columns = (
            _Side.build(cloud, start, size, low, h, cells, SUMMATION.ratio * s)
            for cloud, start, size in zip((one, other), first, sizes, strict=True)
        )
        return GaussianSums(rows, columns, grid, epsilon, share)

    @property
    def T(self) -> GaussianSums:  # noqa: N802
        """The sums with x and y exchanged."""
        return replace(self, rows=self.columns, columns=self.rows)

    def softmin(self, potential: Float[Tensor, " m"]) -> Float[Tensor, " n"]:
        """Return -eps log sum_j exp((potential_j - |x_i - y_j|^2) / eps).

        Raises:
            OutOfRangeError: if the terms of a block differ by more than float64 holds.
        """
        return self._softmin(potential, with_means=False)[0]

    def gradients_in_x(self, a: Float[Tensor, " n"], b: Float[Tensor, " m"]) -> Float[Tensor, "n d"] | None:
        """Return sum_j P_ij dC_ij / dx_i for the fixed plan P_ij = exp((a_i + b_j - C_ij) / epsilon).

        None where numbers of a block are out of range (`OutOfRangeError`).
        """
        try:
            out, means = self._softmin(b, with_means=True)
        except OutOfRangeError:
            return None
        assert means is not None
        mass = ((a.double() - out) / self.epsilon).exp()
        apart = self.rows.cloud.mean - self.columns.cloud.mean
        return 2 * mass.unsqueeze(-1) * (apart - means[:, 3 - len(apart) :] / SUMMATION.ratio**2)

    def _softmin(self, potential: Tensor, *, with_means: bool) -> tuple[Tensor, Tensor | None]:
        # Let x' and y' be the points relative to the means of their clouds, and a the difference of the means. Then
        # |x - y|^2 = |x' - y'|^2 + 2 a.(x' - y') + |a|^2, and the grid takes care of the first term.
        apart = self.rows.cloud.mean - self.columns.cloud.mean
        along = [
            2 * side.cloud.restored(side.cloud.points)[:, 3 - len(apart) :] @ apart
            for side in (self.rows, self.columns)
        ]
        logs = self.columns.to_nodes((potential.double() + along[1]) / self.epsilon, self.grid.cells)
        width = self.epsilon * (1 - 2 * SUMMATION.ratio**2)  # 2 s'^2
        logs = -self.grid.softmin(logs.flatten() * width, width).reshape(logs.shape) / width
        sums, means = self.rows.from_nodes(logs, with_means=with_means)
        h, t = self.grid.spacing[0], SUMMATION.ratio * math.sqrt(self.epsilon / 2)
        log_c = len(apart) * (math.log(h**2 / (2 * math.pi * t**2)) - math.log(1 - 2 * SUMMATION.ratio**2) / 2)
        return along[0] + apart.square().sum() - self.epsilon * (sums + log_c), means


def _densities(
    one: _Cloud, other: _Cloud, f: Tensor, g: Tensor, epsilon: float, share: float, *, is_bound: bool
) -> tuple[Tensor, float]:
    """Return log P between blocks and an estimate of the number of pairs of points that count.

    log P is a bound of its largest value where `is_bound`, else its value at the centres and mean potentials.
    """
    d, apart = len(one.mean), one.mean - other.mean
    f = one.blocks_of(f) - 2 * one.points[..., 3 - d :] @ apart - one.points.square().sum(-1)
    g = other.blocks_of(g) + 2 * other.points[..., 3 - d :] @ apart - other.points.square().sum(-1)
    between = 2 * one.centre @ other.centre.T + apart.square().sum()
    mean_f, mean_g = (h.masked_fill(h == -torch.inf, torch.nan).nanmean(1) for h in (f, g))
    log_p = (mean_f.unsqueeze(1) + mean_g + between - 2 * apart.square().sum()) / epsilon
    pairs = len(one) * len(other) * float((log_p > math.log(share / (4 * len(other)))).double().mean())
    if is_bound:
        log_p = one.largest_sums(f, other.centre) + other.largest_sums(g, one.centre).T - between
        log_p = (log_p + 2 * one.half @ other.half.T) / epsilon
    return log_p, pairs


def _ranges(
    one: _Cloud, other: _Cloud, log_p: Tensor, width: float, cut: float, max_peak: float
) -> tuple[Tensor, Tensor]:
    """Return the least and the largest z of each block, (blocks, 3) each.

    The share exp(-cut) of the sum lies outside of them.
    """
    peak = log_p.amax(1, keepdim=True)
    reach = (2 * (log_p - (peak - peak.clamp(0.0, max_peak)) + cut)).clamp_(min=0.0).sqrt_().mul_(width)
    nothing = reach == 0
    ends = []
    for sign in (-1, 1):
        others = SUMMATION.ratio**2 * (other.centre * sign + other.half)
        furthest = [(others[:, k] + reach).masked_fill(nothing, -torch.inf).amax(1) for k in range(3)]
        ends.append((1 - SUMMATION.ratio**2) * (one.centre + sign * one.half) + sign * torch.stack(furthest, -1))
    return ends[0], ends[1]


def _nanoseconds(clouds: Sequence[_Cloud], sizes: Sequence[Tensor], grid: GridCost, epsilon: float) -> float:
    """Return an estimate of the nanoseconds that a soft minimum through the grid takes."""
    in_logs = epsilon * (1 - 2 * SUMMATION.ratio**2) < grid.smallest_epsilon_for_products
    work = (NANOSECONDS.log_node if in_logs else NANOSECONDS.node) * math.prod(grid.cells) * sum(grid.cells)
    for cloud, size in zip(clouds, sizes, strict=True):
        planes, nodes = float((size[:, 0] * size[:, 1]).sum()), float(size.prod(-1).sum())
        work += (
            NANOSECONDS.point * len(cloud)
            + NANOSECONDS.entry * cloud.points.shape[1] * planes
            + NANOSECONDS.box_node * nodes
        )
    return work
