"""The adapter for XGBoost and LightGBM: train trees with our objective on arrays, and get their scores.

Both start from the logarithms of the class frequencies, so that a model of no trees predicts the frequencies. XGBoost
keeps them in the booster. LightGBM keeps nothing but margins of each row, in 16 bytes a score, so they are added to its
scores here.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from operator import index
from typing import Any

import numpy as np

from otloss._checks import install_hint, missing_package
from otloss.boosting import lightgbm_metric, lightgbm_objective, xgboost_metric, xgboost_objective
from otloss.boosting.start import class_shares

# The oldest versions that the tests have run with: XGBoost 3.1 is the first whose `base_score` holds a number a class.
OLDEST = {"xgboost": (3, 1), "lightgbm": (4, 5)}
BOOSTERS = tuple(OLDEST)
XGBOOST_FIRST_NAMES = {
    "eta": "learning_rate",
    "n_jobs": "nthread",
    "random_state": "seed",
    "reg_alpha": "alpha",
    "reg_lambda": "lambda",
}
# Set by the estimator from the loss, the labels, the dtypes of columns, n_estimators and early_stopping, or not used by
# its own early stopping; by the first names of both libraries.
OWN_SETTINGS = {
    "objective",
    "num_class",
    "base_score",
    "metric",
    "eval_metric",
    "disable_default_eval_metric",
    "num_iterations",
    "num_boost_round",
    "n_estimators",
    "early_stopping_round",
    "early_stopping_rounds",
    "early_stopping_min_delta",
    "categorical_feature",
    "feature_types",
}
# Read by the libraries' own objectives alone.
CLASS_SETTINGS = {"is_unbalance", "scale_pos_weight", "pos_bagging_fraction", "neg_bagging_fraction"}
# Numbers of rows, with the values that limit nothing.
ROWS_COUNTED = {
    "min_data_in_leaf": 0, "min_data_in_bin": 1, "path_smooth": 0, "cegb_penalty_split": 0,
    "cegb_penalty_feature_lazy": 0,
}  # fmt: skip
# The share of the rows in each round. Up to 0.5 LightGBM copies the bins and gradients of these rows.
SAMPLED = {"xgboost": 0.5, "lightgbm": 0.51}
# Mean weight from which all rows are in each round: half of a few heavy rows, equal ones merged, is another table.
UNSAMPLED_WEIGHT = 5.0
# Other kinds of rounds change earlier ones, so that none is the best to stop at, or cannot start from the frequencies.
KINDS = (None, "gbtree", "gbdt", "goss", "plain")
_SMALLEST_LIMIT = 1e-12  # of the curvature in a leaf
_COPIES = 20  # of a row on average in what LightGBM makes bins of, which takes memory
_COMPARED = 4096  # rows that are compared at a time
_FILLED = 2**16  # rows that XGBoost gets at a time


@dataclass(frozen=True)
class TreeSettings:
    """Settings that both libraries have, and `extra` by the library's own names, which take precedence.

    Attributes:
        threads: 0 for as many as the library uses by itself.
        patience: rounds that the last part watched may go without a lower loss; None for no early stopping.
        categorical: columns to split by sets of categories.
        loss: keywords of the objective, and of the metric of parts watched.
    """

    positions: int
    rounds: int
    learning_rate: float
    max_depth: int
    threads: int
    seed: int
    patience: int | None
    categorical: tuple[int, ...]
    loss: dict[str, Any]
    extra: dict[str, Any]


@dataclass(eq=False)
class Table:
    """Features (N, d), and numbers (N,) that equal rows have in common, in an order that the rows alone decide."""

    features: np.ndarray

    @cached_property
    def groups(self) -> np.ndarray:
        """The number of each row among the distinct rows, in an order that the values decide, and not their dtype."""
        table = self.features
        if any((np.signbit(block) & (block == 0)).any() for block in _blocks(table, _COMPARED)):
            table = np.add(table, 0.0, order="C")  # -0.0 + 0.0 is 0.0
        if any(_has_other_nan(block) for block in _blocks(table, _COMPARED)):
            table = np.where(np.isnan(table), table.dtype.type(np.nan), table)
        rows = np.ascontiguousarray(table).view(np.dtype((np.void, table.itemsize * table.shape[1])))[:, 0]
        order = np.argsort(rows)
        is_new = [rows[block[1:]] != rows[block[:-1]] for block in _blocks(order, _COMPARED, overlap=1)]
        is_first = np.concatenate([[True], *is_new])
        groups = np.empty(len(rows), np.int64)
        groups[order] = is_first.cumsum() - 1
        first = order[is_first]
        place = np.empty(len(first), np.int64)
        place[np.argsort(self._keys()[first], kind="stable")] = np.arange(len(first))
        return place[groups]

    def _keys(self) -> np.ndarray:
        """Return a number (n,) for each row, by which distinct rows differ."""
        factors = np.random.RandomState(0).uniform(size=self.features.shape[1])
        blocks = (np.nan_to_num(block.astype(np.float64), nan=0.5) for block in _blocks(self.features, _COMPARED))
        return np.concatenate([(block * factors).sum(1) for block in blocks])


def _has_other_nan(block: np.ndarray) -> bool:
    """Return whether a NaN has other bits than numpy's own, as 0 / 0 has another sign."""
    bits = np.ascontiguousarray(block).view(f"u{block.itemsize}")
    return bool((bits[np.isnan(block)] != np.array(np.nan, block.dtype).view(bits.dtype)).any())


