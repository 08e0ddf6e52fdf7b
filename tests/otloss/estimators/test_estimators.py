"""Estimators among scikit-learn: its checks, its meta-estimators, and labels of all types."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import BaggingClassifier, StackingClassifier, VotingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, KFold, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import otloss.estimators
from otloss.estimators import EncodedLabelsWarning, OrdinalBoostingClassifier, OrdinalClassifier
from otloss.metrics import scorer

SMALL = {"n_estimators": 8, "learning_rate": 0.3, "early_stopping": False, "n_jobs": 1, "random_state": 0}
NAMES = ["low", "medium", "high"]  # sorts as high, low, medium


def ordered_rows(rows: int = 90, classes: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features (rows, 3) and ranks that follow them, with noise."""
    random = np.random.default_rng(seed)
    X = random.normal(size=(rows, 3))
    score = X @ [1.0, -0.7, 0.0] + 0.4 * random.normal(size=rows)
    edges = np.quantile(score, np.linspace(0, 1, classes + 1)[1:-1])
    return X, np.searchsorted(edges, score)


def boosted(library: str = "lightgbm", **settings: Any) -> OrdinalBoostingClassifier:
    pytest.importorskip(library)
    return OrdinalBoostingClassifier(booster=library, **{**SMALL, **settings})


def both(**settings: Any) -> list[Any]:
    return [OrdinalClassifier(**settings), boosted(**settings)]


BOTH = pytest.mark.parametrize("index", [0, 1], ids=["linear", "boosted"])


# ---- scikit-learn's own checks -------------------------------------------------------------------------------------

CHECKED = [
    OrdinalClassifier(),
    OrdinalClassifier(model="cumulative"),
    OrdinalClassifier(hidden_layer_sizes=(10,), learning_rate=0.03, max_iter=40),
    OrdinalBoostingClassifier(booster="lightgbm", n_jobs=1, n_estimators=8, learning_rate=0.4),
    OrdinalBoostingClassifier(booster="xgboost", n_jobs=1, n_estimators=8, learning_rate=0.4),
    OrdinalClassifier(standardize=False, calibration="temperature"),
    OrdinalClassifier(hidden_layer_sizes=(10,), learning_rate=0.03, max_iter=40, early_stopping=True),
    OrdinalClassifier(decode="median"),
]
CHECKED_SLOWLY = [
    OrdinalClassifier(power=1, cross_entropy=0.3, alpha=1.0),
    OrdinalClassifier(solver="adam", learning_rate=0.1, max_iter=30, cross_entropy=0.1),
    OrdinalClassifier(model="cumulative", hidden_layer_sizes=10, learning_rate=0.03, max_iter=40),
    OrdinalClassifier(hidden_layer_sizes=(10,)),
    OrdinalBoostingClassifier(booster="lightgbm"),
    OrdinalBoostingClassifier(booster="xgboost"),
    OrdinalClassifier(model="cumulative", calibration="ordinal", decode="mean"),
    OrdinalClassifier(hidden_layer_sizes=(10,), learning_rate=0.03, max_iter=40, batch_size=10, early_stopping=False),
    OrdinalBoostingClassifier(
        booster="lightgbm", n_jobs=1, n_estimators=8, learning_rate=0.4, calibration="temperature"
    ),
    OrdinalBoostingClassifier(booster="xgboost", n_jobs=1, n_estimators=8, learning_rate=0.4, early_stopping=True),
]


def cannot_pass(estimator: Any) -> dict[str, str]:
    """Checks that settings contradict, and why."""
    reasons = {}
    if estimator.calibration or estimator.early_stopping is True or getattr(estimator, "batch_size", 200) < 200:
        drawn = "rows are drawn at random, and a row given twice is drawn twice"
        for data in ("dense", "sparse"):
            reasons[f"check_sample_weight_equivalence_on_{data}_data"] = drawn
    if estimator.decode != "argmax":
        reasons["check_classifiers_train"] = "predict is not the most probable class"
    return reasons


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(CHECKED, expected_failed_checks=cannot_pass)
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    if isinstance(estimator, OrdinalBoostingClassifier):
        pytest.importorskip(estimator.booster)
    check(estimator)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(CHECKED_SLOWLY, expected_failed_checks=cannot_pass)
def test_scikit_learns_checks_of_more_settings(estimator: Any, check: Any) -> None:
    check(estimator)


# ---- labels --------------------------------------------------------------------------------------------------------


