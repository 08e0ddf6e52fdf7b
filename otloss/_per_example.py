"""The decorator of functions whose leading axes are a batch: an axis that `torch.vmap` maps over becomes such an axis.

Inside transforms of `torch.func` the numbers of tensors cannot be read. So the function is called below the transforms,
as one operation of autograd with a rule for `torch.vmap`: the mapped axis of each argument goes to the front, in front
of the axes of its batch, which are brought to equal number. Arguments that are not mapped broadcast; where a gradient
is wanted of them, every example has its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from otloss._checks import TRANSFORMS, check_not_batched, requires_gradient, transform_kinds

_P = ParamSpec("_P")
_R = TypeVar("_R")


Place = tuple[str, int | None]  # the name of an argument, and for one of a pair which one


def per_example(
    *, is_traced: Callable[[dict[str, Any]], bool] = lambda settings: True, **axes: int | tuple[int, int]
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator for a function of tensors that are named with the number of their axes after the batch.

    An argument that may be a pair has two such numbers. `is_traced` tells by the arguments of a call whether
    `torch.func.grad` differentiates the function itself.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: _P.args, **settings: _P.kwargs) -> _R:
            if torch._C._are_functorch_transforms_active():
                arguments = signature.bind(*args, **settings).arguments
                for cost in (value for value in arguments.values() if hasattr(value, "tensors")):
                    for tensor in cost.tensors():
                        check_not_batched(tensor)  # calls are mapped over weights: all have one cost
                tensors = _tensors(arguments, axes)
                if _is_below(arguments, tensors, is_traced):
                    return _call_below(function, arguments, tensors, axes)
            return function(*args, **settings)

        return call

    return decorate


def _tensors(arguments: dict[str, Any], axes: dict[str, int | tuple[int, int]]) -> dict[Place, Tensor]:
    arguments_of_places: dict[Place, Any] = {}
    for name, value in arguments.items():
        if isinstance(axes.get(name), tuple) and isinstance(value, tuple | list):
            arguments_of_places |= {(name, index): part for index, part in enumerate(value[:2])}
        elif name in axes:
            arguments_of_places[name, None] = value
    return {place: t for place, t in arguments_of_places.items() if isinstance(t, Tensor)}


def _is_below(
    arguments: dict[str, Any], tensors: dict[Place, Tensor], is_traced: Callable[[dict[str, Any]], bool]
) -> bool:
    kinds = transform_kinds()
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if TRANSFORMS.Jvp in kinds or not any(is_wrapped(t) for t in tensors.values()):
        return False
    return TRANSFORMS.Vmap in kinds or (TRANSFORMS.Grad in kinds and not is_traced(arguments))


def _call_below(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    tensors: dict[Place, Tensor],
    axes: dict[str, int | tuple[int, int]],
) -> Any:
    names = {name for name, _ in tensors}
    for name, value in arguments.items():
        if name not in names and isinstance(value, tuple | list) and any(isinstance(t, Tensor) for t in value):
            raise NotImplementedError(
                f"{function.__name__} does not take a list as {name} inside transforms of torch.func; pass one padded "
                "tensor with weights of 0, or pass the batch itself in one call, without them."
            )
        parts = value.parameters() if hasattr(value, "parameters") else [value]
        if name not in names and any(isinstance(t, Tensor) and requires_gradient(t) for t in parts):
            raise NotImplementedError(
                f"{function.__name__} gives no gradient of {name} inside transforms of torch.func; pass the batch "
                "itself in one call, and differentiate by torch.autograd.grad."
            )
    wanted = tuple(place for place, t in tensors.items() if t.is_floating_point() and requires_gradient(t))
    counts = [axes[name] for name, _ in tensors]
    after = tuple(count if isinstance(count, int) else count[0] for count in counts)
    return _Value.apply(_Work(function, arguments, tuple(tensors), after, wanted), *tensors.values())


@dataclass(eq=False)
class _Work:
    """A call, and after it the graph of its value.

    Attributes:
        function, arguments: of the call.
        places, axes: of the tensors, and the number of their axes after the batch.
        wanted: the places of those whose gradient is wanted.
        leaves, value: what the call was below the transforms, and its value.
    """

    function: Callable[..., Tensor]
    arguments: dict[str, Any]
    places: tuple[Place, ...]
    axes: tuple[int, ...]
    wanted: tuple[Place, ...]
    leaves: tuple[Tensor, ...] = ()
    value: Tensor | None = None

    def run(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Call the function on tensors without transforms."""
        arguments, own = dict(self.arguments), {}
        with torch.enable_grad():
            for (name, index), t in zip(self.places, tensors, strict=True):
                leaf = own[name, index] = t.detach().requires_grad_((name, index) in self.wanted)
                pair = arguments[name]
                arguments[name] = leaf if index is None else (*pair[:index], leaf, *pair[index + 1 :])
            self.value = self.function(**arguments)
        self.leaves = tuple(own[place] for place in self.wanted)
        return self.value.detach()

    def gradients(self, upstream: Tensor) -> tuple[Tensor, ...]:
        assert self.value is not None
        if not self.value.requires_grad:
            return tuple(torch.zeros_like(leaf) for leaf in self.leaves)
        return torch.autograd.grad(self.value, self.leaves, upstream, retain_graph=True, materialize_grads=True)

    def mapped(self, count: int, dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Return the tensors with the mapped axis in front of their batch axes."""
        batches = [t.dim() - axes - (dim is not None) for t, dim, axes in zip(tensors, dims, self.axes, strict=True)]
        batch_axes = max(*batches, *(len(getattr(value, "batch_shape", ())) for value in self.arguments.values()))
        moved = []
        for place, t, dim, batch in zip(self.places, tensors, dims, batches, strict=True):
            if dim is not None:
                t = t.movedim(dim, 0)
            elif place in self.wanted:
                t = t.expand(count, *t.shape)
            else:
                moved.append(t)
                continue
            moved.append(t.reshape(count, *[1] * (batch_axes - batch), *t.shape[1:]))
        return moved


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(work: _Work, *tensors: Tensor) -> Tensor:
        return work.run(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.work = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        work: _Work = ctx.work
        derivatives = dict(zip(work.wanted, _Gradients.apply(work, upstream[0], *ctx.saved_tensors), strict=True))
        return None, *(derivatives.get(place) for place in work.places)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], work: _Work, *tensors: Tensor) -> tuple[Tensor, int]:
        return _Value.apply(work, *work.mapped(info.batch_size, in_dims[1:], tensors)), 0


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(work: _Work, upstream: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return work.gradients(upstream)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.work = inputs[0]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> None:
        function = ctx.work.function
        settings = ', with grad="implicit"' if "grad" in inspect.signature(function).parameters else ""
        raise RuntimeError(
            f"a second derivative of {function.__name__} was asked for inside transforms of torch.func, where it gives "
            f"first ones only; pass the batch itself in one call{settings}, and differentiate by torch.autograd.grad."
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], work: _Work, upstream: Tensor, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        dim, dims = in_dims[1], in_dims[2:]
        ahead = upstream.movedim(dim, 0) if dim is not None else upstream.expand(info.batch_size, *upstream.shape)
        if all(axis is None for axis in dims):  # several gradients of one value, as for a Jacobian
            each = [_Gradients.apply(work, one, *tensors) for one in ahead]
            derivatives = [torch.stack(parts) for parts in zip(*each, strict=True)]
        else:
            own = dict(zip(work.places, zip(tensors, dims, strict=True), strict=True))
            derivatives = _Gradients.apply(work, ahead, *work.mapped(info.batch_size, dims, tensors))
            moved = [own[place] for place in work.wanted]
            shapes = [t.shape if axis is None else t.movedim(axis, 0).shape[1:] for t, axis in moved]
            derivatives = [t.reshape(info.batch_size, *shape) for t, shape in zip(derivatives, shapes, strict=True)]
        return tuple(derivatives), (0,) * len(derivatives)
