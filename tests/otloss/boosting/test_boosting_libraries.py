"""Objectives and metrics inside XGBoost and LightGBM, by their native and their scikit-learn interfaces."""

import itertools
import json
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

from otloss.boosting import lightgbm_metric, lightgbm_objective, start_scores, xgboost_metric, xgboost_objective

lgb = pytest.importorskip("lightgbm")
xgb = pytest.importorskip("xgboost")
K = 4
XGB = {"objective": "multi:softprob", "num_class": K, "base_score": 0.5, "nthread": 1, "max_depth": 3,
       "disable_default_eval_metric": True}  # fmt: skip
LGB = {"num_class": K, "num_threads": 1, "num_leaves": 7, "verbose": -1, "deterministic": True, "metric": "none",
       "force_row_wise": True}  # fmt: skip
ONLY_CROSS_ENTROPY = {"transport": 0.0, "cross_entropy": 1.0}
LOSSES: list[dict[str, Any]] = [
    {}, {"power": 1, "cross_entropy": 0.5}, {"cost": np.subtract.outer(np.arange(K), np.arange(K)) ** 2.0},
]  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightgbm|xgboost|sklearn")
        yield


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, labels, weights."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(600, 5))
    y = np.clip(np.round(X[:, 0] + X[:, 1] * X[:, 2] + rng.normal(size=600) * 0.5 + 1.5), 0, K - 1).astype(int)
    return X, y, rng.uniform(0.2, 2, size=600)


def rps(P: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None) -> float:
    lost = ((np.cumsum(P, 1)[:, :-1] - (y[:, None] <= np.arange(P.shape[1] - 1))) ** 2).sum(1)
    return float(np.average(lost, weights=weights))


def trees(booster: Any) -> list[dict[str, Any]]:
    """Features, thresholds and leaves of each tree."""
    kept = ("split_indices", "split_conditions", "left_children", "right_children")
    model = json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"]
    return [{name: tree[name] for name in kept} for tree in model["trees"]]


def test_cross_entropy_grows_the_trees_of_xgboost(rows: Any) -> None:
    X, y, weights = rows
    data = xgb.DMatrix(X, y, weight=weights)
    own = xgb.train(XGB, data, 8)
    ours = xgb.train(XGB, data, 8, obj=xgboost_objective(K, **ONLY_CROSS_ENTROPY))
    for mine, theirs in zip(trees(ours), trees(own), strict=True):
        assert mine["split_indices"] == theirs["split_indices"]
        assert mine["left_children"] == theirs["left_children"]
        np.testing.assert_allclose(mine["split_conditions"], theirs["split_conditions"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(ours.predict(data), own.predict(data), atol=1e-5)
    data = xgb.DMatrix(X, y > 1, weight=weights)  # one score
    settings = {"objective": "binary:logistic", "base_score": 0.5, "nthread": 1}
    own = xgb.train(settings, data, 5)
    ours = xgb.train(settings, data, 5, obj=xgboost_objective(2, **ONLY_CROSS_ENTROPY))
    np.testing.assert_allclose(ours.predict(data), own.predict(data), atol=1e-5)


@pytest.mark.parametrize(("classes", "weighted"), [(2, True), (K, False)])
def test_cross_entropy_grows_the_trees_of_lightgbm(rows: Any, classes: int, weighted: bool) -> None:
    X, y, weights = rows
    y = np.minimum(y, classes - 1)

    def data() -> Any:
        start = np.zeros((len(y), classes))
        return lgb.Dataset(X, y, weight=weights if weighted else None, init_score=start, free_raw_data=False)

    settings = {**LGB, "num_class": classes, "boost_from_average": False}
    own = lgb.train({**settings, "objective": "multiclass"}, data(), 8)
    ours = lgb.train({**settings, "objective": lightgbm_objective(classes, **ONLY_CROSS_ENTROPY)}, data(), 8)
    mine, theirs = ours.trees_to_dataframe(), own.trees_to_dataframe()
    assert mine["split_feature"].equals(theirs["split_feature"])
    np.testing.assert_allclose(mine["threshold"], theirs["threshold"], rtol=1e-6)
    np.testing.assert_allclose(mine["value"], theirs["value"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_it_learns_and_reports_what_it_learns(rows: Any, library: str, loss: dict[str, Any]) -> None:
    X, y, weights = rows
    start, history = start_scores(y, K, sample_weight=weights), {}
    starts = np.tile(start, (len(y), 1))
    if library == "xgboost":
        data, metric = xgb.DMatrix(X, y, weight=weights), xgboost_metric(K, **loss)
        settings = {**XGB, "base_score": start.tolist()}
        booster = xgb.train(
            settings, data, 15, obj=xgboost_objective(K, **loss), custom_metric=metric, evals=[(data, "train")],
            evals_result=history, verbose_eval=False,
        )  # fmt: skip
        scores = booster.predict(data, output_margin=True)
    else:
        data = lgb.Dataset(X, y, weight=weights, init_score=starts, free_raw_data=False)
        metric = lightgbm_metric(K, **loss)
        booster = lgb.train(
            {**LGB, "objective": lightgbm_objective(K, **loss)}, data, 15, feval=metric, valid_sets=[data],
            valid_names=["train"], callbacks=[lgb.record_evaluation(history)],
        )  # fmt: skip
        scores = np.asfortranarray(booster.predict(X) + start)
    reported = [metric(starts, data)[1], *history["train"][metric.__name__]]
    assert all(b < a for a, b in itertools.pairwise(reported))
    assert reported[-1] < 0.7 * reported[0]
    assert metric(scores, data)[1] == pytest.approx(reported[-1], rel=1e-5)
    if not loss:
        assert reported[-1] == pytest.approx(rps(softmax(scores.astype(float), 1), y, weights), rel=1e-5)
    if library == "xgboost":
        by_probabilities = xgboost_metric(K, predictions="probabilities", **loss)
        assert by_probabilities(booster.predict(data), data)[1] == pytest.approx(reported[-1], abs=2e-6)


def test_the_classifier_of_xgboost_is_its_native_training(rows: Any) -> None:
    from sklearn.base import clone

    X, y, weights = rows
    start = start_scores(y, K).tolist()
    model = clone(xgb.XGBClassifier(
        objective=xgboost_objective(K, interface="sklearn"), eval_metric=xgboost_metric(K, interface="sklearn"),
        n_estimators=40, max_depth=3, n_jobs=1, base_score=start, early_stopping_rounds=3,
    ))  # fmt: skip
    model.fit(X[:400], y[:400], sample_weight=weights[:400], verbose=False, eval_set=[(X[400:], y[400:])])
    assert np.argmin(model.evals_result()["validation_0"]["rps"]) == model.best_iteration
    assert model.best_score == pytest.approx(rps(model.predict_proba(X[400:]).astype(float), y[400:]), rel=1e-4)
    data = xgb.DMatrix(X[:400], y[:400], weight=weights[:400])
    native = xgb.train({**XGB, "base_score": start}, data, model.best_iteration + 1, obj=xgboost_objective(K))
    np.testing.assert_allclose(model.predict_proba(X), native.predict(xgb.DMatrix(X)), atol=1e-6)
    assert (pickle.loads(pickle.dumps(model)).predict(X) == model.predict(X)).all()
