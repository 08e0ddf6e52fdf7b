"""Modules of differentiable sorting, ranks and top-k."""

from __future__ import annotations

from torch import Tensor

from otloss.nn.base import Module
from otloss.solvers.ranking.soft_sort import soft_rank, soft_sort, soft_top_k


class SoftSort(Module):
    """`otloss.soft_sort` over the last axis.

    Example:
        >>> import torch
        >>> SoftSort(epsilon=1e-3)(torch.tensor([3.0, 1.0, 2.0]))
        tensor([1., 2., 3.])
    """

    def __init__(
        self, *, epsilon: float | None = None, regularization: str = "entropy", descending: bool = False
    ) -> None:
        super().__init__(locals())

    def forward(self, x: Tensor) -> Tensor:
        return soft_sort(x, **self.settings)


class SoftRank(Module):
    """`otloss.soft_rank` over the last axis.

    Example:
        >>> import torch
        >>> SoftRank(epsilon=1e-3)(torch.tensor([3.0, 1.0, 2.0]))
        tensor([3., 1., 2.])
    """

    def __init__(
        self, *, epsilon: float | None = None, regularization: str = "entropy", descending: bool = False
    ) -> None:
        super().__init__(locals())

    def forward(self, x: Tensor) -> Tensor:
        return soft_rank(x, **self.settings)


class SoftTopK(Module):
    """`otloss.soft_top_k` over the last axis.

    Example:
        >>> import torch
        >>> SoftTopK(k=1, epsilon=1e-3)(torch.tensor([3.0, 1.0, 2.0]))
        tensor([1., 0., 0.])
    """

    def __init__(self, k: int, *, epsilon: float = 0.1, regularization: str = "entropy") -> None:
        super().__init__(locals())

    def forward(self, x: Tensor) -> Tensor:
        return soft_top_k(x, **self.settings)
