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

from otloss._foreign import explain_missing_names as _explain_missing_names
from otloss.costs.cosine import CosineCost as CosineCost
from otloss.costs.cost import Cost as Cost
from otloss.costs.dense import DenseCost as DenseCost
from otloss.costs.dense import as_cost as as_cost
from otloss.costs.dense import cost_between as cost_between
from otloss.costs.graph import graph_cost as graph_cost
from otloss.costs.grid import GridCost as GridCost
from otloss.costs.line import LineCost as LineCost
from otloss.costs.points import PointCost as PointCost
from otloss.costs.within import costs_within as costs_within

__all__ = [
    "CosineCost",
    "Cost",
    "DenseCost",
    "GridCost",
    "LineCost",
    "PointCost",
    "as_cost",
    "cost_between",
    "costs_within",
    "graph_cost",
]

_explain_missing_names(__name__, __all__)
