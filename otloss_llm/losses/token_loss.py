"""Token losses of a causal language model: validation, the choice of kernel, and reduction.

Labels are aligned with logits (or hidden states): position `t` is scored against label `t`; shift before the call.
`D = sum_i q_i c(i, y)` is the exact transport cost to the one-hot target, because a one-hot target leaves
only one coupling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import check_floating, check_positive
from otloss._public import public
from otloss.costs import Cost
from otloss_llm.costs.embedding import EmbeddingCost
from otloss_llm.costs.vocabulary import TokenCost, VocabularyCost
from otloss_llm.kernels import chunked, reference, sharded_logits
from otloss_llm.kernels.logits import TokenLossConfig
from otloss_llm.losses.positions import (
    IGNORE_INDEX,
    check_fixed,
    check_head,
    check_kernel,
    check_objective,
    check_token_reduction,
    check_transform,
    check_vocabulary,
    raise_not_finite,
    reduction_factor,
    scatter,
    valid_positions,
    valid_weights,
)
from otloss_llm.models.sharded_heads import (
    CHECKS,
    LocalLogits,
    VocabShard,
    fingerprint,
    gathered_sequence,
    local_logits,
    local_tensors,
    replica,
)
from otloss_llm.objectives import EMO, Objective, Statistics, Sum


class _LossNllCost(NamedTuple):
    loss: Tensor
    nll: Tensor
    cost: Tensor | None


class TokenLoss(_LossNllCost):
    """What a token loss returns; it unpacks as `loss, nll, cost`.

    Attributes:
        loss: the reduced objective, with a graph; float32 for 16-bit inputs.
        nll: detached per-token `-log q_y` in nats, shaped like the labels; 0 at ignored positions.
        cost: detached per-token transport cost D; None without a cost.
        transport_cost: another name of `cost`.
        entropy: detached per-token `-sum_i q_i log q_i`; None unless the objective reads it, as the following ones.
        logsumexp, mean_logit: detached per-token `log sum_i exp(z_i)` and mean of the logits.
        tempered_logsumexp: detached per-token `T log sum_i exp(z_i / T)`, T the objective's temperature.
    """

    entropy: Tensor | None
    logsumexp: Tensor | None
    mean_logit: Tensor | None
    tempered_logsumexp: Tensor | None

    def __new__(
        cls,
        loss: Tensor,
        nll: Tensor,
        cost: Tensor | None,
        *,
        entropy: Tensor | None = None,
        logsumexp: Tensor | None = None,
        mean_logit: Tensor | None = None,
        tempered_logsumexp: Tensor | None = None,
    ) -> Self:
        result = super().__new__(cls, loss, nll, cost)
        result.entropy, result.logsumexp, result.mean_logit = entropy, logsumexp, mean_logit
        result.tempered_logsumexp = tempered_logsumexp
        return result

    @property
    def transport_cost(self) -> Tensor | None:
        return self.cost

    @classmethod
    def at_positions(cls, loss: Tensor, statistics: Statistics, valid: Tensor) -> TokenLoss:
        """Per-token vectors back at their positions (the loss too, unless it is reduced)."""
        placed = statistics.map(lambda vector: scatter(vector.detach(), valid))
        return cls(scatter(loss, valid) if loss.ndim else loss, **placed._asdict())

    def statistics(self) -> Statistics:
        """The statistics of all positions."""
        return Statistics(**{name: getattr(self, name) for name in Statistics._fields})


@public
def token_loss(
    logits: Float[Tensor, "*batch vocab"],
    labels: Int[Tensor, "*batch"],
    *,
    objective: Objective,
    cost: TokenCost | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    token_weight: Float[Tensor, "*batch"] | None = None,
) -> TokenLoss:
    """An objective of per-token statistics, `(nll, D)` or more, from logits: the fused kernels are tested against it.

    Args:
        logits: `(..., V)`; 16-bit logits are computed with in float32. Sharded logits, a DTensor with placements
            `[Shard(-1)]` as under torch's `loss_parallel`, are not gathered: labels are then the same in all processes,
            and so are the results.
        labels: `(...)` token ids aligned with `logits` (no hidden shift); `ignore_index` leaves a position out.
        objective: `(nll, D) -> value`, for example `EMO()`; or a function of any of `nll, cost, entropy, logsumexp,
            mean_logit, tempered_logsumexp`, which it names as its parameters.
        cost: over the vocabulary, such as `EmbeddingCost` or any of `otloss.costs`; needed by objectives that read D,
            else only reported.
        ignore_index: label that leaves a position out of the loss.
        reduction: "mean" over the labelled positions, "sum", or "none" (0 at ignored positions).
        num_items: with "mean", divide by this count instead (gradient accumulation, several processes).
        token_weight: `(...)` factors >= 0 of the value at each label, without a gradient; "mean" then divides by the
            sum of the weights at labelled positions. Statistics in the result are not weighted.

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
    local, labels = local_logits(logits), replica("labels", labels)
    logits = local.logits
    token_weight = None if token_weight is None else replica("token_weight", token_weight)

    def checked() -> tuple[Sum, VocabularyCost | None]:
        check_token_reduction(reduction, num_items)
        return check_objective(objective, cost, local.vocab, logits.device)

    settings = (reduction, num_items, ignore_index)
    (total, token_cost), shard = (
        (checked(), None) if local.group is None else _agreed_logits(local, checked, labels, token_weight, settings)
    )
    valid = valid_positions(labels, logits.shape[:-1], local.vocab, ignore_index, "logits")
    predicted = logits[valid]
    predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
    y = labels[valid].long()
    rows = None if token_cost is None else token_cost.for_labels(y, shard)
    if shard is None:
        value, statistics = reference.token_values(predicted, y, objective=total, cost=rows)
    else:
        value, statistics = sharded_logits.token_values(predicted, y, objective=total, cost=rows, shard=shard)
    if not (torch.isfinite(value).all() and torch.isfinite(statistics.nll).all()):
        raise_not_finite(statistics, y, total, logits=predicted)
    weights = valid_weights(token_weight, labels, valid)
    loss = (
        _weighted(value, weights)
        if reduction == "none"
        else chunked.reduced(value, reduction_factor(reduction, num_items, value, weights))
    )
    return TokenLoss.at_positions(loss, statistics, valid)


