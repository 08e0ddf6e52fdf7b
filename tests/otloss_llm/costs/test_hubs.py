"""Hubs of an embedding: planted ones are found, orthogonal rows have none, and the share is a share of all draws."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from otloss_llm import EmbeddingCost
from otloss_llm.costs import hubs
from otloss_llm.costs.hubs import hub_share


def planted(labels: int = 400, rare: int = 10) -> tuple[Tensor, Tensor]:
    """Rows of labels that share a direction, which rare tokens have alone; and their counts."""
    rows = torch.zeros(labels + rare, labels + rare + 1)
    rows[:, 0] = 1.0
    rows[torch.arange(labels + rare), 1 + torch.arange(labels + rare)] = torch.tensor([2.0] * labels + [0.3] * rare)
    return rows, torch.tensor([10.0] * labels + [0.0] * rare)


def test_a_planted_hub_is_found_and_gone_without_the_leading_directions() -> None:
    rows, counts = planted()
    assert hub_share(EmbeddingCost(rows).unit, counts) > 0.95  # the rest are draws with a label twice
    assert hub_share(EmbeddingCost(rows, directions=None).unit, counts) == 0.0
    assert hub_share(EmbeddingCost(rows).unit, torch.ones(len(rows))) == 0.0  # no token is rare


def test_the_share_is_that_of_all_draws() -> None:
    """All 6^4 ordered draws of four labels, each with its probability."""
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(8, 3)) + 0.6
    counts = np.array([50, 30, 20, 10, 5, 5, 0.1, 0.0])
    cost = EmbeddingCost(torch.from_numpy(rows), near_duplicates="keep").dense().numpy()
    p, expected = counts / counts.sum(), 0.0
    for draw in itertools.product(range(8), repeat=4):
        mean = cost[list(draw)].mean(0)
        if mean[[6, 7]].min() < mean[list(draw)].min() - 1e-9:
            expected += float(np.prod(p[list(draw)]))
    unit = torch.nn.functional.normalize(torch.from_numpy(rows), dim=1)
    actual = hub_share(unit, torch.from_numpy(counts))
    assert 0.02 < expected < 0.9
    assert actual == pytest.approx(expected, abs=4 * (expected * (1 - expected) / hubs.DRAWS) ** 0.5)
