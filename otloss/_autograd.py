"""Gradients that must not be mistaken: an error where a derivative is not given, in place of a constant or a zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def once_only(gradient: Tensor, message: str, *inputs: Tensor) -> Tensor:
    """Return `gradient`, tied to what it depends on: differentiating it once more raises RuntimeError(message)."""
    held: Tensor = _Refusal.apply(gradient, message, *inputs)
    return held


def without_gradient(value: Tensor, message: str, *inputs: Tensor) -> Tensor:
    """Return `value`, which depends on `inputs`: a backward pass through it raises RuntimeError(message)."""
    held: Tensor = _Refusal.apply(value.detach(), message, *inputs)
    return held


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, message: str, *inputs: Tensor) -> Tensor:
        ctx.message = message
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(ctx.message)