def _blocks(array: np.ndarray, size: int, *, overlap: int = 0) -> Iterator[np.ndarray]:
    """Parts of an array, so that what is made of one is small; `overlap` rows of each are in the next one too."""
    for start in range(0, len(array), size):
        yield array[start : start + size + overlap]


@dataclass(frozen=True)
class Part:
    """Rows to train on, or to watch the loss of: places (n,) in a table, their positions (n,) and weights (n,).

    Only `features` copies rows of the table: of a block, where the library takes blocks.
    """

    table: Table
    rows: np.ndarray
    target: np.ndarray
    weight: np.ndarray

    def __getitem__(self, index: np.ndarray | slice) -> Part:
        return Part(self.table, self.rows[index], self.target[index], self.weight[index])

    def features(self) -> np.ndarray:
        """Return a copy of the features (n, d)."""
        return self.table.features[self.rows]

    def get_label(self) -> np.ndarray:
        """Return the positions, as objectives and metrics ask a DMatrix for them."""
        return self.target

    def get_weight(self) -> np.ndarray:
        """Return the weights, as objectives and metrics ask a DMatrix for them."""
        return self.weight

    def merged(self) -> Part:
        """Return equal rows as one that has their weight, in an order of their own.

        So that a weight of two is a row given twice to the last bit: both libraries hold gradients in float32, where
        one of 2 g and two of g round differently.
        """
        keys = self.table.groups[self.rows] * (self.target.max() + 1) + self.target
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        return replace(self[first], weight=np.bincount(which, weights=self.weight))

    def ordered(self) -> Part:
        """Return the rows in the order that `merged` has, with equal ones by their weight."""
        return self[np.lexsort((self.weight, self.target, self.table.groups[self.rows]))]

    def is_constant(self) -> bool:
        """Return whether all rows have equal features, where NaN equals NaN."""
        first = self[:1].features()
        blocks = (self.table.features[rows] for rows in _blocks(self.rows, _COMPARED))
        return all(((block == first) | (np.isnan(block) & np.isnan(first))).all() for block in blocks)


History = dict[str, dict[str, list[float]]]  # loss after each round, by the name of the part watched and of the loss


