"""Near-duplicate rows of an embedding: which are found, what they cost, and what EMO then does at such labels."""

import pytest
import torch
from torch import Tensor

from otloss_llm import EmbeddingCost
from otloss_llm.costs.near_duplicates import CRITERIA, find_near_duplicates
from tests.otloss.oracles import cosine_matrix


def by_all_pairs(embedding: Tensor) -> Tensor:
    """The definition, over the whole matrix in float64."""
    costs = cosine_matrix(embedding).fill_diagonal_(9.0)
    return torch.stack([(costs <= cost).sum(1) >= others for cost, others in CRITERIA]).any(0)


def planted(rows: int, width: int) -> Tensor:
    """Rows that share a direction; among them an untrained cluster, and pairs, triples and fours of any nearness."""
    generator = torch.Generator().manual_seed(rows)
    made = torch.randn(rows, width, generator=generator) + 0.7 * torch.randn(width, generator=generator)
    order = torch.randperm(rows, generator=generator)
    cluster, rest = order[: rows // 10], order[rows // 10 :]
    made[cluster] = made[cluster[0]] + 0.05 * torch.randn(len(cluster), width, generator=generator)
    groups, size = rest[: 10 * (len(rest) // 20)].view(10, -1), len(rest) // 20
    noise = torch.logspace(-3, -0.5, size).unsqueeze(1)
    for of, row in ((0, 1), (2, 3), (2, 4), (5, 6), (5, 7), (5, 8)):  # a pair, a triple, a four
        made[groups[row]] = made[groups[of]] + noise * torch.randn(size, width, generator=generator)
    made[rest[-3:]] = 0.0
    return made


@pytest.mark.parametrize(("rows", "width"), [(500, 40), (3000, 24), (3000, 300)])
def test_it_finds_what_a_look_at_all_pairs_finds(rows: int, width: int) -> None:
    """Below and above the number of rows that are compared at once, with and without a sketch."""
    embedding = planted(rows, width)
    expected = by_all_pairs(embedding)
    assert rows / 8 < expected.sum() < rows / 2
    got = find_near_duplicates(torch.nn.functional.normalize(embedding, dim=1))
    assert not (got & ~expected).any()
    assert (expected & ~got).sum() <= 0.01 * expected.sum()  # a search by random directions may miss a few


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 8, 16])
def test_random_rows_are_left_alone_however_narrow(width: int) -> None:
    for rows in (2, 30, 300, 3000):
        assert not EmbeddingCost(
            torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
        ).zero_rows.any()


def test_near_duplicates_cost_1_to_every_other_token() -> None:
    embedding = torch.randn(60, 24, generator=torch.Generator().manual_seed(0))
    embedding[50:] = embedding[:50].mean(0) + 1e-5 * embedding[50:]  # as new tokens are made
    with pytest.warns(UserWarning, match=r'^10 of the 60 rows .* near_duplicates="keep" leaves them'):
        cost = EmbeddingCost(embedding)
    new = torch.arange(60) >= 50
    assert torch.equal(cost.near_duplicates, new)
    assert torch.equal(cost.to(torch.float64).near_duplicates, new)
    assert torch.equal(cost.dense()[new], 1 - torch.eye(60)[new])
    torch.testing.assert_close(cost.dense()[~new][:, ~new].double(), cosine_matrix(embedding)[~new][:, ~new])
    shuffled = cost.shuffled(torch.Generator().manual_seed(1))
    assert shuffled.near_duplicates.sum() == 10
    assert torch.equal(shuffled.near_duplicates, shuffled.zero_rows)
    kept = EmbeddingCost(embedding, near_duplicates="keep")
    torch.testing.assert_close(kept.dense().double(), cosine_matrix(embedding), rtol=0, atol=2e-6)
