"""The cosine cost of EMO (arXiv 2310.04691), `c(i, j) = 1 - cos(e_i, e_j)`.

With `U` for the rows scaled to length one, `C v = sum(v) - U (U^T v)` costs O(V d).
"""

from __future__ import annotations

from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss._checks import check_floating
from otloss.costs.centroids import between_directions, power_of_drift
from otloss.costs.cost import CentroidBound, Cost, arithmetic_dtype, makes_graph, unit_rows
from otloss.costs.products import product


class CosineCost(Cost):
    """The cosine cost between the rows of an embedding, `c(i, j) = 1 - cos(e_i, e_j)`, without the V x V matrix.

    The diagonal is exactly 0 and no cost is negative. In float32 the absolute error of a cost is about 1e-7,
    which is 1 % of it for directions that are 0.005 radians apart: pass such rows in float64. A row of norm zero (a
    padding row) has no direction: it costs 1 to every other row and 0 to itself, and receives no gradient; in
    `PointCost` two zero rows cost 0. The graph of `embedding` is kept.

    Args:
        embedding: (V, d), finite, of any scale. float16 and bfloat16 rows are normalised, and their costs
            computed, in float32.

    Attributes:
        unit: (V, d), the rows scaled to length one, zero rows left at zero.
        zero_rows: (V,), True where the norm is zero.

    Raises:
        TypeError: if `embedding` is not a floating tensor.
        ValueError: if it is not (V, d), or a row holds a NaN or an infinity.

    Example:
        >>> cost = CosineCost(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0], [-1.0, 0.0], [0.0, 0.0]]))
        >>> cost.rows(torch.tensor([0, 4]))
        tensor([[0., 0., 1., 2., 1.],
                [1., 1., 1., 1., 0.]])
    """

    unit: Float[Tensor, "V d"]
    zero_rows: Bool[Tensor, " V"]

    def __init__(self, embedding: Float[Tensor, "V d"]) -> None:
        check_floating("embedding", embedding)
        if embedding.dim() != 2 or 0 in embedding.shape:
            raise ValueError(f"embedding has shape {tuple(embedding.shape)}, expected (V, d) with V, d >= 1.")
        self.unit, self.zero_rows = unit_rows("embedding", embedding.to(arithmetic_dtype(embedding.dtype)))

    @property
    def shape(self) -> tuple[int, int]:
        return self.unit.shape[0], self.unit.shape[0]

    @property
    def _data(self) -> Tensor:
        return self.unit

    @property
    def T(self) -> Self:  # noqa: N802
        return self

    def rows(self, index: Int[Tensor, " picked"]) -> Float[Tensor, "picked V"]:
        """Return the costs C[index, :] by one matrix product."""
        index = self._checked_index(index)
        if makes_graph(self.unit):
            costs = 1 - product(self.unit[index], self.unit.T)
        else:
            # Autocast would run the product in half precision, where 1 - cos has no correct digit left near 0.
            with torch.autocast(self.device.type, enabled=False):  # fastest on a CPU where a column of memory is a row
                ones = self.unit.new_ones(self.shape[0], len(index))
                costs = ones.addmm_(self.unit, self.unit[index].T, alpha=-1).T  # (picked, V)
        return costs.clamp_(0, 2).scatter_(1, index.unsqueeze(1), 0.0)

    def diagonal(self) -> Float[Tensor, " V"]:
        return self._zeros()

    def apply(self, v: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch V"]:
        """Return C v in O(V d); the absolute error is as large as for a sum over `|v|`, since the product cancels."""
        cost, v = self._product_arguments(v)
        moved = v.sum(-1, keepdim=True) - product(product(v, cost.unit), cost.unit.T)  # (..., V)
        # A zero row has no product with itself to cancel its own mass.
        return moved - v * cost.zero_rows

    def largest(self) -> Tensor:
        """Return 2, which no cosine cost exceeds."""
        return torch.full((), 2.0, dtype=self.dtype, device=self.device)

    def centroid_bound(
        self, p: Float[Tensor, "*batch V"], q: Float[Tensor, "*batch V"], mass: Float[Tensor, "*batch"]
    ) -> CentroidBound | None:
        # Each zero row is like one on an axis of its own, as it costs 1 to every other row.
        of_zero_rows = power_of_drift(p - q, mass.unsqueeze(-1), 2) * self.zero_rows
        value = between_directions(p, q, mass, self.unit, self.unit) + of_zero_rows.sum(-1) / 2
        return CentroidBound(value, is_smooth=True)

    def __repr__(self) -> str:
        zeros = int(self.zero_rows.sum())
        return super().__repr__()[:-1] + f", zero_rows={zeros})"
