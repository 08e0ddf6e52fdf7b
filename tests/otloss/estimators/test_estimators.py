"""Both estimators among scikit-learn: its checks, its meta-estimators, labels of all types, weights, bad input."""

import copy
import pickle
import re
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csc_matrix, csr_array
from scipy.special import softmax
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import BaggingClassifier, StackingClassifier, VotingClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict, train_test_split
from sklearn.utils import resample
from sklearn.utils.estimator_checks import parametrize_with_checks

from otloss import metrics
from otloss.estimators import (
    EncodedLabelsWarning,
    LabelOrderWarning,
    OrdinalBoostingClassifier,
    OrdinalClassifier,
    OrdinalDecomposition,
    OrdinalRecalibration,
    Temperature,
)
from otloss.estimators.base import above_zero, split_off
from otloss.estimators.decode import decode
from tests.errors import raising

SMALL = {"n_estimators": 8, "learning_rate": 0.3, "early_stopping": False, "n_jobs": 1, "random_state": 0}
NAMES = ["low", "medium", "high"]  # sorts as high, low, medium


def fitted_proba(model: Any, *rows: Any, of: np.ndarray) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(*rows).predict_proba(of)


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
X, RANK = ordered_rows()
Y = np.array(NAMES)[RANK]


# ---- scikit-learn's own checks -------------------------------------------------------------------------------------

QUICK = {"n_jobs": 1, "n_estimators": 8, "learning_rate": 0.4}
NETWORK: dict[str, Any] = {"hidden_layer_sizes": (10,), "learning_rate": 0.03, "max_iter": 40}
CHECKED = [
    OrdinalDecomposition(),
    OrdinalClassifier(),
    OrdinalBoostingClassifier(booster="lightgbm", **QUICK),
    OrdinalBoostingClassifier(booster="xgboost", **QUICK),
]
CHECKED_SLOWLY = [
    OrdinalClassifier(model="cumulative"),
    OrdinalClassifier(**NETWORK),
    OrdinalClassifier(standardize=False, calibration="temperature"),
    OrdinalClassifier(model="cumulative", **NETWORK, early_stopping=True),
    OrdinalClassifier(decode="argmax", power=1, cross_entropy=0.3, alpha=1.0),
    OrdinalBoostingClassifier(booster="lightgbm", decode="argmax", **QUICK),
    OrdinalBoostingClassifier(booster="lightgbm"),
    OrdinalBoostingClassifier(booster="xgboost", **QUICK, early_stopping=True, calibration="ordinal"),
]


def cannot_pass(estimator: Any) -> dict[str, str]:
    """Checks that settings contradict, and why."""
    reasons = {}
    if estimator.calibration or estimator.early_stopping is True:
        drawn = "rows are drawn at random, and a row given twice is drawn twice"
        for data in ("dense", "sparse"):
            reasons[f"check_sample_weight_equivalence_on_{data}_data"] = drawn
    if estimator.decode != "argmax":
        # The median of the default has fewer errors of several ranks; this check asserts the argmax of predict_proba.
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


def test_ordered_categoricals_and_dtypes_bring_their_order() -> None:
    pandas = pytest.importorskip("pandas")
    wanted = [*NAMES, "very high"]
    dtype = pandas.CategoricalDtype(wanted, ordered=True)
    for options, y in (({}, pandas.Series(pandas.Categorical(Y, dtype=dtype))), ({"categories": dtype}, Y)):
        assert clone(OrdinalClassifier(**options)).fit(X, y).categories_.tolist() == wanted
    with pytest.raises(ValueError, match=r"categories is CategoricalDtype.*expected .*ordered=True"):
        OrdinalClassifier(categories=pandas.CategoricalDtype(wanted)).fit(X, Y)


@BOTH
def test_fractions_that_repeat_are_classes(index: int) -> None:
    """In their order and 1 apart; the target of a regression raises."""
    model, plain = both()[index].fit(X, RANK / 2), both()[index].fit(X, RANK)
    assert model.categories_.tolist() == model.classes_.tolist() == [0, 0.5, 1]
    np.testing.assert_array_equal(model.predict_proba(X), plain.predict_proba(X))
    weight = np.arange(len(X))
    assert model.score(X, RANK / 2, weight) == plain.score(X, RANK, weight)
    assert model.score(X[:3], [0.25] * 3) == 0
    assert both(categories=[0, 0.5, 1])[index].fit(X[:4], [0, 0.5, 0.5, 1]).classes_.tolist() == [0, 0.5, 1]
    for y in (X[:, 0], np.repeat(X[:46, 0], 2)[:90] + np.r_[np.zeros(89), 1]):
        with pytest.raises(ValueError, match=r"Unknown label type: continuous. y holds \d+ different numbers"):
            both()[index].fit(X, y)


