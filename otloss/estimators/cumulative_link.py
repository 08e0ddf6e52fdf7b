"""A linear classifier of ordered labels with one score and ordered thresholds, and its standard errors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import validate_data

from otloss._ordered_classes import check_choice
from otloss.estimators.base import dense
from otloss.estimators.features import reading_features
from otloss.estimators.likelihood import LikelihoodSummary, likelihood_summary
from otloss.estimators.model_base import LinearBase
from otloss.estimators.training import LOSSES, PenalisedLoss, Rows
from otloss.losses.cumulative import LINKS
from otloss.metrics.rank_labels import plain_items


@dataclass(kw_only=True, eq=False, repr=False)
class CumulativeLinkClassifier(LinearBase):
    """Linear classifier of ordered labels with one score and K - 1 ordered thresholds, trained with a transport loss.

    This is the model of proportional odds, with d + K - 1 parameters: for few rows, or labels that follow one direction
    of the features. It minimises what `OrdinalClassifier` does. With transport=0, cross_entropy=1 and alpha=0 it
    maximises the likelihood, and `summary` has standard errors.

    Args:
        categories, values, power, cost: as for `OrdinalClassifier`.
        link: "logit", "probit" or "cloglog" (complementary log-log: proportional hazards).
        loss: L, "transport", or the logistic loss of "all_threshold" or "immediate_threshold" models
            (`otloss.losses.threshold_loss`), which have no class values or costs. With cross_entropy=0 these are
            `LogisticAT` and `LogisticIT` of mord.
        transport, cross_entropy, class_weight, decode, calibration: as for `OrdinalClassifier`.
        alpha: as for `OrdinalClassifier`; thresholds have no penalty.
        standardize, max_iter, tol, validation_fraction, warm_start, random_state: as for `OrdinalClassifier`.

    Attributes:
        classes_, categories_, n_iter_: as for `OrdinalClassifier`.
        coef_, intercept_: (1, d) and (m - 1,), in the units of the features and before calibration:
            X @ coef_.T + intercept_ are the log-odds of the labels above each of the first m - 1 seen (with the logit
            link). AttributeError with one class.
        thresholds_: (m - 1,) increasing, the negatives of intercept_: the log-odds of the labels up to each of the
            first m - 1 seen are thresholds_ - X @ coef_.T; with another link that is the argument of its distribution.

    Source:
        P. McCullagh, Regression models for ordinal data, JRSS B 42 (1980), 109-142.

    Example:
        >>> X = np.linspace(0, 3, 60)[:, None]
        >>> model = CumulativeLinkClassifier().fit(X, np.minimum(X[:, 0], 2.9).astype(int))
        >>> model.predict([[0.2], [1.5], [2.8]]).tolist(), model.coef_.shape, model.thresholds_.shape
        ([0, 1, 2], (1, 1), (2,))
    """

    link: str = "logit"
    loss: str = "transport"

    def summary(self, X: Any, y: Any, sample_weight: Any = None) -> LikelihoodSummary:
        """Return coefficients and thresholds with standard errors, and the log-likelihood: `print` it for a table.

        For a model fitted by likelihood, `CumulativeLinkClassifier(transport=0, cross_entropy=1, alpha=0)`, to these
        rows; tol=1e-8 gives more digits. A weight counts rows. Standard errors are by the inverse of the Hessian.

        Raises:
            ValueError: if the model was not fitted so, these are not the rows that it was fitted to, features depend
                on each other linearly, or the features separate the classes, so that the likelihood has no maximum.
        """
        self._linear_parts("summary")
        wanted = {"transport": 0, "alpha": 0, "class_weight": None, "calibration": None}
        for name, value in wanted.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"summary is of a model fitted by likelihood alone, expected {name}={value!r}, and it is "
                    f"{getattr(self, name)!r}; fit CumulativeLinkClassifier(transport=0, cross_entropy=1, alpha=0)."
                )
        with reading_features(X, self._advice_for_text):
            features, labels = validate_data(self, X, plain_items(y), reset=False, **self._accepts())
        parts = self._weighted_rows(dense(features), labels, sample_weight)
        names = getattr(self, "feature_names_in_", [f"x{j}" for j in range(parts[0].shape[1])])
        with torch.inference_mode(False), torch.enable_grad():
            return likelihood_summary(self._network, self._scaler, parts, [*map(str, names)], self._order.by_position)

    @property
    def coef_(self) -> np.ndarray:
        """(1, d) weights of the score."""
        return self._linear_parts("coef_")[0]

    @property
    def intercept_(self) -> np.ndarray:
        """(m - 1,) negatives of the thresholds."""
        return -self.thresholds_

    @property
    def thresholds_(self) -> np.ndarray:
        """(m - 1,) increasing thresholds."""
        bias, log_gaps = self._linear_parts("thresholds_")[1], self._network.log_gaps
        assert log_gaps is not None
        return np.concatenate([np.zeros(1), np.exp(log_gaps.detach().numpy()).cumsum()]) - bias

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # One score for all classes cannot tell classes apart that do not follow each other along a line.
        tags.classifier_tags.poor_score = True
        return tags

    def _check_settings(self) -> None:
        super()._check_settings()
        check_choice("link", self.link, LINKS)
        check_choice("loss", self.loss, LOSSES)
        if self.loss != "transport" and (self.cost is not None or self.values is not None):
            raise ValueError(f"loss={self.loss!r} has no class values or costs; leave cost and values out.")

    def _architecture(self) -> tuple[tuple[int, ...], str, str]:
        return (), "cumulative", self.link

    def _objective(self, rows: Rows) -> PenalisedLoss:
        return replace(super()._objective(rows), loss=self.loss)
