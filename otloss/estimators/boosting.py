"""Boosted trees for ordered labels: XGBoost or LightGBM inside, with the gradients of transport losses."""

from __future__ import annotations

import functools
import inspect
import warnings
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
from joblib import effective_n_jobs  # type: ignore[import-untyped]
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_consistent_length, column_or_1d
from sklearn.utils.validation import check_is_fitted, validate_data

from otloss._checks import check_count
from otloss._foreign import check_keywords
from otloss._ordered_classes import check_choice
from otloss.boosting.derivatives import LARGEST_WEIGHT
from otloss.estimators.base import OrdinalBase, hold_out, unchanged_on_error
from otloss.estimators.boosters import (
    BOOSTERS,
    Part,
    Table,
    TreeSettings,
    checked_parameters,
    require_library,
    train_trees,
)
from otloss.estimators.criterion import check_real
from otloss.estimators.features import types_of_columns, warn_of_tiny_columns
from otloss.metrics.rank_labels import plain_items
from otloss.solvers.convergence import level_of_the_caller

_C = TypeVar("_C")
_CONSTANT = (
    "OrdinalBoostingClassifier split no row from another, so that it predicts the class frequencies: the loss is too "
    "small beside the limits and penalties of the trees. Raise transport and cross_entropy or the weights, or lower "
    "{} in booster_params."
)
_LIMITS = {
    "xgboost": "min_child_weight, gamma and lambda",
    "lightgbm": "min_sum_hessian_in_leaf, lambda_l2, min_gain_to_split, min_data_in_leaf and cat_smooth",
}
_OTHER_CATEGORIES = ("dictionary<", "Categorical", "Enum(")  # beginnings of the names of dtypes of Arrow and polars
_UNSEEN_MISSING = {
    "xgboost": "XGBoost sends them to one side of each split",
    "lightgbm": "LightGBM reads them as 0, which is the first of ordered categories",
}
SMALLEST_NUMBERS = {"xgboost": 1e-38, "lightgbm": 1e-35}  # the limits of float32, and of zero as LightGBM has it
# What trains on a cluster, by booster.
_ON_DASK = {
    "xgboost": "xgboost.dask.train(obj=otloss.boosting.xgboost_objective(K))",
    "lightgbm": 'lightgbm.DaskLGBMRegressor(objective=otloss.boosting.lightgbm_objective(K, interface="sklearn"))',
}


def _names_foreign_settings(cls: type[_C]) -> type[_C]:
    """Decorate a class: settings of the libraries are named before Python says that they are unexpected."""
    init, own = cls.__init__, inspect.signature(cls).parameters

    @functools.wraps(init)
    def checked(self: _C, **params: Any) -> None:
        check_keywords(cls.__name__, params, own)
        init(self, **params)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


