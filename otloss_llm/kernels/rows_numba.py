"""The sweeps of `rows` on a CPU: float32, vectorised, on all cores.

A row of 32k logits stays in a core's cache between reading and writing; in torch every elementwise operation goes
through memory once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._numba.compile import compiled, spliced
from otloss._numba.compile import exp32 as _exp
from otloss._numba.tasks import next_task
from otloss._numba.threads import run_on_threads
from otloss_llm.kernels.rows import CostRows, GradientCoefficients, RowSums, logits_from

F32 = np.float32
BLOCK_ENTRIES = 2**16  # of logits read twice in a row: 256 KiB stay in a core's cache
LEAST = F32(-1e4)  # in the place of z - top where that is -inf: exp is 0 from -87 on, and 0 times -inf would be NaN


@spliced
def spread(costs: Any, which: Any, c: Any) -> None:
    """The cost of each token from the costs of the labels: apart, as a gather keeps a loop from being vectorised."""
    for t in range(c.shape[0]):
        c[t] = costs[which[t]]


@compiled(allocates=True)
def _softmax(
    counter: Any, z: Any, cost: Any, which: Any, top: Any, others: Any, others_cost: Any, others_logit: Any, block: int
) -> None:
    """Each part of the vocabulary (axis 0 of the results) apart: its largest logit, and the sums relative to that."""
    vocab, tokens = z.shape
    parts = top.shape[0]
    with_cost, with_logit = cost.shape[0] > 0, others_logit.shape[0] > 0
    while True:
        part = next_task(counter)
        if part >= parts:
            return
        first, last = vocab * part // parts, vocab * (part + 1) // parts
        m, s, d = top[part], others[part], others_cost[part]
        x = others_logit[part] if with_logit else np.empty(0, F32)
        new, block_s, block_d = np.empty(tokens, F32), np.empty(tokens, F32), np.empty(tokens, F32)
        c, block_x = np.empty(tokens, F32), np.empty(tokens, F32)
        for t in range(tokens):
            m[t], s[t], d[t] = F32(-np.inf), F32(0.0), F32(0.0)
        x[:] = F32(0.0)
        for start in range(first, last, block):
            stop = min(start + block, last)
            for t in range(tokens):
                new[t], block_s[t], block_d[t] = m[t], F32(0.0), F32(0.0)
            for i in range(start, stop):
                row = z[i]
                for t in range(tokens):
                    new[t] = row[t] if row[t] > new[t] else new[t]
            if with_logit:
                for t in range(tokens):
                    shift = F32(0.0) if new[t] == F32(-np.inf) else new[t]
                    step = m[t] - shift if m[t] > F32(-np.inf) else F32(0.0)
                    x[t] = (x[t] + step * s[t]) * _exp(step)
                    block_x[t] = F32(0.0)
            for t in range(tokens):
                shift = F32(0.0) if new[t] == F32(-np.inf) else new[t]
                shrink = _exp(m[t] - shift)
                s[t] *= shrink
                d[t] *= shrink
                m[t] = new[t]
                new[t] = shift
            for i in range(start, stop):
                row = z[i]
                if with_cost and with_logit:
                    spread(cost[i], which, c)
                    for t in range(tokens):
                        below = row[t] - new[t]
                        e = _exp(below)
                        block_s[t] += e
                        block_d[t] += e * c[t]
                        block_x[t] += e * (below if below > LEAST else LEAST)
                elif with_logit:
                    for t in range(tokens):
                        below = row[t] - new[t]
                        e = _exp(below)
                        block_s[t] += e
                        block_x[t] += e * (below if below > LEAST else LEAST)
                elif with_cost:
                    spread(cost[i], which, c)
                    for t in range(tokens):
                        e = _exp(row[t] - new[t])
                        block_s[t] += e
                        block_d[t] += e * c[t]
                else:
                    for t in range(tokens):
                        block_s[t] += _exp(row[t] - new[t])
            for t in range(tokens):
                s[t] += block_s[t]
                d[t] += block_d[t]
            if with_logit:
                for t in range(tokens):
                    x[t] += block_x[t]


@compiled(allocates=True)
def _gradient(
    counter: Any, z: Any, top: Any, cost: Any, which: Any, a: Any, b: Any, transport: Any, h: Any, parts: int
) -> None:
    vocab, tokens = z.shape
    with_cost, with_logit = cost.shape[0] > 0, h.shape[0] > 0
    while True:
        part = next_task(counter)
        if part >= parts:
            return
        c = np.empty(tokens, F32)
        for i in range(vocab * part // parts, vocab * (part + 1) // parts):
            row = z[i]
            if with_cost and with_logit:
                spread(cost[i], which, c)
                for t in range(tokens):
                    below = row[t] - top[t]
                    of_entropy = h[t] * (below if below > LEAST else LEAST)
                    row[t] = _exp(below) * (a[t] + b[t] * (c[t] - transport[t]) - of_entropy)
            elif with_logit:
                for t in range(tokens):
                    below = row[t] - top[t]
                    row[t] = _exp(below) * (a[t] - h[t] * (below if below > LEAST else LEAST))
            elif with_cost:
                spread(cost[i], which, c)
                for t in range(tokens):
                    row[t] = _exp(row[t] - top[t]) * (a[t] + b[t] * (c[t] - transport[t]))
            else:
                for t in range(tokens):
                    row[t] = _exp(row[t] - top[t]) * a[t]


def softmax_rows(
    z: Float[Tensor, "rows columns"], label: Int[Tensor, " rows"], cost: CostRows | None, entropy: bool = False
) -> RowSums:
    """The sums of each row; leaves the logits in `z`, -inf at the label."""
    here = label >= 0
    column = label.clamp(min=0)
    positions = torch.arange(len(label), device="cpu")
    z_y = torch.where(here, z[positions, column], -torch.inf)
    z[positions[here], label[here]] = -torch.inf
    parts, block = parts_of(z), max(1, BLOCK_ENTRIES // max(1, len(label)))
    top, others, others_cost = (z.new_empty(parts, len(label)) for _ in range(3))
    others_logit = z.new_empty(parts if entropy else 0, len(label))
    sums = (vector.numpy() for vector in (top, others, others_cost, others_logit))
    run_on_threads(_softmax, parts, (columns_of(z), *_arrays(cost, z), *sums, block))
    overall = torch.maximum(top.amax(0), z_y)
    logit = over_parts(others_logit, others, top, overall) if entropy else None
    shrink = (top - overall).nan_to_num_(nan=-torch.inf).exp_()
    others = (others * shrink).sum(0)
    # A logit that is NaN or +inf shows in its sum only.
    overall = torch.where(others.isfinite() & (overall < torch.inf), overall, torch.nan)
    if cost is None:
        return RowSums(overall, others, None, z_y, None, logit)
    c_y = torch.where(here, cost.rows[cost.which, column], 0.0)
    return RowSums(overall, others, (others_cost * shrink).sum(0), z_y, c_y, logit)


def gradient_rows(
    z: Float[Tensor, "rows columns"],
    top: Float[Tensor, " rows"],
    label: Int[Tensor, " rows"],
    cost: CostRows | None,
    coefficients: GradientCoefficients,
) -> None:
    """Overwrite `z`, as `softmax_rows` left it, with the gradient in the logits."""
    nothing = torch.zeros_like(top)
    b = nothing if coefficients.b is None else coefficients.b
    transport = nothing if coefficients.transport is None else coefficients.transport
    vectors = [v.to(torch.float32).contiguous().numpy() for v in (coefficients.a, b, transport)]
    vectors.append(entropy_vector(coefficients.h))
    parts = parts_of(z)
    arguments = (columns_of(z), top.numpy(), *_arrays(None if coefficients.b is None else cost, z), *vectors, parts)
    run_on_threads(_gradient, parts, arguments)
    here = label >= 0
    z[here.nonzero().squeeze(-1), label[here]] = coefficients.at_label[here]


def over_parts(others_logit: Tensor, others: Tensor, top: Tensor, overall: Tensor) -> Tensor:
    """`others_logit` of all parts, relative to the overall top; a part whose columns are all masked adds nothing."""
    made = logits_from(overall, others_logit, others, top)
    assert made is not None
    return torch.where(top == -torch.inf, 0.0, made).sum(0)


def entropy_vector(h: Tensor | None) -> np.ndarray:
    """The factor of the entropy's derivative as the sweeps want it: empty where there is none."""
    return np.empty(0, dtype=np.float32) if h is None else h.to(torch.float32).contiguous().numpy()


def parts_of(z: Tensor) -> int:
    return max(1, min(4 * torch.get_num_threads(), z.shape[1]))


def columns_of(z: Tensor) -> np.ndarray:
    assert z.T.is_contiguous()
    return z.T.numpy()


def _arrays(cost: CostRows | None, z: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Cost rows as the sweeps want them, a column each: none at all where no cost is asked for."""
    if cost is None:
        return np.empty((0, 0), dtype=np.float32), np.empty(0, dtype=np.uint32)
    return cost.rows.to(z.dtype).T.contiguous().numpy(), cost.which.numpy().astype(np.uint32)
