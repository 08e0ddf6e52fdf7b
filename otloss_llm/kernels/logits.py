"""The logits of the chunked kernel: how they come from hidden states, where they lie, and which sweeps suit them."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from otloss.costs import Cost
from otloss_llm.kernels import rows
from otloss_llm.objectives import Objective

CHUNK_BYTES = 128 * 2**20  # of logits: 1048 rows of a 32k vocabulary in float32
ROW_MULTIPLE = 16  # matrix products of other heights cost up to a fifth more


@dataclass(frozen=True)
class Head:
    """How logits come from hidden states, `softcap * tanh(scale * (h W^T + b) / softcap)`, and what is made of them."""

    objective: Objective
    cost: Cost | None = None
    scale: float = 1.0
    softcap: float | None = None
    chunk_size: int | None = None
    impl: str = "auto"

    def rows_per_chunk(self, vocab: int) -> int:
        """Tokens in one chunk."""
        fitting = CHUNK_BYTES // (4 * vocab)
        return self.chunk_size or max(1, fitting - fitting % ROW_MULTIPLE)


class Logits:
    """The logits of one chunk after another, in one buffer: fresh memory for each costs more than the product."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head) -> None:
        self.weight, self.bias, self.head = weight, bias, head
        step = min(len(hidden), head.rows_per_chunk(weight.shape[0]))
        self.product = hidden.new_empty(step * weight.shape[0])
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self.wide = self.product if wide == hidden.dtype else torch.empty_like(self.product, dtype=wide)

    def _rows(self, buffer: Tensor, rows: int) -> Tensor:
        vocab = self.weight.shape[0]
        flat = buffer[: rows * vocab]
        return flat.view(vocab, rows).T if buffer.device.type == "cpu" else flat.view(rows, vocab)

    def of(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits in float32 (or float64), valid until the next call; and the soft cap's derivative where there is one."""
        z = self._rows(self.product, len(hidden))
        if self.bias is None:
            torch.mm(hidden, self.weight.T, out=z)
        else:
            torch.addmm(self.bias, hidden, self.weight.T, out=z)
        if self.wide is not self.product:
            z = self._rows(self.wide, len(hidden)).copy_(z)
        if self.head.scale != 1.0:
            z.mul_(self.head.scale)
        if self.head.softcap is None:
            return z, None
        torch.tanh_(z.div_(self.head.softcap))
        slope = 1.0 - z * z
        return z.mul_(self.head.softcap), slope


def sweeps_for(z: Tensor, impl: str) -> ModuleType:
    """The module with `softmax_rows` and `gradient_rows` for these logits."""
    if z.device.type != "cpu" or z.dtype != torch.float32:
        return rows
    from otloss_llm.kernels import rows_compiled  # numba takes half a second to import

    return rows_compiled
