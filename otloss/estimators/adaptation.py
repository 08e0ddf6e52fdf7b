"""Maps from a source domain to a target domain, by optimal transport.

    linear        x -> m_t + A (x - m_s),  A = S^(-1/2) (S^(1/2) T S^(1/2))^(1/2) S^(-1/2)

with m_s, S and m_t, T the means and covariances: the optimal map between normal distributions (M. Knott, C. Smith, On
the optimal mapping of distributions, 1984).

    barycentric   x_i -> sum_j P_ij y_j / p_i

with P an optimal plan for squared distances between the distinct samples; other points move as the nearest sample does
(S. Ferradans et al., Regularized discrete optimal transport, 2014). An entropic plan has a map of every point,

    x -> sum_j w_j y_j,  w the softmax of (g_j - |x - y_j|^2) / epsilon

with g its potential (A. Pooladian, J. Niles-Weed, Entropic estimation of optimal transport maps, 2021). The mean is the
best place for squared distances only, so there is no other cost.
"""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.linalg import solve_triangular
from scipy.spatial import cKDTree
from scipy.spatial.distance import cdist
from scipy.special import softmax
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from otloss._checks import check_positive
from otloss.costs import PointCost
from otloss.estimators.base import unchanged_on_error
from otloss.estimators.features import reading_features
from otloss.metrics.arrays import column_names
from otloss.solvers.solve import solve

METHODS = ("linear", "barycentric")
_ADVICE = "leave such columns out, or encode them"
_RIDGE = 1e-8  # of a variance
_LARGEST_MOVE = 100.0  # in standard deviations
_ROUNDINGS = 64  # of the mean of equal numbers, or of a variance, and more


