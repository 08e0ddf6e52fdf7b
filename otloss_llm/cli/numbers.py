"""What a training on numbers is told before it starts: which tokens are numbers, and how many of the labels are."""

from __future__ import annotations

import sys
from typing import Any

import torch

from otloss_llm.losses.positions import cost_positions
from otloss_llm.objectives import Sum
from otloss_llm.training.batches import label_counts


def report_numbers(trainer: Any, objective: str) -> None:
    """Print which tokens count as numbers and their share of the labels; nothing for a cost of an embedding.

    Raises ValueError if no label is a number: the objective would be another one.
    """
    kind = Sum.of(trainer.training_objective).cost_kind
    cost = getattr(trainer.transport_cost, "numbers", trainer.transport_cost)
    if kind == "embedding":
        return
    if trainer.is_world_process_zero() and kind == "rating":
        print(repr(cost), file=sys.stderr)
    elif trainer.is_world_process_zero():
        cost.coverage(file=sys.stderr)
    vocab = trainer.transport_cost.shape[0]
    counts = label_counts(trainer.train_dataset, vocab, shifted=True)
    if counts is None:  # a stream
        return
    tokens = torch.arange(vocab, device=cost.device)
    has_cost = cost_positions(cost, tokens, torch.ones_like(tokens, dtype=torch.bool)).to(counts.device)
    numbers, labels = int(counts[has_cost].sum()), int(counts.sum())
    name = "rating" if kind == "rating" else "number"
    if not numbers:
        plain = "emo" if kind == "mixed" else "mle"
        raise ValueError(
            f"none of the {labels} tokens that are trained on is a {name}, so {objective} would equal {plain}; use "
            f"rows with {name}s in what is trained on, or take {plain}."
        )
    if trainer.is_world_process_zero():
        share = f"{numbers} of the {labels} tokens that are trained on are {name}s ({numbers / labels:.1%})"
        print(share, file=sys.stderr)
