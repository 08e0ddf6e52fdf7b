"""Classifiers of ordered labels out of binary ones: the formulas of Frank and Hall, order, weights, errors.

scikit-learn's checks run in test_estimators.py.
"""

from typing import Any

import numpy as np
import pytest
from scipy.sparse import coo_array, csr_array
from sklearn import config_context
from sklearn.base import clone
from sklearn.datasets import load_diabetes
from sklearn.ensemble import RandomForestClassifier, StackingClassifier
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils import get_tags

from otloss.estimators import OrdinalDecomposition
from tests.errors import raising

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


def test_ensembles_have_a_length_and_probabilities_only_once_they_are_fitted() -> None:
    stack = StackingClassifier([("tree", DecisionTreeClassifier(max_depth=2))])
    assert OrdinalDecomposition(stack).fit(X[:99], y[:99]).predict_proba(X).shape == (len(X), 5)
    forest = RandomForestClassifier(5, random_state=0)
    assert get_tags(OrdinalDecomposition(forest)).input_tags.sparse
    assert (OrdinalDecomposition(forest).fit(X, y).predict(X) == y).mean() > 0.9


def test_binary_probabilities_out_of_order_become_a_distribution() -> None:
    model = OrdinalDecomposition(DecisionTreeClassifier(random_state=0, max_depth=6)).fit(X[:300], y[:300])
    above = np.column_stack([binary.predict_proba(X)[:, 1] for binary in model.estimators_])
    assert (np.diff(above) > 0).any(1).sum() > 20
    proba = model.predict_proba(X)
    assert (proba >= 0).all()
    np.testing.assert_allclose(proba.sum(1), 1)
    np.testing.assert_allclose(np.sort(1 - proba.cumsum(1)[:, :-1], 1), np.sort(above, 1), atol=1e-12)


def test_order_and_weights() -> None:
    names = np.array(["very low", "low", "mid", "high", "top"])
    model = OrdinalDecomposition(categories=names).fit(X, names[y])
    np.testing.assert_array_equal(model.predict(X), names[OrdinalDecomposition().fit(X, y).predict(X)])
    assert model.predict_distribution(X).labels.tolist() == names.tolist()
    weight = np.arange(len(y)) % 3
    weighted = OrdinalDecomposition(DecisionTreeClassifier(max_depth=2)).fit(X, y, sample_weight=weight)
    repeated = clone(weighted).fit(np.repeat(X, weight, 0), np.repeat(y, weight))
    np.testing.assert_allclose(weighted.predict_proba(X), repeated.predict_proba(X))


def test_the_inner_estimator_alone_checks_features() -> None:
    words = np.array(["none", "some", "much", "most", "all"])
    reader = OrdinalDecomposition(make_pipeline(CountVectorizer(), DecisionTreeClassifier()), categories=words)
    np.testing.assert_array_equal(reader.fit(words[y].tolist(), words[y]).predict(words[y].tolist()), words[y])
    holes = np.where(X > 0.12, np.nan, X)
    filled = SimpleImputer().fit_transform(holes)
    imputing = OrdinalDecomposition(make_pipeline(SimpleImputer(), LogisticRegression())).fit(holes, y)
    expected = OrdinalDecomposition().fit(filled, y).predict_proba(filled)
    np.testing.assert_allclose(imputing.predict_proba(holes), expected)
    tree = OrdinalDecomposition(DecisionTreeClassifier(max_depth=2)).fit(X, y)
    for rows in (X.tolist(), csr_array(X), coo_array(X)):
        np.testing.assert_array_equal(clone(tree).fit(rows, y).predict_proba(X), tree.predict_proba(X))
    with pytest.raises(ValueError, match="X has 9 features"):
        tree.predict(X[:, :9])


