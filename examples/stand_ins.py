"""Data for examples whose files are missing: a surface by a formula, and what installed packages have."""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import torch
from docstring_corpus import docstring_corpus
from torch import Tensor

# The parts of SciPy and scikit-learn whose docstrings are the six classes of texts.
PARTS = ("scipy.stats", "scipy.sparse", "scipy.signal", "scipy.optimize", "sklearn.ensemble", "sklearn.cluster")
DOCSTRINGS = "sentences of the docstrings of SciPy and scikit-learn, with vectors of the words' co-occurrences"


def surface(count: int = 20_000) -> Tensor:
    """Points (count, 3) of a closed surface without symmetry: a sphere with an ear, a snout, a tail and a dent."""
    k = torch.arange(count) + 0.5
    z, angle = 1 - 2 * k / count, k * torch.pi * (1 + 5**0.5)  # Fibonacci's points
    u = torch.stack([(1 - z * z).sqrt() * angle.cos(), (1 - z * z).sqrt() * angle.sin(), z], dim=1)
    places = torch.tensor([[0.3, 0.4, 0.87], [0.95, 0.1, 0.3], [-0.8, 0.3, -0.5], [0.1, -0.99, 0.1]])
    heights, widths = torch.tensor([0.9, 0.5, 0.35, -0.3]), torch.tensor([20.0, 6.0, 40.0, 4.0])
    radius = 1 + (heights * (widths * (u @ places.T - 1)).exp()).sum(1, keepdim=True)
    return u * radius * torch.tensor([1.0, 0.7, 0.85])


def graded_diabetes() -> tuple[np.ndarray, np.ndarray]:
    """Disease progression after one year (scikit-learn), in five grades of equal size."""
    from sklearn.datasets import load_diabetes

    X, progress = load_diabetes(return_X_y=True)
    return X, np.searchsorted(np.quantile(progress, [0.2, 0.4, 0.6, 0.8]), progress)


def classed_sentences() -> list[tuple[int, str]]:
    """Sentences of 5 to 20 words, and the part of `PARTS` that each is from."""
    sentences_of_parts = []
    for k, part in enumerate(PARTS):
        sentences = chain.from_iterable(re.split(r"[.!?:;](?:\s|$)", text) for text in docstring_corpus(part))
        texts = (re.findall(r"[a-z]+", sentence.lower()) for sentence in sentences)
        sentences_of_parts += [(k, " ".join(words)) for words in texts if 5 <= len(words) <= 20]
    return list(dict.fromkeys(sentences_of_parts))


def classed_questions(count: int = 5000) -> tuple[tuple[int, ...], tuple[str, ...], np.ndarray, np.ndarray]:
    """Classes and texts of `count` of the sentences in a random order, and the words and vectors of all."""
    sentences = classed_sentences()
    words, vectors = word_vectors([text for _, text in sentences])
    order = np.random.default_rng(0).permutation(len(sentences))[:count]
    classes, texts = zip(*(sentences[k] for k in order), strict=True)
    return classes, texts, words, vectors


def word_vectors(sentences: list[str], size: int = 25, fewest: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Words that occur in some sentences, the most frequent first, and vectors (V, size) of their co-occurrences.

    The vectors belong to the largest singular values of the positive pointwise mutual information.
    """
    from scipy.sparse import csr_array
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import CountVectorizer

    often = Counter(word for sentence in sentences for word in set(sentence.split()))
    words = [word for word, times in often.most_common() if times >= fewest and len(word) > 1]
    counts = csr_array(CountVectorizer(vocabulary=words, binary=True).transform(sentences), dtype=float)
    pairs = (counts.T @ counts).tocoo()
    single = counts.sum(0)
    shared = np.log(pairs.data * len(sentences) / (single[pairs.row] * single[pairs.col]))
    information = csr_array((np.maximum(shared, 0), (pairs.row, pairs.col)), shape=pairs.shape)
    vectors = TruncatedSVD(size, random_state=0).fit_transform(information)
    return np.array(words), (vectors / vectors.std()).astype(np.float32)


def small_model(steps: int = 150) -> tuple[Any, Any]:
    """A Llama and its tokenizer, trained on docstrings for some steps of 8 x 128 tokens."""
    from emo_demo import BLOCK, small_llama

    from otloss_llm.data import train_bpe_tokenizer

    texts = list(chain.from_iterable(map(docstring_corpus, PARTS)))
    tokenizer = train_bpe_tokenizer(texts, 1024)
    model, generator = small_llama(len(tokenizer)), torch.Generator().manual_seed(0)
    ids_of_texts = tokenizer(texts, verbose=False)["input_ids"]
    stream = [token for ids in ids_of_texts for token in (*ids, tokenizer.eos_token_id)]
    blocks = torch.tensor(stream[: len(stream) // BLOCK * BLOCK]).view(-1, BLOCK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        ids = blocks[torch.randint(len(blocks), (8,), generator=generator)]
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval(), tokenizer
