"""Token-weighted means of a training or an evaluation, for logs and metrics. `MEANS` lists them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.losses.positions import IGNORE_INDEX, cost_positions
from otloss_llm.losses.token_loss import TokenLoss
from otloss_llm.objectives import Sum
from otloss_llm.training.batches import Targets


@dataclass(frozen=True)
class ScoredBatch:
    """What the means are made of: values of shape (batch, length), and the sums of `training.predictions`."""

    result: TokenLoss
    targets: Targets
    objective: Sum
    cost: TokenCost | None
    auxiliary: Tensor | None
    predictions: Tensor | None = None

    def prediction(self, index: int) -> Tensor | None:
        """Return one of the sums of predictions; None where they were not made."""
        return None if self.predictions is None else self.predictions[index]

    @property
    def valid(self) -> Tensor:
        """Which positions are labelled."""
        return self.targets.valid

    @property
    def examples(self) -> Tensor:
        """Which rows have a label."""
        return self.valid.any(-1)

    @property
    def weight(self) -> Tensor:
        """The weight of each position, 0 where there is no label."""
        weight = self.targets.token_weight
        return self.valid.double() if weight is None else torch.where(self.valid, weight.double(), 0.0)

    @property
    def value(self) -> Tensor:
        """The objective at each position, 0 where there is no label."""
        nll = self.result.nll
        value = self.objective.value(self.result.statistics().map(lambda vector: vector[self.valid]))
        return torch.zeros_like(nll).masked_scatter(self.valid, value.to(nll.dtype))

    @property
    def cost_positions(self) -> Tensor:
        """Which positions the cost is about: all predicted tokens, or number positions."""
        return cost_positions(None if self.result.cost is None else self.cost, self.targets.labels, self.valid)


@dataclass(frozen=True)
class Mean:
    """The sum of `total` over the sum of `count`; `empty` where the count is 0 (NaN: the mean is left out of the logs).

    Both may be None or NaN where they were not measured. A statistic of tokens is measured if the objective reads it.
    """

    total: Callable[[ScoredBatch], Tensor | None]
    count: Callable[[ScoredBatch], Tensor | None] = lambda batch: batch.valid
    empty: float = math.nan


MEANS = {
    "loss": Mean(lambda batch: batch.weight * batch.value, lambda batch: batch.weight, empty=0.0),
    "nll": Mean(lambda batch: batch.result.nll, empty=0.0),
    "transport_cost": Mean(lambda batch: batch.result.cost, lambda batch: batch.cost_positions),
    "aux_loss": Mean(  # balances the experts of a mixture, one number for a batch
        lambda batch: None if batch.auxiliary is None else batch.auxiliary * batch.examples,
        lambda batch: batch.examples,
    ),
    # These have TRL's names.
    "entropy": Mean(lambda batch: batch.prediction(0), lambda batch: batch.prediction(2)),
    "mean_token_accuracy": Mean(lambda batch: batch.prediction(1), lambda batch: batch.prediction(2)),
    # For a term of the loss whose mean is over weighted number positions; it is not logged.
    "weighted_cost": Mean(
        lambda batch: None if batch.result.cost is None else batch.weight * batch.result.cost,
        lambda batch: batch.weight * batch.cost_positions,
    ),
}
LOGGED = tuple(name for name in MEANS if name not in ("loss", "weighted_cost"))  # loss is the trainer's own
EVALUATED = ("loss", "perplexity", *LOGGED)  # an evaluation may have these, where they are measured


def batch_sums(batch: ScoredBatch) -> Float[Tensor, "means 2"]:
    """Return the sums over a batch of the totals and counts of `MEANS`; NaN where they are not measured."""

    def summed(values: Tensor | None) -> Tensor:
        nothing = torch.tensor(math.nan, dtype=torch.float64, device=batch.valid.device)
        return nothing if values is None else values.detach().double().sum()

    return torch.stack([torch.stack([summed(m.total(batch)), summed(m.count(batch))]) for m in MEANS.values()])


def measured(sums: Float[Tensor, "means 2"]) -> set[str]:
    """Return the names of the means that are made of a batch, and perplexity."""
    totals = zip(MEANS, sums[:, 0].tolist(), strict=True)
    return {"loss", "nll", "perplexity", *(name for name, total in totals if not math.isnan(total))}


def token_means(sums: Float[Tensor, "means 2"]) -> dict[str, float]:
    """Return the means by name; those that were not measured are left out."""
    means = {
        name: total / count if count else mean.empty
        for (name, mean), (total, count) in zip(MEANS.items(), sums.tolist(), strict=True)
    }
    return {name: mean for name, mean in means.items() if not math.isnan(mean)}


def token_count(sums: Float[Tensor, "means 2"]) -> Float[Tensor, ""]:
    """Return how many tokens were predicted, or the sum of their weights."""
    return sums[list(MEANS).index("loss"), 1]


class Rows(NamedTuple):
    """The rows of a batch, or of a part of it: `targets`, and what the model reads, None where it is not by token."""

    targets: Targets
    input_ids: Tensor | None
    attention_mask: Tensor | None

    @staticmethod
    def read(inputs: dict[str, Any], targets: Targets) -> Rows:
        names = ("input_ids", "attention_mask")
        return Rows(targets, *(t if isinstance(t := inputs.get(name), Tensor) else None for name in names))

    def counted(self, *, with_inputs: bool) -> Counter[tuple[tuple[int, ...], ...]]:
        """Return the rows that have labels, without ignored ones, and without padding where there is a mask.

        Parts of a batch may lack its padding.
        """
        labels = self.targets.labels.reshape(len(self.targets.labels), -1).cpu()
        ids, mask = (t if t is None else t.flatten(1).cpu() for t in (self.input_ids, self.attention_mask))
        rows: list[tuple[tuple[int, ...], ...]] = [(tuple(row[row != IGNORE_INDEX].tolist()),) for row in labels]
        if with_inputs and ids is not None and len(ids) == len(labels):
            is_read = torch.ones_like(ids) if mask is None or mask.shape != ids.shape else mask
            rows = [(*row, tuple(read[one != 0].tolist())) for row, read, one in zip(rows, ids, is_read, strict=True)]
        return Counter(row for row in rows if row[0])


class Pass(NamedTuple):
    """What one call of `compute_loss` has scored.

    Attributes:
        sums: of `batch_sums`.
        loss: that it returned.
        rows: that it has scored.
        is_of_model: whether by the trainer's own model, with its adapters.
    """

    sums: Float[Tensor, "means 2"]
    loss: Tensor
    rows: Rows
    is_of_model: bool


def passes_of_batch(passes: list[Pass], batch: Callable[[], Rows | None]) -> list[Pass]:
    """Return those of the passes of a step that score its batch by the trainer's model.

    A `compute_loss` of the user's may score a teacher, other rows, the batch again, or the batch in parts. Of several
    passes over the whole batch the first one counts that reads the same tokens, or else the first with the same labels.
    If the passes do not add up to the rows of the batch, all passes of the model are returned.

    Args:
        batch: returns the rows of the batch; None where it has no labels.
    """
    if len(passes) < 2:
        return passes
    own = [one for one in passes if one.is_of_model] or passes
    if len(own) < 2 or (of_batch := batch()) is None:
        return own
    for with_inputs in (True, False):
        rows = of_batch.counted(with_inputs=with_inputs)
        counted = [one.rows.counted(with_inputs=with_inputs) for one in own]
        if rows in counted:
            return [own[counted.index(rows)]]
        parts = []
        for one, part in zip(own, counted, strict=True):
            if part <= rows:
                parts.append(one)
                rows = rows - part
        if not rows:
            return parts
    return own


@dataclass
class Evaluation:
    """What an evaluation has measured so far.

    Attributes:
        stream: what several processes share, of which `counting_rows` counts the rows.
        is_weighted: whether the rows name weights of tokens.
        sums: of `token_means`.
        batch: returns the rows of the batch that is evaluated now, None where it has no labels.
        count: its number of tokens as the trainer counts it, over all processes.
        batches: how many there have been.
        passes: of that batch.
        added: what the user's own `compute_loss` or `prediction_step` adds to the objective, summed over tokens.
    """

    stream: Any
    is_weighted: bool
    sums: Tensor | None = None
    batch: Callable[[], Rows | None] = lambda: None
    count: Tensor | int | None = None
    batches: int = 0
    passes: list[Pass] = field(default_factory=list)
    added: Tensor | float = 0.0

    def begin_batch(self, batch: Callable[[], Rows | None]) -> None:
        """Forget the passes of the batch before."""
        self.batch, self.count = batch, None
        self.batches += 1
        self.passes.clear()

    def share_of(self, part: Targets, count: Tensor | int) -> Tensor:
        """Return the tokens of a part / `count`: times this, the mean of the part is its sum / `count`.

        If `count` is the trainer's own, over all processes, the divisor is the tokens of the batch in this one.
        """
        tokens = part.counts(part.valid)[0].double()
        whole = self.batch() if self.count is not None and float(self.count) == float(count) else None
        divisor = float(count) if whole is None else float(whole.targets.counts(whole.targets.valid)[0])
        return tokens / divisor if divisor > 0 else torch.ones_like(tokens)

    def end_batch(self, loss: Tensor | None) -> None:
        """Add what the batch makes of its passes, and compare the loss that its step returned with theirs."""
        loss = None if loss is None else loss.detach().double().mean()
        for one in passes_of_batch(self.passes, self.batch):
            self.sums = one.sums if self.sums is None else self.sums + one.sums
            if loss is not None:
                count = token_count(one.sums)
                self.added = self.added + (count * (loss - one.loss)).where(count > 0, 0.0)
