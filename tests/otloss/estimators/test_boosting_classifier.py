"""What the boosted estimators learn: the loss asked for, starts, stopping, settings, missing values."""

import pickle
import tomllib
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.special import softmax
from sklearn import config_context
from sklearn.ensemble import AdaBoostClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

from otloss.boosting import start_scores
from otloss.estimators import OrdinalBoostingClassifier
from otloss.estimators.boosters import OLDEST, Part, Table, require_library
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
def test_rounds_that_end_before_early_stopping_are_warned_of(library: str) -> None:
    X, y = ordered_rows(200)
    settings = {"learning_rate": 0.3, "early_stopping": "auto", "n_iter_no_change": 5}
    with pytest.warns(ConvergenceWarning, match="did not converge in n_estimators=6 rounds"):
        boosted(library, n_estimators=6, **settings).fit(X, y)
    model = boosted(library, n_estimators=300, **settings).fit(X, y)  # warnings are errors
    ((name, losses),) = model.evals_result_["validation_0"].items()
    assert name == "rps+ce"
    assert model.n_estimators_ == model.best_iteration_ == np.argmin(losses) + 1 == len(losses) - 5
    alone = boosted(library, n_estimators=6).fit(X, y)
    assert (alone.best_iteration_, alone.evals_result_) == (None, {})


def test_rounds_of_lightgbm_that_split_nothing() -> None:
    """LightGBM takes them out of the booster, and the losses of each round count them."""
    random = np.random.default_rng(3)

    def noisy_rows(rows: int) -> tuple[np.ndarray, np.ndarray]:
        X = random.normal(size=(rows, 4))
        return X, np.digitize(X[:, 0] + random.normal(size=rows), [-0.5, 0.5, 1.5])

    (X, y), (V, v) = noisy_rows(120), noisy_rows(100)
    settings = {"early_stopping": True, "n_iter_no_change": 30, "learning_rate": 0.2, "cross_entropy": 0}
    parameters = {"min_gain_to_split": 3.0, "subsample": 0.3}
    model = boosted("lightgbm", n_estimators=200, booster_params=parameters, **settings)
    model.fit(X, y, eval_set=[(V, v)])
    losses = model.evals_result_["validation_0"]["rps"]
    assert model.n_estimators_ < model.best_iteration_ == np.argmin(losses) + 1
    below = model.predict_distribution(V).cumsum(1)[:, :-1] - (v[:, None] <= np.arange(3))
    np.testing.assert_allclose((below**2).sum(1).mean(), min(losses), rtol=1e-5)


@LIBRARIES
def test_the_loss_of_rows_in_a_category_that_training_rows_lack(library: str) -> None:
    """By the bins of the training rows XGBoost would take it for another category."""
    names = list("abcdefgh")
    random = np.random.default_rng(0)

    def table(rows: int, kinds: list[str]) -> tuple[Any, np.ndarray]:
        kind = random.choice(kinds, rows)
        y = np.array([names.index(each) % 3 for each in kind])
        return pd.DataFrame({"kind": pd.Categorical(kind, names), "x": random.normal(size=rows)}), y

    (X, y), (V, v) = table(200, list("abcf")), table(150, names)
    model = boosted(library, n_estimators=9, learning_rate=0.3, cross_entropy=0).fit(X, y, eval_set=[(V, v)])
    below = model.predict_distribution(V).cumsum(1)[:, :-1] - (v[:, None] <= np.arange(2))
    expected = model.evals_result_["validation_0"]["rps"][-1]
    np.testing.assert_allclose((below**2).sum(1).mean(), expected, rtol=1e-5)


@LIBRARIES
def test_small_losses_keep_their_digits(library: str) -> None:
    """XGBoost itself keeps six decimals."""
    (X, y), (V, v) = ordered_rows(150), ordered_rows(90, seed=1)
    settings = {"transport": 1e-5, "cross_entropy": 0, "booster_params": {"min_child_weight": 0.0, "reg_lambda": 0.0}}
    model = boosted(library, n_estimators=9, **settings).fit(X, y, eval_set=[(V, v)])
    below = model.predict_distribution(V).cumsum(1)[:, :-1] - (v[:, None] <= np.arange(2))
    expected = 1e-5 * (below**2).sum(1).mean()
    np.testing.assert_allclose(model.evals_result_["validation_0"]["rps"][-1], expected, rtol=1e-5)


