"""The token loss from hidden states, a chunk of tokens at a time: the full logits never exist.

Notation: z are the logits of one token, q = softmax(z), y its label, c_i = c(i, y) one row of the cost.

    nll = -log q_y    D = sum_i q_i c_i    H = -sum_i q_i log q_i    Z = logsumexp(z)    M = mean_i z_i
    Z_T = T logsumexp(z / T)
    value = objective(nll, D, ...)        alpha, beta, eta, zeta, mu, tau = d value / d (nll, D, H, Z, M, Z_T)
    d value / d z_i = q_i (alpha + zeta + beta (c_i - D) - eta (log q_i + H)) - alpha [i = y] + mu / V
                      + tau softmax(z / T)_i

The sweeps work with x_i = z_i - max z: H = log sum_i exp(x_i) - X and log q_i + H = x_i - X, where X = sum_i q_i x_i.
M and its gradient, the same for all logits, take a pass of their own over the chunk; so does Z_T (`tempered`). What the
objective does not read is not computed.

Tokens are sorted by label, so that a cost row is computed once per distinct label of a chunk. A chunk is a matrix
product, a sweep over its rows (`rows.softmax_rows`), the objective on two vectors, a second sweep that leaves the
gradient in the logits (`rows.gradient_rows`), and two more products. Where the upstream gradient is known in advance
(sum and mean) all this happens in the forward pass; for per-token values ("none") the backward pass recomputes.

Memory beyond inputs and gradients: one buffer of (chunk, vocab), the cost rows of its labels, and vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._autograd import check_no_transform
from otloss_llm.costs.vocabulary import FewColumns, LabelRows
from otloss_llm.kernels.few_columns import FewColumnSweeps
from otloss_llm.kernels.logits import ROW_MULTIPLE, Logits, TokenLossConfig, runs_on_numba, sweeps_for
from otloss_llm.kernels.rows import CostRows, GradientCoefficients, RowSums
from otloss_llm.kernels.tempered import TemperedLogits
from otloss_llm.kernels.vocab_parallel import ShardedSweeps, sum_over
from otloss_llm.kernels.weight_gradients import Gradients
from otloss_llm.models.sharded_heads import VocabShard
from otloss_llm.objectives import Statistics

_WITHOUT_TRANSFORM = 'Pass impl="reference", or call torch.autograd.grad.'


@dataclass
class Tokens:
    """The rows' numbers put together: the statistics of each token, and what their gradient is made of."""

    statistics: Statistics
    sums: RowSums
    e_y: Float[Tensor, " chunk"]
    total: Float[Tensor, " chunk"]
    x_y: Float[Tensor, " chunk"]
    x_mean: Float[Tensor, " chunk"] | None

    @classmethod
    def from_sums(cls, sums: RowSums, mean_logit: Tensor | None = None, tempered: Tensor | None = None) -> Tokens:
        """Use the sums over a whole row; the label's entry stays apart, so nll and D keep their digits as q_y -> 1."""
        x_y = sums.z_y - sums.top
        e_y = x_y.exp()
        total = sums.others + e_y
        # Where e_y is 1 the label is the largest, but for rounding. Where all is masked e_y is NaN, and so is nll.
        log_total = torch.where(e_y == 1, torch.log1p(sums.others), total.log())
        nll = torch.where(e_y == 1, log_total, log_total - x_y)
        transport = entropy = x_mean = None
        if sums.others_cost is not None and sums.c_y is not None:
            transport = (sums.others_cost + e_y * sums.c_y) / total
        if sums.others_logit is not None:
            x_mean = (sums.others_logit + torch.where(e_y == 0, 0.0, e_y * x_y)) / total
            entropy = log_total - x_mean
        statistics = Statistics(nll, transport, entropy, sums.top + log_total, mean_logit, tempered)
        return cls(statistics, sums, e_y, total, x_y, x_mean)

    def coefficients(self, gradients: Statistics, factor: Tensor) -> GradientCoefficients:
        """What multiplies `exp(z - top)` in `factor * d value / dz` but for M and Z_T, and the sum at the label."""
        alpha, beta, eta, zeta, *_ = gradients
        scale = factor / self.total
        a, transport = alpha * scale, self.statistics.cost
        at_label = -a * self.sums.others
        b = h = None
        if zeta is not None:
            a, at_label = a + zeta * scale, at_label + zeta * scale * self.e_y
        if beta is not None and transport is not None and self.sums.c_y is not None:
            b = beta * scale
            at_label = at_label + b * self.e_y * (self.sums.c_y - transport)
        if eta is not None and self.x_mean is not None:
            h = eta * scale
            a, at_label = a + h * self.x_mean, at_label - h * self.e_y * (self.x_y - self.x_mean)
        return GradientCoefficients(a, b, None if b is None else transport, at_label, h)


