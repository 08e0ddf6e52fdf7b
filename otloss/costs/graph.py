"""Shortest paths between the nodes of a graph, with slopes in the lengths of its edges.

    D_ij = sum of the lengths A_ab of the edges (a, b) on a shortest path from i to j
    dD_ij / dA_ab = 1 if the edge is on that path, else 0

The paths from one node form a tree, so `sum_ij G_ij dD_ij / dA` collects G from the leaves of each tree to its root: an
edge gets the sum of G over all nodes behind it. Where two paths are equally short, D has a kink, and the slope is that
of the path found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import check_floating
from otloss.costs.cost import arithmetic_dtype
from otloss.costs.dense import DenseCost


def shortest_paths(adjacency: Any) -> Float[Tensor, "nodes nodes"]:
    """Return the lengths of the shortest paths between all nodes; arguments and errors as for `graph_cost`."""
    if hasattr(adjacency, "tocsr"):
        lengths, _ = _solve(adjacency.tocsr())
        return torch.from_numpy(lengths.astype(adjacency.dtype if adjacency.dtype == np.float32 else np.float64))
    check_floating("adjacency", adjacency)
    adjacency = adjacency.to(arithmetic_dtype(adjacency.dtype))
    lengths_of: Tensor = _ShortestPaths.apply(adjacency)
    return lengths_of


class _ShortestPaths(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, adjacency: Tensor) -> Tensor:
        from scipy.sparse import csr_array

        array = adjacency.detach().to("cpu", torch.float64).numpy()
        lengths, ctx.before = _solve(csr_array(np.where(np.isposinf(array), 0.0, array)))
        return torch.from_numpy(lengths).to(adjacency)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        # The paths are constant between kinks: what is left to differentiate is the sum over them.
        collected: Tensor = _Collected.apply(gradients[0], ctx.before)
        return collected


class _Collected(torch.autograd.Function):
    """Each edge's sum of the values of all pairs whose path it is on; linear, and its transpose sums along paths."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, before: np.ndarray) -> Tensor:
        ctx.before = before
        return torch.from_numpy(_by_edge(before, _to_numpy(values))).to(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed: Tensor = _Summed.apply(gradients[0], ctx.before)
        return summed, None


class _Summed(torch.autograd.Function):
    """Each pair's sum of the values of the edges on its path."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, before: np.ndarray) -> Tensor:
        ctx.before = before
        return torch.from_numpy(_along_paths(before, _to_numpy(values))).to(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        collected: Tensor = _Collected.apply(gradients[0], ctx.before)
        return collected, None


def _to_numpy(values: Tensor) -> np.ndarray:
    array: np.ndarray = values.detach().to("cpu", torch.float64).numpy()
    return array


def _solve(edges: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths (n, n), and for each source (row) the node before each node, negative at the source."""
    from scipy.sparse.csgraph import shortest_path

    if edges.ndim != 2 or edges.shape[0] != edges.shape[1] or 0 in edges.shape:
        raise ValueError(f"adjacency has shape {tuple(edges.shape)}, expected (n, n) with n >= 1.")
    bad = ~(edges.data >= 0) | np.isinf(edges.data)
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        edge = int(np.searchsorted(edges.indptr, at, side="right")) - 1, int(edges.indices[at])
        raise ValueError(
            f"adjacency holds {edges.data[at]} at {edge}, expected lengths >= 0; leave an edge out, or make it 0, "
            "where there is none."
        )
    lengths, before = shortest_path(edges.astype(np.float64), method="D", return_predecessors=True)
    if np.isinf(lengths).any():
        i, j = (int(k) for k in np.argwhere(np.isinf(lengths))[0])
        raise ValueError(
            f"no path leads from node {i} to node {j}, expected a connected graph (strongly connected, if its edges "
            "have directions); add edges, or give a matrix with costs of your own for such pairs."
        )
    return lengths, before


def _nearest_first(before: np.ndarray) -> np.ndarray:
    """Row k: for each source the node that is k-th in number of hops, itself the first."""
    n = len(before)
    nodes = np.arange(n)
    ancestor = np.where(before < 0, nodes[:, None], before)
    hops = (before >= 0).astype(np.int64)
    while True:  # doubles the distance looked back each time
        further = hops + np.take_along_axis(hops, ancestor, axis=1)
        if (further == hops).all():
            break
        hops, ancestor = further, np.take_along_axis(ancestor, ancestor, axis=1)
    return np.argsort(hops, axis=1, kind="stable").T


def _along_paths(before: np.ndarray, values: np.ndarray) -> np.ndarray:
    nodes, sums = np.arange(len(before)), np.zeros_like(values)
    for column in _nearest_first(before)[1:]:
        parent = before[nodes, column]
        sums[nodes, column] = sums[nodes, parent] + values[parent, column]
    return sums


def _by_edge(before: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    n = len(before)
    nodes, behind = np.arange(n), gradient.copy()
    slopes = np.zeros((n, n))
    for column in _nearest_first(before)[:0:-1]:  # of each source the farthest first, never itself
        parent, carried = before[nodes, column], behind[nodes, column]
        behind[nodes, parent] += carried
        np.add.at(slopes, (parent, column), carried)
    return slopes


def graph_cost(adjacency: Any) -> DenseCost:
    """Return the cost between the nodes of a graph, the length of the shortest path from one to the other.

    Args:
        adjacency: (n, n) lengths >= 0 of the edges from row to column, in the unit of the cost; 0 or infinity where
            there is none. Asymmetric if edges have directions. Or a scipy sparse matrix, whose stored entries are the
            edges. The graph of a tensor is kept: the cost has derivatives in the lengths, those of the path
            that was found where several are shortest.

    Returns:
        (n, n), in the dtype of `adjacency` (at least float32), solved in float64 on the CPU.

    Raises:
        TypeError: if `adjacency` is neither a floating tensor nor a sparse matrix.
        ValueError: if it is not square, a length is negative or NaN, or no path leads from one node to another.

    Source:
        E. W. Dijkstra, A note on two problems in connexion with graphs, 1959, as implemented in scipy.

    Example:
        >>> import torch
        >>> path = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 2.0], [0.0, 2.0, 0.0]])
        >>> graph_cost(path).dense()
        tensor([[0., 1., 3.],
                [1., 0., 2.],
                [3., 2., 0.]])
    """
    return DenseCost(shortest_paths(adjacency))
