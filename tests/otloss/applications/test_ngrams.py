"""Distances of n-grams against linear programs over explicit n-grams and finite differences; blindness to order."""

import numpy as np
import pytest
import torch

from otloss.losses import ngram_distance
from tests.errors import raising
from tests.otloss.oracles import as_double, linprog_value

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(3, 6, 4)), RNG.normal(size=(3, 5, 4))
WORDS = [6, 3, 5], [4, 5, 3]  # of each text; the rest is padding


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


def test_single_words_are_blind_to_the_order_and_ngrams_are_not() -> None:
    x = torch.randn(4, 8, 5, generator=torch.Generator().manual_seed(0))
    shuffled = x[:, torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])]
    torch.testing.assert_close(ngram_distance(x, shuffled, n=1), torch.zeros(4), atol=1e-6, rtol=0)
    assert (ngram_distance(x, shuffled, n=1, order_weight=0.5) > 0.05).all()
    for n in (2, 3):
        assert (ngram_distance(x, shuffled, n=n) > 0.1).all()
        torch.testing.assert_close(ngram_distance(x, x, n=n), torch.zeros(4), atol=1e-6, rtol=0)
    # The bigrams of "a b a c a" are those of its reverse, up to their inner order; places tell the two apart.
    a, b, c = torch.eye(3)
    text = torch.stack([a, b, a, c, a])
    rolled = torch.stack([a, c, a, b, a])
    assert ngram_distance(text, rolled, n=2) == 0
    assert ngram_distance(text, rolled, n=2, order_weight=1.0) > 0.1


def test_leading_axes_broadcast() -> None:
    x, y = as_double(X).unsqueeze(1), as_double(Y)
    actual = ngram_distance(x, y, n=2)
    assert actual.shape == (3, 3)
    torch.testing.assert_close(actual.diagonal(), ngram_distance(x[:, 0], y, n=2))
    assert ngram_distance(x.bfloat16(), y.bfloat16(), n=2).dtype == torch.bfloat16


A, B = torch.ones(2, 4, 3), torch.ones(2, 4, 3)
SHORT = torch.tensor([[True] * 4, [True, False, True, True]])


test_bad_input = raising(
    (lambda: ngram_distance(A, B, n=0), ValueError, "n is 0"),
    (lambda: ngram_distance(A, B, n=5), ValueError, "x has 4 words, expected at least n = 5"),
    (lambda: ngram_distance(A, B, n=3, mask_y=SHORT), ValueError, r"text \(1,\) of y has no 3 neighbouring"),
    (lambda: ngram_distance(A, B, n=1, mask_x=SHORT.float()), TypeError, "mask_x has dtype torch.float32"),
    (lambda: ngram_distance(A, B[..., :2], n=1), ValueError, "x has 3 coordinates"),
    (lambda: ngram_distance(A, B.expand(3, 2, 4, 3)[:, :1].expand(3, 5, 4, 3), n=1), ValueError, "broadcast"),
)
