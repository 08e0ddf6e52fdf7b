"""Cost objects: `C[i, j]` is the price of moving one unit of mass from bin i of p to bin j of q.

A loss with a one-hot target y needs one row of C only, `D = sum_j C[y, j] q_j`, and a bound or a Sinkhorn
iteration needs products and soft minima only. A cost therefore answers four questions, and forms the
whole matrix only when `dense()` asks for it:

    rows(y)            C[y, :]                                              (U, m)
    apply(v)           (C v)_i = sum_j C_ij v_j                             (..., m) -> (..., n)
    softmin(h, eps)    -eps log sum_j exp((h_j - C_ij) / eps)               (..., m) -> (..., n)
    dense()            C                                                    (n, m)

Half-precision data is raised to float32 at construction: 1 - cos cancels, and bfloat16 has 8 bits.
The cosine cost follows EMO (arXiv 2310.04691): `c(i, j) = 1 - cos(e_i, e_j)`, written with `U` for the rows scaled to
length one, so that `C v = sum(v) - U (U^T v)` costs O(V d).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss._checks import check_finite, check_floating, check_index, check_last_axis, check_positive

# softmin works through blocks of rows of about this many entries, 16 MiB in float32.
_BLOCK_ENTRIES = 2**22


class Cost(ABC):
    """A cost between n bins of p and m bins of q; subclasses give `rows`, `T` and the tensor that holds their data."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(n, m)."""

    @property
    def batch_shape(self) -> torch.Size:
        """Leading axes, empty unless the cost holds one matrix per problem."""
        return torch.Size()

    @property
    @abstractmethod
    def _data(self) -> Tensor: ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the costs: float32 or float64."""
        return self._data.dtype

    @property
    def device(self) -> torch.device:
        """Where the costs live."""
        return self._data.device

    @property
    @abstractmethod
    def T(self) -> Cost:  # noqa: N802 - the name tensors use
        """The cost of moving mass the other way."""

    @abstractmethod
    def rows(self, index: Int[Tensor, " picked"]) -> Float[Tensor, "picked m"]:
        """Return the rows `C[index, :]`.

        A subclass may take a keyword `out`, a flat tensor of at least `picked * m` entries in the cost's dtype that it
        may make the rows in: callers in a loop then touch the same memory again instead of fresh pages.
        """

    def dense(self) -> Float[Tensor, "n m"]:
        """Return the whole matrix."""
        return self.rows(torch.arange(self.shape[0], device=self.device))

    def diagonal(self) -> Float[Tensor, " n"]:
        """Return the costs of staying, C[i, i]; only a square cost has them."""
        return torch.zeros(self.shape[0], dtype=self.dtype, device=self.device)

    def apply(self, v: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch n"]:
        """Return C v over the last axis, in the promoted dtype of the cost and `v`."""
        check_last_axis("v", v, self.shape[1])
        cost = self._promoted(v)
        with torch.autocast(self.device.type, enabled=False):
            return (cost.dense() @ v.to(cost.dtype).unsqueeze(-1)).squeeze(-1)

    def softmin(self, potential: Float[Tensor, "*batch m"], epsilon: float) -> Float[Tensor, "*batch n"]:
        """Return -epsilon logsumexp_j((potential_j - C_ij) / epsilon), block by block of rows."""
        check_last_axis("potential", potential, self.shape[1])
        check_positive("epsilon", epsilon)
        n, m = self.shape
        step = max(1, _BLOCK_ENTRIES // max(1, m * potential[..., 0].numel()))
        blocks = []
        for start in range(0, n, step):
            rows = self.rows(torch.arange(start, min(start + step, n), device=self.device))
            blocks.append(_softmin(rows, potential, epsilon))
        return torch.cat(blocks, dim=-1)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the same cost elsewhere: arguments as for `Tensor.to`, dtypes float32 or float64."""
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(moved, name, value.to(*args, **kwargs))
        if moved.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"the cost was asked for in {moved.dtype}, expected float32 or float64: 1 - cos cancels.")
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and not value.is_floating_point():
                setattr(moved, name, value.to(moved.device))
        return moved

    def _promoted(self, v: Tensor) -> Self:
        dtype = torch.promote_types(self.dtype, check_floating("v", v).dtype)
        return self if dtype == self.dtype else self.to(dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, device='{self.device}')"


