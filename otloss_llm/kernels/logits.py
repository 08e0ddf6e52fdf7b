"""The logits of the chunked kernel: how they come from hidden states, where they lie, and which sweeps suit them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from otloss._numba import may_run_on
from otloss_llm.costs.vocabulary import FewColumns, LabelRows
from otloss_llm.kernels import rows
from otloss_llm.objectives import Sum

# Logits in a chunk. On a CPU 128 MiB in float32 (656 rows of a 50k vocabulary), at most 1024 rows: beyond, a product
# gains nothing and a small vocabulary's buffer only costs fresh memory. On a GPU 512 MiB in 16 bits: 2048 rows of a
# vocabulary of 128256, for each chunk reads and writes the gradient of the whole head, 4 GiB at a width of 4096.
CHUNK_ENTRIES, CHUNK_ENTRIES_ON_GPU = 2**25, 2**28
MAX_ROWS_ON_CPU = 1024
ROW_MULTIPLE, ROW_MULTIPLE_ON_GPU = 16, 128  # matrix products of other heights cost up to a fifth more


@dataclass(frozen=True)
class TokenLossConfig:
    """What a kernel computes from hidden states h and the head (W, b).

    The logits are `softcap * tanh(scale * (h W^T + b) / softcap) / temperature`, the value is the objective of the
    statistics that it reads.
    """

    objective: Sum
    cost: LabelRows | FewColumns | None = None
    scale: float = 1.0
    softcap: float | None = None
    chunk_size: int | None = None
    impl: str = "auto"
    temperature: float = 1.0

    @property
    def factor(self) -> float:
        """What the logits are multiplied by where there is no cap, and their derivative everywhere."""
        return self.scale / self.temperature

    def rows_per_chunk(self, vocab: int, device: str = "cpu") -> int:
        """Tokens in one chunk on a device of this type."""
        on_cpu = device == "cpu"
        fitting = (CHUNK_ENTRIES if on_cpu else CHUNK_ENTRIES_ON_GPU) // max(1, vocab)
        fitting = min(fitting, MAX_ROWS_ON_CPU) if on_cpu else fitting
        multiple = ROW_MULTIPLE if on_cpu else ROW_MULTIPLE_ON_GPU
        return self.chunk_size or max(1, fitting - fitting % multiple)

    def rows_for(self, hidden: Tensor, labels: Tensor, head: Tensor, vocab: int) -> int:
        """Tokens in one chunk, where `hidden` holds all of them and `vocab` rows of the head are here.

        All at once where their logits take no more memory than the sum in float32 of the head's gradient, and the cost
        rows no more than that gradient, which comes after them: one chunk needs no such sum, and its products are
        faster.
        """
        fewest = self.rows_per_chunk(vocab, hidden.device.type)
        trains_head = torch.is_grad_enabled() and head.requires_grad
        if self.chunk_size or not (trains_head and self.keeps_16_bits(hidden) and self.objective.temperature is None):
            return fewest
        if not fewest < len(hidden) <= 2 * hidden.shape[-1]:
            return fewest
        if isinstance(self.cost, LabelRows):
            limit = hidden.shape[-1] * head.dtype.itemsize // self.cost_dtype(head).itemsize
            if len(labels) > limit and len(labels.unique()) > limit:
                return fewest
        return len(hidden)

    def keeps_16_bits(self, hidden: Tensor) -> bool:
        """Whether logits stay in bfloat16.

        The Triton sweeps compute in float32 whatever they read, and bfloat16 holds any gradient. In float16 many would
        be 0 (q_i / N is 1e-9) before a loss scaler's factor saves them: both are float32 there.
        """
        is_narrow = hidden.dtype == torch.bfloat16 and runs_on_triton(hidden, self.impl)
        return is_narrow and self.factor == 1.0 and self.softcap is None

    def cost_dtype(self, weight: Tensor) -> torch.dtype:
        """What the cost rows are made in: 16 bits where 16-bit logits meet a cost that offers it, on a GPU.

        There a float32 product costs ten times a 16-bit one, which may not be spent on a tenth of all products.
        """
        assert isinstance(self.cost, LabelRows)
        wanted = weight.device.type == "cuda" and weight.dtype in (torch.bfloat16, torch.float16)
        offered = weight.dtype in self.cost.buffer_dtypes
        return weight.dtype if wanted and offered and runs_on_triton(weight, self.impl) else self.cost.dtype


class Logits:
    """The logits of one chunk after another, in one buffer: fresh memory for each costs more than the product."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, config: TokenLossConfig) -> None:
        self.weight, self.bias, self.config = weight, bias, config
        on_triton = runs_on_triton(hidden, config.impl)
        self.row_major = on_triton or hidden.device.type != "cpu"
        step = min(len(hidden), config.rows_per_chunk(weight.shape[0], hidden.device.type))
        self.product = hidden.new_empty(step * weight.shape[0])
        wide = hidden.dtype if config.keeps_16_bits(hidden) else torch.promote_types(hidden.dtype, torch.float32)
        self.wide = self.product if wide == hidden.dtype else torch.empty_like(self.product, dtype=wide)

    def _rows(self, buffer: Tensor, rows: int) -> Tensor:
        vocab = self.weight.shape[0]
        flat = buffer[: rows * vocab]
        return flat.view(rows, vocab) if self.row_major else flat.view(vocab, rows).T

    def compute(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits, valid until the next call, and the soft cap's derivative where there is one.

        In float32 or float64, but untransformed ones of bfloat16 stay as they are if the Triton sweeps read them.
        """
        z = self._rows(self.product, len(hidden))
        if self.bias is None:
            torch.mm(hidden, self.weight.T, out=z)
        else:
            torch.addmm(self.bias, hidden, self.weight.T, out=z)
        if self.wide is not self.product:
            z = self._rows(self.wide, len(hidden)).copy_(z)
        before_cap = self.config.factor if self.config.softcap is None else self.config.scale
        if before_cap != 1.0:
            z.mul_(before_cap)
        if self.config.softcap is None:
            return z, None
        torch.tanh_(z.div_(self.config.softcap))
        derivative = 1.0 - z * z
        return z.mul_(self.config.softcap / self.config.temperature), derivative


def sweeps_for(z: Tensor, impl: str) -> ModuleType:
    """The module with `softmax_rows` and `gradient_rows` for these logits.

    "auto" is Triton on a CUDA device, else "chunked": numba kernels for float32 on a CPU, plain torch for the rest.
    """
    if runs_on_triton(z, impl):
        from otloss_llm.kernels import rows_triton

        return rows_triton
    if not runs_on_numba(z, impl):
        return rows
    from otloss_llm.kernels import rows_numba  # numba takes half a second to import

    return rows_numba


def runs_on_numba(z: Tensor, impl: str) -> bool:
    """Whether the numba kernels are for these logits."""
    return not runs_on_triton(z, impl) and z.dtype == torch.float32 and may_run_on(z)


def runs_on_triton(tensor: Tensor, impl: str) -> bool:
    """Whether the Triton sweeps are for logits like this tensor; raises where they were asked for and cannot run."""
    if impl == "triton":
        from otloss_llm.kernels import rows_triton

        rows_triton.check_usable(tensor.device, tensor.dtype)
        return True
    return impl == "auto" and tensor.device.type == "cuda" and tensor.dtype != torch.float64 and _triton_is_installed()


@functools.cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None
