"""Token-weighted means of a training or an evaluation, for logs and metrics.

Sums are kept per example, so that examples repeated to fill the last distributed batch can be dropped:

    nll, loss         over predicted tokens, the loss weighted where the data have weights
    transport_cost    over positions that the cost is about: all predicted tokens, or number positions
    aux_loss          over rows, the loss that balances the experts of a mixture
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.losses.positions import IGNORE_INDEX, cost_positions
from otloss_llm.losses.token_loss import TokenLoss
from otloss_llm.objectives import Objective, value_of

TOKENS = 4  # the column of the sums that counts predicted tokens


def example_sums(
    result: TokenLoss,
    labels: Int[Tensor, "batch length"],
    *,
    objective: Objective,
    cost: TokenCost | None,
    auxiliary: Tensor | None,
    token_weight: Float[Tensor, "batch length"] | None = None,
) -> Float[Tensor, "batch 10"]:
    """Sums over each example of (nll, transport cost, weighted value, cost positions, tokens, auxiliary loss, 1,
    weight, weighted transport cost, weight of cost positions)."""
    valid = labels != IGNORE_INDEX
    transport = torch.full_like(result.nll, math.nan) if result.cost is None else result.cost
    value = value_of(objective, result.statistics().map(lambda vector: vector[valid]))
    positions = cost_positions(None if result.cost is None else cost, labels, valid)
    weight = valid.double() if token_weight is None else torch.where(valid, token_weight.double(), 0.0)
    values = torch.zeros_like(result.nll).masked_scatter(valid, value)
    columns = [result.nll, transport, weight * values, positions, valid]
    sums = [column.double().sum(-1) for column in columns]
    ones = torch.ones_like(sums[0])
    balance = ones * (math.nan if auxiliary is None else auxiliary.detach().double())
    weighted = [column.double().sum(-1) for column in (weight, weight * transport, weight * positions)]
    return torch.stack([*sums, balance, ones, *weighted], dim=-1)


def token_means(sums: Float[Tensor, "10"]) -> dict[str, float]:
    """Means of "loss", "nll", "transport_cost", "weighted_cost" (of weighted positions) and "aux_loss"; what was not
    measured is left out."""
    nll, cost, value, positions, tokens, auxiliary, rows, weight, weighted_cost, weighted_positions = sums.tolist()
    tokens = max(tokens, 1.0)
    means = {
        "loss": value / (weight or 1.0),
        "nll": nll / tokens,
        "transport_cost": cost / positions if positions else math.nan,  # a cost of numbers where no label is one
        "weighted_cost": weighted_cost / weighted_positions if weighted_positions else math.nan,
        "aux_loss": auxiliary / rows,
    }
    return {key: mean for key, mean in means.items() if not math.isnan(mean)}
