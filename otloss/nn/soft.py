"""Modules of smooth sorting; they fit into `torch.nn.Sequential`."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from otloss.nn.base import described
from otloss.solvers.sorting import soft_rank, soft_sort, soft_top_k


class SoftSort(nn.Module):
    """`otloss.soft_sort` over the last axis.

    Args:
        epsilon: relative to the squared range of a row.
        descending: largest first.

    Example:
        >>> import torch
        >>> SoftSort(epsilon=1e-3)(torch.tensor([3.0, 1.0, 2.0]))
        tensor([1., 2., 3.])
    """

    def __init__(self, *, epsilon: float = 0.01, descending: bool = False) -> None:
        super().__init__()
        self.epsilon, self.descending = epsilon, descending

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return soft_sort(x, epsilon=self.epsilon, descending=self.descending)

    def extra_repr(self) -> str:
        return described(self, ("epsilon", "descending"))


class SoftRank(nn.Module):
    """`otloss.soft_rank` over the last axis.

    Args:
        epsilon: relative to the squared range of a row.
        descending: 1 for the largest.

    Example:
        >>> import torch
        >>> SoftRank(epsilon=1e-3)(torch.tensor([3.0, 1.0, 2.0]))
        tensor([3., 1., 2.])
    """

    def __init__(self, *, epsilon: float = 0.01, descending: bool = False) -> None:
        super().__init__()
        self.epsilon, self.descending = epsilon, descending

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return soft_rank(x, epsilon=self.epsilon, descending=self.descending)

    def extra_repr(self) -> str:
        return described(self, ("epsilon", "descending"))


class SoftTopK(nn.Module):
    """`otloss.soft_top_k` over the last axis.

    Args:
        k: how many to pick.
        epsilon: relative to the squared range of a row.

    Example:
        >>> import torch
        >>> SoftTopK(k=1, epsilon=1e-3)(torch.tensor([3.0, 1.0, 2.0]))
        tensor([1., 0., 0.])
    """

    def __init__(self, *, k: int, epsilon: float = 0.1) -> None:
        super().__init__()
        self.k, self.epsilon = k, epsilon

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return soft_top_k(x, self.k, epsilon=self.epsilon)

    def extra_repr(self) -> str:
        return described(self, ("k", "epsilon"))
