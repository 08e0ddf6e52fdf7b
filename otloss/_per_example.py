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

_P = ParamSpec("_P")
_R = TypeVar("_R")


def per_example(
    *, is_traced: Callable[[dict[str, Any]], bool] = lambda settings: True, **axes: int
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator for a function of tensors that are named with the number of their axes after the batch.

    `is_traced` tells by the arguments of a call whether `torch.func.grad` differentiates the function itself.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: _P.args, **settings: _P.kwargs) -> _R:
            if torch._C._are_functorch_transforms_active():
                arguments = signature.bind(*args, **settings).arguments
                tensors = {name: t for name, t in arguments.items() if name in axes and isinstance(t, Tensor)}
                if _is_below(arguments, tensors, is_traced):
                    return _call_below(function, arguments, tensors, axes)
            return function(*args, **settings)

        return call

    return decorate


def _is_below(
    arguments: dict[str, Any], tensors: dict[str, Tensor], is_traced: Callable[[dict[str, Any]], bool]
) -> bool:
    functorch = torch._C._functorch
    kinds, stack = functorch.TransformType, {level.key() for level in functorch.get_interpreter_stack()}
    if kinds.Jvp in stack or not any(functorch.is_functorch_wrapped_tensor(t) for t in tensors.values()):
        return False
    return kinds.Vmap in stack or (kinds.Grad in stack and not is_traced(arguments))


def _call_below(
    function: Callable[..., Any], arguments: dict[str, Any], tensors: dict[str, Tensor], axes: dict[str, int]
) -> Any:
    for name, value in arguments.items():
        parts = value.parameters() if hasattr(value, "parameters") else [value]
        if name not in tensors and any(isinstance(t, Tensor) and t.requires_grad for t in parts):
            raise NotImplementedError(
                f"{function.__name__} gives no gradient of {name} inside transforms of torch.func; pass the batch "
                "itself in one call, and differentiate by torch.autograd.grad."
            )
    wanted = tuple(name for name, t in tensors.items() if t.is_floating_point() and t.requires_grad)
    work = _Work(function, arguments, tuple(tensors), tuple(axes[name] for name in tensors), wanted)
    return _Value.apply(work, *tensors.values())


@dataclass(eq=False)
class _Work:
    """A call, and after it the graph of its value.

    Attributes:
        function, arguments: of the call.
        names, axes: of the tensors, and the number of their axes after the batch.
        wanted: the names of those whose gradient is wanted.
        leaves, value: what the call was below the transforms, and its value.
    """

    function: Callable[..., Tensor]
    arguments: dict[str, Any]
    names: tuple[str, ...]
    axes: tuple[int, ...]
    wanted: tuple[str, ...]
    leaves: tuple[Tensor, ...] = ()
    value: Tensor | None = None

    def run(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Call the function on tensors without transforms."""
        with torch.enable_grad():
            own = {
                name: t.detach().requires_grad_(name in self.wanted)
                for name, t in zip(self.names, tensors, strict=True)
            }
            self.value = self.function(**{**self.arguments, **own})
        self.leaves = tuple(own[name] for name in self.wanted)
        return self.value.detach()

    def gradients(self, upstream: Tensor) -> tuple[Tensor, ...]:
        assert self.value is not None
        if not self.value.requires_grad:
            return tuple(torch.zeros_like(leaf) for leaf in self.leaves)
        return torch.autograd.grad(self.value, self.leaves, upstream, retain_graph=True, materialize_grads=True)

    def mapped(self, count: int, dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Return the tensors with the mapped axis in front of their batch axes."""
        batches = [t.dim() - axes - (dim is not None) for t, dim, axes in zip(tensors, dims, self.axes, strict=True)]
        most, moved = max(batches), []
        for name, t, dim, batch in zip(self.names, tensors, dims, batches, strict=True):
            if dim is not None:
                t = t.movedim(dim, 0)
            elif name in self.wanted:
                t = t.expand(count, *t.shape)
            else:
                moved.append(t)
                continue
            moved.append(t.reshape(count, *[1] * (most - batch), *t.shape[1:]))
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
        return None, *(derivatives.get(name) for name in work.names)

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
        raise RuntimeError(
            f"a second derivative of {ctx.work.function.__name__} was asked for inside transforms of torch.func, where "
            "it gives first ones only; call torch.autograd.grad outside of them, for entropic transport with "
            'grad="implicit".'
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
            own = dict(zip(work.names, zip(tensors, dims, strict=True), strict=True))
            derivatives = _Gradients.apply(work, ahead, *work.mapped(info.batch_size, dims, tensors))
            places = [own[name] for name in work.wanted]
            shapes = [t.shape if axis is None else t.movedim(axis, 0).shape[1:] for t, axis in places]
            derivatives = [t.reshape(info.batch_size, *shape) for t, shape in zip(derivatives, shapes, strict=True)]
        return tuple(derivatives), (0,) * len(derivatives)