@dataclass(frozen=True)
class Trees:
    """A trained booster.

    Attributes:
        booster: None where there is nothing to split on.
        start: the scores (m,) that it started from.
        categorical: as in the settings.
        rounds: that predict.
        best_round: after which the loss of the last part watched was least, counted from 1; None without early
            stopping. LightGBM takes rounds that split nothing out again, so that fewer may predict.
        history: of all rounds trained, also of those after the best one.
        has_stopped: whether early stopping, if any, came before the last round allowed.
    """

    library: str
    booster: Any
    start: np.ndarray
    categorical: tuple[int, ...]
    rounds: int
    best_round: int | None
    history: History
    has_stopped: bool

    def scores(self, features: np.ndarray) -> np.ndarray:
        """Return scores (n, m) whose softmax is the distribution over positions."""
        if self.booster is None:
            return np.tile(self.start, (len(features), 1))
        if self.library == "lightgbm":
            return self.start + self.booster.predict(features, raw_score=True)
        import xgboost

        data = xgboost.DMatrix(features, **_xgboost_types(features.shape[1], self.categorical))
        return np.asarray(self.booster.predict(data, output_margin=True), dtype=np.float64)

    def gains(self, columns: int) -> np.ndarray:
        """Return the gain of the splits on each of `columns` features, summed over all trees: (columns,)."""
        if self.booster is None:
            return np.zeros(columns)
        if self.library == "lightgbm":
            return np.asarray(self.booster.feature_importance("gain"), dtype=np.float64)
        total = self.booster.get_score(importance_type="total_gain")
        return np.array([total.get(f"f{column}", 0.0) for column in range(columns)])


def require_library(name: str) -> None:
    """Raise ImportError, with how to install it, if the library is not there or older than `OLDEST`."""
    try:
        version = import_module(name).__version__
    except ImportError as error:
        missing_package(error, name)
        raise ImportError(f'booster="{name}" needs the library {name}: {install_hint("boost")}.') from error
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST[name]:
        oldest = ".".join(map(str, OLDEST[name]))
        raise ImportError(
            f'booster="{name}" found {name} {version}, expected {oldest} or later: {install_hint("boost")} --upgrade.'
        )


def train_trees(library: str, settings: TreeSettings, rows: Part, watched: Sequence[Part] = ()) -> Trees:
    """Boost for `rounds`, or until the loss of the last part `watched` has not fallen for `patience` rounds.

    The rounds after the best one then predict nothing.
    """
    rows = rows.ordered() if library == "lightgbm" and _counts_rows(settings) else rows.merged()
    # Weights are numbers of rows, and what merged rows weigh on average is no row.
    start = np.log(class_shares(rows.target, rows.weight, settings.positions, row=1.0))
    if rows.is_constant():  # an error of LightGBM
        return Trees(library, None, start, settings.categorical, 0, None, {}, has_stopped=True)
    if not watched:
        settings = replace(settings, patience=None)
    watched_parts = {f"validation_{number}": part for number, part in enumerate(watched)}
    train = _train_lightgbm if library == "lightgbm" else _train_xgboost
    booster, sizes, history = train(settings, rows, watched_parts, start)
    best, has_stopped = None, True
    if settings.patience is not None:
        best, has_stopped = _best_round(history), _is_patience_over(history, settings.patience)
    rounds = sizes[-1 if best is None else best - 1]
    return Trees(library, booster, start, settings.categorical, rounds, best, history, has_stopped)


def _counts_rows(settings: TreeSettings) -> bool:
    """Return whether LightGBM limits leaves, bins or categories by a number of rows, of which merging leaves few.

    By its default settings too it splits off no category of less than half of the mean weight of a row.
    """
    given = {name: settings.extra.get(name, least) for name, least in ROWS_COUNTED.items()}
    numbers = {name: np.asarray(of.split(",") if isinstance(of, str) else of, float) for name, of in given.items()}
    return bool(settings.categorical) or any((numbers[name] > least).any() for name, least in ROWS_COUNTED.items())


def _last_losses(history: History) -> list[float]:
    """Return the losses by which training stops: of the part watched that was named last."""
    (losses,) = history[list(history)[-1]].values()
    return losses


def _best_round(history: History) -> int:
    """Return the round after which that loss was least, counted from 1."""
    return int(np.argmin(_last_losses(history))) + 1


def _is_patience_over(history: History, patience: int) -> bool:
    """Return whether that loss has not fallen for `patience` rounds."""
    return len(_last_losses(history)) - _best_round(history) >= patience


