"""The sweeps of `few_columns` on a CPU: as `rows_numba`, float32, the vocabulary as the slow axis.

A column outside the few takes the time of a sweep without costs; one of the few also reads its cost for each token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._numba.compile import compiled
from otloss._numba.compile import exp32 as _exp
from otloss._numba.tasks import next_task
from otloss._numba.threads import run_on_threads
from otloss_llm.costs.vocabulary import FewColumns
from otloss_llm.kernels.few_columns import ColumnSums, largest
from otloss_llm.kernels.rows import GradientCoefficients, RowSums
from otloss_llm.kernels.rows_numba import (
    BLOCK_ENTRIES,
    LEAST,
    columns_of,
    entropy_vector,
    over_parts,
    parts_of,
    spread,
)

F32 = np.float32


@compiled(allocates=True)
def _softmax(
    counter: Any, z: Any, place: Any, cost: Any, which: Any, top: Any, text: Any, few: Any, few_cost: Any, logit: Any,
    block: int,
) -> None:  # fmt: skip
    """Each part of the vocabulary (axis 0 of the results) apart; `place` is a column's row in `cost`, or -1."""
    vocab, tokens = z.shape
    parts = top.shape[0]
    with_logit = logit.shape[0] > 0
    while True:
        part = next_task(counter)
        if part >= parts:
            return
        first, last = vocab * part // parts, vocab * (part + 1) // parts
        m, s, f, d = top[part], text[part], few[part], few_cost[part]
        new, block_s = np.empty(tokens, F32), np.empty(tokens, F32)
        block_f, block_d, c = np.empty(tokens, F32), np.empty(tokens, F32), np.empty(tokens, F32)
        x = logit[part] if with_logit else np.empty(0, F32)
        block_x = np.empty(tokens, F32)
        x[:] = F32(0.0)
        for t in range(tokens):
            m[t], s[t], f[t], d[t] = F32(-np.inf), F32(0.0), F32(0.0), F32(0.0)
        for start in range(first, last, block):
            stop = min(start + block, last)
            for t in range(tokens):
                new[t], block_s[t], block_f[t], block_d[t] = m[t], F32(0.0), F32(0.0), F32(0.0)
            for i in range(start, stop):
                row = z[i]
                for t in range(tokens):
                    new[t] = row[t] if row[t] > new[t] else new[t]
            if with_logit:
                for t in range(tokens):
                    shift = F32(0.0) if new[t] == F32(-np.inf) else new[t]
                    step = m[t] - shift if m[t] > F32(-np.inf) else F32(0.0)
                    x[t] = (x[t] + step * (s[t] + f[t])) * _exp(step)
                    block_x[t] = F32(0.0)
            for t in range(tokens):
                shift = F32(0.0) if new[t] == F32(-np.inf) else new[t]
                shrink = _exp(m[t] - shift)
                s[t] *= shrink
                f[t] *= shrink
                d[t] *= shrink
                m[t] = new[t]
                new[t] = shift
            for i in range(start, stop):
                row = z[i]
                if with_logit:  # over all columns, few or not
                    for t in range(tokens):
                        below = row[t] - new[t]
                        block_x[t] += _exp(below) * (below if below > LEAST else LEAST)
                if place[i] >= 0:
                    spread(cost[place[i]], which, c)
                    for t in range(tokens):
                        e = _exp(row[t] - new[t])
                        block_f[t] += e
                        block_d[t] += e * c[t]
                else:
                    for t in range(tokens):
                        block_s[t] += _exp(row[t] - new[t])
            for t in range(tokens):
                s[t] += block_s[t]
                f[t] += block_f[t]
                d[t] += block_d[t]
            if with_logit:
                for t in range(tokens):
                    x[t] += block_x[t]