@BOTH
def test_text_without_an_order_warns_once_per_fit_where_it_was_called(index: int) -> None:
    message = r"\['high', 'low', 'medium'\] are text, .* ordered as \['high', 'low', 'medium'\].*pass categories="
    with pytest.warns(LabelOrderWarning, match=message) as caught:
        model = both(calibration="temperature", early_stopping=False)[index].fit(X, Y.astype(object))
    assert [warning.filename for warning in caught] == [__file__]
    assert model.categories_.tolist() == ["high", "low", "medium"]
    with pytest.warns(LabelOrderWarning, match="every integer between would be a class"):
        both()[index].fit(X, np.array([0, 1, 10**6])[RANK])


@BOTH
def test_whole_numbers_keep_their_distances_and_their_unit_is_the_mean_gap(index: int) -> None:
    with_gaps = both()[index].fit(X, np.array([1, 2, 5])[RANK])
    same = both(values=[0, 0.5, 2])[index].fit(X, RANK)  # the mean gap of the labels, 2, is 1 in training
    assert with_gaps.categories_.tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(with_gaps.predict_proba(X), same.predict_proba(X), atol=1e-6)
    tens = both()[index].fit(X, np.array([10, 20, 30], dtype=np.uint8)[RANK])
    assert tens.categories_.dtype == np.uint8
    np.testing.assert_allclose(tens.predict_proba(X), both()[index].fit(X, RANK).predict_proba(X), atol=1e-6)


COST = np.array([[0.0, 1, 2], [1, 0, 1], [20, 10, 0]])


def test_labelled_costs_and_values_go_by_their_index() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(COST, index=NAMES, columns=NAMES)
    plain = OrdinalClassifier(categories=NAMES, cost=COST).fit(X, Y).predict_proba(X)
    for table in (frame.loc[sorted(NAMES), sorted(NAMES)], frame.loc[:, sorted(NAMES)], pandas.DataFrame(COST)):
        labelled = OrdinalClassifier(categories=NAMES, cost=table).fit(X, Y)
        np.testing.assert_array_equal(labelled.predict_proba(X), plain)
    values = pandas.Series({"high": 7.0, "low": 0.0, "medium": 1.0, "other": 3.0})
    actual, expected = (OrdinalClassifier(categories=NAMES, values=v).fit(X, Y) for v in (values, [0, 1, 7]))
    np.testing.assert_array_equal(actual.expected_value(X), expected.expected_value(X))


# ---- meta-estimators -----------------------------------------------------------------------------------------------


def test_meta_estimators_pass_codes_and_get_right_columns() -> None:
    """A wrong order of the codes would mistake the middle class for an end, and lose accuracy."""
    X, rank = ordered_rows(150)
    labels = np.array(NAMES)[rank]
    model, others = OrdinalClassifier(categories=NAMES, values=[0, 1, 2.5]), LogisticRegression()
    metas = [
        VotingClassifier([("ours", model), ("other", others)], voting="soft"),
        StackingClassifier([("ours", model), ("other", others)], cv=3),
        BaggingClassifier(model, n_estimators=3, random_state=0),
    ]
    message = re.escape("(0 = 'high', 1 = 'low', 2 = 'medium')")
    with pytest.warns(EncodedLabelsWarning, match=message):
        probability = cross_val_predict(model, X, labels, cv=3, method="predict_proba")
    for meta in metas:
        with pytest.warns(EncodedLabelsWarning, match=message):
            meta.fit(X, labels)
        assert meta.score(X, labels) > 0.75
    columns = np.argsort(np.argsort(NAMES))
    folds = cross_val_predict(clone(model).set_params(categories=None), X, rank, cv=3, method="predict_proba")
    np.testing.assert_array_equal(probability[:, columns], folds)
    assert CalibratedClassifierCV(model, cv=3).fit(X, labels).score(X, labels) > 0.75  # passes labels as they are


# ---- weights, units, decoding, calibration -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        OrdinalClassifier(calibration="temperature", random_state=0),
        OrdinalClassifier(**NETWORK, early_stopping=False, batch_size=30, random_state=0),
        OrdinalBoostingClassifier(booster="lightgbm", calibration="ordinal", n_estimators=10, random_state=0),
    ],
    ids=str,
)
def test_rows_without_weight_are_rows_left_out(model: Any) -> None:
    if isinstance(model, OrdinalBoostingClassifier):
        pytest.importorskip(model.booster)
    X, y = ordered_rows(150)
    weight = np.random.default_rng(0).exponential(size=150)
    weight[::3] = 0
    kept = weight > 0
    expected = fitted_proba(model, X[kept], y[kept], weight[kept], of=X)
    np.testing.assert_array_equal(fitted_proba(model, X, y, weight, of=X), expected)


