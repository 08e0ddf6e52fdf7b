"""The door to XGBoost and LightGBM: train trees with our objective on arrays, and get their scores.

Both start from the logarithms of the class frequencies, which are given as the margins of the rows and added at
prediction, so that a model of no trees predicts the frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from json import loads
from typing import Any

import numpy as np

from otloss.boosting import (
    lightgbm_metric,
    lightgbm_objective,
    start_scores,
    xgboost_metric,
    xgboost_objective,
)

BOOSTERS = ("xgboost", "lightgbm")
LIGHTGBM_ZERO = 1e-35  # what it holds features up to this size for
XGBOOST_SETTINGS: dict[str, Any] = {
    "objective": "multi:softprob",
    "num_class": 2,
    "disable_default_eval_metric": True,
    "tree_method": "hist",
}
XGBOOST_FIRST_NAMES = {
    "eta": "learning_rate",
    "min_split_loss": "gamma",
    "n_jobs": "nthread",
    "random_state": "seed",
    "reg_alpha": "alpha",
    "reg_lambda": "lambda",
}
_ROUNDS = "is set by n_estimators of the estimator"
_STOPPING = "is set by early_stopping and n_iter_no_change of the estimator"
_METRIC = "is the loss itself"
# By the first names of both libraries, and by those of their functions and scikit-learn interfaces.
OWN_SETTINGS = {
    "objective": "follows from the loss",
    "num_class": "follows from the labels",
    "base_score": "follows from the class frequencies",
    "metric": _METRIC,
    "eval_metric": _METRIC,
    "disable_default_eval_metric": _METRIC,
    "num_iterations": _ROUNDS,
    "num_boost_round": _ROUNDS,
    "n_estimators": _ROUNDS,
    "early_stopping_round": _STOPPING,
    "early_stopping_rounds": _STOPPING,
}


@dataclass(frozen=True)
class TreeSettings:
    """Settings that both libraries have, by XGBoost's names, and `extra` by the library's own.

    Attributes:
        threads: 0 for all cores.
        loss: keywords of the objective and of the metric that stops early.
        hessian: of the objective.
    """

    positions: int
    n_estimators: int
    learning_rate: float
    max_depth: int
    min_child_weight: float
    subsample: float
    colsample_bytree: float
    reg_lambda: float
    threads: int
    seed: int
    patience: int
    verbose: int
    loss: dict[str, Any]
    hessian: str
    extra: dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Features (n, d), positions (n,) and weights (n,) of the rows to train on, or to stop by."""

    features: np.ndarray
    target: np.ndarray
    weight: np.ndarray

    def __getitem__(self, index: np.ndarray) -> Part:
        return Part(self.features[index], self.target[index], self.weight[index])

    def merged(self) -> Part:
        """Without rows of weight zero, and equal rows as one that has their weight, in an order of their own.

        So that a weight of two is a row given twice to the last bit: both libraries hold gradients in float32, where
        one of 2 g and two of g round differently, and rows without weight would still place the edges of bins.
        """
        part = self[self.weight > 0]
        table = np.column_stack([part.features + 0.0, part.target])  # -0.0 + 0.0 is 0.0
        rows = np.ascontiguousarray(table).view(np.dtype((np.void, table.itemsize * table.shape[1])))[:, 0]
        _, first, which = np.unique(rows, return_index=True, return_inverse=True)
        return Part(part.features[first], part.target[first], np.bincount(which, weights=part.weight))


@dataclass(frozen=True)
class Trees:
    """A trained booster (None without rounds), the scores (m,) that it started from, and the number of its rounds."""

    library: str
    booster: Any
    start: np.ndarray
    rounds: int

    def scores(self, features: np.ndarray) -> np.ndarray:
        """Scores (n, m) whose softmax is the distribution over positions."""
        margin = np.tile(self.start, (len(features), 1))
        if self.booster is None:
            return margin
        if self.library == "lightgbm":
            return margin + self.booster.predict(features, raw_score=True)
        import xgboost

        data = xgboost.DMatrix(features, base_margin=margin)
        return np.asarray(self.booster.predict(data, output_margin=True), dtype=np.float64)