def _chunks(
    labels: Tensor, weight: Tensor, config: TokenLossConfig
) -> Iterator[tuple[Tensor, CostRows | FewColumns | None]]:
    """Per chunk: token positions, equal labels side by side; their cost rows, valid until the next chunk."""
    if not len(labels):
        return
    step = config.rows_per_chunk(weight.shape[0], weight.device.type)
    if isinstance(config.cost, FewColumns):
        for tokens in torch.arange(len(labels), device=labels.device).split(step):
            yield tokens, config.cost.for_chunk(tokens)
        return
    # Grouped by label, the groups in no order: frequent tokens have low ids in many vocabularies, and sorting by id
    # would give the last chunks most of the distinct labels, and the buffer of cost rows their size.
    order = (labels * 0x9E3779B1 & 0xFFFFFFFF).argsort(stable=True)
    if config.cost is None:
        yield from ((tokens, None) for tokens in order.split(step))
        return
    distinct, which = torch.unique_consecutive(labels[order], return_inverse=True)
    pieces = which.split(step)
    # One synchronisation for all chunks: the first and last distinct label of each.
    bounds = torch.stack([torch.stack([piece[0], piece[-1]]) for piece in pieces]).tolist()
    max_labels = max(last + 1 - first for first, last in bounds)
    buffers = [_buffer_of_rows(config.cost, max_labels, config.cost_dtype(weight))]
    for k, (tokens, piece, (first, last)) in enumerate(zip(order.split(step), pieces, bounds, strict=True)):
        # Nothing but the last chunk's rows holds the buffer, so that whoever takes them can free its memory.
        index, is_last = distinct[first : last + 1], k + 1 == len(pieces)
        yield (
            tokens,
            CostRows(
                _rows_of(config.cost, index, buffers.pop() if is_last else buffers[0], weight.dtype), piece - first
            ),
        )


def _buffer_of_rows(cost: LabelRows, max_labels: int, dtype: torch.dtype) -> Tensor | None:
    """Memory for the rows of up to `most` labels, which all chunks share; None if the cost takes none."""
    if not cost.buffer_dtypes:
        return None
    max_labels += -max_labels % ROW_MULTIPLE
    return torch.empty(max_labels * cost.columns, dtype=dtype, device=cost.device)


