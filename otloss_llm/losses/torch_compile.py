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
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from otloss_llm.objectives import from_recipe, recipe

Score = Callable[..., Any]
_SCORES: list[Score] = []  # linear_token_loss, which stands a floor above


def scores_with(score: Score) -> Score:
    """Decorator: what the operators call."""
    _SCORES.append(score)
    return score


_AUTOGRAD_KEYS = [
    getattr(torch._C.DispatchKey, name)
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView")
    if hasattr(torch._C.DispatchKey, name)
]
_TABLE: list[dict[str, Any]] = []


def _while_tracing(function: Any) -> Any:
    """Decorator: run when a program is traced, and its result put into the graph as a constant.

    `torch.compiler.assume_constant_result` does no more, but imports the compiler: a second for everybody.
    """
    function._dynamo_marked_constant = True
    return function


@_while_tracing
def key_of(made: Any, objective_id: int, cost: Any, cost_id: int) -> int:
    """The table's entry for an objective (or its `recipe`) and a cost; tracing guards on the identity of each.

    Entries stay for good: a compiled graph may ask for its own at any time.

    Args:
        objective_id, cost_id: as the traced program sees them.

    Raises:
        ValueError: an object that the traced program itself makes. It does not exist yet: what arrives here is a shell
            whose `__init__` never ran, with the defaults of its class for attributes.
    """
    if torch.compiler.is_exporting():
        raise ValueError("the fused loss cannot be exported: its objective and cost are objects of this process.")
    known = isinstance(made, (tuple, MethodType)) or (isinstance(made, partial) and isinstance(made.func, FunctionType))
    for name, thing, seen, fine in (("objective", made, objective_id, known), ("cost", cost, cost_id, False)):
        if not fine and id(thing) != seen:
            raise ValueError(
                f"the {name} ({type(thing).__name__}) is made inside the compiled function; make it outside, once."
            )
    objective = from_recipe(made)
    for key, entry in enumerate(_TABLE):
        same = entry["objective"] is objective or (isinstance(made, tuple) and recipe(entry["objective"]) == made)
        if same and entry["cost"] is cost:
            return key
    _TABLE.append({"objective": objective, "cost": cost})
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


def _call(leaves: Leaves, labels: Tensor, num_items: Tensor | None, settings: tuple[Any, ...]) -> Any:
    key, reduction, ignore_index, logit_scale, logit_softcap, impl, chunk_size = settings
    return _SCORES[0](
        leaves[0], leaves[1], labels, bias=leaves[2], num_items=num_items, reduction=reduction,
        ignore_index=ignore_index, logit_scale=logit_scale, logit_softcap=logit_softcap, impl=impl,
        chunk_size=chunk_size, **_TABLE[key],
    )  # fmt: skip


def _puts_off(hidden: Tensor, reduction: str) -> bool:
    """Whether the gradients wait for the backward pass: for an upstream gradient per token, or in float16 for a loss
    scaler's factor, which has to save the small ones before they are rounded."""
    return reduction == "none" or hidden.dtype == torch.float16


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
    graph = any(wanted) and not _puts_off(hidden, reduction)
    settings = (key, reduction, ignore_index, logit_scale, logit_softcap, impl, chunk_size)
    with _eager(hidden, graph):
        leaves = _leaves(hidden, weight, bias, wanted if graph else [False] * 3)
        out = _call(leaves, labels, num_items, settings)
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
    settings = (key, reduction, ignore_index, logit_scale, logit_softcap, impl, chunk_size)
    with _eager(hidden, True):
        leaves = _leaves(hidden, weight, bias, wanted)
        gradients = _gradients(_call(leaves, labels, num_items, settings).loss, leaves, upstream)
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
    loss = torch.empty_like(nll) if reduction == "none" else nll.new_empty(())
    cost = nll.new_empty(0) if _TABLE[key]["cost"] is None else torch.empty_like(nll)
    return (
        loss,
        nll,
        cost,
        *_shapes((hidden, weight, bias), [False] * 3 if _puts_off(hidden, reduction) else wanted, nll),
    )


@_backward_operator.register_fake
def _(upstream: Tensor, hidden: Tensor, weight: Tensor, labels: Any, bias: Tensor | None, *rest: Any) -> Any:
    return tuple(_shapes((hidden, weight, bias), rest[-1], upstream))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.settings, ctx.put_off, ctx.wanted = inputs[5:], _puts_off(inputs[0], inputs[6]), inputs[-1]
    ctx.save_for_backward(*(inputs[:5] if ctx.put_off else output[3:]))


def _backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and type(upstream) is Tensor:
        raise RuntimeError("the fused loss has no second derivative inside torch.compile; call it outside.")
    if ctx.put_off:
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


@_while_tracing
def _has_cost(key: int) -> bool:
    return _TABLE[key]["cost"] is not None
