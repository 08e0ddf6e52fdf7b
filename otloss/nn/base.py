"""A module that holds the settings of a function: tensors as buffers or parameters, costs as submodules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from otloss._checks import check_reduction
from otloss.costs import Cost

_HALF = (torch.float16, torch.bfloat16)


class Module(nn.Module):
    """A module with settings; its tensors keep their dtype when the module is cast to half precision."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._names = tuple(settings)
        for name, value in settings.items():
            self._hold(name, value)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by name, as the function takes them."""
        held = {name: getattr(self, name) for name in self._names}
        return {name: value() if isinstance(value, HeldCost) else value for name, value in held.items()}

    def _hold(self, name: str, value: Any) -> None:
        if isinstance(value, Cost):
            self.add_module(name, HeldCost(value))
        elif isinstance(value, nn.Parameter):
            self.register_parameter(name, value)
        elif isinstance(value, Tensor):
            if value.requires_grad:
                raise ValueError(
                    f"{name} requires a gradient but is not a torch.nn.Parameter, so optimisers would not find it. "
                    f"Pass torch.nn.Parameter({name}) or {name}.detach(), or call the function instead of the module."
                )
            self.register_buffer(name, value)
        else:
            setattr(self, name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in _HALF else moved

        return super()._apply(wide, recurse)

    def extra_repr(self) -> str:
        told = []
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                told.append(f"{name}={tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}")
            elif isinstance(value, (bool, int, float, str)):
                told.append(f"{name}={value!r}")
        return ", ".join(told)


class HeldCost(Module):
    """A cost object taken apart into buffers and parameters; a call puts it together again."""

    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self._frame = copy.copy(cost)
        self._tensors: dict[str, str] = {}  # attribute of the cost to the name under which it is held
        held: dict[int, str] = {}  # one tensor under two names stays one
        for attribute, value in vars(cost).items():
            if isinstance(value, Tensor):
                if id(value) not in held:
                    held[id(value)] = attribute
                    self._hold(attribute, value)
                self._tensors[attribute] = held[id(value)]
            elif isinstance(value, Cost):
                self._hold(attribute, value)
            else:
                continue
            setattr(self._frame, attribute, None)

    def forward(self) -> Cost:
        cost = copy.copy(self._frame)
        for attribute, part in self.named_children():
            setattr(cost, attribute, part())
        for attribute, name in self._tensors.items():
            setattr(cost, attribute, getattr(self, name))
        return cost


class Loss(Module):
    """A module of a function that returns one value per problem."""

    def __init__(self, reduction: str, **settings: Any) -> None:
        check_reduction(reduction)
        super().__init__(**settings)
        self.reduction = reduction

    def extra_repr(self) -> str:
        return ", ".join(part for part in (super().extra_repr(), f"reduction={self.reduction!r}") if part)

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
