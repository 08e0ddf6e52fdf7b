"""The two sweeps where each process holds some columns of the vocabulary: the interface of `rows`, sums over all.

Notation: process r sweeps over its own columns and finds top_r, others_r, ... (`RowSums`; a label elsewhere is -1).

    top = max_r top_r        s_r = exp(top_r - top)
    others = sum_r s_r others_r        others_cost = sum_r s_r others_cost_r

One collective a chunk carries at most six numbers per token and process, whatever the size of the vocabulary; the mean
logit takes another, of one number. Every process computes the same merged numbers from the same gathered ones, bit for
bit: the derivatives of the objective agree without further communication.
A NaN in one process is a NaN in all of them.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from otloss_llm.kernels.rows import CostRows, GradientCoefficients, RowSums, logits_from
from otloss_llm.models.sharded_heads import VocabShard, gathered


class ShardedSweeps:
    """Both sweeps over one chunk: the module of local sweeps inside, labels and sums of the whole vocabulary outside.

    Args:
        local: `rows` or another module with its interface.
        shard: the columns of this process.
    """

    def __init__(self, local: ModuleType, shard: VocabShard) -> None:
        self.local, self.shard = local, shard

    def softmax_rows(
        self,
        z: Float[Tensor, "rows columns"],
        label: Int[Tensor, " rows"],
        cost: CostRows | None,
        entropy: bool = False,
    ) -> RowSums:
        """The sums of each row over all processes; `cost` holds the columns of this one."""
        own = self.shard.local(label)
        sums = self.local.softmax_rows(z, own, cost, entropy) if z.shape[1] else _of_no_columns(z, cost, entropy)
        self._own_top = sums.top
        return merged(sums, self.shard.group)

    def gradient_rows(
        self,
        z: Float[Tensor, "rows columns"],
        top: Float[Tensor, " rows"],
        label: Int[Tensor, " rows"],
        cost: CostRows | None,
        coefficients: GradientCoefficients,
    ) -> None:
        """Write the gradient as `rows.gradient_rows` does, with the merged `top` and coefficients."""
        if not z.shape[1]:
            return
        # The local sweeps may have left exp(z - own top) in z: what is missing goes into the coefficients.
        own = coefficients.relative_to(self._own_top, top)
        # Where every column here is masked, -inf less -inf would be NaN in the sweeps that read z again.
        shift = torch.where(self._own_top == -torch.inf, 0.0, self._own_top)
        self.local.gradient_rows(z, shift, self.shard.local(label), cost, own)


def merged(sums: RowSums, group: dist.ProcessGroup) -> RowSums:
    """The sums over the columns of all processes, from those over each one's own."""
    with_cost, with_logit = sums.others_cost is not None, sums.others_logit is not None
    mine = torch.stack([part for part in sums if part is not None])
    parts = list(gathered(mine, group).unbind(1))  # (processes, rows) each, in the order of RowSums
    logits = parts.pop() if with_logit else None
    tops, others, *costs = parts
    z_y = costs.pop(1 if with_cost else 0)
    top = tops.amax(0)
    share = (tops - top).exp()  # NaN where a logit is, and where no column of any process is left
    total = (others * share).sum(0)
    logit = logits_from(top, logits, others, tops)
    logit = None if logit is None else logit.sum(0)
    if not costs:
        return RowSums(top, total, None, z_y.amax(0), None, logit)
    return RowSums(top, total, (costs[0] * share).sum(0), z_y.amax(0), costs[1].sum(0), logit)


def _of_no_columns(z: Tensor, cost: CostRows | None, entropy: bool) -> RowSums:
    nothing = z.new_zeros(len(z), dtype=torch.promote_types(z.dtype, torch.float32))
    masked = torch.full_like(nothing, -torch.inf)
    costs = None if cost is None else nothing
    return RowSums(masked, nothing, costs, masked, costs, nothing if entropy else None)


def sum_over(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Add up in place what each process has computed from its own columns."""
    if tensor.numel():
        dist.all_reduce(tensor, group=group)
