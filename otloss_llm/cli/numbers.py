"""What a training on numbers is told before it starts: which tokens are numbers, and how many of the labels are."""

from __future__ import annotations

import sys
from typing import Any

from otloss_llm.costs.choice import number_tokens
from otloss_llm.objectives import Sum
from otloss_llm.training.batches import label_counts


def report_numbers(trainer: Any, objective: str) -> None:
    """Print which tokens count as numbers and their share of the labels; nothing for a cost of an embedding.

    Raises ValueError if no label is a number: the objective would be another one.
    """
    kind = Sum.of(trainer.objective).cost_kind
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
    values = number_tokens(trainer.processing_class, vocab).values[:vocab]
    numbers, labels = int(counts[~values.isnan()].sum()), int(counts.sum())
    if not numbers:
        plain = "emo" if kind == "mixed" else "mle"
        raise ValueError(
            f"none of the {labels} tokens that are trained on is a number, so {objective} would equal {plain}; use "
            f"rows with numbers in what is trained on, or take {plain}."
        )
    if trainer.is_world_process_zero():
        share = f"{numbers} of the {labels} tokens that are trained on are numbers ({numbers / labels:.1%})"
        print(share, file=sys.stderr)
