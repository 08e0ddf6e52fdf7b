"""Token losses of a causal language model: validation, the choice of kernel, and reduction.

Labels are aligned with logits (or hidden states): position `t` is scored against label `t`; shift before the call.
`D = sum_i q_i c(i, y)` is the exact transport cost to the one-hot target, because a one-hot target leaves
only one coupling.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from otloss.costs import Cost
from otloss.extending import check_floating, eager
from otloss_llm.costs.embedding import EmbeddingCost
from otloss_llm.costs.few_columns import FewColumns
from otloss_llm.costs.sharded import own_columns
from otloss_llm.kernels import chunked, reference
from otloss_llm.kernels.logits import Head
from otloss_llm.losses.positions import (
    IGNORE_INDEX,
    check_fixed,
    check_head,
    check_kernel,
    check_objective,
    check_token_reduction,
    check_transform,
    raise_not_finite,
    reduction_factor,
    scatter,
    valid_positions,
)
from otloss_llm.models.sharded_heads import VocabShard, fingerprint, local_tensors
from otloss_llm.objectives import EMO, Objective


class TokenLoss(NamedTuple):
    """What a token loss returns.

    Attributes:
        loss: the reduced objective, with a graph; float32 for 16-bit inputs.
        nll: detached per-token `-log q_y` in nats, shaped like the labels; 0 at ignored positions.
        cost: detached per-token transport cost D, likewise; None when no cost was given.
    """

    loss: Tensor
    nll: Tensor
    cost: Tensor | None


@eager
def token_loss(
    logits: Float[Tensor, "*batch vocab"],
    labels: Int[Tensor, "*batch"],
    *,
    objective: Objective,
    cost: Cost | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
) -> TokenLoss:
    """An objective of `(nll, D)` per token, from logits: the specification the fused kernels are tested against.

    Args:
        logits: `(..., V)`; 16-bit logits are computed with in float32.
        labels: `(...)` token ids aligned with `logits` (no hidden shift); `ignore_index` leaves a position out.
        objective: `(nll, D) -> value`, for example `EMO()`.
        cost: vocabulary cost with `rows(labels) -> (U, V)`; needed by objectives that read D, else only reported.
        ignore_index: label that leaves a position out of the loss.
        reduction: "mean" over the labelled positions, "sum", or "none" (0 at ignored positions).
        num_items: with "mean", divide by this count instead (gradient accumulation, several processes).

    Returns:
        `TokenLoss(loss, nll, cost)`. All positions ignored: loss 0 with a graph and zero gradients.

    Raises:
        ValueError: shapes that do not fit, labels out of range, a cost of another vocabulary, non-finite logits.
        TypeError: non-floating logits, non-integer labels, an objective that is not callable.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, 1.0]], requires_grad=True)
        >>> out = token_loss(logits, torch.tensor([0]), objective=EMO(), cost=EmbeddingCost(torch.eye(3)))
        >>> out.loss, out.cost  # with an orthonormal embedding D is 1 - q_y
        (tensor(0.4076, grad_fn=<MulBackward0>), tensor([0.3348]))
    """
    check_floating("logits", logits)
    check_objective(objective, cost, logits.shape[-1], logits.device)
    check_token_reduction(reduction, num_items)
    valid = valid_positions(labels, logits.shape[:-1], logits.shape[-1], ignore_index, "logits")
    chosen = logits[valid]
    chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
    y = labels[valid].long()
    value, nll, transport = reference.token_values(chosen, y, objective=objective, cost=_at(cost, labels, valid))
    if not (torch.isfinite(value).all() and torch.isfinite(nll).all()):
        raise_not_finite(nll.detach(), transport, y, objective, logits=chosen)
    loss = value if reduction == "none" else value.sum() * reduction_factor(reduction, num_items, value)
    return _at_positions(loss, nll, transport, valid)


@eager
def linear_token_loss(
    hidden: Float[Tensor, "*batch width"],
    weight: Float[Tensor, "vocab width"],
    labels: Int[Tensor, "*batch"],
    *,
    objective: Objective,
    cost: Cost | None = None,
    bias: Float[Tensor, "vocab"] | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    impl: str = "auto",
    chunk_size: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> TokenLoss:
    """`token_loss(softcap(scale * (hidden @ weight.T + bias)), labels)` without ever forming the full logits.

    Args:
        hidden: `(..., d)` hidden states before the head.
        weight: `(V, d)` head; trained or frozen.
        labels: `(...)` token ids aligned with `hidden` (no hidden shift).
        objective, cost, ignore_index, reduction, num_items: as in `token_loss`.
        bias: `(V,)` of the head.
        logit_scale: factor on the logits.
        logit_softcap: `softcap * tanh(logits / softcap)` after the scale; None for no cap.
        impl: "chunked" holds, beyond inputs and gradients, (chunk, V) float32 and the cost rows of a chunk's distinct
            labels, never (N, V), and is first-order only;
            "triton" is the same in chunks whose softmax and gradient are made by Triton kernels, for CUDA tensors of
            at most 32 bits, and holds (chunk, V) in bfloat16 if the inputs are; "reference" forms the full logits and
            allows second derivatives. "auto" is "triton" on CUDA where Triton is installed, else "chunked".
        chunk_size: tokens per chunk; None takes, of the tokens at hand, as many as fit 128 MiB of float32 logits, at
            most 1024, or on a GPU 2^28 logits (512 MiB in bfloat16): 2048 tokens of a vocabulary of 128256.
        process_group: processes that hold the rows of `weight` (and `bias`) together, in the order of ranks, and have
            the same `hidden` and `labels` each (tensor parallelism). Labels are ids in the whole vocabulary; the loss
            and the gradient of `hidden` come out whole in every process, that of `weight` for its own rows. The cost
            is a whole one, or a `ShardedEmbeddingCost`. None: all rows are here.

    DTensors carry their sharding (leave process_group out): a weight with placements `[Shard(0)]` goes with replicated
    hidden states.

    Under `torch.autocast` the matrix products run in the autocast dtype, as the model's own head would. `torch.compile`
    leaves the call out of its graphs (one graph break). Second derivatives and `torch.func` need impl="reference".
    Where gradients are made in the backward pass (reduction "none", checkpointing, a graph gone through again) the
    objective is asked again then: it must not have changed.

    Returns:
        `TokenLoss(loss, nll, cost)`.

    Raises:
        ValueError, TypeError: as `token_loss`; also hidden states and head of different width, dtype or device.
        RuntimeError: a second derivative through "chunked".

    Example:
        >>> hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(10, 8, requires_grad=True)
        >>> out = linear_token_loss(hidden, weight, torch.tensor([1, 2, 3, -100]),
        ...                         objective=EMO(), cost=EmbeddingCost(weight))
        >>> out.loss.backward(); hidden.grad.shape, bool(hidden.grad[3].any())
        (torch.Size([4, 8]), False)
    """
    hidden, weight, bias, labels, process_group = local_tensors(hidden, weight, bias, labels, process_group)
    head = Head(objective, cost, logit_scale, logit_softcap, chunk_size, impl)
    shard = None
    if process_group is not None:
        reduced = {"reduction": reduction, "num_items": num_items, "ignore_index": ignore_index}
        shard = _agreed_shard(process_group, (hidden, weight, bias, labels), head, reduced)
    check_kernel(impl, chunk_size)
    logit_scale, logit_softcap = check_transform(logit_scale, logit_softcap)
    head = replace(head, scale=logit_scale, softcap=logit_softcap)
    hidden, weight, bias = check_head(hidden, weight, bias, labels)
    vocab = weight.shape[0] if shard is None else shard.vocab
    check_objective(objective, cost, vocab, weight.device)
    check_token_reduction(reduction, num_items)
    valid = valid_positions(labels, hidden.shape[:-1], vocab, ignore_index, "hidden")
    h, y = hidden[valid], labels[valid].long()
    factor = None if reduction == "none" else reduction_factor(reduction, num_items, h)
    if impl != "reference":
        check_fixed(cost)
    kernel = _reference if impl == "reference" else partial(chunked.token_values, shard=shard)
    if shard is not None:
        columns = None if cost is None else own_columns(cost, shard, y)
        step = head.rows_per_chunk(max(1, *shard.sizes), hidden.device.type)  # one for all processes
        head = replace(head, cost=columns, chunk_size=step)
    else:
        head = replace(head, cost=_at(cost, labels, valid))
    with torch.autocast(hidden.device.type, enabled=False):
        loss, nll, transport = kernel(h, weight, bias, y, factor, head)
    if not (torch.isfinite(loss).all() and torch.isfinite(nll).all()):
        raise_not_finite(nll.detach(), transport, y, objective, hidden=h, weight=weight, bias=bias)
    return _at_positions(loss, nll, transport, valid)


def _agreed_shard(
    group: dist.ProcessGroup,
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor],
    head: Head,
    reduced: dict[str, Any],
) -> VocabShard:
    """Which rows of the head are here; raises in every process if the arguments of one are wrong."""
    hidden, weight, bias, labels = tensors
    cost = head.cost
    assert not isinstance(cost, FewColumns)  # made for the labels at hand, further down

    def check() -> dict[str, Any]:
        count = reduced["num_items"]
        h, w, b = check_head(hidden, weight, bias, labels)
        check_kernel(head.impl, head.chunk_size)
        scale, softcap = check_transform(head.scale, head.softcap)
        check_token_reduction(reduced["reduction"], count)
        check_objective(head.objective, cost, cost.shape[0] if isinstance(cost, Cost) else 0)
        if head.impl == "reference":
            raise ValueError('impl="reference" forms all logits in one process; with process_group expected "auto".')
        check_fixed(cost)
        return {
            "hidden": (tuple(h.shape), h.dtype),
            "labels": (tuple(labels.shape), fingerprint(labels)),
            "gradients": [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (h, w, b)],
            "cost": None if cost is None else (type(cost).__name__, cost.shape, cost.dtype),
            "logits": (scale, softcap, head.impl, head.chunk_size),
            "reduction": reduced | {"num_items": None if count is None else float(count)},
        }

    return VocabShard.agreed(group, weight, check)


def _at(cost: Cost | None, labels: Tensor, valid: Tensor) -> Cost | FewColumns | None:
    """The cost as the kernels take it: for the labels at hand, where it is one number but in a few columns."""
    few_columns = getattr(cost, "few_columns", None)
    return cost if few_columns is None else few_columns(labels, valid)


def _reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, factor: Tensor | None, head: Head
) -> tuple[Tensor, Tensor, Tensor | None]:
    logits = reference.head_logits(hidden, weight, bias, scale=head.scale, softcap=head.softcap)
    value, nll, transport = reference.token_values(logits, labels, objective=head.objective, cost=head.cost)
    return value if factor is None else value.sum() * factor, nll, transport


def _at_positions(loss: Tensor, nll: Tensor, transport: Tensor | None, valid: Tensor) -> TokenLoss:
    """Per-token tensors back at their positions (the loss too, unless it is reduced)."""
    return TokenLoss(
        loss=scatter(loss, valid) if loss.ndim else loss,
        nll=scatter(nll.detach(), valid),
        cost=None if transport is None else scatter(transport.detach(), valid),
    )


def emo_loss(
    logits: Float[Tensor, "*batch vocab"],
    labels: Int[Tensor, "*batch"],
    embedding: Float[Tensor, "vocab width"] | EmbeddingCost,
    *,
    weighting: str | float = "ratio",
    ratio_clip: float | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
) -> Tensor:
    """EMO from logits in one line: `token_loss` with `EMO` and the cosine cost of `embedding`, returning the loss.

    Args:
        logits: `(..., V)`, aligned with the labels like those of `torch.nn.functional.cross_entropy`
            (the vocabulary is the last axis here).
        labels: `(...)` token ids; `ignore_index` leaves a position out.
        embedding: `(V, d)` rows of a frozen head, always detached; pass an `EmbeddingCost` to normalise it, and to look
            for its near-duplicates, only once.
        weighting, ratio_clip: as in `EMO`.
        ignore_index, reduction: as in `token_loss`.

    Example:
        >>> emo_loss(torch.zeros(2, 3), torch.tensor([0, 2]), torch.eye(3))
        tensor(1.0986)
    """
    cost = embedding if isinstance(embedding, Cost) else EmbeddingCost(embedding)
    objective = EMO(weighting=weighting, ratio_clip=ratio_clip)
    return token_loss(
        logits, labels, objective=objective, cost=cost, ignore_index=ignore_index, reduction=reduction
    ).loss
