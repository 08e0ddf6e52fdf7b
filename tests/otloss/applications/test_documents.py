"""Word mover's distance against linear programs, and pruned searches against all pairs."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from otloss import document_search
from otloss.applications.documents import _bags, _lower_bounds, _word_costs
from otloss.costs import PointCost
from otloss.losses import document_distance
from tests.errors import raising
from tests.otloss.oracles import linprog_value

IDS_P = torch.tensor([[0, 3, 3, -1], [5, -100, 2, 1]])
IDS_Q = torch.tensor([[4, 1, -1, -1, -1], [2, 5, 0, 4, -1]])
WEIGHTS_P = torch.tensor([[0.5, 0.19, 0.31, 0.0], [0.13, 0.0, 0.56, 0.31]], dtype=torch.float64)
WEIGHTS_Q = torch.tensor([[0.7, 0.3, 0.0, 0.0, 0.0], [0.41, 0.27, 0.21, 0.11, 0.0]], dtype=torch.float64)


def vectors(count: int = 6, axes: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, axes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def solved(p: np.ndarray, q: np.ndarray, embedding: np.ndarray) -> float:
    """Of weights over the whole vocabulary."""
    return linprog_value(p, q, np.linalg.norm(embedding[:, None] - embedding, axis=-1))


def spread(weights: torch.Tensor, ids: torch.Tensor, size: int = 6) -> np.ndarray:
    return torch.zeros(2, size, dtype=torch.float64).scatter_add(1, ids.clamp(min=0), weights).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_against_linear_programs(dtype: torch.dtype) -> None:
    embedding = vectors()
    p, q = spread(WEIGHTS_P, IDS_P), spread(WEIGHTS_Q, IDS_Q)
    expected = [solved(p[k], q[k], embedding.numpy()) for k in range(2)]
    padded = document_distance(WEIGHTS_P.to(dtype), WEIGHTS_Q.to(dtype), embedding.to(dtype), ids_p=IDS_P, ids_q=IDS_Q)
    assert padded.dtype == dtype
    np.testing.assert_allclose(padded, expected, rtol=1e-6)
    whole = document_distance(torch.from_numpy(p).to(dtype), WEIGHTS_Q.to(dtype), embedding.to(dtype), ids_q=IDS_Q)
    np.testing.assert_allclose(whole, expected, rtol=1e-6)
    one_query = document_distance(None, None, embedding, ids_p=IDS_P[0], ids_q=IDS_Q)
    shares = spread((IDS_Q >= 0) / (IDS_Q >= 0).sum(1, keepdim=True).double(), IDS_Q)
    by_hand = [solved(np.array([1, 0, 0, 2, 0, 0]) / 3, share, embedding.numpy()) for share in shares]
    np.testing.assert_allclose(one_query, by_hand, rtol=1e-12)


def test_kernels_against_their_reference_implementations() -> None:
    ids_p, ids_q = torch.randint(-1, 50, (40, 1, 7)), torch.randint(-1, 50, (30, 9))
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        embedding = vectors(50, 20).to(dtype)
        expected = PointCost(embedding[ids_p.clamp(min=0)], embedding[ids_q.clamp(min=0)], metric="euclidean").dense()
        inside = (ids_p >= 0).unsqueeze(-1) & (ids_q >= 0).unsqueeze(-2)
        actual = _word_costs(embedding, ids_p, ids_q)
        torch.testing.assert_close(actual, expected * inside, rtol=tolerance, atol=tolerance)
    table, p = torch.rand(7, 50, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
    documents, _ = _bags("corpus", torch.rand(30, 50) * (torch.rand(30, 50) < 0.2), 50)
    bounds = _lower_bounds(table.numpy(), p.numpy(), documents)
    for k in range(30):
        words, masses = (torch.from_numpy(part) for part in documents.row(k))
        costs = table[:, words]
        f, g = costs.amin(1), costs.amin(0)
        from_p = p @ f + masses @ (costs - f[:, None]).amin(0)
        from_q = masses @ g + p @ (costs - g).amin(1)
        assert bounds[k] == pytest.approx(float(torch.maximum(from_p, from_q)), rel=1e-12)


def test_a_pruned_search_finds_what_all_pairs_find() -> None:
    generator = np.random.default_rng(0)
    corpus = generator.poisson(0.15, (40, 30)) + np.eye(40, 30, dtype=int)
    corpus[7] = 0  # a document without words
    corpus[[11, 12]] = corpus[10]  # ties
    corpus[30:, 0] += 1
    queries = np.concatenate([corpus[10:11], generator.poisson(0.2, (2, 30)) + np.eye(30, dtype=int)[:2]])
    embedding = vectors(30, 5)
    distances = np.full((3, 40), np.inf)
    for row, column in np.ndindex(3, 40):
        if column != 7:
            p, q = queries[row] / queries[row].sum(), corpus[column] / corpus[column].sum()
            distances[row, column] = solved(p, q, embedding.numpy())
    for k in (1, 5, 39):
        actual = document_search(torch.from_numpy(queries), csr_array(corpus), embedding, k=k)
        np.testing.assert_allclose(actual.distances, np.sort(distances, 1)[:, :k], atol=1e-7)
        np.testing.assert_allclose(
            np.take_along_axis(distances, actual.indices.numpy(), 1), actual.distances, atol=1e-7
        )
        assert actual.indices[0, :3].tolist() == [10, 11, 12][:k]
        assert ((actual.share_solved > 0) & (actual.share_solved <= 39 / 40)).all()
    one = document_search(torch.from_numpy(queries[1]), torch.from_numpy(corpus), embedding.float(), k=k)
    torch.testing.assert_close(one.distances, actual.distances[1], rtol=1e-6, atol=1e-6)
    assert one.share_solved.shape == ()


DOCUMENTS = {"p": WEIGHTS_P, "q": WEIGHTS_Q, "embedding": vectors(), "ids_p": IDS_P, "ids_q": IDS_Q}
SEARCH = {"query": torch.ones(6), "corpus": torch.eye(6)[:3], "embedding": vectors(), "k": 2}


test_bad_input = raising(
    (document_distance, {"ids_p": IDS_P + 3}, "ids_p holds 8, expected ids below 6"),
    (document_distance, {"ids_p": IDS_P.roll(1, 1)}, "p has weight 0.5 at .0, 0., where ids_p is negative, which"),
    (document_distance, {"p": None, "ids_p": None}, "p and ids_p are both None"),
    (document_distance, {"p": None, "ids_p": torch.full((2, 3), -1)}, "mass"),
    (document_search, {"k": 0}, "k is 0 and the corpus has shape .3, 6., 3 documents with words"),
    (document_search, {"query": torch.zeros(2, 6)}, "query 0 has no words"),
    (document_search, {"corpus": csr_array(np.ones((3, 5)))}, "corpus has shape .3, 5., expected a last axis of 6"),
    (document_search, {"corpus": -torch.ones(3, 6)}, "corpus holds -1.0, expected weights >= 0"),
    call=lambda f, change: f(**((DOCUMENTS if f is document_distance else SEARCH) | change)),
)
