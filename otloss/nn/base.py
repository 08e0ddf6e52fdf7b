"""Modules made of functions: some arguments are settings that the module holds, the others come with each call.

    class CdfDistance(Loss, function=cdf_distance, inputs=("p", "q")): ...

The settings have the names, the order and the defaults that they have in the function. Tensors among them are held as
buffers or parameters, cost objects as submodules.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from otloss._checks import check_reduction
from otloss._foreign import check_keywords
from otloss.costs import Cost, as_cost

_HALF = (torch.float16, torch.bfloat16)


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
        names: dict[int, str] = {}  # one tensor under two attributes stays one
        for attribute, value in vars(cost).items():
            if isinstance(value, Tensor):
                if id(value) not in names:
                    names[id(value)] = attribute
                    self._hold(attribute, value)
                self._tensors[attribute] = names[id(value)]
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


class Module(TensorHolder):
    """A function as a module. A subclass names the function and the arguments that come with each call."""

    _function: ClassVar[Callable[..., Any]]
    _inputs: ClassVar[tuple[str, ...]]
    _settings: ClassVar[inspect.Signature]

    def __init_subclass__(cls, *, function: Callable[..., Any] | None = None, inputs: tuple[str, ...] = ()) -> None:
        super().__init_subclass__()
        if function is not None:
            parameters = inspect.signature(function).parameters
            cls._function = staticmethod(function)
            cls._inputs = tuple(name for name in inputs if parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY)
            cls._settings = inspect.Signature([p for name, p in parameters.items() if name not in inputs])
            cls.__signature__ = cls._settings  # type: ignore[attr-defined]  # what `help` and `inspect` show

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__()
        name = type(self).__name__
        check_keywords(name, settings, self._settings.parameters)
        try:
            bound = self._settings.bind(*args, **settings)
        except TypeError as error:
            raise TypeError(f"{name}: {error}; expected {name}{self._settings}.") from None
        bound.apply_defaults()
        self._names = tuple(bound.arguments)
        for setting, value in self._prepared(bound.arguments).items():
            self._hold(setting, value)

    def _prepared(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the settings as they are held, after checks that need not wait for a call."""
        if "reduction" in settings:
            check_reduction(settings["reduction"])
        return {n: as_cost(v) if n.startswith("cost") and v is not None else v for n, v in settings.items()}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by name, as the function takes them."""
        values = {name: getattr(self, name) for name in self._names}
        return {name: value() if isinstance(value, CostModule) else value for name, value in values.items()}

    def forward(self, *inputs: Any, **more: Any) -> Tensor:
        if len(inputs) > len(self._inputs):
            raise TypeError(f"{type(self).__name__} got {len(inputs)} inputs, expected at most {self._inputs}.")
        value: Tensor = self._function(**dict(zip(self._inputs, inputs, strict=False)), **more, **self.settings)
        return value

    def extra_repr(self) -> str:
        shown = []
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                shown.append(f"{name}={tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}")
            elif isinstance(value, (bool, int, float, str)):
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)


class Loss(Module):
    """A function that returns one value per problem, as a module with a reduction."""

    def __init__(self, *args: Any, reduction: str = "mean", **settings: Any) -> None:
        check_reduction(reduction)
        super().__init__(*args, **settings)
        self.reduction = reduction

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if options:
            own = inspect.signature(Loss.__init__).parameters["reduction"].replace(annotation="str")
            settings = cls._settings
            cls.__signature__ = settings.replace(parameters=[*settings.parameters.values(), own])  # type: ignore[attr-defined]

    def extra_repr(self) -> str:
        return ", ".join(part for part in (super().extra_repr(), f"reduction={self.reduction!r}") if part)

    def forward(self, *inputs: Any, **more: Any) -> Tensor:
        values = super().forward(*inputs, **more)
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
