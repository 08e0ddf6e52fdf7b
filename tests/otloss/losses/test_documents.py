"""Distances of documents and of n-grams against linear programs, and pruned searches against all pairs."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from otloss import document_search
from otloss.losses import document_distance, ngram_distance
from tests.errors import raising
from tests.otloss.draws import normal
from tests.otloss.oracles import as_double, linprog_value

IDS_P = torch.tensor([[0, 3, 3, -1], [5, -100, 2, 1]])
IDS_Q = torch.tensor([[4, 1, -1, -1, -1], [2, 5, 0, 4, -1]])
WEIGHTS_P = torch.tensor([[0.5, 0.19, 0.31, 0.0], [0.13, 0.0, 0.56, 0.31]], dtype=torch.float64)
WEIGHTS_Q = torch.tensor([[0.7, 0.3, 0.0, 0.0, 0.0], [0.41, 0.27, 0.21, 0.11, 0.0]], dtype=torch.float64)


def solved(p: np.ndarray, q: np.ndarray, embedding: np.ndarray) -> float:
    """Return the distance of weights over the whole vocabulary."""
    return linprog_value(p, q, np.linalg.norm(embedding[:, None] - embedding, axis=-1))


def spread(weights: torch.Tensor, ids: torch.Tensor, size: int = 6) -> np.ndarray:
    return torch.zeros(2, size, dtype=torch.float64).scatter_add(1, ids.clamp(min=0), weights).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_against_linear_programs(dtype: torch.dtype) -> None:
    embedding = normal(6, 3)
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


def test_a_pruned_search_finds_what_all_pairs_find() -> None:
    generator = np.random.default_rng(0)
    corpus = generator.poisson(0.15, (40, 30)) + np.eye(40, 30, dtype=int)
    corpus[7] = 0  # a document without words
    corpus[[11, 12]] = corpus[10]  # ties
    corpus[30:, 0] += 1
    queries = np.concatenate([corpus[10:11], generator.poisson(0.2, (2, 30)) + np.eye(30, dtype=int)[:2]])
    embedding = normal(30, 5)
    distances = np.full((3, 40), np.inf)
    for row, column in np.ndindex(3, 40):
        if column != 7:
            p, q = queries[row] / queries[row].sum(), corpus[column] / corpus[column].sum()
            distances[row, column] = solved(p, q, embedding.numpy())
    for k in (1, 5, 39):
        actual = document_search(torch.from_numpy(queries), csr_array(corpus), embedding, k=k)
        np.testing.assert_allclose(actual.distances, np.sort(distances, 1)[:, :k], atol=1e-7)
        chosen = np.take_along_axis(distances, actual.indices.numpy(), 1)
        np.testing.assert_allclose(chosen, actual.distances, atol=1e-7)
        assert actual.indices[0, :3].tolist() == [10, 11, 12][:k]
        assert ((actual.share_solved > 0) & (actual.share_solved <= 39 / 40)).all()
    for query in (torch.from_numpy(queries[1]), csr_array(queries)[1]):  # a row of a sparse array has one axis
        one = document_search(query, torch.from_numpy(corpus), embedding.float(), k=k)
        torch.testing.assert_close(one.distances, actual.distances[1], rtol=1e-6, atol=1e-6)
        assert one.share_solved.shape == ()


DOCUMENTS = {"p": WEIGHTS_P, "q": WEIGHTS_Q, "embedding": normal(6, 3), "ids_p": IDS_P, "ids_q": IDS_Q}
SEARCH = {"query": torch.ones(6), "corpus": torch.eye(6)[:3], "embedding": normal(6, 3), "k": 2}
test_bad_input = raising(
    (document_distance, {"ids_p": IDS_P + 3}, "ids_p holds 8, expected ids below 6"),
    (document_distance, {"ids_p": IDS_P.roll(1, 1)}, "p has weight 0.5 at .0, 0., where ids_p is negative, which"),
    (
        document_distance,
        {"ids_p": IDS_P[..., :0], "p": None},
        r"cost matrix has shape .*0, \d\), expected .* n, m >= 1",
    ),
    (document_search, {"k": 0}, "k is 0 and the corpus has shape .3, 6., 3 documents with words"),
    (document_search, {"corpus": -torch.ones(3, 6)}, "corpus holds -1.0, expected weights >= 0"),
    (document_search, {"embedding": 1e160 * SEARCH["embedding"].double()}, "overflow torch.float64; .* rescale them"),
    call=lambda f, change: f(**((DOCUMENTS if f is document_distance else SEARCH) | change)),
)
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(3, 6, 4)), RNG.normal(size=(3, 5, 4))
WORDS = [6, 3, 5], [4, 5, 3]  # so many words in each text; what follows is padding


def by_hand(x: np.ndarray, y: np.ndarray, n: int, order_weight: float) -> float:
    """Squared distances between concatenated n-grams over n, and between their places."""
    a, b = (np.stack([t[i : i + n].ravel() for i in range(len(t) - n + 1)]) for t in (x, y))
    cost = ((a[:, None] - b[None]) ** 2).sum(-1) / n
    places = [(np.arange(len(t)) + 0.5) / len(t) for t in (a, b)]
    cost += order_weight * np.abs(np.subtract.outer(*places))
    return linprog_value(np.full(len(a), 1 / len(a)), np.full(len(b), 1 / len(b)), cost)


@pytest.mark.parametrize(("n", "order_weight"), [(1, 0.0), (1, 3.0), (2, 0.0), (3, 3.0)])
def test_against_linear_programs_over_concatenated_ngrams(n: int, order_weight: float) -> None:
    x, y = torch.full((3, 6, 4), torch.nan).double(), torch.full((3, 5, 4), torch.nan).double()
    masks = []
    for padded, texts, words in ((x, X, WORDS[0]), (y, Y, WORDS[1])):
        for k, count in enumerate(words):
            first = k % 2  # padding on either side
            padded[k, first : first + count] = as_double(texts[k, :count])[: padded.shape[1] - first]
        masks.append(~padded.isnan().any(-1))
    settings = {"n": n, "order_weight": order_weight, "metric": "sqeuclidean"}
    actual = ngram_distance(x, y, mask_x=masks[0], mask_y=masks[1], **settings)  # type: ignore[arg-type]
    for k in range(3):
        a, b = x[k, masks[0][k]], y[k, masks[1][k]]
        expected = by_hand(a.numpy(), b.numpy(), n, order_weight)
        assert actual[k].item() == pytest.approx(expected, rel=1e-6)
        assert ngram_distance(a, b, **settings).item() == pytest.approx(expected, rel=1e-6)  # type: ignore[arg-type]
    each = ngram_distance(as_double(X).unsqueeze(1), as_double(Y), n=2)  # leading axes broadcast
    assert each.shape == (3, 3)
    torch.testing.assert_close(each.diagonal(), ngram_distance(as_double(X), as_double(Y), n=2))


def test_single_words_are_blind_to_the_order_and_ngrams_are_not() -> None:
    x = torch.randn(4, 8, 5, generator=torch.Generator().manual_seed(0))
    shuffled = x[:, torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])]
    torch.testing.assert_close(ngram_distance(x, shuffled, n=1), torch.zeros(4), atol=1e-6, rtol=0)
    for options in ({"n": 1, "order_weight": 0.5}, {"n": 2}, {"n": 3}):
        assert (ngram_distance(x, shuffled, **options) > 0.05).all()
        torch.testing.assert_close(ngram_distance(x, x, **options), torch.zeros(4), atol=1e-6, rtol=0)


A, B = torch.ones(2, 4, 3), torch.ones(2, 4, 3)
SHORT = torch.tensor([[True] * 4, [True, False, True, True]])
test_bad_ngrams = raising(
    (lambda: ngram_distance(A, B, n=3, mask_y=SHORT), r"text \(1,\) of y has no 3 neighbouring"),
    (lambda: ngram_distance(A, B, n=1, mask_x=SHORT.float()), TypeError, "mask_x has dtype torch.float32"),
    (lambda: ngram_distance(1e20 * A.float(), B.float(), n=1, metric="euclidean"), "overflow torch.float32; .* them"),
)
