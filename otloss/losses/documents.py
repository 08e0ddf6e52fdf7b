"""Documents as clouds of word vectors: their distance, and the nearest ones of a corpus.

The word mover's distance is the exact transport between the words of two documents, p and q their shares:

    D(p, q) = min <C, P>  over  P >= 0,  P 1 = p,  P^T 1 = q,      C_ij = |e_i - e_j|

A search needs one product of the query's words with the vocabulary for the costs to all documents. Documents are
ordered by a lower bound (`documents_numba`) and solved in batches, until the next bound exceeds the k-th distance.

Source: M. Kusner et al., From word embeddings to document distances, ICML 2015.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._autograd import check_no_transform
from otloss._checks import (
    broadcast_shape,
    check_broadcast,
    check_cloud,
    check_finite,
    check_floating,
    check_integers,
    check_last_axis,
    check_tensor,
    check_whole,
)
from otloss._numba import may_run_on, threads
from otloss._public import public
from otloss.costs import DenseCost, PointCost
from otloss.costs.cost import arithmetic_dtype, makes_graph
from otloss.solvers.closed_forms.line import finite_in
from otloss.solvers.exact.optimum import solve_arrays
from otloss.solvers.solve import emd

# Documents per call of the solver: enough that the time of a call does not matter, few enough that little is wasted.
_BATCH = 32
# Rounding of a bound, relative to the distance it is compared with.
_ROUNDING = 1e-9


@public
def document_distance(
    p: Float[Tensor, "*batch n"] | None,
    q: Float[Tensor, "*batch m"] | None,
    embedding: Float[Tensor, "vocabulary d"],
    *,
    ids_p: Int[Tensor, "*batch n"] | None = None,
    ids_q: Int[Tensor, "*batch m"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Return the word mover's distance of pairs of documents, exactly.

    Args:
        p, q: (..., n) and (..., m) weights of the words, of equal mass; None for equal shares of all words with an id
            >= 0, which is the frequency of words where `ids` is a sequence with repetitions. Leading axes broadcast.
        embedding: (V, d), the vector of each word.
        ids_p, ids_q: (..., n) and (..., m) rows of `embedding`; padding is negative, and has weight 0. None if the
            weights are over the whole vocabulary, (..., V).

    Returns:
        (...), in the unit of the embedding times the unit of the mass. Differentiable once in p, q and the embedding.

    Raises:
        TypeError: if weights or embedding are not floating tensors, or ids not integers.
        ValueError: if an id is not below V, padding has weight, both weights and ids of a side are None, shapes do not
            fit, or for what `emd` raises it: masses that differ, as where one document has no words.

    Source:
        M. Kusner et al., From word embeddings to document distances, ICML 2015.

    Example:
        >>> embedding = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
        >>> document_distance(None, None, embedding, ids_p=torch.tensor([0, 0, -1]), ids_q=torch.tensor([1, 2]))
        tensor(3.)
    """
    check_cloud("embedding", embedding)
    if embedding.dim() != 2:
        raise ValueError(f"embedding has shape {tuple(embedding.shape)}, expected (V, d): one vector per word.")
    p, ids_p = _weights_and_ids("p", p, ids_p, embedding)
    q, ids_q = _weights_and_ids("q", q, ids_q, embedding)
    check_broadcast(ids_p=ids_p.shape[:-1], ids_q=ids_q.shape[:-1])
    return emd(p, q, DenseCost(_word_costs(embedding, ids_p, ids_q)))


def _weights_and_ids(name: str, weights: Any, ids: Any, embedding: Tensor) -> tuple[Tensor, Tensor]:
    if ids is None:
        if weights is None:
            raise ValueError(
                f"{name} and ids_{name} are both None, expected the ids of the words, their weights, or both."
            )
        check_last_axis(name, check_floating(name, weights), len(embedding))
        return weights, torch.arange(len(embedding), device=embedding.device)
    check_integers(f"ids_{name}", ids)
    if ids.dim() == 0:
        raise ValueError(f"ids_{name} has no axes, expected (..., words).")
    if ids.numel() and int(ids.max()) >= len(embedding):
        raise ValueError(
            f"ids_{name} holds {int(ids.max())}, expected ids below {len(embedding)}, the rows of the embedding, and "
            "negative ones for padding."
        )
    padding = ids < 0
    if weights is None:
        count = (~padding).sum(-1, keepdim=True)
        return ((~padding).double() / count.clamp(min=1)).to(embedding.dtype), ids
    check_last_axis(name, check_floating(name, weights), ids.shape[-1])
    heavy = padding & (weights.detach() != 0)
    if heavy.any():
        at = tuple(int(k) for k in heavy.nonzero()[0])
        raise ValueError(
            f"{name} has weight {float(weights.detach().expand(heavy.shape)[at]):g} at {at}, where ids_{name} is "
            "negative, which means padding; set it to 0, or give the word's id."
        )
    return weights, ids