def checked_parameters(library: str, parameters: Any, columns: int | None = None) -> dict[str, Any]:
    """Settings by the library's own names with each name turned into its first one, so that ours give way to them.

    Raises:
        TypeError: if they are no dict of names, or constraints have another form, as by names of columns.
        ValueError: if a constraint names a column that X does not have, a name is one that the estimator sets itself,
            names a setting twice, or is unknown to LightGBM (XGBoost warns of those), or if they ask for other rounds
            than gradient boosting.
    """
    parameters = {} if parameters is None else parameters
    if not isinstance(parameters, dict) or not all(isinstance(name, str) for name in parameters):
        raise TypeError(f"booster_params is {parameters!r}, expected a dict of {library}'s settings.")
    first_names = _lightgbm_names() if library == "lightgbm" else XGBOOST_FIRST_NAMES
    checked: dict[str, Any] = {}
    for name, value in parameters.items():
        if value is None:  # In `get_params` of their classifiers None is the default.
            continue
        first = str(first_names.get(name, name))
        if first in OWN_SETTINGS:
            raise ValueError(
                f"booster_params holds {name!r}, which follows from the estimator's arguments or data; remove it."
            )
        if first in CLASS_SETTINGS:
            raise ValueError(
                f"booster_params holds {name!r}, which has no effect on the loss of ranks; weigh classes by "
                'class_weight, as class_weight="balanced", and remove it.'
            )
        if library == "lightgbm" and name not in first_names:
            raise ValueError(f"booster_params holds {name!r}, expected settings of lightgbm.")
        if first in checked:
            raise ValueError(f"booster_params holds {name!r} and another name of {first!r}; remove one of them.")
        if first in CONSTRAINTS:
            value = CONSTRAINTS[first](name, _parsed(value, is_nested=first == "interaction_constraints"), columns)
            if library == "xgboost":  # XGBoost reads lists as names of columns; LightGBM reads lists alone
                value = tuple(value) if first == "monotone_constraints" else str(value)
        checked[first] = value.item() if isinstance(value, np.generic) else value  # XGBoost writes some as JSON
    kind = checked.get("boosting" if library == "lightgbm" else "booster")
    if kind not in KINDS:
        raise ValueError(
            f"booster_params asks for {kind!r}, expected gradient boosting; for other kinds train with "
            f"otloss.boosting.{library}_objective."
        )
    return checked


def _parsed(constraints: Any, *, is_nested: bool) -> Any:
    """Return what text says, as both libraries take it: in brackets, or without the outer ones."""
    if not isinstance(constraints, str):
        return constraints
    try:
        read = literal_eval(f"[{constraints}]")
    except (ValueError, SyntaxError):
        return constraints
    is_whole = len(read) == 1 and np.iterable(read[0]) and np.iterable(next(iter(read[0]), 0)) == is_nested
    return read[0] if is_whole else read


def _signs(name: str, signs: Any, columns: int | None) -> list[int]:
    """Return -1, 0 or 1 for each column of X as a list."""
    is_plain = np.iterable(signs) and not hasattr(signs, "axes")  # a Series may go by the names of its index
    values = np.asarray(signs) if is_plain and all(map(np.isscalar, signs)) else np.empty(())
    if values.ndim != 1 or not np.isin(values, (-1, 0, 1)).all() or columns not in (None, len(values)):
        raise TypeError(
            f"booster_params holds {name}={signs!r}, expected -1, 0 or 1 for each column of X in its order: trees "
            "get arrays, without names of columns. Pass [signs.get(column, 0) for column in X.columns]."
        )
    return values.astype(int).tolist()


def _column_groups(name: str, groups: Any, columns: int | None) -> list[list[int]]:
    """Return groups of places of columns as lists, the only form that LightGBM reads."""
    try:
        lists = [[index(column) for column in group] for group in groups]
    except TypeError as error:
        raise TypeError(
            f"booster_params holds {name}={groups!r}, expected groups of places of columns, as [[0, 1], [2]]: trees "
            "get arrays, without names of columns. Pass [list(X.columns.get_indexer(group)) for group in groups]."
        ) from error
    if columns is not None and not all(0 <= column < columns for group in lists for column in group):
        raise ValueError(f"booster_params holds {name}={groups!r}, expected places from 0 to {columns - 1}.")
    return lists