@_names_foreign_settings
@dataclass(kw_only=True, eq=False, repr=False)
class OrdinalBoostingClassifier(OrdinalBase):
    """Classifier of ordered labels: boosted trees of XGBoost or LightGBM with the gradients of a transport loss.

    Minimises the sum by weight of transport * L + cross_entropy * (-log P_y), starting from the class frequencies;
    L = sum_k d_k |F_k - 1[y <= k]|^power for the gaps d between class values, or sum_i P_i cost[y, i]. Equal rows count
    as one row of their weight, for `subsample` too, but where LightGBM counts rows: by `min_child_samples` and the
    like, and in columns of categories. NaN is a missing value; where a column of the trees had none in fit, predicting
    warns.

    Weights (times the ones by `class_weight`) count rows: two is a row given twice, as scikit-learn checks, but where
    LightGBM counts rows, and where rows are held out: copies may lie on both sides, so give weights; of the cells of a
    table of counts a part of each is held out. Weights w with sum w^2 < sum w, such as shares with sum one, are
    multiplied by sum w / sum w^2, which is 1 for weights of 0 and 1: else `min_child_weight` and `lambda`, in the unit
    of the weights, would let no tree split.

    A pandas column of dtype category is split by sets of its categories, and one of ordered categories by their order.
    The dtype at `fit` declares them all, also for rows to come: `predict` looks labels up there, and raises ValueError
    at one it does not find.

    Meta-estimators of scikit-learn that pass on indices in place of labels need `categories`, as for
    `OrdinalClassifier`.

    Args:
        booster: "xgboost" or "lightgbm".
        categories, values, power, cost: as for `OrdinalClassifier`.
        transport, cross_entropy: weights of the two losses. Without cross-entropy the forecasts of a rare first or last
            class (some rows in a thousand) may stay at its frequency, and power 1 and costs drive probabilities to 0
            and 1.
        n_estimators: rounds, at most where training stops early: ten times XGBoost's own default. On large
            tables n_estimators=250 with learning_rate=0.2 takes a quarter of the time, for a slightly higher loss.
        learning_rate, max_depth: as XGBoost names them.
        booster_params: further settings by any of the library's own names; they take precedence. Without them each
            round samples half of the rows (all, where they weigh five or more on average, equal ones as one), leaves
            are limited by a sum of curvatures of 0.1 (a row has a small one: 1 would need four rows or many more) and
            the L2 penalty is 1. For columns of categories LightGBM starts from
            cat_smooth=1, cat_l2=1 and min_data_per_group=1; its own settings are for larger curvatures.
            `monotone_constraints` hold for the score of each class alone, not for the forecast; `OrdinalDecomposition`
            of a constrained binary classifier is monotone in every P(y > k).
        class_weight, decode, calibration: as for `OrdinalClassifier`.
        early_stopping: hold rows out, stop when their loss has not fallen for `n_iter_no_change` rounds, and train
            again for the best number of rounds on all rows; "auto": from 50 rows. `fit(eval_set=)` takes other rows.
        validation_fraction: share of rows held out for early stopping, and for calibration, class by class.
        n_iter_no_change: rounds without a lower loss after which training stops.
        n_jobs: threads; None for as many as the library takes by itself, which are all that OpenMP allows
            (OMP_NUM_THREADS); -1 all cores, -2 all but one, as in joblib.
        random_state: seed or `numpy.random.RandomState` for rows held out and the library's own sampling.

    Attributes:
        classes_: (m,) the labels seen in training, sorted; the columns of `predict_proba`.
        categories_: (K,) all labels in rank order; the columns of `predict_distribution`.
        n_estimators_: rounds that predict; LightGBM's without those that found nothing to split.
        best_iteration_: rounds until the loss held out was least, counted from 1 as LightGBM does, in `evals_result_`;
            None without early stopping.
        evals_result_: for "validation_0", "validation_1", ... (the parts of `eval_set`, or the rows held out) a dict
            from the name of the loss to its mean after each round, distances in the unit of training.
        booster_: the `xgboost.Booster` or `lightgbm.Booster`; None where no feature varies. It takes arrays with codes
            of categories, and scores classes in rank order; LightGBM's raw scores lack `start_scores_`.
        start_scores_: (m,) scores that training started from, log-frequencies of the labels seen in rank order.
        feature_importances_: (d,) shares of the features in what all splits gain, sum 1, or zeros without a split.

    Source:
        L. Hou, C.-P. Yu, D. Samaras, Squared Earth Mover's Distance-based Loss, arXiv 1611.05916 (the loss).

    Example:
        >>> X = np.linspace(0, 3, 60)[:, None]
        >>> y = np.minimum(X[:, 0], 2.9).astype(int)
        >>> model = OrdinalBoostingClassifier(n_estimators=5, learning_rate=0.5, early_stopping=False).fit(X, y)
        >>> model.predict([[0.2], [1.5], [2.8]]).tolist(), model.feature_importances_.tolist()
        ([0, 1, 2], [1.0])
    """

    booster: str = "xgboost"
    n_estimators: int = 1000
    learning_rate: float = 0.05
    max_depth: int = 3
    booster_params: dict[str, Any] | None = None
    early_stopping: bool | str = "auto"
    n_iter_no_change: int = 50
    n_jobs: int | None = None

    _advice_for_text = (
        "make it one of categories in a pandas DataFrame before fit (X.astype({{{column}: 'category'}})), or encode it"
    )

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        eval_set: Any = None,
        eval_X: Any = None,
        eval_y: Any = None,
        **foreign: Any,
    ) -> OrdinalBoostingClassifier:
        """Fit to features X (n, d), NaN where missing, labels y (n,), and weights (n,) if given; return self.

        A sparse X is made dense; what it does not hold is 0, not missing. Features stay float32 where they are.
        Weights are numbers of rows, beside the regularisation of the booster; those that sum to less than their
        effective number of rows, (sum w)^2 / sum w^2, are scaled up to that sum.

        Args:
            eval_set: (X, y) or (X, y, sample_weight), or a list of them, whose losses go to `evals_result_`.
                The last one is what early stopping goes by, unless it is False: then all rows of X are trained on. A
                pipeline passes it on as it is.
            eval_X, eval_y: features and labels, or tuples of as many, in place of `eval_set`, as LightGBM names them.
                A pipeline with `transform_input=["eval_X"]` transforms `eval_X` as it does X.
            foreign: none; options that only the `fit` of a library has raise TypeError, with what to write here.

        Raises:
            ImportError: if the library of `booster` is not installed.
            TypeError: if X is a collection of Dask, which the libraries train on themselves.
            ValueError: if a label, a weight, a feature or a setting is wrong; the message says which.

        Warns:
            ConvergenceWarning: if `n_estimators` rounds ended training before early stopping did.
            UserWarning: if no tree splits, so that the class frequencies are predicted, or labels have fractions.
        """
        _check_foreign_options(foreign)
        self._check_in_memory(X)
        with unchanged_on_error(self):
            eval_set = joined_evaluation(eval_set, eval_X, eval_y)
            self._category_dtypes = category_dtypes(X)
            self._fit(coded(X, self._category_dtypes), y, sample_weight, eval_set=eval_set)
        return self

    @property
    def booster_(self) -> Any:
        """The `xgboost.Booster` or `lightgbm.Booster`."""
        check_is_fitted(self)
        return None if self._trees is None else self._trees.booster

    @property
    def start_scores_(self) -> np.ndarray:
        """(m,) scores that training started from."""
        check_is_fitted(self)
        return np.zeros(1) if self._trees is None else self._trees.start

    @property
    def feature_importances_(self) -> np.ndarray:
        """(d,) shares of the features in what all splits gain."""
        check_is_fitted(self)
        gains = np.zeros(self.n_features_in_) if self._trees is None else self._trees.gains(self.n_features_in_)
        return gains / gains.sum() if gains.any() else gains

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _accepts(self) -> dict[str, Any]:
        return {**super()._accepts(), "dtype": [np.float64, np.float32], "ensure_all_finite": "allow-nan"}

    def _check_in_memory(self, X: Any) -> None:
        if hasattr(X, "__dask_graph__"):
            raise TypeError(
                f"X is a {type(X).__name__} of Dask, expected rows in memory. Train on the cluster by "
                f"{_ON_DASK.get(self.booster, _ON_DASK['xgboost'])}, with positions of K classes as labels, or pass "
                "X.compute() and y.compute()."
            )

    def _check_settings(self) -> None:
        super()._check_settings()
        self._check_early_stopping()
        check_choice("booster", self.booster, BOOSTERS)
        require_library(self.booster)
        for name in ("n_estimators", "max_depth", "n_iter_no_change"):
            check_count(name, getattr(self, name))
        if self.n_jobs is not None and (isinstance(self.n_jobs, bool) or not isinstance(self.n_jobs, Integral)):
            raise TypeError(f"n_jobs is {self.n_jobs!r}, expected a whole number of threads, or None.")
        if self.n_jobs == 0:
            raise ValueError("n_jobs is 0, expected None, a number of threads of at least 1, or -1 for all cores.")
        check_real("learning_rate", self.learning_rate, minimum=0.0, above=True)
        checked_parameters(self.booster, self.booster_params)

    def _as_features(self, X: Any) -> np.ndarray:
        X = super()._as_features(X)
        if self.booster == "xgboost" and X.size:
            largest, limit = max(np.fmax.reduce(X, axis=None), -np.fmin.reduce(X, axis=None)), np.finfo(np.float32).max
            if largest > limit:
                raise ValueError(
                    f"X holds numbers up to {largest:g} in size, expected at most {limit:.2g} with "
                    'booster="xgboost", which trains in float32. Look for marks of missing values such as 1e300, '
                    "divide the feature by a power of ten, or take its logarithm."
                )
        return X

    def _weighted_rows(self, X: Any, y: np.ndarray, sample_weight: Any) -> tuple[Any, np.ndarray, np.ndarray]:
        X, positions, weights = super()._weighted_rows(X, y, sample_weight)
        if weights.max() > LARGEST_WEIGHT:
            raise ValueError(
                f"a row has the weight {weights.max():g}, expected at most {LARGEST_WEIGHT:g}; divide all weights by "
                "the largest."
            )
        relative = weights / weights.max()  # Sums of weights could overflow, or underflow.
        scaled = relative * (relative.sum() / np.square(relative).sum())
        return X, positions, np.maximum(weights, scaled)

    def _features(self, X: Any) -> np.ndarray:
        if self._category_dtypes and hasattr(X, "columns"):
            validate_data(self, X, reset=False, skip_check_array=True)  # names of columns, before their categories
        table = super()._features(coded(X, self._category_dtypes))
        self._warn_of_missing(table)
        return table

    def _warn_of_missing(self, X: np.ndarray) -> None:
        """Warn of NaN in a numeric or ordered column that the trees split by and that held no NaN in fit."""
        if self._trees is None:
            return
        is_unseen = _columns_with_nan(X) & ~self._has_nan
        is_unseen[list(self._categorical())] = False  # a missing category is in no set, as one that was not seen
        if not is_unseen.any():
            return
        places = np.flatnonzero(is_unseen & (self._trees.gains(X.shape[1]) > 0))
        if len(places):
            names = getattr(self, "feature_names_in_", range(X.shape[1]))
            warnings.warn(
                f"column {names[places[0]]!r} of X holds NaN and held none in fit ({len(places)} such columns): no "
                f"tree has learnt where missing values belong, and {_UNSEEN_MISSING[self.booster]}. Fill them in, or "
                "fit to rows of which some lack the value.",
                stacklevel=level_of_the_caller(),
            )

    def _categorical(self) -> tuple[int, ...]:
        """Return the columns that are split by sets of categories; codes of ordered ones are split as numbers."""
        return tuple(place for place, dtype in self._category_dtypes.items() if not dtype.ordered)

    def _train(
        self,
        X: np.ndarray,
        positions: np.ndarray,
        weights: np.ndarray,
        *,
        random: np.random.RandomState,
        eval_set: Any = None,
    ) -> None:
        rows = Part(Table(X), np.arange(len(X)), positions, weights)
        self.n_estimators_, self.best_iteration_, self.evals_result_ = 0, None, {}
        self._trees, self._has_nan = None, _columns_with_nan(X)
        watched = [self._evaluation_part(name, *part) for name, part in evaluation_parts(eval_set).items()]
        if len(self.classes_) == 1:
            return
        settings = self._tree_settings(seed=int(random.randint(2**31 - 1)))
        stops = self._stops_early(len(rows.target)) if not watched else bool(self.early_stopping)
        training = rows
        if stops and not watched:
            halves = hold_out(
                X, positions, weights, self.validation_fraction, random=random, purpose="early stopping"
            )  # fmt: skip
            training, validation = (replace(rows[half.rows], weight=half.weights) for half in halves)
            watched = [validation]
        patience = self.n_iter_no_change if stops else None
        trees = train_trees(self.booster, replace(settings, patience=patience), training, watched)
        self.evals_result_ = trees.history
        warn_of_tiny_columns(X, SMALLEST_NUMBERS[self.booster], stacklevel=4)
        if trees.booster is not None and not trees.gains(X.shape[1]).any():
            warnings.warn(_CONSTANT.format(_LIMITS[self.booster]), stacklevel=4)
        self.best_iteration_ = trees.best_round
        if trees.best_round is not None and not trees.has_stopped:
            warnings.warn(self._unsettled(trees.best_round), ConvergenceWarning, stacklevel=4)
        if training is not rows:
            trees = train_trees(self.booster, replace(settings, rounds=trees.best_round or 1), rows)
        self._trees, self.n_estimators_ = trees, trees.rounds

    def _unsettled(self, best: int) -> str:
        return (
            f"OrdinalBoostingClassifier did not converge in n_estimators={self.n_estimators} rounds: the loss held out "
            f"was least after {best}, and early stopping waits for {self.n_iter_no_change} more. Raise n_estimators "
            "or learning_rate, or set early_stopping=False for exactly that many rounds."
        )

    def _evaluation_part(self, name: str, X: Any, y: Any, sample_weight: Any = None) -> Part:
        """Return a part of `eval_set` as the rows that training takes."""
        try:
            X, y = self._features(X), column_or_1d(plain_items(y))
            check_consistent_length(X, y)
            X, positions, weights = self._weighted_rows(X, y, sample_weight)
            return Part(Table(X), np.arange(len(X)), positions, weights)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{name}: {error}") from error

    def _tree_settings(self, *, seed: int) -> TreeSettings:
        criterion = self._criterion
        return TreeSettings(
            positions=len(self.classes_),
            rounds=self.n_estimators,
            learning_rate=self.learning_rate,
            max_depth=self.max_depth,
            threads=0 if self.n_jobs is None else int(effective_n_jobs(self.n_jobs)),
            seed=seed,
            patience=None,
            categorical=self._categorical(),
            loss={
                **criterion.geometry,
                "transport": criterion.transport,
                "cross_entropy": criterion.cross_entropy,
            },
            extra=checked_parameters(self.booster, self.booster_params, self.n_features_in_),
        )

    def _logits(self, X: np.ndarray) -> np.ndarray:
        assert self._trees is not None
        return self._trees.scores(X)