@compiled(allocates=True)
def _gradient(
    counter: Any, z: Any, top: Any, place: Any, cost: Any, which: Any, a: Any, few_a: Any, few_b: Any, h: Any,
    parts: int,
) -> None:  # fmt: skip
    vocab, tokens = z.shape
    with_logit = h.shape[0] > 0
    while True:
        part = next_task(counter)
        if part >= parts:
            return
        c = np.empty(tokens, F32)
        for i in range(vocab * part // parts, vocab * (part + 1) // parts):
            row = z[i]
            if with_logit:
                for t in range(tokens):
                    c[t] = F32(0.0)
                if place[i] >= 0:
                    spread(cost[place[i]], which, c)
                is_few = place[i] >= 0
                for t in range(tokens):
                    below = row[t] - top[t]
                    of_cost = few_a[t] + few_b[t] * c[t] if is_few else a[t]
                    row[t] = _exp(below) * (of_cost - h[t] * (below if below > LEAST else LEAST))
            elif place[i] >= 0:
                spread(cost[place[i]], which, c)
                for t in range(tokens):
                    row[t] = _exp(row[t] - top[t]) * (few_a[t] + few_b[t] * c[t])
            else:
                for t in range(tokens):
                    row[t] = _exp(row[t] - top[t]) * a[t]


class NumbaFewColumnSweeps:
    """As `FewColumnSweeps`, for float32 logits whose columns are rows of memory."""

    def softmax_rows(
        self, z: Float[Tensor, "rows columns"], label: Int[Tensor, " rows"], cost: FewColumns, entropy: bool = False
    ) -> RowSums:
        """The sums of each row; leaves the logits in `z`, -inf at the label."""
        positions = torch.arange(len(label), device="cpu")
        z_y = z[positions, label]
        z[positions, label] = -torch.inf
        kinds, which = cost.which.unique(return_inverse=True)
        rows = cost.costs[kinds].to(z.dtype)
        place = torch.full((z.shape[1],), -1, dtype=torch.int32, device="cpu")
        place[cost.columns] = torch.arange(len(cost.columns), dtype=torch.int32, device="cpu")
        self._arguments = place.numpy(), rows.T.contiguous().numpy(), which.numpy().astype(np.uint32)
        parts, block = parts_of(z), max(1, BLOCK_ENTRIES // max(1, len(label)))
        tops, text, few, few_cost = (z.new_empty(parts, len(label)) for _ in range(4))
        logits = z.new_empty(parts if entropy else 0, len(label))
        sums = (vector.numpy() for vector in (tops, text, few, few_cost, logits))
        run_on_threads(_softmax, parts, (columns_of(z), *self._arguments, *sums, block))
        top, shift = largest(tops.amax(0), z_y)
        logit = over_parts(logits, text + few, tops, shift) if entropy else None
        shrink = (tops - shift).nan_to_num_(nan=-torch.inf).exp_()
        text, few, few_cost = ((part * shrink).sum(0) for part in (text, few, few_cost))
        # A logit that is NaN or +inf shows in its sum only.
        top = torch.where((text + few).isfinite(), top, torch.nan)
        own = place[label].long()
        self._sums = ColumnSums(top, text, few, few_cost, cost.costs_elsewhere[cost.which].to(z.dtype), logit)
        c_y = self._sums.cost_elsewhere
        if rows.shape[1]:
            c_y = torch.where(own >= 0, rows[which, own.clamp(min=0)], c_y)
        return self._sums.row_sums(z_y, c_y)

    def gradient_rows(
        self, z: Tensor, top: Tensor, label: Tensor, cost: FewColumns, coefficients: GradientCoefficients
    ) -> None:
        """Overwrite `z`, as `softmax_rows` left it, with the gradient in the logits."""
        vectors = [v.to(torch.float32).contiguous().numpy() for v in self._sums.multipliers(coefficients)]
        vectors.append(entropy_vector(coefficients.h))
        parts = parts_of(z)
        run_on_threads(_gradient, parts, (columns_of(z), top.numpy(), *self._arguments, *vectors, parts))
        z[torch.arange(len(label), device="cpu"), label] = coefficients.at_label
