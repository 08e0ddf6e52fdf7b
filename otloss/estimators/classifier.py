"""A linear or multi-layer classifier of ordered labels, trained with transport losses."""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted, validate_data

from otloss.boosting.start import class_shares
from otloss.estimators.base import OrdinalBase, check_magnitude, unchanged_on_error
from otloss.estimators.criterion import check_choice, check_count, check_real
from otloss.estimators.features import LARGEST_FEATURE, centre_of, fitted_scaler, scale_of
from otloss.estimators.labels import LabelOrder, label_order, ordered_categories, refuse_missing_objects
from otloss.estimators.scores import MODELS, ScoreFunction
from otloss.estimators.training import Adam, Objective, Rows, train_adam_in_parts, train_epoch, train_lbfgs
from otloss.estimators.weights import split_off

ROUNDING = 1e-8  # slopes below which float64 may see no difference in the loss
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
    sorted labels in place of labels, and drop the order of a Categorical: name `categories` there. Indices are
    recognised by their being no categories, and an `EncodedLabelsWarning` says how they were read where the orders
    differ ("high", "low", "medium") or categories are numbers. Among the categories 1 to K, a fold of indices without
    the lowest class reads as labels one rank too low, with a warning: prefer labels 0 to K - 1. Without `categories`
    the gaps between whole numbers are lost there.

    Args:
        categories: all labels in rank order, lowest first, of any type that sorts, or an ordered CategoricalDtype; a
            training set may lack some. By default the order of an ordered pandas Categorical. Else whole numbers, also
            as text, stand for every integer from the smallest to the largest: labels 1, 2, 5 have the positions 0, 1,
            4, as in `otloss.metrics`. Other labels are sorted; for words a `LabelOrderWarning` says so.
        values: (K,) strictly increasing class values for the categories, 0 to K - 1 by default: what the distances of
            the loss, `decode="mean"` and `expected_value` are made of. A Series, as a cost in a DataFrame, goes by its
            index. Training divides values by their mean gap, a cost by its largest entry over K - 1.
        power: 2, the ranked probability score, or 1, W_1; unused with a cost.
        cost: (K, K) costs >= 0 over the categories, **cost[true, predicted]**, in place of values and power.
        transport: weight of the transport loss; 0 leaves cross-entropy alone.
        cross_entropy: weight of the cross-entropy added; advisable at power 1 and with a cost, which alone drive
            probabilities to 0 and 1, to a local optimum.
        model: "softmax", a score for each class, or "cumulative", one score with K - 1 ordered thresholds
            (proportional odds): few parameters, for few rows or labels that follow one direction of the features.
        hidden_layer_sizes: widths of hidden layers of rectified units; () for a linear model.
        alpha: L2 penalty on the weights, as 1 / C in `LogisticRegression`; biases and thresholds have none.
        class_weight: None, "balanced", or a dict from label to weight.
        decode: how `predict` chooses. "median" is the least expected absolute error in ranks; it was 8 % less than
            "argmax" in the mean of 23 sets, at equal accuracy (cumulative model: 2 % less, accuracy 1.4 points lower).
            "argmax", the most probable class, is for accuracy, and the default: scikit-learn's
            `check_classifiers_train` passes with no other rule. "mean" is the class value nearest to the expected one,
            "cost" the least expected cost, which needs a cost.
        calibration: None, "temperature" (`otloss.estimators.Temperature`) or "ordinal" (`OrdinalRecalibration`, beside
            it), fitted to rows held out of training.
        calibration_fraction: share of rows held out for it, class by class.
        standardize: give features deviation 1 (by weight) first, as penalty and step size suppose; they are centred
            always.
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
        coef_, intercept_: of linear models, in the units of the features and before calibration; AttributeError with
            hidden layers or one class alone. Softmax: (m, d) and (m,), whose `softmax(X @ coef_.T + intercept_)` is
            `predict_proba`, also for two classes. Cumulative: (1, d) and (m - 1,), whose X @ coef_.T + intercept_ are
            the log-odds of the labels above each of the first m - 1 seen.
        thresholds_: (m - 1,) of linear cumulative models, increasing, the negatives of intercept_: the log-odds of the
            labels up to each of the first m - 1 seen are thresholds_ - X @ coef_.T.

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
    _scaler: Any
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
        """Fit to features X (n, d), made dense if sparse, labels y (n,), and weights (n,) if given; return self.

        Raises:
            ValueError: if a label, a weight, a feature or a setting is wrong; the message says which.
        """
        with unchanged_on_error(self), torch.inference_mode(False):
            self._fit(X, y, sample_weight)
        return self

    @available_if(_learns_in_parts)
    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> OrdinalClassifier:
        """Go once over the rows given, with Adam, from where the last call ended; return self.

        The first call fixes the labels: `classes` if given, else `categories`, else those of y. Features are
        standardised by all rows so far; when these move mean and deviation, what was learnt is carried over exactly.

        Raises:
            AttributeError: if calibration is asked for, for which there are no rows to hold out.
            ValueError: as `fit`, if y holds a label that the first call did not name, or class_weight is "balanced".
        """
        if isinstance(self.class_weight, str):
            raise ValueError(
                f"class_weight is {self.class_weight!r}, which partial_fit cannot know from a part of the rows; pass "
                "a dict of labels: sklearn.utils.class_weight.compute_class_weight makes weights out of all of them."
            )
        with unchanged_on_error(self), torch.inference_mode(False):
            self._go_over(X, y, classes, sample_weight)
        return self

    def _go_over(self, X: Any, y: Any, classes: Any, sample_weight: Any) -> None:
        first = not hasattr(self, "classes_")
        refuse_missing_objects(y)
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
        X, positions, weights = self._weighted_rows(X, y, sample_weight)
        if not hasattr(self, "_adam"):
            self._random = check_random_state(self.random_state)
            self.n_iter_ = getattr(self, "n_iter_", 0)
        self._adam = deepcopy(getattr(self, "_adam", Adam()))  # the one before stays, should this call fail
        self._prepare(X, positions, weights, random=self._random, onward=not first)
        self.n_iter_ += 1
        if len(self.classes_) > 1:
            # The penalty is shared by all rows so far, of which these are a part.
            alpha = self.alpha * float(weights.sum()) / self._mass
            self._parameters, _ = train_epoch(
                replace(self._objective(), alpha=alpha),
                self._parameters,
                Rows.of(self._features(X), positions, weights),
                adam=self._adam,
                random=self._random,
                **self._steps(),
            )

    @property
    def coef_(self) -> np.ndarray:
        """(m, d) weights for the scores of `classes_`, or (1, d) of the cumulative model."""
        weights = self._linear_part("coef_")[0].T
        return weights if self._scores.model == "cumulative" else weights[self._order.columns]

    @property
    def intercept_(self) -> np.ndarray:
        """(m,) biases of the scores of `classes_`, or (m - 1,) of the cumulative model: its thresholds' negatives."""
        if self._linear_scores("intercept_").model == "cumulative":
            return -self.thresholds_
        return self._linear_part("intercept_")[1][self._order.columns]

    @property
    def thresholds_(self) -> np.ndarray:
        """(m - 1,) increasing thresholds of the cumulative model."""
        if self._linear_scores("thresholds_").model != "cumulative":
            raise AttributeError("thresholds_ is of model='cumulative', and this one was fitted with model='softmax'.")
        _, bias, log_gaps = self._linear_part("thresholds_")
        return np.concatenate([np.zeros(1), np.exp(log_gaps).cumsum()]) - bias

    def _linear_scores(self, name: str) -> ScoreFunction:
        """The score function, or AttributeError for the attribute `name` if it is not linear."""
        check_is_fitted(self)
        if self._scores.hidden or len(self.classes_) == 1:
            found = f"hidden_layer_sizes={self._scores.hidden}" if self._scores.hidden else "one class alone"
            raise AttributeError(f"{name} is of linear models of two classes or more, and this one has {found}.")
        return self._scores

    def _linear_part(self, name: str) -> list[np.ndarray]:
        """Weights, bias and, if cumulative, log-gaps of the thresholds, for features that are not standardised."""
        scores, stretch = self._linear_scores(name), 1 / scale_of(self._scaler)
        plain = scores.restandardised(self._parameters, shift=-centre_of(self._scaler) * stretch, stretch=stretch)
        return [part.numpy() for part in scores.unpack(torch.from_numpy(plain))]

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
        for name in ("standardize", "warm_start"):
            check_choice(name, getattr(self, name), (True, False))
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
        problem = self._by_adam(rows, random) if uses_adam else self._by_lbfgs(rows)
        if problem:
            warnings.warn(f"OrdinalClassifier did not converge {problem}.", ConvergenceWarning, stacklevel=4)

    def _by_lbfgs(self, rows: Rows) -> str:
        scale = min(self._criterion.transport + self._criterion.cross_entropy, 1.0)  # of the loss
        self._parameters, self.n_iter_, slope = train_lbfgs(
            self._objective(), self._parameters, rows, max_iter=self.max_iter, tol=self.tol * scale
        )
        if slope <= max(self.tol, ROUNDING) * scale:
            return ""
        if self.n_iter_ >= self.max_iter:
            return f"in max_iter={self.max_iter} iterations; raise max_iter or tol"
        return (
            f"to tol={self.tol:g}: at slopes of {slope:.2g} the loss falls no more; use standardize=True, or raise tol"
        )

    def _by_adam(self, rows: Rows, random: np.random.RandomState) -> str:
        parts = None
        if self._stops_early(len(rows)):
            parts = split_off(rows.target.numpy(), self.validation_fraction, random=random, purpose="early stopping")
        found = train_adam_in_parts(
            self._objective(), self._parameters, rows, parts=parts, refit=self.refit, max_iter=self.max_iter,
            n_iter_no_change=self.n_iter_no_change, tol=self.tol, verbose=self.verbose, random=random, **self._steps(),
        )  # fmt: skip
        self._parameters, self.n_iter_ = found.parameters, found.epochs
        return "" if found.settled else f"in max_iter={self.max_iter} iterations; raise max_iter or tol"

    def _prepare(
        self, X: np.ndarray, positions: np.ndarray, weights: np.ndarray, *, random: np.random.RandomState, onward: bool
    ) -> None:
        """Standardise and start the parameters; or go `onward`, both moved so that the scores stay what they were."""
        scores = ScoreFunction(X.shape[1], self._hidden(), len(self.classes_), self.model)
        if onward and scores != self._scores:
            raise ValueError(
                f"X and the settings make {scores}, expected {self._scores} as in the last call; set warm_start=False "
                "and call fit to start anew."
            )
        in_parts = onward and hasattr(self, "_adam")
        known = self._scaler if in_parts else None
        scaler = fitted_scaler(X, weights, standardize=bool(self.standardize), known=known)
        self._mass = float(weights.sum()) + (self._mass if in_parts else 0.0)
        if onward and len(self.classes_) > 1:
            stretch = scale_of(self._scaler)
            self._parameters = scores.restandardised(
                self._parameters,
                shift=(centre_of(scaler) - centre_of(self._scaler)) / stretch,
                stretch=scale_of(scaler) / stretch,
            )
        elif len(self.classes_) > 1:
            self._parameters = scores.start(class_shares(positions, weights, len(self.classes_)), random)
        self._scores, self._scaler = scores, scaler

    def _features(self, X: np.ndarray) -> np.ndarray:
        return (X - centre_of(self._scaler)) / scale_of(self._scaler)

    def _check_features(self, X: np.ndarray) -> None:
        check_magnitude(X, LARGEST_FEATURE, mend="divide the feature by a power of ten")

    def _objective(self) -> Objective:
        return Objective(self._scores, self._criterion, self.alpha)

    def _steps(self) -> dict[str, Any]:
        return {"learning_rate": self.learning_rate, "batch_size": self.batch_size}

    def _logits(self, X: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            # Copied: joblib may have loaded the parameters as memory that must not be written.
            parameters = torch.tensor(self._parameters, device="cpu")
            logits = self._scores(parameters, torch.from_numpy(self._features(X)))
        return logits.numpy()
