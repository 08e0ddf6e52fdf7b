"""Settings of XGBoost and LightGBM by all their names, and that each setting of the estimator reaches them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from otloss.boosting import start_scores
from otloss.estimators.boosters import Part, TreeSettings, train_trees
from tests.otloss.estimators.test_estimators import boosted, ordered_rows

X, Y = ordered_rows(120)
X = X.round(1)
LIBRARIES = pytest.mark.parametrize("library", ["xgboost", "lightgbm"])


def proba(library: str, **settings: Any) -> np.ndarray:
    model = boosted(library, **{"subsample": 1.0, "colsample_bytree": 1.0, "early_stopping": False, **settings})
    return model.fit(X, Y).predict_proba(X)


@pytest.mark.parametrize(
    ("library", "alias", "value", "settings"),
    [
        ("lightgbm", "eta", 0.02, {"learning_rate": 0.02}),
        ("lightgbm", "reg_lambda", 30.0, {"reg_lambda": 30.0}),
        ("lightgbm", "min_child_weight", 9.0, {"min_child_weight": 9.0}),
        ("lightgbm", "subsample", 0.3, {"subsample": 0.3}),
        ("lightgbm", "colsample_bytree", 0.4, {"colsample_bytree": 0.4}),
        ("lightgbm", "max_depth", 1, {"max_depth": 1}),
        ("lightgbm", "min_child_samples", 40, {}),
        ("lightgbm", "max_leaves", 2, {}),
        ("lightgbm", "random_state", 5, {}),
        ("xgboost", "eta", 0.02, {"learning_rate": 0.02}),
        ("xgboost", "reg_lambda", 30.0, {"reg_lambda": 30.0}),
        ("xgboost", "min_child_weight", 9.0, {"min_child_weight": 9.0}),
        ("xgboost", "subsample", 0.3, {"subsample": 0.3}),
        ("xgboost", "reg_alpha", 2.0, {}),
        ("xgboost", "min_split_loss", 2.0, {}),
        ("xgboost", "random_state", 5, {}),
    ],
)
def test_settings_by_any_name_take_precedence(library: str, alias: str, value: Any, settings: dict[str, Any]) -> None:
    sampled = {"subsample": 0.5} if alias == "random_state" else {}
    found = proba(library, booster_params={alias: value}, **sampled)
    assert np.abs(found - proba(library, **sampled)).max() > 1e-3
    if settings:
        np.testing.assert_array_equal(found, proba(library, **settings))


@pytest.mark.parametrize(
    ("library", "given", "message"),
    [
        ("lightgbm", {"n_estimators": 7}, "holds 'n_estimators', which is set by n_estimators"),
        ("lightgbm", {"num_trees": 7}, "holds 'num_trees', which is set by n_estimators"),
        ("lightgbm", {"early_stopping_rounds": 7}, "which is set by early_stopping and n_iter_no_change"),
        ("lightgbm", {"application": "multiclass"}, "holds 'application', which follows from the loss"),
        ("lightgbm", {"num_classes": 3}, "holds 'num_classes', which follows from the labels"),
        ("lightgbm", {"metrics": "auc"}, "which is the loss itself"),
        ("lightgbm", {"eta": 0.1, "learning_rate": 0.2}, "another name of 'learning_rate'"),
        ("lightgbm", {"num_leafs": 3}, "holds 'num_leafs', expected settings of lightgbm, such as 'num_leaf"),
        ("lightgbm", {"boosting": "dart"}, "asks for 'dart', .*early_stopping=False"),
        ("lightgbm", {"boosting_type": "rf"}, "boosting='rf', which cannot start"),
        ("xgboost", {"n_estimators": 7}, "which is set by n_estimators"),
        ("xgboost", {"num_boost_round": 7}, "which is set by n_estimators"),
        ("xgboost", {"early_stopping_rounds": 7}, "which is set by early_stopping"),
        ("xgboost", {"eval_metric": "mlogloss"}, "which is the loss itself"),
        ("xgboost", {"base_score": 0.5}, "which follows from the class frequencies"),
        ("xgboost", {"objective": "multi:softmax"}, "which follows from the loss"),
        ("xgboost", {"eta": 0.1, "learning_rate": 0.2}, "another name of 'learning_rate'"),
        ("xgboost", {"max_dept": 3}, "holds 'max_dept', expected settings of xgboost, such as 'max_depth'"),
        ("xgboost", {"booster": "dart"}, "asks for 'dart', .*early_stopping=False"),
        ("xgboost", {"booster": "gblinear"}, "asks for 'gblinear', .*early_stopping=False"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_named(library: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        boosted(library, booster_params=given, early_stopping="auto").fit(X, Y)


@pytest.mark.parametrize(
    ("library", "given", "rounds"),
    [
        ("xgboost", {"booster": "dart", "rate_drop": 0.5}, 8),
        ("xgboost", {"booster": "gblinear", "feature_selector": "shuffle"}, 8),
        ("lightgbm", {"boosting": "dart"}, 8),
        ("lightgbm", {"data_sample_strategy": "goss"}, 8),
        ("lightgbm", {"boosting": "goss"}, 8),
        ("lightgbm", {"min_data_in_leaf": 100}, 1),  # nothing can be split
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_other_kinds_of_rounds_are_all_trained(library: str, given: dict[str, Any], rounds: int) -> None:
    model = boosted(library, booster_params=given, early_stopping=False).fit(X, Y)
    assert model.n_estimators_ == rounds
    assert np.isfinite(model.predict_proba(X)).all()


@LIBRARIES
@pytest.mark.parametrize(
    "setting",
    [{"min_child_weight": 9.0}, {"reg_lambda": 30.0}, {"colsample_bytree": 0.4}, {"subsample": 0.4}, {"max_depth": 1}],
    ids=str,
)
def test_each_setting_matters(library: str, setting: dict[str, Any]) -> None:
    assert np.abs(proba(library, **setting) - proba(library)).max() > 1e-3


@LIBRARIES
def test_the_seed_is_that_of_random_state(library: str) -> None:
    first, second = (proba(library, subsample=0.5, random_state=seed) for seed in (1, 2))
    assert np.abs(first - second).max() > 1e-3


@LIBRARIES
@pytest.mark.parametrize(("jobs", "threads"), [(None, 0), (2, 2), (3, 3), (-1, 4), (-2, 3)])
def test_jobs_are_threads(library: str, jobs: int | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("joblib.parallel.cpu_count", lambda *_, **__: 4)
    monkeypatch.setattr("joblib._parallel_backends.cpu_count", lambda *_, **__: 4)
    model = boosted(library, n_estimators=1).fit(X, Y).set_params(n_jobs=jobs)
    assert model._tree_settings(seed=0).threads == threads


@LIBRARIES
def test_rows_held_out_stop_by_their_weight(library: str) -> None:
    pytest.importorskip(library)
    settings: TreeSettings = boosted(library, n_estimators=60).fit(X, Y)._tree_settings(seed=0)
    settings = replace(settings, patience=60)
    noise = np.random.default_rng(0).permutation(Y)  # wrong labels, which no round serves
    features, labels = np.concatenate([X, X]), np.concatenate([Y, noise])
    rounds = []
    for good in (1.0, 1e-3):
        weight = np.repeat([good, 1.001 - good], 120)
        rounds.append(train_trees(library, settings, Part(X, Y, np.ones(120)), [Part(features, labels, weight)]).rounds)
    assert rounds[0] > rounds[1] + 5
    start = train_trees(library, settings, Part(X, Y, np.ones(120))).start
    np.testing.assert_allclose(start, start_scores(Y, 3))
