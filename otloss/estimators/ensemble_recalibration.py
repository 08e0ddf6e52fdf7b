"""Recalibration of ensemble forecasts of a number: members are shifted and spread by the score on held-out data.

With m the mean of an ensemble, r_j = x_j - m its residuals and s = 1/2 mean |x_j - x_k| its spread,

    x'_j = offset + factor m + (scale + added / s) r_j        so that s' = scale s + added

The mean continuous ranked probability score (`otloss.losses.crps`) of x' is

    mean |offset + factor m + (scale + added / s) r_j - y| - (scale s + added)

which is convex in the four numbers: the best ones under scale, added >= 0 are found by one descent. Added to it is
shrinkage / n e |p - identity|^2, with e the root mean square error of the means, and p the four numbers: the offset (at
the mean of all ensembles) in units of e, and what is added in units of the mean spread.

Source: B. Van Schaeybroeck, S. Vannitsem, Ensemble post-processing using member-by-member approaches, QJRMS 141 (2015).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.optimize import minimize
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from otloss._checks import check_not_negative
from otloss.estimators.features import check_size
from otloss.metrics.arrays import read_shares
from otloss.metrics.ensembles import read_ensemble

# A descent stops at the kinks of the score, so they are first smoothed: by a tenth of the error, and then by less and
# less, down to this share of the error that is left.
_SMALLEST_ROUNDING = 1e-5
_ROUNDING_OF_FLOATS = 1e-13  # of an error that is left, in units of the first one


class EnsembleRecalibration(BaseEstimator):
    """A linear map of the mean and of the spread of ensembles, by the continuous ranked probability score.

    Corrects ensembles that lean to one side, and that are too sure or not sure enough. Members keep their order. An
    ensemble of equal members has no residuals to spread, and is only shifted.

    Args:
        shrinkage: the pull to the identity, in examples; 0 for none.

    Attributes:
        offset_, factor_: of the mean of an ensemble; 0 and 1 where nothing is better.
        scale_, added_: of the spread s, and added to it, both >= 0; 1 and 0 where nothing is better.

    Example:
        >>> ensemble, y = [[1.0, 3.0], [2.0, 4.0], [5.0, 7.0]], [12.0, 13.0, 16.0]  # ten too low, and too wide
        >>> EnsembleRecalibration(shrinkage=0).fit(ensemble, y).predict(ensemble).round(2)
        array([[12., 12.],
               [13., 13.],
               [16., 16.]])
    """

    def __init__(self, *, shrinkage: float = 8.0) -> None:
        self.shrinkage = shrinkage

    def fit(self, ensemble: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Learn the map.

        Args:
            ensemble: (n, m) held-out forecasts of m members each.
            y: (n,) what came true.
            sample_weight: (n,) weights >= 0; only their ratios matter.

        Raises:
            ValueError: if sizes differ, a number is NaN, infinite or beyond 1e100, or a weight or the shrinkage is
                negative.
        """
        check_not_negative("shrinkage", self.shrinkage)
        members, true = read_ensemble(ensemble, y)
        weight = read_shares(sample_weight, len(members))
        members, true, weight = (numbers[weight > 0] for numbers in (members, true, weight))
        check_size("ensemble", members)
        check_size("y", true)
        mean, residual, spread = _parts(members)
        unit = _root_mean_square(mean - true, weight) or 1.0
        mean, residual, spread, true = (numbers / unit for numbers in (mean, residual, spread, true))
        centre = mean[0] + weight @ (mean - mean[0])  # exact for equal means
        typical = float(weight @ spread)
        wide = _ratio(typical, spread)
        # In the order of the four numbers: an offset in errors, the rest relative to the identity.
        columns = 1.0, _deviation(mean, centre)[:, None], residual, wide[:, None] * residual
        spreads = np.array([weight @ spread, weight @ (wide * spread)])
        pull = self.shrinkage * float(weight @ weight)
        identity = np.array([0.0, 1.0, 1.0, 0.0])

        def score(p: np.ndarray, rounding: float) -> tuple[float, float, np.ndarray]:
            """The mean distance to y, the score, and its gradient."""
            error = centre - true[:, None] + sum(a * column for a, column in zip(p, columns, strict=True))
            size = np.sqrt(error**2 + rounding**2)
            signs = weight[:, None] / members.shape[1] * np.divide(error, size, out=np.zeros_like(size), where=size > 0)
            gradient = np.array([(signs * column).sum() for column in columns])
            gradient[2:] -= spreads
            change, distance = p - identity, float(weight @ size.mean(1))
            return distance, float(distance - p[2:] @ spreads + pull * change @ change), gradient + 2 * pull * change

        # In these units the score is curved alike by all four numbers, whatever the range of the means.
        sizes = np.array([np.sqrt(weight @ np.broadcast_to(column**2, members.shape).mean(1)) for column in columns])
        units = 1 / np.sqrt(sizes**2 + pull + (sizes == 0))
        best = _descend(score, identity, units)
        self.factor_, self.scale_ = float(best[1]), float(best[2])
        self.offset_ = float(best[0] + centre * (1 - best[1])) * unit
        self.added_ = float(best[3] * typical) * unit
        return self

    def predict(self, ensemble: ArrayLike) -> Float[np.ndarray, "n members"]:
        """Return the recalibrated members.

        Args:
            ensemble: (n, m) forecasts; m may be another number than in the fit.

        Raises:
            ValueError: if the shape is another one, or a number is NaN or infinite.
            sklearn.exceptions.NotFittedError: before `fit`.
        """
        check_is_fitted(self, "offset_")
        members, _ = read_ensemble(ensemble)
        mean, residual, spread = _parts(members)
        stretch = self.scale_ + _ratio(self.added_, spread)
        return (self.offset_ + self.factor_ * mean + 0.0)[:, None] + stretch[:, None] * residual


