"""What the boosted estimators learn: XGBoost's own objective as oracle, starts, stopping, weights, missing values."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from otloss.boosting import start_scores
from otloss.estimators import OrdinalBoostingClassifier
from otloss.estimators.base import softmax
from tests.otloss.estimators.test_estimators import ordered_rows

LIBRARIES = pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
WHOLE: dict[str, Any] = {"subsample": 1.0, "colsample_bytree": 1.0}


def boosted(library: str, **settings: Any) -> OrdinalBoostingClassifier:
    pytest.importorskip(library)
    settings = {"early_stopping": False, "n_jobs": 1, "random_state": 0, **settings}
    return OrdinalBoostingClassifier(booster=library, **settings)


def test_cross_entropy_alone_is_xgboosts_own_objective() -> None:
    xgboost = pytest.importorskip("xgboost")
    X, y = ordered_rows(300, 4)
    ours = boosted("xgboost", transport=0.0, cross_entropy=1.0, n_estimators=12, learning_rate=0.2, **WHOLE)
    margin = np.tile(start_scores(y, 4), (300, 1))
    data = xgboost.DMatrix(X, label=y, base_margin=margin)
    settings = {"objective": "multi:softprob", "num_class": 4, "eta": 0.2, "max_depth": 3, "tree_method": "hist"}
    settings["min_child_weight"] = 0.1
    expected = xgboost.train(settings, data, num_boost_round=12).predict(data)
    np.testing.assert_allclose(ours.fit(X, y).predict_proba(X), expected, atol=1e-5)


@LIBRARIES
@pytest.mark.parametrize(
    "loss", [{"power": 2}, {"power": 1}, {"cost": True}, {"power": 2, "cross_entropy": 0.3}], ids=str
)
def test_the_loss_asked_for_falls_below_that_of_the_frequencies(library: str, loss: dict[str, Any]) -> None:
    X, y = ordered_rows(400, 4)
    values = np.array([0.0, 1.0, 4.0, 5.0])
    cost = np.abs(values[:, None] - values) ** 1.5 * [[1], [1], [1], [3]]
    settings = {"cost": cost} if "cost" in loss else {**loss, "values": values}
    model = boosted(library, n_estimators=40, learning_rate=0.2, **settings).fit(X[:300], y[:300])

    def mean_loss(P: np.ndarray) -> float:
        if "cost" in loss:
            return float((P * cost[y[300:]]).sum(1).mean())
        below = np.abs(P.cumsum(1)[:, :-1] - (y[300:, None] <= np.arange(3))) ** loss["power"]
        nll = -np.log(P[np.arange(100), y[300:]])
        return float((below @ np.diff(values) + loss.get("cross_entropy", 0.0) * nll).mean())

    frequencies = np.tile(softmax(start_scores(y[:300], 4)[None]), (100, 1))
    assert mean_loss(model.predict_proba(X[300:])) < 0.6 * mean_loss(frequencies)


@LIBRARIES
def test_features_without_meaning_leave_the_weighted_frequencies(library: str) -> None:
    y = np.repeat([0, 1, 2], [30, 60, 10])
    weight = np.where(y == 2, 4.0, 1.0)
    model = boosted(library).fit(np.full((100, 2), [0.0, np.nan]), y, weight)
    assert model.n_estimators_ == 0
    np.testing.assert_allclose(model.predict_proba([[0.0, 0.0]])[0], np.array([30, 60, 40]) / 130, atol=1e-6)


@LIBRARIES
def test_a_weight_is_a_repetition_and_zero_is_absence(library: str) -> None:
    X, y = ordered_rows(80)
    X = X.round(1)
    weight = np.random.default_rng(0).integers(0, 4, size=80)
    settings = {"n_estimators": 10, "learning_rate": 0.3, "early_stopping": False}
    weighted = boosted(library, **settings).fit(X, y, weight)
    repeated = boosted(library, **settings).fit(X.repeat(weight, 0), y.repeat(weight))
    shuffled = np.random.default_rng(1).permutation(80)
    moved = boosted(library, **settings).fit(X[shuffled], y[shuffled], weight[shuffled])
    for other in (repeated, moved):
        np.testing.assert_array_equal(weighted.predict_proba(X), other.predict_proba(X))


@LIBRARIES
def test_early_stopping_finds_few_rounds_and_refits_on_all_rows(library: str) -> None:
    X, y = ordered_rows(400)
    settings = {"n_estimators": 400, "learning_rate": 0.3, "max_depth": 4, "early_stopping": "auto"}
    stopped = boosted(library, refit=False, **settings).fit(X, y)
    again = boosted(library, refit=True, **settings).fit(X, y)
    assert 1 <= stopped.n_estimators_ == again.n_estimators_ < 100
    assert np.abs(stopped.predict_proba(X) - again.predict_proba(X)).max() > 0
    too_few = boosted(library, n_estimators=7, early_stopping="auto")
    assert too_few.fit(X[:40], y[:40]).n_estimators_ == 7
    with pytest.raises(ValueError, match="leave none to hold out for early stopping"):
        boosted(library, early_stopping=True).fit(X[:3], [0, 1, 2])


@LIBRARIES
def test_what_is_cut_off_is_not_predicted_with(library: str) -> None:
    X, y = ordered_rows(400)
    settings = {"learning_rate": 0.5, "max_depth": 5, "refit": False, "subsample": 1.0, "early_stopping": True}
    stopped = boosted(library, n_estimators=300, **settings).fit(X, y)
    with pytest.warns(ConvergenceWarning):
        same = boosted(library, n_estimators=stopped.n_estimators_, n_iter_no_change=300, **settings).fit(X, y)
    np.testing.assert_allclose(stopped.predict_proba(X), same.predict_proba(X), rtol=1e-6)


@LIBRARIES
def test_missing_values_are_learnt_from(library: str) -> None:
    X, y = ordered_rows(200)
    X[y == 2, 0] = np.nan
    model = boosted(library, n_estimators=30, learning_rate=0.3).fit(X, y)
    assert (model.predict(X) == 2)[y == 2].mean() > 0.9
    with pytest.raises(ValueError, match="infinity"):
        model.predict(np.full((1, 3), np.inf))


@LIBRARIES
def test_two_classes_and_settings_of_the_library(library: str) -> None:
    X, y = ordered_rows(120, 2)
    model = boosted(library, n_estimators=20, learning_rate=0.3).fit(X, y)
    assert model.predict_proba(X).shape == (120, 2)
    assert model.score(X, y) > 0.85
    stump = boosted(library, n_estimators=20, learning_rate=0.3, booster_params={"max_depth": 1, "num_leaves": 2})
    if library == "xgboost":
        stump.set_params(booster_params={"max_depth": 1})
    assert np.unique(stump.fit(X[:, :1] > 0, y).predict_proba(X[:, :1] > 0)[:, 1]).size == 2


@LIBRARIES
def test_threads_do_not_change_the_result(library: str) -> None:
    X, y = ordered_rows(150)
    one, two = (boosted(library, n_estimators=6, n_jobs=n).fit(X, y).predict_proba(X) for n in (1, 2))
    np.testing.assert_allclose(one, two, rtol=1e-6)


@LIBRARIES
def test_a_library_that_is_not_there_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = ordered_rows(30)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=r'pip install "otloss\[boost\]"'):
        OrdinalBoostingClassifier(booster=library).fit(X, y)