def _check_foreign_options(foreign: dict[str, Any]) -> None:
    """Raise TypeError for an option of `fit` that it does not have; a decorator would add a frame to all warnings."""
    if foreign:
        name = "OrdinalBoostingClassifier.fit"
        check_keywords(name, foreign, inspect.signature(OrdinalBoostingClassifier.fit).parameters)
        raise TypeError(
            f"{name} has no option {next(iter(foreign))!r}, expected sample_weight, eval_set, eval_X, eval_y."
        )


def joined_evaluation(eval_set: Any, eval_X: Any, eval_y: Any) -> Any:
    """Return `eval_set`, or `eval_X` and `eval_y` in its form.

    Raises:
        ValueError: if both are given, one of the two is missing, or tuples differ in length.
    """
    if eval_X is None and eval_y is None:
        return eval_set
    if eval_set is not None or eval_X is None or eval_y is None:
        names = [n for n, v in (("eval_set", eval_set), ("eval_X", eval_X), ("eval_y", eval_y)) if v is not None]
        raise ValueError(f"got {' and '.join(names)}, expected eval_set, or both eval_X and eval_y.")
    several = isinstance(eval_X, tuple), isinstance(eval_y, tuple)
    if not any(several):
        return [(eval_X, eval_y)]
    if not all(several) or len(eval_X) != len(eval_y):
        raise ValueError("eval_X and eval_y differ, expected tuples of as many tables of features and lists of labels.")
    return list(zip(eval_X, eval_y, strict=True))