@BOTH
def test_the_unit_of_values_and_costs_is_no_matter(index: int) -> None:
    scale = 2.0**20
    X, y = ordered_rows(120, 4)
    values = np.array([0.0, 1.0, 4.0, 5.0])
    for given_ in ({"values": values, "power": 1}, {"cost": np.abs(values[:, None] - values)}):
        name = next(iter(given_))
        scaled = {**given_, name: np.asarray(given_[name]) * scale}
        plain, other = (both(cross_entropy=0.1, **chosen)[index].fit(X, y) for chosen in (given_, scaled))
        np.testing.assert_array_equal(plain.predict_proba(X), other.predict_proba(X))
        if name == "values":
            np.testing.assert_allclose(other.expected_value(X), scale * plain.expected_value(X))


@pytest.mark.parametrize(
    ("index", "kind", "method"), [(0, "temperature", Temperature), (1, "ordinal", OrdinalRecalibration)]
)
def test_calibration_is_that_of_the_rows_held_out(index: int, kind: str, method: Any) -> None:
    """By weight and class values, on rows that training did not see; and predictions follow it."""
    X, y = ordered_rows(160, 4)
    weight, values = np.random.default_rng(0).exponential(size=160), np.array([0.0, 1.0, 8.0, 9.0])
    model = both(calibration=kind, values=values, power=1, decode="mean")[index]
    model.random_state = 0
    model.fit(X, y, weight)
    kept = np.zeros(160, bool)
    kept[split_off(y, model.validation_fraction, random=np.random.RandomState(0), purpose="calibration")[0]] = True
    assert 20 < (~kept).sum() < 44
    moved = clone(model).fit(np.where(kept[:, None], X, X + 1), y, weight)
    np.testing.assert_allclose(moved._logits(X), model._logits(X), rtol=1e-12)
    raw = above_zero(softmax(model._logits(X), 1))
    expected = method(values=values).fit(raw[~kept], y[~kept], sample_weight=weight[~kept]).predict(raw)
    np.testing.assert_allclose(model.predict_proba(X), expected, rtol=1e-9)
    np.testing.assert_array_equal(model._calibration.values, values)
    more = ordered_rows(2000, 4)[0]  # enough that some predictions change
    decoded = np.abs((model.predict_proba(more) @ values)[:, None] - values).argmin(1)
    np.testing.assert_array_equal(model.predict(more), decoded)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=80), st.floats(0.05, 0.9), st.integers(0, 5))
def test_rows_held_out(labels: list[int], fraction: float, seed: int) -> None:
    positions = np.array(labels)
    random = np.random.RandomState(seed)
    if np.unique(positions).size == len(labels):
        with pytest.raises(ValueError, match="leave none to hold out for testing"):
            split_off(positions, fraction, random=random, purpose="testing")
        return
    kept, held = split_off(positions, fraction, random=random, purpose="testing")
    assert sorted([*kept, *held]) == list(range(len(labels)))
    assert set(positions[kept]) == set(labels)
    assert 1 <= len(held) <= fraction * len(labels) + 1


def test_class_weights_are_sample_weights() -> None:
    X, y = ordered_rows(100, 4)
    y = np.maximum(y, 1)
    mass = np.bincount(y)
    for chosen, factor in (({1: 0.5, 3: 4.0}, [1, 0.5, 1, 4.0]), ("balanced", 100 / 3 / np.maximum(mass, 1))):
        weighted = OrdinalClassifier(class_weight=chosen).fit(X, y)
        by_rows = OrdinalClassifier().fit(X, y, np.asarray(factor)[y])
        np.testing.assert_allclose(weighted.predict_proba(X), by_rows.predict_proba(X), rtol=1e-6)
    names = np.array(["d", "c", "b", "a"])
    named = OrdinalClassifier(categories=names, class_weight={"c": 0.5, "a": 4.0}).fit(X, names[y])
    by_rows = OrdinalClassifier(categories=names).fit(X, names[y], np.array([1, 0.5, 1, 4.0])[y])
    np.testing.assert_allclose(named.predict_distribution(X), by_rows.predict_distribution(X), rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any), min_size=1, max_size=5))