def _descend(
    score: Callable[[np.ndarray, float], tuple[float, float, np.ndarray]], start: np.ndarray, units: np.ndarray
) -> np.ndarray:
    """Return the four numbers of least score, the last two >= 0: of scores that are smoothed less and less."""
    bounds = [(None, None), (None, None), (0, None), (0, None)]
    parameters = best = start
    rounding = score(start, 0.0)[0]
    while True:
        distance = score(best, 0.0)[0]
        rounding = 0.1 * min(rounding, distance)
        if rounding < max(_SMALLEST_ROUNDING * distance, _ROUNDING_OF_FLOATS):
            return best

        # In units of the distance, because the optimiser's tolerances are absolute.
        def in_units(q: np.ndarray, rounding: float = rounding, distance: float = distance) -> tuple[float, np.ndarray]:
            _, value, gradient = score(q * units, rounding)
            return value / distance, gradient * units / distance

        parameters = minimize(in_units, parameters / units, jac=True, method="L-BFGS-B", bounds=bounds).x * units
        best = min((best, parameters), key=lambda p: score(p, 0.0)[1])


def _root_mean_square(error: Float[np.ndarray, " n"], weight: Float[np.ndarray, " n"]) -> float:
    largest = np.abs(error).max()
    return float(largest * np.sqrt(weight @ (error / largest) ** 2)) if largest > 0 else 0.0


def _deviation(numbers: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """Return numbers - centre, 0 where that is rounding alone, which a map would stretch."""
    deviation = numbers - centre
    rounding = 16 * np.finfo(float).eps * np.maximum(np.abs(numbers), np.abs(centre))
    return np.where(np.abs(deviation) <= rounding, 0.0, deviation)


def _parts(members: Float[np.ndarray, "n members"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean (n,), the residuals (n, m) and half the mean distance between members (n,)."""
    mean = members[:, 0] + (members - members[:, :1]).mean(1)  # exact for equal members
    m = members.shape[1]
    spread = np.sort(members, axis=1) @ (2 * np.arange(1, m + 1) - m - 1) / m**2
    residual = _deviation(members, mean[:, None])
    return mean, residual, np.where(residual.any(1), spread, 0.0)


def _ratio(number: float, spread: np.ndarray) -> np.ndarray:
    return np.divide(number, spread, out=np.zeros_like(spread), where=spread > 0)