def require_library(name: str) -> None:
    """Raise ImportError, with how to install it, if the library is not there."""
    try:
        import_module(name)
    except ImportError as error:
        raise ImportError(f'booster="{name}" needs the library {name}: pip install "otloss[boost]".') from error


def train_trees(library: str, settings: TreeSettings, rows: Part, held_out: Part | None = None) -> Trees:
    """Boost for `n_estimators` rounds, or until the loss of `held_out` has not fallen for `patience` of them.

    The rounds after the best one are cut off.
    """
    rows = rows.merged()
    start = start_scores(rows.target, settings.positions, sample_weight=rows.weight)
    if _all_alike(rows.features, library):  # nothing to split on, which LightGBM refuses
        return Trees(library, None, start, 0)
    train = _train_lightgbm if library == "lightgbm" else _train_xgboost
    booster, rounds = train(settings, rows, held_out, start)
    return Trees(library, booster, start, rounds)


def checked_parameters(library: str, given: Any, *, may_stop_early: bool) -> dict[str, Any]:
    """Settings by the library's own names with each name turned into its first one, so that ours give way to them.

    Raises:
        TypeError: if they are no dict of names.
        ValueError: if a name is unknown, names a setting twice, or one that the estimator sets itself, or if they ask
            for trees that cannot be cut off at the best round.
    """
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"booster_params is {given!r}, expected a dict of {library}'s settings.")
    first_names = _lightgbm_names() if library == "lightgbm" else _xgboost_names(given)
    found: dict[str, Any] = {}
    for name, value in given.items():
        first = str(first_names.get(name, name))
        if first in OWN_SETTINGS:
            raise ValueError(f"booster_params holds {name!r}, which {OWN_SETTINGS[first]}; remove it.")
        if name not in first_names:
            near = get_close_matches(name, first_names)
            raise ValueError(f"booster_params holds {name!r}, expected settings of {library}{_or(near)}.")
        if first in found:
            raise ValueError(f"booster_params holds {name!r} and another name of {first!r}; remove one of them.")
        found[first] = value
    _check_kind(library, found, may_stop_early)
    return found


def _check_kind(library: str, found: dict[str, Any], may_stop_early: bool) -> None:
    kind = found.get("boosting") if library == "lightgbm" else found.get("booster")
    if library == "lightgbm" and kind in ("rf", "random_forest"):
        raise ValueError("booster_params asks for boosting='rf', which cannot start from the class frequencies.")
    if kind in ("dart", "gblinear") and may_stop_early:
        raise ValueError(
            f"booster_params asks for {kind!r}, which changes earlier rounds and so has no best one to stop at; set "
            "early_stopping=False."
        )


def _or(names: list[str]) -> str:
    return f", such as {' or '.join(repr(name) for name in names)}" if names else ""


def _lightgbm_names() -> dict[str, str]:
    """The first name of each name that LightGBM knows."""
    from lightgbm.basic import _ConfigAliases

    aliases = _ConfigAliases._get_all_param_aliases()
    return {name: first for first, names in aliases.items() for name in (first, *names)}


def _xgboost_names(given: dict[str, Any]) -> dict[str, str]:
    """The first name of each name that XGBoost knows for the kind of trees that `given` asks for."""
    import xgboost

    def names(config: Any) -> Iterator[str]:
        for name, value in config.items() if isinstance(config, dict) else ():
            yield from names(value) if isinstance(value, dict) else (name,)

    settings: dict[str, Any] = {**XGBOOST_SETTINGS, "verbosity": 0}
    settings.update({name: given[name] for name in ("booster", "tree_method", "updater") if name in given})
    data = xgboost.DMatrix(np.zeros((1, 1)))
    config = xgboost.Booster(settings, cache=[data]).save_config()
    known: list[str] = [*names(loads(config)), "verbosity"]
    return {name: XGBOOST_FIRST_NAMES.get(name, name) for name in known}


def _all_alike(features: np.ndarray, library: str) -> bool:
    if library == "lightgbm":
        features = np.where(np.abs(features) <= LIGHTGBM_ZERO, 0.0, features)
    return bool(((features == features[0]) | (np.isnan(features) & np.isnan(features[0]))).all())