class DenseCost(Cost):
    """A cost given as a matrix, which may be asymmetric, rectangular, or one matrix per problem.

    Args:
        matrix: (n, m), or (..., n, m) for one matrix per problem; finite, non-negative, in the user's own units.
            The graph is kept: losses are differentiable in it.

    Raises:
        TypeError: if `matrix` is no floating tensor.
        ValueError: if it has fewer than two axes, no entries in a row or column, or a NaN, infinite or negative entry.

    Example:
        >>> cost = DenseCost(torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
        >>> cost.rows(torch.tensor([1]))
        tensor([[1., 0.]])
        >>> cost.apply(torch.tensor([0.5, 0.5]))
        tensor([1.0000, 0.5000])
    """

    def __init__(self, matrix: Float[Tensor, "*batch n m"]) -> None:
        check_floating("cost matrix", matrix)
        if matrix.dim() < 2 or 0 in matrix.shape[-2:]:
            raise ValueError(f"the cost matrix has shape {tuple(matrix.shape)}, expected (..., n, m) with n, m >= 1.")
        check_finite("cost matrix", matrix)
        if (matrix < 0).any():
            first = tuple(int(i) for i in (matrix < 0).nonzero()[0])
            raise ValueError(
                f"the cost matrix holds {matrix.detach()[first]} at index {first}, expected costs >= 0; "
                "add a constant to all of them (it changes no optimal plan) or clamp rounding errors to 0."
            )
        self.matrix = matrix.to(_arithmetic_dtype(matrix.dtype))

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
        transposed = copy.copy(self)
        transposed.matrix = self.matrix.mT
        return transposed

    def rows(self, index: Int[Tensor, " picked"]) -> Float[Tensor, "picked m"]:
        if self.batch_shape:
            raise ValueError(
                f"rows of a cost with batch axes {tuple(self.batch_shape)} are ambiguous; "
                "expected one (n, m) matrix. Pick the problem's matrix first."
            )
        return self.matrix[check_index("index", index, self.shape[0])]

    def dense(self) -> Float[Tensor, "*batch n m"]:
        return self.matrix

    def diagonal(self) -> Float[Tensor, "*batch n"]:
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def softmin(self, potential: Float[Tensor, "*batch m"], epsilon: float) -> Float[Tensor, "*batch n"]:
        check_last_axis("potential", potential, self.shape[1])
        return _softmin(self.matrix, potential, check_positive("epsilon", epsilon))


