"""Soft labels: a class position y of K as a distribution whose mode is y, less sure the nearer the other classes are.

With the class k as the interval [k / K, (k + 1) / K] and m = (y + 1/2) / K its middle:

    triangular   a on each class beside y, the rest on y: an isosceles triangle on the interval of y that overlaps them
    binomial     P_k = pmf(k) of Binomial(K - 1, m)
    beta         P_k = the mass in the interval of k of the beta distribution of mean m and deviation 1 / (2 K)
    poisson      P_k ~ pmf(k) of Poisson(y + 1/2), cut to the K classes
"""

from __future__ import annotations

from math import lgamma
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import check_count, check_number, check_tensor
from otloss._ordered_classes import check_choice
from otloss.losses.rows import check_positions

_LARGEST_SHARE = 2 / 9  # A triangle with more mass on each neighbour reaches beyond the neighbours.


def soft_labels(
    target: Int[Tensor, "*batch"],
    num_classes: int,
    kind: str = "triangular",
    *,
    neighbour: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*batch classes"]:
    """Return class positions as distributions over ordered classes, targets of `ordinal_loss` and of cross-entropy.

    Each has its mode at the label. Mix them with one-hot labels yourself: `s * soft + (1 - s) * one_hot`.

    Args:
        target: (...) class positions 0 to K - 1, in an integer dtype.
        num_classes: K, at least 2.
        kind: "triangular", "binomial", "beta" or "poisson", by the formulas above. The binomial and Poisson
            distributions are wide, a beta distribution keeps two thirds of its mass on an inner label, and 0.85 on the
            first or last one.
        neighbour: the mass on each class beside the label, of "triangular" alone: 0.05 by default, at most 2/9.
        dtype: of the answer; the dtype of the logits is the fastest in `ordinal_loss`.

    Returns:
        (..., K), each of mass 1, on the device of target.

    Raises:
        TypeError: if target is not an integer tensor, or num_classes is not a whole number.
        ValueError: if a position is out of range, kind is unknown, or neighbour is out of range or not used.

    Source:
        V. M. Vargas, P. A. Gutiérrez, J. Barbero-Gómez, C. Hervás-Martínez, Soft labelling based on triangular
        distributions for ordinal classification, Information Fusion 93 (2023), 258-267, and Unimodal regularisation
        based on beta distribution for deep ordinal regression, Pattern Recognition 122 (2022), 108310; C. Beckham,
        C. Pal, Unimodal probability distributions for deep ordinal classification, arXiv 1705.05278 (the other two).

    Example:
        >>> soft_labels(torch.tensor([0, 2]), 5)
        tensor([[0.9500, 0.0500, 0.0000, 0.0000, 0.0000],
                [0.0000, 0.0500, 0.9000, 0.0500, 0.0000]])
        >>> soft_labels(torch.tensor([1]), 4, "binomial")
        tensor([[0.2441, 0.4395, 0.2637, 0.0527]])
    """
    if check_tensor("target", target).is_floating_point() or target.dtype == torch.bool:
        raise TypeError(f"target has dtype {target.dtype}, expected class positions in an integer dtype.")
    num_classes = check_count("num_classes", num_classes, 2)
    check_choice("kind", kind, tuple(_TABLES))
    if neighbour is not None:
        if kind != "triangular":
            raise ValueError(f"neighbour={neighbour} is given with kind={kind!r}; it belongs to kind='triangular'.")
        if not 0 <= check_number("neighbour", neighbour) <= _LARGEST_SHARE:
            raise ValueError(f"neighbour is {neighbour}, expected a mass from 0 to 2/9.")
    target = target.long()  # torch compares no unsigned integers of 16 bits or more
    check_positions("target", target, num_classes, None)
    table = _TABLES[kind](num_classes, 0.05 if neighbour is None else float(neighbour))
    return torch.tensor(table / table.sum(1, keepdims=True), dtype=dtype, device=target.device)[target]


def _triangular(classes: int, neighbour: float) -> Any:
    beside = np.eye(classes, k=1) + np.eye(classes, k=-1)
    return neighbour * beside + np.diag(1 - neighbour * beside.sum(1))


def _binomial(classes: int, _: float) -> Any:
    k = np.arange(classes)
    m = (k[:, None] + 0.5) / classes
    log_factorials = _log_factorials(classes)
    log_choices = log_factorials[-1] - log_factorials - log_factorials[::-1]
    return _rows_of_logs(log_choices + k * np.log(m) + (classes - 1 - k) * np.log1p(-m))


def _beta(classes: int, _: float) -> Any:
    from scipy.special import betainc  # `import otloss` does not load it.

    y = np.arange(classes)[:, None]
    size = (2 * y + 1) * (2 * classes - 2 * y - 1) - 1  # p + q = m (1 - m) / deviation^2 - 1
    mean = (y + 0.5) / classes
    return np.diff(betainc(mean * size, (1 - mean) * size, np.arange(classes + 1) / classes), axis=1)


def _poisson(classes: int, _: float) -> Any:
    k = np.arange(classes)
    return _rows_of_logs(k * np.log(k[:, None] + 0.5) - _log_factorials(classes))


def _log_factorials(classes: int) -> Any:
    return np.array([lgamma(k + 1) for k in range(classes)])


def _rows_of_logs(logs: Any) -> Any:
    """Return exp of each row, over its largest entry, so that rows of many classes stay within float64."""
    return np.exp(logs - logs.max(1, keepdims=True))


_TABLES = {"triangular": _triangular, "binomial": _binomial, "beta": _beta, "poisson": _poisson}
