"""What a cost is: rows, products and soft minima, and the matrix only when asked for."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import check_floating, check_last_axis, check_positive

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
            blocks.append(softmin_of(rows, potential, epsilon))
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


def takes_out(cost: Cost) -> bool:
    """Whether `cost.rows` knows the keyword `out`."""
    return "out" in inspect.signature(cost.rows).parameters


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype costs of such data are computed in."""
    return torch.promote_types(dtype, torch.float32)


def softmin_of(rows: Tensor, potential: Tensor, epsilon: float) -> Tensor:
    """Soft minimum over the last axis of `rows - potential`."""
    return -epsilon * ((potential.unsqueeze(-2) - rows) / epsilon).logsumexp(-1)
