"""Bounds of the exact transport cost that need no solver.

With M the common mass, r = min(p, q) entry by entry, a = p - r, b = q - r and m the mass of a:

    independent    p^T C q / M                        the product coupling
    residual       sum_i r_i C_ii + a^T C b / m       what both share stays; a product coupling moves all else
    centroid       M h(sum_i p_i x_i / M - sum_j q_j y_j / M)
                                                      Jensen, for costs h(x_i - y_j) with h convex: distances, and
                                                      their powers from 1 on; 1 - cos = |u_i - u_j|^2 / 2 on unit rows
    relaxed        max(sum_i p_i min_j C_ij, sum_j q_j min_i C_ij)
                                                      minima over bins with mass; each drops one marginal constraint

    centroid or relaxed <= exact <= residual, independent

The residual is zero exactly when p = q (for costs that vanish on the diagonal only), and never looser than the
independent bound when the cost is a metric. Cosine and squared costs violate the triangle inequality and can break
that. Costs are used through `apply`, `diagonal` and hard minima: no n x m matrix is formed, and bounds of squared and
cosine costs between points take O((n + m) d).

Sources: EMO, arXiv 2310.04691 (product coupling); Y. Rubner, C. Tomasi, L. Guibas, The Earth Mover's Distance as a
Metric for Image Retrieval, 2000 (centroids); M. Kusner et al., From Word Embeddings To Document Distances, 2015.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import broadcast_shape
from otloss._public import public
from otloss.costs import Cost
from otloss.costs.centroids import or_one
from otloss.costs.cost import block_entries
from otloss.solvers.histograms import HistogramPair, pair_and_cost

COUPLINGS = ("independent", "residual", "best")


@public
def upper_bound(
    p: Float[Tensor, "*batch n"] | None,
    q: Float[Tensor, "*batch m"] | None,
    cost: Cost | Float[Tensor, "*batch n m"],
    *,
    coupling: str = "best",
) -> Float[Tensor, "*batch"]:
    """Return the cost of a coupling that needs no solver, an upper bound of `emd(p, q, cost)`, per problem.

    Args:
        p: (..., n) weights >= 0, or None for 1 / n each. The leading axes of p, q and the cost broadcast.
        q: (..., m) weights >= 0 with the mass of p, up to rounding, or None for 1 / m each.
        cost: (n, m), (..., n, m) or a cost object; C[i, j] is the price per unit of mass.
        coupling: "independent", the product coupling; exact when p or q is one-hot, and not zero at p = q.
            "residual", min(p, q) stays in place and the remaining mass moves by its product coupling; zero iff p = q,
            given a cost that vanishes on the diagonal only; needs the same bins on both sides.
            "best", the smaller of the two (the independent one where the cost is not square).

    Returns:
        (...), in the promoted dtype; its unit is the unit of the cost times the unit of the mass.
        Differentiable in p and q (centred over all bins) and in the cost. "residual" has a kink where p_i = q_i; the
        gradient there is finite, and zero at p = q but for the diagonal of the cost.

    Raises:
        TypeError: if p, q or a cost matrix is not a floating tensor.
        ValueError: if shapes or masses differ, a weight or a cost is negative, a number is not finite, the coupling is
            unknown, or it is "residual" and the cost is not square.

    Source:
        EMO, arXiv 2310.04691, for the product coupling.

    Example:
        >>> p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.5, 0.0, 0.5])
        >>> cost = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 1.0], [2.0, 1.0, 0.0]])
        >>> upper_bound(p, q, cost, coupling="independent"), upper_bound(p, q, cost, coupling="residual")
        (tensor(1.), tensor(0.5000))
    """
    if coupling not in COUPLINGS:
        raise ValueError(f"coupling is {coupling!r}, expected one of {COUPLINGS}.")
    pair, fitted = pair_and_cost(p, q, cost)
    n, m = fitted.shape
    if coupling == "residual" and n != m:
        raise ValueError(
            f'coupling "residual" keeps mass in its bin, but the cost has shape {(n, m)}; expected the same bins for p '
            'and q. Use "independent".'
        )
    if coupling == "independent" or n != m:
        value = _independent(pair, fitted)
    elif coupling == "residual":
        value = _residual(pair, fitted)
    else:
        value = torch.minimum(_independent(pair, fitted), _residual(pair, fitted))
    return _finite_in(pair.dtype, value)


@public
def lower_bound(
    p: Float[Tensor, "*batch n"] | None,
    q: Float[Tensor, "*batch m"] | None,
    cost: Cost | Float[Tensor, "*batch n m"],
) -> Float[Tensor, "*batch"]:
    """Return a lower bound of `emd(p, q, cost)` that needs no solver, per problem.

    The centroid bound for cosine and squared Euclidean costs (`CosineCost`, `PointCost`, `LineCost` and `GridCost` of
    power 2), smooth. Otherwise the best relaxed marginal bound, piecewise linear in the weights on a given set of bins
    with mass; or the centroid bound where it is larger, for other `PointCost` metrics and powers from 1 on. The bound
    that is not active gets a gradient of zero.

    Args:
        p: (..., n) weights >= 0, or None for 1 / n each. The leading axes of p, q and the cost broadcast.
        q: (..., m) weights >= 0 with the mass of p, up to rounding, or None for 1 / m each.
        cost: (n, m), (..., n, m) or a cost object; C[i, j] is the price per unit of mass.

    Returns:
        (...), in the promoted dtype; its unit is the unit of the cost times the unit of the mass.
        Differentiable in p and q (centred over all bins) and in the cost.

    Raises:
        TypeError: if p, q or a cost matrix is not a floating tensor.
        ValueError: if shapes or masses differ, a weight or a cost is negative, or a number is not finite.

    Source:
        Y. Rubner, C. Tomasi, L. Guibas, The Earth Mover's Distance, 2000 (centroids); M. Kusner et al., 2015 (relaxed).

    Example:
        >>> p, q = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
        >>> from otloss.costs import CosineCost
        >>> lower_bound(p, q, CosineCost(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])))
        tensor(2.)
        >>> lower_bound(torch.tensor([0.5, 0.5]), q, torch.tensor([[0.0, 3.0], [3.0, 0.0]]))
        tensor(1.5000)
    """
    pair, fitted = pair_and_cost(p, q, cost)
    centroid = fitted.centroid_bound(*pair.in_float64, pair.mass)
    if centroid is None:
        value = _relaxed_marginals(pair, fitted)
    elif centroid.is_smooth:
        value = centroid.value
    else:
        value = torch.maximum(centroid.value, _relaxed_marginals(pair, fitted))
    return _finite_in(pair.dtype, value)


def _finite_in(dtype: torch.dtype, value: Tensor) -> Tensor:
    value = value.to(dtype)
    if not bool(value.detach().isfinite().all()):
        wider = "" if dtype == torch.float64 else ", or pass float64"
        raise ValueError(f"the costs overflow {dtype}; rescale them, or the points{wider}.")
    return value


def _independent(pair: HistogramPair, cost: Cost) -> Tensor:
    share = pair.p / or_one(pair.mass).unsqueeze(-1)
    return _not_negative((share * cost.apply(pair.q)).sum(-1))


def _residual(pair: HistogramPair, cost: Cost) -> Tensor:
    """sum_i r_i C_ii + a^T C b / m."""
    p, q = pair.in_float64
    excess, lack = ((one - other).relu().to(pair.p.dtype) for one, other in ((p, q), (q, p)))  # a and b
    moved = (excess.sum(-1) + lack.sum(-1)) / 2
    # Divided before the product: a^T C b underflows where p and q nearly agree, and would hide that they differ.
    share = excess / or_one(moved).unsqueeze(-1)
    return _not_negative((share * cost.apply(lack)).sum(-1)) + ((pair.p - excess) * cost.diagonal()).sum(-1)


def _relaxed_marginals(pair: HistogramPair, cost: Cost) -> Tensor:
    entries = broadcast_shape(pair.p.shape[:-1], pair.q.shape[:-1], cost.batch_shape).numel() * math.prod(cost.shape)
    if cost.stored_matrix() is not None or entries <= block_entries():
        matrix = cost.dense()  # one for both sides
        to_q, to_p = _smallest_entries(matrix, pair.q), _smallest_entries(matrix.mT, pair.p)
    else:
        to_q, to_p = _smallest_of_rows(cost, pair.q), _smallest_of_rows(cost.T, pair.p)
    return torch.maximum((pair.p * to_q).sum(-1), (pair.q * to_p).sum(-1))  # (..., n) and (..., m)


def _smallest_entries(matrix: Float[Tensor, "*batch n m"], weights: Float[Tensor, "*batch m"]) -> Tensor:
    """Return `_smallest_of_rows` of a matrix."""
    empty = weights.detach() == 0
    if not empty.any():
        return matrix.amin(-1)
    return matrix.masked_fill(empty.unsqueeze(-2), torch.inf).amin(-1).masked_fill(empty.all(-1, keepdim=True), 0.0)


def _smallest_of_rows(cost: Cost, weights: Tensor) -> Tensor:
    """Return each row's smallest cost over the columns that hold mass, 0 where none does."""
    empty = weights.detach() == 0
    smallest = cost.softmin(torch.zeros_like(weights.detach()).masked_fill(empty, -torch.inf), 0.0)
    return smallest.masked_fill(empty.all(-1, keepdim=True), 0.0)


def _not_negative(value: Tensor) -> Tensor:
    # Rounding of the cosine product can go below 0; the gradient must not be cut with it. An infinite value stays.
    return value - value.detach().clamp(max=0)