@BOTH
def test_columns_are_sorted_and_ranks_kept_apart(index: int) -> None:
    X, rank = ordered_rows()
    named = both(categories=NAMES)[index].fit(X, np.array(NAMES)[rank])
    plain = both()[index].fit(X, rank)
    assert named.classes_.tolist() == ["high", "low", "medium"]
    assert named.categories_.tolist() == NAMES
    np.testing.assert_array_equal(named.predict_distribution(X), plain.predict_proba(X))
    np.testing.assert_array_equal(named.predict_proba(X), plain.predict_proba(X)[:, [2, 0, 1]])
    np.testing.assert_array_equal(named.predict(X), np.array(NAMES)[plain.predict(X)])
    np.testing.assert_allclose(named.expected_value(X), plain.predict_proba(X) @ [0, 1, 2])


@pytest.mark.parametrize(
    "categories", [[3, 2, 1], ["10", "9", "2"], [0.5, 0.25, 4.5], [False, True], np.array(["b", "a"], dtype=object)]
)
def test_any_type_of_label(categories: Any) -> None:
    X, rank = ordered_rows(classes=len(categories))
    model = OrdinalClassifier(categories=categories).fit(X, np.asarray(categories)[rank])
    plain = OrdinalClassifier().fit(X, rank)
    assert set(model.predict(X)) <= set(categories)
    np.testing.assert_array_equal(model.predict_distribution(X), plain.predict_proba(X))


@BOTH
def test_a_class_missing_from_training_keeps_its_place_and_distance(index: int) -> None:
    X, rank = ordered_rows()
    labels = np.array(["a", "b", "d"])[rank]
    # Both of mean gap 2.5, the unit in training.
    model = both(categories=list("abcde"), values=[0, 1, 2, 5, 10])[index].fit(X, labels)
    same = both(values=[0, 1, 5])[index].fit(X, rank)
    assert model.classes_.tolist() == ["a", "b", "d"]
    everything = model.predict_distribution(X)
    assert everything.shape == (len(X), 5)
    assert not everything[:, [2, 4]].any()
    np.testing.assert_array_equal(everything[:, [0, 1, 3]], same.predict_proba(X))
    np.testing.assert_allclose(model.expected_value(X), everything @ [0, 1, 2, 5, 10])
    by_default = both(categories=list("abcde"))[index].fit(X, np.array(["a", "c", "e"])[rank])
    twice = both(values=[0, 1, 2], transport=2.0)[index].fit(X, rank)
    np.testing.assert_array_equal(by_default.predict_proba(X), twice.predict_proba(X))


@BOTH
def test_one_class_alone(index: int) -> None:
    X, _ = ordered_rows(12)
    model = both(categories=NAMES, calibration="ordinal")[index].fit(X, ["medium"] * 12)
    assert model.predict(X[:2]).tolist() == ["medium"] * 2
    assert model.predict_distribution(X[:1]).tolist() == [[0, 1, 0]]


def test_decoding_rules_differ_where_they_should() -> None:
    X = np.zeros((20, 1))
    y = np.repeat([0, 1, 2], [9, 3, 8])
    models = {
        rule: OrdinalClassifier(decode=rule, values=[0, 4, 5], alpha=0.0).fit(X, y)
        for rule in ("argmax", "median", "mean")
    }
    np.testing.assert_allclose(models["mean"].predict_proba(X[:1]), [[0.45, 0.15, 0.4]], atol=1e-6)
    assert {rule: int(model.predict(X[:1])[0]) for rule, model in models.items()} == {
        "argmax": 0,
        "median": 1,
        "mean": 1,
    }
    cost = np.array([[0.0, 1, 9], [1, 0, 1], [1, 1, 0]])
    for rule, expected in (("argmax", 0), ("cost", 0)):
        model = OrdinalClassifier(cost=cost, cross_entropy=100.0, decode=rule, alpha=0.0).fit(X, y)
        assert model.predict(X[:1])[0] == expected
    assert OrdinalClassifier(cost=cost.T, cross_entropy=100.0, decode="cost").fit(X, y).predict(X[:1])[0] == 2


# ---- meta-estimators -----------------------------------------------------------------------------------------------


@BOTH
def test_grid_search_in_a_pipeline(index: int) -> None:
    X, rank = ordered_rows()
    model = both(categories=NAMES)[index]
    name = type(model).__name__.lower()
    search = GridSearchCV(
        make_pipeline(StandardScaler(), model),
        {f"{name}__cross_entropy": [0.0, 0.5], f"{name}__decode": ["argmax", "median"]},
        cv=3,
        n_jobs=2,
    ).fit(X, np.array(NAMES)[rank])
    assert search.best_score_ > 0.6


