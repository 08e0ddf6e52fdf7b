"""The token loss from hidden states, a chunk of tokens at a time: the full logits never exist.

Notation: z are the logits of one token, q = softmax(z), y its label, c_i = c(i, y) one row of the cost.

    nll = -log q_y        D = sum_i q_i c_i        value = objective(nll, D)
    alpha = d value / d nll        beta = d value / d D
    d value / d z_i = q_i (alpha + beta (c_i - D)) - alpha [i = y]

Tokens are sorted by label, so that a cost row is computed once per distinct label of a chunk. Where the upstream
gradient is known in advance (sum and mean), dh and dW are made in the forward pass, while the chunk is at hand;
for per-token values ("none") the backward pass recomputes the chunks.

Memory beyond inputs and gradients: a few buffers of (chunk, vocab) float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from otloss.costs import Cost
from otloss_llm.objectives import Objective, value_and_slopes

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


def _softmax_except_label(z: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Overwrite `z` by q with q_y set to 0; return it with q_y and nll, both accurate where q_y is near 1.

    Taking the label out of the sum keeps `1 - q_y` as a sum of small numbers instead of a difference of large ones.
    """
    top, position = z.max(dim=-1, keepdim=True)
    z_y = z.gather(-1, label)
    e = z.sub_(top).exp_()
    e_y = (z_y - top).exp()
    e.scatter_(-1, label, 0.0)
    others = e.sum(-1, keepdim=True)
    total = others + e_y
    # top - z_y is exactly 0 when the label is the largest, and then e_y is 1.
    nll = torch.where(position == label, torch.log1p(others), (top - z_y) + total.log())
    return e.div_(total), e_y / total, nll.squeeze(-1)


def _pass(
    hidden: Float[Tensor, "tokens width"],
    weight: Float[Tensor, "vocab width"],
    bias: Float[Tensor, "vocab"] | None,
    labels: Int[Tensor, "tokens"],
    head: Head,
    *,
    upstream: Tensor | None,
    gradients: Gradients,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Per-token (value, nll, D); adds d(sum_t upstream_t value_t) to `gradients`."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    value, nll = hidden.new_empty(len(labels), dtype=wide), hidden.new_empty(len(labels), dtype=wide)
    transport = torch.empty_like(nll) if head.cost is not None else None
    order = labels.argsort(stable=True)  # equal labels side by side: their cost row is computed once
    for tokens in order.split(head.rows_per_chunk(weight.shape[0])) if len(order) else ():
        h, y = hidden[tokens], labels[tokens]
        z, cap_slope = _chunk_logits(h, weight, bias, head)
        q, q_y, nll_chunk = _softmax_except_label(z, y[:, None])
        rows, distance = None, None
        if head.cost is not None:
            distinct, which = torch.unique_consecutive(y, return_inverse=True)
            rows = head.cost.rows(distinct).to(q.dtype).index_select(0, which)
            at_label = rows.gather(-1, y[:, None])
            distance = torch.linalg.vecdot(q, rows) + (q_y * at_label).squeeze(-1)
        value_chunk, alpha, beta = value_and_slopes(head.objective, nll_chunk, distance)
        value[tokens], nll[tokens] = value_chunk.to(wide), nll_chunk
        if transport is not None and distance is not None:
            transport[tokens] = distance
        if not gradients.wanted:
            continue
        # dz overwrites q (others) and rows; the label's entry is set apart: q_y - 1 is minus the sum of the others.
        alpha, others = alpha[:, None], q.sum(-1, keepdim=True)
        dz_y = -alpha * others
        if rows is not None and beta is not None and distance is not None:
            beta, distance = beta[:, None], distance[:, None]
            dz_y = dz_y + beta * q_y * (at_label - distance)
            dz = q.mul_(rows.sub_(distance).mul_(beta).add_(alpha))
        else:
            dz = q.mul_(alpha)
        dz.scatter_(-1, y[:, None], dz_y)
        if cap_slope is not None:
            dz.mul_(cap_slope)
        if upstream is not None:
            dz.mul_(upstream[tokens][:, None] if upstream.ndim else upstream)
        if head.scale != 1.0:
            dz.mul_(head.scale)
        gradients.add(tokens, dz, h, weight)
    return value, nll, transport


class _Summed(torch.autograd.Function):
    """`factor * sum_t value_t`, its gradients made in the forward pass."""

    @staticmethod
    def forward(  # type: ignore[override]  # torch types it for any arguments
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
        value, nll, transport = _pass(
            hidden, weight, bias, labels, head, upstream=factor, gradients=gradients
        )
        ctx.dtypes = (hidden.dtype, weight.dtype, bias.dtype if bias is not None else None)
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.mark_non_differentiable(nll, *([] if transport is None else [transport]))
        return value.sum() * factor.to(value.dtype), nll, transport

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # as above
        scaled = (
            None if saved is None else (saved * upstream).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None, None)


class _PerToken(torch.autograd.Function):
    """`value_t` for each token; the backward pass recomputes the chunks."""

    @staticmethod
    def forward(  # type: ignore[override]  # torch types it for any arguments
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.head = head
        ctx.save_for_backward(hidden, weight, bias, labels)
        value, nll, transport = _pass(
            hidden, weight, bias, labels, head, upstream=None, gradients=Gradients()
        )
        ctx.mark_non_differentiable(nll, *([] if transport is None else [transport]))
        return value, nll, transport

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # as above
        hidden, weight, bias, labels = ctx.saved_tensors
        gradients = Gradients.like(hidden, weight, bias, ctx.needs_input_grad[:3])
        _pass(hidden, weight, bias, labels, ctx.head, upstream=upstream, gradients=gradients)
        made = (gradients.hidden, gradients.weight, gradients.bias)
        inputs = (hidden, weight, bias)
        cast = (None if g is None else g.to(x.dtype) for g, x in zip(made, inputs, strict=True))
        return (*cast, None, None)


def summed(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, factor: Tensor, head: Head
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`(factor * sum of values, nll, D)`; every label is a valid token."""
    needs = [tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)]
    wanted = tuple(need and torch.is_grad_enabled() for need in needs)
    return _Summed.apply(hidden, weight, bias, labels, factor, head, wanted)


def per_token(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`(values, nll, D)` per token; every label is a valid token."""
    return _PerToken.apply(hidden, weight, bias, labels, head)
