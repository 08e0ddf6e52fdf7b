"""Score the hidden states inside a causal LM's own forward pass, so that its logits are never formed.

For the time of one forward pass the head's `forward` is replaced by one that scores its input and returns a
placeholder of one position, and a hook on the root module hands out the loss instead of the logits.
No model's forward is copied, and everything runs inside the wrapped root (DDP, FSDP, ZeRO hooks see what they expect:
the head's parameters are gathered while the head runs, and the loss is part of the root's output).

What a model does to its logits after the head (scale, soft cap) is read from its config and *checked*: the placeholder
holds another number in each column of the vocabulary and goes through the same code, and what comes out has to be
what the config says. Otherwise the model is refused, be it for another scale, a masked column or a dropped one.

A head that torch's `ColwiseParallel` has spread over processes is scored where it is, its placeholder spread likewise.

A head that FSDP2 shards apart from the root and reshards after its forward is gone when the backward pass comes: there
the gradients have to be made in the forward pass, as the "chunked" kernel does for sums and means (else torch raises).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from otloss_llm._shards import is_row_shard
from otloss_llm.heads import LanguageModelHead, find_head
from otloss_llm.token_loss import TokenLoss


def unwrap(model: nn.Module) -> nn.Module:
    """The root module under DDP, `torch.compile` and the like (PEFT models are roots of their own)."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and hasattr(model, "module") and isinstance(model.module, nn.Module):
            inner = model.module
        if inner is None:
            return model
        model = inner


@contextmanager
def fused_loss(model: nn.Module, score: Callable[[Tensor, LanguageModelHead], TokenLoss]) -> Iterator[None]:
    """Within this context a call of `model` returns `{"loss", "nll", "cost"}` made by `score(hidden, head)`.

    Args:
        model: a causal LM of transformers, possibly wrapped (DDP, FSDP2, PEFT).
        score: called once with the head's input `(batch, length, d)` and the head.

    Raises:
        TypeError: the head cannot be handled.
        ValueError: the model treats its logits in another way than its config says, adds a loss of its own, or does
            not call its head exactly once.
    """
    root = unwrap(model)
    head = find_head(root)
    name = type(root).__name__
    made: dict[str, Any] = {}

    @torch.compiler.disable  # a compiled graph would keep the labels of the call that compiled it
    def score_hidden(hidden: Tensor) -> Tensor:
        if "result" in made:
            raise ValueError(f"{name} calls its head more than once in a forward pass; it cannot be fused.")
        made["result"] = score(hidden, head)
        probe = torch.linspace(-40.0, 40.0, head.weight.shape[0], device=hidden.device)
        made["probe"] = probe.reshape([1] * (hidden.ndim - 1) + [-1])
        return _spread_like(head.weight, made["probe"]) if is_row_shard(head.weight) else made["probe"].clone()

    @torch.compiler.disable
    def hand_out(module: nn.Module, args: Any, output: Any) -> dict[str, Tensor]:
        if "result" not in made:
            raise ValueError(f"{name} did not call its head {type(head.module).__name__} in its forward pass.")
        logits = output["logits"] if isinstance(output, dict) else output[0]
        _check_transform(name, head, made["probe"], logits)
        if isinstance(output, dict) and output.get("aux_loss") is not None:
            raise ValueError(
                f"{name} adds an auxiliary loss (mixture of experts), which the objective does not include; "
                "set output_router_logits=False in its config."
            )
        result: TokenLoss = made["result"]
        return {"loss": result.loss, "nll": result.nll} | ({} if result.cost is None else {"cost": result.cost})

    if "forward" in head.module.__dict__:
        raise TypeError(
            f"the head of {name} had its forward replaced (device_map, a tp_plan of transformers, another patch?); "
            "it cannot be fused. torch's own ColwiseParallel on the head can."
        )
    head.module.forward = score_hidden  # type: ignore[method-assign]  # for one forward pass; restored below
    handle = root.register_forward_hook(hand_out, prepend=True)
    try:
        yield
    finally:
        handle.remove()
        del head.module.forward


def _spread_like(weight: Any, probe: Tensor) -> Any:
    """The placeholder as the logits of a head sharded by rows would come: each process has its own columns."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = DTensor.from_local(probe, weight.device_mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(probe.ndim - 1)])


def _check_transform(name: str, head: LanguageModelHead, probe: Tensor, seen: Any) -> None:
    if hasattr(seen, "placements"):
        seen = seen.full_tensor()
    elif is_row_shard(head.weight) and seen.shape[-1] != probe.shape[-1]:
        probe = _spread_like(head.weight, probe).to_local()
    expected = probe.float() * head.scale
    if head.softcap is not None:
        expected = head.softcap * torch.tanh(expected / head.softcap)
    # Models differ in the dtype of these few operations: bfloat16 rounding is the coarsest of them.
    same = seen.shape == expected.shape and torch.allclose(seen.float(), expected, rtol=2.0**-6, atol=2.0**-6)
    if not same:
        raise ValueError(
            f"{name} changes its logits after the head in a way that its config does not tell "
            f"(scale {head.scale}, soft cap {head.softcap} were read from it); its loss cannot be fused. "
            "Use token_loss on the model's own logits instead."
        )