def evaluation_parts(eval_set: Any) -> dict[str, Any]:
    """The parts of `eval_set` by their names in messages; a pair (X, y) or triple given by itself is the only part.

    Raises:
        TypeError: if a part is neither.
    """
    if eval_set is None:
        return {}
    if isinstance(eval_set, tuple) and len(eval_set) in (2, 3) and _is_table(eval_set[0]):
        return {"eval_set": eval_set}
    expected = "expected (X, y) or (X, y, sample_weight), or a list of them"
    if not isinstance(eval_set, list | tuple):
        raise TypeError(f"eval_set is a {type(eval_set).__name__}, {expected}.")
    for number, part in enumerate(eval_set):
        if not isinstance(part, list | tuple) or len(part) not in (2, 3):
            size = f" of {len(part)}" if isinstance(part, list | tuple) else ""
            raise TypeError(f"eval_set[{number}] is a {type(part).__name__}{size}, {expected}.")
    return {f"eval_set[{number}]": part for number, part in enumerate(eval_set)}


def _columns_with_nan(X: np.ndarray) -> np.ndarray:
    """Return which columns (d,) of X (n, d) hold NaN."""
    return np.isnan(np.minimum.reduce(X, axis=0))  # no copy of X


def _is_table(X: Any) -> bool:
    """Return whether these are rows of features, and not a part (X, y)."""
    if hasattr(X, "shape"):
        return len(X.shape) == 2
    try:
        return np.ndim(X) == 2
    except ValueError:  # X beside y is ragged
        return False