def _word_costs(embedding: Tensor, ids_p: Tensor, ids_q: Tensor) -> Float[Tensor, "*batch n m"]:
    if makes_graph(embedding) or not may_run_on(embedding, ids_p, ids_q):
        x, y = (embedding[ids.clamp(min=0)] for ids in (ids_p, ids_q))
        return PointCost(x, y, metric="euclidean").dense()
    from otloss.losses.documents_numba import answers, pair_distances

    vectors = embedding.detach().to(arithmetic_dtype(embedding.dtype)).contiguous()
    batch = broadcast_shape(ids_p.shape[:-1], ids_q.shape[:-1])
    n, m = ids_p.shape[-1], ids_q.shape[-1]
    sides = [
        (ids[None] if ids.dim() == 1 else ids.expand(*batch, ids.shape[-1]).flatten(0, -2)).long().contiguous()
        for ids in (ids_p, ids_q)
    ]
    table, words_p, words_q = (t.numpy() for t in (vectors, *sides))
    costs = answers(words_p, words_q, table.dtype)
    one_thread = costs.size * table.shape[1] < threads.MIN_ENTRIES
    threads.run_on_threads(pair_distances, len(costs), (table, words_p, words_q, costs), one_thread=one_thread)
    return torch.from_numpy(costs).reshape(*batch, n, m)


@dataclass(frozen=True)
class NearestDocuments:
    """What `document_search` found.

    Attributes:
        indices: (..., k) of the nearest documents, the nearest first; the smaller index first at equal distances.
        distances: (..., k), their word mover's distances, in float64.
        share_solved: (...), share of the corpus that was solved exactly; bounds ruled out the rest.
    """

    indices: Int[Tensor, "*queries k"]
    distances: Float[Tensor, "*queries k"]
    share_solved: Float[Tensor, "*queries"]


