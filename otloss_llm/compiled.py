"""The token loss inside `torch.compile`: one operator that the graph holds and does not look into.

Tracing the kernels would break the graph at every look at the data (which positions are labelled, which labels are
distinct, whether the result is finite). So the traced program calls an operator whose body is the ordinary eager loss:

    forward     loss, nll, D and, for "mean" and "sum", the gradients, made while the chunks are at hand
    backward    those gradients times the upstream one; for "none" a second operator runs the eager backward pass

Objective and cost are Python objects, which operators do not take: they wait in a table, and the graph holds the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Score = Callable[..., Any]  # linear_token_loss with everything by name

_AUTOGRAD_KEYS = [
    getattr(torch._C.DispatchKey, name)
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView")
    if hasattr(torch._C.DispatchKey, name)
]
_TABLE: list[tuple[Score, dict[str, Any]]] = []


@torch.compiler.assume_constant_result
def key_of(score: Score, names: tuple[str, ...], *objects: Any) -> int:
    """The table's entry for `score` with these objects by these names; tracing guards on the identity of each object.

    Entries stay for good: a compiled graph may ask for its own at any time.
    """
    for key, (known, settings) in enumerate(_TABLE):
        if known is score and all(settings[name] is made for name, made in zip(names, objects, strict=True)):
            return key
    _TABLE.append((score, dict(zip(names, objects, strict=True))))
    return len(_TABLE) - 1


Leaves = tuple[Tensor, Tensor, Tensor | None]


def _leaves(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]) -> Leaves:
    made = [
        None if tensor is None else tensor.detach().requires_grad_(want)
        for tensor, want in zip((hidden, weight, bias), wanted, strict=True)
    ]
    return made[0], made[1], made[2]  # type: ignore[return-value]


def _gradients(loss: Tensor, leaves: Leaves, upstream: Tensor | None) -> list[Tensor]:
    """One tensor for each leaf, empty where no gradient is wanted: an operator returns tensors only."""
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    made = iter(torch.autograd.grad(loss, wanted, upstream) if wanted else ())
    return [next(made) if leaf is not None and leaf.requires_grad else loss.new_empty(0) for leaf in leaves]


@contextmanager
def _eager(hidden: Tensor, graph: bool) -> Iterator[None]:
    """Autograd as outside of an operator, whose body runs below it: the objective's slopes come from autograd."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        exclude = exclude.remove(key)
    with (
        torch._C._ForceDispatchKeyGuard(include, exclude),
        torch.set_grad_enabled(graph),
        torch.autocast(hidden.device.type, enabled=False),
    ):
        yield


@torch.library.custom_op("otloss_llm::token_loss", mutates_args=())
def _operator(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, num_items: Tensor | None,
    key: int, reduction: str, ignore_index: int, logit_scale: float, logit_softcap: float | None, impl: str,
    chunk_size: int | None, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    score, objects = _TABLE[key]
    graph = any(wanted) and reduction != "none"
    with _eager(hidden, graph):
        leaves = _leaves(hidden, weight, bias, wanted if graph else [False] * 3)
        out = score(
            leaves[0], leaves[1], labels, bias=leaves[2], num_items=num_items, reduction=reduction,
            ignore_index=ignore_index, logit_scale=logit_scale, logit_softcap=logit_softcap, impl=impl,
            chunk_size=chunk_size, **objects,
        )  # fmt: skip
        gradients = _gradients(out.loss, leaves, None)
    cost = out.nll.new_empty(0) if out.cost is None else out.cost
    return out.loss.detach(), out.nll, cost, gradients[0], gradients[1], gradients[2]


@torch.library.custom_op("otloss_llm::token_loss_backward", mutates_args=())
def _backward_operator(
    upstream: Tensor,
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, num_items: Tensor | None,
    key: int, reduction: str, ignore_index: int, logit_scale: float, logit_softcap: float | None, impl: str,
    chunk_size: int | None, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    score, objects = _TABLE[key]
    with _eager(hidden, True):
        leaves = _leaves(hidden, weight, bias, wanted)
        out = score(
            leaves[0], leaves[1], labels, bias=leaves[2], num_items=num_items, reduction=reduction,
            ignore_index=ignore_index, logit_scale=logit_scale, logit_softcap=logit_softcap, impl=impl,
            chunk_size=chunk_size, **objects,
        )  # fmt: skip
        gradients = _gradients(out.loss, leaves, upstream)
    return gradients[0], gradients[1], gradients[2]


def _shapes(tensors: tuple[Tensor | None, ...], wanted: list[bool], like: Tensor) -> list[Tensor]:
    return [
        tensor.new_empty(tensor.shape) if tensor is not None and want else like.new_empty(0)
        for tensor, want in zip(tensors, wanted, strict=True)
    ]


@_operator.register_fake
def _(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, num_items: Any, *rest: Any) -> Any:
    key, reduction, wanted = rest[0], rest[1], rest[-1]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    nll = torch.empty_like(labels, dtype=wide, memory_format=torch.contiguous_format)
    per_token = reduction == "none"
    loss = torch.empty_like(nll) if per_token else nll.new_empty(())
    cost = nll.new_empty(0) if _TABLE[key][1]["cost"] is None else torch.empty_like(nll)
    return loss, nll, cost, *_shapes((hidden, weight, bias), [False] * 3 if per_token else wanted, nll)


@_backward_operator.register_fake
def _(upstream: Tensor, hidden: Tensor, weight: Tensor, labels: Any, bias: Tensor | None, *rest: Any) -> Any:
    return tuple(_shapes((hidden, weight, bias), rest[-1], upstream))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.settings, ctx.per_token, ctx.wanted = inputs[5:], inputs[6] == "none", inputs[-1]
    ctx.save_for_backward(*(inputs[:5] if ctx.per_token else output[3:]))


def _backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    if ctx.per_token:
        made = _backward_operator(upstream, *ctx.saved_tensors, *ctx.settings)
    else:
        made = tuple((saved * upstream).to(saved.dtype) for saved in ctx.saved_tensors)
    hidden, weight, bias = (g if want else None for g, want in zip(made, ctx.wanted, strict=True))
    return hidden, weight, None, bias, None, *[None] * len(ctx.settings)


_operator.register_autograd(_backward, setup_context=_keep)


def traced_token_loss(
    key: int,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    settings: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`(loss, nll, cost)` as a node of the graph being traced.

    Args:
        key: of the table.
        tensors: hidden, weight, labels, bias, num_items.
        settings: reduction, ignore_index, logit_scale, logit_softcap, impl, chunk_size.
    """
    hidden, weight, _, bias, _ = tensors
    wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    loss, nll, cost, *_ = _operator(*tensors, key, *settings, wanted)
    return loss, nll.detach(), cost.detach() if _has_cost(key) else None


@torch.compiler.assume_constant_result
def _has_cost(key: int) -> bool:
    return _TABLE[key][1]["cost"] is not None