def test_decoding_is_the_best_answer_by_enumeration(counts: list[list[int]]) -> None:
    P = np.array(counts) / np.sum(counts, 1, keepdims=True)
    values, ranks = np.array([0.0, 1, 3, 7]), np.arange(4)
    cost = np.random.default_rng(0).uniform(size=(4, 4))
    best = {
        "median": P @ np.abs(ranks[:, None] - ranks),
        "mean": P @ (values[:, None] - values) ** 2,
        "cost": P @ cost,
        "argmax": 1 - P,
    }
    for rule, expected in best.items():
        chosen = decode(P, rule, values=values, cost=cost)
        np.testing.assert_allclose(expected[np.arange(len(P)), chosen], expected.min(1), atol=1e-12)


@BOTH
def test_a_fit_that_fails_leaves_what_was_learnt(index: int) -> None:
    model = both(calibration="temperature", power=1, random_state=0)[index].fit(X, RANK)
    before = model.predict_proba(X)
    bad: list[tuple[Any, ...]] = [
        (X, np.array([7, 8, 9])[RANK], -np.ones(90)),
        (X[:, :2], RANK, -np.ones(90)),
        (X[:3], [0, 1, 2]),  # none to hold out
    ]
    for arguments in bad:
        with pytest.raises(ValueError):
            model.fit(*arguments)
        np.testing.assert_array_equal(model.predict_proba(X), before)
        assert model.classes_.tolist() == [0, 1, 2]
        assert model.n_features_in_ == 3


# ---- bad input -----------------------------------------------------------------------------------------------------


test_bad_settings_and_labels_are_named = raising(
    ({"cost": -np.ones((3, 3))}, Y, r"cost\[0, 0\] is \-1, expected finite numbers of at least 0"),
    ({"cost": np.ones((3, 3)), "values": [0, 1, 2]}, Y, "values and cost are both given"),
    ({"transport": 0.0, "cross_entropy": 0.0}, Y, "transport and cross_entropy are both 0"),
    ({"decode": "cost"}, Y, "decode is 'cost' without a cost matrix"),
    ({"calibration": "ordinal", "validation_fraction": 1.5}, Y, r"validation_fraction is 1\.5"),
    ({"class_weight": {"tall": 2.0}}, Y, "class_weight names the label 'tall'"),
    ({"class_weight": {"low": -2.0}}, Y, r"class_weight\['low'\] is \-2\.0"),
    ({"categories": ["low", "high", "low"]}, Y, "expected each label once"),
    ({"categories": set(NAMES[:1])}, Y, "expected a list or array of labels"),
    ({"categories": ["low", "high"]}, Y, r"y holds the label 'medium', expected one of categories=\['low', 'high'\]"),
    ({}, np.where(RANK == 1, np.nan, RANK * 1.0), "Input y contains NaN"),
    ({}, np.array([None, *Y[1:]], dtype=object), r"y\[0\] is missing"),
    ({}, np.array(["tall", *Y[1:]]), "y holds the label 'tall'"),
    ({}, np.minimum(RANK, 1), "or all their indices"),
    call=lambda settings, y: OrdinalClassifier(**{"categories": NAMES, **settings}).fit(X, y),
)


test_bad_settings_of_one_estimator_are_named = raising(
    (OrdinalClassifier, {"alpha": -1.0}, "alpha"),
    (OrdinalClassifier, {"model": "probit"}, "model"),
    (OrdinalClassifier, {"hidden_layer_sizes": (2.5,)}, TypeError, "hidden_layer_sizes"),
    (OrdinalBoostingClassifier, {"booster": "catboost"}, "booster"),
    (OrdinalBoostingClassifier, {"early_stopping": 1}, "early_stopping"),
    (OrdinalBoostingClassifier, {"booster_params": [1]}, TypeError, "booster_params"),
    call=lambda estimator, settings: estimator(**settings).fit(X, RANK),
)


# ---- columns of a distribution, and labels that may be indices ------------------------------------------------------


