"""What the functions of this library tell autograd: where a derivative is not given, an error in place of a zero."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from otloss._checks import TRANSFORMS, called, has_tangent, raise_inside_vmap, requires_gradient, transform_kinds

_T = TypeVar("_T")


def cached_with_graph(function: Callable[[Any], _T]) -> cached_property[_T]:
    """Return a `cached_property` that has the graph of its object, also where it is read first under `no_grad`.

    The object has an attribute `_grad_enabled`: whether autograd recorded where it was made.
    """

    def compute(instance: Any) -> _T:
        with torch.inference_mode(False), torch.set_grad_enabled(instance._grad_enabled):
            return function(instance)

    return cached_property(compute)


def once_only(gradient: Tensor, message: str, *inputs: Tensor) -> Tensor:
    """Return `gradient`, tied to what it depends on: differentiating it once more raises RuntimeError(message)."""
    if not torch.is_grad_enabled() and not has_tangent(*inputs):
        return gradient
    tied: Tensor = _NoDerivative.apply(gradient, message, *inputs)
    return tied


def without_gradient(value: Tensor, message: str, *inputs: Tensor) -> Tensor:
    """Return `value`, which depends on `inputs`: a backward pass through it raises RuntimeError(message)."""
    tied: Tensor = _NoDerivative.apply(value.detach(), message, *inputs)
    return tied


def change_gradient(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Let `change` replace the gradient of a tensor that is no leaf of a user's; torch may ask for none."""
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: None if gradient is None else change(gradient))


def check_no_tangent(advice: str, *inputs: Tensor) -> None:
    """Raise NotImplementedError if an input carries a tangent, which would be lost."""
    if has_tangent(*inputs):
        raise NotImplementedError(f"{called()} has no derivative in forward mode here; {advice}")


def is_forward_in_forward() -> bool:
    """Whether forward mode of torch.func is inside forward mode, as jacfwd of jacfwd.

    Torch gives the `jvp` of a Function saved tensors without their outer tangents: the derivative would lack a part.
    """
    return transform_kinds().count(TRANSFORMS.Jvp) > 1


def check_no_forward_in_forward() -> None:
    """Raise NotImplementedError where a Function with a `jvp` would give a wrong second derivative."""
    if is_forward_in_forward():
        raise NotImplementedError(
            f"{called()} has no derivative by forward mode inside forward mode (jacfwd of jacfwd); use "
            "torch.func.hessian, which is jacfwd of jacrev."
        )


def check_first_derivative(*inputs: Tensor) -> None:
    """Raise NotImplementedError for forward mode of torch.func inside another derivative: only the first is given."""
    kinds = transform_kinds()
    if TRANSFORMS.Jvp not in kinds:
        return
    is_recorded = torch.is_grad_enabled() and any(map(requires_gradient, inputs))
    if is_recorded or kinds.count(TRANSFORMS.Jvp) + kinds.count(TRANSFORMS.Grad) > 1:
        raise NotImplementedError(
            f"{called()} gives first derivatives only, and forward mode (jvp, jacfwd) is inside another derivative, or "
            "an argument requires a gradient; detach the arguments."
        )


_ADVICE = "Call torch.autograd.grad, or in forward mode use torch.autograd.forward_ad."


def check_no_transform(advice: str = _ADVICE) -> None:
    """Raise NotImplementedError inside transforms of `torch.func`, whose tensors do not let their numbers be read."""
    if kinds := transform_kinds():
        if TRANSFORMS.Vmap in kinds:
            raise_inside_vmap()
        raise NotImplementedError(
            f"{called()} does not work inside transforms of torch.func (grad, jvp, ...) with these arguments: "
            f"it reads the numbers of its tensors. {advice}"
        )


class Unchanged:
    """Notices where one of some tensors was changed in place since."""

    def __init__(self, *tensors: Tensor) -> None:
        # Inference tensors count no versions.
        self._versions = [(t, t._version) for t in tensors if not t.is_inference()]

    def __getstate__(self) -> list[tuple[Tensor, bool]]:
        return [(tensor, tensor._version == version) for tensor, version in self._versions]

    def __setstate__(self, state: list[tuple[Tensor, bool]]) -> None:
        # Copies of tensors, by `copy` or `pickle`, count their versions anew.
        self._versions = [(tensor, tensor._version if is_unchanged else -1) for tensor, is_unchanged in state]

    def check(self, what: str) -> None:
        """Raise RuntimeError if one was; `what` names what was to be computed from them."""
        for tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"{what} was asked for after a tensor of shape {tuple(tensor.shape)} that the problem is made of "
                    "was changed in place; ask for it before, or solve with a clone of that tensor."
                )


def release(ctx: Any, *names: str) -> None:
    """Drop these attributes of the context of a backward pass, unless its graph is retained for another one.

    Torch frees saved tensors after the pass, but attributes live for as long as the value does.
    """
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        for name in names:
            setattr(ctx, name, None)


class _NoDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, message: str, *inputs: Tensor) -> Tensor:
        ctx.message = message
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(ctx.message)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> None:
        raise NotImplementedError(f"{called()} has no derivative in forward mode here: {ctx.message}")