@LIBRARIES
def test_the_last_part_of_eval_set_stops_training_on_all_rows(library: str) -> None:
    X, y = ordered_rows(150)
    labels = np.array(NAMES)[y]
    V, v = ordered_rows(90, seed=1)
    weight = np.where(v == 0, 3.0, 1.0)
    settings = {"categories": NAMES, "learning_rate": 0.3, "cross_entropy": 0}
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


@LIBRARIES
def test_the_booster_and_its_importances_are_public(library: str) -> None:
    model = boosted(library, n_estimators=15, learning_rate=0.3).fit(X, Y)
    rows = pytest.importorskip("xgboost").DMatrix(X) if library == "xgboost" else X
    options = {"output_margin": True} if library == "xgboost" else {"raw_score": True}
    scores = model.booster_.predict(rows, **options) + (0 if library == "xgboost" else model.start_scores_)
    np.testing.assert_allclose(softmax(scores, 1), model.predict_proba(X), rtol=1e-5)
    importances = model.feature_importances_
    assert importances.sum() == pytest.approx(1)
    assert importances[0] > importances[1] > 3 * importances[2] >= 0
    assert not boosted(library).fit(np.zeros((60, 3)), Y[:60]).feature_importances_.any()


@LIBRARIES
def test_settings_by_any_name_take_precedence_and_seeds_and_few_rows_count(library: str) -> None:
    """The curvature of a row of weight 1 is small: by default a few rows are enough for a leaf."""

    def proba(given: dict[str, Any], **settings: Any) -> np.ndarray:
        model = boosted(library, n_estimators=8, booster_params=given, **{"learning_rate": 0.3, **settings})
        return model.fit(X, Y).predict_proba(X)

    np.testing.assert_array_equal(proba({"eta": 0.02}), proba({}, learning_rate=0.02))
    np.testing.assert_array_equal(proba(dict.fromkeys(["learning_rate", "seed", "lambda"])), proba({}))
    for given in ({"eta": 0.02}, {"min_child_weight": 9.0}, {"reg_lambda": 30.0}):
        assert np.abs(proba(given) - proba({})).max() > 1e-3
    if library == "lightgbm":
        np.testing.assert_allclose(proba({"force_col_wise": True}), proba({}), rtol=1e-6)
    first, second = (proba({"subsample": 0.5}, random_state=seed) for seed in (1, 2))
    assert np.abs(first - second).max() > 1e-3
    rows, y = np.arange(24.0)[:, None], np.repeat([0, 1, 2], [16, 4, 4])
    assert boosted(library, n_estimators=100).fit(rows, y).score(rows, y) == 1.0


@LIBRARIES
def test_leaves_may_be_as_light_as_a_row(library: str) -> None:
    """Without a limit LightGBM ends in a failed check of its own."""
    model = boosted(library, n_estimators=60, learning_rate=0.5, booster_params={"min_child_weight": 0})
    assert model.fit(X, Y).score(X, Y) > 0.9


@LIBRARIES
def test_rows_of_few_kinds_are_all_in_each_round(library: str) -> None:
    """Half of the kinds and labels of a survey are another survey."""
    kinds, counts = np.unique(np.c_[X.round()[:, :1], Y], axis=0, return_counts=True)
    copies = np.repeat(kinds, 5 * counts, axis=0)

    def proba(rows: np.ndarray, weight: Any, **given: float) -> np.ndarray:
        settings = {"early_stopping": False, "n_estimators": 20, "n_jobs": 1, "random_state": 0, "learning_rate": 0.3}
        model = OrdinalBoostingClassifier(booster=library, booster_params=given, **settings)
        return model.fit(rows[:, :1], rows[:, 1], weight).predict_proba(kinds[:, :1])

    pytest.importorskip(library)
    expected = proba(copies, None, subsample=1.0)
    np.testing.assert_array_equal(proba(copies, None), expected)
    np.testing.assert_array_equal(proba(kinds, 5.0 * counts), expected)
    assert np.abs(proba(kinds, None) - proba(kinds, None, subsample=1.0)).max() > 1e-3


