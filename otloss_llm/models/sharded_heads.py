"""A head whose rows are spread over processes: which process holds which rows, and whether all make the same call.

Notation: process r of a group holds the rows start_r .. stop_r of the (V, d) head, in the order of ranks; some may hold
no rows. Hidden states and labels are whole, and equal, in every process: tensor parallelism, not data parallelism.

A process that raises alone deadlocks the others. So arguments are checked before the first collective, which also tells
the others; what is computed later is equal in all processes, and so are its errors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

Facts = dict[str, Any]
CHECKS = ("always", "first")


@dataclass(frozen=True)
class VocabShard:
    """The rows of this process (number `rank` of the group), and the number of rows of each process (`sizes`)."""

    group: dist.ProcessGroup
    rank: int
    sizes: tuple[int, ...]

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.rank])

    @property
    def stop(self) -> int:
        return self.start + self.sizes[self.rank]

    @property
    def vocab(self) -> int:
        return sum(self.sizes)

    def local(self, index: Int[Tensor, " picked"]) -> Int[Tensor, " picked"]:
        """Positions of tokens among the rows of this process; -1 for tokens of another process."""
        return torch.where((index >= self.start) & (index < self.stop), index - self.start, -1)

    @classmethod
    def agreed(cls, group: dist.ProcessGroup, block: Tensor, check: Callable[[], Facts]) -> VocabShard:
        """Exchange the number of rows, and whether each process found its arguments valid.

        `check` raises, or returns what has to be equal in all processes. Raises what `check` raised, or ValueError if
        it raised in another process or the processes' facts differ.
        """
        error: Exception | None = None
        facts: Facts = {}
        try:
            facts = check()
        except Exception as caught:  # Any error must reach the other processes, which wait for this one.
            error = caught
        rows = -1 if error is not None else len(block)
        summary = torch.tensor([rows, zlib.crc32(repr(facts).encode())], device=getattr(block, "device", None))
        everyone = gathered(summary, group)
        if error is not None:
            raise error
        sizes, digests = zip(*everyone.tolist(), strict=True)
        if -1 in sizes:
            raise ValueError(f"process {sizes.index(-1)} of the group got invalid arguments; see its own error.")
        if len(set(digests)) > 1:
            raise ValueError(
                f"the processes of the group made different calls; here it is {facts}. Expected equal arguments except "
                "for the rows of the head: in data parallelism, where tokens differ, omit process_group."
            )
        return cls(group, dist.get_rank(group), sizes)


def gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all processes, stacked, in one collective."""
    everyone = tensor.new_empty(dist.get_world_size(group) * tensor.numel())
    # torch 2.13 renamed the function, and warns about the name of torch 2.6.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everyone, tensor.reshape(-1), group=group)
    return everyone.view(-1, *tensor.shape)


def fingerprint(labels: Int[Tensor, "*batch"]) -> int:
    """A number that differs between different labels."""
    flat = labels.detach().reshape(-1).long()
    weights = torch.arange(1, len(flat) + 1, device=flat.device) * 0x9E3779B97F4A7C1 + 1  # wraps, as does the sum
    return int(((flat + 1) * weights).sum())


class LocalTensors(NamedTuple):
    """Plain tensors of this process, and the group whose processes hold the other rows of the head (None: all here)."""

    hidden: Float[Tensor, "*batch width"]
    weight: Float[Tensor, "rows width"]
    bias: Float[Tensor, " rows"] | None
    labels: Int[Tensor, "*batch"]
    group: dist.ProcessGroup | None


def local_tensors(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, group: dist.ProcessGroup | None
) -> LocalTensors:
    """The local parts of DTensors: a head sharded by rows with hidden states replicated, or everything replicated.

    Hidden states and labels that are sharded along the sequence, or another batch axis, on the mesh of such a head
    (sequence parallelism) are gathered; each process gets the gradient of its own part.

    Raises ValueError for another placement, or one with which the other processes may hold other tokens.
    """
    if not any(hasattr(tensor, "placements") for tensor in (hidden, weight, bias, labels)):
        return LocalTensors(hidden, weight, bias, labels, group)
    if is_row_shard(weight):
        group = _group_of_row_shards(hidden, weight, bias, group)
        hidden, labels = gathered_sequence(hidden, hidden.ndim - 1), gathered_sequence(labels, hidden.ndim - 1)
        weight, bias = weight.to_local(), None if bias is None else bias.to_local()  # type: ignore[attr-defined]
    elif hasattr(weight, "placements") and group is not None:
        raise ValueError(
            f"weight is a DTensor with placements {_placements(weight)}, and process_group was given; expected the "
            "rows of this process: pass weight.to_local() of a weight with placements [Shard(0)]."
        )
    return LocalTensors(
        replica("hidden", hidden),
        replica("weight", weight),
        None if bias is None else replica("bias", bias),
        replica("labels", labels),
        group,
    )


