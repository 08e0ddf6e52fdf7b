"""Costs between the tokens of a vocabulary, as the token losses need them: the rows of the labels at hand.

Notation: C the V x V cost matrix, which never exists; y a label, C[y, :] its row; S a few columns of the vocabulary;
q = softmax(z) of the logits z of one token, D its transport cost.

A vocabulary cost gives the rows of some labels (`VocabularyCost.for_labels`) in one of two forms:

    LabelRows     dense rows, made for some labels at a time
                  D = sum_i q_i C[y, i]
    FewColumns    c_j in the columns S, r in every other column
                  D = sum_{j in S} q_j c_j + r sum_{i not in S} q_i

With the second no row of the vocabulary's size is made: the sweeps over the logits are those without a cost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss.costs import Cost
from otloss_llm.models.sharded_heads import VocabShard


@dataclass(frozen=True)
class LabelRows:
    """Rows of the cost matrix from the labels at hand, made on request.

    Attributes:
        rows: `rows(labels, out)` returns the costs (labels, columns) from these labels. `out` is None, or a
            flat buffer of at least as many entries in which the rows are made: a caller in a loop then touches the same
            memory again instead of fresh pages.
        columns: how many columns of the vocabulary the rows have; all, or this process's.
        device, dtype: of rows made without a buffer.
        buffer_dtypes: the dtypes that a buffer may have; () where none can be used. Rows made without a buffer may be
            the cost's own memory: do not write into them.
    """

    rows: Callable[[Int[Tensor, " labels"], Tensor | None], Float[Tensor, "labels columns"]]
    columns: int
    device: torch.device
    dtype: torch.dtype
    buffer_dtypes: tuple[torch.dtype, ...] = ()


@dataclass(frozen=True)
class FewColumns:
    """Rows of the cost matrix that hold one number except in a few columns, one row a kind of label.

    Attributes:
        columns: the few, distinct ids of the vocabulary.
        costs: of each kind in these columns.
        costs_elsewhere: the cost of each kind in all other columns, also of the label if it is one of them.
        which: the kind of each token.
    """

    columns: Int[Tensor, " few"]
    costs: Float[Tensor, "kinds few"]
    costs_elsewhere: Float[Tensor, " kinds"]
    which: Int[Tensor, " tokens"]

    def for_chunk(self, tokens: Int[Tensor, " chunk"]) -> FewColumns:
        """Return the same for a chunk of the tokens."""
        return replace(self, which=self.which[tokens])


class VocabularyCost(ABC):
    """A cost between the tokens of a vocabulary.

    Attributes:
        covers_text: whether labels that are no numbers have costs too.
        signed: whether costs may be negative, for objectives that say `signed_cost = True`.
    """

    covers_text: ClassVar[bool] = True
    signed: ClassVar[bool] = False

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(V, V)."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the costs: float32 or float64."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the costs."""

    @property
    def requires_grad(self) -> bool:
        """Whether the costs carry a graph, which only the reference implementation follows."""
        return False

    @abstractmethod
    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the same cost elsewhere: arguments as for `Tensor.to`, dtypes float32 or float64."""

    @abstractmethod
    def for_labels(self, labels: Int[Tensor, " tokens"], shard: VocabShard | None = None) -> LabelRows | FewColumns:
        """Return the rows of these labels, all of them ids of the vocabulary.

        Args:
            labels: of the tokens of a batch, repeated ones included.
            shard: the columns of this process, where a head is spread over several; `LabelRows` of them are returned.
                Every process makes the call, with the same labels.
        """

    def positions(self, labels: Int[Tensor, "*batch"], valid: Bool[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
        """Return which of the valid positions have costs, the number positions of a cost of numbers; labels that are
        not valid may be anything."""
        return valid


class ValuesCost(VocabularyCost):
    """A cost that is made from one number for each token.

    Attributes:
        values: (V,), NaN at tokens without a number.
    """

    values: Float[Tensor, " vocab"]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), len(self.values)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device


TokenCost = VocabularyCost | Cost  # what token losses accept


class _RowsOf(VocabularyCost):
    """Any square cost of `otloss.costs`, through its `rows`."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost

    shape = property(lambda self: self.cost.shape)
    dtype = property(lambda self: self.cost.dtype)
    device = property(lambda self: self.cost.device)
    requires_grad = property(lambda self: bool(self.cost.parameters()))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return type(self)(self.cost.to(*args, **kwargs))

    def for_labels(self, labels: Int[Tensor, " tokens"], shard: VocabShard | None = None) -> LabelRows:
        own = slice(0, self.shape[1]) if shard is None else slice(shard.start, shard.stop)
        return LabelRows(
            lambda index, out: self.cost.rows(index)[:, own], own.stop - own.start, self.device, self.dtype
        )


def as_vocabulary_cost(cost: TokenCost) -> VocabularyCost:
    """Return a vocabulary cost as it is; any other cost through its rows.

    Raises:
        TypeError: not a cost.
    """
    if isinstance(cost, VocabularyCost):
        return cost
    if isinstance(cost, type):
        raise TypeError(f"cost is the class {cost.__name__}, expected an instance, such as EmbeddingCost(embedding).")
    if not isinstance(cost, Cost):
        raise TypeError(f"cost is a {type(cost).__name__}, expected a cost such as EmbeddingCost(embedding).")
    return _RowsOf(cost)


def check_cost_dtype(costs: Tensor) -> Tensor:
    """Return these costs, or what they are made from, if they are in float32 or float64; else raise ValueError."""
    if costs.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"the cost was asked for in {costs.dtype}, expected float32 or float64; cast the result instead."
        )
    return costs
