"""Standard errors of a linear cumulative model, by the Hessian of its log-likelihood.

The model is fitted to standardised features (x - m) / s, with the coefficients w and the thresholds t. In the features
as they come, its coefficients beta and thresholds theta, and their covariance, are

    beta = w / s,    theta = t + m.beta,    cov(beta, theta) = A H^{-1} A^T

H is the Hessian of the negative log-likelihood in (w, t), and A is the matrix of the map from (w, t) to (beta, theta).
H is scaled to a diagonal of ones, so that its condition does not depend on the units of the features.

The likelihood has no maximum if the features separate the classes: if there is a direction (w, t) along which no row's
interval narrows, and the interval of some row widens. With a_y = t_y - w.x that is the linear program

    max sum of all slacks    slacks: a_y >= 0 for the rows of all classes but the last, -a_{y-1} >= 0 but for the first

of which the optimum is 0 where the classes overlap.

Source: A. Albert, J. Anderson, On the existence of maximum likelihood estimates in logistic regression models,
Biometrika 71 (1984), 1-10.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import stats
from scipy.optimize import linprog
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from otloss._checks import check_number
from otloss.estimators.features import standardised
from otloss.estimators.training import OrdinalNetwork
from otloss.losses import cumulative_log_probabilities

_SMALLEST_CURVATURE = 1e-10  # where each parameter has curvature 1; below, the likelihood is constant along a direction
_SMALLEST_SLACK = 1e-5  # directions have entries up to 1, and the program keeps its constraints to 1e-7
_FEW_ROWS = 2000  # for which the linear program takes some milliseconds
_LARGEST_DECREMENT = 1e-2  # twice the log-likelihood that a Newton step may still gain


@dataclass(frozen=True, eq=False)  # arrays have no single truth value
class LikelihoodSummary:
    """Coefficients and thresholds of a linear cumulative model, with standard errors; `print` shows a table.

    Attributes:
        names: of the parameters: the d features, then a name such as "low | mid" for each of the K - 1 thresholds.
        estimates: (d + K - 1,) coefficients of the features as they come, then thresholds.
        covariance: (d + K - 1, d + K - 1) of the estimates.
        log_likelihood: the sum over the rows.
        rows: the number of rows, or the sum of their weights.

    Example:
        >>> from otloss.estimators import CumulativeLinkClassifier
        >>> X, y = np.arange(6.0)[:, None], np.array([0, 1, 0, 1, 0, 1])
        >>> model = CumulativeLinkClassifier(transport=0, cross_entropy=1, alpha=0).fit(X, y)
        >>> print(model.summary(X, y))
                    estimate  std error        z       p      2.5 %     97.5 %
        x0            0.3614     0.5174     0.70   0.485    -0.6527      1.375
        0 | 1         0.9034       1.55     0.58   0.560     -2.134      3.941
        log-likelihood -3.89501, AIC 11.79, BIC 11.3735, rows 6
    """

    names: tuple[str, ...]
    estimates: np.ndarray
    covariance: np.ndarray
    log_likelihood: float
    rows: float

    @property
    def standard_errors(self) -> Float[np.ndarray, " parameters"]:
        """Square roots of the variances."""
        return np.sqrt(np.diag(self.covariance))

    @property
    def p_values(self) -> Float[np.ndarray, " parameters"]:
        """Two-sided p-values of the hypothesis that a parameter is 0, by the normal distribution."""
        return 2 * stats.norm.sf(np.abs(self.estimates / self.standard_errors))

    @property
    def aic(self) -> float:
        """Akaike's information criterion, 2 (number of parameters - log-likelihood)."""
        return 2 * (len(self.estimates) - self.log_likelihood)

    @property
    def bic(self) -> float:
        """The Bayesian information criterion, log(rows) (number of parameters) - 2 log-likelihood."""
        return float(np.log(self.rows) * len(self.estimates) - 2 * self.log_likelihood)

    def interval(self, level: float = 0.95) -> Float[np.ndarray, "parameters 2"]:
        """Return the normal confidence intervals of the parameters, at a level between 0 and 1."""
        if not 0 < check_number("level", level) < 1:
            raise ValueError(f"level is {level}, expected a share between 0 and 1, such as 0.95.")
        half = stats.norm.ppf((1 + level) / 2) * self.standard_errors
        return np.column_stack([self.estimates - half, self.estimates + half])

    def __str__(self) -> str:
        width = max(9, *map(len, self.names))
        head = f"{'':{width}} {'estimate':>10} {'std error':>10} {'z':>8} {'p':>7} {'2.5 %':>10} {'97.5 %':>10}"
        columns = zip(self.names, self.estimates, self.standard_errors, self.p_values, self.interval(), strict=True)
        lines = [
            f"{name:{width}} {value:10.4g} {error:10.4g} {value / error:8.2f} {p:7.3f} {low:10.4g} {high:10.4g}"
            for name, value, error, p, (low, high) in columns
        ]
        foot = f"log-likelihood {self.log_likelihood:.6g}, AIC {self.aic:.6g}, BIC {self.bic:.6g}, rows {self.rows:g}"
        return "\n".join([head, *lines, foot])


