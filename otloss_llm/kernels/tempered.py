"""A second softmax of a chunk's logits, at a temperature T: `Z_T = T log sum_i exp(z_i / T)`, and its gradient.

The gradient in z is `softmax(z / T)`. It is stored between the sweeps, which overwrite z, in a buffer of (chunk, vocab)
in float32 that all chunks share.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from otloss_llm.models.sharded_heads import VocabShard, gathered


class TemperedLogits:
    """The softmax at temperature `T` of one chunk after another; with a `shard` each process has some columns."""

    def __init__(self, T: float, shard: VocabShard | None) -> None:
        self.T, self.shard = T, shard
        self._buffer: Tensor | None = None

    def logsumexp(self, z: Float[Tensor, "rows columns"]) -> Float[Tensor, " rows"]:
        """Z_T of each row, over the columns of all processes (one collective); `z` is only read."""
        wide = torch.promote_types(z.dtype, torch.float32)
        own_top = z.amax(-1).to(wide) if z.shape[1] else z.new_full((len(z),), -torch.inf, dtype=wide)
        shift = torch.where(own_top == -torch.inf, 0.0, own_top)  # every column here is masked
        self._e = self._like(z, wide)
        torch.sub(z, shift[:, None], out=self._e).mul_(1.0 / self.T).exp_()
        top, total = own_top, self._e.sum(-1)
        if self.shard is not None:
            tops, totals = gathered(torch.stack([top, total]), self.shard.group).unbind(1)
            top = tops.amax(0)
            total = (totals * ((tops - top) / self.T).exp()).sum(0)
        self._factor = ((own_top - top) / self.T).exp() / total
        return top + self.T * total.log()

    def add_gradient(self, z: Float[Tensor, "rows columns"], upstream: Float[Tensor, " rows"]) -> None:
        """Add `upstream * softmax(logits / T)` of the logits last seen to `z`."""
        z.addcmul_(self._e, (upstream * self._factor)[:, None])

    def _like(self, z: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory laid out like `z`, the same for all chunks: the first is the largest."""
        if self._buffer is None:
            self._buffer = z.new_empty(z.numel(), dtype=dtype)
        return self._buffer[: z.numel()].as_strided(z.shape, z.stride())