class LocalLogits(NamedTuple):
    """Plain logits of this process, and the group whose processes hold the other columns (None: all are here)."""

    logits: Float[Tensor, "*batch columns"]
    vocab: int
    group: dist.ProcessGroup | None


def local_logits(logits: Any) -> LocalLogits:
    """The local part of logits that are a DTensor, replicated or sharded by columns on a mesh of one axis.

    Raises ValueError for another placement.
    """
    placements: tuple[Any, ...] = getattr(logits, "placements", ())
    vocab = logits.shape[-1]
    if len(placements) == 1 and placements[0].is_shard(logits.ndim - 1):
        return LocalLogits(logits.to_local(), vocab, logits.device_mesh.get_group())
    if placements and not all(placement.is_replicate() for placement in placements):
        raise ValueError(
            f"logits is a DTensor with placements {_placements(logits)}, expected replicated ones, or (on a mesh of "
            "one axis) [Shard(-1)]: of data or sequence parallelism pass logits.to_local() with the labels of this "
            "process, and num_items."
        )
    return LocalLogits(replica("logits", logits), vocab, None)


def _group_of_row_shards(hidden: Any, weight: Any, bias: Any, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    mesh = weight.device_mesh
    if not hasattr(hidden, "placements") and group is None:
        raise ValueError(
            "weight is a DTensor sharded by rows and hidden a plain tensor, so other processes may hold other tokens "
            "(FSDP2) or the same (tensor parallelism). For FSDP2 make the call inside the model's forward pass, where "
            "the weight is gathered (ObjectiveTrainer does); for tensor parallelism pass hidden as a DTensor with "
            "placements [Replicate()] (or sharded along the sequence), or weight.to_local() with process_group=."
        )
    if hasattr(hidden, "placements") and hidden.device_mesh != mesh:
        raise ValueError("hidden and weight are DTensors of different device meshes, expected one mesh.")
    own: dist.ProcessGroup = mesh.get_group()
    if group is not None and dist.get_process_group_ranks(group) != dist.get_process_group_ranks(own):
        raise ValueError("process_group has other processes than the device mesh of weight; omit process_group.")
    if bias is not None and not (is_row_shard(bias) and bias.device_mesh == mesh):
        raise ValueError(f"bias is {_placements(bias)}, expected a DTensor sharded by rows on the mesh of weight.")
    return own


def replicated_like(weight: Any, tensor: Tensor) -> Any:
    """A tensor that is equal in all processes, as a DTensor on the mesh of a head that is sharded by rows."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, weight.device_mesh, [Replicate()], run_check=False)


def gathered_sequence(tensor: Any, batch_axes: int) -> Any:
    """A DTensor that is sharded along one of its first axes, replicated; anything else as it is."""
    from torch.distributed.tensor import Replicate, Shard  # slow to import, needed for DTensors only

    placements: tuple[Any, ...] = getattr(tensor, "placements", ())
    if len(placements) != 1 or type(placements[0]) is not Shard or placements[0].dim >= batch_axes:
        return tensor
    return tensor.redistribute(placements=[Replicate()])


def is_row_shard(tensor: Any) -> bool:
    """Whether this is a DTensor of placement Shard(0) on a mesh of one axis."""
    if not hasattr(tensor, "placements"):
        return False
    from torch.distributed.tensor import Shard  # slow to import, needed for DTensors only

    return len(tensor.placements) == 1 and type(tensor.placements[0]) is Shard and tensor.placements[0].dim == 0


def replica(name: str, tensor: Any) -> Tensor:
    """The local part of a replicated DTensor, or a plain tensor as it is; raises ValueError for another placement."""
    if not hasattr(tensor, "placements"):
        return tensor
    if not all(placement.is_replicate() for placement in tensor.placements):
        rows = ", or (on a mesh of one axis) [Shard(0)]" if name == "weight" else ""
        raise ValueError(
            f"{name} is a DTensor with placements {_placements(tensor)}, expected replicated ones{rows}; "
            f"call {name}.redistribute(placements=[Replicate()])."
        )
    return tensor.to_local()


def _placements(tensor: Any) -> str:
    return str(list(tensor.placements)) if hasattr(tensor, "placements") else "a plain tensor"
