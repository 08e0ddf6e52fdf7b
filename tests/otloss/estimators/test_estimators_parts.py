"""`partial_fit` on streams whose first part lacks some class, and labels that no row of weight has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from otloss.boosting import start_scores
from otloss.boosting.start import class_shares
from otloss.estimators import OrdinalClassifier
from otloss.metrics import ranked_probability_score
from tests.otloss.estimators.test_estimators import ordered_rows


def stream(seed: int = 0, rows: int = 2400) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, 3))
    return X, np.digitize(2 * X[:, 0] + rng.logistic(size=rows), [-1.5, 0.5, 2.0])


@pytest.mark.parametrize("settings", [{}, {"model": "cumulative"}, {"hidden_layer_sizes": (8,)}], ids=str)
def test_classes_that_the_first_part_lacks_are_learnt(settings: dict[str, Any]) -> None:
    X, y = stream()
    train, test = np.arange(1400), np.arange(1400, 2400)
    first = train[y[train] < 2][:32]
    rest = np.setdiff1d(train, first)
    model = OrdinalClassifier(categories=range(4), learning_rate=0.02, random_state=0, **settings)
    model.partial_fit(X[first], y[first])
    for _ in range(3):
        for part in np.array_split(rest, len(rest) // 32):
            model.partial_fit(X[part], y[part])
    scores = [
        ranked_probability_score(y[test], fitted.predict_proba(X[test]), labels=range(4))
        for fitted in (model, OrdinalClassifier(random_state=0, **settings).fit(X[train], y[train]))
    ]
    assert scores[0] < 1.15 * scores[1]


def test_an_absent_class_counts_as_half_a_row() -> None:
    shares = class_shares(np.array([0, 0, 2]), np.array([1.0, 3.0, 2.0]), 4)
    np.testing.assert_allclose(shares, np.array([4, 1, 2, 1]) / 8)  # half of the mean weight 2 is 1
    np.testing.assert_array_equal(start_scores([0, 0, 2], 4, sample_weight=[1.0, 3.0, 2.0]), np.log(shares))
    np.testing.assert_array_equal(class_shares(np.array([1, 0, 1, 1]), np.ones(4), 2), [0.25, 0.75])


@pytest.mark.parametrize("model", ["softmax", "cumulative"])
def test_a_class_without_weight_is_unlikely_after_fit(model: str) -> None:
    X, y = ordered_rows(300)
    fitted = OrdinalClassifier(model=model).fit(X, y, sample_weight=np.where(y == 2, 0.0, 1.0))
    proba = fitted.predict_proba(X)
    assert proba[:, 2].max() < 0.01
    np.testing.assert_allclose(proba.sum(1), 1)
