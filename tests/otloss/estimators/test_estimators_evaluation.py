"""Defaults of boosting, rows it is evaluated on, and what both estimators say of their features."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from scipy.special import expit, softmax
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.feature_selection import RFE, SelectFromModel

from otloss.estimators import OrdinalBoostingClassifier, OrdinalClassifier
from tests.otloss.estimators.test_estimators import both, ordered_rows
from tests.otloss.estimators.test_estimators_boosting import LIBRARIES, boosted

NAMES = ["low", "mid", "high"]


def toy(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two features whose product decides (Herbrich et al. 2000): either alone tells next to nothing."""
    random = np.random.default_rng(seed)
    X = random.uniform(size=(rows, 2))
    score = 10 * (X[:, 0] - 0.5) * (X[:, 1] - 0.5) + 0.125 * random.normal(size=rows)
    return X, np.searchsorted([-1.0, -0.1, 0.25, 1.0], score)


# ---- defaults ------------------------------------------------------------------------------------------------------


@LIBRARIES
def test_by_default_trees_see_both_of_two_features(library: str) -> None:
    X, y = toy(300, 0)
    settings = OrdinalBoostingClassifier().get_params()
    model = boosted(library, n_estimators=60, learning_rate=0.3, colsample_bytree=settings["colsample_bytree"])
    assert model.fit(X, y).score(*toy(300, 1)) > 0.75


@LIBRARIES
def test_by_default_a_few_rows_are_enough_for_a_leaf(library: str) -> None:
    """The curvature of a row of weight 1 is small: between two classes at most a quarter, at a rare class far less."""
    X, y = np.arange(24.0)[:, None], np.repeat([0, 1, 2], [16, 4, 4])
    assert boosted(library, n_estimators=100).fit(X, y).score(X, y) == 1.0


# ---- early stopping and evaluation ---------------------------------------------------------------------------------


@LIBRARIES
def test_rounds_that_end_before_early_stopping_are_warned_of(library: str) -> None:
    X, y = ordered_rows(200)
    settings = {"learning_rate": 0.3, "early_stopping": "auto", "n_iter_no_change": 5, "subsample": 1.0}
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
    settings = {"categories": NAMES, "learning_rate": 0.3, "subsample": 1.0}
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
    watched = boosted(library, n_estimators=9, **settings).fit(X, labels, eval_set=(V, np.array(NAMES)[v]))
    assert (len(watched.evals_result_["validation_0"]["rps"]), watched.n_estimators_) == (9, 9)


@pytest.mark.parametrize(
    ("eval_set", "message"),
    [
        ([], r"eval_set is \[\], expected a list of \(X, y\)"),
        ([np.zeros((2, 3)), [0, 1]], r"eval_set\[0\] is a ndarray, expected a tuple \(X, y\)"),
        ([(np.zeros((2, 2)), [0, 1])], r"eval_set\[0\]: X has 2 features"),
        ([(np.zeros((2, 3)), [0, 1, 1])], r"eval_set\[0\]: .*inconsistent numbers"),
        ([(np.zeros((2, 3)), [0, 9])], r"eval_set\[0\]: y holds the label 9, which no row of training has"),
        ([(np.zeros((2, 3)), [0, 1], [1, -1])], r"eval_set\[0\]: sample_weight\[1\] is -1"),
    ],
    ids=str,
)
def test_parts_that_cannot_be_evaluated_are_named(eval_set: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        boosted("lightgbm", n_estimators=2).fit(*ordered_rows(60), eval_set=eval_set)


# ---- columns of categories -----------------------------------------------------------------------------------------


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
    assert model._columns.unordered == (0,)
    for same in (X.assign(letter=letters), X.assign(letter=pandas.Categorical(letters, list("zyxwvu")))):
        np.testing.assert_array_equal(model.predict_proba(same), expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict_proba(X), expected)
    np.testing.assert_array_equal(clone(model).fit(X, y).predict_proba(X), expected)
    assert np.isfinite(model.predict_proba(X.assign(letter="new"))).all()  # declared, though in no row
    assert np.isfinite(model.predict_proba(X.assign(letter=None))).all()
    with pytest.raises(ValueError, match="column 'letter' of X holds 'other', expected one of the 7 categories"):
        model.predict(X.assign(letter="other"))
    with pytest.raises(ValueError, match="X is a ndarray, expected a pandas DataFrame"):
        model.predict(X.to_numpy())
    with pytest.raises(ValueError, match="same order"):
        model.predict(X[["width", "letter"]])


# ---- what models say of their features -----------------------------------------------------------------------------


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
    linear = boosted("xgboost", n_estimators=2, booster_params={"booster": "gblinear"}).fit(X, y)
    assert not hasattr(linear, "feature_importances_")
    assert not hasattr(boosted(library), "booster_")


def test_linear_models_show_their_coefficients() -> None:
    X, rank = ordered_rows()
    X, labels = X * [1, 3, 0.5] + [5, 0, 9], np.array(NAMES)[rank]
    plain, shared = (
        OrdinalClassifier(categories=NAMES, model=model).fit(X, labels) for model in ("softmax", "cumulative")
    )
    np.testing.assert_allclose(softmax(X @ plain.coef_.T + plain.intercept_, 1), plain.predict_proba(X), rtol=1e-9)
    at_most = expit(shared.thresholds_ - X @ shared.coef_.T)
    np.testing.assert_allclose(at_most, shared.predict_distribution(X).cumsum(1)[:, :-1], rtol=1e-9)
    np.testing.assert_array_equal(shared.intercept_, -shared.thresholds_)
    assert not hasattr(plain, "thresholds_")


def test_other_models_have_no_coefficients() -> None:
    X, y = ordered_rows()
    network = OrdinalClassifier(hidden_layer_sizes=3, max_iter=2, tol=9.0, n_iter_no_change=1).fit(X, y)
    for name in ("coef_", "intercept_", "thresholds_"):
        with pytest.raises(AttributeError, match=rf"{name} is of linear models .*hidden_layer_sizes=\(3,\)"):
            getattr(network, name)
        with pytest.raises(NotFittedError):
            getattr(OrdinalClassifier(), name)
        assert not hasattr(OrdinalClassifier().fit(X, np.zeros(90)), name)


def test_features_are_selected_by_both_estimators() -> None:
    X, y = ordered_rows()
    for model in both():
        for selector in (RFE(model, n_features_to_select=2), SelectFromModel(model, max_features=2, threshold=-np.inf)):
            assert selector.fit(X, y).get_support().tolist() == [True, True, False]


def test_logarithms_of_probabilities_do_not_overflow() -> None:
    X, y = ordered_rows()
    model = OrdinalClassifier().fit(X, y)
    far = 1e4 * X
    assert (model.predict_proba(far) == 0).any()
    scores = far @ model.coef_.T + model.intercept_
    expected = scores - np.logaddexp.reduce(scores, 1, keepdims=True)
    np.testing.assert_allclose(model.predict_log_proba(far), expected, rtol=1e-6, atol=1e-9)
    for calibrated in both(calibration="temperature", random_state=0):
        calibrated.fit(X, y)
        np.testing.assert_allclose(np.exp(calibrated.predict_log_proba(X)), calibrated.predict_proba(X), rtol=1e-12)