@public
def linear_token_loss(
    hidden: Float[Tensor, "*batch width"],
    weight: Float[Tensor, "vocab width"],
    labels: Int[Tensor, "*batch"],
    *,
    objective: Objective,
    cost: TokenCost | None = None,
    bias: Float[Tensor, " vocab"] | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    token_weight: Float[Tensor, "*batch"] | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    impl: str = "auto",
    chunk_size: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    check: str = "always",
) -> TokenLoss:
    """`token_loss(softcap(scale * (hidden @ weight.T + bias)), labels)` without ever forming the full logits.

    Args:
        hidden: `(..., d)` hidden states before the head.
        weight: `(V, d)` head; trained or frozen.
        labels: `(...)` token ids aligned with `hidden` (no hidden shift).
        objective, cost, ignore_index, reduction, num_items, token_weight: as in `token_loss`.
        bias: `(V,)` of the head.
        logit_scale: factor on the logits.
        logit_softcap: `softcap * tanh(logits / softcap)` after the scale; None for no cap.
        impl: "chunked" holds, beyond inputs and gradients, (chunk, V) float32 and the cost rows of a chunk's distinct
            labels, never (N, V), and is first-order only;
            "triton" is the same in chunks whose softmax and gradient are made by Triton kernels, for CUDA tensors of
            at most 32 bits, and holds (chunk, V) in bfloat16 if the inputs are; "reference" forms the full logits and
            allows second derivatives. "auto" is "triton" on CUDA where Triton is installed, else "chunked".
        chunk_size: tokens per chunk; None takes, of the tokens at hand, as many as fit 128 MiB of float32 logits, at
            most 1024, or on a GPU 2^28 logits (512 MiB in bfloat16): 2048 tokens of a vocabulary of 128256. With
            "triton" in bfloat16, a head that is trained, and neither `logit_scale`, `logit_softcap` nor a
            temperature, it takes up to `2 d` tokens at once if the cost rows fit the memory of the head's gradient:
            their logits need no more memory than the float32 sum of that gradient, which one chunk does without.
        process_group: processes that hold the rows of `weight` (and `bias`) together, in the order of ranks, and have
            the same `hidden` and `labels` each (tensor parallelism). Labels are ids in the whole vocabulary; the loss
            and the gradient of `hidden` come out whole in every process, the gradient of `weight` for its own rows. The
            cost is a whole one, or a `ShardedEmbeddingCost`. None: all rows are here.
        check: with a head spread over processes, "always" compares the arguments of all processes in each call: one
            collective, and a checksum of the labels that the host waits for. "first" does it in the first call with a
            head and a cost of these shapes in this group; after that processes whose arguments differ wait for each
            other, or go wrong, and so do heads of another vocabulary with a part of the same shape.

    DTensors carry their sharding (leave process_group out): a weight with placements `[Shard(0)]` goes with replicated
    hidden states, or with hidden states (and labels) sharded along the sequence on the same mesh, which are gathered;
    each process then gets the gradient of its own part.

    Under `torch.autocast` the matrix products run in the autocast dtype, as the model's own head would. `torch.compile`
    leaves the call out of its graphs (one graph break). Second derivatives and `torch.func` need impl="reference".
    Where gradients are computed in the backward pass (reduction "none", checkpointing, a second backward pass) the
    objective is called again there: it must not have changed.

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
    _check_checks(check)
    axes = hidden.ndim - 1
    hidden, weight, bias, labels, process_group = local_tensors(hidden, weight, bias, labels, process_group)
    token_weight = None if token_weight is None else replica("token_weight", gathered_sequence(token_weight, axes))

    def checked() -> _Call:
        h, w, b = check_head(hidden, weight, bias, labels)
        check_kernel(impl, chunk_size)
        check_token_reduction(reduction, num_items)
        total, token_cost = check_objective(objective, cost, device=w.device)
        if impl != "reference":
            check_fixed(token_cost)
        else:
            _check_one_process(process_group)
        scale, softcap = check_transform(logit_scale, logit_softcap)
        config = TokenLossConfig(total, None, scale, softcap, chunk_size, impl)
        return _Call(h, w, b, labels, token_cost, config, ignore_index, reduction, num_items, token_weight)

    if process_group is None:
        return _linear_token_loss(checked(), shard=None)
    return _linear_token_loss(*_agreed(process_group, weight, cost, checked, check))


@dataclass(frozen=True)
class _Call:
    """The checked arguments of one call of `linear_token_loss`; tensors in the dtype of the matrix products."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    cost: VocabularyCost | None
    config: TokenLossConfig
    ignore_index: int
    reduction: str = "none"
    num_items: int | Tensor | None = None
    token_weight: Tensor | None = None

    def facts(self) -> dict[str, Any]:
        """What has to be equal in all processes that hold rows of the head."""
        count, config = self.num_items, self.config
        leaves = (self.hidden, self.weight, self.bias)
        return {
            "hidden": (tuple(self.hidden.shape), self.hidden.dtype),
            "labels": (tuple(self.labels.shape), fingerprint(self.labels), self.ignore_index),
            "gradients": [torch.is_grad_enabled() and t is not None and t.requires_grad for t in leaves],
            "cost": None if self.cost is None else (type(self.cost).__name__, self.cost.shape, self.cost.dtype),
            "logits": (config.scale, config.softcap, config.temperature, config.impl, config.chunk_size),
            "token_weight": None if self.token_weight is None else fingerprint(_bits(self.token_weight)),
            "reduction": (self.reduction, None if count is None else float(count)),
        }


