"""Scorers within scikit-learn's model selection: signs, folds without some class, weights, two classes, pickling."""

import pickle
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from otloss import metrics
from otloss.estimators import LabelOrderWarning, OrdinalClassifier
from otloss.metrics import scorer
from tests.errors import raising

NAMES = ["low", "mid", "high"]
ALL = [
    "off_by_one_accuracy", "minimum_sensitivity", "ordinal_mae", "macro_mae", "maximum_mae",
    "ranked_probability_score", "ordinal_emd", "threshold_calibration_error",
]  # fmt: skip
LESS_IS_BETTER = ALL[2:]


def data(seed: int = 0, n: int = 90) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    return X, np.array(NAMES)[np.digitize(X[:, 0] + 0.5 * rng.normal(size=n), [-0.5, 0.7])]


@pytest.mark.parametrize("name", ALL)
def test_is_the_metric_of_the_predictions(name: str) -> None:
    X, y = data()
    model = LogisticRegression().fit(X[:60], y[:60])
    predictions: Any = model.predict(X) if name in ALL[:5] else model.predict_proba(X)
    value = getattr(metrics, name)(y, predictions, labels=NAMES)
    sign = -1 if name in LESS_IS_BETTER else 1
    score = scorer(name, labels=NAMES)
    assert score(model, X, y) == sign * value
    again = pickle.loads(pickle.dumps(score))
    assert again(model, X, y) == sign * value
    weight = np.arange(len(y))
    weighted = getattr(metrics, name)(y, predictions, labels=NAMES, sample_weight=weight)
    assert score(model, X, y, sample_weight=weight) == sign * weighted


def test_folds_without_some_class_and_predictors_without_classes() -> None:
    X, y = data()
    model = LogisticRegression().fit(X[y != "mid"], y[y != "mid"])
    proba = np.insert(model.predict_proba(X), 2, 0, axis=1)  # sorted: high, low, mid
    score = scorer("ranked_probability_score", labels=NAMES, normalize=True)
    assert score(model, X, y) == -metrics.ranked_probability_score(y, proba, labels=NAMES, normalize=True)
    rounded = SimpleNamespace(predict=lambda X: np.full(len(X), 3))
    assert scorer("ordinal_mae")(rounded, np.zeros(2), np.array([1, 3])) == -1.0


test_bad_input = raising(
    (lambda: scorer("ordinal_emd", labels=NAMES)(StandardScaler(), *data()), TypeError, "StandardScaler has no"),
    (lambda: scorer("ordinal_mae", vlues=[1, 2]), TypeError, "'vlues' is not an argument of ordinal_mae"),
    (lambda: scorer("ordinal_mae")(LogisticRegression().fit(*data()), *data()), "are text, .* Pass labels="),
)


def test_the_order_that_a_model_was_told_is_the_default() -> None:
    X, y = data()
    model = OrdinalClassifier(categories=NAMES)
    search = GridSearchCV(make_pipeline(model), {"ordinalclassifier__alpha": [1.0]}, cv=2)
    for fitted in (make_pipeline(StandardScaler(), model).fit(X, y), search.fit(X, y)):
        for name in ("ordinal_mae", "ranked_probability_score"):
            by_default, ordered, other = (scorer(name, labels=k)(fitted, X, y) for k in (None, NAMES, sorted(NAMES)))
            assert by_default == ordered != other


POSITIONS: dict[str, list[Any]] = {"integers": list(range(1, 11)), "floats": list(range(1, 11))}
POSITIONS |= {"alphabet": sorted(NAMES), "ordered": NAMES, "categories": NAMES}


@pytest.mark.parametrize("kind", list(POSITIONS))
def test_estimator_scorer_and_metric_put_the_classes_at_the_same_positions(kind: str) -> None:
    X, names = data(n=120)
    numbers = np.array([1, 2, 10])[np.searchsorted(sorted(NAMES), names)]
    y = {"integers": numbers, "floats": numbers.astype(float)}.get(kind, names)
    y = pd.Categorical(names, NAMES, ordered=True) if kind == "ordered" else y
    model = OrdinalClassifier(categories=NAMES if kind == "categories" else None)
    with pytest.warns(LabelOrderWarning) if kind == "alphabet" else nullcontext():
        model.fit(X, y)
    places = POSITIONS[kind]
    assert model.categories_.tolist() == places
    true, column, predicted = (
        np.array([places.index(label) for label in np.asarray(labels).tolist()])
        for labels in (y, model.classes_, model.predict(X))
    )
    proba, distribution = model.predict_proba(X), model.predict_distribution(X)
    np.testing.assert_allclose(model.expected_value(X), proba @ column)
    thresholds = np.arange(len(places))
    rps = ((proba @ (column[:, None] <= thresholds) - (true[:, None] <= thresholds)) ** 2).sum(1).mean()
    mae = np.abs(true - predicted).mean()
    assert -scorer("ranked_probability_score")(model, X, y) == pytest.approx(rps)
    assert -scorer("ordinal_mae")(model, X, y) == pytest.approx(mae)
    order: dict[str, Any] = {"labels": model.categories_} if kind in ("alphabet", "categories") else {}
    assert metrics.ordinal_mae(y, model.predict(X), **order) == pytest.approx(mae)
    of_columns = [(proba, model.classes_), (distribution, "rank")] + ([] if order else [(proba, "sorted")])
    for table, columns in of_columns:
        assert metrics.ranked_probability_score(y, table, columns=columns, **order) == pytest.approx(rps)


def test_whole_numbers_that_only_the_fold_has_extend_the_range() -> None:
    X, y = data()
    ranks = np.array([2, 3, 7])[np.searchsorted(sorted(NAMES), y)]
    for model in (OrdinalClassifier(), LogisticRegression()):
        model.fit(X[ranks < 7], ranks[ranks < 7])
        for name in ("ordinal_mae", "ranked_probability_score"):
            assert scorer(name)(model, X, ranks) == scorer(name, labels=range(2, 8))(model, X, ranks)
    with pytest.raises(ValueError, match="expected one of the labels"):
        scorer("ordinal_mae")(OrdinalClassifier(categories=[2, 3]).fit(X[ranks < 7], ranks[ranks < 7]), X, ranks)
