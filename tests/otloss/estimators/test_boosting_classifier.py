"""What the boosted estimators learn: the loss asked for, starts, stopping, settings, missing values."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from otloss.boosting import start_scores
from otloss.estimators import OrdinalBoostingClassifier
from otloss.estimators.boosters import Part, train_trees
from tests.errors import raising
from tests.otloss.estimators.test_estimators import NAMES, ordered_rows

X, Y = ordered_rows(120)
X = X.round(1)
LIBRARIES = pytest.mark.parametrize("library", ["xgboost", "lightgbm"])


def boosted(library: str, **settings: Any) -> OrdinalBoostingClassifier:
    """All rows in each round, unless `booster_params` says otherwise."""
    pytest.importorskip(library)
    settings = {"early_stopping": False, "n_jobs": 1, "random_state": 0, **settings}
    settings["booster_params"] = {"subsample": 1.0, **settings.get("booster_params", {})}
    return OrdinalBoostingClassifier(booster=library, **settings)


@LIBRARIES
@pytest.mark.parametrize("loss", [{"power": 1}, {"cost": True}, {"power": 2, "cross_entropy": 0.3}], ids=str)
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
def test_missing_values_are_learnt_from(library: str) -> None:
    X, y = ordered_rows(200)
    X[y == 2, 0] = np.nan
    model = boosted(library, n_estimators=30, learning_rate=0.3).fit(X, y)
    assert (model.predict(X) == 2)[y == 2].mean() > 0.9
    with pytest.raises(ValueError, match="infinity"):
        model.predict(np.full((1, 3), np.inf))


@LIBRARIES
def test_a_library_that_is_not_there_is_named(library: str, without: Callable[[str], None]) -> None:
    X, y = ordered_rows(30)
    without(library)
    with pytest.raises(ImportError, match=r'pip install "torch-otloss\[boost\]"'):
        OrdinalBoostingClassifier(booster=library).fit(X, y)


@LIBRARIES
def test_by_default_a_few_rows_are_enough_for_a_leaf(library: str) -> None:
    """The curvature of a row of weight 1 is small: between two classes at most a quarter, at a rare class far less."""
    X, y = np.arange(24.0)[:, None], np.repeat([0, 1, 2], [16, 4, 4])
    assert boosted(library, n_estimators=100).fit(X, y).score(X, y) == 1.0


@LIBRARIES
def test_rounds_that_end_before_early_stopping_are_warned_of(library: str) -> None:
    X, y = ordered_rows(200)
    settings = {"learning_rate": 0.3, "early_stopping": "auto", "n_iter_no_change": 5}
    with pytest.warns(ConvergenceWarning, match="did not converge in n_estimators=6 rounds"):
        boosted(library, n_estimators=6, **settings).fit(X, y)
    model = boosted(library, n_estimators=300, **settings).fit(X, y)  # warnings are errors
    ((name, losses),) = model.evals_result_["validation_0"].items()
    assert name == "rps"
    assert model.n_estimators_ == model.best_iteration_ == np.argmin(losses) + 1 == len(losses) - 5
    alone = boosted(library, n_estimators=6).fit(X, y)
    assert (alone.best_iteration_, alone.evals_result_) == (None, {})


@LIBRARIES
def test_the_last_part_of_eval_set_stops_training_on_all_rows(library: str) -> None:
    X, y = ordered_rows(150)
    labels = np.array(NAMES)[y]
    V, v = ordered_rows(90, seed=1)
    weight = np.where(v == 0, 3.0, 1.0)
    settings = {"categories": NAMES, "learning_rate": 0.3}
    model = boosted(library, n_estimators=300, early_stopping="auto", n_iter_no_change=4, **settings)
    model.fit(X, labels, eval_set=[(X, labels), (V, np.array(NAMES)[v], weight)])
    (of_training,), (losses,) = (part.values() for part in model.evals_result_.values())
    best = int(np.argmin(losses))
    assert model.best_iteration_ == model.n_estimators_ == best + 1 == len(losses) - 4
    assert of_training[-1] < of_training[best] < losses[best]  # which would not have stopped yet
    same = boosted(library, n_estimators=best + 1, **settings).fit(X, labels)
    np.testing.assert_allclose(model.predict_proba(X), same.predict_proba(X), rtol=1e-6)
    below = model.predict_distribution(V).cumsum(1)[:, :-1] - (v[:, None] <= np.arange(2))
    np.testing.assert_allclose(np.average((below**2).sum(1), weights=weight), losses[best], rtol=1e-5)
    watched = boosted(library, n_estimators=9, **settings).fit(X, labels, eval_set=[(V, np.array(NAMES)[v])])
    assert (len(watched.evals_result_["validation_0"]["rps"]), watched.n_estimators_) == (9, 9)


def test_one_part_to_evaluate_needs_no_list() -> None:
    X, y = ordered_rows(60)
    weight = np.ones(60)
    expected = boosted("lightgbm", n_estimators=3).fit(X, y, eval_set=[(X, y)]).evals_result_
    for alone in ((X, y), (X, y, weight), (X.tolist(), y.tolist()), ([X, y],)):
        assert boosted("lightgbm", n_estimators=3).fit(X, y, eval_set=alone).evals_result_ == expected
    expectation = r"expected \(X, y\) or \(X, y, sample_weight\), or a list of them"
    for wrong, got in ((X, "eval_set is a ndarray"), ([X, y], r"eval_set\[0\] is a ndarray"), ([(X,)], "a tuple of 1")):
        with pytest.raises(TypeError, match=f"{got}, {expectation}"):
            boosted("lightgbm", n_estimators=3).fit(X, y, eval_set=wrong)
    for part, name in (((X, y + 7), "eval_set"), ([(X, y + 7)], r"eval_set\[0\]")):
        with pytest.raises(ValueError, match=f"{name}: y holds the label 9, expected the labels"):
            boosted("lightgbm", n_estimators=2).fit(X, y, eval_set=part)


@LIBRARIES
def test_columns_of_categories_are_split_by_sets_and_looked_up_by_label(library: str) -> None:
    pandas = pytest.importorskip("pandas")
    random = np.random.default_rng(0)
    letters = random.choice(list("uvwxyz"), 120)
    y = np.where(np.isin(letters, ["v", "x", "z"]), 2, 0)  # every second one: one split by a set, five by codes
    X = pandas.DataFrame({"letter": pandas.Categorical(letters, [*"uvwxyz", "new"])})
    X["width"] = pandas.cut(random.normal(size=120), 4)  # ordered
    params = {"max_cat_to_onehot": 1}
    model = boosted(library, n_estimators=30, learning_rate=0.3, max_depth=1, booster_params=params)
    model = model.fit(X, y, eval_set=[(X, y)])
    expected = model.predict_proba(X)
    assert model.score(X, y) == 1.0
    assert model.feature_names_in_.tolist() == ["letter", "width"]
    assert model._trees.categorical == (0,)
    for same in (X.assign(letter=letters), X.assign(letter=pandas.Categorical(letters, list("zyxwvu")))):
        np.testing.assert_array_equal(model.predict_proba(same), expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict_proba(X), expected)
    np.testing.assert_array_equal(clone(model).fit(X, y).predict_proba(X), expected)
    assert np.isfinite(model.predict_proba(X.assign(letter="new"))).all()  # declared, though in no row
    assert np.isfinite(model.predict_proba(X.assign(letter=None))).all()
    with pytest.raises(ValueError, match="column 'letter' of X holds 'other', expected one of the 7 categories"):
        model.predict(X.assign(letter="other"))
    with pytest.raises(ValueError, match="same order"):
        model.predict(X[["width", "letter"]])


@LIBRARIES
def test_the_booster_and_its_importances_are_public(library: str) -> None:
    X, y = ordered_rows(120)
    model = boosted(library, n_estimators=15, learning_rate=0.3).fit(X, y)
    if library == "xgboost":
        import xgboost

        scores = model.booster_.predict(xgboost.DMatrix(X), output_margin=True)
    else:
        scores = model.booster_.predict(X, raw_score=True) + model.start_scores_
    np.testing.assert_allclose(softmax(scores, 1), model.predict_proba(X), rtol=1e-5)
    importances = model.feature_importances_
    assert importances.shape == (3,)
    assert importances.sum() == pytest.approx(1)
    assert importances[0] > importances[1] > 3 * importances[2] >= 0
    assert not boosted(library).fit(np.zeros((60, 3)), y[:60]).feature_importances_.any()
    assert not hasattr(boosted(library), "booster_")


def proba(library: str, given: dict[str, Any] | None = None, **settings: Any) -> np.ndarray:
    model = boosted(library, n_estimators=8, booster_params=given or {}, **{"learning_rate": 0.3, **settings})
    return model.fit(X, Y).predict_proba(X)


@pytest.mark.parametrize(("library", "alias", "value", "settings"), [
    ("lightgbm", "eta", 0.02, {"learning_rate": 0.02}), ("lightgbm", "reg_lambda", 30.0, {}),
    ("lightgbm", "min_child_weight", 9.0, {}), ("xgboost", "eta", 0.02, {"learning_rate": 0.02}),
    ("xgboost", "min_child_weight", 9.0, {}),
])  # fmt: skip
def test_settings_by_any_name_take_precedence(library: str, alias: str, value: Any, settings: dict[str, Any]) -> None:
    actual = proba(library, {alias: value})
    assert np.abs(actual - proba(library)).max() > 1e-3
    if settings:
        np.testing.assert_array_equal(actual, proba(library, **settings))


test_settings_that_cannot_be_are_named = raising(
    ("lightgbm", {"num_trees": 7}, "holds 'num_trees', which follows from the estimator's arguments"),
    ("lightgbm", {"eta": 0.1, "learning_rate": 0.2}, "another name of 'learning_rate'"),
    ("lightgbm", {"num_leafs": 3}, "holds 'num_leafs', expected settings of lightgbm"),
    ("lightgbm", {"boosting_type": "rf"}, "asks for 'rf', expected gradient boosting"),
    ("xgboost", {"n_estimators": 7}, "holds 'n_estimators', which follows"),
    ("xgboost", {"eta": 0.1, "learning_rate": 0.2}, "another name of 'learning_rate'"),
    ("xgboost", {"booster": "dart"}, "asks for 'dart', expected gradient boosting"),
    call=lambda library, given: boosted(library, booster_params=given, early_stopping="auto").fit(X, Y),
)


@LIBRARIES
def test_the_seed_is_that_of_random_state(library: str) -> None:
    first, second = (proba(library, {"subsample": 0.5}, random_state=seed) for seed in (1, 2))
    assert np.abs(first - second).max() > 1e-3


@LIBRARIES
def test_rows_held_out_stop_by_their_weight(library: str) -> None:
    pytest.importorskip(library)
    settings = boosted(library, n_estimators=60).fit(X, Y)._tree_settings(seed=0)
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
