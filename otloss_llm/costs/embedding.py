"""Costs between the tokens of a vocabulary, for objectives that measure how far a prediction misses.

`EmbeddingCost` is `c(i, j) = 1 - cos(e_i, e_j)`, e the rows of a frozen language-model head (arXiv 2310.04691).
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss._checks import check_finite, check_floating, check_index, device_of
from otloss.costs import CosineCost
from otloss.costs.products import product
from otloss_llm.costs.near_duplicates import describe_criteria, find_near_duplicates
from otloss_llm.costs.vocabulary import LabelRows, VocabularyCost
from otloss_llm.models.heads import find_head
from otloss_llm.models.sharded_heads import VocabShard

if TYPE_CHECKING:
    from torch import nn


logger = logging.getLogger(__name__)

TREATMENTS = ("zero", "keep")
NOTHING_LEFT = 1e-3  # a row of which removing directions leaves a smaller share has no direction but rounding
LONG_WORK = 2**40  # multiplications of an eigenproblem, from which on a line says that it takes a while


class EmbeddingCost(CosineCost, VocabularyCost):
    """Cosine cost of a vocabulary embedding, always detached: training does not change the cost.

    It is not a module and not part of one, so it is in no checkpoint and no optimizer.

    Formulas: docs/guide/definitions.md#def-emo

    Args:
        embedding: `(V, d)`, copied without its graph. Zero rows (padding) cost 1 to every other token. A sharded one
            (DTensor) is gathered: every process has to make the call.
        near_duplicates: how to treat rows that lie within cost 0.001 of another, or 0.01 of three others, such as
            rows of tokens that were never trained, and the new ones that transformers' `resize_token_embeddings`
            makes. "zero" treats them like rows of zeros, cost 1 to every other token, and warns: at a label among
            near-duplicates EMO pushes the prediction towards all of them, not towards the label. "keep" leaves them as
            they are, and does not search: duplicates cost 0 to each other.
        directions: how many leading directions to remove from the rows first, as `all_but_the_top`; 0 leaves the rows
            as they are, which is the cost of the paper; None removes one for every hundred dimensions, at least one,
            which is what trainers, the command line and `emo_loss` do where no cost is given. Rows as they are can
            share a direction with tokens that were seldom trained; EMO then moves mass to those tokens, and its
            reverse divergence is up to 0.2 nats worse than likelihood's (`docs/reports/evidence.md`).

    Attributes:
        near_duplicates: (V,), True for the rows that were set to zero.

    The search takes less than the head's forward pass for 500 tokens: on one core of a CPU 0.2 to 0.3 s for 32,000 rows
    of width 768 and 1 to 2 s for 128,256 of 2048, and 80 and 210 MiB. Make the cost once, not at every step.

    Example:
        >>> EmbeddingCost(torch.eye(3)).rows(torch.tensor([1]))
        tensor([[1., 0., 1.]])
    """

    near_duplicates: Bool[Tensor, " vocab"]

    # The rows are as in `CosineCost` but for rounding.
    diagonal, apply = CosineCost.diagonal, CosineCost.apply
    largest, centroid_bound = CosineCost.largest, CosineCost.centroid_bound

    def __init__(
        self,
        embedding: Float[Tensor, "vocab width"],
        *,
        near_duplicates: str = "zero",
        directions: int | None = 0,
    ) -> None:
        embedding = check_floating("embedding", embedding).detach()
        check_treatment(near_duplicates)
        if hasattr(embedding, "full_tensor"):
            embedding = embedding.full_tensor()
        was_nonzero = (embedding != 0).any(-1)
        self.has_all_directions = directions == 0
        if directions != 0:
            check_finite("embedding", embedding)
            # before the search: rows of tokens that were never trained share a leading direction
            embedding = all_but_the_top(embedding, directions)
        super().__init__(embedding)  # Normalising makes a copy.
        self.near_duplicates = torch.zeros_like(self.zero_rows)
        if near_duplicates == "zero":
            # Rows of which nothing is left are all but equal to the mean, as rows of new tokens are.
            self.near_duplicates = find_near_duplicates(self.unit) | (self.zero_rows & was_nonzero)
            if self.near_duplicates.any():
                warn_of_near_duplicates(self.near_duplicates, stacklevel=2)
                self.unit[self.near_duplicates] = 0.0
                self.zero_rows |= self.near_duplicates
        self._rounding = 16 * torch.finfo(self.dtype).eps  # It belongs to these rows, in whatever dtype they are later.
        self._narrowed: dict[torch.dtype, tuple[Tensor, float]] = {}

    def rows(
        self, index: Int[Tensor, " picked"], *, out: Float[Tensor, " entries"] | None = None
    ) -> Float[Tensor, "picked vocab"]:
        """Return the costs C[index, :]; what rounding leaves between rows of one direction is 0.

        Vocabularies hold duplicates (reserved tokens). A noisy 6e-8 in place of 0 would make the ratio nll / D of a
        prediction split between duplicates 1e7, and its gradient noise of full size.

        `out` is a flat buffer for the rows. It may be of a 16-bit dtype, for speed on a GPU: the product is then one of
        16-bit numbers, summed up in float32. Costs have the digits of that dtype, and those up to twice what rounding
        has added to the square of a row's length are 0: 5e-4 for bfloat16 and a width of 4096, at most 2 eps. The same
        holds on a CPU where `torch.set_float32_matmul_precision("medium")` allows products of bfloat16.
        """
        if self.device.type == "cpu":  # On a GPU the check would synchronise.
            index = check_index("index", index, self.shape[0])
        if out is None or out.dtype == self.dtype:
            unit, rounding = self.unit, self.rounding_now()
        else:
            unit, rounding = self._narrow(out.dtype)
        return cosine_costs(unit[index], unit, index, out=out, rounding=rounding)

    def for_labels(self, labels: Int[Tensor, " tokens"], shard: VocabShard | None = None) -> LabelRows:
        """Return the rows of the labels, which may be made in 16 bits unless the head is spread over processes."""
        if shard is None:
            dtypes = (self.dtype, torch.bfloat16, torch.float16)
            return LabelRows(
                lambda index, out: self.rows(index, out=out), self.shape[1], self.device, self.dtype, dtypes
            )
        own, rounding = self.unit[shard.start : shard.stop], self.rounding_now()

        def rows(index: Tensor, out: Tensor | None) -> Tensor:
            return cosine_costs(self.unit[index], own, shard.local(index), out=out, rounding=rounding)

        return LabelRows(rows, len(own), self.device, self.dtype, (self.dtype,))

    def _narrow(self, dtype: torch.dtype) -> tuple[Tensor, float]:
        """Return the unit rows in a 16-bit dtype, and what rounding to it may leave in place of 0.

        That is twice what it has added to the square of a length.
        """
        if dtype not in self._narrowed:
            rounding = 2 * added_by_rounding(self.unit, self.zero_rows, dtype) + self._rounding
            self._narrowed[dtype] = self.unit.to(dtype), rounding
        return self._narrowed[dtype]

    def rounding_now(self) -> float:
        """What rounding may leave in place of 0 in a product in the cost's own dtype, as torch is set now."""
        return self._narrow(torch.bfloat16)[1] if products_are_of_bfloat16(self.unit) else self._rounding

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the same cost elsewhere, as `Cost.to`."""
        moved = super().to(*args, **kwargs)
        moved._rounding, moved._narrowed = max(self._rounding, 16 * torch.finfo(moved.dtype).eps), {}
        return moved

    @classmethod
    def from_model(
        cls, model: nn.Module, *, near_duplicates: str = "zero", directions: int | None = 0
    ) -> EmbeddingCost:
        """Copy and freeze the output embedding (head) of a causal LM of transformers: tied, resized or PEFT-wrapped.

        Args:
            model: has `get_output_embeddings()`.
            near_duplicates, directions: as in the constructor.

        Raises:
            TypeError, ValueError: the model has no head, or one that cannot be read, named in the message.
        """
        return cls(find_head(model).weight, near_duplicates=near_duplicates, directions=directions)

    def random_like(self, generator: torch.Generator | None = None) -> EmbeddingCost:
        """The control without semantics: Gaussian rows of the same shape, so that c is near 1 between all tokens."""
        unit = self.unit
        rows = torch.randn(unit.shape, generator=generator, dtype=unit.dtype, device=device_of(generator))
        return EmbeddingCost(rows.to(unit.device), near_duplicates="keep")

    def shuffled(self, generator: torch.Generator | None = None) -> EmbeddingCost:
        """Return the control with the same geometry but tokens assigned to it at random."""
        order = torch.randperm(self.unit.shape[0], generator=generator, device=device_of(generator)).to(
            self.unit.device
        )
        shuffled = EmbeddingCost(self.unit[order], near_duplicates="keep")
        shuffled.near_duplicates = self.near_duplicates[order]
        return shuffled


def all_but_the_top(rows: Float[Tensor, "vocab width"], directions: int | None = None) -> Float[Tensor, "vocab width"]:
    """Return the rows without their mean and their leading principal directions.

    Tokens that are seldom or never trained share a direction with most others. At a position that is hard to predict
    they are then nearer to all likely targets than those are to each other, and EMO moves mass to them
    (`docs/reports/evidence.md`). `EmbeddingCost(rows, directions=None)` is the cost of rows without such directions.

    Args:
        rows: rows of zeros stay so, and count neither for the mean nor for the directions. A row of which less than a
            thousandth of its length is left becomes zero: its direction would be one of rounding.
        directions: how many, fewer than the width; None for one in a hundred dimensions, at least one.

    Raises:
        TypeError: if the rows are not a floating tensor, or directions no whole number.
        ValueError: if the rows are no matrix of width 2 or more, a number is NaN or infinite, or directions too many.

    Source:
        J. Mu, P. Viswanath, All-but-the-Top: Simple and Effective Postprocessing for Word Representations, ICLR 2018.

    Example:
        >>> all_but_the_top(torch.tensor([[9.0, 1.0], [1.0, 1.0], [9.0, -1.0], [1.0, -1.0]]))
        tensor([[ 0.,  1.],
                [ 0.,  1.],
                [ 0., -1.],
                [ 0., -1.]])
    """
    rows = check_floating("rows", rows).detach()
    check_finite("rows", rows)
    if rows.dim() != 2 or 0 in rows.shape or rows.shape[1] < 2:
        raise ValueError(f"rows have shape {tuple(rows.shape)}, expected (V, d) with d of 2 or more.")
    return remove_directions(rows, check_directions(directions, rows.shape[1]), lambda part: part)


def check_directions(directions: int | None, width: int) -> int:
    """Return the number of directions to remove from rows of this width; raises TypeError or ValueError."""
    count = max(1, width // 100) if directions is None else directions
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"directions is {count!r}, expected a whole number, or None.")
    if not 0 <= count < width:
        raise ValueError(f"directions is {count}, expected 0 to {width - 1}, fewer than the width.")
    return count


def remove_directions(
    rows: Float[Tensor, "here width"],
    count: int,
    total: Callable[[Tensor], Tensor],
    largest: Callable[[Tensor], Tensor] = lambda part: part,
    agreed: Callable[[Tensor], Tensor] = lambda part: part,
) -> Float[Tensor, "here width"]:
    """Return the rows without the mean and the `count` leading directions of all rows.

    Args:
        rows: the rows of this process.
        total, largest: sum and maximum over processes.
        agreed: what the first process has.
    """
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    width = rows.shape[1]
    size = rows.abs().amax() if len(rows) else rows.new_zeros(())
    size = largest(size).clamp(min=torch.finfo(rows.dtype).tiny)  # products of large rows overflow
    used = (rows != 0).any(1, keepdim=True)
    number = total(used.sum(dtype=rows.dtype).reshape(1))
    centred = rows / size
    centred = (centred - total(centred.sum(0)) / number.clamp(min=1)) * used
    if float(number) * width**2 + 10 * float(width) ** 3 > LONG_WORK:
        logger.warning(
            "removing the leading directions of an embedding of %d rows of width %d, once; this can take minutes on a "
            "CPU", int(number), width,
        )  # fmt: skip
    leading = agreed(
        torch.linalg.eigh(total(product(centred.T, centred))).eigenvectors[:, width - count :].contiguous()
    )
    kept = centred - product(product(centred, leading), leading.T)
    lengths = torch.linalg.vector_norm(rows / size, dim=1, keepdim=True)
    kept[(torch.linalg.vector_norm(kept, dim=1, keepdim=True) < NOTHING_LEFT * lengths).squeeze(1)] = 0.0
    return kept * size


def cosine_costs(
    e_y: Float[Tensor, "picked width"],
    unit: Float[Tensor, "columns width"],
    own: Int[Tensor, " picked"],
    *,
    out: Float[Tensor, " entries"] | None,
    rounding: float,
) -> Float[Tensor, "picked columns"]:
    """1 - <e_y, unit_j>; 0 where that is at most `rounding`, and in the column `own` of each label (-1: not here).

    Args:
        e_y, unit: rows of length one, or zero.
        out: a flat buffer to make the costs in.
    """
    entries = len(e_y) * len(unit)
    flat = unit.new_empty(entries) if out is None else out[:entries]
    with without_tf32(unit.device), torch.autocast(unit.device.type, enabled=False):
        # In the order of memory that the sweeps read: on a CPU the costs of a column lie side by side.
        if unit.device.type == "cpu":
            costs = flat.view(len(unit), len(e_y)).fill_(1).addmm_(unit, e_y.T, alpha=-1).T
        else:
            costs = flat.view(len(e_y), len(unit)).fill_(1).addmm_(e_y, unit.T, alpha=-1)
    torch.threshold_(costs, rounding, 0.0)
    if len(unit):
        own = own.unsqueeze(1)
        column = own.clamp(min=0)
        costs.scatter_(1, column, torch.where(own >= 0, 0.0, costs.gather(1, column)))
    return costs


def check_treatment(near_duplicates: str) -> None:
    """Raise ValueError unless this is a way to treat near-duplicates."""
    if near_duplicates not in TREATMENTS:
        raise ValueError(f"near_duplicates is {near_duplicates!r}, expected one of {TREATMENTS}.")


def warn_of_near_duplicates(flagged: Bool[Tensor, " vocab"], *, stacklevel: int) -> None:
    """Say how many rows were set to zero, and how to leave them as they are."""
    warnings.warn(
        f"{int(flagged.sum())} of the {len(flagged)} rows of the embedding are near-duplicates "
        f"({describe_criteria()}), as rows of tokens that were never trained are. They now cost 1 "
        "to every other token, like rows of zeros; "
        'near_duplicates="keep" leaves them as they are (on the command line: the cost embedding as-is).',
        stacklevel=stacklevel + 1,
    )


def products_are_of_bfloat16(unit: Tensor) -> bool:
    """Whether `torch.set_float32_matmul_precision("medium")` lets a CPU round the factors of a float32 product."""
    if unit.device.type != "cpu" or unit.dtype != torch.float32:
        return False
    products = getattr(torch.backends.mkldnn, "matmul", None)  # torch 2.9; before, one setting for all devices
    if products is None:
        return torch.get_float32_matmul_precision() == "medium"
    return products.fp32_precision == "bf16"


def added_by_rounding(unit: Tensor, zero_rows: Tensor, dtype: torch.dtype) -> float:
    """Return the most that rounding unit rows to `dtype` adds to the square of a length, or takes from it."""
    if not len(unit):
        return 0.0
    square = torch.linalg.vector_norm(unit.to(dtype), dim=1, dtype=torch.float32).square()
    return float((square - 1).abs().masked_fill(zero_rows, 0.0).max())


class _Tf32:
    """How often, by the threads of this process, TF32 is switched off now; and what it was before."""

    lock: ClassVar[threading.Lock] = threading.Lock()
    depth: ClassVar[int] = 0
    previous: ClassVar[Any] = None


@contextmanager
def without_tf32(device: torch.device) -> Iterator[None]:
    """A user may have allowed TF32 for products of float32; 1 - cos would have no correct digit left near 0.

    The setting belongs to the process: the first thread in switches it off, the last one out restores it.
    """
    if device.type != "cuda":
        yield
        return
    products = torch.backends.cuda.matmul
    name, full = ("fp32_precision", "ieee") if hasattr(products, "fp32_precision") else ("allow_tf32", False)
    with _Tf32.lock:
        if not _Tf32.depth:
            _Tf32.previous = getattr(products, name)
            setattr(products, name, full)
        _Tf32.depth += 1
    try:
        yield
    finally:
        with _Tf32.lock:
            _Tf32.depth -= 1
            if not _Tf32.depth:
                setattr(products, name, _Tf32.previous)
