"""A linear or multi-layer classifier of ordered labels, trained with transport losses."""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import validate_data

from otloss.estimators._base import OrdinalBase, class_prior
from otloss.estimators._criterion import check_choice, check_count, check_real
from otloss.estimators._labels import LabelOrder, label_order, ordered_categories
from otloss.estimators._scores import MODELS, ScoreFunction
from otloss.estimators._training import Adam, Objective, Rows, train_adam, train_epoch, train_lbfgs
from otloss.estimators._weights import row_weights, split_off

SOLVERS = ("auto", "lbfgs", "adam")


def _learns_in_parts(classifier: OrdinalClassifier) -> bool:
    if classifier.calibration is not None:
        raise AttributeError(
            f"calibration is {classifier.calibration!r}, which partial_fit has no rows to hold out for; use fit, or "
            "calibration=None."
        )
    return True


class OrdinalClassifier(OrdinalBase):
    """Classifier of ordered labels: a linear model or a multi-layer perceptron trained with a transport loss.

    Minimises the mean by weight of transport * L + cross_entropy * (-log P_y), plus alpha / (2 sum of weights) |W|^2;
    L = sum_k d_k |F_k - 1[y <= k]|^power for the gaps d between class values, or sum_i P_i cost[y, i].

    `VotingClassifier`, `StackingClassifier`, `BaggingClassifier` and `cross_val_predict` pass on indices into the
    sorted labels in place of labels. These are recognised, also with `categories`; where the two orders differ (such as
    "high", "low", "medium") an `EncodedLabelsWarning` says how they were read. Labels that sort in their rank order
    avoid it.

    Args:
        categories: all labels in rank order, lowest first, of any type that sorts; a training set may lack some. By
            default the order of an ordered pandas Categorical, else the sorted labels of y: for words, the alphabet.
        values: (K,) strictly increasing class values for the categories, 0 to K - 1 by default: what the distances of
            the loss, `decode="mean"` and `expected_value` are made of.
        power: 2, the ranked probability score, or 1, W_1; unused with a cost.
        cost: (K, K) costs >= 0 over the categories, **cost[true, predicted]**, in place of values and power.
        transport: weight of the transport loss; 0 leaves cross-entropy alone.
        cross_entropy: weight of the cross-entropy added; advisable at power 1 and with a cost, which alone drive
            probabilities to 0 and 1.
        model: "softmax", a score for each class, or "cumulative", one score with K - 1 ordered thresholds
            (proportional odds): few parameters, for few rows or labels that follow one direction of the features.
        hidden_layer_sizes: widths of hidden layers of rectified units; () for a linear model.
        alpha: L2 penalty on the weights, as 1 / C in `LogisticRegression`; biases and thresholds have none.
        class_weight: None, "balanced", or a dict from label to weight.
        decode: how `predict` chooses: "argmax" (most probable; what scikit-learn expects of a classifier), "median"
            (least expected absolute error in ranks), "mean" (class value nearest to the expected one), or "cost"
            (least expected cost; needs a cost).
        calibration: None, "temperature" or "ordinal" (`otloss._calibration`), fitted to rows held out of training.
        calibration_fraction: share of rows held out for it, class by class.
        standardize: give features mean 0 and deviation 1 (by weight) first; penalty and step size suppose so.
        solver: "lbfgs" (all rows, float64, deterministic), "adam" (batches), or "auto": lbfgs for linear models without
            early_stopping=True, else adam.
        learning_rate, batch_size: of adam.
        max_iter: iterations of lbfgs, or epochs of adam.
        tol: lbfgs ends at slopes below it, adam where `n_iter_no_change` epochs improve the loss by less.
        early_stopping: with adam, hold rows out and keep the parameters that were best on them; "auto": from 50 rows.
        validation_fraction: share of rows held out for it, class by class.
        refit: then train again from the same start on all rows, for the best number of epochs.
        warm_start: `fit` goes on from the last solution; labels, features and layers must stay.
        random_state: seed or `numpy.random.RandomState` for rows held out, batches and first weights of hidden layers.
        verbose: 1 prints the loss of each epoch of adam.

    Attributes:
        classes_: (m,) the labels seen in training, sorted; the columns of `predict_proba`.
        categories_: (K,) all labels in rank order; the columns of `predict_distribution`.
        n_iter_: iterations or epochs.

    Source:
        L. Hou, C.-P. Yu, D. Samaras, Squared Earth Mover's Distance-based Loss, arXiv 1611.05916 (the loss);
        P. McCullagh, Regression models for ordinal data, JRSS B 1980 (the cumulative model).

    Example:
        >>> X = np.linspace(0, 3, 60)[:, None]
        >>> y = np.array(["low", "mid", "high"])[np.minimum(X[:, 0], 2.9).astype(int)]
        >>> model = OrdinalClassifier(categories=["low", "mid", "high"]).fit(X, y)
        >>> model.predict([[0.2], [1.5], [2.8]]).tolist(), model.classes_.tolist()
        (['low', 'mid', 'high'], ['high', 'low', 'mid'])
    """

    _scores: ScoreFunction
    _scaler: StandardScaler
    _parameters: np.ndarray
    _adam: Adam
    _mass: float
    _random: np.random.RandomState

    def __init__(
        self,
        *,
        categories: Any = None,
        values: Any = None,
        power: int = 2,
        cost: Any = None,
        transport: float = 1.0,
        cross_entropy: float = 0.2,
        model: str = "softmax",
        hidden_layer_sizes: Any = (),
        alpha: float = 0.3,
        class_weight: Any = None,
        decode: str = "argmax",
        calibration: str | None = None,
        calibration_fraction: float = 0.2,
        standardize: bool = True,
        solver: str = "auto",
        learning_rate: float = 5e-3,
        batch_size: int = 200,
        max_iter: int = 1000,
        tol: float = 1e-6,
        early_stopping: bool | str = "auto",
        validation_fraction: float = 0.2,
        n_iter_no_change: int = 20,
        refit: bool = True,
        warm_start: bool = False,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.categories = categories
        self.values = values
        self.power = power
        self.cost = cost
        self.transport = transport
        self.cross_entropy = cross_entropy
        self.model = model
        self.hidden_layer_sizes = hidden_layer_sizes
        self.alpha = alpha
        self.class_weight = class_weight
        self.decode = decode
        self.calibration = calibration
        self.calibration_fraction = calibration_fraction
        self.standardize = standardize
        self.solver = solver
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.tol = tol
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.refit = refit
        self.warm_start = warm_start
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> OrdinalClassifier:
        """Fit to features X (n, d), labels y (n,), and weights (n,) if given; return self.

        Raises:
            ValueError: if a label, a weight, a feature or a setting is wrong; the message says which.
        """
        self._fit(X, y, sample_weight)
        return self

    @available_if(_learns_in_parts)
    @torch.inference_mode(False)
    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> OrdinalClassifier:
        """Go once over the rows given, with Adam, from where the last call ended; return self.

        The first call fixes the labels: `classes` if given, else `categories`, else those of y. Features are
        standardised by the mean and the deviation of all rows so far; when these move, what was learnt is carried over
        exactly.

        Raises:
            AttributeError: if calibration is asked for, for which there are no rows to hold out.
            ValueError: as `fit`, or if y holds a label that the first call did not name.
        """
        first = not hasattr(self, "classes_")
        categories = ordered_categories(y) if self.categories is None else self.categories
        X, y = validate_data(self, X, y, reset=first, **self._accepts())
        self._check_settings()
        self._calibration = None
        if first:
            self._set_order(label_order(y, categories, classes=categories if classes is None else classes))
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(
                f"classes is {classes!r}, expected {self.classes_.tolist()} as in the first call, or None."
            )
        positions = self._order.positions(y)
        weights = row_weights(sample_weight, self.class_weight, order=self._order, positions=positions)
        if not hasattr(self, "_adam"):
            self._adam, self._random = Adam(), check_random_state(self.random_state)
            self.n_iter_ = getattr(self, "n_iter_", 0)
        self._prepare(X, positions, weights, random=self._random, onward=not first)
        self.n_iter_ += 1
        if len(self.classes_) > 1:
            # The penalty is shared by all rows so far, of which these are a part.
            share = float(weights.sum()) / self._mass
            self._parameters, _ = train_epoch(
                replace(self._objective(), alpha=self.alpha * share),
                self._parameters,
                Rows.of(self._features(X), positions, weights),
                adam=self._adam,
                random=self._random,
                **self._steps(),
            )
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # One score for all classes cannot tell classes apart that do not follow each other along a line.
        tags.classifier_tags.poor_score = self.model == "cumulative" and not self._hidden()
        return tags

    def _set_order(self, order: LabelOrder) -> None:
        if self.warm_start and hasattr(self, "classes_") and not np.array_equal(order.classes, self.classes_):
            raise ValueError(
                f"y holds the labels {order.classes.tolist()}, expected those of the last fit, "
                f"{self.classes_.tolist()}, with warm_start=True; set it to False to start anew."
            )
        super()._set_order(order)

    def _check_settings(self) -> None:
        super()._check_settings()
        check_choice("model", self.model, MODELS)
        check_choice("solver", self.solver, SOLVERS)
        check_real("alpha", self.alpha, least=0.0)
        check_real("learning_rate", self.learning_rate, least=0.0, above=True)
        check_real("tol", self.tol, least=0.0)
        for name in ("batch_size", "max_iter"):
            check_count(name, getattr(self, name))
        for width in self._hidden():
            check_count("hidden_layer_sizes", width)
        if self.solver == "lbfgs" and self.early_stopping not in (False, "auto"):
            raise ValueError("early_stopping=True with solver='lbfgs', which goes to the optimum; use solver='adam'.")

    def _hidden(self) -> tuple[int, ...]:
        widths = self.hidden_layer_sizes
        return tuple(widths) if np.iterable(widths) else (widths,)

    @torch.inference_mode(False)
    def _train(
        self, X: np.ndarray, positions: np.ndarray, weights: np.ndarray, *, random: np.random.RandomState
    ) -> None:
        for name in ("_adam", "_random"):
            self.__dict__.pop(name, None)
        self.n_iter_ = 1
        self._prepare(X, positions, weights, random=random, onward=self.warm_start and hasattr(self, "_parameters"))
        if len(self.classes_) == 1:
            return
        rows = Rows.of(self._features(X), positions, weights)
        in_batches = bool(self._hidden()) or self.early_stopping not in (False, "auto")
        uses_adam = self.solver == "adam" or (self.solver == "auto" and in_batches)
        if uses_adam:
            settled = self._by_adam(rows, random)
        else:
            self._parameters, self.n_iter_, settled = train_lbfgs(
                self._objective(), self._parameters, rows, max_iter=self.max_iter, tol=self.tol
            )
        if not settled:
            warnings.warn(
                f"OrdinalClassifier did not converge in max_iter={self.max_iter} iterations; raise max_iter or tol.",
                ConvergenceWarning,
                stacklevel=4,
            )

    def _by_adam(self, rows: Rows, random: np.random.RandomState) -> bool:
        held_out, everything = None, rows
        if self._stops_early(len(rows)):
            kept, held = split_off(
                rows.target.numpy(), self.validation_fraction, random=random, purpose="early stopping"
            )
            rows, held_out = rows[kept], rows[held]
            if not (held_out.weight.any() and rows.weight.any()):
                raise ValueError(
                    "the rows held out for early stopping, or those kept, all have weight 0; drop such rows."
                )
        settings = {"tol": self.tol, "verbose": self.verbose, "random": random, **self._steps()}
        start, objective = self._parameters, self._objective()
        found = train_adam(
            objective, start, rows, held_out=held_out, max_iter=self.max_iter, n_iter_no_change=self.n_iter_no_change,
            **settings,
        )  # fmt: skip
        settled = found.settled
        if held_out is not None and self.refit:
            # For as many epochs, however the loss goes.
            found = train_adam(
                objective, start, everything, held_out=None, max_iter=found.epochs,
                n_iter_no_change=found.epochs + 1, **settings,
            )  # fmt: skip
        self._parameters, self.n_iter_ = found.parameters, found.epochs
        return settled

    def _prepare(
        self,
        X: np.ndarray,
        positions: np.ndarray,
        weights: np.ndarray,
        *,
        random: np.random.RandomState,
        onward: bool,
    ) -> None:
        """Standardise and start the parameters; or go `onward`, both moved so that the scores stay what they were."""
        scores = ScoreFunction(X.shape[1], self._hidden(), len(self.classes_), self.model)
        if onward and scores != self._scores:
            raise ValueError(
                f"X and the settings make {scores}, expected {self._scores} as in the last call; set warm_start=False "
                "and call fit to start anew."
            )
        known = self._scaler if onward else None
        if not self.standardize:
            scaler = StandardScaler(with_mean=False, with_std=False).fit(X)
        elif known is not None and hasattr(self, "_adam"):
            scaler = deepcopy(known).partial_fit(X, sample_weight=weights)
        else:
            scaler = StandardScaler().fit(X, sample_weight=weights)
        self._mass = float(weights.sum()) + (self._mass if onward and hasattr(self, "_adam") else 0.0)
        shift, stretch = _centre(scaler), _scale(scaler)
        if onward and len(self.classes_) > 1:
            self._parameters = scores.restandardised(
                self._parameters,
                shift=(shift - _centre(self._scaler)) / _scale(self._scaler),
                stretch=stretch / _scale(self._scaler),
            )
        elif len(self.classes_) > 1:
            self._parameters = scores.start(class_prior(positions, weights, len(self.classes_)), random)
        self._scores, self._scaler = scores, scaler

    def _features(self, X: np.ndarray) -> np.ndarray:
        return (X - _centre(self._scaler)) / _scale(self._scaler)

    def _objective(self) -> Objective:
        return Objective(self._scores, self._criterion, self.alpha)

    def _steps(self) -> dict[str, Any]:
        return {"learning_rate": self.learning_rate, "batch_size": self.batch_size}

    def _logits(self, X: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            logits = self._scores(torch.from_numpy(self._parameters), torch.from_numpy(self._features(X)))
        return logits.numpy()


def _centre(scaler: StandardScaler) -> np.ndarray:
    return np.zeros(scaler.n_features_in_) if scaler.mean_ is None else scaler.mean_


def _scale(scaler: StandardScaler) -> np.ndarray:
    return np.ones(scaler.n_features_in_) if scaler.scale_ is None else scaler.scale_
