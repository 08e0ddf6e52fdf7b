"""Gradients of hidden states, head and bias, summed over chunks of tokens in float32.

Where one chunk holds all tokens, its product is the gradient of the head: no sum in float32 is needed, nor its memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

SLAB_ROWS = 8192  # so many rows of the head at a time where their product cannot be added in float32 at once


@dataclass
class Gradients:
    """Which gradients a pass accumulates, and the buffers it accumulates them in (None: not wanted).

    Attributes:
        head: the head if its gradient is wanted; the first chunk makes the buffer `weight`.
    """

    hidden: Tensor | None
    head: Tensor | None
    bias: Tensor | None
    math_dtype: torch.dtype
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None]
    weight: Tensor | None = None

    @classmethod
    def like(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...]) -> Gradients:
        """Buffers for the wanted ones; weight and bias sums accumulate in float32 (float64 for float64 inputs)."""
        # Gradients of float16 inputs stay float32 until the upstream (loss scaler's) factor has been applied.
        wide = torch.promote_types(hidden.dtype, torch.float32)
        math_dtype = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
        return cls(
            hidden=torch.zeros_like(hidden, dtype=math_dtype) if wanted[0] else None,
            head=weight if wanted[1] else None,
            bias=torch.zeros_like(bias, dtype=wide) if wanted[2] and bias is not None else None,
            math_dtype=math_dtype,
            dtypes=(hidden.dtype, weight.dtype, None if bias is None else bias.dtype),
        )

    @property
    def wanted(self) -> bool:
        return self.hidden is not None or self.head is not None or self.bias is not None

    def add(self, tokens: Tensor, dz: Tensor, hidden: Tensor, weight: Tensor, *, is_only: bool) -> None:
        """Accumulate one chunk, which may be the only one: `dh = dz W`, `dW += dz^T h`, `db += sum dz`."""
        narrow = dz.to(self.math_dtype)
        if self.hidden is not None:
            self.hidden[tokens] = _times_weight(narrow, weight)
        if self.head is not None:
            self._add_to_weight(self.head, narrow.T, hidden.to(self.math_dtype), is_only)
        if self.bias is not None:
            self.bias += dz.sum(0, dtype=self.bias.dtype)

    def _add_to_weight(self, head: Tensor, dz: Tensor, hidden: Tensor, is_only: bool) -> None:
        is_first = self.weight is None
        if self.weight is None:
            dtype = self.math_dtype if is_only else torch.promote_types(self.math_dtype, torch.float32)
            self.weight = torch.empty(head.shape, dtype=dtype, device=head.device)
        if self.weight.dtype != self.math_dtype:
            _add_in_float32(self.weight, dz, hidden, fresh=is_first)
        elif is_first:  # writing is cheaper than clearing and adding
            torch.mm(dz, hidden, out=self.weight)
        else:
            self.weight.addmm_(dz, hidden)

    def times(self, upstream: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients in the dtypes of the inputs, times a factor; the buffers are given away."""
        if self.head is not None and self.weight is None:  # there was no token
            self.weight = torch.zeros_like(self.head)
        # Most factors are 1. Another is read too: a GPU takes three times as long for one that it has to read itself.
        factor = 1.0 if upstream is None else float(upstream)

        def finished(total: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
            if total is None:
                return None
            if factor == 1.0:
                return total.to(dtype)
            if total.dtype == dtype:
                return total.mul_(factor)
            return torch.mul(total, factor, out=torch.empty_like(total, dtype=dtype))  # one pass over memory

        totals = (self.hidden, self.weight, self.bias)
        self.hidden = self.head = self.weight = self.bias = None
        hidden, weight, bias = (finished(g, dtype) for g, dtype in zip(totals, self.dtypes, strict=True))
        return hidden, weight, bias


def _times_weight(dz: Tensor, weight: Tensor) -> Tensor:
    """`dz W`, of float16 rows in float32, without a second matrix of the head's size."""
    if weight.dtype == dz.dtype:
        return dz @ weight
    products = dz.new_zeros(len(dz), weight.shape[1])
    for part, slab in zip(dz.split(SLAB_ROWS, dim=1), weight.split(SLAB_ROWS), strict=True):
        products.addmm_(part, slab.to(dz.dtype))
    return products


def _add_in_float32(total: Tensor, dz: Tensor, hidden: Tensor, *, fresh: bool) -> None:
    """`total += dz hidden` (or `=`) of 16-bit factors, without a second matrix of the head's size."""
    if total.is_cuda and _has_float32_products(total.device, dz.dtype):
        if fresh:
            torch.ops.aten.mm.dtype_out(dz, hidden, torch.float32, out=total)
        else:
            torch.ops.aten.addmm.dtype_out(total, dz, hidden, torch.float32, out=total)
        return
    for part, slab in zip(total.split(SLAB_ROWS), dz.split(SLAB_ROWS), strict=True):
        product = slab @ hidden
        if fresh:
            part.copy_(product)
        else:
            part += product


@functools.cache
def _has_float32_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether 16-bit products can be added to a float32 sum in place: from torch 2.8 the operator is there, and in some
    versions it raised an error for a float32 sum or did not add it."""
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.ones(16, 16, device=device)
    try:
        torch.ops.aten.mm.dtype_out(ones, ones, torch.float32, out=total)
        torch.ops.aten.addmm.dtype_out(total, ones, ones, torch.float32, out=total)
    except (AttributeError, RuntimeError):
        return False
    return bool((total == 32).all())