def category_dtypes(X: Any) -> dict[int, Any]:
    """Return the CategoricalDtype of each pandas column of categories in X (n, d), by its position.

    Raises:
        ValueError: if X holds categories of Arrow or polars, which numpy reads as their labels: text, or numbers.
    """
    columns = list(types_of_columns(X))
    for name, dtype in columns:
        if str(dtype).startswith(_OTHER_CATEGORIES):
            remedy = "Pass X.to_pandas()"
            if hasattr(X, "isetitem"):  # astype("category") raises for a missing value
                remedy = f"Convert it by X[{name!r}] = X[{name!r}].array.__arrow_array__().to_pandas().array"
            raise ValueError(
                f"column {name!r} of X holds categories as {str(dtype)[:60]}, expected the dtype category of pandas, "
                f"whose columns are split by sets. {remedy}."
            )
    is_frame = hasattr(X, "isetitem")
    return {place: dtype for place, (_, dtype) in enumerate(columns) if is_frame and hasattr(dtype, "ordered")}


def coded(X: Any, dtypes: dict[int, Any]) -> Any:
    """Return X with the codes of `dtypes` in place of categories, NaN where a value is missing.

    Labels are looked up in the dtype of training: the codes of another data frame may number other categories.

    Raises:
        ValueError: if a value is not a category of training, or X is no data frame.
    """
    if not dtypes:
        return X
    if not hasattr(X, "isetitem"):
        frame = "X.to_pandas()" if hasattr(X, "to_pandas") else "one with the columns of the fit"
        raise ValueError(
            f"X is a {type(X).__name__}, expected a pandas DataFrame: the columns at {sorted(dtypes)} held categories "
            f"at fit, whose labels are looked up by column. Pass {frame}."
        )
    table = X.copy(deep=False)
    for place, dtype in dtypes.items():
        column = X.iloc[:, place]
        codes = dtype.categories.get_indexer(column)
        unknown = (codes < 0) & column.notna().to_numpy()
        if unknown.any():
            raise ValueError(
                f"column '{column.name}' of X holds {column[unknown].tolist()[0]!r}, expected one of the "
                f"{len(dtype.categories)} categories of fit. Declare every category in the dtype before fit, or pass "
                "NaN, if the column held NaN in fit."
            )
        table.isetitem(place, np.where(codes < 0, np.nan, codes))
    return table
