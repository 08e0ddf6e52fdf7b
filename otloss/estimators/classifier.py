"""A linear or multi-layer classifier of ordered labels, trained with transport losses."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted, validate_data

from otloss._checks import check_count
from otloss._ordered_classes import check_choice
from otloss.boosting.start import class_shares
from otloss.estimators.base import OrdinalBase, dense, split_off, unchanged_on_error
from otloss.estimators.criterion import check_real
from otloss.estimators.features import fitted_scaler, standardised
from otloss.estimators.likelihood import LikelihoodSummary, likelihood_summary
from otloss.estimators.training import (
    LOSSES,
    MODELS,
    PATIENCE,
    OrdinalNetwork,
    PenalisedLoss,
    Rows,
    restarted,
    train_adam,
    train_lbfgs,
)
from otloss.losses.cumulative import LINKS


class OrdinalClassifier(OrdinalBase):
    """Classifier of ordered labels: a linear model or a multi-layer perceptron trained with a transport loss.

    Minimises the mean by weight of transport * L + cross_entropy * (-log P_y), plus alpha / (2 sum of weights) |W|^2;
    L = sum_k d_k |F_k - 1[y <= k]|^power for the gaps d between class values, or sum_i P_i cost[y, i], or a loss of
    thresholds.

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
            index. Training divides values by their mean gap, a cost by its largest entry over K - 1.
        power: 2, the ranked probability score, or 1, W_1; unused with a cost.
        cost: (K, K) costs >= 0 over the categories, **cost[true, predicted]**, in place of values and power.
        loss: L, "transport", or the logistic loss of "all_threshold" or "immediate_threshold" models
            (`otloss.losses.threshold_loss`), which have no class values or costs. With model="cumulative" and
            cross_entropy=0 these are `LogisticAT` and `LogisticIT` of mord.
        transport: weight of L; 0 leaves cross-entropy alone.
        cross_entropy: weight of the cross-entropy added; advisable at power 1 and with a cost, which alone drive
            probabilities to 0 and 1, to a local optimum.
        model: "softmax", a score for each class, or "cumulative", one score with K - 1 ordered thresholds
            (proportional odds): few parameters, for few rows or labels that follow one direction of the features.
        link: of the cumulative model, "logit", "probit" or "cloglog" (complementary log-log: proportional hazards).
        hidden_layer_sizes: widths of hidden layers of rectified units; () for a linear model.
        alpha: L2 penalty on the weights, as 1 / C in `LogisticRegression`; biases and thresholds have none. Its
            unit is that of the rows' weights: with weights of sum one give it divided by the number of rows.
        class_weight: None, "balanced", or a dict from label to weight.
        decode: how `predict` chooses. "median", the default, has the least expected absolute error in ranks, and so
            few errors of several ranks. "argmax" is the most probable class, for accuracy: the only rule with which
            scikit-learn's `check_classifiers_train` passes, which asserts it. "mean" is the class value nearest to the
            expected one, "cost" the least expected cost, which needs a cost (docs/reports/ordinal_tables.md).
        calibration: None, "temperature" (`otloss.estimators.Temperature`) or "ordinal" (`OrdinalRecalibration`, beside
            it), fitted to rows held out of training.
        standardize: give features deviation 1 (by weight) first, as penalty and step size suppose; they are centred
            always.
        learning_rate, batch_size: of Adam, which trains hidden layers.
        max_iter: iterations of L-BFGS, which trains linear models on all rows, or epochs of Adam.
        tol: L-BFGS ends where no derivative is larger.
        early_stopping: with hidden layers, hold rows out, keep the epoch that was best on them, and train again for as
            many epochs on all rows; "auto": from 50 rows. Training ends when 20 epochs brought nothing.
        validation_fraction: share of rows held out for early stopping, and for calibration, class by class.
        warm_start: start from the parameters of the last fit, if that had as many features, the same classes in the
            same order, and layers of the same sizes.
        random_state: seed or `numpy.random.RandomState` for rows held out, batches and first weights of hidden layers.

    Attributes:
        classes_: (m,) the labels seen in training, sorted; the columns of `predict_proba`.
        categories_: (K,) all labels in rank order; the columns of `predict_distribution`.
        n_iter_: iterations or epochs.
        coef_, intercept_: of linear models, in the units of the features and before calibration; AttributeError with
            hidden layers or one class alone. Softmax: (m, d) and (m,), whose `softmax(X @ coef_.T + intercept_)` is
            `predict_proba`, also for two classes. Cumulative: (1, d) and (m - 1,), whose X @ coef_.T + intercept_ are
            the log-odds of the labels above each of the first m - 1 seen (with the logit link).
        thresholds_: (m - 1,) of linear cumulative models, increasing, the negatives of intercept_: the log-odds of the
            labels up to each of the first m - 1 seen are thresholds_ - X @ coef_.T; with another link that is the
            argument of its distribution.

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

    _network: OrdinalNetwork
    _scaler: StandardScaler
    _start: tuple[OrdinalNetwork, StandardScaler, np.ndarray] | None

    def __init__(
        self,
        *,
        categories: Any = None,
        values: Any = None,
        power: int = 2,
        cost: Any = None,
        loss: str = "transport",
        transport: float = 1.0,
        cross_entropy: float = 0.2,
        model: str = "softmax",
        link: str = "logit",
        hidden_layer_sizes: Any = (),
        alpha: float = 0.3,
        class_weight: Any = None,
        decode: str = "median",
        calibration: str | None = None,
        standardize: bool = True,
        learning_rate: float = 5e-3,
        batch_size: int = 200,
        max_iter: int = 1000,
        tol: float = 1e-4,
        early_stopping: bool | str = "auto",
        validation_fraction: float = 0.2,
        warm_start: bool = False,
        random_state: Any = None,
    ) -> None:
        self.categories = categories
        self.values = values
        self.power = power
        self.cost = cost
        self.loss = loss
        self.transport = transport
        self.cross_entropy = cross_entropy
        self.model = model
        self.link = link
        self.hidden_layer_sizes = hidden_layer_sizes
        self.alpha = alpha
        self.class_weight = class_weight
        self.decode = decode
        self.calibration = calibration
        self.standardize = standardize
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.tol = tol
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.warm_start = warm_start
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> OrdinalClassifier:
        """Fit to features X (n, d), labels y (n,), and weights (n,) if given; return self.

        A sparse X stays sparse in linear models, also to be centred, and is made dense for hidden layers.

        Raises:
            ValueError, TypeError: if a label, a weight, a feature or a setting is wrong; the message says which.

        Warns:
            ConvergenceWarning: if `max_iter` ended training.
        """
        with unchanged_on_error(self), torch.inference_mode(False), torch.enable_grad():
            self._start = None
            if self.warm_start and "_network" in vars(self):
                self._start = self._network, self._scaler, self._order.by_position
            self._fit(X, y, sample_weight)
            del self._start
        return self

    def summary(self, X: Any, y: Any, sample_weight: Any = None) -> LikelihoodSummary:
        """Return coefficients and thresholds with standard errors, and the log-likelihood: `print` it for a table.

        For a linear cumulative model fitted by likelihood, `OrdinalClassifier(model="cumulative", transport=0,
        cross_entropy=1, alpha=0)`, to these rows; tol=1e-8 gives more digits. A weight counts rows. Standard errors are
        those of the inverse of the Hessian.

        Raises:
            ValueError: if the model was not fitted so, these are not the rows that it was fitted to, features depend
                on each other linearly, or the features separate the classes, so that the likelihood has no maximum.
        """
        self._linear_parts("summary")
        wanted = {"model": "cumulative", "transport": 0, "alpha": 0, "class_weight": None, "calibration": None}
        for name, value in wanted.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"summary is of a model fitted by likelihood alone, expected {name}={value!r}, and it is "
                    f"{getattr(self, name)!r}; fit OrdinalClassifier(model='cumulative', transport=0, cross_entropy=1, "
                    "alpha=0)."
                )
        features, labels = validate_data(self, X, y, reset=False, **self._accepts())
        parts = self._weighted_rows(dense(features), labels, sample_weight)
        names = getattr(self, "feature_names_in_", [f"x{j}" for j in range(parts[0].shape[1])])
        with torch.inference_mode(False), torch.enable_grad():
            return likelihood_summary(self._network, self._scaler, parts, [*map(str, names)], self._order.by_position)

    @property
    def coef_(self) -> np.ndarray:
        """(m, d) weights for the scores of `classes_`, or (1, d) of the cumulative model."""
        weights = self._linear_parts("coef_")[0]
        return weights if self._network.log_gaps is not None else weights[self._order.columns]

    @property
    def intercept_(self) -> np.ndarray:
        """(m,) biases of the scores of `classes_`, or (m - 1,) of the cumulative model: its thresholds' negatives."""
        bias = self._linear_parts("intercept_")[1]
        return -self.thresholds_ if self._network.log_gaps is not None else bias[self._order.columns]

    @property
    def thresholds_(self) -> np.ndarray:
        """(m - 1,) increasing thresholds of the cumulative model."""
        bias, log_gaps = self._linear_parts("thresholds_")[1], self._network.log_gaps
        if log_gaps is None:
            raise AttributeError("thresholds_ is of model='cumulative', and this one was fitted with model='softmax'.")
        return np.concatenate([np.zeros(1), np.exp(log_gaps.detach().numpy()).cumsum()]) - bias

    def _linear_parts(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Weights (outputs, d) and bias (outputs,) for features as they come; AttributeError where there are none."""
        check_is_fitted(self)
        if len(self.classes_) == 1 or len(self._network.layers) > 1:
            reason = "one class alone" if len(self.classes_) == 1 else f"hidden_layer_sizes={self.hidden_layer_sizes}"
            raise AttributeError(f"{name} is of linear models of two classes or more, and this one has {reason}.")
        layer, scaler = self._network.layers[0], self._scaler
        weights = layer.weight.detach().numpy() / (1.0 if scaler.scale_ is None else scaler.scale_)
        return weights, layer.bias.detach().numpy() - weights @ scaler.mean_

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # One score for all classes cannot tell classes apart that do not follow each other along a line.
        tags.classifier_tags.poor_score = self.model == "cumulative" and not self._hidden()
        return tags

    def _check_settings(self) -> None:
        super()._check_settings()
        check_choice("model", self.model, MODELS)
        check_choice("link", self.link, LINKS)
        if self.link != "logit" and self.model != "cumulative":
            raise ValueError(f"link={self.link!r} is of model='cumulative', and model is {self.model!r}.")
        check_choice("loss", self.loss, LOSSES)
        if self.loss != "transport" and (self.cost is not None or self.values is not None):
            raise ValueError(f"loss={self.loss!r} has no class values or costs; leave cost and values out.")
        check_choice("standardize", self.standardize, (True, False))
        check_choice("warm_start", self.warm_start, (True, False))
        check_real("alpha", self.alpha, least=0.0)
        check_real("learning_rate", self.learning_rate, least=0.0, above=True)
        check_real("tol", self.tol, least=0.0)
        for name in ("batch_size", "max_iter"):
            check_count(name, getattr(self, name))
        for width in self._hidden():
            check_count("hidden_layer_sizes", width)

    def _hidden(self) -> tuple[int, ...]:
        widths = self.hidden_layer_sizes
        return tuple(widths) if np.iterable(widths) else (widths,)

    def _laid_out(self, X: Any) -> Any:
        if issparse(X) and not X.has_canonical_format:  # entries given twice are sums, and X is the caller's
            X = X.copy()
            X.sum_duplicates()
        return X

    def _train(self, X: Any, positions: np.ndarray, weights: np.ndarray, *, random: np.random.RandomState) -> None:
        X = dense(X) if self._hidden() else X
        self._scaler = fitted_scaler(X, weights, with_std=bool(self.standardize))
        self.n_iter_ = 1
        if len(self.classes_) == 1:
            return
        rows = Rows.of(standardised(X, self._scaler), positions, weights)
        train = self._by_adam if self._hidden() else self._by_lbfgs
        if not train(rows, random):
            warnings.warn(
                f"OrdinalClassifier did not converge in max_iter={self.max_iter} iterations; raise max_iter or tol.",
                ConvergenceWarning,
                stacklevel=4,
            )

    def _by_lbfgs(self, rows: Rows, random: np.random.RandomState) -> bool:
        self._network = self._new_network(rows, random)
        tol = self.tol * min(self._criterion.transport + self._criterion.cross_entropy, 1.0)
        objective = self._objective(rows)
        self.n_iter_, largest = train_lbfgs(self._network, objective, rows, max_iter=self.max_iter, tol=tol)
        return self.n_iter_ < self.max_iter or largest <= tol

    def _by_adam(self, rows: Rows, random: np.random.RandomState) -> bool:
        self._network = self._new_network(rows, random)

        def train(network: OrdinalNetwork, rows: Rows, held_out: Rows | None, epochs: int, patience: int) -> Any:
            return train_adam(
                network, self._objective(rows), rows, held_out=held_out, epochs=epochs, patience=patience,
                learning_rate=self.learning_rate, batch_size=self.batch_size, random=random,
            )  # fmt: skip

        if not self._stops_early(len(rows)):
            self.n_iter_, settled = train(self._network, rows, None, self.max_iter, PATIENCE)
            return bool(settled)
        parts = split_off(rows.target.numpy(), self.validation_fraction, random=random, purpose="early stopping")
        kept, validation = (rows[index] for index in parts)
        self.n_iter_, settled = train(deepcopy(self._network), kept, validation, self.max_iter, PATIENCE)
        train(self._network, rows, None, self.n_iter_, self.n_iter_ + 1)  # all rows, for as many epochs
        return bool(settled)

    def _new_network(self, rows: Rows, random: np.random.RandomState) -> OrdinalNetwork:
        prior = class_shares(rows.target.numpy(), rows.weight.numpy(), len(self.classes_))
        widths = (rows.features.shape[1], *self._hidden())
        network = OrdinalNetwork(widths, prior, self.model, random, self.link)
        if self._start is None:
            return network
        former, scaler, labels = self._start
        if not np.array_equal(labels, self._order.by_position) or former.sizes != network.sizes:
            return network
        return restarted(former, scaler, self._scaler)

    def _objective(self, rows: Rows) -> PenalisedLoss:
        return PenalisedLoss(self._criterion, float(self.alpha), float(rows.weight.sum()), self.loss)

    def _logits(self, X: Any) -> np.ndarray:
        network = self._network
        with torch.no_grad():
            if issparse(X) and len(network.layers) == 1:
                layer = network.layers[0]
                scores = standardised(X, self._scaler) @ layer.weight.numpy().T + layer.bias.numpy()
                return network.logits(torch.from_numpy(scores)).numpy()
            return network(torch.from_numpy(self._scaler.transform(dense(X)))).numpy()