def likelihood_summary(
    network: OrdinalNetwork, scaler: StandardScaler, parts: tuple[np.ndarray, ...], names: list[str], labels: np.ndarray
) -> LikelihoodSummary:
    """Return the summary of a linear cumulative network at some rows.

    `parts` are the features, the positions of the classes and the weights of the rows.

    Raises:
        ValueError: if the parameters do not maximise the likelihood of these rows, the features separate the classes,
            or H is singular.
    """
    assert network.log_gaps is not None
    if lacking := np.setdiff1d(np.arange(len(labels)), parts[1]).tolist():
        raise ValueError(
            f"no row is of the class {labels.tolist()[lacking[0]]!r} of fit; pass the rows and weights of fit."
        )
    if separates(standardised(parts[0], scaler), parts[1]):
        raise ValueError(
            "the features separate the classes, or some of them, so that the likelihood has no maximum: the "
            "coefficients grow until training stops, and have no standard errors. Leave features out, merge classes, "
            "or add rows."
        )
    X, target, weight = (torch.tensor(part, device="cpu") for part in (standardised(parts[0], scaler), *parts[1:]))
    inputs = X.shape[1]
    layer = network.layers[0]
    gaps = network.log_gaps.detach().exp()
    thresholds = torch.cat([gaps.new_zeros(1), gaps.cumsum(0)]) - layer.bias.detach()
    point = torch.cat([layer.weight.detach()[0], thresholds]).requires_grad_()

    def loss(point: Tensor) -> Tensor:
        w, t = point[:inputs], point[inputs:]
        log_P = cumulative_log_probabilities(X @ w - t[0], t.diff().log(), network.link)
        return -weight @ log_P.gather(1, target.unsqueeze(1)).squeeze(1)

    value = loss(point)
    gradient = torch.autograd.grad(value, point)[0].numpy()
    H = torch.autograd.functional.hessian(loss, point.detach()).numpy()
    # Features may be in any units where they are not standardised.
    sizes = np.sqrt(np.maximum(H.diagonal(), 0.0))
    sizes[sizes == 0] = 1.0
    scaled = H / np.outer(sizes, sizes)
    if not np.linalg.eigvalsh(scaled)[0] > _SMALLEST_CURVATURE:
        raise ValueError(
            "the Hessian of the likelihood is singular, so there are no standard errors: a feature is constant or a "
            "linear combination of others, or rows weigh almost nothing. Leave features out."
        )
    inverse = np.linalg.inv(scaled) / np.outer(sizes, sizes)
    decrement = float(gradient @ inverse @ gradient)
    if not decrement < _LARGEST_DECREMENT:
        raise ValueError(
            f"the parameters are not the maximum of the likelihood of these rows: a Newton step would gain about "
            f"{decrement / 2:.3g}. Pass the rows and weights of fit, and fit with a smaller tol and more max_iter."
        )
    A = np.eye(len(point))
    scale = np.ones(inputs) if scaler.scale_ is None else scaler.scale_
    A[:inputs, :inputs] /= scale[:, None]
    A[inputs:, :inputs] = scaler.mean_ / scale
    between = [f"{low} | {high}" for low, high in pairwise(labels)]
    return LikelihoodSummary(
        (*names, *between), A @ point.detach().numpy(), A @ inverse @ A.T, -value.item(), float(weight.sum())
    )


def separates(X: Float[np.ndarray, "rows features"], y: Int[np.ndarray, " rows"]) -> bool:
    """Return whether the features separate the classes 0 to K - 1, of which each has a row, wholly or in part."""
    scale = np.abs(X).max(0, initial=0.0)
    X = X / np.where(scale > 0, scale, 1.0)
    # Where some of the rows overlap, all do, unless some leave directions undetermined.
    by_class = np.argsort(y, kind="stable")
    some = np.unique(np.concatenate([by_class[:: max(1, len(y) // _FEW_ROWS)], np.unique(y, return_index=True)[1]]))
    slacks = _slacks(X[some], y[some])
    has_more = len(some) < len(y)
    if not _has_slack(slacks) and not (has_more and np.linalg.matrix_rank(slacks) < slacks.shape[1]):
        return False
    return not has_more or _has_slack(_slacks(X, y))


def _slacks(X: Float[np.ndarray, "rows features"], y: Int[np.ndarray, " rows"]) -> Float[np.ndarray, "slacks unknowns"]:
    """Return the matrix that has the slacks of a direction (w, t) as its product with it."""
    thresholds = np.eye(int(y.max()))
    upper, lower = y < len(thresholds), y > 0
    return np.concatenate(
        [np.hstack([-X[upper], thresholds[y[upper]]]), np.hstack([X[lower], -thresholds[y[lower] - 1]])]
    )


def _has_slack(slacks: Float[np.ndarray, "slacks unknowns"]) -> bool:
    """Return whether there is a direction of which no slack is below 0 and some are above."""
    result = linprog(-slacks.sum(0), A_ub=-slacks, b_ub=np.zeros(len(slacks)), bounds=(-1, 1), method="highs")
    return bool(result.status == 0 and -result.fun > _SMALLEST_SLACK)
