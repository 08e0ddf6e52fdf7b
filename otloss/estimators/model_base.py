"""Bases of the models of standardised features: checks, training, warm starts, and coefficients of linear ones."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from otloss._checks import check_count
from otloss._ordered_classes import check_choice
from otloss.boosting.start import class_shares
from otloss.estimators.base import OrdinalBase, unchanged_on_error
from otloss.estimators.criterion import check_real
from otloss.estimators.features import SMALLEST_FEATURE, fitted_scaler, standardised, warn_of_tiny_columns
from otloss.estimators.training import OrdinalNetwork, PenalisedLoss, Rows, restarted, train_lbfgs

SMALLEST_SHARE_OF_PENALTY = 1e-6  # Coefficients are of this size where the weights sum to so small a part of alpha.
SMALLEST_SUM, LARGEST_SUM = 1e-300, 1e303  # of the weights of all rows


@dataclass(kw_only=True, eq=False, repr=False)
class ModelBase(OrdinalBase):
    """A network of standardised features; a subclass says its architecture, and optimises it."""

    alpha: float = 0.3
    standardize: bool = True
    max_iter: int = 1000
    warm_start: bool = False

    _remedy: ClassVar[str]  # what helps where `max_iter` was too small

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit to features X (n, d), labels y (n,), and weights (n,) if given; return self.

        Raises:
            ValueError, TypeError: if a label, a weight, a feature or a setting is wrong; the message says which.

        Warns:
            ConvergenceWarning: if `max_iter` ended training.
            UserWarning: if a feature, or all weights beside `alpha`, are too small to learn from.
        """
        with unchanged_on_error(self), torch.inference_mode(False), torch.enable_grad():
            check_choice("warm_start", self.warm_start, (True, False))
            self._start = None
            if self.warm_start and "_network" in vars(self):
                self._start = self._network, self._scaler, self._order.by_position
            self._fit(X, y, sample_weight)
            del self._start
        return self

    def _check_settings(self) -> None:
        super()._check_settings()
        check_choice("standardize", self.standardize, (True, False))
        check_real("alpha", self.alpha, minimum=0.0)
        check_count("max_iter", self.max_iter)

    def _train(self, X: Any, positions: np.ndarray, weights: np.ndarray, *, random: np.random.RandomState) -> None:
        self._check_sum_of_weights(float(weights.sum()))
        self._scaler = fitted_scaler(X, weights, with_std=bool(self.standardize))
        self.n_iter_ = 1
        if len(self.classes_) == 1:
            return
        self._warn_of_lost_rows(X, weights)
        rows = Rows.from_arrays(standardised(X, self._scaler), positions, weights)
        self._network = self._new_network(rows, random)
        if not self._optimise(rows, random):
            warnings.warn(
                f"{type(self).__name__} did not converge in max_iter={self.max_iter} iterations; raise {self._remedy}.",
                ConvergenceWarning,
                stacklevel=4,
            )

    def _check_sum_of_weights(self, mass: float) -> None:
        """Raise ValueError where quotients with the sum of the weights, such as `alpha / mass`, would overflow."""
        smallest = SMALLEST_SUM * max(1.0, float(self.alpha))
        if not smallest <= mass <= LARGEST_SUM:
            raise ValueError(
                f"the weights of the rows sum to {mass:g}, expected {smallest:g} to {LARGEST_SUM:g} with alpha="
                f"{self.alpha:g}; divide sample_weight by its mean."
            )

    def _warn_of_lost_rows(self, X: Any, weights: np.ndarray) -> None:
        """Warn where the features, or the weights beside the penalty, are too small for the model to learn from."""
        if self.standardize:
            warn_of_tiny_columns(X, SMALLEST_FEATURE, stacklevel=5)
        mass, factor = float(weights.sum()), self._criterion.transport + self._criterion.cross_entropy
        if mass * factor < SMALLEST_SHARE_OF_PENALTY * self.alpha:
            of_loss = "" if factor >= 1 else f", and those of the two losses to {factor:g}"
            warnings.warn(
                f"the weights of the rows sum to {mass:g}{of_loss}, which is so small beside alpha={self.alpha:g} that "
                f"{type(self).__name__} learns nothing from the features; multiply sample_weight, or lower alpha.",
                stacklevel=5,
            )

    def _new_network(self, rows: Rows, random: np.random.RandomState) -> OrdinalNetwork:
        prior = class_shares(rows.target.numpy(), rows.weight.numpy(), len(self.classes_))
        hidden, head, link = self._architecture()
        network = OrdinalNetwork((rows.features.shape[1], *hidden), prior, head, random, link)
        if self._start is None:
            return network
        former, scaler, labels = self._start
        if not np.array_equal(labels, self._order.by_position) or former.sizes != network.sizes:
            return network
        return restarted(former, scaler, self._scaler)

    def _objective(self, rows: Rows) -> PenalisedLoss:
        return PenalisedLoss(self._criterion, float(self.alpha), float(rows.weight.sum()))

    def _logits(self, X: Any) -> np.ndarray:
        with torch.no_grad():
            logits: np.ndarray = self._network(torch.from_numpy(self._scaler.transform(X))).numpy()
        return logits

    def _architecture(self) -> tuple[tuple[int, ...], str, str]:
        """Return the widths of hidden layers, the head and the link."""
        raise NotImplementedError

    def _optimise(self, rows: Rows, random: np.random.RandomState) -> bool:
        """Train the network on `rows`, and return whether it converged."""
        raise NotImplementedError


@dataclass(kw_only=True, eq=False, repr=False)
class LinearBase(ModelBase):
    """A linear model, trained by L-BFGS on all rows; sparse features stay sparse."""

    tol: float = 1e-4

    _remedy = "max_iter or tol"

    def _check_settings(self) -> None:
        super()._check_settings()
        check_real("tol", self.tol, minimum=0.0)

    def _as_features(self, X: Any) -> Any:
        if issparse(X) and not X.has_canonical_format:  # entries given twice are sums, and X is the caller's
            X = X.copy()
            X.sum_duplicates()
        return X

    def _optimise(self, rows: Rows, random: np.random.RandomState) -> bool:
        self.n_iter_, has_converged = train_lbfgs(
            self._network, self._objective(rows), rows, max_iter=int(self.max_iter), tol=float(self.tol)
        )
        return has_converged

    def _logits(self, X: Any) -> np.ndarray:
        if not issparse(X):
            return super()._logits(X)
        layer = self._network.layers[0]
        scores = standardised(X, self._scaler) @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
        with torch.no_grad():
            return self._network.logits(torch.from_numpy(scores)).numpy()

    def _linear_parts(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Weights (outputs, d) and bias (outputs,) for features as they come; AttributeError where there are none."""
        check_is_fitted(self)
        if len(self.classes_) == 1:
            raise AttributeError(f"{name} is of models of two classes or more, and this one has one class alone.")
        layer, scaler = self._network.layers[0], self._scaler
        weights = layer.weight.detach().numpy() / (1.0 if scaler.scale_ is None else scaler.scale_)
        return weights, layer.bias.detach().numpy() - weights @ scaler.mean_
