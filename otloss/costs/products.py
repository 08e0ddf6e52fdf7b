"""Matrix products whose precision is the one of their factors, backwards too, inside `torch.autocast` as outside.

Autocast rounds the factors of a float32 product to 16 bits, and a backward pass inside of it does so again with the
products of derivatives, though the forward pass kept out of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from otloss._autograd import is_forward_in_forward
from otloss._checks import needs_torch, requires_gradient


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` for factors of at least one and two axes, with derivatives of every order."""
    if a.dim() == 1:
        return product(a.unsqueeze(0), b).squeeze(-2)
    # Torch gives the jvp of a Function no outer tangents.
    if is_forward_in_forward() or not (needs_torch(a, b) or requires_gradient(a) or requires_gradient(b)):
        return _multiplied(a, b)
    if a.dim() > 2 and b.dim() == 2:  # the derivative of b is then one product, not one for each problem of the batch
        flat: Tensor = _Product.apply(a.reshape(-1, a.shape[-1]), b)
        return flat.reshape(*a.shape[:-1], b.shape[-1])
    batched: Tensor = _Product.apply(a, b)
    return batched


def _multiplied(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


class _Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return _multiplied(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad
        return (
            product(upstream[0], b.mT).sum_to_size(a.shape) if needs_a else None,
            product(a.mT, upstream[0]).sum_to_size(b.shape) if needs_b else None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        a, b = ctx.saved_tensors
        along_a, along_b = tangents
        terms = [product(along_a, b)] if along_a is not None else []
        terms += [product(a, along_b)] if along_b is not None else []
        return sum(terms[1:], terms[0])
