"""The base of the modules: what a function is given to hold, and reductions.

Tensors among the settings are held as buffers or parameters, cost objects as submodules.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from otloss._checks import check_reduction
from otloss._foreign import check_keywords
from otloss._public import as_tensor
from otloss.costs import Cost, DenseCost, as_cost

_HALF = (torch.float16, torch.bfloat16)
_SHOWN = (Tensor, bool, int, float, str, tuple, list)  # settings in a repr; a cost has one of its own


class TensorHolder(nn.Module):
    """A module whose tensors keep their dtype when it is cast to half precision."""

    def _hold(self, name: str, value: Any) -> None:
        if isinstance(value, Cost):
            self.add_module(name, CostModule(value))
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


class CostModule(TensorHolder):
    """A cost object as buffers and parameters; a call returns the object with their present values."""

    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self._frame = copy.copy(cost)
        self._tensors: dict[str, str] = {}  # attribute of the cost to its name in this module
        self._parts: list[str] = []  # attributes that are costs themselves
        names: dict[int, str] = {}  # one tensor under two attributes stays one
        for attribute, value in vars(cost).items():
            if isinstance(value, Tensor):
                if id(value) not in names:
                    _check_is_given(cost, attribute, value)
                    names[id(value)] = attribute
                    self._hold(attribute, value)
                self._tensors[attribute] = names[id(value)]
            elif isinstance(value, Cost):
                self._parts.append(attribute)
                self._hold(attribute, value)
            else:
                continue
            setattr(self._frame, attribute, None)

    def forward(self) -> Cost:
        cost = copy.copy(self._frame)
        for attribute in self._parts:
            setattr(cost, attribute, getattr(self, attribute)())
        values = {name: getattr(self, name) for name in set(self._tensors.values())}  # once, by a parametrization
        for attribute, name in self._tensors.items():
            setattr(cost, attribute, values[name])
        return cost


def _check_is_given(cost: Cost, attribute: str, value: Tensor) -> None:
    """Raise for a tensor that the cost computed of a trained one: later steps would not change it."""
    if not value.is_leaf:
        raise ValueError(
            f"the {attribute} of {type(cost).__name__} is computed of a tensor that requires a gradient, so a module "
            "would not follow its training. Detach that tensor, or call the function, with a new cost object in each "
            "step."
        )


def checked_cost(cost: Any, check: Callable[[Any], Cost] = as_cost) -> Cost:
    """Return a checked cost; of a matrix on the meta device, whose numbers are loaded later, the form alone."""
    matrix = cost.stored_matrix() if isinstance(cost, Cost) else cost
    if isinstance(matrix, Tensor) and matrix.is_meta:
        return cost if isinstance(cost, Cost) else DenseCost(cost)
    return check(cost)


class Module(TensorHolder):
    """A function as a module: a subclass has the settings in `__init__` and the other arguments in `forward`.

    `__init__` passes on `locals()`, its arguments by name.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            cls.__init__ = _explained(cls.__init__)  # type: ignore[method-assign]

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        own = {name: value for name, value in arguments.items() if name not in ("self", "__class__")}
        settings = {name: as_tensor(name, value) for name, value in own.items()}
        if "reduction" in settings:
            check_reduction(settings["reduction"])
        self._names = tuple(settings)
        for name, value in self._prepared(settings).items():
            self._hold(name, value)

    def _prepared(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the settings as they are held, after checks that need not wait for a call."""
        return {n: checked_cost(v) if n.startswith("cost") and v is not None else v for n, v in settings.items()}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by name, as the function takes them."""
        values = {name: getattr(self, name) for name in self._names}
        return {name: value() if isinstance(value, CostModule) else value for name, value in values.items()}

    def extra_repr(self) -> str:
        values = {name: getattr(self, name) for name in self._names}
        return ", ".join(f"{n}={_shown(v)}" for n, v in values.items() if isinstance(v, _SHOWN))


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return f"({', '.join(map(_shown, value))})" if isinstance(value, tuple | list) else repr(value)


def _explained(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate `__init__`: a keyword of another package, or one that is misspelt, raises a TypeError that says so."""
    own = inspect.signature(init).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values()):
        return init

    @functools.wraps(init)
    def checked(self: Module, *args: Any, **settings: Any) -> None:
        check_keywords(type(self).__name__, settings, own)
        init(self, *args, **settings)

    return checked


class Loss(Module):
    """A function that returns one value per problem, as a module with a reduction."""

    reduction: str

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in super().settings.items() if name != "reduction"}

    def _reduced(self, values: Tensor) -> Tensor:
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