def _xgboost_parameters(settings: TreeSettings) -> dict[str, Any]:
    return {
        **XGBOOST_SETTINGS,
        "num_class": settings.positions,
        "learning_rate": settings.learning_rate,
        "max_depth": settings.max_depth,
        "min_child_weight": settings.min_child_weight,
        "subsample": settings.subsample,
        "colsample_bytree": settings.colsample_bytree,
        "lambda": settings.reg_lambda,
        "nthread": settings.threads,
        "seed": settings.seed,
        "verbosity": min(settings.verbose, 1),
        **settings.extra,
    }


def _train_xgboost(settings: TreeSettings, rows: Part, held_out: Part | None, start: np.ndarray) -> tuple[Any, int]:
    import xgboost

    def data(part: Part) -> Any:
        margin = np.tile(start, (len(part.target), 1))
        return xgboost.DMatrix(part.features, label=part.target, weight=part.weight, base_margin=margin)

    stopping: dict[str, Any] = {}
    if held_out is not None:
        stopping = {
            "evals": [(data(held_out), "held_out")],
            "custom_metric": xgboost_metric(settings.positions, **settings.loss),
            "early_stopping_rounds": settings.patience,
        }
    booster = xgboost.train(
        _xgboost_parameters(settings),
        data(rows),
        num_boost_round=settings.n_estimators,
        obj=xgboost_objective(settings.positions, hessian=settings.hessian, **settings.loss),
        verbose_eval=bool(settings.verbose),
        **stopping,
    )
    if held_out is None:
        return booster, settings.n_estimators
    rounds = booster.best_iteration + 1
    return booster[:rounds], rounds


def _lightgbm_parameters(settings: TreeSettings) -> dict[str, Any]:
    extra = settings.extra
    depth = extra.get("max_depth", settings.max_depth)
    # Trees on gradients sampled by their size have no bagging beside.
    sampled = "goss" in (extra.get("boosting"), extra.get("data_sample_strategy"))
    fraction = extra.get("bagging_fraction", 1.0 if sampled else settings.subsample)
    return {
        "objective": lightgbm_objective(settings.positions, hessian=settings.hessian, **settings.loss),
        "num_class": settings.positions,
        "metric": "none",
        "learning_rate": settings.learning_rate,
        "max_depth": depth,
        "num_leaves": 2 ** min(depth, 10) if depth > 0 else 2**10,
        # Weights are repetitions, so leaves and bins are limited by weight, not by number of rows.
        "min_sum_hessian_in_leaf": settings.min_child_weight,
        "min_data_in_leaf": 1,
        "min_data_in_bin": 1,
        "feature_pre_filter": False,
        "bagging_fraction": fraction,
        "bagging_freq": int(fraction < 1),
        "feature_fraction": settings.colsample_bytree,
        "lambda_l2": settings.reg_lambda,
        "num_threads": settings.threads,
        "seed": settings.seed,
        "deterministic": True,
        "force_row_wise": True,
        "verbosity": -1,
        **extra,
    }


def _train_lightgbm(settings: TreeSettings, rows: Part, held_out: Part | None, start: np.ndarray) -> tuple[Any, int]:
    import lightgbm

    parameters = _lightgbm_parameters(settings)

    def data(part: Part, reference: Any = None) -> Any:
        margin = np.tile(start, (len(part.target), 1))
        return lightgbm.Dataset(
            part.features, part.target, weight=part.weight, init_score=margin, reference=reference, params=parameters
        )

    training = data(rows)
    stopping: dict[str, Any] = {"callbacks": [lightgbm.log_evaluation(1)] if settings.verbose else []}
    if held_out is not None:
        stopping["valid_sets"] = [data(held_out, training)]
        stopping["feval"] = lightgbm_metric(settings.positions, **settings.loss)
        stopping["callbacks"].append(lightgbm.early_stopping(settings.patience, verbose=bool(settings.verbose)))
    booster = lightgbm.train(parameters, training, num_boost_round=settings.n_estimators, **stopping)
    rounds = booster.best_iteration if held_out is not None else settings.n_estimators
    return booster, min(rounds, booster.current_iteration())  # where nothing can be split it ends by itself
