"""Objectives: what XGBoost and LightGBM call once a round for the gradient and the curvature of every row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otloss.boosting.data import INTERFACES, Rows, rows_of, rows_of_arrays
from otloss.boosting.rows import ORDERS, curvature, slopes
from otloss.boosting.settings import RowLoss, check_choice, check_hessian, row_loss

# XGBoost takes the square of a sum of gradients in float32: where it overflows, no split is found, and none is told.
_LARGEST_SUM = 1e19
Slopes = tuple[NDArray[np.float32], NDArray[np.float32]]


@dataclass(frozen=True, repr=False)
class _Objective:
    library: str
    loss: RowLoss
    hessian: str

    def __repr__(self) -> str:
        interface = "" if isinstance(self, _NativeObjective) else ', interface="sklearn"'
        return f'{self.library}_objective({self.loss!r}, hessian="{self.hessian}"{interface})'

    @property
    def __name__(self) -> str:
        return f"{self.library}_objective"

    def _slopes(self, rows: Rows) -> Slopes:
        chosen = curvature(self.loss, self.hessian, library=self.library, single=rows.single)
        gradient, hessian = slopes(
            rows.scores, rows.labels, rows.weights, loss=self.loss, curvature=chosen, order=ORDERS[self.library]
        )
        if self.library == "xgboost":
            _check_sum(self.loss, rows)
        if rows.single:
            return gradient[:, 1].reshape(rows.shape), hessian[:, 1].reshape(rows.shape)
        return gradient, hessian


@dataclass(frozen=True, repr=False)
class _NativeObjective(_Objective):
    def __call__(self, predictions: NDArray[Any], data: Any) -> Slopes:
        return self._slopes(rows_of(predictions, data, num_classes=self.loss.num_classes))


@dataclass(frozen=True, repr=False)
class _SklearnObjective(_Objective):
    # Of these names XGBoost knows the last; LightGBM counts them.
    def __call__(self, y_true: ArrayLike, y_pred: NDArray[Any], sample_weight: ArrayLike | None = None) -> Slopes:
        return self._slopes(rows_of_arrays(y_true, y_pred, sample_weight, num_classes=self.loss.num_classes))


def xgboost_objective(
    num_classes: int,
    *,
    power: int = 2,
    x: ArrayLike | None = None,
    cost: ArrayLike | None = None,
    transport: float = 1.0,
    cross_entropy: float = 0.0,
    class_weight: ArrayLike | dict[int, float] | None = None,
    hessian: str = "auto",
    interface: str = "native",
) -> _Objective:
    """Return an objective for XGBoost: transport from the predicted distribution to the label, per row.

    The loss of a row is transport * T + cross_entropy * (-log P_y), T = sum_k d_k |F_k - 1[y <= k]|^power with d the
    gaps between class values, or sum_i P_i cost[y, i]. Power 2, the ranked probability score, is proper: it is least
    in expectation at the true probabilities. Power 1 and costs are not: they draw all probability to the class of
    least expected cost, and with more rounds become ever more certain of it; add some cross-entropy where the
    probabilities matter. Neither is better on every data set than plain cross-entropy.

    Train with `objective="multi:softprob"`, so that `predict` returns probabilities, and start from the frequencies:

        start = otloss.boosting.start_scores(labels, num_classes)
        xgboost.train({"objective": "multi:softprob", "num_class": num_classes, "base_score": start.tolist(),
                       "disable_default_eval_metric": True}, data, obj=xgboost_objective(num_classes))

    Args:
        num_classes: K. Labels are the positions 0 to K - 1 in the order of the classes.
        power: 1 or 2; unused with a cost.
        x: (K,) strictly increasing class values, 0 to K - 1 by default. Gradients and curvatures grow with their
            gaps: regularisation (`lambda`, `min_child_weight`) is in the same unit.
        cost: (K, K) costs >= 0, [true, predicted], in place of power and x.
        transport: factor of the transport term; 0 leaves plain cross-entropy, with the trees of the library's own.
        cross_entropy: factor of the cross-entropy.
        class_weight: (K,) numbers, or a dict or pandas Series from position to number, which multiply the weights of
            rows. Series and DataFrames, also as x and cost, are read by their index, which names positions.
        hessian: "gauss-newton", the diagonal of that matrix (power 2 only); "bound", a diagonal that bounds the
            Hessian and so never lets a small step ascend; "absolute", the absolute diagonal of the Hessian, fastest
            and least careful. "auto" is twice Gauss-Newton at power 2, else the bound; cross-entropy is then curved
            as in the library's own objective. All are kept above a small floor.
        interface: "native" for `xgboost.train(obj=)`: f(predictions, data). "sklearn" for `XGBClassifier(objective=)`:
            f(y_true, y_pred, sample_weight).

    Returns:
        A picklable, unchangeable callable that returns (gradient, hessian), each (n, K) float32, times the weights of
        the rows: XGBoost applies none to objectives that are not its own. With two classes a single score (n,) for
        the second of them is right too, which is what `XGBClassifier` then trains.

    Raises:
        TypeError: if an argument holds no numbers.
        ValueError: if an argument is out of range; when called, if a label, weight or score is none.

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
    loss = row_loss(
        num_classes, power=power, x=x, cost=cost, transport=transport, cross_entropy=cross_entropy,
        class_weight=class_weight,
    )  # fmt: skip
    return _objective("xgboost", loss, hessian, interface)


