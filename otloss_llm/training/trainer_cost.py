"""The transport cost of a trainer: chosen, checked, compared with a checkpoint's, and what it says of labels."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otloss.costs import CosineCost, Cost
from otloss_llm.costs.choice import NumberSettings, choose_cost, near_duplicates_in
from otloss_llm.costs.embedding import EmbeddingCost
from otloss_llm.costs.hubs import hub_share
from otloss_llm.costs.number_cost import MixedCost, NumberCost
from otloss_llm.costs.sharded import ShardedEmbeddingCost
from otloss_llm.costs.vocabulary import FewColumns, LabelRows, TokenCost, as_vocabulary_cost
from otloss_llm.losses.positions import check_objective
from otloss_llm.objectives import NumberDistance, Objective, Sum
from otloss_llm.training.batches import label_counts

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


def _embedding_part(cost: TokenCost | None) -> EmbeddingCost | None:
    embedding = cost.other if isinstance(cost, MixedCost) else cost
    return embedding if isinstance(embedding, EmbeddingCost) else None


# ---- checkpoints ----------------------------------------------------------------------------------------------------

SAMPLE_FILE = "transport_cost_sample.pt"
SAMPLED_TOKENS, SAME_COSTS = 64, 1e-3  # rows in bfloat16 and in float32 differ by less


def save_sample(cost: TokenCost | None, folder: str | Path) -> None:
    """Write the costs between some tokens beside a checkpoint; nothing for a cost that is sharded over processes."""
    if not isinstance(cost, ShardedEmbeddingCost):
        torch.save(_sample(cost), Path(folder) / SAMPLE_FILE)


def check_sample(cost: TokenCost | None, folder: str | Path) -> None:
    """Raise ValueError if the run of a checkpoint had other costs; a checkpoint of another trainer has no sample."""
    file = Path(folder) / SAMPLE_FILE
    if isinstance(cost, ShardedEmbeddingCost) or not file.is_file():
        return
    costs, recorded = _sample(cost), torch.load(file, weights_only=True)
    if costs.shape != recorded.shape:
        kind = None if cost is None else type(cost).__name__
        raise ValueError(
            f"the transport cost is {kind}, and the run that wrote {str(folder)!r} had a cost of another kind, or none "
            f"({len(recorded)} of its tokens were recorded, {len(costs)} expected); give the trainer the cost= of that "
            "run."
        )
    if not torch.allclose(costs, recorded, rtol=SAME_COSTS, atol=SAME_COSTS, equal_nan=True):
        difference = float((costs - recorded).abs().nan_to_num(torch.inf).max())
        raise ValueError(
            f"the transport cost differs by {difference:.2g} from the cost of the run that wrote {str(folder)!r}. "
            "A cost of an embedding comes from the trainer's model. Give it the model that the run began with "
            "(resuming loads the weights of the checkpoint), or the cost of that run as cost=."
        )


def _sample(cost: TokenCost | None) -> Tensor:
    """The costs between some of the tokens that have any (number tokens of a cost of numbers); (0, 0) for None."""
    if cost is None:
        return torch.empty(0, 0, device="cpu")
    tokens = torch.arange(cost.shape[0], device=cost.device)
    tokens = tokens[as_vocabulary_cost(cost).positions(tokens, tokens >= 0)]
    count = min(SAMPLED_TOKENS, len(tokens))
    places = torch.linspace(0, len(tokens) - 1, count, dtype=torch.float32, device="cpu").long()
    ids = tokens[places.to(tokens.device)]
    rows = cost.rows(ids) if isinstance(cost, Cost | NumberCost) else _rows(cost.for_labels(ids), ids, cost.shape[1])
    return rows[:, ids].float().cpu()


def _rows(costs: LabelRows | FewColumns, ids: Tensor, vocab: int) -> Tensor:
    if isinstance(costs, LabelRows):
        return costs.rows(ids, None)
    rows = costs.costs_elsewhere[costs.which].unsqueeze(1).repeat(1, vocab)
    return rows.index_copy(1, costs.columns, costs.costs[costs.which])


# ---- what the cost says of the training set -------------------------------------------------------------------------


def log_labels(cost: TokenCost | None, rows: Any, *, shifted: bool) -> None:
    """Log what the cost says of the labels of rows: near-duplicates among them, and hubs beside them.

    Args:
        rows: a data set with a column of labels; nothing is said of others.
        shifted: whether the first label of each row is not predicted.
    """
    embedding = _embedding_part(cost)
    counts = None if embedding is None else label_counts(rows, embedding.shape[0], shifted=shifted)
    if embedding is None or counts is None:
        return
    duplicates = near_duplicates_in(embedding)
    if duplicates is not None:
        _log_duplicates_once(int(counts[duplicates.cpu()].sum()), int(counts.sum()))
    share = hub_share(embedding.unit, counts)
    if share is not None:
        _log_hubs_once(share, embedding.has_all_directions)


@functools.cache  # once for all arms and seeds of a comparison
def _log_duplicates_once(duplicates: int, labels: int) -> None:
    logger.warning(
        "%d of the first %d labels of the training set (%.2f %%) are tokens of near-duplicate rows of the embedding, "
        "which cost 1 to every other token", duplicates, labels, 100 * duplicates / max(labels, 1),
    )  # fmt: skip


# A share of all rows: 0.02 to 0.04 where EMO moved mass to rare tokens, at most 0.002 elsewhere
# (docs/reports/evidence.md).
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
