"""A linear classifier of ordered labels, trained with transport losses."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np

from otloss.estimators.model_base import LinearBase

_C = TypeVar("_C")
# Parameters that this class had when it was three models.
_MOVED = {
    ("hidden_layer_sizes", "learning_rate", "batch_size", "early_stopping"): "OrdinalNetworkClassifier, with head= for "
    "the former model=",
    ("model", "link", "loss"): "CumulativeLinkClassifier, without model=",
}


def _check_moved(params: Iterable[str]) -> None:
    """Raise TypeError for a parameter that another class has now."""
    for names, home in _MOVED.items():
        for name in params:
            if name in names:
                raise TypeError(f"OrdinalClassifier is linear and has no parameter {name!r}; use {home}.")


def _names_new_classes(cls: type[_C]) -> type[_C]:
    """Decorate a class: parameters of another class are named before Python says that they are unexpected."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: _C, **params: Any) -> None:
        _check_moved(params)
        init(self, **params)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


@_names_new_classes
@dataclass(kw_only=True, eq=False, repr=False)
class OrdinalClassifier(LinearBase):
    """Linear classifier of ordered labels, with a score for each class, trained with a transport loss.

    Minimises the mean by weight of transport * L + cross_entropy * (-log P_y), plus alpha / (2 sum of weights) |W|^2;
    L = sum_k d_k |F_k - 1[y <= k]|^power for the gaps d between class values, or sum_i P_i cost[y, i].
    A sparse X stays sparse, also to be centred. `CumulativeLinkClassifier` has one score for all classes, and
    `OrdinalNetworkClassifier` has hidden layers.

    `VotingClassifier`, `StackingClassifier`, `BaggingClassifier` and `cross_val_predict` pass on indices into the
    sorted labels in place of labels, and drop the order of a Categorical: name `categories` there. Integers that are
    not all among the categories are read as such indices: always where these are text, with an `EncodedLabelsWarning`
    if the orders differ ("high", "low", "medium"), and where they are numbers such as 1 to 5 if each index occurs.
    Without `categories`, or where the indices are categories themselves (0 to 10, of which `y` holds 0, 5 and 10), an
    index cannot be told from a label, and gaps or the order of text are lost. There pass labels 0 to K - 1 with
    categories=range(K), and in `values` the number that each stands for.

    Args:
        categories: all labels in rank order, lowest first, of any type that sorts, or an ordered CategoricalDtype or
            polars Enum; a training set may lack some. By default the order of an ordered pandas Categorical or a polars
            Enum. Else whole numbers stand for every integer from the smallest to the largest: labels 1, 2, 5 have the
            positions 0, 1, 4, as in `otloss.metrics`. Other labels are sorted; for text a `LabelOrderWarning` says so,
            and numbers with fractions are classes where each has two rows or more on average, with a warning.
        values: (K,) strictly increasing class values for the categories, 0 to K - 1 by default: what the distances of
            the loss, `decode="mean"` and `expected_value` are made of. A Series, as a cost in a DataFrame, goes by its
            index, or by rank where that is 0, 1, 2, ... as pandas gives it. Training divides values by their mean gap,
            a cost by its largest entry over K - 1; without `categories` by the mean gap of the labels seen, so that
            10, 20, 30 train as 0, 1, 2 do.
        power: 2, the ranked probability score, or 1, W_1; unused with a cost.
        cost: (K, K) costs >= 0 over the categories, **cost[true, predicted]**, in place of values and power.
        transport: weight of L; 0 leaves cross-entropy alone.
        cross_entropy: weight of the cross-entropy added; advisable at power 1 and with a cost, which alone drive
            probabilities to 0 and 1, to a local optimum.
        alpha: L2 penalty on the weights, as 1 / C in `LogisticRegression`; biases have none. Its unit is the unit of
            the rows' weights: with weights of sum one give it divided by the number of rows.
        class_weight: None, "balanced", or a dict from label to weight, which may name whole numbers without a row if it
            names all labels that have one.
        decode: how `predict` chooses. "median", the default, has the least expected absolute error in ranks, and so
            few errors of several ranks. "argmax" is the most probable class, for accuracy: the only rule with which
            scikit-learn's `check_classifiers_train` passes, which asserts it. "mean" is the class value nearest to the
            expected one, "cost" the least expected cost, which needs a cost (docs/reports/ordinal_tables.md).
        calibration: None, "temperature" (`otloss.estimators.Temperature`) or "ordinal" (`OrdinalRecalibration`, beside
            it), fitted to rows held out of training.
        standardize: give features deviation 1 (by weight) first, as penalty and step size suppose; they are centred
            always.
        max_iter: iterations of L-BFGS, which trains on all rows.
        tol: L-BFGS ends where no derivative is larger; lower it for costs of very unequal sizes, or without
            cross-entropy where a class is rare, since such losses have plateaus.
        validation_fraction: share of rows held out for calibration, class by class.
        warm_start: start from the parameters of the last fit, if that had as many features and the same classes in the
            same order.
        random_state: seed or `numpy.random.RandomState` for rows held out.

    Attributes:
        classes_: (m,) the labels seen in training, sorted; the columns of `predict_proba`.
        categories_: (K,) all labels in rank order; the columns of `predict_distribution`.
        n_iter_: iterations.
        coef_, intercept_: (m, d) and (m,), in the units of the features and before calibration:
            `softmax(X @ coef_.T + intercept_)` is `predict_proba`, also for two classes. AttributeError with one class.

    Source:
        L. Hou, C.-P. Yu, D. Samaras, Squared Earth Mover's Distance-based Loss, arXiv 1611.05916.

    Example:
        >>> X = np.linspace(0, 3, 60)[:, None]
        >>> y = np.array(["low", "mid", "high"])[np.minimum(X[:, 0], 2.9).astype(int)]
        >>> model = OrdinalClassifier(categories=["low", "mid", "high"]).fit(X, y)
        >>> model.predict([[0.2], [1.5], [2.8]]).tolist(), model.classes_.tolist()
        (['low', 'mid', 'high'], ['high', 'low', 'mid'])
    """

    def set_params(self, **params: Any) -> Self:
        """Set parameters of this estimator; return self."""
        _check_moved(params)
        result: Self = super().set_params(**params)
        return result

    @property
    def coef_(self) -> np.ndarray:
        """(m, d) weights for the scores of `classes_`."""
        return self._linear_parts("coef_")[0][self._order.columns]

    @property
    def intercept_(self) -> np.ndarray:
        """(m,) biases of the scores of `classes_`."""
        return self._linear_parts("intercept_")[1][self._order.columns]

    def _architecture(self) -> tuple[tuple[int, ...], str, str]:
        return (), "softmax", "logit"
