"""Training time of XGBoost and LightGBM with our objectives and with their own, in interleaved rounds.

The limit is for XGBoost at power 2: at most 1.5 times the time of its own multi:softprob. All arms use the same data,
already binned, and the same numbers of trees and threads. `OrdinalBoostingClassifier` and `XGBClassifier` start from
arrays, and have the same rounds, depth, learning rate, sampled share of the rows and threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.bench import Bench
from benchmarks.measure import Limit, Settings

NAME = "boosting"
ROUNDS, SMALL_ROUNDS = 7, 1
ROWS, FEATURES, CLASSES, TREES = 100_000, 10, 5, 100
SMALL_ROWS, SMALL_TREES = 2_000, 5
LIMIT, LIMIT_OF_CLASSIFIER = 1.5, 1.25
CLASSIFIER_ROWS = (500, 2_000, 20_000)
OWN = {"xgboost": "multi:softprob", "lightgbm": "multiclass"}
VARIANTS: dict[str, dict[str, Any]] = {"power 2": {}, "power 1": {"power": 1}, "power 2 + CE": {"cross_entropy": 0.5}}


def main(settings: Settings) -> None:
    rows, trees = (SMALL_ROWS, SMALL_TREES) if settings.small else (ROWS, TREES)
    bench = Bench(settings, NAME, rounds=ROUNDS, small_rounds=SMALL_ROUNDS)
    features, labels = problem(rows)
    case = f"n={rows}, {FEATURES} features, K={CLASSES}, {trees} rounds"
    for library, arms in (("xgboost", xgboost_arms), ("lightgbm", lightgbm_arms)):
        steps = {f"{library} {name}": step for name, step in arms(features, labels, trees).items()}
        timings = bench.timed(case, steps, turn=0.0)
        if library == "xgboost":
            own, power_2, *_ = timings.values()
            bench.judge(Limit(f"{library}: time of power 2 / {OWN[library]}", LIMIT), power_2, own)
    for count in CLASSIFIER_ROWS[: 1 if settings.small else None]:
        steps = classifier_arms(*problem(count), trees)
        ours, peer = steps
        case = f"n={count}, {FEATURES} features, K={CLASSES}, {trees} rounds, estimators"
        timings = bench.timed(case, steps, peer=peer, turn=0.0)
        bench.judge(Limit(f"time of {ours} / {peer}, n={count}", LIMIT_OF_CLASSIFIER), timings[ours], timings[peer])
    bench.report("quantity")


def problem(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Features, and noisy labels in five classes."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, FEATURES)).astype(np.float32)
    score = X[:, 0] + 0.7 * X[:, 1] * X[:, 2] + np.sin(2 * X[:, 3]) + 0.7 * rng.normal(size=rows)
    return X, np.digitize(score, np.quantile(score, [0.1, 0.3, 0.7, 0.9]))


def xgboost_arms(features: np.ndarray, labels: np.ndarray, trees: int) -> dict[str, Callable[[], Any]]:
    import xgboost

    from otloss.boosting import xgboost_objective

    data = xgboost.QuantileDMatrix(features, labels)
    parameters = {"objective": OWN["xgboost"], "num_class": CLASSES, "base_score": 0.5, "tree_method": "hist",
                  "nthread": torch.get_num_threads(), "disable_default_eval_metric": True}  # fmt: skip
    train = partial(xgboost.train, parameters, data, trees)
    return {OWN["xgboost"]: train} | {
        name: partial(train, obj=xgboost_objective(CLASSES, **variant)) for name, variant in VARIANTS.items()
    }


def lightgbm_arms(features: np.ndarray, labels: np.ndarray, trees: int) -> dict[str, Callable[[], Any]]:
    import lightgbm

    from otloss.boosting import lightgbm_objective

    fixed = {"verbose": -1, "num_threads": torch.get_num_threads(), "force_row_wise": True}
    data = lightgbm.Dataset(features, labels, params=fixed, free_raw_data=False).construct()
    parameters = {"num_class": CLASSES, "metric": "none", **fixed}

    def train(objective: Any) -> Any:
        return lightgbm.train({**parameters, "objective": objective}, data, trees)

    return {OWN["lightgbm"]: partial(train, OWN["lightgbm"])} | {
        name: partial(train, lightgbm_objective(CLASSES, **variant)) for name, variant in VARIANTS.items()
    }


def classifier_arms(features: np.ndarray, labels: np.ndarray, trees: int) -> dict[str, Callable[[], Any]]:
    from xgboost import XGBClassifier

    from otloss.estimators import OrdinalBoostingClassifier
    from otloss.estimators.boosters import SAMPLED

    shared = {"n_estimators": trees, "max_depth": 3, "learning_rate": 0.05, "n_jobs": torch.get_num_threads()}
    ours = OrdinalBoostingClassifier(early_stopping=False, **shared)
    peer = XGBClassifier(subsample=SAMPLED["xgboost"], min_child_weight=0.1, **shared)
    return {type(model).__name__: partial(model.fit, features, labels) for model in (ours, peer)}


if __name__ == "__main__":
    main(Settings())
