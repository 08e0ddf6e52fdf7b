"""The estimators among scikit-learn: its checks, its meta-estimators, labels of all types, weights, bad input."""

import copy
import functools
import pickle
import re
import warnings
from enum import Enum
from functools import cache
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax
from sklearn import config_context
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.ensemble import BaggingClassifier, StackingClassifier, VotingClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, KFold, cross_val_predict, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.utils import resample
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.multiclass import type_of_target

from otloss import metrics
from otloss.boosting import start_scores, xgboost_objective
from otloss.estimators import (
    CumulativeLinkClassifier,
    EncodedLabelsWarning,
    LabelOrderWarning,
    OrdinalBoostingClassifier,
    OrdinalClassifier,
    OrdinalDecomposition,
    OrdinalNetworkClassifier,
    OrdinalRecalibration,
    Temperature,
    TransportAdapter,
)
from otloss.estimators.base import above_zero, split_off
from otloss.estimators.decode import decode
from tests.errors import raising

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
X, RANK = ordered_rows()
Y = np.array(NAMES)[RANK]
QUICK = {"n_jobs": 1, "n_estimators": 8, "learning_rate": 0.4}
NETWORK: dict[str, Any] = {"hidden_layer_sizes": (10,), "learning_rate": 0.03, "max_iter": 40}
CHECKED = [
    OrdinalDecomposition(),
    OrdinalClassifier(),
    CumulativeLinkClassifier(),
    OrdinalNetworkClassifier(**NETWORK | {"max_iter": 20}, early_stopping=False),
    OrdinalBoostingClassifier(booster="lightgbm", **QUICK),
]
SLOWLY = [
    OrdinalBoostingClassifier(booster="xgboost", **QUICK),
    OrdinalClassifier(standardize=False, calibration="temperature"),
    OrdinalNetworkClassifier(**NETWORK, head="cumulative", early_stopping=True),
    OrdinalClassifier(decode="argmax", power=1, cross_entropy=0.3, alpha=1.0),
    OrdinalBoostingClassifier(booster="xgboost", **QUICK, early_stopping=True, calibration="ordinal"),
]


def cannot_pass(estimator: Any) -> dict[str, str]:
    """Checks that settings contradict, and why."""
    reasons = {}
    if estimator.calibration or getattr(estimator, "early_stopping", False) is True:
        drawn = "rows are drawn at random, and a row given twice is drawn twice"
        reasons |= {f"check_sample_weight_equivalence_on_{data}_data": drawn for data in ("dense", "sparse")}
    if estimator.decode != "argmax":  # the median of the default has fewer errors of several ranks
        reasons["check_classifiers_train"] = "predict is not the most probable class"
        if estimator.calibration == "ordinal":  # in one of 30 rows; it asserts the values of decision_function
            reasons["check_classifiers_classes"] = reasons["check_classifiers_train"]
    return reasons