@dataclass(frozen=True)
class _Bags:
    """Documents as rows of (starts, words, masses), the masses of each document with sum 1."""

    starts: np.ndarray
    words: np.ndarray
    masses: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        return self.words[self.starts[k] : self.starts[k + 1]], self.masses[self.starts[k] : self.starts[k + 1]]

    def padded(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(B, m) words and masses of these documents; padding is word 0 of mass 0."""
        lengths = self.starts[rows + 1] - self.starts[rows]
        place = np.arange(lengths.max())
        inside = place < lengths[:, None]
        at = np.where(inside, self.starts[rows][:, None] + place, 0)
        return np.where(inside, self.words[at], 0), np.where(inside, self.masses[at], 0.0)


@public
def document_search(query: Any, corpus: Any, embedding: Float[Tensor, "vocabulary d"], *, k: int) -> NearestDocuments:
    """Return the k documents of a corpus that are nearest to each query by the word mover's distance, exactly.

    Args:
        query: (V,) or (..., V) counts or weights of words, a tensor or a scipy sparse matrix (as `CountVectorizer` of
            scikit-learn returns). Each document is divided by its sum.
        corpus: (N, V) counts or weights of words, as `query`. A document without words is never found.
        embedding: (V, d), the vector of each word.
        k: from 1 to the number of documents with words.

    Returns:
        A `NearestDocuments`, without a graph, computed in float64 on the CPU. The answer is the same as by solving all
        pairs.

    Raises:
        TypeError: if an argument is not a tensor (or a sparse matrix).
        ValueError: if shapes do not fit, a weight is negative or not finite, a query has no words, or k is too large.

    Source:
        M. Kusner et al., From word embeddings to document distances, ICML 2015, section 4: prefetch and prune.

    Example:
        >>> embedding = torch.tensor([[0.0], [1.0], [5.0]])
        >>> corpus = torch.tensor([[0, 0, 2], [1, 1, 0], [2, 0, 1]])
        >>> document_search(torch.tensor([1, 0, 0]), corpus, embedding, k=2).distances
        tensor([0.5000, 1.6667], dtype=torch.float64)
    """
    check_no_transform()
    check_cloud("embedding", embedding)
    queries, batch = _bags("query", query, len(embedding))
    documents, shape = _bags("corpus", corpus, len(embedding))
    with_words = np.flatnonzero(np.diff(documents.starts))
    check_whole("k", k)
    if len(shape) != 1 or not 1 <= k <= len(with_words):
        raise ValueError(
            f"k is {k} and the corpus has shape {(*shape, len(embedding))}, {len(with_words)} documents with words; "
            "expected (N, V), and k from 1 to the documents with words."
        )
    used, words = np.unique(documents.words, return_inverse=True)
    documents = _Bags(documents.starts, words, documents.masses)
    vectors = embedding.detach().to("cpu", torch.float64)
    vocabulary = vectors[torch.from_numpy(used)]
    results = [_search(queries.row(i), documents, with_words, vectors, vocabulary, k) for i in range(len(queries))]
    indices, distances, problem_counts = (np.stack(part) for part in zip(*results, strict=True)) if results else (
        np.empty((0, k), int), np.empty((0, k)), np.empty(0),
    )  # fmt: skip
    return NearestDocuments(
        torch.from_numpy(indices).reshape(*batch, k),
        torch.from_numpy(distances).reshape(*batch, k),
        torch.from_numpy(problem_counts).reshape(batch),
    )


def _bags(name: str, weights: Any, vocabulary: int) -> tuple[_Bags, tuple[int, ...]]:
    """Return the documents, and the axes before the vocabulary."""
    from scipy.sparse import csr_array

    if hasattr(weights, "tocsr"):
        shape, batch = weights.shape, weights.shape[:-1]
        rows = csr_array(weights.reshape(1, -1) if len(shape) == 1 else weights)  # a row of a sparse array has one axis
    else:
        check_finite(name, check_tensor(name, weights))
        shape, batch = tuple(weights.shape), tuple(weights.shape[:-1])
        check_last_axis(name, weights, vocabulary)
        rows = csr_array(weights.detach().resolve_neg().to("cpu", torch.float64).reshape(-1, vocabulary).numpy())
    if len(shape) < 1 or shape[-1] != vocabulary:
        raise ValueError(f"{name} has shape {shape}, expected a last axis of {vocabulary}, the rows of the embedding.")
    rows = rows.astype(np.float64)
    rows.sum_duplicates()
    rows.eliminate_zeros()
    check_finite(name, torch.from_numpy(rows.data))
    if rows.data.size and rows.data.min() < 0:
        raise ValueError(f"{name} holds {rows.data.min()}, expected weights >= 0.")
    lengths = np.diff(rows.indptr)
    if name == "query" and not lengths.all():
        raise ValueError(
            f"query {int(np.flatnonzero(lengths == 0)[0])} has no words, so it has no distance to a document; "
            "leave out documents without a known word."
        )
    sums = np.asarray(rows.sum(1)).reshape(-1)
    check_finite(f"the sums of {name}", torch.from_numpy(sums))
    return _Bags(rows.indptr.astype(np.int64), rows.indices.astype(np.int64), rows.data / sums.repeat(lengths)), batch


def _search(
    query: tuple[np.ndarray, np.ndarray], documents: _Bags, with_words: np.ndarray, vectors: Tensor,
    vocabulary: Tensor, k: int,
) -> tuple[np.ndarray, np.ndarray, float]:  # fmt: skip
    """Return the k nearest of the documents that have words, their distances, and the share that was solved."""
    words, p = query
    distances_of_words = PointCost(vectors[torch.from_numpy(words)], vocabulary, metric="euclidean").dense()
    table = finite_in(torch.float64, distances_of_words, 2).numpy()
    bounds = _lower_bounds(table, p, documents)[with_words]
    order = np.argsort(bounds, kind="stable")
    indices, distances = np.empty(0, np.int64), np.empty(0)
    done, kth = 0, np.inf
    while done < len(order):
        batch = order[done : done + max(k, _BATCH)]
        batch = batch[bounds[batch] <= kth * (1 + _ROUNDING)]
        if not len(batch):
            break
        done += len(batch)
        rows = with_words[batch]
        columns, q = documents.padded(rows)
        costs = np.ascontiguousarray(table[:, columns].transpose(1, 0, 2))
        new_values = solve_arrays(torch.from_numpy(p), torch.from_numpy(q), torch.from_numpy(costs)).value.numpy()
        indices, distances = np.append(indices, rows), np.append(distances, new_values)
        best = np.lexsort((indices, distances))[:k]
        indices, distances = indices[best], distances[best]
        kth = distances[-1] if len(best) == k else np.inf
    return indices, distances, done / len(documents)


def _lower_bounds(table: np.ndarray, p: np.ndarray, documents: _Bags) -> np.ndarray:
    from otloss.losses.documents_numba import dual_bounds

    bounds: np.ndarray = dual_bounds(table, p, documents.starts, documents.words, documents.masses)
    return bounds
