"""Token-weighted means of a training or an evaluation, for logs and metrics. `MEANS` lists them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
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


class Pass(NamedTuple):
    """What one call of `compute_loss` has scored.

    Attributes:
        sums: of `batch_sums`.
        loss: that it returned.
        labels: aligned with the positions that predict them.
        is_of_model: whether by the trainer's own model, with its adapters.
    """

    sums: Float[Tensor, "means 2"]
    loss: Tensor
    labels: Int[Tensor, "rows length"]
    is_of_model: bool


def passes_of_batch(
    passes: list[Pass], targets: Callable[[], Targets | None], loss: Tensor | None = None
) -> list[Pass]:
    """Return those of the passes of a step that score its batch by the trainer's model.

    A `compute_loss` of the user's may score a teacher, other rows, the batch again, or the batch in parts. Of several
    passes over the whole batch the one counts whose loss is nearest to that of the step, or the first. If the passes do
    not add up to the rows of the batch, all passes of the model are returned.

    Args:
        targets: returns those of the batch; None where there are none.
        loss: of the step, where it may be compared with those of the passes.
    """
    if len(passes) < 2:
        return passes
    own = [one for one in passes if one.is_of_model] or passes
    if len(own) < 2 or (of_batch := targets()) is None:
        return own
    rows, rows_of_passes = _rows(of_batch.labels), [_rows(one.labels) for one in own]
    whole = [one for one, part in zip(own, rows_of_passes, strict=True) if part == rows]
    if whole:
        return whole[:1] if loss is None else [min(whole, key=lambda one: abs(float(one.loss) - float(loss)))]
    parts = []
    for one, part in zip(own, rows_of_passes, strict=True):
        if part <= rows:
            parts.append(one)
            rows = rows - part
    return own if rows else parts


def _rows(labels: Tensor) -> Counter[tuple[int, ...]]:
    """Return the rows that have labels, without ignored ones: parts of a batch may lack its padding."""
    rows = Counter(tuple(row[row != IGNORE_INDEX].tolist()) for row in labels.reshape(len(labels), -1).cpu())
    del rows[()]
    return rows


@dataclass
class Evaluation:
    """What an evaluation has measured so far.

    Attributes:
        stream: what several processes share, of which `counting_rows` counts the rows.
        is_weighted: whether the rows name weights of tokens.
        sums: of `token_means`.
        targets: returns what is scored of the batch that is evaluated now, None where it has no labels.
        passes: of that batch.
        added: what the user's own `compute_loss` or `prediction_step` adds to the objective, summed over tokens.
    """

    stream: Any
    is_weighted: bool
    sums: Tensor | None = None
    targets: Callable[[], Targets | None] = lambda: None
    passes: list[Pass] = field(default_factory=list)
    added: Tensor | float = 0.0

    def begin_batch(self, targets: Callable[[], Targets | None]) -> None:
        """Forget the passes of the batch before."""
        self.targets = targets
        self.passes.clear()

    def share_of_batch(self, part: Targets) -> Tensor:
        """Return tokens of the part / tokens of the batch: times this, its mean is a term of the mean of the batch."""
        whole = self.targets() or part
        tokens, of_batch = (one.counts(one.valid)[0].double() for one in (part, whole))
        of_batch = of_batch.to(tokens)
        return (tokens / of_batch.clamp(min=torch.finfo(torch.float32).tiny)).where(of_batch > 0, 1.0)

    def end_batch(self, loss: Tensor | None) -> None:
        """Add what the batch makes of its passes, and compare the loss that its step returned with theirs."""
        loss = None if loss is None else loss.detach().double().mean()
        for one in passes_of_batch(self.passes, self.targets, loss):
            self.sums = one.sums if self.sums is None else self.sums + one.sums
            if loss is not None:
                count = token_count(one.sums)
                self.added = self.added + (count * (loss - one.loss)).where(count > 0, 0.0)
