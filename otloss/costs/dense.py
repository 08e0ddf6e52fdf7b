"""A cost that is a matrix."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import broadcast_shape, check_epsilon, check_finite, check_floating, code_for_tensor
from otloss._numba import may_run_on
from otloss.costs.cost import (
    Cost,
    arithmetic_dtype,
    is_symmetric_matrix,
    makes_graph,
    scaled_plan_rows,
    softmin_of,
    usual_entry,
)
from otloss.costs.products import product

if TYPE_CHECKING:
    from otloss.costs.streams_triton import Matrix


class DenseCost(Cost):
    """A cost given as a matrix, which may be asymmetric, rectangular, or one matrix per problem.

    Args:
        matrix: (n, m), or (..., n, m) for one matrix per problem; finite, non-negative, in the user's own units.
            The graph is kept: losses are differentiable in it.

    Raises:
        TypeError: if `matrix` is not a floating tensor.
        ValueError: if it has fewer than two axes, no entries in a row or column, or a NaN, infinite or negative entry.

    Example:
        >>> cost = DenseCost(torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
        >>> cost.rows(torch.tensor([1]))
        tensor([[1., 0.]])
        >>> cost.apply(torch.tensor([0.5, 0.5]))
        tensor([1.0000, 0.5000])
    """

    def __init__(self, matrix: Float[Tensor, "*batch n m"]) -> None:
        check_floating("matrix", matrix, may_be_meta=True)
        if matrix.dim() < 2 or 0 in matrix.shape[-2:]:
            raise ValueError(f"the cost matrix has shape {tuple(matrix.shape)}, expected (..., n, m) with n, m >= 1.")
        entries = matrix.detach()
        # Each by itself takes less than half of what torch.aminmax does.
        if entries.numel() and not entries.is_meta and not (entries.amin() >= 0 and entries.amax() < torch.inf):
            check_finite("cost matrix", matrix)
            first = tuple(int(i) for i in (matrix < 0).nonzero()[0])
            raise ValueError(
                f"the cost matrix holds {matrix.detach()[first]} at index {first}, expected costs >= 0; "
                "add a constant to all of them (it changes no optimal plan) or clamp rounding errors to 0."
            )
        self.matrix = matrix.resolve_neg().to(arithmetic_dtype(matrix.dtype))

    @classmethod
    def unchecked(cls, matrix: Float[Tensor, "*batch n m"]) -> DenseCost:
        """Return the cost of a matrix in float32 or float64 whose entries are known to be valid."""
        cost = cls.__new__(cls)
        cost.matrix = matrix
        return cost

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape[-2], self.matrix.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        return self.matrix.shape[:-2]

    @property
    def _data(self) -> Tensor:
        return self.matrix

    @property
    def T(self) -> DenseCost:  # noqa: N802
        return self._with(self.matrix.mT)

    def rows(self, index: Int[Tensor, " picked"]) -> Float[Tensor, "picked m"]:
        return self.matrix[self._checked_index(index)]

    def dense(self) -> Float[Tensor, "*batch n m"]:
        return self.matrix

    def diagonal(self) -> Float[Tensor, "*batch n"]:
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def row_block(self, start: int, stop: int) -> Float[Tensor, "*batch block m"]:
        return self.matrix[..., start:stop, :]

    def apply(self, v: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch n"]:
        cost, v = self._product_arguments(v)
        return product(cost.matrix, v.unsqueeze(-1)).squeeze(-1)

    def softmin(self, potential: Float[Tensor, "*batch m"], epsilon: float | Tensor) -> Float[Tensor, "*batch n"]:
        check_floating("potential", potential)
        if (costs := self._stream()) is not None and not makes_graph(self.matrix, potential):
            from otloss.costs import streams_triton as streams

            potential, epsilon, _ = self._softmin_arguments(potential, epsilon)
            return streams.softmin(costs, potential, streams.Epsilon.build(epsilon, self.device))
        # The kernel needs no memory for scores, so it takes the matrix as one block.
        if may_run_on(self.matrix, potential) and not makes_graph(self.matrix, potential):
            potential, epsilon, _ = self._softmin_arguments(potential, epsilon)
            return softmin_of(self.matrix, potential, epsilon)
        return super().softmin(potential, epsilon)

    def plan_gradients(
        self,
        f: Float[Tensor, "*batch n"],
        g: Float[Tensor, "*batch m"],
        log_p: Float[Tensor, "*batch n"],
        log_q: Float[Tensor, "*batch m"],
        *,
        epsilon: float | Tensor,
        upstream: Float[Tensor, "*batch"],
    ) -> tuple[Tensor, ...]:
        # The gradient in the matrix is the plan itself.
        epsilon = check_epsilon(epsilon, above_zero=True)
        if not self.matrix.requires_grad:
            return ()
        batch = broadcast_shape(f.shape[:-1], g.shape[:-1], self.batch_shape, upstream.shape)
        if may_run_on(self.matrix, f) and batch == self.batch_shape:
            return (scaled_plan_rows(self.matrix, f, g, (log_p, log_q), epsilon, upstream),)
        gradient = torch.empty_like(self.matrix, requires_grad=False)
        for start, stop in self.row_blocks(batch):
            part = slice(start, stop)
            rows = self.matrix.detach()[..., part, :]
            plan = scaled_plan_rows(rows, f[..., part], g, (log_p[..., part], log_q), epsilon, upstream)
            gradient[..., part, :] = plan
        return (gradient,)

    def largest(self) -> Float[Tensor, "*batch"]:
        return self.matrix.detach().amax((-2, -1))

    def stored_matrix(self) -> Float[Tensor, "*batch n m"] | None:
        return self.matrix if type(self) in (DenseCost, SignedCost) else None

    def contiguous(self) -> DenseCost:
        return self if self._may_stream() else self._with(self.matrix.contiguous())

    def kernel_inputs(self) -> Matrix | None:
        from otloss.costs.streams_triton import Matrix

        return Matrix(self.matrix)

    def costs_within(self) -> tuple[Cost, Cost] | None:
        return (self, self) if self._is_within() else None

    def _is_within(self) -> bool:
        """Whether the matrix is symmetric with zeros on the diagonal, up to rounding."""
        matrix, rounding = self.matrix.detach(), 8 * torch.finfo(self.dtype).eps
        if not is_symmetric_matrix(matrix, rounding):
            return False
        # Without the zeros a matrix between other bins, of a single one for example, would pass.
        diagonal = self.diagonal().detach()
        return not bool(diagonal.any()) or bool((diagonal.amax(-1) <= rounding * usual_entry(matrix)).all())

    def _with(self, matrix: Tensor) -> DenseCost:
        """Return the same cost with its valid entries in another tensor."""
        cost = copy.copy(self)
        cost.matrix = matrix
        return cost


class SignedCost(DenseCost):
    """A matrix with negative entries, or +inf for pairs that may not exchange mass.

    It is the cost of a problem as it was posed. Solvers get a `DenseCost` in its place, from
    `otloss.solvers.reductions.plain_costs`.

    Raises:
        ValueError: if the matrix has fewer than two axes, or an entry is NaN or -inf.
    """

    def __init__(self, matrix: Float[Tensor, "*batch n m"]) -> None:
        if matrix.dim() < 2:
            raise ValueError(f"the cost matrix has shape {tuple(matrix.shape)}, expected (..., n, m) with n, m >= 1.")
        entries = matrix.detach()
        bad = entries.isnan() | (entries == -torch.inf)
        if bad.any():
            first = tuple(int(i) for i in bad.nonzero()[0])
            raise ValueError(
                f"the cost matrix holds {float(entries[first])} at index {first}, expected finite costs, or +inf to "
                "forbid a pair."
            )
        self.matrix = matrix.resolve_neg().to(arithmetic_dtype(matrix.dtype))

    @property
    def has_plain_entries(self) -> bool:
        return False

    def kernel_inputs(self) -> None:
        return None


def posed_cost(cost: Cost | Float[Tensor, "*batch n m"]) -> Cost:
    """Return the cost of `as_cost`, or a `SignedCost` for a matrix with negative entries or +inf."""
    if isinstance(cost, Cost):
        matrix = cost.stored_matrix()
        return cost if matrix is None or has_plain_entries(matrix) else SignedCost(matrix)
    if not isinstance(cost, Tensor) or not cost.numel() or cost.dim() < 2:
        return as_cost(cost)
    if not has_plain_entries(cost):
        return SignedCost(cost)
    return DenseCost.unchecked(cost.to(arithmetic_dtype(cost.dtype)))


def has_plain_entries(cost: Any) -> bool:
    """Whether a cost is no matrix with a negative, infinite or NaN entry."""
    if not isinstance(cost, Tensor) or not check_floating("cost", cost).numel():
        return True
    entries = cost.detach()
    return entries.amin().item() >= 0 and entries.amax().item() < torch.inf


def as_cost(cost: Cost | Float[Tensor, "*batch n m"]) -> Cost:
    """Return `cost` itself if it is a cost object, else wrap the matrix.

    The matrix of an object is checked again: a step of training may have changed it, and kernels read it as it is.

    Raises:
        TypeError: if it is neither a cost object nor a floating tensor.
        ValueError: as for `DenseCost`.

    Example:
        >>> as_cost(torch.ones(2, 3))
        DenseCost(shape=(2, 3), dtype=torch.float32, device='cpu')
    """
    if isinstance(cost, Cost):
        matrix = cost.stored_matrix()
        if matrix is not None and not has_plain_entries(matrix):
            DenseCost(matrix)  # raises ValueError
        return cost
    if not isinstance(cost, Tensor):
        raise TypeError(
            f"cost is a {type(cost).__name__}, expected a cost object such as PointCost(x, y), or a torch.Tensor "
            "(..., n, m) of costs, whose rows and columns go by place; turn an array into one with "
            f"{code_for_tensor('cost', cost)}."
        )
    return DenseCost(check_floating("cost", cost))


def cost_between(p: Float[Tensor, "*batch n"], q: Float[Tensor, "*batch m"], cost: Cost) -> Cost:
    """Return `cost` in the dtype of these histograms.

    Raises:
        ValueError: if its shape is not theirs, or it lies on another device.

    Example:
        >>> cost_between(torch.ones(2), torch.ones(3), DenseCost(torch.ones(2, 3))).shape
        (2, 3)
    """
    shape = (p.shape[-1], q.shape[-1])
    if cost.shape != shape:
        raise ValueError(
            f"the cost has shape {cost.shape}, expected {shape}: rows for the bins of p, columns for the bins of q."
        )
    if cost.device != p.device:
        raise ValueError(f"the cost is on {cost.device} and p on {p.device}, expected one device.")
    return cost if cost.dtype == p.dtype else cost.to(p.dtype)
