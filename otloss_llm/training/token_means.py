"""Token-weighted means of a training or an evaluation, for logs and metrics. `MEANS` lists them.

Sums are kept per example, so that examples repeated to fill the last distributed batch can be dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.losses.positions import cost_positions
from otloss_llm.losses.token_loss import TokenLoss
from otloss_llm.objectives import Sum
from otloss_llm.training.batches import Targets


@dataclass(frozen=True)
class ScoredBatch:
    """What the means are made of: of shape (batch, length), and the sums of each example of `training.predictions`."""

    result: TokenLoss
    targets: Targets
    objective: Sum
    cost: TokenCost | None
    auxiliary: Tensor | None
    predictions: Tensor | None = None

    def prediction(self, which: int) -> Tensor | None:
        """One of the sums of predictions, a column; None where they were not made."""
        return None if self.predictions is None else self.predictions[:, which : which + 1]

    @property
    def valid(self) -> Tensor:
        return self.targets.valid

    @property
    def weight(self) -> Tensor:
        weight = self.targets.token_weight
        return self.valid.double() if weight is None else torch.where(self.valid, weight.double(), 0.0)

    @property
    def value(self) -> Tensor:
        """Of the objective at each token, 0 where there is no label."""
        nll = self.result.nll
        value = self.objective.value(self.result.statistics().map(lambda vector: vector[self.valid]))
        return torch.zeros_like(nll).masked_scatter(self.valid, value)

    @property
    def one(self) -> Tensor:
        """1 for each example."""
        return self.weight.new_ones(len(self.weight), 1)

    @property
    def cost_positions(self) -> Tensor:
        """What the cost is about: all predicted tokens, or number positions."""
        return cost_positions(None if self.result.cost is None else self.cost, self.targets.labels, self.valid)


@dataclass(frozen=True)
class Mean:
    """The sum of `total` over that of `count`; `empty` where the count is 0 (NaN: the mean is left out of the logs).

    Both may be None or NaN where they were not measured. A statistic of tokens is measured if the objective reads it.
    """

    total: Callable[[ScoredBatch], Tensor | None]
    count: Callable[[ScoredBatch], Tensor | None] = lambda batch: batch.valid
    empty: float = math.nan


MEANS = {
    "loss": Mean(lambda batch: batch.weight * batch.value, lambda batch: batch.weight, empty=0.0),
    "nll": Mean(lambda batch: batch.result.nll, empty=0.0),
    "transport_cost": Mean(lambda batch: batch.result.cost, lambda batch: batch.cost_positions),
    "aux_loss": Mean(  # that balances the experts of a mixture, one number for a batch
        lambda batch: None if batch.auxiliary is None else batch.auxiliary * batch.one, lambda batch: batch.one
    ),
    # Under TRL's names.
    "entropy": Mean(lambda batch: batch.prediction(0), lambda batch: batch.prediction(2)),
    "mean_token_accuracy": Mean(lambda batch: batch.prediction(1), lambda batch: batch.prediction(2)),
    # Not logged: for a term whose mean is over weighted number positions.
    "weighted_cost": Mean(
        lambda batch: None if batch.result.cost is None else batch.weight * batch.result.cost,
        lambda batch: batch.weight * batch.cost_positions,
    ),
}
LOGGED = tuple(name for name in MEANS if name not in ("loss", "weighted_cost"))  # loss is the trainer's own


def example_sums(batch: ScoredBatch) -> Float[Tensor, "batch means 2"]:
    """The sums over each example of the totals and counts of `MEANS`."""
    rows = len(batch.valid)

    def summed(column: Tensor | None) -> Tensor:
        nothing = torch.full((rows,), math.nan, dtype=torch.float64, device=batch.valid.device)
        return nothing if column is None else column.detach().double().sum(-1)

    return torch.stack([torch.stack([summed(m.total(batch)), summed(m.count(batch))], -1) for m in MEANS.values()], 1)


def token_means(sums: Float[Tensor, "means 2"]) -> dict[str, float]:
    """The means by name; those that were not measured are left out."""
    means = {
        name: total / count if count else mean.empty
        for (name, mean), (total, count) in zip(MEANS.items(), sums.tolist(), strict=True)
    }
    return {name: mean for name, mean in means.items() if not math.isnan(mean)}


def tokens_in(sums: Float[Tensor, "means 2"]) -> float:
    """How many tokens were predicted, or the sum of their weights."""
    return float(sums[list(MEANS).index("loss"), 1])