def lightgbm_objective(
    num_classes: int,
    *,
    power: int = 2,
    x: ArrayLike | None = None,
    cost: ArrayLike | None = None,
    transport: float = 1.0,
    cross_entropy: float = 0.0,
    class_weight: ArrayLike | dict[int, float] | None = None,
    hessian: str = "auto",
    interface: str = "native",
) -> _Objective:
    """Return an objective for LightGBM; the loss and the arguments are those of `xgboost_objective`.

        start = numpy.tile(otloss.boosting.start_scores(labels, num_classes), (len(labels), 1))
        lightgbm.train({"objective": lightgbm_objective(num_classes), "num_class": num_classes},
                       lightgbm.Dataset(features, labels, init_score=start))

    LightGBM forgets what it started from and applies no softmax after an objective that is not its own: probabilities
    are `scipy.special.softmax(booster.predict(features) + start[0], axis=1)`, also for `LGBMClassifier`, whose
    `predict_proba` returns raw scores then, (n, K), and whose `predict` returns the same scores, not labels: these are
    the `argmax(axis=1)` of the probabilities. `otloss.estimators.OrdinalBoostingClassifier(booster="lightgbm")` does
    all that by itself.

    `LGBMClassifier(metric="None")` where it stops early: else it adds its own log-loss, which takes our scores for
    probabilities, and `lightgbm.early_stopping` watches every metric and so ends training on a wrong one.

    Args:
        interface: "native" for `lightgbm.train({"objective": f})`: f(predictions, dataset). "sklearn" for
            `LGBMClassifier(objective=)`: f(y_true, y_pred, weight). Fit that one to positions, not to names:
            `LGBMClassifier` numbers its labels by the alphabet ("high" < "low" < "mid") before this loss sees them.
            Encode them by `sklearn.preprocessing.OrdinalEncoder(categories=[["low", "mid", "high"]])`, or use
            `otloss.estimators.OrdinalBoostingClassifier(categories=["low", "mid", "high"])`.

    Returns:
        A picklable, unchangeable callable that returns (gradient, hessian), each (n, K) float32 in Fortran order, times
        the weights of the rows. With two classes a single score (n,) for the second of them is right too, which is
        what `LGBMClassifier` then trains.

    Raises:
        TypeError: if an argument holds no numbers.
        ValueError: if an argument is out of range; when called, if a label, weight or score is none.

    Examples:
        >>> import numpy as np
        >>> objective = lightgbm_objective(3, power=1, interface="sklearn")
        >>> gradient, hessian = objective(np.array([0, 2]), np.zeros((2, 3)))
        >>> gradient.round(3)
        array([[-0.333,  0.   ,  0.333],
               [ 0.333,  0.   , -0.333]], dtype=float32)
    """
    loss = row_loss(
        num_classes, power=power, x=x, cost=cost, transport=transport, cross_entropy=cross_entropy,
        class_weight=class_weight,
    )  # fmt: skip
    return _objective("lightgbm", loss, hessian, interface)


def _check_sum(loss: RowLoss, rows: Rows) -> None:
    total = loss.steepest * (float(rows.weights.sum()) if rows.weights.size else len(rows.labels))
    if total > _LARGEST_SUM:
        raise ValueError(
            f"gradients of {len(rows.labels)} rows may sum to {total:.3g}, expected at most {_LARGEST_SUM:g}: XGBoost "
            "squares the sum in float32, and beyond that finds no split. Divide the weights of rows by one number, or "
            "x, cost or transport and cross_entropy."
        )


def _objective(library: str, loss: RowLoss, hessian: str, interface: str) -> _Objective:
    kind = _NativeObjective if check_choice("interface", interface, INTERFACES) == "native" else _SklearnObjective
    return kind(library, loss, check_hessian(hessian, loss))
