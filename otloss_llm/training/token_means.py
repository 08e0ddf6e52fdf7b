"""Token-weighted means of a training or an evaluation, for logs and metrics.

Sums are kept per example, so that examples repeated to fill the last distributed batch can be dropped:

    nll, loss         over predicted tokens
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
) -> Float[Tensor, "batch 7"]:
    """Sums over each example of (nll, transport cost, value, cost positions, tokens, auxiliary loss, 1)."""
    valid = labels != IGNORE_INDEX
    transport = torch.full_like(result.nll, math.nan) if result.cost is None else result.cost
    value = value_of(objective, result.statistics().map(lambda vector: vector[valid]))
    positions = cost_positions(None if result.cost is None else cost, labels, valid)
    columns = [result.nll, transport, torch.zeros_like(result.nll).masked_scatter(valid, value), positions, valid]
    sums = [column.double().sum(-1) for column in columns]
    ones = torch.ones_like(sums[0])
    balance = ones * (math.nan if auxiliary is None else auxiliary.detach().double())
    return torch.stack([*sums, balance, ones], dim=-1)


def token_means(sums: Float[Tensor, "7"]) -> dict[str, float]:
    """Means of "loss", "nll", "transport_cost" and "aux_loss"; what was not measured is left out."""
    nll, cost, value, positions, tokens, auxiliary, rows = sums.tolist()
    tokens = max(tokens, 1.0)
    transport = cost / positions if positions else math.nan  # a cost of numbers where no label is one
    means = {"loss": value / tokens, "nll": nll / tokens, "transport_cost": transport, "aux_loss": auxiliary / rows}
    return {key: mean for key, mean in means.items() if not math.isnan(mean)}
