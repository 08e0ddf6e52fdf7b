"""Classifiers of ordered labels out of binary ones: the formulas of Frank and Hall, order, weights, errors.

scikit-learn's checks run in test_estimators.py.
"""

import numpy as np
import pytest
from scipy.sparse import coo_array, csr_array
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_diabetes
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder
from sklearn.tree import DecisionTreeClassifier

from otloss.estimators import OrdinalDecomposition

X, progression = load_diabetes(return_X_y=True)
y = np.searchsorted(np.quantile(progression, [0.2, 0.4, 0.6, 0.8]), progression)


def test_probabilities_are_differences_of_the_binary_ones() -> None:
    model = OrdinalDecomposition().fit(X, y)
    above = np.column_stack([LogisticRegression().fit(X, y > k).predict_proba(X)[:, 1] for k in range(4)])
    agree = (np.diff(above) <= 0).all(1)
    assert agree.mean() > 0.9
    expected = -np.diff(np.column_stack([np.ones(len(X)), above, np.zeros(len(X))]))
    np.testing.assert_allclose(model.predict_proba(X)[agree], expected[agree], atol=1e-12)
    np.testing.assert_array_equal(model.predict(X)[agree], (above[agree] >= 0.5).sum(1))


def test_binary_probabilities_out_of_order_become_a_distribution() -> None:
    model = OrdinalDecomposition(DecisionTreeClassifier(random_state=0, max_depth=6)).fit(X[:300], y[:300])
    above = np.column_stack([binary.predict_proba(X)[:, 1] for binary in model.estimators_])
    assert (np.diff(above) > 0).any(1).sum() > 20
    proba = model.predict_proba(X)
    assert (proba >= 0).all()
    np.testing.assert_allclose(proba.sum(1), 1)
    np.testing.assert_allclose(np.sort(1 - proba.cumsum(1)[:, :-1], 1), np.sort(above, 1), atol=1e-12)


def test_order_weights_and_missing_values() -> None:
    names = np.array(["very low", "low", "mid", "high", "top"])
    model = OrdinalDecomposition(categories=names).fit(X, names[y])
    plain = OrdinalDecomposition().fit(X, y)
    np.testing.assert_array_equal(model.predict(X), names[plain.predict(X)])
    assert model.predict_distribution(X).labels.tolist() == names.tolist()
    weight = np.arange(len(y)) % 3
    weighted = OrdinalDecomposition(DecisionTreeClassifier(max_depth=2)).fit(X, y, sample_weight=weight)
    repeated = clone(weighted).fit(np.repeat(X, weight, 0), np.repeat(y, weight))
    np.testing.assert_allclose(weighted.predict_proba(X), repeated.predict_proba(X))
    holes = np.where(X > 0.12, np.nan, X)
    assert np.isfinite(
        OrdinalDecomposition(HistGradientBoostingClassifier(max_iter=2)).fit(holes, y).predict_proba(holes)
    ).all()
    with pytest.raises(ValueError, match="contains NaN"):
        plain.fit(holes, y)


def test_the_inner_estimator_alone_checks_features() -> None:
    pandas = pytest.importorskip("pandas")
    holes = np.where(X > 0.12, np.nan, X)
    filled = SimpleImputer().fit(holes[::2])
    imputing = OrdinalDecomposition(make_pipeline(SimpleImputer(), LogisticRegression())).fit(holes[::2], y[::2])
    expected = OrdinalDecomposition().fit(filled.transform(holes[::2]), y[::2]).predict_proba(filled.transform(holes))
    np.testing.assert_allclose(imputing.predict_proba(holes), expected)
    words = np.array(["none", "some", "much", "most", "all"])
    table = pandas.DataFrame({"word": words[y], "number": X[:, 0]})
    encoding = make_pipeline(ColumnTransformer([("word", OneHotEncoder(), ["word"])], remainder="passthrough"),
                             DecisionTreeClassifier())  # fmt: skip
    reader = make_pipeline(CountVectorizer(), DecisionTreeClassifier())
    for inner, rows in ((encoding, table), (reader, words[y].tolist())):
        model = OrdinalDecomposition(inner, categories=words).fit(rows, words[y])
        np.testing.assert_array_equal(model.predict(rows), words[y])
    kept = np.arange(len(y)) % 4 > 0
    tree = OrdinalDecomposition(DecisionTreeClassifier(max_depth=2)).fit(X[kept], y[kept])
    for rows in (X.tolist(), csr_array(X), coo_array(X)):
        weighted = clone(tree).fit(rows, y, sample_weight=kept).predict_proba(X)
        np.testing.assert_array_equal(weighted, tree.predict_proba(X))
    with pytest.raises(ValueError, match="X has 9 features"):
        tree.predict(X[:, :9])


def test_errors_name_the_estimator() -> None:
    with pytest.raises(TypeError, match="estimator is a RidgeClassifier without predict_proba"):
        OrdinalDecomposition(RidgeClassifier()).fit(X, y)
    with pytest.raises(ValueError, match="fit of KNeighborsClassifier takes none"):
        OrdinalDecomposition(KNeighborsClassifier()).fit(X, y, sample_weight=np.arange(len(y)))
    with pytest.raises(ValueError, match="decode is 'cost', expected one of"):
        OrdinalDecomposition(decode="cost").fit(X, y)
