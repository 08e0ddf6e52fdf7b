"""A multi-layer perceptron for ordered labels, trained with transport losses."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from otloss._checks import check_count
from otloss._ordered_classes import check_choice
from otloss.estimators.base import hold_out
from otloss.estimators.criterion import check_real
from otloss.estimators.model_base import ModelBase
from otloss.estimators.training import HEADS, PATIENCE, OrdinalNetwork, Rows, train_adam


@dataclass(kw_only=True, eq=False, repr=False)
class OrdinalNetworkClassifier(ModelBase):
    """Multi-layer perceptron for ordered labels, trained with a transport loss by Adam.

    It minimises what `OrdinalClassifier` does. A sparse X is made dense.

    Args:
        categories, values, power, cost, transport, cross_entropy: as for `OrdinalClassifier`.
        hidden_layer_sizes: widths of the hidden layers of rectified units, one or several.
        head: "softmax", a score for each class, or "cumulative", one score with K - 1 ordered thresholds, as of
            `CumulativeLinkClassifier`.
        alpha: L2 penalty on the weights of all layers, divided by twice the sum of the rows' weights.
        class_weight, decode, calibration, standardize: as for `OrdinalClassifier`.
        learning_rate, batch_size: of Adam.
        max_iter: epochs.
        early_stopping: hold rows out, keep the epoch that was best on them, and train again for as many epochs on all
            rows; "auto": from 50 rows. Training ends when 20 epochs brought nothing.
        validation_fraction: share of rows held out for early stopping, and for calibration, class by class.
        warm_start: start from the parameters of the last fit, if that had as many features, the same classes in the
            same order, and layers of the same sizes.
        random_state: seed or `numpy.random.RandomState` for rows held out, batches and first weights.

    Attributes:
        classes_, categories_: as for `OrdinalClassifier`.
        n_iter_: epochs.

    Source:
        L. Hou, C.-P. Yu, D. Samaras, Squared Earth Mover's Distance-based Loss, arXiv 1611.05916.

    Example:
        >>> X = np.linspace(-3, 3, 60)[:, None]
        >>> y = np.minimum(abs(X[:, 0]), 2.9).astype(int)
        >>> model = OrdinalNetworkClassifier(hidden_layer_sizes=20, learning_rate=0.05, random_state=0).fit(X, y)
        >>> model.predict([[-2.5], [0.2], [1.5], [2.8]]).tolist()
        [2, 0, 1, 2]
    """

    hidden_layer_sizes: Any = (100,)
    head: str = "softmax"
    learning_rate: float = 5e-3
    batch_size: int = 200
    early_stopping: bool | str = "auto"

    _remedy = "max_iter or learning_rate"

    def _check_settings(self) -> None:
        super()._check_settings()
        check_choice("head", self.head, HEADS)
        self._check_early_stopping()
        check_real("learning_rate", self.learning_rate, minimum=0.0, above=True)
        check_count("batch_size", self.batch_size)
        widths = self._architecture()[0]
        if not widths:
            raise ValueError("hidden_layer_sizes is empty, expected a width or more; OrdinalClassifier is linear.")
        for width in widths:
            check_count("hidden_layer_sizes", width)

    def _architecture(self) -> tuple[tuple[int, ...], str, str]:
        widths = self.hidden_layer_sizes
        return tuple(widths) if np.iterable(widths) else (widths,), self.head, "logit"

    def _optimise(self, rows: Rows, random: np.random.RandomState) -> bool:
        def train(network: OrdinalNetwork, rows: Rows, held_out: Rows | None, epochs: int, patience: int) -> Any:
            return train_adam(
                network, self._objective(rows), rows, held_out=held_out, epochs=epochs, patience=patience,
                learning_rate=float(self.learning_rate), batch_size=int(self.batch_size), random=random,
            )  # fmt: skip

        if not self._stops_early(len(rows)):
            self.n_iter_, has_stopped = train(self._network, rows, None, int(self.max_iter), PATIENCE)
            return bool(has_stopped)
        assert isinstance(rows.features, torch.Tensor)
        features, target, weight = (part.numpy() for part in (rows.features, rows.target, rows.weight))
        halves = hold_out(features, target, weight, self.validation_fraction, random=random, purpose="early stopping")
        kept, validation = (replace(rows[half.rows], weight=torch.from_numpy(half.weights)) for half in halves)
        self.n_iter_, has_stopped = train(deepcopy(self._network), kept, validation, int(self.max_iter), PATIENCE)
        train(self._network, rows, None, self.n_iter_, self.n_iter_ + 1)  # all rows, for as many epochs
        return bool(has_stopped)
