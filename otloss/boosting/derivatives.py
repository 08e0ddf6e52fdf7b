"""Values, gradients and diagonal Hessians of rows of raw scores: formulas in numpy, and calls of the numba kernels.

A row has scores z and a label y among K classes; P = softmax(z), F = cumsum(P), G_k = 1[y <= k], r = F - G, both
without their last entry. The loss of the row is, with d_k the gap from one class value to the next,

    transport * T + cross_entropy * (-log P_y)      T = sum_k d_k r_k^2          power 2, the ranked probability score
                                                    T = sum_i P_i c(y, i)        power 1: c(y, i) = |x_y - x_i|

Let s be the derivative of T in P: s_j = sum_{k >= j} 2 d_k r_k, or c(y, j). Then, with s' = s - P.s,

    dT/dz_i   = P_i s'_i
    d2T/dz2   = M + 2 sum_k d_k J_k J_k^T           the second term at power 2 only; J_ki = P_i (1[i <= k] - F_k)
    v^T M v   = sum_i P_i s'_i (v_i - P.v)^2

The Hessian that the libraries get is a diagonal. At power 2 it is the second term's (Gauss-Newton), else a D
with v^T D v >= v^T M v for all v: (v_i - P.v)^2 <= 2 (1 - P_i) [(1 - P_i) v_i^2 + sum_{j != i} P_j v_j^2] by Cauchy and
Schwarz. So, with w_i = P_i max(s'_i, 0) (1 - P_i),

    D_i = 2 [w_i (1 - P_i) + P_i sum_{j != i} w_j]

Sources: L. Hou, C.-P. Yu, D. Samaras, Squared Earth Mover's Distance-based Loss, arXiv 1611.05916; D. Böhning,
Multinomial logistic regression algorithm, Annals of the Institute of Statistical Mathematics 44 (1992), for bounds in
place of Hessians.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from otloss._numba import may_run_on
from otloss._numba.threads import run_on_threads
from otloss._ordered_classes import Floats
from otloss.boosting.settings import RowLoss

Order = Literal["C", "F"]
# The memory order of the scores that a library passes and reads fastest.
ORDERS: dict[str, Order] = {"xgboost": "C", "lightgbm": "F"}
LARGEST_WEIGHT = 1e12  # Of a row: with it, sums of float32 gradients stay finite.

# Smallest second derivative, of a transport term whose neighbouring classes lie 1 apart: both derivatives vanish where
# a row is certain, right or wrong, and the second one does so first.
_SMALLEST_CURVATURE = 1e-2
# Rows below which numpy is as fast; for a single row, in both memory orders, the kernel would be compiled again.
_SMALL = 32
_SMALLEST = 1e-16  # XGBoost's own objective has this lower limit.


@dataclass(frozen=True)
class Curvature:
    """transport * factor * diagonal + cross_entropy * entropy_factor * P (1 - P), at least `smallest`."""

    factor: float
    entropy_factor: float
    smallest: float


def curvature(loss: RowLoss, *, library: str, single: bool) -> Curvature:
    """Return the factors of the diagonal; `single` is for two classes with one score between them.

    A diagonal leaves out that the scores move together, hence the factor 2 for several scores, which the bound already
    has. The factor of cross-entropy is the one of the library's own objective.
    """
    together = 1.0 if single else 2.0
    # In units of the average cost of a step to the neighbouring class.
    smallest = max(_SMALLEST_CURVATURE * loss.transport * loss.largest_transport / (loss.num_classes - 1), _SMALLEST)
    own = loss.num_classes / (loss.num_classes - 1) if library == "lightgbm" and not single else together
    return Curvature(together if loss.is_square else together / 2, own, smallest)


def gradients(
    scores: NDArray[Any], labels: Floats, weights: Floats, *, loss: RowLoss, curvature: Curvature, order: Order
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return gradient and hessian, each (n, K) float32 in the memory order "C" or "F", times weights.

    Args:
        scores: (n, K), any floats.
        labels: (n,), whole numbers.
        weights: (n,), or (0,) for ones.

    Raises:
        ValueError: if a score, label or weight is invalid.
    """
    if len(scores) < _SMALL or not may_run_on():
        check_rows(scores, labels, weights)
        gradient, hessian = gradients_in_numpy(scores, labels, weights, loss=loss, curvature=curvature)
        return np.asarray(gradient, np.float32, order=order), np.asarray(hessian, np.float32, order=order)
    from otloss.losses import ordinal_numba as ordinal

    scores = _in_order(scores, order)
    results = ordinal.answers_of_curvatures(scores)
    factors = (curvature.factor, curvature.entropy_factor, curvature.smallest)
    settings = (loss.transport, loss.cross_entropy, *factors)
    inputs, of_loss, threads = (scores, labels, weights), (loss.gaps, loss.costs), torch.get_num_threads()
    arguments = (inputs, loss.class_weights, of_loss, settings, results, threads)
    if any(run_on_threads(ordinal.gradients_and_curvatures, threads, arguments)):
        check_rows(scores, labels, weights)
    return np.asarray(results[0], order=order), np.asarray(results[1], order=order)