CONSTRAINTS: dict[str, Callable[..., list[Any]]] = {
    "monotone_constraints": _signs,
    "interaction_constraints": _column_groups,
}


def _lightgbm_names() -> dict[str, str]:
    """Return the first name of each name that LightGBM knows."""
    from lightgbm.basic import _ConfigAliases

    aliases = _ConfigAliases._get_all_param_aliases()
    return {name: first for first, names in aliases.items() for name in (first, *names)}


def _xgboost_types(columns: int, categorical: tuple[int, ...]) -> dict[str, Any]:
    if not categorical:
        return {}
    types = ["c" if column in categorical else "q" for column in range(columns)]
    return {"feature_types": types, "enable_categorical": True}


def _xgboost_data(part: Part, parameters: dict[str, Any], categorical: tuple[int, ...], *, is_watched: bool) -> Any:
    """Return a DMatrix: to train by histograms one of bins, a byte a number, which is filled block by block."""
    import xgboost

    types = _xgboost_types(part.table.features.shape[1], categorical)
    # By the bins of the training rows a category or a number that they lack may be another one.
    if parameters["tree_method"] != "hist" or is_watched:
        # Without weights: the curvatures hold them, and "approx" makes bins by curvature times weight.
        return xgboost.DMatrix(part.features(), label=part.target, **types)
    is_categorical = types.pop("enable_categorical", False)

    class Blocks(xgboost.DataIter):
        def reset(self) -> None:
            self.blocks = _blocks(np.arange(len(part.rows)), _FILLED)

        def next(self, input_data: Callable[..., None]) -> bool:
            block = next(self.blocks, None)
            if block is not None:
                rows = part[block]
                input_data(data=rows.features(), label=rows.target, weight=rows.weight, **types)
            return block is not None

    return xgboost.QuantileDMatrix(
        Blocks(), max_bin=int(parameters["max_bin"]), nthread=parameters["nthread"],
        enable_categorical=is_categorical,
    )  # fmt: skip


def _train_xgboost(
    settings: TreeSettings, rows: Part, watched: dict[str, Part], start: np.ndarray
) -> tuple[Any, Sequence[int], History]:
    """Return the booster, without the rounds after the best one, its rounds after each one, and all losses watched."""
    import xgboost

    parts: dict[int, Part] = {}  # A DMatrix copies its labels and weights for each call, which takes 0.1 ms a round.

    def data(part: Part, *, is_watched: bool) -> Any:
        matrix = _xgboost_data(part, parameters, settings.categorical, is_watched=is_watched)
        parts[id(matrix)] = part
        return matrix

    objective = xgboost_objective(settings.positions, **settings.loss)
    metric = xgboost_metric(settings.positions, **settings.loss)

    parameters = {
        "objective": "multi:softprob",
        "num_class": settings.positions,
        "base_score": start.tolist(),
        "disable_default_eval_metric": True,
        "tree_method": "hist",
        "max_bin": 256,
        "learning_rate": settings.learning_rate,
        "max_depth": settings.max_depth,
        "min_child_weight": 0.1,
        "subsample": _sampled_share("xgboost", rows),
        "nthread": settings.threads,
        "seed": settings.seed,
        **settings.extra,
    }
    training = data(rows, is_watched=False)
    evals = [(data(part, is_watched=True), name) for name, part in watched.items()]
    names = {id(matrix): name for matrix, name in evals}
    history: History = {name: {} for name in watched}

    def measure(scores: np.ndarray, matrix: Any) -> tuple[str, float]:
        loss, value = metric(scores, parts[id(matrix)])
        history[names[id(matrix)]].setdefault(loss, []).append(value)  # XGBoost keeps six decimals
        return loss, value

    class StopByLast(xgboost.callback.TrainingCallback):
        def after_iteration(self, *_: Any) -> bool:
            return settings.patience is not None and _is_patience_over(history, settings.patience)

    booster = xgboost.train(
        parameters,
        training,
        num_boost_round=settings.rounds,
        obj=lambda scores, matrix: objective(scores, parts[id(matrix)]),
        evals=evals,
        custom_metric=measure,
        callbacks=[StopByLast()],
        verbose_eval=False,
    )
    if settings.patience is not None:
        booster = booster[: _best_round(history)]
    return booster, range(1, booster.num_boosted_rounds() + 1), history