@BOTH
def test_a_distribution_is_read_by_its_labels(index: int) -> None:
    """The rank order poor, fair, good is not that of the alphabet."""
    pd = pytest.importorskip("pandas")
    grades = ["poor", "fair", "good"]
    y = np.array(grades)[RANK]
    model = both(categories=grades)[index].fit(X, y)
    distribution = model.predict_distribution(X)
    by_rank = metrics.ranked_probability_score(RANK, np.asarray(distribution))
    ordered = pd.Categorical(y, grades, ordered=True)
    for target, labels in ((y, None), (y, grades), (ordered, None), (ordered, grades)):
        assert metrics.ranked_probability_score(target, distribution, labels=labels) == pytest.approx(by_rank)
        proba = model.predict_proba(X)
        if labels is None and target is y:
            with pytest.raises(ValueError, match="rank order is not known"):
                metrics.ranked_probability_score(target, proba)
        else:
            assert metrics.ranked_probability_score(target, proba, labels=labels) == pytest.approx(by_rank)
    folds = [distribution[:40], distribution[40:]]
    for kept in (distribution[3:9], copy.deepcopy(distribution), distribution[RANK > 0], np.concatenate(folds),
                 pickle.loads(pickle.dumps(distribution)), np.vstack(folds), np.copy(distribution),
                 distribution[:50, :], distribution[..., :], distribution.round(3), np.take(distribution, [1, 2], 0),
                 resample(distribution, random_state=0), *train_test_split(distribution, random_state=0)):  # fmt: skip
        assert kept.labels.tolist() == grades
    mixed = metrics.Distribution(np.asarray(distribution), labels=grades[::-1])
    for lost in (distribution[:, ::-1], distribution * 1, np.vstack([distribution, mixed]),
                 np.flip(distribution, 1)):  # fmt: skip
        assert lost.labels is None
        with pytest.raises(ValueError, match='pass columns="rank"'):
            metrics.ranked_probability_score(y[: len(lost)], lost, labels=grades)
    with pytest.raises(ValueError, match=r"ordered categories \['good', 'fair', 'poor'\]"):
        metrics.ranked_probability_score(pd.Categorical(y, grades[::-1], ordered=True), distribution)
    with pytest.raises(ValueError, match="2 labels"):
        metrics.Distribution(np.ones((1, 3)) / 3, labels=grades[:2])


def test_integers_that_are_names_and_indices_raise() -> None:
    """The label 1 of the categories "1" to "5" is no index 1, the place of "2"."""
    y = 1 + np.minimum(RANK, 3)
    names = ["1", "2", "3", "4", "5"]
    with pytest.raises(ValueError, match="each integer may be the label of that name or the index"):
        OrdinalClassifier(categories=names).fit(X, y)
    model = OrdinalClassifier(categories=names).fit(X, y.astype(str))
    assert set(model.predict(X)) <= {"1", "2", "3"}
    zero_based = OrdinalClassifier(categories=["0", "1", "2"]).fit(X, RANK)  # both readings agree
    assert zero_based.categories_.tolist() == [0, 1, 2]


@pytest.mark.parametrize("workers", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_meta_estimators_that_lose_gaps_are_named(workers: int | None) -> None:
    values = np.array([0, 5, 10])
    y, gaps = values[RANK], OrdinalClassifier(categories=range(11), values=np.arange(11.0))
    for fit, name in (
        (lambda model, y: VotingClassifier([("a", model)], n_jobs=workers).fit(X, y), "VotingClassifier"),
        (lambda model, y: StackingClassifier([("a", model)], cv=3, n_jobs=workers).fit(X, y), "StackingClassifier"),
        (lambda model, y: BaggingClassifier(model, n_estimators=2, n_jobs=workers).fit(X, y), "BaggingClassifier"),
        (lambda model, y: cross_val_predict(model, X, y, cv=3, method="predict_proba", n_jobs=workers),
         "cross_val_predict"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"{name}.* passes the index of each label"):
            fit(gaps, y)
        with pytest.raises(ValueError, match=rf"{name}.*categories=range\(3\)"):
            fit(OrdinalClassifier(categories=[1, 2, 3]), RANK + 1)
        if workers is None or name == "BaggingClassifier":
            with pytest.raises(ValueError, match=rf"{name}.*values=\[0, 5, 10\]"):
                fit(OrdinalClassifier(), y)
        if workers is None:
            with pytest.warns(LabelOrderWarning, match="passes the index .*categories="):
                fit(OrdinalClassifier(), Y)
        fit(OrdinalClassifier(categories=range(3), values=values), RANK)  # the advice
        if workers is None or name == "BaggingClassifier":
            fit(OrdinalClassifier(), RANK + 1)  # no gaps
        else:
            with pytest.raises(LabelOrderWarning, match="not known in a worker process"):  # an error in tests
                fit(OrdinalClassifier(), RANK + 1)
    assert cross_val_predict(gaps, X, y, cv=3).max() <= 10  # of labels, not of indices


@BOTH
def test_sparse_features_are_dense_ones(index: int) -> None:
    dense = np.where(np.abs(X) > 0.5, X, 0.0)
    model, expected = both()[index].fit(csr_array(dense), RANK), both()[index].fit(dense, RANK)
    for rows in (dense, csr_array(dense), csc_matrix(dense)):
        np.testing.assert_allclose(model.predict_proba(rows), expected.predict_proba(dense), rtol=1e-9)
