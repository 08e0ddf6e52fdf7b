"""`EmbeddingCost` of an embedding whose rows are spread over processes, as the head's are.

Notation: process r holds the rows start_r .. stop_r of the head, and needs C[y, start_r:stop_r] of each label y. It
computes them from its own unit rows and the rows e_y of the labels, which one collective exchanges.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss._checks import check_floating
from otloss_llm.costs.embedding import (
    EmbeddingCost,
    added_by_rounding,
    check_directions,
    check_treatment,
    cosine_costs,
    products_are_of_bfloat16,
    remove_directions,
    warn_of_near_duplicates,
)
from otloss_llm.costs.near_duplicates import search, sketch
from otloss_llm.costs.vocabulary import LabelRows, VocabularyCost, check_cost_dtype
from otloss_llm.models.sharded_heads import VocabShard, is_row_shard


class ShardedEmbeddingCost(VocabularyCost):
    """`EmbeddingCost` of an embedding whose rows are spread over processes like the head's.

    Every process has to make the calls. It goes with `linear_token_loss(..., process_group=...)` only: no process has
    whole rows of this cost.

    Args:
        embedding: `(rows, d)` of this process, copied without its graph; or a DTensor sharded by rows.
        process_group: the processes, whose rows follow each other in the order of ranks; a DTensor knows it.
        near_duplicates: as in `EmbeddingCost`, among the rows of all processes. The first of them warns.
        directions: as in `EmbeddingCost`, from the rows of all processes.

    Attributes:
        near_duplicates: (V,), True for the rows, of all processes, that were set to zero.

    Raises:
        ValueError: the DTensor has another placement, there is no group, or processes hold rows of different kind.
    """

    near_duplicates: Bool[Tensor, " vocab"]

    def __init__(
        self,
        embedding: Float[Tensor, "rows width"],
        process_group: dist.ProcessGroup | None = None,
        *,
        near_duplicates: str = "zero",
        directions: int | None = 0,
    ) -> None:
        embedding = check_floating("embedding", embedding).detach()
        if is_row_shard(embedding) and process_group is None:
            process_group, embedding = embedding.device_mesh.get_group(), embedding.to_local()  # type: ignore[attr-defined]
        if process_group is None or hasattr(embedding, "placements"):
            raise ValueError(
                "a sharded cost needs the rows of this process with process_group=, or a DTensor with placements "
                "[Shard(0)] on a mesh of one axis alone."
            )
        local: list[EmbeddingCost] = []

        def check() -> dict[str, object]:
            check_treatment(near_duplicates)
            local.extend([EmbeddingCost(embedding, near_duplicates="keep")] if len(embedding) else [])
            check_directions(directions, max(2, *embedding.shape[1:]))
            settings = {"near_duplicates": near_duplicates, "directions": directions}
            return {"width": embedding.shape[1:], "dtype": embedding.dtype} | settings

        self.shard = VocabShard.agreed(process_group, embedding, check)
        if directions != 0:
            embedding = self._without_directions(embedding, check_directions(directions, embedding.shape[1]))
            local = [EmbeddingCost(embedding, near_duplicates="keep")] if len(embedding) else []
        wide = torch.promote_types(embedding.dtype, torch.float32)
        self.unit = local[0].unit if local else embedding.to(wide)
        self.near_duplicates = torch.zeros(self.shard.vocab, dtype=torch.bool, device=self.unit.device)
        if near_duplicates == "zero":
            self._zero_near_duplicates()
        self._rounding = 16 * torch.finfo(wide).eps
        added = torch.tensor([added_by_rounding(self.unit, ~self.unit.any(1), torch.bfloat16)], device=self.unit.device)
        dist.all_reduce(added, op=dist.ReduceOp.MAX, group=process_group)
        self._rounding_of_bfloat16 = 2 * float(added) + self._rounding

    def _without_directions(self, rows: Tensor, count: int) -> Tensor:
        group = self.shard.group

        def over_processes(part: Tensor, operation: Any) -> Tensor:
            part = part.clone()
            dist.all_reduce(part, op=operation, group=group)
            return part

        return remove_directions(
            rows,
            count,
            total=lambda part: over_processes(part, dist.ReduceOp.SUM),
            largest=lambda part: over_processes(part, dist.ReduceOp.MAX),
            agreed=self._agree,
        )

    def _zero_near_duplicates(self) -> None:
        here = slice(self.shard.start, self.shard.stop)
        part = sketch(self.unit)
        whole = part.new_zeros(self.shard.vocab, part.shape[1])
        whole[here] = part
        dist.all_reduce(whole, group=self.shard.group)  # The sum is exact: all but one of the terms are 0.
        self.near_duplicates = search(whole, self.embedding_of, width=self.unit.shape[1], agree=self._agree)
        self.unit[self.near_duplicates[here]] = 0.0
        if self.near_duplicates.any() and self.shard.rank == 0:
            warn_of_near_duplicates(self.near_duplicates, stacklevel=3)

    def _agree(self, pairs: Tensor) -> Tensor:
        """What the first process has found, so that all exchange the same rows, whatever rounding made of theirs."""
        dist.broadcast(pairs, src=dist.get_global_rank(self.shard.group, 0), group=self.shard.group)
        return pairs

    def rounding_now(self) -> float:
        """Return the rounding of `EmbeddingCost.rounding_now`, over the rows of all processes."""
        return self._rounding_of_bfloat16 if products_are_of_bfloat16(self.unit) else self._rounding

    @property
    def shape(self) -> tuple[int, int]:
        return self.shard.vocab, self.shard.vocab

    @property
    def dtype(self) -> torch.dtype:
        return self.unit.dtype

    @property
    def device(self) -> torch.device:
        return self.unit.device

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the same cost elsewhere, as `VocabularyCost.to`."""
        moved = copy.copy(self)
        moved.unit = check_cost_dtype(self.unit.to(*args, **kwargs))
        moved.near_duplicates = self.near_duplicates.to(moved.device)
        return moved

    def for_labels(self, labels: Int[Tensor, " tokens"], shard: VocabShard | None = None) -> LabelRows:
        """Return the rows of the labels, whose unit rows one collective exchanges.

        Raises:
            ValueError: no shard, or one of other sizes than the embedding's.
        """
        if shard is None:
            raise ValueError(
                "a ShardedEmbeddingCost has no whole rows in one process; use linear_token_loss with process_group=, "
                "or an EmbeddingCost of the whole embedding."
            )
        if self.shard.sizes != shard.sizes:
            raise ValueError(
                f"the cost has {self.shard.sizes} rows in the processes of the group, the head {shard.sizes}; expected "
                "the same: build the cost from the same blocks."
            )
        distinct = labels.unique()  # sorted
        e, rounding = self.embedding_of(distinct), self.rounding_now()

        def rows(index: Tensor, out: Tensor | None) -> Tensor:
            e_y = e[torch.searchsorted(distinct, index)]
            return cosine_costs(e_y, self.unit, shard.local(index), out=out, rounding=rounding)

        return LabelRows(rows, len(self.unit), self.device, self.dtype, (self.dtype,))

    def embedding_of(self, labels: Int[Tensor, " distinct"]) -> Float[Tensor, "distinct width"]:
        """Return the unit rows of these tokens, from whichever process holds them: one collective."""
        row = self.shard.local(labels)
        here = row >= 0
        rows = self.unit.new_zeros(len(labels), self.unit.shape[1])
        rows[here] = self.unit[row[here]]
        dist.all_reduce(rows, group=self.shard.group)  # The sum is exact: all but one of the terms are 0.
        return rows