def _sampled_share(library: str, rows: Part) -> float:
    """Return the share of the rows in each round."""
    return SAMPLED[library] if rows.weight.mean() < UNSAMPLED_WEIGHT else 1.0


def _plain(history: dict[str, Any]) -> History:
    return {name: {loss: list(values) for loss, values in of_part.items()} for name, of_part in history.items()}


def _lightgbm_parameters(settings: TreeSettings, share: float) -> dict[str, Any]:
    extra = settings.extra
    depth = extra.get("max_depth", settings.max_depth)
    # Rows sampled by the size of their gradients exclude bagging.
    sampled = "goss" in (extra.get("boosting"), extra.get("data_sample_strategy"))
    fraction = extra.get("bagging_fraction", 1.0 if sampled else share)
    parameters = {
        "objective": "none",
        "num_class": settings.positions,
        "metric": "none",
        "learning_rate": settings.learning_rate,
        "max_depth": depth,
        "num_leaves": 2 ** min(depth, 10) if depth > 0 else 2**10,
        # A weight is a number of repetitions, so leaves and bins are limited by weight.
        "min_sum_hessian_in_leaf": 0.1,
        "min_data_in_leaf": 0,  # LightGBM estimates the rows of a leaf by its curvatures: one light merged row is 0
        "min_data_in_bin": 1,
        # With its own settings few categories split, as curvatures are small.
        "min_data_per_group": 1,
        "cat_smooth": 1.0,
        "cat_l2": 1.0,
        # 400 rows a bin: LightGBM holds what it samples in 12 bytes a number.
        "bin_construct_sample_cnt": 100_000,
        "feature_pre_filter": False,
        "bagging_fraction": fraction,
        "bagging_freq": int(fraction < 1),
        "lambda_l2": 1.0,
        "num_threads": settings.threads,
        "seed": settings.seed,
        "deterministic": True,
        "force_row_wise": not extra.get("force_col_wise", False),
        "verbosity": -1,
        **extra,
    }
    # At 0 LightGBM makes leaves without rows, which fail a check of its own.
    limit = max(float(parameters["min_sum_hessian_in_leaf"]), _SMALLEST_LIMIT)
    return parameters | {"min_sum_hessian_in_leaf": limit}


def _sampled(weights: np.ndarray, parameters: dict[str, Any]) -> np.ndarray:
    """Return the numbers of the rows of which LightGBM makes bins, by its own settings, each as often as it weighs.

    LightGBM counts the rows of a bin: of merged rows, taken once each, the values that most rows have would share bins.
    """
    sums = weights.cumsum()
    most = min(int(parameters["bin_construct_sample_cnt"]), _COPIES * len(weights))
    count = min(most, max(round(sums[-1]), len(weights)))
    random = np.random.RandomState(parameters.get("data_random_seed", parameters["seed"]))
    # One of each part of the weight: all rows, as often as they weigh, where these are as many.
    places = (np.arange(count) + random.uniform(size=count)) * (sums[-1] / count)
    return np.minimum(np.searchsorted(sums, places, side="right"), len(weights) - 1)


