"""Bad input to the estimators: messages that name what came in, what was expected, and the mend."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from scipy.sparse import coo_matrix, csc_array, csr_array, issparse
from sklearn.compose import ColumnTransformer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from otloss.estimators import OrdinalBoostingClassifier, OrdinalClassifier
from tests.otloss.estimators.test_estimators import BOTH, NAMES, boosted, both, ordered_rows

GOOD_X, GOOD_RANK = ordered_rows(30)
GOOD_Y = np.array(NAMES)[GOOD_RANK]
BAD_SETTINGS = [
    ({"values": [0, 2, 1]}, "values[1] is 2 and values[2] is 1, expected strictly increasing"),
    ({"values": [0, 1, 1]}, "values[1] is 1 and values[2] is 1, expected strictly increasing"),
    ({"values": [0, 1]}, "values has shape (2,), expected (3,)"),
    ({"values": [0, 1, np.nan]}, "values holds nan"),
    ({"values": "abc"}, "values is 'abc', expected numbers"),
    ({"cost": np.ones((2, 3))}, "cost has shape (2, 3), expected (3, 3)"),
    ({"cost": -np.ones((3, 3))}, "cost[0, 0] is -1, expected costs >= 0"),
    ({"cost": np.full((3, 3), np.inf)}, "cost holds inf"),
    ({"cost": np.ones((3, 3)), "values": [0, 1, 2]}, "values and cost are both given"),
    ({"power": 3}, "power is 3, expected one of (1, 2)"),
    ({"cross_entropy": -1.0}, "cross_entropy is -1.0, expected a finite number >= 0"),
    ({"transport": 0.0, "cross_entropy": 0.0}, "transport and cross_entropy are both 0"),
    ({"decode": "mode"}, "decode is 'mode', expected one of"),
    ({"decode": "cost"}, "decode is 'cost' without a cost matrix"),
    ({"calibration": "platt"}, "calibration is 'platt', expected one of"),
    ({"calibration": "ordinal", "calibration_fraction": 1.5}, "calibration_fraction is 1.5"),
    ({"class_weight": {"tall": 2.0}}, "class_weight names the label 'tall'"),
    ({"class_weight": {"low": -2.0}}, "class_weight['low'] is -2.0"),
    ({"class_weight": "equal"}, "class_weight is 'equal'"),
    ({"categories": ["low", "high", "low"]}, "categories holds 'low' more than once"),
    ({"categories": "low"}, "categories is 'low', expected a sequence"),
    ({"categories": {"low": 1, "medium": 2, "high": 3}}, "expected a sequence of labels, lowest rank first"),
    ({"categories": set(NAMES[:1])}, "expected a sequence of labels, lowest rank first"),
    ({"values": [0, 1e-160, 2e-160]}, "values spans 2e-160, expected between 1e-150"),
    ({"values": [-1.5e308, 0, 1.5e308]}, "multiply all of it by one number"),
    ({"cost": np.full((3, 3), 1e200)}, "cost spans 1e+200"),
    ({"categories": ["low", "high"]}, "y holds the label 'medium', which is none of categories=['low', 'high']"),
    ({"categories": [0, 1, 2]}, "which is none of categories=[0, 1, 2]"),
]


@BOTH
@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS, ids=lambda value: str(value)[:40])
def test_bad_settings_are_named(index: int, settings: dict[str, Any], message: str) -> None:
    model = both(**{"categories": NAMES, **settings})[index]
    with pytest.raises(ValueError, match=re.escape(message)):
        model.fit(GOOD_X, GOOD_Y)


@BOTH
@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.where(GOOD_RANK == 1, np.nan, GOOD_RANK * 1.0), "Input y contains NaN"),
        (np.array([None, *GOOD_Y[1:]], dtype=object), "Input y contains NaN, None or infinity: y[0] is None"),
        (np.array([1, *GOOD_Y[1:]], dtype=object), "y mixes labels of the types int, str"),
        (np.array(["tall", *GOOD_Y[1:]]), "y holds the label 'tall'"),
        (GOOD_RANK[:-1], "inconsistent numbers of samples"),
        (np.minimum(GOOD_RANK, 1), "without the last, 2, which categories they count is not certain"),
        (
            np.array(["NaT", *["2020-01-01"] * 29], dtype="datetime64[D]"),
            "Input y contains NaN, None or infinity: y[0]",
        ),
    ],
    ids=["nan", "none", "mixed", "unknown", "short", "codes", "no date"],
)
def test_bad_labels_are_named(index: int, y: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        both(categories=NAMES)[index].fit(GOOD_X, y)


@BOTH
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.r_[-1.0, np.ones(29)], "sample_weight[0] is -1.0, expected finite weights >= 0"),
        (np.r_[np.ones(29), np.nan], "sample_weight[29] is nan"),
        (np.ones(29), "sample_weight has shape (29,), expected (30,)"),
        (np.ones((30, 2)), "Sample weights must be 1D"),
        (np.zeros(30), "all are zero"),
        (np.full(30, 1e150), "the largest weight of a row (sample weight times class weight) is 1e+150"),
        (np.full(30, 1e-300), "is 1e-300, expected between 1e-12 and 1e+12"),
    ],
    ids=["negative", "nan", "short", "table", "zero", "large", "small"],
)
def test_bad_weights_are_named(index: int, weights: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        both()[index].fit(GOOD_X, GOOD_RANK, sample_weight=weights)


@pytest.mark.parametrize("settings", [{}, {"model": "cumulative"}, {"hidden_layer_sizes": 3, "tol": 1.0}], ids=str)
def test_scores_that_overflow_are_refused(settings: dict[str, Any]) -> None:
    model = OrdinalClassifier(random_state=0, **settings).fit(GOOD_X * 1e-3, GOOD_RANK)
    far = GOOD_X.copy()
    far[2] = 1.7e308
    with np.errstate(all="ignore"), pytest.raises(ValueError, match="the scores of row 2 overflow"):
        model.predict_proba(far)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"alpha": -1.0}, ValueError),
        ({"alpha": "a"}, TypeError),
        ({"model": "probit"}, ValueError),
        ({"solver": "sgd"}, ValueError),
        ({"solver": "lbfgs", "early_stopping": True}, ValueError),
        ({"hidden_layer_sizes": (0,)}, ValueError),
        ({"hidden_layer_sizes": (2.5,)}, TypeError),
        ({"max_iter": 0}, ValueError),
        ({"learning_rate": 0.0}, ValueError),
        ({"validation_fraction": 0.0}, ValueError),
        ({"verbose": -1}, ValueError),
        ({"standardize": "no"}, ValueError),
        ({"warm_start": 1}, ValueError),
        ({"power": np.array([1, 2])}, ValueError),
    ],
    ids=str,
)
def test_bad_settings_of_the_linear_model_are_named(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{list(settings)[-1]}"):
        OrdinalClassifier(**settings).fit(GOOD_X, GOOD_RANK)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"booster": "catboost"}, ValueError),
        ({"early_stopping": 1}, ValueError),
        ({"n_estimators": 0}, ValueError),
        ({"subsample": 0.0}, ValueError),
        ({"subsample": 1.5}, ValueError),
        ({"min_child_weight": -1}, ValueError),
        ({"n_jobs": 0}, ValueError),
        ({"verbose": "x"}, TypeError),
        ({"refit": "no"}, ValueError),
        ({"booster_params": [1]}, TypeError),
        ({"booster_params": {"num_class": 3}}, ValueError),
        ({"hessian": "exact"}, ValueError),
    ],
    ids=str,
)
def test_bad_settings_of_boosting_are_named(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{list(settings)[-1]}"):
        OrdinalBoostingClassifier(**{"booster": "lightgbm", **settings}).fit(GOOD_X, GOOD_RANK)


@BOTH
@pytest.mark.parametrize("container", [csr_array, csc_array, coo_matrix])
def test_sparse_features_are_dense_ones(index: int, container: Any) -> None:
    X = np.where(np.abs(GOOD_X) > 0.5, GOOD_X, 0.0)
    model, dense = both()[index].fit(container(X), GOOD_RANK), both()[index].fit(X, GOOD_RANK)
    np.testing.assert_array_equal(model.predict_proba(X), dense.predict_proba(X))
    np.testing.assert_array_equal(model.predict(container(X)), dense.predict(X))
    assert model.__sklearn_tags__().input_tags.sparse


@BOTH
def test_columns_made_one_hot_and_sparse_are_features(index: int) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"colour": np.arange(30).astype(str), "size": GOOD_X[:, 0]})
    hot = [("hot", OneHotEncoder(), ["colour"])]
    made = [ColumnTransformer(hot, remainder="passthrough", sparse_threshold=share) for share in (1, 0)]
    fitted = [make_pipeline(maker, both()[index]).fit(frame, GOOD_RANK) for maker in made]
    assert issparse(made[0].transform(frame))
    np.testing.assert_array_equal(*(model.predict_proba(frame) for model in fitted))


def test_a_stream_of_sparse_features_is_one_of_dense_ones() -> None:
    models = [OrdinalClassifier(random_state=0).partial_fit(X, GOOD_RANK) for X in (csr_array(GOOD_X), GOOD_X)]
    np.testing.assert_array_equal(*(model.predict_proba(GOOD_X) for model in models))


def test_missing_features_are_refused_where_they_have_no_meaning() -> None:
    X = GOOD_X.copy()
    X[3, 1] = np.nan
    for features in (X, csr_array(X)):
        with pytest.raises(ValueError, match="Input X contains NaN"):
            OrdinalClassifier().fit(features, GOOD_RANK)
    kept = OrdinalBoostingClassifier(n_estimators=3, random_state=0)
    np.testing.assert_array_equal(*(kept.fit(f, GOOD_RANK).predict_proba(X) for f in (X, csr_array(X))))


def test_missing_values_of_pandas_are_no_label() -> None:
    pandas = pytest.importorskip("pandas")
    labels = np.array([pandas.NA, *GOOD_Y[1:]], dtype=object)
    with pytest.raises(ValueError, match=r"contains NaN.*y\[0\] is <NA>"):
        OrdinalClassifier(categories=NAMES).fit(GOOD_X, labels)


@BOTH
@pytest.mark.parametrize("where", ["fit", "predict"])
def test_features_too_large_are_named(index: int, where: str) -> None:
    model = [OrdinalClassifier(), boosted("xgboost")][index].fit(GOOD_X, GOOD_RANK)
    X = GOOD_X.copy()
    X[2, 1] = -1e308 if index == 0 else -1e39
    message = r"X\[2, 1\] is -1e\+(308|39), expected numbers of at most"
    if index == 0 and where == "predict":
        message = "the scores of row 2 overflow"
    with np.errstate(all="ignore"), pytest.raises(ValueError, match=message):
        model.fit(X, GOOD_RANK) if where == "fit" else model.predict(np.where(X == -1e308, -1.79e308, X))


def test_features_too_small_for_lightgbm_leave_the_frequencies() -> None:
    model = boosted("lightgbm").fit(GOOD_X * 1e-36, GOOD_RANK)
    assert model.n_estimators_ == 0
    np.testing.assert_allclose(model.predict_proba(GOOD_X[:1]), [[1 / 3, 1 / 3, 1 / 3]], atol=0.05)


@BOTH
@pytest.mark.parametrize(
    ("rule", "message"), [("cost", "decode is 'cost' without a cost"), ("mode", "expected one of")]
)
def test_a_rule_set_after_the_fit_is_checked(index: int, rule: str, message: str) -> None:
    model = both()[index].fit(GOOD_X, GOOD_RANK).set_params(decode=rule)
    with pytest.raises(ValueError, match=message):
        model.predict(GOOD_X)