# Calls that were compared: (group, shape of this process's rows, shape of the cost). Groups stay alive here, so that no
# other group has the identity of one.
_shards: dict[tuple[Any, ...], VocabShard] = {}


def _agreed(
    group: dist.ProcessGroup, weight: Tensor, cost: TokenCost | None, checked: Callable[[], _Call], check: str
) -> tuple[_Call, VocabShard]:
    """The call, and which rows of the head are here; raises in every process if the arguments of one are wrong."""
    key = (group, weight.shape, getattr(cost, "shape", None))
    if check == "first" and key in _shards:
        return checked(), _shards[key]
    calls: list[_Call] = []

    def facts() -> dict[str, Any]:
        calls.append(checked())
        return calls[0].facts()

    _shards[key] = VocabShard.agreed(group, weight, facts)
    return calls[0], _shards[key]


def _agreed_logits(
    local: LocalLogits,
    checked: Callable[[], tuple[Sum, VocabularyCost | None]],
    labels: Tensor,
    token_weight: Tensor | None,
    settings: tuple[Any, ...],
) -> tuple[tuple[Sum, VocabularyCost | None], VocabShard]:
    """What `checked` returns, and which columns of the logits are here; raises in every process if one differs."""
    assert local.group is not None
    returned: list[tuple[Sum, VocabularyCost | None]] = []

    def facts() -> dict[str, Any]:
        returned.append(checked())
        cost = returned[0][1]
        weights = None if token_weight is None else fingerprint(_bits(token_weight))
        return {
            "logits": (tuple(local.logits.shape[:-1]), local.logits.dtype),
            "labels": (tuple(labels.shape), fingerprint(labels)),
            "cost": None if cost is None else (type(cost).__name__, cost.shape, cost.dtype),
            "settings": [float(value) if isinstance(value, Tensor) else value for value in settings],
            "token_weight": weights,
        }

    shard = VocabShard.agreed(local.group, local.logits.movedim(-1, 0), facts)
    return returned[0], shard