@BOTH
@pytest.mark.parametrize("categories", [NAMES, ["a low", "b medium", "c high"], [7, 8, 9], [3, 2, 1]])
def test_meta_estimators_pass_codes_and_get_right_columns(index: int, categories: list[Any]) -> None:
    """A wrong order of the codes would mistake the middle class for an end, and lose accuracy."""
    X, rank = ordered_rows(150)
    labels = np.array(categories)[rank]
    model = both(categories=categories, values=[0, 1, 2.5])[index]
    codes = sorted(categories)
    needs_warning = categories != codes or isinstance(codes[0], int)

    def quietly(call: Any) -> Any:
        if needs_warning:
            with pytest.warns(EncodedLabelsWarning, match=re.escape(f"(0 = {codes[0]!r}, 1 = {codes[1]!r}, 2 =")):
                return call()
        return call()

    probability = quietly(lambda: cross_val_predict(model, X, labels, cv=3, method="predict_proba"))
    columns = np.argsort(np.argsort(categories))
    folds = cross_val_predict(clone(model).set_params(categories=None), X, rank, cv=3, method="predict_proba")
    np.testing.assert_array_equal(probability[:, columns], folds)
    others = LogisticRegression()
    voting = quietly(lambda: VotingClassifier([("ours", model), ("other", others)], voting="soft").fit(X, labels))
    stacking = quietly(lambda: StackingClassifier([("ours", model), ("other", others)], cv=3).fit(X, labels))
    bagging = quietly(lambda: BaggingClassifier(model, n_estimators=3, random_state=0).fit(X, labels))
    calibrated = CalibratedClassifierCV(model, cv=3).fit(X, labels)
    for meta in (voting, stacking, bagging, calibrated):
        assert meta.score(X, labels) > 0.75
        assert meta.classes_.tolist() == sorted(categories)


def test_rare_class_missing_from_folds() -> None:
    X, rank = ordered_rows(60)
    rank[:2] = 3
    names = np.array([*NAMES, "very high"])
    for score in ("accuracy", scorer("ranked_probability_score", labels=names)):
        scores = cross_val_score(
            OrdinalClassifier(categories=names), X, names[rank], cv=KFold(2), scoring=score, error_score="raise"
        )
        assert np.isfinite(scores).all()


@BOTH
def test_pickled_and_fitted_again_it_is_the_same(index: int) -> None:
    X, rank = ordered_rows()
    model = both(random_state=3, calibration="temperature")[index].fit(X, rank)
    copy = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copy.predict_proba(X), model.predict_proba(X))
    again = clone(model).fit(X, rank)
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))


@pytest.mark.parametrize("settings", [{}, {"hidden_layer_sizes": 5, "max_iter": 30, "tol": 1.0, "batch_size": 20}])
def test_no_global_state_is_touched_or_needed(settings: dict[str, Any]) -> None:
    X, rank = ordered_rows(40)
    model = OrdinalClassifier(random_state=0, **settings)
    expected = model.fit(X, rank).predict_proba(X)
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            np.testing.assert_array_equal(model.fit(X, rank).predict_proba(X), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])
    assert torch.get_num_threads() == before[2]


def test_feature_names_are_kept() -> None:
    pandas = pytest.importorskip("pandas")
    X, rank = ordered_rows()
    frame = pandas.DataFrame(X, columns=["a", "b", "c"])
    for model in both():
        model.fit(frame, pandas.Series(rank))
        assert model.feature_names_in_.tolist() == ["a", "b", "c"]
        assert model.n_features_in_ == 3
        with pytest.raises(ValueError, match="feature names"):
            model.predict(frame[["b", "a", "c"]])


@BOTH
def test_ordered_categoricals_bring_their_order(index: int) -> None:
    pandas = pytest.importorskip("pandas")
    X, rank = ordered_rows()
    y = pandas.Categorical(np.array(NAMES)[rank], categories=[*NAMES, "very high"], ordered=True)
    for labels in (y, pandas.Series(y)):
        model = both()[index].fit(X, labels)
        assert model.categories_.tolist() == [*NAMES, "very high"]
        np.testing.assert_array_equal(model.predict_distribution(X)[:, :3], both()[index].fit(X, rank).predict_proba(X))
    assert OrdinalClassifier().partial_fit(X, y).categories_.tolist() == [*NAMES, "very high"]


def test_importing_the_estimators_imports_no_boosting_library_and_no_compiler() -> None:
    code = (
        "import sys, otloss; assert 'sklearn' not in sys.modules\n"
        "import otloss.estimators\n"
        "print([m for m in ('xgboost', 'lightgbm', 'numba', 'torch._dynamo') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", [OrdinalClassifier, OrdinalBoostingClassifier])
def test_docstrings_name_the_maps_by_their_public_path(kind: Any) -> None:
    assert "otloss._" not in kind.__doc__
    assert "`otloss.estimators.Temperature`" in kind.__doc__
    assert {"Temperature", "OrdinalRecalibration"} <= set(otloss.estimators.__all__)