@pytest.fixture
def what_can_pass(request: pytest.FixtureRequest) -> None:
    """Skip the checks of `cannot_pass`: they are marked as expected to fail, and find nothing, whatever fails."""
    mark = request.node.get_closest_marker("xfail")
    if mark is not None:
        pytest.skip(mark.kwargs["reason"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("what_can_pass")
@parametrize_with_checks(CHECKED, expected_failed_checks=cannot_pass)
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("what_can_pass")
@parametrize_with_checks(SLOWLY, expected_failed_checks=cannot_pass)
def test_scikit_learns_checks_of_more_settings(estimator: Any, check: Any) -> None:
    check(estimator)


LETTERS, FAR = list("abcde"), [0, 1, 2, 5, 10]
# Settings, the labels of the three ranks, all categories, and settings that are the same for the ranks themselves. The
# mean gap of the classes that are there is the unit in training.
PLACES: dict[str, tuple[dict[str, Any], Any, list[Any], dict[str, Any]]] = {
    "names": ({"categories": NAMES}, NAMES, NAMES, {}),
    "classes missing": ({"categories": LETTERS, "values": FAR}, list("abd"), LETTERS, {"values": [0, 1, 5]}),
    "by default 1 apart": ({"categories": LETTERS}, list("ace"), LETTERS, {"values": [0, 1, 2], "transport": 2.0}),
    "whole numbers": ({}, [1, 2, 5], [1, 2, 3, 4, 5], {"values": [0, 0.5, 2]}),
    "eight bits": ({}, np.array([10, 20, 30], np.uint8), list(range(10, 31)), {}),
    "fractions": ({}, [0, 0.5, 1], [0, 0.5, 1], {}),
}


@pytest.mark.filterwarnings("ignore:y holds the labels .* numbers with fractions")
@BOTH
@pytest.mark.parametrize("name", PLACES)
def test_classes_have_their_places_and_columns_are_sorted(name: str, index: int) -> None:
    settings, labels, categories, same = PLACES[name]
    model, plain = both(**settings)[index].fit(X, np.array(labels)[RANK]), both(**same)[index].fit(X, RANK)
    assert model.categories_.tolist() == categories
    assert model.categories_.dtype == np.array(labels).dtype or name == "classes missing"
    assert model.classes_.tolist() == sorted(labels)
    distribution, places = model.predict_distribution(X), [categories.index(label) for label in labels]
    np.testing.assert_allclose(distribution[:, places], plain.predict_proba(X), atol=1e-6)
    assert not np.delete(distribution, places, 1).any()
    columns = [categories.index(label) for label in sorted(labels)]
    np.testing.assert_array_equal(model.predict_proba(X), distribution[:, columns])
    np.testing.assert_array_equal(model.predict(X), np.array(labels)[plain.predict(X)])
    values = settings.get("values", np.arange(len(categories)))
    np.testing.assert_allclose(model.expected_value(X), np.asarray(distribution) @ values)


@BOTH
def test_text_without_an_order_warns_once_per_fit_where_it_was_called(index: int) -> None:
    message = r"\['high', 'low', 'medium'\] are text, .* ordered as \['high', 'low', 'medium'\].*pass categories="
    with pytest.warns(LabelOrderWarning, match=message) as caught:
        model = both(calibration="temperature")[index].fit(X, Y.astype(object))
    assert [warning.filename for warning in caught] == [__file__]
    assert model.categories_.tolist() == ["high", "low", "medium"]
    with pytest.warns(LabelOrderWarning, match="every integer between would be a class"):
        both()[index].fit(X, np.array([0, 1, 10**6])[RANK])


@BOTH
def test_one_class_alone_and_the_target_of_a_regression(index: int) -> None:
    one = both(categories=NAMES, calibration="ordinal")[index].fit(X, ["medium"] * len(X))
    assert one.predict(X[:2]).tolist() == ["medium"] * 2
    assert one.predict_distribution(X[:1]).tolist() == [[0, 1, 0]]
    for y in (X[:, 0], np.repeat(X[:46, 0], 2)[:90] + np.r_[np.zeros(89), 1]):
        with pytest.raises(ValueError, match=r"Unknown label type: continuous. y holds \d+ different numbers"):
            both()[index].fit(X, y)


def test_values_may_be_an_index_or_a_tensor() -> None:
    pandas = pytest.importorskip("pandas")
    values = [0.0, 1.0, 5.0]
    expected = OrdinalClassifier(values=values).fit(X, RANK).predict_proba(X)
    for form in (pandas.Index(values), torch.tensor(values), np.float32(values)):
        np.testing.assert_array_equal(OrdinalClassifier(values=form).fit(X, RANK).predict_proba(X), expected)


def test_the_index_that_pandas_gives_counts_ranks_in_each_fold() -> None:
    pandas = pytest.importorskip("pandas")
    values, cost = np.array([0.0, 1, 5]), np.array([[0.0, 1, 2], [3, 0, 1], [20, 10, 0]])
    tables = {"values": (values, pandas.Series(values)), "cost": (cost, pandas.DataFrame(cost))}
    for name, (array, table) in tables.items():
        for labels in ([1, 2, 3], [10, 20, 30], ["a", "b", "c"], [0, 1, 2]):
            y, options = np.array(labels)[RANK], {} if labels[0] in (0, 1) else {"categories": labels}
            ours, expected = (OrdinalClassifier(**{name: v}, **options).fit(X, y) for v in (table, array))
            np.testing.assert_array_equal(ours.predict_proba(X), expected.predict_proba(X))
        with pytest.raises(ValueError, match=rf"{name} has shape .* expected .*categories="):
            OrdinalClassifier(**{name: table}).fit(X[RANK < 2], RANK[RANK < 2] + 1)
        with pytest.raises(
            ValueError, match=rf"{name} has the index \[0, 1, 2\], which may count ranks or name the cla"
        ):
            OrdinalClassifier(**{name: table}, categories=[2, 1, 0]).fit(X, RANK)
    named = pandas.DataFrame(cost, index=NAMES, columns=NAMES).loc[sorted(NAMES), sorted(NAMES)]
    for one_axis in (named.reset_index(drop=True), named.reset_index(), named.set_axis(range(3), axis=1)):
        with pytest.raises(ValueError, match=r"cost names the classes on one axis alone, as .* expected names on both"):
            OrdinalClassifier(cost=one_axis, categories=NAMES).fit(X, Y)
    ranked, counted = pandas.DataFrame(cost, columns=NAMES), pandas.DataFrame(cost)
    ours, expected = (OrdinalClassifier(cost=c, categories=NAMES).fit(X, Y).predict_proba(X) for c in (ranked, cost))
    np.testing.assert_array_equal(ours, expected)
    expected = OrdinalClassifier(cost=cost).fit(X, RANK).predict_proba(X)
    for named in (counted[[2, 1, 0]], counted.iloc[::-1], counted.assign(total=1.0)):  # ranks are the names
        np.testing.assert_array_equal(OrdinalClassifier(cost=named).fit(X, RANK).predict_proba(X), expected)
    by_class = OrdinalClassifier(values=pandas.Series([5.0, 1, 0]).reindex([2, 1, 0]), categories=[2, 1, 0])
    expected = OrdinalClassifier(values=[0, 1, 5], categories=[2, 1, 0]).fit(X, RANK).predict_proba(X)
    np.testing.assert_array_equal(by_class.fit(X, RANK).predict_proba(X), expected)


def test_labels_of_pandas_bring_their_order_and_tables_go_by_their_index() -> None:
    pandas = pytest.importorskip("pandas")
    wanted = [*NAMES, "very high"]
    dtype = pandas.CategoricalDtype(wanted, ordered=True)
    for options, y in (({}, pandas.Series(pandas.Categorical(Y, dtype=dtype))), ({"categories": dtype}, Y)):
        assert clone(OrdinalClassifier(**options)).fit(X, y).categories_.tolist() == wanted
    with pytest.raises(ValueError, match=r"categories is CategoricalDtype.*expected .*ordered=True"):
        OrdinalClassifier(categories=pandas.CategoricalDtype(wanted)).fit(X, Y)
    cost = np.array([[0.0, 1, 2], [1, 0, 1], [20, 10, 0]])
    frame = pandas.DataFrame(cost, index=NAMES, columns=NAMES).loc[sorted(NAMES), sorted(NAMES)]
    values = pandas.Series({"high": 7.0, "low": 0.0, "medium": 1.0, "other": 3.0})
    for labelled, plain in (({"cost": frame}, {"cost": cost}), ({"values": values}, {"values": [0, 1, 7]})):
        ours, expected = (OrdinalClassifier(categories=NAMES, **given).fit(X, Y) for given in (labelled, plain))
        np.testing.assert_array_equal(ours.predict_proba(X), expected.predict_proba(X))
        np.testing.assert_array_equal(ours.expected_value(X), expected.expected_value(X))


@BOTH
def test_a_distribution_is_read_by_its_labels(index: int) -> None:
    """Rows keep the labels of the columns; what moves or changes columns loses them. NAMES is not alphabetic."""
    pandas = pytest.importorskip("pandas")
    model = both(categories=NAMES)[index].fit(X, Y)
    distribution, proba = model.predict_distribution(X), model.predict_proba(X)
    by_rank = metrics.ranked_probability_score(RANK, np.asarray(distribution))
    ordered = pandas.Categorical(Y, NAMES, ordered=True)
    for target, labels in ((Y, NAMES), (ordered, None)):
        for table in (distribution, proba):
            assert metrics.ranked_probability_score(target, table, labels=labels) == pytest.approx(by_rank)
    with pytest.raises(ValueError, match="rank order is not known"):
        metrics.ranked_probability_score(Y, proba)
    folds = [distribution[:40], distribution[40:]]
    for kept in (distribution[RANK > 0], copy.deepcopy(distribution), pickle.loads(pickle.dumps(distribution)),
                 np.concatenate(folds), np.vstack(tup=folds), distribution[:50, :], np.take(distribution, [1, 2], -2),
                 resample(distribution, random_state=0), *train_test_split(distribution, random_state=0)):  # fmt: skip
        assert kept.labels.tolist() == NAMES
    mixed = metrics.Distribution(np.asarray(distribution), labels=NAMES[::-1])
    turned = np.broadcast_to([[2, 1, 0]], distribution.shape)
    in_place = distribution.copy()
    in_place.sort(0)
    assert in_place.labels is None
    for lost in (distribution[:, ::-1], distribution * 1, np.vstack([distribution, mixed]), np.flip(distribution, 1),
                 np.sort(distribution), np.partition(distribution, 1), np.take(distribution, [2, 1, 0], 1),
                 np.take_along_axis(distribution, turned, 1), distribution[np.ix_([0, 1], [2, 1, 0])]):  # fmt: skip
        with pytest.raises(ValueError, match='pass columns="rank"'):
            metrics.ranked_probability_score(Y[: len(lost)], lost, labels=NAMES)
    with pytest.raises(ValueError, match="ordered categories"):
        metrics.ranked_probability_score(pandas.Categorical(Y, NAMES[::-1], ordered=True), distribution)


def test_meta_estimators_pass_codes_and_get_right_columns() -> None:
    X, rank = ordered_rows(150)
    labels = np.array(NAMES)[rank]
    model = OrdinalClassifier(categories=NAMES, values=[0, 1, 2.5])
    message = re.escape("(0 = 'high', 1 = 'low', 2 = 'medium')")
    with pytest.warns(EncodedLabelsWarning, match=message):
        probability = cross_val_predict(model, X, labels, cv=3, method="predict_proba")
    folds = cross_val_predict(clone(model).set_params(categories=None), X, rank, cv=3, method="predict_proba")
    np.testing.assert_array_equal(probability[:, np.argsort(np.argsort(NAMES))], folds)
    pair = [("ours", model), ("other", LogisticRegression())]
    for meta in (VotingClassifier(pair, voting="soft"), StackingClassifier(pair, cv=3), BaggingClassifier(model, 3)):
        with pytest.warns(EncodedLabelsWarning, match=message):
            meta.fit(X, labels)
        assert meta.score(X, labels) > 0.75


@pytest.mark.parametrize("workers", [None, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [range, np.arange, tuple, "Index"], ids=str)
def test_meta_estimators_take_categories_that_are_numbers(make: Any, workers: int | None) -> None:
    """Their indices 0 to 2 are no labels of 1 to 3: the labels alone tell so."""
    X, rank = ordered_rows(150)
    make = pytest.importorskip("pandas").Index if make == "Index" else make
    categories = make(1, 4) if make in (range, np.arange) else make([1, 2, 3])
    ours, plain = OrdinalClassifier(categories=categories), OrdinalClassifier()
    folds = [cross_val_predict(m, X, y, method="predict_proba") for m, y in ((ours, rank + 1), (plain, rank))]
    np.testing.assert_array_equal(*folds)
    for wrap in (
        lambda model: VotingClassifier([("a", model)], voting="soft", n_jobs=workers),
        lambda model: StackingClassifier([("a", model)], cv=3, n_jobs=workers),
        lambda model: BaggingClassifier(model, 2, random_state=0, n_jobs=workers),
    ):
        labels = wrap(ours).fit(X, rank + 1).predict(X)
        np.testing.assert_array_equal(labels, wrap(plain).fit(X, rank).predict(X) + 1)
    for y in (np.minimum(rank, 1), rank[rank != 1]):  # indices in a fold that lacks a class, or undeclared labels
        with pytest.warns(EncodedLabelsWarning, match="If they are labels, correct y or categories"):
            clone(ours).fit(X[: len(y)], y)
    with pytest.raises(ValueError, match="expected these labels, or their indices"):
        clone(ours).fit(X, rank * 2)


@pytest.mark.filterwarnings("ignore::otloss.estimators.EncodedLabelsWarning", "ignore:Number of classes:RuntimeWarning")
def test_folds_without_a_class_are_read_as_the_whole_is() -> None:
    """The labels 1 to 5, of which 1 and 5 have one row each, so that a fold has the indices 0 to 3 or 1 to 4."""
    X, rank = ordered_rows(150)
    labels = rank + 2
    labels[0], labels[-1] = 1, 5
    models = OrdinalClassifier(categories=range(1, 6)), OrdinalClassifier(categories=range(5))
    folds = [
        cross_val_predict(model, X, y, cv=KFold(5), method="predict_proba")
        for model, y in zip(models, (labels, labels - 1), strict=True)
    ]
    np.testing.assert_allclose(*folds, atol=1e-12)


def test_integers_of_an_ordered_categorical_are_labels() -> None:
    """scikit-learn passes no Categoricals, so that rows without the highest grade leave no doubt."""
    pandas = pytest.importorskip("pandas")
    X, rank = ordered_rows(150)
    y = pandas.Categorical(rank, categories=range(4), ordered=True)
    model = OrdinalClassifier(values=[0, 1, 2.5, 4]).fit(X, y)  # warnings are errors
    np.testing.assert_array_equal(model.categories_, range(4))
    with pytest.warns(EncodedLabelsWarning):
        OrdinalClassifier(categories=range(4)).fit(X, rank)


@pytest.mark.filterwarnings("ignore:OrdinalClassifier did not converge")
def test_weights_beside_a_constant_column() -> None:
    """The variance by weight that scikit-learn computes of it may be rounding below 0."""
    for seed in range(30):
        random = np.random.default_rng(seed)
        X = np.column_stack([np.full(40, 0.1), random.normal(size=40)])
        model = OrdinalClassifier(max_iter=3).fit(X, np.arange(40) % 3, random.gamma(1, size=40))
        assert np.isfinite(model.coef_).all()


class Grade(str, Enum):  # noqa: UP042  # numpy knows a StrEnum
    LOW, MEDIUM, HIGH = "low", "medium", "high"


def _object_array(labels: list[Any]) -> np.ndarray:
    array = np.empty(len(labels), dtype=object)
    array[:] = labels
    return array


@pytest.mark.parametrize("make", [list, _object_array])
def test_members_of_a_class_of_text_are_labels(make: Any) -> None:
    """numpy takes the first letters of the name of their class."""
    X, rank = ordered_rows(90)
    y, text = make([list(Grade)[k] for k in rank]), [list(Grade)[k].value for k in rank]
    names = [grade.value for grade in Grade]
    model = OrdinalClassifier(categories=Grade, class_weight={Grade.LOW: 2.0}).fit(X, y)
    same = OrdinalClassifier(categories=names, class_weight={"low": 2.0}).fit(X, text)
    np.testing.assert_array_equal(model.predict(X), same.predict(X))
    assert model.score(X, y) == same.score(X, text)
    assert (
        metrics.ordinal_mae(y, y[::-1], labels=list(Grade)) == metrics.ordinal_mae(text, text[::-1], labels=names) > 0
    )
    linear = CumulativeLinkClassifier(categories=Grade, transport=0, cross_entropy=1, alpha=0).fit(X, y)
    assert linear.summary(X, y).log_likelihood == linear.summary(X, text).log_likelihood
    pytest.importorskip("xgboost")
    OrdinalBoostingClassifier(n_estimators=2, categories=names, early_stopping=False).fit(X, text, eval_set=[(X, y)])


class OtherTarget(TransformerMixin, BaseEstimator):
    """Adds the forecast of another label to the features."""

    def fit(self, X: np.ndarray, y: Any = None) -> "OtherTarget":
        self.model_ = OrdinalClassifier(categories=[10, 20, 30]).fit(
            X, np.array([10, 20, 30])[np.digitize(X[:, 0], [-0.5, 0.5])]
        )
        return self

    def transform(self, X: np.ndarray) -> np.ndarray:
        return np.column_stack([X, self.model_.predict_proba(X)])


def test_a_model_of_another_target_fits_inside_of_meta_estimators() -> None:
    inside = make_pipeline(OtherTarget(), LogisticRegression())
    assert VotingClassifier([("a", inside)]).fit(X, Y).score(X, Y) > 0.7
    assert cross_val_predict(inside, X, RANK, method="predict_proba").shape == (90, 3)


def answers_to_tables(name: str) -> list[list[Any]]:
    """All that a model answers, for features in an array and in a table of pandas."""
    import pandas

    return [answers(name, table) for table in (X, pandas.DataFrame(X, columns=["a", "b", "c"]))]


answers_by_default = cache(answers_to_tables)


def answers(name: str, table: Any) -> list[Any]:
    if name == "adapter":
        return [TransportAdapter().fit(table, target=2 * X).transform(table)]
    models: dict[str, Any] = {
        "linear": OrdinalClassifier(calibration="temperature", random_state=0),
        "network": OrdinalNetworkClassifier(hidden_layer_sizes=3, max_iter=30, early_stopping=False, random_state=0),
        "decomposition": OrdinalDecomposition(),
    }
    model = models.get(name) or boosted(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(table, RANK, sample_weight=np.linspace(0, 2, 90))
    methods = ("predict", "predict_proba", "decision_function", "expected_value", "predict_distribution")
    return [*(getattr(model, method)(table) for method in methods), model.score(table, RANK)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["linear", "network", "decomposition", "xgboost", "lightgbm", "adapter"])
@pytest.mark.parametrize("global_settings", [
    {"transform_output": "pandas"}, {"transform_output": "polars"}, {"enable_metadata_routing": True},
    {"assume_finite": True},
], ids=str)  # fmt: skip
def test_global_settings_of_scikit_learn_change_no_answer(name: str, global_settings: dict[str, Any]) -> None:
    pytest.importorskip("pandas")
    expected = answers_by_default(name)
    with config_context(**global_settings):
        if name == "adapter" and global_settings.get("transform_output") == "polars":
            pytest.importorskip("polars")
        actual = answers_to_tables(name)
    for one, other in zip(chain(*actual), chain(*expected), strict=True):
        assert name == "adapter" or type(one) is type(other)
        np.testing.assert_array_equal(one, other)
    if name == "adapter" and global_settings.get("transform_output") == "pandas":
        assert list(actual[1][0].columns) == ["a", "b", "c"]  # a transformer follows it


@pytest.mark.parametrize("name", ["linear", "network", "lightgbm", "adapter"])
def test_tensors_are_arrays_also_where_scikit_learn_dispatches_by_type(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With array_api_dispatch scikit-learn keeps tensors, which no function of numpy and scipy here takes."""
    monkeypatch.setenv("SCIPY_ARRAY_API", "1")
    table, target = torch.from_numpy(X), torch.from_numpy(RANK)

    def answers(table: Any, target: Any) -> list[Any]:
        if name == "adapter":
            return [TransportAdapter().fit(table, target=2 * table).transform(table)]
        network = OrdinalNetworkClassifier(max_iter=3, early_stopping=False, random_state=0)
        models: dict[str, Any] = {"linear": CumulativeLinkClassifier(transport=0, cross_entropy=1, alpha=0)}
        model = {**models, "network": network}.get(name) or boosted(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(table, target)
        summary = [model.summary(table, target).log_likelihood] if name == "linear" else []
        return [model.predict_proba(table), model.predict(table), model.score(table, target), *summary]

    expected = answers(X, RANK)
    with config_context(array_api_dispatch=True):
        actual = answers(table, target)
    for one, other in zip(actual, expected, strict=True):
        assert type(one) is type(other)
        np.testing.assert_array_equal(one, other)


@BOTH
@pytest.mark.parametrize("categories", [None, [1, 1.5, 2]])
def test_labels_with_fractions_are_warned_of(categories: Any, index: int) -> None:
    y = np.array([1, 1.5, 2])[RANK]
    with pytest.warns(UserWarning, match="neither shuffles nor stratifies") as caught:
        model = both(categories=categories)[index].fit(X, y)
    assert [warning.filename for warning in caught] == [__file__]
    remedy = np.searchsorted(model.categories_, y)
    same = both(values=model.categories_)[index].fit(X, remedy)
    np.testing.assert_allclose(same.predict_proba(X), model.predict_proba(X), rtol=1e-6)
    assert type_of_target(remedy) == "multiclass"


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


METHODS = [(0, "temperature", Temperature), (1, "ordinal", OrdinalRecalibration)]


@pytest.mark.parametrize(("index", "kind", "method"), METHODS)
def test_calibration_is_that_of_the_rows_held_out(index: int, kind: str, method: Any) -> None:
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


@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any), min_size=1, max_size=5))
def test_decoding_is_the_best_answer_by_enumeration(counts: list[list[int]]) -> None:
    P = np.array(counts) / np.sum(counts, 1, keepdims=True)
    values, ranks = np.array([0.0, 1, 3, 7]), np.arange(4)
    cost = np.random.default_rng(0).uniform(size=(4, 4))
    best = {"median": P @ np.abs(ranks[:, None] - ranks), "cost": P @ cost, "argmax": 1 - P}
    best["mean"] = P @ (values[:, None] - values) ** 2
    for rule, expected in best.items():
        chosen = decode(P, rule, values=values, cost=cost)
        np.testing.assert_allclose(expected[np.arange(len(P)), chosen], expected.min(1), atol=1e-12)


def test_weights_of_rows_and_classes() -> None:
    X, y = ordered_rows(150)
    weight = np.random.default_rng(0).exponential(size=150)
    weight[::3] = 0
    kept = weight > 0
    for model in (
        OrdinalClassifier(calibration="temperature", random_state=0),
        OrdinalNetworkClassifier(**NETWORK, early_stopping=False, batch_size=30, random_state=0),
        boosted(calibration="ordinal"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            expected = model.fit(X[kept], y[kept], weight[kept]).predict_proba(X)
            np.testing.assert_array_equal(model.fit(X, y, weight).predict_proba(X), expected)
    for chosen, factor in (({0: 0.5, 2: 4.0}, [0.5, 1, 4.0]), ("balanced", len(y) / 3 / np.bincount(y))):
        weighted = OrdinalClassifier(class_weight=chosen).fit(X, y)
        by_rows = OrdinalClassifier().fit(X, y, np.asarray(factor)[y])
        np.testing.assert_allclose(weighted.predict_proba(X), by_rows.predict_proba(X), rtol=1e-6)
    rows = y < 2  # as a fold without the last class
    given = [OrdinalClassifier(class_weight=w).fit(X[rows], y[rows]) for w in ({1: 2.0}, {0: 1.0, 1.0: 2.0, 2: 9.0})]
    np.testing.assert_array_equal(*(model.predict_proba(X) for model in given))
    named = OrdinalClassifier(categories=NAMES, class_weight={"low": 0.5, "high": 4.0}).fit(X, np.array(NAMES)[y])
    by_rows = OrdinalClassifier().fit(X, y, np.array([0.5, 1, 4.0])[y])
    np.testing.assert_allclose(named.predict_distribution(X), by_rows.predict_proba(X), rtol=1e-6)


test_weights_that_cannot_be_are_named = raising(
    (np.ones(90) * 1j, TypeError, "sample_weight is of dtype complex128, expected real numbers"),
    (np.array(["a"] * 90), TypeError, "sample_weight is of dtype <U1, expected real numbers"),
    ({0: 1.0}, TypeError, "sample_weight cannot be read: .* estimators have class_weight="),
    ("balanced", TypeError, "sample_weight is 'balanced', expected real numbers"),
    (-np.ones(90), r"sample_weight\[0\] is -1.0, expected finite weights >= 0"),
    call=lambda weight: OrdinalClassifier().fit(X, RANK, weight),
)


def test_imaginary_parts_are_never_dropped() -> None:
    X, y, w = np.zeros((3, 1)), np.arange(3), np.arange(3) + 1j
    for call in (
        lambda: OrdinalClassifier(values=w).fit(X, y),
        lambda: OrdinalClassifier(cost=np.ones((3, 3)) * 1j).fit(X, y),
        lambda: start_scores(y, 3, sample_weight=w),
        lambda: xgboost_objective(3, class_weight=w),
        lambda: metrics.ordinal_mae(y, y, sample_weight=w),
        lambda: metrics.pit_histogram(w, np.ones((3, 2))),
        lambda: metrics.pit_histogram(y, np.ones((3, 2)) * 1j),
    ):
        with pytest.raises(TypeError, match="complex"):
            call()


@pytest.mark.filterwarnings("ignore:y holds the labels")
def test_scores_take_labels_in_every_form_that_fits_take() -> None:
    pandas = pytest.importorskip("pandas")
    halves = 1 + RANK / 2
    model, is_whole = OrdinalClassifier().fit(X, halves), halves % 1 == 0
    share = np.mean(model.predict(X) == halves)
    forms = (
        halves.tolist(),
        halves.astype(object),
        halves[:, None],
        pandas.DataFrame({"y": halves}),
        torch.tensor(halves),
    )
    assert [model.score(X, form) for form in forms] == [share] * len(forms)
    share = np.mean(model.predict(X[is_whole]) == halves[is_whole])
    whole = halves[is_whole].astype(int)
    assert [
        model.score(X[is_whole], form) for form in (whole, whole.tolist(), pandas.Series(whole, dtype="Int64"))
    ] == [share] * 3
    with pytest.raises(ValueError, match=r"y holds labels such as '1.5', expected some of \[1.0, 1.5, 2.0\]"):
        model.score(X[[0]], ["1.5"])
    with pytest.raises(ValueError, match="masked"):
        model.score(X, np.ma.array(halves, mask=RANK == 0))


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_counts_may_be_numpy_integers_of_few_bits() -> None:
    """Five times 10,000 is below 0 in 16 bits."""
    expected = OrdinalClassifier().fit(X, RANK)
    assert OrdinalClassifier(max_iter=np.int16(10_000)).fit(X, RANK).n_iter_ == expected.n_iter_ > 1
    narrow = OrdinalNetworkClassifier(batch_size=np.uint64(40), learning_rate=np.float16(0.0625), max_iter=np.int8(20))
    wide = OrdinalNetworkClassifier(batch_size=40, learning_rate=0.0625, max_iter=20)
    first, second = (model.set_params(random_state=0).fit(X, RANK).predict_proba(X) for model in (narrow, wide))
    np.testing.assert_array_equal(first, second)
    boosted("xgboost", booster_params={"max_bin": np.int64(16)}).fit(X, RANK)


def test_scores_check_weights_as_fits_do() -> None:
    model = OrdinalClassifier().fit(X, RANK)
    for weight in (-np.ones(90), np.ones(90) * 1j, np.zeros(90)):
        with pytest.raises((TypeError, ValueError), match="sample_weight"):
            model.score(X, RANK, weight)
    assert model.score(X, RANK, np.ones(90)) == model.score(X, RANK)


@BOTH
def test_integers_that_are_objects_are_labels(index: int) -> None:
    pandas = pytest.importorskip("pandas")
    expected = both()[index].fit(X, RANK)
    for y in (RANK.astype(object), pandas.Series(RANK, dtype=object)):
        model = both()[index].fit(X, y)
        np.testing.assert_array_equal(model.predict_proba(X), expected.predict_proba(X))
        assert model.score(X, y) == expected.score(X, RANK)


def test_tables_whose_index_lacks_a_label_are_named() -> None:
    pandas = pytest.importorskip("pandas")
    costs = pandas.DataFrame(1.0 - np.eye(3), index=NAMES, columns=NAMES)
    for settings in ({"cost": costs}, {"cost": costs.set_axis([0, 1, 5])}, {"values": pandas.Series([0, 1, 2], NAMES)}):
        with pytest.raises(ValueError, match=r"has the index .*, expected all of \[0, 1, 2\], and it lacks [02]"):
            OrdinalClassifier(**settings).fit(X, RANK)
    pyarrow = pytest.importorskip("pyarrow")  # whose rows have no names
    reversed_columns = pyarrow.table({name: costs[name].to_numpy() for name in NAMES[::-1]})
    with pytest.raises(ValueError, match=r"cost has the columns .*, expected them, as its rows, in rank order"):
        OrdinalClassifier(categories=NAMES, cost=reversed_columns).fit(X, np.array(NAMES)[RANK])


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_settings_may_be_numbers_of_numpy(kind: type) -> None:
    OrdinalClassifier(alpha=kind(0.5), tol=kind(1e-3), validation_fraction=kind(0.25)).fit(X, RANK)


NAMED, GENERATOR = {"categories": NAMES}, np.random.default_rng(0)
DIGITS = ["1", "2", "3", "4", "5"]
test_bad_settings_and_labels_are_named = raising(
    (OrdinalClassifier, {"cost": -np.ones((3, 3))}, RANK, r"cost\[0, 0\] is -1, expected finite numbers"),
    (OrdinalClassifier, {"cost": np.ones((3, 3)), "values": [0, 1, 2]}, RANK, "values and cost are both given"),
    (OrdinalClassifier, {"decode": "cost"}, RANK, "decode is 'cost' without a cost matrix"),
    (OrdinalClassifier, {"warm_start": np.ones(3)}, RANK, r"warm_start is array.*, expected one of \(True, False\)"),
    (OrdinalClassifier, {"alpha": 10**400}, RANK, "alpha is a whole number of 1329 bits, expected at most 63"),
    *(
        (
            kind,
            {"random_state": bad},
            np.zeros(len(RANK), int),
            rf"random_state is {shown}.*, expected None, a whole number",
        )
        for kind in (OrdinalClassifier, OrdinalNetworkClassifier, OrdinalBoostingClassifier)
        for bad, shown in (
            ("x", "'x'"),
            (-1, "-1"),
            (2**40, "1099511627776"),
            (1.5, "1.5"),
            (GENERATOR, r"Generator\("),
        )
    ),
    (OrdinalClassifier, {"values": np.arange(3).astype("m8[D]")}, RANK, TypeError, "numbers of dates and times depend"),
    (OrdinalClassifier, {"values": [0, 1, 10**400]}, RANK, TypeError, "values cannot be read: int too large"),
    (OrdinalClassifier, {"class_weight": {"tall": 2.0}}, RANK, "class_weight names the label 'tall'"),
    (OrdinalClassifier, {"class_weight": {3: 2.0}} | NAMED, Y, "class_weight names the label 3"),
    (OrdinalClassifier, {"class_weight": {1: 2.0, 2: 1.0, 3: 2.0}}, RANK, "class_weight names the label 3"),
    (OrdinalClassifier, {"values": [0, 1, 2, 4]}, RANK, r"values has shape \(4,\), expected \(3,\).*categories="),
    (OrdinalClassifier, {"class_weight": {1: -2.0}}, RANK, r"class_weight\[1\] is \-2\.0"),
    (OrdinalClassifier, {"categories": ["low", "high", "low"]}, Y, "expected each label once"),
    (OrdinalClassifier, {"categories": ["low", "high"]}, Y, r"y holds the label 'medium', expected one of categories="),
    (OrdinalClassifier, NAMED, np.array([None, *Y[1:]], dtype=object), r"y\[0\] is missing"),
    (OrdinalClassifier, NAMED, RANK + 1, "or their indices"),
    # The label 1 of these is no index 1, the place of "2".
    (OrdinalClassifier, {"categories": DIGITS}, RANK + 1, "each integer may be the label of that name or the index"),
    (OrdinalClassifier, {"model": "cumulative"}, RANK, TypeError, "use CumulativeLinkClassifier, without model="),
    (OrdinalClassifier, {"model": "softmax", "batch_size": 9}, RANK, TypeError, "use OrdinalNetworkClassifier, with "),
    (OrdinalNetworkClassifier, {"hidden_layer_sizes": ()}, RANK, "OrdinalClassifier is linear"),
    (OrdinalNetworkClassifier, {"head": "cumulativ"}, RANK, "head is 'cumulativ'"),
    call=lambda estimator, settings, y: estimator(**settings).fit(X, y),
)


def test_searches_set_parameters_and_those_of_another_class_are_named() -> None:
    search = GridSearchCV(CumulativeLinkClassifier(), {"link": ["logit", "probit"], "alpha": [0.1, 1.0]}, cv=3)
    assert search.fit(X, RANK).best_estimator_.get_params()["link"] in ("logit", "probit")
    with pytest.raises(TypeError, match="use CumulativeLinkClassifier"):
        GridSearchCV(OrdinalClassifier(), {"model": ["softmax", "cumulative"]}, error_score="raise").fit(X, RANK)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("make", [OrdinalClassifier, CumulativeLinkClassifier, OrdinalNetworkClassifier, boosted])
def test_decoding_by_a_cost_takes_that_of_the_fit(make: Any) -> None:
    model = make().fit(X, RANK).set_params(decode="cost", cost=np.ones((3, 3)) - np.eye(3))
    with pytest.raises(ValueError, match="decode is 'cost' and the fit had no cost matrix; fit again with cost="):
        model.predict(X)


@pytest.mark.parametrize(
    ("categories", "y"), [([1, 2, 3], [0, 1, 2] * 10), ([1, 2, 3], [1, 2] * 15), (range(6), [0, 1, 2, 3, 4] * 6)]
)
def test_integers_of_two_readings_are_named_where_it_matters(categories: Any, y: list[int]) -> None:
    """Indices, labels of a fold without the lowest class, and labels 0 to 4 that may be indices of labels 1 to 5."""
    X = np.random.default_rng(0).normal(size=(30, 2))
    values = np.arange(len(categories)) ** 2.0
    with pytest.warns(EncodedLabelsWarning, match="to be certain of values, cost and class_weight"):
        OrdinalClassifier(categories=categories, values=values).fit(X, y)
    if 5 not in categories:
        OrdinalClassifier(categories=categories).fit(X, y)
        return
    with pytest.warns(EncodedLabelsWarning, match="a lower category has no row"):
        OrdinalClassifier(categories=categories).fit(X, y)
    with pytest.warns(EncodedLabelsWarning, match="a lower category has no row"):
        VotingClassifier([("ours", OrdinalClassifier(categories=categories))]).fit(X, np.add(y, np.greater(y, 2)))


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("make", [OrdinalClassifier, CumulativeLinkClassifier, OrdinalNetworkClassifier, boosted])
def test_dates_are_named_in_training_and_prediction(make: Any) -> None:
    """Alone in a frame they were numbers, a thousand times larger in nanoseconds than in microseconds."""
    pd = pytest.importorskip("pandas")
    days = pd.date_range("2020-01-01", periods=20)
    for dates in (days, days.tz_localize("UTC"), days - days[0]):
        frame, y = pd.DataFrame({"day": dates}), np.arange(20) // 10
        with pytest.raises(TypeError, match=r"column 'day' of X has dtype .* origin"):
            make().fit(frame, y)
    fitted = make().fit(frame / pd.Timedelta(days=1), y)
    with pytest.raises(TypeError, match=r"column 'day' of X has dtype .* origin"):
        fitted.predict(frame)
    with pytest.raises(TypeError, match="X has dtype datetime64"):
        make().fit(frame.to_numpy() + np.datetime64("2020"), y)
    polars_like = SimpleNamespace(columns=["n", "day"], dtypes=["Float64", "Datetime(time_unit='us')"])
    for table in (polars_like, pytest.importorskip("pyarrow").table({"n": y, "day": days})):
        with pytest.raises(TypeError, match=r"column 'day' of X has dtype .* origin"):
            make().fit(table, y)
    for dates in (days.to_period("D"), days.date, [*days[:-1].date, pd.NA]):
        cells = pd.DataFrame({"number": [None, *range(19)], "day": pd.Series(dates, dtype=object)}, dtype=object)
        with pytest.raises(TypeError, match=r"column 'day' of X holds .*2020.*, expected numbers; convert it"):
            make().fit(cells, y)


def test_what_is_missing_is_told_wherever_columns_are_read() -> None:
    """Under a mask, among categories of Arrow, and as NA of pandas there are numbers that nobody gave."""
    X, rank = ordered_rows(90)
    hidden, told = np.ma.masked_less(X, -1), "masked"
    model = CumulativeLinkClassifier(transport=0, cross_entropy=1, alpha=0).fit(X, rank)
    masked_labels = np.ma.masked_equal(rank, 0)
    for call in (
        lambda: model.fit(hidden, rank),
        lambda: model.predict(hidden),
        lambda: model.predict_proba(hidden),
        lambda: model.score(hidden, rank),
        lambda: model.score(X, masked_labels),
        lambda: model.summary(X, masked_labels),
        lambda: TransportAdapter().fit(hidden, target=X),
        lambda: OrdinalDecomposition().fit(X, rank).predict(hidden),
    ):
        with pytest.raises(ValueError, match=told):
            call()
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    labels = pandas.Series(rank.astype(str), dtype="string").mask(rank == 0)
    with pytest.raises(ValueError, match=r"y\[\d+\] is missing"):
        OrdinalClassifier(categories=["1", "2"]).fit(X, labels)
    column = pandas.Series(rank, dtype="Int64").mask(rank == 0).astype("category")
    table = pyarrow.Table.from_pandas(pandas.DataFrame({"x": X[:, 0], "rank": column}))
    for fit in (
        OrdinalClassifier().fit,
        OrdinalDecomposition().fit,
        functools.partial(TransportAdapter().fit, target=X),
    ):
        with pytest.raises(ValueError, match=r"column 'rank' of X holds nulls among its categories.*X.to_pandas\(\)"):
            fit(table, rank)