def test_a_pipeline_gets_weights_by_metadata_routing() -> None:
    weight, tree = np.arange(len(y)) % 3, DecisionTreeClassifier(max_depth=2, random_state=0)
    expected = OrdinalDecomposition(clone(tree)).fit(X, y, sample_weight=weight).predict_proba(X)
    with pytest.raises(ValueError, match=r"fit of Pipeline takes none; .*enable_metadata_routing=True"):
        OrdinalDecomposition(make_pipeline(SimpleImputer(), tree)).fit(X, y, sample_weight=weight)
    with config_context(enable_metadata_routing=True):
        requesting = clone(tree).set_fit_request(sample_weight=True)
        for inner in (requesting, make_pipeline(SimpleImputer(), requesting)):
            model = (
                OrdinalDecomposition(inner).set_fit_request(sample_weight=True).set_score_request(sample_weight=False)
            )
            np.testing.assert_array_equal(model.fit(X, y, sample_weight=weight).predict_proba(X), expected)
            search = GridSearchCV(model, {"decode": ["median"]}, cv=2)  # which splits the weights
            search.fit(X, y, sample_weight=weight)
            np.testing.assert_array_equal(search.predict_proba(X), expected)
        default = OrdinalDecomposition().set_score_request(sample_weight=True)
        weighed, plain = (default.fit(X, y, sample_weight=w).predict_proba(X) for w in (weight, None))
        for request, expected in ((True, weighed), (False, plain)):
            search = GridSearchCV(clone(default).set_fit_request(sample_weight=request), {"decode": ["median"]}, cv=2)
            actual = search.fit(X, y, sample_weight=weight).predict_proba(X)
            np.testing.assert_array_equal(actual, expected)
        scaler = StandardScaler().set_fit_request(sample_weight=False)
        OrdinalDecomposition(make_pipeline(scaler, requesting)).fit(X, y, sample_weight=weight)
        for other in (tree, clone(tree).set_fit_request(sample_weight="w")):
            with pytest.raises(ValueError, match=r"Pipeline does not request it by this name; .*=False"):
                OrdinalDecomposition(make_pipeline(SimpleImputer(), other)).fit(X, y, sample_weight=weight)


class Reversed(LogisticRegression):
    """With classes in falling order, and probabilities in a data frame."""

    broken = False

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        super().fit(X, y, sample_weight)
        self.classes_ = self.classes_[::-1]
        return self

    def predict_proba(self, X: Any) -> Any:
        table = LogisticRegression.predict_proba(self, X)[:, ::-1]
        return pytest.importorskip("pandas").DataFrame(np.nan * table if self.broken else table)


def test_classes_of_the_inner_classifier_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = (OrdinalDecomposition(inner).fit(X, y) for inner in (Reversed(), LogisticRegression()))
    np.testing.assert_allclose(model.predict_proba(X), expected.predict_proba(X))
    monkeypatch.setattr(Reversed, "broken", True)
    with pytest.raises(ValueError, match="predict_proba of Reversed returns NaN or infinity"):
        model.predict(X)


test_errors_name_the_estimator = raising(
    (OrdinalDecomposition(RidgeClassifier()), None, TypeError, "estimator is a RidgeClassifier without predict_proba"),
    (OrdinalDecomposition("logistic"), None, TypeError, "estimator is 'logistic', expected a classifier object, such"),
    (OrdinalDecomposition(RidgeClassifier), None, TypeError, "expected a classifier object, such"),
    (OrdinalDecomposition(KNeighborsClassifier()), y + 1, "fit of KNeighborsClassifier takes none"),
    (OrdinalDecomposition(decode="cost"), None, "decode is 'cost', expected one of"),
    call=lambda model, weight: model.fit(X, y, sample_weight=weight),
)


def test_a_class_whose_rows_have_no_weight_is_left_out() -> None:
    """A bootstrap of rows with a rare class may leave it without weight."""
    random = np.random.default_rng(0)
    X = random.normal(size=(60, 2))
    y = 1 + (X[:, 0] > 0)
    y[5] = 0
    model = OrdinalDecomposition().fit(X, y, sample_weight=(y > 0) * 1.0)
    assert model.predict_proba(X)[:, 0].max() < 1e-6
    assert (model.predict(X)[y > 0] == y[y > 0]).mean() > 0.9


def test_log_probabilities_of_votes_are_finite_for_a_calibration() -> None:
    random = np.random.default_rng(5)
    X = random.normal(size=(300, 2))
    y = np.digitize(X[:, 0] + 0.8 * random.normal(size=300), [-1, 0, 1])
    model = OrdinalDecomposition(KNeighborsClassifier(5)).fit(X, y)
    assert model.predict_proba(X).min() < 1e-300
    assert model.decision_function(X).min() == pytest.approx(np.log(1e-6))
