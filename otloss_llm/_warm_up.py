"""Compile the CPU kernels of the token losses before they are needed."""

from __future__ import annotations

import torch

from otloss_llm.costs.embedding import EmbeddingCost
from otloss_llm.costs.number_cost import NumberCost
from otloss_llm.losses.token_loss import linear_token_loss
from otloss_llm.objectives import EMO, NumberToken


def warm_up() -> None:
    """Compile the kernels of `linear_token_loss` on the CPU, with costs of embeddings and of numbers.

    Otherwise they are compiled at the first call, for about 2 s; `otloss.warm_up` says where kernels are kept.

    Example:
        >>> warm_up()
    """
    with torch.inference_mode(False), torch.enable_grad():
        hidden = torch.zeros(8, 4, device="cpu", requires_grad=True)
        weight, labels = torch.eye(16, 4, device="cpu"), torch.arange(8, device="cpu")
        values = torch.full((16,), torch.nan, device="cpu")
        values[:4] = torch.arange(4.0, device="cpu")
        for objective, cost in ((EMO(), EmbeddingCost(weight)), (NumberToken(0.3), NumberCost(values))):
            linear_token_loss(hidden, weight, labels, objective=objective, cost=cost).loss.backward()
