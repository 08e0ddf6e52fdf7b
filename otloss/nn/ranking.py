"""Modules of differentiable sorting, ranks and top-k."""

from __future__ import annotations

from otloss.nn.base import Module
from otloss.solvers.ranking.soft_sort import soft_rank, soft_sort, soft_top_k


class SoftSort(Module, function=soft_sort, inputs=("x",)):
    """`otloss.soft_sort` over the last axis.

    Example:
        >>> import torch
        >>> SoftSort(epsilon=1e-3)(torch.tensor([3.0, 1.0, 2.0]))
        tensor([1., 2., 3.])
    """


class SoftRank(Module, function=soft_rank, inputs=("x",)):
    """`otloss.soft_rank` over the last axis.

    Example:
        >>> import torch
        >>> SoftRank(epsilon=1e-3)(torch.tensor([3.0, 1.0, 2.0]))
        tensor([3., 1., 2.])
    """


class SoftTopK(Module, function=soft_top_k, inputs=("x",)):
    """`otloss.soft_top_k` over the last axis.

    Example:
        >>> import torch
        >>> SoftTopK(k=1, epsilon=1e-3)(torch.tensor([3.0, 1.0, 2.0]))
        tensor([1., 0., 0.])
    """
