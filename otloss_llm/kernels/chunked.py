"""The token loss from hidden states, a chunk of tokens at a time: the full logits never exist.

Notation: z are the logits of one token, q = softmax(z), y its label, c_i = c(i, y) one row of the cost.

    nll = -log q_y        D = sum_i q_i c_i        value = objective(nll, D)
    alpha = d value / d nll        beta = d value / d D
    d value / d z_i = q_i (alpha + beta (c_i - D)) - alpha [i = y]

Tokens are sorted by label, so that a cost row is computed once per distinct label of a chunk. Where the upstream
gradient is known in advance (sum and mean), dh and dW are made in the forward pass, while the chunk is at hand;
for per-token values ("none") the backward pass recomputes the chunks.

The entry of the label is kept apart from the others throughout: `1 - q_y` and `q_y - 1` are sums of the other,
small entries instead of differences of numbers near 1, so nll, D and the gradient stay accurate as q_y -> 1.

Memory beyond inputs and gradients: a few buffers of (chunk, vocab) float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss.costs import Cost
from otloss_llm.objectives import Objective, check_tokenwise, value_and_slopes, value_of

if TYPE_CHECKING:
    from otloss_llm.kernels.row_pass import CompiledChunk

CHUNK_BYTES = 64 * 2**20  # of float32 logits: 512 rows of a 32k vocabulary; three such buffers live at once


@dataclass(frozen=True)
class Head:
    """How logits come from hidden states, `softcap * tanh(scale * (h W^T + b) / softcap)`, and what is made of them."""

    objective: Objective
    cost: Cost | None = None
    scale: float = 1.0
    softcap: float | None = None
    chunk_size: int | None = None

    def rows_per_chunk(self, vocab: int) -> int:
        """Tokens in one chunk."""
        return self.chunk_size or max(1, CHUNK_BYTES // (4 * vocab))


@dataclass
class Gradients:
    """Which gradients a pass accumulates, and the buffers it accumulates them in (None: not wanted)."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    math_dtype: torch.dtype = field(default=torch.float32)

    @classmethod
    def like(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, bool, bool]) -> Gradients:
        """Zeroed buffers; weight and bias sums accumulate in float32 (float64 for float64 inputs)."""
        # Gradients of float16 inputs stay float32 until the upstream (loss scaler's) factor has been applied.
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return cls(
            hidden=torch.zeros_like(hidden, dtype=_gradient_dtype(hidden.dtype)) if wanted[0] else None,
            weight=torch.zeros_like(weight, dtype=wide) if wanted[1] else None,
            bias=torch.zeros_like(bias, dtype=wide) if wanted[2] and bias is not None else None,
            math_dtype=_gradient_dtype(hidden.dtype),
        )

    @property
    def wanted(self) -> bool:
        return self.hidden is not None or self.weight is not None or self.bias is not None

    def add(self, tokens: Tensor, dz: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Accumulate one chunk: `dh = dz W`, `dW += dz^T h`, `db += sum dz`."""
        narrow = dz.to(self.math_dtype)
        if self.hidden is not None:
            self.hidden[tokens] = narrow @ weight.to(self.math_dtype)
        if self.weight is not None:
            if self.weight.dtype == self.math_dtype:
                self.weight.addmm_(narrow.T, hidden.to(self.math_dtype))
            else:
                self.weight += narrow.T @ hidden.to(self.math_dtype)
        if self.bias is not None:
            self.bias += dz.sum(0)


def _gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float16 else dtype


def _chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head) -> tuple[Tensor, Tensor | None]:
    """Logits of a chunk in float32 (or float64), and the soft cap's derivative where there is one."""
    z = torch.nn.functional.linear(hidden, weight, bias)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    if head.scale != 1.0:
        z = z.mul_(head.scale)
    if head.softcap is None:
        return z, None
    z = torch.tanh_(z.div_(head.softcap))
    slope = 1.0 - z * z
    return z.mul_(head.softcap), slope


@dataclass
class Chunk:
    """Some tokens: their distribution with the label's entry apart, and their cost rows. Any device and dtype."""

    label: Int[Tensor, "chunk 1"]
    others: Float[Tensor, "chunk vocab"]  # q, 0 at the label
    q_y: Float[Tensor, "chunk 1"]
    nll: Float[Tensor, " chunk"]
    rows: Float[Tensor, "chunk vocab"] | None = None
    transport: Float[Tensor, " chunk"] | None = None

    @classmethod
    def of(cls, z: Tensor, label: Tensor, costs: Tensor | None, which: Tensor | None) -> Chunk:
        """Overwrites the logits `z`; `costs` holds a row per distinct label, `which` the row of each token."""
        label = label[:, None]
        top, position = z.max(dim=-1, keepdim=True)
        z_y = z.gather(-1, label)
        e = z.sub_(top).exp_()
        e_y = (z_y - top).exp()
        e.scatter_(-1, label, 0.0)
        others = e.sum(-1, keepdim=True)
        total = others + e_y
        # top - z_y is exactly 0 when the label is the largest, and then e_y is 1.
        nll = torch.where(position == label, torch.log1p(others), (top - z_y) + total.log()).squeeze(-1)
        chunk = cls(label, e.div_(total), e_y / total, nll)
        if costs is not None and which is not None:
            chunk.rows = costs.index_select(0, which)
            at_label = chunk.q_y * chunk.rows.gather(-1, label)
            chunk.transport = torch.linalg.vecdot(chunk.others, chunk.rows) + at_label.squeeze(-1)
        return chunk

    def logit_gradient(self, alpha: Tensor, beta: Tensor | None, factor: Tensor) -> Tensor:
        """`factor (q_i (alpha + beta (c_i - D)) - alpha [i = y])`; overwrites `others` and `rows`."""
        alpha = (alpha * factor)[:, None]
        dz_y = -alpha * self.others.sum(-1, keepdim=True)
        if beta is None or self.rows is None or self.transport is None:
            dz = self.others.mul_(alpha)
        else:
            beta, transport = (beta * factor)[:, None], self.transport[:, None]
            dz_y = dz_y + beta * self.q_y * (self.rows.gather(-1, self.label) - transport)
            dz = self.others.mul_(self.rows.sub_(transport).mul_(beta).add_(alpha))
        return dz.scatter_(-1, self.label, dz_y)


def _chunk(z: Tensor, label: Tensor, costs: Tensor | None, which: Tensor | None) -> Chunk | CompiledChunk:
    if z.device.type != "cpu" or z.dtype != torch.float32:
        return Chunk.of(z, label, costs, which)
    from otloss_llm.kernels.row_pass import CompiledChunk  # numba takes half a second to import

    return CompiledChunk.of(z, label, costs, which)


def _chunks(labels: Tensor, vocab: int, head: Head) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    """Per chunk: token positions, equal labels side by side; a cost row per distinct label; the row of each token."""
    if not len(labels):
        return
    order = labels.argsort(stable=True)
    step = head.rows_per_chunk(vocab)
    if head.cost is None:
        yield from ((tokens, None, None) for tokens in order.split(step))
        return
    distinct, which = torch.unique_consecutive(labels[order], return_inverse=True)
    pieces = which.split(step)
    # One synchronisation for all chunks: the first and last distinct label of each.
    bounds = torch.stack([torch.stack([piece[0], piece[-1]]) for piece in pieces]).tolist()
    for tokens, piece, (first, last) in zip(order.split(step), pieces, bounds, strict=True):
        yield tokens, head.cost.rows(distinct[first : last + 1]), piece - first


def _pass(
    hidden: Float[Tensor, "tokens width"],
    weight: Float[Tensor, "vocab width"],
    bias: Float[Tensor, " vocab"] | None,
    labels: Int[Tensor, " tokens"],
    head: Head,
    *,
    upstream: Tensor,
    gradients: Gradients,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Per-token (value, nll, D); adds d(sum_t upstream_t value_t) to `gradients`."""
    value = hidden.new_empty(len(labels), dtype=torch.promote_types(hidden.dtype, torch.float32))
    nll = torch.empty_like(value)
    transport = torch.empty_like(value) if head.cost is not None else None
    for tokens, costs, which in _chunks(labels, weight.shape[0], head):
        h = hidden[tokens]
        z, cap_slope = _chunk_logits(h, weight, bias, head)
        chunk = _chunk(z, labels[tokens], None if costs is None else costs.to(z.dtype), which)
        if gradients.wanted:
            value_chunk, alpha, beta = value_and_slopes(head.objective, chunk.nll, chunk.transport)
        else:
            value_chunk = value_of(head.objective, chunk.nll, chunk.transport)
        value[tokens], nll[tokens] = value_chunk.to(value.dtype), chunk.nll
        if transport is not None and chunk.transport is not None:
            transport[tokens] = chunk.transport
        if gradients.wanted:
            factor = head.scale * (upstream[tokens] if upstream.ndim else upstream)
            dz = chunk.logit_gradient(alpha, beta, factor)
            if cap_slope is not None:
                dz.mul_(cap_slope)
            gradients.add(tokens, dz, h, weight)
    check_tokenwise(head.objective, nll, transport, value)
    return value, nll, transport


class _Summed(torch.autograd.Function):
    """`factor * sum_t value_t`, its gradients made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        factor: Tensor,
        head: Head,
        wanted: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        gradients = Gradients.like(hidden, weight, bias, wanted)
        value, nll, transport = _pass(hidden, weight, bias, labels, head, upstream=factor, gradients=gradients)
        ctx.dtypes = (hidden.dtype, weight.dtype, bias.dtype if bias is not None else None)
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.mark_non_differentiable(nll, *([] if transport is None else [transport]))
        return value.sum() * factor.to(value.dtype), nll, transport

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        scaled = (
            None if saved is None else (saved * upstream).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None, None)


class _PerToken(torch.autograd.Function):
    """`value_t` for each token; the backward pass recomputes the chunks."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.head = head
        ctx.save_for_backward(hidden, weight, bias, labels)
        value, nll, transport = _pass(
            hidden, weight, bias, labels, head, upstream=hidden.new_ones(()), gradients=Gradients()
        )
        ctx.mark_non_differentiable(nll, *([] if transport is None else [transport]))
        return value, nll, transport

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        hidden, weight, bias, labels = ctx.saved_tensors
        gradients = Gradients.like(hidden, weight, bias, ctx.needs_input_grad[:3])
        values = _pass(hidden, weight, bias, labels, ctx.head, upstream=upstream, gradients=gradients)[0]
        if not torch.isfinite(values).all():
            raise ValueError(f"objective {ctx.head.objective!r} has a slope that is not finite; guard it there.")
        made = (gradients.hidden, gradients.weight, gradients.bias)
        inputs = (hidden, weight, bias)
        cast = (None if g is None else g.to(x.dtype) for g, x in zip(made, inputs, strict=True))
        return (*cast, None, None)


def _refuse_second_order() -> None:
    # torch's once_differentiable would hand out constants here, and a gradient penalty would silently do nothing.
    if torch.is_grad_enabled():
        raise RuntimeError(
            'the "chunked" kernel has no second derivative, and create_graph=True asked this backward pass for one; '
            'use impl="reference".'
        )


def token_values(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, factor: Tensor | None, head: Head
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`(factor * sum of values, nll, D)`, or with no factor `(values, nll, D)`; every label is a valid token."""
    if factor is None:
        return _PerToken.apply(hidden, weight, bias, labels, head)
    needs = [tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)]
    wanted = tuple(need and torch.is_grad_enabled() for need in needs)
    return _Summed.apply(hidden, weight, bias, labels, factor, head, wanted)
