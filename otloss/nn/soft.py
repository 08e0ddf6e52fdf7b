"""Modules of smooth sorting; they fit into `torch.nn.Sequential`."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from otloss.applications.sorting import soft_rank, soft_sort, soft_top_k
from otloss.nn.base import Module


class SoftSort(Module):
    """`otloss.soft_sort` over the last axis.

    Args:
        epsilon, regularization: as for the function.
        descending: largest first.

    Example:
        >>> import torch
        >>> SoftSort(epsilon=1e-3)(torch.tensor([3.0, 1.0, 2.0]))
        tensor([1., 2., 3.])
    """

    def __init__(
        self, *, epsilon: float | None = None, regularization: str = "entropy", descending: bool = False
    ) -> None:
        super().__init__(epsilon=epsilon, regularization=regularization, descending=descending)

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return soft_sort(x, **self.settings)


class SoftRank(Module):
    """`otloss.soft_rank` over the last axis.

    Args:
        epsilon, regularization: as for the function.
        descending: 1 for the largest.

    Example:
        >>> import torch
        >>> SoftRank(epsilon=1e-3)(torch.tensor([3.0, 1.0, 2.0]))
        tensor([3., 1., 2.])
    """

    def __init__(
        self, *, epsilon: float | None = None, regularization: str = "entropy", descending: bool = False
    ) -> None:
        super().__init__(epsilon=epsilon, regularization=regularization, descending=descending)

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return soft_rank(x, **self.settings)


class SoftTopK(Module):
    """`otloss.soft_top_k` over the last axis.

    Args:
        k: how many to pick.
        epsilon, regularization: as for the function.

    Example:
        >>> import torch
        >>> SoftTopK(k=1, epsilon=1e-3)(torch.tensor([3.0, 1.0, 2.0]))
        tensor([1., 0., 0.])
    """

    def __init__(self, *, k: int, epsilon: float = 0.1, regularization: str = "entropy") -> None:
        super().__init__(k=k, epsilon=epsilon, regularization=regularization)

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return soft_top_k(x, **self.settings)
