"""The cost between the cells of a regular grid, axis by axis.

Cell i = (i_1, ..., i_d) lies at (spacing_1 i_1, ..., spacing_d i_d), and the cost is a sum over the axes,

    C_ij = sum_k c_k(i_k, j_k),    c_k(a, b) = (spacing_k |a - b|)^power

so products need the marginals of a vector only, and soft and hard minima are taken along one axis after
the other, since exp(-C / eps) is a product (J. Solomon et al., Convolutional Wasserstein Distances, 2015):

    (C v)_i = sum_k sum_b c_k(i_k, b) v^(k)_b            v^(k) the sums of v over all axes but k
    h <- -softmin_b of c_k(a, b) - h_b along axis k      for k = 1, ..., d
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import check_positive
from otloss._numba import may_run_on
from otloss.costs.centroids import power_of_drift
from otloss.costs.cost import CentroidBound, Cost, above_rounding, block_entries, makes_graph, recomputed, softmin_of
from otloss.costs.products import product

# Costs over epsilon up to which exp(-C / eps) is held as a number in float64: along all axes at once, and along one by
# itself. There both factors of a product are larger by exp(SHIFT), so that sums reach from exp(2 SHIFT) times the
# number of cells down to exp(2 SHIFT - _LARGEST_ALONG); numbers below exp(SMALLEST_EXPONENT) are exp(-40) of that.
_LARGEST_EXPONENT, _LARGEST_ALONG = 600.0, 1010.0
SHIFT, SMALLEST_EXPONENT = 350.0, -700.0


class GridCost(Cost):
    """The cost between the cells of a grid, `sum_k (spacing_k |i_k - j_k|)^power`, such as the pixels of an image.

    Histograms over it are flattened in C order: `images.flatten(-2)` for images (..., height, width).

    On a CPU entropic problems are quick down to `smallest_epsilon_for_products`, a thousandth of the largest cost along
    one axis. Below it large grids take from seconds to minutes, and so do the dense equations of grad="implicit" there
    and in unbalanced problems; a UserWarning says so.

    Powers of other functions: docs/guide/definitions.md#def-orders

    Args:
        shape: cells along each axis, each at least 1.
        power: above 0; the squared Euclidean distance at 2 (no 1/2), the l1 distance at 1.
        spacing: distance of neighbouring cells, above 0: a number, or one per axis. The unit of the cost is its unit
            to the power `power`.

    Raises:
        TypeError: if `shape` is not a sequence of whole numbers.
        ValueError: if it is empty or a number in it is below 1, `spacing` does not fit, or a number is not above 0.

    Example:
        >>> cost = GridCost((2, 3), spacing=(10.0, 1.0))
        >>> cost.rows(torch.tensor([0])).reshape(2, 3)
        tensor([[  0.,   1.,   4.],
                [100., 101., 104.]])
        >>> cost.apply(torch.full((6,), 1 / 6))
        tensor([51.6667, 50.6667, 51.6667, 51.6667, 50.6667, 51.6667])
    """

    def __init__(self, shape: Sequence[int], *, power: float = 2, spacing: float | Sequence[float] = 1.0) -> None:
        if not isinstance(shape, Sequence) or not all(isinstance(size, Integral) for size in shape):
            raise TypeError(f"the shape of the grid is {shape!r}, expected whole numbers such as (64, 64).")
        steps = spacing.tolist() if hasattr(spacing, "tolist") else spacing  # of an array, as of shapes of voxels
        spacings = tuple(steps) if isinstance(steps, Sequence) else (steps,) * len(shape)
        if not shape or min(shape) < 1 or len(spacings) != len(shape):
            raise ValueError(
                f"the grid has shape {tuple(shape)} and {len(spacings)} spacings, expected at least one axis, of at "
                "least one cell each, and one spacing or one per axis."
            )
        self.cells = tuple(map(int, shape))
        self.power = check_positive("power", power)
        # Numbers of Python, so that a cost moved to float64 has all their digits.
        self.spacing = tuple(check_positive("spacing", step) for step in spacings)
        self._kind = torch.zeros((), dtype=torch.float32, device="cpu")

    @property
    def shape(self) -> tuple[int, int]:
        return math.prod(self.cells), math.prod(self.cells)

    @property
    def _data(self) -> Tensor:
        return self._kind

    @property
    def T(self) -> GridCost:  # noqa: N802
        return self

    def axis_costs(self, axis: int) -> Float[Tensor, "cells cells"]:
        """Return the costs c_k between the positions along one axis."""
        steps = torch.arange(self.cells[axis], device=self.device)
        by_steps = (steps.to(self.dtype) * self.spacing[axis]) ** self.power
        return by_steps[(steps.unsqueeze(1) - steps).abs()]

    def rows(self, index: Int[Tensor, " picked"]) -> Float[Tensor, "picked n"]:
        index = self._checked_index(index)
        total = torch.zeros((len(index), *self.cells), dtype=self.dtype, device=self.device)
        for axis, cells in enumerate(self.cells):
            at = (
                index // math.prod(self.cells[axis + 1 :]) % cells
            )  # torch.unravel_index imports sympy in half a second
            total += self.axis_costs(axis)[at].reshape(-1, *self._along(axis))
        return total.reshape(len(index), self.shape[1])

    def diagonal(self) -> Float[Tensor, " n"]:
        return self._zeros()

    def apply(self, v: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        cost, v = self._product_arguments(v)
        v = v.reshape(*v.shape[:-1], *self.cells)
        total = torch.zeros_like(v)
        for axis in range(len(self.cells)):
            others = [k - len(self.cells) for k in range(len(self.cells)) if k != axis]
            marginal = v.sum(others) if others else v  # (*batch, cells of the axis)
            moved = product(marginal, cost.axis_costs(axis))
            total = total + moved.reshape(*moved.shape[:-1], *self._along(axis))
        return total.flatten(-len(self.cells))

    def softmin(self, potential: Float[Tensor, "*batch n"], epsilon: float | Tensor) -> Float[Tensor, "*batch n"]:
        potential, epsilon, batch = self._softmin_arguments(potential, epsilon)
        h = potential.expand(*batch, -1).reshape(batch.numel(), *self.cells)
        width = torch.as_tensor(epsilon, dtype=torch.float64, device=h.device).expand(batch).reshape(-1)
        groups = self._groups(width) if may_run_on(h, width) and not makes_graph(potential) else None
        if groups is not None:
            return -_Products(self, width, groups)(h).reshape(*batch, self.shape[0]).to(potential.dtype)
        if isinstance(epsilon, Tensor):
            epsilon = epsilon.expand(batch).reshape(-1, *(1 for _ in self.cells[1:]))  # an axis for each but the one
        for axis in range(len(self.cells)):
            lines = h.movedim(axis + 1, -1)  # (problems, other cells, cells of the axis)
            h = -_along_lines(self.axis_costs(axis), lines, epsilon).movedim(-1, axis + 1)
        return -h.reshape(*batch, self.shape[0])

    def softmin_at(self, epsilon: Float[Tensor, "*batch"]) -> Callable[[Tensor], Tensor]:
        groups = self._groups(epsilon.double().reshape(-1)) if may_run_on(epsilon) else None
        if groups is None:
            return super().softmin_at(epsilon)
        products = _Products(self, epsilon.double().reshape(-1), groups)

        def softmin(potential: Tensor) -> Tensor:
            if potential.shape[:-1] != epsilon.shape or makes_graph(potential):
                return self.softmin(potential, epsilon)
            h = products(potential.reshape(-1, *self.cells))
            return -h.reshape(potential.shape).to(torch.promote_types(potential.dtype, self.dtype))

        return softmin

    def _groups(self, epsilon: Float[Tensor, " problems"]) -> list[list[int]] | None:
        """The axes to take in one product: all, or each by itself; None where exp(-C / eps) is too small for either."""
        smallest = float(epsilon.amin()) if epsilon.numel() else 0.0
        if not smallest > 0:
            return None
        along = self._largest_along()
        axes = range(1, len(along) + 1)
        if sum(along) <= _LARGEST_EXPONENT * smallest:
            return [list(axes)]
        return [[axis] for axis in axes] if max(along) <= _LARGEST_ALONG * smallest else None

    @property
    def smallest_epsilon_for_products(self) -> float:
        """The least epsilon at which soft minima on a CPU are products along the axes; below they take longer."""
        return max(self._largest_along()) / _LARGEST_ALONG

    def _largest_along(self) -> list[float]:
        """The largest cost along each axis."""
        return [(step * (size - 1)) ** self.power for step, size in zip(self.spacing, self.cells, strict=True)]

    def largest(self) -> Tensor:
        return above_rounding(sum(self._largest_along()), terms=len(self.cells) + self.power, like=self._kind)

    def softmin_work(self) -> int:
        return self.shape[0] * sum(self.cells)

    def as_grid(self) -> GridCost | None:
        return self if type(self) is GridCost else None

    def coarser(self, size: int) -> GridCost:
        """Return the cost between blocks of `size` cells along each axis; blocks at the end may reach beyond it."""
        cells = [-(-count // size) for count in self.cells]
        cost = GridCost(cells, power=self.power, spacing=[size * step for step in self.spacing])
        return cost.to(self.device, self.dtype)

    def centroid_bound(
        self, p: Float[Tensor, "*batch n"], q: Float[Tensor, "*batch n"], mass: Float[Tensor, "*batch"]
    ) -> CentroidBound | None:
        if self.as_grid() is None or self.power < 1:
            return None
        value = power_of_drift(self._drift(p - q), mass.unsqueeze(-1), self.power).sum(-1)
        return CentroidBound(value, is_smooth=self.power == 2)

    def _drift(self, difference: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch axes"]:
        """How far the mean moves along each axis, times the mass."""
        axes = len(self.cells)
        image = difference.reshape(*difference.shape[:-1], *self.cells)
        drifts = []
        for axis, (size, spacing) in enumerate(zip(self.cells, self.spacing, strict=True)):
            others = [k - axes for k in range(axes) if k != axis]
            steps = torch.arange(size, dtype=difference.dtype, device=difference.device) - (size - 1) / 2
            marginal = image.sum(others) if others else image
            drifts.append((marginal * steps).sum(-1) * spacing)
        return torch.stack(drifts, dim=-1)

    def _along(self, axis: int) -> list[int]:
        return [size if k == axis else 1 for k, size in enumerate(self.cells)]

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, cells={self.cells}, power={self.power}, spacing={self.spacing})"


class _Products:
    """h to -softmin(h), with one exponential for each cell and group of axes, in float64; h is (problems, *cells)."""

    def __init__(self, cost: GridCost, epsilon: Float[Tensor, " problems"], groups: list[list[int]]) -> None:
        self.width = epsilon.reshape(-1, *(1 for _ in cost.cells))
        is_beyond = sum(cost._largest_along()) > _LARGEST_EXPONENT * float(epsilon.amin())
        self.shift = SHIFT if is_beyond else 0.0
        shared = epsilon[:1] if bool((epsilon == epsilon[:1]).all()) else epsilon
        self.groups = [
            (axes, [(cost.axis_costs(axis - 1).double() / -shared[:, None, None] + self.shift).exp() for axis in axes])
            for axes in groups
        ]

    def __call__(self, h: Tensor) -> Tensor:
        h, shape = h.double(), h.shape
        for axes, kernels in self.groups:
            top = h.amax(axes, keepdim=True)
            terms = (h - top.masked_fill(top == -torch.inf, 0.0)) / self.width + self.shift
            terms = terms.clamp_(min=SMALLEST_EXPONENT).exp_()
            for axis, kernel in zip(axes, kernels, strict=True):
                lines = terms.reshape(shape[0], math.prod(shape[1:axis]), shape[axis], -1)
                terms = lines.squeeze(-1) @ kernel if lines.shape[-1] == 1 else kernel.unsqueeze(1) @ lines
            h = top + self.width * (terms.reshape(shape).log_() - 2 * self.shift)
        return h


def _along_lines(
    matrix: Float[Tensor, "size size"], lines: Float[Tensor, "*lines size"], epsilon: float | Tensor
) -> Float[Tensor, "*lines size"]:
    """The soft minimum of every line; in torch so many lines at a time that their scores stay within a block."""
    if may_run_on(matrix, lines) and not makes_graph(lines):
        return softmin_of(matrix, lines, epsilon)
    size = lines.shape[-1]
    step = max(1, block_entries() // size**2)
    blocks = lines.reshape(-1, size).split(step)
    widths: Sequence[float | Tensor] = [epsilon] * len(blocks)
    if isinstance(epsilon, Tensor):
        widths = epsilon.expand(lines.shape[:-1]).reshape(-1).split(step)
    recompute = len(blocks) > 1 and makes_graph(lines)
    parts = [
        recomputed(softmin_of, matrix, block, width) if recompute else softmin_of(matrix, block, width)
        for block, width in zip(blocks, widths, strict=True)
    ]
    return torch.cat(parts).reshape(lines.shape)