def _check_checks(check: str) -> None:
    if check not in CHECKS:
        raise ValueError(f"check is {check!r}, expected one of {CHECKS}.")


def _bits(weights: Tensor) -> Tensor:
    return weights.detach().float().contiguous().view(torch.int32)


def _check_one_process(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        raise ValueError('impl="reference" forms all logits in one process; with process_group expected "auto".')


class _Scored(NamedTuple):
    """The labelled tokens of a call: hidden states, labels, where they are; and the settings of the kernel for them."""

    hidden: Tensor
    labels: Tensor
    valid: Tensor
    config: TokenLossConfig

    @classmethod
    def from_call(cls, call: _Call, shard: VocabShard | None) -> _Scored:
        weight = call.weight
        vocab, longest = (len(weight),) * 2 if shard is None else (shard.vocab, max(1, *shard.sizes))
        if call.cost is not None:
            check_vocabulary(call.cost, vocab)
        valid = valid_positions(call.labels, call.hidden.shape[:-1], vocab, call.ignore_index, "hidden")
        h, y = _labelled(call.hidden, valid, call.labels)
        cost = None if call.cost is None else call.cost.for_labels(y, shard)
        config = replace(call.config, cost=cost)
        step = config.rows_for(h, y, weight, longest)  # one for all processes
        return cls(h, y, valid, replace(config, chunk_size=step))


def _labelled(hidden: Tensor, valid: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and labels of the valid tokens. A mask as an index would make a GPU wait each time it is used."""
    places = valid.flatten().nonzero().squeeze(1)
    hidden, labels = hidden.reshape(labels.numel(), hidden.shape[-1]), labels.flatten().long()
    if len(places) == len(labels):
        return hidden, labels
    return hidden.index_select(0, places), labels[places]


def _linear_token_loss(call: _Call, shard: VocabShard | None) -> TokenLoss:
    """Compute the loss with the whole head, by the reference or the chunked kernel, or with this process's rows."""
    weight, bias = call.weight, call.bias
    h, y, valid, config = _Scored.from_call(call, shard)
    weights = valid_weights(call.token_weight, call.labels, valid)
    per_token = call.reduction == "none"
    factor = None if per_token else reduction_factor(call.reduction, call.num_items, h, weights)
    with torch.autocast(h.device.type, enabled=False):
        if config.impl == "reference":
            value, statistics = _reference(h, weight, bias, y, config)
            loss = value if factor is None else chunked.reduced(value, factor)
        else:
            loss, statistics = chunked.token_values(h, weight, bias, y, factor, config, shard)
    if not (torch.isfinite(loss).all() & torch.isfinite(statistics.nll).all()):  # one value for the host to wait for
        raise_not_finite(statistics, y, config.objective, hidden=h, weight=weight, bias=bias)
    return TokenLoss.at_positions(_weighted(loss, weights) if per_token else loss, statistics, valid)


def _weighted(value: Tensor, weights: Tensor | None) -> Tensor:
    return value if weights is None else value * weights.to(value)


def _reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, config: TokenLossConfig
) -> tuple[Tensor, Statistics]:
    logits = reference.head_logits(
        hidden, weight, bias, scale=config.scale, softcap=config.softcap, temperature=config.temperature
    )
    return reference.token_values(logits, labels, objective=config.objective, cost=config.cost)


class TokenStatistics(NamedTuple):
    """The log-probability of each label, and the entropy of the distribution it is from, in nats; both with a graph."""

    log_prob: Tensor
    entropy: Tensor


@public
def token_statistics(
    hidden: Float[Tensor, "*batch width"],
    weight: Float[Tensor, "vocab width"],
    labels: Int[Tensor, "*batch"],
    *,
    temperature: float = 1.0,
    bias: Float[Tensor, " vocab"] | None = None,
    ignore_index: int = IGNORE_INDEX,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    impl: str = "auto",
    chunk_size: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    check: str = "always",
) -> TokenStatistics:
    """`log q_y` and the entropy of q at each label, differentiable and without full logits: for reinforcement learning.

    `q = softmax(logits / temperature)`, where the logits are the head's, scaled and capped.

    Args:
        hidden, weight, labels, bias, ignore_index, logit_scale, logit_softcap, impl, chunk_size, process_group, check:
            as in `linear_token_loss`.
        temperature: that the tokens were sampled with, > 0.

    Returns:
        `TokenStatistics(log_prob, entropy)`, each shaped like the labels, 0 at ignored positions. The backward pass of
        "chunked" and "triton" makes the logits again, a chunk at a time.

    Raises:
        ValueError, TypeError: as `linear_token_loss`; also a temperature that is not positive.

    Example:
        >>> hidden, weight = torch.zeros(2, 8), torch.ones(10, 8)
        >>> token_statistics(hidden, weight, torch.tensor([1, -100]))
        TokenStatistics(log_prob=tensor([-2.3026,  0.0000]), entropy=tensor([2.3026, 0.0000]))
    """
    _check_checks(check)
    hidden, weight, bias, labels, process_group = local_tensors(hidden, weight, bias, labels, process_group)

    def checked() -> _Call:
        h, w, b = check_head(hidden, weight, bias, labels)
        check_kernel(impl, chunk_size)
        if impl == "reference":
            _check_one_process(process_group)
        scale, softcap = check_transform(logit_scale, logit_softcap)
        check_positive("temperature", temperature)
        config = TokenLossConfig(Sum.of(_nll_beside_entropy), None, scale, softcap, chunk_size, impl, temperature)
        return _Call(h, w, b, labels, None, config, ignore_index)

    call, shard = (checked(), None) if process_group is None else _agreed(process_group, weight, None, checked, check)
    h, y, valid, config = _Scored.from_call(call, shard)
    with torch.autocast(h.device.type, enabled=False):
        if config.impl == "reference":
            _, (nll, _, entropy, *_) = _reference(h, call.weight, call.bias, y, config)
        else:
            nll, entropy = chunked.nll_and_entropy(h, call.weight, call.bias, y, config, shard)
    if not torch.isfinite(nll).all():
        statistics = Statistics(nll, entropy=entropy)
        raise_not_finite(statistics, y, config.objective, hidden=h, weight=call.weight, bias=call.bias)
    assert entropy is not None
    return TokenStatistics(scatter(-nll, valid), scatter(entropy, valid))


def _nll_beside_entropy(nll: Tensor, entropy: Tensor) -> Tensor:
    return nll


@public
def emo_loss(
    logits: Float[Tensor, "*batch vocab"],
    labels: Int[Tensor, "*batch"],
    embedding: Float[Tensor, "vocab width"] | EmbeddingCost,
    *,
    directions: int | None = None,
    weighting: str | float = "ratio",
    ratio_clip: float | str | None = "default",
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
) -> Tensor:
    """EMO from logits in one line: `token_loss` with `EMO` and the cosine cost of `embedding`, returning the loss.

    Labels are aligned with the logits: there is no shift inside. EMOLoss of the package of that name takes the same
    three arguments and shifts; its `EMOLoss(logits, labels, W)` is `emo_loss(logits[:, :-1], labels[:, 1:], W,
    directions=0)`. Without the slices a model learns to repeat its input, and the loss falls to 0.

    Args:
        logits: `(..., V)`, aligned with the labels as for `torch.nn.functional.cross_entropy`
            (the vocabulary is the last axis here).
        labels: `(...)` token ids; `ignore_index` leaves a position out.
        embedding: `(V, d)` rows of a frozen head, always detached. Rows are prepared anew in each call: pass
            `EmbeddingCost(rows, directions=None)` to do it only once.
        directions: leading directions that are removed from the rows, as in `EmbeddingCost`; None for one in a hundred
            dimensions, 0 for the paper's cost of the rows as they are. An `EmbeddingCost` is taken as it is.
        weighting, ratio_clip: as in `EMO`. The paper's EMO is `directions=0, ratio_clip=None`.
        ignore_index, reduction: as in `token_loss`.

    Example:
        >>> emo_loss(torch.zeros(2, 3), torch.tensor([0, 2]), torch.eye(3), directions=0)
        tensor(1.0986)
    """
    cost: TokenCost = (
        embedding if isinstance(embedding, VocabularyCost | Cost) else EmbeddingCost(embedding, directions=directions)
    )
    objective = EMO(weighting=weighting, ratio_clip=ratio_clip)
    return token_loss(
        logits, labels, objective=objective, cost=cost, ignore_index=ignore_index, reduction=reduction
    ).loss
