"""The transport cost of a trainer: chosen for its objective, checked, and what it says of the training set."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from otloss.costs import CosineCost
from otloss_llm.costs.choice import NumberSettings, choose_cost, near_duplicates_in
from otloss_llm.costs.embedding import EmbeddingCost
from otloss_llm.costs.hubs import hub_share
from otloss_llm.costs.number_cost import MixedCost
from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.data.blocks import PackedBlocks
from otloss_llm.data.questions import AnsweredQuestions, label_counts
from otloss_llm.losses.positions import check_objective
from otloss_llm.objectives import NumberDistance, Objective, Sum

logger = logging.getLogger(__name__)


def cost_for(
    objective: Objective,
    cost: TokenCost | str | None,
    *,
    rows: Callable[[], Tensor],
    vocab_size: int,
    tokenizer: Any,
    numbers: NumberSettings | None,
    seed: int,
) -> TokenCost | None:
    """The cost, made if its kind is named, and checked against the objective.

    Args:
        rows: returns the rows of the model's head, the same in all processes; called for an embedding cost.
    """
    if isinstance(cost, str):
        cost = choose_cost(
            Sum.of(objective).cost_kind if cost == "auto" else cost,
            embedding=lambda: EmbeddingCost(rows(), directions=None), tokenizer=tokenizer, vocab_size=vocab_size,
            numbers=numbers, seed=seed,
        )  # fmt: skip
    elif numbers is not None:
        raise ValueError(
            f'numbers={numbers!r} is for the costs "auto", "number" or "mixed", got {cost}; set it in that cost.'
        )
    check_objective(objective, cost, vocab_size)
    check_numbers(objective, cost)
    return cost


def check_numbers(objective: Objective, cost: TokenCost | None) -> None:
    """Raise ValueError if the objective needs the values of numbers, and the cost is one of an embedding."""
    total = Sum.of(objective)
    if total.terms_of(NumberDistance) and isinstance(cost, CosineCost):
        weight = total.weight_of(NumberDistance)
        raise ValueError(
            f"{objective!r} needs distances between numbers, which {type(cost).__name__} has not; give the trainer "
            f'cost="number" or NumberCost.from_tokenizer(tokenizer), or take EMO({weight}) with this cost.'
        )


def log_labels(cost: TokenCost | None, rows: Any) -> None:
    """Log what the cost says of the labels of rows of ours: near-duplicates among them, and hubs beside them."""
    embedding = cost.other if isinstance(cost, MixedCost) else cost
    if not isinstance(embedding, EmbeddingCost) or not isinstance(rows, PackedBlocks | AnsweredQuestions):
        return
    counts, duplicates = label_counts(rows, len(embedding.unit)), near_duplicates_in(embedding)
    if duplicates is not None:
        _log_duplicates_once(int(counts[duplicates.cpu()].sum()), int(counts.sum()))
    share = hub_share(embedding.unit, counts)
    if share is not None:
        _log_hubs_once(share, embedding.has_all_directions)


@functools.cache  # once for all arms and seeds of a comparison
def _log_duplicates_once(duplicates: int, labels: int) -> None:
    logger.warning(
        "%d of the %d labels of the training set (%.2f %%) are tokens of near-duplicate rows of the embedding, which "
        "cost 1 to every other token", duplicates, labels, 100 * duplicates / max(labels, 1),
    )  # fmt: skip


# Of all rows: 0.02 to 0.04 where EMO moved mass to rare tokens, at most 0.002 elsewhere (docs/reports/evidence.md).
HUB_SHARE = 0.01


@functools.cache
def _log_hubs_once(share: float, has_all_directions: bool) -> None:
    text = "by the cost a rare token is nearer to %.1f %% of draws of four labels than these are to each other"
    if share < HUB_SHARE or not has_all_directions:
        logger.info(text, 100 * share)
        return
    logger.warning(
        f"{text}; EMO moves mass to such tokens. Remove what rows share with EmbeddingCost(rows, directions=None) "
        "(--cost_embedding all-but-the-top), the default, and compare with MLE", 100 * share,
    )  # fmt: skip
