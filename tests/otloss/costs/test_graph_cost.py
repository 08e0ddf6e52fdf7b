"""Shortest paths against Floyd and Warshall's three loops; gradients in the lengths against finite differences."""

import math

import numpy as np
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from otloss.costs import graph_cost
from tests.errors import raising


def floyd_warshall(lengths: np.ndarray) -> np.ndarray:
    n = len(lengths)
    best = np.where((lengths == 0) | np.isinf(lengths), math.inf, lengths)
    np.fill_diagonal(best, 0.0)
    for k in range(n):
        for i in range(n):
            for j in range(n):
                best[i, j] = min(best[i, j], best[i, k] + best[k, j])
    return best


def random_graph(n: int, seed: int, *, directed: bool) -> np.ndarray:
    """A ring, which connects it, and some chords."""
    rng = np.random.default_rng(seed)
    lengths = rng.uniform(0.5, 2.0, (n, n)) * (rng.random((n, n)) < 0.3)
    lengths[np.arange(n), (np.arange(n) + 1) % n] = rng.uniform(0.5, 2.0, n)
    return lengths if directed else np.maximum(lengths, lengths.T)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 9), st.integers(0, 1000), st.booleans())
def test_lengths_are_those_of_the_shortest_paths(n: int, seed: int, directed: bool) -> None:
    lengths = random_graph(n, seed, directed=directed)
    expected = torch.from_numpy(floyd_warshall(lengths))
    torch.testing.assert_close(graph_cost(torch.from_numpy(lengths)).dense(), expected)
    torch.testing.assert_close(graph_cost(scipy.sparse.csr_array(lengths)).dense(), expected)
    infinite = torch.from_numpy(np.where(lengths == 0, np.inf, lengths))
    torch.testing.assert_close(graph_cost(infinite).dense(), expected)
    assert graph_cost(torch.from_numpy(lengths).float()).dtype == torch.float32
    assert graph_cost(torch.from_numpy(lengths).bfloat16()).dtype == torch.float32


def test_a_long_path_and_edges_that_rounding_swallows() -> None:
    n = 300
    lengths = np.diag(np.full(n - 1, 1.0), 1)
    lengths[3, 4] = 1e-30
    lengths += lengths.T
    leaf = torch.from_numpy(lengths).requires_grad_()
    cost = graph_cost(leaf)
    (gradient,) = torch.autograd.grad(cost.dense()[0, n - 1], leaf)
    expected = np.diag(np.ones(n - 1), 1)
    assert np.array_equal(gradient.numpy(), expected)
    assert cost.dense()[0, n - 1] == n - 2


def test_stored_zeros_of_a_sparse_matrix_are_edges() -> None:
    edges = scipy.sparse.csr_array((np.array([0.0, 2.0, 0.0, 2.0]), ([0, 1, 1, 2], [1, 2, 0, 1])), shape=(3, 3))
    assert graph_cost(edges).dense().tolist() == [[0, 0, 2], [0, 0, 2], [2, 2, 0]]
    assert graph_cost(edges.astype(np.float32)).dtype == torch.float32
    assert graph_cost(torch.zeros(1, 1)).dense().tolist() == [[0.0]]


test_bad_input = raising(
    (lambda: graph_cost(np.ones((2, 2))), TypeError, "adjacency is a ndarray"),
    (lambda: graph_cost(torch.tensor([[0.0, -1.0], [1.0, 0.0]])), ValueError, r"holds -1.0 at \(0, 1\)"),
    (lambda: graph_cost(torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])), ValueError, r"holds nan at \(1, 0\)"),
    (lambda: graph_cost(torch.tensor([[0.0, 1.0], [0.0, 0.0]])), ValueError, "no path leads from node 1 to node 0"),
)
