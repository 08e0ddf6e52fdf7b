"""Wasserstein-1 distance between histograms on the nodes of a rooted tree, in closed form.

The edge from node v to its parent carries what p holds below it more than q, so that

    W_1 = sum_v length_v |P_v - Q_v|          P_v, Q_v the masses of p and q in the subtree of v

(S. N. Evans, F. A. Matsen, The phylogenetic Kantorovich-Rubinstein metric, 2012). Subtree sums come from doubling: with
S_v the sum over the descendants of v fewer than 2^r levels down and a_r(v) the ancestor 2^r levels up, adding S_v to
S_{a_r(v)} for all v at once gives the sums for r + 1. That takes log2(depth) steps, without the cancellation of
differences of prefix sums; and if some node has an ancestor left after log2(n) steps, there is a cycle.

Nodes without mass get one-sided derivatives: where the subtree of v is empty in both histograms, mass added there has
to leave by the edge, and costs its length on either side; where all other nodes are empty, it saves that length.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import broadcast_shape, check_finite, check_floating, check_integers
from otloss._public import public
from otloss.costs.products import product
from otloss.solvers.histograms import histogram_pair


@public
def wasserstein_tree(
    p: Float[Tensor, "*batch nodes"],
    q: Float[Tensor, "*batch nodes"],
    parent: Int[Tensor, " nodes"],
    length: Float[Tensor, " nodes"],
) -> Float[Tensor, "*batch"]:
    """Return W_1 between histograms on the nodes of a tree, the minimal cost of moving p to q along its edges.

    Formulas: docs/guide/definitions.md#def-line

    Args:
        p: (..., n) weights >= 0. The leading axes of p and q broadcast.
        q: (..., n) weights >= 0 with the mass of p, up to rounding.
        parent: (n,) the parent of each node, nodes in any order; the one root is its own parent, or has -1.
        length: (n,) lengths >= 0 of the edges from each node to its parent; the root's is not used.

    Returns:
        (...), in the promoted dtype; its unit is the unit of the length times the unit of the mass.
        Differentiable in p, q (centred over all nodes; one-sided derivatives at nodes without mass) and length. Where
        an edge carries nothing between two parts with mass the value has a kink, and the gradient is a subgradient.

    Raises:
        TypeError: if p, q or length is not a floating tensor, or parent not an integer tensor.
        ValueError: if the masses differ, a weight or length (but the root's) is negative or not finite, the shapes do
            not fit, or the parents do not make one rooted tree.

    Source:
        S. N. Evans, F. A. Matsen, The phylogenetic Kantorovich-Rubinstein metric for environmental sequence samples,
        JRSS B 74, 2012.

    Example:
        >>> parent = torch.tensor([0, 0, 0, 1])  # 3 below 1 below 0, and 2 below 0
        >>> length = torch.tensor([0.0, 1.0, 2.0, 4.0])
        >>> wasserstein_tree(torch.eye(4)[3], torch.eye(4)[2], parent, length)
        tensor(7.)
    """
    check_floating("length", length)
    pair = histogram_pair(p, q, length.dtype)
    n = p.shape[-1]
    if q.shape[-1] != n:
        raise ValueError(f"p has {n} nodes and q {q.shape[-1]}, expected the same nodes.")
    ancestors = _ancestors(_parents(parent, n).to(p.device))
    length = _checked_lengths(length, ancestors[0] == n)
    batch = broadcast_shape(p.shape[:-1], q.shape[:-1])
    # Nodes first: adding whole rows is fast, and the edges of a node lie side by side.
    weights_p, weights_q = (w.expand(*batch, n).movedim(-1, 0) for w in pair.in_float64)  # (n, ...)
    carried = _carried(weights_p, weights_q, ancestors)
    return product(length.to(carried.dtype), carried.reshape(n, batch.numel())).reshape(batch).to(pair.dtype)


def _carried(p: Tensor, q: Tensor, ancestors: list[Tensor]) -> Tensor:
    """Return |P_v - Q_v| for every node; with one-sided derivatives where one side of an edge is empty."""
    holds = ((p.detach() > 0) | (q.detach() > 0)).to(torch.int64)
    inside = _subtree_sums(holds, ancestors)
    below_empty, above_empty = inside == 0, inside == holds.sum(0)
    # Rounding must not choose a side.
    apart = _subtree_sums(p - q, ancestors).masked_fill(below_empty | above_empty, 0.0).abs()
    if not (below_empty | above_empty).any():
        return apart
    both = _subtree_sums(p + q, ancestors)
    # The difference from the detached sum adds derivatives and no value.
    return apart + (below_empty.to(p.dtype) - above_empty.to(p.dtype)) * (both - both.detach())


def _subtree_sums(values: Tensor, ancestors: list[Tensor]) -> Tensor:
    n = values.shape[0]
    sums = torch.cat([values, torch.zeros_like(values[:1])])  # row n collects what rises above the root
    for ancestor in ancestors:
        sums = sums.index_add(0, ancestor, sums[:n])
    return sums[:n]


def _ancestors(parent: Tensor) -> list[Tensor]:
    """Return the ancestors 1, 2, 4, ... levels up, n where there is none; raise ValueError on a cycle."""
    n = parent.shape[0]
    steps: list[Tensor] = []
    above = torch.cat([parent, parent.new_tensor([n])])
    while bool((above[:n] < n).any()):
        if 2 ** len(steps) > n:
            node = int((above[:n] < n).nonzero()[0])
            raise ValueError(
                f"parent has a cycle above node {node}, expected that every path upwards ends at the root."
            )
        steps.append(above[:n])
        above = above[above]
    return steps or [parent]


def _parents(parent: Any, n: int) -> Tensor:
    """Return the checked parents, where the root has n."""
    check_integers("parent", parent)
    if parent.shape != (n,):
        raise ValueError(f"parent has shape {tuple(parent.shape)}, expected ({n},), one parent per node of p and q.")
    parent = parent.long()  # beside uint8 the number -1 is 255, and int8 cannot hold an n of 128
    outside = (parent < -1) | (parent >= n)
    if outside.any():
        node = int(outside.nonzero()[0])
        raise ValueError(f"parent[{node}] is {int(parent[node])}, expected 0 to {n - 1}, or -1 for the root.")
    root = (parent == -1) | (parent == torch.arange(n, device=parent.device))
    if int(root.sum()) != 1:
        raise ValueError(
            f"parent has {int(root.sum())} roots {root.nonzero()[:2, 0].tolist()}, expected one node that is its own "
            "parent or has -1; join several trees by giving their roots a common parent."
        )
    return parent.masked_fill(root, n)


def _checked_lengths(length: Tensor, is_root: Tensor) -> Tensor:
    """Return the lengths, 0 for the root, which has no edge."""
    n = len(is_root)
    if length.shape != (n,):
        raise ValueError(f"length has shape {tuple(length.shape)}, expected ({n},), one edge per node of p and q.")
    length = length.masked_fill(is_root.to(length.device), 0.0)
    check_finite("length", length)
    if (length < 0).any():
        node = int((length < 0).nonzero()[0])
        raise ValueError(f"length[{node}] is {float(length[node].detach())}, expected lengths >= 0.")
    return length