def _rows_of(cost: LabelRows, index: Tensor, buffer: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The rows of these labels, in float64 only if the head is."""
    padding = index[-1:].expand(0 if buffer is None else -len(index) % ROW_MULTIPLE)
    rows = cost.rows(torch.cat([index, padding]), buffer)
    is_fitting = (rows.dtype == torch.float64) == (dtype == torch.float64)
    return rows if is_fitting else rows.to(torch.promote_types(dtype, torch.float32))


def chunked_pass(
    hidden: Float[Tensor, "tokens width"],
    weight: Float[Tensor, "vocab width"],
    bias: Float[Tensor, " vocab"] | None,
    labels: Int[Tensor, " tokens"],
    config: TokenLossConfig,
    *,
    upstream: Tensor,
    gradients: Gradients,
    shard: VocabShard | None = None,
    derivatives: Derivatives | None = None,
) -> tuple[Tensor, Statistics]:
    """The value and the statistics of each token; adds d(sum_t upstream_t value_t) to `gradients`.

    With a `shard`, `weight`, `bias` and the columns of the cost belong to this process, and everything else is equal
    in all of them, the chunk size included. `derivatives` takes the place of the objective's.
    """
    objective = config.objective
    read = objective.reads
    value = hidden.new_empty(len(labels), dtype=torch.promote_types(hidden.dtype, torch.float32))
    kept = {name: torch.empty_like(value) for name in _wanted_statistics(read, config)}
    vocab = len(weight) if shard is None else shard.vocab
    logits = Logits(hidden, weight, bias, config)
    temperature = objective.temperature
    tempered = None if temperature is None else TemperedLogits(temperature, shard)
    for tokens, cost in _chunks(labels, weight, config):
        h, label = hidden[tokens], labels[tokens]
        z, cap_derivative = logits.compute(h)
        sweeps: Any = _sweeps_for(z, config, shard)
        mean_logit = _mean_logit(z, vocab, shard) if "mean_logit" in read else None
        tempered_logsumexp = None if tempered is None else tempered.logsumexp(z)
        sums = sweeps.softmax_rows(z, label, cost, "entropy" in read)
        chunk = Tokens.from_sums(sums, mean_logit, tempered_logsumexp)
        statistics = Statistics(**{name: getattr(chunk.statistics, name) for name in kept})
        if derivatives is not None:
            value_chunk, gradient_of = statistics.nll, derivatives(tokens)
        elif gradients.wanted:
            value_chunk, gradient_of = objective.value_and_gradients(statistics)
        else:
            value_chunk = objective.value(statistics)
        value[tokens] = value_chunk.to(value.dtype)
        for name, vector in kept.items():
            vector[tokens] = getattr(statistics, name).to(value.dtype)
        if gradients.wanted:
            factor = config.factor * (upstream[tokens] if upstream.ndim else upstream)
            sweeps.gradient_rows(z, sums.top, label, cost, chunk.coefficients(gradient_of, factor))
            cost = None  # the products below may take its memory
            if gradient_of.mean_logit is not None:
                z.add_((gradient_of.mean_logit * factor / vocab)[:, None])
            if tempered is not None and gradient_of.tempered_logsumexp is not None:
                tempered.add_gradient(z, gradient_of.tempered_logsumexp * factor)
            if cap_derivative is not None:
                z.mul_(cap_derivative)
            gradients.add(tokens, z, h, weight, is_only=len(tokens) == len(labels))
    if shard is not None and gradients.hidden is not None:
        sum_over(gradients.hidden, shard.group)
    statistics = Statistics(**kept)
    objective.check_tokenwise(statistics, value)
    return value, statistics


Derivatives = Callable[[Int[Tensor, " chunk"]], Statistics]  # the derivatives of the tokens at these positions


def _wanted_statistics(read: tuple[str, ...], config: TokenLossConfig) -> list[str]:
    """The statistics that a pass makes: nll always, the cost where there is one, and what the objective reads."""
    wanted = {"nll", *read} - {"cost"} | ({"cost"} if config.cost is not None else set())
    return [name for name in Statistics._fields if name in wanted]


def _mean_logit(z: Tensor, vocab: int, shard: VocabShard | None) -> Float[Tensor, " chunk"]:
    total = z.sum(-1, dtype=torch.promote_types(z.dtype, torch.float32))
    if shard is not None:
        sum_over(total, shard.group)
    return total / vocab


def _sweeps_for(z: Tensor, config: TokenLossConfig, shard: VocabShard | None) -> Any:
    sweeps = sweeps_for(z, config.impl)
    if isinstance(config.cost, FewColumns):
        if runs_on_numba(z, config.impl):
            from otloss_llm.kernels.few_columns_numba import NumbaFewColumnSweeps

            return NumbaFewColumnSweeps()
        return FewColumnSweeps(sweeps)
    return sweeps if shard is None else ShardedSweeps(sweeps, shard)


def reduced(value: Tensor, factor: Tensor) -> Tensor:
    """`sum_t factor_t value_t`, of one factor or one for each token."""
    factor = factor.to(value.dtype)
    return (value * factor).sum() if factor.ndim else value.sum() * factor


class _Loss(torch.autograd.Function):
    """`sum_t factor_t value_t`, of one factor or one for each token; without a factor `value_t` for each token.

    `wanted` says which gradients are computed in the forward pass; others are computed in the backward pass, which
    runs the chunks again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        factor: Tensor | None,
        config: TokenLossConfig,
        shard: VocabShard | None,
        wanted: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, ...]:
        gradients = Gradients.like(hidden, weight, bias, wanted)
        upstream = hidden.new_ones(()) if factor is None else factor
        value, statistics = chunked_pass(
            hidden, weight, bias, labels, config, upstream=upstream, gradients=gradients, shard=shard
        )
        ctx.config, ctx.shard, ctx.per_token = config, shard, factor is None
        ctx.gradients = gradients if gradients.wanted else None
        # Also read by a second backward pass through a retained graph: the gradients are handed out once.
        ctx.save_for_backward(hidden, weight, bias, labels, factor)
        ctx.mark_non_differentiable(*(vector for vector in statistics if vector is not None))
        return value if factor is None else reduced(value, factor), *statistics

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        _check_first_order()
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            hidden, weight, bias, labels, factor = ctx.saved_tensors  # read once: checkpointing allows no more
            gradients = Gradients.like(hidden, weight, bias, ctx.needs_input_grad[:3])
            value = chunked_pass(
                hidden, weight, bias, labels, ctx.config,
                upstream=upstream if factor is None else factor, gradients=gradients, shard=ctx.shard,
            )[0]  # fmt: skip
            if not torch.isfinite(value).all():
                raise ValueError(
                    f"objective {ctx.config.objective!r} has a derivative that is not finite; guard it there."
                )
        return (*gradients.times(None if ctx.per_token else upstream), None, None, None, None, None)