class TransportAdapter(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """A transformer that moves samples of a source domain into a target domain.

    Train a classifier on the transformed source samples, with their labels. Neither method sees labels: classes that
    are more frequent in one domain are mapped onto others. The linear map is the safer one for few samples.

    Args:
        method: "linear", an affine map between means and covariances; "barycentric", by a plan between samples.
        epsilon: for "barycentric" alone: None for an exact plan, else as for `otloss.sinkhorn`.
        ridge: for "linear" alone: added to the variances, above 0, in squared units of the features; by default 1e-8 of
            the variance of each feature in each domain, so that nothing depends on its unit; a feature that is constant
            in X moves by the difference of the means.

    Attributes:
        matrix_, offset_: (d, d) and (d,), of "linear": x @ matrix_ + offset_.
        samples_, mapped_: (k, d), of "barycentric" without epsilon: the distinct samples of `fit` and where they move.
        targets_, potential_, epsilon_: (m, d), (m,) and a number, with epsilon: the samples of the target, their
            potential g, and the epsilon of `fit`.
        n_features_in_: d.

    Example:
        >>> source, target = np.array([[0.0], [1.0], [2.0]]), np.array([[10.0], [14.0], [12.0]])
        >>> TransportAdapter("linear").fit(source, target=target).transform([[0.5]]).round(3)
        array([[11.]])
        >>> TransportAdapter("barycentric").fit(source, target=target).transform([[0.0], [1.9]]).round(3)
        array([[10. ],
               [13.9]])
    """

    def __init__(self, method: str = "linear", *, epsilon: float | None = None, ridge: float | None = None) -> None:
        self.method = method
        self.epsilon = epsilon
        self.ridge = ridge

    def fit(self, X: ArrayLike, y: Any = None, *, target: ArrayLike) -> Self:
        """Learn the map.

        Args:
            X: (n, d) samples of the source domain.
            y: not used.
            target: (m, d) samples of the target domain.

        Raises:
            ValueError: if a setting is not valid, samples are not finite or differ in their number of features, or two
                data frames have other columns.
        """
        with unchanged_on_error(self):
            return self._fit(X, target)

    def _fit(self, X: ArrayLike, target: ArrayLike) -> Self:
        for attribute in [name for name in vars(self) if name.endswith("_")]:  # `transform` asks which ones there are
            delattr(self, attribute)
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}, expected one of {METHODS}.")
        for setting, method in (("epsilon", "barycentric"), ("ridge", "linear")):
            if getattr(self, setting) is None:
                continue
            if method != self.method:
                raise ValueError(
                    f'{setting} is given with method="{self.method}", expected method="{method}", which alone has it; '
                    "leave it out, or change the method."
                )
            check_positive(setting, getattr(self, setting))
        with reading_features(X, _ADVICE):
            source = validate_data(self, X, dtype=np.float64, order="C")
        _check_columns(X, target)
        with reading_features(target, _ADVICE, name="target"):
            other = check_array(target, dtype=np.float64, order="C", copy=True, input_name="target")
        if other.shape[1] != source.shape[1]:
            raise ValueError(f"target has {other.shape[1]} features, expected {source.shape[1]}, as X.")
        if self.method == "linear":
            self.matrix_ = self._linear_map(source, other)
            self.offset_ = other.mean(0) - source.mean(0) @ self.matrix_
            return self
        samples, counts = np.unique(source, axis=0, return_counts=True)  # equal samples move to one place
        p = torch.tensor(counts / len(source), device="cpu")[:, None]
        q = torch.full((len(other),), 1 / len(other), dtype=p.dtype, device="cpu")
        z = torch.tensor(other, device="cpu")  # copies, because arrays of data frames are read-only
        transport = solve(p[:, 0], q, PointCost(torch.tensor(samples, device="cpu"), z), epsilon=self.epsilon)
        if self.epsilon is None:
            self.samples_, self.mapped_ = samples, (transport.apply(z) / p).numpy()
        else:
            self.targets_, self.potential_ = other, transport.potentials[1].numpy()
            self.epsilon_ = float(self.epsilon)
        return self

    def transform(self, X: ArrayLike) -> np.ndarray:
        """Return the samples (n, d), moved to the target domain.

        Raises:
            ValueError: if samples are not finite, or of another number of features.
            sklearn.exceptions.NotFittedError: before `fit`.
        """
        check_is_fitted(self)
        with reading_features(X, _ADVICE):
            points: np.ndarray = validate_data(self, X, dtype=np.float64, reset=False)
        if hasattr(self, "matrix_"):
            return np.asarray(points @ self.matrix_ + self.offset_)
        if hasattr(self, "potential_"):
            scores = (self.potential_ - cdist(points, self.targets_, "sqeuclidean")) / self.epsilon_
            return np.asarray(softmax(scores, 1) @ self.targets_)
        _, nearest = cKDTree(self.samples_).query(points)
        return np.asarray(points + (self.mapped_ - self.samples_)[nearest])

    def _linear_map(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return the matrix A; by default features that are constant in the source keep their scale."""
        matrix = np.eye(source.shape[1])
        varies = _variance_above_rounding(source) > 0 if self.ridge is None else np.ones(len(matrix), dtype=bool)
        if varies.any():
            source, target = source[:, varies], target[:, varies]
            covariances = self._covariance(source, target), self._covariance(target, source)
            part = _affine(*covariances)
            matrix[np.ix_(varies, varies)] = part
            _warn_of_dependent_features(part, *(np.sqrt(np.diag(each)) for each in covariances))
        return matrix

    def _covariance(self, samples: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Return the covariance of one domain, with the ridge."""
        centred = samples - samples.mean(0)
        ridge = _ridge(samples, others) if self.ridge is None else np.full(samples.shape[1], float(self.ridge))
        return np.asarray(centred.T @ centred / len(samples) + np.diag(ridge))


def _ridge(samples: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return a share of the variance of each feature of one domain, so that domains may differ in their units.

    A feature that is constant has the share of its variance in the other domain.
    """
    variance, variance_of_others = (_variance_above_rounding(each) for each in (samples, others))
    return _RIDGE * np.where(variance > 0, variance, variance_of_others)


def _variance_above_rounding(samples: np.ndarray) -> np.ndarray:
    """Return the variance of each feature, 0 for a constant one, whose mean is rounded."""
    variance: np.ndarray = samples.var(0)
    rounding = _ROUNDINGS * np.finfo(np.float64).eps * abs(samples).max(0)
    return np.where(variance > rounding**2, variance, 0.0)


def _check_columns(X: Any, target: Any) -> None:
    """Raise ValueError if both are data frames whose columns differ, in their order too; names may be numbers."""
    names, others = column_names(X), column_names(target)
    if names and others and names != others:
        raise ValueError(f"target has the columns {others}, expected {names} as X; pass them in the order of X.")


def _warn_of_dependent_features(matrix: np.ndarray, source: np.ndarray, target: np.ndarray) -> None:
    """Warn of a map that moves a sample of usual features by many deviations (d,): only the ridge holds it there."""
    largest = np.abs(matrix * source[:, None] / target).max()
    if largest > _LARGEST_MOVE:
        warnings.warn(
            f"X has features that depend on each other, or fewer samples than features, and the target does not: a "
            f"new sample with other such features can move by {largest:.1g} standard deviations. Give a larger ridge, "
            "for example 0.1 of the variances, or leave features out.",
            stacklevel=5,
        )


def _affine(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return A, from factors S = L L^T and T = M M^T: A^T = M Q L^-1, Q the orthogonal factor of M^T L.

    Features in falling order of their variances keep the digits of the small ones, whatever the units.
    """
    order = np.argsort(-np.log(np.diag(source)) - np.log(np.diag(target)))
    s, t = (_cholesky(covariance[np.ix_(order, order)]) for covariance in (source, target))
    left, _, right = np.linalg.svd(t.T @ s)
    matrix = np.empty_like(source)
    matrix[np.ix_(order, order)] = solve_triangular(s, (t @ left @ right).T, lower=True, trans="T")
    return matrix


def _cholesky(covariance: np.ndarray) -> np.ndarray:
    """Return the factor (d, d); raise ValueError if a feature is a combination of others, up to rounding."""
    try:
        factor: np.ndarray = np.linalg.cholesky(covariance)
        own = np.diag(factor) ** 2 / np.diag(covariance)  # the share of its variance that the others do not explain
    except np.linalg.LinAlgError:
        own = np.zeros(1)
    if own.min() < _ROUNDINGS * np.finfo(np.float64).eps:
        raise ValueError(
            "features depend on each other, and the ridge is too small for an inverse of their covariance; expected a "
            "larger ridge, or None."
        )
    return factor