class CosineCost(Cost):
    """The cosine cost between the rows of an embedding, `c(i, j) = 1 - cos(e_i, e_j)`, without the V x V matrix.

    The diagonal is exactly 0 and no cost is negative. A row of norm zero (a padding row) has no direction: it costs
    1 to every other row and 0 to itself, and receives no gradient. The graph of `embedding` is kept.

    Args:
        embedding: (V, d), finite, of any scale. float16 and bfloat16 rows are normalised, and their costs
            computed, in float32.

    Attributes:
        unit: (V, d), the rows scaled to length one, zero rows left at zero.
        zero_rows: (V,), True where the norm is zero.

    Raises:
        TypeError: if `embedding` is no floating tensor.
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
        self.unit, self.zero_rows = _normalise_rows(embedding.to(_arithmetic_dtype(embedding.dtype)))

    @property
    def shape(self) -> tuple[int, int]:
        return self.unit.shape[0], self.unit.shape[0]

    @property
    def _data(self) -> Tensor:
        return self.unit

    @property
    def T(self) -> Self:  # noqa: N802
        return self

    def rows(
        self, index: Int[Tensor, " picked"], *, out: Float[Tensor, " entries"] | None = None
    ) -> Float[Tensor, "picked V"]:
        """Return the costs C[index, :] with one matrix product; `out` as in `Cost.rows`, used where no graph is made."""
        return self._one_minus_cosine(index, out).clamp_(0, 2).scatter_(1, index.unsqueeze(1), 0.0)

    def _one_minus_cosine(self, index: Tensor, out: Tensor | None) -> Tensor:
        """Rows in the order of memory that the product is fastest in on a CPU: a column of memory is a row."""
        index = check_index("index", index, self.shape[0])
        shape = (self.shape[0], len(index))
        # Autocast would run the product in half precision, where 1 - cos has no correct digit left near 0.
        with torch.autocast(self.device.type, enabled=False):
            if torch.is_grad_enabled() and self.unit.requires_grad:
                return 1 - self.unit[index] @ self.unit.T
            ones = self.unit.new_empty(shape) if out is None else out[: shape[0] * shape[1]].view(shape)
            return ones.fill_(1).addmm_(self.unit, self.unit[index].T, alpha=-1).T  # (picked, V)

    def apply(self, v: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch V"]:
        """Return C v in O(V d); the absolute error is that of a sum over `|v|`, since the product cancels."""
        check_last_axis("v", v, self.shape[1])
        cost = self._promoted(v)
        v = v.to(cost.dtype)
        with torch.autocast(self.device.type, enabled=False):
            product = v.sum(-1, keepdim=True) - (v @ cost.unit) @ cost.unit.T  # (..., V)
        # A zero row has no product with itself to cancel its own mass.
        return product - v * cost.zero_rows

    def __repr__(self) -> str:
        zeros = int(self.zero_rows.sum())
        return super().__repr__()[:-1] + f", zero_rows={zeros})"


class LineCost(Cost):
    """The cost between positions on a line, `|x_i - x_j|^power`.

    Args:
        x: (n,), finite positions in any order; the unit of the cost is that of `x` to the power `power`.
            The graph of `x` is kept.
        power: above 0; a metric up to 1, the squared distance at 2.

    Raises:
        TypeError: if `x` is no floating tensor.
        ValueError: if it is not (n,), holds a NaN or an infinity, or `power` is not above 0.

    Example:
        >>> LineCost(torch.tensor([0.0, 1.0, 3.0])).dense()
        tensor([[0., 1., 3.],
                [1., 0., 2.],
                [3., 2., 0.]])
    """

    def __init__(self, x: Float[Tensor, " n"], power: float = 1) -> None:
        check_floating("x", x)
        if x.dim() != 1 or x.numel() == 0:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (n,) with n >= 1.")
        check_finite("x", x)
        self.x = x.to(_arithmetic_dtype(x.dtype))
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
        index = check_index("index", index, self.shape[0])
        difference = self.x[index].unsqueeze(1) - self.x  # (picked, n)
        if self.power == 2:
            return difference.square()
        distance = difference.abs()
        if self.power == 1:
            return distance
        # Below power 1 the slope at 0 is infinite, and infinity times the zero slope of |.| would be NaN.
        apart = distance > 0
        return torch.where(apart, torch.where(apart, distance, 1.0) ** self.power, 0.0)

    def __repr__(self) -> str:
        return super().__repr__()[:-1] + f", power={self.power})"


def as_cost(cost: Cost | Float[Tensor, "*batch n m"]) -> Cost:
    """Return `cost` itself if it is a cost object, else wrap the matrix.

    Example:
        >>> as_cost(torch.ones(2, 3))
        DenseCost(shape=(2, 3), dtype=torch.float32, device='cpu')
    """
    return cost if isinstance(cost, Cost) else DenseCost(cost)


def _arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _softmin(rows: Tensor, potential: Tensor, epsilon: float) -> Tensor:
    return -epsilon * ((potential.unsqueeze(-2) - rows) / epsilon).logsumexp(-1)


def _normalise_rows(embedding: Tensor) -> tuple[Tensor, Tensor]:
    # Squares overflow at 1e20 and vanish at 1e-23 in float32, so each row is first scaled by its largest entry.
    # The direction does not depend on that scale, so no gradient flows through it.
    largest = embedding.detach().abs().amax(-1, keepdim=True)  # (V, 1)
    if not torch.isfinite(largest).all():
        row = int((~torch.isfinite(largest)).nonzero()[0, 0])
        raise ValueError(
            f"embedding row {row} holds a NaN or an infinity, expected finite numbers; "
            "mend that row (a zero row is allowed) before building the cost."
        )
    zero = largest == 0
    scaled = embedding / largest.masked_fill(zero, 1.0)
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True).masked_fill(zero, 1.0)
    return (scaled / norm).masked_fill(zero, 0.0), zero.squeeze(-1)
