"""What a training on numbers is told before it starts: which tokens are numbers, and how many of the labels are."""

from __future__ import annotations

import sys
from typing import Any

import torch

from otloss_llm.costs.choice import number_tokens
from otloss_llm.objectives import Sum


def report_numbers(trainer: Any, objective: str) -> None:
    """Print which tokens count as numbers and their share of the labels; nothing for a cost of an embedding.

    Raises ValueError if no label is a number: the objective would be another one.
    """
    kind = Sum.of(trainer.objective).cost_kind
    cost = getattr(trainer.transport_cost, "numbers", trainer.transport_cost)
    if kind == "embedding":
        return
    if kind == "rating":
        print(repr(cost), file=sys.stderr)
    else:
        cost.coverage(file=sys.stderr)
    vocab = trainer.transport_cost.shape[0]
    counts = label_counts(trainer.train_dataset, vocab, shifted=True)
    if counts is None:  # a stream
        return
    values = number_tokens(trainer.processing_class, vocab).values[:vocab]
    numbers, labels = int(counts[~torch.as_tensor(values).isnan()].sum()), int(counts.sum())
    if not numbers:
        same = "emo" if kind == "mixed" else "mle"
        raise ValueError(
            f"none of the {labels} tokens that are trained on is a number, so {objective} would equal {same}; use rows "
            f"with numbers in what is trained on, or take {same}."
        )
    print(f"{numbers} of the {labels} tokens that are trained on are numbers ({numbers / labels:.1%})", file=sys.stderr)


def label_counts(rows: Any, vocab: int, *, shifted: bool) -> torch.Tensor | None:
    """How often each token is a predicted label; None for a stream."""
    if not hasattr(rows, "__len__"):
        return None
    counts = torch.zeros(vocab, dtype=torch.int64)
    for chunk in rows.with_format("numpy", columns=["labels"]).iter(1000):
        labels = torch.cat([torch.as_tensor(row)[int(shifted) :] for row in chunk["labels"]])
        counts += torch.bincount(labels[labels >= 0], minlength=vocab)
    return counts
