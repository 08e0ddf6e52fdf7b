"""The door to XGBoost and LightGBM: train trees with our objective on arrays, and get their scores.

Both start from the logarithms of the class frequencies, which are given as the margins of the rows and added at
prediction, so that a model of no trees predicts the frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
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
    if _all_alike(rows.features):  # nothing to split on, which LightGBM refuses
        return Trees(library, None, start, 0)
    train = _train_lightgbm if library == "lightgbm" else _train_xgboost
    booster, rounds = train(settings, rows, held_out, start)
    return Trees(library, booster, start, rounds)


def _all_alike(features: np.ndarray) -> bool:
    return bool(((features == features[0]) | (np.isnan(features) & np.isnan(features[0]))).all())


def _train_xgboost(settings: TreeSettings, rows: Part, held_out: Part | None, start: np.ndarray) -> tuple[Any, int]:
    import xgboost

    def data(part: Part) -> Any:
        margin = np.tile(start, (len(part.target), 1))
        return xgboost.DMatrix(part.features, label=part.target, weight=part.weight, base_margin=margin)

    parameters = {
        "objective": "multi:softprob",
        "num_class": settings.positions,
        "disable_default_eval_metric": True,
        "learning_rate": settings.learning_rate,
        "max_depth": settings.max_depth,
        "min_child_weight": settings.min_child_weight,
        "subsample": settings.subsample,
        "colsample_bytree": settings.colsample_bytree,
        "lambda": settings.reg_lambda,
        "nthread": settings.threads,
        "seed": settings.seed,
        "tree_method": "hist",
        "verbosity": min(settings.verbose, 1),
        **settings.extra,
    }
    stopping: dict[str, Any] = {}
    if held_out is not None:
        stopping = {
            "evals": [(data(held_out), "held_out")],
            "custom_metric": xgboost_metric(settings.positions, **settings.loss),
            "early_stopping_rounds": settings.patience,
        }
    booster = xgboost.train(
        parameters,
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


def _train_lightgbm(settings: TreeSettings, rows: Part, held_out: Part | None, start: np.ndarray) -> tuple[Any, int]:
    import lightgbm

    def data(part: Part, reference: Any = None) -> Any:
        margin = np.tile(start, (len(part.target), 1))
        return lightgbm.Dataset(
            part.features, part.target, weight=part.weight, init_score=margin, reference=reference, params=parameters
        )

    parameters = {
        "objective": lightgbm_objective(settings.positions, hessian=settings.hessian, **settings.loss),
        "num_class": settings.positions,
        "metric": "none",
        "learning_rate": settings.learning_rate,
        "max_depth": settings.max_depth,
        "num_leaves": 2 ** min(settings.max_depth, 10),
        # Weights are repetitions, so leaves and bins are limited by weight, not by number of rows.
        "min_sum_hessian_in_leaf": settings.min_child_weight,
        "min_data_in_leaf": 1,
        "min_data_in_bin": 1,
        "feature_pre_filter": False,
        "bagging_fraction": settings.subsample,
        "bagging_freq": int(settings.subsample < 1),
        "feature_fraction": settings.colsample_bytree,
        "lambda_l2": settings.reg_lambda,
        "num_threads": settings.threads,
        "seed": settings.seed,
        "deterministic": True,
        "force_row_wise": True,
        "verbosity": -1,
        **settings.extra,
    }
    training = data(rows)
    stopping: dict[str, Any] = {"callbacks": [lightgbm.log_evaluation(1)] if settings.verbose else []}
    if held_out is not None:
        stopping["valid_sets"] = [data(held_out, training)]
        stopping["feval"] = lightgbm_metric(settings.positions, **settings.loss)
        stopping["callbacks"].append(lightgbm.early_stopping(settings.patience, verbose=bool(settings.verbose)))
    booster = lightgbm.train(parameters, training, num_boost_round=settings.n_estimators, **stopping)
    return booster, booster.best_iteration if held_out is not None else settings.n_estimators
