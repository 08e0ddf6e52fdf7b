"""Shortest paths between the nodes of a graph, with derivatives in the lengths of its edges.

    D_ij = sum of the lengths A_ab of the edges (a, b) on a shortest path from i to j
    dD_ij / dA_ab = 1 if the edge is on that path, else 0

scipy finds, for each source i, the node b_i(j) before j on its path. Their lengths are then summed up in torch by
doubling: with S_ij the length of the last 2^r edges of the path and a_i(j) the node where they begin,

    S_ij <- S_ij + S_i,a_i(j)        a_i(j) <- a_i(a_i(j))

Where two paths are equally short D is not differentiable, and the derivative belongs to the path found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss._autograd import check_no_transform
from otloss._checks import check_floating
from otloss.costs.cost import arithmetic_dtype, makes_graph
from otloss.costs.dense import DenseCost


def graph_cost(adjacency: Any) -> DenseCost:
    """Return the cost between the nodes of a graph, the length of the shortest path from one to the other.

    Args:
        adjacency: (n, n) lengths >= 0 of the edges from row to column, in the unit of the cost; 0 or infinity where
            there is none. Asymmetric if edges have directions. Or a scipy sparse matrix, whose stored entries are the
            edges. The graph of a tensor is kept: the cost has derivatives in the lengths of the path
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
    check_no_transform()
    if hasattr(adjacency, "tocsr"):
        lengths, _ = _shortest_paths(_rows_of_edges(adjacency))
        return DenseCost(torch.from_numpy(lengths.astype(np.result_type(adjacency.dtype, np.float32))))
    if hasattr(adjacency, "adjacency"):  # of networkx
        call = "networkx.to_scipy_sparse_array(adjacency, dtype=float)"
        if "Multi" in type(adjacency).__name__:  # of parallel edges that one would take the sum
            call = "torch.as_tensor(networkx.to_numpy_array(adjacency, multigraph_weight=min, nonedge=math.inf))"
        raise TypeError(
            f"adjacency is a {type(adjacency).__name__}, expected a matrix of lengths; pass {call}, whose lengths are "
            "the edges' weights, 1 by default."
        )
    from scipy.sparse import csr_array

    check_floating("adjacency", adjacency)
    adjacency = adjacency.to(arithmetic_dtype(adjacency.dtype))
    array = adjacency.detach().resolve_neg().to("cpu", torch.float64).numpy()
    lengths, parents = _shortest_paths(csr_array(np.where(np.isposinf(array), 0.0, array)))
    costs = torch.from_numpy(lengths)
    if makes_graph(adjacency):
        costs = _along_paths(adjacency.to("cpu", torch.float64), torch.from_numpy(parents.astype(np.int64)))
    return DenseCost(costs.to(adjacency))


def _rows_of_edges(adjacency: Any) -> Any:
    """Return the edges in CSR format, with parallel ones, which `tocsr` of the COO format adds up."""
    if adjacency.format != "coo" or adjacency.ndim != 2:
        return adjacency.tocsr()
    from scipy.sparse import csr_array

    order = np.lexsort((adjacency.col, adjacency.row))
    starts = np.append(0, np.bincount(adjacency.row, minlength=adjacency.shape[0]).cumsum())
    return csr_array((adjacency.data[order], adjacency.col[order], starts), shape=adjacency.shape)


def _along_paths(adjacency: Float[Tensor, "n n"], parents: Tensor) -> Float[Tensor, "n n"]:
    nodes = torch.arange(len(parents), device=parents.device)
    start = torch.where(parents < 0, nodes.unsqueeze(1), parents)  # the source comes before itself, at no length
    sums = adjacency[start, nodes].masked_fill(parents < 0, 0.0)
    while not torch.equal(start, nodes.unsqueeze(1).expand_as(start)):
        sums = sums + sums.gather(1, start)
        start = start.gather(1, start)
    return sums


def _shortest_paths(edges: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths (n, n), and for each source (row) the node before each node, negative at the source."""
    from scipy.sparse.csgraph import shortest_path

    if edges.ndim != 2 or edges.shape[0] != edges.shape[1] or 0 in edges.shape:
        raise ValueError(f"adjacency has shape {tuple(edges.shape)}, expected (n, n) with n >= 1.")
    bad = ~(edges.data >= 0) | np.isinf(edges.data)
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        edge = int(np.searchsorted(edges.indptr, at, side="right")) - 1, int(edges.indices[at])
        raise ValueError(
            f"adjacency holds {edges.data[at]} at {edge}, expected lengths >= 0; leave the edge out, or make it 0."
        )
    lengths, parents = shortest_path(edges.astype(np.float64), method="D", return_predecessors=True)
    if np.isinf(lengths).any():
        i, j = (int(k) for k in np.argwhere(np.isinf(lengths))[0])
        raise ValueError(
            f"no path leads from node {i} to node {j}, expected a connected graph (strongly connected, if its edges "
            "have directions); add edges, or give a matrix with costs of your own for such pairs."
        )
    return lengths, parents
