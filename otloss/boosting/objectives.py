"""Objectives: what XGBoost and LightGBM call once a round for the gradient and the Hessian's diagonal of every row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from otloss.boosting.data import RowFunction, ScoredRows
from otloss.boosting.derivatives import ORDERS, curvature, gradients
from otloss.boosting.settings import LossSettings, RowLoss, row_loss, shows_settings

# XGBoost squares a sum of gradients in float32: if that overflows, it silently finds no split.
_LARGEST_SUM = 1e19


@dataclass(frozen=True)
class RowObjective(RowFunction):
    """Return (gradient, hessian) of rows, each (n, K) float32, times the weights of the rows."""

    @property
    def __name__(self) -> str:
        return f"{self.library}_objective"

    # XGBoost passes the last argument by name; LightGBM counts the arguments.
    def __call__(
        self, first: Any, second: Any, sample_weight: Any = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        rows = self.rows(first, second, sample_weight)
        spec = curvature(self.loss, library=self.library, single=rows.single)
        gradient, hessian = gradients(
            rows.scores, rows.labels, rows.weights, loss=self.loss, curvature=spec, order=ORDERS[self.library]
        )
        _check_sum(self.loss, rows)
        if rows.single:
            return gradient[:, 1].reshape(rows.shape), hessian[:, 1].reshape(rows.shape)
        return gradient, hessian


@shows_settings
def xgboost_objective(num_classes: int, *, interface: str = "native", **settings: Unpack[LossSettings]) -> RowObjective:
    """Return an objective for XGBoost: transport from the predicted distribution to the label, per row.

    The loss of a row is transport * T + cross_entropy * (-log P_y), T = sum_k d_k |F_k - 1[y <= k]|^power with d the
    gaps between class values, or sum_i P_i cost[y, i]. Power 2, the ranked probability score, is proper: it is least
    in expectation at the true probabilities. Power 1 and costs are not: they move all probability to the class of
    least expected cost, more so with more rounds; add some cross-entropy where the probabilities matter. Neither is
    better on every data set than plain cross-entropy.

    The Hessian is a diagonal: twice Gauss-Newton's at power 2, else one that bounds the Hessian, so that small
    steps always descend; for cross-entropy it is the library's own. All are clamped to a small minimum.

    Train with `objective="multi:softprob"`, so that `predict` returns probabilities, and start from the frequencies:

        start = otloss.boosting.start_scores(labels, num_classes)
        xgboost.train({"objective": "multi:softprob", "num_class": num_classes, "base_score": start.tolist(),
                       "disable_default_eval_metric": True}, data, obj=xgboost_objective(num_classes))

    Args:
        num_classes: K. Labels are the positions 0 to K - 1 in the order of the classes.
        power: 1 or 2, 2 by default; unused with a cost.
        x: (K,) strictly increasing class values, 0 to K - 1 by default. Gradients and curvatures grow with their
            gaps: regularisation (`lambda`, `min_child_weight`) is in the same unit.
        cost: (K, K) costs >= 0, [true, predicted], in place of power and x.
        transport: factor of the transport term, 1 by default; with 0 (plain cross-entropy) trees are the
            library's own.
        cross_entropy: factor of the cross-entropy, 0 by default; `OrdinalBoostingClassifier` has 0.2, without which the
            forecasts of a rare first or last class may stay at its frequency.
        class_weight: (K,) numbers by class position, which multiply the weights of rows. Weights are taken as they
            come from the library: limits and penalties of trees (`min_child_weight`, `lambda`) are in their unit, so
            weights of sum one leave too little to split. Divide them by their mean.
        interface: "native" for `xgboost.train(obj=)`: f(predictions, data). "sklearn" for `XGBClassifier(objective=)`:
            f(y_true, y_pred, sample_weight).

    Returns:
        A picklable, immutable callable that returns (gradient, hessian), each (n, K) float32, times the weights of
        the rows: XGBoost applies none to custom objectives. With two classes a single score (n,) for the second of
        them is valid too, which is what `XGBClassifier` then trains.

    Raises:
        TypeError: if an argument is not numeric.
        ValueError: if an argument is out of range; when called, if a label, weight or score is invalid, or gradients
            are so large that XGBoost would find no split.

    Source:
        L. Hou, C.-P. Yu, D. Samaras, Squared Earth Mover's Distance-based Loss, arXiv 1611.05916.

    Examples:
        >>> import numpy as np
        >>> objective = xgboost_objective(3, power=1, interface="sklearn")
        >>> gradient, hessian = objective(np.array([0, 2]), np.zeros((2, 3)))
        >>> gradient.round(3)
        array([[-0.333,  0.   ,  0.333],
               [ 0.333,  0.   , -0.333]], dtype=float32)
    """
    return RowObjective("xgboost", row_loss(num_classes, **settings), interface)


@shows_settings
def lightgbm_objective(
    num_classes: int, *, interface: str = "native", **settings: Unpack[LossSettings]
) -> RowObjective:
    """Return an objective for LightGBM; the loss and the arguments are as in `xgboost_objective`.

        start = numpy.tile(otloss.boosting.start_scores(labels, num_classes), (len(labels), 1))
        lightgbm.train({"objective": lightgbm_objective(num_classes), "num_class": num_classes},
                       lightgbm.Dataset(features, labels, init_score=start))

    LightGBM does not keep the start and applies no softmax after a custom objective: probabilities
    are `scipy.special.softmax(booster.predict(features) + start[0], axis=1)`, also for `LGBMClassifier`, whose
    `predict_proba` returns raw scores then, (n, K), and whose `predict` returns the same scores, not labels: these are
    the `argmax(axis=1)` of the probabilities. `otloss.estimators.OrdinalBoostingClassifier(booster="lightgbm")` does
    all that.

    Continue a training by `init_score=start + first.predict(features, raw_score=True)`, and add the scores of both:
    `init_model=first` would replace the start.

    For early stopping create `LGBMClassifier(metric="None")`: otherwise it adds its own log-loss, which takes these
    scores for probabilities, and `lightgbm.early_stopping` watches every metric.

    Args:
        num_classes, power, x, cost, transport, cross_entropy, class_weight: as for `xgboost_objective`.
        interface: "native" for `lightgbm.train({"objective": f})`: f(predictions, dataset). "sklearn" for
            `LGBMClassifier(objective=)`: f(y_true, y_pred, weight). Fit that one to positions, not to names:
            `LGBMClassifier` numbers its labels by the alphabet ("high" < "low" < "mid") before this loss sees them.
            Encode them by `sklearn.preprocessing.OrdinalEncoder(categories=[["low", "mid", "high"]])`, or use
            `otloss.estimators.OrdinalBoostingClassifier(categories=["low", "mid", "high"])`.

    Returns:
        A picklable, immutable callable that returns (gradient, hessian), each (n, K) float32 in Fortran order, times
        the weights of the rows. With two classes a single score (n,) for the second of them is valid too, which is
        what `LGBMClassifier` then trains.

    Raises:
        TypeError, ValueError: as `xgboost_objective`.

    Examples:
        >>> import numpy as np
        >>> objective = lightgbm_objective(3, power=1, interface="sklearn")
        >>> gradient, hessian = objective(np.array([0, 2]), np.zeros((2, 3)))
        >>> gradient.round(3)
        array([[-0.333,  0.   ,  0.333],
               [ 0.333,  0.   , -0.333]], dtype=float32)
    """
    return RowObjective("lightgbm", row_loss(num_classes, **settings), interface)


def _check_sum(loss: RowLoss, rows: ScoredRows) -> None:
    total = loss.largest_gradient * (float(rows.weights.sum()) if rows.weights.size else len(rows.labels))
    if not total <= _LARGEST_SUM:
        raise ValueError(
            f"gradients of {len(rows.labels)} rows may sum to {total:.3g}, expected at most {_LARGEST_SUM:g}: "
            "beyond that their square overflows in float32, and no split is found. Divide the weights of rows by one "
            "number, or x, cost or transport and cross_entropy."
        )
