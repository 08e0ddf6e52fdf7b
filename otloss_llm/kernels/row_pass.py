"""The chunked kernel's sweeps over rows of logits on a CPU: float32, vectorised, on all cores.

Notation as in `chunked`: z logits of a token, y its label, c its cost row, q = softmax(z), D = sum_i q_i c_i.

    softmax     z -> e_i = exp(z_i - max z), 0 at the label, in place;  r = sum_{i != y} e_i,  e_y,  nll,  D
    gradient    e -> d value / d z_i = q_i (alpha + beta (c_i - D)) - alpha [i = y], in place

`r` is kept apart because `1 - q_y = r / (r + e_y)` then needs no difference. A row of 32k logits stays in a core's
cache between reading and writing; in torch every elementwise operation goes through memory once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from jaxtyping import Float, Int
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic
from torch import Tensor

F32 = np.float32
LOG2_E = F32(1.4426950408889634)
# ln 2 in two parts; the first has so few bits that n * LN2_HIGH is exact.
LN2_HIGH, LN2_LOW = F32(0.693359375), F32(-2.12194440e-4)
SMALLEST = F32(-87.0)  # below, exp leaves the normal numbers of float32
# exp(r) = 1 + r + r^2 P(r) on [-ln 2 / 2, ln 2 / 2], P the minimax polynomial of Cephes' expf.
P0, P1, P2 = F32(1.9875691500e-4), F32(1.3981999507e-3), F32(8.3334519073e-3)
P3, P4, P5 = F32(4.1665795894e-2), F32(1.6666665459e-1), F32(5.0000001201e-1)


@intrinsic
def _float_of_bits(typing_context: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), codegen


@njit(inline="always", fastmath={"contract"})
def _exp(x: Any) -> Any:
    """exp of x <= 0 in float32 to 1e-7, in operations that the compiler vectorises; 0 below exp(-87)."""
    bounded = max(x, SMALLEST)
    n = np.floor(bounded * LOG2_E + F32(0.5))
    r = bounded - n * LN2_HIGH
    r = r - n * LN2_LOW
    p = ((((P0 * r + P1) * r + P2) * r + P3) * r + P4) * r + P5
    y = (p * r * r + r + F32(1.0)) * _float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))
    return y if x > SMALLEST else F32(0.0)


# Sums may be reordered (that is what vectorising them means); NaN and infinity keep their meaning.
_SWEEP: dict[str, Any] = {
    "parallel": True,
    "fastmath": {"contract", "reassoc", "nsz"},
    "error_model": "numpy",
    "cache": True,
}


@njit(**_SWEEP)
def _softmax_rows(
    z: Any, cost: Any, which: Any, label: Any, others: Any, at_label: Any, nll: Any, distance: Any
) -> None:
    with_cost = cost.shape[0] > 0
    for t in prange(z.shape[0]):
        row, y = z[t], label[t]
        top, broken = F32(-np.inf), False
        for i in range(row.shape[0]):
            broken |= row[i] != row[i]
            top = max(top, row[i])
        z_y = row[y]
        row[y] = F32(-np.inf)
        r, d = F32(0.0), F32(0.0)
        if with_cost:
            c = cost[which[t]]
            for i in range(row.shape[0]):
                e = _exp(row[i] - top)
                row[i] = e
                r += e
                d += e * c[i]
        else:
            for i in range(row.shape[0]):
                e = _exp(row[i] - top)
                row[i] = e
                r += e
        row[y] = F32(0.0)
        e_y = _exp(z_y - top)
        if with_cost:
            d += e_y * cost[which[t], y]
        others[t], at_label[t] = r, e_y
        distance[t] = d / (r + e_y)
        nll[t] = np.log1p(r) if z_y == top else (top - z_y) + np.log(r + e_y)
        if broken or not np.isfinite(top):
            nll[t] = np.nan


@njit(**_SWEEP)
def _gradient_rows(
    e: Any,
    cost: Any,
    which: Any,
    label: Any,
    others: Any,
    at_label: Any,
    alpha: Any,
    beta: Any,
    distance: Any,
    factor: Any,
) -> None:
    with_cost = cost.shape[0] > 0
    for t in prange(e.shape[0]):
        row, y = e[t], label[t]
        scale = factor[t] / (others[t] + at_label[t])
        a, b = scale * alpha[t], scale * beta[t]
        dz_y = -a * others[t]
        if with_cost:
            c = cost[which[t]]
            dz_y += b * at_label[t] * (c[y] - distance[t])
            a -= b * distance[t]
            for i in range(row.shape[0]):
                row[i] *= a + b * c[i]
        else:
            for i in range(row.shape[0]):
                row[i] *= a
        row[y] = dz_y


@dataclass
class CompiledChunk:
    """Some tokens between the two sweeps; the fast twin of `chunked.Chunk`."""

    e: Float[Tensor, "chunk vocab"]
    label: Int[Tensor, " chunk"]
    others: Float[Tensor, " chunk"]
    at_label: Float[Tensor, " chunk"]
    nll: Float[Tensor, " chunk"]
    transport: Float[Tensor, " chunk"] | None
    costs: Float[Tensor, "distinct vocab"] | None
    which: Int[Tensor, " chunk"] | None

    @classmethod
    def of(cls, z: Tensor, label: Tensor, costs: Tensor | None, which: Tensor | None) -> CompiledChunk:
        """Overwrites the logits `z`; `costs` holds a row per distinct label, `which` the row of each token."""
        others, at_label, nll, distance = (z.new_empty(z.shape[0]) for _ in range(4))
        with _as_many_threads_as_torch():
            _softmax_rows(
                z.numpy(), _rows(costs, z), _index(which, label), label.numpy(), others.numpy(), at_label.numpy(),
                nll.numpy(), distance.numpy(),
            )  # fmt: skip
        return cls(z, label, others, at_label, nll, None if costs is None else distance, costs, which)

    def logit_gradient(self, alpha: Tensor, beta: Tensor | None, factor: Tensor) -> Tensor:
        """`factor (q_i (alpha + beta (c_i - D)) - alpha [i = y])`; overwrites `e`."""
        nothing = torch.zeros_like(self.others)
        costs = None if beta is None else self.costs
        alpha, beta, factor, transport = (
            values.expand_as(nothing).to(torch.float32).contiguous()
            for values in (alpha, nothing if beta is None else beta, factor,
                           nothing if self.transport is None else self.transport)
        )  # fmt: skip
        with _as_many_threads_as_torch():
            _gradient_rows(
                self.e.numpy(), _rows(costs, self.e), _index(self.which, self.label), self.label.numpy(),
                self.others.numpy(), self.at_label.numpy(), alpha.numpy(), beta.numpy(), transport.numpy(),
                factor.numpy(),
            )  # fmt: skip
        return self.e


def _rows(costs: Tensor | None, like: Tensor) -> np.ndarray:
    """Cost rows as the sweeps want them: none at all where no cost is asked for."""
    return (like.new_empty(0, like.shape[1]) if costs is None else costs.contiguous()).numpy()


def _index(which: Tensor | None, label: Tensor) -> np.ndarray:
    return (label if which is None else which).contiguous().numpy()


@contextmanager
def _as_many_threads_as_torch() -> Iterator[None]:
    before = numba.get_num_threads()
    numba.set_num_threads(max(1, min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)))
    try:
        yield
    finally:
        numba.set_num_threads(before)
