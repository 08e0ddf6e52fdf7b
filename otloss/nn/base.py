"""What the modules share: tensors and costs that they hold, and the reduction of losses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from otloss._checks import check_reduction, check_tensor
from otloss.costs import Cost

_HALF = (torch.float16, torch.bfloat16)


class Holder(nn.Module):
    """A module whose tensors keep their dtype where they are asked for in half precision."""

    def hold(self, name: str, value: Tensor | None) -> None:
        if value is None:
            self.register_buffer(name, None)
            return
        check_tensor(name, value)
        if isinstance(value, nn.Parameter):
            self.register_parameter(name, value)
            return
        if value.requires_grad:
            raise ValueError(
                f"{name} requires a gradient and is no torch.nn.Parameter: optimisers would not find it here, and a "
                f"graph behind it would serve one backward pass only. Pass torch.nn.Parameter({name}) or "
                f"{name}.detach(), or call the function in place of the module."
            )
        self.register_buffer(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in _HALF else moved

        return super()._apply(wide, recurse)


class HeldCost(Holder):
    """A cost object taken apart into buffers and parameters, and put together again when it is called."""

    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self._frame = copy.copy(cost)
        self._names: dict[str, str] = {}  # of the attributes of the cost: where each is held
        held: dict[int, str] = {}  # one tensor under two names stays one
        for attribute, value in vars(cost).items():
            if isinstance(value, Cost):
                self.add_module(attribute, HeldCost(value))
            elif isinstance(value, Tensor):
                if id(value) not in held:
                    held[id(value)] = attribute
                    self.hold(attribute, value)
                self._names[attribute] = held[id(value)]
            else:
                continue
            setattr(self._frame, attribute, None)

    def forward(self) -> Cost:
        cost = copy.copy(self._frame)
        for attribute, part in self.named_children():
            setattr(cost, attribute, part())
        for attribute, name in self._names.items():
            setattr(cost, attribute, getattr(self, name))
        return cost

    def extra_repr(self) -> str:
        return repr(self())


class Loss(Holder):
    shown: tuple[str, ...] = ()

    def __init__(self, reduction: str) -> None:
        super().__init__()
        check_reduction(reduction)
        self.reduction = reduction

    def reduced(self, values: Tensor) -> Tensor:
        if self.reduction == "none":
            return values
        if self.reduction == "sum":
            return values.sum()
        if values.numel() == 0:
            raise ValueError(
                f'reduction="mean" over an empty batch of shape {tuple(values.shape)} has no value; skip empty '
                'batches, or use reduction="sum".'
            )
        return values.mean()

    def extra_repr(self) -> str:
        return described(self, (*self.shown, "reduction"))


def described(module: nn.Module, names: tuple[str, ...]) -> str:
    parts = []
    for name in names:
        value = getattr(module, name)
        if isinstance(value, Tensor):
            value = f"{tuple(value.shape)} {value.dtype}".replace("torch.", "")
        elif value is None:
            continue
        else:
            value = repr(value)
        parts.append(f"{name}={value}")
    return ", ".join(parts)