@LIBRARIES
@pytest.mark.parametrize("class_weight", [None, {0: 0.3, 2: 2.0}], ids=str)
def test_the_unit_of_weights_below_one_is_no_matter(library: str, class_weight: Any) -> None:
    random = np.random.default_rng(0)
    weight, valid = random.exponential(size=120) * (np.arange(120) % 5 > 0) / 8, random.exponential(size=120) / 8
    kept = weight > 0
    settings = {"class_weight": class_weight, "n_estimators": 10, "booster_params": {"subsample": 0.5}}

    def fitted(factor: float, rows: Any = slice(None)) -> OrdinalBoostingClassifier:
        # Doubles hold the products to a last bit or so, and trees may tell that: of powers of two they hold all.
        factor = 2.0 ** round(np.log2(factor))
        return boosted(library, **settings).fit(
            X[rows], Y[rows], factor * weight[rows], eval_set=(X, Y, factor * valid)
        )

    expected = fitted(1.0)
    assert expected.feature_importances_.sum() == pytest.approx(1)
    for factor in (1e-300, 1e-6, 1 / 120):
        model = fitted(factor)
        np.testing.assert_array_equal(model.predict_proba(X), expected.predict_proba(X))
        for actual, wanted in zip(model.evals_result_.values(), expected.evals_result_.values(), strict=True):
            np.testing.assert_allclose(*(list(of.values()) for of in (actual, wanted)), rtol=1e-12)
    np.testing.assert_array_equal(fitted(1e-6, kept).predict_proba(X), expected.predict_proba(X))
    nearly = boosted(library, **settings).fit(X, Y, weight + (weight == 0) * 1e-30)
    nothing = boosted(library, **settings).fit(X[kept], Y[kept], weight[kept])
    assert np.abs(nearly.predict_proba(X) - nothing.predict_proba(X)).max() < 0.2  # other rows are sampled
    one = boosted(library, n_estimators=10, learning_rate=0.3)
    assert AdaBoostClassifier(one, n_estimators=3).fit(X, Y).score(X, Y) > 0.8


@LIBRARIES
def test_trees_without_a_split_are_warned_of(library: str) -> None:
    with pytest.warns(UserWarning, match="split no row from another") as caught:
        model = boosted(library, n_estimators=3, transport=1e-6, cross_entropy=1e-6).fit(X, Y)
    assert [warning.filename for warning in caught] == [__file__]
    assert np.ptp(model.predict_proba(X), axis=0).max() < 1e-3


@LIBRARIES
def test_features_that_the_library_takes_for_zeros_are_warned_of(library: str) -> None:
    rows = X.astype(float) * np.append(1e-50, np.ones(X.shape[1] - 1))
    with pytest.warns(UserWarning, match=r"column 0 of X holds numbers up to .*e-50 in size \(1 such") as caught:
        boosted(library, n_estimators=3, early_stopping=False).fit(rows, Y)
    assert [warning.filename for warning in caught] == [__file__]