def _gradients_by_blocks(rows: Part, start: np.ndarray, objective: Any) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Return the objective of these rows block by block: copies of all scores take as much memory as their bins.

    It is a function, since LightGBM copies other objects with all that they hold.
    """

    def gradients(scores: np.ndarray, data: Any) -> tuple[np.ndarray, np.ndarray]:
        del data  # a matrix of the same rows
        gradients_and_hessians = np.empty_like(scores, np.float32), np.empty_like(scores, np.float32)
        for first in range(0, len(scores), _FILLED):
            block = slice(first, first + _FILLED)
            parts = objective(scores[block] + start, rows[block])
            gradients_and_hessians[0][block], gradients_and_hessians[1][block] = parts
        return gradients_and_hessians

    return gradients


@dataclass(frozen=True, eq=False)  # LightGBM hashes it
class _StopByLast:
    """Callback of LightGBM that stops by the last part watched; its own also stops by the others.

    Attributes:
        sizes: rounds of the booster after each round: LightGBM takes those that split nothing out again.
        patience: None where training does not stop early.
    """

    history: dict[str, Any]
    sizes: list[int]
    patience: int | None
    order: int = 30  # after the losses of a round are recorded

    def __call__(self, env: Any) -> None:
        from lightgbm import EarlyStopException

        self.sizes.append(env.model.current_iteration())
        if self.patience is None:
            return
        if _is_patience_over(self.history, self.patience) or env.iteration == env.end_iteration - 1:
            best = self.sizes[_best_round(self.history) - 1]
            raise EarlyStopException(best - 1, env.evaluation_result_list)


@contextmanager
def _failed_checks_are_named() -> Iterator[None]:
    """Say what to do about data of which LightGBM reports the line of its source that failed."""
    from lightgbm.basic import LightGBMError

    fixes = {
        "num_features()": "LightGBM finds no column to split: numbers below 1e-35 in size are 0 to it. Multiply such "
        "features by a power of ten, leave feature_pre_filter out, or lower min_data_in_leaf.",
        "left_count": "a leaf is so light that it holds no row; raise min_sum_hessian_in_leaf (min_child_weight).",
        "(num_data)": "bagging_fraction leaves LightGBM no row in a round; raise it (subsample), or add rows.",
    }
    try:
        yield
    except LightGBMError as error:
        for check, fix in fixes.items():
            if "Check failed" in str(error) and check in str(error):
                raise ValueError(fix) from error
        raise


def _train_lightgbm(
    settings: TreeSettings, rows: Part, watched: dict[str, Part], start: np.ndarray
) -> tuple[Any, Sequence[int], History]:
    """Return the booster, its rounds after each one, some perhaps after the best one, and all losses watched."""
    import lightgbm

    parameters = _lightgbm_parameters(settings, _sampled_share("lightgbm", rows))

    class Rows(lightgbm.Sequence):
        """Rows that are copied block by block."""

        batch_size = _FILLED

        def __init__(self, part: Part) -> None:
            self.part = part

        def __len__(self) -> int:
            return len(self.part.rows)

        def __getitem__(self, index: Any) -> np.ndarray:
            return self.part[index].features()

    arguments = {"params": parameters, "categorical_feature": list(settings.categorical)}

    def data(part: Part, reference: Any) -> Any:
        rows = lightgbm.Dataset(Rows(part), part.target, reference=reference, **arguments).construct()
        # `weight=` passes over ones, and where the reference has weights, zeros are in their place.
        return rows.set_field("weight", part.weight)

    # Bins are made of a sample, for which LightGBM takes single rows of a `Sequence`, in 2.5 times its memory.
    weights = np.ones(len(rows.rows)) if _counts_rows(settings) else rows.weight
    sample = rows[_sampled(weights, parameters)].features()
    training = data(rows, lightgbm.Dataset(sample, **arguments).construct())
    del sample
    objective = lightgbm_objective(settings.positions, **settings.loss)
    metric = lightgbm_metric(settings.positions, **settings.loss)
    history: dict[str, Any] = {}
    sizes: list[int] = []
    with _failed_checks_are_named():
        booster = lightgbm.train(
            parameters | {"objective": _gradients_by_blocks(rows, start, objective)},
            training,
            num_boost_round=settings.rounds,
            valid_sets=[data(part, training) for part in watched.values()],
            valid_names=list(watched),
            feval=lambda scores, data: metric(scores + start, data),
            callbacks=[lightgbm.record_evaluation(history), _StopByLast(history, sizes, settings.patience)],
        )
    return booster, sizes, _plain(history)
