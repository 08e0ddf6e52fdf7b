"""Cost objects: `C[i, j]` is the price of moving one unit of mass from bin i of p to bin j of q.

A loss with a one-hot target y needs one row of C only, `D = sum_j C[y, j] q_j`, and a bound or a Sinkhorn
iteration needs products and soft minima only. A cost therefore answers four questions, and forms the
whole matrix only when `dense()` asks for it:

    rows(y)            C[y, :]                                              (U, m)
    apply(v)           (C v)_i = sum_j C_ij v_j                             (..., m) -> (..., n)
    softmin(h, eps)    -eps log sum_j exp((h_j - C_ij) / eps)               (..., m) -> (..., n)
    dense()            C                                                    (n, m)

Half-precision data is raised to float32 at construction: 1 - cos cancels, and bfloat16 has 8 bits.
"""

from typing import Any as _Any

from otloss.costs._cosine import CosineCost as CosineCost
from otloss.costs._cost import Cost as Cost
from otloss.costs._dense import DenseCost as DenseCost
from otloss.costs._dense import as_cost as as_cost
from otloss.costs._graph import shortest_paths as _shortest_paths
from otloss.costs._grid import GridCost as GridCost
from otloss.costs._line import LineCost as LineCost
from otloss.costs._point import PointCost as PointCost

__all__ = ["CosineCost", "Cost", "DenseCost", "GridCost", "LineCost", "PointCost", "as_cost", "graph_cost"]


def graph_cost(adjacency: _Any) -> DenseCost:
    """Return the cost between the nodes of a graph, the length of the shortest path from one to the other.

    Args:
        adjacency: (n, n) lengths >= 0 of the edges from row to column, in the unit of the cost; 0 or infinity where
            there is none. Asymmetric if edges have directions. Or a scipy sparse matrix, whose stored entries are the
            edges. The graph of a tensor is kept: the cost has first derivatives in the lengths, those of the path
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
    return DenseCost(_shortest_paths(adjacency))