def _check_first_order() -> None:
    if torch.is_grad_enabled():
        # torch's once_differentiable would return constants here, and a gradient penalty would have no effect.
        raise RuntimeError(
            'the "chunked" kernel has no second derivative, which create_graph=True asked for; use impl="reference".'
        )


def _is_checkpointed() -> bool:
    """Whether saved tensors pass through hooks, as in activation checkpointing: what is computed now may be discarded.

    The backward pass then computes the gradients, once; the forward pass and its repetition do no work for them. torch
    2.7 cannot be asked: there both compute them, and the results are the same.
    """
    top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # there is no public way to ask
    return top_hooks is not None and top_hooks(False) is not None


def token_values(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    factor: Tensor | None,
    config: TokenLossConfig,
    shard: VocabShard | None = None,
) -> tuple[Tensor, Statistics]:
    """`factor * sum of values`, or with no factor the values, and the statistics; every label is a valid token."""
    check_no_transform(_WITHOUT_TRANSFORM)
    now = factor is not None and torch.is_grad_enabled() and not _is_checkpointed()
    wanted = tuple(now and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias))
    loss, *statistics = _Loss.apply(hidden, weight, bias, labels, factor, config, shard, wanted)
    return loss, Statistics(*statistics)


class _NllEntropy(torch.autograd.Function):
    """`nll_t` and `H_t` for each token, both differentiable: the backward pass runs the chunks again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        config: TokenLossConfig,
        shard: VocabShard | None,
    ) -> tuple[Tensor, Tensor | None]:
        nothing = Gradients.like(hidden, weight, bias, (False, False, False))
        one = hidden.new_ones(())
        statistics = chunked_pass(hidden, weight, bias, labels, config, upstream=one, gradients=nothing, shard=shard)[1]
        ctx.config, ctx.shard = config, shard
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.set_materialize_grads(False)
        return statistics.nll, statistics.entropy

    @staticmethod
    def backward(ctx: Any, alpha: Tensor | None, eta: Tensor | None) -> tuple[Tensor | None, ...]:
        _check_first_order()
        hidden, weight, bias, labels = ctx.saved_tensors
        alpha = hidden.new_zeros(len(labels)) if alpha is None else alpha
        gradients = Gradients.like(hidden, weight, bias, ctx.needs_input_grad[:3])
        chunked_pass(
            hidden, weight, bias, labels, ctx.config, upstream=hidden.new_ones((), dtype=alpha.dtype),
            gradients=gradients, shard=ctx.shard,
            derivatives=lambda tokens: Statistics(alpha[tokens], entropy=None if eta is None else eta[tokens]),
        )  # fmt: skip
        return (*gradients.times(None), None, None, None)


def nll_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    config: TokenLossConfig,
    shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor]:
    """nll and entropy of each token, both with a graph; `config.objective` reads these two."""
    check_no_transform(_WITHOUT_TRANSFORM)
    return _NllEntropy.apply(hidden, weight, bias, labels, config, shard)
