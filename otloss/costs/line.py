"""The cost between positions on a line."""

from __future__ import annotations

from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import check_finite, check_floating, check_positive
from otloss._numba import may_run_on
from otloss.costs.centroids import drift, power_of_drift
from otloss.costs.cost import CentroidBound, Cost, above_rounding, arithmetic_dtype, makes_graph


class LineCost(Cost):
    """The cost between positions on a line, `|x_i - x_j|^power`.

    Formulas: docs/guide/definitions.md#def-line

    Args:
        x: (n,), finite positions in any order; the unit of the cost is the unit of `x` to the power `power`.
            The graph of `x` is kept.
        power: above 0; a metric up to 1, the squared distance at 2.

    Raises:
        TypeError: if `x` is not a floating tensor.
        ValueError: if it is not (n,), holds a NaN or an infinity, or `power` is not above 0.

    Example:
        >>> LineCost(torch.tensor([0.0, 1.0, 3.0])).dense()
        tensor([[0., 1., 3.],
                [1., 0., 2.],
                [3., 2., 0.]])
    """

    def __init__(self, x: Float[Tensor, " n"], power: float = 1) -> None:
        check_floating("x", x, may_be_meta=True)
        if x.dim() != 1 or x.numel() == 0:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (n,) with n >= 1.")
        if not x.is_meta:
            check_finite("x", x)
        self.x = x.to(arithmetic_dtype(x.dtype))
        self.power = check_positive("power", power)

    @property
    def shape(self) -> tuple[int, int]:
        return self.x.shape[0], self.x.shape[0]

    @property
    def _data(self) -> Tensor:
        return self.x

    @property
    def T(self) -> Self:  # noqa: N802
        return self

    def rows(self, index: Int[Tensor, " picked"]) -> Float[Tensor, "picked n"]:
        return self._from(self.x[self._checked_index(index)])

    def row_block(self, start: int, stop: int) -> Float[Tensor, "block n"]:
        return self._from(self.x[start:stop])

    def _from(self, places: Float[Tensor, " picked"]) -> Float[Tensor, "picked n"]:
        difference = places.unsqueeze(1) - self.x
        if self.power == 2:
            return difference.square()
        distance = difference.abs()
        if self.power == 1:
            return distance
        # Below power 1 the derivative at 0 is infinite, and infinity times the zero derivative of |.| would be NaN.
        apart = distance > 0
        return torch.where(apart, torch.where(apart, distance, 1.0) ** self.power, 0.0)

    def diagonal(self) -> Float[Tensor, " n"]:
        return self._zeros()

    def softmin(self, potential: Float[Tensor, "*batch n"], epsilon: float | Tensor) -> Float[Tensor, "*batch n"]:
        check_floating("potential", potential)
        metric = {1.0: "l1", 2.0: "sqeuclidean"}.get(self.power)
        if metric is None or makes_graph(potential, self.x) or not may_run_on(self.x, potential):
            return super().softmin(potential, epsilon)
        from otloss.costs.points_numba import points_softmin

        potential, epsilon, _ = self._softmin_arguments(potential, epsilon)
        points = self.x.unsqueeze(-1)
        return points_softmin(points, points, potential, epsilon=epsilon, metric=metric)

    def largest(self) -> Tensor:
        x = self.x.detach()
        return above_rounding((x.amax() - x.amin()) ** self.power, terms=self.power, like=x)

    def as_line(self) -> LineCost | None:
        return self if type(self) is LineCost and self.power >= 1 else None

    def centroid_bound(
        self, p: Float[Tensor, "*batch n"], q: Float[Tensor, "*batch n"], mass: Float[Tensor, "*batch"]
    ) -> CentroidBound | None:
        if self.as_line() is None:
            return None
        x = self.x.unsqueeze(-1)
        value = power_of_drift(drift(p, q, x, x).squeeze(-1), mass, self.power)
        return CentroidBound(value, is_smooth=self.power == 2)

    def __repr__(self) -> str:
        return super().__repr__()[:-1] + f", power={self.power})"