def values(scores: NDArray[Any], labels: Floats, weights: Floats, *, loss: RowLoss) -> Floats:
    """Return the loss of each row, (n,), without the weights, which are checked all the same."""
    check_rows(scores, labels, weights)
    if not loss.is_square or len(scores) < _SMALL or not may_run_on():
        return values_in_numpy(scores, labels, loss=loss)
    from otloss.losses import ordinal_numba as ordinal

    z = np.require(scores, np.float64, ["C", "W"])
    results, no_gradient = ordinal.answers_of_scores(z, with_gradients=False)
    y, gaps, threads = labels.astype(np.int64), loss.transport * loss.gaps, torch.get_num_threads()
    arguments = (z, y, gaps, loss.cross_entropy, 1.0, 0.0, results, no_gradient, threads)
    run_on_threads(ordinal.ranked_scores, threads, arguments)
    return results


def _in_order(scores: NDArray[Any], order: Order) -> NDArray[Any]:
    """Return float32 by rows, as XGBoost passes them, or float64 by columns, as LightGBM does."""
    if scores.dtype == np.float32 and order == "C":
        return np.require(scores, np.float32, ["C", "W"])
    return np.require(scores, np.float64, ["F", "W"])


def check_rows(scores: NDArray[Any], labels: Floats, weights: Floats) -> None:
    """Raise ValueError naming the first invalid score, label or weight."""
    classes = scores.shape[1]
    with np.errstate(invalid="ignore"):
        misfits = np.flatnonzero(~((labels >= 0) & (labels < classes) & (labels == np.floor(labels))))
    if misfits.size:
        row = int(misfits[0])
        raise ValueError(
            f"the label of row {row} is {labels[row]:g}, expected whole numbers 0 to {classes - 1}, the positions of "
            f"{classes} classes in their order; encode labels by sklearn.preprocessing.OrdinalEncoder(categories=...)."
        )
    misfits = np.flatnonzero(~((weights >= 0) & (weights <= LARGEST_WEIGHT)))
    if misfits.size:
        row = int(misfits[0])
        raise ValueError(
            f"the weight of row {row} is {weights[row]:g}, expected weights from 0 to {LARGEST_WEIGHT:g}; divide all "
            "of them by the largest."
        )
    rows = np.flatnonzero(~np.isfinite(scores).all(1))
    if rows.size:
        raise ValueError(
            f"the scores of row {int(rows[0])} are {scores[rows[0]].tolist()}, expected finite numbers; look for NaN "
            "or infinities in base_margin or init_score, or lower the learning rate."
        )


def gradients_in_numpy(
    scores: NDArray[Any], labels: Floats, weights: Floats, *, loss: RowLoss, curvature: Curvature
) -> tuple[Floats, Floats]:
    """Return what `gradients` does, in float64: the reference implementation of its kernel."""
    P, F, r = _distributions(scores, labels)
    y, d = labels.astype(np.int64), loss.gaps
    zeros = np.zeros((len(P), 1))
    s = np.concatenate([_sums_from(2 * d * r), zeros], axis=1) if loss.is_square else loss.costs[y]
    moved = P * (s - (P * s).sum(1, keepdims=True))
    own = np.arange(loss.num_classes) == y[:, None]
    if loss.is_square:
        above, below = d * (1 - F) ** 2, d * F**2
        sums = np.concatenate([_sums_from(above), zeros], 1) + np.concatenate([zeros, np.cumsum(below, 1)], 1)
        second = 2 * P**2 * sums
    else:
        w = np.maximum(moved, 0) * (1 - P)
        second = 2 * (w * (1 - P) + P * (w.sum(1, keepdims=True) - w))
    second = loss.transport * curvature.factor * second + loss.cross_entropy * curvature.entropy_factor * P * (1 - P)
    weight = ((weights if weights.size else 1.0) * loss.class_weights[y])[:, None]
    gradient = loss.transport * moved + loss.cross_entropy * (P - own)
    return weight * gradient, weight * np.maximum(second, curvature.smallest)


def values_in_numpy(scores: NDArray[Any], labels: Floats, *, loss: RowLoss) -> Floats:
    """Return what `values` does, in float64."""
    P, _, r = _distributions(scores, labels)
    y = labels.astype(np.int64)
    moved = (loss.gaps * r**2).sum(1) if loss.is_square else (P * loss.costs[y]).sum(1)
    z = scores.astype(np.float64)
    top = z.max(1)
    gradient_of_transport: Floats = loss.transport * moved
    if loss.cross_entropy:
        # The order matters: the logarithm would be lost in rounding if it were added to a large score first.
        surprise = np.log(np.exp(z - top[:, None]).sum(1)) + (top - z[np.arange(len(z)), y])
        gradient_of_transport += loss.cross_entropy * surprise
    return gradient_of_transport


def _distributions(scores: NDArray[Any], labels: Floats) -> tuple[Floats, Floats, Floats]:
    """Return P, F and r."""
    z = scores.astype(np.float64)
    e = np.exp(z - z.max(1, keepdims=True))
    P = e / e.sum(1, keepdims=True)
    F = np.cumsum(P, 1)[:, :-1]
    return P, F, F - (labels[:, None] <= np.arange(F.shape[1]))


def _sums_from(terms: Floats) -> Floats:
    """Return the sums over k >= j."""
    return np.cumsum(terms[:, ::-1], 1)[:, ::-1]