@LIBRARIES
def test_features_are_copied_by_blocks_only(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """tracemalloc counts arrays of numpy, and the rows of which LightGBM makes bins, whose number is a setting."""
    for size in ("_FILLED", "_COMPARED"):
        monkeypatch.setattr(f"otloss.estimators.boosters.{size}", 100)
    random = np.random.default_rng(0)
    rows, weight = random.normal(size=(3000, 400)).astype(np.float32), random.exponential(size=3000)
    y = np.digitize(rows[:, 0], [-0.5, 0.5])
    settings = {"early_stopping": True, "n_iter_no_change": 1, "learning_rate": 1.0}
    sampled = {"bin_construct_sample_cnt": 50} if library == "lightgbm" else {}
    model = boosted(library, n_estimators=2, max_depth=1, booster_params=sampled, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(rows[:600, :2], y[:600])  # imports and kernels
        tracemalloc.start()
        model.fit(rows, y, weight)
        peak = tracemalloc.get_traced_memory()[1] / rows.nbytes
        tracemalloc.stop()
    assert peak < {"xgboost": 0.4, "lightgbm": 0.7}[library]


def test_equal_rows_are_one_whatever_the_dtype_the_memory_order_and_the_sign_of_zero_and_nan() -> None:
    random = np.random.default_rng(0)
    distinct = np.column_stack([np.arange(40.0), random.choice([0.0, np.nan, 1.0], 40)])
    copies = np.repeat(np.arange(40), random.integers(1, 4, size=40))
    table = random.permutation(distinct[copies]) * [1.0, -1.0]
    assert np.signbit(table[table[:, 1] == 0, 1]).any()
    table[::2] += 0.0
    missing = np.flatnonzero(np.isnan(table[:, 1]))
    table[missing, 1] = np.where(np.arange(len(missing)) % 2, np.nan, -np.nan)  # as 0 / 0 has it
    assert 0 < np.signbit(table[missing, 1]).sum() < len(missing)
    parts = []
    for rows in (table, np.asfortranarray(table), table.astype(np.float32), table[::-1]):
        part = Part(Table(rows), np.arange(len(rows)), np.zeros(len(rows), int), np.ones(len(rows))).merged()
        order = np.argsort(part.features()[:, 0])
        np.testing.assert_array_equal(part.features()[order], distinct * [1.0, -1.0])
        np.testing.assert_array_equal(part.weight[order], np.bincount(copies))
        parts.append(part.features())
    for features in parts[1:]:  # samples of rows depend on their order
        np.testing.assert_array_equal(features, parts[0])


@LIBRARIES
def test_a_pipeline_transforms_what_is_evaluated(library: str) -> None:
    parts = {"eval_X": (X, X[::2]), "eval_y": (Y, Y[::2])}
    expected = boosted(library, n_estimators=3).fit(X, Y, **parts)
    assert (
        expected.evals_result_
        == boosted(library, n_estimators=3).fit(X, Y, eval_set=[(X, Y), (X[::2], Y[::2])]).evals_result_
    )
    with config_context(enable_metadata_routing=True):
        model = boosted(library, n_estimators=3).set_fit_request(eval_X=True, eval_y=True)
        scaling = Pipeline([("scale", StandardScaler()), ("model", model)], transform_input=["eval_X"])
        scaling.fit(1000 * X, Y, eval_X=tuple(1000 * part for part in parts["eval_X"]), eval_y=parts["eval_y"])
    for name, losses in expected.evals_result_.items():
        np.testing.assert_allclose(model.evals_result_[name]["rps+ce"], losses["rps+ce"], rtol=1e-3)


@LIBRARIES
def test_libraries_older_than_the_range_of_the_tests_are_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pyproject = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    (wanted,) = (one for one in pyproject["project"]["optional-dependencies"]["boost"] if one.startswith(library))
    assert wanted == f"{library}>={'.'.join(map(str, OLDEST[library]))}"
    major, minor = OLDEST[library]
    module = pytest.importorskip(library)
    monkeypatch.setattr(module, "__version__", f"{major}.{minor - 1}.9")
    with pytest.raises(ImportError, match=f"found {library} .*, expected {major}.{minor} or later: pip install"):
        boosted(library).fit(X, Y)
    for version in (f"{major}.{minor}.0rc1", f"{major + 7}.0.dev1"):
        monkeypatch.setattr(module, "__version__", version)
        require_library(library)


test_evaluation_sets_that_cannot_be_are_named = raising(
    ({"eval_X": X}, "got eval_X, expected eval_set, or both"),
    ({"eval_X": (X, X), "eval_y": Y}, "expected tuples of as many"),
    ({"eval_X": (X, X), "eval_y": (Y,)}, "expected tuples of as many"),
    ({"early_stopping_rounds": 5}, TypeError, "set n_iter_no_change=... and early_stopping=True of the estimator"),
    ({"sample_weight_eval_set": [Y]}, TypeError, r"give eval_set=\[\(X, y, sample_weight\), ...\]"),
    ({"init_score": Y}, TypeError, "train with otloss.boosting.xgboost_objective or lightgbm_objective"),
    ({"eval_sets": [(X, Y)]}, TypeError, "did you mean eval_set="),
    ({"rounds": 3}, TypeError, "no option 'rounds', expected sample_weight, eval_set"),
    ({"eval_set": [("valid", (X, Y))]}, r"eval_set\[0\]: could not convert string to float: 'valid'"),
    ({"eval_set": (X, Y, np.full(len(X), 1e300))}, r"eval_set: a row has the weight 1e\+300, expected at most 1e\+12"),
    ({"sample_weight": np.full(len(X), 1e13)}, r"^a row has the weight 1e\+13, expected at most 1e\+12"),
    call=lambda given: boosted("lightgbm").fit(X, Y, **given),
)
test_settings_that_cannot_be_are_named = raising(
    ("lightgbm", {"num_trees": 7}, "holds 'num_trees', which follows from the estimator's arguments"),
    ("lightgbm", {"cat_feature": [0]}, "holds 'cat_feature', which follows from the estimator's arguments"),
    ("lightgbm", {"num_leafs": 3}, "holds 'num_leafs', expected settings of lightgbm"),
    ("xgboost", {"eta": 0.1, "learning_rate": 0.2}, "another name of 'learning_rate'"),
    ("xgboost", {"monotone_constraints": {"a": 1}}, TypeError, "expected -1, 0 or 1 for each column of X"),
    ("lightgbm", {"monotone_constraints": pd.Series({"b": 1, "a": 0})}, TypeError, "expected -1, 0 or 1 for each"),
    ("lightgbm", {"unbalance": True}, ValueError, "holds 'unbalance', which has no effect on the loss of ranks"),
    ("lightgbm", {"neg_subsample": 0.1}, ValueError, "holds 'neg_subsample', which has no effect .* class_weight"),
    ("xgboost", {"scale_pos_weight": 2.0}, ValueError, "holds 'scale_pos_weight', which has no effect on the loss"),
    ("xgboost", {"monotone_constraints": [1]}, TypeError, "expected -1, 0 or 1 for each column of X"),
    ("xgboost", {"monotone_constraints": [[1], [0, 1]]}, TypeError, "expected -1, 0 or 1 for each column of X"),
    ("lightgbm", {"monotone_constraints": [2, 0, 0]}, TypeError, "expected -1, 0 or 1 for each column of X"),
    ("xgboost", {"interaction_constraints": [["a", "b"]]}, TypeError, "expected groups of places of columns"),
    ("lightgbm", {"mc": {"a": 1}}, TypeError, r"mc=\{'a': 1\}, expected -1, 0 or 1 for each column of X"),
    call=lambda library, given: boosted(library, booster_params=given, early_stopping="auto").fit(X, Y),
)


test_booster_params_that_are_no_dict_are_named = raising(
    (np.ones(3), TypeError, "booster_params is array.*, expected a dict of xgboost's settings"),
    ([], TypeError, r"booster_params is \[\], expected a dict of xgboost's settings"),
    call=lambda given: OrdinalBoostingClassifier(booster_params=given).fit(X, Y),
)
test_numbers_of_threads_that_cannot_be_are_named = raising(
    ("all", TypeError, "n_jobs is 'all', expected a whole number"),
    (1.5, TypeError, "n_jobs is 1.5, expected a whole number"),
    (0, "n_jobs is 0, expected None, a number of threads of at least 1, or -1"),
    call=lambda given: boosted("lightgbm", n_jobs=given).fit(X, Y),
)


def test_features_beyond_float32_are_named_where_trees_are_in_float32() -> None:
    trained = boosted("xgboost").fit(X, Y)
    for sign in (1e40, -1e40):
        far = np.where(X > 0.5, sign, np.where(X < -1, np.nan, X))
        assert np.isfinite(boosted("lightgbm").fit(far, Y).predict_proba(far)).all()
        message = r"X holds numbers up to 1e\+40 in size, expected at most 3.4e\+38"
        with pytest.raises(ValueError, match=message):
            boosted("xgboost").fit(far, Y)
        with pytest.raises(ValueError, match=message):
            boosted("xgboost").fit(X, Y, eval_set=(far, Y))
        with pytest.raises(ValueError, match=message):
            trained.predict(far)


test_data_that_lightgbm_cannot_split_is_named = raising(
    (X * 1e-36, {}, "numbers below 1e-35 in size are 0 to it. Multiply such features"),
    (X, {"feature_pre_filter": True, "min_data_in_leaf": 150}, "leave feature_pre_filter out, or lower min_data"),
    (X, {"subsample": 1e-3}, "bagging_fraction leaves LightGBM no row in a round; raise it"),
    call=lambda X, given: boosted("lightgbm", booster_params=given).fit(X, Y),
)


def test_one_part_to_evaluate_needs_no_list_and_a_library_that_is_not_there_is_named(
    without: Callable[[str], None],
) -> None:
    expected = boosted("lightgbm", n_estimators=3).fit(X, Y, eval_set=[(X, Y)]).evals_result_
    for alone in ((X, Y), (X.tolist(), Y.tolist()), ([X, Y],)):
        assert boosted("lightgbm", n_estimators=3).fit(X, Y, eval_set=alone).evals_result_ == expected
    with pytest.raises(TypeError, match=r"eval_set\[0\] is a ndarray, expected \(X, y\) or \(X, y, sample_weight\)"):
        boosted("lightgbm").fit(X, Y, eval_set=[X, Y])
    with pytest.raises(TypeError, match=r"eval_set\[0\]: X has dtype datetime64"):
        boosted("lightgbm").fit(X, Y, eval_set=[(X.astype("datetime64[s]"), Y)])
    with pytest.raises(ValueError, match="eval_set: y holds the label 8, expected the labels"):
        boosted("lightgbm").fit(X, Y, eval_set=(X, Y + 7))
    without("lightgbm")
    with pytest.raises(ImportError, match=r'pip install "torch-otloss\[boost\]"'):
        OrdinalBoostingClassifier(booster="lightgbm").fit(X, Y)


@LIBRARIES
def test_missing_values_and_categories_are_learnt_from(library: str) -> None:
    missing = np.where((Y == 2)[:, None] & [True, False, False], np.nan, X)
    model = boosted(library, n_estimators=30, learning_rate=0.3).fit(missing, Y)
    assert (model.predict(missing) == 2)[Y == 2].mean() > 0.9
    random = np.random.default_rng(0)
    letters = random.choice(list("uvwxyz"), 120)
    y = np.where(np.isin(letters, ["v", "x", "z"]), 2, 0)  # every second one: one split by a set, five by codes
    table = pd.DataFrame({"letter": pd.Categorical(letters, [*"uvwxyz", "new"])})
    table["width"] = pd.cut(random.normal(size=120), 4)  # ordered
    params = {"max_cat_to_onehot": 1}
    model = boosted(library, n_estimators=30, learning_rate=0.3, max_depth=1, booster_params=params).fit(table, y)
    assert model.score(table, y) == 1.0
    expected = model.predict_proba(table)
    for same in (table.assign(letter=letters), table.assign(letter=pd.Categorical(letters, list("zyxwvu")))):
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict_proba(same), expected)
    for rare in ("new", None):  # declared, though in no row
        assert np.isfinite(model.predict_proba(table.assign(letter=rare))).all()
    with pytest.raises(ValueError, match="column 'letter' of X holds 'other', expected one of the 7 categories"):
        model.predict(table.assign(letter="other"))
    with pytest.raises(ValueError, match="same order"):
        model.predict(table[["width", "letter"]])


@LIBRARIES
def test_numbers_of_numpy_are_settings(library: str) -> None:
    expected = boosted(library, n_estimators=3).fit(X, Y).predict_proba(X)
    for settings in ({"n_jobs": np.int32(1)}, {"booster_params": {"n_jobs": np.int64(1)}}):
        np.testing.assert_array_equal(boosted(library, n_estimators=3, **settings).fit(X, Y).predict_proba(X), expected)


@LIBRARIES
def test_missing_values_that_no_tree_has_seen_are_told(library: str) -> None:
    table = pd.DataFrame(X, columns=["a", "b", "c"]).assign(d=pd.Categorical(np.arange(120) % 3), constant=1.0)
    model = boosted(library, n_estimators=30).fit(table, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(table.assign(constant=np.nan, d=pd.Categorical([None] * 120, range(3))))
    first = table.columns[np.argmax(model.feature_importances_[:3])]
    for predict in (model.predict, model.predict_log_proba):
        with pytest.warns(UserWarning, match=rf"column '{first}' of X holds NaN and held none in fit \(1 such") as told:
            predict(table.assign(**{first: np.nan}))
        assert told[0].filename == __file__


@LIBRARIES
def test_values_that_most_rows_have_are_split_beside_a_long_tail(library: str) -> None:
    """LightGBM made its bins of merged rows, among which a tail of thousands of values outnumbers the others."""
    random = np.random.default_rng(0)

    def table(rows: int) -> tuple[np.ndarray, np.ndarray]:
        x = random.integers(0, 21, rows).astype(float)
        in_tail = random.random(rows) < 0.05
        x[in_tail] = np.round(np.exp(random.normal(9, 1, in_tail.sum())))
        return x[:, None], np.where(in_tail, 0, x % 3).astype(int)

    (rows, y), (others, labels) = table(60_000), table(2_000)
    model = boosted(library, n_estimators=60, learning_rate=0.3, max_depth=6).fit(rows, y)
    assert model.score(others, labels) > 0.97


@LIBRARIES
def test_a_class_without_weight_starts_from_half_a_row(library: str) -> None:
    """Not from half a merged row, which stands for many; bagging gives such weights."""
    rows = np.repeat([[0.0], [1.0]], 400, axis=0)
    y = np.where(np.arange(800) % 4 == 0, 1, rows[:, 0].astype(int))
    y[:2] = 2
    weight, copies = (y < 2).astype(float), np.repeat(np.arange(800), 1 + (np.arange(800) > 1))
    model = boosted(library, n_estimators=3).fit(rows, y, weight)
    assert np.exp(model.start_scores_[2]) == pytest.approx(0.5 / 798.5)
    twice = boosted(library, n_estimators=3).fit(rows, y, 2 * weight)
    repeated = boosted(library, n_estimators=3).fit(rows[copies], y[copies], weight[copies])
    np.testing.assert_array_equal(twice.predict_proba(rows), repeated.predict_proba(rows))


@LIBRARIES
def test_a_rare_last_class_is_learnt(library: str) -> None:
    """By the ranked probability score alone its forecasts stay at the share of .3 %."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(6000, 3))
    y = np.digitize(rows[:, 0] + random.logistic(size=6000), [-1.0, 0.5, 2.0])
    rows[:, 2] = np.arange(6000) < 24
    y[:24] = np.where(random.random(24) < 0.93, 4, 3)
    model = OrdinalBoostingClassifier(booster=library, n_jobs=1, random_state=0).fit(rows, y)
    assert model.predict_proba(rows[:24])[:, 4].mean() > 0.6


@LIBRARIES
def test_a_small_group_of_equal_rows_is_split_off(library: str) -> None:
    """Equal rows are merged to few, beside which LightGBM took this group for less than half of a row."""
    random = np.random.default_rng(0)
    rows = np.column_stack([random.integers(0, 5, 20_000), np.arange(20_000) < 200]).astype(float)
    y = np.where((rows[:, 1] > 0) & (random.random(20_000) < 0.93), 0, 1 + random.integers(0, 3, 20_000))
    model = boosted(library, n_estimators=100, learning_rate=0.2).fit(rows, y)
    assert model.predict_proba(rows[:200])[:, 0].min() > 0.85


def test_settings_of_lightgbm_that_count_rows_count_all_of_them() -> None:
    """Equal rows are merged elsewhere: of 24 kinds of rows, each of more than 30 rows, no leaf would hold 30."""
    random = np.random.default_rng(0)
    rows = np.array(list(np.ndindex(3, 2, 4)), dtype=float).repeat(50, axis=0)
    y = np.digitize(rows.sum(1) + random.logistic(size=1200), [2.0, 3.5])
    fits = []
    for limits in ({}, {"min_child_samples": "30"}, {"min_data_in_bin": 20}, {"path_smooth": 1e-6}):
        for order in (slice(None), random.permutation(1200)):
            model = boosted("lightgbm", n_estimators=30, cross_entropy=0, booster_params=limits)
            model.fit(rows[order], y[order])
            fits.append(model.predict_proba(rows))
    assert np.ptp(fits[0], axis=0).max() > 0.3
    for fit in fits[1:]:
        np.testing.assert_allclose(fit, fits[0], atol=1e-4)
    shops = pd.DataFrame({"shop": pd.Categorical(np.arange(1200) // 50)})  # LightGBM drops categories of fewer rows
    split = boosted("lightgbm", n_estimators=30, booster_params={"cat_smooth": 20}).fit(shops, y)
    assert np.ptp(split.predict_proba(shops), axis=0).max() > 0.3


def test_categories_of_arrow_and_polars_raise_with_the_remedy() -> None:
    """numpy reads them as their labels, so that numbers and digits would be split by size."""
    arrow = pytest.importorskip("pyarrow")
    columns = {"width": X[:, 0], "code": arrow.array((Y + 100).astype(str)).dictionary_encode()}
    table = arrow.table(columns)
    model = boosted("xgboost", n_estimators=2)
    expected = r"column 'code' of X holds categories as dictionary<.*expected the dtype category"
    with pytest.raises(ValueError, match=expected + r".* Pass X\.to_pandas\(\)\."):
        model.fit(table, Y)
    columns["code"] = columns["code"].take(arrow.array([None, *range(1, 120)]))  # a missing value
    for each in (table, arrow.table(columns)):
        frame = each.to_pandas(types_mapper=pd.ArrowDtype).set_index(np.arange(120) + 7)
        with pytest.raises(ValueError, match=expected) as told:
            model.fit(frame, Y)
        exec(str(told.value).partition("Convert it by ")[2].removesuffix("."), {"X": frame})
        by_sets = [model.fit(t, Y).predict_proba(t) for t in (each.to_pandas(), frame)]
        np.testing.assert_array_equal(*by_sets)


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_interaction_constraints_are_groups_of_columns(library: str) -> None:
    def predicted(groups: Any) -> np.ndarray:
        model = boosted(library, n_estimators=5, booster_params={"interaction_constraints": groups})
        return model.fit(X, Y).predict_proba(X)

    lists = predicted([[0], [1, 2]])
    for groups in ([(0,), (1, 2)], ({0}, {1, 2}), [range(1), np.arange(1, 3)], "[0], [1, 2]", "[[0], [1, 2]]"):
        np.testing.assert_array_equal(predicted(groups), lists)
    assert (predicted(None) != lists).any()
    with pytest.raises(ValueError, match=f"expected places from 0 to {X.shape[1] - 1}"):
        predicted([[0, 9]])


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_monotone_constraints_may_be_a_list_or_an_array(library: str) -> None:
    predicted = [
        boosted(library, n_estimators=3, booster_params={"monotone_constraints": given}).fit(X, Y).predict_proba(X)
        for given in ((1,) * X.shape[1], [True] * X.shape[1], np.ones(X.shape[1]), "(1, 1, 1)", "1,1,1")
    ]
    for other in predicted[1:]:
        np.testing.assert_array_equal(other, predicted[0])
